"""Simulated measurements of nodes: labctl's Trial, and the same verdicts in arrays, for many nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median_high

import numpy as np
from msgspec import Struct
from noise_recording import Drawn, Floats
from numpy.typing import NDArray

from labctl.batches import evidence
from labctl.batches.alone import AGAIN, MOST_RUNS, SPARE, Runs, Trial
from labctl.batches.evidence import MOST_ROUNDS, Verdict
from labctl.batches.figures import JobOutcome
from labctl.batches.profile import Check, Limit

METRIC = "tflops"
TURNS = Check(name="matmul", workload="matmul", declared="", nodes="turns", limits=(Limit(metric=METRIC),))
EACH = Check(name="matmul", workload="matmul", declared="", nodes="each", limits=(Limit(metric=METRIC),))

Draw = Callable[[int], Drawn]
"""Returns so many rounds of the next run."""
Indices = NDArray[np.int64]


class Judgement(Struct, frozen=True, kw_only=True):
    """Verdicts on the nodes, in order, and what they took."""

    verdicts: tuple[Verdict, ...]
    rounds: int
    runs: int


def by_trial(draw: Draw, nodes: int, within: float, check: Check = TURNS) -> Judgement:
    """Judge nodes by labctl's own Trial on drawn rounds; return the verdicts, rounds and runs."""
    names = tuple(f"worker-{number}" for number in range(nodes))
    trial = Trial(check, names, within, evidence.error_per_test(nodes, 1), compared=True)
    trial.measure(partial(_run, draw, check), lambda _: {})
    verdicts: tuple[Verdict, ...] = tuple(trial.judged[METRIC][name].verdict for name in names)
    return Judgement(verdicts=verdicts, rounds=len(trial.rounds[METRIC]), runs=len(trial.runs[names[0]]))


def _run(draw: Draw, check: Check, nodes: tuple[str, ...], turns: int) -> Runs:
    """Draw a run of all nodes in turn with ``turns`` rounds, or a run of each node with one, as the check says."""
    if check.nodes == "turns":
        return Runs([JobOutcome(nodes=nodes, passed=True, message="", rounds=draw(turns).rounds(nodes))], {})
    (readings,) = draw(1).rounds(nodes)
    metrics = {node: {METRIC: {"last": reading.speed}} for node, reading in readings.items()}
    jobs = [JobOutcome(nodes=(node,), passed=True, message="", metrics=metrics[node]) for node in nodes]
    return Runs(jobs, {node: reading.lost for node, reading in readings.items()})


def by_arrays(draw: Draw, nodes: int, within: float, check: Check = TURNS) -> Judgement:
    """Return what ``by_trial`` returns, computed with numpy arrays, for many nodes; no run may fail."""
    error = evidence.error_per_test(nodes, 1)
    in_turn = check.nodes == "turns"
    ranks = Ranks(nodes, within, error, corrected=in_turn)
    many = evidence.rounds_needed(max(1, nodes - 1), error) + SPARE
    runs = 0
    while True:
        drawn = draw(many if in_turn else 1)
        for speeds, lost in zip(drawn.speeds, drawn.lost, strict=True):
            ranks.take(speeds, lost)
        runs += 1
        verdicts = ranks.verdicts()
        most = MOST_ROUNDS if in_turn else MOST_RUNS
        if "unsure" not in verdicts or len(ranks.speeds) >= most or runs >= MOST_RUNS:
            return Judgement(verdicts=verdicts, rounds=len(ranks.speeds), runs=runs)
        many = AGAIN


class Ranks:
    """Evidence on all nodes at once, as ``evidence.judge`` has it after each round; every round has all nodes."""

    def __init__(self, nodes: int, within: float, error: float, *, corrected: bool) -> None:
        """Begin without rounds; ``within`` is the tolerated loss of speed, ``error`` that of a test."""
        self.within, self.error, self.corrected = within, error, corrected
        self.speeds: list[Floats] = []
        self.chances = np.array([[chance] for chance, _ in evidence.WINS])
        weights = np.log([[weight] for _, weight in evidence.WINS])
        self.slow, self.low, self.good = (np.repeat(weights, nodes, axis=1) for _ in range(3))
        """Logarithms of the likelihood ratios, by chance of winning and node."""

    def take(self, speeds: Floats, lost: Floats) -> None:
        """Add a round; the first one only chooses the references."""
        if self.speeds:
            self.compare(speeds, lost)
        self.speeds.append(speeds)

    def compare(self, speeds: Floats, lost: Floats) -> None:
        """Add a round's evidence on its nodes, undisturbed ones unless ``corrected``; none if fewer than two."""
        nodes = np.flatnonzero(self.corrected | (lost <= evidence.DISTURBED))
        if len(nodes) < 2:
            return
        before = np.median(self.speeds, axis=0)[nodes]
        now = speeds[nodes]
        fast = before >= (1 - self.within) * median_high(before.tolist())
        proven = now * (1 - lost[nodes]) if self.corrected else now
        possible = now if self.corrected else now / (1 - lost[nodes])
        slowest, quartile, fastest, odds, quartile_odds = _references(now, before, fast)
        chances, least = self.chances, 1 - self.within
        good = proven > min(evidence.GOOD, 1 - self.within) * fastest
        won, not_won = np.log(chances * odds), np.log((1 - chances) * odds / (odds - 1))
        self.slow[:, nodes] += np.where(possible < least * slowest, won, not_won)
        quartile_won, quartile_not_won = (
            np.log(chances * quartile_odds),
            np.log((1 - chances) * quartile_odds / (quartile_odds - 1)),
        )
        self.low[:, nodes] += np.where(possible < least * quartile, quartile_won, quartile_not_won)
        self.good[:, nodes] += np.where(good, won, not_won)

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return each node's verdict: bad or else good if the evidence suffices, unsure if not."""
        slowest, low, good = (np.exp(np.minimum(logs, 700)).sum(axis=0) for logs in (self.slow, self.low, self.good))
        slow = (slowest + low) / 2
        enough = 1 / self.error
        words = np.where(slow >= enough, "bad", np.where(good >= enough, "good", "unsure"))
        verdicts: list[Verdict] = words.tolist()
        return tuple(verdicts)


References = tuple[Floats, Floats, Floats, Floats, Floats]


def _references(now: Floats, before: Floats, fast: NDArray[np.bool_]) -> References:
    """Return each node's slowest reference, lower quartile and fastest but for outliers, and the first two's odds."""
    sorted_fast = np.flatnonzero(fast)[np.argsort(now[fast], kind="stable")]
    values = now[sorted_fast]
    place = np.full(len(now), len(values))
    place[sorted_fast] = np.arange(len(values))
    others = len(values) - fast
    if others.min() < evidence.FEWEST_REFERENCES:
        return _few_references(now, before, fast)
    outliers = others // evidence.OUTLIERS
    slowest, fastest = _without(values, place, outliers), _without(values, place, others - 1 - outliers)
    quarter = others // evidence.QUARTER
    quartile = _without(values, place, quarter)
    return slowest, quartile, fastest, (others + 1) / (outliers + 1), (others + 1) / (quarter + 1)


def _without(values: Floats, place: Indices, index: Indices) -> Floats:
    """Return for each node the value at an index of the sorted ones, of which its own, at its place, is left out."""
    of_index: Floats = values[index + (index >= place)]
    return of_index


def _few_references(now: Floats, before: Floats, fast: NDArray[np.bool_]) -> References:
    """Return the same, node by node; a node with too few fast others has the fastest nodes before as references."""
    rows = []
    by_before = np.argsort(-before, kind="stable")
    for node in range(len(now)):
        others = np.flatnonzero(fast & (np.arange(len(now)) != node))
        if len(others) < evidence.FEWEST_REFERENCES:
            others = by_before[by_before != node][: evidence.FEWEST_REFERENCES]
        speeds = sorted(now[others].tolist())
        many, quarter = len(speeds), evidence.QUARTER
        fastest = speeds[-1 - many // evidence.OUTLIERS]
        slowest_two = evidence.slowest(speeds), evidence.slowest(speeds, quarter)
        rows.append((*slowest_two, fastest, evidence.odds(many), evidence.odds(many, quarter)))
    slowest, quartile, fastest, odds, quartile_odds = np.array(rows).T
    return slowest, quartile, fastest, odds, quartile_odds
