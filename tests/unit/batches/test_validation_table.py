"""Simulation of validations and bisections from recorded noise; `python tests/validation_table.py` does thousands."""

from __future__ import annotations

from pathlib import Path
from random import Random

import noise_recording
import numpy as np
import pytest
import validation_table as table
from bisect_table import FAILS
from noise_recording import Drawn, Recording, Series
from simulated_trial import EACH, TURNS, Draw, Judgement, by_arrays, by_trial
from validation_table import Count, Validated

from labctl.batches.evidence import Reading
from labctl.batches.profile import Check

SPEED = 0.085


def noisy(nodes: int, busy: float = 0.0, seed: int = 1) -> Recording:
    """Return a recording: one of twenty readings slow, and other programs take ``busy`` of the time."""
    chance = np.random.default_rng(seed)
    shape = (200 // nodes, nodes)
    speeds = SPEED * (1 - abs(chance.normal(0, 0.03, shape))) * np.where(chance.random(shape) < 0.05, 0.8, 1.0)
    lost = np.clip(chance.normal(busy, 0.05, shape), 0, 0.9)
    rounds = [
        tuple(zip(of_round, losses, strict=True))
        for of_round, losses in zip(speeds.tolist(), lost.tolist(), strict=True)
    ]
    return Recording(lab="made up", load="busy" if busy else "idle", seconds=1.1, rounds=tuple(rounds))


def numbered(rounds: int, nodes: int) -> Series:
    """Return a series whose speeds are the round's number plus a tenth of the node's number."""
    speeds = np.arange(rounds)[:, None] + np.arange(nodes) / 10
    return Series(speeds=speeds, lost=np.zeros_like(speeds), seconds=4.0)


# --- recordings ----------------------------------------------------------------------------------------------


def test_a_recording_is_read_from_the_output_of_a_run_of_turns() -> None:
    """Read a run's output of 50 turns of 4 nodes: 50 rounds of speed and lost time, 1 s each."""
    lines = [
        f"worker-0: turn {turn} of node {node} (worker-{node}): 0.08{turn % 10}{node} TFLOP/s, "
        f"lost 0.0{node} to others, 0.000 to its own quota"
        for turn in range(50)
        for node in range(4)
    ]
    output = "\n".join(("starting", *lines, "tflops: 0.08 (the slowest rank)"))
    recording = table.recorded("four", "idle", output, [f"worker-{node}" for node in range(4)], 215.0)
    assert recording.rounds[12] == ((0.082, 0.0), (0.0821, 0.01), (0.0822, 0.02), (0.0823, 0.03))
    assert (recording.nodes, len(recording.rounds), recording.seconds) == (4, 50, 1.0)


def test_a_run_that_lacks_turns_is_no_recording() -> None:
    """Read output that lacks turns or nodes: ValueError with the counts."""
    line = "turn 0 of node 0 (worker-0): 0.08 TFLOP/s, lost 0.01 to others, 0.000 to its own quota"
    with pytest.raises(ValueError, match=r"four, idle: 1 rounds of 4 nodes, not 200 readings"):
        table.recorded("four", "idle", line, [f"worker-{node}" for node in range(4)], 215.0)
    with pytest.raises(ValueError, match="not every round has all of the nodes"):
        noise_recording.recorded("two", "idle", [{"worker-0": Reading(1.0)}, {"worker-1": Reading(1.0)}], 1.0)


def test_a_recording_is_small_and_read_as_it_was_written(tmp_path: Path) -> None:
    """Write noise of 50 rounds and read its folder: the same recording, a line for each round and 5 more."""
    recording = noisy(4)
    path = noise_recording.write(recording, tmp_path / "noise")
    assert path.name == "made-up-idle.json"
    assert noise_recording.read(tmp_path / "noise") == [recording]
    assert len(path.read_text().splitlines()) == 50 + 5


def test_the_turns_of_a_recording_are_those_of_the_profile_quick() -> None:
    """Ask for the command of four nodes: `run matmul` with a timeout of 15m, 2 rounds and 50 turns."""
    assert table.command(4) == ("run", "matmul", "--timeout", "15m", "--set", "rounds=2", "--set", "turns=50")


# --- bootstrap -----------------------------------------------------------------------------------------------


def test_nodes_of_a_host_share_blocks_of_consecutive_rounds_and_hosts_do_not() -> None:
    """Draw rounds of two hosts: nodes of a host share consecutive rounds, the hosts differ."""
    drawn = noise_recording.draw(numbered(50, 4), 8, 12, np.random.default_rng(1))
    assert drawn.speeds.shape == (12, 8)
    first, second = drawn.speeds[:, :4], drawn.speeds[:, 4:]
    assert np.allclose(first - first[:, :1], np.arange(4) / 10)
    # Blocks of 20 s are five rounds of 4 s.
    steps = np.diff(first[:, 0])
    assert np.allclose(np.delete(steps, [4, 9]), 1)
    assert not np.allclose(first, second)


def test_of_the_last_host_only_as_many_nodes_as_are_left_take_part() -> None:
    """Draw six nodes of hosts of four: six columns."""
    assert noise_recording.draw(numbered(50, 4), 6, 3, np.random.default_rng(1)).speeds.shape == (3, 6)


def test_lasting_differences_of_recorded_nodes_are_not_noise_of_hosts_with_a_node_each() -> None:
    """Split readings of nodes with speeds 1 and 2 into single nodes: all speeds are 1, lost times stay."""
    rounds = (((1.0, 0.1), (2.0, 0.2)),) * 3
    series = noise_recording.node_each(Recording(lab="", load="", seconds=1.0, rounds=rounds))
    assert series.speeds.tolist() == [[1.0]] * 6
    assert series.lost.ravel().tolist() == [0.1, 0.2] * 3


# --- verdicts ------------------------------------------------------------------------------------------------


def source(series: Series, nodes: int, bad: float, seed: int) -> Draw:
    """Return a function that draws rounds in which the first node has speed ``bad``; of 16 the second half of it."""
    chance = np.random.default_rng(seed)
    factors = np.ones(nodes)
    factors[0] = bad
    factors[1] = bad / 2 if nodes >= 16 else 1.0
    return lambda rounds: table.slowed(noise_recording.draw(series, nodes, rounds, chance), factors)


@pytest.mark.parametrize("check", [TURNS, EACH], ids=["turns", "each"])
@pytest.mark.parametrize("nodes", [2, 3, 4, 16, 90])
@pytest.mark.parametrize("busy", [0.0, 0.24, 0.5])
def test_verdicts_in_arrays_are_those_of_the_trial(busy: float, nodes: int, check: Check) -> None:
    """Judge drawn rounds by arrays and by the real trial: equal verdicts."""
    series = noise_recording.node_each(noisy(1, busy))
    for seed in range(5 if nodes < 16 else 1):
        for bad in (1.0, 0.75):
            judged, real = (by(source(series, nodes, bad, seed), nodes, 0.15, check) for by in (by_arrays, by_trial))
            assert judged == real


def test_a_validation_counts_good_nodes_that_are_accused_and_verdicts_on_bad_ones() -> None:
    """Count a judgement against the planted bad nodes: verdicts on them, and good nodes accused."""
    judged = Judgement(verdicts=("bad", "good", "unsure", "good"), rounds=9, runs=1)
    assert Validated(judged, frozenset({0, 1, 2})).of_bad("bad") == [True, False, False]
    assert not Validated(judged, frozenset({0})).accuses_good
    assert Validated(judged, frozenset({1})).accuses_good
    assert not Validated(judged, frozenset()).is_unsure


def test_at_half_speed_a_node_is_found_and_no_other_one_accused() -> None:
    """Validate 16 nodes with bad ones at half speed: all are found and no good one accused, with 20 seeds."""
    series = noise_recording.as_recorded(noisy(4))
    done = [table.validated(series, 16, 0.5, seed) for seed in range(20)]
    assert all(all(one.of_bad("bad")) for one in done)
    assert not any(one.accuses_good for one in done)


def test_at_most_half_of_the_nodes_and_four_are_bad() -> None:
    """Draw factors: one to half of the nodes bad, at most four; none if no speed is given."""
    for seed in range(20):
        chance = np.random.default_rng(seed)
        assert 1 <= np.count_nonzero(table.factors(4, 0.5, chance) < 1) <= 2
        assert 1 <= np.count_nonzero(table.factors(64, 0.5, chance) < 1) <= 4
        assert np.all(table.factors(64, None, chance) == 1)


# --- counts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counted", "text"),
    [
        (Count(0, 2000), "0.0 % (0.0 to 0.2)"),
        (Count(20, 2000), "1.0 % (0.6 to 1.5)"),
        (Count(2000, 2000), "100.0 % (99.8 to 100.0)"),
        (Count(0, 0), ""),
    ],
)
def test_a_rate_is_shown_with_its_interval(counted: Count, text: str) -> None:
    """Show a count as rate with its confidence interval; empty without trials."""
    assert counted.text() == text


def test_goals_are_missed_by_intervals_above_them_and_on_an_idle_machine_by_what_is_not_found() -> None:
    """Compare counts with the goals: missed goals by name, none where the interval allows them."""
    none, few, many = Count(0, 2000), Count(25, 2000), Count(40, 2000)
    assert table.missed("steady", 0.75, few, none, few, none) == []
    assert table.missed("steady", 0.75, many, none, many, none) == [
        "more than 1 % false accusations",
        "more than 1 % of bad nodes called good",
    ]
    assert table.missed("idle", None, none, Count(0, 0), Count(0, 0), Count(101, 2000)) == ["more than 5 % unsure"]
    assert table.missed("idle", 0.5, none, Count(94, 100), none, none) == ["less than 95% found"]


# --- bisect --------------------------------------------------------------------------------------------------


def test_a_run_is_as_fast_as_its_slowest_node_or_link() -> None:
    """Run groups of a cluster with planted nodes or links: the slowest member's speed, or exit code 1."""
    chance = Random(1)  # noqa: S311
    fast = Recording(lab="", load="", seconds=1.0, rounds=(((1.0, 0.0),),) * 10)
    cluster = table.planted(fast, 16, ("nodes", 0.7), chance)
    slow = next(iter(cluster.slow))
    good = [node for node in cluster.nodes if node not in cluster.slow]
    assert cluster.run((slow, good[0]), chance).value == pytest.approx(0.7)
    assert cluster.run((good[0], good[1]), chance).value == pytest.approx(1.0)
    cluster = table.planted(fast, 16, ("links", FAILS), chance)
    assert cluster.run(next(iter(cluster.links)), chance).why == "exit code 1"


def test_what_others_take_slows_a_run_and_is_read_before_it() -> None:
    """Average six readings into a run: its speed is that of the later ones, its lost time the first one's."""
    readings = ((1.0, 0.9), *[(1.0, 0.5)] * 5)
    series = noise_recording.node_each(
        Recording(lab="", load="", seconds=1.0, rounds=tuple((one,) for one in readings))
    )
    speeds, lost = table.runs_of(series)
    assert (speeds.tolist(), lost.tolist()) == ([0.5], [0.9])


def test_bisections_find_bad_nodes_and_links_in_idle_noise() -> None:
    """Bisect 16 nodes with each plant in idle noise: all are found and none wrong, with 5 seeds."""
    for plant in table.PLANTS:
        done = [table.searched(noisy(4), 16, plant, seed) for seed in range(5)]
        assert [(one.found, one.wrong) for one in done] == [(one.bad, 0) for one in done]


# --- episodes ------------------------------------------------------------------------------------------------


def test_hosts_are_slow_for_a_tenth_of_the_time_and_for_the_length_of_an_episode() -> None:
    """Draw 200 hosts with episodes: slow a tenth of the time, ten rounds in a row on average."""
    _, pace = table.PACES["each"]
    drawn: Drawn = table.Episodes(200, 60, pace, np.random.default_rng(1)).draw(100)
    slow = drawn.speeds < 0.85
    assert slow.mean() == pytest.approx(0.1, abs=0.03)
    # Rounds are 6 s apart.
    begins = (slow[1:] & ~slow[:-1]).sum()
    assert slow.sum() / begins == pytest.approx(10, rel=0.2)


def test_a_second_series_accuses_fewer_hosts_than_the_first() -> None:
    """Judge slow episodes twice: many hosts are accused in one series, few in both."""
    after = [table.accused_after(4, 60, 60, "each", seed) for seed in range(200)]
    assert sum(number >= 1 for number in after) > 10
    assert sum(number >= 2 for number in after) < 8
