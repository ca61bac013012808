from __future__ import annotations

import cProfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.config.hostfile import format_hostfile, parse
from labctl.errors import ConfigError

NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?(\.[a-z0-9]{1,5})?", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("worker-0 slots=8\nworker-1 slots=4\n", (("worker-0", 8), ("worker-1", 4))),
        ("worker-0 slots=8", (("worker-0", 8),)),
        ("worker-0\t slots=8\r\n\r\nworker-1 slots=8\r\n", (("worker-0", 8), ("worker-1", 8))),
        ("# batch 1\n\n  worker-0 slots=1  # the first\n", (("worker-0", 1),)),
        ("ml-512-node-001 slots=1024\n10.0.0.7 slots=08\n", (("ml-512-node-001", 1024), ("10.0.0.7", 8))),
        ("Node1.lab.example slots=2", (("Node1.lab.example", 2),)),
        (f"{'a' * 63} slots=1", (("a" * 63, 1),)),
    ],
)
def test_nodes_are_read_in_order(text: str, nodes: tuple[tuple[str, int], ...]) -> None:
    assert parse(text, "hostfile") == nodes


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("worker;reboot slots=1", 1, "bad host name `worker;reboot`"),
        ("-oProxyCommand=x slots=1", 1, "bad host name"),
        ("worker- slots=1", 1, "bad host name"),
        ("worker_0 slots=1", 1, "bad host name"),
        ("a..b slots=1", 1, "bad host name"),
        ("a. slots=1", 1, "bad host name"),
        (f"{'a' * 64} slots=1", 1, "bad host name"),
        (f"{'.'.join(['a' * 60] * 5)} slots=1", 1, "bad host name"),
        ("w\u00f6rker slots=1", 1, r"bad host name `w\xf6rker`"),
        ("a\x1b[31m slots=1", 1, r"bad host name `a\x1b[31m`"),
        ("a slots=1\n\nb slots=1\na slots=2", 4, "duplicate host `a`, first named on line 1"),
        ("a slots=1\nA slots=1", 2, "duplicate host `A`, first named on line 1"),
        ("a slots=0", 1, "slots must be between 1 and 1024, not `0`"),
        ("a slots=1025", 1, "slots must be between 1 and 1024"),
        (f"a slots={'9' * 10_000}", 1, "slots must be between 1 and 1024"),
        ("# first\na", 2, "slots are missing"),
        ("a slots=", 1, "slots must be a number"),
        ("a slots=eight", 1, "slots must be a number, not `eight`"),
        ("a slots=-1", 1, "slots must be a number"),
        ("a slots=\u0663", 1, "slots must be a number"),
        ("a slots = 8", 1, "expected `slots=N`, found `slots`"),
        ("a 8", 1, "expected `slots=N`, found `8`"),
        ("a Slots=8", 1, "expected `slots=N`"),
        ("root@a slots=1", 1, "user and port belong in the ssh config"),
        ("a slots=1 max_slots=2", 1, "unknown word `max_slots=2`"),
        ("a slots=1\rb slots=1", 1, "unknown word `b`"),
        ("\ufeffa slots=1", 1, "byte order mark"),
        ("a slots=1\nb\0 slots=1", 2, "NUL"),
        ("", 1, "no nodes listed"),
        ("# nothing\n\n", 1, "no nodes listed"),
    ],
)
def test_what_cannot_be_read_names_file_line_and_reason(text: str, line: int, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "hosts/hostfile")
    assert caught.value.message.startswith(f"hosts/hostfile:{line}: ")
    assert reason in caught.value.message
    assert caught.value.exit_code == 2
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 250


@given(st.lists(st.tuples(NAMES, st.integers(1, 1024)), min_size=1, unique_by=lambda entry: entry[0]))
def test_formatted_entries_read_back_the_same(entries: list[tuple[str, int]]) -> None:
    assert parse(format_hostfile(entries), "hostfile") == tuple(entries)


@given(st.text())
def test_any_text_is_read_or_refused_with_its_place(text: str) -> None:
    try:
        parse(text, "hostfile")
    except ConfigError as error:
        assert error.message.startswith("hostfile:")  # noqa: PT017 - reading it is as good


def test_format_is_one_line_per_node() -> None:
    assert format_hostfile([("worker-0", 8), ("worker-1", 1)]) == "worker-0 slots=8\nworker-1 slots=1\n"


def test_a_hundred_thousand_lines_take_as_few_calls_each_as_a_thousand() -> None:
    """Limit the calls per line: costs that grow with the number of lines would take minutes."""
    few, many = _calls(1000) / 1000, _calls(100_000) / 100_000
    assert many <= few < 30


def _calls(lines: int) -> int:
    """Count the function calls that reading these lines takes."""
    text, costs = "".join(f"node-{number:06d} slots=8\n" for number in range(lines)), cProfile.Profile()
    assert len(costs.runcall(parse, text, "hostfile")) == lines
    return sum(entry.callcount for entry in costs.getstats())
