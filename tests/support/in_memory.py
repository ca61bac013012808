"""Docker's backend for a given lab, on an in-memory engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from labctl.backends.docker.backend import DockerBackend
from labctl.config.context import Context
from labctl.model import Event, Lab
from support.builders import cluster_of
from support.fake_backend import FakeBackend


class InMemory(DockerBackend):
    """Docker's backend of the lab ``of``; ``engine`` holds its containers in memory, events go to ``emit``."""

    def __init__(
        self, of: Lab, engine: FakeBackend | None = None, emit: Callable[[Event], None] = lambda _: None
    ) -> None:
        """Make a backend that is connected to an in-memory engine and returns ``of`` as its lab."""
        environ = {"LAB_NAME": of.name, "LAB_ACCELERATOR": of.accelerator}
        context = Context(directory=of.directory, environ=environ, emit=emit, flags={})
        super().__init__(context, context.settings(), ExitStack(), {})
        self.cluster = cluster_of(context, engine)
        self._given = of

    def lab(self) -> Lab:
        return self._given
