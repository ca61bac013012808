from __future__ import annotations

import cProfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.config.hostfile import OWN, format_hostfile, parse
from labctl.errors import ConfigError

NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?(\.[a-z0-9]{1,5})?", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("worker-0 slots=8\nworker-1 slots=4\n", (("worker-0", 8), ("worker-1", 4))),
        ("worker-0 slots=8", (("worker-0", 8),)),
        ("worker-0\t slots=8\r\n\r\nworker-1 slots=8\r\n", (("worker-0", 8), ("worker-1", 8))),
        ("\ufeffworker-0 slots=8\n", (("worker-0", 8),)),
        ("# batch 1\n\n  worker-0 slots=1  # the first\n", (("worker-0", 1),)),
        ("ml-512-node-001 slots=1024\n10.0.0.7 slots=08\n", (("ml-512-node-001", 1024), ("10.0.0.7", 8))),
        ("Node1.lab.example slots=2", (("Node1.lab.example", 2),)),
        (f"{'a' * 63} slots=1", (("a" * 63, 1),)),
        ("worker-0\n10.0.0.7\n", (("worker-0", OWN), ("10.0.0.7", OWN))),
        ("worker-0:2  # MPICH\nworker-1:08\nworker-2 slots=4\n", (("worker-0", 2), ("worker-1", 8), ("worker-2", 4))),
    ],
)
def test_nodes_are_read_in_order(text: str, nodes: tuple[tuple[str, int], ...]) -> None:
    """Parse hostfiles of several forms: names with slots, OWN where none are given."""
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
        ("a:", 1, "slots must be a number, not ``"),
        ("a:0", 1, "slots must be between 1 and 1024, not `0`"),
        ("a:2222", 1, "slots must be between 1 and 1024"),
        ("a:2 slots=4", 1, "slots are given twice: `:2` and `slots=4`"),
        ("a:2 b:2", 1, "expected `slots=N`, found `b:2`"),
        ("a:2,b:2", 1, "several nodes in `a:2,b:2`"),
        ("[::1]:2", 1, "bad host name `[::1]:2`"),
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
        ("a slots=1\nb\0 slots=1", 2, "NUL"),
        ("", 1, "no nodes listed"),
        ("# nothing\n\n", 1, "no nodes listed"),
    ],
)
def test_what_cannot_be_read_names_file_line_and_reason(text: str, line: int, reason: str) -> None:
    """Parse invalid lines: ConfigError with file, line and reason, printable and short."""
    with pytest.raises(ConfigError) as caught:
        parse(text, "hosts/hostfile")
    assert caught.value.message.startswith(f"hosts/hostfile:{line}: ")
    assert reason in caught.value.message
    assert caught.value.exit_code == 2
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("a slots = 8", "write `a slots=8`"),
        ("a 8", "write `a slots=8`"),
        ("a Slots=8", "write `a slots=8`"),
        ("a slots=4 max_slots=8", "write `a slots=4`"),
        ("a np=2", "write `a slots=2`"),
        ("a gpus:2", "write `a slots=2`"),
        ("a:2 slots=4", "write `a slots=2`"),
        ("a slots=0", "write `a slots=8`, or `a` alone for all slots that it has"),
        ("a:2222", "write `a slots=8`, or `a` alone for all slots that it has"),
        ("a slots=eight", "write `a slots=8`, or `a` alone for all slots that it has"),
        ("a address=10.0.0.5 user=ann", "write `a slots=8`, or `a` alone for all slots that it has"),
        ("root@a slots=1", "write `a`"),
        ("a:2,b:2", "write a line for each, such as `a:2`"),
        ("a\na", "name it once, with all of its slots: `a slots=8`"),
    ],
)
def test_a_line_that_cannot_be_meant_is_shown_written_right(line: str, hint: str) -> None:
    """Parse lines that are nearly right: the hint shows them written right."""
    with pytest.raises(ConfigError) as caught:
        parse(line, "hostfile")
    assert caught.value.hint == hint


@given(st.lists(st.tuples(NAMES, st.integers(0, 1024)), min_size=1, unique_by=lambda entry: entry[0]))
def test_formatted_entries_read_back_the_same(entries: list[tuple[str, int]]) -> None:
    """Format entries and parse them: the same entries."""
    assert parse(format_hostfile(entries), "hostfile") == tuple(entries)


@given(st.text())
def test_any_text_is_read_or_refused_with_its_place(text: str) -> None:
    """Parse any text: entries, or ConfigError that names the file."""
    try:
        parse(text, "hostfile")
    except ConfigError as error:
        assert error.message.startswith("hostfile:")  # noqa: PT017 - reading it is as good


def test_format_is_one_line_per_node() -> None:
    """Format three entries: a line each, without slots for OWN."""
    entries = [("worker-0", 8), ("worker-1", 1), ("worker-2", OWN)]
    assert format_hostfile(entries) == "worker-0 slots=8\nworker-1 slots=1\nworker-2\n"


def test_a_hundred_thousand_lines_take_as_few_calls_each_as_a_thousand() -> None:
    """Limit the calls per line: costs that grow with the number of lines would take minutes."""
    few, many = _calls(1000) / 1000, _calls(100_000) / 100_000
    assert many <= few < 30


def _calls(lines: int) -> int:
    """Return the number of function calls that parsing these lines takes."""
    text, costs = "".join(f"node-{number:06d} slots=8\n" for number in range(lines)), cProfile.Profile()
    assert len(costs.runcall(parse, text, "hostfile")) == lines
    return sum(entry.callcount for entry in costs.getstats())
