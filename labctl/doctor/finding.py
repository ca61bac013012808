"""What doctor says, and what its checks look at."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from labctl import model, naming
from labctl.compose import render
from labctl.config import dotenv
from labctl.config.settings import Settings
from labctl.doctor.place import Place
from labctl.engines import Backend
from labctl.engines.docker import DockerEngine
from labctl.engines.state import Container, ObservedState
from labctl.images import catalog
from labctl.model import HERE, File, Host, Lab, Node
from labctl.system import filelock
from labctl.system.cached import once

LIMIT = 10.0
"""Seconds in which a check, or a node, answers."""
UP = "labctl up"
ANEW = "labctl down && labctl up"
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at: code, level, node, what was seen, why it matters, and the command that mends it.

    ``node`` is a container's, or the host that it concerns: ``local`` is this machine.

    ``fix`` is typed in the lab's directory. A ``runnable`` one is simple commands with ``&&`` between, which change
    nothing but what is labctl's own: ``--fix`` may run it.
    """

    code: str
    level: Literal["ok", "warn", "error"]
    node: str
    seen: str
    why: str = ""
    fix: str = ""
    runnable: bool = False


def ok(code: str, seen: str, node: str = HERE) -> Finding:
    return Finding(code=code, level="ok", node=node, seen=seen)


def warn(code: str, seen: str, *, why: str, fix: str, node: str = HERE, runnable: bool = False) -> Finding:
    """Something that a person should know of; a run may do all the same."""
    return Finding(code=code, level="warn", node=node, seen=seen, why=why, fix=fix, runnable=runnable)


def error(code: str, seen: str, *, why: str, fix: str, node: str = HERE, runnable: bool = False) -> Finding:
    """Something that will stop a run."""
    return Finding(code=code, level="error", node=node, seen=seen, why=why, fix=fix, runnable=runnable)


@dataclass(frozen=True, kw_only=True)
class Examination:
    """A lab on one host or on all, and what is known of it and the engine; read from Docker once, when asked for."""

    lab: Lab
    settings: Settings
    environ: Mapping[str, str]
    engine: Backend
    """Of one host; of all of them where the lab as a whole is looked at."""
    place: Place = field(default_factory=Place)
    """The host that is looked at."""
    hosts: tuple[Examination, ...] = ()
    """Of the lab as a whole: an examination of each of its hosts that ssh reached."""
    only: str = ""
    """The one node that is asked about; empty for all."""
    silent: bool = False
    """Whether the engine was asked and gave no answer: it is not asked again."""
    root: Path = Path("/")
    """Where /proc, /sys and /dev are looked for: those of another host are laid out."""

    @property
    def name(self) -> str:
        """The host that is looked at; ``local`` where it is this machine, also for a lab that is on others."""
        return self.place.name

    @property
    def local(self) -> bool:
        """Whether the lab is on this machine, not on hosts that are listed."""
        return self.lab.hosts[0].name == HERE

    @property
    def here(self) -> Host:
        """What it has for the lab."""
        return self.lab.hosts[0] if self.name == HERE else self.lab.host(self.name)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The lab's nodes on it."""
        return tuple(node for node in self.lab.nodes if self.name in (HERE, node.host))

    def at(self, node: str) -> Examination:
        """The examination of the host that has a node."""
        host = self.lab.host_of(node).name
        return next((one for one in self.hosts if one.name == host), self)

    def host(self, name: str | None) -> Examination:
        """The examination of the host of this name; of the first where it is none of them."""
        return next((one for one in self.hosts if one.name == name), (*self.hosts, self)[0])

    @property
    def daemon(self) -> DockerEngine:
        """The host's own engine."""
        return cast(DockerEngine, self.engine)

    @once
    def info(self) -> dict[str, Any]:
        return self.daemon.information()

    @once
    def named(self) -> ObservedState:
        """What the engine holds of this name, whosever it is."""
        return self.engine.observe(self.lab.name, self.lab.image)

    @once
    def observed(self) -> ObservedState:
        """What it holds of this directory's lab: nothing where another has the name."""
        foreign = self.named.owner_elsewhere(self.lab.directory, self.lab.owner)
        return ObservedState(image=self.named.image) if foreign else self.named

    @once
    def network(self) -> dict[str, Any] | None:
        """The lab's network as the engine describes it; None where there is none."""
        wanted = naming.project(self.lab)
        return next((self.daemon.network(key) for key, name in self.observed.networks if name == wanted), None)

    @once
    def files(self) -> tuple[File, ...]:
        """The lab's files as the settings say they should be."""
        return render.render(self.lab)

    @property
    def builds(self) -> bool:
        """Whether the lab's image is labctl's to build and not there, as far as the engine tells."""
        return not self.silent and catalog.name_of(self.lab.image) is not None and self.observed.image is None

    @once
    def run_active(self) -> bool:
        return filelock.is_held(self.lab.directory / filelock.RUN)

    @property
    def names(self) -> tuple[str, ...]:
        """The lab's containers that are asked about: launcher first, then workers."""
        workers = (node.name for node in self.lab.nodes)
        every = (model.LAUNCHER, *workers) if self.name == HERE else self.lab.containers_on(self.name)
        return tuple(name for name in every if self.only in ("", name))

    @property
    def running(self) -> tuple[Container, ...]:
        """Those of them that run."""
        found = (self.observed.container(name) for name in self.names)
        return tuple(one for one in found if one and one.state == "running")

    def read(self, path: str) -> str:
        """A file of /proc, /sys or /etc; empty where it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def put(self, key: str, value: str) -> str:
        """The command that gives a setting another value, wherever it has its value from."""
        written, origin = self._written(key)
        line = f"{written}={dotenv.quote(value)}"
        if origin.startswith(".env:"):
            return f"sed -i {shlex.quote(f'/^{self._beginning(origin)}/c {line}')} .env"
        if origin == "environment":
            return f"export {written}={shlex.quote(value)}"
        if origin == "flag":
            return f"labctl doctor -s {shlex.quote(f'{written}={value}')}"
        return f"printf '\\n%s\\n' {shlex.quote(line)} >> .env"

    def drop(self, key: str) -> str:
        """The command that unsets a setting."""
        written, origin = self._written(key)
        if origin.startswith(".env:"):
            return f"sed -i {shlex.quote(f'/^{self._beginning(origin)}/d')} .env"
        return f"unset {written}" if origin == "environment" else f"labctl doctor  # without -s {written}=..."

    def _beginning(self, origin: str) -> str:
        """What the line of .env begins with, so that one command does not move the line of the next."""
        number = int(origin.rpartition(":")[2])
        lines = (self.lab.directory / ".env").read_text(encoding="utf-8").splitlines()
        return lines[number - 1].partition("=")[0] + "="

    def _written(self, key: str) -> tuple[str, str]:
        """The name that a setting was given under, which may be an alias, and where."""
        everything = {**self.settings.found, **{found.key: found for found in self.settings.extra}}
        return everything[key].key, everything[key].origin


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size < 10 * GIB else f"{size / GIB:.0f} GiB"
