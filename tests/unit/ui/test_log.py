"""Windows of logs, and search in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.ui import log
from labctl.ui.log import IndexedFile, LogLine, Window

LINES = 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a log of LINES lines of two ranks, every hundredth of a third; return its folder."""
    write(tmp_path, [f"line {number} of {'many ' * (number % 7)}" for number in range(LINES)])
    return tmp_path


def write(folder: Path, lines: list[str]) -> None:
    """Write a log with the rank and the time of each line."""
    ranks = [2 if number % 100 == 0 else number % 2 for number in range(len(lines))]
    times = [f"{number}.500 {rank}\n" for number, rank in enumerate(ranks)]
    (folder / "output.log").write_bytes("".join(f"{line}\n" for line in lines).encode())
    (folder / "output.times").write_text("".join(times))


def numbers(window: Window) -> list[int]:
    """Return the numbers of a window's lines."""
    return [line.number for line in window.lines]


@pytest.mark.parametrize("piece", [1 << 20, 200])
def test_windows_from_the_end_back_have_each_line_once(
    folder: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pieces as small as a few lines, too; so have windows from the beginning on."""
    small(monkeypatch, piece)
    seen: list[int] = []
    end: int | None = None
    while end != 0:
        window = log.before(folder, end, 30)
        seen = numbers(window) + seen
        end = window.begin
    assert seen == list(range(1, LINES + 1))
    again: list[int] = []
    begin = 0
    while begin < window.size:
        window = log.after(folder, begin, 30)
        again += numbers(window)
        begin = window.end
    assert again == seen


def small(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Read files in pieces of this size, and count their lines anew."""
    monkeypatch.setattr(log, "PIECE", piece)
    monkeypatch.setattr(log, "PART", piece)
    log._counts.cache_clear()


def test_a_line_has_its_offset_rank_and_time(folder: Path) -> None:
    line = log.before(folder, None, 1).lines[0]
    content = (folder / "output.log").read_bytes()
    assert line == LogLine(at=content.index(b"line 999"), number=1000, text=line.text, rank=1, when=999.5)
    assert line.text.startswith("line 999 of many")


def test_a_window_that_begins_within_a_line_begins_with_it(folder: Path) -> None:
    last = log.before(folder, None, 1).lines[0]
    assert log.after(folder, last.at + 3, 5).lines == (last,)


@pytest.mark.parametrize("piece", [1 << 20, 200])
def test_lines_of_a_rank(folder: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far apart as they are, those that are read come, and the window says how far it reached."""
    small(monkeypatch, piece)
    monkeypatch.setattr(log, "MOST_PIECES", 20)
    seen: list[int] = []
    end: int | None = None
    while end != 0:
        window = log.before(folder, end, 4, rank=2)
        assert window.begin < (LINES * 100 if end is None else end)
        seen = numbers(window) + seen
        end = window.begin
    assert seen == list(range(1, LINES + 1, 100))
    assert numbers(log.after(folder, 0, 2, rank=2)) == [1, 101]


def test_a_log_that_lacks_times_has_no_ranks(folder: Path) -> None:
    (folder / "output.times").write_text("1.000 0\n")
    first = log.after(folder, 0, 2).lines
    assert [(line.rank, line.when) for line in first] == [(0, 1.0), (None, None)]
    (folder / "output.times").unlink()
    assert log.after(folder, 0, 1).lines[0].rank is None
    assert log.before(folder, None, 9, rank=1).lines == ()


def test_a_time_that_was_not_written_whole_is_unknown(folder: Path) -> None:
    """As on a full disk; the others stay those of their lines."""
    (folder / "output.times").write_text("1.000 0\n2.03.000 1\n\0\0\0\n4.000 1\n")
    lines = log.after(folder, 0, 4).lines
    assert [(line.rank, line.when) for line in lines] == [(0, 1.0), (1, None), (None, None), (1, 4.0)]
    assert len(log.search(folder, "line").lines) == log.MOST_MATCHES


def test_a_file_with_the_inode_of_one_that_is_gone_has_its_own_line_numbers(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (first / "output.log").write_bytes(b"a\n" * log.PART)
    assert numbers(log.before(first, None, 1)) == [log.PART]
    # As a removed file's inode may be that of the next new one.
    (first / "output.log").rename(second / "output.log")
    (second / "output.log").write_bytes(b"longer than the line before\n" * log.PART)
    assert numbers(log.before(second, None, 1)) == [log.PART]


def test_no_log_is_an_empty_one_and_a_link_is_none(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    assert log.before(tmp_path, None, 9) == Window()
    (tmp_path / "output.log").symlink_to(secret)
    assert log.before(tmp_path, None, 9) == log.after(tmp_path, 0, 9) == Window()
    assert log.search(tmp_path, "secret").lines == ()


def test_news_are_whole_lines(folder: Path) -> None:
    """A line that is not complete comes when it is; the last lines of many come with the number of others."""
    end = log.before(folder, None, 1).end
    with (folder / "output.log").open("a") as stream:
        stream.write("new\nhal")
        stream.flush()
        new = log.new_lines(folder, end, 9)
        assert new is not None
        assert ([line.text for line in new.lines], new.end, new.skipped) == (["new"], end + 4, 0)
        assert log.new_lines(folder, new.end, 9) is None
        stream.write("f\n" + "more\n" * 500)
    burst = log.new_lines(folder, new.end, 3)
    assert burst is not None
    assert (burst.skipped, [line.text for line in burst.lines]) == (498, ["more"] * 3)
    assert [line.number for line in burst.lines] == [1500, 1501, 1502]
    first = log.new_lines(folder, None, 3)
    assert first is not None
    assert (first.skipped, first.lines) == (0, burst.lines)


@pytest.mark.parametrize("piece", [1 << 20, 200])
def test_search_ignores_case_and_names_the_place(folder: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, piece)
    found = log.search(folder, "LINE 77")
    assert [line.number for line in found.lines] == [78, *range(771, 781)]
    assert not found.more
    assert log.after(folder, found.lines[0].at, 1).lines[0].text.startswith("line 77 ")
    assert [line.number for line in log.search(folder, "line 30", rank=2).lines] == [301]
    assert log.search(folder, "no such text").lines == ()
    assert log.search(folder, "\n").lines == log.search(folder, "").lines == ()


def test_search_stops_at_the_most_hits(folder: Path) -> None:
    found = log.search(folder, "line")
    assert (len(found.lines), found.more) == (log.MOST_MATCHES, True)


def test_a_hit_in_a_long_line_is_shown_with_what_is_around(tmp_path: Path) -> None:
    write(tmp_path, ["x" * 5000 + "needle" + "y" * 5000])
    (hit,) = log.search(tmp_path, "needle").lines
    assert "xneedley" in hit.text
    assert len(hit.text) < 300


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\x1b[31mred\x1b[0m \x1b]0;title\x07end", "red end"),
        (b" 10%|#  | 1/9\r 20%|## | 2/9\r", " 20%|## | 2/9"),
        (b"a\x00b\x07c\td", "a\ufffdb\ufffdc\td"),
        ("a\u202eb\u2028".encode(), "a\ufffdb\ufffd"),
        (b"\xff<script>alert(1)</script>", "\ufffd<script>alert(1)</script>"),
        (b"x" * 5000, "x" * log.LONGEST + " ... 5,000 bytes"),
        (b"old\r" + b"x" * 10, "x" * 10),
    ],
)
def test_a_terminal_code_does_nothing(raw: bytes, text: str) -> None:
    assert log.display_text(raw) == text


def test_lines_of_ranks_have_no_node_before_them(tmp_path: Path) -> None:
    """Read lines and a bar of a rank behind pdsh's prefix; a line of no known rank keeps it."""
    write(tmp_path, ["worker-0: loss: 0.5", "worker-0: 1/9\r2/9", "worker-0: worker-1: up"])
    with (tmp_path / "output.log").open("a") as file:
        file.write("worker-1: no rank yet\n")
    texts = [line.text for line in log.before(tmp_path, None, 9).lines]
    assert texts == ["loss: 0.5", "2/9", "worker-1: up", "worker-1: no rank yet"]


def test_a_line_longer_than_a_piece_is_cut_and_its_neighbours_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch, 200)
    write(tmp_path, ["before", "x" * 9000, "after"])
    window = log.before(tmp_path, None, 9)
    assert [line.text for line in window.lines] == ["after"]
    window = log.before(tmp_path, window.begin, 9)
    assert [line.text[-14:] for line in window.lines] == ["x ... 9,000 bytes"[-14:]]
    assert [line.number for line in log.before(tmp_path, window.begin, 9).lines] == [1]
    assert [line.number for line in log.after(tmp_path, window.begin, 1).lines] == [2]


def test_a_log_of_a_million_lines_is_read_at_its_end_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look counts its lines; a later one reads a part of it."""
    (tmp_path / "output.log").write_bytes(b"step 1 loss 2 of a line as long as they are\n" * 1_000_000)
    assert numbers(log.before(tmp_path, None, 300))[-1] == 1_000_000
    read, sizes = IndexedFile.read, list[int]()

    def noting_read(self: IndexedFile, begin: int, end: int) -> bytes:
        """Read, and note how many bytes."""
        content = read(self, begin, end)
        sizes.append(len(content))
        return content

    monkeypatch.setattr(IndexedFile, "read", noting_read)
    assert numbers(log.before(tmp_path, None, 300))[-1] == 1_000_000
    assert sum(sizes) < 4 * log.PIECE
