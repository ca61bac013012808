"""Follows runs to their end, judges them and writes their results; nothing else does.

`run` judges the run that it follows; `attach`, `stop`, `runs`, `show` and `down` judge a run that has ended meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import partial
from typing import Any

from msgspec.structs import replace

from labctl.backends import Backend
from labctl.backends.owner import owner
from labctl.backends.spec import hidden
from labctl.errors import ConfigError, HostError, LabError
from labctl.health.model import Condition
from labctl.jobs.job import GRACE
from labctl.model import Hang, Job, Lab, Metric, Result, Verdict, Workload
from labctl.records import left, metrics, outlook, store, straggler
from labctl.records.active import ActiveRun, Run
from labctl.records.finder import answered
from labctl.records.lines import Line
from labctl.records.outlook import Outlook
from labctl.records.progress import tracker_of
from labctl.records.verdict import RunOutcome, error
from labctl.records.verdict import judge as verdict_of
from labctl.runs import attempts, changes, evidence
from labctl.runs.health import Looked
from labctl.system import filelock

# Seconds that another labctl, which has followed a run to its end, has to judge it.
JUDGING = 300
# Seconds between two looks at a run that ends.
LOOK = 0.2
# Seconds in which a run is followed that has ended before, and after its end from which its nodes tell little of it.
BRIEF, LATE = 5, 60
# Setting of torch that may turn off the record of process groups.
RECORDER = "TORCH_FR_BUFFER_SIZE"
LOST_LAB = "the lab's nodes are gone: its engine was restarted, or they were removed"


# --- judge ---------------------------------------------------------------------------------------------------


def judge(backend: Backend, run_id: str, on_lines: Callable[[Iterable[str]], object]) -> Result:
    """Follow a run to its end, judge and record it; return the result, known or new. LockHeld if another does."""
    directory = backend.context.directory
    with ExitStack() as held:
        held.enter_context(store.recording(directory, run_id))
        if result := store.read_result(directory, run_id):
            return result
        run = backend.recorded(run_id)
        age = store.age(run.directory)
        now, began = datetime.fromtimestamp(time.time() - age).astimezone(), time.monotonic() - age
        log = store.RunLog(run.directory, run.lab, run.job.workload, over=True)
        held.callback(log.close)
        taken = time.time()
        with backend.context.showing(log.progress, age, run.job.timeout):
            outcome = backend.supervise(run, log.keep_and_show(on_lines), age=age)
        is_late = time.time() - taken < BRIEF and taken - now.timestamp() - (outcome.seconds or age) > LATE
        # What is read long after its end tells little of the run.
        looked = None if is_late else changes.begin_after(backend, run)
        backend.collect(run_id)
        log.close()
        return conclude(backend, run, outcome, log, outcome.seconds or time.monotonic() - began, now, looked)


def conclude(
    backend: Backend,
    run: Run,
    outcome: RunOutcome,
    log: store.RunLog,
    seconds: float,
    now: datetime,
    looked: Future[Looked] | None,
) -> Result:
    """Write an ended run's result and evidence, delete its data on nodes; return the result. HostError on failure.

    The result of a run whose disk is full is returned if it cannot be written, too; the nodes then keep its data, so
    that a later command writes it.
    """
    warn = backend.context.warn
    result = result_of(run, outcome, log, seconds, now)
    result = with_changes(result, changes.of(run, looked))
    if result.verdict != "PASS":
        result = replace(result, hang=store.read_hang(run.lab, run.run_id))
    shares = straggler.read(run.directory, [run.short(node.name) for node in run.job.nodes])
    if not result.hang:
        late = straggler.straggler(shares, log.progress().seconds_per_step)
        result = replace(result, straggler=late)
    try:
        result = store.finish(run.lab, result)
    except HostError as error:
        if outcome.cause != "disk-full":
            raise
        warn(f"{error.message}: `labctl show {run.run_id}` writes it once there is room")
        return store.final_result(run.lab, result)
    if result.verdict == "PASS" and _shows_groups(run) and straggler.apart(shares):
        warn("no rank joined a process group of torch: each worked alone, though torchrun started them together")
    evidence.write(run.lab, result, warn, partial(backend.evidence, run))
    with suppress(HostError):
        backend.forget(run)
    for metric in unmatched(run.job.workload, result):
        warn(f"metric `{metric.name}`: no line of the output matches `{metric.pattern}`")
    return result


def with_changes(result: Result, found: Sequence[Condition]) -> Result:
    """Return a result with what changed on its nodes; in its message too if it did not pass."""
    message = result.message if result.verdict == "PASS" else changes.message(result, found)
    return replace(result, message=message, node_changes=tuple(condition.sentence() for condition in found))


def _shows_groups(run: Run) -> bool:
    """Return True if torchrun starts the ranks and no setting keeps torch's recorder from showing their groups."""
    is_recorded = RECORDER not in dict((*run.lab.environment, *run.job.environment, *run.job.workload.environment))
    is_torchrun = run.job.workload.launcher.partition(":")[0] == "torchrun"
    return is_recorded and is_torchrun


def result_of(run: Run, outcome: RunOutcome, log: store.RunLog, seconds: float, now: datetime) -> Result:
    """Return the result of a run by its log and outcome, unwritten; compared with an earlier attempt."""
    job = run.job
    ranks = tuple(replace(rank, node=run.short(rank.node)) for rank in store.ranks_of(log.lines))
    reduced = {**metrics.reduce_values(job.workload.metrics, log.values), **log.found()}
    notes = metrics.read_notes(job.workload.notes, log.lines)
    judged_job = replace(job, workload=answered(job.workload, reduced))
    verdict, reached = verdict_of(judged_job, reduced, outcome, len(ranks)), log.progress()
    if verdict.status != "PASS" and reached.step is not None:
        of_all = f" of {reached.steps}" if reached.steps else ""
        notes[store.REACHED] = f"{reached.counts} {reached.step}{of_all}"
    verdict, expected = attempts.compared(run.lab.directory, job, verdict, notes.get(store.REACHED, ""))
    measured = {"metrics": reduced, "notes": notes, "ranks": ranks, "world_size": len(ranks), "pace": log.pace}
    return _result(run.lab, job, verdict, expected, now, seconds=seconds, **measured)


def unmatched(workload: Workload, result: Result) -> list[Metric]:
    """Return the metrics that a passed run lacks and that are not optional; [] for other verdicts."""
    if result.verdict != "PASS":
        return []
    return [metric for metric in workload.metrics if metric.name not in result.metrics and not metric.optional]


def refuse(run: Run, reason: str, now: datetime) -> Result:
    """Create the record of a run that does not fit, with an ERROR result; return the result."""
    store.create(run.lab, run.run_id, run.job.files)
    verdict = error("does-not-fit", reason)
    return store.finish(run.lab, _result(run.lab, run.job, verdict, outlook.of(verdict.cause, verdict.message), now))


def _result(lab: Lab, job: Job, verdict: Verdict, expected: Outlook, now: datetime, **measured: Any) -> Result:
    """Build a result of a job from its verdict, the outlook and measured fields; nothing is written."""
    return Result(
        run_id=job.run_id,
        workload=job.workload.name,
        launcher=job.workload.launcher,
        lab=lab.name,
        verdict=verdict.status,
        cause=verdict.cause,
        message=verdict.message,
        exit_code=verdict.exit_code,
        domain=expected.domain,
        retry=expected.retry,
        evidence=expected.evidence,
        checks=verdict.checks,
        started=now.isoformat(timespec="seconds"),
        resumed=job.resumed,
        retried=job.retried,
        replays=job.replays,
        **measured,
    )


def judged(backend: Backend, run_id: str) -> Result:
    """Wait for another process that records a run, and return its result. HostError if none appears in time."""
    directory = backend.context.directory
    deadline = time.monotonic() + JUDGING
    while time.monotonic() < deadline and filelock.is_held(store.lock(directory, run_id)):
        time.sleep(LOOK)
    if result := store.read_result(directory, run_id):
        return result
    raise HostError(f"run {run_id} has no result yet", hint=f"labctl attach {run_id}")


# --- runs that nothing supervises any more -------------------------------------------------------------------


def close(backend: Backend, run_id: str) -> None:
    """End what is left of a run, fetch its files, write an ERROR result unless it has one; warn if that fails."""
    context = backend.context
    # Asked first: what comes from the run and its hosts cannot end it.
    orphaned = store.state(context.directory, run_id) != "done"
    backend.end(run_id)
    try:
        backend.collect(run_id)
        lab = backend.lab()
        if orphaned:
            evidence.write(lab, store.abandon(lab, run_id, "lab-lost", LOST_LAB), context.warn)
        else:
            store.redact_ranks(store.directory(context.directory, run_id), lab.hidden)
    except HostError as failure:
        # Whatever a workload made of its directory: other runs go on.
        context.warn(f"run {run_id}: {failure.message}")
    with suppress(LabError):
        backend.forget(backend.recorded(run_id))


def unfinished(backend: Backend, active: Mapping[str, ActiveRun], among: Iterable[str]) -> dict[str, str]:
    """Return runs that must be ended before another, with reasons, of those whose backend leaves processes."""
    every = left.unfinished(backend.context.directory, active, among)
    return {run_id: reason for run_id, reason in every.items() if backend.leaves_processes(run_id)}


def settle(backend: Backend, run_id: str) -> None:
    """Judge a run that has ended; do nothing if done or orphaned. ConfigError if running, HostError if unknown."""
    directory = backend.context.directory
    state = store.state(directory, run_id, backend.active())
    if state == "unknown":
        raise HostError(
            f"the launcher does not answer: whether run {run_id} has ended is unknown", hint="labctl status"
        )
    if state not in ("done", "ended", "orphaned"):
        raise ConfigError(f"run {run_id} is still {state}", hint=f"labctl attach {run_id}, or labctl stop {run_id}")
    if state == "ended":
        judge(backend, run_id, _drop)


def gather(backend: Backend, run_id: str) -> None:
    """Fetch all files of an ended run; first end processes and close its record if it left any on nodes."""
    if unfinished(backend, backend.active(), (run_id,)).get(run_id):
        close(backend, run_id)
    else:
        backend.collect(run_id)


def listing(backend: Backend, limit: int | None = None) -> tuple[store.RunSummary, ...]:
    """Return the lab's run summaries, latest first; judge ended runs, close those whose containers are gone."""
    directory = backend.context.directory
    # Before the nodes are asked: a run that is launched meanwhile is not taken for a lost one.
    unjudged = store.unjudged(directory)
    if not unjudged:
        return store.listing(directory, limit)
    return store.listing(directory, limit, judge_ended(backend, unjudged))


def judge_ended(backend: Backend, unjudged: Iterable[str]) -> Mapping[str, ActiveRun]:
    """Judge those of these runs that have ended, close those whose containers are gone; return the active runs."""
    directory = backend.context.directory
    free = [run_id for run_id in unjudged if not filelock.is_held(store.lock(directory, run_id))]
    active = backend.active()
    for run_id in free:
        with suppress(HostError):
            _judge_ended(backend, run_id, store.state(directory, run_id, active))
    return active


def _judge_ended(backend: Backend, run_id: str, state: str) -> None:
    """Judge a run in state ``ended``; close an ``orphaned`` one that may have left processes; else do nothing."""
    if state == "ended":
        judge(backend, run_id, _drop)
    elif state == "orphaned" and backend.leaves_processes(run_id):
        with store.recording(backend.context.directory, run_id):
            close(backend, run_id)


def find(backend: Backend, run_id: str) -> store.ShownRun:
    """Return a run's summary and result, None without one, after runs that have ended were judged."""
    summaries = {run.run_id: run for run in listing(backend)}
    return store.ShownRun(summaries[run_id], store.read_result(backend.context.directory, run_id))


def states(backend: Backend, limit: int) -> tuple[store.RunSummary, ...]:
    """Return the latest ``limit`` run summaries of the lab; nothing is judged."""
    directory = backend.context.directory
    active: Mapping[str, ActiveRun] = backend.active() if store.unjudged(directory) else {}
    return store.listing(directory, limit, active)


# --- commands on runs ----------------------------------------------------------------------------------------


def attach(backend: Backend, run_id: str) -> Result:
    """Print a run's output to its end; judge it, or wait for the process that does. HostError without a result."""
    context = backend.context
    if result := store.read_result(context.directory, run_id):
        logs(backend, run_id, context.line, follow=False)
        return result
    _require_supervised(backend, run_id)
    if result := store.read_result(context.directory, run_id):
        return result
    with suppress(filelock.LockHeld):
        return judge(backend, run_id, context.lines)
    context.notice(f"{filelock.holder(store.lock(context.directory, run_id))} records it")
    run = backend.recorded(run_id)
    tracker = tracker_of(run.job.workload)

    def show(lines: Sequence[Line]) -> None:
        """Track progress, and print the lines with secrets redacted."""
        tracker.read(lines)
        if lines:
            context.lines(line.text for line in store.redact_lines(lines, run.lab.hidden))

    with context.showing(tracker.progress, store.age(run.directory), run.job.timeout):
        backend.output(run, show)
    return judged(backend, run_id)


def _require_supervised(backend: Backend, run_id: str) -> None:
    """Close a run as ERROR if it is orphaned, left processes and no process records it; else nothing."""
    directory = backend.context.directory
    if filelock.is_held(store.lock(directory, run_id)) or not backend.leaves_processes(run_id):
        return
    if store.state(directory, run_id, backend.active()) == "orphaned":
        with suppress(filelock.LockHeld), store.recording(directory, run_id):
            close(backend, run_id)


def stop(backend: Backend, run_id: str, grace: float) -> Result:
    """Stop a run with ``grace`` seconds before SIGKILL, judge it and return the result. HostError if it has ended.

    A run that nothing supervises any more is closed, as the next run would close it.
    """
    if not store.read_result(backend.context.directory, run_id):
        _require_supervised(backend, run_id)
        if closed := store.read_result(backend.context.directory, run_id):
            return closed
    run = _running(backend, run_id)
    backend.stop(run, grace, f"stopped by {owner()}")
    return _judge_or_wait(backend, run_id)


def look(backend: Backend, run_id: str) -> Hang:
    """Return what a running run's ranks wait for. HostError if it has ended."""
    return backend.look(_running(backend, run_id))


def _running(backend: Backend, run_id: str) -> Run:
    """Return a recorded run without a result, orphaned ones closed first. HostError if it has one, readable or not."""
    _require_supervised(backend, run_id)
    directory = backend.context.directory
    if store.state(directory, run_id) == "done":
        result = store.read_result(directory, run_id)
        end = result.verdict if result else "its result.json cannot be read"
        raise HostError(f"run {run_id} has ended: {end}", hint=f"labctl show {run_id}")
    return backend.recorded(run_id)


def _judge_or_wait(backend: Backend, run_id: str) -> Result:
    """Judge a run, or wait for the process that does, and return the result. HostError if none appears."""
    with suppress(filelock.LockHeld):
        return judge(backend, run_id, _drop)
    return judged(backend, run_id)


def stop_all(backend: Backend, run_ids: Iterable[str], message: str) -> None:
    """Stop these runs with this message, skipping runs that fail to stop with HostError."""
    for run_id in run_ids:
        with suppress(HostError):
            backend.stop(backend.recorded(run_id), GRACE, message)


def end_all(backend: Backend) -> None:
    """Stop the lab's running runs and judge each, skipping all HostErrors."""
    with suppress(HostError):
        running = [run.id for run in backend.active().values() if run.state == "running"]
        stop_all(backend, running, f"{owner()} took the lab down")
        for run_id in running:
            with suppress(HostError):
                _judge_or_wait(backend, run_id)


def logs(
    backend: Backend,
    run_id: str,
    on_line: Callable[[str], None],
    *,
    follow: bool,
    rank: int | None = None,
    timestamps: bool = False,
) -> None:
    """Pass a run's redacted output, or one rank's, to ``on_line``, with times if asked; ``follow`` until it ends."""
    hides = hidden(backend.settings)
    directory = backend.context.directory

    def show(when: float | None, text: str) -> None:
        """Pass a line, redacted and with its time if asked, to ``on_line``."""
        on_line(store.redact(timed(when, text) if timestamps else text, hides))

    def show_lines(lines: Sequence[Line]) -> None:
        for line in lines:
            if rank in (None, line.rank):
                show(line.when, line.text if rank is None else line.said)

    if not store.read_result(directory, run_id):
        if follow:
            backend.output(backend.recorded(run_id), show_lines)
            return
        if backend.log(run_id, show_lines):
            return
    for when, text in store.output(directory, run_id, rank):
        show(when, text)


def timed(when: float | None, text: str) -> str:
    """Render ``TIME TEXT`` in ISO format, or ``- TEXT`` if the time is unknown."""
    shown = datetime.fromtimestamp(when).astimezone().isoformat(timespec="milliseconds") if when else "-"
    return f"{shown} {text}"


def _drop(_: object) -> None:
    """Ignore the lines of a run."""
