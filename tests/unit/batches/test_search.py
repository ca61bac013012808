"""The search for bad nodes, round by round, with simulated runs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from msgspec.structs import replace
from support import builders

from labctl.batches import bisect, search
from labctl.batches.bisect import BadNode, Diagnosis
from labctl.batches.record import Batch, BatchJob
from labctl.batches.search import Rounded
from labctl.config import hostfile
from labctl.config.context import Context
from labctl.errors import HostError
from labctl.model import Lab, Metric

Speed = Callable[[tuple[str, ...]], float | None]


def lab(directory: Path, nodes: int = 4) -> Lab:
    """Return a lab of this many nodes."""
    return builders.lab(nodes, directory=directory)


def running(speed: Speed, rounds: list[list[tuple[str, ...]]]) -> Callable[[Path], Rounded]:
    """Return a stand-in for a batch: groups run at ``speed``, None for a failure; ``rounds`` gets the groups."""

    def run(folder: Path) -> Rounded:
        """Record the groups of the folder's hostfiles; return a batch with a job at ``speed`` for each."""
        paths = sorted(folder.glob("hostfile_*"))
        groups = [tuple(name for name, _ in hostfile.parse(path.read_text(), str(path))) for path in paths]
        rounds.append(groups)
        jobs = tuple(job(path.name, group, speed(group)) for path, group in zip(paths, groups, strict=True))
        return Rounded(Batch(workload="opt", lab="demo", metric="throughput", timeout=9, began=0, jobs=jobs), {})

    return run


def job(name: str, nodes: tuple[str, ...], value: float | None) -> BatchJob:
    """Return a job that is done: PASS with this value, or ERROR with cause rank-crashed for None."""
    return BatchJob(
        job=name,
        set="round01",
        hostfile=name,
        names=nodes,
        nodes=nodes,
        log=f"{name}.log",
        state="done",
        verdict="ERROR" if value is None else "PASS",
        cause="rank-crashed" if value is None else None,
        value=value,
    )


def diagnosed(directory: Path, speed: Speed, rounds: list[list[tuple[str, ...]]], nodes: int = 8) -> Diagnosis:
    """Search among nodes whose groups run at ``speed``; return the diagnosis, and fill ``rounds`` with the groups."""
    of = lab(directory, nodes)
    names = tuple(node.name for node in of.nodes)
    diagnosis, interrupted = search.search(of, directory / "out", running(speed, rounds), bisect.diagnose(names))
    assert not interrupted
    return diagnosis


@pytest.mark.parametrize(("metric", "least"), [("throughput", 25), ("busbw", 100)])
def test_a_bound_is_shared_by_the_nodes_where_the_metric_is_a_total(metric: str, least: float) -> None:
    """Ask for a bound of 100 on 4 nodes: 25 for throughput, 100 for busbw."""
    assert search.least(metric, 100, 4) == least


@pytest.mark.parametrize(
    ("why", "sign", "searched"), [("busbw", ">=", True), ("latency", "<=", False), ("latency", ">=", False)]
)
def test_only_the_metric_that_runs_are_compared_by_is_searched_by(why: str, sign: str, searched: bool) -> None:
    """Ask is_searched_by for metric and sign: true for the compared metric with >= alone."""
    assert search.is_searched_by(Metric(name="busbw", pattern="x"), why, sign) is searched


def test_a_slow_node_is_found_by_rounds_of_hostfiles(tmp_path: Path) -> None:
    """Make worker-5 half as fast: it alone is bad with figure 0.5, and no round uses a node twice."""
    rounds: list[list[tuple[str, ...]]] = []
    diagnosis = diagnosed(tmp_path, lambda group: len(group) * (50 if "worker-5" in group else 100), rounds)
    assert [(bad.node, bad.kind, bad.figure) for bad in diagnosis.bad] == [("worker-5", "slow", 0.5)]
    assert len(rounds) == diagnosis.rounds
    for groups in rounds:
        named = [node for group in groups for node in group]
        assert len(named) == len(set(named))


def test_a_failing_node_is_found_with_its_cause(tmp_path: Path) -> None:
    """Let runs with worker-0 crash: it is failing, with rank-crashed in its runs."""
    diagnosis = diagnosed(tmp_path, lambda group: None if "worker-0" in group else 100.0 * len(group), [])
    (bad,) = diagnosis.bad
    assert (bad.node, bad.kind) == ("worker-0", "failing")
    assert {run.why for run in bad.runs} == {"rank-crashed"}


def test_a_search_ends_with_the_launcher() -> None:
    """Take the outcomes of a round that lost the launcher: HostError says so, as no node is to blame."""
    lost = replace(job("a", ("x",), None), verdict="ERROR", cause="lab-lost", message="launcher: container died")
    batch = Batch(workload="hello", lab="demo", timeout=1, began=0, jobs=(lost,))
    with pytest.raises(HostError, match="launcher: container died"):
        search.outcomes((("x",),), Rounded(batch, {}))


def test_the_value_of_a_run_that_only_missed_its_criteria_counts() -> None:
    """Take the outcome of a job that failed its criteria: its value per node counts."""
    missed = BatchJob(
        job="a", set="s", hostfile="h", names=("x", "y"), nodes=("x", "y"), log="l", state="done", verdict="FAIL",
        cause="criteria", value=80,
    )  # fmt: skip
    assert search.outcome(missed, "throughput").value == 40


def test_a_value_that_does_not_grow_with_the_nodes_is_not_divided_by_them() -> None:
    """Take the outcome of busbw: the value is not divided by the nodes."""
    assert search.outcome(job("a", ("x", "y"), 80), "busbw").value == 80


def test_runs_of_a_workload_without_metrics_pass_or_fail() -> None:
    """Take outcomes without a metric: 1 for a passed job, None for a failed one."""
    assert search.outcome(replace(job("a", ("x",), 1), value=None), "").value == 1
    assert search.outcome(job("a", ("x",), None), "").value is None


def test_bad_nodes_are_added_to_the_drained_ones_once(tmp_path: Path) -> None:
    """Drain two bad nodes, one listed before: drained.txt gets one line with figure and date, both are returned."""
    of = lab(tmp_path)
    (tmp_path / "drained.txt").write_text("worker-0  # fan broken\n")
    bad = tuple(BadNode(node=name, kind="slow", figure=0.5, runs=()) for name in ("worker-0", "worker-2"))
    diagnosis = Diagnosis(bad=bad, links=(), good=(), unsure=(), unexplained=(), rounds=1, runs=1)
    assert search.drained_by(of, diagnosis, date(2026, 1, 2)) == ("worker-0", "worker-2")
    assert (tmp_path / "drained.txt").read_text() == (
        "worker-0  # fan broken\nworker-2  # slow, 50 % of the median, 2026-01-02\n"
    )


def test_ctrl_c_returns_what_is_known(tmp_path: Path) -> None:
    """Interrupt round 7: the diagnosis has the slow node, a note that names the round, and ended is True."""
    rounds: list[list[tuple[str, ...]]] = []
    run = running(lambda group: len(group) * (50 if "worker-5" in group else 100), rounds)

    def interrupted(folder: Path) -> Rounded:
        """Raise KeyboardInterrupt in round07; run other rounds."""
        if folder.name == "round07":
            raise KeyboardInterrupt
        return run(folder)

    of = lab(tmp_path, 8)
    names = tuple(node.name for node in of.nodes)
    diagnosis, ended = search.search(of, tmp_path / "out", interrupted, bisect.diagnose(names))
    assert (ended, diagnosis.note, [bad.node for bad in diagnosis.bad]) == (
        True,
        "Interrupted in round 7.",
        ["worker-5"],
    )


@pytest.mark.parametrize(
    ("good", "unsure", "none_good", "code"),
    [(("a", "b"), (), False, 0), ((), ("a", "b"), True, 5), ((), ("a", "b"), False, 6), (("a",), ("b",), False, 6)],
)
def test_a_search_that_no_run_of_was_good_fails(
    good: tuple[str, ...], unsure: tuple[str, ...], none_good: bool, code: int
) -> None:
    """Ask for exit codes: 0 if all are good, 5 if no run was good, 6 if some node is unsure."""
    diagnosis = Diagnosis(
        bad=(), links=(), good=good, unsure=unsure, unexplained=(), rounds=1, runs=1, none_good=none_good
    )
    report = search.BisectReport(directory="out", workload="opt", metric="", unit="", diagnosis=diagnosis)
    assert report.exit_code == code


def test_a_search_keeps_why_each_round_ran_and_what_came_out(tmp_path: Path) -> None:
    """Its notes are there while it is under way, its report once it has ended; neither of an earlier labctl."""
    assert (search.read_notes(tmp_path), search.read_report(tmp_path)) == ((), None)
    told: list[str] = []
    context = Context(directory=tmp_path, environ={}, emit=lambda event: told.append(event.text), flags={})
    for text in ("round 1: all nodes in pairs", "worker-1 is slow"):
        search._note(context, tmp_path / "search" / search.NOTES, text)
    assert search.read_notes(tmp_path / "search") == tuple(told) == ("round 1: all nodes in pairs", "worker-1 is slow")
