"""A run under way, looked at from beside it: how far it is, and what its nodes and devices do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from msgspec import Struct

from labctl.backends.docker import agent
from labctl.backends.docker.engine import Backend
from labctl.backends.docker.lab.cluster import Cluster
from labctl.errors import HostError
from labctl.model import Job, Lab, Progress
from labctl.records import store
from labctl.records.active import ActiveRun
from labctl.records.progress import Tracker
from labctl.runs import follow, samples
from labctl.runs.samples import NodeSamples
from labctl.system.parallel import begin

# Seconds between two looks at the samples of the nodes.
PACE = 2
# Seconds for one look to be told what was printed before, and without a word after which that was all.
CATCHING_UP, SILENT = 10, 0.5


class RunView(Struct, frozen=True, kw_only=True):
    """A run at a moment; ``state`` is ``running``, ``waiting`` for nodes of other runs, or ``ended``."""

    run_id: str
    workload: str
    state: str
    seconds: float
    timeout: float
    progress: Progress
    nodes: tuple[NodeSamples, ...]


def under_way(cluster: Cluster, run: str) -> ActiveRun:
    """A run that is under way, without a name the latest one. HostError where it is not, or none is."""
    wanted = store.find(cluster.directory, run) if run else ""
    known = [one for one in follow.known_runs(cluster).values() if wanted in ("", one.id)]
    if unknown := [one.id for one in known if one.state == "unknown"]:
        message = f"the launcher does not answer: whether run {unknown[0]} is under way is unknown"
        raise HostError(message, hint="labctl status")
    here = [one for one in known if one.state == "running" and store.is_run(cluster.directory, one.id)]
    if not here and wanted:
        raise HostError(f"run {wanted} is not under way", hint=f"labctl show {wanted}")
    if not here:
        raise HostError("no run is under way", hint="labctl run opt-tiny; `labctl runs` lists those that have ended")
    return max(here, key=lambda one: one.order)


class Observer:
    """Follows a run and records nothing of it."""

    def __init__(self, lab: Lab, engine: Backend, run: ActiveRun) -> None:
        self._lab, self._engine, self._run = lab, engine, run
        self._job: Job = store.load_job(lab.directory, run.id)
        self._tracker = Tracker(self._job.workload.metrics)
        self._over = threading.Event()
        self._follower = agent.Follower(self._tracker.read, given_up=self._over.is_set)
        self._nodes = tuple(NodeSamples(node=node.name) for node in self._job.nodes)
        self._following = begin(lambda: agent.follow(lab, engine, run.id, self._follower))

    @property
    def ended(self) -> bool:
        """HostError where the connection to the run is lost."""
        return self._following.done() and bool(self._following.result())

    def view(self) -> RunView:
        progress = self._tracker.progress()
        waits = self._run.waits and progress.last_line is None
        return RunView(
            run_id=self._run.id,
            workload=self._job.workload.name,
            state="ended" if self.ended else "waiting" if waits else "running",
            seconds=round(store.age(store.directory(self._lab.directory, self._run.id)), 1),
            timeout=self._job.timeout,
            progress=progress,
            nodes=self._nodes,
        )

    def look(self) -> RunView:
        """One view, once what was printed before is known."""
        began, place, since = time.time(), -1, 0.0
        deadline = time.monotonic() + CATCHING_UP
        self._ask_nodes()
        while not self.ended and time.monotonic() < deadline:
            if self._follower.place != place:
                place, since = self._follower.place, time.monotonic()
            silent = self._follower.heard and time.monotonic() - since > SILENT
            if silent or (self._tracker.progress().last_line or 0) >= began:
                break
            time.sleep(0.05)
        return self.view()

    def watch(self, show: Callable[[RunView], bool]) -> RunView:
        """Show one view after the other until the run ends or ``show``, which takes its time, says that it is enough.

        The last one.
        """
        begin(self._keep_asking_nodes)
        try:
            while show(view := self.view()) and view.state != "ended":
                pass
            return view
        finally:
            self._over.set()

    def _keep_asking_nodes(self) -> None:
        while not self._over.is_set():
            self._ask_nodes()
            self._over.wait(PACE)

    def _ask_nodes(self) -> None:
        found = samples.last(self._lab, self._engine, self._job)
        # What ends with the run goes on being shown.
        self._nodes = tuple(
            new if new.values or new.devices else old for new, old in zip(found, self._nodes, strict=True)
        )
