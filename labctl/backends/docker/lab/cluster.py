"""The hosts of a lab: this machine, or those of the inventory, reached over ssh for the time of one command."""

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
from labctl.backends.docker.engine import Backend, Capabilities
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
from labctl.system import files
from labctl.system.cached import once
from labctl.system.hostpath import HostPath
from labctl.system.parallel import map_hosts

if TYPE_CHECKING:
    from labctl.backends.docker.hosts import facts
    from labctl.system import routing

# Seconds in which a host, and then its daemon, answers.
REACHING = 20
ANSWERING = 20
THIS_MACHINE = (InventoryHost(name=HERE),)
"""The inventory of a lab on this machine."""
FACTS = ".lab/facts"
"""What hosts reported when they were last reached, in the lab directory: used for those that do not answer, so that
nothing changes for the others."""
FILES = ".labctl"
"""Where a lab's files are on a host, in the user's home directory there."""

T = TypeVar("T")


class DetectedHardware(Struct, frozen=True, kw_only=True):
    """The hosts as they were found, and those that lack what their nodes ask for."""

    accelerator: str
    hosts: tuple[Host, ...]
    lacking: Mapping[str, HostError] = field(default_factory=dict)


class Cluster(Struct, frozen=True, kw_only=True, dict=True):
    """The hosts of a lab, connected. This machine is a cluster of one host, named ``HERE``."""

    settings: Settings
    directory: Path
    engine: Backend
    inventory: tuple[InventoryHost, ...] = THIS_MACHINE
    """All hosts of the lab, in order, also those that do not answer."""
    daemons: Mapping[str, DockerEngine] = field(default_factory=dict)
    """The Docker daemons of the hosts that answer, for images and doctor; none where the backend is another."""
    connections: Mapping[str, Connection] = field(default_factory=lambda: {HERE: LocalConnection()})
    dumps: Mapping[str, facts.HostDump] = field(default_factory=dict)
    """What each host reported, those that do not answer when they were last reached."""
    failed: Mapping[str, HostError] = field(default_factory=dict)
    """The hosts that do not answer or cannot take part."""

    @property
    def network(self) -> Network:
        return "host" if len(self.inventory) > 1 else "bridge"

    @property
    def shares_files(self) -> bool:
        """Whether the hosts see the lab directory itself, so that nothing is pushed to them."""
        return self.inventory == THIS_MACHINE or bool(self.settings.text("LAB_SHARED_DIR"))

    @property
    def remote_hosts(self) -> dict[str, Connection]:
        """The connections to other machines whose engines answer."""
        return {name: self.connections[name] for name in self.engine.hosts if name != HERE}

    @property
    def sent(self) -> dict[str, str]:
        """Where the lab's files are on the hosts that answer, as far as they are pushed."""
        return {} if self.shares_files else {host: self.sent_to(host) for host in self.engine.hosts}

    def sent_to(self, host: str, name: str = "") -> str:
        """Where the lab's files are on a host, of this name when they were pushed; empty where it shares them.

        Hosts may share a home directory: each has a directory of its own in it.
        """
        if self.shares_files:
            return ""
        return f"{self.dumps[host].home}/{FILES}/{self.settings.text('LAB_NAME')}.{name or host}"

    def root(self, host: str) -> HostPath:
        """The host's root directory, to read its /proc, /sys and /etc."""
        from labctl.system.procfs import ROOT

        return self.dumps[host].root if host in self.dumps else ROOT

    @property
    def placement(self) -> dict[str, str]:
        """The containers that the settings ask for, and the host of each."""
        return placement(self.settings, self.inventory)

    def begin_reach(self, observed: ObservedState) -> EarlyReach | None:
        """The check over ssh of the workers that the settings ask for, begun; None where one of them is not running."""
        workers = tuple(name for name, host in self.placement.items() if name != LAUNCHER and host in self.engine.hosts)
        return begin_reach(self.engine, observed, workers)

    @once
    def facts(self) -> dict[str, facts.HostFacts]:
        """What else is known of the hosts that ssh reaches."""
        reached = {name: one for name, one in self.connections.items() if isinstance(one, SshConnection)}
        return {name: self.dumps[name].facts_at(one.output_at) for name, one in reached.items()}

    @once
    def _hardware(self) -> DetectedHardware:
        return detect_hardware(self)

    @property
    def accelerator(self) -> str:
        """What the hosts have. Errors as ``detect_hardware``."""
        return self._hardware.accelerator

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts as they were found, less those that were never reached. Errors as ``detect_hardware``."""
        return self._hardware.hosts

    @once
    def image(self) -> str:
        """The image of the lab's nodes: the base image, or the one with what the settings add to it."""
        from labctl.backends.docker.images import packages

        return packages.tag(self.base_image, packages.of(self.settings))

    @property
    def base_image(self) -> str:
        """The image asked for, or labctl's own for the accelerator."""
        return base_image(self.settings, lambda: self.accelerator)

    def with_usable_hosts(self) -> Cluster:
        """A copy without the hosts that lack what their nodes ask for. Errors as ``detect_hardware``."""
        return self.excluding({name: why for name, why in self._hardware.lacking.items() if name not in self.failed})

    def excluding(self, failed: Mapping[str, HostError]) -> Cluster:
        """A copy without the failed hosts. HostError where none is left."""
        if not failed:
            return self
        left = {name: daemon for name, daemon in self.daemons.items() if name not in failed}
        if not left:
            raise_all({**self.failed, **failed})
        engine = engine_of(self.settings, self.inventory, left)
        return replace(self, engine=engine, daemons=left, failed={**self.failed, **failed})

    def capabilities(self, host: Host) -> Capabilities | None:
        """What the host's engine has and can do; None where it did not answer."""
        return self.engine.capabilities(host.name) if host.name in self.engine.hosts else None

    def map_engines(self, ask: Callable[[Host, Capabilities], T]) -> tuple[dict[str, T], Cluster]:
        """Ask all engines at once: the answers by host, and a copy without the hosts where that failed."""

        def work(host: Host) -> T:
            with on_host(host.name):
                return ask(host, self.engine.capabilities(host.name))

        done, failed = map_hosts(work, {host.name: host for host in self.hosts if self.capabilities(host)})
        return done, self.excluding(failed)

    def lab(self, hosts: tuple[Host, ...]) -> Lab:
        """The lab on these hosts, with the limits that they are known to grant."""
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
    """The lab's hosts, or ``only`` some, for the time of the block; daemons have so many seconds for an answer.

    Those that are drained are left out unless they are asked for, too. HostError where no host answers, if one has to
    (``demand``); ConfigError where two of them are one machine.
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
        dumps, invalid = map_hosts(lambda one: facts.read(one.output, one.target.name), reached)
        connections = {name: reached[name] for name in dumps}
        daemons = {name: DockerEngine(connection, seconds=seconds) for name, connection in connections.items()}
        ids, silent = map_hosts(DockerEngine.identity, daemons)
        facts.require_distinct(chosen, dumps, ids)
        failed = {**unreached, **invalid, **silent}
        if demand and len(failed) == len(chosen):
            raise_all(failed)
        for name, connection in connections.items():
            files.write(context.directory / FACTS / name, connection.output)
        last = {target.name: last_dump(context.directory, target.name) for target in every}
        answering = {name: daemon for name, daemon in daemons.items() if name not in failed}
        yield Cluster(
            settings=settings,
            directory=context.directory,
            engine=engine_of(settings, every, answering),
            daemons=answering,
            inventory=every,
            connections=connections,
            dumps={**{name: dump for name, dump in last.items() if dump}, **dumps},
            failed=failed,
        )


def read_inventory(directory: Path, settings: Settings, *, drained: bool = False) -> tuple[InventoryHost, ...]:
    """The hosts that the settings list, or this machine; those that are drained only where they are asked for."""
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


def backend_here(seconds: int) -> Backend:
    """What runs a lab that lists no hosts: this machine's Docker daemon."""
    return DockerEngine(seconds=seconds)


def base_image(settings: Settings, detect: Callable[[], str]) -> str:
    """The image that a person names; else labctl's own for the accelerator, or what it has of the one a workload needs.

    ``detect`` is asked where the settings do not say which accelerator the hosts have.
    """
    from labctl.backends.docker.images import catalog

    named, wanted = settings.text("LAB_IMAGE"), settings.text("LAB_ACCELERATOR")
    if named and not settings.origin("LAB_IMAGE").startswith(BY_WORKLOAD):
        return named
    accelerator = detect() if wanted == "auto" else wanted
    own = catalog.name_of(named) or accelerator
    return catalog.tag(dict(accelerators.get(accelerator).images).get(own, own))


def placement(settings: Settings, hosts: tuple[InventoryHost, ...]) -> dict[str, str]:
    """The containers that the settings ask for, by name, and the host of each."""
    names = [host.name for host in hosts]
    if len(names) == 1:
        # More than there are, perhaps: that is known once its devices are.
        names *= settings.number("LAB_NODES") or USUAL_NODES
    return {LAUNCHER: names[0], **{f"worker-{number}": name for number, name in enumerate(names)}}


def engine_of(settings: Settings, hosts: tuple[InventoryHost, ...], daemons: Mapping[str, Backend]) -> MultiHostEngine:
    """These daemons as one engine."""
    name = settings.text("LAB_NAME")
    places = {naming.container_of(name, node): host for node, host in placement(settings, hosts).items()}
    return MultiHostEngine(daemons, places)


def last_dump(directory: Path, host: str) -> facts.HostDump | None:
    """What a host reported when it was last reached; None where it never was."""
    from labctl.backends.docker.hosts import facts

    try:
        return facts.read((directory / FACTS / host).read_text(encoding="utf-8"), host)
    except (OSError, HostError):
        return None


def detect_hardware(cluster: Cluster) -> DetectedHardware:
    """The accelerator, which all hosts must have, and the hosts as they were found.

    A host that was never reached is left out. HostError where that is the first one, which has the launcher. Where
    all of them lack the devices that the settings ask for, the settings are wrong: the error is that of the first.
    """
    from labctl import accelerators
    from labctl.backends import spec

    accelerator = cluster.settings.text("LAB_ACCELERATOR")
    require_shared(cluster)
    known = [one for one in enumerate(cluster.inventory) if one[1].name in (HERE, *cluster.dumps)]
    if not known or known[0][0] != 0:
        raise cluster.failed[cluster.inventory[0].name]
    endpoints = endpoints_of(cluster, [target for _, target in known])
    hosts: list[Host] = []
    lacking: dict[str, LabError] = {}
    for number, target in known:
        dump = cluster.dumps.get(target.name)
        try:
            accelerator, host = observe(accelerator, dump)
        except HostError as error:
            lacking[target.name] = error
            _, host = observe(accelerators.CPU, dump)
        endpoint = endpoints.get(target.name)
        host = replace(
            host,
            number=number,
            slots=target.slots,
            address=endpoint.address if endpoint else "",
            interface=endpoint.interface if endpoint else host.interface,
            directory=cluster.sent_to(target.name),
        )
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


def observe(wanted: str, dump: facts.HostDump | None) -> tuple[str, Host]:
    """The accelerator, and the host that reported this or else this machine.

    HostError where it has no device of the wanted kind.
    """
    from labctl import accelerators
    from labctl.backends.docker.hosts import facts

    if dump is None:
        return accelerators.observe(wanted)
    try:
        with facts.valid(dump.host):
            accelerator, host = accelerators.observe(wanted, dump.root)
            uid, _, gid = dump.user
            return accelerator, replace(host, name=dump.host, home=dump.home, uid=uid, gid=gid)
    except HostError as error:
        raise HostError(error.message, hint=error.hint, node=dump.host) from error


def endpoints_of(cluster: Cluster, hosts: list[InventoryHost]) -> dict[str, routing.Endpoint]:
    """How several hosts reach each other, by name; a host alone needs nothing."""
    if cluster.network == "bridge":
        return {}
    from labctl.system import routing

    members = [
        routing.ClusterMember(name=one.name, network=cluster.dumps[one.name].network, iface=one.iface, where=one.where)
        for one in hosts
    ]
    return dict(zip((one.name for one in hosts), routing.endpoints(members), strict=True))


def require_shared(cluster: Cluster) -> None:
    """ConfigError where the lab is not in the directory that the hosts are said to share."""
    shared = cluster.settings.text("LAB_SHARED_DIR")
    if shared and cluster.inventory != THIS_MACHINE and not cluster.directory.is_relative_to(shared):
        raise ConfigError(
            f"LAB_SHARED_DIR is {shared}, and the lab is in {cluster.directory}, which the hosts do not see",
            hint=f"move the lab below {shared}, or unset LAB_SHARED_DIR in .env: then its files are sent",
        )


def load_lab(context: Context, cluster: Cluster, *, ask: bool = True, refresh: bool = False) -> tuple[Lab, Cluster]:
    """The lab that the settings describe, on its hosts as they are; and the cluster without failed hosts.

    The engines are asked what they can do, all at once, unless what was found out before is enough (``ask``); what an
    earlier probe said of devices is probed again (``refresh``) for doctor.
    """
    from labctl.backends.docker.lab import capabilities, device_requests

    cluster = cluster.with_usable_hosts()
    settings, directory = cluster.settings, cluster.directory
    hosts = {host.name: device_requests.remembered(host, directory) for host in cluster.hosts}
    if ask:

        def resolve(host: Host, engine: Capabilities) -> Host:
            asked = settings, cluster.accelerator, host, directory, cluster.image, engine
            return device_requests.resolve_device_request(*asked, refresh=refresh, root=cluster.root(host.name))

        resolved, cluster = cluster.map_engines(resolve)
        hosts |= resolved
        refused, cluster = cluster.map_engines(
            lambda host, engine: capabilities.probe(settings, directory, cluster.image, host.name, engine)
        )
        for name, limits in refused.items():
            if limits:
                who = "this host" if name == HERE else name
                context.warn(f"{who} cannot raise {', '.join(limits)} for a container: its own limit stays in force")
    lab = cluster.lab(tuple(hosts.values()))
    if ask and capabilities.lacks_files(lab):
        _, cluster = cluster.map_engines(lambda host, engine: capabilities.ask_files(lab, host.name, engine))
    return capabilities.with_files(lab), cluster


def preview_lab(cluster: Cluster) -> tuple[Lab, Cluster]:
    """The lab as `up` would make it, as far as is known without a probe, and the cluster as ``load_lab``.

    No engine needs to answer.
    """
    from labctl import accelerators
    from labctl.backends.docker.lab import capabilities, device_requests

    cluster = cluster.with_usable_hosts()
    hosts = cluster.hosts
    if accelerators.get(cluster.accelerator).engine.is_open:

        def preview(host: Host) -> Host:
            asked = cluster.settings, cluster.accelerator, host, cluster.directory, cluster.capabilities(host)
            request, _ = device_requests.foreseen(*asked, cluster.root(host.name))
            return replace(host, request=request)

        previewed, _ = map_hosts(preview, {host.name: host for host in hosts})
        hosts = tuple(previewed.values())
    return capabilities.with_files(cluster.lab(hosts)), cluster
