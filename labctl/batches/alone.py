"""Checks that measure each node: repeated, round after round, until every node is judged or the limit is reached."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from labctl.batches import evidence, turns
from labctl.batches.evidence import DISTURBED, MOST_ROUNDS, PASSED, Judged, Reading, Round, Verdict
from labctl.batches.figures import Bound, JobOutcome, against
from labctl.batches.profile import Check, Limit
from labctl.reports.validation import Figure
from labctl.system import human

MOST_RUNS = 16
"""Runs of a check on a node, each of which measures once; it is unsure if it has no verdict by then."""

Bounds = Mapping[tuple[str, str], Bound]
"""Constant bounds, by metric and node."""


class Runs(Struct, frozen=True):
    """Runs of a check on nodes at about the same time, and the share of each node's cores that others used."""

    jobs: list[JobOutcome]
    lost: Mapping[str, float]


class Trial:
    """Measurements of a check on each of some nodes, and the verdicts that they allow so far."""

    def __init__(self, check: Check, nodes: tuple[str, ...], within: float, error: float, *, compared: bool) -> None:
        """Start without measurements; if ``compared``, other nodes judge metrics without constant bound."""
        self.check, self.nodes, self.within, self.error, self.compared = check, nodes, within, error, compared
        self.bounds: Bounds = {}
        self.runs: defaultdict[str, list[JobOutcome]] = defaultdict(list)
        """Runs of each node, in order; one of all nodes in turn is a run of each."""
        self.rounds: defaultdict[str, list[Round]] = defaultdict(list)
        """By metric."""
        self.judged: dict[str, dict[str, Judged]] = {}
        """Verdicts so far, by metric and node; a node that a metric cannot judge is left out."""

    def measure(
        self, run: Callable[[tuple[str, ...], int], Runs], bounds: Callable[[list[JobOutcome]], Bounds]
    ) -> None:
        """Run the check on all nodes, then again on `to_repeat()` until it is empty; keep runs and verdicts.

        ``run`` takes the nodes and how many turns each is to have; ``bounds`` are read once, after the first runs.
        """
        first = run(self.nodes, self.turns_needed())
        self.bounds = bounds(first.jobs)
        self.take(first)
        while nodes := self.to_repeat():
            self.take(run(nodes, AGAIN))

    def turns_needed(self) -> int:
        """Return the number of turns that tell good nodes from slow ones, even if a round goes against a node."""
        return evidence.rounds_needed(max(1, len(self.nodes) - 1), self.error) + SPARE

    def take(self, runs: Runs) -> None:
        """Append runs by node and readings by metric, and judge the nodes again by each metric."""
        for job in runs.jobs:
            for node in job.nodes:
                self.runs[node].append(job)
        for limit in self.check.limits:
            if self.check.nodes == "turns":
                self.rounds[limit.metric] += chain.from_iterable(job.rounds for job in runs.jobs)
            else:
                self.rounds[limit.metric].append(_round(limit, runs))
            self.judged[limit.metric] = self.judge(limit)

    def to_repeat(self) -> tuple[str, ...]:
        """Return nodes to run again: failed once, unsure, passing if compared, all if results differ."""
        if self.failed_together:
            return ()
        failed = [node for node in self.nodes if len(self.runs[node]) == 1 and not self.runs[node][0].passed]
        unsure = {limit: self.unsure(limit) for limit in self.check.limits}
        if any(unsure[limit] for limit in self.judged_by_others()):
            running = self.passing()
            return tuple(dict.fromkeys((*failed, *(running if len(running) > 1 else ()))))
        if not {"good"}.issuperset(self.agreement().values()) and len(self.runs[self.nodes[0]]) < COMPUTED:
            return self.nodes
        return tuple(dict.fromkeys(chain(failed, *unsure.values())))

    def unsure(self, limit: Limit) -> list[str]:
        """Return the nodes whose verdict by this metric is unsure, whose last run passed, that may run again."""
        most = MOST_ROUNDS if self.check.nodes == "turns" else MOST_RUNS
        judged = self.judged[limit.metric]
        unsure = [node for node in judged if judged[node].verdict == "unsure" and self.runs[node][-1].passed]
        return [node for node in unsure if 0 < len(judged[node].values) < most and len(self.runs[node]) < MOST_RUNS]

    def passing(self) -> tuple[str, ...]:
        """Return the nodes whose last run passed."""
        return tuple(node for node in self.nodes if self.runs[node][-1].passed)

    def confirm(self, later: Trial) -> None:
        """Merge a later trial's runs, rounds and verdicts into this one; a node is bad only if both say so."""
        for node, jobs in later.runs.items():
            self.runs[node] += jobs
        for metric, judged in later.judged.items():
            self.rounds[metric] += later.rounds[metric]
            for node, again in judged.items():
                if first := self.judged[metric].get(node):
                    self.judged[metric][node] = evidence.both(first, again)

    @property
    def failed_together(self) -> str:
        """Return the message of the first failed run of all nodes in turn; empty if there is none."""
        jobs = self.runs[self.nodes[0]] if self.check.nodes == "turns" and len(self.nodes) > 1 else []
        return next((job.message for job in jobs if not job.passed), "")

    def proven_slow(self, node: str) -> bool:
        """Tell if the verdict of any metric on a node is bad."""
        return any(self.is_bad(limit, node) for limit in self.check.limits)

    def misses_bound(self, node: str) -> bool:
        """Tell if a node is bad by constant bounds alone: its runs and results are not bad, nor other metrics."""
        bad = [limit for limit in self.check.limits if self.is_bad(limit, node)]
        others = node in self.failing() or self.agreement().get(node) == "bad"
        return bool(bad) and not others and all(self.is_bounded(limit, node) for limit in bad)

    def is_bad(self, limit: Limit, node: str) -> bool:
        """Tell if a metric shows that a node is bad."""
        return node in (judged := self.judged[limit.metric]) and judged[node].verdict == "bad"

    @property
    def is_judged(self) -> bool:
        """Tell if the check judges nodes: by a constant bound, by the other nodes or, without metrics, by passing."""
        return bool(self.bounds or self.judged_by_others() or not self.check.limits)

    def agreement(self) -> dict[str, Verdict]:
        """Judge nodes by the result their passed runs printed, if the check compares it; leave out others."""
        computed = [
            (node, *job.notes[self.check.equal].partition(" on ")[::2])
            for node, jobs in self.runs.items()
            for job in jobs
            if job.passed and self.check.equal in job.notes
        ]
        return agreement(computed)

    def is_bounded(self, limit: Limit, node: str) -> bool:
        """Tell if a metric of a node has a constant bound."""
        return (limit.metric, self.subject(node)) in self.bounds

    def subject(self, node: str) -> str:
        """Return the name of a node's figures: empty if the check runs on all nodes, else the node."""
        return "" if self.check.nodes == "all" else node

    def judged_by_others(self) -> list[Limit]:
        """Return metrics, not all 0, that some node has no constant bound for; [] if nodes are not compared."""
        if not self.compared or len(self.nodes) < 2:
            return []
        unbounded = (limit for limit in self.check.limits if not all(map(partial(self.is_bounded, limit), self.nodes)))
        return [limit for limit in unbounded if self.has_values(limit)]

    def has_values(self, limit: Limit) -> bool:
        """Tell if a metric is other than 0 on any node; the bandwidth of a single rank is 0 by definition."""
        return any(map(any, self.speeds(limit).values()))

    def judge(self, limit: Limit) -> dict[str, Judged]:
        """Return verdicts by node: of its constant bound, else of a comparison with other nodes; others left out."""
        rounds = self.rounds[limit.metric]
        judged = {}
        if limit in self.judged_by_others():
            judged = evidence.judge(rounds, self.within, self.error)
        for node in self.nodes:
            if bound := self.bounds.get((limit.metric, self.subject(node))):
                judged[node] = self.judge_by_bound(limit, bound, evidence.readings_of(node, rounds))
        return judged

    def judge_by_bound(self, limit: Limit, bound: Bound, readings: Sequence[Reading]) -> Judged:
        """Return a node's verdict by its readings of a metric against a constant bound, with mean lost share."""
        misses = [bound.misses(_value(limit, reading.speed), reading.included) for reading in readings]
        verdict = evidence.against_bound(misses, self.error)
        lost = sum(reading.lost for reading in readings) / max(1, len(readings))
        values = tuple(reading.speed for reading in readings)
        return Judged(verdict=verdict, speed=None, lost=lost, values=values)

    def failing(self) -> dict[str, str]:
        """Map each node whose first two runs failed to a text with the last run's message."""
        return {
            node: f"{self.check.name}: {jobs[-1].message}, twice"
            for node, jobs in self.runs.items()
            if len(jobs) > 1 and not jobs[0].passed and not jobs[1].passed
        }

    def recovered(self) -> list[str]:
        """Return nodes run twice or more that failed or missed a bound at first, and whose verdict is good."""
        return [
            node
            for node, jobs in self.runs.items()
            if len(jobs) > 1 and not self.first_passed(node) and self.verdict(node) == "good"
        ]

    def first_passed(self, node: str) -> bool:
        """Tell if the first run of a node passed and held all constant bounds."""
        first = self.runs[node][0]
        bounds = [(metric, bound) for (metric, of), bound in self.bounds.items() if of == self.subject(node)]
        return first.passed and all(bound.holds(first.value(metric)) for metric, bound in bounds)

    def verdict(self, node: str) -> Verdict:
        """Return a node's worst verdict by all metrics: bad if it failed twice or gave no number."""
        jobs = self.runs[node]
        if node in self.failing() or (jobs[-1].passed and self.without_number(node)):
            return "bad"
        if not jobs[-1].passed:
            return "unsure"
        verdicts = {of_metric[node].verdict for of_metric in self.judged.values() if node in of_metric}
        verdicts.add(self.agreement().get(node, "good"))
        return next((worst for worst in ("bad", "unsure") if worst in verdicts), "good")

    def without_number(self, node: str) -> list[str]:
        """Return the metrics and the note that a node's last run did not print, though it passed."""
        last = self.runs[node][-1]
        missing = [limit.metric for limit in self.check.limits if last.value(limit.metric) is None]
        if self.check.nodes == "turns":
            missing = [limit.metric for limit in self.check.limits if not self.speeds(limit)[node]]
        return [*missing, *([self.check.equal] if self.check.equal not in {"", *last.notes} else [])]

    def figures(self) -> list[Figure]:
        """Return the figure of each metric of each node: the median of its readings; none before the first run."""
        return [self.figure(node, limit) for limit, node in product(self.check.limits, self.nodes) if self.judged]

    def figure(self, node: str, limit: Limit) -> Figure:
        """Return the figure of a metric of a node: median, unit, verdict and bound; value None without readings."""
        readings = evidence.readings_of(node, self.rounds[limit.metric])
        values = tuple(_value(limit, reading.speed) for reading in readings)
        units = [
            str(job.metrics[limit.metric].get("unit", "")) for job in self.runs[node] if limit.metric in job.metrics
        ]
        judged, bound = self.judged[limit.metric].get(node), self.bound_of(limit, node)
        unit = units[0] if units else ""
        figure = Figure(
            step=self.check.name,
            what=limit.metric,
            node=self.subject(node),
            value=median(values) if values else None,
            unit=unit,
            passed=_passed(judged) if values else False,
            values=values if len(values) > 1 else (),
            judged=said(judged) if judged else "",
        )
        return replace(figure, limit=bound.text(unit), source=bound.source) if bound else figure

    def bound_of(self, limit: Limit, node: str) -> Bound | None:
        """Return a node's constant bound for a metric, else the usual one if others judge it; None if neither."""
        if bound := self.bounds.get((limit.metric, self.subject(node))):
            return bound
        judged = self.judged[limit.metric].get(node)
        return self.usual_bound(limit) if judged and judged.speed is not None else None

    def usual_bound(self, limit: Limit) -> Bound:
        """Return the bound that a node judged by the others would have to meet, if their medians had no noise."""
        speeds = [median(of_node) for of_node in self.speeds(limit).values()]
        least = (1 - self.within) * evidence.usual(speeds)
        share = human.share(self.within)
        if limit.lower_is_better:
            return Bound(sign="<=", value=1 / least, source=f"{share} above the others", of_others=True)
        return Bound(sign=">=", value=least, source=f"{share} below the others", of_others=True)

    def speeds(self, limit: Limit) -> dict[str, list[float]]:
        """Map each node to its speeds by a metric, in order of rounds; higher is better."""
        speeds: defaultdict[str, list[float]] = defaultdict(list)
        for readings in self.rounds[limit.metric]:
            for node, reading in readings.items():
                speeds[node].append(reading.speed)
        return speeds

    def texts(self, node: str) -> list[str]:
        """Return what speaks against a node: results, bad or unsure metrics, missing numbers, a failed last run."""
        texts = []
        for limit in self.check.limits:
            figure, bound = self.figure(node, limit), self.bound_of(limit, node)
            if figure.passed is False or (figure.passed is None and bound):
                texts.append(against(figure, bound, len(self.runs[node])))
        last, verdict = self.runs[node][-1], self.agreement().get(node, "good")
        if last.passed:
            texts += [f"{self.check.name}: it printed no {name}" for name in self.without_number(node)]
        else:
            texts.append(f"{self.check.name}: its last run failed: {last.message}")
        return [*([f"{self.check.name}: {DISAGREES[verdict]}"] if verdict != "good" else []), *texts]


COMPUTED = 3
"""Runs of each node whose results are compared, if the first ones differ."""
DISAGREES = {
    "bad": "its results are wrong: they differ from those of the other nodes with the same hardware",
    "unsure": "nodes with the same hardware computed different results, and no result has a majority",
}
SPARE = 3
"""Turns more than are needed without noise."""
HELD = 0.05
"""Share of its time that a node's own quota takes, above which it is a reason of a low speed."""
LEAST = 1e-12
"""Value of a metric of which less is better, below which it counts as 0."""
AGAIN = 8
"""Turns of each further run."""


def agreement(computed: Iterable[tuple[str, str, str]]) -> dict[str, Verdict]:
    """Judge nodes by (node, result, hardware): bad if unlike the majority of the same hardware, unsure without one.

    A node is bad if most of its results are not that of more than half, and unsure if some are not. All are unsure if
    there is no such majority.
    """
    by_hardware: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for node, result, hardware in computed:
        by_hardware[hardware].append((node, result))
    verdicts: dict[str, Verdict] = {}
    for results in by_hardware.values():
        ((usual, many),) = Counter(result for _, result in results).most_common(1)
        nodes = dict.fromkeys(node for node, _ in results)
        if 2 * many <= len(results) and len(nodes) > 1:
            verdicts |= dict.fromkeys(nodes, "unsure")
        else:
            for node in nodes:
                others = [result != usual for of, result in results if of == node]
                verdicts[node] = "unsure" if any(others) else "good"
                if 2 * sum(others) > len(others):
                    verdicts[node] = "bad"
    return verdicts


def said(judged: Judged) -> str:
    """Render a speed, ``27 % of the others (p < 0.001, 9 rounds)``, with why if unsure; empty without a speed."""
    if judged.speed is None:
        return ""
    rounds = human.count(len(judged.values), "round")
    if judged.verdict == "unsure":
        return f"{human.share(judged.speed)} of the others ({rounds}); {why_unsure(judged)}"
    text = f"{human.share(judged.speed)} of the others ({evidence.p_text(judged.p)}, {rounds})"
    if judged.verdict == "bad" and judged.held > HELD:
        return f"{text}; its own CPU quota throttled it for {human.share(judged.held)} of its time"
    return text


def why_unsure(judged: Judged) -> str:
    """Return why a node is neither surely good nor surely bad: other programs, noise, or a speed near the limit."""
    if judged.doubt:
        return judged.doubt
    if judged.lost > DISTURBED:
        return f"other programs took {human.share(judged.lost)} of its time, so it may be slow or only disturbed"
    bounds = [human.share(bound) for bound in (judged.low, judged.high) if bound is not None]
    if len(bounds) == 2:
        return f"somewhere between {bounds[0]} and {bounds[1]}, too close to the limit to tell"
    varied = max(judged.values) / max(min(judged.values), LEAST)
    return f"its fastest round was {human.number(varied)} times as fast as its slowest"


def _round(limit: Limit, runs: Runs) -> Round:
    """Map nodes to readings of their single runs, inverted if lower is better; runs without a value are left out."""
    readings = {}
    for job in runs.jobs:
        value = job.value(limit.metric)
        if value is not None:
            (node,) = job.nodes
            speed = 1 / max(value, LEAST) if limit.lower_is_better else value
            readings[node] = Reading(speed, runs.lost.get(node, 0.0))
    return readings


def _value(limit: Limit, speed: float) -> float:
    """Convert a speed back to the value that the workload printed: its inverse if lower is better."""
    if not limit.lower_is_better:
        return speed
    return 0.0 if speed >= 1 / LEAST else 1 / speed


def _passed(judged: Judged | None) -> bool | None:
    """Return False for a bad node, True for a good one; None if it is unsure, or was not judged."""
    return PASSED[judged.verdict] if judged else None


def in_turn(check: Check, many: int) -> Check:
    """Return a copy of a check with the option that gives each node ``many`` turns."""
    arguments = (*check.options.arguments, (turns.OPTION, str(many)))
    return replace(check, options=replace(check.options, arguments=arguments))
