"""Facts about a host, read from its /proc, /sys and /etc: no Docker, no processes."""

from __future__ import annotations

import grp
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from labctl.model import Fabric
from labctl.system import routing
from labctl.system.hostpath import HostPath

ROOT = Path("/")
"""Root of this host, which has /proc, /sys and /etc."""


def read(path: HostPath) -> str:
    """Return the text of a file of the kernel or the system; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def default_mtu(root: HostPath = ROOT) -> int:
    """Return the MTU of the default route's interface; 1500 without one."""
    interface = routing.default_interface(routing.parse(read(root / "proc/net/route")))
    text = read(root / f"sys/class/net/{interface}/mtu") if interface else ""
    return int(text) if text.strip() else 1500


def online(root: HostPath = ROOT) -> int:
    """Return the number of a host's cores, also of those that this process may not use; 0 if unknown."""
    return len(parse_cpulist(read(root / "sys/devices/system/cpu/online")))


def cpus(root: HostPath = ROOT) -> tuple[int, ...]:
    """Return the cores that this process may use; of another host, those its reporting process may. Source: proc(5)."""
    if root == ROOT:
        return tuple(sorted(os.sched_getaffinity(0)))
    fields = (line.partition(":") for line in read(root / "proc/self/status").splitlines())
    allowed = next((value for name, _, value in fields if name == "Cpus_allowed_list"), "")
    # Cores that could be plugged in later are allowed too.
    online = set(parse_cpulist(read(root / "sys/devices/system/cpu/online")))
    return tuple(core for core in parse_cpulist(allowed) if core in online)


def has_bf16(root: HostPath = ROOT) -> bool:
    """Tell if the processor has bf16 instructions; True if /proc/cpuinfo lists no flags at all."""
    fields = (line.partition(":") for line in read(root / "proc/cpuinfo").splitlines())
    flags = next((value.split() for name, _, value in fields if name.strip() in ("flags", "Features")), ())
    return not flags or not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def processor(root: HostPath = ROOT) -> str:
    """Return the model of a host's processor; empty where /proc/cpuinfo has none, as on most Arm."""
    fields = (line.partition(":") for line in read(root / "proc/cpuinfo").splitlines())
    return next((value.strip() for name, _, value in fields if name.strip() == "model name"), "")


def numa_nodes(root: HostPath = ROOT) -> tuple[tuple[int, ...], ...]:
    """Return the usable cores of each NUMA node that has any; empty if the kernel shows no nodes."""
    usable = set(cpus(root))
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    near = (parse_cpulist(read(path / "cpulist")) for path in folders)
    shares = (tuple(filter(usable.__contains__, cores)) for cores in near)
    return tuple(filter(None, shares))


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Parse the kernel's cpulist format, ``0-3,8``, into core numbers. Source: cpuset(7)."""
    spans = (word.partition("-") for word in text.strip().split(",") if word)
    return tuple(core for low, _, high in spans for core in range(int(low), int(high or low) + 1))


def infiniband(root: HostPath = ROOT) -> tuple[str, ...]:
    """Return the device files that RDMA needs: /dev/infiniband/uverbs* and rdma_cm; empty without them."""
    names = sorted(path.name for path in (root / "dev/infiniband").glob("*"))
    return tuple(f"/dev/infiniband/{name}" for name in names if name.startswith("uverbs") or name == "rdma_cm")


def fabrics(root: HostPath = ROOT) -> tuple[Fabric, ...]:
    """Return the RDMA devices, each by its first port; ``state`` is the word in ``4: ACTIVE``.

    Source: Documentation/ABI/stable/sysfs-class-infiniband.
    """
    return tuple(map(_fabric, sorted((root / "sys/class/infiniband").glob("*"))))


def _fabric(folder: HostPath) -> Fabric:
    """Build an RDMA device from its folder in sysfs."""
    return Fabric(
        name=folder.name,
        layer=read(folder / "ports/1/link_layer").strip(),
        state=read(folder / "ports/1/state").rpartition(":")[2].strip(),
        numa=numa(folder / "device"),
        interface=next((path.name for path in sorted((folder / "device/net").glob("*"))), ""),
    )


def numa(device: HostPath) -> int | None:
    """Return the NUMA node of a device; None if the kernel does not know it, which it writes as -1."""
    text = read(device / "numa_node").strip()
    return int(text) if text.isdecimal() else None


def memory(root: HostPath = ROOT) -> int:
    """Return a host's total memory in bytes; 0 if unknown."""
    return _meminfo(root, "MemTotal")


def memory_available(root: HostPath = ROOT) -> int:
    """Return a host's memory that can be used now without swapping, in bytes; 0 if unknown."""
    return _meminfo(root, "MemAvailable")


def os_release(root: HostPath = ROOT) -> Mapping[str, str]:
    """Return the fields of /etc/os-release, such as ``ID`` and ``VERSION_CODENAME``; empty without the file."""
    return parse_os_release(read(root / "etc/os-release") or read(root / "usr/lib/os-release"))


def parse_os_release(text: str) -> dict[str, str]:
    """Parse ``KEY=value`` lines with a shell's quotes. Source: os-release(5)."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.lstrip().startswith("#"))
    return {key.strip(): "".join(shlex.split(value)) for key, _, value in pairs}


def groups(*names: str, root: HostPath = ROOT) -> tuple[int, ...]:
    """Return the sorted ids of the named groups that exist."""
    numbers = group_ids(root)
    return tuple(sorted({numbers[name] for name in names if name in numbers}))


def group_ids(root: HostPath = ROOT) -> dict[str, int]:
    """Map the names of the host's groups to their ids."""
    if root == ROOT:
        return {entry.gr_name: entry.gr_gid for entry in grp.getgrall()}
    lines = (line.split(":") for line in read(root / "etc/group").splitlines())
    return {line[0]: int(line[2]) for line in lines if len(line) > 2 and line[2].isdecimal()}


def group_of(path: str, root: HostPath = ROOT) -> int:
    """Return the id of the group that owns a file; 0 if the file does not exist."""
    try:
        return (root / path.lstrip("/")).stat().st_gid
    except OSError:
        return 0


def lock_directory(root: HostPath = ROOT) -> str:
    """Return the sticky, world-writable directory for lock files: /run/lock, else /tmp.

    It is the same for all users of a host: /run/lock, or /tmp on distributions where only root may write /run/lock,
    such as Fedora.
    """
    preferred = root / "run/lock"
    everyones = preferred.is_dir() and preferred.stat().st_mode & 0o1777 == 0o1777
    return str(preferred if everyones else root / "tmp")


def load_average(root: HostPath = ROOT) -> float:
    """Return the mean number of a host's tasks that ran or waited in the last minute; 0 if unknown. Source: proc(5)."""
    word = read(root / "proc/loadavg").partition(" ")[0]
    return float(word) if word.replace(".", "", 1).isdecimal() else 0.0


def has_systemd(root: HostPath = ROOT) -> bool:
    """Tell if systemd is the running service manager. Source: sd_booted(3)."""
    return (root / "run/systemd/system").is_dir()


def _meminfo(root: HostPath, name: str) -> int:
    """Return a value of /proc/meminfo in bytes; 0 if it is missing."""
    lines = (line.split() for line in read(root / "proc/meminfo").splitlines())
    return next((int(fields[1]) * 1024 for fields in lines if fields and fields[0] == f"{name}:"), 0)
