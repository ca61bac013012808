"""What stands beside a run that breaks, and what must be so after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.harness import Lab

from docker import DockerClient


@pytest.fixture(scope="module")
def stranger(engine: DockerClient, image: str, family: str) -> Iterator[Callable[[], bool]]:
    """A container of somebody else; the answer tells whether it is as it was."""
    words = ["-c", "while sleep 1; do :; done"]
    made = engine.containers.run(image, words, entrypoint="sh", detach=True, name=f"{family}-stranger")

    def state() -> tuple[str, int]:
        made.reload()
        return made.status, made.attrs["State"]["Pid"]

    before = state()
    assert before[0] == "running"
    yield lambda: state() == before
    made.remove(force=True)


@pytest.fixture
def lab(lab: Lab, stranger: Callable[[], bool]) -> Iterator[Lab]:
    """The shared lab: after a test nothing runs in its nodes that did not before, and a stranger is not hurt."""
    before = lab.processes()
    yield lab
    assert lab.left_since(before) == []
    assert stranger()
