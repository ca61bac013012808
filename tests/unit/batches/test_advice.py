"""Commands that show why a node is bad."""

from __future__ import annotations

import shlex
from itertools import product
from typing import get_args

import pytest

from labctl import accelerators
from labctl.batches import advice
from labctl.batches.advice import Cause


def over_ssh(command: str) -> str:
    """Return the ssh command line that runs the command on host red."""
    return f"ssh lab@red {shlex.quote(command)}"


def test_a_slow_node_with_devices_is_looked_at_by_its_vendors_tool_on_its_host() -> None:
    """Ask for the look at a slow nvidia node: nvidia-smi -q over ssh to its host."""
    text = advice.look_at("worker-2", over_ssh, "slow", "nvidia")
    assert "`ssh lab@red 'nvidia-smi -q -d CLOCK,ECC,PERFORMANCE'` (clocks, throttling and memory errors)" in text


def test_a_slow_node_without_devices_is_looked_at_by_quota_and_use_of_cores() -> None:
    """Ask for the look at a slow node without devices: top and MHz on the host, cpu.max and cpu.stat in the node."""
    text = advice.look_at("worker-2", str, "slow")
    assert "`top -b -n 1 | head -n 20; grep MHz /proc/cpuinfo` (who uses its cores, and their clocks)" in text
    assert "`labctl up && labctl exec -n worker-2 cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/cpu.stat`" in text


def test_a_failing_node_is_looked_at_by_doctor_and_kernel() -> None:
    """Ask for the look at a failing node: labctl doctor for it and dmesg over ssh."""
    assert advice.look_at("worker-1", over_ssh, "failing") == (
        "`labctl doctor -n worker-1` (findings), "
        "`ssh lab@red 'sudo dmesg -T --level err,warn | tail -n 20'` (its kernel)"
    )


@pytest.mark.parametrize(("cause", "accelerator"), list(product(get_args(Cause), accelerators.modules())))
def test_each_command_is_complete(cause: Cause, accelerator: str) -> None:
    """Ask for every cause and accelerator: each command is labctl or ssh with one argument, without braces."""
    commands = advice.look_at("worker-1", over_ssh, cause, accelerator).split("`")[1::2]
    assert commands
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program in ("ssh", "labctl")
        assert "{" not in command
        assert program == "labctl" or (arguments[0] == "lab@red" and len(arguments) == 2)
