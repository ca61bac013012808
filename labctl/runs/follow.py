"""Runs that were launched before: followed from their beginning, ended, and judged by whoever looks once they ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime

from labctl.backends.docker import agent
from labctl.backends.docker.events import Losses
from labctl.backends.docker.lab.cluster import Cluster, load_lab
from labctl.backends.spec import hidden
from labctl.config.context import Context
from labctl.errors import ConfigError, HostError
from labctl.model import LAUNCHER, Lab, Result
from labctl.records import store
from labctl.records.active import ActiveRun
from labctl.records.lines import Line
from labctl.records.progress import Tracker
from labctl.runs import run as runs
from labctl.runs.job import GRACE
from labctl.runs.supervise import supervise
from labctl.system import filelock

# Seconds that another labctl, which has followed a run to its end, has to judge it.
JUDGING = 300
# Seconds between two looks at a run that ends.
LOOK = 0.2


def listing(context: Context, cluster: Cluster, limit: int | None = None) -> tuple[store.RunSummary, ...]:
    """The lab's runs, the latest first; those that have ended meanwhile are judged."""
    directory = context.directory
    unjudged = store.unjudged(directory)
    if not unjudged:
        return store.listing(directory, limit)
    known = known_runs(cluster)
    for run_id in unjudged:
        if run_id in known and known[run_id].state == "ended":
            with suppress(HostError):
                lab, _ = load_lab(context, cluster, ask=False)
                judge(context, cluster, lab, run_id, lambda _: None)
    return store.listing(directory, limit, known)


def known_runs(cluster: Cluster) -> dict[str, ActiveRun]:
    """What the launcher knows of runs; that the state of those without a result is unknown where it does not answer."""
    with suppress(HostError):
        observed = cluster.engine.observe(cluster.settings.text("LAB_NAME"))
        if observed.container(LAUNCHER) or not (observed.silent or cluster.failed):
            return agent.runs(cluster.engine, observed)
    here = {path.stem for path in filelock.held_below(cluster.directory / filelock.RUNS)}
    unknown = [run_id for run_id in store.unjudged(cluster.directory) if run_id not in here]
    return {run_id: ActiveRun(id=run_id, nodes=(), state="unknown") for run_id in unknown}


def attach(context: Context, cluster: Cluster, lab: Lab, run_id: str, losses: Losses | None = None) -> Result:
    """Print all that a run prints to its end; its result. HostError where it cannot be followed any more.

    ``losses`` as ``supervise``.
    """
    if found := store.read_result(lab.directory, run_id):
        logs(cluster, lab, run_id, context.line, follow=False)
        return found
    with suppress(filelock.LockHeld):
        return judge(context, cluster, lab, run_id, context.lines, losses)
    context.notice(f"{filelock.holder(store.lock(lab.directory, run_id))} records it")
    job = store.load_job(lab.directory, run_id)
    tracker = Tracker(job.workload.metrics)

    def show(lines: Sequence[Line]) -> None:
        tracker.read(lines)
        context.lines(line.text for line in store.redact_lines(lines, lab.hidden))

    with context.showing(tracker.progress, store.age(store.directory(lab.directory, run_id)), job.timeout):
        agent.follow(lab, cluster.engine, run_id, agent.Follower(show, context.notice))
    return judged(lab, run_id)


def judge(
    context: Context,
    cluster: Cluster,
    lab: Lab,
    run_id: str,
    on_lines: Callable[[Iterable[str]], object],
    losses: Losses | None = None,
) -> Result:
    """Follow a run from its beginning to its end, and write its record and result. LockHeld where another does."""
    path, job = store.directory(lab.directory, run_id), store.load_job(lab.directory, run_id)
    age = store.age(path)
    with ExitStack() as held:
        held.enter_context(store.recording(lab.directory, run_id))
        if found := store.read_result(lab.directory, run_id):
            return found
        now = datetime.fromtimestamp(time.time() - age).astimezone()
        site = runs.RunDeployment(context=context, cluster=cluster, lab=lab, job=job, now=now, held=held)
        site.log = store.RunLog(path, lab, job.workload, over=True)
        held.callback(site.log.close)

        keep = site.log.keep_and_show(on_lines)
        site.began = time.monotonic() - age
        with context.showing(site.log.progress, age, job.timeout):
            site.outcome = supervise(lab, job, cluster.engine, keep, losses=losses, age=age, notice=context.notice)
        site.seconds = site.outcome.seconds
        runs.conclude_record(site)
        return site.result  # type: ignore[return-value]


def settle(context: Context, cluster: Cluster, lab: Lab, run_id: str, known: Mapping[str, ActiveRun]) -> None:
    """Judge a run that has ended, if that was not done. ConfigError for one that is under way, HostError if unknown."""
    state = store.state(lab.directory, run_id, known)
    if state == "unknown":
        raise HostError(
            f"the launcher does not answer: whether run {run_id} has ended is unknown", hint="labctl status"
        )
    if state not in ("done", "ended", "orphaned"):
        raise ConfigError(f"run {run_id} is still {state}", hint=f"labctl attach {run_id}, or labctl stop {run_id}")
    if state == "ended":
        judge(context, cluster, lab, run_id, lambda _: None)


def judged(lab: Lab, run_id: str) -> Result:
    """The result of a run that another labctl records. HostError where that does not write one."""
    deadline = time.monotonic() + JUDGING
    while time.monotonic() < deadline and filelock.is_held(store.lock(lab.directory, run_id)):
        time.sleep(LOOK)
    if found := store.read_result(lab.directory, run_id):
        return found
    raise HostError(f"run {run_id} has no result yet", hint=f"labctl attach {run_id}")


def stop(context: Context, cluster: Cluster, lab: Lab, run_id: str, grace: float) -> Result:
    """End a run and judge it. HostError for one that is not running."""
    if found := store.read_result(lab.directory, run_id):
        raise HostError(f"run {run_id} has ended: {found.verdict}", hint=f"labctl show {run_id}")
    agent.stop(lab, cluster.engine, run_id, grace, f"stopped by {lab.owner}")
    with suppress(filelock.LockHeld):
        return judge(context, cluster, lab, run_id, lambda _: None)
    return judged(lab, run_id)


def stop_all(cluster: Cluster, lab: Lab, run_ids: Iterable[str], message: str) -> None:
    """Have runs end. Nothing of those that have ended, or cannot be reached."""
    for run_id in run_ids:
        with suppress(HostError):
            agent.stop(lab, cluster.engine, run_id, GRACE, message)


def end_all(context: Context, cluster: Cluster) -> None:
    """End the runs of a lab that goes down, and judge them while their output is there. Nothing of what fails."""
    with suppress(HostError):
        lab, able = load_lab(context, cluster, ask=False)
        running = [run.id for run in known_runs(able).values() if run.state == "running"]
        stop_all(able, lab, running, f"{lab.owner} took the lab down")
        for run_id in running:
            with suppress(HostError):
                try:
                    judge(context, able, lab, run_id, lambda _: None)
                except filelock.LockHeld:
                    judged(lab, run_id)


def logs(
    cluster: Cluster,
    lab: Lab,
    run_id: str,
    on_line: Callable[[str], None],
    *,
    follow: bool,
    rank: int | None = None,
    timestamps: bool = False,
) -> None:
    """Pass on what a run, or one rank of it, has printed; with ``follow`` also what it prints until it ends."""
    hides = hidden(cluster.settings)

    def show(when: float | None, text: str) -> None:
        on_line(store.redact(timed(when, text) if timestamps else text, hides))

    def show_live(lines: Sequence[Line]) -> None:
        for line in lines:
            if rank in (None, line.rank):
                show(line.when, line.text if rank is None else line.said)

    if follow and not store.read_result(lab.directory, run_id):
        agent.follow(lab, cluster.engine, run_id, agent.Follower(show_live))
        return
    for when, text in store.output(lab.directory, run_id, rank):
        show(when, text)


def timed(when: float | None, text: str) -> str:
    """A line behind its time, or ``-`` where that is not known."""
    shown = datetime.fromtimestamp(when).astimezone().isoformat(timespec="milliseconds") if when else "-"
    return f"{shown} {text}"
