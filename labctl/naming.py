"""Names and paths of everything that a lab owns."""

from __future__ import annotations

from pathlib import Path

from labctl.model import Device, Host, Lab

OUTPUTS = "runs/.outputs"
"""Where a run writes until it ends, relative to the lab directory."""
CLONES = "clones"
"""Where the clones that were sent lie in the lab's directory on a host."""
NOTEBOOKS = "runs/notebooks"
"""Containers can write here and to ``OUTPUTS``, and nowhere else below ``runs/``."""


def project_name(lab: str) -> str:
    """The compose project and network of a lab of this name."""
    return f"labctl-{lab}"


def project(lab: Lab) -> str:
    return project_name(lab.name)


def container_name(lab: Lab, node: str) -> str:
    return container_of(lab.name, node)


def container_of(lab: str, node: str) -> str:
    """The name that compose gives the container of a node, in a lab of this name."""
    return f"{project_name(lab)}-{node}-1"


def node_directory(node: str) -> str:
    """Where a node's files lie, relative to the lab directory: the unit that is copied to a remote host."""
    return f".lab/nodes/{node}"


def cache_directory(node: str) -> str:
    """Where a node keeps the kernels and operators that were compiled on it, relative to the lab directory.

    Each node has its own: one shared by all leaves them waiting for each other's locks.
    """
    return f".lab/cache/{node}"


def compose_path(node: str) -> str:
    return f"{node_directory(node)}/compose.yml"


def override_path(node: str) -> str:
    """What a person adds to it, relative to the lab directory."""
    return f"{node_directory(node)}/override.yml"


def lease_path(locks: str, device: Device) -> Path:
    """The file whose lock is a device's lease: named by PCI address, as indices may change, or by its device file."""
    return Path(locks) / f"labctl-{lease_name(device)}.lock"


def lease_name(device: Device) -> str:
    return device.pci or device.path.removeprefix("/dev/").replace("/", "-")


def own_path(lab: Lab, host: Host, path: str) -> str:
    """Where something of the lab's directory is on a host."""
    return f"{host.directory or lab.directory}/{path}"


def path_on(lab: Lab, host: Host, path: str) -> str:
    """Where a path of this machine is on a host: its lab directory, clones and person's home are elsewhere."""
    clone = dict(lab.clones).get(path)
    if clone and sent(host):
        return own_path(lab, host, clone)
    moved = ((str(lab.directory), host.directory), (lab.home, host.home))
    for here, there in moved:
        if here and there and (path == here or path.startswith(f"{here}/")):
            return there + path.removeprefix(here)
    return path


def fingerprint(content: str) -> str:
    """The ``labctl.config-hash`` label in a rendered compose file."""
    return content.split("labctl.config-hash: ", 1)[1].split("\n", 1)[0].strip('"')


def sent(host: Host) -> bool:
    """Whether the lab's files are sent to this host, because it does not see the lab directory itself."""
    return bool(host.directory)
