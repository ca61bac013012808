"""Accelerators: the runtime that hands them in, who may open them, what Gaudi asks of a host, what torch counts."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterator
from dataclasses import replace

from labctl.accelerators.detect import observe
from labctl.accelerators.vendor_tools import SECONDS, describe
from labctl.doctor import daemon
from labctl.doctor.finding import ANEW, Examination, Finding, error, ok
from labctl.doctor.place import Mode
from labctl.engines import agent
from labctl.engines.state import Container
from labctl.errors import ConfigError, HostError, LabError
from labctl.lab import spec
from labctl.model import Device, Host, Node

HABANA = "habana-container-runtime"
BY_FRAMEWORK = """
try:
    import torch
except ModuleNotFoundError:
    from tensorflow import config
    print("tensorflow", len(config.list_physical_devices("{kind}")))
else:
    print("torch", torch.{module}.device_count())
"""
COUNT = {
    "nvidia": BY_FRAMEWORK.format(kind="GPU", module="cuda"),
    "habana": "import habana_frameworks.torch.hpu as hpu; print('torch', hpu.device_count())",
    "intel": BY_FRAMEWORK.format(kind="XPU", module="xpu"),
}
"""How each accelerator's framework counts the devices that it can use; its last line is its name and the number."""
ABSENT = "ModuleNotFoundError"
KILLED = 137
RESET = {
    "nvidia": "nvidia-smi --gpu-reset --id={device}",
    "habana": "sh -c 'modprobe -r habanalabs && modprobe habanalabs'",
}
"""How a device that nobody uses is brought to itself again."""
TELLING = 2 * SECONDS
"""Seconds for the maker's tool."""
COUNTING = 30.0
"""Seconds for that: torch alone takes several to import, and nodes share the cores."""


def none(examination: Examination, lacking: LabError) -> Finding:
    """The finding of a host without the devices that the settings ask for, or of an engine that cannot hand them in."""
    settings = examination.settings
    why = "no node can be made before this is mended"
    found, spread = 0, examination.lab.network == "host"
    try:
        accelerator, here = observe(settings.text("LAB_ACCELERATOR"), examination.root)
        found = len(spec.chosen_devices(accelerator, here, settings.text("LAB_DEVICES")))
        if spread:
            spec.node_of(settings, accelerator, replace(here, slots=examination.here.slots))
        else:
            spec.nodes(settings, accelerator, here)
    except ConfigError:
        return error("LAB-DEVICE-001", lacking.message, why=why, fix=examination.drop("LAB_DEVICES"))
    except HostError:
        slots = int(settings.text("LAB_SLOTS") or 1)
        fewer = ("LAB_NODES", str(found // slots)) if found >= slots else ("LAB_SLOTS", str(found))
        fix = examination.put(*fewer) if found else examination.put("LAB_ACCELERATOR", "auto")
        if spread and not found:
            fix = examination.place.there(f"{examination.place.sudo}dmesg | tail -n 50  # or take it out of LAB_HOSTS")
        return error("LAB-DEVICE-001", lacking.message, why=why, fix=fix)
    if accelerator == "cpu":
        log = examination.place.there(f"{examination.place.sudo}journalctl -u docker -n 50")
        return error("LAB-RUNTIME-001", lacking.message, why=why, fix=log)
    why = "; ".join(filter(None, (why, caution(examination, accelerator))))
    fix = examination.place.there(register(examination, accelerator))
    return error("LAB-RUNTIME-001", lacking.message, why=why, fix=fix)


def register(examination: Examination, accelerator: str) -> str:
    """The command that, typed on the host, lets its engine hand devices in."""
    place = examination.place
    install = f"{place.sudo}apt-get install --yes"
    if accelerator == "nvidia":
        commands = [f"{place.sudo}nvidia-ctk runtime configure --runtime=docker", daemon.restart(examination)]
        return " && ".join([*([] if place.has("nvidia-ctk") else [f"{install} nvidia-container-toolkit"]), *commands])
    program = place.has(HABANA)
    path = shutil.which(HABANA) if program and place.connection is None else ""
    wanted = {"runtimes": {"habana": {"path": path or f"/usr/bin/{HABANA}"}}}
    steps = [
        *([] if program else [f"{install} habanalabs-container-runtime"]),
        daemon.put(examination, wanted),
        # The engine reads its runtimes anew without being started again.
        f"{place.sudo}sh -c 'kill -HUP $(cat /var/run/docker.pid)'",
    ]
    return " && ".join(steps)


def caution(examination: Examination, accelerator: str) -> str:
    """What a person should know before typing that: the packages are in no archive of a distribution's."""
    source = {
        "nvidia": (
            "nvidia-ctk",
            "the package is in NVIDIA's own archive: add it first (Container Toolkit, Installing)",
        ),
        "habana": (HABANA, "the package is in Habana's own archive: add it first (docs.habana.ai, Installation)"),
    }.get(accelerator)
    said = [source[1]] if source and not examination.place.has(source[0]) else []
    return "; ".join([*said, *([daemon.RESTART_ENDS] if accelerator == "nvidia" else [])])


def starts(examination: Examination) -> Iterator[Finding]:
    """Whether the engine starts a container with a node's devices."""
    node = examination.nodes[0]
    if not node.devices.devices or not examination.observed.image:
        return
    reason = examination.daemon.starts(examination.lab.name, examination.lab.image, node.devices)
    given = ", ".join(device.id for device in node.devices.devices)
    if reason:
        yield error(
            "LAB-RUNTIME-002",
            f"a container with {given} does not start: {reason}",
            why="; ".join(filter(None, ("no more would the nodes", caution(examination, examination.lab.accelerator)))),
            fix=renew(examination, node.devices.driver),
        )
    else:
        yield ok("LAB-RUNTIME-002", f"a container with {given} starts")


def renew(examination: Examination, driver: str) -> str:
    """The command after which devices are handed in as they are now."""
    place = examination.place
    if driver == "cdi":
        return place.there(f"{place.sudo}nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml")
    accelerator = examination.lab.accelerator
    return "labctl devices" if accelerator == "intel" else place.there(register(examination, accelerator))


def permissions(examination: Examination) -> Iterator[Finding]:
    """Whether the containers' user may open the device files: by owner, by one of its groups, or as everybody."""
    here = examination.here
    closed: dict[str, tuple[str, str]] = {}
    given = {path: node.devices.group_add for node in examination.nodes for path in device_files(node)}
    modes = examination.place.modes(tuple(given), examination.root)
    for path, groups in given.items():
        if reason := why_closed(modes[path], here, groups):
            closed[path] = (
                reason,
                examination.place.there(opening(examination.place.sudo, path, modes[path], groups)),
            )
    for path, (reason, fix) in closed.items():
        yield error(
            "LAB-DEVICE-002",
            f"{path} {reason}",
            why=f"ranks run as user {here.uid} and could not open it",
            fix=fix,
        )
    if given and not closed:
        yield ok("LAB-DEVICE-002", f"user {here.uid} may open all {len(given)} device files")


def opening(sudo: str, path: str, found: Mode | str, groups: tuple[int, ...]) -> str:
    """The command that lets a node with these groups open a device file: as its group, else as everybody.

    Everybody is what the drivers of NVIDIA, Gaudi and RDMA set by themselves; of the host's groups, a node has only
    those of render nodes.
    """
    if isinstance(found, Mode) and found.gid in groups:
        return f"{sudo}chmod g+rw {path}"
    if path.startswith("/dev/dri/"):
        return f"{sudo}chgrp render {path} && {sudo}chmod g+rw {path}"
    return f"{sudo}chmod a+rw {path}"


def device_files(node: Node) -> tuple[str, ...]:
    """The device files that a node's processes open."""
    return tuple(dict.fromkeys((*(device.path for device in node.devices.devices), *node.devices.paths)))


def why_closed(found: Mode | str, host: Host, groups: tuple[int, ...]) -> str:
    """Why this host's user in these groups may not read and write a file; empty when it may."""
    if isinstance(found, str):
        return found
    if found.uid == host.uid:
        granted = found.mode >> 6
    elif found.gid in (host.gid, *groups):
        granted = found.mode >> 3
    else:
        granted = found.mode
    if granted & 0o6 == 0o6:
        return ""
    return f"is {stat.filemode(found.mode)} of user {found.uid}, group {found.gid}"


def health(examination: Examination) -> Iterator[Finding]:
    """What the maker's tool says against a device, where it is installed."""
    kind = examination.lab.accelerator
    every = tuple(device for node in examination.nodes for device in node.devices.devices)
    # One call of the tool for all: it takes seconds.
    described = dict(zip(every, describe(kind, every, examination.place.run), strict=True))
    for node in examination.nodes:
        for device in map(described.__getitem__, node.devices.devices):
            if device.health:
                yield error(
                    "LAB-DEVICE-003",
                    f"{device.id}: {device.health}",
                    why="ranks on it fail or hang",
                    fix=reset(examination, device),
                    node=node.name,
                )
            else:
                yield ok("LAB-DEVICE-003", f"{device.id} {device.name}".rstrip(), node=node.name)


def reset(examination: Examination, device: Device) -> str:
    """The command that brings a device to itself; none is known for one that may also show a person's screen."""
    kind, place = examination.lab.accelerator, examination.place
    if kind not in RESET:
        return place.there(f"{place.sudo}dmesg | grep -i -e i915 -e xe | tail -n 50")
    return f"labctl down && {place.there(f'{place.sudo}{RESET[kind].format(device=device.id)}')} && labctl up"


# --- within a node -------------------------------------------------------------------------------------------


def counted(examination: Examination, one: Container) -> Iterator[Finding]:
    """Whether the node's torch, or TensorFlow, counts the devices that the node was given; not while they work."""
    node = next((node for node in examination.lab.nodes if node.name == one.node), None)
    given = len(node.devices.devices) if node else 0
    program = COUNT.get(examination.lab.accelerator)
    if not given or program is None or examination.run_active:
        return
    user = agent.user(examination.lab)
    # What is left behind in a container when `docker exec` ends would hold the devices.
    argv = ("timeout", "--signal=KILL", f"{COUNTING - 2:.0f}", "python", "-c", program)
    done = examination.daemon.exec(one.name, argv, user=user, limit=COUNTING - 1)
    last = (done.out.strip().splitlines() or [""])[-1]
    framework, _, count = last.partition(" ")
    said = (done.err.strip().splitlines() or [""])[-1]
    if done.code == KILLED:
        seen = f"its devices were not counted within {COUNTING - 2:.0f} s"
        raise HostError(seen, hint=f"labctl logs {one.node}", node=one.node)
    if done.code and said.startswith(ABSENT):
        yield ok("LAB-DEVICE-004", f"its image has nothing that counts devices ({said})", node=one.node)
    elif done.code == 0 and count == str(given):
        yield ok("LAB-DEVICE-004", f"{framework} counts {given} devices", node=one.node)
    else:
        yield error(
            "LAB-DEVICE-004",
            f"{framework or 'torch'} counts {count or 'no'} of {given} devices{f': {said}' if done.code else ''}",
            why="each rank needs a device of its own",
            fix=ANEW,
            node=one.node,
            runnable=True,
        )
