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
    """Return the name of a lab's compose project, which is also that of its network."""
    return f"labctl-{lab}"


def project(lab: Lab) -> str:
    return project_name(lab.name)


def container_name(lab: Lab, node: str) -> str:
    return container_of(lab.name, node)


def container_of(lab: str, node: str) -> str:
    """Return the container name that compose gives a node of the lab with this name."""
    return f"{project_name(lab)}-{node}-1"


def node_directory(node: str) -> str:
    """Return the folder of a node's files, relative to the lab directory: the unit that is copied to a host."""
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
    """Return the file whose lock is a device's lease: named by PCI address, which is stable, or by device file."""
    return Path(locks) / f"labctl-{lease_name(device)}.lock"


def lease_name(device: Device) -> str:
    return device.pci or device.path.removeprefix("/dev/").replace("/", "-")


def own_path(lab: Lab, host: Host, path: str) -> str:
    """Return the path on a host of a path relative to the lab's directory."""
    return f"{host.directory or lab.directory}/{path}"


def path_on(lab: Lab, host: Host, path: str) -> str:
    """Return the path on a host of a path of this machine: lab directory, clones and home may be elsewhere there."""
    clone = dict(lab.clones).get(path)
    if clone and sent(host):
        return own_path(lab, host, clone)
    moved = ((str(lab.directory), host.directory), (lab.home, host.home))
    for local, remote in moved:
        if local and remote and (path == local or path.startswith(f"{local}/")):
            return remote + path.removeprefix(local)
    return path


def fingerprint(content: str) -> str:
    """Return the ``labctl.config-hash`` label in a rendered compose file."""
    return content.split("labctl.config-hash: ", 1)[1].split("\n", 1)[0].strip('"')


def sent(host: Host) -> bool:
    """Tell if the lab's files are copied to this host, because it does not see the lab directory itself."""
    return bool(host.directory)
