"""Finds the bad nodes and links of a lab: each round of ``bisect`` is a batch, with hostfiles and logs of its own."""

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
    """Return the nodes to search, each once: those that are named, else all that are not drained."""
    drained = {} if nodes else inventory.drained(backend.context.directory)
    asked = job.nodes_of(lab, nodes, "--nodes") or lab.nodes
    for node in asked:
        if node.name in drained:
            backend.context.notice(f"{node.name} is left out: {inventory.DRAINED} lists it")
    return tuple(dict.fromkeys(node.name for node in asked if node.name not in drained))


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
        found: Diagnosis = ended.value
        return found


def outcomes(groups: tuple[Group, ...], batch: Batch) -> dict[Group, Outcome]:
    """Return the outcome of each group."""
    jobs = {frozenset(ended.nodes): ended for ended in batch.jobs}
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


def drained_by(lab: Lab, diagnosis: Diagnosis, today: date) -> tuple[str, ...]:
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


def described(bad: BadNode | BadLink) -> str:
    """How bad it is: ``slow, 0.52 of the median``."""
    return bad.kind if bad.figure is None else f"{bad.kind}, {bad.figure:.2f} of the median"
