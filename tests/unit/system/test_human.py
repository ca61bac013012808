"""Numbers, durations, sizes and lists of names as text for people."""

from __future__ import annotations

import math

import pytest

from labctl.system import human


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (999.96, "1000"),
        (12345.6, "12,346"),
        (-12345.6, "-12,346"),
        (123456789012345, "123,456,789,012,345"),
        (2.5999e39, "2.6e+39"),
        (3, "3"),
        (0, "0"),
        (None, "no value"),
        (math.nan, "no value"),
        (-math.inf, "no value"),
    ],
)
def test_a_number_has_four_digits_or_is_an_integer(value: float | None, text: str) -> None:
    """Format numbers: four digits or an integer, "no value" for None, nan and infinity."""
    assert human.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0s ago"),
        (59.9, "59s ago"),
        (60, "1m ago"),
        (3 * 3600 + 59, "3h ago"),
        (86400, "1d ago"),
        (2 * 86400 - 1, "1d ago"),
        (12 * 86400, "12d ago"),
    ],
)
def test_the_time_since_an_event_is_in_its_largest_unit(seconds: float, text: str) -> None:
    """Format seconds since an event: one unit, rounded down."""
    assert human.ago(seconds) == text


def test_a_span_is_the_lowest_and_the_highest_number() -> None:
    """Format the span of numbers: lowest to highest, one number alone."""
    assert human.span([141.03, 98.1, 100]) == "98.1 to 141"
    assert human.span([2.5]) == "2.5"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (600.0, "600"),
        (175.759, "175.759"),
        (0.000001, "0.000001"),
        (-0.0000125, "-0.0000125"),
        (12345678.9, "12345679"),
        (999999.7, "1000000"),
        (1e12, "1000000000000"),
        (1e30, "1e+30"),
        (0, "0"),
    ],
)
def test_an_exact_number_has_no_exponent_where_a_person_would_write_none(value: float, text: str) -> None:
    """Format numbers exactly: all digits up to eight, exponents only for huge ones."""
    assert human.exact(value) == text


@pytest.mark.parametrize(
    ("value", "limit", "texts"),
    [
        (24.72925, 52.4839375, ("24.73", "52.48")),
        (599.9999, 600, ("599.9999", "600")),
        (12345.6, 20000, ("12346", "20000")),
        (1500, 1600, ("1500", "1600")),
        (600, 600, ("600", "600")),
    ],
)
def test_numbers_that_are_compared_have_the_digits_that_tell_them_apart(
    value: float, limit: float, texts: tuple[str, str]
) -> None:
    """Format a value and a limit: as many digits as tell them apart."""
    assert human.compared(value, limit) == texts


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.05, "5 %"),
        (0.1234, "12.3 %"),
        (0.0236, "2.4 %"),
        (0.0052, "0.52 %"),
        (1.214, "121 %"),
        (25.3, "2,530 %"),
        (0.0001, "0.01 %"),
        (-1e-16, "0 %"),
        (0.07, "7 %"),
    ],
)
def test_a_share_is_in_per_cent_without_the_noise_of_floats(value: float, text: str) -> None:
    """Format shares in per cent."""
    assert human.share(value) == text


def test_a_difference_shows_its_sign() -> None:
    """Format differences: with their sign."""
    assert [human.share(value, "+") for value in (0.1, -0.025, 0)] == ["+10 %", "-2.5 %", "+0 %"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00001, "0 s"),
        (0.0031, "0.0031 s"),
        (4.23, "4.2 s"),
        (5, "5 s"),
        (42.6, "43 s"),
        (90, "90 s"),
        (119.7, "2 min"),
        (425, "7 min 5 s"),
        (600, "10 min"),
        (7200, "2 h"),
        (7230, "2 h"),
        (7500, "2 h 5 min"),
        (100_000, "1 d 3 h"),
        (-3, "-3 s"),
    ],
)
def test_a_duration_is_in_its_two_largest_units(seconds: float, text: str) -> None:
    """Format durations: the two largest units, fractions below ten seconds."""
    assert human.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (50_000_000, "50 MB"),
        (662_513_657, "663 MB"),
        (26_500_000_000, "26.5 GB"),
        (10**15, "1,000 TB"),
    ],
)
def test_a_size_is_in_the_units_of_docker_and_the_hub(count: int, text: str) -> None:
    """Format sizes in powers of 1000."""
    assert human.size(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (512, "512 B"),
        (1 << 20, "1 MiB"),
        (1023 << 20, "1,023 MiB"),
        (80 << 30, "80 GiB"),
        (67_418_292_224, "62.79 GiB"),
        (3 << 50, "3,072 TiB"),
    ],
)
def test_memory_is_in_the_units_of_settings(count: int, text: str) -> None:
    """Format memory in powers of 1024."""
    assert human.memory(count) == text


def test_a_noun_follows_its_number() -> None:
    """Count a noun: 0 nodes, 1 node, 1,200 nodes."""
    assert [human.count(number, "node") for number in (0, 1, 1200)] == ["0 nodes", "1 node", "1,200 nodes"]


def test_a_long_text_ends_in_dots() -> None:
    """Shorten a text of 111 characters to 110: "..." at its end; 110 stay."""
    assert human.shortened("x" * 110, 110) == "x" * 110
    assert human.shortened("x" * 111, 110) == "x" * 107 + "..."
    assert [human.shortened("abcdef", width) for width in range(1, 6)] == ["a", "ab", "abc", "a...", "ab..."]


@pytest.mark.parametrize(("width", "text"), [(1, "a"), (2, "ab"), (3, "abc"), (4, "a...")])
def test_a_text_without_room_for_dots_is_cut_all_the_same(width: int, text: str) -> None:
    """Shorten a text to less than a character and three dots: never more characters than the width."""
    assert human.shortened("abcdef", width) == text


def test_names_beyond_the_most_are_counted() -> None:
    """List names: two, two "and 1 more", none; and a counted rest."""
    assert human.listed(["a", "b"], 2) == "a, b"
    assert human.listed(["a", "b", "c"], 2) == "a, b and 1 more"
    assert human.listed([]) == ""
    assert human.more(1200, "pods") == "and 1,200 more pods"
