"""What is wrong here, and what mends it: every check of the host, the engine and the lab, side by side.

``CHECKS`` is the list of them, in the order of their findings. A check is a function that looks and yields findings;
adding one is adding a function and its line.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from labctl.containers import Container
from labctl.doctor import devices, engine, files, gaudi, host, image, network, nodes
from labctl.doctor.finding import HERE, LIMIT, Examination, Finding, as_root, warn
from labctl.doctor.mending import Ask, Attempt, mend
from labctl.doctor.together import together
from labctl.errors import ConfigError, HostError, LabError

__all__ = ["Ask", "Attempt", "Examination", "Finding", "examine", "mend", "require"]

Look = Callable[[Examination], Iterator[Finding]]
LookInside = Callable[[Examination, Container], Iterator[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check, and where it applies: ``stops`` names the commands that call it, because what it finds stops them."""

    look: Look
    engine: bool = True
    """Whether it needs a daemon that answers."""
    lab: bool = True
    """Whether it needs the lab's own devices; without them the host and its engine are looked at all the same."""
    stops: tuple[str, ...] = ()
    seconds: float = LIMIT
    """How long it may take."""

    @property
    def log(self) -> str:
        """The command that shows what it looks at from nearer."""
        return f"{as_root()}journalctl -u docker -n 50" if self.engine else f"{as_root()}dmesg | tail -n 50"


CHECKS: tuple[Check, ...] = (
    Check(look=host.cores, engine=False),
    Check(look=host.memory, engine=False),
    Check(look=host.shared_memory, engine=False, stops=("up",)),
    Check(look=host.mounts, engine=False, stops=("up",)),
    Check(look=host.space, engine=False, lab=False),
    Check(look=host.records, engine=False, lab=False, stops=("run",)),
    Check(look=host.proxies, engine=False, lab=False),
    Check(look=host.certificates, engine=False, lab=False),
    Check(look=gaudi.hugepages, engine=False),
    Check(look=gaudi.balancing, engine=False),
    Check(look=gaudi.iommu, engine=False),
    Check(look=devices.permissions, engine=False, stops=("up",)),
    Check(look=devices.health, engine=False, seconds=devices.TELLING),
    Check(look=devices.leased, engine=False),
    Check(look=engine.compose, engine=False, lab=False),
    Check(look=engine.buildx, engine=False, lab=False),
    Check(look=engine.version, lab=False),
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
    Check(look=files.private_keys),
    Check(look=files.rendered),
    Check(look=nodes.states),
    Check(look=network.missing),
    Check(look=network.members),
    Check(look=nodes.links, seconds=nodes.REACHING),
)
INSIDE: tuple[tuple[LookInside, float], ...] = ((nodes.inside, LIMIT), (devices.counted, devices.COUNTING))
"""Checks of each container that runs, with their seconds."""


def examine(examination: Examination, *, lacking: LabError | None = None) -> tuple[Finding, ...]:
    """Every check that can be made, side by side, each with its time; findings in the order of the checks.

    On a host ``lacking`` the lab's devices, only what does not depend on them. ConfigError where the one node asked
    about is none of the lab's.
    """
    if examination.only and not examination.names:
        known = ", ".join(node.name for node in examination.lab.nodes)
        raise ConfigError(
            f"lab {examination.lab.name} has no node `{examination.only}`", hint=f"it has launcher, {known}"
        )
    asleep = gather(examination)
    examination = replace(examination, silent=True) if asleep else examination
    first = [*((devices.none(examination, lacking),) if lacking else ()), *((asleep,) if asleep else ())]
    checks = [check for check in CHECKS if not (asleep and check.engine) and not (lacking and check.lab)]
    tasks = [
        Sight(HERE, check.look.__name__, partial(check.look, examination), check.seconds, check.log) for check in checks
    ]
    if not first:
        tasks += [
            Sight(one.node, look.__name__, partial(look, examination, one), limit, f"labctl logs {one.node}")
            for one in examination.running
            for look, limit in INSIDE
        ]
    found = together([(task.findings, task.limit) for task in tasks])
    seen = [one for task, findings in zip(tasks, found, strict=True) for one in answered(task, findings)]
    return (*first, *(one for one in seen if one.node == HERE or examination.only in ("", one.node)))


def gather(examination: Examination) -> Finding | None:
    """Ask the engine once what many checks want to know; the finding of an engine that does not answer."""
    try:
        _ = examination.info, examination.observed, examination.network
    except HostError as failure:
        return engine.silent(examination, failure)
    return None


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
            yield from self.look()
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
    """HostError for the first thing found that will stop the command; only checks that take no time are made."""
    for check in CHECKS:
        if command in check.stops:
            for finding in check.look(examination):
                if finding.level == "error":
                    message = f"{finding.seen} ({finding.code}): {finding.why}"
                    raise HostError(message, hint=finding.fix, node=None if finding.node == HERE else finding.node)
