"""The clock of a node against labctl's: ranks on nodes that disagree on the time cannot be compared."""

from __future__ import annotations

from collections.abc import Iterator

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
    """Judge a clock that is ahead or behind by more than the limit as bad."""
    offset = reading.value
    if not isinstance(offset, (int, float)) or abs(offset) <= (evidence.limit or 0):
        return None
    return Answer("bad", f"clock is {_seconds(offset)} {'ahead of' if offset > 0 else 'behind'} this machine's")


def jumped(reading: Reading, evidence: Evidence) -> Answer | None:
    """Judge a clock that moved away by more than the limit since before as a remark; moving back is a repair."""
    offset, before = reading.value, evidence.before
    if not isinstance(offset, (int, float)) or not isinstance(before, (int, float)):
        return None
    if abs(offset - before) <= (evidence.limit or 0) or abs(offset) < abs(before):
        return None
    return Answer("remark", f"clock jumped by {_seconds(offset - before)}")


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
