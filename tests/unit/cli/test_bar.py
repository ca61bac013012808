from __future__ import annotations

import io
import os
import pty
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from labctl.cli.bar import ERASE, Bar, noting, progress_line, progress_text
from labctl.cli.output import Output
from labctl.model import Event, Progress

METRICS = {
    "accuracy": {"value": 0.5, "unit": ""},
    "throughput": {"value": 1234.5, "unit": "samples/s"},
    "loss": {"value": 3.14159, "unit": ""},
}
FOUND = Progress(step=30, steps=120, metrics=METRICS, seconds_per_step=1.0, seconds_left=90.0)


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (120, f"step  30/120  {'━' * 8}{'─' * 22}  loss 3.142  throughput 1,234 samples/s  accuracy 0.5  1:30 left"),
        (79, "step  30/120  loss 3.142  throughput 1,234 samples/s  accuracy 0.5  1:30 left"),
        (59, f"step  30/120  {'━' * 2}{'─' * 6}  loss 3.142  accuracy 0.5  1:30 left"),
        (40, "step  30/120  loss 3.142  1:30 left"),
        (20, "step  30/120  1:30 l"),
        (0, ""),
    ],
)
def test_a_narrow_terminal_shows_less_in_one_line(width: int, expected: str) -> None:
    """Format the progress at widths from 120 to 0: bar, then metrics, then everything is left out."""
    assert progress_text(FOUND, 5, 600, width) == expected


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (Progress(), "running  1:05 (limit 2 h)"),
        (Progress(step=7), "step 7  1:05 (limit 2 h)"),
        (Progress(step=7, steps=9), f"step 7/9  {'━' * 23}{'─' * 7}  1:05 (limit 2 h)"),
        (Progress(counts="epoch", step=2), "epoch 2  1:05 (limit 2 h)"),
        (Progress(metrics={"loss": {"value": None, "unit": "", "note": "nan"}}), "running  loss nan  1:05 (limit 2 h)"),
        (Progress(step=9, steps=8, seconds_left=0.0), f"step 9/8  {'━' * 30}  0:00 left"),
    ],
)
def test_what_a_run_does_not_say_is_not_shown(progress: Progress, expected: str) -> None:
    """Format a progress without steps, metrics or estimate: what is missing is left out, the elapsed time shown."""
    assert progress_text(progress, 65, 7200, 80) == expected


def test_a_limit_that_nobody_asked_for_is_not_shown() -> None:
    """Format a progress with the limit of a program, a day: the elapsed time alone."""
    assert progress_text(Progress(step=7), 65, 24 * 3600, 80) == "step 7  1:05"


@pytest.mark.parametrize(("age", "shown"), [(510, "1:30 left"), (660, "1:30 left, more than --timeout (10:00) allows")])
def test_a_run_that_will_not_end_in_time_says_so(age: float, shown: str) -> None:
    """Format a progress with 90 s left of a limit of 600 s: shown if it would go well beyond."""
    assert progress_line(FOUND, age, 600).endswith(f"  {shown}")


def test_a_name_from_a_workload_moves_no_cursor() -> None:
    """Give a metric control characters as name and unit: the text is printable."""
    text = progress_text(Progress(metrics={"\x1b[2J": {"value": 1.0, "unit": "\x1b[A"}}), 0, 60, 80)
    assert text.isprintable()


def test_lines_are_printed_above_the_bar_which_is_gone_at_the_end() -> None:
    """Print around a bar: it is erased, the line printed and the bar drawn again; gone after the block."""
    stream, drawn = io.StringIO(), threading.Event()

    def text(_: int) -> str:
        """Signal that the bar was drawn; return its text."""
        drawn.set()
        return "step 1/2"

    with Bar(stream, text) as bar:
        assert drawn.wait(60)
        bar.print("before it is seen, or after")
        while "step 1/2" not in stream.getvalue():
            pass
        bar.print("\x1b[31mred \r 50%|#")
    bar.print("after the end")
    *_, shown = stream.getvalue().partition("step 1/2")
    assert shown.endswith(f"{ERASE}\x1b[31mred \r 50%|#\nstep 1/2{ERASE}after the end\n")


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Replace sys.stderr by a pseudo-terminal; yield the descriptor that reads its output, and close it."""
    master, slave = pty.openpty()
    with open(slave, "w", encoding="utf-8") as stream:  # noqa: PTH123
        monkeypatch.setattr("sys.stderr", stream)
        yield master
    os.close(master)


@pytest.mark.parametrize(("term", "as_json"), [("dumb", False), ("", False), ("xterm", True)])
def test_a_terminal_that_cannot_and_a_document_have_no_bar(
    monkeypatch: pytest.MonkeyPatch, term: str, as_json: bool
) -> None:
    """Show progress on a dumb terminal or with JSON: no bar is made."""
    monkeypatch.setenv("TERM", term)
    with terminal(monkeypatch):
        output = Output(as_json=as_json)
        with output.showing(lambda: FOUND, 0, 600):
            assert output._bar is None


def test_a_terminal_has_a_bar_and_lines_above_it_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show progress on a pseudo-terminal: lines, warnings and notes stand above the bar as without one."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = b""
    with terminal(monkeypatch) as master:
        output = Output()
        with output.showing(lambda: FOUND, 0, 600):
            while b"1:30 left" not in screen:
                screen += os.read(master, 4096)
            output.event(Event("line", "from a rank"))
            output.event(Event("warning", "disk is full"))
        output.note("after")
        while b"after" not in screen:
            screen += os.read(master, 4096)
    lines = screen.decode().replace(ERASE, "\x00")
    assert re.findall(r"\x00([^\x00\r]*)\r\n", lines) == [
        "\x1b[2m  | \x1b[0mfrom a rank", "\x1b[33mwarning:\x1b[0m disk is full", "after"
    ]  # fmt: skip


def test_quiet_leaves_out_what_runs_print_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """Use quiet output: lines of ranks are left out; notice and answer are printed."""
    output = Output(quiet=True)
    with output.showing(Progress, 0, 60):
        output.event(Event("line", "from a rank"))
        output.event(Event("notice", "run r1"))
    output.answer({}, "verdict PASS")
    assert capsys.readouterr() == ("verdict PASS\n", "run r1\n")


def test_a_pipe_has_the_lines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Show progress into a pipe: a line with colour and carriage return is printed unchanged, and no bar."""
    output = Output()
    with output.showing(lambda: FOUND, 0, 600):
        output.event(Event("line", "\x1b[31mred\r 50%"))
    assert capsys.readouterr().err == "\x1b[31mred\r 50%\n"


def test_without_a_terminal_quiet_has_a_line_now_and_then_and_the_last() -> None:
    """Tell progress every ms: lines while it lasts, and at the end the last step, which came after the last line."""
    lines: list[str] = []
    steps = [Progress(step=1, steps=2)]
    told = threading.Event()

    def note(line: str) -> None:
        """Keep a line, and say that one was told."""
        lines.append(line)
        told.set()

    with noting(note, lambda: steps[-1], lambda now: progress_line(now, 65, 600), every=0.001):
        assert told.wait(60)
        steps.append(Progress(step=2, steps=2, metrics=METRICS, seconds_left=0.0))
    last = "step 2/2  loss 3.142  throughput 1,234 samples/s  accuracy 0.5  0:00 left"
    assert lines[0] == "step 1/2  1:05 (limit 10 min)"
    assert lines[-1] == last


@pytest.mark.parametrize(
    ("steps", "expected"),
    [([Progress(step=1), Progress(step=2)], ["step 2  0:05 (limit 60 s)"]), ([Progress()] * 2, [])],
)
def test_a_short_run_has_one_line_and_one_without_steps_none(steps: list[Progress], expected: list[str]) -> None:
    """Tell progress of a run that ends before the first line is due: the last step alone, if there is one."""
    lines: list[str] = []
    with noting(lines.append, lambda: steps[-1], lambda now: progress_line(now, 5, 60), every=60):
        pass
    assert lines == expected


def test_quiet_tells_progress_to_a_pipe_and_not_beside_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    """Show progress of a quiet run into a pipe: its last line; nothing with JSON."""
    for as_json in (False, True):
        with Output(quiet=True, as_json=as_json).showing(lambda: FOUND, 0, 600):
            pass
    line = "step  30/120  loss 3.142  throughput 1,234 samples/s  accuracy 0.5  1:30 left\n"
    assert capsys.readouterr().err == line


def test_steps_are_cut_to_the_width_of_a_terminal_and_whole_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Emit a long step: 40 columns of it on a terminal that wide, all of it in a pipe."""
    step = Event("step", f"[1/2] write {'x' * 200}")
    Output().event(step)
    assert capsys.readouterr().err == f"{step.text}\n"
    monkeypatch.setattr("labctl.cli.output.width_of", lambda _: 40)
    with terminal(monkeypatch) as master:
        Output().event(step)
        Output().begin("stopping run r1")
        screen = b""
        while screen.count(b"\n") < 2:
            screen += os.read(master, 4096)
    assert screen.decode() == f"[1/2] write {'x' * 25}...\r\nstopping run r1 ...\r\n"


def test_what_a_command_begins_with_is_for_a_terminal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Begin a command in a pipe: nothing is printed."""
    Output().begin("stopping run r1")
    assert capsys.readouterr() == ("", "")
