"""The hosts of a lab: this machine, or those that the settings list, reached over ssh for the time of one command."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from labctl import accelerators, naming
from labctl.accelerators import detect
from labctl.config import inventory
from labctl.config.context import Context
from labctl.config.inventory import InventoryHost
from labctl.config.settings import Settings
from labctl.engines import Backend, Capabilities
from labctl.engines.docker import DockerEngine
from labctl.engines.multi import MultiHostEngine
from labctl.errors import ConfigError, HostError, LabError, on_host, raise_all
from labctl.hosts import facts as survey
from labctl.hosts.ssh import Connection, connected
from labctl.images import catalog
from labctl.lab import capabilities, device_requests, spec
from labctl.model import HERE, LAUNCHER, Accelerator, Host, Lab, Limits, Network
from labctl.system import files, routing
from labctl.system.cached import once
from labctl.system.parallel import attempt

# Seconds in which a host, and then its daemon, answers.
REACHING = 20
ANSWERING = 20
TOLD = ".lab/told"
"""What hosts told of themselves when they were last reached, relative to the lab directory: one that does not answer
stays what it was, so that nothing changes for the others."""
FILES = ".labctl"
"""Where a lab's files lie on a host, below the person's home there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was found on the hosts, and what some of them lack for their nodes."""

    accelerator: Accelerator
    hosts: tuple[Host, ...]
    lacking: Mapping[str, HostError] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The hosts and the way to them; without targets it is this machine. ``failed`` are those that do not answer."""

    settings: Settings
    directory: Path
    engine: Backend
    daemons: Mapping[str, DockerEngine] = field(default_factory=dict)
    """The Docker daemons of the hosts that answer, for images and doctor; none where the backend is another."""
    targets: tuple[InventoryHost, ...] = ()
    """All that the list names, in its order."""
    connections: Mapping[str, Connection] = field(default_factory=dict)
    told: Mapping[str, survey.HostDump] = field(default_factory=dict)
    """What hosts told, those that do not answer when they last did."""
    failed: Mapping[str, HostError] = field(default_factory=dict)

    @property
    def network(self) -> Network:
        return "host" if len(self.targets) > 1 else "bridge"

    @property
    def sent(self) -> dict[str, str]:
        """Where the lab's files lie on the hosts that answer, as far as they were sent."""
        return {host: path for host in self.engine.hosts if self.targets and (path := self.sent_to(host))}

    def sent_to(self, host: str, name: str = "") -> str:
        """Where the lab's files are on a host, of this name when they were sent; empty where it sees the lab directory.

        Hosts may share a home: each has a directory of its own in it.
        """
        if self.settings.text("LAB_SHARED_DIR"):
            return ""
        return f"{self.told[host].facts['home']}/{FILES}/{self.settings.text('LAB_NAME')}.{name or host}"

    @property
    def placement(self) -> dict[str, str]:
        """The containers that the settings ask for, and their hosts."""
        return placement(self.settings, self.targets)

    @once
    def facts(self) -> dict[str, survey.HostFacts]:
        """What else is to be known of the hosts that ssh reaches."""
        return {name: survey.facts_of(self.told[name], one.told_at) for name, one in self.connections.items()}

    @once
    def _seen(self) -> Seen:
        return look(self)

    @property
    def accelerator(self) -> Accelerator:
        """What the hosts have. Errors as ``look``."""
        return self._seen.accelerator

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts as they were found, less those that were never reached. Errors as ``look``."""
        return self._seen.hosts

    @property
    def image(self) -> str:
        """The image of the lab's nodes: the one asked for, or labctl's own for the accelerator."""
        wanted = self.settings.text("LAB_ACCELERATOR")
        return self.settings.text("LAB_IMAGE") or catalog.tag(self.accelerator if wanted == "auto" else wanted)

    def equipped(self) -> Cluster:
        """The site where hosts have failed, too, that lack what their nodes are to have. Errors as ``look``."""
        return self.without({name: why for name, why in self._seen.lacking.items() if name not in self.failed})

    def without(self, failed: Mapping[str, HostError]) -> Cluster:
        """The site where these hosts have failed too: nothing more is asked of them. HostError where none is left."""
        if not failed:
            return self
        left = {name: daemon for name, daemon in self.daemons.items() if name not in failed}
        if not left:
            raise_all({**self.failed, **failed})
        engine = over_hosts(self.settings, self.targets, left)
        return replace(self, engine=engine, daemons=left, failed={**self.failed, **failed})

    def capabilities(self, host: Host) -> Capabilities | None:
        """What the host's engine has and can do; None where it did not answer."""
        return self.engine.capabilities(host.name) if host.name in self.engine.hosts else None

    def texts(self, host: Host) -> device_requests.Texts:
        """What reads the texts in a folder of a host."""
        return partial(survey.texts_in, self.told[host.name]) if self.targets else device_requests.texts_here

    def lab(self, hosts: tuple[Host, ...], granted: Limits) -> Lab:
        """The lab on these hosts, with the limits that they grant."""
        return spec.build(
            self.settings,
            self.directory,
            self.accelerator,
            hosts,
            granted,
            network=self.network,
            owner=owner(),
            lacking=self._seen.lacking,
        )


@contextmanager
def opened(
    context: Context, found: Settings, only: tuple[str, ...] = (), *, seconds: int = ANSWERING, demand: bool = True
) -> Iterator[Cluster]:
    """The lab's hosts, or ``only`` some, for the time of the block; daemons have so many seconds for an answer.

    HostError where none of them answers, unless that is not what is to be had (``demand``); ConfigError where two of
    them are one machine.
    """
    targets = listed(context.directory, found)
    if not targets:
        engine = backend_here(seconds)
        docker = {HERE: engine} if isinstance(engine, DockerEngine) else {}
        yield Cluster(settings=found, directory=context.directory, engine=engine, daemons=docker)
        return
    chosen = tuple(target for target in targets if not only or target.name in only)
    with connected(chosen, survey.SCRIPT, seconds=REACHING, waits=context.waits) as (reached, unreached):
        heard, garbled = attempt(lambda one: survey.read(one.told, one.target.name), reached)
        connections = {name: reached[name] for name in heard}
        daemons = {name: DockerEngine(connection, seconds=seconds) for name, connection in connections.items()}
        engines, silent = attempt(DockerEngine.identity, daemons)
        survey.require_apart(chosen, heard, engines)
        failed = {**unreached, **garbled, **silent}
        if demand and len(failed) == len(chosen):
            raise_all(failed)
        for name, connection in connections.items():
            files.write(context.directory / TOLD / name, connection.told)
        earlier = {name: remembered(context.directory, name) for name in (one.name for one in targets)}
        told = {name: one for name, one in earlier.items() if one}
        answering = {name: daemon for name, daemon in daemons.items() if name not in failed}
        yield Cluster(
            settings=found,
            directory=context.directory,
            engine=over_hosts(found, targets, answering),
            daemons=answering,
            targets=targets,
            connections=connections,
            told={**told, **heard},
            failed=failed,
        )


def listed(directory: Path, found: Settings) -> tuple[InventoryHost, ...]:
    """The hosts that the settings list; none for this machine."""
    name = found.text("LAB_HOSTS")
    return inventory.read(directory / Path(name).expanduser(), name) if name else ()


def backend_here(seconds: int) -> Backend:
    """What runs a lab that lists no hosts: this machine's Docker daemon."""
    return DockerEngine(seconds=seconds)


def placement(found: Settings, targets: tuple[InventoryHost, ...]) -> dict[str, str]:
    """The containers that the settings ask for, by name, and the hosts that are to have them."""
    names = [target.name for target in targets] or [HERE]
    if len(names) == 1:
        names *= found.number("LAB_NODES")
    return {LAUNCHER: names[0], **{f"worker-{number}": name for number, name in enumerate(names)}}


def over_hosts(found: Settings, targets: tuple[InventoryHost, ...], daemons: Mapping[str, Backend]) -> MultiHostEngine:
    """These daemons as one backend."""
    name = found.text("LAB_NAME")
    return MultiHostEngine(
        daemons, {naming.container_of(name, node): host for node, host in placement(found, targets).items()}
    )


def remembered(directory: Path, name: str) -> survey.HostDump | None:
    """What a host told when it was last reached; None where it never was."""
    try:
        return survey.read((directory / TOLD / name).read_text(encoding="utf-8"), name)
    except (OSError, HostError):
        return None


def look(where: Cluster) -> Seen:
    """The accelerator, which all hosts must have, and the hosts as they were found.

    A host that was never reached is left out. HostError where that is the first one, which has the launcher. Where
    all of them lack the devices that the settings ask for, the settings are wrong: the error is that of the first.
    """
    wanted = where.settings.text("LAB_ACCELERATOR")
    if not where.targets:
        accelerator, here = detect.observe(wanted)
        return Seen(accelerator=accelerator, hosts=(here,))
    require_shared(where)
    first = where.targets[0].name
    if first not in where.told:
        raise where.failed[first]
    known = [(number, target) for number, target in enumerate(where.targets) if target.name in where.told]
    ways = ways_of(where, [target for _, target in known])
    seen = []
    lacking: dict[str, LabError] = {}
    with files.scratch() as scratch:
        for number, target in known:
            told = where.told[target.name]
            root = survey.lay_out(told, scratch / str(number))
            try:
                wanted, host = survey.host_of(told, root, wanted)
            except HostError as error:
                lacking[target.name] = error
                host = survey.host_of(told, root, "cpu")[1]
            way = ways.get(target.name)
            host = replace(
                host,
                number=number,
                slots=target.slots,
                address=way.address if way else "",
                interface=way.interface if way else host.interface,
                directory=where.sent_to(target.name),
            )
            if where.network == "host" and target.name not in lacking:
                try:
                    spec.node_of(where.settings, wanted, host)
                except LabError as error:
                    lacking[target.name] = error
            seen.append(host)
    if len(lacking) == len(seen):
        raise next(iter(lacking.values()))
    return Seen(accelerator=wanted, hosts=tuple(seen), lacking=named(lacking))


def named(lacking: Mapping[str, LabError]) -> dict[str, HostError]:
    """What each of these hosts lacks, as the host's failure."""
    return {name: HostError(f"{name}: {why.message}", hint=why.hint, node=name) for name, why in lacking.items()}


def ways_of(where: Cluster, targets: list[InventoryHost]) -> dict[str, routing.Way]:
    """How several hosts reach each other, by name; a host alone needs nothing."""
    if where.network == "bridge":
        return {}
    networks = [survey.network_of(where.told[target.name]) for target in targets]
    asked = [
        routing.Peer(name=target.name, network=network, iface=target.iface, where=target.where)
        for target, network in zip(targets, networks, strict=True)
    ]
    return dict(zip((target.name for target in targets), routing.ways(asked), strict=True))


def require_shared(where: Cluster) -> None:
    """ConfigError where the lab is not in the directory that the hosts are said to share."""
    shared = where.settings.text("LAB_SHARED_DIR")
    if shared and not where.directory.is_relative_to(shared):
        raise ConfigError(
            f"LAB_SHARED_DIR is {shared}, and the lab is in {where.directory}, which the hosts do not see",
            hint=f"move the lab below {shared}, or unset LAB_SHARED_DIR in .env: then its files are sent",
        )


def owner() -> str:
    """Who calls, and on which machine."""
    try:
        person = getpass.getuser()
    except (KeyError, OSError):
        person = str(os.getuid())
    return f"{person}@{socket.gethostname()}"


T = TypeVar("T")


def load_lab(context: Context, where: Cluster, *, ask: bool = True, refresh: bool = False) -> tuple[Lab, Cluster]:
    """The lab that the settings describe, on its hosts as they are; and the site less those that cannot be part of it.

    Their engines are asked what they can do, side by side, unless what was found out before is to count; what an
    earlier probe said of devices is probed again (``refresh``) for doctor.
    """
    where = where.equipped()
    hosts = {host.name: device_requests.remembered(host, where.directory) for host in where.hosts}
    if ask:
        resolved, where = of_engines(where, partial(resolved_on, where, refresh=refresh))
        hosts |= resolved
        refused, where = of_engines(where, partial(limits_refused, where))
        for name, those in refused.items():
            if those:
                who = "this host" if name == HERE else name
                context.warn(f"{who} cannot raise {', '.join(those)} for a container: its own limit stays in force")
    lab = lab_on(where, tuple(hosts.values()))
    if ask and capabilities.lacks_files(lab):
        _, where = of_engines(where, lambda host, engine: capabilities.ask_files(lab, host.name, engine))
    return capabilities.with_files(lab), where


def foresee_lab(where: Cluster) -> tuple[Lab, Cluster]:
    """The lab as `up` would make it, as far as can be told without a trial, and the site as ``load_lab``.

    No engine need answer.
    """
    where = where.equipped()
    hosts = where.hosts
    if accelerators.get(where.accelerator).engine.is_open:
        foreseen, _ = attempt(partial(foreseen_on, where), {host.name: host for host in hosts})
        hosts = tuple(foreseen.values())
    return capabilities.with_files(lab_on(where, hosts)), where


def lab_on(where: Cluster, hosts: tuple[Host, ...]) -> Lab:
    """The lab on these hosts, with the limits that they are known to grant."""
    return where.lab(hosts, capabilities.granted(where.settings, where.directory, [host.name for host in hosts]))


def resolved_on(where: Cluster, host: Host, engine: Capabilities, *, refresh: bool) -> Host:
    found, texts = where.settings, where.texts(host)
    return device_requests.resolve_device_request(
        found, where.accelerator, host, where.directory, where.image, engine, refresh=refresh, texts=texts
    )


def foreseen_on(where: Cluster, host: Host) -> Host:
    engine, texts = where.capabilities(host), where.texts(host)
    request, _ = device_requests.foreseen(where.settings, where.accelerator, host, where.directory, engine, texts)
    return replace(host, request=request)


def limits_refused(where: Cluster, host: Host, engine: Capabilities) -> tuple[str, ...]:
    return capabilities.probe(where.settings, where.directory, where.image, host.name, engine)


def of_engines(where: Cluster, ask: Callable[[Host, Capabilities], T]) -> tuple[dict[str, T], Cluster]:
    """What comes of asking all engines side by side, by host; and the site less those where that failed."""

    def work(host: Host) -> T:
        with on_host(host.name):
            return ask(host, where.engine.capabilities(host.name))

    done, failed = attempt(work, {host.name: host for host in where.hosts if host.name in where.engine.hosts})
    return done, where.without(failed)
