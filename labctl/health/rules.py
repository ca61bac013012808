"""Rules that checks share: limits, growth, and comparison with neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from labctl.health.model import Answer, Evidence, Judge, Level, Reading, Value, shown
from labctl.system import human


def above(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a number above its limit as bad."""
    return _over(reading, evidence, "bad")


def remark_above(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a number above its limit as a remark."""
    return _over(reading, evidence, "remark")


def _over(reading: Reading, evidence: Evidence, level: Level) -> Answer | None:
    """Judge a number above its limit with this level."""
    if not isinstance(reading.value, (int, float)) or evidence.limit is None or reading.value <= evidence.limit:
        return None
    bound = f", the limit is {shown(evidence.limit)}" if evidence.limit else ""
    return Answer(level, f"{reading.name} {reading.text()}{bound}")


def below(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a number below its limit as bad."""
    if not isinstance(reading.value, (int, float)) or evidence.limit is None or reading.value >= evidence.limit:
        return None
    return Answer("bad", f"{reading.name} {reading.text()}, at least {shown(evidence.limit)} is needed")


def grew(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a counter that grew by more than its limit since the earlier readings as bad."""
    return _growth(reading, evidence, "bad")


def remark_grew(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a counter that grew by more than its limit since the earlier readings as a remark."""
    return _growth(reading, evidence, "remark")


def _growth(reading: Reading, evidence: Evidence, level: Level) -> Answer | None:
    """Judge the growth of a counter with this level; a counter that fell was reset, and counts from zero."""
    growth = grown(reading.value, evidence.before) if evidence.same_boot else 0
    if growth <= (evidence.limit or 0):
        return None
    return Answer(level, f"{reading.name} +{shown(growth)}")


def grown(value: Value | None, before: Value | None) -> float:
    """Return by how much a counter grew; all of it if it was reset, 0 if either value is missing."""
    if not isinstance(value, (int, float)) or not isinstance(before, (int, float)):
        return 0
    return value - before if value >= before else value


def one_of(good: Collection[str], level: Level = "bad") -> Judge:
    """Return a rule that judges a text as ``level`` unless it is one of the good ones, whatever its case."""
    accepted = {text.casefold() for text in good}

    def judge(reading: Reading, evidence: Evidence) -> Answer | None:  # noqa: ARG001 - as Judge
        """Judge a text that is none of the good ones."""
        if str(reading.value).casefold() in accepted:
            return None
        return Answer(level, f"{reading.name} is {reading.text()}")

    return judge


def less_than_neighbours(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a number that is lower than that of most neighbours as bad if these outnumber all others, else a remark.

    One against one, or two against two, nobody knows which is right.
    """
    usual = usual_value(evidence.neighbours)
    if usual is None or not isinstance(reading.value, (int, float)) or not isinstance(usual, (int, float)):
        return None
    if reading.value >= usual:
        return None
    same = [place for place, value in evidence.neighbours if value == usual]
    is_majority = len(same) * 2 > len(evidence.neighbours) + 1
    return Answer("bad" if is_majority else "remark", f"{reading.name} {reading.text()}, {_where(usual, same)}")


def unlike_neighbours(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a value that differs from that of most neighbours as a remark."""
    usual = usual_value(evidence.neighbours)
    if usual is None or reading.value == usual:
        return None
    same = [place for place, value in evidence.neighbours if value == usual]
    return Answer("remark", f"{reading.name} {reading.text()}, {_where(usual, same)}")


def usual_value(neighbours: Collection[tuple[str, Value]]) -> Value | None:
    """Return the value of more than half of the neighbours; None without such a value."""
    counted = Counter(value for _, value in neighbours).most_common(1)
    return counted[0][0] if counted and counted[0][1] * 2 > len(neighbours) else None


def _where(value: Value, places: Collection[str]) -> str:
    """Render as ``16 on worker-1`` or ``16 on 7 others``."""
    return f"{shown(value)} on {next(iter(places)) if len(places) == 1 else human.count(len(places), 'other')}"
