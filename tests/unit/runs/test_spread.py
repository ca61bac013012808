"""Spread of results with the same settings: the run that is furthest from the others, and what is usual."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from labctl.model import Result
from labctl.runs.spread import Effect, between, in_words, repeated, spreads, usual_difference, within


def result(number: int, throughput: float | None, verdict: str = "PASS", unit: str = "samples/s") -> Result:
    """Return a result with this throughput, without the metric for None."""
    metrics: dict[str, dict[str, Any]] = {"throughput": {"value": throughput, "unit": unit}} if throughput else {}
    named: dict[str, Any] = {"workload": "hello", "launcher": "deepspeed", "lab": "demo", "metrics": metrics}
    return Result(run_id=f"r{number}", verdict=verdict, cause=None, message="", exit_code=0, **named)


def results(figures: Sequence[float | None]) -> list[Result]:
    """Return a PASS result for each figure."""
    return [result(number, figure) for number, figure in enumerate(figures, start=1)]


def furthest(*figures: float) -> Effect:
    """Return the one effect among runs of these figures."""
    (effect,) = within("A", results(figures))
    return effect


STEADY = (24.8, 24.9, 24.7, 25.0)


def test_a_run_that_is_slower_than_the_others_is_more_than_usual_as_it_does_not_widen_what_is_usual() -> None:
    """Compare five runs, one slower: more than usual, judged by the other four."""
    effect = furthest(*STEADY, 18.6)
    assert in_words(effect) == "throughput of r5: same settings; 25.2 % slower, more than the usual 3.3 %"
    assert effect.other == pytest.approx(24.85)


def test_runs_that_are_alike_are_no_more_than_usual() -> None:
    """Compare five similar runs: no more than usual."""
    assert in_words(furthest(*STEADY, 24.6)) == (
        "throughput of r5: same settings; 1 % slower, no more than the usual 3.3 %"
    )


def test_of_three_runs_all_tell_what_is_usual() -> None:
    """Compare three runs: judged by all three."""
    assert in_words(furthest(24.8, 24.9, 24.7)) == (
        "throughput of r3: same settings; 0.6 % slower, no more than the usual 4.8 %"
    )


def test_of_two_runs_the_second_is_compared_with_the_first_and_neither_told_from_it() -> None:
    """Compare two runs: the change without judgement, "2 runs are too few"."""
    repeats = repeated(results((24.0, 18.0)), "hello")
    assert list(map(in_words, repeats.effects)) == ["throughput of r2: same settings; 25 % slower"]
    assert repeats.conclusion == "2 runs are too few to tell (needs 3 or more): `labctl run hello --repeat 5`"
    assert repeats.spread["throughput"].usual is None


def test_runs_that_spread_by_more_than_a_factor_of_two_tell_nothing() -> None:
    """Compare runs that spread beyond a factor of two: no judgement."""
    repeats = repeated(results((24.8, 44.9, 14.7)), "hello")
    (effect,) = repeats.effects
    assert (effect.basis, effect.noise, effect.verdict) == ("runs", None, None)
    assert in_words(effect).endswith("% faster; runs with the same settings spread too much to tell")
    assert repeats.conclusion == "3 runs are too few to tell: `labctl run hello --repeat 5`"


def test_a_single_run_and_runs_that_are_the_same_conclude_nothing() -> None:
    """Compare one run or equal runs: no effect, or "the same"; no conclusion."""
    assert (repeated(results((24.0,)), "hello").effects, repeated(results((24.0,)), "hello").conclusion) == ((), "")
    same = repeated(results((24.0, 24.0)), "hello")
    assert (list(map(in_words, same.effects)), same.conclusion) == (["throughput: the same"], "")


def test_figures_at_or_below_zero_differ_without_a_judgement() -> None:
    """Compare figures below zero: the change without judgement."""
    effect = furthest(-24.8, -24.9, -24.7, -18.6)
    assert in_words(effect) == "throughput of r4: same settings; 25 % faster"
    assert effect.basis is None


def test_what_is_usual_is_the_pooled_standard_deviation_of_the_logarithms_times_students_t() -> None:
    """Compute the usual difference: pooled deviation of logarithms times Student's t; None without a usable group."""
    a, b, c = (10.0, 11.0, 12.0), (20.0, 21.0, 22.0, 23.0), (1.0, 100.0)
    variances = [sum((math.log(v) - sum(map(math.log, of)) / len(of)) ** 2 for v in of) for of in (a, b)]
    pooled = math.sqrt(sum(variances) / 5)
    assert usual_difference([a, b, c], 3, 4) == pytest.approx(4.03 * pooled * math.sqrt(1 / 3 + 1 / 4))
    assert usual_difference([c], 3, 4) is None


CHANCE = Random(1)  # noqa: S311


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_among_equal_runs_one_is_seldom_more_than_usual(count: int) -> None:
    """Compare equal runs 300 times: at most 30 are judged "more than noise"."""
    judged = [furthest(*(CHANCE.gauss(100, 2) for _ in range(count))).verdict for _ in range(300)]
    assert judged.count("more than noise") <= 30


def test_what_a_run_that_broke_off_had_printed_does_not_count_beside_runs_that_ended() -> None:
    """Compute the spread with an ERROR: its value counts only if no run ended."""
    ended, broken = results((20.0, 20.2)), result(3, 3.0, "ERROR")
    assert spreads([*ended, broken])["throughput"].values == (20.0, 20.2)
    assert spreads([broken])["throughput"].values == (3.0,)


def test_the_spread_of_repeats_leaves_out_runs_without_the_figure() -> None:
    """Compute the spread with a run without the metric: median, mean and cv of the others."""
    spread = spreads(results((10.0, None, 12.0, 11.0)))["throughput"]
    assert spread.values == (10.0, 12.0, 11.0)
    assert (spread.median, spread.mean) == (11.0, 11.0)
    assert spread.cv == spread.usual == pytest.approx(1 / 11)


def test_a_run_whose_metric_is_nan_is_counted_apart_and_compared_with_none() -> None:
    """Compute the spread with nan: it is named beside the mean of the others, and alone stands for it."""
    diverged = [replace(run, metrics={"throughput": {"value": None, "note": "nan"}}) for run in results((1.0, 2.0))]
    groups = {"A": spreads(results(STEADY)), "B": spreads(diverged), "C": spreads([*results((10.0, 12.0)), *diverged])}
    shown = [(of_group["throughput"].figure, of_group["throughput"].basis) for of_group in groups.values()]
    assert shown == [("24.85", "mean of 4"), ("nan", ""), ("11", "mean of 2, nan in 2 runs")]
    effect = between("throughput", "B", "A", groups)
    assert (effect.value, effect.change, effect.verdict) == (None, None, None)
