"""Accelerators: the runtime that hands them to containers, access to device files, health, leases, and their host."""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from labctl import accelerators
from labctl.accelerators import leases as device_leases
from labctl.accelerators.leases import Lease
from labctl.accelerators.vendor_tools import describe
from labctl.backends import spec
from labctl.backends.docker import agent
from labctl.backends.docker.checks import engine
from labctl.backends.docker.checks.examination import COUNT_SECONDS, ON_HOST, RECREATE, CheckContext, FileStatus
from labctl.backends.finding import Finding, error, ok, warn
from labctl.backends.state import Container
from labctl.errors import ConfigError, HostError, LabError
from labctl.model import Host
from labctl.naming import lease_path
from labctl.system import filelock, files
from labctl.system.process import CompletedProcess

KILLED = 137
# An image has no framework at all; one that lacks a module of it has a framework that is too old.
NO_FRAMEWORK = re.compile(r"ModuleNotFoundError: No module named '\w+'")


def missing(ctx: CheckContext, why: LabError) -> Finding:
    """The finding of a host without the devices that the settings ask for, or whose engine cannot hand them in."""
    settings, spread = ctx.settings, ctx.lab.network == "host"
    code, caution, found = "LAB-DEVICE-001", "", 0
    try:
        accelerator, host = accelerators.observe(settings.text("LAB_ACCELERATOR"), ctx.root)
        found = len(spec.chosen_devices(settings, accelerator, host))
        if spread:
            spec.node_of(settings, accelerator, replace(host, slots=ctx.host.slots))
        else:
            spec.nodes(settings, accelerator, host)
    except ConfigError:
        fix = ctx.unset_setting("LAB_DEVICES")
    except HostError:
        slots = int(settings.text("LAB_SLOTS") or 1)
        if found >= slots:
            fix = ctx.set_setting("LAB_NODES", str(found // slots))
        elif found:
            fix = ctx.set_setting("LAB_SLOTS", str(found))
        elif spread:
            fix = ctx.as_root("dmesg | tail -n 50  # or remove it from LAB_HOSTS")
        else:
            fix = ctx.set_setting("LAB_ACCELERATOR", "auto")
    else:
        code = "LAB-RUNTIME-001"
        if accelerator == accelerators.CPU:
            fix = ctx.as_root("journalctl -u docker -n 50")
        else:
            fix, caution = register_runtime(ctx, accelerator)
    return error(code, why.message, f"no node can be created{caution}", fix)


def register_runtime(ctx: CheckContext, accelerator: str) -> tuple[str, str]:
    """The command that lets the host's engine hand devices in, and what to know before typing it."""
    access, sudo = accelerators.get(accelerator).engine, ctx.sudo
    path = ctx.script('command -v "$1"', access.program, check=False).strip()
    steps = [] if path else [f"{sudo}apt-get install --yes {access.package}"]
    caution = "" if path else f"; the package is in {access.source}"
    if access.configure:
        steps += [f"{sudo}{access.configure}", f"{sudo}{engine.RESTART}"]
        caution = f"{caution}; {engine.RESTART_ENDS}"
    else:
        runtimes = {"runtimes": {access.runtime: {"path": path or f"/usr/bin/{access.program}"}}}
        # The engine reloads its runtimes without a restart.
        steps += [engine.configure(ctx, runtimes), f"{sudo}sh -c 'kill -HUP $(cat /var/run/docker.pid)'"]
    return ctx.command(" && ".join(steps)), caution


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
    access = accelerators.get(ctx.lab.accelerator).engine
    fix, caution = register_runtime(ctx, ctx.lab.accelerator) if access.ways else ("labctl devices", "")
    if mapping.driver == "cdi":
        fix = ctx.as_root(access.generate_cdi.format(folder="/etc/cdi"))
    summary, impact = f"a container with {ids} does not start: {reason}", f"the nodes would fail to start too{caution}"
    yield error("LAB-RUNTIME-002", summary, impact, fix)


def permissions(ctx: CheckContext) -> Iterator[Finding]:
    """Whether the containers' user may open the device files: as owner, through a group, or as everybody."""
    uid = ctx.host.uid
    groups = {
        path: node.devices.group_add
        for node in ctx.nodes
        for path in (*(device.path for device in node.devices.devices), *node.devices.paths)
    }
    status = ctx.files(tuple(groups))
    closed = {path: why for path in groups if (why := why_closed(status[path], ctx.host, groups[path]))}
    for path, why in closed.items():
        # To everybody is how most drivers create them; a node has no other group of the host than that of render nodes.
        fix = f"chmod a+rw {path}"
        if status[path].gid in groups[path]:
            fix = f"chmod g+rw {path}"
        elif path.startswith("/dev/dri/"):
            fix = f"chgrp render {path} && {ctx.sudo}chmod g+rw {path}"
        impact = f"ranks run as user {uid} and could not open it"
        yield error("LAB-DEVICE-002", f"{path} {why}", impact, ctx.as_root(fix))
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

    def run(argv: Sequence[str], seconds: float) -> CompletedProcess:
        return ctx.connection.run('exec "$@"', *argv, timeout=seconds, check=False)

    kind, module = ctx.lab.accelerator, accelerators.get(ctx.lab.accelerator)
    given = [(node.name, device) for node in ctx.nodes for device in node.devices.devices]
    # One call of the tool for all: it takes seconds.
    described = describe(kind, tuple(device for _, device in given), run)
    for (node, _), device in zip(given, described, strict=True):
        if not device.health:
            yield ok("LAB-DEVICE-003", f"{device.id} {device.name}".rstrip(), node)
            continue
        if module.reset:
            fix = f"labctl down && {ctx.as_root(module.reset.format(device=device.id))} && labctl up"
        else:
            drivers = " ".join(f"-e {name}" for name in module.pci.drivers) if module.pci else "-e pci"
            fix = ctx.as_root(f"dmesg | grep -i {drivers} | tail -n 50")
        summary = f"{device.id}: {device.health}"
        yield error("LAB-DEVICE-003", summary, "ranks on it fail or hang", fix, node=node)


def leases(ctx: CheckContext) -> Iterator[Finding]:
    """Whether another lab holds a device that this lab would get."""
    wanted = {device: node.name for node in ctx.nodes for device in node.devices.devices}
    if not wanted:
        return
    paths = [str(lease_path(ctx.host.locks, device)) for device in wanted]
    lines = ctx.script(ON_HOST, "locks", str(filelock.LONGEST_TEXT), *paths, check=False).split("\n")
    # No lines of a host without flock(1).
    for (device, node), line in zip(wanted.items(), lines, strict=False):
        lease = filelock.words(line.removeprefix("held "))
        if line.startswith("held ") and device_leases.is_foreign(ctx.lab, ctx.host, lease):
            holder = device_leases.in_words(lease, partial(user_name, ctx))
            summary = f"{device_leases.called(device)} is held by {holder}"
            impact = "two labs on a device would crash or slow each other down; `down` ends the run of the other"
            yield error("LAB-DEVICE-005", summary, impact, release(ctx, lease), node=node)


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
        return ctx.command(f"docker ps --filter {label}  # and ask its holder")
    free = device_leases.enough(ctx.lab, ctx.host)
    return ctx.set_setting("LAB_DEVICES", ",".join(free)) if free else "labctl devices  # and ask its holder"


def vendor_host(ctx: CheckContext) -> Iterator[Finding]:
    """What the accelerator's vendor asks of a host."""
    for one in accelerators.get(ctx.lab.accelerator).host_checks(ctx.host, ctx.read):
        if one.impact:
            fix = ctx.as_root(one.fix.replace("{sudo}", ctx.sudo))
            yield warn(one.code, one.summary, one.impact, fix)
        else:
            yield ok(one.code, one.summary)


# --- in a node -----------------------------------------------------------------------------------------------


def framework_count(ctx: CheckContext, container: Container) -> Iterator[Finding]:
    """Whether the node's torch or TensorFlow counts the devices that the node was given; not during a run."""
    name = container.node
    given = next((len(node.devices.devices) for node in ctx.lab.nodes if node.name == name), 0)
    counted = accelerators.get(ctx.lab.accelerator).count
    if not given or not counted or ctx.run_active:
        return
    program = files.path("docker", "count_devices.py").read_text(encoding="utf-8")
    # A program that outlives `docker exec` would keep the devices in use.
    argv = ("timeout", "--signal=KILL", f"{COUNT_SECONDS - 2:.0f}", "python", "-c", program, *counted)
    done = ctx.daemon.exec(container.name, argv, user=agent.user(ctx.lab), limit=COUNT_SECONDS - 1)
    if done.code == KILLED:
        message = f"its devices were not counted within {COUNT_SECONDS - 2:.0f} s"
        raise HostError(message, hint=f"labctl logs {name}", node=name)
    framework, _, count = (done.out.strip().splitlines() or [""])[-1].partition(" ")
    stderr = (done.err.strip().splitlines() or [""])[-1]
    if done.code and NO_FRAMEWORK.fullmatch(stderr):
        yield ok("LAB-DEVICE-004", f"its image has nothing that counts devices ({stderr})")
    elif done.code == 0 and count == str(given):
        yield ok("LAB-DEVICE-004", f"{framework} counts {given} devices")
    else:
        reason = f": {stderr}" if done.code else ""
        summary = f"{framework or 'torch'} counts {count or 'no'} of {given} devices{reason}"
        yield error("LAB-DEVICE-004", summary, "each rank needs a device of its own", RECREATE, auto_fixable=True)
