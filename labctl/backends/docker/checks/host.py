"""A host without its engine: cores, memory, shared memory, mounts, disk, proxies, certificates."""

from __future__ import annotations

import shlex
import socket
import stat
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from labctl import naming
from labctl.backends.docker.checks.examination import GIB, CheckContext, FileStatus
from labctl.backends.docker.compose import render
from labctl.backends.finding import Finding, Level, error, ok, problem, warn
from labctl.backends.spec import own_mounts
from labctl.config.settings import in_bytes
from labctl.errors import nearest
from labctl.jobs.inputs import RUNS
from labctl.model import HERE, Mount
from labctl.system import human

MIB = 1 << 20
RANKS_PER_CORE = 4
"""CPU ranks that a core can serve within the launchers' own time limits."""
SHARED_PER_RANK = 66 * MIB
"""Bytes that a rank of DeepSpeed maps for communication. Source: csrc/cpu/comm/shm.cpp, struct allreduce_workspace."""
SHARED_PER_DEVICE = GIB
"""Bytes that NCCL's authors advise; Docker's default of 64 MiB ends in bus errors (NCCL issues 290, 342, 983)."""
CACHE_SPACE = 2 * GIB
"""Free disk below which the cache gets a warning."""
PROXY_SECONDS = 3.0
"""Time limit of a connection to a proxy."""
PROXY_PORTS = {"https": 443, "socks4": 1080, "socks5": 1080, "socks5h": 1080}
RUN_SPACE = 64 * MIB
"""Free disk that a run needs for its record."""


def cores(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok with the host's cores and memory; also a warning if a CPU lab has too many ranks for the cores."""
    cpus, ranks = len(ctx.host.cpus), sum(node.slots for node in ctx.nodes)
    summary = f"{cpus} cores, {human.memory(ctx.host.memory)} memory, accelerator {ctx.lab.accelerator}"
    yield ok("LAB-HOST-001", summary)
    most = RANKS_PER_CORE * cpus
    if ctx.lab.accelerator == "cpu" and ranks > most:
        nodes = most // ctx.nodes[0].slots
        fewer = ("LAB_NODES", nodes) if nodes and ctx.lab.network != "host" else ("LAB_SLOTS", most)
        impact, fix = "they wait for each other until launchers time out", ctx.set_setting(fewer[0], str(fewer[1]))
        yield warn("LAB-HOST-002", f"{ranks} ranks share {cpus} cores", impact, fix)


def load(whole: CheckContext) -> Iterator[Finding]:
    """Yield ok per idle host, and a warning per host whose cores other programs use, but none during a run."""
    for ctx in whole.hosts or (whole,):
        if ctx.load and not ctx.load.is_busy:
            yield ok("LAB-HOST-009", ctx.load.text(), node=ctx.name)
        elif ctx.load and not whole.run_active:
            impact = "runs are slower and their figures vary: `validate` and `bisect` may stay unsure"
            fix = ctx.command("top -b -n 1 | head -n 20  # end what is not needed")
            yield warn("LAB-HOST-009", ctx.load.text(), impact, fix, node=ctx.name)


def memory(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok, or a warning if the nodes' memory limits exceed the host's memory; nothing without a limit."""
    limit, has, nodes = ctx.lab.memory, ctx.host.memory, len(ctx.nodes)
    if limit is None or not nodes:
        return
    asked = in_bytes(limit) * nodes
    if asked <= has:
        yield ok("LAB-HOST-003", f"memory limits of the nodes add up to {human.memory(asked)} of {human.memory(has)}")
        return
    fits = max(64, has * 9 // 10 // nodes // MIB)
    summary = f"{nodes} nodes may take {limit} each, {human.memory(asked)}; the host has {human.memory(has)}"
    impact = "the kernel would kill processes of any of them, or others, before a limit is reached"
    yield warn("LAB-HOST-003", summary, impact, ctx.set_setting("LAB_MEMORY", f"{fits}m"))


def shared_memory(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok, or a warning or error if LAB_SHM_SIZE is too small for the ranks of one node."""
    lab, slots = ctx.lab, max(node.slots for node in ctx.lab.nodes)
    has, least = in_bytes(lab.shm_size), SHARED_PER_RANK * slots
    needed = least if lab.accelerator == "cpu" else SHARED_PER_DEVICE * slots
    if slots == 1 or has >= needed:
        yield ok("LAB-SHM-001", f"{lab.shm_size} of shared memory, ranks on a node: {slots}")
        return
    # NCCL does not start with less; on CPU it depends on the size of the messages.
    level: Level = "error" if lab.accelerator != "cpu" and has < least else "warn"
    summary = f"LAB_SHM_SIZE={lab.shm_size} for {slots} ranks on a node, which take up to {human.memory(needed)}"
    impact = "ranks of one node exchange data through /dev/shm and die of SIGBUS when it is full"
    fix = ctx.set_setting("LAB_SHM_SIZE", f"{max(1024, needed // MIB)}m")
    yield problem(level, "LAB-SHM-001", summary, impact, fix)


def mounts(ctx: CheckContext) -> Iterator[Finding]:
    """Yield, per directory that containers mount, ok, a warning if not accessible, or an error if missing."""
    lab, host = ctx.lab, ctx.host
    created_by_up = {naming.path_on(lab, host, source) for source in own_mounts(lab)}
    cache = naming.path_on(lab, host, ctx.settings.text("HOST_CACHE_PATH"))
    devices = chain.from_iterable(node.devices.mounts for node in ctx.nodes)
    every = (*render.shared_mounts(lab, host), *devices)
    status = ctx.files([mount.source for mount in every])
    for mount in every:
        state = status[mount.source]
        # On other hosts, labctl creates all that is below the lab directory.
        below = bool(host.directory) and mount.source.startswith(f"{host.directory}/")
        if state.exists:
            yield existing_mount(ctx, mount, state, folder=mount.source in created_by_up)
        elif mount.source in created_by_up or below:
            yield ok("LAB-MOUNT-001", f"{mount.source} -> {mount.target} (created by the first `labctl up`)")
        else:
            near = near_folder(Path(mount.source)) if ctx.name == HERE and mount.source != cache else ""
            fix, fixable = ctx.command(f"mkdir -p {shlex.quote(mount.source)}"), mount.source == cache
            fix = f"did you mean `{near}`? otherwise: {fix}" if near else fix
            summary = f"{mount.source}, mounted at {mount.target}, not found"
            yield error("LAB-MOUNT-001", summary, "its nodes would not start", fix, auto_fixable=fixable)


def near_folder(missing: Path) -> str:
    """Return the path beside a missing one of this machine that is named most like it; empty if none is."""
    try:
        beside = [path.name for path in missing.parent.iterdir()]
    except OSError:
        return ""
    near = nearest(missing.name, beside)
    return str(missing.with_name(near)) if near else ""


def existing_mount(ctx: CheckContext, mount: Mount, state: FileStatus, *, folder: bool) -> Finding:
    """Return ok, a warning if a mount's source is not accessible, or an error if it must be a ``folder`` and is not."""
    source, described = shlex.quote(mount.source), f"{mount.source}, mounted at {mount.target},"
    if folder and not stat.S_ISDIR(state.mode):
        fix, impact = ctx.command(f"mv {source} {source}.old"), "nodes mount it as a directory"
        return error("LAB-MOUNT-001", f"{described} is not a directory", impact, fix)
    if set("r" if mount.read_only else "rw") <= set(state.access):
        return ok("LAB-MOUNT-001", f"{mount.source} -> {mount.target}")
    summary = f"{described} is not {'read' if mount.read_only else 'writ'}able here"
    impact = "ranks run as you: what you may not do there they may not either"
    # Not recursive: others may share the directory.
    fix = ctx.command(f"sudo chown {ctx.host.uid}:{ctx.host.gid} {source}")
    if not mount.read_only and (point := ctx.read_only_mount(mount.source)):
        summary, impact = f"{summary}: {point} is mounted read-only", "no run can write there"
        # The kernel mounts a disk with errors read-only: only the user can tell if it may be written to again.
        fix = ctx.command(f"findmnt -T {source}; {ctx.sudo}dmesg | tail  # tell why it is read-only")
    return warn("LAB-MOUNT-002", summary, impact, fix)


def cache_space(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok or a warning on the free disk at HOST_CACHE_PATH; the fix names a roomier folder if there is one."""
    cache = Path(naming.path_on(ctx.lab, ctx.host, ctx.settings.text("HOST_CACHE_PATH")))
    free = ctx.free(cache)
    if free >= CACHE_SPACE:
        yield ok("LAB-DISK-002", f"{human.memory(free)} free at {cache} for models and data")
        return
    fix = ctx.command(largest(cache))
    if ctx.name == HERE:
        folders = (Path(ctx.settings.home) / ".cache/labctl", ctx.lab.directory / "cache")
        usual = (*folders, Path("/var/tmp/labctl-cache"))  # noqa: S108
        roomy = (folder for folder in usual if folder != cache and ctx.free(folder) > 2 * CACHE_SPACE)
        if place := next(roomy, None):
            fix = f"mkdir -p {shlex.quote(str(place))} && {ctx.set_setting('HOST_CACHE_PATH', str(place))}"
    summary = f"{human.memory(free)} free at {cache}, where models and data are kept"
    yield warn("LAB-DISK-002", summary, "a download or a checkpoint that does not fit ends a run", fix)


def run_space(ctx: CheckContext) -> Iterator[Finding]:
    """Yield an error if less than RUN_SPACE is free for records of runs, which may be on a disk of their own."""
    directory = ctx.lab.directory / RUNS
    free = ctx.free(directory)
    if free < RUN_SPACE:
        summary, impact = f"{human.memory(free)} free at {directory}", "a run writes its record there"
        yield error("LAB-DISK-003", summary, impact, largest(directory))
    elif ctx.lacks_inodes(directory):
        summary = f"the file system of {directory} has almost no free inodes"
        fix = f"du --inodes -xa {shlex.quote(str(directory))} | sort -n | tail -20  # remove what is not needed"
        yield error("LAB-DISK-003", summary, "a run writes its record there", fix)


def largest(directory: Path | str) -> str:
    """Return the command that lists the largest files and folders."""
    return f"du -xah {shlex.quote(str(directory))} | sort -h | tail -20  # remove what is not needed"


def proxies(ctx: CheckContext) -> Iterator[Finding]:
    """Warn of proxies that are no valid URL, and of nodes missing in NO_PROXY; values are not shown: passwords."""
    values = {key: ctx.settings.secret(key) for key in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")}
    revealed = {key: value.reveal() for key, value in values.items() if value}
    given = revealed.pop("NO_PROXY", "")
    for key, value in revealed.items():
        if not (reason := why_no_proxy_url(value)):
            yield ok("LAB-PROXY-001", f"{key} is set")
            continue
        summary, fix = f"{key} ({ctx.settings.origin(key)}) {reason}", ctx.unset_setting(key)
        yield warn("LAB-PROXY-001", summary, "builds and downloads fail, or bypass it", fix)
    if not revealed:
        return
    bypass = [word.strip() for word in given.split(",") if word.strip()]
    local_names = ("localhost", "127.0.0.1", "launcher", *(node.name for node in ctx.lab.nodes))
    missing = [] if "*" in bypass else [name for name in local_names if name not in bypass]
    if not missing:
        yield ok("LAB-PROXY-002", "NO_PROXY has the lab's own names")
        return
    summary = f"not in NO_PROXY: {human.listed(missing, 4)}"
    impact = "http between nodes, such as a rendezvous or a dashboard, would go through the proxy"
    fix = ctx.set_setting("NO_PROXY", ",".join((*bypass, *missing)))
    yield warn("LAB-PROXY-002", summary, impact, fix)


def proxies_answer(ctx: CheckContext) -> Iterator[Finding]:
    """Yield, per valid proxy, ok if something listens at its address, else a warning."""
    for key in ("HTTP_PROXY", "HTTPS_PROXY"):
        secret = ctx.settings.secret(key)
        if secret and not why_no_proxy_url(secret.reveal()):
            yield proxy_answers(ctx, key, secret.reveal())


def proxy_answers(ctx: CheckContext, key: str, value: str) -> Finding:
    """Return ok if something listens at a proxy's address, else a warning with its host, without its password."""
    parts = urlsplit(value if "//" in value else f"//{value}")
    place = (parts.hostname or "", parts.port or PROXY_PORTS.get(parts.scheme, 80))
    try:
        socket.create_connection(place, timeout=PROXY_SECONDS).close()
    except OSError as failure:
        shown = f"{key} ({ctx.settings.origin(key)}): {place[0]}:{place[1]} does not answer"
        reason = failure.strerror or str(failure) or "timed out"
        # Not removed: it may be down for a minute, and be the only way out.
        address = f"{parts.scheme or 'http'}://{place[0]}:{place[1]}"
        fix = f"curl -sSI --proxy {shlex.quote(address)} https://example.com  # correct {key} if it stays down"
        return warn("LAB-PROXY-003", f"{shown}: {reason}", "builds and downloads time out", fix)
    return ok("LAB-PROXY-003", f"{key} answers")


def why_no_proxy_url(value: str) -> str:
    """Return why a value is not the URL of a proxy: scheme, host or port; empty if it is."""
    nowhere = "names no host; write it like http://proxy.example:3128"
    try:
        parts = urlsplit(value if "//" in value else f"//{value}")
        port = parts.port
    except ValueError as failure:
        # Its message would show the value, which may have a password.
        return "has a port that is not a number up to 65535" if str(failure).startswith("Port ") else nowhere
    if parts.scheme not in ("", "http", "https", "socks4", "socks5", "socks5h"):
        return f"has the scheme `{parts.scheme}`; a proxy's URL begins with http://"
    if not parts.hostname or "/" in parts.path.strip("/") or (not port and parts.path.strip("/")):
        return nowhere
    return ""


def certificates(ctx: CheckContext) -> Iterator[Finding]:
    """Check that LAB_CA_CERTIFICATES is a file with certificates: error if an image must be built, else a warning."""
    import ssl

    path = ctx.settings.text("LAB_CA_CERTIFICATES")
    if not path:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        reason = "holds no certificate that can be read"
    except OSError as failure:
        reason = f"cannot be read: {failure.strerror}"
    else:
        yield ok("LAB-CA-001", f"certificates in {path}")
        return
    summary = f"LAB_CA_CERTIFICATES ({ctx.settings.origin('LAB_CA_CERTIFICATES')}): {path} {reason}"
    impact = "the image cannot be built with it; unset, this host's own certificates are used"
    fix = ctx.unset_setting("LAB_CA_CERTIFICATES")
    yield problem("error" if ctx.builds else "warn", "LAB-CA-001", summary, impact, fix)
