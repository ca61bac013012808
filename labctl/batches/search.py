"""Find the bad nodes and links of a lab: runs each round of ``bisect`` as a batch, with hostfiles and logs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path

from msgspec import Struct

from labctl.backends import Backend
from labctl.batches import batch as batches
from labctl.batches import bisect as tree
from labctl.batches import hostfiles
from labctl.batches.bisect import BadLink, BadNode, Diagnosis, Group, Outcome
from labctl.batches.record import Batch, BatchJob
from labctl.config import inventory
from labctl.errors import ConfigError
from labctl.jobs import job
from labctl.jobs.request import RunOptions
from labctl.model import Lab, Metric, Workload
from labctl.system import files, human

TOTALS = ("throughput", "tokens")
"""Metrics that add up over nodes; bandwidths and the rate of the slowest rank do not."""


def is_searched_by(metric: Metric | None, why: str, sign: str) -> bool:
    """Tell if a search compares runs by the missed metric ``why``: it is the batch's metric, and more is better."""
    return metric is not None and metric.name == why and sign == ">="


def least(metric: str, bound: float, size: int) -> float:
    """Return the bound for one run in a bisection, given the bound for ``size`` nodes: per node if it is a total."""
    return bound / size if metric in TOTALS else bound


RUNS_ALONE = 0.99
"""``within`` of a search that judges by failures alone: no successful run is that far below the median."""


class BisectReport(Struct, frozen=True, kw_only=True):
    """Result of a search, and the directory of the logs of its runs."""

    directory: str
    workload: str
    metric: str
    unit: str
    diagnosis: Diagnosis
    drained: tuple[str, ...] = ()
    """Names that were added to the list of drained nodes."""

    @property
    def exit_code(self) -> int:
        """Return 5 if a node or link is bad or no run was good, else 0."""
        return 5 if self.diagnosis.bad or self.diagnosis.links or not self.diagnosis.good else 0


def bisect(
    backend: Backend,
    name: str,
    workload: Workload,
    options: RunOptions,
    show: Callable[[Batch], None],
    *,
    nodes: tuple[str, ...] = (),
    within: float = 0.1,
    minimum: float | None = None,
    out: Path | None = None,
    drain: bool = False,
) -> BisectReport:
    """Find the bad nodes and links by runs of a workload on groups of these nodes (default: all), round after round.

    A run is bad that fails, or whose metric per node is below ``minimum``, or more than ``within`` below the median.
    With ``drain`` bad nodes are added to the lab's list of machines to leave out.
    """
    now, context = datetime.now(), backend.context
    directory = out or context.directory / f"output/bisect_{name.replace('/', '-')}_{now:%Y%m%d-%H%M%S}"
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty", hint="another directory: --out DIR")
    lab = backend.lab()
    chosen = _usable(backend, lab, nodes)
    backend.require_launcher(workload)

    def run(folder: Path) -> Batch:
        context.notice(folder.name)
        batch = batches.begin(folder, batches.plan(lab, workload, (folder,), options), lab, resume=False)
        return batches.run_jobs(backend, workload, options, folder, batch, show)

    diagnosis = search(lab, chosen, directory, run, within=within, minimum=minimum)
    metric = batches.metric_of(workload)
    return BisectReport(
        directory=str(directory),
        workload=workload.name,
        metric=metric.name if metric else "",
        unit=metric.unit if metric else "",
        diagnosis=diagnosis,
        drained=drained_by(lab, diagnosis, now.date()) if drain and diagnosis.bad else (),
    )


def _usable(backend: Backend, lab: Lab, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the nodes to search, each once: those that are named, else all that are not drained; only usable ones."""
    left_out = dict(backend.unusable())
    if not nodes:
        left_out |= inventory.drained_reasons(backend.context.directory)
    asked = job.nodes_of(lab, nodes, "--nodes") or lab.nodes
    for node in asked:
        if node.name in left_out:
            backend.context.notice(f"{node.name} is left out: {left_out[node.name]}")
    return tuple(dict.fromkeys(node.name for node in asked if node.name not in left_out))


def search(
    lab: Lab,
    nodes: tuple[str, ...],
    directory: Path,
    run: Callable[[Path], Batch],
    *,
    within: float,
    minimum: float | None,
) -> Diagnosis:
    """Run rounds until the diagnosis is complete; ``run`` runs the hostfiles of a directory as a batch."""
    slots = {node.name: node.slots for node in lab.nodes}
    steps = tree.diagnose(nodes, within=within, minimum=minimum)
    number = 0
    try:
        groups = next(steps)
        while True:
            number += 1
            folder = directory / f"round{number:02}"
            hostfiles.write(folder, hostfiles.texts(groups, slots))
            groups = steps.send(outcomes(groups, run(folder)))
    except StopIteration as ended:
        diagnosis: Diagnosis = ended.value
        return diagnosis


def outcomes(groups: tuple[Group, ...], batch: Batch) -> dict[Group, Outcome]:
    """Return each node group's value per node, or why its run failed."""
    jobs = {frozenset(ended.nodes): ended for ended in batch.jobs}
    return {group: outcome(jobs[frozenset(group)], batch.metric) for group in groups}


def outcome(job: BatchJob, metric: str) -> Outcome:
    """Return a job's value per node; None with a reason if its run failed. A run that missed criteria has a value.

    Without a metric, all runs that passed are equal.
    """
    if not metric and job.verdict == "PASS":
        return Outcome(1)
    if job.value is None or job.verdict == "ERROR":
        return Outcome(None, job.cause or job.message)
    return Outcome(job.value / len(job.nodes) if metric in TOTALS else job.value)


def drained_by(lab: Lab, diagnosis: Diagnosis, today: date) -> tuple[str, ...]:
    """Add bad nodes to the lab's list of drained ones, by host name on several hosts; return their names."""
    path = lab.directory / inventory.DRAINED
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    drained = inventory.drained(lab.directory)
    # By node on one machine: it has other nodes, and stays in use.
    hosts = {node.name: node.name if lab.network == "bridge" else node.host for node in lab.nodes}
    reasons = {hosts[bad.node]: described(bad) for bad in diagnosis.bad}
    new = [f"{name}  # {reason}, {today}\n" for name, reason in reasons.items() if name.lower() not in drained]
    files.write(path, "".join((before.rstrip("\n") + "\n" if before else "", *new)), mode=0o644)
    return tuple(reasons)


def described(bad: BadNode | BadLink) -> str:
    """Render how bad a node or link is: ``slow, 0.52 of the median``."""
    return bad.kind if bad.figure is None else f"{bad.kind}, {human.share(bad.figure)} of the median"
