"""Calls to the agent that runs inside every node."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from msgspec import Struct

from labctl import model, naming
from labctl.backends.docker.engine import Backend
from labctl.backends.docker.hosts.ssh_errors import ssh_reason
from labctl.backends.state import ObservedState
from labctl.errors import HostError, parsing
from labctl.model import Lab
from labctl.records.active import ActiveRun, Ended, LaunchError, in_use
from labctl.records.lines import Line, line_of
from labctl.system.parallel import begin, pool

# Runs in any container: has_command NAME; runs VARIABLE=VALUE; answers NODE...
IN_NODE = Path(__file__).with_name("in_node.sh").read_text(encoding="utf-8")
AGENT = ("/usr/bin/python3", "-I", "/opt/lab/labnode.py")
# Seconds in which a container that is being removed is gone.
DYING = 5
# Nodes that the launcher logs in to at once, as the agent does.
AT_ONCE = 64
# Seconds for the check that is begun early, after which it counts for nothing.
FRESH = 5
# Seconds that the launcher is asked for again where the connection to a run breaks.
PATIENCE = 120
# Seconds for one try to do so.
RECONNECTING = 5
ENDLESS = 1e8
# Seconds for a node's health check, which has shorter limits inside.
CHECKING = 20


def reach(lab: Lab, engine: Backend, nodes: tuple[str, ...], seconds: int) -> dict[str, float]:
    """Seconds that each node took to answer over ssh; HostError names those that did not and why."""
    lines = agent(lab, engine, model.LAUNCHER, "reach", str(seconds), *nodes)
    with parsing(lab.host_of(model.LAUNCHER).name):
        answers = [json.loads(line) for line in lines]
        reasons = {answer["node"]: ssh_reason(answer["error"]) for answer in answers if not answer["ok"]}
        answered = {answer["node"]: answer["seconds"] for answer in answers if answer["ok"]}
    reasons |= {node: "the launcher gave no answer about it" for node in nodes if node not in {*answered, *reasons}}
    if reasons:
        first = next(iter(reasons))
        raise HostError(
            "the launcher does not reach every worker over ssh"
            + "".join(f"\n  {node}: {reason}" for node, reason in reasons.items()),
            hint=f"labctl logs {first}; `labctl down && labctl up` recreates the nodes",
            node=first,
        )
    return answered


class EarlyReach(NamedTuple):
    """A check over ssh that was begun before the command decides, which takes about as long."""

    nodes: tuple[str, ...]
    answers: Future[set[str]]
    begun: float

    def passed(self, nodes: tuple[str, ...]) -> bool:
        """Whether these nodes have all answered, just now."""
        if not set(nodes) <= set(self.nodes) or time.monotonic() - self.begun > FRESH:
            return False
        return not self.answers.exception() and set(nodes) <= self.answers.result()


def begin_reach(engine: Backend, observed: ObservedState, nodes: tuple[str, ...]) -> EarlyReach | None:
    """Ask these nodes beside what follows, if they and the launcher are running, once and for a second at most."""
    launcher, *workers = (observed.container(name) for name in (model.LAUNCHER, *nodes))
    if len(nodes) > AT_ONCE or not launcher or not all(one and one.state == "running" for one in (launcher, *workers)):
        return None
    container, look = launcher.name, ("sh", "-c", IN_NODE, "sh", "answers", *nodes)

    def ask() -> set[str]:
        return set(engine.exec(container, look, user="lab", limit=FRESH).out.split())

    return EarlyReach(nodes, begin(ask), time.monotonic())


class Launch(Struct, frozen=True, kw_only=True):
    """A run as the agent in the launcher is given it; what it does with each is in labnode.py."""

    id: str
    nodes: tuple[str, ...]
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str
    launcher: str
    limit: float
    """Seconds that the command has."""
    patience: float
    """Seconds that nobody may follow before the run is ended; 0 for no limit."""
    port: int
    """At which its ranks meet."""
    ssh_port: int
    owner: str
    stall: float
    """Seconds of silence after which a run that had steps may be stalled; 0 for never."""
    needed: tuple[str, ...]
    """Those of its nodes without which it cannot go on."""
    elastic: bool = False
    """Whether its launcher starts ranks again that fail."""
    wait: bool = False
    """Whether it waits for other runs that have its nodes."""
    follow: bool = True


class Follower:
    """Follows a run's output over one connection after another: each line once."""

    def __init__(
        self,
        on_lines: Callable[[Sequence[Line]], object],
        notice: Callable[[str], object] = len,
        given_up: Callable[[], bool] = bool,
    ) -> None:
        """``on_lines`` gets those that come at once together; ``notice`` a line for a connection that breaks;
        ``given_up``: whether to connect again is of no use.
        """
        self._on_lines, self.notice, self.given_up = on_lines, notice, given_up
        self.place = 0
        self.heard: float | None = None
        """When the agent last said anything of the run, on the monotonic clock."""
        self.ended: Ended | None = None
        self.other: list[str] = []
        """What the agent printed that is no line of the run."""
        self.busy: list[ActiveRun] = []
        self.refused = False
        """Whether who is handed the lines has raised an error."""

    def read(self, texts: Sequence[str]) -> None:
        """Lines of the agent's."""
        lines, last = [], ""
        for text in texts:
            place, _, rest = text.partition(" ")
            if place.isdecimal():
                when, _, said = rest.partition(" ")
                lines.append(line_of(said, float(when)))
                last = place
            else:
                self._read_word(place, rest, text)
        if lines:
            self.heard = time.monotonic()
            self.refused = True
            self._on_lines(lines)
            self.refused = False
            self.place = int(last)

    def _read_word(self, word: str, rest: str, text: str) -> None:
        if word in ("end", "beat"):
            self.heard = time.monotonic()
        if word == "end":
            self.ended = msgspec.json.decode(rest, type=Ended)
        elif word == "busy":
            self.busy.append(msgspec.json.decode(rest, type=ActiveRun))
        elif word != "beat":
            self.other.append(text)


def follow(lab: Lab, engine: Backend, run_id: str, follower: Follower, launch: Launch | None = None) -> Ended:
    """Launch a run, or go on with one, and follow it to its end, over one connection after another.

    LaunchError where it cannot be started, as where other runs have its nodes. HostError where the launcher does not
    answer for ``PATIENCE`` seconds.
    """
    began, noticed = time.monotonic(), False
    if launch:
        launch_run(lab, engine, follower, launch)
    while not follower.ended:
        lost = reconnect(lab, engine, model.LAUNCHER)
        error = lost or look(lab, engine, run_id, follower, "follow", run_id, str(follower.place))
        if follower.ended:
            break
        unknown = any(text.startswith(f"no run {run_id}") for text in follower.other)
        if unknown and launch and not follower.heard:
            raise LaunchError(f"run {run_id} did not begin", hint="re-run the command", node=model.LAUNCHER)
        if unknown or not is_running(lab, engine) or (lost and follower.given_up()):
            return Ended(code=137, lost=True)
        if time.monotonic() > (follower.heard or began) + PATIENCE:
            why = error.message if error else "the launcher does not answer"
            hint = f"labctl attach {run_id}"
            raise HostError(f"{why}; run {run_id} is left to itself", hint=hint, node=model.LAUNCHER)
        if lost and not noticed:
            follower.notice(f"{lost.message}; labctl tries for {PATIENCE} s to connect to run {run_id} again")
        noticed = bool(lost)
        time.sleep(0.5)
    return follower.ended


def reconnect(lab: Lab, engine: Backend, node: str) -> HostError | None:
    """Connect again to a node's host where the connection has ended; returns why that fails."""
    host = lab.host_of(node).name
    try:
        if host in engine.connections:
            engine.connections[host].reconnect(RECONNECTING)
    except HostError as error:
        return error
    return None


def launch_run(lab: Lab, engine: Backend, follower: Follower, launch: Launch) -> None:
    """Launch a run and follow it as long as the connection stands. LaunchError where it does not begin."""
    error = look(lab, engine, launch.id, follower, "launch", msgspec.json.encode(launch).decode())
    if follower.busy:
        raise in_use(follower.busy)
    if follower.heard:
        return
    if error:
        raise LaunchError(error.message, hint=error.hint, node=error.node) from error
    if follower.other:
        said = follower.other[-1]
        hint = "labctl build && labctl up" if "KeyError" in said else "labctl logs launcher"
        raise LaunchError(f"launcher: {said}", hint=hint, node=model.LAUNCHER)


def look(lab: Lab, engine: Backend, run_id: str, follower: Follower, *words: str) -> HostError | None:
    """Have the agent tell the follower of a run until that ends or the connection does; returns why, if that is said.

    What the follower itself raises is raised here.
    """
    container = naming.container_name(lab, model.LAUNCHER)
    # With a run's id of its own, the agent is not taken for what a run has left in the launcher.
    own = (("LABCTL_RUN_ID", f"supervises-{run_id}"),)
    try:
        engine.stream(container, (*AGENT, *words), follower.read, user="0", environment=own, limit=ENDLESS)
    except HostError as error:
        if follower.refused:
            raise
        return error
    return None


def start(lab: Lab, engine: Backend, launch: Launch) -> None:
    """Launch a run without following it. Errors as ``follow``."""
    follower = Follower(lambda _: None)
    text, own = msgspec.json.encode(launch).decode(), {"LABCTL_RUN_ID": f"supervises-{launch.id}"}
    follower.read(agent(lab, engine, model.LAUNCHER, "launch", text, root=True, environment=own))
    if follower.busy:
        raise in_use(follower.busy)


def stop(
    lab: Lab, engine: Backend, run_id: str, grace: float, message: str, cause: model.Cause = "interrupted"
) -> None:
    """Have the agent end a run: TERM, and KILL after so many seconds. HostError for one that is not running.

    A ``grace`` of 0 also ends a run at once that is being ended.
    """
    agent(lab, engine, model.LAUNCHER, "stop", run_id, f"{grace:g}", cause, message, root=True)


def forget(lab: Lab, engine: Backend, run_id: str) -> None:
    """Have the agent remove what it keeps of a run that has ended."""
    agent(lab, engine, model.LAUNCHER, "forget", run_id, root=True)


def is_running(lab: Lab, engine: Backend) -> bool:
    """Whether the launcher runs, or may do so where its host does not say."""
    try:
        observed = engine.observe(lab.name)
    except HostError:
        return True
    launcher = observed.container(model.LAUNCHER)
    silent = lab.host_of(model.LAUNCHER).name in dict(observed.silent)
    return silent or bool(launcher and launcher.state in ("running", "paused"))


def runs(engine: Backend, observed: ObservedState) -> dict[str, ActiveRun]:
    """The runs that the agent in the launcher knows, by id; none where the launcher does not run."""
    launcher = observed.container(model.LAUNCHER)
    if not launcher or launcher.state != "running":
        return {}
    done = engine.exec(launcher.name, ("sh", "-c", IN_NODE, "sh", "if_runs", *AGENT, "runs"), user="0")
    if done.code and "KeyError" in done.err:
        # One of an earlier labctl, which knows of no runs.
        return {}
    if done.code:
        said = done.err.strip() or f"its agent ended with code {done.code}"
        raise HostError(f"{model.LAUNCHER}: {said}", hint="labctl logs launcher", node=model.LAUNCHER)
    with parsing(launcher.host):
        found = [msgspec.json.decode(line, type=ActiveRun) for line in done.out.splitlines()]
    return {run.id: run for run in found}


def active(engine: Backend, observed: ObservedState) -> tuple[ActiveRun, ...]:
    """The runs that are under way, or wait for nodes, in their order."""
    return tuple(
        sorted((run for run in runs(engine, observed).values() if run.state == "running"), key=lambda one: one.order)
    )


def reap(
    lab: Lab,
    engine: Backend,
    run_id: str,
    grace: float,
    *,
    nodes: tuple[str, ...] = (),
    lasted: float | None = None,
    launcher: str = "",
) -> list[str]:
    """End a run's processes in the launcher and in its nodes, or in all workers; returns those that could not be ended.

    If the run has ``lasted`` so many seconds, then in workers those too that were started meanwhile and have left it:
    they have no parent, and the environment of no other run or shell. In the launcher only for the ``launcher`` script:
    under others nothing of the workload runs there, but a person's editor may.
    """

    def end(node: str) -> str:
        leavers = node != model.LAUNCHER or launcher == "script"
        return reap_node(lab, engine, node, run_id, grace, lasted if leavers else None)

    # A script's own children on the nodes are its ssh sessions' until those end.
    first = (model.LAUNCHER,) if launcher == "script" else ()
    containers = (model.LAUNCHER, *nodes) if nodes else lab.containers
    others = tuple(name for name in containers if name not in first)
    with pool(len(containers)) as threads:
        return [text for text in (*threads.map(end, first), *threads.map(end, others)) if text]


def reap_node(lab: Lab, engine: Backend, node: str, run_id: str, grace: float, lasted: float | None) -> str:
    given = {} if lasted is None else {"LABCTL_RUN_SECONDS": f"{lasted:.3f}"}
    try:
        return "".join(
            f"{node}: {line}" for line in agent(lab, engine, node, "reap", run_id, str(grace), environment=given)
        )
    except HostError as error:
        # A container that is gone holds nothing; one that stays and cannot be entered may hold all of it.
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


def unhealthy(lab: Lab, engine: Backend, nodes: tuple[str, ...]) -> dict[str, str]:
    """What the health check says of those of these nodes that fail it now, asked of all at once as Docker asks it.

    Nothing of a node that does not answer.
    """

    def check(node: str) -> str:
        try:
            done = engine.exec(naming.container_name(lab, node), (*AGENT, "health"), user="0", limit=CHECKING)
        except HostError:
            return ""
        return done.err.strip() if done.code else ""

    if not nodes:
        return {}
    with pool(len(nodes)) as threads:
        return {node: said for node, said in zip(nodes, threads.map(check, nodes), strict=True) if said}


def agent(
    lab: Lab,
    engine: Backend,
    node: str,
    *words: str,
    root: bool = False,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """What the node's own agent prints, one line each; HostError when it fails without an answer."""
    # An earlier agent, as an image of a person's own may have it, would refuse another argument.
    given = ("env", *(f"{name}={value}" for name, value in environment.items())) if environment else ()
    who = "0" if root else user(lab, node)
    done = engine.exec(naming.container_name(lab, node), (*given, *AGENT, *words), user=who)
    if done.code and not done.out:
        said = done.err.strip() or f"{AGENT[-1]} {words[0]} ended with code {done.code} and without a word"
        raise HostError(f"{node}: {said}", hint=f"labctl status; labctl logs {node}", node=node)
    return done.out.splitlines()


def user(lab: Lab, node: str = model.LAUNCHER) -> str:
    """Numeric user and group that processes in a container of the lab have: the person's own on its host."""
    host = lab.host_of(node)
    return f"{host.uid}:{host.gid}"
