"""Starts a run: its job, what must hold before it, its plan, and its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from itertools import groupby

from msgspec import Struct
from msgspec.structs import replace

from labctl.backends import Backend, Replay
from labctl.backends.plan import Plan, PlanPreview, Step, carry_out
from labctl.backends.plan import preview as preview_of
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import HostError
from labctl.health.model import Snapshot
from labctl.jobs import checkpoints
from labctl.jobs.request import RunOptions, unknown, without
from labctl.model import Result, Workload
from labctl.records import store
from labctl.records.active import Run
from labctl.records.store import RunSummary
from labctl.runs import fitting, health, judge, labs
from labctl.runs.steps import CollectResults, EndRun, LaunchRun, RunDeployment, StageRun, WriteResult
from labctl.system import filelock
from labctl.workloads import external

Ask = Callable[[str], bool]
# Seconds to wait for another run that is staged.
STAGING = 10


class Request(Struct, frozen=True, kw_only=True):
    """A run that is asked for; ``replayed`` makes the job of a recorded run once more."""

    workload: Workload
    options: RunOptions
    name: str = ""
    """Name by which the workload is chosen; empty for a script."""
    replayed: Replay | None = None
    ask: Ask | None = None
    """Confirms that the image of the workload is built and the lab brought up with it."""


class DoesNotFit(HostError):
    """The workload of a run that was to be launched does not fit; ``result`` is what was recorded."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.message, hint=f"labctl fit {result.workload}")
        self.result = result


def warn_of_unknown(context: Context, settings: Settings, workload: Workload, options: RunOptions) -> None:
    """Warn of options that script or launcher do not know, and of remarks on the workload's clone."""
    for remark in (*external.remarks(workload, external.roots(settings)), *unknown(workload, options)):
        context.warn(remark)


def run(backend: Backend, request: Request) -> Result:
    """Run a workload, follow and judge it; return the result, ERROR if it does not fit. HostError if not begun."""
    try:
        new, before = ready(backend, request)
    except DoesNotFit as error:
        return error.result
    return _carry_out(backend, request, new, before).result


def launch(backend: Backend, request: Request) -> RunSummary:
    """Launch a run detached and return its summary. HostError, also if it does not fit, or ConfigError."""
    request = replace(request, options=replace(request.options, detach=True))
    new, before = ready(backend, request)
    _carry_out(backend, request, new, before)
    return store.summary(new.lab.directory, new.run_id, backend.active())


def preview_run(backend: Backend, request: Request) -> PlanPreview:
    """Return a run's plan, after plans to bring the lab up if needed; change nothing. HostError if it cannot fit."""
    new = begin(backend, request, datetime.now().astimezone(), preview=True)
    if reason := why_not_fit(backend, new):
        raise HostError(reason, hint=f"labctl fit {new.job.workload.name}")
    new = backend.observe(new, preview=True)
    before: tuple[Plan, ...] = ()
    if backend.needs_up(new):
        backend.confirm_image(new, request.ask, preview=True)
        before = labs.preview_up(backend)
    backend.require_ready(new, request.options, preview=True)
    return preview_of(new.lab.name, *before, plan(backend, new, request.options, preview=True))


def begin(backend: Backend, request: Request, now: datetime, *, preview: bool = False) -> Run:
    """Build a run of a request; fetch the files of a run that it resumes first. HostError without its devices."""
    options = request.options
    if options.resume and not options.retried and not preview:
        gather(backend, options.resume)
    new = backend.begin(request.workload, options, now, request.replayed)
    external.require_device(request.workload, new.lab.accelerator, external.roots(backend.settings))
    return new


def gather(backend: Backend, run_id: str) -> None:
    """Judge an ended run if it has no result, and fetch all its files. ConfigError if it is running."""
    judge.settle(backend, run_id)
    with locked(backend.context, run_id):
        judge.gather(backend, run_id)


def why_not_fit(backend: Backend, run: Run) -> str | None:
    """Return why a run cannot fit in its nodes' memory; None if it may."""
    return fitting.why_not_fit(run.lab, run.job, backend.settings.number("LAB_MEMORY"))


def ready(backend: Backend, request: Request) -> tuple[Run, Mapping[str, Snapshot]]:
    """Build a run, bring the lab up if it needs another image, check it; return it and the readings of its hosts.

    DoesNotFit if memory is short, Unfit for a bad node, HostError or ConfigError for another run that cannot begin.
    """
    now = datetime.now().astimezone()
    run = begin(backend, request, now)
    if reason := why_not_fit(backend, run):
        raise DoesNotFit(judge.refuse(run, reason, now))
    observed = backend.observe(run)
    if backend.needs_up(observed):
        backend.confirm_image(observed, request.ask)
        labs.bring_up(backend)
        run = backend.begin(request.workload, request.options, datetime.now().astimezone(), request.replayed)
        observed = backend.observe(run)
    looked = health.begin_look(backend, observed)
    backend.require_ready(observed, request.options)
    return observed, health.require_fit(backend, observed, request.options, looked)


def plan(backend: Backend, run: Run, options: RunOptions, *, preview: bool = False) -> Plan:
    """Return a run's plan: end what earlier runs left, stage, launch and, unless detached, collect and judge."""
    unfinished = _unfinished(backend)
    of_backend = backend.plan_run(run, ended=unfinished, preview=preview)
    run_id, cause, is_read = run.run_id, f"run {run.run_id}", health.is_read(backend)
    nodes = ", ".join(node.name for node in run.job.nodes)
    ended = tuple(EndRun(run_id=earlier, cause=why) for earlier, why in unfinished.items())
    end = (
        CollectResults(text=of_backend.collect, cause=cause),
        WriteResult(run_id=run_id, cause=cause),
    )

    def with_record(text: str) -> Plan:
        """Return the plan with this text in the recorded plan.txt."""
        record = (store.plan_file(text), *of_backend.record)
        stage = StageRun(
            run_id=run_id, job=run.job.files, record=record, code=run.job.code, reads_health=is_read, cause=cause
        )
        launched = LaunchRun(text=of_backend.launch, cause=f"{run.job.workload.name} on {nodes}")
        steps = (*ended, *of_backend.before, stage, *of_backend.send, launched)
        return Plan(steps if options.detach else (*steps, *end))

    # The record holds the text of the plan itself.
    return with_record(f"{with_record('')}\n")


def _unfinished(backend: Backend) -> dict[str, str]:
    """Return runs to end first, with reasons: the last one if it left processes, and orphaned ones."""
    directory = backend.context.directory
    orphaned = [run_id for run_id in store.unjudged(directory) if store.state(directory, run_id) == "orphaned"]
    active = backend.active() if orphaned else {}
    return judge.unfinished(backend, active, orphaned)


def _carry_out(backend: Backend, request: Request, run: Run, before: Mapping[str, Snapshot]) -> RunDeployment:
    """Carry out a run's plan under its lock; return its deployment with the result. HostError if a step fails."""
    options = request.options
    with locked(backend.context, run.run_id), ExitStack() as held:
        steps = plan(backend, run, options).steps
        now = datetime.now().astimezone()
        deployment = RunDeployment(backend=backend, run=run, options=options, now=now, held=held, before=before)
        done = 0
        for is_own, section in _sections(steps):
            after = len(steps) - done - len(section)
            if is_own:
                carry_out(section, deployment, before=done, after=after)
            else:
                backend.carry_out_steps(run, section, before=done, after=after)
            done += len(section)
        return deployment


def _sections(steps: tuple[Step, ...]) -> Iterator[tuple[bool, tuple[Step, ...]]]:
    """Yield consecutive steps of a plan, with True for the run's own and False for the backend's."""
    of_run = (EndRun, StageRun, LaunchRun, CollectResults, WriteResult)
    for is_own, section in groupby(steps, key=lambda step: isinstance(step, of_run)):
        yield is_own, tuple(section)


@contextmanager
def locked(context: Context, run_id: str) -> Iterator[None]:
    """Hold a run's lock in the block, taken while the lab's lock is held. HostError if another command has that."""
    lab = context.directory
    with ExitStack() as held:
        with filelock.held(lab / filelock.LAB, store.purpose(run_id), wait=STAGING):
            held.enter_context(store.recording(lab, run_id))
        yield


# --- once more -----------------------------------------------------------------------------------------------


def run_again(backend: Backend, request: Request, ended: Result) -> tuple[Request, Result]:
    """Bring the lab up and run a failed run again; if it stays down or is not fit, warn; return the old result."""
    try:
        options = _recover(backend, request, ended)
    except HostError as error:
        why = "a node is not fit" if isinstance(error, health.Unfit) else "the lab does not come up"
        backend.context.warn(f"run {ended.run_id} is not started again, because {why}: {error.message}")
        return replace(request, options=replace(request.options, retries=0)), ended
    request = replace(request, options=options)
    return request, run(backend, request)


def _recover(backend: Backend, request: Request, ended: Result) -> RunOptions:
    """Bring the lab up, without lost nodes if the workload is elastic; return retry options. HostError if down."""
    context, workload, options = backend.context, request.workload, request.options
    context.notice(f"run {ended.run_id} has ended: {ended.cause}: {ended.message}; the lab is brought up again")
    try:
        labs.bring_up(backend)
    except HostError as error:
        if not workload.elastic:
            raise
        options = backend.without_lost(options, ended, error)
    gather(backend, ended.run_id)
    return again(context, workload, _without_unfit(backend, workload, options, ended), ended)


def _without_unfit(backend: Backend, workload: Workload, options: RunOptions, ended: Result) -> RunOptions:
    """Return a retry's options, without the bad nodes of the ended run if the workload is elastic; Unfit if not."""
    used = {node.name for node in store.job(store.directory(backend.context.directory, ended.run_id)).nodes}
    bad = {node: why for node, why in health.unfit_nodes(backend).items() if node in used}
    if not bad:
        return options
    if not workload.elastic or not used - bad.keys():
        raise health.unfit(bad, tuple(used), options)
    backend.context.notice(f"the run goes on without {', '.join(bad)}: {next(iter(bad.values()))[0]}")
    return without(options, tuple(bad))


def again(context: Context, workload: Workload, options: RunOptions, ended: Result) -> RunOptions:
    """Return a retry's options, resuming from the last checkpoint or else starting over; announce which."""
    checkpoint, why = None, f"`{workload.name}` does not say how it resumes"
    if workload.resume:
        checkpoint, why = checkpoints.last(context.directory, ended.run_id, workload.resume)
    retried = (*options.retried, f"{ended.run_id}: {ended.cause}: {ended.message}")
    place = f"goes on from {checkpoint}" if checkpoint else f"begins from the start: {why}"
    context.notice(f"retry {len(retried)} of {options.retries} {place}")
    return replace(options, resume=ended.run_id if checkpoint else "", retried=retried)
