from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support.builders import job, lab
from support.fake_backend import FakeBackend
from support.in_memory import InMemory

from labctl.backends.docker.agent import AGENT
from labctl.errors import ConfigError, HostError
from labctl.model import File, Lab, Metric
from labctl.records import store
from labctl.records.active import ActiveRun
from labctl.runs import top
from labctl.runs.top import Observer, RunView

RUN = "20260102-150405-hello-3fa2"
ACTIVE = ActiveRun(id=RUN, nodes=("worker-0",), state="running", order=2.0)
END = 'end {"code": 0, "seconds": 3}'


@pytest.fixture
def of(tmp_path: Path) -> Lab:
    """Write the record of a run that has begun; return its lab."""
    of = lab(directory=tmp_path)
    requested = replace(job(of, metrics=(Metric(name="loss", pattern=r"loss (\S+)"),)), files=())
    content = json.dumps({"job": msgspec.to_builtins(requested, enc_hook=str)})
    store.create(of, RUN, (), (File(path="job.json", content=content),))
    return of


def observer(of: Lab, *printed: str, run: ActiveRun = ACTIVE) -> Observer:
    """Build the observer of a run whose agent prints these lines; each node has a sample."""

    def answer(_: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Yield a sample for sh, and the printed lines for the agent's follow."""
        if argv[:1] == ("sh",):
            yield from ("seconds (s),cpu (%)", "1,50")
        elif argv[len(AGENT)] == "follow":
            yield from printed

    return Observer(InMemory(of, FakeBackend(answer=answer)), run)


def records(of: Lab) -> set[Path]:
    """Return all paths below runs/."""
    return {*(of.directory / "runs").rglob("*")}


def test_one_look_knows_what_was_printed_before_and_records_nothing(of: Lab) -> None:
    """Look once: state, progress, metrics and samples, and no file is written."""
    before = records(of)
    view = observer(of, "9 1000.0 step 1/5 loss 3", "18 1002.0 step 2/5 loss 2", END).look()
    assert (view.state, view.workload, view.progress.step, view.progress.seconds_left) == ("ended", "hello", 2, 6.0)
    assert view.progress.metrics["loss"]["value"] == 2.0
    assert [node.values["cpu"].value for node in view.nodes] == [50.0] * len(view.nodes)
    assert records(of) == before


def test_each_node_is_asked_for_its_own_sample_and_one_that_is_silent_has_none(of: Lab) -> None:
    """Look with one silent node: its values are empty, the other's are from its own samples file."""

    def answer(container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Yield the end for the agent, a sample for worker-0; raise HostError for worker-1."""
        if argv[:1] != ("sh",):
            yield END
            return
        if container.endswith("worker-1-1"):
            raise HostError("no answer", node="worker-1")
        assert argv[-1].endswith("/samples/worker-0.csv")
        yield from ("seconds (s),cpu (%)", "1,50")

    first, second = Observer(InMemory(of, FakeBackend(answer=answer)), ACTIVE).look().nodes
    assert (first.values["cpu"].value, second.node, second.values) == (50.0, "worker-1", {})


def test_it_is_watched_until_it_ends(of: Lab) -> None:
    """Watch until the end: the last view is "ended"."""
    views: list[RunView] = []

    def show(view: RunView) -> bool:
        """Record the view; go on."""
        views.append(view)
        return True

    last = observer(of, "9 1000.0 step 1/5", END).watch(show)
    assert (last, last.state) == (views[-1], "ended")


@pytest.mark.parametrize(("waits", "state"), [(False, "running"), (True, "waiting")])
def test_it_is_watched_until_somebody_has_enough(
    of: Lab, monkeypatch: pytest.MonkeyPatch, waits: bool, state: str
) -> None:
    """Watch until show returns False: the state is running, or waiting if the run waits."""
    enough = threading.Event()
    monkeypatch.setattr("labctl.backends.docker.agent.follow", lambda *_: enough.wait(60))
    view = observer(of, run=replace(ACTIVE, waits=waits)).watch(lambda _: False)
    enough.set()
    assert view.state == state


def test_a_connection_that_is_lost_is_an_error(of: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the connection: watch raises HostError."""

    def lost(*_: object) -> None:
        """Raise HostError "the launcher does not answer"."""
        raise HostError("the launcher does not answer")

    monkeypatch.setattr("labctl.backends.docker.agent.follow", lost)
    with pytest.raises(HostError, match="does not answer"):
        observer(of).watch(lambda _: True)


# --- which run -----------------------------------------------------------------------------------------------


def chosen(of: Lab, run: str, *active: ActiveRun) -> ActiveRun:
    """Return the run that top chooses among these active ones."""
    context = SimpleNamespace(directory=of.directory)
    backend: Any = SimpleNamespace(context=context, active=lambda: {run.id: run for run in active})
    return top.under_way(backend, run)


def test_the_latest_run_that_is_under_way_here_is_watched(of: Lab) -> None:
    """Choose without an id: the latest running one that is recorded here; with an id that one."""
    earlier = replace(ACTIVE, id="20260101-000000-hello-0000", order=1.0)
    store.create(of, earlier.id, ())
    ended = replace(ACTIVE, id="20260103-000000-hello-0000", order=3.0, state="ended")
    elsewhere = replace(ACTIVE, id="20260104-000000-hello-0000", order=4.0)
    runs = (ACTIVE, earlier, ended, elsewhere)
    assert chosen(of, "", *runs) == ACTIVE
    assert chosen(of, earlier.id, *runs) == earlier


@pytest.mark.parametrize(
    ("run", "runs", "message", "hint"),
    [
        ("", (), "no run is under way", "labctl run opt-tiny"),
        (RUN, (replace(ACTIVE, state="ended"),), f"run {RUN} is not under way", f"labctl show {RUN}"),
        ("latest", (), f"run {RUN} is not under way", f"labctl show {RUN}"),
        ("", (replace(ACTIVE, state="unknown"),), "the launcher does not answer", "labctl status"),
    ],
)
def test_where_no_run_is_under_way_that_is_said(
    of: Lab, run: str, runs: tuple[ActiveRun, ...], message: str, hint: str
) -> None:
    """Choose where no run is running: HostError with a command."""
    with pytest.raises(HostError, match=message) as raised:
        chosen(of, run, *runs)
    assert hint in raised.value.hint


def test_an_unknown_run_is_a_mistake(of: Lab) -> None:
    """Choose an unknown run: ConfigError."""
    with pytest.raises(ConfigError, match="no run `nothing`"):
        chosen(of, "nothing")
