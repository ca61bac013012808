"""The hosts of a lab: this machine, or those that the settings list, reached over ssh for the time of one command."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

from labctl import device_requests, files, hosts, images, lab, observe, render, routes, survey
from labctl.connection import Connection, connected
from labctl.context import Context
from labctl.engines import Daemon, Engine
from labctl.engines.docker_engine import DockerEngine
from labctl.engines.fleet import Fleet
from labctl.errors import ConfigError, HostError, LabError
from labctl.execute import raise_all
from labctl.hardware import HERE, Host
from labctl.hosts import Target
from labctl.model import LAUNCHER, Accelerator, Lab, Limits, Network
from labctl.once import once
from labctl.settings import Settings
from labctl.side_by_side import attempt

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
class Site:
    """The hosts and the way to them; without targets it is this machine. ``failed`` are those that do not answer."""

    settings: Settings
    directory: Path
    engine: Engine
    targets: tuple[Target, ...] = ()
    """All that the list names, in its order."""
    connections: Mapping[str, Connection] = field(default_factory=dict)
    told: Mapping[str, survey.Told] = field(default_factory=dict)
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
    def places(self) -> dict[str, str]:
        """The containers that the settings ask for, and their hosts."""
        return places(self.settings, self.targets)

    @once
    def facts(self) -> dict[str, survey.Facts]:
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
        return self.settings.text("LAB_IMAGE") or images.tag(self.accelerator if wanted == "auto" else wanted)

    def equipped(self) -> Site:
        """The site where hosts have failed, too, that lack what their nodes are to have. Errors as ``look``."""
        return self.without({name: why for name, why in self._seen.lacking.items() if name not in self.failed})

    def without(self, failed: Mapping[str, HostError]) -> Site:
        """The site where these hosts have failed too: nothing more is asked of them. HostError where none is left."""
        if not failed:
            return self
        left = {name: self.engine.on(name) for name in self.engine.hosts if name not in failed}
        if not left:
            raise_all({**self.failed, **failed})
        engine = fleet(self.settings, self.targets, left)
        return replace(self, engine=engine, failed={**self.failed, **failed})

    def daemon(self, host: Host) -> Daemon | None:
        """The host's engine; None where it did not answer."""
        return self.engine.on(host.name) if host.name in self.engine.hosts else None

    def texts(self, host: Host) -> device_requests.Texts:
        """What reads the texts in a folder of a host."""
        return partial(survey.texts_in, self.told[host.name]) if self.targets else device_requests.texts_here

    def lab(self, hosts: tuple[Host, ...], granted: Limits) -> Lab:
        """The lab on these hosts, with the limits that they grant."""
        return lab.build(
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
) -> Iterator[Site]:
    """The lab's hosts, or ``only`` some, for the time of the block; daemons have so many seconds for an answer.

    HostError where none of them answers, unless that is not what is to be had (``demand``); ConfigError where two of
    them are one machine.
    """
    targets = listed(context.directory, found)
    if not targets:
        yield Site(settings=found, directory=context.directory, engine=DockerEngine(seconds=seconds))
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
        yield Site(
            settings=found,
            directory=context.directory,
            engine=fleet(found, targets, answering),
            targets=targets,
            connections=connections,
            told={**told, **heard},
            failed=failed,
        )


def listed(directory: Path, found: Settings) -> tuple[Target, ...]:
    """The hosts that the settings list; none for this machine."""
    name = found.text("LAB_HOSTS")
    return hosts.read(directory / Path(name).expanduser(), name) if name else ()


def places(found: Settings, targets: tuple[Target, ...]) -> dict[str, str]:
    """The containers that the settings ask for, by name, and the hosts that are to have them."""
    names = [target.name for target in targets] or [HERE]
    if len(names) == 1:
        names *= found.number("LAB_NODES")
    return {LAUNCHER: names[0], **{f"worker-{number}": name for number, name in enumerate(names)}}


def fleet(found: Settings, targets: tuple[Target, ...], daemons: Mapping[str, Daemon]) -> Fleet:
    """These daemons as one engine."""
    name = found.text("LAB_NAME")
    return Fleet(daemons, {render.container_of(name, node): host for node, host in places(found, targets).items()})


def remembered(directory: Path, name: str) -> survey.Told | None:
    """What a host told when it was last reached; None where it never was."""
    try:
        return survey.read((directory / TOLD / name).read_text(encoding="utf-8"), name)
    except (OSError, HostError):
        return None


def look(where: Site) -> Seen:
    """The accelerator, which all hosts must have, and the hosts as they were found.

    A host that was never reached is left out. HostError where that is the first one, which has the launcher. Where
    all of them lack the devices that the settings ask for, the settings are wrong: the error is that of the first.
    """
    wanted = where.settings.text("LAB_ACCELERATOR")
    if not where.targets:
        accelerator, here = observe.observe(wanted)
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
                    lab.node_of(where.settings, cast(Accelerator, wanted), host)
                except LabError as error:
                    lacking[target.name] = error
            seen.append(host)
    if len(lacking) == len(seen):
        raise next(iter(lacking.values()))
    return Seen(accelerator=cast(Accelerator, wanted), hosts=tuple(seen), lacking=named(lacking))


def named(lacking: Mapping[str, LabError]) -> dict[str, HostError]:
    """What each of these hosts lacks, as the host's failure."""
    return {name: HostError(f"{name}: {why.message}", hint=why.hint, node=name) for name, why in lacking.items()}


def ways_of(where: Site, targets: list[Target]) -> dict[str, routes.Way]:
    """How several hosts reach each other, by name; a host alone needs nothing."""
    if where.network == "bridge":
        return {}
    networks = [survey.network_of(where.told[target.name]) for target in targets]
    asked = [
        routes.Peer(name=target.name, network=network, iface=target.iface, where=target.where)
        for target, network in zip(targets, networks, strict=True)
    ]
    return dict(zip((target.name for target in targets), routes.ways(asked), strict=True))


def require_shared(where: Site) -> None:
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
