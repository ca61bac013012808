"""Watching of runs under way: their output and samples as they grow, for the pages that are open.

A run that a process here records is read from its record. Any other is followed into a folder of this process, by the
same code that records runs, so that both have the same files with the same bytes: a place in one is that in the other.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct

from labctl import flows
from labctl.backends import Backend
from labctl.config.context import Context
from labctl.errors import LabError
from labctl.model import Progress
from labctl.records import samples, store, straggler
from labctl.records.active import Run
from labctl.records.lines import Line
from labctl.records.progress import tracker_of
from labctl.records.samples import NodeSamples
from labctl.runs.opening import of_run
from labctl.system import filelock
from labctl.system.parallel import begin, pool
from labctl.ui import log
from labctl.ui.live_charts import LiveCharts, SampleTable
from labctl.ui.log import LogLine

PACE = 5
"""Seconds between two looks at the nodes."""
MOST_READ = 1000
"""Lines that are read for the progress at once, at most."""
LEAVING = 3
"""Seconds for the end of a run's follower."""
SILENT = re.compile(r"labctl: silent for [^:]+: (.+)")
"""Line that the run's supervisor prints once its ranks are silent."""


class NobodyWatches(Exception):
    """All pages of a run are closed."""


class State(Struct, frozen=True, kw_only=True):
    """A run under way; ``problem`` tells why no more is known of it."""

    state: str
    """``ended``, ``waiting`` for nodes of other runs, or ``running``."""
    seconds: float
    timeout: float
    progress: Progress
    straggler: str
    """Sentence on the node that the others wait for."""
    nodes: Sequence[NodeSamples]
    hang: str = ""
    """Sentence on what its ranks wait for, as long as they print nothing."""
    problem: str = ""


class Watcher:
    """A run that at least one page watches."""

    def __init__(self, context: Context, run_id: str) -> None:
        """Begin to watch it in the background. HostError if its record does not hold its job."""
        self.run_id = run_id
        self.job = store.load_job(context.directory, run_id)
        self.charts = LiveCharts()
        self._record = store.directory(context.directory, run_id)
        self._context = context
        # A process that ends while the output is written leaves the files of that moment, but no traceback.
        self._folder = TemporaryDirectory(prefix="labctl-ui-", ignore_cleanup_errors=True)
        self._own = Path(self._folder.name)
        self.tables = [SampleTable(node.name, self._own / f"{place}.csv") for place, node in enumerate(self.job.nodes)]
        self._follower: Future[None] | None = None
        self._over = threading.Event()
        self._problem = ""
        self._hang = ""
        self._waits = False
        self._tracker = tracker_of(self.job.workload)
        self._read: int | None = None
        self._reading = threading.Lock()
        self._looker = begin(self._look_after)

    def leave(self) -> None:
        """End all work, and remove what was read as soon as nothing writes to it."""
        self._over.set()
        self._looker.add_done_callback(self._remove)

    def _remove(self, _: Future[None]) -> None:
        """Remove what was read once the follower has ended too."""
        if self._follower:
            self._follower.add_done_callback(lambda _: self._folder.cleanup())
        else:
            self._folder.cleanup()

    @property
    def has_ended(self) -> bool:
        """Return True if the run has a result."""
        return os.path.lexists(self._record / store.RESULT)

    @property
    def folder(self) -> Path:
        """Return the folder in which the log and the metrics grow."""
        return self._own if self._follower else self._record

    def state(self) -> State:
        """Return the run's state by what has been printed and sampled so far; raise a bug that ended the watch."""
        if self._looker.done():
            self._looker.result()
        with self._reading:
            if new := log.new_lines(self.folder, self._read, MOST_READ):
                self._read = new.end
                self._tracker.read(map(_printed, new.lines))
                self._hang = hang_of(new.lines, self._hang)
            progress, waits = self._tracker.progress(), self._waits and not self._read
        shares = {table.node: samples.shares(table.last) for table in self.tables}
        late = straggler.straggler(shares, progress.seconds_per_step)
        return State(
            state="ended" if self.has_ended else "waiting" if waits else "running",
            seconds=round(store.age(self._record), 1),
            timeout=self.job.timeout,
            progress=progress,
            straggler=straggler.sentence(late) if late else "",
            nodes=[samples.parse(table.node, table.last) for table in self.tables],
            hang=self._hang,
            problem=self._problem or next((table.problem for table in self.tables if table.problem), ""),
        )

    # --- in the background ---

    def _look_after(self) -> None:
        """Ask the nodes, and follow the output if no process here records it, until the run or the watch ends."""
        while self._goes_on():
            try:
                self._look_on()
            # The disk of this process's folder may be full.
            except (LabError, OSError) as error:
                self._problem = str(error)
                self._over.wait(PACE)

    def _goes_on(self) -> bool:
        """Tell if neither the run nor the watch has ended."""
        return not (self._over.is_set() or self.has_ended)

    def _look_on(self) -> None:
        """Connect, and look as long as the run and the watch go on."""
        with of_run(self._context, self.run_id) as (backend, _):
            self._problem = ""
            run = backend.recorded(self.run_id)
            for table, node in zip(self.tables, self.job.nodes, strict=True):
                table.node = run.short(node.name)
            while self._goes_on():
                self._look(backend, run)
                self._over.wait(PACE)
            if self._follower:
                wait((self._follower,), LEAVING)

    def _look(self, backend: Backend, run: Run) -> None:
        """Follow the output if nobody here does, ask the nodes for samples, and see if the run waits for nodes."""
        is_followed = self._follower and not self._follower.done()
        is_recorded = filelock.is_held(store.lock(self._context.directory, self.run_id))
        # Asked last: who records a run gives its lock back after the result is written.
        if not is_followed and not is_recorded and not self.has_ended:
            self._follower = begin(partial(self._follow, backend, run))
        with pool(len(self.tables)) as threads:
            list(threads.map(partial(_ask, backend, run), self.tables))
        if not self._read:
            active = backend.active().get(self.run_id)
            self._waits = bool(active and active.waits)

    def _follow(self, backend: Backend, run: Run) -> None:
        """Follow the output to the run's end, and have it judged."""
        kept = store.RunLog(self._own, run.lab, run.job.workload, over=True)

        def hear(lines: Sequence[Line]) -> None:
            """Keep lines. NobodyWatches once all pages are closed."""
            if self._over.is_set():
                raise NobodyWatches
            self._problem = ""
            kept.keep(lines)

        try:
            backend.output(run, hear, self._over.is_set)
            if not self._over.is_set():
                flows.show(self._context, self.run_id)
        except NobodyWatches:
            pass
        except LabError as error:
            self._problem = error.message
        finally:
            kept.close()


def _ask(backend: Backend, run: Run, table: SampleTable) -> None:
    """Add the samples of a node that are new; one that does not answer is asked again later."""
    file = store.samples(run.lab.directory, run.run_id, table.node)
    # A command in a container takes a tenth of a second of a core.
    if table.is_read or file.is_file():
        with suppress(FileNotFoundError):
            table.read(file)
        return
    try:
        printed = backend.exec(run, table.node, table.rest(run.job), limit=samples.LIMIT).out
    except LabError as error:
        table.problem = f"no samples from {table.node}: {error.message}"
        return
    table.problem = ""
    table.add(printed)


def hang_of(lines: Sequence[LogLine], before: str) -> str:
    """Return the sentence of a hang that lines tell, or ``before``; empty once a rank prints again."""
    for line in lines:
        if match := SILENT.match(line.text):
            before = match[1]
        elif not line.text.startswith("labctl: "):
            before = ""
    return before


def _printed(line: LogLine) -> Line:
    """Return a line of a log as it was printed: a progress bar begins with a carriage return."""
    text = f"\r{line.text}" if "%|" in line.text else line.text
    return Line(text, line.when or 0, line.rank)


class Watchers:
    """The runs that are watched, each by one Watcher for all of its pages."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._watchers: dict[str, Watcher] = {}
        self._pages = Counter[str]()
        self._changing = threading.Lock()

    @contextmanager
    def watching(self, run_id: str) -> Iterator[Watcher]:
        """Watch a run in the block."""
        with self._changing:
            watcher = self._watchers.get(run_id) or Watcher(self._context, run_id)
            self._watchers[run_id] = watcher
            self._pages[run_id] += 1
        try:
            yield watcher
        finally:
            with self._changing:
                self._pages[run_id] -= 1
                if not self._pages[run_id]:
                    self._watchers.pop(run_id).leave()

    def folder(self, run_id: str) -> Path:
        """Return the folder in which a run's log grows: its record, unless it is followed here."""
        watcher = self._watchers.get(run_id)
        return watcher.folder if watcher else store.directory(self._context.directory, run_id)
