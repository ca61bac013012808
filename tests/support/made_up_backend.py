# ruff: noqa: ARG002 - less is made up than a backend is asked
"""A made-up backend in one file: nodes are directories, and ranks are processes of this machine.

Registered by one row, ``BACKENDS["made-up"] = "support.made_up_backend"``. The process that launches a run is the agent
beside its ranks, so a detached run goes on in a thread of it, and only as long as it lives.
"""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from labctl import __version__, accelerators
from labctl.backends import Backend, OnLines, Replay, RunPlan, spec
from labctl.backends.devices import DeviceReport, HostDevices, NodeShare
from labctl.backends.finding import Finding, Receiver, ignore, ok
from labctl.backends.owner import owner
from labctl.backends.plan import Plan, Step, carry_out
from labctl.backends.status import LabStatus, NodeStatus
from labctl.backends.stopping import RunStopper, interrupts
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import ConfigError, Failures, HostError, raise_all
from labctl.hub import prefetch
from labctl.hub.report import CacheReport
from labctl.jobs import job as jobs
from labctl.jobs.request import RunOptions, build_job
from labctl.model import HERE, LAUNCHER, Cache, Cause, Hang, Job, Lab, Limits, Result, Workload
from labctl.records import outputs, store
from labctl.records.active import ActiveRun, Ended, LaunchError, Run
from labctl.records.crash import CrashWatch, judged
from labctl.records.lines import Line, line_of
from labctl.records.verdict import RunOutcome
from labctl.system import process
from labctl.system.process import CompletedProcess

if TYPE_CHECKING:
    from labctl.jobs.replay import ReplayedRun

BY_HAND = "edit the directories below .made-up"
UNSUPPORTED: Mapping[str, str] = {
    "render": BY_HAND,
    "devcontainer": BY_HAND,
    "build": "ranks have the programs of this machine",
    "clean": "labctl down",
    "keys rotate": "there is no ssh",
    "down --images": "there are no images",
    "jupyter": "start it on this machine",
    "bundle save": "tar",
    "cache --hosts": "all nodes have this machine's cache",
    "doctor --fix": BY_HAND,
    "doctor --node": "labctl doctor",
    "replay": "labctl run WORKLOAD",
    "freeze": "nodes are what this machine is",
    "verify": "nodes are what this machine is",
    "--wait": "leave it out: runs share nodes",
    "--retries": "leave it out: nodes are not lost",
}
NODES, PROJECT = ".made-up/nodes", ".made-up/project"
"""Directories of the nodes, and of the files that all nodes share; relative to the lab directory."""
LOG = "log"
LINKS = {"outputs": "runs/.outputs", "workloads": "workloads", "runs": "runs"}
SAMPLES = "seconds (s),cpu (%)\n1.0,50\n"


# --- runs: the part of an agent beside the ranks -----------------------------------------------------


class Ranks:
    """The ranks of an active run, the lines printed so far, and how they ended."""

    def __init__(self, run: Run, nodes: Path) -> None:
        """Start all ranks. LaunchError if one cannot be started."""
        job = run.job
        self.active = ActiveRun(
            id=run.run_id,
            nodes=tuple(node.name for node in job.nodes),
            state="running",
            order=time.time(),
            port=run.lab.master_port,
            owner=run.lab.owner,
        )
        self.ended: Ended | None = None
        self._job, self._nodes, self._began = job, nodes, time.monotonic()
        self._lines: list[Line] = []
        self._reason: tuple[Cause, str] | None = None
        self._changed = threading.Condition()
        self._placement = [(node.name, local) for node in job.nodes for local in range(node.slots)]
        directory = Path(job.directory)
        (directory / "samples").mkdir(exist_ok=True)
        for node in job.nodes:
            (directory / f"samples/{node.name}.csv").write_text(SAMPLES)
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, (name, local) in enumerate(self._placement):
                self._processes.append(self._start(rank, name, local, run.lab))
        except OSError as error:
            self._signal(signal.SIGKILL)
            raise LaunchError(f"{job.workload.script}: {error.strerror}") from error
        threading.Thread(target=self._supervise, daemon=True).start()

    def _start(self, rank: int, node: str, local: int, lab: Lab) -> subprocess.Popen[bytes]:
        """Start the process of a rank in the run's work folder; return it, its output a pipe."""
        job = self._job
        program, *rest = job.workload.program
        given = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self._placement)),
            "LOCAL_RANK": str(local),
            "MADE_UP_NODE": node,
            "LABCTL_RUN_DIR": job.directory,
            "PYTHONPATH": f"{lab.project_path}/workloads/common",
        }
        return subprocess.Popen(
            (sys.executable if program == "python" else program, *rest, *job.workload.arguments),
            cwd=Path(job.directory, jobs.WORK, job.workload.project.work if job.workload.project else ""),
            env={
                **os.environ,
                **dict(lab.environment),
                **given,
                **dict(job.environment),
                **dict(job.workload.environment),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _supervise(self) -> None:
        """Read the ranks' output until all have ended, or stop them at the time limit; then set ``ended``."""
        limit = threading.Timer(
            self._job.timeout, self.stop, (jobs.GRACE, f"no end within {self._job.timeout:g} s", "timeout")
        )
        limit.daemon = True
        limit.start()
        readers = [
            threading.Thread(target=self._read, args=(rank,), daemon=True) for rank in range(len(self._placement))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        limit.cancel()
        code = max(_code(child.wait()) for child in self._processes)
        cause, message = self._reason or (None, "")
        with self._changed:
            self.active = replace(self.active, state="ended")
            self.ended = Ended(
                code=code or int(cause is not None),
                cause=cause,
                message=message,
                seconds=time.monotonic() - self._began,
                at=time.time(),
            )
            self._changed.notify_all()

    def _read(self, rank: int) -> None:
        """Collect a rank's output, also in its log; stop the run with cause rank-crashed if it fails."""
        child, (node, _) = self._processes[rank], self._placement[rank]
        report = f"\x01{rank}!\x02labctl: rank {rank}"
        with Path(self._job.directory, f"ranks/rank-{rank}.log").open("wb") as log, child:
            self._keep(f"{report} of {len(self._placement)} on {node}")
            for line in child.stdout or ():
                log.write(line)
                log.flush()
                self._keep(f"\x01{rank}\x02{line.decode('utf-8', 'replace').rstrip()}")
            if code := _code(child.wait()):
                self._keep(f"{report} on {node} exited with code {code}")
                crash = f"rank {rank} on {node} exited with code {code}"
                threading.Thread(target=self.stop, args=(1, crash, "rank-crashed"), daemon=True).start()

    def _keep(self, text: str) -> None:
        """Append a line to the run's output and wake those who follow it."""
        with self._changed:
            self._lines.append(line_of(text, time.time()))
            self._changed.notify_all()

    def follow(self, on_lines: OnLines, given_up: Callable[[], bool] = bool) -> None:
        """Pass the run's lines to ``on_lines`` until its end or ``given_up``; an empty batch per silent second."""
        place = 0
        while not given_up():
            with self._changed:
                self._changed.wait_for(lambda: self.ended or len(self._lines) > place, 1)  # noqa: B023 - called at once
                fresh, over = self._lines[place:], self.ended
            on_lines(fresh)
            place += len(fresh)
            if over:
                return

    def stop(self, grace: float, message: str, cause: Cause = "interrupted") -> None:
        """Stop the ranks by SIGTERM, and SIGKILL after ``grace`` seconds; keep the first call's cause and message."""
        with self._changed:
            if self.ended:
                return
            self._reason = self._reason or (cause, message)
        self._signal(signal.SIGTERM)
        with self._changed:
            if not self._changed.wait_for(lambda: self.ended is not None, grace):
                self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Signal all processes of the run, including those that have left the session of their rank."""
        mark = f"LABCTL_RUN_ID={self._job.run_id}".encode()
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in environ.read_bytes().split(b"\0"):
                    os.kill(int(environ.parent.name), number)


def _code(returned: int) -> int:
    """Convert Popen's exit code to a shell's: 128+N for signal N."""
    return 128 - returned if returned < 0 else returned


RUNS: defaultdict[Path, dict[str, Ranks]] = defaultdict(dict)
"""Runs that this process follows, by lab directory."""


def lose_nodes(directory: Path) -> None:
    """Remove all nodes' directories, kill the ranks of all runs and forget the runs."""
    shutil.rmtree(directory / NODES)
    for ranks in RUNS.pop(directory, {}).values():
        ranks.stop(0, "")


class Stopper(RunStopper):
    """Ends the ranks of a followed run on request, for example on Ctrl-C."""

    def __init__(self, lab: Lab, job: Job, ranks: Ranks) -> None:
        super().__init__(lab, job)
        self._ranks = ranks

    def end(self, grace: float) -> None:
        """Stop the ranks with this grace period."""
        self._ranks.stop(grace, self.message, self.cause or "interrupted")


# --- steps ---------------------------------------------------------------------------------------------------


@dataclass
class Deployment:
    """The lab directory in which steps make and remove nodes."""

    context: Context

    def host_of(self, error: HostError) -> str:
        """Return the node that an error names, or this machine."""
        return error.node or HERE

    @property
    def nodes(self) -> Path:
        return self.context.directory / NODES


class MakeNode(Step, frozen=True, kw_only=True):
    """Step that makes the directory of a node."""

    node: str

    def __str__(self) -> str:
        return f"make {NODES}/{self.node}"

    def do(self, deployment: Deployment) -> None:
        """Create the node's directory with a log, and the lab's links to the shared files where they are missing."""
        path = deployment.nodes / self.node
        path.mkdir(parents=True)
        (path / LOG).write_text("it listens\n")
        project = deployment.context.directory / PROJECT
        project.mkdir(exist_ok=True)
        for name, target in LINKS.items():
            source = deployment.context.directory / target
            source.mkdir(parents=True, exist_ok=True)
            if not (project / name).is_symlink():
                (project / name).symlink_to(source)


class RemoveNode(Step, frozen=True, kw_only=True):
    """Step that removes the directory of a node."""

    node: str

    def __str__(self) -> str:
        return f"remove {NODES}/{self.node}"

    def do(self, deployment: Deployment) -> None:
        """Remove the directory; ignore a missing one."""
        shutil.rmtree(deployment.nodes / self.node, ignore_errors=True)


# --- the backend ---------------------------------------------------------------------------------------------


def settings_for(context: Context, settings: Settings, workload: Workload) -> Settings:
    """Return the settings unchanged: ranks use the programs of this machine, whatever the workload."""
    return settings


@contextmanager
def connect(context: Context, settings: Settings, **options: Any) -> Iterator[Backend]:
    """Open the backend; there is nothing to connect."""
    yield MadeUpBackend(context, settings)


class MadeUpBackend:
    """A lab whose nodes are directories below the lab directory."""

    name = "made-up"

    def __init__(self, context: Context, settings: Settings) -> None:
        self.context, self.settings = context, settings

    @property
    def _runs(self) -> dict[str, Ranks]:
        return RUNS[self.context.directory]

    @property
    def _nodes(self) -> Path:
        return self.context.directory / NODES

    def _made(self) -> tuple[str, ...]:
        """List the existing nodes, the launcher first."""
        names = [path.name for path in self._nodes.glob("*")]
        return tuple(sorted(names, key=lambda name: (name != LAUNCHER, len(name), name)))

    def _place(self, node: str) -> Path:
        """Return the directory of a node. HostError if it does not exist."""
        if node not in self._made():
            raise HostError(f"{node} is not up", hint="labctl up", node=node)
        return self._nodes / node

    def _ranks(self, run_id: str) -> Ranks:
        """Return the ranks of a run. HostError if they do not exist."""
        if run_id not in self._runs:
            raise HostError(f"run {run_id} is not known to its nodes", hint="labctl runs")
        return self._runs[run_id]

    def with_context(self, context: Context) -> MadeUpBackend:
        """Return a copy that reports to another context."""
        other = copy.copy(self)
        other.context = context
        return other

    # --- the lab ---

    def lab(self) -> Lab:
        """Return the lab with its nodes on this machine, which see their files below one directory."""
        directory = self.context.directory
        settings = self.settings.with_value("PROJECT_PATH", str(directory / PROJECT), "made up")
        accelerator, host = accelerators.observe("cpu")
        return spec.build(settings, directory, accelerator, (host,), Limits(), image="none", owner=owner())

    def status(self) -> LabStatus:
        """Report each existing node as running, and the lab as up, partial or down."""
        lab, made = self.lab(), self._made()
        slots = {node.name: node.slots for node in lab.nodes}
        nodes = tuple(
            NodeStatus(
                name=name,
                role="launcher" if name == LAUNCHER else "worker",
                host=HERE,
                state="running",
                slots=slots.get(name, 0),
            )
            for name in made
        )
        state = "up" if made == lab.containers else "partial" if made else "down"
        return LabStatus(lab=lab.name, state=state, nodes=nodes, unreachable=())

    def unusable(self, slots: int = 0) -> Mapping[str, str]:
        """Return {}: every node is usable."""
        return {}

    def devices(self) -> DeviceReport:
        """Report this machine's cores, and which of them each node has; no devices are made up."""
        lab = self.lab()
        host = lab.hosts[0]
        shares = tuple(
            NodeShare(name=node.name, slots=node.slots, cpus=node.cpuset or host.cpus, devices=()) for node in lab.nodes
        )
        return DeviceReport((
            HostDevices(
                name=host.name,
                accelerator=lab.accelerator,
                reason="the only kind that is made up",
                cpus=host.cpus,
                numa=host.numa,
                memory=host.memory,
                devices=(),
                drivers={},
                groups=(),
                infiniband=(),
                fabrics=(),
                nodes=shares,
                warnings=(),
            ),
        ))  # fmt: skip

    def findings(self, node: str = "", receive: Receiver = ignore) -> tuple[Finding, ...]:
        """Return one finding, which is always ok."""
        findings = (ok("LAB-MADE-001", f"{self.context.directory} is there"),)
        receive(findings)
        return findings

    def plan_prepare(self, *, preview: bool = False) -> Plan:
        """Return an empty plan: nodes have no images."""
        return Plan()

    def plan_up(self, *, preview: bool = False) -> Plan:
        """Plan to make missing nodes, and to remove those that the settings do not have."""
        made, needed = self._made(), self.lab().containers
        removed = (RemoveNode(node=name, cause="not in the settings") for name in made if name not in needed)
        missing = (MakeNode(node=name, cause="labctl up") for name in needed if name not in made)
        return Plan((*removed, *missing))

    def plan_down(self, *, images: bool = False, state: str = "", preview: bool = False) -> Plan:
        """Plan the removal of all nodes."""
        return Plan(tuple(RemoveNode(node=name, cause="labctl down") for name in self._made()))

    def carry_out(self, plan: Plan) -> None:
        """Carry out a plan; raise the failures of its steps."""
        raise_all(carry_out(plan.steps, Deployment(self.context)))

    def under_way(self) -> tuple[str, ...]:
        """Return ``run ID`` for each run that is running, not for those that have ended."""
        return tuple(f"run {run.id}" for run in self.active().values() if run.state == "running")

    def require_idle(self) -> None:
        """Raise HostError if a run is active."""
        if runs := self.under_way():
            raise HostError(f"{'; '.join(runs)} is under way", hint="labctl stop")

    def fill(self, workload: str, wanted: Cache, *, hosts: bool, preview: bool) -> CacheReport:
        """Download models and datasets into this machine's cache; in a preview, only list them."""
        hub = prefetch.connect(self.settings, self.context.environ)
        items = prefetch.fetch(self.context, hub, wanted, dry_run=preview)
        return CacheReport(workload=workload, cache=self.settings.text("HOST_CACHE_PATH"), items=items, seconds=0)

    def typed(self, host: str, command: str) -> str:
        """Return the command itself: this machine is the only host."""
        return command

    def on_hosts(
        self, script: str, arguments: tuple[str, ...], seconds: float, hosts: Collection[str] = ()
    ) -> tuple[Mapping[str, CompletedProcess], Failures]:
        """Run a script in bash on this machine; return its result, or its HostError as a failure."""
        try:
            return {HERE: process.run(("bash", "-c", script, "bash", *arguments), timeout=seconds, check=False)}, {}
        except HostError as error:
            return {}, {HERE: error}

    def remains(self) -> tuple[tuple[str, ...], Failures]:
        """Describe the nodes and the active runs."""
        return (*(f"node {name}" for name in self._made()), *self.under_way()), {}

    def versions(self) -> dict[str, str]:
        """Return the versions of labctl and of the made-up engine, as ``labctl`` and ``engine``."""
        return {"labctl": __version__, "engine": "made-up 1"}

    def freeze(self) -> dict[str, Any]:
        """Raise ConfigError: nodes share this machine's devices and programs, so `freeze` is not supported."""
        raise ConfigError("freeze is not supported", hint=UNSUPPORTED["freeze"])

    def not_replayable(self, recorded: ReplayedRun) -> Iterator[str]:
        """Yield one reason: made-up runs are not replayed."""
        yield "made-up runs are not replayed"

    # --- nodes ---

    def exec(self, run: Run, node: str, argv: tuple[str, ...], *, limit: float) -> CompletedProcess:
        """Run a short program in the directory of a node."""
        return process.run(("env", "-C", str(self._place(node)), *argv), timeout=limit, check=False)

    def attach(
        self, nodes: tuple[str, ...], command: tuple[str, ...], *, stdin: Literal["terminal", "pipe"], prompt: bool
    ) -> int:
        """Run a command in each of these nodes, or of all workers, one by one; return the largest exit code."""
        chosen = nodes or tuple(node.name for node in self.lab().nodes)
        return max(process.attached(("env", "-C", str(self._place(node)), *command), lambda _: None) for node in chosen)

    def logs(self, node: str | None, on_line: Callable[[str], None], *, follow: bool, colors: bool) -> None:
        """Pass the present log lines of one or all nodes to ``on_line``, with the node's name in front."""
        for name in (node,) if node else self._made():
            for line in (self._place(name) / LOG).read_text().splitlines():
                on_line(f"{name}  | {line}")

    # --- runs ---

    def begin(self, workload: Workload, options: RunOptions, now: datetime, replayed: Replay | None = None) -> Run:
        """Build a Run with its job on the lab's nodes; record and start nothing."""
        lab = self.lab()
        return Run(lab=lab, job=build_job(lab, workload, options, now, self.context.warn))

    def observe(self, run: Run, *, preview: bool = False) -> Run:
        """Return the run unchanged: nothing about its nodes needs resolving."""
        return run

    def needs_up(self, run: Run) -> bool:
        """Return False: nodes have no images."""
        return False

    def confirm_image(self, run: Run, ask: Callable[[str], bool] | None, *, preview: bool = False) -> None:
        """Do nothing: nodes have no images."""

    def require_launcher(self, workload: Workload) -> None:
        """Raise HostError if the launcher's node does not exist."""
        self._place(LAUNCHER)

    def require_ready(self, run: Run, options: RunOptions, *, preview: bool = False) -> None:
        """Raise HostError if a node of the run is missing; warn in a preview."""
        if missing := [name for name in run.job.containers if name not in self._made()]:
            error = HostError(f"{missing[0]} is not up", hint="labctl up", node=missing[0])
            if not preview:
                raise error
            self.context.warn(error.message)

    def plan_run(self, run: Run, *, ended: Collection[str] = (), preview: bool = False) -> RunPlan:
        """Plan a run that starts its script once per rank."""
        versions = {} if preview else store.versions(run.lab, self.versions(), None)
        return RunPlan(
            record=store.record(run.lab, self.settings, run.job, versions, preview=preview),
            launch=f"run {run.job.workload.script} once per rank, at most {run.job.timeout:g} s",
            collect=f"move runs/.outputs/{run.run_id} to runs",
        )

    def carry_out_steps(self, run: Run, steps: tuple[Step, ...], *, before: int, after: int) -> None:
        """Carry out steps of a run's plan."""
        raise_all(carry_out(steps, Deployment(self.context), before=before, after=after))

    def start(self, run: Run, options: RunOptions) -> None:
        """Start a run's ranks and keep them under the run's id."""
        self._runs[run.run_id] = Ranks(run, self._nodes)

    def supervise(
        self,
        run: Run,
        keep: Callable[[Sequence[Line]], Sequence[Line]],
        options: RunOptions | None = None,
        *,
        age: float = 0,
    ) -> RunOutcome:
        """Launch a run, or without ``options`` follow one launched before, until its end; return how it ended."""
        if options:
            self.start(run, options)
        ranks, watch = self._ranks(run.run_id), CrashWatch(run.lab, run.job)
        stop = Stopper(run.lab, run.job, ranks)
        with ExitStack() as held:
            if options:
                held.enter_context(interrupts(stop, self.context.notice))
                # A run whose lines cannot be written is no longer followed, so stop it.
                held.callback(ranks.stop, jobs.GRACE, "nothing follows it any more")
            ranks.follow(lambda lines: watch.look_at(keep(lines)))
        stop.close()
        return outcome(run, ranks.ended or Ended(code=1, lost=True), watch)

    def output(self, run: Run, on_lines: OnLines, given_up: Callable[[], bool] = bool) -> None:
        """Pass a run's lines, from the first to its end, to ``on_lines``."""
        self._ranks(run.run_id).follow(on_lines, given_up)

    def log(self, run_id: str, on_lines: OnLines) -> bool:
        """Return False: the record has the lines of a followed run."""
        return False

    def recorded(self, run_id: str) -> Run:
        """Build a run from its recorded job and the current lab."""
        return Run(lab=self.lab(), job=store.load_job(self.context.directory, run_id))

    def active(self) -> Mapping[str, ActiveRun]:
        """Return the runs that this process has started, also ended ones, by id."""
        return {run_id: ranks.active for run_id, ranks in self._runs.items()}

    def sharing_losses(self) -> AbstractContextManager[object]:
        """Do nothing: nodes are not watched."""
        return nullcontext()

    def stop(self, run: Run, grace: float, message: str) -> None:
        """Stop a run. HostError if it is not running."""
        ranks = self._ranks(run.run_id)
        if ranks.ended:
            raise HostError(f"run {run.run_id} has ended", hint=f"labctl show {run.run_id}")
        ranks.stop(grace, message)

    def look(self, run: Run) -> Hang:
        """Tell nothing of ranks. HostError if the run is not running."""
        if self._ranks(run.run_id).ended:
            raise HostError(f"run {run.run_id} is not running", hint=f"labctl show {run.run_id}")
        return Hang(kind="unknown", sentence="nothing is known of its ranks")

    def leaves_processes(self, run_id: str) -> bool:
        """Return True: only labctl ends the ranks of a run."""
        return True

    def end(self, run_id: str) -> None:
        """Kill the remaining processes of a run and forget it; do nothing if it is unknown."""
        if ranks := self._runs.pop(run_id, None):
            ranks.stop(0, "")

    def collect(self, run_id: str) -> None:
        """Move the files that ranks wrote into the record."""
        directory = self.context.directory
        outputs.move(store.outputs(directory, run_id), store.directory(directory, run_id))

    def evidence(self, run: Run, since: float) -> dict[str, str]:
        """Return one file, ``nodes.txt``, with the names of the nodes."""
        return {"nodes.txt": "\n".join(self._made())}

    def forget(self, run: Run) -> None:
        """Remove a run from this process's runs; its processes are not ended."""
        self._runs.pop(run.run_id, None)

    def without_lost(self, options: RunOptions, ended: Result, error: HostError) -> RunOptions:
        """Raise ``error``: a run is never repeated without lost nodes."""
        raise error


def outcome(run: Run, ended: Ended, watch: CrashWatch) -> RunOutcome:
    """Return how a run ended; for a crash, the last line of the rank that failed first."""
    cause, message = judged(ended, watch)
    return RunOutcome(
        exit_code=ended.code,
        cause=cause,
        message=store.redact(message, run.lab.hidden),
        silent=watch.is_silent,
        gave_up=store.redact(watch.gave_up(), run.lab.hidden),
        seconds=ended.seconds,
    )
