"""Steps of a command: printed by ``--dry-run``, or carried out in order; all are decided before the first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, Protocol

from msgspec import Struct

from labctl.config.context import Context
from labctl.errors import Failures, HostError, raise_all
from labctl.model import HERE, Event
from labctl.system.parallel import map_hosts
from labctl.system.progress import waiting_for


class Deployment(Protocol):
    """The objects that the steps of a backend act on."""

    @property
    def context(self) -> Context:
        """Context that steps report to."""

    def host_of(self, error: HostError) -> str:
        """Return the host on which a step failed, also if the error names a node of it."""


class Step(Struct, frozen=True, kw_only=True):
    """A step of a command, as text, with its cause; ``do`` carries it out."""

    cause: str

    def do(self, deployment: Any) -> Failures | None:
        """Carry the step out; return hosts on which it failed if others go on. HostError if all fail."""
        raise NotImplementedError(type(self).__name__)

    def without(self, deployment: Any, lost: Failures) -> Step | None:  # noqa: ARG002 - for steps of several hosts
        """Return the step as it is; steps of several hosts leave out ``lost`` ones, and are None without any."""
        return self


class HostStep(Step, frozen=True, kw_only=True):
    """A step on one host; successive steps on different hosts run concurrently."""

    host: str = HERE


class Plan(Struct, frozen=True):
    """Steps in order; the text has one numbered line each, with its cause."""

    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        lines = (f"#{number} {step}  [{step.cause}]" for number, step in enumerate(self.steps, 1))
        return "\n".join(lines) or "nothing to do"


class PlanPreview(Struct, frozen=True):
    """The steps of a plan, as text."""

    lab: str
    plan: tuple[str, ...]


def preview(lab: str, *plans: Plan) -> PlanPreview:
    """Return the text of plans that follow each other, numbered as one."""
    whole = Plan(tuple(step for plan in plans for step in plan.steps))
    return PlanPreview(lab, tuple(str(whole).splitlines()))


def carry_out(
    steps: Sequence[Step],
    deployment: Deployment,
    failed: Failures = MappingProxyType({}),
    *,
    before: int = 0,
    after: int = 0,
) -> dict[str, HostError]:
    """Carry out steps, those of hosts at once, not of ``failed`` ones; return failures. HostError if others fail.

    A host that fails, or is among ``failed``, gets no further steps. ``before`` and ``after`` count further steps of
    the same command, for the numbers that are announced. HostError for a step that fails as a whole.
    """
    lost = dict(failed)
    total = before + len(steps) + after
    numbered = [(f"[{number}/{total}]", step) for number, step in enumerate(steps, before + 1)]
    for on_hosts, group in groupby(numbered, key=lambda item: isinstance(item[1], HostStep)):
        if on_hosts:
            lost |= _concurrently(group, deployment, lost)
            continue
        for number, whole in group:
            step = whole.without(deployment, lost) if lost else whole
            if step is None:
                continue
            announce(deployment.context, number, step)
            try:
                lost |= step.do(deployment) or {}
            except HostError as error:
                raise_all({**lost, deployment.host_of(error): error})
    return lost


def _concurrently(group: Iterable[tuple[str, Step]], deployment: Deployment, lost: Failures) -> dict[str, HostError]:
    """Carry out each host's steps in order, all hosts at once, but no lost ones; return failed hosts."""
    queues: dict[str, list[tuple[str, HostStep]]] = {}
    for number, step in group:
        if isinstance(step, HostStep) and step.host not in lost:
            queues.setdefault(step.host, []).append((number, step))

    def work(host: str) -> None:
        """Announce and carry out the steps of a host in order."""
        for number, step in queues[host]:
            announce(deployment.context, number, step)
            with busy(host):
                step.do(deployment)

    with waiting_for("still running", deployment.context.notice) as busy:
        return map_hosts(work, {host: host for host in queues})[1]


def announce(context: Context, number: str, step: Step) -> None:
    """Report a step, with its number, as an event before it is carried out."""
    context.emit(Event(kind="step", text=f"{number} {step}"))
