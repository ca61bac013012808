"""Shared labs: lent by their settings, up, and restored afterwards."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from support.harness import Lab

Settings = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class State:
    """A lab's .env, workload files and containers, as the next test expects them."""

    environment: bytes
    workloads: dict[Path, bytes]
    containers: dict[str, tuple[str, str, str]]
    """Id, start time and status by node."""


class Labs:
    """Pool of a session's labs by settings. ``make`` makes a lab directory; the caller removes its containers."""

    def __init__(self, make: Callable[[dict[str, str]], Lab]) -> None:
        self._make = make
        self._idle: defaultdict[Settings, list[Lab]] = defaultdict(list)

    @contextlib.contextmanager
    def lend(self, **settings: str) -> Iterator[Lab]:
        """Yield an idle or new lab with these settings, up; afterwards restore it for reuse, or else destroy it."""
        idle = self._idle[tuple(sorted(settings.items()))]
        lab = idle.pop() if idle else self._new(settings)
        before = state(lab)
        processes = lab.processes()
        yield lab
        if put_right(lab, before, processes):
            idle.append(lab)
        else:
            lab.destroy()

    def _new(self, settings: dict[str, str]) -> Lab:
        """Make a lab with these settings and bring it up."""
        lab = self._make(settings)
        lab.call("up", limit=300).expect(0)
        return lab


def state(lab: Lab) -> State:
    """Return the lab's .env and workload files, and its containers' ids, start times and states."""
    files = (path for path in (lab.path / "workloads").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return State(
        environment=(lab.path / ".env").read_bytes(),
        workloads={path: path.read_bytes() for path in files},
        containers={
            node: (container.id or "", container.attrs["State"]["StartedAt"], container.status)
            for node, container in lab.containers().items()
        },
    )


def put_right(lab: Lab, before: State, processes: dict[tuple[str, str], dict[str, str]]) -> bool:
    """Restore .env, workloads and, by `up`, containers; return False if `up` fails or new processes remain."""
    after = state(lab)
    if after.environment != before.environment:
        (lab.path / ".env").write_bytes(before.environment)
    for path in after.workloads.keys() - before.workloads.keys():
        path.unlink()
    for path, content in before.workloads.items():
        if after.workloads.get(path) != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    if after.containers != before.containers and lab.call("up", limit=300).code != 0:
        return False
    return not lab.left_since(processes)
