"""Accelerators: the runtime that hands them to containers, access to device files, health, leases, and Gaudi's host."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from labctl.accelerators import leases as device_leases
from labctl.accelerators.detect import observe
from labctl.accelerators.leases import Lease
from labctl.accelerators.vendor_tools import describe
from labctl.doctor.checks import engine
from labctl.doctor.examination import COUNT_SECONDS, RECREATE, CheckContext, Finding, error, ok, warn
from labctl.doctor.host_access import FileStatus
from labctl.engines import agent
from labctl.engines.state import Container
from labctl.errors import ConfigError, HostError, LabError
from labctl.lab import spec
from labctl.model import Host

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
"""How each accelerator's framework counts its devices; the last line is its name and the number."""
KILLED = 137
RESET = {
    "nvidia": "nvidia-smi --gpu-reset --id={device}",
    "habana": "sh -c 'modprobe -r habanalabs && modprobe habanalabs'",
}
"""How a device that is not in use is reset."""
HUGEPAGES = 15_000
"""Pages of 2 MiB for eight Gaudis: what Intel's own cluster software reserves comes to 14 500."""
BALANCED = ((5, 9), (5, 16))
"""First and last kernel on which Habana asks to turn NUMA balancing off; hccl_demo's README."""


def missing(ctx: CheckContext, why: LabError) -> Finding:
    """The finding of a host without the devices that the settings ask for, or whose engine cannot hand them in."""
    settings, spread = ctx.settings, ctx.lab.network == "host"
    impact, found = "no node can be created", 0
    try:
        accelerator, host = observe(settings.text("LAB_ACCELERATOR"), ctx.root)
        found = len(spec.chosen_devices(accelerator, host, settings.text("LAB_DEVICES")))
        if spread:
            spec.node_of(settings, accelerator, replace(host, slots=ctx.host.slots))
        else:
            spec.nodes(settings, accelerator, host)
    except ConfigError:
        return error("LAB-DEVICE-001", why.message, impact=impact, fix=ctx.unset_setting("LAB_DEVICES"))
    except HostError:
        slots = int(settings.text("LAB_SLOTS") or 1)
        if found:
            fewer = ("LAB_NODES", found // slots) if found >= slots else ("LAB_SLOTS", found)
            fix = ctx.set_setting(fewer[0], str(fewer[1]))
        elif spread:
            fix = ctx.as_root("dmesg | tail -n 50  # or remove it from LAB_HOSTS")
        else:
            fix = ctx.set_setting("LAB_ACCELERATOR", "auto")
        return error("LAB-DEVICE-001", why.message, impact=impact, fix=fix)
    if accelerator == "cpu":
        fix = ctx.as_root("journalctl -u docker -n 50")
        return error("LAB-RUNTIME-001", why.message, impact=impact, fix=fix)
    fix, caution = register_runtime(ctx, accelerator)
    return error("LAB-RUNTIME-001", why.message, impact=f"{impact}{caution}", fix=fix)


def register_runtime(ctx: CheckContext, accelerator: str) -> tuple[str, str]:
    """The command that lets the host's engine hand devices in, and what to know before typing it."""
    sudo = ctx.access.sudo
    program, package = HABANA, "habanalabs-container-runtime"
    source = "Habana's own archive: add it first (docs.habana.ai, Installation)"
    if accelerator == "nvidia":
        program, package = "nvidia-ctk", "nvidia-container-toolkit"
        source = "NVIDIA's own archive: add it first (Container Toolkit, Installing)"
    installed = ctx.access.has(program)
    steps = [] if installed else [f"{sudo}apt-get install --yes {package}"]
    caution = "" if installed else f"; the package is in {source}"
    if accelerator == "nvidia":
        steps += [f"{sudo}nvidia-ctk runtime configure --runtime=docker", engine.restart(ctx)]
        caution = f"{caution}; {engine.RESTART_ENDS}"
    else:
        path = shutil.which(HABANA) if installed and ctx.access.connection is None else ""
        runtimes = {"runtimes": {"habana": {"path": path or f"/usr/bin/{HABANA}"}}}
        # The engine reloads its runtimes without a restart.
        steps += [engine.configure(ctx, runtimes), f"{sudo}sh -c 'kill -HUP $(cat /var/run/docker.pid)'"]
    return ctx.access.command(" && ".join(steps)), caution


def container_starts(ctx: CheckContext) -> Iterator[Finding]:
    """Whether the engine starts a container with a node's devices."""
    mapping = ctx.nodes[0].devices
    if not mapping.devices or not ctx.observed.image:
        return
    ids = ", ".join(device.id for device in mapping.devices)
    reason = ctx.daemon.starts(ctx.lab.name, ctx.lab.image, mapping)
    if not reason:
        yield ok("LAB-RUNTIME-002", f"a container with {ids} starts")
        return
    intel = ctx.lab.accelerator == "intel"
    fix, caution = ("labctl devices", "") if intel else register_runtime(ctx, ctx.lab.accelerator)
    if mapping.driver == "cdi":
        fix = ctx.as_root("nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml")
    summary, impact = f"a container with {ids} does not start: {reason}", f"the nodes would fail to start too{caution}"
    yield error("LAB-RUNTIME-002", summary, impact=impact, fix=fix)


def permissions(ctx: CheckContext) -> Iterator[Finding]:
    """Whether the containers' user may open the device files: as owner, through a group, or as everybody."""
    uid = ctx.host.uid
    groups = {
        path: node.devices.group_add
        for node in ctx.nodes
        for path in (*(device.path for device in node.devices.devices), *node.devices.paths)
    }
    status = ctx.access.files(tuple(groups), ctx.root)
    closed = {path: why for path in groups if (why := why_closed(status[path], ctx.host, groups[path]))}
    for path, why in closed.items():
        # To everybody is how the drivers of NVIDIA, Gaudi and RDMA create them; a node has no other group of the host
        # than that of render nodes.
        fix = f"chmod a+rw {path}"
        if status[path].gid in groups[path]:
            fix = f"chmod g+rw {path}"
        elif path.startswith("/dev/dri/"):
            fix = f"chgrp render {path} && {ctx.access.sudo}chmod g+rw {path}"
        impact = f"ranks run as user {uid} and could not open it"
        yield error("LAB-DEVICE-002", f"{path} {why}", impact=impact, fix=ctx.as_root(fix))
    if groups and not closed:
        yield ok("LAB-DEVICE-002", f"user {uid} may open all {len(groups)} device files")


def why_closed(found: FileStatus, host: Host, groups: tuple[int, ...]) -> str:
    """Why this host's user in these groups may not read and write a file; empty when it may."""
    if found.error:
        return found.error
    shift = 6 if found.uid == host.uid else 3 if found.gid in (host.gid, *groups) else 0
    if found.mode >> shift & 0o6 == 0o6:
        return ""
    return f"is {stat.filemode(found.mode)} of user {found.uid}, group {found.gid}"


def health(ctx: CheckContext) -> Iterator[Finding]:
    """What the vendor's tool says of each device, where it is installed."""
    kind = ctx.lab.accelerator
    given = [(node.name, device) for node in ctx.nodes for device in node.devices.devices]
    # One call of the tool for all: it takes seconds.
    described = describe(kind, tuple(device for _, device in given), ctx.access.run)
    for (node, _), device in zip(given, described, strict=True):
        if not device.health:
            yield ok("LAB-DEVICE-003", f"{device.id} {device.name}".rstrip(), node)
            continue
        # A GPU of Intel's may also drive a person's screen.
        fix = ctx.as_root("dmesg | grep -i -e i915 -e xe | tail -n 50")
        if kind in RESET:
            fix = f"labctl down && {ctx.as_root(RESET[kind].format(device=device.id))} && labctl up"
        summary = f"{device.id}: {device.health}"
        yield error("LAB-DEVICE-003", summary, impact="ranks on it fail or hang", fix=fix, node=node)


def leases(ctx: CheckContext) -> Iterator[Finding]:
    """Whether another lab holds a device that this lab would get."""
    wanted = {device: node.name for node in ctx.nodes for device in node.devices.devices}
    for device, lease in ctx.access.leases(ctx.host.locks, tuple(wanted)).items():
        if device_leases.is_foreign(ctx.lab, ctx.host, lease):
            holder = device_leases.in_words(lease, partial(user_name, ctx))
            yield error(
                "LAB-DEVICE-005",
                f"{device_leases.called(device)} is held by {holder}",
                impact="two labs on a device would crash or slow each other down; `down` ends the run of the other",
                fix=release(ctx, lease),
                node=wanted[device],
            )


def user_name(ctx: CheckContext, uid: str) -> str:
    """The name of a user on the host that is examined."""
    if ctx.local:
        return device_leases.user_name(uid)
    people = (line.split(":") for line in ctx.read("etc/passwd").splitlines())
    return next((fields[0] for fields in people if fields[2:3] == [uid]), f"user {uid}")


def release(ctx: CheckContext, lease: Lease) -> str:
    """The command that frees a device: end the lab that holds it, if it is one's own, or use other devices."""
    own = lease.get("uid") == str(ctx.host.uid) and "directory" in lease
    if own and (ctx.local or Path(lease["directory"]).is_dir()):
        return f"labctl down -C {shlex.quote(lease['directory'])}"
    if not ctx.local:
        # LAB_DEVICES would change every host, and only this one was examined.
        label = shlex.quote(f"label=labctl.lab={lease.get('lab', '')}")
        return ctx.access.command(f"docker ps --filter {label}  # and ask its holder")
    free = device_leases.enough(ctx.lab, ctx.host)
    return ctx.set_setting("LAB_DEVICES", ",".join(free)) if free else "labctl devices  # and ask its holder"


def gaudi_hugepages(ctx: CheckContext) -> Iterator[Finding]:
    """Huge pages, from which Gaudi's communication takes its buffers."""
    if ctx.lab.accelerator != "habana":
        return
    pages, devices = ctx.read("proc/sys/vm/nr_hugepages"), len(ctx.host.devices)
    wanted = HUGEPAGES * max(1, devices) // 8
    if int(pages or 0) >= wanted:
        yield ok("LAB-GAUDI-001", f"{pages} huge pages")
        return
    impact = "the driver's buffers come from them: large models fail to allocate host memory"
    fix = ctx.as_root(f"sysctl -w vm.nr_hugepages={wanted}")
    yield warn("LAB-GAUDI-001", f"{pages or 'no'} huge pages for {devices} Gaudis", impact=impact, fix=fix)


def gaudi_numa_balancing(ctx: CheckContext) -> Iterator[Finding]:
    """NUMA balancing, which on some kernels moves pages that Gaudi's driver has pinned."""
    if ctx.lab.accelerator != "habana":
        return
    release = re.match(r"(\d+)\.(\d+)", ctx.read("proc/sys/kernel/osrelease") or os.uname().release)
    kernel = (int(release[1]), int(release[2])) if release else (0, 0)
    on = ctx.read("proc/sys/kernel/numa_balancing") not in ("", "0")
    if not on or not BALANCED[0] <= kernel <= BALANCED[1]:
        yield ok("LAB-GAUDI-002", f"NUMA balancing {'on' if on else 'off'} (fine with this kernel)")
        return
    summary = f"NUMA balancing is on under kernel {kernel[0]}.{kernel[1]}"
    impact = "on kernels 5.9 to 5.16 it slows Gaudi down and may make it fail"
    yield warn("LAB-GAUDI-002", summary, impact=impact, fix=ctx.as_root("sysctl -w kernel.numa_balancing=0"))


def gaudi_iommu(ctx: CheckContext) -> Iterator[Finding]:
    """An IOMMU that translates each of Gaudi's memory accesses instead of passing them through."""
    if ctx.lab.accelerator != "habana":
        return
    words = set(ctx.read("proc/cmdline").split())
    translating = sorted({"intel_iommu=on", "amd_iommu=on"} & words)
    if not translating or "iommu=pt" in words:
        yield ok("LAB-GAUDI-003", "the IOMMU is off or passes accesses through")
        return
    yield warn(
        "LAB-GAUDI-003",
        f"the kernel was started with {', '.join(translating)} and without iommu=pt",
        impact="each memory access of a device is translated, which costs bandwidth; some fail",
        fix=ctx.as_root(
            "sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=pt /' /etc/default/grub && "
            f"{ctx.access.sudo}update-grub  # and reboot this host when it is not in use"
        ),
    )


# --- in a node -----------------------------------------------------------------------------------------------


def framework_count(ctx: CheckContext, container: Container) -> Iterator[Finding]:
    """Whether the node's torch or TensorFlow counts the devices that the node was given; not during a run."""
    name = container.node
    given = next((len(node.devices.devices) for node in ctx.lab.nodes if node.name == name), 0)
    program = COUNT.get(ctx.lab.accelerator)
    if not given or program is None or ctx.run_active:
        return
    # A program that outlives `docker exec` would keep the devices in use.
    argv = ("timeout", "--signal=KILL", f"{COUNT_SECONDS - 2:.0f}", "python", "-c", program)
    done = ctx.daemon.call(container.name, argv, user=agent.user(ctx.lab), limit=COUNT_SECONDS - 1)
    if done.code == KILLED:
        message = f"its devices were not counted within {COUNT_SECONDS - 2:.0f} s"
        raise HostError(message, hint=f"labctl logs {name}", node=name)
    framework, _, count = (done.out.strip().splitlines() or [""])[-1].partition(" ")
    stderr = (done.err.strip().splitlines() or [""])[-1]
    if done.code and stderr.startswith("ModuleNotFoundError"):
        yield ok("LAB-DEVICE-004", f"its image has nothing that counts devices ({stderr})", name)
    elif done.code == 0 and count == str(given):
        yield ok("LAB-DEVICE-004", f"{framework} counts {given} devices", name)
    else:
        reason = f": {stderr}" if done.code else ""
        summary = f"{framework or 'torch'} counts {count or 'no'} of {given} devices{reason}"
        impact = "each rank needs a device of its own"
        yield error("LAB-DEVICE-004", summary, impact=impact, fix=RECREATE, node=name, auto_fixable=True)
