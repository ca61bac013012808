from __future__ import annotations

import sys
from collections.abc import Sequence

from labctl.system import process


def test_a_progress_bar_that_is_drawn_over_and_over_is_one_line() -> None:
    """Stream a bar with carriage returns: one line; CRLF is removed, invalid bytes replaced."""
    lines: list[str] = []
    program = r"import sys; sys.stdout.buffer.write(b'one\r\n\r 1/2\r 2/2\nbad \xff byte\n')"
    process.stream((sys.executable, "-c", program), lines.append)
    assert lines == ["one", "\r 1/2\r 2/2", "bad \ufffd byte"]


def test_a_line_without_an_end_comes_in_pieces() -> None:
    """Stream a line of 3 MB: pieces of at most LONGEST_LINE, then the next line."""
    pieces: list[str] = []
    program = "import sys; sys.stdout.write('begin\\n' + 'x' * 3_000_000 + '\\nend\\n')"
    done = process.stream((sys.executable, "-c", program), pieces.append)
    assert (pieces[0], pieces[-1], done.code) == ("begin", "end", 0)
    assert "".join(pieces[1:-1]) == "x" * 3_000_000
    assert max(map(len, pieces)) <= process.LONGEST_LINE


def test_lines_that_come_at_once_come_together_and_the_rest_without_an_end_if_it_is_asked_for() -> None:
    """Stream three lines at once: blocks of whole lines, the unfinished one only with rest=True."""
    program = ("printf", r"one\ntwo\nthr")
    for rest, expected in ((True, [["one", "two"], ["thr"]]), (False, [["one", "two"]])):
        blocks: list[Sequence[str]] = []
        process.stream_blocks(program, blocks.append, rest=rest)
        assert blocks == expected


def test_what_the_agent_makes_of_a_long_line_is_one_here() -> None:
    """Stream a line of 1.1 MB: one line."""
    lines: list[str] = []
    process.stream((sys.executable, "-c", "print('x' * 1_100_000)"), lines.append)
    assert [len(line) for line in lines] == [1_100_000]
