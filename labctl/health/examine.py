"""Examine a node: each check of its readings, compared with neighbours, earlier readings and a lock file."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from labctl.health.model import (
    LEVELS,
    Answer,
    Check,
    Condition,
    Evidence,
    KernelLine,
    Level,
    LineCheck,
    Reading,
    Rules,
    Snapshot,
    Subject,
    Value,
)
from labctl.health.script import ERRORS
from labctl.system import human

PROCESSOR = "processor"
"""Reading that nodes of the same hardware have in common."""
MACHINE = "machine"
"""Reading that no other machine has: a lock file is of the machine that has it."""
KERNEL_SOURCE = "dmesg"
ADDRESS = "PCI address"
"""Reading of a device by which it is known again: its number moves if another device is gone."""
UNIQUE = (ADDRESS, "uuid")
"""Readings by which a device is known again, the surest first: an address moves with another firmware or slot."""
CHANGED, CHANGES = "changed", "Changes"
"""Name of the check of what moved, and its heading."""
LOST_STEPS = ("{sudo}dmesg | tail -n 100", "{sudo}reboot", "if it does not come back: service of the host")
"""Steps for hardware that a host lacks."""
ON_PURPOSE = "if it was taken out on purpose: labctl health --since 1m"
"""Step by which an item that is gone is forgotten."""
FREEZE = "if that is on purpose: labctl freeze"
OWN_LEVELS: Mapping[int, Level] = {0: "ok", 1: "remark", 2: "bad"}
TIMED_OUT = 124
"""Exit code of timeout(1) for a command that did not end."""


class Past(Struct, frozen=True, kw_only=True):
    """Earlier readings of a node, and the time from which a kernel line counts, in seconds since the node's start."""

    snapshot: Snapshot | None = None
    since: float = 0.0
    frozen: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The node's fingerprint in a lock file: facts by item and name."""
    lock: str = ""
    """Name of the lock file."""
    shows_age: bool = True
    """True if the age of a kernel line is shown: a run's record is read later."""


def since_of(now: Snapshot, before: Snapshot | None, seconds: float | None = None) -> float:
    """Return the time of the kernel from which its lines count: the last ``seconds``, else after ``before``'s, or 0.

    The kernel's clock of lines is not that of its uptime: it is never adjusted, and stops while a machine sleeps. So
    the last line that was there before tells, and the uptime only if lines could not be read then.
    """
    if seconds is not None:
        return now.uptime - seconds
    if before is None or before.boot != now.boot:
        return 0.0
    return before.uptime if before.lines_why else max((line.seconds for line in before.lines), default=0.0)


def examine(
    now: Snapshot, subjects: Sequence[Subject], rules: Rules, past: Past, neighbours: Mapping[str, Snapshot]
) -> tuple[Condition, ...]:
    """Return the answer of each check that applies to a node; ``neighbours`` are the other nodes by name."""
    conditions: list[Condition] = []
    past = recognized(past, now)
    alike = {name: other for name, other in neighbours.items() if _processor(other) == _processor(now)}
    for subject in subjects:
        for check in subject.checks:
            if check.name not in rules.off:
                conditions += _of_check(subject, check, now, rules, past, alike)
        for line_check in subject.lines:
            if line_check.name not in rules.off:
                conditions += _of_lines(subject, line_check, now, rules, past)
    unreadable = tuple(_unreadable(now, subjects))
    conditions += unreadable
    if CHANGED not in rules.off:
        # Items of a subject that cannot be read are not gone.
        conditions += changed(now, past, subjects, has_all=not unreadable)
        conditions += () if unreadable else missing(now, past, subjects, neighbours)
    conditions += own(now, rules)
    return tuple(conditions)


def worst(conditions: Iterable[Condition], *, is_blind: bool = False) -> Level:
    """Return the worst level of these conditions, without ``unknown`` if any check could look; unknown if none.

    ``is_blind``: nothing is known of the devices, so that without a bad condition the answer is unknown.
    """
    levels = {condition.level for condition in conditions} - {"unknown"}
    if not levels or (is_blind and "bad" not in levels):
        return "unknown"
    return max(levels, key=LEVELS.index)


def _processor(snapshot: Snapshot) -> Value | None:
    """Return the model of a node's processor."""
    return next((reading.value for reading in snapshot.readings if reading.name == PROCESSOR), None)


def _of_check(
    subject: Subject, check: Check, now: Snapshot, rules: Rules, past: Past, alike: Mapping[str, Snapshot]
) -> Iterator[Condition]:
    """Yield the answer of a check for each reading that it judges."""
    before = past.snapshot.by_key() if past.snapshot else {}
    for reading in now.readings:
        if reading.name != check.reading:
            continue
        if reading.value is None:
            yield _condition(subject, check.name, reading, Answer("unknown", reading.why))
            continue
        earlier = before.get(reading.key)
        evidence = Evidence(
            limit=rules.limits.get(check.name, check.limit),
            neighbours=tuple(_neighbours(reading, now, alike)),
            before=earlier.value if earlier else None,
            same_boot=bool(past.snapshot and past.snapshot.boot == now.boot),
        )
        answer = _judged(partial(check.judge, reading, evidence)) or Answer("ok", "")
        steps = _filled(check.steps, reading.item, now) if answer.level in ("bad", "remark") else ()
        yield _condition(subject, check.name, reading, answer, steps)


def _judged(judge: Callable[[], Answer | None]) -> Answer | None:
    """Return a judge's answer; unknown if it fails, as on a value that nobody expects."""
    try:
        return judge()
    except ERRORS as error:
        return Answer("unknown", f"the check failed: {type(error).__name__}: {error}")


def _condition(
    subject: Subject, check: str, reading: Reading, answer: Answer, steps: tuple[str, ...] = ()
) -> Condition:
    """Build the condition of a reading."""
    return Condition(
        check=check,
        subject=subject.name,
        level=answer.level,
        item=reading.item,
        text=answer.text,
        value="" if reading.value is None else reading.text(),
        source=reading.source,
        steps=steps,
    )


def _filled(steps: Iterable[str], item: str, now: Snapshot) -> tuple[str, ...]:
    """Return steps with the item's name and id, and with sudo unless labctl is root on the node."""
    names = {"{item}": item, "{id}": item.rpartition(" ")[2], "{sudo}": "" if now.root else "sudo "}
    return tuple(re.sub(r"\{(item|id|sudo)\}", lambda match: names[match[0]], step) for step in steps)


def _neighbours(reading: Reading, now: Snapshot, alike: Mapping[str, Snapshot]) -> Iterator[tuple[str, Value]]:
    """Yield the places and values of comparable hardware, on this node and on those like it."""
    if reading.kin:
        for other in now.readings:
            if other.name == reading.name and other.kin == reading.kin and other.item != reading.item:
                yield from _known(other.item, other)
    for node, snapshot in alike.items():
        for other in snapshot.readings:
            same = other.kin == reading.kin if reading.kin else other.item == reading.item
            if other.name == reading.name and same:
                yield from _known(f"{node} {other.item}".rstrip(), other)


def _known(place: str, reading: Reading) -> Iterator[tuple[str, Value]]:
    """Yield a place and its value, if that is known."""
    if reading.value is not None:
        yield place, reading.value


# --- kernel lines --------------------------------------------------------------------------------------------


def _of_lines(subject: Subject, check: LineCheck, now: Snapshot, rules: Rules, past: Past) -> Iterator[Condition]:
    """Yield the answer of a check of kernel lines: one per text, with the number of its lines and the last time."""
    if now.lines_why:
        yield Condition(
            check=check.name, subject=subject.name, level="unknown", text=now.lines_why, source=KERNEL_SOURCE
        )
        return
    answers: dict[Answer, list[KernelLine]] = {}
    for line in now.lines:
        if line.seconds <= past.since or any(re.search(pattern, line.text) for pattern in rules.ignored):
            continue
        match = re.search(check.pattern, line.text)
        answer = _judged(partial(check.judge, match)) if match else None
        if answer:
            answers.setdefault(answer, []).append(line)
    for answer, lines in answers.items():
        times = f" ({len(lines)} times)" if len(lines) > 1 else ""
        ago = f", {human.ago(now.uptime - lines[-1].seconds)}" if past.shows_age else ""
        yield Condition(
            check=check.name,
            subject=subject.name,
            level=answer.level,
            item=answer.item,
            text=f"{answer.text}{times}{ago}",
            value=lines[-1].text,
            source=KERNEL_SOURCE,
            steps=_filled(check.steps, answer.item, now) if answer.level != "unknown" else (),
        )
    if not answers:
        yield Condition(check=check.name, subject=subject.name, level="ok", source=KERNEL_SOURCE)


# --- devices with another number -----------------------------------------------------------------------------


def recognized(past: Past, now: Snapshot) -> Past:
    """Return the past with the names that its devices have now."""
    facts = facts_of(now)
    frozen = _names(past.frozen, facts)
    return replace(
        past,
        snapshot=renumbered(past.snapshot, now) if past.snapshot else None,
        frozen={_renamed(item, frozen): of_item for item, of_item in past.frozen.items()},
    )


def renumbered(before: Snapshot, now: Snapshot) -> Snapshot:
    """Return earlier readings with the names that their devices have now."""
    names = _names(facts_of(before), facts_of(now))
    readings = (replace(reading, item=_renamed(reading.item, names)) for reading in before.readings)
    return replace(before, readings=tuple(readings))


def _names(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the present name of each earlier device: that of the one with its PCI address, else uuid, or its own.

    A device that is gone has its address behind its name if another one has this name now.
    """
    # Items of other hardware have no address, and a device whose link leads nowhere an empty one.
    earlier = {item: facts for item, facts in before.items() if facts.get(ADDRESS)}
    names: dict[str, str] = {}
    for fact in UNIQUE:
        present = {facts[fact]: item for item, facts in now.items() if facts.get(ADDRESS) and facts.get(fact)}
        for item, facts in earlier.items():
            name = present.get(facts.get(fact, ""))
            if item not in names and name and name not in names.values():
                names[item] = name
    taken = frozenset(names.values())
    for item, facts in earlier.items():
        if item not in names:
            names[item] = f"{item} ({facts[ADDRESS]})" if item in taken else item
    return names


def _renamed(item: str, names: Mapping[str, str]) -> str:
    """Return the present name of an item, or of a part of it such as ``GPU 2 NVLink 0``."""
    owner = next((name for name in names if item == name or item.startswith(f"{name} ")), "")
    return names[owner] + item.removeprefix(owner) if owner else item


# --- what moved ----------------------------------------------------------------------------------------------


def facts_of(snapshot: Snapshot) -> dict[str, dict[str, str]]:
    """Return a node's facts by item and name, its own by the empty item."""
    facts: dict[str, dict[str, str]] = {}
    for reading in snapshot.readings:
        if reading.kind == "fact" and reading.value is not None:
            facts.setdefault(reading.item, {})[reading.name] = reading.text()
    return facts


def fingerprint(snapshot: Snapshot) -> dict[str, str]:
    """Return a node's facts by ``ITEM NAME``."""
    of_items = facts_of(snapshot).items()
    return {f"{item} {name}".lstrip(): text for item, facts in of_items for name, text in facts.items()}


def changed(now: Snapshot, past: Past, subjects: Sequence[Subject], *, has_all: bool = True) -> Iterator[Condition]:
    """Yield what is gone since the earlier readings if ``has_all``, what moved, and what differs from the lock file."""
    if past.snapshot and has_all:
        yield from _gone(now, past.snapshot, subjects)
    if past.snapshot:
        yield from _moved(now, facts_of(past.snapshot), "before")
    if past.frozen:
        yield from _moved(now, past.frozen, f"in {past.lock}", (FREEZE,))


def _gone(now: Snapshot, before: Snapshot, subjects: Sequence[Subject]) -> Iterator[Condition]:
    """Yield the items with facts that are gone: hardware that has neighbours is bad, other items are a remark.

    An item is not gone if a tool that told of it gives no answer now, or if nobody asks for it: a lab that was of
    another accelerator.
    """
    items, silent = {reading.item for reading in now.readings}, silent_tools(now)
    asked = {"", *(subject.name for subject in subjects)}
    facts_before = (reading for reading in before.readings if reading.kind == "fact" and not reading.slow)
    known = [reading for reading in facts_before if reading.subject in asked]
    for item in dict.fromkeys(reading.item for reading in known):
        if item in items:
            continue
        facts = [reading for reading in known if reading.item == item]
        if any(is_silent(reading, silent) for reading in facts):
            continue
        shown = ", ".join(f"{reading.name} {reading.text()}" for reading in facts[:3] if reading.value is not None)
        level: Level = "bad" if any(reading.kin for reading in facts) else "remark"
        text, subject = f"is gone; it had {shown}", facts[0].subject
        steps = _filled((*LOST_STEPS, ON_PURPOSE), item, now) if level == "bad" else ()
        yield Condition(check=CHANGED, subject=CHANGES, level=level, item=item, text=text, changed=subject, steps=steps)


def silent_tools(now: Snapshot) -> frozenset[tuple[str, str]]:
    """Return each tool that gives no answer, with the item of which it gives none; empty for all of the node."""
    return frozenset((reading.item, _tool(reading)) for reading in now.readings if reading.value is None)


def is_silent(reading: Reading, silent: Collection[tuple[str, str]]) -> bool:
    """Tell if an earlier reading is from a tool that gives no answer now.

    Output that cannot be parsed names no tool: then each may be silent.
    """
    return not {("", ""), ("", _tool(reading)), (reading.item, _tool(reading))}.isdisjoint(silent)


def _tool(reading: Reading) -> str:
    """Return the file or program that a reading is from."""
    return reading.source.partition(" ")[0]


def _moved(
    now: Snapshot, before: Mapping[str, Mapping[str, str]], when: str, steps: tuple[str, ...] = ()
) -> Iterator[Condition]:
    """Yield a remark with these steps per fact that has another value than before."""
    for reading in now.readings:
        earlier = before.get(reading.item, {}).get(reading.name)
        if reading.kind == "fact" and reading.value is not None and earlier not in (None, reading.text()):
            text = f"{reading.name} {reading.text()}, {earlier} {when}"
            yield Condition(
                check=CHANGED,
                subject=CHANGES,
                level="remark",
                item=reading.item,
                text=text,
                source=reading.source,
                changed=reading.subject,
                steps=steps,
            )


def missing(
    now: Snapshot, past: Past, subjects: Sequence[Subject], neighbours: Mapping[str, Snapshot]
) -> Iterator[Condition]:
    """Yield the items of the lock file that a node lacks, besides those that are gone since the earlier readings.

    An item is not missing if its subject gives no answer, or any subject if its own is unknown.
    """
    known = {reading.item for each in (now, past.snapshot) if each for reading in each.readings}
    silent = {subject.name for subject in subjects if _is_silent(subject, now)}
    for item, facts in past.frozen.items():
        own = [subject.name for subject in subjects for check in subject.checks if check.reading in facts]
        if item in known | {""} or (silent.intersection(own) if own else silent):
            continue
        # The model says what an item is, else the first fact: a card's PCI id.
        names = sorted(facts, key=lambda name: (name != "model", name))[:3]
        shown = ", ".join(f"{name} {facts[name]}" for name in names)
        is_hardware = _has_kin(facts, (now, *neighbours.values()))
        level: Level = "bad" if is_hardware and not _is_elsewhere(names[0], facts, now, past) else "remark"
        text = f"is not there; {past.lock} has {shown}"
        yield Condition(
            check=CHANGED,
            subject=CHANGES,
            level=level,
            item=item,
            text=text,
            source=past.lock,
            changed=next(iter(own), ""),
            steps=(*(_filled(LOST_STEPS, item, now) if level == "bad" else ()), FREEZE),
        )


def _is_silent(subject: Subject, now: Snapshot) -> bool:
    """Tell if a subject's readings of a node are unknown; those of a full look alone tell of no further item."""
    names = _names_of(subject)
    return any(each.name in names and each.value is None and not each.item and not each.slow for each in now.readings)


def is_blind(subject: Subject, now: Snapshot) -> bool:
    """Tell if a subject gives no answer on a node at all: its tool is silent, and nothing is known of any item."""
    names = _names_of(subject)
    is_known = any(each.name in names and each.value is not None and each.item for each in now.readings)
    return not is_known and _is_silent(subject, now)


def _names_of(subject: Subject) -> frozenset[str]:
    """Return the names of a subject's readings that are judged, and of the one that says that it cannot be parsed."""
    return frozenset((subject.name, *(check.reading for check in subject.checks)))


def _has_kin(facts: Mapping[str, str], snapshots: Iterable[Snapshot]) -> bool:
    """Tell if there is hardware with such facts that has neighbours."""
    return any(reading.kin and reading.name in facts for snapshot in snapshots for reading in snapshot.readings)


def _is_elsewhere(name: str, facts: Mapping[str, str], now: Snapshot, past: Past) -> bool:
    """Tell if an item that the lock file lacks has this fact: a card has another address in another slot."""
    new = (reading for reading in now.readings if reading.item not in past.frozen and reading.name == name)
    return any(reading.text() == facts[name] for reading in new)


# --- what a site adds ----------------------------------------------------------------------------------------


def own(now: Snapshot, rules: Rules) -> Iterator[Condition]:
    """Yield the answers of the site's own checks."""
    readings = {reading.name: reading for reading in now.readings}
    for check in rules.own_on:
        if f"own {check.name}" not in readings:
            continue
        reading = readings[f"own {check.name}"]
        code, _, text = str(reading.value or "").partition(" ")
        level = OWN_LEVELS.get(int(code), "unknown") if code.isdecimal() else "unknown"
        if code == str(TIMED_OUT):
            text = f"did not end within {check.seconds:g} s"
        shown = "" if level == "ok" else f"{check.name}: {text or reading.why or f'exit code {code}'}"
        yield Condition(check=check.name, subject="Own", level=level, text=shown, value=text, source=reading.source)


def _unreadable(now: Snapshot, subjects: Iterable[Subject]) -> Iterator[Condition]:
    """Yield the subjects whose output could not be parsed."""
    names = {subject.name for subject in subjects}
    for reading in now.readings:
        if reading.name in names and reading.value is None:
            yield Condition(check=reading.name.lower(), subject=reading.name, level="unknown", text=reading.why)
