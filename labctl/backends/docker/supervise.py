"""Follow a run, which the agent in the launcher supervises, and stop it on failure or timeout.

The run goes on if the connection to it breaks: its output is then read on from the same line.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from labctl import launchers, naming
from labctl.backends.docker import agent
from labctl.backends.docker.engine import Engine
from labctl.backends.docker.events import Losses
from labctl.backends.state import lost, paused
from labctl.backends.stopping import RunStopper, interrupts
from labctl.errors import HostError
from labctl.jobs.job import limited
from labctl.model import LAUNCHER, Cause, Job, Lab, Pace
from labctl.records import store
from labctl.records.active import Ended, LaunchError
from labctl.records.crash import CrashWatch, judged, memory_limit
from labctl.records.lines import Line
from labctl.records.verdict import RunOutcome
from labctl.system import filelock, human
from labctl.system.parallel import pool

# Seconds until an agent is asked again to end a run, which it may not have begun yet.
ASK_AGAIN = 0.5
# Seconds in which a node has to let the launcher in, after a run of which no rank began.
REACHING = 5
# A line of `df -Pk`: size and free space in KiB, and where it is mounted; and the free share of a full file system.
DF_LINE = re.compile(r"\S.*? +(\d+) +\d+ +(\d+) +\d+% (/.*)")
FULL = 0.01
# Causes that may hide a lost device, which ranks notice before the node's health check.
SYMPTOMS: tuple[Cause | None, ...] = (None, "rank-crashed", "launcher-failed")


class AgentStopper(RunStopper):
    """Stops a run through the agent in its launcher."""

    def __init__(self, lab: Lab, job: Job, engine: Engine) -> None:
        super().__init__(lab, job)
        self._engine = engine

    def end(self, grace: float) -> None:
        """Ask the agent to end the run, TERM then KILL after ``grace`` s; repeat until it answers or all is over."""
        cause = self.cause or "interrupted"
        while not self.over.is_set():
            with contextlib.suppress(HostError):
                return agent.stop(self.lab, self._engine, self.job.run_id, grace, self.message, cause)
            self.over.wait(ASK_AGAIN)
        return None


def launch_of(
    lab: Lab,
    job: Job,
    *,
    patience: float = 120,
    stall: float = 0,
    pace: Pace | None = None,
    detach: bool = False,
    wait: bool = False,
) -> agent.Launch:
    """Return the Launch of a job, with which the agent in the launcher starts it."""
    nodes = tuple(node.name for node in job.nodes)
    return agent.Launch(
        id=job.run_id,
        nodes=nodes,
        argv=limited(job),
        environment=dict(job.environment),
        directory=job.directory,
        launcher=job.workload.launcher,
        limit=job.timeout,
        patience=patience,
        stall=stall,
        pace=pace or Pace(),
        port=lab.master_port,
        ssh_port=lab.ssh_port,
        owner=lab.owner,
        needed=launchers.needed(job.workload.launcher, nodes),
        elastic=launchers.is_elastic(job.workload.launcher),
        wait=wait,
        follow=not detach,
    )


def supervise(
    lab: Lab,
    job: Job,
    engine: Engine,
    keep: Callable[[Sequence[Line]], Sequence[Line]],
    launch: agent.Launch | None = None,
    *,
    standby: agent.Standby | None = None,
    losses: Losses | None = None,
    age: float = 0,
    notice: Callable[[str], object] = len,
) -> RunOutcome:
    """Launch a run, or without ``launch`` follow one, to its end; return its outcome. HostError if cut off from it.

    Ctrl-C ends a run that is launched here, by the agent of ``standby`` if one waits. ``keep`` gets lines as they come
    and returns them redacted; ``losses``: those of the lab's nodes, if other runs share them; ``notice`` gets a line
    for a connection that breaks; ``age``: seconds that the run has lasted already. RecordError if a line cannot be
    written, HostError if the connection to the run is lost; the run then goes on.
    """
    stop, watch = AgentStopper(lab, job, engine), CrashWatch(lab, job)
    began = time.monotonic() - age
    with contextlib.ExitStack() as watchers:
        watchers.enter_context(node_losses(stop, lab, job, losses or Losses(engine, lab.name), notice))
        if launch:
            watchers.enter_context(interrupts(stop, notice))
        try:
            ended = follow(lab, job, engine, stop, watch, keep, launch, standby, notice)
        except LaunchError as error:
            ended = Ended(code=1, lost=True)
            stop.note("launcher-failed", error.message)
        stop.close()
        left = end_left(stop, ended, time.monotonic() - began, engine, notice)
        if ended.code != 0 and stop.cause is None:
            ended = ended if ended.seconds else replace(ended, seconds=time.monotonic() - began)
            stop.cause, stop.message = explain(ended, lab, job, engine, silent=watch.is_silent)
        if ended.code != 0 and not stop.message and (words := watch.launcher_words):
            named = "program" if job.workload.starts_itself else "launcher"
            stop.message = f"the {named} exited with code {ended.code}: {words}"
        if ended.code != 0 and stop.cause in SYMPTOMS:
            look_at_devices(stop, lab, job, engine)
        if stop.cause == watch.cause == "disk-full" and (disks := full_disks(lab, job, engine)):
            stop.message += f"; {disks}"
    if stop.cause == "timeout" and watch.is_silent:
        stop.message += "; no rank wrote a line"
    if left:
        stop.cause = stop.cause or "launcher-failed"
        stop.message = "; ".join((stop.message, "could not kill: " + ", ".join(left))).lstrip("; ")
    message = store.redact(stop.message, lab.hidden)
    return RunOutcome(
        exit_code=ended.code,
        cause=stop.cause,
        message=message,
        silent=watch.is_silent,
        gave_up=store.redact(watch.gave_up(), lab.hidden),
        seconds=ended.seconds,
        gone=tuple(stop.gone.values()),
    )


def end_left(
    stop: RunStopper, ended: Ended, lasted: float, engine: Engine, notice: Callable[[str], object]
) -> list[str]:
    """Reconnect to hosts; kill by Docker what the agent left there; return errors of processes that remain."""
    lab, job = stop.lab, stop.job

    def reap(nodes: tuple[str, ...]) -> list[str]:
        """End the run's processes on these nodes; return errors of those that remain."""
        return agent.reap(lab, engine, job.run_id, 1, nodes=nodes, lasted=lasted, launcher=job.workload.launcher)

    back = wait_for_hosts(stop, lab, engine, notice)
    gone = tuple(name for name in stop.gone if ended.lost or name in ended.left)
    if gone:
        # A node that was cut off may still have ranks; errors are ignored, as it is known to be lost.
        reap(gone)
    if not ended.lost and not set(ended.left) - {*stop.gone}:
        return []
    nodes = tuple(node.name for node in job.nodes if node.name not in stop.gone)
    left = reap(nodes)
    return reap(nodes) if left and back and wait_for_hosts(stop, lab, engine, notice) else left


def wait_for_hosts(stop: RunStopper, lab: Lab, engine: Engine, notice: Callable[[str], object]) -> bool:
    """Reconnect to the hosts of a run's nodes within PATIENCE; return False if one fails, or after Ctrl-C.

    Also False, without trying, if the run lost a node.
    """
    if stop.cause == "node-lost":
        return False
    deadline, noticed = time.monotonic() + agent.PATIENCE, False
    for node in (node.name for node in stop.job.nodes if node.name not in stop.gone):
        while lost := agent.reconnect(lab, engine, node):
            if time.monotonic() > deadline or stop.asked.wait(1):
                return False
            if not noticed:
                patience = human.duration(agent.PATIENCE)
                notice(f"{lost.message}; the run has ended, and labctl tries for {patience} to connect again")
            noticed = True
    return True


def follow(
    lab: Lab,
    job: Job,
    engine: Engine,
    stop: RunStopper,
    watch: CrashWatch,
    keep: Callable[[Sequence[Line]], Sequence[Line]],
    launch: agent.Launch | None,
    standby: agent.Standby | None,
    notice: Callable[[str], object],
) -> Ended:
    """Follow a run, launched first with ``launch``, to its end; note causes in ``stop``; end it if not recorded."""

    def look(lines: Sequence[Line]) -> None:
        """Give lines to ``keep``, and what it returns to the watch for failed ranks."""
        watch.look_at(keep(lines))

    follower = agent.Follower(look, notice, lambda: stop.cause in ("interrupted", "node-lost"))
    try:
        ended = agent.follow(lab, engine, job.run_id, follower, launch, standby)
    except (store.RecordError, KeyboardInterrupt) as error:
        if not launch:
            raise
        full = error.message if isinstance(error, store.DiskFull) else ""
        if full:
            stop.note("disk-full", full)
        ended = end_unrecorded(lab, job, engine, follower.place, full)
        if not full:
            raise
    cause, message = judged(ended, watch)
    if cause:
        stop.note(cause, message)
    if stop.cause == "stalled" and (nodes := paused_nodes(lab, job, engine)) not in stop.message:
        stop.message = f"{nodes}; {stop.message}"
    return ended


def end_unrecorded(lab: Lab, job: Job, engine: Engine, place: int, full: str = "") -> Ended:
    """Stop a run whose output cannot be written; return how it ended, ``lost`` if that is not known.

    ``full`` is the message about a full disk, which is then the cause of its end.
    """
    rest = agent.Follower(len)
    rest.place = place
    cause: Cause = "disk-full" if full else "interrupted"
    with contextlib.suppress(HostError):
        agent.stop(lab, engine, job.run_id, 1, full or "its output cannot be written", cause)
        return agent.follow(lab, engine, job.run_id, rest)
    return Ended(code=137, lost=True)


def explain(ended: Ended, lab: Lab, job: Job, engine: Engine, *, silent: bool) -> tuple[Cause | None, str]:
    """Return cause and message of a failure: stopped or unreached node, ended agent; (None, "") if neither.

    ``silent``: no rank has begun, so the launcher may have found a node that does not let it in.
    """
    observed = engine.observe(lab.name)
    for name in job.containers:
        container = observed.container(name)
        if lab.host_of(name).name in dict(observed.silent):
            continue
        if container is None or container.state != "running":
            return "node-lost", f"{describe_node(name, job)}: container {container.state if container else 'gone'}"
    if ended.lost:
        return "interrupted", "the launcher was restarted, or its agent was ended"
    if silent and (unreached := why_unreached(lab, job, engine)):
        return "node-lost", unreached
    return None, ""


def why_unreached(lab: Lab, job: Job, engine: Engine) -> str:
    """Return the nodes of the run to which the launcher cannot log in, and why; empty if none or it is silent."""
    with contextlib.suppress(HostError):
        reasons = agent.unreached(lab, engine, tuple(node.name for node in job.nodes), REACHING)
        named = "; ".join(f"{node}: {reason}" for node, reason in reasons.items())
        return f"{agent.UNREACHED}: {named}" if named else ""
    return ""


def paused_nodes(lab: Lab, job: Job, engine: Engine) -> str:
    """Return the run's paused nodes, with ranks and how to unpause, as text; empty if none is."""
    observed = engine.observe(lab.name)
    containers = filter(None, (observed.container(node.name) for node in job.nodes))
    stopped = (container for container in containers if container.state == "paused")
    return "; ".join(f"{describe_node(container.node, job)}: {paused(container.name)}" for container in stopped)


def look_at_devices(stop: RunStopper, lab: Lab, job: Job, engine: Engine) -> None:
    """Run the nodes' health check; if one reports a lost device, make that the cause of ``stop``."""
    names = tuple(node.name for node in job.nodes if node.devices.devices)
    for name, reason in agent.unhealthy(lab, engine, names).items():
        if lost(reason) == "device-lost":
            earlier = f" ({stop.message})" if stop.message else ""
            stop.cause, stop.message = "device-lost", f"{describe_node(name, job)}: {reason}{earlier}"
            return


def full_disks(lab: Lab, job: Job, engine: Engine) -> str:
    """Return text on the full file systems of a run's nodes, each once per host; empty if none or unknown."""
    look = ("df", "-Pk", job.directory, f"{lab.project_path}/.cache", "/tmp", "/dev/shm")  # noqa: S108 - of a container

    def ask(node: str) -> str:
        """Return what df prints in a node, also with exit code 1 for a path that is missing; empty if it fails."""
        try:
            return engine.exec(naming.container_name(lab, node), look, user="0", limit=agent.CHECKING).out
        except HostError:
            return ""

    names = [node.name for node in job.nodes]
    with pool(len(names)) as threads:
        printed = list(threads.map(ask, names))
    full: dict[tuple[str, str], str] = {}
    for name, text in zip(names, printed, strict=True):
        for line in filter(None, map(DF_LINE.match, text.splitlines())):
            size, free, mount = 1024 * int(line[1]), 1024 * int(line[2]), line[3]
            if free < FULL * size:
                left = f"{name} has {human.memory(free)} of {human.memory(size)} free at {mount}"
                full.setdefault((lab.host_of(name).name, mount), left)
    return "; ".join(full.values())


def describe_node(name: str, job: Job) -> str:
    """Return a node's name with its ranks, as ``worker-1 (rank 1)``; the name alone if it is not in the job."""
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
    """Stop the run, during the block, if a node it needs or the last is lost; report the loss of any other."""
    launcher = job.workload.launcher
    needed = (LAUNCHER, *launchers.needed(launcher, tuple(node.name for node in job.nodes)))
    lock = lab.directory / filelock.LAB

    def hear(node: str, cause: Cause, reason: str) -> None:
        """Note a node that the launcher can miss in ``stop.gone``; for others, or if all are gone, stop the run."""
        if node not in job.containers:
            return
        command = f" during {filelock.holder(lock)}" if filelock.is_held(lock) else ""
        limit = f"; {memory_limit(lab)}" if cause == "out-of-memory" else ""
        if node not in needed and cause in ("node-lost", "device-lost"):
            if node not in stop.gone:
                notice(f"{node}: {reason}; {launchers.name(launcher)} goes on without it")
            stop.gone[node] = f"{node}: {reason}"
        if node in needed or len(stop.gone) == len(job.nodes):
            stop.because(cause, f"{describe_node(node, job)}: {reason}{command}{limit}")

    with losses.subscribed(hear):
        yield
