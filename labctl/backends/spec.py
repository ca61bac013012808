"""Build the Lab of settings and hosts: its nodes, their share of a host's cores and devices, and mounts."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterator, Mapping
from itertools import chain, islice, pairwise
from pathlib import Path
from urllib.parse import unquote

from msgspec.structs import replace

from labctl import accelerators, naming
from labctl.config.settings import LOGIN, USUAL_NODES, Settings, span, split_ports
from labctl.errors import ConfigError, HostError
from labctl.model import BRIDGED, Device, Host, Lab, Limits, Mount, Network, Node, Pairs, Secret
from labctl.system import human, pci
from labctl.system.hostpath import HostPath
from labctl.system.procfs import ROOT

EVERY = "all"
"""Value of a variable that chooses every device."""
KEPT = ".lab/home"
"""Folder in the lab directory for files of shells and notebooks that outlive `down`, such as histories."""


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
    """Build the lab: nodes on the first host, with network ``host`` one per host. HostError, ConfigError on devices.

    HostError if a host has fewer devices than its nodes need, ConfigError for a device that is not found. Nodes on
    ``lacking`` hosts, which have too few, get none.
    """
    project = settings.text("PROJECT_PATH")
    if network == "bridge":
        hosts = tuple(replace(host, interface=BRIDGED) for host in hosts)
    return Lab(
        name=settings.text("LAB_NAME"),
        directory=directory,
        accelerator=accelerator,
        image=image or image_of(settings, accelerator),
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


def image_of(settings: Settings, accelerator: str) -> str:
    """Return the name of the nodes' image: LAB_IMAGE, else labctl's own for the accelerator."""
    return settings.text("LAB_IMAGE") or f"labctl/{accelerator}"


def ports(settings: Settings, network: Network) -> tuple[tuple[str, int, int], ...]:
    """Return the ports to publish on the host. ConfigError if LAB_PORTS is set and the network is the host's."""
    setting = settings.values["LAB_PORTS"]
    if setting.value and network == "host":
        reason = "with several hosts the launcher has its host's own network, where a server's port is the host's port"
        raise setting.error(reason, "remove it; the server itself chooses its address")
    return split_ports(setting.value)


def nodes(settings: Settings, accelerator: str, host: Host) -> tuple[Node, ...]:
    """Return the workers of one host, each with its own devices and cores. HostError if devices are too few."""
    count = settings.number("LAB_NODES") or usual_nodes(settings, accelerator, host)
    slots, shares = share_devices(settings, accelerator, host, count)
    cores = share_cores(host, tuple(map(_cores_of, shares)))
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


def _cores_of(devices: tuple[Device, ...]) -> tuple[int, ...]:
    """Return the cores near these devices."""
    return tuple(chain.from_iterable(device.cpus for device in devices))


def usual_nodes(settings: Settings, accelerator: str, host: Host) -> int:
    """Return the default number of workers on one host: 2, or 1 if devices do not suffice for two."""
    if accelerator == "cpu":
        return USUAL_NODES
    slots = host.slots or settings.number("LAB_SLOTS") or 1
    return min(USUAL_NODES, max(1, len(chosen_devices(settings, accelerator, host)) // slots))


def spread(settings: Settings, accelerator: str, hosts: tuple[Host, ...], lacking: Container[str]) -> Iterator[Node]:
    """Yield a worker per host; on ``lacking`` hosts it has no devices. HostError if another has too few."""
    for host in hosts:
        if host.name in lacking:
            slots = host.slots or settings.number("LAB_SLOTS") or 1
            yield Node(name=f"worker-{host.number}", host=host.name, slots=slots)
        else:
            yield node_of(settings, accelerator, host)


def node_of(settings: Settings, accelerator: str, host: Host) -> Node:
    """Return the worker of one of several hosts, with a device per slot and all cores. HostError if too few."""
    slots, (devices,) = share_devices(settings, accelerator, host, 1)
    mapping = accelerators.get(accelerator).mapping(host, devices)
    return Node(name=f"worker-{host.number}", host=host.name, slots=slots, devices=mapping)


def chosen_devices(settings: Settings, accelerator: str, host: Host) -> tuple[Device, ...]:
    """Return the host's devices, or those of LAB_DEVICES in that order. ConfigError if one is unknown."""
    text = settings.text("LAB_DEVICES")
    if not text:
        return host.devices
    if accelerator == "cpu":
        raise ConfigError("LAB_DEVICES names devices, and a CPU lab has none", hint="leave LAB_DEVICES unset")
    devices_by_name: dict[str, Device] = {}
    for device in host.devices:
        devices_by_name |= dict.fromkeys(names_of(device), device)
    # By path, as two names may be of the same device.
    chosen: dict[str, Device] = {}
    for entry in chain.from_iterable(expand(word.strip()) for word in text.split(",")):
        # Vendors' tools write addresses as 00000000:3B:00.0.
        name = pci.address(entry) or entry
        if name not in devices_by_name:
            has = ", ".join(device.id for device in host.devices)
            raise ConfigError(
                f"LAB_DEVICES: {host.name} has no {accelerator} device `{name}`", hint=f"it has {has}; labctl devices"
            )
        device = devices_by_name[name]
        chosen[device.path] = device
    return tuple(chosen.values())


def unused_choices(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning per variable of the environment that chooses devices of an accelerator in vain.

    Such a variable numbers the devices of one shell's machine: a lab may have others, and keeps the devices of its
    nodes from `up` on. None for a vendor that LAB_ACCELERATOR rules out, or if a setting of labctl chooses.
    """
    asked = settings.text("LAB_ACCELERATOR")
    set_for_ranks = {name for name, _ in settings.environment}
    if settings.text("LAB_DEVICES"):
        return
    for accelerator, module in accelerators.modules().items():
        if asked not in ("auto", accelerator):
            continue
        for name in module.chosen_by:
            value = environ.get(name, EVERY)
            if value != EVERY and name not in set_for_ranks:
                shown = human.shortened(f"{name}={value}", 80)
                yield f"{shown} of the environment is not used: {_chosen_here(settings, value)}"


def _chosen_here(settings: Settings, value: str) -> str:
    """Return the advice on settings that choose devices as the variable's ``value`` does."""
    if settings.text("LAB_ENGINE") == "kubernetes":
        return "a cluster chooses the devices of a pod; LAB_SLOTS says how many it has"
    if value in ("", "-1", "none", "NoDevFiles"):
        return "LAB_ACCELERATOR=cpu in .env makes a lab without devices"
    # A mask may name tiles of devices, as 0.1; labctl passes whole devices.
    ids = ",".join(dict.fromkeys(word.strip().partition(".")[0] for word in value.split(",")))
    return (
        f"LAB_DEVICES={ids} in .env chooses devices of the lab, as `labctl devices` numbers them; "
        "`run --include worker-0:0,1` chooses slots of a run"
    )


def names_of(device: Device) -> tuple[str, ...]:
    """Return all names by which users may call a device: id, path, file name, PCI address, uuid, module."""
    names = (device.id, device.path, device.path.rpartition("/")[2], device.pci, device.uuid)
    return tuple(filter(None, (*names, device.module and f"module:{device.module}")))


def expand(word: str) -> tuple[str, ...]:
    """Return ``0-3`` as four indices, any other word as itself."""
    ends = span(word)
    return tuple(str(index) for index in range(ends[0], ends[1] + 1)) if ends else (word,)


def share_devices(
    settings: Settings, accelerator: str, host: Host, count: int
) -> tuple[int, tuple[tuple[Device, ...], ...]]:
    """Return slots per node and the devices of each of ``count`` nodes. HostError if there are too few."""
    devices = chosen_devices(settings, accelerator, host)
    asked = host.slots or settings.number("LAB_SLOTS")
    if accelerator == "cpu":
        return asked or 1, ((),) * count
    slots = asked or max(1, len(devices) // count)
    if len(devices) < slots * count:
        present, picked = len(host.devices), len(devices)
        few, nodes = picked < present, human.count(count, "node")
        has = f"LAB_DEVICES picks {picked} of {present}" if few else f"{host.name} has {present}"
        raise HostError(
            f"{nodes} with {human.count(slots, 'slot')} need{'s' * (count == 1)} "
            f"{human.count(slots * count, f'{accelerator} device')}, {has}",
            hint=_fewer(settings, few=few),
        )
    return slots, tuple(devices[index * slots : (index + 1) * slots] for index in range(count))


def _fewer(settings: Settings, *, few: bool) -> str:
    """Return the hint to ask for fewer devices, where that was asked for; ``few``: or to choose more of them."""
    by_flag = [key for key in ("LAB_NODES", "LAB_SLOTS") if settings.origin(key) == "flag"]
    if by_flag:
        return f"lower {' or '.join(by_flag)} of -s"
    return f"lower LAB_NODES or LAB_SLOTS{', or name more in LAB_DEVICES,' if few else ''} in .env"


def share_cores(host: Host, near: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Return disjoint, nearly equal shares of the cores, those near first; all empty for one node or too few cores.

    Cores near the devices of one node go to others only after it has its share. If no cores are near, shares follow the
    NUMA nodes. All shares are empty for one node, or for more nodes than cores.
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
    filled = ((*share, *islice(rest, size - len(share))) for share, size in zip(shares, sizes, strict=True))
    return tuple(tuple(sorted(share)) for share in filled)


def mounts(settings: Settings, directory: Path, project: str) -> tuple[Mount, ...]:
    """Return the mounts of every container: cache, clones, lab folders, shell histories, and the user's."""
    from labctl.workloads import external

    sources = ((settings.text(clone.setting), clone.repository) for clone in external.CLONES)
    mounted = (Mount(source=path, target=f"{project}/{name}", read_only=True) for path, name in sources if path)
    return (
        Mount(source=settings.text("HOST_CACHE_PATH"), target=f"{project}/.cache"),
        *mounted,
        Mount(source=str(directory / "workloads"), target=f"{project}/workloads", read_only=True),
        Mount(source=str(directory / "runs"), target=f"{project}/runs", read_only=True),
        Mount(source=str(directory / naming.NOTEBOOKS), target=f"{project}/{naming.NOTEBOOKS}"),
        Mount(source=str(directory / naming.OUTPUTS), target=f"{project}/outputs"),
        Mount(source=str(directory / KEPT), target="/home/lab/.kept"),
        *settings.mounts,
    )


def clones(settings: Settings) -> Pairs:
    """Return the path of each clone that exists on this machine, with its folder in the lab directory on hosts."""
    from labctl.workloads import external

    paths = ((settings.text(clone.setting), clone.repository) for clone in external.CLONES)
    return tuple((path, f"{naming.CLONES}/{name}") for path, name in paths if path and Path(path).is_dir())


def own_mounts(lab: Lab) -> tuple[str, ...]:
    """Return the mount sources of the lab that `labctl up` creates if missing."""
    here = {str(lab.directory / name) for name in ("workloads", "runs", naming.NOTEBOOKS, naming.OUTPUTS, KEPT)}
    created = {*here, str(Path.home() / ".cache/labctl")}
    return tuple(mount.source for mount in lab.mounts if mount.source in created)


def environment(settings: Settings, project: str) -> Pairs:
    """Return the environment of each process in a container; variables of the settings replace labctl's."""
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
    """Return the files of /run/secrets by name: ``hf_token``, and ``environment`` with shell exports; if set."""
    token = settings.secret("HF_TOKEN")
    hidden = shell_exports((*proxies(settings), *settings.secret_environment))
    return tuple((name, value) for name, value in (("hf_token", token), ("environment", hidden)) if value)


def proxies(settings: Settings) -> tuple[tuple[str, Secret], ...]:
    """Return the set proxies as Secrets, each under its name in upper and lower case."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    values = [(name, settings.secret(name)) for name in names]
    given = [(name, value) for name, value in values if value]
    return tuple(chain.from_iterable(((name, value), (name.lower(), value)) for name, value in given))


def hidden(settings: Settings) -> tuple[Secret, ...]:
    """Return secrets, proxies with logins, their passwords and lines, of 4 characters or more, longest first."""
    token = settings.secret("HF_TOKEN")
    secret = [*((token,) if token else ()), *dict(settings.secret_environment).values()]
    secret += [value for _, value in proxies(settings) if "@" in value.reveal()]
    values = [value.reveal() for value in secret]
    # A program may print the password of a URL by itself, quoted as in the URL or not.
    passwords = [login[1] for value in values if (login := LOGIN.search(value))]
    values += [*passwords, *map(unquote, passwords)]
    texts = {*values, *chain.from_iterable(value.splitlines() for value in values)}
    long_enough = (text for text in texts if len(text.strip()) >= 4)
    return tuple(map(Secret, sorted(long_enough, key=len, reverse=True)))


def shell_exports(variables: tuple[tuple[str, Secret], ...]) -> Secret:
    """Return, as a Secret, lines ``export NAME=VALUE`` for bash, with values quoted."""
    return Secret("".join(f"export {name}={shlex.quote(value.reveal())}\n" for name, value in variables))


def choice(settings: Settings, root: HostPath = ROOT) -> tuple[str | None, str]:
    """Return the accelerator by LAB_ACCELERATOR on this host, None if it is not found, and the reason."""
    setting = settings.text("LAB_ACCELERATOR")
    try:
        chosen = accelerators.choose(setting, root)
    except HostError as error:
        return None, error.message
    if setting != "auto":
        return chosen.name, chosen.why
    missed = accelerators.unserved(root) if chosen.name == "cpu" else ()
    return chosen.name, f"auto: {'; '.join((chosen.why, *missed))}"
