"""Plan + engine -> done: carries out each step and says so; decides nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import singledispatch

from labctl import files, plan, render
from labctl.engines import Engine
from labctl.errors import HostError
from labctl.model import Event, Lab

AGENT = ("/usr/bin/python3", "-I", "/opt/lab/labnode.py")
Emit = Callable[[Event], None]
# Seconds in which a container that is being removed is gone.
DYING = 5
# Seconds for a node's health check, which has shorter limits inside.
CHECKING = 20


def carry_out(steps: plan.Plan, lab: Lab, engine: Engine, emit: Emit) -> None:
    """Every step in order; HostError says which one failed, on which node, and what came back."""
    for step in announced(steps, emit):
        do(step, lab, engine)


def remove_all(steps: plan.Plan, engine: Engine, emit: Emit) -> None:
    """The steps of a plan that only removes: it needs no lab on disk."""
    for step in announced(steps, emit):
        if isinstance(step, plan.RemoveContainers):
            engine.remove(tuple(container.id for container in step.containers))
        elif isinstance(step, plan.RemoveNetworks):
            engine.remove_networks(tuple(identity for identity, _ in step.networks))


def announced(steps: plan.Plan, emit: Emit) -> Iterator[plan.Step]:
    """The steps, each said before it is handed on."""
    for number, step in enumerate(steps.steps, 1):
        emit(Event(kind="step", text=f"[{number}/{len(steps.steps)}] {shorten(str(step))}"))
        yield step


def shorten(text: str, width: int = 110) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


@singledispatch
def do(step: object, lab: Lab, engine: Engine) -> None:  # noqa: ARG001
    """Carry out one step."""
    raise TypeError(f"no way to carry out {type(step).__name__}")


@do.register
def _(step: plan.WriteFiles, lab: Lab, engine: Engine) -> None:  # noqa: ARG001
    files.write_all(lab.directory, step.files)


@do.register
def _(step: plan.RemoveContainers, lab: Lab, engine: Engine) -> None:  # noqa: ARG001
    engine.remove(tuple(container.id for container in step.containers))


@do.register
def _(step: plan.ComposeUp, lab: Lab, engine: Engine) -> None:
    engine.compose_up(step.project, tuple(lab.directory / render.compose_path(node) for node in step.nodes))


@do.register
def _(step: plan.Reach, lab: Lab, engine: Engine) -> None:
    reach(lab, engine, step.nodes, step.seconds)


def reach(lab: Lab, engine: Engine, nodes: tuple[str, ...], seconds: int) -> dict[str, float]:
    """Seconds that each node took to answer over ssh; HostError names those that did not and why."""
    answers = [json.loads(line) for line in agent(lab, engine, render.LAUNCHER, "reach", str(seconds), *nodes)]
    reasons = {answer["node"]: ssh_reason(answer["error"]) for answer in answers if not answer["ok"]}
    answered = {answer["node"] for answer in answers}
    reasons |= {node: "the launcher gave no answer about it" for node in nodes if node not in answered}
    if reasons:
        first = next(iter(reasons))
        raise HostError(
            "the launcher does not reach every worker over ssh"
            + "".join(f"\n  {node}: {reason}" for node, reason in reasons.items()),
            hint=f"labctl logs {first}; `labctl down && labctl up` makes the nodes anew",
            node=first,
        )
    return {answer["node"]: answer["seconds"] for answer in answers}


def ssh_reason(said: str) -> str:
    """The line of ssh's words that says why."""
    if "IDENTIFICATION HAS CHANGED" in said:
        return "its host key is not the one pinned for it (REMOTE HOST IDENTIFICATION HAS CHANGED); not trusted"
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else "no answer"


def reap(lab: Lab, engine: Engine, run_id: str, grace: float) -> list[str]:
    """End a run's processes in all containers at once; returns those that could not be ended, as text."""
    nodes = (render.LAUNCHER, *(node.name for node in lab.nodes))
    with ThreadPoolExecutor(min(len(nodes), 32)) as pool:
        left = pool.map(lambda node: reap_node(lab, engine, node, run_id, grace), nodes)
    return [text for text in left if text]


def reap_node(lab: Lab, engine: Engine, node: str, run_id: str, grace: float) -> str:
    try:
        return "".join(f"{node}: {line}" for line in agent(lab, engine, node, "reap", run_id, str(grace)))
    except HostError as error:
        # A container that is gone holds nothing; one that stays and cannot be entered may hold all of it.
        deadline = time.monotonic() + DYING
        while (container := engine.observe(lab.name).container(node)) and container.state == "running":
            if time.monotonic() >= deadline:
                return error.message
            time.sleep(0.1)
        return ""


def unhealthy(lab: Lab, engine: Engine, nodes: tuple[str, ...]) -> dict[str, str]:
    """What the health check says of those of these nodes that fail it now, asked of all at once as Docker asks it.

    Nothing of a node that does not answer.
    """

    def check(node: str) -> str:
        try:
            done = engine.call(render.container_name(lab, node), (*AGENT, "health"), user="0", limit=CHECKING)
        except HostError:
            return ""
        return done.err.strip() if done.code else ""

    if not nodes:
        return {}
    with ThreadPoolExecutor(min(len(nodes), 32)) as pool:
        return {node: said for node, said in zip(nodes, pool.map(check, nodes), strict=True) if said}


def agent(lab: Lab, engine: Engine, node: str, *words: str) -> list[str]:
    """What the node's own agent prints, one line each; HostError when it fails without a word."""
    done = engine.call(render.container_name(lab, node), (*AGENT, *words), user=user(lab))
    if done.code and not done.out:
        raise HostError(f"{node}: {done.err.strip()}", hint=f"labctl logs {node}", node=node)
    return done.out.splitlines()


def user(lab: Lab) -> str:
    """Numeric user and group that processes in the lab's containers have: the person's own."""
    return f"{lab.hosts[0].uid}:{lab.hosts[0].gid}"
