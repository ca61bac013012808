"""Opens the backend of a directory's lab for a command: what the command needs is chosen, or refused, before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from labctl import backends
from labctl.config import context as contexts
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError

if TYPE_CHECKING:
    from labctl.backends import Backend
    from labctl.jobs.request import RunOptions
    from labctl.model import Result, Workload
    from labctl.records.store import RunSummary, ShownRun
    from labctl.runs.compare import RecordedRun
    from labctl.runs.start import Ask, Request


@contextmanager
def connected(
    context: Context, command: str = "", settings: Settings | None = None, **options: Any
) -> Iterator[Backend]:
    """Connect the backend of the lab in the block. ConfigError if it is no lab or lacks ``command``."""
    settings = settings or named_settings(context)
    if command:
        backends.require(settings, command)
    with backends.connect(context, settings, **options) as backend:
        yield backend


@contextmanager
def docker(context: Context, command: str, settings: Settings | None = None, **options: Any) -> Iterator[Any]:
    """Connect the Docker backend in the block. ConfigError if the lab's backend does not support ``command``."""
    with connected(context, command, settings or context.settings(), **options) as backend:
        yield backend


@contextmanager
def to_bring_up(context: Context, workload: str) -> Iterator[Backend]:
    """Connect the backend for `up` in the block, with a workload's image if named. ConfigError without .env."""
    contexts.require_initialised(context)
    settings = settings_for(context, workload)
    warn_of_environment(context, settings)
    with connected(context, "up", settings) as backend:
        yield backend


@contextmanager
def to_remove(context: Context, *, images: bool) -> Iterator[Backend]:
    """Connect the backend with drained hosts too, in the block. ConfigError if ``images`` is not supported."""
    settings = named_settings(context)
    if images:
        backends.require(settings, "down --images")
    with backends.connect(context, settings, drained=True) as backend:
        yield backend


@contextmanager
def to_run(
    context: Context, name: str, options: RunOptions, ask: Ask | None, *, again: bool = False
) -> Iterator[tuple[Backend, Request]]:
    """Connect the backend and yield it with a run's request; warn of unknown options. ConfigError if invalid."""
    from labctl.jobs import request
    from labctl.runs import start

    settings = named_settings(context) if not name else context.settings()
    backends.require_options(settings, options)
    if options.detach and options.retries:
        raise ConfigError(
            "a run is started again by the labctl that follows it", hint="leave out --detach or --retries"
        )
    if options.resume and not again:
        name, options = request.resumed(context.directory, name, options)
    workload = request.choose_workload(context.directory, name, options, settings)
    settings = backends.settings_for(context, settings, workload)
    if not again:
        warn_of_environment(context, settings)
        start.warn_of_unknown(context, settings, workload, options)
    with backends.connect(context, settings) as backend:
        yield backend, start.Request(workload=workload, options=options, name=name, ask=ask)


@contextmanager
def to_replay(context: Context, run: str) -> Iterator[tuple[Backend, Request]]:
    """Connect the backend and yield it with a replay's request. HostError if something it needs has changed."""
    from labctl.jobs import replay as replays
    from labctl.jobs.request import RunOptions
    from labctl.records import store
    from labctl.runs import start
    from labctl.runs.replay import require_same

    settings = named_settings(context)
    backends.require(settings, "replay")
    recorded = replays.read(context.directory, store.find(context.directory, run))
    workload = recorded.job.workload
    with backends.connect(context, backends.settings_for(context, settings, workload)) as backend:
        require_same(backend, recorded)
        again = partial(replays.job, recorded)
        yield backend, start.Request(workload=workload, options=RunOptions(), replayed=again)


@contextmanager
def of_run(context: Context, run: str) -> Iterator[tuple[Backend, str]]:
    """Connect the backend and yield it with a recorded run's id. ConfigError if there is no such run."""
    from labctl.records import store

    settings = named_settings(context)
    run_id = store.find(context.directory, run)
    with connected(context, settings=settings) as backend:
        yield backend, run_id


@contextmanager
def of_batch(context: Context, command: str, name: str, options: RunOptions) -> Iterator[tuple[Backend, Workload]]:
    """Connect the backend and yield it with the workload of a batch or bisection. ConfigError if unsupported."""
    from labctl.jobs.request import choose_workload

    settings = context.settings()
    backends.require(settings, command)
    workload = choose_workload(context.directory, name, options, settings)
    warn_of_environment(context, settings)
    with backends.connect(context, backends.settings_for(context, settings, workload)) as backend:
        yield backend, workload


def warn_of_environment(context: Context, settings: Settings) -> None:
    """Warn of each variable of the shell that would choose devices, and that the lab ignores."""
    from labctl.backends import spec

    for text in spec.unused_choices(settings, context.environ):
        context.warn(text)


def named_settings(context: Context, *, quiet: bool = False) -> Settings:
    """Return the lab's settings. ConfigError without .env and LAB_NAME, not checked if ``quiet``.

    ``quiet``: for commands that examine a machine without a lab, too, and give the warnings of its settings themselves.
    """
    if quiet:
        return context.declared()
    settings = context.settings()
    contexts.require_named(context, settings)
    return settings


def initialised_settings(context: Context) -> Settings:
    """Return the settings of a directory with a .env. ConfigError without one."""
    contexts.require_initialised(context)
    return context.settings()


def settings_for(context: Context, workload: str) -> Settings:
    """Return the lab's settings with the image that a workload needs, unless the name is empty."""
    settings = context.settings()
    if not workload:
        return settings
    from labctl.jobs.request import RunOptions, choose_workload

    chosen = choose_workload(context.directory, workload, RunOptions(), settings)
    return backends.settings_for(context, settings, chosen)


def listing(context: Context) -> tuple[RunSummary, ...]:
    """Return the lab's run summaries, latest first; if some have no result, ask the nodes and judge ended ones."""
    from labctl.records import store

    settings = named_settings(context)
    if not store.unjudged(context.directory):
        return store.listing(context.directory)
    from labctl.runs import judge

    with connected(context, settings=settings, demand=False) as backend:
        return judge.listing(backend)


def named_run(context: Context, run: str) -> RunSummary:
    """Return a run's summary, also with the nodes that it was started on. ConfigError if there is no such run."""
    from labctl.records import store

    named_settings(context)
    run_id = store.find(context.directory, run)
    summary = store.summary(context.directory, run_id)
    started_on = tuple(node.name for node in store.job(store.directory(context.directory, run_id)).nodes)
    return replace(summary, nodes=summary.nodes or started_on)


def show(context: Context, run: str) -> ShownRun:
    """Return a run, by id or ``latest``, with its result if it has one; judge it first if it has ended."""
    from labctl.records import store
    from labctl.runs import judge

    settings = named_settings(context)
    shown = store.read(context.directory, run)
    if shown.result:
        return shown
    with connected(context, settings=settings, demand=False) as backend:
        return judge.find(backend, shown.summary.run_id)


def results(context: Context, runs: Iterable[str]) -> list[Result]:
    """Return the results of runs, each once, judging those that have ended. HostError for one without a result."""
    from labctl.records import store

    named_settings(context)
    run_ids = dict.fromkeys(store.find(context.directory, run) for run in runs)
    ended: list[Result] = []
    for run_id in run_ids:
        shown = show(context, run_id)
        if not shown.result:
            raise _without_result(shown.summary)
        ended.append(shown.result)
    return ended


def _without_result(run: RunSummary) -> HostError:
    """Return the error of a run that has no result, or one that cannot be read."""
    if run.state == "done":
        return HostError(f"cannot read result.json of run {run.run_id}", hint=f"labctl logs --run {run.run_id}")
    return HostError(f"run {run.run_id} has no result: it is {run.state}", hint=f"labctl attach {run.run_id}")


def records(context: Context, runs: Iterable[str]) -> list[RecordedRun]:
    """Return the records of ended runs, each once, to compare. HostError for a run without a result."""
    from labctl.runs import compare as comparing

    return [comparing.read(context.directory, result) for result in results(context, runs)]
