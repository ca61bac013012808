"""This host: cores, memory, shared memory, mounts, disk, proxies, certificates. No engine is asked."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from labctl import naming
from labctl.compose import render
from labctl.config.settings import in_bytes
from labctl.doctor.finding import GIB, Examination, Finding, error, gib, ok, warn
from labctl.lab.spec import own_mounts
from labctl.model import HERE

MIB = 1 << 20
RANKS_PER_CORE = 4
"""CPU ranks that a core can serve and still answer within the launchers' own time limits."""
SHARED_PER_RANK = 66 * MIB
"""What a rank of DeepSpeed's shared-memory communication maps: csrc/cpu/comm/shm.cpp, struct allreduce_workspace."""
SHARED_PER_DEVICE = GIB
"""What NVIDIA advises; Docker's own 64 MiB end in bus errors (NCCL issues 290, 342, 983)."""
CACHE_SPACE = 2 * GIB
RECORD_SPACE = 64 * MIB


def cores(examination: Examination) -> Iterator[Finding]:
    """Cores, and whether they are enough for the ranks of a CPU lab."""
    lab, here, on_it = examination.lab, examination.here, examination.nodes
    ranks = sum(node.slots for node in on_it)
    seen = f"{len(here.cpus)} cores, {gib(here.memory)} memory, accelerator {lab.accelerator}"
    yield ok("LAB-HOST-001", seen)
    if lab.accelerator == "cpu" and ranks > RANKS_PER_CORE * len(here.cpus):
        slots = on_it[0].slots
        key, fits = ("LAB_NODES", RANKS_PER_CORE * len(here.cpus) // slots)
        if not fits or lab.network == "host":
            key, fits = ("LAB_SLOTS", RANKS_PER_CORE * len(here.cpus))
        yield warn(
            "LAB-HOST-002",
            f"{ranks} ranks share {len(here.cpus)} cores",
            why="they wait for each other so long that launchers give up on them",
            fix=examination.put(key, str(fits)),
        )


def memory(examination: Examination) -> Iterator[Finding]:
    """Whether the nodes' memory limits are within what the host has."""
    lab, here, on_it = examination.lab, examination.here, examination.nodes
    if lab.memory is None or not on_it:
        return
    asked = in_bytes(lab.memory) * len(on_it)
    if asked > here.memory:
        fits = max(64, here.memory * 9 // 10 // len(on_it) // MIB)
        yield warn(
            "LAB-HOST-003",
            f"{len(on_it)} nodes may take {lab.memory} each, {gib(asked)}; the host has {gib(here.memory)}",
            why="the kernel would kill processes of any of them, or of others, before a limit is met",
            fix=examination.put("LAB_MEMORY", f"{fits}m"),
        )
    else:
        yield ok("LAB-HOST-003", f"memory limits of the nodes come to {gib(asked)} of {gib(here.memory)}")


def shared_memory(examination: Examination) -> Iterator[Finding]:
    """Whether /dev/shm holds what the ranks of one node exchange through it."""
    lab = examination.lab
    slots = max(node.slots for node in lab.nodes)
    has, least = in_bytes(lab.shm_size), SHARED_PER_RANK * slots
    wanted = least if lab.accelerator == "cpu" else SHARED_PER_DEVICE * slots
    if slots > 1 and has < wanted:
        # NCCL does not begin without; on CPU it depends on how much the ranks have to tell each other.
        judged = error if lab.accelerator != "cpu" and has < least else warn
        yield judged(
            "LAB-SHM-001",
            f"LAB_SHM_SIZE={lab.shm_size} for {slots} ranks on a node, which take up to {wanted // MIB} MiB",
            why="ranks of one node exchange data through /dev/shm and die of SIGBUS when it is full",
            fix=examination.put("LAB_SHM_SIZE", f"{max(1024, wanted // MIB)}m"),
        )
    else:
        yield ok("LAB-SHM-001", f"{lab.shm_size} of shared memory, ranks on a node: {slots}")


def mounts(examination: Examination) -> Iterator[Finding]:
    """The directories that containers see: there, and writable where they are written to."""
    lab, place, here = examination.lab, examination.place, examination.here
    own = {naming.path_on(lab, here, source) for source in own_mounts(lab)}
    cache = naming.path_on(lab, here, examination.settings.text("HOST_CACHE_PATH"))
    devices = (mount for node in examination.nodes for mount in node.devices.mounts)
    every = (*render.shared_mounts(lab, here), *devices)
    rights = place.rights([mount.source for mount in every])
    for mount in every:
        shown, may = f"{mount.source} -> {mount.target}", rights[mount.source]
        if not may:
            # What lies below the lab's directory on another host is labctl's own there.
            if mount.source in own or (here.directory and mount.source.startswith(f"{here.directory}/")):
                yield ok("LAB-MOUNT-001", f"{shown} (made by the first `labctl up`)")
                continue
            yield error(
                "LAB-MOUNT-001",
                f"{mount.source}, mounted at {mount.target}, is not there",
                why="its nodes would not start",
                fix=place.there(f"mkdir -p {shlex.quote(mount.source)}"),
                runnable=mount.source == cache,
            )
        elif not set("r" if mount.read_only else "rw") <= set(may):
            yield warn(
                "LAB-MOUNT-002",
                f"{mount.source}, mounted at {mount.target}, cannot be {'read' if mount.read_only else 'written'} here",
                why="ranks run as you: what you may not do there they may not either",
                # Not all that is below: it may be a folder that others share.
                fix=place.there(
                    f"sudo chown {examination.here.uid}:{examination.here.gid} {shlex.quote(mount.source)}"
                ),
            )
        else:
            yield ok("LAB-MOUNT-001", shown)


def space(examination: Examination) -> Iterator[Finding]:
    """Disk for the cache of models and data."""
    cache = Path(naming.path_on(examination.lab, examination.here, examination.settings.text("HOST_CACHE_PATH")))
    free = examination.place.free(cache)
    if free < CACHE_SPACE:
        yield warn(
            "LAB-DISK-002",
            f"{gib(free)} free at {cache}, where models and data are kept",
            why="a download or a checkpoint that does not fit ends a run",
            fix=roomier(examination, cache),
        )
    else:
        yield ok("LAB-DISK-002", f"{gib(free)} free at {cache} for models and data")


def records(examination: Examination) -> Iterator[Finding]:
    """Disk for the records of runs: without it no run can begin."""
    directory = examination.lab.directory
    free = examination.place.free(directory)
    if free < RECORD_SPACE:
        yield error(
            "LAB-DISK-003",
            f"{free // MIB} MiB free at {directory}",
            why="a run writes its record there",
            fix=f"du -xah {shlex.quote(str(directory))} | sort -h | tail -20  # remove what you can spare of these",
        )


def roomier(examination: Examination, full: Path) -> str:
    """The command that makes room: the cache elsewhere, where a usual place has it, else a list of what is large."""
    listing = f"du -xah {shlex.quote(str(full))} | sort -h | tail -20  # remove what you can spare of these"
    if examination.name != HERE:
        return examination.place.there(listing)
    home = Path(examination.settings.home)
    places = (home / ".cache/labctl", examination.lab.directory / "cache", Path("/var/tmp/labctl-cache"))  # noqa: S108
    for place in places:
        if place != full and examination.place.free(place) > 2 * CACHE_SPACE:
            return f"mkdir -p {shlex.quote(str(place))} && {examination.put('HOST_CACHE_PATH', str(place))}"
    return listing


def proxies(examination: Examination) -> Iterator[Finding]:
    """Proxies that downloads can use, and that the nodes' names stay clear of. Values may hold passwords: not shown."""
    set_here = [key for key in ("HTTP_PROXY", "HTTPS_PROXY") if examination.settings.secret(key)]
    for key in set_here:
        value = examination.settings.secret(key)
        reason = why_no_proxy_url(value.reveal() if value else "")
        if reason:
            yield warn(
                "LAB-PROXY-001",
                f"{key} ({examination.settings.origin(key)}) {reason}",
                why="builds and downloads fail, or pass it by",
                fix=examination.drop(key),
            )
        else:
            yield ok("LAB-PROXY-001", f"{key} is set")
    if set_here:
        yield from exceptions(examination)


def why_no_proxy_url(value: str) -> str:
    """What is wrong with a proxy's URL; empty when nothing is."""
    nowhere = "names no host; write it like http://proxy.example:3128"
    try:
        parts = urlsplit(value if "//" in value else f"//{value}")
    except ValueError:
        # Its message would show the value, and with it a password.
        return nowhere
    if parts.scheme not in ("", "http", "https", "socks4", "socks5", "socks5h"):
        return f"has the scheme `{parts.scheme}`; a proxy's URL begins with http://"
    try:
        port = parts.port
    except ValueError:
        return "has a port that is not a number up to 65535"
    if not parts.hostname or "/" in parts.path.strip("/") or (not port and parts.path.strip("/")):
        return nowhere
    return ""


def exceptions(examination: Examination) -> Iterator[Finding]:
    """Whether the lab's own names are kept from the proxy."""
    given = examination.settings.secret("NO_PROXY")
    words = [word.strip() for word in (given.reveal() if given else "").split(",") if word.strip()]
    wanted = ["localhost", "127.0.0.1", "launcher", *(node.name for node in examination.lab.nodes)]
    lacking = [] if "*" in words else [name for name in wanted if name not in words]
    if lacking:
        yield warn(
            "LAB-PROXY-002",
            f"NO_PROXY lacks {', '.join(lacking[:4])}{' ...' if len(lacking) > 4 else ''}",
            why="http between nodes, such as a rendezvous or a dashboard, would go through the proxy",
            fix=examination.put("NO_PROXY", ",".join((*words, *lacking))),
        )
    else:
        yield ok("LAB-PROXY-002", "NO_PROXY has the lab's own names")


def certificates(examination: Examination) -> Iterator[Finding]:
    """The file of CA certificates that builds are handed: there, and full of certificates."""
    path = examination.settings.text("LAB_CA_CERTIFICATES")
    if not path:
        return
    reason = why_no_certificates(Path(path))
    if reason:
        judged = error if examination.builds else warn
        yield judged(
            "LAB-CA-001",
            f"LAB_CA_CERTIFICATES ({examination.settings.origin('LAB_CA_CERTIFICATES')}): {path} {reason}",
            why="the image cannot be built with it; unset, this host's own certificates are handed in",
            fix=examination.drop("LAB_CA_CERTIFICATES"),
        )
    else:
        yield ok("LAB-CA-001", f"certificates in {path}")


def why_no_certificates(path: Path) -> str:
    """What keeps a file from being read as CA certificates; empty when nothing does."""
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        return "holds no certificate that can be read"
    except OSError as failure:
        return f"cannot be read: {failure.strerror}"
    return ""
