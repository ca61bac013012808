"""What is wrong here, and what mends it: every check of the hosts, their engines and the lab, side by side.

``CHECKS`` is the list of them, in the order of their findings. A check is a function that looks and yields findings;
adding one is adding a function and its line.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal

from labctl.doctor import devices, engine, files, gaudi, host, hosts, image, leased, network, nodes, traffic
from labctl.doctor.finding import LIMIT, Examination, Finding, warn
from labctl.doctor.mending import Ask, Attempt, mend
from labctl.doctor.together import together
from labctl.engines.state import Container
from labctl.errors import ConfigError, HostError, LabError
from labctl.model import HERE

__all__ = ["Ask", "Attempt", "Examination", "Finding", "examine", "mend", "refused", "require"]

Look = Callable[[Examination], Iterator[Finding]]
LookInside = Callable[[Examination, Container], Iterator[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check, and where it applies: ``stops`` names the commands that call it, because what it finds stops them."""

    look: Look
    of: Literal["machine", "host", "lab"] = "host"
    """Where there are hosts: this machine, which labctl runs on, each of them, or what they have in common."""
    engine: bool = True
    """Whether it needs a daemon that answers."""
    lab: bool = True
    """Whether it needs the lab's own devices; without them the host and its engine are looked at all the same."""
    stops: tuple[str, ...] = ()
    seconds: float = LIMIT
    """How long it may take."""

    def log(self, examination: Examination) -> str:
        """The command that shows what it looks at from nearer."""
        place = examination.place
        return place.there(f"{place.sudo}{'journalctl -u docker -n 50' if self.engine else 'dmesg | tail -n 50'}")


CHECKS: tuple[Check, ...] = (
    Check(look=host.cores, engine=False),
    Check(look=host.memory, engine=False),
    Check(look=host.shared_memory, of="machine", engine=False, stops=("up",)),
    Check(look=hosts.shared, engine=False, lab=False, stops=("up",)),
    Check(look=host.mounts, engine=False, stops=("up",)),
    Check(look=host.space, engine=False, lab=False),
    Check(look=host.records, of="machine", engine=False, lab=False, stops=("run",)),
    Check(look=host.proxies, of="machine", engine=False, lab=False),
    Check(look=host.certificates, of="machine", engine=False, lab=False),
    Check(look=gaudi.hugepages, engine=False),
    Check(look=gaudi.balancing, engine=False),
    Check(look=gaudi.iommu, engine=False),
    Check(look=devices.permissions, engine=False, stops=("up",)),
    Check(look=devices.health, engine=False, seconds=devices.TELLING),
    Check(look=leased.leased, engine=False),
    Check(look=engine.compose, of="machine", engine=False, lab=False),
    Check(look=engine.buildx, of="machine", engine=False, lab=False),
    Check(look=engine.version, lab=False, stops=("up",)),
    Check(look=hosts.ssh_port, stops=("up",)),
    Check(look=hosts.master_port, stops=("up",)),
    Check(look=hosts.room, engine=False, stops=("up",)),
    Check(look=hosts.alike, of="lab"),
    Check(look=engine.groups),
    Check(look=engine.clock, lab=False),
    Check(look=engine.space, lab=False),
    Check(look=engine.limits),
    Check(look=devices.starts, seconds=devices.TELLING),
    Check(look=files.name, lab=False),
    Check(look=image.image, lab=False),
    Check(look=image.driver),
    Check(look=network.pools, lab=False),
    Check(look=network.mtu, lab=False),
    Check(look=network.neighbours, engine=False),
    Check(look=files.private_keys, of="lab"),
    Check(look=files.rendered, of="lab"),
    Check(look=nodes.states),
    Check(look=network.missing),
    Check(look=network.members),
    Check(look=nodes.links, of="lab", seconds=nodes.REACHING),
    Check(look=traffic.interfaces, of="lab", seconds=traffic.LIMIT),
)
ASKING = 30.0
"""Seconds for what a host's engine is asked before the checks."""
INSIDE: tuple[tuple[LookInside, float], ...] = ((nodes.inside, LIMIT), (devices.counted, devices.COUNTING))
"""Checks of each container that runs, with their seconds."""


def examine(
    examination: Examination,
    *,
    lacking: Mapping[str, LabError] = MappingProxyType({}),
    first: tuple[Finding, ...] = (),
) -> tuple[Finding, ...]:
    """Every check that can be made, side by side, each with its time; findings in the order of the checks.

    On hosts that are ``lacking`` the lab's devices, and on this machine for one that has none at all, only what does
    not depend on them; ``first`` are findings that there are already. ConfigError where the one node asked about is
    none of the lab's.
    """
    if examination.only and not examination.names:
        known = ", ".join(node.name for node in examination.lab.nodes)
        raise ConfigError(
            f"lab {examination.lab.name} has no node `{examination.only}`", hint=f"it has launcher, {known}"
        )
    asked = (examination,) if examination.local else examination.hosts
    failures = together([(partial(gather, one), ASKING) for one in asked])
    pairs = tuple(zip(asked, failures, strict=True))
    asleep = [finding for one, failed in pairs for finding in silence(one, failed)]
    each = tuple(one if failed == () else replace(one, silent=True) for one, failed in pairs)
    silent = all(one.silent for one in each)
    whole = each[0] if examination.local else replace(examination, hosts=each, silent=silent)
    tasks = [
        Sight(one.name, check.look.__name__, partial(check.look, one), check.seconds, check.log(one))
        for check in CHECKS
        for one in (each if check.of == "host" else (whole,))
        if not (one.name in lacking and check.lab) and not (check.engine and one.silent)
    ]
    tasks += [
        Sight(one.node, look.__name__, partial(look, on, one), limit, f"labctl logs {one.node}")
        for on in each
        if not (on.name in lacking or on.silent)
        for one in on.running
        for look, limit in INSIDE
    ]
    found = together([(task.findings, task.limit) for task in tasks])
    seen = [one for task, findings in zip(tasks, found, strict=True) for one in answered(task, findings)]
    about = {HERE, *(one.name for one in each)}
    # Of a host that does not answer no more is claimed than that.
    unable = [
        replace(devices.none(examination.host(error.node), error), node=error.node or HERE)
        for error in dict.fromkeys(lacking.values())
        if each and error.node in (None, *about)
    ]
    return (*first, *unable, *asleep, *(one for one in seen if one.node in about or examination.only in ("", one.node)))


def gather(examination: Examination) -> Iterator[HostError]:
    """Ask the engine once what many checks want to know; why not, where it does not answer."""
    if examination.silent:
        return
    try:
        _ = examination.info, examination.observed, examination.network
    except HostError as failure:
        yield failure


def silence(examination: Examination, failures: tuple[HostError, ...] | None) -> Iterator[Finding]:
    """The finding of an engine that was asked and does not answer."""
    if failures is None:
        failures = (HostError(f"{examination.name}: its engine does not answer within {ASKING:.0f} s"),)
    for failure in failures:
        yield replace(engine.silent(examination, failure), node=examination.name)


@dataclass(frozen=True, slots=True)
class Sight:
    """One check of one node."""

    node: str
    name: str
    look: Callable[[], Iterator[Finding]]
    limit: float
    log: str
    """The command that shows what the one looked at says of itself."""

    def findings(self) -> Iterator[Finding]:
        """What the check yields; a check that cannot go on is a finding too."""
        try:
            for finding in self.look():
                # What a check finds of the host that it looks at.
                yield replace(finding, node=self.node) if finding.node == HERE else finding
        except LabError as failure:
            node = failure.node or self.node
            why = "what it looks at could not be asked"
            fix = self.log if failure.hint in ("", "labctl doctor") else failure.hint
            yield warn("LAB-CHECK-001", f"{self.name}: {failure.message}", why=why, fix=fix, node=node)
        except (OSError, ValueError) as failure:
            # A file that may not be read, or an answer in another form than any known.
            path = getattr(failure, "filename", None)
            fix = f"ls -ld {shlex.quote(str(path))}" if path else self.log
            why = "what it looks at cannot be read"
            yield warn("LAB-CHECK-001", f"{self.name}: {failure}", why=why, fix=fix, node=self.node)


def answered(sight: Sight, findings: tuple[Finding, ...] | None) -> tuple[Finding, ...]:
    if findings is not None:
        return findings
    seen = f"{sight.name}: no answer within {sight.limit:.0f} s"
    why = "the host, a disk, the engine or the node hangs"
    return (warn("LAB-CHECK-002", seen, why=why, fix=sight.log, node=sight.node),)


def require(examination: Examination, command: str) -> None:
    """HostError for the first thing found that will stop the command; only checks that take no time are made.

    Where the lab has hosts, only what concerns this machine: those are looked at by ``refused``.
    """
    for check in CHECKS:
        if command in check.stops and (examination.local or check.of != "host"):
            for finding in stopping(check, examination):
                raise finding


def refused(examination: Examination, command: str) -> dict[str, HostError]:
    """The hosts that cannot take part in the command, and the first reason of each; looked at side by side."""

    def reasons(one: Examination) -> Iterator[HostError]:
        for check in (check for check in CHECKS if command in check.stops and check.of == "host"):
            try:
                yield from stopping(check, one)
            except HostError as failure:
                yield failure

    each = [one for one in examination.hosts if not one.silent]
    found = together([(partial(reasons, one), ASKING) for one in each])
    late = (HostError(f"it was not looked at within {ASKING:.0f} s", hint="labctl doctor"),)
    pairs = [
        (one, answers[0])
        for one, answers in zip(each, (late if f is None else f for f in found), strict=True)
        if answers
    ]
    return {
        one.name: HostError(f"{one.name}: {why.message.removeprefix(f'{one.name}: ')}", hint=why.hint, node=one.name)
        for one, why in pairs
    }


def stopping(check: Check, examination: Examination) -> Iterator[HostError]:
    """What a check finds that will stop a command."""
    for finding in check.look(examination):
        if finding.level == "error":
            message = f"{finding.seen} ({finding.code}): {finding.why}"
            yield HostError(message, hint=finding.fix, node=None if finding.node == HERE else finding.node)
