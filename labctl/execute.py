"""Plan + engine -> done: carries out each step and says so; decides nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import singledispatch
from itertools import groupby
from types import MappingProxyType
from typing import cast

from labctl import files, laid, plan, provision, render, sending
from labctl.connection import Connection
from labctl.engines import Engine
from labctl.errors import HostError
from labctl.hardware import HERE
from labctl.model import Event, Lab
from labctl.progress import waiting_for
from labctl.side_by_side import attempt, pool

AGENT = ("/usr/bin/python3", "-I", "/opt/lab/labnode.py")
Emit = Callable[[Event], None]
Bring = Callable[[Connection, str], None]
"""Fetches what is only on a host, from a directory there that is to be removed."""
Failures = Mapping[str, HostError]
"""What failed, by the name of the host."""
# Seconds in which a container that is being removed is gone.
DYING = 5
# Seconds for a node's health check, which has shorter limits inside.
CHECKING = 20


def carry_out(steps: plan.Plan, lab: Lab, engine: Engine, emit: Emit, failed: Failures = MappingProxyType({})) -> None:
    """Every step in order, those of different hosts side by side; one that ``failed`` gets none, nor any further ones.

    HostError says which step failed, on which host or node, and what came back, once the others are done.
    """
    lost = dict(failed)
    for concerns_hosts, group in groupby(numbered(steps), key=lambda one: isinstance(one.step, plan.HostStep)):
        if concerns_hosts:
            lost |= on_hosts(group, lambda step: do(step, lab, engine), emit, lost)
            continue
        for one in group:
            if step := spared(one.step, lab, lost):
                replace(one, step=step).announce(emit)
                try:
                    do(step, lab, engine)
                except HostError as error:
                    if not lost:
                        raise
                    lost[lab.host_of(error.node).name if error.node else HERE] = error
    raise_all(lost)


def remove_all(
    steps: plan.Plan, engine: Engine, emit: Emit, bring: Bring, failed: Failures = MappingProxyType({})
) -> Failures:
    """The steps of a plan that only removes: it needs no lab on disk. Returns what failed where, and did before.

    The files of a host go once ``bring`` has fetched what is not here.
    """

    def act(step: plan.HostStep) -> None:
        if stays := remove(step, engine, bring):
            emit(Event(kind="warning", text=f"{step.host}: {stays}"))

    return {**failed, **on_hosts(numbered(steps), act, emit, failed)}


@dataclass(frozen=True, slots=True)
class Numbered:
    """A step of a plan and its place in it."""

    step: plan.Step
    number: int
    of: int

    def announce(self, emit: Emit) -> None:
        emit(Event(kind="step", text=f"[{self.number}/{self.of}] {shorten(str(self.step))}"))


def numbered(steps: plan.Plan) -> Iterator[Numbered]:
    return (Numbered(step, number, len(steps.steps)) for number, step in enumerate(steps.steps, 1))


def on_hosts(
    group: Iterable[Numbered], act: Callable[[plan.HostStep], None], emit: Emit, lost: Failures
) -> dict[str, HostError]:
    """The steps of each host in order, all hosts at once; returns what failed where. Lost hosts are left out."""
    queues: dict[str, list[Numbered]] = {}
    for one in group:
        host = cast(plan.HostStep, one.step).host
        if host not in lost:
            queues.setdefault(host, []).append(one)

    def work(host: str) -> None:
        for one in queues[host]:
            one.announce(emit)
            with busy(host):
                act(cast(plan.HostStep, one.step))

    with waiting_for("still at it", lambda text: emit(Event(kind="notice", text=text))) as busy:
        return attempt(work, {host: host for host in queues})[1]


def spared(step: plan.Step, lab: Lab, lost: Failures) -> plan.Step | None:
    """The step as far as it concerns hosts that are not lost; None where nothing of it is left."""
    if not isinstance(step, plan.Reach) or not lost:
        return step
    nodes = tuple(node.name for node in lab.nodes if node.name in step.nodes and node.host not in lost)
    return replace(step, nodes=nodes) if nodes and lab.host_of(render.LAUNCHER).name not in lost else None


def raise_all(lost: Failures) -> None:
    """HostError that says what failed on each of these hosts; nothing where none failed."""
    if len(lost) == 1:
        raise next(iter(lost.values()))
    if lost:
        first = next(iter(lost))
        lines = "".join(f"\n  {indented(about(host, error))}" for host, error in lost.items())
        advice = lost[first].hint
        if advice and len({error.hint for error in lost.values()}) > 1:
            advice = f"{advice} (for {first}; `labctl doctor` says what for each)"
        hint = f"{advice}; then the same command again" if advice else "the same command again"
        raise HostError(f"{len(lost)} hosts failed:{lines}", hint=hint, node=first)


def about(host: str, error: HostError) -> str:
    return error.message if error.message.startswith(host) else f"{host}: {error.message}"


def indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def remove(step: plan.HostStep, engine: Engine, bring: Bring) -> str:
    """Carry out a step that only removes; returns what stays, as others use it."""
    there = engine.on(step.host)
    if isinstance(step, plan.RemoveContainers):
        remove_containers(step, engine)
    elif isinstance(step, plan.RemoveNetworks):
        there.remove_networks(tuple(identity for identity, _ in step.networks))
    elif isinstance(step, plan.RemoveFiles) and there.connection:
        bring(there.connection, step.directory)
        sending.remove(there.connection, step.directory)
    elif isinstance(step, plan.RemoveImage):
        try:
            there.remove_image(step.image)
        except HostError as error:
            # Docker's word for an image that a container uses.
            _, conflict, why = error.message.partition("conflict: ")
            if not conflict:
                raise
            return f"image {step.image} stays: {why}"
    return ""


def remove_containers(step: plan.RemoveContainers, engine: Engine) -> None:
    engine.on(step.host).remove(tuple(container.id for container in step.containers))


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
def _(step: plan.SendFiles, lab: Lab, engine: Engine) -> None:
    there = engine.on(step.host)
    if there.connection:
        laid.note(lab.directory, step.host, there.identity())
        provision.send(lab, lab.host(step.host), there.connection, step.image)


@do.register
def _(step: plan.RemoveContainers, lab: Lab, engine: Engine) -> None:  # noqa: ARG001
    remove_containers(step, engine)


@do.register
def _(step: plan.ComposeUp, lab: Lab, engine: Engine) -> None:
    files = tuple(lab.directory / render.compose_path(node) for node in step.nodes)
    engine.on(step.host).compose_up(step.project, files)


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
    with pool(len(nodes)) as threads:
        left = threads.map(lambda node: reap_node(lab, engine, node, run_id, grace), nodes)
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
    with pool(len(nodes)) as threads:
        return {node: said for node, said in zip(nodes, threads.map(check, nodes), strict=True) if said}


def agent(lab: Lab, engine: Engine, node: str, *words: str) -> list[str]:
    """What the node's own agent prints, one line each; HostError when it fails without an answer."""
    done = engine.call(render.container_name(lab, node), (*AGENT, *words), user=user(lab, node))
    if done.code and not done.out:
        said = done.err.strip() or f"{AGENT[-1]} {words[0]} ended with code {done.code} and without a word"
        raise HostError(f"{node}: {said}", hint=f"labctl status; labctl logs {node}", node=node)
    return done.out.splitlines()


def user(lab: Lab, node: str = render.LAUNCHER) -> str:
    """Numeric user and group that processes in a container of the lab have: the person's own on its host."""
    host = lab.host_of(node)
    return f"{host.uid}:{host.gid}"
