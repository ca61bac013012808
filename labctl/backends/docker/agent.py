"""Calls to the agent that runs inside every node."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from msgspec import Struct

from labctl import launchers, model, naming
from labctl.backends.docker.engine import Engine
from labctl.backends.docker.hosts.ssh_errors import ssh_reason
from labctl.backends.state import ObservedState
from labctl.config import override
from labctl.errors import HostError, parsing
from labctl.model import Lab, Pace, Pairs
from labctl.records.active import ActiveRun, Ended, LaunchError, in_use
from labctl.records.lines import Line, line_of
from labctl.system import human
from labctl.system.decode import decode
from labctl.system.parallel import begin, pool
from labctl.system.process import Input

UNREACHED = "the launcher does not reach every worker over ssh"
# Script for any container, whose commands are described in it.
IN_NODE = Path(__file__).with_name("in_node.sh").read_text(encoding="utf-8")
AGENT = ("/usr/bin/python3", "-I", "/opt/lab/labnode.py")
# Seconds until a container that is being removed is gone.
DYING = 5
# Nodes that the launcher logs in to at once, as the agent does.
AT_ONCE = 64
# Time limit of the early check, and age up to which it counts, in seconds.
FRESH = 5
# Seconds to try to reach the launcher again after the connection to a run breaks.
PATIENCE = 120
# Time limit of each try, in seconds.
RECONNECTING = 5
ENDLESS = 1e8
# Seconds for the agent to remove its data of a run.
FORGETTING = 1
# Time limit of a node's health check in seconds, which has shorter limits inside.
CHECKING = 20
# Seconds between looks at nodes that are not yet reached, as to whether they have stopped.
LOOKING = 2


def reach(lab: Lab, engine: Engine, nodes: tuple[str, ...], seconds: int) -> None:
    """Log in from the launcher to each node over ssh. HostError names nodes that do not answer in time, and why.

    HostError at once if a node has stopped: it would never answer.
    """
    answers = begin(partial(unreached, lab, engine, nodes, seconds))
    while not wait((answers,), timeout=LOOKING).done:
        require_alive(lab, engine, nodes)
    if reasons := answers.result():
        require_alive(lab, engine, nodes)
        first = next(iter(reasons))
        raise HostError(
            UNREACHED + "".join(f"\n  {node}: {reason}" for node, reason in reasons.items()),
            hint=f"labctl logs {first}; `labctl down && labctl up` recreates the nodes",
            node=first,
        )


def require_alive(lab: Lab, engine: Engine, nodes: tuple[str, ...]) -> None:
    """Raise HostError, with the last line of its log, for the first of these nodes or launcher that has stopped."""
    observed = engine.observe(lab.name)
    for node in (model.LAUNCHER, *nodes):
        container = observed.container(node)
        if container and container.state in ("exited", "dead"):
            message = f"{node} has stopped (exit code {container.exit_code}): {last_line(lab, engine, node)}"
            adds = f"correct {override.FILE}, which adds to {node}"
            mend = adds if node in dict(lab.override) else "mend what it names"
            hint = f"labctl logs {node}; {mend}, then `labctl up`"
            raise HostError(message, hint=hint, node=node)


def last_line(lab: Lab, engine: Engine, node: str) -> str:
    """Return the last line of a node's log, without its name; ``no output`` if it has none."""
    lines: deque[str] = deque(maxlen=1)
    engine.logs(naming.project(lab), lines.append, node=node)
    return lines.pop().partition("| ")[2] if lines else "no output"


def unreached(lab: Lab, engine: Engine, nodes: tuple[str, ...], seconds: int) -> dict[str, str]:
    """Log in from the launcher to each node over ssh; return the nodes that do not answer in time, and why."""
    lines = agent(lab, engine, model.LAUNCHER, "reach", str(seconds), *nodes)
    with parsing(lab.host_of(model.LAUNCHER).name):
        answers = [json.loads(line) for line in lines]
        reasons = {answer["node"]: ssh_reason(answer["error"]) for answer in answers if not answer["ok"]}
        answered = {answer["node"] for answer in answers if answer["ok"]}
    return reasons | {
        node: "the launcher gave no answer about it" for node in nodes if node not in answered | reasons.keys()
    }


class EarlyReach(NamedTuple):
    """A check over ssh that was begun before the command decides, as both take about as long."""

    nodes: tuple[str, ...]
    answers: Future[set[str]]
    begun: float

    def passed(self, nodes: tuple[str, ...]) -> bool:
        """Return True if these nodes were asked at most FRESH seconds ago, and all answer; wait for them."""
        if not set(nodes) <= set(self.nodes) or time.monotonic() - self.begun > FRESH:
            return False
        return not self.answers.exception() and set(nodes) <= self.answers.result()


def begin_reach(engine: Engine, launcher: str, nodes: tuple[str, ...]) -> EarlyReach | None:
    """Ask sshd of these nodes in the background, from a launcher's container; return None for more than AT_ONCE.

    Each is asked once, with a short limit.
    """
    if len(nodes) > AT_ONCE:
        return None
    look = ("sh", "-c", IN_NODE, "sh", "answers", *nodes)

    def ask() -> set[str]:
        return set(engine.exec(launcher, look, user="lab", limit=FRESH).out.split())

    return EarlyReach(nodes, begin(ask), time.monotonic())


class Launch(Struct, frozen=True, kw_only=True):
    """Arguments of a run for the agent in the launcher; labnode.py describes their use."""

    id: str
    nodes: tuple[str, ...]
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str
    launcher: str
    limit: float
    """Time limit of the command, in seconds."""
    patience: float
    """Seconds without a follower after which the run is ended; 0 for no limit."""
    port: int
    """Port of the rendezvous of its ranks."""
    ssh_port: int
    owner: str
    stall: float
    """Seconds of silence after which a run that had steps may be stalled; 0 for never."""
    pace: Pace
    """Steps of an earlier run of the same program."""
    needed: tuple[str, ...]
    """Nodes without which it cannot go on."""
    elastic: bool = False
    """True if the launcher restarts failed ranks."""
    wait: bool = False
    """Wait for other runs that use its nodes."""
    follow: bool = True


class Follower:
    """Follows a run's output over successive connections, so that each line is passed on once."""

    def __init__(
        self,
        on_lines: Callable[[Sequence[Line]], object],
        notice: Callable[[str], object] = len,
        given_up: Callable[[], bool] = bool,
    ) -> None:
        """Follow from the first line; ``notice`` gets lost connections, ``given_up`` tells when not to reconnect.

        ``on_lines`` gets lines that arrive together; ``notice`` a line for a connection that breaks; ``given_up`` tells
        if it is of no use to connect again.
        """
        self._on_lines, self.notice, self.given_up = on_lines, notice, given_up
        self.place = 0
        self.heard: float | None = None
        """Time of the last message of the agent about the run, on the monotonic clock; None before the first."""
        self.ended: Ended | None = None
        self.other: list[str] = []
        """Output of the agent that is neither a line of the run nor a message."""
        self.busy: list[ActiveRun] = []
        self.refused = False
        """``on_lines`` raised an error."""

    def read(self, texts: Sequence[str]) -> None:
        """Parse the agent's output: pass the run's lines on; note their place, the run's end, other messages."""
        lines, last, ended = [], "", self.ended
        is_silent = set(texts) == {"beat"}
        for text in texts:
            place, _, rest = text.partition(" ")
            if place.isdecimal():
                when, _, line = rest.partition(" ")
                lines.append(line_of(line, float(when)))
                last = place
            elif place == "end":
                self.heard, ended = time.monotonic(), decode(rest, Ended)
            else:
                self._read_word(place, rest, text)
        if lines or is_silent:
            self.heard = time.monotonic()
            self.refused = True
            self._on_lines(lines)
            self.refused = False
        if lines:
            self.place = int(last)
        # Last, as another thread may wait for it.
        self.ended = ended

    def _read_word(self, word: str, rest: str, text: str) -> None:
        """Note the time of a ``beat``, or in ``busy`` the run that has the nodes; keep any other line."""
        if word == "beat":
            self.heard = time.monotonic()
        elif word == "busy":
            self.busy.append(decode(rest, ActiveRun))
        else:
            self.other.append(text)


class Standby:
    """An agent in the launcher that waits to launch a run, over a connection that lasts to the run's end.

    It is opened before the command decides, as that takes about as long, and meanwhile asks the sshd of the nodes.
    """

    def __init__(self, lab: Lab, engine: Engine, run_id: str, nodes: tuple[str, ...] = ()) -> None:
        """Start an agent in the launcher that waits to launch a run; ask sshd of ``nodes`` unless too many."""
        self._begun = time.monotonic()
        self._reached: set[str] = set()
        self._changed = threading.Condition()
        self._follower: Follower | None = None
        self._input = Input()
        names = " ".join(nodes) if len(nodes) <= AT_ONCE else ""
        stand_by = ("sh", "-c", IN_NODE, "sh", "stand_by", names)
        self._stream = begin(
            partial(
                engine.stream,
                naming.container_name(lab, model.LAUNCHER),
                (*stand_by, *AGENT, "launch"),
                self._read,
                user="0",
                environment=_of_agent(run_id),
                limit=ENDLESS,
                typed=self._input,
            )
        )
        self._stream.add_done_callback(lambda _: self._read(("reached",)))

    @property
    def ended(self) -> bool:
        """Tell if the connection has ended."""
        return self._stream.done()

    def passed(self, nodes: tuple[str, ...]) -> bool:
        """Wait for these nodes' sshd until FRESH seconds after the start; return False if not all answered."""
        left = self._begun + FRESH - time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._reached.issuperset(nodes) or "" in self._reached, max(0, left))
            return left > 0 and self._reached.issuperset(nodes)

    def launch(self, follower: Follower, launch: Launch) -> None:
        """Launch the run; return when it or the connection ends. LaunchError if it does not begin.

        Errors that the follower raises are raised.
        """
        self._follower = follower
        self._input.write(msgspec.json.encode(launch).decode())
        with self._changed:
            self._changed.wait_for(lambda: follower.ended or self.ended)
        error = self._stream.exception() if self.ended else None
        if error and (follower.refused or not isinstance(error, HostError)):
            raise error
        if follower.busy:
            raise in_use(follower.busy)
        if follower.heard:
            return
        if isinstance(error, HostError):
            raise LaunchError(error.message, hint=error.hint, node=error.node) from error
        code = self._stream.result() if self.ended else 0
        if follower.other or code:
            answer = follower.other[-1] if follower.other else f"its agent exited with code {code}"
            # An agent of an earlier labctl takes the run as an argument, or knows no `launch`.
            is_old = answer.startswith(("KeyError: 'launch'", "TypeError: launch()"))
            hint = "labctl build && labctl up" if is_old else "labctl logs launcher"
            raise LaunchError(f"launcher: {answer}", hint=hint, node=model.LAUNCHER)

    def forget(self) -> bool:
        """Have the agent remove its data of the ended run; return False if it is gone or takes over a second."""
        if self.ended:
            return False
        self._input.write("forget")
        self._input.close()
        wait((self._stream,), timeout=FORGETTING)
        return self.ended

    def close(self) -> None:
        """Close the connection; a run that was launched goes on."""
        self._input.close()

    def _read(self, texts: Sequence[str]) -> None:
        """Note the nodes that sshd reached, and "" after the last; pass other lines on to the run's follower."""
        rest: list[str] = []
        for text in texts:
            word, _, node = text.partition(" ")
            if word == "reached":
                self._reached.add(node)
            else:
                rest.append(text)
        if self._follower and rest:
            self._follower.read(rest)
        with self._changed:
            self._changed.notify_all()


def launch_run(lab: Lab, engine: Engine, follower: Follower, launch: Launch, standby: Standby | None = None) -> None:
    """Launch a run by a waiting or new agent; follow it until it or the connection ends. LaunchError if not begun."""
    waiting = standby if standby and not standby.ended else Standby(lab, engine, launch.id)
    try:
        waiting.launch(follower, launch)
    finally:
        if waiting is not standby:
            waiting.close()


def _of_agent(run_id: str) -> Pairs:
    """Return the variable with the agent's own run id, so that it is not taken for a process that the run left."""
    return (("LABCTL_RUN_ID", f"supervises-{run_id}"),)


def follow(
    lab: Lab,
    engine: Engine,
    run_id: str,
    follower: Follower,
    launch: Launch | None = None,
    standby: Standby | None = None,
) -> Ended:
    """Follow a run to its end, launched first with ``launch``; return how it ended. LaunchError if it does not begin.

    LaunchError if it cannot be started, as when other runs use its nodes. HostError if the launcher does not answer for
    ``PATIENCE`` seconds.
    """
    began, noticed = time.monotonic(), False
    if launch:
        launch_run(lab, engine, follower, launch, standby)
    while not follower.ended:
        lost = reconnect(lab, engine, model.LAUNCHER)
        error = lost or look(lab, engine, run_id, follower, "follow", run_id, str(follower.place))
        if follower.ended:
            break
        if _is_unknown(run_id, follower, launched=bool(launch)) or not is_running(lab, engine):
            return Ended(code=137, lost=True)
        if lost and follower.given_up():
            return Ended(code=137, lost=True)
        if time.monotonic() > (follower.heard or began) + PATIENCE:
            raise _left(run_id, error)
        if lost and not noticed:
            patience = human.duration(PATIENCE)
            follower.notice(f"{lost.message}; labctl tries for {patience} to connect to run {run_id} again")
        noticed = bool(lost)
        time.sleep(0.5)
    return follower.ended


def _is_unknown(run_id: str, follower: Follower, *, launched: bool) -> bool:
    """Tell if the agent knows no such run; LaunchError if it has just been ``launched``."""
    unknown = any(text.startswith(f"no run {run_id}") for text in follower.other)
    if unknown and launched and not follower.heard:
        raise LaunchError(f"run {run_id} did not start", hint="re-run the command", node=model.LAUNCHER)
    return unknown


def _left(run_id: str, error: HostError | None) -> HostError:
    """Return the HostError of a run that labctl cannot follow any more, with a hint to `labctl attach`."""
    why = error.message if error else "the launcher does not answer"
    hint = f"labctl attach {run_id}"
    return HostError(f"{why}; run {run_id} goes on without labctl", hint=hint, node=model.LAUNCHER)


def reconnect(lab: Lab, engine: Engine, node: str) -> HostError | None:
    """Connect again to a node's host if the connection has ended; return the error if that fails, else None."""
    host = lab.host_of(node).name
    try:
        if host in engine.connections:
            engine.connections[host].reconnect(RECONNECTING)
    except HostError as error:
        return error
    return None


def look(lab: Lab, engine: Engine, run_id: str, follower: Follower, *arguments: str) -> HostError | None:
    """Run the agent in the launcher, pass its output to the follower; return the HostError of a lost connection.

    Errors that the follower raises are raised. ``arguments``: the agent's command.
    """
    container, variables = naming.container_name(lab, model.LAUNCHER), _of_agent(run_id)
    try:
        engine.stream(container, (*AGENT, *arguments), follower.read, user="0", environment=variables, limit=ENDLESS)
    except HostError as error:
        if follower.refused:
            raise
        return error
    return None


def stop(lab: Lab, engine: Engine, run_id: str, grace: float, message: str, cause: model.Cause = "interrupted") -> None:
    """Have the agent end a run: TERM, and KILL after ``grace`` seconds. HostError if it is not running.

    A ``grace`` of 0 also kills a run that is being ended.
    """
    agent(lab, engine, model.LAUNCHER, "stop", run_id, f"{grace:g}", cause, message, root=True)


def look_at_ranks(lab: Lab, engine: Engine, run_id: str) -> model.Hang:
    """Have the agent tell what the ranks of a run wait for. HostError if it is not running."""
    (answer,) = agent(lab, engine, model.LAUNCHER, "look", run_id, root=True)
    return decode(answer.encode(), model.Hang)


def forget(lab: Lab, engine: Engine, run_id: str) -> None:
    """Have the agent in the launcher remove its data of a run that has ended, in the background."""
    command = ("sh", "-c", IN_NODE, "sh", "background", *AGENT, "forget", run_id)
    engine.exec(naming.container_name(lab, model.LAUNCHER), command, user="0")


def is_running(lab: Lab, engine: Engine) -> bool:
    """Return True if the launcher is running or paused, or cannot be observed because its host does not answer."""
    try:
        observed = engine.observe(lab.name)
    except HostError:
        return True
    launcher = observed.container(model.LAUNCHER)
    silent = lab.host_of(model.LAUNCHER).name in dict(observed.silent)
    return silent or bool(launcher and launcher.state in ("running", "paused"))


def runs(engine: Engine, observed: ObservedState) -> dict[str, ActiveRun]:
    """Return runs by id from the launcher's agent; {} if not running or too old. HostError if the agent fails."""
    launcher = observed.container(model.LAUNCHER)
    if not launcher or launcher.state != "running":
        return {}
    done = engine.exec(launcher.name, ("sh", "-c", IN_NODE, "sh", "if_runs", *AGENT, "runs"), user="0")
    if done.code and "KeyError" in done.err:
        # An agent of an earlier labctl, which does not record runs.
        return {}
    if done.code:
        reason = done.err.strip() or f"its agent exited with code {done.code}"
        raise HostError(f"{model.LAUNCHER}: {reason}", hint="labctl logs launcher", node=model.LAUNCHER)
    with parsing(launcher.host):
        reported = [decode(line, ActiveRun) for line in done.out.splitlines()]
    return {run.id: run for run in reported}


def active(engine: Engine, observed: ObservedState) -> tuple[ActiveRun, ...]:
    """Return the runs with state ``running``, also those that wait for nodes, in the order of their launch."""
    running = (run for run in runs(engine, observed).values() if run.state == "running")
    return tuple(sorted(running, key=lambda run: run.order))


def reap(
    lab: Lab,
    engine: Engine,
    run_id: str,
    grace: float,
    *,
    nodes: tuple[str, ...] = (),
    lasted: float | None = None,
    launcher: str = "",
) -> list[str]:
    """End a run's processes in the launcher and ``nodes``, without ``nodes`` in all containers; return the errors.

    If the run has ``lasted`` so many seconds, also end processes in workers that were started in that time and have
    left it: they have no parent, and no environment of another run or shell. In the launcher this is done only for the
    ``launcher`` script: under others no process of the workload runs there, but a user's editor may.
    """

    starts_itself = launchers.name(launcher) == "script"

    def end(node: str) -> str:
        """End the run's processes in a container; return the error, or an empty text."""
        leavers = node != model.LAUNCHER or starts_itself
        return reap_node(lab, engine, node, run_id, grace, lasted if leavers else None)

    # A script's children on the nodes belong to its ssh sessions until those end.
    first = (model.LAUNCHER,) if starts_itself else ()
    containers = (model.LAUNCHER, *nodes) if nodes else lab.containers
    others = tuple(name for name in containers if name not in first)
    with pool(len(containers)) as threads:
        return [text for text in (*threads.map(end, first), *threads.map(end, others)) if text]


def reap_node(lab: Lab, engine: Engine, node: str, run_id: str, grace: float, lasted: float | None) -> str:
    """End a run's processes in a container; return the error, or empty if none remains or the container has ended."""
    given = {} if lasted is None else {"LABCTL_RUN_SECONDS": f"{lasted:.3f}"}
    try:
        return "".join(
            f"{node}: {line}" for line in agent(lab, engine, node, "reap", run_id, str(grace), environment=given)
        )
    except HostError as error:
        # A container that is gone has no processes; one that stays and cannot be entered may have all of them.
        deadline = time.monotonic() + DYING
        while True:
            observed = engine.observe(lab.name)
            if lab.host_of(node).name in dict(observed.silent):
                return error.message
            container = observed.container(node)
            if not container or container.state not in ("running", "paused"):
                return ""
            if container.state == "paused" or time.monotonic() >= deadline:
                return error.message
            time.sleep(0.1)


def unhealthy(lab: Lab, engine: Engine, nodes: tuple[str, ...]) -> dict[str, str]:
    """Run the health check in these nodes at once; return stderr of each that fails; silent nodes are left out."""

    def check(node: str) -> str:
        """Return the error of a node's health check; empty if it passes or cannot run."""
        try:
            done = engine.exec(naming.container_name(lab, node), (*AGENT, "health"), user="0", limit=CHECKING)
        except HostError:
            return ""
        return done.err.strip() if done.code else ""

    if not nodes:
        return {}
    with pool(len(nodes)) as threads:
        return {node: reason for node, reason in zip(nodes, threads.map(check, nodes), strict=True) if reason}


def agent(
    lab: Lab,
    engine: Engine,
    node: str,
    *arguments: str,
    root: bool = False,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Run labctl's agent in a node's container; return its lines. HostError if it exits non-zero without output."""
    # By environment: the agent of an older image would reject another argument.
    prefix = ("env", *(f"{name}={value}" for name, value in environment.items())) if environment else ()
    who = "0" if root else user(lab, node)
    done = engine.exec(naming.container_name(lab, node), (*prefix, *AGENT, *arguments), user=who)
    if done.code and not done.out:
        # A traceback ends with its reason.
        silent = f"{AGENT[-1]} {arguments[0]} exited with code {done.code} and no output"
        reason = (done.err.strip().splitlines() or [silent])[-1]
        raise HostError(f"{node}: {reason}", hint=way_out(lab, node, reason), node=node)
    return done.out.splitlines()


def way_out(lab: Lab, node: str, reason: str) -> str:
    """Return the hint of an agent that failed: by the file that it did not find, else to its log."""
    if "No such file" in reason and "'/etc/lab/" in reason:
        return "labctl up"
    if "No such file" in reason and reason.endswith("'ssh'"):
        return f"image {lab.image} has no ssh client: install one in it, then `labctl up`"
    return f"labctl status; labctl logs {node}"


def user(lab: Lab, node: str = model.LAUNCHER) -> str:
    """Return the numeric user and group of the lab's processes on a node: the user's own on its host."""
    host = lab.host_of(node)
    return f"{host.uid}:{host.gid}"
