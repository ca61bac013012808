from __future__ import annotations

import io
import os
import pty
import re
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace
from rich.console import Console
from rich.text import Text
from support.commandline import Labctl

from labctl import flows
from labctl.cli import top
from labctl.cli.output import to_json
from labctl.cli.top import Screen, view_text
from labctl.model import Progress, Straggler
from labctl.records.samples import NodeSamples, Reading
from labctl.runs.top import RunView

METRICS = {
    "loss": {"value": 3.25, "unit": ""},
    "throughput": {"value": 25.337, "unit": "samples/s"},
}
DEVICE = {
    "utilisation": Reading(97.0, "%"),
    "memory": Reading(40960.0, "MiB"),
    "temperature": Reading(61.0, "C"),
    "power": Reading(612.5, "W"),
}


def view(nodes: int = 2, state: str = "running") -> RunView:
    """Return a running view of opt-tiny with this many nodes, one device each."""
    machine = {"cpu": Reading(95.5, "%"), "memory": Reading(1551.0, "MiB"), "network received": Reading(29.0, "MB/s")}
    return RunView(
        run_id="20260102-150405-opt-tiny-3fa2",
        workload="opt-tiny",
        state=state,
        seconds=65.2,
        timeout=600.0,
        progress=Progress(step=30, steps=120, metrics=METRICS, seconds_per_step=0.5, seconds_left=45.0),
        nodes=tuple(NodeSamples(node=f"worker-{at}", values=machine, devices={"0": DEVICE}) for at in range(nodes)),
    )


BAR = f"{'━' * 8}{'─' * 22}"
WIDE = f"""\
opt-tiny  running  1:05 of 10:00  run 20260102-150405-opt-tiny-3fa2
step  30/120  {BAR}  0:45 left  0.5 s per step
loss 3.25  throughput 25.34 samples/s

NODE      CPU %  MEMORY MiB  NETWORK RECEIVED MB/s
worker-0  95.5   1,551       29
worker-1  95.5   1,551       29

NODE      DEVICE  UTIL %  MEMORY MiB  TEMP C  POWER W
worker-0  0       97      40,960      61      612.5
worker-1  0       97      40,960      61      612.5"""
NARROW = """\
opt-tiny  running  1:05 of 10:00
step  30/120  0:45 left  0.5 s per step
loss 3.25  throughput 25.34 samples/s

NODE      CPU %  MEMORY MiB
worker-0  95.5   1,551
worker-1  95.5   1,551

NODE      DEVICE  UTIL %  MEMORY MiB
worker-0  0       97      40,960
worker-1  0       97      40,960"""


@pytest.mark.parametrize(("width", "expected"), [(0, WIDE), (120, WIDE), (80, WIDE), (40, NARROW)])
def test_a_narrow_terminal_has_fewer_columns_and_no_line_wraps(width: int, expected: str) -> None:
    """Format the view: at 40 columns fewer columns, no line longer than the width."""
    assert view_text(view(), width) == expected


def test_the_node_that_others_wait_for_is_told_with_its_time_as_the_samples_are_of_another() -> None:
    """Format a straggler: the sentence says that its shares are of the last minute."""
    late = Straggler(node="worker-1", share=0.064, others=0.63)
    assert (
        view_text(replace(view(), straggler=late)).splitlines()[-1].startswith("in the last minute: worker-1 arrives")
    )


def test_metrics_that_were_found_in_the_output_are_marked() -> None:
    """Format a metric that was found in the output: marked so."""
    progress = Progress(metrics={"loss": {"value": 3.25, "unit": "", "found": "name: 1.2"}})
    shown = view_text(replace(view(), progress=progress)).splitlines()
    assert "loss 3.25  (found in the output)" in shown


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_screen_is_filled_as_it_was_laid_out(width: int) -> None:
    """Print the screen with rich: the same lines as formatted, the last says how to leave."""
    console = Console(width=width, height=24, record=True, file=io.StringIO())
    console.print(Text(view_text(view(), width, 24), no_wrap=True))
    shown = [line.rstrip() for line in console.export_text().splitlines()]
    assert shown == view_text(view(), width, 24).splitlines()
    assert shown[-1] == top.LEAVES


def test_of_many_nodes_a_screen_shows_those_that_have_room_and_says_how_many_lines_more() -> None:
    """Format 64 nodes for 24 lines: cut to the screen, with the number of hidden lines."""
    lines = view_text(view(nodes=64), 80, 24).splitlines()
    assert len(lines) == 24
    hidden = len(view_text(view(nodes=64)).splitlines()) - 21
    assert lines[-3:] == [f"... and {hidden} more lines", "", top.LEAVES]


def test_a_run_that_has_said_nothing_yet_is_shown() -> None:
    """Format a run without any sample: its head and node."""
    expected = RunView(
        run_id="r1", workload="x", state="waiting", seconds=1, timeout=60, progress=Progress(),
        nodes=(NodeSamples(node="worker-0"),),
    )  # fmt: skip
    assert view_text(expected) == "x  waiting  0:01 of 1:00  run r1\n\nNODE\nworker-0"


def test_a_document_has_all_of_it() -> None:
    """Turn the view into JSON: step and device readings are in it."""
    document = to_json(view())
    assert document["progress"]["step"] == 30
    assert document["nodes"][1]["devices"]["0"]["power"] == {"value": 612.5, "unit": "W"}


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Make a pseudo-terminal stdin and stdout during the block; yield its two descriptors."""
    master, slave = pty.openpty()
    with open(slave, "r+b", buffering=0) as raw, open(slave, "w", closefd=False) as out:  # noqa: PTH123
        monkeypatch.setattr("sys.stdin", raw)
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setenv("TERM", "xterm")
        yield master, slave
    os.close(master)


def test_q_leaves_the_screen_and_the_terminal_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Type q: show() is False, and the terminal's settings and screen are restored."""
    with terminal(monkeypatch) as (master, slave):
        before = termios.tcgetattr(slave)
        os.write(master, b"q\n")
        with Screen() as screen:
            assert not screen.show(view())
            assert termios.tcgetattr(slave)[tty.LFLAG] != before[tty.LFLAG]
        assert termios.tcgetattr(slave) == before
        output = b""
        while b"\x1b[?1049l" not in output:
            output += os.read(master, 1 << 16)
        assert output.index(b"\x1b[?1049h") < output.index(b"worker-1") < output.index(b"\x1b[?1049l")


def test_other_keys_do_not_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Type another key: show() stays True."""
    with terminal(monkeypatch) as (master, _), Screen() as screen:
        os.write(master, b"x\n")
        assert screen.show(view())


def test_without_an_engine_it_says_so(labctl: Labctl) -> None:
    """Run top without an engine: exit code 3 with a hint."""
    answer = labctl("top")
    assert answer.code == 3
    assert re.search("^hint:", answer.err, re.MULTILINE)


def test_leaving_it_by_ctrl_c_is_no_error(labctl: Labctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C: exit code 130, and a line without `error:`."""

    def interrupted(*_: object) -> None:
        """Raise KeyboardInterrupt."""
        raise KeyboardInterrupt

    monkeypatch.setattr(flows, "top", interrupted)
    answer = labctl("top")
    assert (answer.code, answer.err) == (130, "no longer watched: the run goes on; `labctl stop` ends it\n")
