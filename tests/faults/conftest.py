"""What stands beside every fault: a container of somebody else, which notices nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from support.harness import Lab

from docker import DockerClient

# What Lab.plant_canary starts.
CANARY = re.compile(r"sleep 8\d{4}")


@pytest.fixture(scope="session")
def strangers_container(engine: DockerClient, image: str, family: str) -> Iterator[Callable[[], bool]]:
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
def nothing_left(lab: Lab, strangers_container: Callable[[], bool]) -> Iterator[None]:
    """What runs in the lab's containers after the test is what ran before it, and the stranger's is as it was.

    Of containers that ended meanwhile nothing is asked.
    """
    before, identities = lab.processes(), lab.identities()
    yield
    assert strangers_container()
    after = lab.processes()
    for node in (node for node in after if lab.identities()[node] == identities.get(node)):
        left = [command for command in Counter(after[node]) - Counter(before[node]) if not CANARY.fullmatch(command)]
        assert left == [], node
        assert Counter(before[node]) - Counter(after[node]) == Counter(), node
