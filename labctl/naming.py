"""Names and paths of everything that a lab owns."""

from __future__ import annotations

from pathlib import Path

from labctl.model import Device, Host, Lab

OUTPUTS = "runs/.outputs"
"""Folder that a run writes to until it ends, relative to the lab directory."""
CLONES = "clones"
"""Folder of copied clones, relative to the lab's directory on a host."""
NOTEBOOKS = "runs/notebooks"
"""Folder of notebooks. Containers can write here and to ``OUTPUTS``, and to no other folder below ``runs/``."""


def project_name(lab: str) -> str:
    """Return the name of a lab's compose project and network, `labctl-LAB`."""
    return f"labctl-{lab}"


def project(lab: Lab) -> str:
    return project_name(lab.name)


def container_name(lab: Lab, node: str) -> str:
    return container_of(lab.name, node)


def container_of(lab: str, node: str) -> str:
    """Return the container name that compose gives a node of the lab with this name."""
    return f"{project_name(lab)}-{node}-1"


def node_directory(node: str) -> str:
    """Return the folder of a node's files, relative to the lab directory."""
    return f".lab/nodes/{node}"


def cache_directory(node: str) -> str:
    """Return the folder of kernels and operators compiled on a node, relative to the lab directory.

    Each node has its own: in a shared folder nodes would wait for each other's locks.
    """
    return f".lab/cache/{node}"


def compose_path(node: str) -> str:
    return f"{node_directory(node)}/compose.yml"


def override_path(node: str) -> str:
    """Return the path of the user's additions to a node's compose file, relative to the lab directory."""
    return f"{node_directory(node)}/override.yml"


def lease_path(locks: str, device: Device) -> Path:
    """Return the path of the file whose lock is a device's lease, in the folder ``locks``."""
    return Path(locks) / f"labctl-{lease_name(device)}.lock"


def lease_name(device: Device) -> str:
    return device.pci or device.path.removeprefix("/dev/").replace("/", "-")


def own_path(lab: Lab, host: Host, path: str) -> str:
    """Return a path relative to the lab's directory as a path on a host."""
    return f"{host.directory or lab.directory}/{path}"


def path_on(lab: Lab, host: Host, path: str) -> str:
    """Return this machine's path as a path on a host, whose lab directory, clones and home may be elsewhere."""
    clone = dict(lab.clones).get(path)
    if clone and sent(host):
        return own_path(lab, host, clone)
    moved = ((str(lab.directory), host.directory), (lab.home, host.home))
    for local, remote in moved:
        if local and remote and (path == local or path.startswith(f"{local}/")):
            return remote + path.removeprefix(local)
    return path


def fingerprint(content: str) -> str:
    """Return the value of the `labctl.config-hash` label in a compose file's text."""
    return content.split("labctl.config-hash: ", 1)[1].split("\n", 1)[0].strip('"')


def sent(host: Host) -> bool:
    """Tell if the lab's files are copied to this host, which has a directory of its own for them."""
    return bool(host.directory)
