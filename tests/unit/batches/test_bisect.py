"""Bisection on simulated clusters; `python tests/bisect_table.py` measures more of them."""

from __future__ import annotations

import random
from math import ceil, log2

import pytest
from bisect_table import FAILS, SCENARIOS, Cluster, names, score, solve

from labctl.batches.bisect import NOT_CONFIRMED, Diagnosis, Group, Outcome, Steps, confirm, diagnose, shown_by


def accused(diagnosis: Diagnosis) -> set[str | frozenset[str]]:
    """Return the bad nodes, and each bad link as a set of two nodes."""
    return {*(bad.node for bad in diagnosis.bad), *(frozenset(link.nodes) for link in diagnosis.links)}


@pytest.mark.parametrize("speed", [0.7, FAILS])
@pytest.mark.parametrize("count", [8, 16, 64, 256, 1024, 4096])
def test_one_bad_node_is_found_in_four_rounds_more_than_log2_of_the_nodes(count: int, speed: float) -> None:
    """Plant one bad node: it alone is accused, within log2 + 4 rounds or 7, and the others are good."""
    diagnosis = solve(Cluster(nodes=names(count), slow={"worker-5": speed}))
    assert accused(diagnosis) == {"worker-5"}
    # Fewer nodes leave fewer to compare with, and take more rounds.
    assert diagnosis.rounds <= max(7, ceil(log2(count)) + 4)
    assert diagnosis.good == tuple(node for node in names(count) if node != "worker-5")


def test_the_evidence_of_a_bad_node_is_bad_runs_with_different_good_partners() -> None:
    """Plant one slow or failing node: the evidence is three bad runs with different partners and a small p."""
    (bad,) = solve(Cluster(nodes=names(16), slow={"worker-5": 0.7})).bad
    assert bad.kind == "slow"
    assert bad.figure == pytest.approx(0.7, abs=0.05)
    assert [run.bad for run in bad.runs] == [True, True, True]
    assert bad.p is not None
    assert bad.p < 0.001
    assert len({node for run in bad.runs for node in run.nodes}) == 4
    (bad,) = solve(Cluster(nodes=names(16), slow={"worker-5": FAILS})).bad
    assert (bad.kind, bad.figure, bad.runs[0].why) == ("failing", None, "exit code 1")


@pytest.mark.parametrize("speed", [0.5, FAILS])
@pytest.mark.parametrize("ends", [("worker-0", "worker-1"), ("worker-3", "worker-12"), ("worker-7", "worker-9")])
def test_a_bad_link_is_a_link_and_not_two_nodes(ends: tuple[str, str], speed: float) -> None:
    """Plant one bad link: it is accused, no node is, and runs of each end apart were good."""
    for seed in range(20):
        diagnosis = solve(Cluster(nodes=names(16), links={ends: speed}), seed)
        assert accused(diagnosis) == {frozenset(ends)}
        assert set(diagnosis.good) == set(names(16))
        (link,) = diagnosis.links
        assert link.kind == ("slow" if speed else "failing")
        assert sum(run.bad for run in link.runs) >= 2
        assert [(set(link.nodes) & set(run.nodes), run.bad) for run in link.apart] == [
            ({link.nodes[0]}, False),
            ({link.nodes[1]}, False),
        ]


def test_a_bad_link_of_1024_nodes_is_found_in_far_fewer_rounds_than_all_pairs_take() -> None:
    """Plant one bad link among 1024 nodes: found in at most 4 * log2 rounds with five seeds, no other accused."""
    results = [score(SCENARIOS["one bad link"], 1024, seed) for seed in range(5)]
    assert [(score.found, score.wrong) for score in results] == [(1, 0)] * 5
    assert max(score.rounds for score in results) <= 4 * log2(1024)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 16, 31])
def test_nothing_is_accused_where_nothing_is_bad(count: int) -> None:
    """Plant nothing: nobody is accused or unsure, with 200 seeds."""
    for seed in range(200):
        diagnosis = solve(Cluster(nodes=names(count)), seed)
        assert accused(diagnosis) == set()
        assert (diagnosis.good, diagnosis.unsure, diagnosis.note) == (names(count), (), "")


def test_accidents_accuse_nobody() -> None:
    """Let 1 in 100 runs fail by accident: nobody is accused, with 100 seeds."""
    for seed in range(100):
        assert accused(solve(Cluster(nodes=names(32), accidents=0.01), seed)) == set()


def test_a_quarter_of_bad_nodes_is_found() -> None:
    """Plant 16 bad nodes of 64: all are found, and no other accused."""
    for seed in range(20):
        result = score(SCENARIOS["1 in 4 nodes failing or at 0.7"], 64, seed)
        assert (result.found, result.wrong) == (16, 0)


def test_bad_nodes_and_links_are_told_apart() -> None:
    """Plant two bad nodes and three bad links: exactly these are accused."""
    for seed in range(20):
        cluster = Cluster(
            nodes=names(64),
            slow={"worker-3": 0.7, "worker-20": FAILS},
            links={("worker-0", "worker-9"): 0.5, ("worker-0", "worker-33"): FAILS, ("worker-5", "worker-6"): 0.5},
        )
        assert accused(solve(cluster, seed)) == {*cluster.slow, *map(frozenset, cluster.links)}


def test_what_groups_lose_by_their_size_accuses_nobody() -> None:
    """Let larger groups be slower: nobody is accused, and only the group of all nodes may stay unexplained."""
    for count in (4, 8, 16, 64):
        diagnosis = solve(Cluster(nodes=names(count), growth=0.15))
        assert accused(diagnosis) == set()
        assert [run.nodes for run in diagnosis.unexplained if len(run.nodes) < count] == []


def test_of_two_nodes_single_runs_decide() -> None:
    """Plant a bad node or link of two nodes: exactly that one is accused."""
    pair = ("a", "b")
    assert accused(solve(Cluster(nodes=pair, slow={"a": 0.7}))) == {"a"}
    assert accused(solve(Cluster(nodes=pair, slow={"b": FAILS}))) == {"b"}
    assert accused(solve(Cluster(nodes=pair, links={pair: FAILS}))) == {frozenset(pair)}
    assert accused(solve(Cluster(nodes=pair, links={pair: 0.5}), minimum=80)) == {frozenset(pair)}


def test_of_three_nodes_all_pairs_decide() -> None:
    """Plant a bad node or link of three nodes: exactly that one is accused."""
    trio = ("a", "b", "c")
    assert accused(solve(Cluster(nodes=trio, slow={"c": 0.7}))) == {"c"}
    assert accused(solve(Cluster(nodes=trio, links={("a", "c"): 0.5}))) == {frozenset("ac")}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 33])
def test_where_everything_fails_no_node_is_accused(count: int) -> None:
    """Let every run fail: nobody is accused, all are unsure, the note says no run was good."""
    diagnosis = solve(Cluster(nodes=names(count), slow=dict.fromkeys(names(count), FAILS)))
    assert (diagnosis.bad, diagnosis.links, diagnosis.unsure) == ((), (), names(count))
    assert diagnosis.note == "No run was good: look at the workload, or at the minimum."


def test_where_no_pair_works_nodes_that_fail_alone_are_still_found() -> None:
    """Let every pair and one node alone fail: that node is accused, the others are unsure."""
    everyone = names(6)
    links = {(first, second): FAILS for first in everyone for second in everyone if first < second}
    diagnosis = solve(Cluster(nodes=everyone, slow={"worker-2": FAILS}, links=links))
    assert accused(diagnosis) == {"worker-2"}
    assert diagnosis.unsure == tuple(node for node in everyone if node != "worker-2")
    assert diagnosis.note.startswith("No two nodes ran well together")


def test_of_three_nodes_one_that_is_well_alone_is_not_called_good() -> None:
    """Let every pair of three nodes fail: no node is good, all are unsure."""
    trio = names(3)
    links = {(first, second): FAILS for first in trio for second in trio if first < second}
    diagnosis = solve(Cluster(nodes=trio, links=links))
    assert (diagnosis.good, diagnosis.unsure) == ((), trio)


def of_bandwidth(count: int, together: float) -> Diagnosis:
    """Diagnose with minimum 9, each group of several at this bandwidth and a single node at 0."""
    steps = diagnose(names(count), minimum=9)
    groups = next(steps)
    while True:
        try:
            groups = steps.send({group: Outcome(together if len(group) > 1 else 0.0) for group in groups})
        except StopIteration as ended:
            diagnosis: Diagnosis = ended.value
            return diagnosis


@pytest.mark.parametrize("count", [2, 3])
def test_a_bandwidth_that_a_single_rank_does_not_have_accuses_no_node(count: int) -> None:
    """Give two or three nodes enough bandwidth, and single ranks 0: nobody is accused."""
    assert accused(of_bandwidth(count, 10.0)) == set()


def test_a_low_bandwidth_of_two_nodes_is_their_links() -> None:
    """Give two nodes bandwidth below the minimum: their link is accused."""
    assert accused(of_bandwidth(2, 4.0)) == {frozenset(names(2))}


def test_a_minimum_finds_that_all_are_slow() -> None:
    """Make all nodes equally slow: unnoticed without a minimum, "No run was good" with one."""
    cluster = Cluster(nodes=names(8), slow=dict.fromkeys(names(8), 0.5))
    assert solve(cluster).note == ""
    assert solve(cluster, minimum=80).note == "No run was good: look at the workload, or at the minimum."


def test_at_the_limit_of_rounds_suspects_are_unsure() -> None:
    """Allow two rounds: no node is accused, the bad one is unsure, the note names the limit."""
    diagnosis = solve(Cluster(nodes=names(8), slow={"worker-5": FAILS}), rounds=2)
    assert (diagnosis.rounds, diagnosis.bad, diagnosis.note) == (2, (), "The limit of 2 rounds was reached.")
    assert "worker-5" in diagnosis.unsure


def test_it_ends_within_the_limit_whatever_runs_say() -> None:
    """Answer runs at random: it ends within 40 rounds, and each node is good, unsure or bad exactly once."""
    chance = random.Random(1)  # noqa: S311
    for seed in range(100):
        nodes, rounds = names(chance.randint(1, 20)), 0
        steps = diagnose(nodes, seed=seed, rounds=40)
        answer: dict[Group, Outcome] | None = None
        while True:
            try:
                groups = next(steps) if answer is None else steps.send(answer)
            except StopIteration as stop:
                diagnosis: Diagnosis = stop.value
                break
            rounds += 1
            answer = {group: Outcome(chance.choice([None, 60.0, 90.0, 100.0])) for group in groups}
        assert rounds == diagnosis.rounds <= 40
        assert sorted((*diagnosis.good, *diagnosis.unsure, *(bad.node for bad in diagnosis.bad))) == sorted(nodes)


def test_another_seed_pairs_other_nodes() -> None:
    """Take the first groups: equal for the same seed, different for another."""
    assert next(diagnose(names(8), seed=1)) == next(diagnose(names(8), seed=1)) != next(diagnose(names(8), seed=2))


def done(steps: Steps[Diagnosis], cluster: Cluster, seed: int = 0) -> Diagnosis:
    """Run the rounds of a search on a cluster; return the diagnosis."""
    chance = random.Random(seed)  # noqa: S311
    try:
        groups = next(steps)
        while True:
            groups = steps.send({group: cluster.run(group, chance) for group in groups})
    except StopIteration as ended:
        diagnosis: Diagnosis = ended.value
        return diagnosis


@pytest.mark.parametrize("count", [2, 3, 4, 8, 16, 64])
def test_what_is_slow_at_one_time_alone_is_unsure(count: int) -> None:
    """Confirm a slow node: accused if slow again, unsure with NOT_CONFIRMED if not."""
    bad = Cluster(nodes=names(count), slow={"worker-1": 0.6})
    for seed in range(20):
        first = done(diagnose(names(count), seed=seed), bad, seed)
        assert accused(first) == {"worker-1"}
        again = done(confirm(first, seed=seed), bad, seed)
        assert (accused(again), set(again.good)) == ({"worker-1"}, {*names(count)} - {"worker-1"})
        later = done(confirm(first, seed=seed), Cluster(nodes=names(count)), seed)
        assert (accused(later), later.unsure, later.note) == (set(), ("worker-1",), NOT_CONFIRMED)
        assert later.rounds > first.rounds


def test_a_link_must_be_slow_again_too() -> None:
    """Confirm a slow link: accused if slow again; if not, both its nodes are unsure."""
    bad = Cluster(nodes=names(16), links={("worker-3", "worker-12"): 0.5})
    first = done(diagnose(names(16)), bad)
    assert accused(done(confirm(first), bad)) == {frozenset(("worker-3", "worker-12"))}
    later = done(confirm(first), Cluster(nodes=names(16)))
    assert (accused(later), later.unsure) == (set(), ("worker-3", "worker-12"))


def test_a_bad_node_below_a_minimum_is_shown_by_it() -> None:
    """Diagnose a slow node with a minimum: its text is "below 80 in 3 of 3 runs"."""
    (bad,) = done(diagnose(names(16), minimum=80), Cluster(nodes=names(16), slow={"worker-1": 0.7})).bad
    assert shown_by(bad) == "below 80 in 3 of 3 runs"


def test_a_slow_run_counts_for_nothing_that_other_programs_may_have_taken() -> None:
    """Report 20 % of time lost to others in slow runs: nobody is accused."""

    class Busy(Cluster, frozen=True):
        def run(self, group: Group, _: random.Random) -> Outcome:
            """Return 80 with lost=0.2 for groups with worker-1, 100 for others."""
            lost = 0.2 if "worker-1" in group else 0.0
            return Outcome(100.0 * (1 - lost), lost=lost)

    assert accused(done(diagnose(names(8)), Busy(nodes=names(8)))) == set()
