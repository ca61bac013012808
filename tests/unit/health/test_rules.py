"""Rules that checks share: who is accused, of what, in which words."""

from __future__ import annotations

from typing import Any

import pytest

from labctl.health import rules
from labctl.health.model import Answer, Evidence, Reading, Value


def width(value: Value | None = 8, **fields: Any) -> Reading:
    """Build a reading of a PCIe width, with other fields if given."""
    return Reading(**{"name": "PCIe width", "value": value, "source": "lspci", **fields})


def beside(*values: Value) -> Evidence:
    """Return the evidence of neighbours worker-1, worker-2, ... with these values."""
    return Evidence(neighbours=tuple((f"worker-{number}", value) for number, value in enumerate(values, 1)))


def test_one_against_one_is_a_remark_that_names_the_other() -> None:
    """Compare two: nobody knows which is right, so the lower one has a remark, and the higher one none."""
    assert rules.less_than_neighbours(width(8), beside(16)) == Answer("remark", "PCIe width 8, 16 on worker-1")
    assert rules.less_than_neighbours(width(16), beside(8)) is None


@pytest.mark.parametrize("number", [2, 3, 7])
def test_one_against_several_is_bad_and_the_majority_never_is(number: int) -> None:
    """Compare one with several: it is bad and the others are counted; none of those is accused."""
    bad = rules.less_than_neighbours(width(8), beside(*[16] * number))
    assert bad == Answer("bad", f"PCIe width 8, 16 on {number} others")
    assert rules.less_than_neighbours(width(16), beside(8, *[16] * (number - 1))) is None


@pytest.mark.parametrize("half", [2, 4, 8])
def test_of_two_halves_none_is_bad(half: int) -> None:
    """Compare the cards of one node with as many of another: a tie, so the lower half has a remark."""
    answer = rules.less_than_neighbours(width(8), beside(*[8] * (half - 1), *[16] * half))
    assert answer == Answer("remark", f"PCIe width 8, 16 on {half} others")


def test_two_of_five_are_both_bad() -> None:
    """Compare two lower ones with three: each is bad by the three."""
    assert rules.less_than_neighbours(width(8), beside(8, 16, 16, 16)) == Answer("bad", "PCIe width 8, 16 on 3 others")


@pytest.mark.parametrize("values", [(), (16, 32), (16, 16, 32, 32), ("16", "16")])
def test_without_a_usual_number_nobody_is_accused(values: tuple[Value, ...]) -> None:
    """Compare with no neighbour, with neighbours that differ from each other, and with texts: no answer."""
    assert rules.less_than_neighbours(width(8), beside(*values)) is None


def test_a_value_unlike_that_of_neighbours_is_a_remark() -> None:
    """Compare a driver's version: a remark if it differs from most, in either direction, else no answer."""
    driver = Reading(name="driver", value="580.1", source="modinfo")
    assert rules.unlike_neighbours(driver, beside("570.2", "570.2")) == Answer(
        "remark", "driver 580.1, 570.2 on 2 others"
    )
    assert rules.unlike_neighbours(driver, beside("580.1", "580.1", "570.2")) is None
    assert rules.unlike_neighbours(driver, beside("570.2", "550.9")) is None
    assert rules.unlike_neighbours(driver, beside()) is None


@pytest.mark.parametrize(
    ("value", "limit", "expected"),
    [
        (91.5, 90.0, Answer("bad", "PCIe width 91.5 °C, the limit is 90")),
        (3, 0.0, Answer("bad", "PCIe width 3 °C")),
        (90, 90.0, None),
        (91, None, None),
        ("hot", 90.0, None),
    ],
)
def test_a_number_above_its_limit_is_bad(value: Value, limit: float | None, expected: Answer | None) -> None:
    """Compare with a limit: bad above it, with the limit unless that is 0; nothing at it, without one, or for text."""
    reading, evidence = width(value, unit="°C"), Evidence(limit=limit)
    assert rules.above(reading, evidence) == expected
    assert rules.remark_above(reading, evidence) == (expected and Answer("remark", expected.text))


def test_a_number_below_its_limit_is_bad() -> None:
    """Compare with a lower limit: bad below it only."""
    assert rules.below(width(4), Evidence(limit=5)) == Answer("bad", "PCIe width 4, at least 5 is needed")
    assert rules.below(width(5), Evidence(limit=5)) is None
    assert rules.below(width(4), Evidence()) is None


@pytest.mark.parametrize(
    ("before", "same_boot", "limit", "expected"),
    [
        (5, True, None, "PCIe width +3"),
        (5, True, 3, None),
        (8, True, None, None),
        (None, True, None, None),
        (5, False, None, None),
        (100, True, None, "PCIe width +8"),
    ],
)
def test_a_counter_counts_since_the_earlier_readings_of_the_same_boot(
    before: Value | None, same_boot: bool, limit: float | None, expected: str | None
) -> None:
    """Count to 8: the growth, above its limit; none after a restart or without before; all of a counter reset."""
    evidence = Evidence(before=before, same_boot=same_boot, limit=limit)
    answers = rules.grew(width(8), evidence), rules.remark_grew(width(8), evidence)
    assert answers == ((Answer("bad", expected), Answer("remark", expected)) if expected else (None, None))


def test_large_numbers_have_all_their_digits() -> None:
    """Count two million errors: no power of ten in a person's sentence."""
    evidence = Evidence(before=0, same_boot=True)
    assert rules.grew(width(2_000_000), evidence) == Answer("bad", "PCIe width +2000000")
    assert rules.above(width(2.5e6), Evidence(limit=1.5e6)) == Answer("bad", "PCIe width 2500000, the limit is 1500000")


def test_a_text_must_be_one_of_the_good_ones() -> None:
    """Judge states: the good ones in any case are ok, others have the level that is asked for."""
    judge, remark = rules.one_of(("ACTIVE", "up")), rules.one_of(("ACTIVE",), "remark")
    state = Reading(name="port", value="Active", source="")
    down = Reading(name="port", value="DOWN", source="")
    assert judge(state, Evidence()) is None
    assert judge(down, Evidence()) == Answer("bad", "port is DOWN")
    assert remark(down, Evidence()) == Answer("remark", "port is DOWN")
