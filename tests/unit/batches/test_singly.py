"""The search among nodes of one host, which run alone and in turn."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from labctl.batches import bisect, singly
from labctl.batches.bisect import Diagnosis, Group, Outcome, Stopped

NAMES = ("worker-0", "worker-1", "worker-2", "worker-3")
Speed = Callable[[str, int], Outcome]


def diagnosed(speed: Speed, nodes: Group = NAMES, stop_in: int = 0, **options: float) -> tuple[Diagnosis, list[str]]:
    """Run the search with these outcomes, interrupted in round ``stop_in``; return diagnosis and notices."""
    notices: list[str] = []
    steps = singly.diagnose(nodes, **{"within": 0.15, **options}, notice=notices.append)  # type: ignore[arg-type]
    number = 0
    try:
        groups = next(steps)
        while True:
            number += 1
            if number == stop_in:
                groups = steps.throw(Stopped("Interrupted."))
            groups = steps.send({group: speed(" - ".join(group), number) for group in groups})
    except StopIteration as ended:
        return ended.value, notices


def noisy(deviation: float, **slow: float) -> Speed:
    """Return a function that draws speeds with this deviation, some nodes slower: ``worker_1=0.5``."""
    chance = random.Random(1)  # noqa: S311
    shares = {name.replace("_", "-"): share for name, share in slow.items()}
    return lambda node, _: Outcome(100 * shares.get(node, 1.0) * chance.gauss(1, deviation))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.75])
def test_a_slow_node_is_named_as_soon_as_it_is_certain(share: float) -> None:
    """Make worker-1 slow: it alone is bad within 10 rounds, and one notice names it with p and round."""
    diagnosis, notices = diagnosed(noisy(0.03, worker_1=share))
    assert [(bad.node, bad.kind) for bad in diagnosis.bad] == [("worker-1", "slow")]
    assert set(diagnosis.good) == {*NAMES} - {"worker-1"}
    assert diagnosis.bad[0].figure == pytest.approx(share, abs=0.03)
    named = [notice for notice in notices if notice.startswith("worker-1 is slow: ")]
    assert len(named) == 1
    assert re.search(r"of the others, p < 0\.00\d+, round \d$", named[0])
    assert diagnosis.rounds <= 10


def test_good_nodes_are_good_within_a_few_rounds() -> None:
    """Make all nodes equal: all are good after 6 rounds, and notices say what is open."""
    diagnosis, notices = diagnosed(noisy(0.03))
    assert (diagnosis.bad, diagnosis.unsure, diagnosis.good) == ((), (), NAMES)
    assert diagnosis.rounds == 6
    assert notices[0] == "round 1: each node alone, in turn; at most 23 more"
    assert notices[1].startswith("round 2: each again, as worker-0, worker-1, worker-2, worker-3 may be good or bad;")


def test_runs_that_vary_by_far_accuse_nobody() -> None:
    """Halve runs at random: nobody is bad, some are unsure, the note says the rounds are too few."""
    chance = random.Random(2)  # noqa: S311
    diagnosis, _ = diagnosed(lambda *_: Outcome(100 * chance.choice([0.45, 1.0])))
    assert diagnosis.bad == ()
    assert diagnosis.unsure
    assert diagnosis.note == "The runs vary too much to tell after 24 rounds: repeat with longer runs."


def test_on_a_busy_host_nodes_are_unsure() -> None:
    """Lose half of the time to other programs: all are unsure, and the note says so."""
    diagnosis, _ = diagnosed(lambda *_: Outcome(100.0, lost=0.5))
    assert diagnosis.unsure == NAMES
    assert diagnosis.note == "Other programs used 50 % of the host: repeat when it is idle."


def test_a_failing_node_runs_no_more() -> None:
    """Let worker-2 fail: it is failing after two runs and runs no more."""
    calls: list[str] = []

    def speed(node: str, _: int) -> Outcome:
        """Record the node; fail on worker-2, 100 for others."""
        calls.append(node)
        return Outcome(None, "exit code 1") if node == "worker-2" else Outcome(100.0)

    diagnosis, notices = diagnosed(speed)
    assert [(bad.node, bad.kind) for bad in diagnosis.bad] == [("worker-2", "failing")]
    assert calls.count("worker-2") == bisect.FAILURES
    assert "worker-2 is failing: 2 runs failed, round 2" in notices


def test_a_node_that_failed_once_is_judged_by_its_other_runs() -> None:
    """Let worker-2 fail once: all nodes are good."""
    diagnosis, _ = diagnosed(
        lambda node, number: Outcome(None, "port in use") if (node, number) == ("worker-2", 1) else Outcome(100.0)
    )
    assert set(diagnosis.good) == {*NAMES}


def test_a_node_without_another_to_compare_with_is_unsure() -> None:
    """Let one of two nodes fail: the other is unsure, as nothing is left to compare with."""
    diagnosis, _ = diagnosed(
        lambda node, _: Outcome(None, "exit code 1") if node == "worker-1" else Outcome(100.0), NAMES[:2]
    )
    assert diagnosis.unsure == ("worker-0",)
    assert diagnosis.note == "No other node to compare worker-0 with."


def test_a_search_by_failures_alone_ends_after_good_runs() -> None:
    """Search by failures alone: all are good after one round."""
    diagnosis, _ = diagnosed(noisy(0.3), within=singly.RUNS_ALONE)
    assert (diagnosis.good, diagnosis.rounds) == (NAMES, 1)


def test_if_no_run_passes_nobody_is_accused() -> None:
    """Let every run fail: nobody is bad, all are unsure, none_good is True."""
    diagnosis, _ = diagnosed(lambda *_: Outcome(None, "exit code 1"))
    assert (diagnosis.bad, diagnosis.unsure, diagnosis.none_good) == ((), NAMES, True)
    assert diagnosis.note == "No run was good: look at the workload, or at the minimum."


def test_if_all_nodes_are_below_the_minimum_it_is_doubted_before_they_are() -> None:
    """Set a minimum above all nodes: nobody is bad, all are unsure, none_good is True."""
    diagnosis, notices = diagnosed(noisy(0.02), minimum=200)
    assert (diagnosis.bad, diagnosis.unsure, diagnosis.none_good) == ((), NAMES, True)
    assert not [line for line in notices if "is slow" in line]


def test_a_node_below_the_minimum_is_slow_even_if_the_others_differ_little() -> None:
    """Set a minimum that one node misses by little: it is bad, shown by "below 94 in 11 of 11 runs"."""
    diagnosis, _ = diagnosed(noisy(0.01, worker_2=0.9), minimum=94)
    assert [bad.node for bad in diagnosis.bad] == ["worker-2"]
    assert bisect.shown_by(diagnosis.bad[0]) == "below 94 in 11 of 11 runs"


def test_a_run_below_the_minimum_does_not_count_where_other_programs_may_be_why() -> None:
    """Put a node below the minimum by others' load: unsure, not bad."""
    busy = {node: 0.3 if node == "worker-2" else 0.0 for node in NAMES}
    diagnosis, _ = diagnosed(lambda node, _: Outcome(100 * (1 - busy[node]), lost=busy[node]), minimum=94)
    assert (diagnosis.bad, diagnosis.unsure) == ((), ("worker-2",))


def test_of_two_nodes_the_slower_one_is_found() -> None:
    """Make one of two nodes half as fast: it is bad, the other good."""
    diagnosis, _ = diagnosed(noisy(0.03, worker_1=0.5), NAMES[:2])
    assert [bad.node for bad in diagnosis.bad] == ["worker-1"]
    assert diagnosis.good == ("worker-0",)


def test_when_it_is_stopped_it_returns_what_is_known() -> None:
    """Interrupt round 3: the diagnosis has two rounds, the note, and all nodes unsure."""
    diagnosis, _ = diagnosed(noisy(0.03), stop_in=3)
    assert (diagnosis.rounds, diagnosis.note, diagnosis.unsure) == (2, "Interrupted.", NAMES)


def test_nodes_whose_workload_needs_two_run_in_pairs() -> None:
    """Give single nodes no speed: they run in pairs, and all are good."""
    diagnosis, _ = diagnosed(lambda group, _: Outcome(100.0 if " - " in group else 0.0))
    assert (set(diagnosis.good), diagnosis.runs) == ({*NAMES}, 3)
