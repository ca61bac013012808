"""What changed on the nodes of a run while it ran: their health before and after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct, field

from labctl.backends import Backend
from labctl.backends import health as of_backend
from labctl.backends.health import HostHealth, nodes_of
from labctl.config import health_rules
from labctl.errors import HostError
from labctl.health import examine
from labctl.health.model import Condition, Level, Rules, Snapshot
from labctl.model import Lab, Result
from labctl.records.active import Run
from labctl.runs.health import Looked, begin_look
from labctl.system import files
from labctl.system.decode import decode

RECORD = "health.json"
"""Readings before and after a run, in its record."""
AFTERWARDS = 3.0
"""Seconds that a host may take to be read after a run."""
CLOCKS = frozenset(("clock", "clock-jump"))
"""Checks of clocks: if most hosts have them, the clock of labctl's machine moved."""
SHOWN = 3
"""Changes that a message names at most."""


class Recorded(Struct, frozen=True, kw_only=True):
    """Readings of the hosts of a run, before it and, once it has ended, after it."""

    before: Mapping[str, Snapshot] = field(default_factory=dict)
    after: Mapping[str, Snapshot] = field(default_factory=dict)


def record(run: Run, readings: Recorded) -> None:
    """Write the readings of a run into its record, if there are any; a run goes on without them."""
    if readings.before:
        with suppress(HostError):
            files.write(run.directory / RECORD, msgspec.json.encode(readings).decode())


def read(directory: Path) -> Recorded:
    """Return the readings in a run's record; none if it has none, or those of another labctl."""
    try:
        return decode((directory / RECORD).read_bytes(), Recorded)
    except (OSError, ValueError):
        return Recorded()


def begin_after(backend: Backend, run: Run) -> Future[Looked] | None:
    """Begin to read the hosts of a run that has ended; None if they were not read before it, or cannot be."""
    # Whatever fails here, the run keeps its result.
    with suppress(Exception):
        if read(run.directory).before:
            return begin_look(backend, run, AFTERWARDS)
    return None


def of(run: Run, looked: Future[Looked] | None) -> tuple[Condition, ...]:
    """Return what changed on the hosts of a run while it ran, the bad first, and keep the readings in its record.

    The ``item`` begins with the nodes. A host that does not answer in time has no word: the run's own end names it.
    """
    # Whatever fails here, such as a health.yml that was changed, the run keeps its result; as with Ctrl-C.
    with suppress(Exception, KeyboardInterrupt):
        return _of(run, looked) if looked else ()
    return ()


def _of(run: Run, looked: Future[Looked]) -> tuple[Condition, ...]:
    """Return the changes as ``of``. Raises what reading the hosts or health.yml raises."""
    recorded, rules = read(run.directory), health_rules.load(run.lab.directory)
    after, _ = looked.result()
    record(run, msgspec.structs.replace(recorded, after=after))
    both = [host for host in after if host in recorded.before]
    by_host = [_changes_of(run, host, recorded.before[host], after[host], rules) for host in both]
    moved = sum(any(change.check in CLOCKS for change in found) for found in by_host)
    left_out = CLOCKS if moved > 1 and 2 * moved > len(both) else frozenset()
    found = [change for changes in by_host for change in changes if change.check not in left_out]
    return tuple(sorted(found, key=lambda condition: condition.level != "bad"))


def _changes_of(run: Run, host: str, before: Snapshot, now: Snapshot, rules: Rules) -> list[Condition]:
    """Return the conditions of a host after a run that it did not have before it."""
    subjects = of_backend.subjects_of(run.lab.accelerator)
    past = examine.Past(snapshot=before, since=examine.since_of(now, before), shows_age=False)
    # Lines that were there before are not new, whatever they say.
    earlier = examine.Past(since=examine.since_of(before, before))
    as_now = examine.renumbered(before, now)
    known_before = of_backend.named(as_now, examine.examine(as_now, subjects, rules, earlier, {}), earlier)
    known = {_identity(each) for each in known_before}
    found = (*_restarted(before, now, rules), *examine.examine(now, subjects, rules, past, {}))
    conditions = of_backend.named(now, found, past)
    verdict = HostHealth(host=host, nodes=of_backend.nodes_on(run.lab, host), level="ok", conditions=conditions)
    if examine.worst(conditions) == "bad":
        with suppress(HostError):
            of_backend.keep(run.lab.directory, {host: now}, [msgspec.structs.replace(verdict, level="bad")], full=False)
    raised = {check.name for subject in subjects for check in subject.checks if check.bad_in_run}
    return [
        msgspec.structs.replace(
            each, item=_with_nodes(run.lab, verdict, each), level="bad" if each.check in raised else each.level
        )
        for each in verdict.wrong
        if _identity(each) not in known and nodes_of(run.lab, verdict, each)
    ]


def _restarted(before: Snapshot, now: Snapshot, rules: Rules) -> Iterator[Condition]:
    """Yield that a host restarted between two looks, unless that is unknown or changes are off."""
    if before.boot and now.boot and before.boot != now.boot and examine.CHANGED not in rules.off:
        yield Condition(check=examine.CHANGED, subject=examine.CHANGES, level="bad", text="restarted")


def _identity(condition: Condition) -> tuple[str, str, Level]:
    """Return the parts of a condition by which it is known again; its text has figures that change."""
    return condition.check, condition.item, condition.level


def _with_nodes(lab: Lab, verdict: HostHealth, condition: Condition) -> str:
    """Return the nodes of a condition, with its item: ``worker-3 mlx5_0/1``."""
    return f"{', '.join(nodes_of(lab, verdict, condition))} {condition.item}".rstrip()


def message(result: Result, found: Sequence[Condition]) -> str:
    """Return the message of a run that failed with what went bad on its nodes while it ran."""
    bad = [f"{each.sentence()} during the run" for each in found if each.level == "bad"]
    return "; ".join((result.message, *bad[:SHOWN]))
