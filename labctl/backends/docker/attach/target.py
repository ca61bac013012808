"""Connect to a node: its host, its daemon, its container; errors name the nodes of the lab, or the node's state."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from labctl import accelerators, model, naming
from labctl.backends import terminal
from labctl.backends.docker.attach import session
from labctl.backends.docker.engine import Engine
from labctl.backends.docker.lab import cluster
from labctl.backends.owner import owner
from labctl.backends.state import Container, elsewhere, not_running, resume
from labctl.config.context import Context
from labctl.errors import ConfigError, HostError, raise_all
from labctl.system.procfs import ROOT


@contextmanager
def opened(where: Context, name: str, node: str | None) -> Iterator[cluster.Cluster]:
    """Yield a cluster connected to a node's host, or to all hosts. ConfigError if the inventory has no such node."""
    settings = where.settings()
    every = cluster.read_inventory(where.directory, settings)
    placement = cluster.placement(settings, every)
    if every != cluster.THIS_MACHINE and node and node not in placement:
        raise unknown(name, node, tuple(placement))
    only = (placement[node],) if node in placement else ()
    with cluster.connect(where, settings, only=only) as connected:
        yield connected


@contextmanager
def entered(where: Context, name: str, node: str) -> Iterator[session.ExecTarget]:
    """Yield a node's running container, with its host connected. HostError if it is missing or does not run."""
    with opened(where, name, node) as connected:
        container = container_of(where, name, node, connected.engine)
        if container.state == "paused":
            raise HostError(f"{node} is paused", hint=resume(container), node=node)
        if container.state != "running":
            raise HostError(f"{node} {not_running(container)}", hint=f"labctl logs {node}; labctl up", node=node)
        sent = connected.sent.get(container.host)
        yield session.ExecTarget(
            engine=connected.engine,
            container=naming.container_of(name, node),
            directory=session.here_in(container, (where.directory, sent) if sent else None),
            user=container.user,
        )


def meant(where: Context, word: str, *more: str) -> str:
    """Return the `labctl exec` command that was meant if a word is the name of a node; else an empty text."""
    settings = where.settings()
    if word not in cluster.placement(settings, cluster.read_inventory(where.directory, settings)):
        return ""
    return f"labctl exec -n {word} -- {shlex.join(argument for argument in more if argument != '--') or 'COMMAND'}"


@contextmanager
def reached(where: Context, name: str, node: str | None) -> Iterator[Engine]:
    """Yield the engine of a node's host, or of all; warn of silent hosts, and after the block raise HostError."""
    with opened(where, name, node) as connected:
        for failed in connected.failed.values():
            where.warn(failed.message)
        if node or len(connected.inventory) == 1:
            container_of(where, name, node or model.LAUNCHER, connected.engine)
        yield connected.engine
        raise_all(connected.failed)


def container_of(where: Context, name: str, node: str, engine: Engine) -> Container:
    """Return a node's container, in any state. HostError if the lab is down or another's, ConfigError if no node."""
    observed = engine.observe(name, node=node)
    raise_all(dict(observed.silent))
    container = observed.container(node)
    if not container and observed.containers:
        raise unknown(name, node, tuple(each.node for each in observed.containers))
    if not container:
        raise HostError(f"lab {name} is down", hint="labctl up", node=node)
    directory = container.directory
    if other := elsewhere(directory, where.directory, container.owner, owner(), container.host):
        way = f"to go into that one: -C {shlex.quote(directory)}" if other.name == directory else "it is theirs"
        hint = f"{way}; for a lab here, set another LAB_NAME in .env"
        raise HostError(f"lab `{name}` belongs to {other.name}", hint=hint)
    return container


def unknown(name: str, node: str, names: tuple[str, ...]) -> ConfigError:
    """Return the error for a name that is not of a node, with the names of the lab's nodes."""
    return ConfigError(
        f"lab {name} has no node `{node}`",
        hint=f"it has {', '.join(names)}; `labctl up` creates missing nodes",
        node=node,
    )


def colors(where: Context, stdin: Literal["terminal", "pipe"]) -> tuple[str, ...]:
    """Return the variable that gives a shell the colors of this terminal; () if it has none."""
    # Docker's own is xterm. Images know few others, so not the terminal's own name.
    shows_colors = "COLORTERM" in where.environ or "256color" in where.environ.get("TERM", "")
    return ("TERM=xterm-256color",) if stdin == "terminal" and shows_colors else ()


def _programs(where: Context) -> frozenset[str]:
    """Return the programs that show devices of a lab, of each vendor whose devices its workers may have."""
    settings, modules = where.settings(), accelerators.modules()
    asked = settings.text("LAB_ACCELERATOR")
    if asked == "auto" and not settings.text("LAB_HOSTS"):
        asked = accelerators.detect_accelerator(ROOT).name
    chosen = modules.values() if asked == "auto" else [modules[asked]]
    return frozenset().union(*(module.programs for module in chosen))


def attach(
    where: Context,
    nodes: tuple[str, ...],
    command: tuple[str, ...],
    *,
    stdin: Literal["terminal", "pipe"],
    prompt: bool,
) -> int:
    """Run a command in a node or several, () for all workers; return the exit code. CommandNotFound if there is none.

    Several are workers. CommandNotFound, with a hint, if the node has no such command. ConfigError for a ``prompt``
    without a terminal.
    """
    name = where.settings().text("LAB_NAME")
    if len(nodes) != 1:
        with entered(where, name, model.LAUNCHER) as inside:
            return session.run_on_nodes(inside, nodes, command)
    (node,) = nodes
    if node == model.LAUNCHER and command[0] in _programs(where):
        hint = f"labctl exec worker-0 -- {shlex.join(command)}"
        raise ConfigError(f"the launcher has no devices for `{command[0]}`", hint=hint, node=node)
    with entered(where, name, node) as inside:
        if prompt:
            terminal.require(node, stdin)
            resume = () if inside.directory else ("LABCTL_RESUME=1",)
            return session.run(inside, command, stdin=stdin, environment=(*resume, *colors(where, stdin)))
        code = session.run(inside, command, stdin=stdin)
        if code in session.NOT_RUN and session.lacks(inside, command[0]):
            add = "LAB_APT adds packages of the image's distribution, LAB_PACKAGES Python's: in .env, then `labctl up`"
            hint = meant(where, *command) or add
            raise session.CommandNotFound(f"{node}: command not found: `{command[0]}`", hint=hint, node=node)
        return code
