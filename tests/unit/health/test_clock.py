"""The clock of a node against labctl's and other nodes'."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support import host_health

from labctl.health.clock import SUBJECT, jumped, wrong
from labctl.health.model import Evidence, Reading, Snapshot
from labctl.system.hostdump import HostDump


def clock(offset: float | None) -> Snapshot:
    """Build a snapshot with this offset of the clock."""
    reading = Reading(
        name="clock offset", value=offset, source="date", unit="s", why="" if offset is not None else "no"
    )
    return Snapshot(time=0, boot="b", readings=(reading,))


def words(now: float | None, before: float | None = None, others: Sequence[float] = ()) -> list[tuple[str, str, str]]:
    """Return check, level and text of what is not ok, beside other nodes with these offsets."""
    earlier = clock(before) if before is not None else None
    found = host_health.conditions(SUBJECT, clock(now), earlier, *map(clock, others)).values()
    return [(condition.check, condition.level, condition.text) for condition in found]


@pytest.mark.parametrize("offset", [0.0, 0.9, -1.0])
def test_a_good_clock(offset: float) -> None:
    """Say nothing up to a second."""
    assert words(offset) == words(offset, 0.0) == []


def test_a_wrong_clock() -> None:
    """Say how much a clock is ahead or behind; with one other node, this machine's may be the wrong one."""
    assert words(2.5) == [("clock", "remark", "clock is 2.5 s ahead of this machine's")]
    assert words(-61.25, others=[0]) == [("clock", "remark", "clock is 61.2 s behind this machine's")]


def test_a_clock_unlike_those_of_most_nodes_is_bad() -> None:
    """Compare three nodes or more with each other, whatever this machine's clock; without a majority it is a remark."""
    assert words(-3.2, others=[-2.9, -3]) == []
    assert words(3, others=[0, 0.2]) == [("clock", "bad", "clock is 2.8 s ahead of that of other nodes")]
    assert words(-6, others=[-3, -3]) == [("clock", "bad", "clock is 3 s behind that of other nodes")]
    assert words(0, others=[-3, -3]) == [("clock", "remark", "clock is 3 s ahead of that of other nodes")]
    assert words(5, others=[0, 0, 5]) == [("clock", "remark", "clock is 5 s ahead of that of other nodes")]
    assert words(0.0, others=[0, 60]) == []


def test_a_jump() -> None:
    """Name a jump since before, even within the limit; not a repair."""
    assert words(0.7, -0.8) == []
    assert words(-0.8, 0.7) == [("clock-jump", "remark", "clock jumped by 1.5 s")]
    assert words(5.0, 0.0)[1] == ("clock-jump", "remark", "clock jumped by 5 s")
    assert words(0.0, 5.0) == []


def test_a_jump_of_this_machines_clock_accuses_no_node() -> None:
    """Say nothing of a clock that is where the others are; one alone has jumped."""
    assert words(-3.1, 0.0, others=[-3, -2.9]) == []
    assert words(-3.0, 0.0, others=[0, 0])[1] == ("clock-jump", "remark", "clock jumped by 3 s")


def test_unknown() -> None:
    """Answer unknown without the time."""
    assert {level for _, level, _ in words(None)} == {"unknown"}


def test_judges_of_a_text() -> None:
    """Say nothing of a value that is no number."""
    reading = Reading(name="clock offset", value="x", source="")
    assert wrong(reading, Evidence(limit=1)) is None
    assert jumped(reading, Evidence(limit=1, before=0)) is None


@pytest.mark.parametrize(("text", "values"), [("yes", ["yes"]), ("no", ["no"]), ("", []), ("n/a", [])])
def test_synchronised_is_told_without_a_word(text: str, values: list[str]) -> None:
    """Tell whether a time server keeps the clock, where systemd knows."""
    readings = SUBJECT.readings(HostDump("gpu-1", facts={"synchronised": text}))
    assert [reading.value for reading in readings] == values


def test_damaged_output() -> None:
    """Raise only what the frame catches."""
    host_health.fuzz(SUBJECT, host_health.output(SUBJECT), seed=5)


def test_this_machine() -> None:
    """Find nothing wrong with the machine that runs the test."""
    assert host_health.wrong_here(SUBJECT) == []
