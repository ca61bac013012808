"""Facts about this host, read from /proc, /sys and /etc: no Docker, no processes."""

from __future__ import annotations

import grp
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

ROOT = Path("/")
"""Where /proc, /sys and /etc are looked for; tests give another."""

_GATEWAY = 0x2
"""RTF_GATEWAY of linux/route.h."""


def default_mtu(root: Path = ROOT) -> int:
    """MTU of the default route's interface; 1500 where there is none. Source: /proc/net/route, /sys/class/net."""
    interface = _default_interface(root)
    text = _read(root / f"sys/class/net/{interface}/mtu") if interface else ""
    return int(text) if text.strip() else 1500


def cpus() -> tuple[int, ...]:
    """The cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def numa_nodes(root: Path = ROOT) -> tuple[tuple[int, ...], ...]:
    """Of the cores that this process may use, those of each NUMA node; none where the kernel names none."""
    usable = set(cpus())
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    shares = (tuple(core for core in parse_cpulist(_read(path / "cpulist")) if core in usable) for path in folders)
    return tuple(share for share in shares if share)


def parse_cpulist(text: str) -> tuple[int, ...]:
    """``0-3,8`` as numbers. Source: the kernel's cpulist format, cpuset(7)."""
    spans = (word.partition("-") for word in text.strip().split(",") if word)
    return tuple(core for low, _, high in spans for core in range(int(low), int(high or low) + 1))


def infiniband(root: Path = ROOT) -> tuple[str, ...]:
    """The character devices through which a program uses RDMA: one a card, and the connection manager's."""
    found = sorted(path.name for path in (root / "dev/infiniband").glob("*"))
    return tuple(f"/dev/infiniband/{name}" for name in found if name.startswith("uverbs") or name == "rdma_cm")


def memory(root: Path = ROOT) -> int:
    """Memory of this host in bytes."""
    return _meminfo(root, "MemTotal")


def memory_available(root: Path = ROOT) -> int:
    """Memory that can be used now without swapping, in bytes."""
    return _meminfo(root, "MemAvailable")


def os_release(root: Path = ROOT) -> Mapping[str, str]:
    """The distribution's own description, such as ``ID`` and ``VERSION_CODENAME``; empty where it has none."""
    text = _read(root / "etc/os-release") or _read(root / "usr/lib/os-release")
    return parse_os_release(text)


def parse_os_release(text: str) -> dict[str, str]:
    """``KEY=value`` lines, quoted as a shell would. Source: os-release(5)."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line and not line.lstrip().startswith("#"))
    return {key.strip(): "".join(shlex.split(value)) for key, _, value in pairs}


def groups(*names: str) -> tuple[int, ...]:
    """Numbers of those of the named groups that exist here."""
    return tuple(sorted({entry.gr_gid for entry in grp.getgrall() if entry.gr_name in names}))


def has_systemd(root: Path = ROOT) -> bool:
    """Whether systemd is the running service manager. Source: sd_booted(3)."""
    return (root / "run/systemd/system").is_dir()


def _default_interface(root: Path) -> str:
    """Interface of the default route with the lowest metric."""
    routes = [line.split() for line in _read(root / "proc/net/route").splitlines()[1:]]
    default = [r for r in routes if len(r) > 7 and r[1] == r[7] == "00000000" and int(r[3], 16) & _GATEWAY]
    return min(default, key=lambda route: int(route[6]))[0] if default else ""


def _meminfo(root: Path, name: str) -> int:
    lines = (line.split() for line in _read(root / "proc/meminfo").splitlines())
    return next((int(fields[1]) * 1024 for fields in lines if fields and fields[0] == f"{name}:"), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
