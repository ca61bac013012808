"""Which directories of a host may be mounted into containers, which write there: not its system, keys and engines.

And where in a container a person's own may be: not where labctl's or the system's are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from labctl.model import Mount

EXAMPLES = {
    "HOST_CACHE_PATH": "~/.cache/labctl",
    "HOST_REPO_PATH": "~/DeepSpeedExamples",
    "HOST_OPTIMUM_HABANA_PATH": "~/optimum-habana",
    "LAB_MOUNTS": "/data/imagenet:/data:ro",
}
"""The settings whose values are mounted, and a value of each."""

_SYSTEM = re.compile(r"/(home|root|usr)?|(/usr)?/(s?bin|lib(32|64|x32)?)")
_CLOSED = ("/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/var/run", "/var/lib/containerd", "/var/lib/docker")
"""Closed with all that is below them, but for what is open."""
_OPEN = re.compile(r"/dev/shm/.+|(/var)?/run/(user/\d+/.+|media(/.+)?)")  # noqa: S108
_KEYS = (".ssh", ".gnupg", ".docker", ".kube", ".aws")
_SOCKETS = ("docker.sock", "containerd.sock", "podman.sock")


_TAKEN = (*_CLOSED, "/bin", "/home/lab", "/lib", "/opt/lab", "/opt/venv", "/root", "/sbin", "/usr", "/var")
_OF_THE_PROJECT = ("/.cache", "/outputs", "/runs", "/workloads", "/DeepSpeedExamples", "/optimum-habana")
_MOUNT = re.compile(r"(?P<source>~?/[^\s:]*|~):(?P<target>/[A-Za-z0-9._+/-]*)(:(?P<mode>ro|rw))?")


def split(value: str, home: str) -> tuple[Mount, ...]:
    """The mounts of ``source:target[:ro]``, with spaces between them. ValueError for anything else."""
    mounts = []
    for word in value.split():
        if not (found := _MOUNT.fullmatch(word)) or ".." in found["target"].split("/"):
            raise ValueError("must be mounts with spaces between them", "write them like /data/imagenet:/data:ro")
        source = re.sub(r"\A~(?=/|\Z)", lambda _: home, found["source"])
        target = _normal(found["target"])
        mounts.append(Mount(source=source, target=target, read_only=found["mode"] == "ro"))
    if len({mount.target for mount in mounts}) < len(mounts):
        raise ValueError("has two mounts at one place", "give each a place of its own in the containers")
    return tuple(mounts)


def target_refusal(target: str, project: str) -> str:
    """Why nothing of a person's may be mounted there; empty where it may."""
    if target == "/" or any(_is_in(target, one) or _is_in(one, target) for one in _TAKEN):
        return "is the system's, or labctl's own"
    if target == project or any(_is_in(target, f"{project}{one}") for one in _OF_THE_PROJECT):
        return "is labctl's own"
    return f"holds {project}" if _is_in(project, target) else ""


def refusal(path: str, home: str, *, here: bool) -> str:
    """Why an absolute path may not be mounted, empty where it may; ``here``, on this machine, links are followed."""
    named = _normal(path)
    if reason := _refusal(named, _normal(home)):
        return reason
    if not here:
        return ""
    real = os.path.realpath(named)
    reason = _refusal(real, os.path.realpath(home)) or _content(real)
    return f"leads to {real}: {reason}" if reason and real != named else reason


def _refusal(path: str, home: str) -> str:
    """What the words of a path say."""
    parts = PurePosixPath(path).parts
    if parts[-1] in _SOCKETS:
        return "is an engine's socket, which gives containers the host"
    if keys := next((name for name in _KEYS if name in parts), ""):
        return f"is in {keys}, where keys and passwords are"
    if _SYSTEM.fullmatch(path):
        return "is a directory of the system"
    if not _OPEN.fullmatch(path) and (closed := next((one for one in _CLOSED if _is_in(path, one)), "")):
        return f"is in {closed}, which is the system's"
    if path == home:
        return "is the home directory"
    held = next((one for one in (home, *_CLOSED) if _is_in(one, path)), "")
    return held and f"holds {held}"


def _content(path: str) -> str:
    """What is there on this machine."""
    try:
        if Path(path).is_socket():
            return "is a socket"
        if os.path.lexists(path) and not Path(path).is_dir():
            return "is a loop of links" if Path(path).is_symlink() else "is not a directory"
    except OSError:
        return ""
    held = next((name for name in (".ssh", ".gnupg", *_SOCKETS) if os.path.lexists(f"{path}/{name}")), "")
    return held and f"holds {held}"


def _is_in(path: str, directory: str) -> bool:
    return f"{path}/".startswith(f"{directory.rstrip('/')}/")


def _normal(path: str) -> str:
    """Without ``..``, as engines take it; two slashes at its beginning are one."""
    return "/" + os.path.normpath(path).lstrip("/")
