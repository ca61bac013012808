from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import builders
from support.in_memory import InMemory

from labctl.backends.docker.backend import NewRun
from labctl.backends.docker.deploy import readiness
from labctl.errors import HostError
from labctl.jobs.request import RunOptions
from labctl.model import File, Lab
from labctl.records import store
from labctl.runs import start
from labctl.system import filelock

EARLIER = "20260101-150405-hello-3fa2"


@pytest.fixture
def of(tmp_path: Path) -> Lab:
    """Write the record of an earlier run that no process supervises; return its lab."""
    of = builders.lab(directory=tmp_path)
    store.create(of, EARLIER, (), (File(path="job.json", content=json.dumps({"workload": "hello"})),))
    return of


def test_a_preview_does_not_mind_a_port_that_an_earlier_run_has_which_is_ended_first(
    of: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preview a run while the earlier one has its port: the first step ends that; HostError once it is judged."""

    def in_use(*_: object) -> None:
        """Raise HostError "port 29500 is in use"."""
        raise HostError("port 29500 is in use")

    monkeypatch.setattr(readiness, "require_port", in_use)
    run = NewRun(lab=of, job=builders.job(of), observed=builders.observed(of))
    first, *_ = start.plan(InMemory(of), run, RunOptions(), preview=True).steps
    assert str(first) == f"end, fetch and close runs/{EARLIER}"
    (store.directory(of.directory, EARLIER) / store.RESULT).write_text("{}")
    with pytest.raises(HostError, match="port 29500 is in use"):
        start.plan(InMemory(of), run, RunOptions(), preview=True)


def test_results_of_an_earlier_run_are_not_gathered_while_another_command_changes_the_lab(
    of: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gather results while another command holds the lab's lock: HostError; afterwards it works."""
    monkeypatch.setattr(start, "STAGING", 0)
    (store.directory(of.directory, EARLIER) / store.RESULT).write_text("{}")
    with filelock.held(of.directory / filelock.LAB, "labctl down"), pytest.raises(HostError, match="labctl down"):
        start.gather(InMemory(of), EARLIER)
    start.gather(InMemory(of), EARLIER)
