"""Verdicts on nodes from rounds of measurements, with and without noise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from labctl.batches import evidence
from labctl.batches.evidence import Reading, Round

Noise = Callable[[random.Random], float]


def quiet(chance: random.Random) -> float:
    """Return a measurement near 1 with 3 % of noise."""
    return chance.lognormvariate(0, 0.03)


def bursts(chance: random.Random) -> float:
    """Return a quiet measurement, in one case of four cut to 20 to 80 %."""
    return quiet(chance) * (chance.uniform(0.2, 0.8) if chance.random() < 0.25 else 1.0)


def wild(chance: random.Random) -> float:
    """Return a measurement near 1 with 50 % of noise."""
    return chance.lognormvariate(0, 0.5)


def verdicts(nodes: int, noise: Noise, seed: int, rounds: int = 24, **slow: float) -> dict[str, str]:
    """Judge nodes n0, n1 ... after each round until none is unsure, at most ``rounds`` times; return the verdicts."""
    chance, taken, judged = random.Random(seed), list[Round](), dict[str, evidence.Judged]()  # noqa: S311
    error = evidence.error_per_test(nodes, 1)
    while len(taken) < rounds and (not judged or "unsure" in {one.verdict for one in judged.values()}):
        names = [f"n{number}" for number in range(nodes)]
        taken.append({name: Reading(slow.get(name, 1.0) * noise(chance)) for name in names})
        judged = evidence.judge(taken, 0.15, error)
    return {name: one.verdict for name, one in judged.items()}


@pytest.mark.parametrize("noise", [quiet, bursts, wild])
@pytest.mark.parametrize(("nodes", "validations"), [(2, 200), (4, 100), (16, 20)])
def test_good_nodes_are_accused_in_at_most_one_of_a_hundred_validations(
    nodes: int, validations: int, noise: Noise
) -> None:
    """Judge equal nodes over many seeds: at most 2, and 2 % of the validations, accuse a node."""
    accused = sum("bad" in verdicts(nodes, noise, seed).values() for seed in range(validations))
    # By chance it is more in fewer than 1 of 50 tests.
    assert accused <= 2 + validations // 50


@pytest.mark.parametrize("nodes", [2, 4, 16])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.75])
def test_without_load_a_slow_node_is_bad_and_the_others_are_good(nodes: int, share: float) -> None:
    """Judge one slow node without noise of others: it is bad, all others are good."""
    for seed in range(20):
        assert verdicts(nodes, quiet, seed, n1=share) == {
            **{f"n{number}": "good" for number in range(nodes)},
            "n1": "bad",
        }


@pytest.mark.parametrize("noise", [quiet, bursts, wild])
def test_a_node_at_three_quarters_is_not_called_good(noise: Noise) -> None:
    """Judge a node at 0.75 over 100 seeds: at most 4 call it good."""
    called_good = sum(verdicts(4, noise, seed, n1=0.75)["n1"] == "good" for seed in range(100))
    assert called_good <= 4


def test_two_slow_nodes_of_eight_do_not_hide_each_other() -> None:
    """Judge eight nodes, two at half speed: both are bad, no other is."""
    judged = verdicts(8, quiet, 1, n1=0.5, n2=0.5)
    assert {name for name, verdict in judged.items() if verdict == "bad"} == {"n1", "n2"}


def test_accidents_of_others_do_not_hide_a_slow_node_among_many() -> None:
    """Judge 200 nodes with rare halved measurements: the node at 0.7 is bad."""

    def accidents(chance: random.Random) -> float:
        """Return a quiet measurement, in one case of a hundred halved."""
        return quiet(chance) * (0.5 if chance.random() < 0.01 else 1.0)

    assert verdicts(200, accidents, 1, n1=0.7)["n1"] == "bad"


def test_a_single_node_is_compared_with_nothing() -> None:
    """Judge one node: unsure, without a speed."""
    judged = evidence.judge([{"n0": Reading(1.0)}] * 5, 0.15, 0.01)
    assert (judged["n0"].verdict, judged["n0"].speed) == ("unsure", None)


def test_time_that_others_took_proves_no_speed() -> None:
    """Judge equal nodes with corrected readings: unsure at 40 % of lost time, good at 10 %."""
    rounds = [{name: Reading(1.0, lost=0.4, corrected=True) for name in ("n0", "n1", "n2")}] * 20
    assert {judged.verdict for judged in evidence.judge(rounds, 0.15, 0.01).values()} == {"unsure"}
    rounds = [{name: Reading(1.0, lost=0.1, corrected=True) for name in ("n0", "n1", "n2")}] * 20
    assert {judged.verdict for judged in evidence.judge(rounds, 0.15, 0.01).values()} == {"good"}


def test_a_speed_that_includes_what_others_took_is_not_compared() -> None:
    """Judge a slow node whose readings are not corrected for lost time: unsure, the others good."""
    rounds = [{"n0": Reading(0.5, lost=0.5), "n1": Reading(1.0), "n2": Reading(1.0)}] * 20
    judged = evidence.judge(rounds, 0.15, 0.01)
    assert {name: of_node.verdict for name, of_node in judged.items()} == {"n0": "unsure", "n1": "good", "n2": "good"}


def test_the_first_round_does_not_count() -> None:
    """Judge a single round: p is 1."""
    one = [{"n0": Reading(0.1), "n1": Reading(1.0), "n2": Reading(1.0)}]
    assert evidence.judge(one, 0.15, 0.01)["n0"].p == 1.0


def test_the_bounds_hold_the_speed() -> None:
    """Judge a node at half speed in 12 rounds: bad, speed 0.5, p below the error."""
    rounds = [{"n0": Reading(0.5), "n1": Reading(1.0), "n2": Reading(1.0), "n3": Reading(1.0)}] * 12
    judged = evidence.judge(rounds, 0.15, 0.0025)["n0"]
    assert (judged.verdict, judged.speed) == ("bad", 0.5)
    assert judged.p < 0.0025


@pytest.mark.parametrize(
    ("misses", "verdict"),
    [([], "unsure"), ([False, False], "good"), ([True, False], "unsure"), ([True] * 9, "unsure"), ([True] * 12, "bad")],
)
def test_a_constant_bound_is_missed_if_more_than_half_surely_miss(misses: list[bool], verdict: str) -> None:
    """Judge misses of a constant bound: bad, good or unsure by their share and number."""
    assert evidence.against_bound(misses, 0.001) == verdict


def test_fewer_rounds_are_needed_among_more_nodes() -> None:
    """Ask for the rounds needed among 2 to 1024 nodes: 9 down to 4 or 5."""
    needed = [evidence.rounds_needed(nodes - 1, evidence.error_per_test(nodes, 1)) for nodes in (2, 4, 8, 64, 1024)]
    assert needed == [9, 6, 5, 4, 5]


def test_a_node_that_is_surely_good_in_one_series_is_as_sure_as_there() -> None:
    """Combine an unsure and a good verdict: good with the p of the good one."""
    good = evidence.Judged(verdict="good", speed=1.0, p=0.002)
    unsure = evidence.Judged(verdict="unsure", speed=0.9, p=0.6)
    assert (evidence.both(unsure, good).verdict, evidence.both(unsure, good).p) == ("good", 0.002)
