"""Calls to the agent that runs inside every node."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from labctl import model, naming
from labctl.engines import Backend
from labctl.engines.state import ObservedState
from labctl.errors import HostError, parsing
from labctl.hosts.ssh_errors import ssh_reason
from labctl.model import Lab
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


def reap(
    lab: Lab, engine: Backend, run_id: str, grace: float, *, lasted: float | None = None, launcher: str = ""
) -> list[str]:
    """End a run's processes in all containers at once; returns those that could not be ended, as text.

    If the run has ``lasted`` so many seconds, then in workers those too that were started meanwhile and have left it:
    they have no parent, and the environment of no other run or shell. In the launcher only for the ``launcher`` script:
    under others nothing of the workload runs there, but a person's editor may.
    """

    def end(node: str) -> str:
        leavers = node != model.LAUNCHER or launcher == "script"
        return reap_node(lab, engine, node, run_id, grace, lasted if leavers else None)

    # A script's own children on the nodes are its ssh sessions' until those end.
    first = (model.LAUNCHER,) if launcher == "script" else ()
    others = tuple(name for name in lab.containers if name not in first)
    with pool(len(lab.containers)) as threads:
        return [text for text in (*threads.map(end, first), *threads.map(end, others)) if text]


def reap_node(lab: Lab, engine: Backend, node: str, run_id: str, grace: float, lasted: float | None) -> str:
    given = {} if lasted is None else {"LABCTL_RUN_SECONDS": f"{lasted:.3f}"}
    try:
        return "".join(f"{node}: {line}" for line in agent(lab, engine, node, "reap", run_id, str(grace), **given))
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


def agent(lab: Lab, engine: Backend, node: str, *words: str, **environment: str) -> list[str]:
    """What the node's own agent prints, one line each; HostError when it fails without an answer."""
    # An earlier agent, as an image of a person's own may have it, would refuse another argument.
    given = ("env", *(f"{name}={value}" for name, value in environment.items())) if environment else ()
    done = engine.exec(naming.container_name(lab, node), (*given, *AGENT, *words), user=user(lab, node))
    if done.code and not done.out:
        said = done.err.strip() or f"{AGENT[-1]} {words[0]} ended with code {done.code} and without a word"
        raise HostError(f"{node}: {said}", hint=f"labctl status; labctl logs {node}", node=node)
    return done.out.splitlines()


def user(lab: Lab, node: str = model.LAUNCHER) -> str:
    """Numeric user and group that processes in a container of the lab have: the person's own on its host."""
    host = lab.host_of(node)
    return f"{host.uid}:{host.gid}"
