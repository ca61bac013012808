"""`python tests/batch_scale.py`: how long large batches take against what their jobs allow (about 15 minutes).

Their jobs take no time but that of a simulated clock. What labctl does for each is done and measured, on an engine in
memory: it is added to that clock, one job after the other.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import resource
import sys
import tempfile
import time
from bisect import bisect, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import msgspec
from msgspec import Struct
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from support import builders
from support.fake_backend import FakeBackend, healthy

from labctl import backends
from labctl.backends.docker.agent import AGENT
from labctl.backends.docker.checks import run as doctor_run
from labctl.backends.docker.compose import render
from labctl.backends.docker.lab import cluster as clusters
from labctl.backends.state import ObservedState
from labctl.batches import hostfiles, record
from labctl.batches.batch import FOLLOWED
from labctl.batches.record import Batch, BatchJob
from labctl.batches.schedule import AHEAD, JobQueue
from labctl.cli.batch import Display
from labctl.cli.output import Output
from labctl.config.context import Context
from labctl.jobs.request import RunOptions, choose_workload
from labctl.model import Result
from labctl.records import store
from labctl.records.active import ActiveRun
from labctl.runs import start
from labctl.system.files import write_all

Jobs = Sequence[tuple[str, ...]]
WORKLOAD = "description: hello\nlauncher: deepspeed\nscript: hello.py\ntimeout: 60s\n"


class Engine(FakeBackend):
    """A lab that is up, whose agent knows the active runs."""

    def __init__(self) -> None:
        """Answer the agent's ``runs`` with the active runs' JSON, by id; all else as a healthy lab."""
        super().__init__(answer=self._say)
        self.runs: dict[str, str] = {}

    def observe(self, lab: str, image: str | None = None, *, node: str = "") -> ObservedState:
        """Return the planted state; forget earlier calls first, so that memory stays small."""
        self.started.clear()
        self.options.clear()
        return super().observe(lab, image, node=node)

    def _say(self, container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Yield the active runs for the agent's ``runs``, and what a healthy node says to any other command."""
        if argv[-len(AGENT) - 1 :] == (*AGENT, "runs"):
            yield from self.runs.values()
        yield from healthy(container, argv)

    def begin(self, run_id: str, job: BatchJob) -> None:
        """Add a run of the job to the active ones."""
        run = ActiveRun(id=run_id, nodes=job.nodes, state="running", port=29500 + len(self.runs))
        self.runs[run_id] = msgspec.json.encode(run).decode()


class Site:
    """A batch in a lab that is up; its methods are labctl's work per job, in seconds of CPU time."""

    def __init__(self, engine: Engine, jobs: Jobs, backend: backends.Backend) -> None:
        """Record a new batch of these jobs of the workload `hello`, none of them started."""
        context = backend.context
        self.engine, self.backend, self.directory = engine, backend, context.directory
        self.workload = choose_workload(context.directory, "hello", RunOptions(), context.settings())
        self.display = Display(Output())
        self.now = {f"{number}": planned(number, nodes) for number, nodes in enumerate(jobs)}
        self.batch = Batch(workload="hello", lab="demo", timeout=60, began=0, jobs=tuple(self.now.values()))
        record.create(self.directory / "out", self.batch)

    def launch(self, index: int) -> float:
        """Launch a job and record it; return the seconds of CPU time."""
        job, began = self.now[f"{index}"], time.process_time()
        options = RunOptions(hostfile=self.directory / "hostfile", detach=True, wait=True)
        (self.directory / "hostfile").write_text("".join(f"{name} slots=1\n" for name in job.nodes))
        begun = start.launch(self.backend, start.Request(workload=self.workload, options=options))
        self._note(replace(job, state="running", run_id=begun.run_id))
        cost = time.process_time() - began
        self.engine.begin(begun.run_id, job)
        return cost

    def launched(self, index: int) -> None:
        """Mark a job as running, with its run's directory, for later jobs; without labctl's own launch."""
        job = replace(self.now[f"{index}"], state="running", run_id=f"20260102-{index:06}-hello-0000")
        folder = store.directory(self.directory, job.run_id)
        folder.mkdir(parents=True)
        (folder / store.MARK).touch()
        self.now[job.log] = job
        self.engine.begin(job.run_id, job)

    def end(self, index: int, *, noted: bool) -> float:
        """Record the end of a job's run, in the batch's record only if ``noted``; return the seconds of CPU time."""
        job, began = replace(self.now[f"{index}"], state="done", verdict="PASS"), time.process_time()
        lab = builders.lab(1, directory=self.directory)
        result = {"workload": "hello", "launcher": "deepspeed", "lab": "demo", "cause": None, "message": "Completed."}
        store.finish(lab, Result(run_id=job.run_id, verdict="PASS", exit_code=0, **cast(dict[str, Any], result)))
        del self.engine.runs[job.run_id]
        self.now[job.log] = job
        if noted:
            self._note(job)
        return time.process_time() - began

    def _note(self, job: BatchJob) -> None:
        """Write the job's state to the batch's record and show the batch."""
        self.now[job.log] = job
        record.change(self.directory / "out", job)
        self.display.show(replace(self.batch, jobs=tuple(self.now.values())))


def planned(number: int, nodes: tuple[str, ...]) -> BatchJob:
    """Return job ``number`` of a batch, on these nodes."""
    return BatchJob(job=f"{number}", set="set", hostfile=f"h{number}", names=nodes, nodes=nodes, log=f"{number}")


@contextmanager
def site(count: int, jobs: Jobs) -> Iterator[Site]:
    """Yield a batch of these jobs in a temporary lab of ``count`` nodes, on an in-memory engine, without stderr."""
    engine = Engine()
    with ExitStack() as held:
        directory = Path(held.enter_context(tempfile.TemporaryDirectory()))
        held.enter_context(redirect_stderr(held.enter_context(open(os.devnull, "w"))))  # noqa: PTH123
        held.enter_context(patch.object(clusters, "backend_here", lambda _: engine))
        held.enter_context(patch.object(doctor_run, "preflight", lambda *given: given[2]))
        (directory / "cache").mkdir()
        (directory / "workloads/hello").mkdir(parents=True)
        (directory / "workloads/hello/hello.py").touch()
        (directory / "workloads/hello/workload.yml").write_text(WORKLOAD)
        settings = f"LAB_NAME=demo\nLAB_ACCELERATOR=cpu\nLAB_NODES={count}\nHOST_CACHE_PATH={directory}/cache\n"
        (directory / ".env").write_text(settings)
        context = Context(directory=directory, environ={}, emit=lambda _: None, flags={})
        with backends.connect(context) as backend:
            lab = backend.lab()
            write_all(directory, render.render(lab))
            engine.seen = builders.observed(lab)
            yield Site(engine, jobs, backend)


class Outcome(Struct, frozen=True, kw_only=True):
    """Result of a batch; times in seconds of the simulated clock."""

    ideal: float
    """Busy time of the busiest node, in seconds."""
    seconds: float
    costs: dict[int, float]
    """Time that labctl spends on each job, by index."""
    overtaken: int
    """Largest number of later jobs that started before an earlier one."""

    @property
    def overhead(self) -> float:
        return self.seconds / self.ideal - 1


Cost = Callable[[int], float]


def nothing(_: int) -> float:
    return 0.0


def run(jobs: Jobs, durations: Sequence[float], launch: Cost = nothing, end: Cost = nothing) -> Outcome:
    """Run the jobs through JobQueue on a simulated clock, which ``launch`` and ``end`` cost; return the Outcome."""
    queue, ends, costs = JobQueue(jobs, FOLLOWED), list[tuple[float, int]](), dict[int, float]()
    now = free = 0.0
    begun: list[int] = []
    overtaken = 0
    while queue:
        began = time.process_time()
        started = queue.start()
        free = max(free, now) + time.process_time() - began
        for index in started:
            costs[index] = launch(index)
            free += costs[index]
            heapq.heappush(ends, (free + durations[index], index))
            overtaken = max(overtaken, len(begun) - bisect(begun, index))
            insort(begun, index)
        now, index = heapq.heappop(ends)
        queue.end(index)
        free = max(free, now) + (cost := end(index))
        costs[index] += cost
    in_use = dict[str, float]()
    for nodes, seconds in zip(jobs, durations, strict=True):
        in_use.update({name: in_use.get(name, 0) + seconds for name in nodes})
    return Outcome(ideal=max(in_use.values()), seconds=max(now, free), costs=costs, overtaken=overtaken)


def durations_of(jobs: Jobs, seconds: float) -> list[float]:
    """Draw a duration for each job, from half to one and a half times ``seconds``."""
    chance = random.Random(1)  # noqa: S311
    return [seconds * chance.uniform(0.5, 1.5) for _ in jobs]


def simulate(count: int, jobs: Jobs, durations: Sequence[float], every: int = 1) -> Outcome:
    """Run a batch in a simulated lab of ``count`` nodes, measuring labctl's CPU time; return its Outcome.

    Only each ``every``th job of a size is measured; those after it are assumed to cost the same.
    """
    count_by_size, last = Counter[int](), dict[tuple[str, int], float]()
    measured = set[int]()
    with site(count, jobs) as made:

        def launch(index: int) -> float:
            """Return the seconds that a launch takes, measured at one job in ``every`` of its size."""
            size = len(jobs[index])
            count_by_size[size] += 1
            if (count_by_size[size] - 1) % every:
                made.launched(index)
            else:
                measured.add(index)
                last["launch", size] = made.launch(index)
            return last["launch", size]

        def end(index: int) -> float:
            """End a job; return the seconds of its measured end, or of the last one measured."""
            seconds = made.end(index, noted=index in measured)
            if index in measured:
                last["end", 0] = seconds
            return last.get(("end", 0), seconds)

        return run(jobs, durations, launch, end)


def names(count: int) -> tuple[str, ...]:
    """Return ``worker-0`` to ``worker-N``, ``count`` names."""
    return tuple(f"worker-{number}" for number in range(count))


def repeated(groups: Jobs, jobs: int) -> Jobs:
    """Repeat the groups in order until there are ``jobs`` of them."""
    return (list(groups) * (jobs // len(groups) + 1))[:jobs]


def sequential(count: int, jobs: int) -> Jobs:
    """Return jobs on pairs of neighbours, each node in one pair."""
    return repeated(hostfiles.groups(names(count), 2, "sequential"), jobs)


def ring(count: int, jobs: int) -> Jobs:
    """Return jobs on pairs of neighbours around a ring."""
    return repeated(hostfiles.groups(names(count), 2, "ring"), jobs)


def random_pairs(count: int, jobs: int) -> Jobs:
    """Return jobs on pairs drawn at random, the same in every call."""
    chance = random.Random(2)  # noqa: S311
    return [tuple(chance.sample(names(count), 2)) for _ in range(jobs)]


def mixed(count: int, jobs: int) -> Jobs:
    """Return jobs on one to eight neighbours, drawn at random, at most all nodes."""
    chance, nodes = random.Random(3), names(count)  # noqa: S311
    sizes = [min(count, chance.choice((1, 2, 4, 8))) for _ in range(jobs)]
    firsts = [chance.randrange(count // size) * size for size in sizes]
    return [nodes[first : first + size] for first, size in zip(firsts, sizes, strict=True)]


def wide(count: int, jobs: int) -> Jobs:
    """Build single-node jobs, with a job of all nodes after each hundred."""
    nodes = names(count)
    return [nodes if number % 101 == 100 else (nodes[number % count],) for number in range(jobs)]


MIXES: dict[str, tuple[Callable[[int, int], Jobs], int]] = {
    "pairs, one after the other": (sequential, 1000),
    "ring of pairs": (ring, 1000),
    "random pairs": (random_pairs, 1000),
    "1, 2, 4 or 8 neighbours, shuffled": (mixed, 1000),
    "all nodes after each 100 single ones": (wide, 1000),
    "1, 2 or 4 of 4 nodes, shuffled": (mixed, 4),
}
HEAD = """\
| nodes | jobs | mix | ideal | overhead | without labctl's time | labctl, per job | overtaken at most |
|---|---|---|---|---|---|---|---|
"""


def row(nodes: int, jobs: Jobs, mix: str, outcome: Outcome, alone: Outcome) -> str:
    """Render a row of the table: overhead with labctl's costs and without, mean cost per job, and overtaken jobs."""
    mean = sum(outcome.costs.values()) / len(outcome.costs)
    return (
        f"| {nodes:,} | {len(jobs):,} | {mix} | {outcome.ideal / 3600:.1f} h | {100 * outcome.overhead:.1f} % | "
        f"{100 * alone.overhead:.1f} % | {1000 * mean:.0f} ms | {outcome.overtaken:,} of {AHEAD * nodes:,} |\n"
    )


def main() -> None:
    """Simulate the batches of the chosen mixes and print a table with the process's peak memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=600, help="that a job takes in the mean")
    parser.add_argument("--every", type=int, default=20, help="measure what labctl does for one in so many jobs")
    parser.add_argument("--only", default="", help="mixes whose name holds this text")
    options = parser.parse_args()
    sys.stdout.write(HEAD)
    for mix, (make, nodes) in MIXES.items():
        if options.only in mix:
            jobs = make(nodes, options.jobs)
            durations = durations_of(jobs, options.seconds)
            outcome = simulate(nodes, jobs, durations, options.every)
            sys.stdout.write(row(nodes, jobs, mix, outcome, run(jobs, durations)))
            sys.stdout.flush()
    sys.stdout.write(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB at most\n")


if __name__ == "__main__":
    main()
