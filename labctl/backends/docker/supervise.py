"""Follows a run, which the agent in the launcher supervises, and stops it on failure or timeout.

The run goes on if the connection to it breaks: what it printed is read on from where that was.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from msgspec import Struct
from msgspec.structs import replace

from labctl import accelerators, launchers
from labctl.backends.docker import agent
from labctl.backends.docker.engine import Backend
from labctl.backends.docker.events import Losses
from labctl.backends.state import lost, paused
from labctl.errors import HostError
from labctl.jobs.job import GRACE, limited
from labctl.model import LAUNCHER, Cause, Job, Lab
from labctl.records import last_words, metrics, store
from labctl.records.active import Ended, LaunchError
from labctl.records.lines import Line
from labctl.records.verdict import RunOutcome
from labctl.system import filelock

REPORTED = re.compile(r"labctl: (rank \d+) on (\S+) exited with code (\d+)")
# Printed by DeepSpeed's launcher on the node of a failed rank; deepspeed/launcher/launch.py.
DEEPSPEED_REPORTED = re.compile(r"^(\S+): .*\[launch\.py:.* exits with return code = (-?\d+)")
# The rank or node of a line, as marked by pdsh (`worker-0: `), Open MPI (`[1,0]<stdout>:`) or Horovod (`[0]<stderr>:`).
SPEAKER = re.compile(r"(?:\[(?:\d+,)?(\d+)\](?:<std\w+>:)? ?|(\S+): )(.*)")
OUT_OF_MEMORY = r"out of memory|OutOfMemoryError|can(?:'t|not) allocate memory|\bMemoryError\b|bad_alloc"
# Printed by rank.sh.
OUT_OF_HOST_MEMORY = re.compile(r"labctl: (\S+) (ran out of memory: .*)$")
# Errors of gloo, torch's store, NCCL and Horovod in a rank that lost its peer.
PEER_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection was likely closed|remote process exit|ncclRemoteError"
    r"|HorovodInternalError",
    re.IGNORECASE,
)


class RankFailure(Struct, frozen=True):
    """A failed rank: its node, the exit code of its process, and its last words."""

    who: str
    node: str
    code: int
    words: str
    cause: Cause

    def __str__(self) -> str:
        if not self.words:
            return self.ended
        return f"{self.ended}{': ' if last_words.is_error(self.words) else '; the last it wrote: '}{self.words}"

    @property
    def ended(self) -> str:
        return f"{self.who} on {self.node} exited with code {self.code}{signal_name(self.code)}"

    @property
    def follows(self) -> bool:
        """Whether it failed because another rank had."""
        return bool(PEER_LOST.search(self.words))


def signal_name(code: int) -> str:
    """The signal of a shell's exit code above 128."""
    with contextlib.suppress(ValueError):
        return f" ({signal.Signals(code - 128).name})" if code > 128 else ""
    return ""


SILENT = "no rank wrote a line"
# Other ranks that a message names.
SHOWN = 4
# Seconds until an agent is asked again to end a run, which it may be about to begin.
ASK_AGAIN = 0.5
# Causes that may hide a lost device, which ranks notice before the node's health check.
SYMPTOMS: tuple[Cause | None, ...] = (None, "rank-crashed", "launcher-failed")


class RunStopper:
    """Has the agent end a run, for the first reason given."""

    def __init__(self, lab: Lab, job: Job, engine: Backend) -> None:
        self.lab, self.job, self._engine = lab, job, engine
        # Reentrant: a signal handler may interrupt the main thread while it holds the lock.
        self._lock = threading.RLock()
        self._over = threading.Event()
        self.cause: Cause | None = None
        self.message = ""
        self.asked = threading.Event()
        """Set by Ctrl-C."""
        self.gone: dict[str, str] = {}
        """Nodes that the run has lost and goes on without, and how."""

    def note(self, cause: Cause, message: str) -> bool:
        """Whether this is the first reason."""
        with self._lock:
            if self.cause is not None or self._over.is_set():
                return False
            self.cause, self.message = cause, message
            return True

    def because(self, cause: Cause, message: str) -> None:
        """Stop the run for this reason; later ones are ignored."""
        with self._lock:
            if self.note(cause, message):
                threading.Thread(target=self.end, args=(GRACE,), daemon=True).start()

    def end(self, grace: float) -> None:
        """End the run: TERM, and KILL after so many seconds."""
        cause = self.cause or "interrupted"
        while not self._over.is_set():
            with contextlib.suppress(HostError):
                return agent.stop(self.lab, self._engine, self.job.run_id, grace, self.message, cause)
            self._over.wait(ASK_AGAIN)
        return None

    def close(self) -> None:
        """Take no reason any more: the run has ended."""
        self._over.set()


def launch_of(
    lab: Lab, job: Job, *, patience: float = 120, stall: float = 0, detach: bool = False, wait: bool = False
) -> agent.Launch:
    """A job as the agent is given it."""
    return agent.Launch(
        id=job.run_id,
        nodes=tuple(node.name for node in job.nodes),
        argv=limited(job),
        environment=dict(job.environment),
        directory=job.directory,
        launcher=job.workload.launcher,
        limit=job.timeout,
        patience=patience,
        stall=stall,
        port=lab.master_port,
        ssh_port=lab.ssh_port,
        owner=lab.owner,
        needed=launchers.needed(job.workload.launcher, tuple(node.name for node in job.nodes)),
        elastic=launchers.is_elastic(job.workload.launcher),
        wait=wait,
        follow=not detach,
    )


def supervise(
    lab: Lab,
    job: Job,
    engine: Backend,
    keep: Callable[[Sequence[Line]], Sequence[Line]],
    launch: agent.Launch | None = None,
    *,
    losses: Losses | None = None,
    age: float = 0,
    notice: Callable[[str], object] = len,
) -> RunOutcome:
    """Launch a run, or follow one that was launched before, to its end.

    A run that is launched here ends with Ctrl-C. ``keep`` gets lines as they come and returns them redacted,
    ``losses`` are those of the lab's nodes, where others listen to them, too; ``notice`` gets a line for a connection
    that breaks; ``age``: seconds that the run has lasted already. RecordError where a line cannot be written, HostError
    where the connection to the run is lost, which then goes on.
    """
    stop, watch = RunStopper(lab, job, engine), CrashWatch(lab, job)
    began = time.monotonic() - age
    with contextlib.ExitStack() as watchers:
        watchers.enter_context(node_losses(stop, lab, job, losses or Losses(engine, lab.name), notice))
        if launch:
            watchers.enter_context(interrupts(stop))
        try:
            ended = follow(lab, job, engine, stop, watch, keep, launch, notice)
        except LaunchError as error:
            ended = Ended(code=1, lost=True)
            stop.note("launcher-failed", error.message)
        stop.close()
        left = end_left(stop, ended, time.monotonic() - began, engine, notice)
        if ended.code != 0 and stop.cause is None:
            ended = ended if ended.seconds else replace(ended, seconds=time.monotonic() - began)
            stop.cause, stop.message = explain(ended, lab, job, engine)
        if ended.code != 0 and stop.cause in SYMPTOMS:
            look_at_devices(stop, lab, job, engine)
    silence = watch.silence()
    if stop.cause == "timeout" and silence:
        stop.message += f"; {silence}"
    if left:
        stop.cause = stop.cause or "launcher-failed"
        stop.message = "; ".join((stop.message, "could not kill: " + ", ".join(left))).lstrip("; ")
    message = store.redact(stop.message, lab.hidden)
    return RunOutcome(
        exit_code=ended.code,
        cause=stop.cause,
        message=message,
        silent=silence == SILENT,
        seconds=ended.seconds,
        gone=tuple(stop.gone.values()),
    )


def end_left(
    stop: RunStopper, ended: Ended, lasted: float, engine: Backend, notice: Callable[[str], object]
) -> list[str]:
    """End by Docker what an agent that was lost, or did not reach a node, has left; returns what stays, as text."""
    lab, job = stop.lab, stop.job

    def reap(nodes: tuple[str, ...]) -> list[str]:
        return agent.reap(lab, engine, job.run_id, 1, nodes=nodes, lasted=lasted, launcher=job.workload.launcher)

    back = wait_for_hosts(stop, lab, engine, notice)
    gone = tuple(name for name in stop.gone if ended.lost or name in ended.left)
    if gone:
        # One that was cut off may have ranks still; one that cannot be asked is no news.
        reap(gone)
    if not ended.lost and not set(ended.left) - {*stop.gone}:
        return []
    nodes = tuple(node.name for node in job.nodes if node.name not in stop.gone)
    left = reap(nodes)
    return reap(nodes) if left and back and wait_for_hosts(stop, lab, engine, notice) else left


def wait_for_hosts(stop: RunStopper, lab: Lab, engine: Backend, notice: Callable[[str], object]) -> bool:
    """Connect again to the hosts of a run that has ended, which have its files, until one does not come back.

    Not where it had lost a node, and not after Ctrl-C.
    """
    if stop.cause == "node-lost":
        return False
    deadline, noticed = time.monotonic() + agent.PATIENCE, False
    for node in (node.name for node in stop.job.nodes if node.name not in stop.gone):
        while lost := agent.reconnect(lab, engine, node):
            if time.monotonic() > deadline or stop.asked.wait(1):
                return False
            if not noticed:
                notice(f"{lost.message}; the run has ended, and labctl tries for {agent.PATIENCE} s to connect again")
            noticed = True
    return True


def follow(
    lab: Lab,
    job: Job,
    engine: Backend,
    stop: RunStopper,
    watch: CrashWatch,
    keep: Callable[[Sequence[Line]], Sequence[Line]],
    launch: agent.Launch | None,
    notice: Callable[[str], object],
) -> Ended:
    """Follow the run to its end, over another connection where one breaks. HostError where that does not come back."""

    def look(lines: Sequence[Line]) -> None:
        watch.look_at(keep(lines))

    follower = agent.Follower(look, notice, lambda: stop.cause in ("interrupted", "node-lost"))
    try:
        ended = agent.follow(lab, engine, job.run_id, follower, launch)
    except (store.RecordError, KeyboardInterrupt):
        if launch:
            end_unrecorded(lab, job, engine, follower.place)
        raise
    watch.now = ended.at or watch.now
    cause, message = judged(ended, watch)
    if cause:
        stop.note(cause, message)
    if stop.cause == "stalled" and (which := paused_nodes(lab, job, engine)) not in stop.message:
        stop.message = f"{which}; {stop.message}"
    return ended


def judged(ended: Ended, watch: CrashWatch) -> tuple[Cause | None, str]:
    """Why a run ended, as its agent says, with what its ranks printed of that; None if neither says anything."""
    if ended.cause not in (None, "rank-crashed"):
        return ended.cause, ended.message
    if watch.cause and (ended.cause or ended.code != 0):
        return watch.cause, watch.message
    return ended.cause, ended.message


def end_unrecorded(lab: Lab, job: Job, engine: Backend, place: int) -> None:
    """End a run whose output cannot be written, from this place on."""
    rest = agent.Follower(len)
    rest.place = place
    with contextlib.suppress(HostError):
        agent.stop(lab, engine, job.run_id, 1, "its output cannot be written")
        agent.follow(lab, engine, job.run_id, rest)


class CrashWatch:
    """Finds the rank failure that explains a run, in what the run printed.

    That is the first one that is not a consequence of a lost peer. Ranks that a script starts itself report nothing;
    for them DeepSpeed's launcher does. An elastic launcher starts them again.
    """

    def __init__(self, lab: Lab, job: Job) -> None:
        self._lab, self._nodes = lab, {node.name: node.slots for node in job.nodes}
        self._starts_itself = job.workload.launcher == "script"
        self._elastic = launchers.is_elastic(job.workload.launcher)
        self._speakers = {*self._nodes, *(f"rank {rank}" for rank in range(sum(self._nodes.values())))}
        self._kept = last_words.kept(len(self._speakers))
        self._killed: dict[str, str] = {}
        patterns = (OUT_OF_MEMORY, *(one.out_of_memory for one in accelerators.modules().values()))
        self._out_of_memory = re.compile("|".join(filter(None, patterns)), re.IGNORECASE)
        self._last: dict[str, deque[str]] = {}
        self._spoke_at: dict[str, float] = {}
        self.now = 0.0
        """When the last line was printed, in seconds since 1970."""
        self._ended: list[RankFailure] = []
        self.reason: RankFailure | None = None

    @property
    def cause(self) -> Cause | None:
        return self.reason.cause if self.reason else None

    @property
    def message(self) -> str:
        """The failed rank, and other ranks that failed; empty if none did."""
        if not self.reason:
            return ""
        # Ranks that a script starts itself have no number here by which to tell them apart.
        ranks = () if self._starts_itself else self._ended
        others = [crash.ended for crash in ranks if crash.who != self.reason.who]
        return "; ".join((str(self.reason), *others[:SHOWN]))

    @property
    def ends_run(self) -> bool:
        """Whether a rank failed that reports by rank.sh, under a launcher that does not start it again."""
        return self.reason is not None and not self._elastic and not self._starts_itself

    def look_at(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self._look_at(line)

    def _look_at(self, line: Line) -> None:
        text, self.now = metrics.searched(line.text), line.when
        reports = line.report or "[launch.py:" in text or (self._starts_itself and "labctl: " in text)
        if reports and self._hear_report(line, text):
            return
        who, said = _speaker(line, text)
        if reports and (line.report or said.startswith("labctl: ") or "[launch.py:" in said):
            # rank.sh and DeepSpeed's launcher speak about ranks, not as one.
            return
        if who in self._speakers and said and not said.isspace():
            if who not in self._last:
                self._last[who] = deque(maxlen=self._kept)
            self._last[who].append(said[: last_words.LONGEST])
            self._spoke_at[who] = self.now

    def _hear_report(self, line: Line, text: str) -> bool:
        """Take note of a report about a rank; returns whether it is that the rank failed."""
        if self._elastic and line.report and store.RANK_REPORTED.match(line.said):
            # Its launcher has started it again.
            self.reason, self._ended, self._killed = None, [], {}
        if line.report and (killed := OUT_OF_HOST_MEMORY.match(line.said)):
            self._killed[killed[1]] = f"{killed[2]}; {memory_limit(self._lab)}"
        crash = self._crash_in(line, text)
        if not crash:
            return False
        if len(self._ended) <= SHOWN:
            self._ended.append(crash)
        if self.reason is None or (self.reason.follows and not crash.follows):
            self.reason = crash
        return True

    def _crash_in(self, line: Line, text: str) -> RankFailure | None:
        # Ranks that a script starts itself may report by what it prints.
        reported = REPORTED.match(line.said) if line.report else self._starts_itself and REPORTED.search(text)
        if reported:
            who, node, code = reported[1], reported[2], int(reported[3])
        elif self._starts_itself and (reported := DEEPSPEED_REPORTED.search(text)):
            who, node, code = "a rank", reported[1], int(reported[2])
        else:
            return None
        lines = self._last.get(who) or self._last.get(node) or ()
        words = self._killed.get(node) or last_words.quoted(lines, who)
        # An error of another kind tells more than an earlier word of memory: that may have been a warning.
        searched = (words,) if last_words.is_error(words) else lines
        cause: Cause = "out-of-memory" if any(map(self._out_of_memory.search, searched)) else "rank-crashed"
        return RankFailure(who, node, code if code >= 0 else 128 - code, words, cause)

    def silence(self) -> str:
        """Who wrote nothing, or nothing for the longest time, as text; empty where that says nothing."""
        nodes = [*self._nodes]
        ranks = [f"rank {rank}" for rank in range(sum(self._nodes.values()))]
        # Lines of a script's own ranks are marked by node or by rank, as its launcher has it.
        speakers = ranks if self._spoke_at.keys() & set(ranks) else nodes
        if not self._spoke_at:
            return "" if self._starts_itself else SILENT
        if never := [name for name in speakers if name not in self._spoke_at]:
            more = f" and {len(never) - SHOWN} more" if len(never) > SHOWN else ""
            return f"{', '.join(never[:SHOWN])}{more} wrote nothing"
        longest = min(speakers, key=self._spoke_at.__getitem__)
        return f"{longest} wrote nothing for {self.now - self._spoke_at[longest]:.0f} s"


def _speaker(line: Line, text: str) -> tuple[str, str]:
    """The rank or node that a line is of, with what it says; of a progress bar what is drawn last. Empty for others."""
    if line.rank is not None:
        return f"rank {line.rank}", line.said.rpartition("\r")[2]
    if speaker := SPEAKER.match(text):
        return speaker[2] or f"rank {speaker[1]}", speaker[3].rpartition("\r")[2]
    return "", ""


def explain(ended: Ended, lab: Lab, job: Job, engine: Backend) -> tuple[Cause | None, str]:
    """The cause of a failure that the agent has no reason for: a stopped container, or that the agent was ended."""
    observed = engine.observe(lab.name)
    for name in job.containers:
        container = observed.container(name)
        if lab.host_of(name).name in dict(observed.silent):
            continue
        if container is None or container.state != "running":
            return "node-lost", f"{describe_node(name, job)}: container {container.state if container else 'gone'}"
    if ended.lost:
        return "interrupted", "the launcher was restarted, or its agent was ended"
    return None, ""


def paused_nodes(lab: Lab, job: Job, engine: Backend) -> str:
    """The nodes of a run that are paused, as text."""
    observed = engine.observe(lab.name)
    containers = filter(None, (observed.container(node.name) for node in job.nodes))
    found = (one for one in containers if one.state == "paused")
    return "; ".join(f"{describe_node(one.node, job)}: {paused(one.name)}" for one in found)


def look_at_devices(stop: RunStopper, lab: Lab, job: Job, engine: Backend) -> None:
    """Set the cause to a lost device, if one is; the earlier message follows in parentheses."""
    names = tuple(node.name for node in job.nodes if node.devices.devices)
    for name, reason in agent.unhealthy(lab, engine, names).items():
        if lost(reason) == "device-lost":
            earlier = f" ({stop.message})" if stop.message else ""
            stop.cause, stop.message = "device-lost", f"{describe_node(name, job)}: {reason}{earlier}"
            return


def memory_limit(lab: Lab) -> str:
    """What a container that ran out of memory had of it."""
    if lab.memory:
        return f"a node has LAB_MEMORY={lab.memory}"
    return "LAB_MEMORY is not set: a node has what its host has left"


def describe_node(name: str, job: Job) -> str:
    """A node with its ranks, as ``worker-1 (rank 1)``."""
    first = 0
    for node in job.nodes:
        if node.name == name:
            last = first + node.slots - 1
            return f"{name} (rank {first})" if first == last else f"{name} (ranks {first} to {last})"
        first += node.slots
    return name


@contextlib.contextmanager
def node_losses(
    stop: RunStopper, lab: Lab, job: Job, losses: Losses, notice: Callable[[str], object]
) -> Iterator[None]:
    """Stop the run when a container that it needs dies, or its node is lost to it; say so of one that it does not."""
    launcher = job.workload.launcher
    needed = (LAUNCHER, *launchers.needed(launcher, tuple(node.name for node in job.nodes)))
    lock = lab.directory / filelock.LAB

    def hear(node: str, cause: Cause, what: str) -> None:
        if node not in job.containers:
            return
        command = f" during {filelock.holder(lock)}" if filelock.is_held(lock) else ""
        limit = f"; {memory_limit(lab)}" if cause == "out-of-memory" else ""
        if node not in needed and cause in ("node-lost", "device-lost"):
            if node not in stop.gone:
                notice(f"{node}: {what}; {launchers.name(launcher)} goes on without it")
            stop.gone[node] = f"{node}: {what}"
        if node in needed or len(stop.gone) == len(job.nodes):
            stop.because(cause, f"{describe_node(node, job)}: {what}{command}{limit}")

    with losses.subscribed(hear):
        yield


@contextlib.contextmanager
def interrupts(stop: RunStopper) -> Iterator[None]:
    """Stop the run on INT and TERM; a second Ctrl-C kills at once. HUP leaves it to whoever attaches in time."""

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        stop.asked.set()
        if stop.cause == "interrupted":
            threading.Thread(target=stop.end, args=(0,), daemon=True).start()
        stop.because("interrupted", f"stopped by {signal.Signals(number).name}")

    # HUP ends this process at once, as where it is killed: the agent ends the run unless it is followed again.
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
