"""Find slow or failing nodes that share a host: each runs alone, one after the other, in rounds. No clock, no I/O.

Nodes of one host have no links to look for, and share its cores, memory and disk: two that run at the same time slow
each other. The verdict is that of ``evidence``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from random import Random
from statistics import median

from labctl.batches import bisect, evidence
from labctl.batches.bisect import FAILURES, BadNode, Diagnosis, Group, Outcome, Run, Steps, Stopped
from labctl.batches.evidence import MOST_ROUNDS, Judged, Reading, Round
from labctl.batches.figures import Bound
from labctl.system import human

RUNS_ALONE = 0.99
"""``within`` of a search that judges by failures alone: no successful run is that far below the others."""


def diagnose(
    nodes: Group,
    *,
    within: float,
    minimum: float | None = None,
    seed: int = 0,
    rounds: int = MOST_ROUNDS,
    figures: int = 1,
    notice: Callable[[str], None] = lambda _: None,
) -> Steps[Diagnosis]:
    """Yield rounds, nodes to run one by one; take outcomes by send(); return the diagnosis, by pairs if all give 0.

    A node is bad if it fails, if it is surely more than ``within`` slower than the others, or surely below ``minimum``.
    The false accusations that are allowed are shared with so many ``figures``. ``notice`` gets a line for each bad
    node, as soon as it is certain, and one per round. If nodes alone have a value of 0, they are searched in pairs.
    """
    search = _Search(nodes, within, minimum, figures, notice)
    order = Random(seed)  # noqa: S311 - which node is first, no secret
    note = ""
    try:
        while (left := search.left()) and search.number < rounds:
            notice(f"round {search.number + 1}: {search.reason()}; at most {rounds - search.number - 1} more")
            outcomes = yield tuple((node,) for node in order.sample(left, len(left)))
            if all(outcome.value == 0 for outcome in outcomes.values()):
                # The bandwidth of a single rank is 0 by definition.
                pairs = bisect.diagnose(
                    nodes, within=within, minimum=minimum, seed=seed, figures=figures, notice=notice
                )
                return (yield from pairs)
            search.take(outcomes)
    except Stopped as stopped:
        note = str(stopped)
    return search.diagnosis(note)


class _Search:
    """Runs of each node so far, and the verdicts that they allow."""

    def __init__(
        self, nodes: Group, within: float, minimum: float | None, figures: int, notice: Callable[[str], None]
    ) -> None:
        """Start without rounds; ``figures`` share the allowed error, ``notice`` gets a line per bad node."""
        self.nodes, self.within, self.minimum, self.notice = nodes, within, minimum, notice
        self.error = evidence.error_per_test(len(nodes), figures)
        self.number = 0
        """Rounds so far."""
        self.runs: defaultdict[str, list[Run]] = defaultdict(list)
        self.rounds: list[Round] = []
        self.judged: dict[str, Judged] = {}
        self.bad: dict[str, BadNode] = {}

    def left(self) -> list[str]:
        """Return all nodes that do not fail, if any is unsure and can be compared; empty if nothing is left to do."""
        running = [node for node in self.nodes if not self.is_failing(node)]
        verdicts = {self.verdict(node) for node in running}
        return running if "unsure" in verdicts and (len(running) > 1 or self.minimum is not None) else []

    def reason(self) -> str:
        """Return the text of the next round: each node alone, or which nodes are unsure."""
        unsure = [node for node in self.nodes if self.verdict(node) == "unsure"]
        if not self.rounds:
            return "each node alone, in turn"
        return f"each again, as {human.listed(unsure)} may be good or bad"

    def take(self, outcomes: Mapping[Group, Outcome]) -> None:
        """Record a round's outcomes, judge all nodes again, and send a notice for each node that is found bad."""
        self.number += 1
        readings = {
            node: Reading(outcome.value, outcome.lost)
            for (node,), outcome in outcomes.items()
            if outcome.value is not None
        }
        self.rounds.append(readings)
        usual = median(reading.speed for reading in readings.values()) if readings else 0.0
        for (node,), outcome in outcomes.items():
            figure = outcome.value / usual if outcome.value is not None and usual else None
            low = (
                outcome.value is None
                or (figure is not None and figure < 1 - self.within)
                or self.is_below(outcome.value)
            )
            run = Run(nodes=(node,), value=outcome.value, figure=figure, bad=low, why=outcome.why, lost=outcome.lost)
            self.runs[node].append(run)
        self.judged = evidence.judge(self.rounds, self.within, self.error)
        for node in () if self.none_good else self.nodes:
            if node not in self.bad and (bad := self.bad_node(node)):
                self.bad[node] = bad
                self.notice(f"{node} is {bad.kind}: {bisect.shown_by(bad)}, round {self.number}")

    def is_below(self, value: float | None) -> bool:
        """Tell if a value is below the minimum, if there is one."""
        return self.minimum is not None and value is not None and value < self.minimum

    @property
    def none_good(self) -> bool:
        """Tell if there were runs, and all failed or were below the minimum: that says nothing about a node."""
        return bool(self.runs) and all(run.bad for run in chain.from_iterable(self.runs.values()))

    def is_failing(self, node: str) -> bool:
        """Tell if a node ran FAILURES times or more and all runs failed."""
        runs = self.runs[node]
        return len(runs) >= FAILURES and all(run.value is None for run in runs)

    def verdict(self, node: str) -> evidence.Verdict:
        """Return good, bad or unsure: by failing runs, the minimum, then the other nodes; unsure if not judged."""
        if node in self.bad or self.is_failing(node):
            return "bad"
        if self.within >= RUNS_ALONE and self.minimum is None:
            return "good" if any(run.value is not None for run in self.runs[node]) else "unsure"
        if node not in self.judged:
            return "unsure"
        below = self.below_minimum(node)
        return below if below != "good" else self.judged[node].verdict

    def below_minimum(self, node: str) -> evidence.Verdict:
        """Judge a node by the minimum, over the runs that gave a value; good without a minimum."""
        if self.minimum is None:
            return "good"
        bound = Bound(sign=">=", value=self.minimum, source="")
        misses = [bound.misses(run.value, run.lost) for run in self.runs[node] if run.value is not None]
        return evidence.against_bound(misses, self.error)

    def bad_node(self, node: str) -> BadNode | None:
        """Return a node as failing if all its runs failed, as slow if judged bad or below the minimum; else None."""
        runs = self.runs[node]
        if self.is_failing(node):
            return BadNode(node=node, kind="failing", figure=None, runs=tuple(runs))
        judged = self.judged.get(node)
        if judged and "bad" in (judged.verdict, self.below_minimum(node)):
            p = judged.p if judged.verdict == "bad" else None
            return BadNode(node=node, kind="slow", figure=judged.speed, runs=tuple(runs), p=p, minimum=self.minimum)
        return None

    def diagnosis(self, note: str) -> Diagnosis:
        """Build the diagnosis of the runs so far; if no run was good, failing nodes are unsure, not bad."""
        verdicts = {node: self.verdict(node) for node in self.nodes}
        unsure = [
            node
            for node, verdict in verdicts.items()
            if verdict == "unsure" or (verdict == "bad" and node not in self.bad)
        ]
        if self.none_good:
            note = note or "No run was good: look at the workload, or at the minimum."
        return Diagnosis(
            bad=tuple(self.bad.values()),
            links=(),
            good=tuple(node for node, verdict in verdicts.items() if verdict == "good"),
            unsure=tuple(unsure),
            unexplained=(),
            rounds=self.number,
            runs=sum(map(len, self.runs.values())),
            note=note or self.why_unsure(unsure),
            none_good=self.none_good,
        )

    def why_unsure(self, unsure: Sequence[str]) -> str:
        """Return a sentence on why nodes stayed unsure and what to repeat; empty if none did."""
        if not unsure:
            return ""
        if len(self.nodes) - sum(bad.kind == "failing" for bad in self.bad.values()) < 2:
            return f"No other node to compare {unsure[0]} with."
        lost = [self.judged[node].lost for node in unsure if node in self.judged]
        if lost and max(lost) > evidence.DISTURBED:
            return f"Other programs used {human.share(max(lost))} of the host: repeat when it is idle."
        return f"The runs vary too much to tell after {self.number} rounds: repeat with longer runs."
