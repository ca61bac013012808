"""Commands that show why a node or link is bad, by cause. They run on hosts, as a validation removes the lab."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from labctl import accelerators
from labctl.accelerators import CPU

Cause = Literal["slow", "failing", "wrong", "link"]
Commands = tuple[tuple[str, str], ...]
"""Commands, each with what it shows; those of labctl run on this machine."""

USE: Commands = (("who uses its cores, and their clocks", "top -b -n 1 | head -n 20; grep MHz /proc/cpuinfo"),)
QUOTA: Commands = (
    ("its quota", "labctl up && labctl exec -n {node} cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/cpu.stat"),
)
DEVICES: Commands = (("clocks, throttling and memory errors", "{devices}"),)
KERNEL: Commands = (("its kernel", "sudo dmesg -T --level err,warn | tail -n 20"),)
MEMORY: Commands = (
    ("memory errors", 'sudo dmesg -T | grep -iE "ecc|edac|mce|hardware error"'),
    ("a test of memory", "sudo memtester 1G 1"),
)
DOCTOR: Commands = (("findings", "labctl doctor -n {node}"),)
LINKS: Commands = (
    ("its cards, their speed and errors", 'ip -s link; for card in $(ls /sys/class/net); do ethtool "$card"; done'),
    ("InfiniBand", "ibstat"),
)
OF_PROCESSOR = {"slow": USE + QUOTA, "failing": DOCTOR + KERNEL, "wrong": MEMORY, "link": LINKS}
OF_DEVICES = {"slow": DEVICES + USE, "failing": DOCTOR + KERNEL, "wrong": DEVICES + KERNEL, "link": LINKS}


def look_at(node: str, typed: Callable[[str], str], cause: Cause, accelerator: str = CPU) -> str:
    """Return commands to look at a node for a cause, comma-separated: each in backticks, then what it shows.

    ``typed`` returns the command line that runs a shell command on the node's host.
    """
    devices = accelerators.get(accelerator).health
    texts = []
    for shown, template in (OF_DEVICES if devices else OF_PROCESSOR)[cause]:
        command = template.format(node=node, devices=devices)
        here = command if command.startswith("labctl") else typed(command)
        texts.append(f"`{here}` ({shown})")
    return ", ".join(texts)
