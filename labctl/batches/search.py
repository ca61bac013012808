"""Find the bad nodes and links of a lab: runs each round of ``bisect`` as a batch, with hostfiles and logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from labctl.accelerators import CPU
from labctl.backends import Backend
from labctl.batches import batch as batches
from labctl.batches import bisect as tree
from labctl.batches import hostfiles, singly
from labctl.batches.bisect import Diagnosis, Group, Outcome, Steps, Stopped
from labctl.batches.evidence import CONFIRMATIONS, PAUSE
from labctl.batches.record import Batch, BatchJob
from labctl.config import inventory
from labctl.config.context import Context
from labctl.errors import ConfigError, HostError
from labctl.jobs import job
from labctl.jobs.request import RunOptions
from labctl.model import Lab, Metric, Workload
from labctl.runs import health
from labctl.system import filelock, files, human
from labctl.system.decode import decode
from labctl.system.load import Measured, Watch

NOTES = "search.txt"
"""File of a search: a line per round with its reason, and one per node or link that is found bad."""
REPORT = "bisect.json"
"""File of a search that has ended: its report."""
TOTALS = ("throughput", "tokens")
"""Metrics that add up over nodes; bandwidths and the rate of the slowest rank do not."""


def is_searched_by(metric: Metric | None, why: str, sign: str) -> bool:
    """Tell if a bisection compares runs by the metric ``why``: it is the batch's, and its bound is a minimum."""
    return metric is not None and metric.name == why and sign == ">="


def least(metric: str, bound: float, size: int) -> float:
    """Return the minimum for one run in a bisection: ``bound`` by node if the metric is a total, else ``bound``."""
    return bound / size if metric in TOTALS else bound


class BisectReport(Struct, frozen=True, kw_only=True):
    """Result of a search, and the directory of the logs of its runs."""

    directory: str
    workload: str
    metric: str
    unit: str
    diagnosis: Diagnosis
    drained: tuple[str, ...] = ()
    """Names that were added to the list of drained nodes."""
    interrupted: bool = False
    """Ctrl-C ended the search; the diagnosis is what was known then."""
    loads: tuple[Measured, ...] = ()
    """Load of each host before each round on processors, in order."""

    @property
    def exit_code(self) -> int:
        """Return 5 if a node or link is bad or no run was good, 6 if nodes are unsure, 130 after Ctrl-C; else 0."""
        diagnosis = self.diagnosis
        if self.interrupted:
            return 130
        if diagnosis.bad or diagnosis.links or diagnosis.none_good:
            return 5
        return 6 if diagnosis.unsure else 0


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
    links: bool = False,
    figures: int = 1,
    wait: Callable[[float], None] = time.sleep,
) -> BisectReport:
    """Find bad nodes and links by rounds of runs on groups of nodes; return the report; drain bad ones if asked.

    A run is bad that fails, or whose metric per node is below ``minimum``, or more than ``within`` below the median.
    Nodes of one host run alone, unless ``links`` asks to look for bad links between them, too. What is slow beside
    other hosts must be slow again later. With ``drain`` bad nodes are added to the lab's list of machines to leave out.
    The false accusations that are allowed are shared with so many ``figures``.
    """
    now, context = datetime.now(), backend.context
    directory = out or context.directory / f"output/bisect_{name.replace('/', '-')}_{now:%Y%m%d-%H%M%S}"
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty", hint="another directory: --out DIR")
    lab = backend.lab()
    chosen = _usable(backend, lab, nodes)
    backend.require_launcher(workload)

    watch = Watch(backend.on_hosts, context.notice)
    hosts = {node.host for node in lab.nodes if node.name in chosen}
    alone = not links and len(hosts) < len(chosen)

    def run(folder: Path) -> Rounded:
        """Run the workload on a folder's hostfiles; return the batch, and each node's host load before it."""
        batch = batches.begin(folder, batches.plan(lab, workload, (folder,), options), lab, resume=False)
        # What devices compute does not depend on who else uses the cores.
        loads = watch.read(folder.name, "before") if lab.accelerator == CPU else {}
        lost = {node.name: loads[node.host].share for node in lab.nodes if node.host in loads}
        done = batches.run_jobs(backend, workload, options, folder, batch, show, parallel=1 if alone else 0)
        return Rounded(done, lost)

    def searched(steps: Steps[Diagnosis], **rest: Any) -> tuple[Diagnosis, bool]:
        """Carry out rounds, and tell by the lock that they are under way."""
        with filelock.held(directory / ".lock", f"labctl bisect {name}"):
            return search(lab, directory, run, steps, **rest)

    notice = partial(_note, context, directory / NOTES)
    criteria: dict[str, Any] = {"within": within, "minimum": minimum, "figures": figures, "notice": notice}
    diagnose = singly.diagnose if alone else tree.diagnose
    diagnosis, interrupted = searched(diagnose(chosen, **criteria))
    for _ in range(CONFIRMATIONS if len(hosts) > 1 and not alone else 0):
        if diagnosis.slow and not interrupted:
            later = human.duration(PAUSE)
            context.notice(f"{human.listed(diagnosis.slow)} may be slow: tested again in {later}")
            steps = tree.confirm(diagnosis, **criteria)
            diagnosis, interrupted = searched(steps, before=diagnosis.rounds, begin=partial(wait, PAUSE))
    metric = batches.metric_of(workload)
    report = BisectReport(
        directory=str(directory),
        workload=workload.name,
        metric=metric.name if metric else "",
        unit=metric.unit if metric else "",
        diagnosis=diagnosis,
        drained=drained_by(lab, diagnosis, now.date()) if drain and diagnosis.bad else (),
        interrupted=interrupted,
        loads=tuple(watch.measured),
    )
    files.write(directory / REPORT, msgspec.json.format(msgspec.json.encode(report)).decode() + "\n", mode=0o644)
    return report


def _note(context: Context, path: Path, text: str) -> None:
    """Tell a step of a search, and keep it in a file. HostError if that cannot be written."""
    context.notice(text)
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as notes:
            notes.write(f"{text}\n")


def read_notes(directory: Path) -> tuple[str, ...]:
    """Return the steps of a search so far, in order; none if it has not begun, or was of an earlier labctl."""
    try:
        with files.open_regular(directory / NOTES) as stream:
            return tuple(stream.read().decode(errors="replace").splitlines())
    except OSError:
        return ()


def read_report(directory: Path) -> BisectReport | None:
    """Return the report of a search; None if it has not ended, or was of an earlier labctl."""
    try:
        with files.open_regular(directory / REPORT) as stream:
            return decode(stream.read(), BisectReport)
    except (OSError, ValueError):
        return None


def _usable(backend: Backend, lab: Lab, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the nodes to search, each once: named ones, else all not drained; note each unusable one."""
    left_out = health.unusable(backend)
    if not nodes:
        left_out |= inventory.drained_reasons(backend.context.directory)
    asked = job.nodes_of(lab, nodes, "--nodes") or lab.nodes
    for node in asked:
        if node.name in left_out:
            backend.context.notice(f"{node.name} is left out: {left_out[node.name]}")
    usable = tuple(dict.fromkeys(node.name for node in asked if node.name not in left_out))
    if not usable:
        raise HostError(f"no node is left: {next(iter(left_out.values()), 'none was named')}", hint="labctl health")
    return usable


class Rounded(NamedTuple):
    """Jobs of a round, and the share of each node's cores that others used before it began."""

    batch: Batch
    lost: Mapping[str, float]


def search(
    lab: Lab,
    directory: Path,
    run: Callable[[Path], Rounded],
    steps: Steps[Diagnosis],
    *,
    before: int = 0,
    begin: Callable[[], object] = bool,
) -> tuple[Diagnosis, bool]:
    """Write each round's hostfiles, run them and send the outcomes; return diagnosis and if Ctrl-C ended it.

    ``begin`` is called before the first; there were so many rounds ``before``.
    """
    slots = {node.name: node.slots for node in lab.nodes}
    number, interrupted = before, False
    try:
        groups = next(steps)
        while True:
            number += 1
            folder = directory / f"round{number:02}"
            hostfiles.write(folder, hostfiles.texts(groups, slots))
            try:
                if number == before + 1:
                    begin()
                done = run(folder)
            except KeyboardInterrupt:
                interrupted = True
                steps.throw(Stopped(f"Interrupted in round {number}."))
            groups = steps.send(outcomes(groups, done))
    except StopIteration as ended:
        diagnosis: Diagnosis = ended.value
        return diagnosis, interrupted


def outcomes(groups: tuple[Group, ...], done: Rounded) -> dict[Group, Outcome]:
    """Map each group to its run's value per node, or why it failed, with the load of its busiest host.

    HostError if the lab lost its launcher.
    """
    done.batch.require_launcher_kept()
    jobs = {frozenset(ended.nodes): ended for ended in done.batch.jobs}
    by_group = {}
    for group in groups:
        lost = max(done.lost.get(node, 0.0) for node in group)
        by_group[group] = replace(outcome(jobs[frozenset(group)], done.batch.metric), lost=lost)
    return by_group


def outcome(job: BatchJob, metric: str) -> Outcome:
    """Return a job's value, a total per node, or None with a reason if the run failed; 1 if it passed without metric.

    A run that missed criteria has a value.
    """
    if not metric and job.verdict == "PASS":
        return Outcome(1)
    if job.value is None or job.verdict == "ERROR":
        return Outcome(None, job.cause or job.message)
    return Outcome(job.value / len(job.nodes) if metric in TOTALS else job.value)


def drained_by(lab: Lab, diagnosis: Diagnosis, today: date) -> tuple[str, ...]:
    """Append bad nodes, or their hosts if the lab has several, to drained.txt with reason and date; return names."""
    path = lab.directory / inventory.DRAINED
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    drained = inventory.drained(lab.directory)
    # By node on one machine: it has other nodes, and stays in use.
    hosts = {node.name: node.name if lab.network == "bridge" else node.host for node in lab.nodes}
    reasons = {hosts[bad.node]: f"{bad.kind}, {tree.shown_by(bad)}" for bad in diagnosis.bad}
    new = [f"{name}  # {reason}, {today}\n" for name, reason in reasons.items() if name.lower() not in drained]
    files.write(path, "".join((before.rstrip("\n") + "\n" if before else "", *new)), mode=0o644)
    return tuple(reasons)
