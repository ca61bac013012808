"""Checks of several nodes together: repeated while a group misses a bound, until that is certain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import chain, count
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from labctl.batches import evidence, figures
from labctl.batches.alone import MOST_RUNS, Bounds, Runs
from labctl.batches.bisect import Group
from labctl.batches.evidence import PASSED, Verdict
from labctl.batches.figures import Bound, JobOutcome
from labctl.batches.hostfiles import groups as grouped
from labctl.batches.profile import Check
from labctl.reports.validation import Figure


class Suspicion(NamedTuple):
    """Reason of a check that failed on several nodes together: a missed metric and its bound; empty if a run failed."""

    metric: str = ""
    bound: Bound | None = None


class GroupTrial:
    """Runs of a check on groups of nodes, and the verdicts on the groups that they allow so far."""

    def __init__(self, check: Check, error: float) -> None:
        """Start without runs."""
        self.check, self.error = check, error
        self.bounds: Bounds = {}
        self.runs: defaultdict[Group, list[JobOutcome]] = defaultdict(list)
        self.misses: defaultdict[Group, list[bool | None]] = defaultdict(list)
        """True for a run that missed a bound; None if other programs may be why."""

    def measure(
        self,
        run: Callable[[tuple[Group, ...], int], Runs],
        groups: tuple[Group, ...],
        bounds: Callable[[list[JobOutcome]], Bounds],
    ) -> None:
        """Run the check on all groups, then on those that may change, until none may or MOST_RUNS is reached."""
        for number in count():
            runs = run(groups, number)
            self.bounds = self.bounds or bounds(runs.jobs)
            for job in runs.jobs:
                self.take(job, max((runs.lost.get(node, 0.0) for node in job.nodes), default=0.0))
            groups = tuple(group for group, jobs in self.runs.items() if self.is_open(group) and len(jobs) < MOST_RUNS)
            if not groups:
                return

    def take(self, job: JobOutcome, lost: float) -> None:
        """Record a group's run and, if it passed, if it misses a constant bound (None if load may be why)."""
        if job.passed:
            constant = self.constant_bounds(job.nodes)
            misses = [bound.misses(job.value(metric) or 0.0, lost) for metric, bound in constant]
            self.misses[job.nodes].append(next((word for word in (True, None) if word in misses), False))
        self.runs[job.nodes].append(job)

    def bounds_of(self, group: Group) -> list[tuple[str, Bound]]:
        """Return (metric, bound) pairs for all bounds of a group."""
        name = self.subject(group)
        return [(metric, bound) for (metric, subject), bound in self.bounds.items() if subject == name]

    def constant_bounds(self, group: Group) -> list[tuple[str, Bound]]:
        """Return (metric, bound) pairs of a group without bounds taken from other groups."""
        return [(metric, bound) for metric, bound in self.bounds_of(group) if not bound.of_others]

    def missed(self, job: JobOutcome) -> list[tuple[str, Bound]]:
        """Return (metric, bound) pairs of all bounds that a run's final values do not meet."""
        return [(metric, bound) for metric, bound in self.bounds_of(job.nodes) if not bound.holds(job.value(metric))]

    def subject(self, group: Group) -> str:
        """Return the name of a group's figures."""
        return figures.subject(group, everyone=self.check.nodes == "all")

    def is_open(self, group: Group) -> bool:
        """Tell if another run may settle a group: its verdict is unsure, or its only run is behind others."""
        jobs = self.runs[group]
        return self.verdict(group) == "unsure" or (len(jobs) == 1 and self.is_behind(jobs[0]))

    def is_behind(self, job: JobOutcome) -> bool:
        """Tell if a run that passed missed a bound that comes from the other groups."""
        return job.passed and any(bound.of_others for _, bound in self.missed(job))

    def verdict(self, group: Group) -> Verdict:
        """Return bad if the last run failed or lacks a number, or bounds are missed; else unsure or good.

        A constant bound must surely be missed in most runs, one that comes from other groups in first and last:
        `bisect` repeats those.
        """
        first, last = self.runs[group][0], self.runs[group][-1]
        if not last.passed or any(last.value(limit.metric) is None for limit in self.check.limits):
            return "bad"
        if self.is_behind(first) and self.is_behind(last):
            return "bad"
        return evidence.against_bound(self.misses[group], self.error) if self.constant_bounds(group) else "good"

    def of(self, verdict: Verdict) -> list[Group]:
        """Return the groups with a verdict."""
        return [group for group in self.runs if self.verdict(group) == verdict]

    def last(self) -> list[JobOutcome]:
        """Return the last run of each group."""
        return [jobs[-1] for jobs in self.runs.values()]

    def why(self, group: Group) -> str:
        """Return why a group is not good: the message of its last run if that failed, else the missed figures."""
        jobs = self.runs[group]
        if not jobs[-1].passed:
            return f"{self.check.name}: {jobs[-1].message}"
        texts = []
        for figure in self.figures_of(group):
            bound = self.bounds.get((figure.what, figure.node))
            if figure.value is None or (bound and figure.passed is not True):
                texts.append(figures.against(figure, bound, len(jobs)))
        disturbed = self.misses[group].count(None)
        return "; ".join(texts) + (f", {disturbed} of them disturbed by other programs" if disturbed else "")

    def figures(self) -> list[Figure]:
        """Return the figures of all groups: medians of their runs."""
        return list(chain.from_iterable(map(self.figures_of, self.runs)))

    def figures_of(self, group: Group) -> list[Figure]:
        """Return a group's figures, each the median of its runs, judged with the group's verdict on a miss."""
        judged = figures.judge(self.check, self.runs[group][-1:], self.bounds)
        return [self.over_runs(group, figure) for figure in judged]

    def over_runs(self, group: Group, figure: Figure) -> Figure:
        """Return a figure as the median of the group's runs with ``passed``; unchanged if fewer than two."""
        values = tuple(value for job in self.runs[group] if (value := job.value(figure.what)) is not None)
        if figure.value is None or len(values) < 2:
            return figure
        bound, passed = self.bounds.get((figure.what, figure.node)), None
        if bound:
            passed = all(map(bound.holds, values)) or PASSED[self.verdict(group)]
        return replace(figure, value=median(values), values=values, passed=passed)

    def suspicion(self) -> Suspicion | None:
        """Return the first metric that a bad group missed, empty if its first run failed; None if none is bad."""
        bad = self.of("bad")
        missed = chain.from_iterable(self.missed(self.runs[group][0]) for group in bad if self.runs[group][0].passed)
        return Suspicion(*next(missed, ())) if bad else None


def groups_of(check: Check, nodes: Group) -> tuple[Group, ...]:
    """Return the groups to run: all nodes as one, or pairs; an odd last node is paired with the first."""
    if check.nodes == "all":
        return (nodes,)
    odd = ((nodes[-1], nodes[0]),) if len(nodes) % 2 else ()
    return (*grouped(nodes, 2, "pairs"), *odd)
