"""Brings a lab up and takes it down, with the runs that it has."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from msgspec import Struct
from msgspec.structs import replace

from labctl.backends import Backend, health
from labctl.backends.plan import Plan, PlanPreview, preview
from labctl.backends.status import LabStatus, RunState
from labctl.config.context import Context
from labctl.errors import HostError, LabError
from labctl.model import LAUNCHER, Hang
from labctl.records import store
from labctl.records.active import Run
from labctl.records.samples import LIMIT, NodeSamples, parse
from labctl.records.store import RunSummary
from labctl.runs import judge, top
from labctl.system import filelock
from labctl.system.decode import decode

STATE = ".lab"
"""Keys and rendered files, relative to the lab directory."""
LISTED = 20
"""Runs that `status` lists."""


def changing(context: Context, command: str) -> AbstractContextManager[None]:
    """Hold the lab's change lock in the block, waiting up to PATIENCE for another holder. LockHeld after that."""
    return filelock.held(context.directory / filelock.LAB, command, wait=filelock.PATIENCE, notice=context.notice)


def preview_up(backend: Backend) -> tuple[Plan, Plan]:
    """Return the plans to prepare and to bring up the lab, changing nothing."""
    return backend.plan_prepare(preview=True), backend.plan_up(preview=True)


def bring_up(backend: Backend) -> LabStatus:
    """Prepare and start the lab under its lock; return its status. HostError names what failed on each host."""
    with changing(backend.context, "labctl up"):
        backend.carry_out(backend.plan_prepare())
        backend.carry_out(backend.plan_up())
    return status(backend)


def status(backend: Backend) -> LabStatus:
    """Return the status of the lab with the states of its latest runs."""
    runs, now = judge.states(backend, LISTED), backend.status()
    ages = health.ages(backend.context.directory, {node.name: node.host for node in now.nodes}, time.time())
    latest = _latest(runs)
    nodes = (replace(node, fitness=ages.get(node.name, ""), run=latest.get(node.name, node.run)) for node in now.nodes)
    states = (RunState(run.run_id, run.state, run.short_id, run.nodes) for run in runs)
    return replace(now, nodes=tuple(nodes), runs=tuple(states))


class LabNow(Struct, frozen=True, kw_only=True):
    """A lab at a moment: its status, and of the runs under way the latest samples of nodes and what ranks wait for."""

    status: LabStatus
    samples: Mapping[str, NodeSamples] = {}
    """By node."""
    hangs: Mapping[str, Hang] = {}
    """By run; of runs that went on since, too."""


def look(backend: Backend) -> LabNow:
    """Return the lab as it is now; nothing is judged. Nodes that do not answer have no samples."""
    now = status(backend)
    samples: dict[str, NodeSamples] = {}
    hangs: dict[str, Hang] = {}
    for state in now.runs:
        if state.state == "running" and store.is_run(backend.context.directory, state.run_id):
            run = backend.recorded(state.run_id)
            tables = top.tables_of(backend, run)
            names = {run.short(node.name): node.name for node in now.nodes if node.run == run.run_id}
            samples |= {names[node]: parse(names[node], table) for node, table in tables.items() if node in names}
            if hang := _hang(backend, run):
                hangs[state.run_id] = hang
    return LabNow(status=now, samples=samples, hangs=hangs)


def _hang(backend: Backend, run: Run) -> Hang | None:
    """Return what the ranks of a run under way wait for; None if it is nothing or unknown."""
    directory = run.lab.directory
    # If all nodes are on this machine, so is the launcher.
    if all(store.samples(directory, run.run_id, run.short(node.name)).exists() for node in run.job.nodes):
        hang = store.decode(store.outputs(directory, run.run_id) / store.HANG, Hang)
        return store.redacted_hang(hang, run.lab) if hang else None
    try:
        written = backend.exec(run, LAUNCHER, ("cat", f"{run.job.directory}/{store.HANG}"), limit=LIMIT)
        return store.redacted_hang(decode(written.out.encode(), Hang), run.lab) if written.code == 0 else None
    except (LabError, ValueError):
        return None


def _latest(runs: Sequence[RunSummary]) -> dict[str, str]:
    """Map nodes to the id of the latest of these runs, the latest first, that runs on them."""
    latest: dict[str, str] = {}
    for run in reversed(runs):
        if run.state == "running":
            latest |= dict.fromkeys(run.nodes, run.run_id)
    return latest


def take_down(
    backend: Backend,
    command: str,
    *,
    images: bool = False,
    state: str = "",
    ask: Callable[[str], bool] | None = None,
) -> PlanPreview:
    """End the lab's runs and remove it; return the plan. HostError if ``ask`` says no to ending runs."""
    with changing(backend.context, command):
        plan = backend.plan_down(images=images, state=state)
        if runs := warn_of_runs(backend):
            if ask and not ask("end it?" if len(runs) == 1 else "end them?"):
                raise HostError("aborted: the lab stays as it is", hint="labctl runs")
            judge.end_all(backend)
        backend.carry_out(plan)
    return preview(backend.settings.text("LAB_NAME"), plan)


def preview_down(backend: Backend, *, images: bool = False, state: str = "") -> PlanPreview:
    """Return the plan of removing the lab, and warn of running runs; change nothing."""
    plan = backend.plan_down(images=images, state=state, preview=True)
    warn_of_runs(backend)
    return preview(backend.settings.text("LAB_NAME"), plan)


def warn_of_runs(backend: Backend) -> tuple[str, ...]:
    """Warn of running runs that will end; return them as texts, () if there are none."""
    runs = backend.under_way()
    if runs:
        backend.context.warn(f"this ends {'; '.join(runs)}")
    return runs
