"""Commands on a backend that labctl has never heard of: nothing but its row in the registry tells of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.harness import wait_until

from labctl import flows
from labctl.backends.plan import Plan
from labctl.config.context import Context
from labctl.config.settings import BACKENDS
from labctl.errors import ConfigError, HostError
from labctl.jobs.request import RunOptions
from labctl.model import Event

DECLARED = """\
description: made up
launcher: mpirun
script: made_up.py
timeout: 1m
metrics:
  {metric}: {{pattern: '{metric}: (\\S+)', reduce: last}}
criteria: ['{metric} > 0']
"""
PROGRAM = """\
import os, pathlib, sys, time
if "--wait" in sys.argv:
    print("step 3/9", flush=True)
    while not pathlib.Path(sys.argv[-1]).exists():
        time.sleep(0.01)
nodes = {nodes!r}
print("{metric}:", nodes.get(os.environ["LABCTL_NODE"], 8))
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(BACKENDS, "made-up", "support.made_up_backend")
    flows.init(tmp_path)
    settings = ("LAB_NAME=demo", "LAB_ENGINE=made-up", "LAB_NODES=4", f"HOST_CACHE_PATH={tmp_path}/cache")
    (tmp_path / ".env").write_text("\n".join(settings))
    return tmp_path


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def context(directory: Path, events: list[Event]) -> Iterator[Context]:
    """A lab of four nodes that is up."""
    made = Context(directory=directory, environ={}, emit=events.append, flags={})
    flows.up(made)
    yield made
    flows.down(made)


def declare(directory: Path, name: str, metric: str = "throughput", **nodes: float) -> None:
    """Write a workload whose ranks print a number, that of their node if it is given."""
    folder = directory / "workloads" / name
    folder.mkdir(exist_ok=True)
    (folder / "workload.yml").write_text(DECLARED.format(metric=metric))
    numbers = {f"worker-{node.removeprefix('n')}": number for node, number in nodes.items()}
    (folder / "made_up.py").write_text(PROGRAM.format(metric=metric, nodes=numbers))


def test_a_run_is_launched_judged_and_recorded(context: Context, directory: Path, events: list[Event]) -> None:
    declare(directory, "mine")
    result = flows.run(context, "mine", RunOptions())
    assert (result.verdict, result.message) == ("PASS", "All criteria met on 4 ranks: throughput > 0 (was 8).")
    assert [(rank.rank, rank.node) for rank in result.ranks] == [(number, f"worker-{number}") for number in range(4)]
    assert flows.show(context, "latest") == result
    assert "throughput: 8" in [event.text for event in events if event.kind == "line"]
