"""The way into a node: its host, its daemon, its container; errors say which nodes there are, or what became of one."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from contextlib import contextmanager

from labctl import model, naming
from labctl.attach import session
from labctl.config.context import Context
from labctl.engines import Daemon
from labctl.engines.state import Container, elsewhere
from labctl.errors import ConfigError, HostError, on_host, raise_all
from labctl.lab import cluster
from labctl.system import process
from labctl.system.parallel import pool


@contextmanager
def entered(where: Context, name: str, node: str) -> Iterator[session.ExecTarget]:
    """A node's running container, for as long as the way to its host is open."""
    found = where.settings()
    targets = cluster.read_inventory(where.directory, found)
    places = cluster.placement(found, targets)
    if len(targets) > 1 and node not in places:
        raise unknown(name, node, tuple(places))
    host = places.get(node, targets[0].name)
    with cluster.connect(where, found, only=(host,)) as there:
        daemon = there.engine.on(host)
        sent = there.sent.get(daemon.hosts[0])
        container = naming.container_of(name, node)
        moved = (where.directory, sent) if sent else None
        inside, unsaid = None, None
        try:
            inside = session.look(name, container, daemon.docker, moved, apart=host != model.HERE)
        except HostError as error:
            unsaid = error
        if not inside:
            state = container_of(where, name, node, daemon).state
            raise unsaid or HostError(f"{node} is {state}", hint=f"labctl logs {node}; labctl up", node=node)
        require_own(where, name, inside.owner, inside.maker, daemon.hosts[0])
        if inside.paused:
            host = daemon.hosts[0]
            where_to = "" if host == model.HERE else f"on {host}: "
            raise HostError(f"{node} is paused", hint=f"{where_to}docker unpause {inside.container}", node=node)
        yield inside


def meant(where: Context, word: str, *more: str) -> str:
    """What to type where the first word of a command is the name of a node; nothing where it is none."""
    found = where.settings()
    if word not in cluster.placement(found, cluster.read_inventory(where.directory, found)):
        return ""
    return f"labctl exec -n {word} -- {shlex.join(one for one in more if one != '--') or 'COMMAND'}"


@contextmanager
def reached(where: Context, name: str, node: str | None) -> Iterator[tuple[Daemon, ...]]:
    """The daemon that has a node, or all of the lab, the launcher's first.

    Hosts that do not answer are told of at once; after the block HostError, as not all of it was there.
    """
    found = where.settings()
    targets = cluster.read_inventory(where.directory, found)
    places = cluster.placement(found, targets)
    if len(targets) > 1 and node and node not in places:
        raise unknown(name, node, tuple(places))
    host = places.get(node) if node else None
    with cluster.connect(where, found, only=(host,) if host else ()) as there:
        for failed in there.failed.values():
            where.warn(failed.message)
        daemons = tuple(there.engine.on(one) for one in there.engine.hosts)
        if node or len(targets) == 1:
            container_of(where, name, node or model.LAUNCHER, daemons[0])
        yield daemons
        raise_all(there.failed)


def logs(
    context: Context, lab: str, node: str | None, on_line: Callable[[str], None], *, follow: bool, colors: bool
) -> None:
    """Pass on the logs of a node, or of all hosts in parallel. HostError for hosts that fail, once all have ended."""
    options = (*(("--follow",) if follow else ()), *((node,) if node else ()))
    ansi = "always" if colors else "never"
    args = ("compose", "--ansi", ansi, "-p", naming.project_name(lab), "logs", *options)

    def stream(daemon: Daemon) -> None:
        with on_host(daemon.hosts[0]):
            process.stream((*daemon.docker, *args), on_line)

    with reached(context, lab, node) as daemons:
        if len(daemons) == 1:
            stream(daemons[0])
            return
        failed = {}
        with pool(len(daemons), endless=follow) as threads:
            hosts = {threads.submit(stream, daemon): daemon.hosts[0] for daemon in daemons}
            for future in as_completed(hosts):
                try:
                    future.result()
                except HostError as error:
                    failed[hosts[future]] = error
        raise_all(failed)


def container_of(where: Context, name: str, node: str, daemon: Daemon) -> Container:
    """A node's container, in whatever state; HostError when there is none, or it is another directory's."""
    observed = daemon.observe(name)
    container = observed.container(node)
    if container:
        require_own(where, name, container.directory, container.owner, container.host)
        return container
    if observed.containers:
        raise unknown(name, node, tuple(one.node for one in observed.containers))
    raise HostError(f"lab {name} is down", hint="labctl up", node=node)


def unknown(name: str, node: str, known: tuple[str, ...]) -> ConfigError:
    return ConfigError(f"lab {name} has no node `{node}`", hint=f"it has {', '.join(known)}", node=node)


def require_own(where: Context, name: str, directory: str, maker: str, host: str) -> None:
    """HostError for a container that another person's or directory's lab of this name has, as its labels say."""
    if owner := elsewhere(directory, where.directory, maker, cluster.owner(), host):
        way = f"to go into that one: -C {shlex.quote(directory)}" if owner.name == directory else "it is theirs"
        hint = f"{way}; for a lab here, set another LAB_NAME in .env"
        raise HostError(f"lab `{name}` belongs to {owner.name}", hint=hint)
