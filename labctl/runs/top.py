"""`labctl top`: observe a running run: progress, and samples of its nodes and devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from labctl.backends import Backend
from labctl.errors import HostError, LabError
from labctl.model import Progress, Straggler
from labctl.records import samples, store
from labctl.records.active import ActiveRun, Run
from labctl.records.lines import Line
from labctl.records.progress import tracker_of
from labctl.records.samples import NodeSamples
from labctl.records.straggler import Shares, straggler
from labctl.system.parallel import begin, pool

PACE = 2
"""Seconds between reads of the nodes' samples."""
CATCHING_UP, SILENT = 10, 0.5
"""Seconds for reading earlier output, and without output after which it is complete."""


class RunView(Struct, frozen=True, kw_only=True):
    """State of a run at a moment: ``running``, ``waiting`` for nodes of other runs, or ``ended``."""

    run_id: str
    workload: str
    state: str
    seconds: float
    timeout: float
    progress: Progress
    nodes: tuple[NodeSamples, ...]
    straggler: Straggler | None = None
    """Node that the others have waited for in the last minute."""


def under_way(backend: Backend, run: str) -> ActiveRun:
    """Return a running run, by default the latest. HostError if it is not running, or that is unknown."""
    directory = backend.context.directory
    run_id = store.find(directory, run) if run else ""
    active = [active for active in backend.active().values() if run_id in ("", active.id)]
    if unknown := [other.id for other in active if other.state == "unknown"]:
        message = f"the launcher does not answer: whether run {unknown[0]} is under way is unknown"
        raise HostError(message, hint="labctl status")
    running = [other for other in active if other.state == "running" and store.is_run(directory, other.id)]
    if not running and run_id:
        raise HostError(f"run {run_id} is not under way", hint=f"labctl show {run_id}")
    if not running:
        raise HostError("no run is under way", hint="labctl run opt-tiny; `labctl runs` lists those that have ended")
    return max(running, key=lambda active: active.order)


class Observer:
    """Follows a run without recording it."""

    def __init__(self, backend: Backend, run: ActiveRun) -> None:
        """Start to follow the run's output in the background, without samples of nodes."""
        self._backend, self._active = backend, run
        self._run = backend.recorded(run.id)
        self._tracker = tracker_of(self._run.job.workload)
        self._over = threading.Event()
        self._heard = 0
        """Batches of lines; an empty one is a sign that all was told."""
        self._nodes = tuple(NodeSamples(node=self._run.short(node.name)) for node in self._run.job.nodes)
        self._shares: Shares = {}
        """Node -> shares of time in collectives, in the last minute."""
        self._following = begin(lambda: backend.output(self._run, self._hear, self._over.is_set))

    def _hear(self, lines: Sequence[Line]) -> None:
        """Track progress in lines, and count the batch."""
        self._tracker.read(lines)
        self._heard += 1

    @property
    def ended(self) -> bool:
        """Tell if the run's output is over. HostError if following it failed."""
        if not self._following.done():
            return False
        self._following.result()
        return True

    def view(self) -> RunView:
        """Return the run's state, progress, samples and straggler as known so far."""
        progress = self._tracker.progress()
        return RunView(
            run_id=self._run.run_id,
            workload=self._run.job.workload.name,
            state=self._state(progress),
            seconds=round(store.age(self._run.directory), 1),
            timeout=self._run.job.timeout,
            progress=progress,
            nodes=self._nodes,
            straggler=straggler(self._shares, progress.seconds_per_step),
        )

    def _state(self, progress: Progress) -> str:
        """Return ``ended``, ``waiting`` if it waits for nodes and printed nothing yet, else ``running``."""
        if self.ended:
            return "ended"
        return "waiting" if self._active.waits and progress.last_line is None else "running"

    def look(self) -> RunView:
        """Ask nodes for samples, read output up to now (CATCHING_UP seconds at most), and return the view."""
        began, heard, since = time.time(), -1, 0.0
        deadline = time.monotonic() + CATCHING_UP
        self._ask_nodes()
        while not self.ended and time.monotonic() < deadline:
            if self._heard != heard:
                heard, since = self._heard, time.monotonic()
            silent = heard and time.monotonic() - since > SILENT
            if silent or (self._tracker.progress().last_line or 0) >= began:
                break
            time.sleep(0.05)
        return self.view()

    def watch(self, show: Callable[[RunView], bool]) -> RunView:
        """Pass views to ``show`` until the run ends or ``show`` returns False; return the last view.

        ``show`` waits between two states.
        """
        begin(self._keep_asking_nodes)
        try:
            while show(view := self.view()) and view.state != "ended":
                pass
            return view
        finally:
            self._over.set()

    def _keep_asking_nodes(self) -> None:
        """Read the nodes' samples every PACE seconds until the observer is over."""
        while not self._over.is_set():
            self._ask_nodes()
            self._over.wait(PACE)

    def _ask_nodes(self) -> None:
        """Read the samples of all nodes; a node with none keeps its last ones, shares are replaced."""
        tables = tables_of(self._backend, self._run)
        sampled = [samples.parse(node, table) for node, table in tables.items()]
        # The samples of a node that has ended go on being shown.
        self._nodes = tuple(
            new if new.values or new.devices else old for new, old in zip(sampled, self._nodes, strict=True)
        )
        self._shares = {node: samples.shares(table) for node, table in tables.items()}


def tables_of(backend: Backend, run: Run) -> dict[str, str]:
    """Map each node of a run to the CSV of its last samples, read in parallel; empty if it does not answer."""

    def read(node: str) -> str:
        """Return a node's CSV of last samples; empty if the node cannot be reached."""
        # A command in a container takes a tenth of a second of a core.
        if table := samples.read_last(store.samples(run.lab.directory, run.run_id, node)):
            return table
        try:
            return backend.exec(run, node, samples.look(run.job, node), limit=samples.LIMIT).out
        except LabError:
            return ""

    nodes = [run.short(node.name) for node in run.job.nodes]
    with pool(len(nodes)) as threads:
        return dict(zip(nodes, threads.map(read, nodes), strict=True))
