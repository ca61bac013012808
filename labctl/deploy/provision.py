"""What lies on a host before its containers start: mounts, keys, secrets, caches; here, or sent there."""

from __future__ import annotations

import shutil
from pathlib import Path

from labctl import naming
from labctl.compose import ssh_keys
from labctl.hosts import manifest, push
from labctl.hosts.ssh import Connection
from labctl.lab.spec import own_mounts
from labctl.model import HERE, File, Host, Lab
from labctl.system.files import make_private, write_all

WORKLOADS = "workloads"
# Seconds for the folders, and for the files of one host: workloads are small, a person's clone may not be.
MAKING = 30
MAKE = Path(__file__).with_name("provision.sh").read_text(encoding="utf-8")


def prepare(lab: Lab, image_id: str | None) -> None:
    """Mounts, keys, secrets and caches, which no plan shows; what removed nodes had is removed with them."""
    for source in own_mounts(lab):
        make_private(Path(source))
    ssh_keys.ensure(lab)
    write_secrets(lab)
    prepare_caches(lab, image_id)
    drop_links(lab)
    kept = {node.name for node in lab.nodes}
    for folder in (naming.node_directory(""), naming.cache_directory("")):
        for path in (lab.directory / folder).glob("*"):
            if path.name not in kept:
                shutil.rmtree(path)


def prepare_caches(lab: Lab, image_id: str | None) -> None:
    """Each node's own cache of compiled operators, emptied where another image filled it: they fit only their torch."""
    for node in (one for one in lab.nodes if one.host == HERE):
        path = lab.directory / naming.cache_directory(node.name)
        marker = path / "image"
        if path.is_dir() and (not marker.is_file() or marker.read_text(encoding="utf-8") != image_id):
            shutil.rmtree(path)
        make_private(path)
        marker.write_text(image_id or "", encoding="utf-8")


def drop_links(lab: Lab) -> None:
    """Remove the names of devices that a node had before."""
    for node in lab.nodes:
        kept = {name for name, _ in node.devices.links}
        for path in (lab.directory / naming.node_directory(node.name) / "by-path").glob("*"):
            if path.name not in kept:
                path.unlink()


def write_secrets(lab: Lab) -> tuple[str, ...]:
    """Each node's secrets as 0600 files that compose mounts under /run/secrets; those no longer set are removed."""
    written: list[str] = []
    for node in lab.nodes:
        folder = f"{naming.node_directory(node.name)}/secrets"
        secrets = [File(path=f"{folder}/{name}", content=value.reveal()) for name, value in lab.secrets]
        for path in set((lab.directory / folder).glob("*")) - {lab.directory / secret.path for secret in secrets}:
            path.unlink()
        written += write_all(lab.directory, secrets)
    return tuple(written)


def send(lab: Lab, host: Host, connection: Connection, image_id: str) -> None:
    """What is the host's, to the host: folders, then the files of its nodes and the workloads, if they changed.

    No files where it sees the lab directory itself.
    HostError names the host, what it lacks, and what came back.
    """
    nodes = [node for node in lab.nodes if node.host == host.name]
    caches = [naming.own_path(lab, host, naming.cache_directory(node.name)) for node in nodes]
    sources = [mount.source for mount in lab.mounts if mount.source in own_mounts(lab) or is_below(mount.source, lab)]
    mounts = [naming.path_on(lab, host, source) for source in sources if source != str(lab.directory / WORKLOADS)]
    locks = [str(naming.lease_path(host.locks, device)) for node in nodes for device in node.devices.devices]
    words = (image_id, str(len(caches)), " ".join(locks), *caches, *mounts)
    connection.run(MAKE, *words, timeout=MAKING)
    if not naming.sent(host):
        return
    wanted = manifests(lab, host, manifest.scan(lab.directory / WORKLOADS))
    push.push(connection, host.directory, wanted, prune=naming.node_directory("").rstrip("/"))


def manifests(lab: Lab, host: Host, workloads: manifest.Manifest) -> dict[str, manifest.Manifest]:
    """What a host gets, by where it lies below the lab's directory on both sides."""
    names = [node.name for node in lab.nodes if node.host == host.name]
    nodes = manifest.scan_nodes(lab.directory, names, launcher=lab.nodes[0].host == host.name)
    return {WORKLOADS: workloads, **nodes}


def is_below(source: str, lab: Lab) -> bool:
    """Whether a path is in the lab's directory, which is labctl's own on a host."""
    return Path(source).is_relative_to(lab.directory)
