"""Finds the bad nodes and links of a lab: each round of ``bisect`` is a batch, with hostfiles and logs of its own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

from msgspec import Struct

from labctl.batches import bisect, hostfiles
from labctl.batches.bisect import Diagnosis, Group, Outcome
from labctl.batches.record import Batch, BatchJob
from labctl.config import inventory
from labctl.model import Lab, Metric
from labctl.system import files

TOTALS = ("throughput", "tokens")
"""Metrics that count what all nodes do together; bandwidths and the rate of the slowest rank do not grow with them."""


def is_searched_by(metric: Metric | None, why: str, sign: str) -> bool:
    """Whether a search compares the runs by the metric that was missed: it knows one, of which more is better."""
    return metric is not None and metric.name == why and sign == ">="


def least(metric: str, bound: float, size: int) -> float:
    """What a run must reach, per node where the metric is a total, where one on so many nodes must reach the bound."""
    return bound / size if metric in TOTALS else bound


RUNS_ALONE = 0.99
"""Share below the median that no run reaches that did not fail: a search that judges nothing else."""


class BisectReport(Struct, frozen=True, kw_only=True):
    """What a search has found, and where the logs of its runs are."""

    directory: str
    workload: str
    metric: str
    unit: str
    diagnosis: Diagnosis
    drained: tuple[str, ...] = ()
    """What was written to the list of drained nodes."""

    @property
    def exit_code(self) -> int:
        """5 where a node or link is bad, or no run was good."""
        return 5 if self.diagnosis.bad or self.diagnosis.links or not self.diagnosis.good else 0


def search(
    lab: Lab,
    nodes: tuple[str, ...],
    directory: Path,
    run: Callable[[Path], Batch],
    *,
    within: float,
    minimum: float | None,
) -> Diagnosis:
    """Run round after round; ``run`` runs the hostfiles of a directory, and returns the batch that they were."""
    slots = {node.name: node.slots for node in lab.nodes}
    steps = bisect.diagnose(nodes, within=within, minimum=minimum)
    number = 0
    try:
        groups = next(steps)
        while True:
            number += 1
            folder = directory / f"round{number:02}"
            hostfiles.write(folder, hostfiles.texts(groups, slots))
            groups = steps.send(outcomes(groups, run(folder)))
    except StopIteration as ended:
        found: Diagnosis = ended.value
        return found


def outcomes(groups: tuple[Group, ...], batch: Batch) -> dict[Group, Outcome]:
    """What came of each group."""
    jobs = {frozenset(job.nodes): job for job in batch.jobs}
    return {group: outcome(jobs[frozenset(group)], batch.metric) for group in groups}


def outcome(job: BatchJob, metric: str) -> Outcome:
    """A job's value per node; none where its run failed, but one that only missed its criteria has its value.

    Of a workload without metrics a run that passed is as good as another.
    """
    if not metric and job.verdict == "PASS":
        return Outcome(1)
    if job.value is None or job.verdict == "ERROR":
        return Outcome(None, job.cause or job.message)
    return Outcome(job.value / len(job.nodes) if metric in TOTALS else job.value)


def drain(lab: Lab, diagnosis: Diagnosis, today: date) -> tuple[str, ...]:
    """Add the bad nodes to the lab's list of drained ones, by their hosts' names on several hosts; returns these."""
    path = lab.directory / inventory.DRAINED
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    known = inventory.drained(lab.directory)
    # A host with several nodes is not given up for one of them.
    hosts = {node.name: node.name if lab.network == "bridge" else node.host for node in lab.nodes}
    found = {hosts[bad.node]: described(bad) for bad in diagnosis.bad}
    new = [f"{name}  # {words}, {today}\n" for name, words in found.items() if name.lower() not in known]
    files.write(path, "".join((before.rstrip("\n") + "\n" if before else "", *new)), mode=0o644)
    return tuple(found)


def described(bad: bisect.BadNode | bisect.BadLink) -> str:
    """How bad it is: ``slow, 0.52 of the median``."""
    return bad.kind if bad.figure is None else f"{bad.kind}, {bad.figure:.2f} of the median"
