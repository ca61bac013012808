"""Rules for mounts: host directories that containers may write to, and container paths that users may mount over.

Forbidden on hosts: system directories, directories of keys, engine sockets. Forbidden in containers: paths of the
system and of labctl.
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
"""The settings whose values are mounted, each with an example."""

_SYSTEM = re.compile(r"/(home|root|usr)?|(/usr)?/(s?bin|lib(32|64|x32)?)")
_CLOSED = ("/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/var/run", "/var/lib/containerd", "/var/lib/docker")
"""Forbidden with everything below, except for ``_OPEN``."""
_OPEN = re.compile(r"/dev/shm/.+|(/var)?/run/(user/\d+/.+|media(/.+)?)")  # noqa: S108
_KEYS = (".ssh", ".gnupg", ".docker", ".kube", ".aws")
_SOCKETS = ("docker.sock", "containerd.sock", "podman.sock")


_TAKEN = (*_CLOSED, "/bin", "/home/lab", "/lib", "/opt/lab", "/opt/venv", "/root", "/sbin", "/usr", "/var")
_OF_THE_PROJECT = ("/.cache", "/outputs", "/runs", "/workloads", "/DeepSpeedExamples", "/optimum-habana")
_MOUNT = re.compile(r"(?P<source>(~|\.{1,2})?/[^\s:]*|~):(?P<target>/[A-Za-z0-9._+/-]*)(:(?P<mode>ro|rw))?")


def split(value: str, home: str, directory: str) -> tuple[Mount, ...]:
    """Parse ``source:target[:ro]`` words into mounts. ValueError(reason, hint) if bad.

    ``~`` is ``home``; a source that begins with ``./`` or ``../`` is relative to ``directory``.
    """
    mounts = []
    for word in value.split():
        if word.startswith("$"):
            raise ValueError("begins a mount with `$`, which is not expanded", "begin it with /, ~/ or ./")
        if not (match := _MOUNT.fullmatch(word)) or ".." in match["target"].split("/"):
            hint = "write them like /data/imagenet:/data:ro or ./data:/data; '...' around several"
            raise ValueError("must be mounts SOURCE:TARGET[:ro], with spaces between them", hint)
        source = re.sub(r"\A~(?=/|\Z)", lambda _: home, match["source"])
        if source.startswith("."):
            source = os.path.normpath(f"{directory}/{source}")
        target = _normal(match["target"])
        mounts.append(Mount(source=source, target=target, read_only=match["mode"] == "ro"))
    if len({mount.target for mount in mounts}) < len(mounts):
        raise ValueError("has two mounts at one place", "give each a place of its own in the containers")
    return tuple(mounts)


def target_refusal(target: str, project: str) -> str:
    """Return the reason why nothing may be mounted at a container path; empty if it may."""
    if target == "/" or any(_is_in(target, taken) or _is_in(taken, target) for taken in _TAKEN):
        return "is the system's, or labctl's own"
    if target == project or any(_is_in(target, f"{project}{folder}") for folder in _OF_THE_PROJECT):
        return "is labctl's own"
    return f"holds {project}" if _is_in(project, target) else ""


def refusal(path: str, home: str, *, here: bool) -> str:
    """Return the reason why a host path may not be mounted, with its content checked if ``here``; empty if it may.

    If ``here``, the path is on this machine: links are followed and the directory's content is checked.
    """
    named = _normal(path)
    if reason := _refusal(named, _normal(home)):
        return reason
    if not here:
        return ""
    real = os.path.realpath(named)
    reason = _refusal(real, os.path.realpath(home)) or _content(real)
    return f"leads to {real}: {reason}" if reason and real != named else reason


def _refusal(path: str, home: str) -> str:
    """Return the reason why a path's text alone forbids mounting (system, keys, home, sockets); empty if it may."""
    parts = PurePosixPath(path).parts
    if parts[-1] in _SOCKETS:
        return "is an engine's socket, which gives containers the host"
    if keys := next((name for name in _KEYS if name in parts), ""):
        return f"is in {keys}, where keys and passwords are"
    if _SYSTEM.fullmatch(path):
        return "is a directory of the system"
    closed = next((folder for folder in _CLOSED if _is_in(path, folder)), "")
    if closed and not _OPEN.fullmatch(path):
        return f"is in {closed}, which is the system's"
    if path == home:
        return "is the home directory"
    held = next((folder for folder in (home, *_CLOSED) if _is_in(folder, path)), "")
    return held and f"holds {held}"


def _content(path: str) -> str:
    """Return the reason why what is at a path here forbids mounting: a socket, a file, keys; empty if it may."""
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
    """Tell if a path is a directory or below it, by its text."""
    return f"{path}/".startswith(f"{directory.rstrip('/')}/")


def _normal(path: str) -> str:
    """Return a path with ``..`` and double slashes resolved in its text, absolute."""
    return "/" + os.path.normpath(path).lstrip("/")
