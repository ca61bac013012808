"""Run the jobs of a batch: concurrently on disjoint nodes, each as a run that goes on if labctl ends."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import chain
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from labctl.backends import Backend
from labctl.backends.owner import owner
from labctl.batches import evaluate, hostfiles, logs, record
from labctl.batches.record import Batch, BatchJob
from labctl.batches.schedule import JobQueue
from labctl.config import hostfile, inventory
from labctl.errors import ConfigError, Interrupted, LabError
from labctl.jobs import job as jobs
from labctl.jobs.request import RunOptions, bounded, read_text, recorded
from labctl.model import LAUNCHER, Cause, Event, Lab, Metric, Result, Workload
from labctl.records import store
from labctl.records.store import RunSummary
from labctl.records.verdict import final
from labctl.runs import health, judge, start
from labctl.runs.health import Unfit
from labctl.system import filelock, files, human, process

FOLLOWED = 1024
"""Jobs that run at the same time at most: each has a thread that follows it."""
LAUNCHED = 8
"""Jobs that are launched at the same time at most."""
JUDGED = 5
"""Seconds that a job lasts longer than its run at most, which has to be judged, unless it waited."""


class BatchReport(Struct, frozen=True, kw_only=True):
    """A batch with its wall-clock and ideal seconds: ``ideal`` is the longest time that one node was in use."""

    directory: str
    batch: Batch
    seconds: float
    ideal: float
    passed: int
    failed: int
    remarks: tuple[str, ...] = ()
    """Differences between jobs of a size, as text."""

    @property
    def exit_code(self) -> int:
        """Return 5 if a job did not pass, else 0."""
        return 5 if self.failed else 0


def run(
    backend: Backend,
    name: str,
    workload: Workload,
    directories: tuple[Path, ...],
    options: RunOptions,
    show: Callable[[Batch], None],
    *,
    out: Path | None = None,
    parallel: int = 0,
    repeat: int = 1,
    resume: bool = False,
) -> BatchReport:
    """Run a workload on each hostfile of directories; write record and logs to ``out``; skip unusable nodes' jobs."""
    context = backend.context
    workload = bounded(context.directory, workload)
    directory = out or next_directory(context.directory / default_directory(directories, name), resume=resume)
    lab = backend.lab()
    batch = plan(lab, workload, directories, options, repeat=repeat)
    if text := renamed(batch):
        context.notice(f"the hostfiles' machines: {text}")
    nodes = {node for job in batch.jobs for node in job.nodes}
    if drained := inventory.drained(context.directory).keys() & nodes:
        context.warn(f"{', '.join(sorted(drained))} is used, though drained.txt lists it")
    backend.require_launcher(workload)
    unusable = health.unusable(backend, most_slots(batch))
    for node in sorted(unusable.keys() & nodes):
        context.warn(f"{node} is left out: {unusable[node]}; `--resume` runs its jobs once it is back")
    with filelock.held(directory / ".lock", f"labctl batch {name}"):
        batch = leave_out(directory, begin(directory, batch, lab, resume=resume), unusable)
        done = run_jobs(backend, workload, options, directory, batch, show, parallel=parallel)
    return report(directory, done)


def run_jobs(
    backend: Backend,
    workload: Workload,
    options: RunOptions,
    directory: Path,
    batch: Batch,
    show: Callable[[Batch], None],
    *,
    parallel: int = 0,
) -> Batch:
    """Run the unfinished jobs of a batch as detached runs that are followed; return the batch with their results."""
    launching, stopped = threading.Semaphore(LAUNCHED), threading.Event()

    def run_one(job: BatchJob, note: Callable[[BatchJob], None]) -> Result:
        """Launch a job as a detached run, or follow its earlier one, and return its result."""
        of_job = replace(options, hostfile=Path(job.hostfile), detach=True, wait=True, batch=f"{batch.id} {job.log}")

        def launch(quiet: Backend) -> RunSummary:
            """Launch the run, at most LAUNCHED at once; Interrupted if the batch was stopped before."""
            with launching:
                if stopped.is_set():
                    raise Interrupted("the batch was stopped before this job started")
                return start.launch(quiet, start.Request(workload=workload, options=of_job))

        return run_job(backend, directory, launch, job, note)

    def stop(run_ids: list[str]) -> None:
        """Let no further run start, and stop the runs of these ids."""
        stopped.set()
        backend.context.notice(f"ending {human.count(len(run_ids), 'run')}")
        judge.stop_all(backend, run_ids, f"{owner()} stopped the batch")

    with backend.sharing_losses():
        return carry_out(directory, batch, run_one, stop, show, parallel=parallel)


def plan(lab: Lab, workload: Workload, directories: Iterable[Path], options: RunOptions, *, repeat: int = 1) -> Batch:
    """Return a new batch: each hostfile of the sets as a job, ``repeat`` times. ConfigError if one is unusable."""
    sets = [(directory.resolve().name, hostfiles.listed(directory)) for directory in directories]
    if twice := repeated(name for name, _ in sets):
        raise ConfigError(
            f"two directories of hostfiles are named {twice}", hint="rename one: their logs would have the same paths"
        )
    jobs_of_turn: list[tuple[str, BatchJob]] = []
    for name, paths in sets:
        folder = f"{name}/" if len(sets) > 1 else ""
        jobs_of_turn += [(folder, read_hostfile(lab, path)) for path in paths]
    short = workload.name.replace("/", "-")
    planned: list[BatchJob] = []
    for turn in range(1, repeat + 1):
        planned += [
            replace(job, repeat=turn, log=f"{folder}{short}_{turn}_{job.job}.log") for folder, job in jobs_of_turn
        ]
    if twice := repeated(job.log for job in planned):
        raise ConfigError(f"two hostfiles would write the same log, {twice}", hint="rename one of them")
    metric = metric_of(workload)
    return Batch(
        id=secrets.token_hex(8),
        # Through JSON, so that it compares equal to the request of a record.
        request=json.loads(json.dumps(recorded(workload, options)["options"])),
        workload=workload.name,
        lab=lab.name,
        metric=metric.name if metric else "",
        unit=metric.unit if metric else "",
        timeout=options.timeout or workload.timeout,
        began=time.time(),
        jobs=tuple(planned),
    )


def metric_of(workload: Workload) -> Metric | None:
    """Return the metric that jobs are compared by: the throughput, else the first metric; None if there is none."""
    by_name = {metric.name: metric for metric in workload.metrics}
    return by_name.get("throughput") or next(iter(workload.metrics), None)


def repeated(names: Iterable[str]) -> str:
    """Return the first name that occurs more than once; empty if none does."""
    return next((name for name, count in Counter(names).items() if count > 1), "")


def read_hostfile(lab: Lab, path: Path) -> BatchJob:
    """Read a hostfile as a job whose log is empty. ConfigError if it cannot be used in the lab."""
    entries = hostfile.parse(read_text(path), str(path))
    chosen = jobs.choose(lab, entries, str(path))
    names = tuple(name for name, _ in entries)
    return BatchJob(
        job=hostfile.job_name(path.name),
        set=path.resolve().parent.name,
        hostfile=str(path.resolve()),
        names=names,
        nodes=tuple(node.name for node, _ in chosen),
        log="",
    )


def renamed(batch: Batch) -> str:
    """Return the hostfile names that differ from the lab's nodes, as "a is worker-0, ..."; empty if none does."""
    pairs: dict[tuple[str, str], None] = {}
    for job in batch.jobs:
        pairs |= dict.fromkeys(zip(job.names, job.nodes, strict=True))
    return ", ".join(f"{name} is {node}" for name, node in pairs if name != node)


def begin(directory: Path, batch: Batch, lab: Lab, *, resume: bool) -> Batch:
    """Save and return a new batch, or the recorded one if ``resume``. ConfigError if one is there, or missing."""
    if resume:
        batch = resumed(directory, batch, lab)
    elif record.load(directory):
        raise ConfigError(f"{directory} already has a batch", hint="--resume continues it, --out DIR starts another")
    record.create(directory, batch)
    return batch


def resumed(directory: Path, batch: Batch, lab: Lab) -> Batch:
    """Load the recorded batch: interrupted jobs wait again, launched ones are running. ConfigError if it differs.

    ConfigError if there is no record, or if its jobs or options differ from those of ``batch``.
    """
    saved = record.load(directory)
    if saved is None:
        raise ConfigError(f"{directory} has no batch to resume", hint="leave out --resume")
    if saved.workload != batch.workload:
        raise ConfigError(f"{directory} is a batch of `{saved.workload}`, not of `{batch.workload}`")
    theirs = {job.log: (job.hostfile, job.nodes) for job in saved.jobs}
    for job in batch.jobs:
        if theirs.pop(job.log, ()) != (job.hostfile, job.nodes):
            raise ConfigError(f"{directory}: {job.log} was not in this batch, or ran on other nodes", hint="--out DIR")
    if theirs:
        raise ConfigError(
            f"{directory}: the batch also had {next(iter(theirs))}", hint="give all directories that it had"
        )
    if saved.request != batch.request:
        before, asked = json.dumps(saved.request, sort_keys=True), json.dumps(batch.request, sort_keys=True)
        raise ConfigError(f"{directory} was started with other options: {before}, not {asked}", hint="--out DIR")
    launched, unjudged = unknown_runs(lab.directory, saved), frozenset(store.unjudged(lab.directory))
    return replace(saved, jobs=tuple(again(job, launched, unjudged) for job in saved.jobs))


def again(job: BatchJob, launched: Mapping[str, str], unjudged: Collection[str]) -> BatchJob:
    """Return a job as --resume takes it: waiting again if interrupted, running if its run exists, else unchanged."""
    if job.cause in record.UNFINISHED:
        run_id = job.run_id if job.run_id in unjudged else ""
        job = replace(job, state="waiting", run_id=run_id, verdict="", cause=None, message="", began=None, ended=None)
    if job.state == "waiting" and (run_id := job.run_id or launched.get(job.log, "")):
        return replace(job, state="running", run_id=run_id)
    return job


def most_slots(batch: Batch) -> int:
    """Return the most slots that a hostfile of the batch asks of a node; 0 if one asks for all that a node has."""
    paths = {job.hostfile for job in batch.jobs}
    listed = chain.from_iterable(hostfile.parse(read_text(Path(path)), path) for path in paths)
    asked = {slots for _, slots in listed}
    return hostfile.OWN if hostfile.OWN in asked else max(asked)


def leave_out(directory: Path, batch: Batch, unusable: Mapping[str, str]) -> Batch:
    """Record the waiting jobs on unusable nodes as interrupted ones, which `--resume` runs; return the batch."""
    jobs_by_log, now = {job.log: job for job in batch.jobs}, time.time()
    for job in batch.jobs:
        reasons = "; ".join(f"{node} is left out: {unusable[node]}" for node in job.nodes if node in unusable)
        if job.state == "waiting" and reasons:
            left = {"state": "done", "verdict": "ERROR", "cause": "interrupted", "message": reasons, "exit_code": 3}
            jobs_by_log[job.log] = replace(job, **left, began=now, ended=now)
            record.change(directory, jobs_by_log[job.log])
    return replace(batch, jobs=tuple(jobs_by_log.values()))


def unknown_runs(lab: Path, batch: Batch) -> dict[str, str]:
    """Map log to run id for runs launched for a batch since it began whose ids its record lacks."""
    recorded_ids = {job.run_id for job in batch.jobs}
    launched: dict[str, str] = {}
    for run_id in store.ids(lab):
        if run_id in recorded_ids:
            continue
        path = store.directory(lab, run_id)
        if time.time() - store.age(path) < batch.began:
            break
        batch_id, _, log = (store.job(path).request or {}).get("batch", "").partition(" ")
        if batch_id == batch.id and batch_id:
            launched.setdefault(log, run_id)
    return launched


def carry_out(
    directory: Path,
    batch: Batch,
    run: Callable[[BatchJob, Callable[[BatchJob], None]], Result],
    stop: Callable[[list[str]], None],
    show: Callable[[Batch], None],
    *,
    parallel: int = 0,
) -> Batch:
    """Run a batch's open jobs by ``run``, ``show`` each change; return the batch; on Ctrl-C call ``stop``, raise.

    ``run`` runs one job to its end and passes the job to its second argument once the run has an id. After Ctrl-C,
    ``stop`` gets the ids of the running runs and KeyboardInterrupt is raised once they have ended. ``show`` gets the
    batch after each change.
    """
    jobs_by_log = {job.log: job for job in batch.jobs}
    lock, stopping = threading.Lock(), threading.Event()

    def note(job: BatchJob) -> None:
        """Record a job that changed, and show the batch."""
        with lock:
            jobs_by_log[job.log] = job
            record.change(directory, job)
            show(replace(batch, jobs=tuple(jobs_by_log.values())))

    def work(job: BatchJob) -> None:
        """Run one job in a thread, and record its start and result."""
        begun = replace(job, began=job.began or time.time())

        def launched(job: BatchJob) -> None:
            """Record a job as running; stop its run if Ctrl-C came before."""
            nonlocal begun
            begun = replace(job, state="running", began=job.began or time.time())
            note(begun)
            if stopping.is_set():
                stop([job.run_id])

        result = run(job, launched)
        note(ended(begun, batch.metric, result))

    waiting = [job for job in batch.jobs if job.state != "done"]
    queue = JobQueue([job.nodes for job in waiting], min(parallel or FOLLOWED, FOLLOWED))
    running: dict[Future[None], int] = {}
    show(batch)
    process.allow_more_files()
    with ThreadPoolExecutor(FOLLOWED + 1) as pool:
        try:
            while queue:
                running |= {pool.submit(work, waiting[index]): index for index in queue.start()}
                # With a limit: a Ctrl-C just before the wait would be noticed only when a job ends.
                for future in wait(running, timeout=1, return_when=FIRST_COMPLETED).done:
                    queue.end(running.pop(future))
                    future.result()
        except BaseException:
            stopping.set()
            # In a thread, which a second Ctrl-C does not interrupt; the pool has one more than jobs for it.
            pool.submit(stop, [job.run_id for job in jobs_by_log.values() if job.state == "running" and job.run_id])
            raise
    return replace(batch, jobs=tuple(jobs_by_log.values()))


def run_job(
    backend: Backend,
    directory: Path,
    launch: Callable[[Backend], RunSummary],
    job: BatchJob,
    note: Callable[[BatchJob], None],
) -> Result:
    """Follow a job's earlier run, or launch and follow one if there is none or it was interrupted; write its log.

    If the job cannot run, the error becomes its result. HostError if the log cannot be written.
    """
    path = directory / job.log
    # Line-buffered, for `tail -f`.
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("w", encoding="utf-8", buffering=1)
    with log:

        def write(text: str) -> None:
            """Write to the log. HostError if that fails."""
            with files.writing(path):
                log.write(text)

        def emit(event: Event) -> None:
            """Write an output line to the log, pass a warning on with the job's name, drop other events."""
            if event.kind == "line":
                write(f"{event.text}\n")
            elif event.kind == "warning":
                backend.context.warn(f"{job.job}: {event.text}")

        quiet = backend.with_context(replace(backend.context, emit=emit))
        head = f"{read_text(Path(job.hostfile)).rstrip()}\n\n"
        try:
            write(head)
            if job.run_id:
                result = judge.attach(quiet, job.run_id)
                if result.cause not in record.UNFINISHED:
                    return result
                log.seek(0)
                log.truncate()
                write(head)
            launched = launch(quiet)
            # Its record was made when its nodes were ready for it.
            job = replace(job, run_id=launched.run_id, began=time.time() - (launched.age or 0))
            note(job)
            return judge.attach(quiet, job.run_id)
        except start.DoesNotFit as error:
            return error.result
        except LabError as error:
            with suppress(OSError):
                log.write(f"labctl: {error.message}\n")
            return refused(backend.settings.text("LAB_NAME"), job, error)


def refused(lab: str, job: BatchJob, error: LabError) -> Result:
    """Return the ERROR result of a job that could not start or be followed; ``interrupted`` if its run may go on."""
    causes: dict[str | None, Cause] = {LAUNCHER: record.LOST, **dict.fromkeys(job.nodes, "node-lost")}
    cause = causes.get(error.node, "launcher-failed")
    return Result(
        run_id=job.run_id,
        workload="",
        launcher="",
        lab=lab,
        verdict="ERROR",
        cause="interrupted" if job.run_id or isinstance(error, (Interrupted, Unfit)) else cause,
        message=error.message,
        exit_code=error.exit_code,
    )


def ended(job: BatchJob, metric: str, result: Result) -> BatchJob:
    """Return the job as done, with verdict, metric value and times of its run; LOST if it lost the launcher."""
    values = result.metrics.get(metric, {})
    value = values.get(final(values))
    now = time.time()
    return replace(
        job,
        state="done",
        run_id=result.run_id,
        verdict=result.verdict,
        cause=record.LOST if result.message.startswith(f"{LAUNCHER}: ") else result.cause,
        message=result.message,
        exit_code=result.exit_code,
        value=None if value is None else float(value),
        began=_began(job, result.seconds, now),
        ended=now,
    )


def _began(job: BatchJob, seconds: float, now: float) -> float | None:
    """Return when a job that ends now began; if it first waited for nodes that another run had, when that ended."""
    since = now - seconds
    waited = since - (job.began or 0) > JUDGED
    return since if seconds and waited else job.began


def report(directory: Path, batch: Batch) -> BatchReport:
    """Summarise a batch: seconds, seconds of its busiest node, jobs that passed, all others, remarks on outliers."""
    done = [job for job in batch.jobs if job.began and job.ended]
    passed = sum(job.verdict == "PASS" for job in done)
    in_use: dict[str, float] = {}
    for job in done:
        for node in job.nodes:
            in_use[node] = in_use.get(node, 0) + (job.ended or 0) - (job.began or 0)
    first = min((job.began or 0 for job in done), default=0)
    last = max((job.ended or 0 for job in done), default=0)
    return BatchReport(
        directory=str(directory),
        batch=batch,
        seconds=round(last - first, 3),
        ideal=round(max(in_use.values(), default=0), 3),
        passed=passed,
        failed=len(batch.jobs) - passed,
        remarks=evaluate.judge(logs.of_batch(batch, directory.name), evaluate.Limits()).remarks,
    )


def default_directory(directories: tuple[Path, ...], workload: str) -> Path:
    """Return the directory of the logs if the user names none: ``output/SET_WORKLOAD``."""
    names = [directory.resolve().name for directory in directories]
    return Path("output", f"{names[0] if len(names) == 1 else f'{len(names)}sets'}_{workload.replace('/', '-')}")


def next_directory(path: Path, *, resume: bool) -> Path:
    """Return the directory of the last batch, ``path-N``; the next free if that is complete and not ``resume``."""

    def numbered(number: int) -> Path:
        return path.with_name(f"{path.name}-{number}") if number > 1 else path

    number = 1
    while record.load(numbered(number + 1)):
        number += 1
    last = record.load(numbered(number))
    return numbered(number + 1) if last and last.complete and not resume else numbered(number)
