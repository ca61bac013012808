"""Spread of runs with the same settings, and whether a difference between runs is more than usual.

The usual difference is estimated from three or more runs with the same settings: 99 % of such runs are no further
apart. It is t x s x sqrt(1/n + 1/m), a difference of logarithms, between the means of n and of m runs: s is the pooled
standard deviation of the logarithms of their figures, t Student's for 99 % and the degrees of freedom of s.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import mean, median, stdev, variance
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from labctl.model import Result
from labctl.records.verdict import final
from labctl.system import human

FEWEST = 3
"""Runs with the same settings that tell how such runs spread."""
ENOUGH = 5
"""Runs to repeat with the same settings if there are too few to tell."""
T99 = (9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17)
"""Student's t for 99 %, two-sided, by degrees of freedom from 2; at most the last beyond."""
LARGEST = math.log(2)
"""Largest usual difference, a factor of two: runs that spread more tell nothing."""


class Spread(Struct, frozen=True, kw_only=True):
    """A metric of runs with the same settings. ``cv`` is standard deviation / mean; None for one run or a mean of 0."""

    unit: str
    values: tuple[float, ...]
    median: float | None
    """None without values, as ``mean``."""
    mean: float | None
    cv: float | None
    at_end: bool
    """The values are the last of a series, as of a loss."""
    change: float | None = None
    """Difference of the mean to that of the first column of a comparison, as a share."""
    found: str = ""
    """Text of the output in which the metric was found; empty for one that is declared."""
    non_finite: tuple[str, ...] = ()
    """``nan`` or ``inf`` of each run that has no other value, which JSON does not have as numbers."""

    @property
    def figure(self) -> str:
        """Return the mean as text; without values ``nan`` or ``inf``."""
        return ", ".join(dict.fromkeys(self.non_finite)) if self.mean is None else human.number(self.mean)

    @property
    def basis(self) -> str:
        """Return ``mean of 2, nan in 1 run``; empty for a single value."""
        several = f"mean of {len(self.values)}" if len(self.values) > 1 else ""
        return ", ".join(filter(None, (several, self.others)))

    @property
    def others(self) -> str:
        """Return ``nan in 1 run`` for the runs that do not count for the mean; empty without such runs."""
        names = ", ".join(dict.fromkeys(self.non_finite))
        return f"{names} in {human.count(len(self.non_finite), 'run')}" if names and self.values else ""

    @property
    def usual(self) -> float | None:
        """Return the coefficient of variation; None for fewer than FEWEST runs."""
        return self.cv if len(self.values) >= FEWEST else None


class Effect(Struct, frozen=True, kw_only=True):
    """A metric of one group compared with another, by their means; None if no run has it.

    With ``run``, it is that of a run compared with the mean of the other runs of its group. ``change`` and ``noise``,
    the usual difference, are shares of the other value.
    """

    metric: str
    unit: str
    at_end: bool
    """The values are the last of a series, as of a loss."""
    group: str
    against: str
    run: str = ""
    value: float | None
    other: float | None
    change: float | None = None
    noise: float | None = None
    basis: Literal["runs"] | None = None
    """``runs`` if three or more have the same settings; without a verdict if these spread too much."""
    verdict: Literal["more than noise", "within noise"] | None = None


class RepeatedRuns(Struct, frozen=True, kw_only=True):
    """Results of a run that was repeated; ``effects`` are of the run that is furthest from the others."""

    runs: tuple[Result, ...]
    spread: Mapping[str, Spread]
    effects: tuple[Effect, ...]
    conclusion: str

    @property
    def worst(self) -> Result:
        """Return the first result with the worst verdict: ERROR, then FAIL, then PASS."""
        severity = {"PASS": 0, "FAIL": 1}
        return max(self.runs, key=lambda run: severity.get(run.verdict, 2))


def repeated(runs: Sequence[Result], target: str) -> RepeatedRuns:
    """Return the spread of repeated runs with effects and a conclusion; ``target`` is what was run."""
    spread, effects = spreads(runs), tuple(within("A", runs))
    return RepeatedRuns(
        runs=tuple(runs), spread=spread, effects=effects, conclusion=conclusion(effects, spread.values(), [target])
    )


def spreads(results: Sequence[Result]) -> dict[str, Spread]:
    """Map each metric of these runs to its values, mean, median and coefficient of variation; omit empty ones."""
    spread: dict[str, Spread] = {}
    for name in _names(results):
        values, non_finite = tuple(_figures(name, results).values()), tuple(_non_finite(name, results))
        if values or non_finite:
            recorded = [result.metrics[name] for result in results if name in result.metrics]
            spread[name] = Spread(
                unit=str(recorded[0].get("unit", "")),
                values=values,
                median=median(values) if values else None,
                mean=mean(values) if values else None,
                cv=stdev(values) / abs(mean(values)) if len(values) > 1 and mean(values) else None,
                at_end=any("last" in metric for metric in recorded),
                found=str(recorded[-1].get("line", "")),
                non_finite=non_finite,
            )
    return spread


def within(group: str, results: Sequence[Result]) -> Iterator[Effect]:
    """Yield an effect per metric: how far the furthest of runs with equal settings is from the others' mean.

    The usual difference is estimated from the others, if they are enough: a run would widen it for itself.
    """
    for name, spread in spreads(results).items():
        figures = _figures(name, results)
        if len(figures) < 2:
            continue
        others = {run_id: _without(run_id, figures) for run_id in reversed(figures)}
        furthest = max(others, key=lambda run_id: abs(figures[run_id] - mean(others[run_id])))
        value, rest = figures[furthest], others[furthest]
        effect = Effect(
            metric=name,
            unit=spread.unit,
            at_end=spread.at_end,
            group=group,
            against=group,
            run=furthest,
            value=value,
            other=mean(rest),
        )
        yield judged(effect, usual_difference([rest if len(rest) >= FEWEST else spread.values], 1, len(rest)))


def between(name: str, group: str, against: str, groups: Mapping[str, Mapping[str, Spread]]) -> Effect:
    """Return a metric's effect of a group against another, judged by all groups' spread; unjudged if one lacks it."""
    spread, other = groups[group].get(name), groups[against].get(name)
    recorded = [metric for metric in (spread, other) if metric]
    effect = Effect(
        metric=name,
        unit=recorded[0].unit,
        at_end=any(metric.at_end for metric in recorded),
        group=group,
        against=against,
        value=spread.mean if spread else None,
        other=other.mean if other else None,
    )
    if not spread or not other or effect.value is None or effect.other is None:
        return effect
    samples = [metrics[name].values for metrics in groups.values() if name in metrics]
    return judged(effect, usual_difference(samples, len(spread.values), len(other.values)))


def usual_difference(samples: Iterable[Sequence[float]], count: int, other: int) -> float | None:
    """Return the 99 % bound of two means' difference of logarithms; None if no sample has FEWEST values.

    ``samples`` are the figures of runs with the same settings; those of three or more tell it, if all are above 0.
    """
    known = [list(map(math.log, values)) for values in samples if len(values) >= FEWEST and min(values) > 0]
    degrees = sum(len(logarithms) - 1 for logarithms in known)
    if not degrees:
        return None
    squares = sum(variance(logarithms) * (len(logarithms) - 1) for logarithms in known)
    t = T99[min(degrees - 2, len(T99) - 1)]
    return t * math.sqrt(squares / degrees * (1 / count + 1 / other))


def judged(effect: Effect, usual: float | None) -> Effect:
    """Return an effect with its change; also noise and verdict if the usual difference is known and small."""
    change = change_of(effect.value, effect.other)
    if change is None or usual is None:
        return replace(effect, change=change)
    if usual > LARGEST:
        return replace(effect, change=change, basis="runs")
    noise = abs(math.expm1(math.copysign(usual, change)))
    verdict: Literal["more than noise", "within noise"] = "more than noise" if abs(change) > noise else "within noise"
    return replace(effect, change=change, noise=noise, basis="runs", verdict=verdict)


def change_of(value: float | None, other: float | None) -> float | None:
    """Return (value - other) / |other|; None if one is missing or other is 0."""
    return None if value is None or not other else (value - other) / abs(other)


def in_words(effect: Effect) -> str:
    """Render an effect, as ``throughput: 25 % slower, more than the usual 4 %``; with the run's id if it is one's."""
    name = titled(effect.metric, at_end=effect.at_end)
    if effect.change is None:
        return f"{name}: {_quantity(effect.value, effect.unit)} against {_quantity(effect.other, effect.unit)}"
    if not effect.change:
        return f"{name}: the same"
    more, less = ("faster", "slower") if effect.unit.endswith("/s") else ("higher", "lower")
    difference = f"{human.share(abs(effect.change))} {more if effect.change > 0 else less}{_judgement(effect)}"
    return f"{name} of {effect.run}: same settings; {difference}" if effect.run else f"{name}: {difference}"


def _judgement(effect: Effect) -> str:
    """Render that a difference is more or no more than usual, or too few runs to tell; empty if unknown."""
    if effect.noise is not None:
        than = "more than" if effect.verdict == "more than noise" else "no more than"
        return f", {than} the usual {human.share(effect.noise)}"
    return "; runs with the same settings spread too much to tell" if effect.basis else ""


def conclusion(effects: Collection[Effect], spreads: Iterable[Spread], targets: Iterable[str]) -> str:
    """Render how the usual difference was found, or that runs are too few and how to run more; empty otherwise.

    ``targets`` follow `labctl run`: the workload, or ``--script FILE``, with options and arguments as far as known.
    """
    changed = [effect for effect in effects if effect.change]
    if any(effect.verdict for effect in changed):
        return "usual: 99 % of runs with the same settings are no further apart, by the spread of those compared"
    runs = max((len(spread.values) for spread in spreads), default=0)
    if not changed or runs >= ENOUGH:
        return ""
    few = "1 run each is" if runs == 1 else f"{runs} runs are"
    needs = f" (needs {FEWEST} or more)" if runs < FEWEST else ""
    return f"{few} too few to tell{needs}: {' and '.join(map(_repeating, targets))}"


def _repeating(target: str) -> str:
    """Return the command that runs a target often enough; the program's arguments stay last."""
    options, dashes, arguments = f"labctl run {target}".partition(" -- ")
    return f"`{options} --repeat {ENOUGH}{dashes}{arguments}`"


def titled(metric: str, *, at_end: bool) -> str:
    """Return a metric's name, with `` at the end`` if its value is the last of a series."""
    return f"{metric} at the end" if at_end else metric


def _quantity(value: float | None, unit: str) -> str:
    """Render a value with its unit; ``none`` for None."""
    return "none" if value is None else f"{human.number(value)} {unit}".rstrip()


def _names(results: Iterable[Result]) -> dict[str, None]:
    """Return the names of all metrics as keys, in order."""
    return dict.fromkeys(chain.from_iterable(result.metrics for result in results))


def _figures(name: str, results: Sequence[Result]) -> dict[str, float]:
    """Map run ids to a metric's number, where there is one."""
    figures = ((run_id, metric.get(final(metric))) for run_id, metric in _counted(name, results))
    return {run_id: figure for run_id, figure in figures if isinstance(figure, (int, float))}


def _non_finite(name: str, results: Sequence[Result]) -> Iterator[str]:
    """Yield ``nan`` or ``inf`` of each run with such a value of a metric."""
    for _, metric in _counted(name, results):
        if metric.get(final(metric)) is None and "note" in metric:
            yield str(metric["note"])


def _counted(name: str, results: Sequence[Result]) -> list[tuple[str, Mapping[str, float | int | str | None]]]:
    """Return run id and metric of each run that has it; ERROR runs count only if all are."""
    ended = [result for result in results if result.verdict != "ERROR"] or results
    return [(result.run_id, result.metrics[name]) for result in ended if name in result.metrics]


def _without(run_id: str, figures: Mapping[str, float]) -> list[float]:
    """Return the figures of all runs but one."""
    return [figure for other, figure in figures.items() if other != run_id]
