"""Tell slow nodes from noise by their ranks, round after round; valid after any round, whatever the noise is like.

In each round all nodes are measured once, in a random order, so a disturbance meets each of them by equal
chance. A node is tested against ``references``, nodes that look good by the rounds before. If it is not slower than is
allowed, its speed divided by the speed allowed is the lowest of k nodes with a probability of at most 1/k; if it is
slower than a good node may be, its speed times that share is the highest with at most 1/k; and so for the lower
quartile, which shows more where some of many references are slow by accident. The evidence against such a
hypothesis is the likelihood ratio of the rounds: the node wins with one of the probabilities ``WINS``, over 1/k. Its
expectation is at most 1 if the hypothesis holds, so it ever exceeds 1/alpha with a probability of at most alpha.

Sources: Ville 1939; Ramdas, Gruenwald, Vovk, Shafer: Game-Theoretic Statistics and Safe Anytime-Valid Inference,
Statistical Science 38 (2023).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import mean, median, median_high
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from labctl.system import human

FALSE_ACCUSATIONS = 0.01
"""Probability that a validation or search of a good cluster accuses a node, over all nodes and figures."""
GOOD = 0.75
"""Speed of a good node, as a share of the others, is above this."""
WINS = ((0.7, 0.1), (0.9, 0.15), (0.995, 0.75))
"""Probabilities that a slow node is the slowest of a round, with their weights."""
CLEARED = 2
"""Values that must hold a bound, more than miss it: a single lucky one clears nobody."""
CONFIRMATIONS = 2
"""Times that a node on another host than the others must be found bad again: a disturbance of its host may last for
many rounds in a row. With two, hosts that are slow for 10 % of the time, up to a minute each, are accused in 1 of 100
validations at most (`python tests/validation_table.py episodes`)."""
PAUSE = 60.0
"""Seconds before each."""
DISTURBED = 0.25
"""Share of its time that other programs took from a node, above which a speed that includes it is not compared."""
MOST_ROUNDS = 24
"""Rounds after which a node without a verdict is unsure."""
QUARTER = 4
"""Number of references of which one is below their lower quartile."""
OUTLIERS = 40
"""Number of references of which one may be slower, or faster, than the node that wins: some always meet an accident."""
FEWEST_REFERENCES = 2
"""References of a node, where the lab has as many others, even if they look slow themselves."""

Verdict = Literal["bad", "good", "unsure"]
PASSED: Mapping[Verdict, bool | None] = {"good": True, "unsure": None, "bad": False}
"""Result of a figure by verdict: True if it passed, None if that is unsure."""


class Reading(Struct, frozen=True):
    """Speed of a node in a round, higher is better; and what other programs took from it."""

    speed: float
    lost: float = 0.0
    """Share of its time that other programs took; a quota of its own may hide behind it."""
    corrected: bool = False
    """The speed is that of the time in which it could run."""
    held: float = 0.0
    """Share of its time for which its own quota held it back."""

    @property
    def proven(self) -> float:
        """Return the speed; if corrected, times the share of time that other programs did not take."""
        return self.speed * (1 - self.lost) if self.corrected else self.speed

    @property
    def included(self) -> float:
        """Return the lost share of time that the speed still includes; 0 if it was corrected."""
        return 0.0 if self.corrected else self.lost

    @property
    def possible(self) -> float:
        """Return the speed it may have had without other programs, which slowed it for the ``included`` share."""
        return undisturbed(self.speed, self.included)

    @property
    def is_comparable(self) -> bool:
        """Tell if other programs took at most DISTURBED of the time the speed includes."""
        return self.included <= DISTURBED


Round = Mapping[str, Reading]
"""Readings of a round, by node."""


class Judged(Struct, frozen=True, kw_only=True):
    """Verdict on a node: its speed as a share of the references', with its bounds, and the values of each round."""

    verdict: Verdict
    speed: float | None
    """Median over the rounds; None without a round that counts."""
    low: float | None = None
    """Lower and upper bound, at the error probability of the verdict; None without one."""
    high: float | None = None
    p: float = 1.0
    """Upper bound of the probability that noise alone gives so clear a verdict: 1 / evidence."""
    lost: float = 0.0
    """Share of its time that other programs took, over all rounds."""
    held: float = 0.0
    """Share of its time for which its own quota held it back, over all rounds."""
    values: tuple[float, ...] = ()
    doubt: str = ""
    """Reason why it is unsure, if other than its noise."""


def readings_of(node: str, rounds: Iterable[Round]) -> list[Reading]:
    """Return the readings of a node, in order of the rounds that have one."""
    return [readings[node] for readings in rounds if node in readings]


def error_per_test(nodes: int, figures: int) -> float:
    """Return the error probability of a test, given the nodes and figures of a validation (Bonferroni)."""
    return FALSE_ACCUSATIONS / max(1, nodes * figures)


def evidence(wins: Iterable[tuple[bool, float]]) -> float:
    """Return the evidence, 1.0 without rounds, that a node wins too often, given (won, N) per round.

    N is the number of nodes that could win, if all are measured alike.
    """
    logs = [math.log(weight) for _, weight in WINS]
    for won, many in wins:
        for number, (chance, _) in enumerate(WINS):
            logs[number] += math.log(chance * many if won else (1 - chance) * many / (many - 1))
    return max(sum(map(_exp, logs)), 1e-300)


def against_bound(misses: Sequence[bool | None], error: float) -> Verdict:
    """Judge by which values after the first miss a bound: bad, good if CLEARED more hold than miss, or unsure.

    Good as soon as ``CLEARED`` more hold than miss. The first value, which may have raised the suspicion, is no
    evidence against it. Of None it is not known, as other programs may be why it misses.
    """
    if evidence((missed, 2) for missed in misses[1:] if missed is not None) >= 1 / error:
        return "bad"
    return "good" if misses.count(False) - misses.count(True) >= CLEARED else "unsure"


def undisturbed(speed: float, lost: float) -> float:
    """Return the speed of a run if no other program had taken this share of its time, at most DISTURBED."""
    return speed / max(1 - lost, 1 - DISTURBED)


def both(first: Judged, later: Judged) -> Judged:
    """Join two verdicts of rounds some time apart: bad if both are, good if one is and none is bad, else unsure."""
    verdicts = {first.verdict, later.verdict}
    verdict: Verdict = "good" if "good" in verdicts and "bad" not in verdicts else "unsure"
    doubt = ""
    if verdicts == {"bad"}:
        verdict = "bad"
    elif "bad" in verdicts:
        doubt = "it was slow in one of two series of rounds, a minute apart, and not in the other"
    speeds = [judged.speed for judged in (first, later) if judged.speed is not None]
    return replace(
        later,
        verdict=verdict,
        speed=median(speeds) if speeds else None,
        p=max(judged.p for judged in (first, later) if verdict in (judged.verdict, "unsure")),
        lost=(first.lost + later.lost) / 2,
        held=(first.held + later.held) / 2,
        values=(*first.values, *later.values),
        doubt=doubt,
    )


def p_text(p: float) -> str:
    """Render an upper bound of a probability: ``p < 0.001``."""
    return "p < 0.001" if p < 0.001 else f"p < {human.number(p, 2)}"


def rounds_needed(references: int, error: float) -> int:
    """Return how many rounds decide against a node if all go against it, plus one that chooses references."""
    rounds = 1
    while evidence([(True, odds(references))] * rounds) < 1 / error:
        rounds += 1
    return rounds + 1


def judge(rounds: Sequence[Round], within: float, error: float) -> dict[str, Judged]:
    """Map nodes to verdicts: bad if surely more than ``within`` below the references, good if surely fast enough.

    A good node is above GOOD of its references' speed, or above 1 - ``within`` if that is less. The first round only
    chooses the first references. Rounds without a reading of the node do not count.
    """
    compared: defaultdict[str, list[_Compared]] = defaultdict(list)
    for number, now in enumerate(rounds[1:], start=1):
        for node, comparison in _comparisons(rounds[:number], now, within):
            compared[node].append(comparison)
    nodes = dict.fromkeys(chain.from_iterable(rounds))
    return {node: _judged(node, rounds, compared[node], within, error) for node in nodes}


class _Compared(Struct, frozen=True, kw_only=True):
    """A reading of a node, and the speeds of its references in the same round."""

    reading: Reading
    odds: float
    """Of how many rounds a good node is at most once slower than ``slowest``, or faster than ``fastest``."""
    slowest: float
    """The slowest reference that is no outlier."""
    quartile: float
    """The lower quartile of the references: some of many are always slow for a moment."""
    quartile_odds: float
    """Of how many rounds a good node is at most once slower than ``quartile``."""
    middle: float
    fastest: float
    """The fastest reference that is no outlier."""


def _comparisons(before: Sequence[Round], now: Round, within: float) -> Iterator[tuple[str, _Compared]]:
    """Yield each comparable node of a round with its comparison to the others; none without references.

    References are the other nodes that are at most ``within`` below the usual speed in the rounds before; if they are
    too few, the fastest ones.
    """
    now = {node: reading for node, reading in now.items() if reading.is_comparable}
    if not now:
        return
    speeds = {node: _median_speed(node, before) for node in now}
    least = (1 - within) * usual(speeds.values())
    fast = {node for node, speed in speeds.items() if speed >= least}
    by_speed = sorted(now, key=lambda node: now[node].speed)
    for node, reading in now.items():
        others = [now[other].speed for other in by_speed if other in fast and other != node]
        if len(others) < FEWEST_REFERENCES:
            fastest_before = sorted((other for other in now if other != node), key=lambda other: -speeds[other])
            others = sorted(now[other].speed for other in fastest_before[:FEWEST_REFERENCES])
        if others:
            comparison = _Compared(
                reading=reading,
                odds=odds(len(others)),
                slowest=slowest(others),
                quartile=slowest(others, QUARTER),
                quartile_odds=odds(len(others), QUARTER),
                middle=median(others),
                fastest=others[-1 - len(others) // OUTLIERS],
            )
            yield node, comparison


def slowest(speeds: Sequence[float], one_in: int = OUTLIERS) -> float:
    """Return the slowest of ascending speeds, the slowest one in ``one_in`` of them left out."""
    return speeds[len(speeds) // one_in]


def odds(references: int, one_in: int = OUTLIERS) -> float:
    """Return N: a good node is slower than the slowest of so many, without ``one_in``, in at most one of N rounds."""
    return (references + 1) / (references // one_in + 1)


def usual(speeds: Iterable[float]) -> float:
    """Return the median speed of nodes; of two in the middle the higher one."""
    return median_high(speeds)


def _judged(node: str, rounds: Sequence[Round], compared: Sequence[_Compared], within: float, error: float) -> Judged:
    """Judge a node by its comparisons: verdict, median share of the references' speed with bounds, p, lost time."""
    slow, good = _evidence_below(compared, 1 - within), _evidence_above(compared, min(GOOD, 1 - within))
    verdict: Verdict = "unsure"
    if slow >= 1 / error:
        verdict = "bad"
    elif good >= 1 / error:
        verdict = "good"
    shares = sorted(comparison.reading.speed / comparison.middle for comparison in compared if comparison.middle)
    # The evidence falls, or grows, with the share.
    surely_above = bisect_left(shares, True, key=lambda share: _evidence_above(compared, share) < 1 / error)
    surely_below = bisect_left(shares, True, key=lambda share: _evidence_below(compared, share) >= 1 / error)
    readings = readings_of(node, rounds)
    return Judged(
        verdict=verdict,
        speed=median(shares) if shares else None,
        low=shares[surely_above - 1] if surely_above else None,
        high=shares[surely_below] if surely_below < len(shares) else None,
        p=min(1.0, 1 / (slow if verdict == "bad" else good)),
        lost=mean(reading.lost for reading in readings),
        held=mean(reading.held for reading in readings),
        values=tuple(reading.speed for reading in readings),
    )


def _evidence_below(compared: Iterable[_Compared], share: float) -> float:
    """Return the evidence that a node's speed is below a share of its references' speed.

    The mean of two: of being slower than the slowest reference, and than their lower quartile.
    """
    compared = list(compared)
    slowest = evidence((at.reading.possible < share * at.slowest, at.odds) for at in compared)
    quartile = evidence((at.reading.possible < share * at.quartile, at.quartile_odds) for at in compared)
    return (slowest + quartile) / 2


def _evidence_above(compared: Iterable[_Compared], share: float) -> float:
    """Return the evidence that a node's proven speed is above a share of its fastest references' speed."""
    return evidence((at.reading.proven > share * at.fastest, at.odds) for at in compared)


def _median_speed(node: str, rounds: Sequence[Round]) -> float:
    """Return the median of a node's speeds; 0 without rounds."""
    return median([reading.speed for reading in readings_of(node, rounds)] or [0.0])


def _exp(logarithm: float) -> float:
    """Return e to the power of a logarithm, capped at 700 against overflow."""
    return math.exp(min(logarithm, 700.0))
