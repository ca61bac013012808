"""The hosts of a lab: this machine, or the inventory's hosts, connected over ssh for the time of a command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from labctl import accelerators, naming
from labctl.backends.docker.agent import EarlyReach, begin_reach
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.engine import Capabilities, Engine
from labctl.backends.docker.hosts.ssh import Connection, LocalConnection, SshConnection, connected
from labctl.backends.docker.multi import MultiHostEngine
from labctl.backends.owner import owner
from labctl.backends.state import ObservedState
from labctl.config import inventory
from labctl.config.context import BY_WORKLOAD, Context
from labctl.config.inventory import InventoryHost
from labctl.config.settings import USUAL_NODES, Settings
from labctl.errors import ConfigError, HostError, LabError, on_host, raise_all
from labctl.model import HERE, LAUNCHER, Host, Lab, Network
from labctl.system import files, hostdump
from labctl.system.cached import once
from labctl.system.hostpath import HostPath
from labctl.system.parallel import map_hosts

if TYPE_CHECKING:
    from labctl.system import routing

# Timeouts in seconds of a host, and of its daemon.
REACHING = 20
ANSWERING = 20
THIS_MACHINE = (InventoryHost(name=HERE),)
"""The inventory of a lab on this machine."""
FACTS = ".lab/facts"
"""Folder of the hosts' last reports, in the lab directory. They stand in for unreachable hosts, so that nothing changes
for the others."""
FILES = ".labctl"
"""Folder of labs' files on a host, in the user's home directory."""

T = TypeVar("T")


class DetectedHardware(Struct, frozen=True, kw_only=True):
    """The hosts as examined; ``lacking`` are errors of hosts that do not have what their nodes need."""

    accelerator: str
    hosts: tuple[Host, ...]
    lacking: Mapping[str, HostError] = field(default_factory=dict)


class Cluster(Struct, frozen=True, kw_only=True, dict=True):
    """The hosts of a lab, connected. This machine is a cluster of a single host, named ``HERE``."""

    settings: Settings
    directory: Path
    engine: Engine
    inventory: tuple[InventoryHost, ...] = THIS_MACHINE
    """All hosts of the lab, in order, unreachable hosts included."""
    daemons: Mapping[str, DockerEngine] = field(default_factory=dict)
    """Docker daemons of the hosts that answer, for images and doctor; empty for another backend."""
    connections: Mapping[str, Connection] = field(default_factory=lambda: {HERE: LocalConnection()})
    dumps: Mapping[str, hostdump.HostDump] = field(default_factory=dict)
    """Report per host; for an unreachable host the last report."""
    failed: Mapping[str, HostError] = field(default_factory=dict)
    """Errors of hosts that do not answer or are unusable."""
    unplaced: bool = False
    """True to examine what was reached although the first host, with the launcher, never was."""

    @property
    def network(self) -> Network:
        return "host" if len(self.inventory) > 1 else "bridge"

    @property
    def shares_files(self) -> bool:
        """Tell if the hosts see the lab directory itself, so that nothing is pushed to them."""
        return self.inventory == THIS_MACHINE or bool(self.settings.text("LAB_SHARED_DIR"))

    @property
    def remote_hosts(self) -> dict[str, Connection]:
        """Connections to other machines whose engines answer."""
        return {name: self.connections[name] for name in self.engine.hosts if name != HERE}

    @property
    def sent(self) -> dict[str, str]:
        """Directories of the lab's pushed files on the hosts that answer; empty if the hosts share them."""
        return {} if self.shares_files else {host: self.sent_to(host) for host in self.engine.hosts}

    def sent_to(self, host: str, name: str = "") -> str:
        """Return the directory of the lab's pushed files on a host; empty if the host shares the lab directory.

        ``name`` is the host's name at the time of the push, if it changed. Hosts may share a home directory: each has
        its own directory in it.
        """
        if self.shares_files:
            return ""
        return f"{self.dumps[host].home}/{FILES}/{self.settings.text('LAB_NAME')}.{name or host}"

    def root(self, host: str) -> HostPath:
        """Return a host's root directory as its report has it, to read /proc, /sys and /etc; else this machine's."""
        from labctl.system.procfs import ROOT

        return self.dumps[host].root if host in self.dumps else ROOT

    @property
    def placement(self) -> dict[str, str]:
        """Host of each container that the settings ask for."""
        return placement(self.settings, self.inventory)

    def begin_reach(self, observed: ObservedState) -> EarlyReach | None:
        """Start to ask sshd of the workers from the launcher; return None if one is not running, or too many."""
        workers = tuple(name for name, host in self.placement.items() if name != LAUNCHER and host in self.engine.hosts)
        launcher, containers = observed.container(LAUNCHER), map(observed.container, workers)
        running = all(container and container.state == "running" for container in (launcher, *containers))
        return begin_reach(self.engine, launcher.name, workers) if launcher and running else None

    @once
    def facts(self) -> dict[str, hostdump.HostFacts]:
        """User, clock skew, free space and ports of each host that ssh reaches, by name. HostError if invalid."""
        return {
            name: self.dumps[name].facts_at(connection.output_at)
            for name, connection in self.connections.items()
            if isinstance(connection, SshConnection)
        }

    @once
    def _hardware(self) -> DetectedHardware:
        return detect_hardware(self)

    @property
    def accelerator(self) -> str:
        """Accelerator of the hosts. Errors as ``detect_hardware``."""
        return self._hardware.accelerator

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts as examined, without hosts that were never reached. Errors as ``detect_hardware``."""
        return self._hardware.hosts

    @once
    def image(self) -> str:
        """Image of the lab's nodes: the base image, or the image with the settings' additions."""
        from labctl.backends.docker.images import packages

        return packages.tag(self.base_image, packages.of(self.settings))

    @property
    def base_image(self) -> str:
        """The user's image, or labctl's own for the accelerator: that of the workload's name, or the plain one."""
        return base_image(self.settings, lambda: self.accelerator)

    def with_usable_hosts(self) -> Cluster:
        """Return a copy without the hosts that lack what their nodes need. HostError if none is left."""
        return self.excluding({name: why for name, why in self._hardware.lacking.items() if name not in self.failed})

    def excluding(self, failed: Mapping[str, HostError]) -> Cluster:
        """Return a copy without these failed hosts, itself if there are none. HostError if no host is left."""
        if not failed:
            return self
        daemons = {name: daemon for name, daemon in self.daemons.items() if name not in failed}
        if not daemons:
            raise_all({**self.failed, **failed})
        engine = engine_of(self.settings, self.inventory, daemons)
        return replace(self, engine=engine, daemons=daemons, failed={**self.failed, **failed})

    def capabilities(self, host: Host) -> Capabilities | None:
        """Return the capabilities of the host's engine; None if it did not answer."""
        return self.engine.capabilities(host.name) if host.name in self.engine.hosts else None

    def map_engines(self, ask: Callable[[Host, Capabilities], T]) -> tuple[dict[str, T], Cluster]:
        """Call ``ask`` for all engines at once; return answers by host, and a copy without failed hosts."""

        def work(host: Host) -> T:
            with on_host(host.name):
                return ask(host, self.engine.capabilities(host.name))

        done, failed = map_hosts(work, {host.name: host for host in self.hosts if self.capabilities(host)})
        return done, self.excluding(failed)

    def lab(self, hosts: tuple[Host, ...]) -> Lab:
        """Build the lab on these hosts, with the limits that they are known to grant and the user's override."""
        from labctl.backends import spec
        from labctl.backends.docker.lab import capabilities
        from labctl.config import override

        lab = spec.build(
            self.settings,
            self.directory,
            self.accelerator,
            hosts,
            capabilities.granted(self.settings, self.directory, [host.name for host in hosts]),
            image=self.image,
            network=self.network,
            owner=owner(),
            lacking=self._hardware.lacking,
        )
        return replace(lab, override=override.read(self.directory, lab.containers))


@contextmanager
def connect(
    context: Context,
    settings: Settings,
    only: tuple[str, ...] = (),
    *,
    seconds: int = ANSWERING,
    demand: bool = True,
    drained: bool = False,
) -> Iterator[Cluster]:
    """Yield the hosts, or ``only`` some, connected; save their reports. With ``demand`` HostError if none answers.

    Daemons have ``seconds`` for an answer. Drained hosts are included only if ``drained``. ConfigError if two hosts are
    the same machine.
    """
    every = read_inventory(context.directory, settings, drained=drained)
    if every == THIS_MACHINE:
        engine = backend_here(seconds)
        docker = {HERE: engine} if isinstance(engine, DockerEngine) else {}
        yield Cluster(settings=settings, directory=context.directory, engine=engine, daemons=docker)
        return
    from labctl.backends.docker.hosts import facts

    chosen = tuple(target for target in every if not only or target.name in only)
    with connected(chosen, facts.script(), seconds=REACHING, waits=context.waits) as (reached, unreached):
        dumps, invalid = map_hosts(lambda connection: hostdump.read(connection.output, connection.target.name), reached)
        connections = {name: reached[name] for name in dumps}
        daemons = {name: DockerEngine(connection, seconds=seconds) for name, connection in connections.items()}
        ids, silent = map_hosts(DockerEngine.identity, daemons)
        facts.require_distinct(chosen, dumps, ids)
        failed = {**unreached, **invalid, **silent}
        if demand and len(failed) == len(chosen):
            raise_all(failed)
        for name, connection in connections.items():
            files.write(context.directory / FACTS / name, connection.output)
        answering = {name: daemon for name, daemon in daemons.items() if name not in failed}
        yield Cluster(
            settings=settings,
            directory=context.directory,
            engine=engine_of(settings, every, answering),
            daemons=answering,
            inventory=every,
            connections=connections,
            dumps={**_last_dumps(context.directory, every), **dumps},
            failed=failed,
        )


def read_inventory(directory: Path, settings: Settings, *, drained: bool = False) -> tuple[InventoryHost, ...]:
    """Return the hosts of LAB_HOSTS, or this machine; drained ones if ``drained``. ConfigError if none is left."""
    name = settings.text("LAB_HOSTS")
    if not name:
        return THIS_MACHINE
    listed = inventory.read(directory / Path(name).expanduser(), name)
    if drained:
        return listed
    used, _ = inventory.in_use(directory, listed)
    if not used:
        raise ConfigError(f"all hosts of {name} are drained", hint=f"take one off {directory / inventory.DRAINED}")
    return used


def backend_here(seconds: int) -> Engine:
    """Return the engine of a lab without an inventory: this machine's Docker daemon."""
    return DockerEngine(seconds=seconds)


def base_image(settings: Settings, detect: Callable[[], str]) -> str:
    """Return LAB_IMAGE if the user set it, else labctl's image for the accelerator and the workload's image.

    If a workload names an image, labctl's variant of it for the accelerator. ``detect`` returns the hosts' accelerator;
    it is called only if the settings do not name one.
    """
    from labctl.backends.docker.images import catalog

    image, configured = settings.text("LAB_IMAGE"), settings.text("LAB_ACCELERATOR")
    if image and not settings.origin("LAB_IMAGE").startswith(BY_WORKLOAD):
        return image
    accelerator = detect() if configured == "auto" else configured
    name = catalog.name_of(image) or accelerator
    return catalog.tag(dict(accelerators.get(accelerator).images).get(name, name))


def placement(settings: Settings, hosts: tuple[InventoryHost, ...]) -> dict[str, str]:
    """Return each container's host: a worker per host, or LAB_NODES on a single host; the launcher on the first."""
    names = [host.name for host in hosts]
    if len(names) == 1:
        # Possibly more than the host has devices for, which are not known yet.
        names *= settings.number("LAB_NODES") or USUAL_NODES
    return {LAUNCHER: names[0], **{f"worker-{number}": name for number, name in enumerate(names)}}


def engine_of(settings: Settings, hosts: tuple[InventoryHost, ...], daemons: Mapping[str, Engine]) -> MultiHostEngine:
    """Return one engine for the hosts' daemons, which knows the host of each container by the settings."""
    name = settings.text("LAB_NAME")
    places = {naming.container_of(name, node): host for node, host in placement(settings, hosts).items()}
    return MultiHostEngine(daemons, places)


def last_dump(directory: Path, host: str) -> hostdump.HostDump | None:
    """Return the host's last report, from the lab directory; None if missing or invalid."""

    try:
        return hostdump.read((directory / FACTS / host).read_text(encoding="utf-8"), host)
    except (OSError, HostError):
        return None


def _last_dumps(directory: Path, hosts: tuple[InventoryHost, ...]) -> dict[str, hostdump.HostDump]:
    """Return the last report of each host that was ever reached."""
    dumps = {host.name: last_dump(directory, host.name) for host in hosts}
    return {name: dump for name, dump in dumps.items() if dump}


def detect_hardware(cluster: Cluster) -> DetectedHardware:
    """Return the accelerator, the hosts, and errors of those that lack what a node needs; HostError if all do.

    Hosts that were never reached are left out. HostError if the first host is, which has the launcher, unless the
    cluster is ``unplaced``. If all hosts lack the devices that the settings ask for, the settings are wrong: raises
    the first host's error.
    """
    from labctl import accelerators
    from labctl.backends import spec

    accelerator = cluster.settings.text("LAB_ACCELERATOR")
    require_shared(cluster)
    reported = [(number, host) for number, host in enumerate(cluster.inventory) if host.name in (HERE, *cluster.dumps)]
    endpoints = endpoints_of(cluster, [target for _, target in reported])
    hosts: list[Host] = []
    lacking: dict[str, LabError] = {}
    if not reported or reported[0][0] != 0:
        first = cluster.inventory[0].name
        if not (reported and cluster.unplaced):
            raise cluster.failed[first]
        hosts.append(Host(name=first, cpus=(0,), memory=0, mtu=0, uid=0, gid=0))
        lacking[first] = cluster.failed[first]
    for number, target in reported:
        dump = cluster.dumps.get(target.name)
        try:
            accelerator, observed = observe(accelerator, dump)
        except HostError as error:
            lacking[target.name] = error
            _, observed = observe(accelerators.CPU, dump)
        host = _placed(observed, number, target, cluster, endpoints.get(target.name))
        if cluster.network == "host" and target.name not in lacking:
            try:
                spec.node_of(cluster.settings, accelerator, host)
            except LabError as error:
                lacking[target.name] = error
        hosts.append(host)
    if len(lacking) == len(hosts):
        raise next(iter(lacking.values()))
    errors = {name: HostError(f"{name}: {why.message}", hint=why.hint, node=name) for name, why in lacking.items()}
    return DetectedHardware(accelerator=accelerator, hosts=tuple(hosts), lacking=errors)


def _placed(
    host: Host, number: int, target: InventoryHost, cluster: Cluster, endpoint: routing.Endpoint | None
) -> Host:
    """Return the host with its number, slots, address, interface and directory in the lab."""
    return replace(
        host,
        number=number,
        slots=target.slots,
        address=endpoint.address if endpoint else "",
        interface=endpoint.interface if endpoint else host.interface,
        directory=cluster.sent_to(target.name),
    )


def observe(setting: str, dump: hostdump.HostDump | None) -> tuple[str, Host]:
    """Return accelerator and host of a report, or of this machine if None. HostError if ``setting`` is not there."""
    from labctl import accelerators

    if dump is None:
        return accelerators.observe(setting)
    try:
        with hostdump.valid(dump.host):
            accelerator, host = accelerators.observe(setting, dump.root)
            uid, _, gid = dump.user
            return accelerator, replace(host, name=dump.host, home=dump.home, uid=uid, gid=gid)
    except HostError as error:
        raise HostError(error.message, hint=error.hint, node=dump.host) from error


def endpoints_of(cluster: Cluster, hosts: list[InventoryHost]) -> dict[str, routing.Endpoint]:
    """Return interface and address of each host by name, on the hosts' network; {} on a bridge."""
    if cluster.network == "bridge":
        return {}
    from labctl.system import routing

    members = [
        routing.ClusterMember(
            name=host.name, network=cluster.dumps[host.name].network, iface=host.iface, where=host.where
        )
        for host in hosts
    ]
    return dict(zip((host.name for host in hosts), routing.endpoints(members), strict=True))


def require_shared(cluster: Cluster) -> None:
    """Raise ConfigError if LAB_SHARED_DIR is set, the lab has other hosts, and is not below that directory."""
    shared = cluster.settings.text("LAB_SHARED_DIR")
    if shared and cluster.inventory != THIS_MACHINE and not cluster.directory.is_relative_to(shared):
        raise ConfigError(
            f"LAB_SHARED_DIR is {shared}, and the lab is in {cluster.directory}, which the hosts do not see",
            hint=f"move the lab below {shared}, or unset LAB_SHARED_DIR in .env: then its files are sent",
        )


def load_lab(context: Context, cluster: Cluster, *, ask: bool = True, refresh: bool = False) -> tuple[Lab, Cluster]:
    """Probe engines if ``ask``, warn of refused limits; return the lab, and the cluster without failed hosts.

    The engines are probed in parallel, unless cached results are enough (``ask=False``); with ``refresh`` the way to
    request devices is probed again, for doctor.
    """
    from labctl.backends.docker.lab import capabilities, device_requests

    cluster = cluster.with_usable_hosts()
    settings, directory = cluster.settings, cluster.directory
    hosts = {host.name: device_requests.remembered(host, directory) for host in cluster.hosts}
    refused: Mapping[str, tuple[str, ...]] = {}
    if ask:

        def resolve(host: Host, engine: Capabilities) -> Host:
            """Return the host with its way to request devices, probed or cached. HostError if none works."""
            request = settings, cluster.accelerator, host, directory, cluster.image, engine
            return device_requests.resolve_device_request(*request, refresh=refresh, root=cluster.root(host.name))

        resolved, cluster = cluster.map_engines(resolve)
        hosts |= resolved
        refused, cluster = cluster.map_engines(
            lambda host, engine: capabilities.probe(settings, directory, cluster.image, host.name, engine)
        )
    lab = cluster.lab(tuple(hosts.values()))
    if ask and capabilities.lacks_files(lab):
        _, cluster = cluster.map_engines(lambda host, engine: capabilities.ask_files(lab, host.name, engine))
    lab = capabilities.with_files(lab)
    for name, limits in refused.items():
        who, needs = "this host" if name == HERE else name, capabilities.needs(lab, lab.host(name))
        for limit in sorted(needs.keys() & limits):
            context.warn(f"{who} cannot raise {limit} for a container: {needs[limit]}; labctl doctor has the remedy")
    return lab, cluster


def preview_lab(cluster: Cluster) -> tuple[Lab, Cluster]:
    """Return the lab as `up` would make it, without probes, and the cluster without unusable hosts.

    No engine needs to answer.
    """
    from labctl import accelerators
    from labctl.backends.docker.lab import capabilities, device_requests

    cluster = cluster.with_usable_hosts()
    hosts = cluster.hosts
    if accelerators.get(cluster.accelerator).engine.is_open:

        def preview(host: Host) -> Host:
            """Return the host with the predicted way to request devices."""
            asked = cluster.settings, cluster.accelerator, host, cluster.directory, cluster.capabilities(host)
            request, _ = device_requests.foreseen(*asked, cluster.root(host.name))
            return replace(host, request=request)

        previewed, _ = map_hosts(preview, {host.name: host for host in hosts})
        hosts = tuple(previewed.values())
    return capabilities.with_files(cluster.lab(hosts)), cluster
