"""A lab at a moment: its status, samples and hangs of runs under way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from support.builders import job, lab
from support.fake_backend import FakeBackend
from support.in_memory import InMemory

from labctl.backends.status import LabStatus, NodeStatus, RunState
from labctl.errors import HostError
from labctl.model import File, Hang, Lab, Secret
from labctl.records import store
from labctl.runs import labs

RUN = "20260102-150405-hello-3fa2"
HANG = Hang(kind="collective", sentence="rank 1 waits in all_reduce #6")


@pytest.fixture
def of(tmp_path: Path) -> Lab:
    """Write the record of a run that has begun; return its lab."""
    of = lab(directory=tmp_path)
    content = json.dumps({"job": msgspec.to_builtins(replace(job(of), files=()), enc_hook=str)})
    store.create(of, RUN, (), (File(path="job.json", content=content),))
    return of


def looked(of: Lab, monkeypatch: pytest.MonkeyPatch, hang: str | None) -> labs.LabNow:
    """Look at a lab with a run under way; worker-1 is silent, and the launcher has this text on a hang, or no file."""

    def answer(container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Yield samples for sh and the hang for cat."""
        if container.endswith("worker-1-1") or (argv[:1] == ("cat",) and hang is None):
            raise HostError("no answer")
        if argv[:1] == ("cat",):
            assert argv[1].endswith(f"/{store.HANG}")
            yield str(hang)
        else:
            yield from ("seconds (s),CPU (cores)", "1,0.5")

    nodes = tuple(
        NodeStatus(name=f"worker-{number}", role="worker", host="local", state="running", run=RUN) for number in (0, 1)
    )
    status = LabStatus(lab="demo", state="up", nodes=nodes, unreachable=(), runs=(RunState(RUN, "running"),))
    monkeypatch.setattr(labs, "status", lambda _: status)
    return labs.look(InMemory(of, FakeBackend(answer=answer)))


def test_nodes_of_a_run_have_samples_and_a_silent_one_has_none(of: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    now = looked(of, monkeypatch, None)
    assert now.samples["worker-0"].values["CPU"].value == 0.5
    assert now.samples["worker-1"].values == {}
    assert now.hangs == {}


def test_a_hang_of_a_run_under_way_is_read_from_its_nodes(of: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    now = looked(of, monkeypatch, msgspec.json.encode(HANG).decode())
    assert now.hangs[RUN].sentence == HANG.sentence
    assert looked(of, monkeypatch, "{").hangs == {}


def test_a_secret_in_a_hang_is_masked() -> None:
    of = lab(hidden=(Secret("CANARY-token"),))
    hang = replace(HANG, sentence="rank 1 waits for CANARY-token", lines=("CANARY-token",))
    assert "CANARY" not in str(store.redacted_hang(hang, of))
