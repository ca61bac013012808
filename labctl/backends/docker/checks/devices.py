"""Accelerators: the container runtime, access to device files, health, leases, and the vendor's advice for hosts."""

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
from labctl.backends.docker.images import catalog
from labctl.backends.finding import Finding, error, ok, warn
from labctl.backends.state import Container
from labctl.errors import ConfigError, HostError, LabError
from labctl.model import Device, Host
from labctl.naming import lease_path
from labctl.system import filelock, files, human
from labctl.system.process import CompletedProcess

KILLED = 137
"""Exit code of a process that was killed."""
# An image has no framework at all; one that lacks a module of it has a framework that is too old.
NO_FRAMEWORK = re.compile(r"ModuleNotFoundError: No module named '\w+'")


def missing(ctx: CheckContext, why: LabError) -> Finding:
    """Return the error, with its fix, of a host that lacks the requested devices or whose engine cannot give them."""
    settings, spread = ctx.settings, ctx.lab.network == "host"
    code, caution, available = "LAB-DEVICE-001", "", 0
    try:
        accelerator, host = accelerators.observe(settings.text("LAB_ACCELERATOR"), ctx.root)
        available = len(spec.chosen_devices(settings, accelerator, host))
        if spread:
            spec.node_of(settings, accelerator, replace(host, slots=ctx.host.slots))
        else:
            spec.nodes(settings, accelerator, host)
    except ConfigError:
        fix = ctx.unset_setting("LAB_DEVICES")
    except HostError:
        slots = int(settings.text("LAB_SLOTS") or 1)
        if available >= slots:
            fix = ctx.set_setting("LAB_NODES", str(available // slots))
        elif available:
            fix = ctx.set_setting("LAB_SLOTS", str(available))
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
    """Return the command that installs and registers the vendor's runtime in the engine, and a caution about it."""
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
    """Start a container with the first node's devices: ok or error; a warning without the image."""
    mapping = ctx.nodes[0].devices
    if not mapping.devices:
        return
    ids = ", ".join(device.id for device in mapping.devices)
    given = f"device{'s' * (len(mapping.devices) > 1)} {ids}"
    if not ctx.observed.image:
        summary = f"no container was started with {given}: image {ctx.lab.image} not found"
        yield warn("LAB-RUNTIME-002", summary, "it is unknown if the engine can pass devices", "labctl up")
        return
    reason = ctx.daemon.starts(ctx.lab.name, ctx.lab.image, mapping)
    if not reason:
        yield ok("LAB-RUNTIME-002", f"a container with {given} starts")
        return
    access = accelerators.get(ctx.lab.accelerator).engine
    fix, caution = register_runtime(ctx, ctx.lab.accelerator) if access.ways else ("labctl devices", "")
    if mapping.driver == "cdi":
        fix = ctx.as_root(access.generate_cdi.format(folder="/etc/cdi"))
    summary = f"a container with {given} does not start: {reason}"
    yield error("LAB-RUNTIME-002", summary, f"the nodes would fail to start too{caution}", fix)


def permissions(ctx: CheckContext) -> Iterator[Finding]:
    """Yield an error per device file that the containers' user may not open by owner, group or mode; ok if none."""
    uid = ctx.host.uid
    groups: dict[str, tuple[int, ...]] = {}
    for node in ctx.nodes:
        paths = (*(device.path for device in node.devices.devices), *node.devices.paths)
        groups |= dict.fromkeys(paths, node.devices.group_add)
    status = ctx.files(tuple(groups))
    closed = {path: why for path in groups if (why := why_closed(status[path], ctx.host, groups[path]))}
    for path, why in closed.items():
        # Most drivers create them open to everybody. A node has no group of the host except that of render nodes.
        fix = f"chmod a+rw {path}"
        if status[path].gid in groups[path]:
            fix = f"chmod g+rw {path}"
        elif path.startswith("/dev/dri/"):
            fix = f"chgrp render {path} && {ctx.sudo}chmod g+rw {path}"
        impact = f"ranks run as user {uid} and could not open it"
        yield error("LAB-DEVICE-002", f"{path} {why}", impact, ctx.as_root(fix))
    if groups and not closed:
        yield ok("LAB-DEVICE-002", f"{user_name(ctx, str(uid))} may open {_device_files(len(groups))}")


def _device_files(count: int) -> str:
    return "the device's file" if count == 1 else f"all {count} device files"


def why_closed(status: FileStatus, host: Host, groups: tuple[int, ...]) -> str:
    """Return a file's error, or why its mode bars this host's user, even root, from read and write; "" if neither."""
    if status.error:
        return status.error
    shift = 3 if status.gid in (host.gid, *groups) else 0
    if status.uid == host.uid:
        shift = 6
    if status.mode >> shift & 0o6 == 0o6:
        return ""
    return f"is {stat.filemode(status.mode)} of user {status.uid}, group {status.gid}"


def health(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok or an error per device, by its health in the driver and, if it is installed, in the vendor's tool."""

    def run(argv: Sequence[str], seconds: float) -> CompletedProcess:
        """Run a program on the host with a time limit; return its output, whatever the exit code."""
        return ctx.connection.run('exec "$@"', *argv, timeout=seconds, check=False)

    kind, module = ctx.lab.accelerator, accelerators.get(ctx.lab.accelerator)
    given: list[tuple[str, Device]] = []
    for node in ctx.nodes:
        given += [(node.name, device) for device in node.devices.devices]
    # One call of the tool for all: it takes seconds.
    described = describe(kind, tuple(device for _, device in given), run)
    for (name, _), device in zip(given, described, strict=True):
        if not device.health:
            yield ok("LAB-DEVICE-003", f"{device.id} {device.name}".rstrip(), name)
            continue
        if module.reset:
            fix = f"labctl down && {ctx.as_root(module.reset.format(device=device.id))} && labctl up"
        else:
            drivers = " ".join(f"-e {driver}" for driver in module.pci.drivers) if module.pci else "-e pci"
            fix = ctx.as_root(f"dmesg | grep -i {drivers} | tail -n 50")
        summary = f"{device.id}: {device.health}"
        yield error("LAB-DEVICE-003", summary, "ranks on it fail or hang", fix, node=name)


def leases(ctx: CheckContext) -> Iterator[Finding]:
    """Yield an error per device of this lab whose lease another lab holds; nothing if none does."""
    node_of: dict[Device, str] = {}
    for node in ctx.nodes:
        node_of |= dict.fromkeys(node.devices.devices, node.name)
    if not node_of:
        return
    paths = [str(lease_path(ctx.host.locks, device)) for device in node_of]
    lines = ctx.script(ON_HOST, "locks", str(filelock.LONGEST_TEXT), *paths, check=False).split("\n")
    # A host without flock(1) prints no lines.
    for (device, name), line in zip(node_of.items(), lines, strict=False):
        lease = filelock.words(line.removeprefix("held "))
        if line.startswith("held ") and device_leases.is_foreign(ctx.lab, ctx.host, lease):
            holder = device_leases.in_words(lease, partial(user_name, ctx))
            summary = f"{device_leases.called(device)} is held by {holder}"
            impact = "two labs on a device would crash or slow each other down; `down` ends the run of the other"
            yield error("LAB-DEVICE-005", summary, impact, release(ctx, lease), node=name)


def user_name(ctx: CheckContext, uid: str) -> str:
    """Return the name of a user id on the examined host; ``user UID`` if unknown."""
    if ctx.local:
        return device_leases.user_name(uid)
    for line in ctx.read("etc/passwd").splitlines():
        fields = line.split(":")
        if fields[2:3] == [uid]:
            return fields[0]
    return f"user {uid}"


def release(ctx: CheckContext, lease: Lease) -> str:
    """Return the command that frees a device: stop the user's own lab, ask another holder, or use other devices."""
    same_user = lease.get("uid") == str(ctx.host.uid) and "directory" in lease
    if same_user and (ctx.local or Path(lease["directory"]).is_dir()):
        return f"labctl down -C {shlex.quote(lease['directory'])}"
    if not ctx.local:
        # LAB_DEVICES applies to all hosts, and only this one was examined.
        label = shlex.quote(f"label=labctl.lab={lease.get('lab', '')}")
        return ctx.command(f"docker ps --filter {label}  # and ask its holder")
    free = device_leases.enough(ctx.lab, ctx.host)
    return ctx.set_setting("LAB_DEVICES", ",".join(free)) if free else "labctl devices  # and ask its holder"


def vendor_host(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok or a warning for each requirement that the accelerator's vendor has of the host."""
    for result in accelerators.get(ctx.lab.accelerator).host_checks(ctx.host, ctx.read):
        if result.impact:
            fix = ctx.as_root(result.fix.replace("{sudo}", ctx.sudo))
            yield warn(result.code, result.summary, result.impact, fix)
        else:
            yield ok(result.code, result.summary)


# --- in a node -----------------------------------------------------------------------------------------------


def framework_count(ctx: CheckContext, container: Container) -> Iterator[Finding]:
    """Check that torch or TensorFlow in a node counts its devices: ok or error; nothing during a run."""
    name = container.node
    given = next((len(node.devices.devices) for node in ctx.lab.nodes if node.name == name), 0)
    counted = accelerators.get(ctx.lab.accelerator).count
    if not given or not counted or ctx.run_active:
        return
    done = count_devices(ctx, container, counted)
    framework, _, count = (done.out.strip().splitlines() or [""])[-1].partition(" ")
    stderr = (done.err.strip().splitlines() or [""])[-1]
    if done.code and NO_FRAMEWORK.fullmatch(stderr):
        yield ok("LAB-DEVICE-004", f"its image has nothing that counts devices ({stderr})")
    elif done.code == 0 and count == str(given):
        yield ok("LAB-DEVICE-004", f"{framework} counts {given} devices")
    else:
        reason = f": {stderr}" if done.code else ""
        counted_few = f"counts {count or 'no'} of {given} devices{reason}"
        yield _miscounted(ctx, framework or "torch", counted_few, in_vain=count == "0")


def _miscounted(ctx: CheckContext, framework: str, counted_few: str, *, in_vain: bool) -> Finding:
    """Return the error of a framework that counts too few devices; one of another image than labctl's may never."""
    chosen = ctx.settings.text("LAB_IMAGE")
    if in_vain and chosen not in ("", catalog.tag(ctx.lab.accelerator)):
        summary = f"{framework} in image {chosen} {counted_few}"
        impact = f"ranks would compute on the processor: the image lacks {ctx.lab.accelerator}'s {framework}"
        fix = f"{ctx.unset_setting('LAB_IMAGE')} && labctl up  # or set LAB_ACCELERATOR=cpu"
        return error("LAB-DEVICE-004", summary, impact, fix)
    summary, impact = f"{framework} {counted_few}", "each rank needs a device of its own"
    return error("LAB-DEVICE-004", summary, impact, RECREATE, auto_fixable=True)


def count_devices(ctx: CheckContext, container: Container, counted: tuple[str, ...]) -> CompletedProcess:
    """Count devices in a container by modules that a vendor names; return output and code. HostError on timeout."""
    program = files.path("docker", "count_devices.py").read_text(encoding="utf-8")
    # With timeout(1): a program that outlives `docker exec` would keep the devices in use.
    argv = ("timeout", "--signal=KILL", f"{COUNT_SECONDS - 2:.0f}", "python", "-c", program, *counted)
    done = ctx.daemon.exec(container.name, argv, user=agent.user(ctx.lab), limit=COUNT_SECONDS - 1)
    if done.code == KILLED:
        message = f"its devices were not counted within {human.duration(COUNT_SECONDS - 2)}"
        raise HostError(message, hint=f"labctl logs {container.node}", node=container.node)
    return done
