"""Fixtures for runs that break: an unrelated container, and the shared lab checked after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.harness import Lab

from docker import DockerClient


@pytest.fixture(scope="module")
def stranger(engine: DockerClient, image: str, family: str) -> Iterator[Callable[[], bool]]:
    """Start an unrelated container for the module; yield a function that tells if it is unchanged."""
    argv = ["-c", "while sleep 1; do :; done"]
    made = engine.containers.run(image, argv, entrypoint="sh", detach=True, name=f"{family}-stranger")

    def state() -> tuple[str, int]:
        """Return status and pid of the unrelated container."""
        made.reload()
        return made.status, made.attrs["State"]["Pid"]

    before = state()
    assert before[0] == "running"
    yield lambda: state() == before
    made.remove(force=True)


@pytest.fixture
def lab(lab: Lab, stranger: Callable[[], bool]) -> Iterator[Lab]:
    """Yield the shared lab; then assert that it has no new processes and the unrelated container is unchanged."""
    before = lab.processes()
    yield lab
    assert lab.left_since(before) == []
    assert stranger()
