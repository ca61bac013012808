"""Plan + engine -> done: carries out each step and says so; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import singledispatch
from itertools import groupby
from types import MappingProxyType
from typing import cast

from labctl import model, naming
from labctl.deploy import ledger, plan, provision
from labctl.engines import Backend
from labctl.engines.agent import reach
from labctl.errors import Failures, HostError, raise_all
from labctl.hosts import push
from labctl.hosts.ssh import Connection
from labctl.model import HERE, Event, Lab
from labctl.system import files
from labctl.system.parallel import map_hosts
from labctl.system.progress import waiting_for

Emit = Callable[[Event], None]
Bring = Callable[[Connection, str], None]
"""Fetches what is only on a host, from a directory there that is to be removed."""


def carry_out(steps: plan.Plan, lab: Lab, engine: Backend, emit: Emit, failed: Failures = MappingProxyType({})) -> None:
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
    steps: plan.Plan, engine: Backend, emit: Emit, bring: Bring, failed: Failures = MappingProxyType({})
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
        return map_hosts(work, {host: host for host in queues})[1]


def spared(step: plan.Step, lab: Lab, lost: Failures) -> plan.Step | None:
    """The step as far as it concerns hosts that are not lost; None where nothing of it is left."""
    if not isinstance(step, plan.WaitForSsh) or not lost:
        return step
    nodes = tuple(node.name for node in lab.nodes if node.name in step.nodes and node.host not in lost)
    return replace(step, nodes=nodes) if nodes and lab.host_of(model.LAUNCHER).name not in lost else None


def remove(step: plan.HostStep, engine: Backend, bring: Bring) -> str:
    """Carry out a step that only removes; returns what stays, as others use it."""
    there = engine.on(step.host)
    if isinstance(step, plan.RemoveContainers):
        remove_containers(step, engine)
    elif isinstance(step, plan.RemoveNetworks):
        there.remove_networks(tuple(identity for identity, _ in step.networks))
    elif isinstance(step, plan.RemoveFiles):
        bring(there.connection, step.directory)
        push.remove(there.connection, step.directory)
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


def remove_containers(step: plan.RemoveContainers, engine: Backend) -> None:
    engine.on(step.host).remove(tuple(container.id for container in step.containers))


def shorten(text: str, width: int = 110) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


@singledispatch
def do(step: object, lab: Lab, engine: Backend) -> None:  # noqa: ARG001
    """Carry out one step."""
    raise TypeError(f"no way to carry out {type(step).__name__}")


@do.register
def _(step: plan.WriteFiles, lab: Lab, engine: Backend) -> None:  # noqa: ARG001
    files.write_all(lab.directory, step.files)


@do.register
def _(step: plan.SendFiles, lab: Lab, engine: Backend) -> None:
    there = engine.on(step.host)
    ledger.note(lab.directory, step.host, there.identity())
    provision.send(lab, lab.host(step.host), there.connection, step.image)


@do.register
def _(step: plan.RemoveContainers, lab: Lab, engine: Backend) -> None:  # noqa: ARG001
    remove_containers(step, engine)


@do.register
def _(step: plan.ComposeUp, lab: Lab, engine: Backend) -> None:
    files = tuple(lab.directory / naming.compose_path(node) for node in step.nodes)
    engine.on(step.host).compose_up(step.project, files)


@do.register
def _(step: plan.WaitForSsh, lab: Lab, engine: Backend) -> None:
    reach(lab, engine, step.nodes, step.seconds)
