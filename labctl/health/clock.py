"""The clock of a node against other nodes': ranks on nodes that disagree on the time cannot be compared."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median_low

from labctl.health.model import Answer, Check, Evidence, Reading, Subject
from labctl.system.hostdump import HostDump

STEPS = ("chronyc tracking", "{sudo}chronyc makestep", "{sudo}timedatectl set-ntp true")

# Asking timedatectl(1) may start its service.
SLOW = """\
ask 2 timedatectl show --property=NTPSynchronized --value
fact synchronised "$(printf '%s' "$answer" | head -n 1)"
"""


def readings(dump: HostDump) -> Iterator[Reading]:
    """Yield whether the clock is kept by a time server, where systemd tells; the offset is read by the script."""
    text = dump.facts.get("synchronised", "")
    if text in ("yes", "no"):
        yield Reading(name="clock synchronised", value=text, source="timedatectl")


def wrong(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a clock that is ahead or behind that of most nodes, of three or more, by more than the limit as bad.

    Of one or two nodes nobody knows which clock is wrong, or whether it is this machine's: a remark. An offset is at
    least what is measured, and more by what the connection takes: so a smaller one than usual is a remark too.
    """
    offset, limit = reading.value, evidence.limit or 0
    if not isinstance(offset, (int, float)):
        return None
    others = _offsets(evidence)
    if len(others) < 2:
        return Answer("remark", f"{_told(offset)} this machine's") if abs(offset) > limit else None
    usual = median_low([offset, *others])
    if abs(offset - usual) <= limit:
        return None
    agreeing = [other for other in others if abs(other - usual) <= limit]
    is_less = min(0, usual) <= offset <= max(0, usual)
    is_sure = len(agreeing) * 2 > len(others) + 1 and not is_less
    return Answer("bad" if is_sure else "remark", f"{_told(offset - usual)} that of other nodes")


def jumped(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a clock that moved away by more than the limit since before as a remark; moving back is a repair.

    If it is where those of other nodes are, this machine's moved.
    """
    offset, before = reading.value, evidence.before
    if not isinstance(offset, (int, float)) or not isinstance(before, (int, float)):
        return None
    if abs(offset - before) <= (evidence.limit or 0) or abs(offset) < abs(before):
        return None
    others = _offsets(evidence)
    if others and abs(offset - median_low(others)) <= (evidence.limit or 0):
        return None
    return Answer("remark", f"clock jumped by {_seconds(offset - before)}")


def _offsets(evidence: Evidence) -> list[float]:
    """Return the offsets of the other nodes' clocks."""
    return [value for _, value in evidence.neighbours if isinstance(value, (int, float))]


def _told(offset: float) -> str:
    """Render as ``clock is 2.5 s ahead of``."""
    return f"clock is {_seconds(offset)} {'ahead of' if offset > 0 else 'behind'}"


def _seconds(offset: float) -> str:
    """Render an offset without its sign: ``2.5 s``."""
    return f"{abs(offset):.3g} s"


SUBJECT = Subject(
    name="Clock",
    slow=SLOW,
    readings=readings,
    checks=(
        # A second: what ssh, tokens of a login and make(1) tolerate at most, and far more than a time server leaves.
        Check(name="clock", reading="clock offset", judge=wrong, limit=1, steps=STEPS),
        Check(name="clock-jump", reading="clock offset", judge=jumped, limit=1, bad_in_run=True, steps=STEPS),
    ),
)
