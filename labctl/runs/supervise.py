"""A run under watch: streams its output, stops it for a reason, and leaves nothing of it in any container."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from labctl import model, naming
from labctl.engines import Backend, agent
from labctl.engines.state import lost
from labctl.errors import HostError
from labctl.model import Cause, Job, Lab
from labctl.system import filelock

REPORTED = re.compile(r"labctl: (rank \d+) on (\S+) exited with code (\d+)")
# What DeepSpeed's launcher says on the node where a rank failed; deepspeed/launcher/launch.py.
DEEPSPEED_REPORTED = re.compile(r"^(\S+): .*\[launch\.py:.* exits with return code = (-?\d+)")
# Who said a line, as pdsh marks it (`worker-0: `), Open MPI (`[1,0]<stdout>:`) or Horovod (`[0]<stderr>:`).
SPEAKER = re.compile(r"(?:\[(?:\d+,)?(\d+)\](?:<std\w+>:)? ?|(\S+): )(.*)")
# What is said about a rank, not by it.
REMARK = re.compile(r"labctl: |.*\[launch\.py:")
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|can't allocate memory", re.IGNORECASE)
# The last words of a rank that failed because another was gone, as gloo, torch's store, NCCL and Horovod put it.
PEER_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection was likely closed|remote process exit|ncclRemoteError"
    r"|HorovodInternalError",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A rank that failed: where, the exit code of its process, and the last line that it said."""

    who: str
    node: str
    code: int
    words: str
    cause: Literal["rank-crashed", "out-of-memory"]

    def __str__(self) -> str:
        said = f": {self.words}" if self.words else ""
        return f"{self.who} on {self.node} exited with code {self.code}{signal_name(self.code)}{said}"

    @property
    def follows(self) -> bool:
        """Whether it failed because another had."""
        return bool(PEER_LOST.search(self.words))


class RankFailureDetector:
    """The crash that explains a run: the first that is reported, unless a later one was not of a lost peer.

    The ranks of a script that starts them itself report nothing; there it is DeepSpeed that says so.
    """

    def __init__(self, *, starts_itself: bool = False) -> None:
        self._starts_itself = starts_itself
        self._memory = False
        self._last: dict[str, str] = {}
        self.reason: RankFailure | None = None

    def look_at(self, line: str) -> None:
        self._memory = self._memory or bool(OUT_OF_MEMORY.search(line))
        if crash := self._crash_in(line):
            if self.reason is None or (self.reason.follows and not crash.follows):
                self.reason = crash
            return
        speaker = SPEAKER.match(line)
        if speaker and speaker[3].strip() and not REMARK.match(speaker[3]):
            self._last[speaker[2] or f"rank {speaker[1]}"] = speaker[3].strip()

    def _crash_in(self, line: str) -> RankFailure | None:
        if reported := REPORTED.search(line):
            return self._crash(reported[1], reported[2], int(reported[3]))
        if self._starts_itself and (reported := DEEPSPEED_REPORTED.search(line)):
            code = int(reported[2])
            return self._crash("a rank", reported[1], code if code > 0 else 128 - code)
        return None

    def _crash(self, who: str, node: str, code: int) -> RankFailure:
        words = self._last.get(node) or self._last.get(who) or ""
        return RankFailure(who, node, code, words, "out-of-memory" if self._memory else "rank-crashed")


def signal_name(code: int) -> str:
    """What a shell's exit code above 128 means."""
    with contextlib.suppress(ValueError):
        return f" ({signal.Signals(code - 128).name})" if code > 128 else ""
    return ""


# Seconds between asking a run's processes to end and ending them.
GRACE = 5
# The limit inside the launcher comes first; the one out here covers a launcher that does not answer.
WATCHDOG_DELAY = 1
# A rank that failed has this long to bring the others down in its own way, with its own words.
CRASH_GRACE = 5

# How a run ends when its ranks notice that a device is gone before the node's health check does.
SYMPTOMS: tuple[Cause | None, ...] = (None, "rank-crashed", "launcher-failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended: the launcher's exit code, and the cause where it was not its own end."""

    exit_code: int
    cause: Cause | None
    message: str


class RunStopper:
    """The first reason to stop a run wins; giving it ends the run's processes in every container."""

    def __init__(self, lab: Lab, job: Job, engine: Backend) -> None:
        self._lab, self._job, self._engine = lab, job, engine
        # Taken again by a signal handler that interrupts the main thread within it.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self.cause: Cause | None = None
        self.message = ""

    def because(self, cause: Cause, message: str) -> None:
        """Note the reason and begin to end the run; later reasons are ignored."""
        with self._lock:
            if self.cause is None:
                self.cause, self.message = cause, message
                self._thread = threading.Thread(target=self.reap, daemon=True)
                self._thread.start()

    def reap(self, grace: float = GRACE) -> list[str]:
        """End what is left of the run, in all containers at once; returns what could not be ended, as text."""
        return agent.reap(self._lab, self._engine, self._job.run_id, grace)

    def wait(self) -> None:
        if self._thread:
            self._thread.join()


def supervise(lab: Lab, job: Job, engine: Backend, on_line: Callable[[str], None]) -> RunOutcome:
    """Run the job's command in the launcher until it ends or is stopped; afterwards no process of it is left."""
    stop = RunStopper(lab, job, engine)
    began = time.monotonic()
    with watchdog(stop, job.timeout), node_losses(stop, lab, job, engine), interrupts(stop):
        try:
            exit_code = follow(lab, job, engine, stop, on_line)
        except HostError as error:
            exit_code = 1
            stop.because("launcher-failed", error.message)
        finally:
            stop.wait()
            left = stop.reap(grace=1)
        if exit_code != 0 and stop.cause is None:
            stop.cause, stop.message = explain(exit_code, time.monotonic() - began, lab, job, engine)
        if exit_code != 0 and stop.cause in SYMPTOMS:
            look_at_devices(stop, lab, job, engine)
    if left:
        stop.cause = stop.cause or "launcher-failed"
        stop.message = "; ".join((stop.message, "processes that cannot be ended: " + ", ".join(left))).lstrip("; ")
    return RunOutcome(exit_code=exit_code, cause=stop.cause, message=stop.message)


def follow(lab: Lab, job: Job, engine: Backend, stop: RunStopper, on_line: Callable[[str], None]) -> int:
    """Stream the command's output to its end; returns its exit code."""
    crash = CrashWatch(stop, starts_itself=job.launcher == "script")

    def look_at(line: str) -> None:
        on_line(line)
        crash.look_at(line)

    try:
        return engine.stream(
            naming.container_name(lab, model.LAUNCHER),
            ("timeout", f"--kill-after={GRACE}", f"{job.timeout:g}", *job.argv),
            look_at,
            user=agent.user(lab),
            workdir=job.directory,
            environment=job.environment,
            limit=job.timeout + 10 * GRACE,
        )
    finally:
        crash.close()


class CrashWatch:
    """Notices a rank that fails, and stops the run if the others do not end by themselves."""

    def __init__(self, stop: RunStopper, *, starts_itself: bool = False) -> None:
        self._stop = stop
        self._crashes = RankFailureDetector(starts_itself=starts_itself)
        self._timer: threading.Timer | None = None

    def look_at(self, line: str) -> None:
        self._crashes.look_at(line)
        if self._crashes.reason and not self._timer:
            self._timer = threading.Timer(CRASH_GRACE, self._tell)
            self._timer.daemon = True
            self._timer.start()

    def _tell(self) -> None:
        if reason := self._crashes.reason:
            self._stop.because(reason.cause, str(reason))

    def close(self) -> None:
        """At the end of the output: the reason stands even when the others ended by themselves."""
        if self._timer:
            self._timer.cancel()
        self._tell()


def explain(exit_code: int, seconds: float, lab: Lab, job: Job, engine: Backend) -> tuple[Cause | None, str]:
    """The cause of a failure that no watcher named: a container that is gone, or the limit inside the launcher."""
    observed = engine.observe(lab.name)
    for name in (model.LAUNCHER, *(node.name for node in job.nodes)):
        container = observed.container(name)
        if container is None or container.state != "running":
            return "node-lost", f"{describe_node(name, job)}: container {container.state if container else 'gone'}"
    if exit_code in (124, 137) and seconds >= job.timeout:
        return "timeout", f"not done after {job.timeout:g} s"
    return None, ""


def look_at_devices(stop: RunStopper, lab: Lab, job: Job, engine: Backend) -> None:
    """Name the device that is lost as the cause, where one is; what the run said of it stands behind."""
    names = tuple(node.name for node in job.nodes if node.devices.devices)
    for name, reason in agent.unhealthy(lab, engine, names).items():
        if lost(reason) == "device-lost":
            said = f" ({stop.message})" if stop.message else ""
            stop.cause, stop.message = "device-lost", f"{describe_node(name, job)}: {reason}{said}"
            return


def describe_node(name: str, job: Job) -> str:
    """A node with the ranks that it carries, as ``worker-1 (rank 1)``."""
    first = 0
    for node in job.nodes:
        if node.name == name:
            last = first + node.slots - 1
            return f"{name} (rank {first})" if first == last else f"{name} (ranks {first} to {last})"
        first += node.slots
    return name


@contextlib.contextmanager
def watchdog(stop: RunStopper, timeout: float) -> Iterator[None]:
    """Stop the run from outside when its time is up."""
    message = f"not done after {timeout:g} s"
    timer = threading.Timer(timeout + WATCHDOG_DELAY, stop.because, ("timeout", message))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def node_losses(stop: RunStopper, lab: Lab, job: Job, engine: Backend) -> Iterator[None]:
    """Stop the run when a container that it runs on dies, or its node is lost to it."""
    concerned = {model.LAUNCHER, *(node.name for node in job.nodes)}

    def watch() -> None:
        with contextlib.suppress(Exception):
            for node, cause, what in engine.events(lab.name):
                if node in concerned and not over.is_set():
                    stop.because(cause, f"{describe_node(node, job)}: {what}{by_whom(lab)}")

    over = threading.Event()
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        # The way to a host that ends from now on ends with the command.
        over.set()


def by_whom(lab: Lab) -> str:
    """Who is changing the lab just now, if somebody is."""
    path = lab.directory / filelock.LAB
    return f" during {filelock.holder(path)}" if filelock.is_held(path) else ""


@contextlib.contextmanager
def interrupts(stop: RunStopper) -> Iterator[None]:
    """Ctrl-C, TERM and a closed terminal stop the run; a second Ctrl-C does not wait for its grace."""

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if stop.cause == "interrupted":
            threading.Thread(target=stop.reap, args=(0,), daemon=True).start()
        stop.because("interrupted", f"stopped by {signal.Signals(number).name}")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
