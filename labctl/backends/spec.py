"""Settings + host -> Lab: the nodes, what each gets of the host's cores and devices, and what is mounted."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterator
from itertools import islice, pairwise
from pathlib import Path
from urllib.parse import unquote

from msgspec.structs import replace

from labctl import accelerators, naming
from labctl.config.settings import LOGIN, USUAL_NODES, Settings, span, split_ports
from labctl.errors import ConfigError, HostError
from labctl.model import BRIDGED, Device, Host, Lab, Limits, Mount, Network, Node, Pairs, Secret
from labctl.system import pci
from labctl.system.hostpath import HostPath
from labctl.system.procfs import ROOT

KEPT = ".lab/home"
"""What shells and notebooks keep when a lab goes down, relative to the lab directory: history, last directories."""


def build(
    settings: Settings,
    directory: Path,
    accelerator: str,
    hosts: tuple[Host, ...],
    limits: Limits,
    *,
    image: str = "",
    network: Network = "bridge",
    owner: str = "",
    lacking: Container[str] = (),
) -> Lab:
    """The lab that these settings ask for on these hosts: on one, its nodes share a bridge, else each host is a node.

    Raises HostError when a host has fewer devices than its nodes ask for, ConfigError for one that is not there; nodes
    of several hosts, some of which are known to be ``lacking`` in that, have no devices there.
    """
    project = settings.text("PROJECT_PATH")
    if network == "bridge":
        hosts = tuple(replace(host, interface=BRIDGED) for host in hosts)
    return Lab(
        name=settings.text("LAB_NAME"),
        directory=directory,
        accelerator=accelerator,
        image=image or settings.text("LAB_IMAGE") or f"labctl/{accelerator}",
        nodes=nodes(settings, accelerator, hosts[0])
        if network == "bridge"
        else tuple(spread(settings, accelerator, hosts, lacking)),
        hosts=hosts,
        network=network,
        owner=owner,
        home=settings.home,
        ssh_port=settings.number("LAB_SSH_PORT"),
        master_port=settings.number("LAB_MASTER_PORT"),
        shm_size=settings.text("LAB_SHM_SIZE"),
        limits=limits,
        memory=settings.text("LAB_MEMORY") or None,
        project_path=project,
        mounts=mounts(settings, directory, project),
        clones=clones(settings),
        environment=environment(settings, project),
        ports=ports(settings, network),
        sshd_log_level=settings.text("LAB_SSHD_LOG_LEVEL"),
        secrets=secrets(settings),
        hidden=hidden(settings),
    )


def ports(settings: Settings, network: Network) -> tuple[tuple[str, int, int], ...]:
    """What the launcher publishes. ConfigError where it has its host's own network, which needs no publishing."""
    found = settings.values["LAB_PORTS"]
    if found.value and network == "host":
        reason = "with several hosts the launcher has its host's own network, where a server's port is the host's port"
        raise found.error(reason, "remove it; the server itself chooses its address")
    return split_ports(found.value)


def nodes(settings: Settings, accelerator: str, host: Host) -> tuple[Node, ...]:
    """The workers, which share the host's devices and cores without overlap."""
    count = settings.number("LAB_NODES") or usual_nodes(settings, accelerator, host)
    slots, shares = share_devices(settings, accelerator, host, count)
    cores = share_cores(host, tuple(tuple(core for device in share for core in device.cpus) for share in shares))
    module = accelerators.get(accelerator)
    return tuple(
        Node(
            name=f"worker-{index}",
            host=host.name,
            slots=slots,
            cpuset=cores[index],
            devices=module.mapping(host, shares[index]),
        )
        for index in range(count)
    )


def usual_nodes(settings: Settings, accelerator: str, host: Host) -> int:
    """How many workers one host has where ``LAB_NODES`` does not say: two, so that ranks meet over ssh, if it can."""
    if accelerator == "cpu":
        return USUAL_NODES
    slots = host.slots or settings.number("LAB_SLOTS") or 1
    return min(USUAL_NODES, max(1, len(chosen_devices(settings, accelerator, host)) // slots))


def spread(settings: Settings, accelerator: str, hosts: tuple[Host, ...], lacking: Container[str]) -> Iterator[Node]:
    """A worker on each host; on those that are lacking it has no devices."""
    for host in hosts:
        if host.name in lacking:
            slots = host.slots or settings.number("LAB_SLOTS") or 1
            yield Node(name=f"worker-{host.number}", host=host.name, slots=slots)
        else:
            yield node_of(settings, accelerator, host)


def node_of(settings: Settings, accelerator: str, host: Host) -> Node:
    """The worker of one of several hosts, with all of its cores and as many of its devices as it has slots."""
    slots, (devices,) = share_devices(settings, accelerator, host, 1)
    mapping = accelerators.get(accelerator).mapping(host, devices)
    return Node(name=f"worker-{host.number}", host=host.name, slots=slots, devices=mapping)


def chosen_devices(settings: Settings, accelerator: str, host: Host) -> tuple[Device, ...]:
    """The host's devices, or those that LAB_DEVICES names, in its order. ConfigError for one that is not there."""
    text = settings.text("LAB_DEVICES")
    if not text:
        return host.devices
    if accelerator == "cpu":
        raise ConfigError("LAB_DEVICES names devices, and a CPU lab has none", hint="leave LAB_DEVICES unset")
    known = {name: device for device in host.devices for name in names_of(device)}
    # Vendors' tools write addresses as 00000000:3B:00.0.
    wanted = [pci.address(name) or name for word in text.split(",") for name in expand(word.strip())]
    for name in wanted:
        if name not in known:
            has = ", ".join(device.id for device in host.devices)
            raise ConfigError(
                f"LAB_DEVICES: {host.name} has no {accelerator} device `{name}`", hint=f"it has {has}; labctl devices"
            )
    return tuple({known[name].path: known[name] for name in wanted}.values())


def names_of(device: Device) -> tuple[str, ...]:
    """What a person may call a device: its id, file, PCI address or uuid, or module as ``module:3``."""
    names = (device.id, device.path, device.path.rpartition("/")[2], device.pci, device.uuid)
    return tuple(filter(None, (*names, device.module and f"module:{device.module}")))


def expand(word: str) -> tuple[str, ...]:
    """``0-3`` as four indices; any other word as itself."""
    ends = span(word)
    return tuple(str(index) for index in range(ends[0], ends[1] + 1)) if ends else (word,)


def share_devices(
    settings: Settings, accelerator: str, host: Host, count: int
) -> tuple[int, tuple[tuple[Device, ...], ...]]:
    """The slots of each of the host's nodes, and the devices of each: its own run of them, in their order."""
    devices = chosen_devices(settings, accelerator, host)
    asked = host.slots or settings.number("LAB_SLOTS")
    if accelerator == "cpu":
        return asked or 1, ((),) * count
    slots = asked or max(1, len(devices) // count)
    if len(devices) < slots * count:
        there, picked = len(host.devices), len(devices)
        few, nodes = picked < there, "1 node" if count == 1 else f"{count} nodes"
        has = f"LAB_DEVICES picks {picked} of {there}" if few else f"{host.name} has {there}"
        raise HostError(
            f"{nodes} with {slots} slot{'s' * (slots > 1)} need{'s' * (count == 1)} {slots * count} {accelerator} "
            f"device{'s' * (slots * count > 1)}, {has}",
            hint=f"lower LAB_NODES or LAB_SLOTS{', or name more in LAB_DEVICES,' if few else ''} in .env",
        )
    return slots, tuple(devices[index * slots : (index + 1) * slots] for index in range(count))


def share_cores(host: Host, near: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Disjoint, nearly equal shares of the cores, for each node those near its devices as far as they go.

    What is near one node fills up no other's share before its own. Where nothing is near, shares run along the NUMA
    nodes. None are set apart where there are more nodes than cores, or one node.
    """
    count = len(near)
    if count == 1 or count > len(host.cpus):
        return ((),) * count
    edges = [round(index * len(host.cpus) / count) for index in range(count + 1)]
    sizes = [end - start for start, end in pairwise(edges)]
    free = [core for numa in host.numa for core in numa] or list(host.cpus)
    shares = []
    for mine, size in zip(near, sizes, strict=True):
        shares.append([core for core in free if core in mine][:size])
        free = [core for core in free if core not in shares[-1]]
    rest = iter(free)
    return tuple(
        tuple(sorted((*share, *islice(rest, size - len(share))))) for share, size in zip(shares, sizes, strict=True)
    )


def mounts(settings: Settings, directory: Path, project: str) -> tuple[Mount, ...]:
    """The cache, clones and results, where the DeepSpeed-Chat scripts expect them; and what shells keep."""
    from labctl.workloads import external

    sources = ((settings.text(clone.setting), clone.repository) for clone in external.CLONES)
    there = (Mount(source=one, target=f"{project}/{name}", read_only=True) for one, name in sources if one)
    return (
        Mount(source=settings.text("HOST_CACHE_PATH"), target=f"{project}/.cache"),
        *there,
        Mount(source=str(directory / "workloads"), target=f"{project}/workloads", read_only=True),
        Mount(source=str(directory / "runs"), target=f"{project}/runs", read_only=True),
        Mount(source=str(directory / naming.NOTEBOOKS), target=f"{project}/{naming.NOTEBOOKS}"),
        Mount(source=str(directory / naming.OUTPUTS), target=f"{project}/outputs"),
        Mount(source=str(directory / KEPT), target="/home/lab/.kept"),
        *settings.mounts,
    )


def clones(settings: Settings) -> Pairs:
    """Those clones that are on this machine, which hosts are sent; others are the hosts' own."""
    from labctl.workloads import external

    paths = ((settings.text(clone.setting), clone.repository) for clone in external.CLONES)
    return tuple((path, f"{naming.CLONES}/{name}") for path, name in paths if path and Path(path).is_dir())


def own_mounts(lab: Lab) -> tuple[str, ...]:
    """Those mount sources of the lab that `labctl up` makes where they are missing."""
    here = {str(lab.directory / name) for name in ("workloads", "runs", naming.NOTEBOOKS, naming.OUTPUTS, KEPT)}
    own = {*here, str(Path.home() / ".cache/labctl")}
    return tuple(mount.source for mount in lab.mounts if mount.source in own)


def environment(settings: Settings, project: str) -> Pairs:
    """What every process in a container sees; the settings' extra environment comes last and wins."""
    common = {
        "PROJECT_PATH": project,
        "HF_HOME": f"{project}/.cache/huggingface",
        "HF_DATASETS_CACHE": f"{project}/.cache/datasets",
        "TORCH_HOME": f"{project}/.cache/torch",
        "KERAS_HOME": f"{project}/.cache/keras",
        "NLTK_DATA": f"{project}/.cache/nltk_data",
        "TFDS_DATA_DIR": f"{project}/.cache/tensorflow_datasets",
        "TORCH_EXTENSIONS_DIR": "/home/lab/.cache/torch_extensions",
        "TRITON_CACHE_DIR": "/home/lab/.cache/triton",
        "TORCHINDUCTOR_CACHE_DIR": "/home/lab/.cache/torchinductor",
        "CUDA_CACHE_PATH": "/home/lab/.cache/cuda",
        "PYTHONUNBUFFERED": "1",
    }
    if settings.secret("HF_TOKEN"):
        common["HF_TOKEN_PATH"] = "/run/secrets/hf_token"  # noqa: S105
    return tuple({**common, **dict(settings.environment)}.items())


def secrets(settings: Settings) -> tuple[tuple[str, Secret], ...]:
    """Files under ``/run/secrets``: the hub's token, and the extra variables whose names say that they are secret."""
    token = settings.secret("HF_TOKEN")
    hidden = shell_exports((*proxies(settings), *settings.secret_environment))
    return tuple((name, value) for name, value in (("hf_token", token), ("environment", hidden)) if value)


def proxies(settings: Settings) -> tuple[tuple[str, Secret], ...]:
    """Proxies in both cases, as secrets: such a URL may hold a password."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    values = [(name, settings.secret(name)) for name in names]
    return tuple((spelt, value) for name, value in values if value for spelt in (name, name.lower()))


def hidden(settings: Settings) -> tuple[Secret, ...]:
    """What no record may show, the longest first, so that one that begins another does not leave its rest."""
    token = settings.secret("HF_TOKEN")
    secret = [*((token,) if token else ()), *dict(settings.secret_environment).values()]
    secret += [value for _, value in proxies(settings) if "@" in value.reveal()]
    values = [value.reveal() for value in secret]
    # A program may print the password of a URL alone, as it was written or as it was meant.
    passwords = [login[1] for value in values if (login := LOGIN.search(value))]
    values += [*passwords, *map(unquote, passwords)]
    lines = {line for value in values for line in (value, *value.splitlines()) if len(line.strip()) >= 4}
    return tuple(Secret(line) for line in sorted(lines, key=len, reverse=True))


def shell_exports(variables: tuple[tuple[str, Secret], ...]) -> Secret:
    """Lines for bash that set these variables, byte for byte."""
    return Secret("".join(f"export {name}={shlex.quote(value.reveal())}\n" for name, value in variables))


def choice(settings: Settings, root: HostPath = ROOT) -> tuple[str | None, str]:
    """The accelerator of a lab with these settings on this host, and why; None if the wanted kind was not found."""
    wanted = settings.text("LAB_ACCELERATOR")
    try:
        chosen = accelerators.choose(wanted, root)
    except HostError as error:
        return None, error.message
    if wanted != "auto":
        return chosen.name, chosen.why
    missed = accelerators.unserved(root) if chosen.name == "cpu" else ()
    return chosen.name, f"auto: {'; '.join((chosen.why, *missed))}"
