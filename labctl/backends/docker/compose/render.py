"""Renders the templates in ``compose/``; every value in them passes a filter that quotes it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins

from labctl import accelerators
from labctl.config import override
from labctl.config.settings import in_bytes
from labctl.launchers import OPEN_MPI_NETWORK
from labctl.model import LAUNCHER, DeviceMapping, File, Host, Lab, Mount, Node, Pairs
from labctl.naming import (
    cache_directory,
    compose_path,
    lease_name,
    lease_path,
    node_directory,
    override_path,
    own_path,
    path_on,
    project,
    sent,
)
from labctl.system import files
from labctl.system.templates import template, yaml_string

CHECK_INTERVAL = 15
"""Seconds between health checks of a node."""
NODES_PER_CORE = 4
"""Maximum nodes per core at that interval: a check takes 0.13 s of a core."""
FILES, FILES_PER_RANK = 64, 4
"""Open files of a process that connects to every rank: 1024 are enough for 32 nodes of 8 ranks, but not for more."""
USUAL_FILES = 1024
"""Default limit of open files on hosts."""


def nodes_on_a_host(lab: Lab) -> int:
    """Return the number of nodes per host: all on a bridge network, 1 on the hosts' network."""
    return len(lab.nodes) if lab.network == "bridge" else 1


def check_interval(lab: Lab, host: Host) -> int:
    """Return the seconds between a node's health checks: CHECK_INTERVAL, or a multiple if many nodes share a core."""
    crowd = nodes_on_a_host(lab) / (NODES_PER_CORE * max(1, len(host.cpus)))
    return CHECK_INTERVAL * max(1, math.ceil(crowd))


def files_needed(lab: Lab) -> int:
    """Return the number of files that a process of a run may have open at once."""
    return FILES + FILES_PER_RANK * sum(node.slots for node in lab.nodes)


def neighbours_needed(lab: Lab) -> int:
    """Return the entries that a host's ARP table needs if all nodes connect to each other."""
    return nodes_on_a_host(lab) * (len(lab.nodes) + 1)


# Capabilities that sshd and the entrypoint need: containers drop all others, so that root in them is restricted.
SSHD_CAPABILITIES = (
    ("AUDIT_WRITE", "sshd records logins where the kernel audits, and ends the session if it may not"),
    ("SETGID", "sshd and the entrypoint become the lab's user"),
    ("SETUID", "sshd and the entrypoint become the lab's user"),
    ("SYS_CHROOT", "sshd confines its unauthenticated part"),
)
LAUNCHER_CAPABILITIES = (
    ("SETGID", "the entrypoint becomes the lab's user"),
    ("SETUID", "the entrypoint becomes the lab's user"),
)
# A second loopback address, which the kernel answers as well.
BESIDE = "127.0.0.2"
# The template's placeholder for the digest of its text; a value cannot contain it, as its quotes are escaped.
UNSEALED = 'labctl.config-hash: ""'
# Keys of a service in compose.override.yml that may set limits: then these are not compared.
LIMITING = {"mem_limit", "cpus", "cpu_shares", "cpu_quota", "cpuset", "pids_limit", "deploy", "extends", "<<"}


class RenderedFiles(Struct, frozen=True, kw_only=True):
    """The nodes whose files were rendered below ``directory``, and the changed files."""

    lab: str
    directory: str
    nodes: tuple[str, ...]
    changed: tuple[str, ...]


def render(lab: Lab) -> tuple[File, ...]:
    """Return compose files, overrides, links and device descriptions of all nodes, and the launcher's ssh config."""
    names = extra_hosts(lab)
    files = [
        file
        for node in lab.nodes
        for file in (render_node(lab, node, names), *overrides(lab, node), *links(node), *watch(lab, node))
    ]
    config = template(Path(__file__).with_name("ssh_config.j2")).render(lab=lab)
    return (*files, File(path=f"{node_directory(lab.nodes[0].name)}/launcher/config", content=config))


def extra_hosts(lab: Lab) -> dict[str, str]:
    """Return the ``extra_hosts`` lines with all nodes' addresses, by role; empty if the network has DNS.

    The launcher shares the first node's address. Open MPI and Horovod would take that node for their own machine and
    start its ranks in the launcher, so there the node's name gets an address that no interface has.
    """
    if lab.network == "bridge":
        return {}
    first, *others = ((node.name, lab.host(node.host).address) for node in lab.nodes)
    rest = "".join(name_line(*pair) for pair in others)
    return {"worker": name_line(*first) + rest, LAUNCHER: name_line(first[0], BESIDE) + rest}


def name_line(name: str, address: str) -> str:
    return f"\n      - {yaml_string(f'{name}:{address}')}"


def render_node(lab: Lab, node: Node, names: Mapping[str, str]) -> File:
    """Return a node's compose file, labelled with its hash; the first node's also has the launcher."""
    host = lab.host(node.host)
    services = [worker(lab, node, host)]
    if node is lab.nodes[0]:
        services.append(launcher(lab, host))
    added = overrides(lab, node)
    content = template(files.path("compose", "node.yml.j2")).render(
        lab=lab,
        node=node,
        host=host,
        project=project(lab),
        path=compose_path(node.name),
        override=added[0].path if added else "",
        services=services,
        interval=check_interval(lab, host),
        names=names,
        secrets=[(f"{service['name']}-{name}", path) for service in services for name, path in service["secrets"]],
    )
    # The label tells `up` if a container was made from this exact text and these secrets.
    sealed = "".join(f"{name}\0{value.reveal()}\0" for name, value in lab.secrets)
    text = content + sealed + "".join(file.content for file in added)
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return File(path=compose_path(node.name), content=content.replace(UNSEALED, f'labctl.config-hash: "{digest}"'))


def overrides(lab: Lab, node: Node) -> tuple[File, ...]:
    """Return the file with the user's additions to the services of a node, for compose to merge; () without any."""
    services = (node.name, LAUNCHER) if node is lab.nodes[0] else (node.name,)
    content = override.text(lab.override, services)
    return (File(path=override_path(node.name), content=content),) if content else ()


def links(node: Node) -> tuple[File, ...]:
    """Return the by-path links of a node's devices, and of no other card."""
    folder = f"{node_directory(node.name)}/by-path"
    return tuple(File(path=f"{folder}/{name}", content=target, link=True) for name, target in node.devices.links)


def watch(lab: Lab, node: Node) -> tuple[File, ...]:
    """Return devices.json, by which the node's agent checks devices; () if it has none or the vendor no ``watch``."""
    description = accelerators.get(lab.accelerator).watch
    if not description or not node.devices.devices:
        return ()
    return (
        File(path=f"{node_directory(node.name)}/ssh/devices.json", content=f"{json.dumps(to_builtins(description))}\n"),
    )


def lease_mounts(node: Node, host: Host) -> tuple[Mount, ...]:
    """Return a mount per lock file of the node's own devices; the node takes every lock that it sees."""
    return tuple(
        Mount(source=str(lease_path(host.locks, device)), target=f"/etc/lab/leases/{lease_name(device)}")
        for device in node.devices.devices
    )


def lease_holder(lab: Lab, node: Node, host: Host) -> Pairs:
    """Return LAB_LEASE with the text that the node writes into its locks, as a pair; () without devices."""
    holder = {"lab": lab.name, "node": node.name, "directory": str(lab.directory), "uid": host.uid}
    return (("LAB_LEASE", json.dumps(holder)),) if node.devices.devices else ()


def shared_mounts(lab: Lab, host: Host) -> tuple[Mount, ...]:
    """Return the mounts that every container of the lab has, with their paths on this host."""
    return tuple(mount._replace(source=path_on(lab, host, mount.source)) for mount in lab.mounts)


def worker(lab: Lab, node: Node, host: Host) -> dict[str, Any]:
    """Return the template's values for a worker's service: limits, environment, devices, mounts and secrets."""
    directory, cpuset = node_directory(node.name), ",".join(map(str, node.cpuset))
    variables = dict(node.devices.environment)
    variables["OMP_NUM_THREADS"] = str(max(1, len(node.cpuset or host.cpus) // node.slots))
    mounts = [*shared_mounts(lab, host), *node.devices.mounts]
    if node.devices.links:
        mounts.append(
            Mount(source=own_path(lab, host, f"{directory}/by-path"), target="/dev/dri/by-path", read_only=True)
        )
    mounts += lease_mounts(node, host)
    mounts.append(Mount(source=own_path(lab, host, cache_directory(node.name)), target="/home/lab/.cache"))
    if node.devices.devices:
        variables["LAB_HEALTH_DEVICES"] = f"{lab.accelerator}:{len(node.devices.devices)}"
    variables |= lease_holder(lab, node, host)
    if lab.sshd_log_level != "VERBOSE":
        variables["LAB_SSHD_LOG_LEVEL"] = lab.sshd_log_level
    return {
        "name": node.name,
        "role": "worker",
        "slots": node.slots,
        "cpuset": cpuset,
        "limits": limits(lab, node.name, cpuset),
        "environment": environment(lab, host, variables),
        "capabilities": (*SSHD_CAPABILITIES, *node.devices.cap_add),
        "devices": node.devices,
        "mounts": (*mounts, ssh_mount(lab, host, f"{directory}/ssh")),
        "secrets": secret_paths(lab, host, node.name),
    }


def launcher(lab: Lab, host: Host) -> dict[str, Any]:
    """Return the template's values for the launcher's service: no devices, no sshd, the only private key."""
    first = lab.nodes[0]
    # An editor attached to the launcher may change workloads; ranks on workers may not. Pushed copies stay read-only.
    edited = () if sent(host) else (f"{lab.project_path}/workloads",)
    shared = shared_mounts(lab, host)
    mounts = [mount._replace(read_only=mount.read_only and mount.target not in edited) for mount in shared]
    return {
        "name": LAUNCHER,
        "role": LAUNCHER,
        "slots": 0,
        "cpuset": "",
        "limits": limits(lab, LAUNCHER, ""),
        "environment": environment(lab, host, dict(first.devices.launcher_environment)),
        "capabilities": LAUNCHER_CAPABILITIES,
        "devices": DeviceMapping(),
        "mounts": (*mounts, ssh_mount(lab, host, f"{node_directory(first.name)}/launcher")),
        "secrets": secret_paths(lab, host, first.name),
    }


def limits(lab: Lab, service: str, cpuset: str) -> str:
    """Return a service's memory, pids and cpuset as its label has them; empty if compose.override.yml sets any."""
    added = json.loads(dict(lab.override).get(service, "{}"))
    if not LIMITING.isdisjoint(added):
        return ""
    values = {"memory": str(in_bytes(lab.memory)) if lab.memory else "", "pids": str(lab.limits.pids), "cpuset": cpuset}
    return " ".join(f"{name}={value}" for name, value in values.items() if value)


def environment(lab: Lab, host: Host, more: Mapping[str, str]) -> Pairs:
    """Return a container's environment: the node's, then ``more``, then the lab's, which overrides both."""
    node = {"LAB_NAME": lab.name, "LAB_UID": str(host.uid), "LAB_GID": str(host.gid), "LAB_SSH_PORT": str(lab.ssh_port)}
    if lab.network == "host":
        # Keep the lab's sshd off the host's other networks.
        node["LAB_SSH_ADDRESS"] = f"{host.address} {BESIDE}" if host.name == lab.nodes[0].host else host.address
    network = {"GLOO_SOCKET_IFNAME": host.interface, **dict.fromkeys(OPEN_MPI_NETWORK, lab.addresses)}
    return tuple({**node, **network, **more, **dict(lab.environment)}.items())


def ssh_mount(lab: Lab, host: Host, path: str) -> Mount:
    return Mount(source=own_path(lab, host, path), target="/etc/lab/ssh", read_only=True)


def secret_paths(lab: Lab, host: Host, node: str) -> Pairs:
    base = own_path(lab, host, f"{node_directory(node)}/secrets")
    return tuple((name, f"{base}/{name}") for name, _ in lab.secrets)
