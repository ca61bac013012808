from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from labctl.backends.docker.lab.devices import ResolvedSetting
from labctl.cli.output import Output, fitted, say, say_printed, table, to_json, width_of, write
from labctl.cli.run import run_text
from labctl.errors import HostError, OutputClosed, OutputFailed, unwritten
from labctl.model import CriterionResult, Event, Rank, Result

ERROR = HostError("no engine", hint="labctl setup", node="worker-1")
RESULT = Result(
    run_id="r1",
    workload="hello",
    launcher="deepspeed",
    lab="demo",
    metrics={
        "loss": {"first": 4.123456, "last": 1.0},
        "throughput": {"value": 12.34567, "unit": "samples/s"},
        "broken": {"value": None, "unit": "", "note": "nan"},
    },
    ranks=tuple(Rank(rank=index, node=f"worker-{index}") for index in range(9)),
    world_size=9,
    seconds=12.3,
    verdict="FAIL",
    cause="criteria",
    message="1 of 2 criteria not met.",
    exit_code=5,
)


def test_the_answer_is_on_stdout_and_words_are_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """Emit events and an answer: the answer alone is on stdout, events on stderr."""
    output = Output()
    output.event(Event(kind="step", text="[1/2] write"))
    output.event(Event(kind="line", text="step 1 loss 2"))
    output.event(Event(kind="warning", text="old image"))
    output.answer({"lab": "demo"}, "lab demo: up")
    captured = capsys.readouterr()
    assert captured.out == "lab demo: up\n"
    assert captured.err == "[1/2] write\nstep 1 loss 2\nwarning: old image\n"


def test_a_quiet_command_prints_notices_without_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Emit a step and a notice with quiet: the notice alone is printed."""
    output = Output(quiet=True)
    output.event(Event(kind="step", text="[1/2] write"))
    output.event(Event(kind="notice", text="run r1: hello"))
    assert capsys.readouterr().err == "run r1: hello\n"


def test_as_json_the_answer_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    """Answer as JSON: one document with schema on stdout."""
    Output(as_json=True).answer({"lab": "demo"}, "not shown")
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "lab": "demo"}


def test_as_json_an_error_is_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    """Report an error as JSON: one document on stdout, nothing on stderr."""
    Output(as_json=True).error(ERROR)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "schema": 1,
        "error": {"kind": "environment", "message": "no engine", "hint": "labctl setup", "node": "worker-1"},
    }
    assert captured.err == ""


def test_an_error_for_people_has_its_hint_and_leaves_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Report an error for people: message and hint on stderr, nothing on stdout."""
    Output().error(ERROR)
    assert capsys.readouterr() == ("", "error: no engine\nhint: labctl setup\n")


def test_that_a_host_is_waited_for_is_told_to_people_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Emit a waiting event: printed for people, not with JSON."""
    for output in (Output(), Output(as_json=True)):
        output.event(Event(kind="waiting", text="waiting for h3"))
    assert capsys.readouterr() == ("", "waiting for h3\n")


def test_no_colors_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Emit events without a terminal: no escape sequence."""
    output = Output()
    for kind in ("step", "line", "notice", "warning"):
        output.event(Event(kind=kind, text="x"))
    assert "\033" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "on_terminal", "elsewhere"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_variables_turn_colors_off_and_on(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], on_terminal: bool, elsewhere: bool
) -> None:
    """Print an error to a terminal and to a file: colored as NO_COLOR and FORCE_COLOR say, else on the terminal."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for stream, colored in ((Terminal(), on_terminal), (io.StringIO(), elsewhere)):
        monkeypatch.setattr(sys, "stderr", stream)
        Output().error(HostError("wrong", hint="right"))
        assert ("\033[31merror:\033[0m wrong" in stream.getvalue()) is colored
        assert ("\033" in stream.getvalue()) is colored


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("loss 1\tok 漢字", "loss 1\tok 漢字"),
        ("\x1b]52;c;cm0gLXJm\x07", "?]52;c;cm0gLXJm?"),
        ("\x1b]0;title\x1b\\", "?]0;title?\\"),
        ("\x1b[2J\x1b[3A\x1bc\x9b2J\b\u202e", "?[2J?[3A?c?2J??"),
        ("\x1b[1;31mred\x1b[38;5;8m grey", "\x1b[1;31mred\x1b[38;5;8m grey\x1b[0m"),
        ("\x1b[31\x1b[2Jm", "?[31?[2Jm"),
    ],
)
def test_a_terminal_gets_only_the_colors_of_what_a_run_prints(
    monkeypatch: pytest.MonkeyPatch, printed: str, shown: str
) -> None:
    """Print control characters of a run to a terminal: colors stay, others become "?", lines are marked."""
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    say_printed(printed)
    Output().event(Event(kind="line", text=f"{printed}\nverdict PASS"))
    assert out.getvalue() == f"{shown}\n"
    mark = "\x1b[2m  | \x1b[0m"
    assert err.getvalue() == f"{mark}{shown}\n{mark}verdict PASS\n"


def test_a_carriage_return_takes_no_mark_from_a_line_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print a carriage return of a run to a terminal: the mark is printed again after it."""
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    Output().event(Event(kind="line", text="50%|#\rverdict    PASS"))
    mark = "\x1b[2m  | \x1b[0m"
    assert err.getvalue() == f"{mark}50%|#\r{mark}verdict    PASS\n"


def test_a_pipe_gets_what_a_run_prints_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Print control characters of a run into a pipe: unchanged."""
    printed = "\x1b]52;c;cm0gLXJm\x07\x1b[31mred\x9b2J\b\r50%|#"
    say_printed(printed)
    Output().event(Event(kind="line", text=f"{printed}\n{printed}"))
    assert capsys.readouterr() == (f"{printed}\n", f"{printed}\n{printed}\n")


def test_better_keys_have_the_deprecated_ones_beside_them() -> None:
    """Turn a setting into JSON: `reason` and the deprecated `why` both stand in it."""
    assert to_json(ResolvedSetting("accelerator", "cpu", "no device")) == {
        "key": "accelerator", "value": "cpu", "reason": "no device", "why": "no device",
    }  # fmt: skip


def test_a_metric_may_have_the_name_of_a_document() -> None:
    """Turn a metric named training into JSON: unchanged."""
    metrics = {"training": {"value": 1.0, "unit": "s"}}
    assert to_json(metrics) == metrics


def test_a_number_that_json_has_not_is_refused() -> None:
    """Answer NaN as JSON: ValueError."""
    with pytest.raises(ValueError, match="JSON"):
        Output(as_json=True).answer({"x": float("nan")}, "")


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    """Format a table: columns as wide as their widest cell, no space at line ends."""
    assert table(("NODE", "N"), [("worker-10", 1), ("w", "")]) == "NODE       N\nworker-10  1\nw"


def test_sentences_of_a_result_are_broken_at_the_width_of_the_terminal_and_paths_are_not() -> None:
    """Format a result in 40 columns: the ranks go on below their first, the folder stays whole."""
    lab = Path("/srv/a-directory-with-a-name-that-is-long")
    lines = run_text(RESULT, lab, 40).splitlines()
    assert lines[4:6] == ["ranks      9 (0 on worker-0, 1 on", "           worker-1, 2 on worker-2, 3 on"]
    assert lines[-1].endswith(f" {lab}/runs/r1")


def test_a_result_shows_loss_throughput_ranks_and_verdict() -> None:
    """Format a result: loss, metrics, ranks on nodes, seconds, verdict and folder."""
    assert run_text(RESULT, Path("/srv/lab")).splitlines() == [
        "run        r1",
        "loss       4.123 -> 1",
        "throughput 12.35 samples/s",
        "broken     nan",
        "ranks      9 (0 on worker-0, 1 on worker-1, 2 on worker-2, 3 on worker-3, 4 on worker-4, 5 on worker-5, "
        "6 on worker-6, 7 on worker-7 and 1 more)",
        "seconds    12.3",
        "verdict    FAIL (criteria): 1 of 2 criteria not met.",
        "next       `labctl report r1` draws its metrics, machines and ranks",
        "files      /srv/lab/runs/r1",
    ]


def test_metrics_that_were_found_are_marked_with_the_lines_that_have_them() -> None:
    """Format metrics that were found in the output: marked, with the line once."""
    line = {"found": "name: 1.2", "line": "step 9 loss: 1.5 lr: 0.1"}
    metrics = {"loss": {"first": 4.0, "last": 1.5, **line}, "learning_rate": {"value": 0.1, "unit": "", **line}}
    shown = run_text(replace(RESULT, metrics=metrics), Path("/srv/lab")).splitlines()[1:4]
    assert shown == [
        "loss          4 -> 1.5 (found)",
        "learning_rate 0.1 (found)",
        "found in      step 9 loss: 1.5 lr: 0.1",
    ]


def test_the_result_of_a_run_that_lost_a_node_says_what_is_next() -> None:
    """Format a result with cause node-lost: the next steps are up and run --resume."""
    text = run_text(replace(RESULT, cause="node-lost"), Path("/srv/lab"))
    assert text.splitlines()[-2].startswith("next       `labctl up` starts the node again; then `labctl run --resume ")


@pytest.mark.parametrize(
    ("domain", "retry", "line"),
    [
        ("workload", "does not", "retry      does not help: KeyError: 'a' (train.py:3) (workload)"),
        ("infrastructure", "helps", "retry      helps: KeyError: 'a' (train.py:3) (infrastructure)"),
        ("unknown", "unknown", "retry      may help: cause unclear (workload or infrastructure)"),
    ],
)
def test_a_result_says_in_one_line_whether_trying_again_helps(domain: str, retry: str, line: str) -> None:
    """Format results with domain and retry: one line; none without evidence, if interrupted or of criteria."""
    told = replace(RESULT, cause="rank-crashed", domain=domain, retry=retry, evidence="KeyError: 'a' (train.py:3)")
    assert line in run_text(told, Path("/srv/lab")).splitlines()
    assert "retry " not in run_text(RESULT, Path("/srv/lab"))
    repeated = replace(told, message=told.evidence, retry="helps", domain="workload")
    assert "retry      helps (workload)" in run_text(repeated, Path("/srv/lab")).splitlines()
    assert "retry " not in run_text(replace(told, cause="interrupted"), Path("/srv/lab"))
    assert "retry " not in run_text(replace(told, verdict="FAIL", cause="criteria"), Path("/srv/lab"))


def test_a_crash_without_advice_says_where_the_rest_of_the_output_is() -> None:
    """Format a result whose rank exited without a known cause: how to read all that the rank wrote."""
    message = "rank 1 on worker-1 exited with code 3; the last it wrote: loss 1; rank 0 on worker-0 exited with code 3"
    crashed = replace(RESULT, verdict="ERROR", cause="rank-crashed", message=message)
    step = f"`labctl logs --run {RESULT.run_id} --rank 1` prints all that rank 1 wrote"
    assert [line.split(maxsplit=1)[1] for line in run_text(crashed, Path("/srv")).splitlines() if "next" in line] == [
        step
    ]


def test_a_run_that_nothing_judged_is_completed_and_has_the_way_to_a_verdict() -> None:
    """Format a PASS without criteria: "completed, nothing judged"; with a met criterion: PASS."""
    passed = replace(RESULT, verdict="PASS", cause=None, message="9 ranks ended with code 0; no criteria.")
    lines = run_text(passed, Path("/srv/lab")).splitlines()
    assert "verdict    completed, nothing judged: 9 ranks ended with code 0; no criteria." in lines
    assert "next       add a criterion for a verdict, such as --expect 'loss<2.5'" in lines
    assert to_json(passed)["verdict"] == "PASS"
    check = CriterionResult(criterion="loss < 2.5", value=1.0, passed=True)
    judged = run_text(replace(passed, checks=(check,), message="All criteria met."), Path("/srv/lab"))
    assert "verdict    PASS: All criteria met." in judged
    assert "next " not in judged


def test_a_run_whose_disk_was_full_has_a_way_to_room() -> None:
    """Format a result with cause disk-full: the next step is runs prune."""
    message = "cannot write output.log: No space left on device; 0 B free at /data"
    text = run_text(replace(RESULT, verdict="ERROR", cause="disk-full", message=message), Path("/srv/lab"))
    assert "next       `labctl runs prune --keep N` removes old runs" in text


def test_a_line_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write notes, answers and errors: each is one write with its line end."""

    class Pieces(io.StringIO):
        def write(self, text: str) -> int:
            """Record the text; return its length."""
            pieces.extend([text] if text else [])
            return len(text)

    pieces: list[str] = []
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, Pieces())
    output = Output(as_json=True)
    output.note("a")
    say("b")
    output.answer({}, "")
    output.error(ERROR)
    assert [(piece[0], piece[-1]) for piece in pieces] == [("a", "\n"), ("b", "\n"), ("{", "\n"), ("{", "\n")]


def test_a_result_that_a_workload_wrote_itself_is_shown_without_its_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Print a result with control characters: they become "?", other text stays."""
    metrics: dict[str, dict[str, str | None]] = {"a\x1b[2J": {}, "b": {"first": "\x1b[2J"}}
    result = replace(RESULT, message="\x1b]0;title\x07 fine \u3000 漢字 \u202e", metrics=metrics)
    Output().answer(result, run_text(result, Path("/srv/lab")))
    text = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "?]0;title? fine \u3000 漢字 ?" in text


def test_what_a_host_said_moves_no_cursor_in_errors_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    """Print warnings and errors with control characters: they become "?"."""
    output = Output()
    output.event(Event(kind="warning", text="red: \x1b[2Jgone"))
    output.error(HostError("red: \x1b]0;title\x07 said\tno", hint="ssh red\x1b[A"))
    assert capsys.readouterr().err.splitlines() == [
        "warning: red: ?[2Jgone",
        "error: red: ?]0;title? said\tno",
        "hint: ssh red?[A",
    ]


def test_output_that_fits_on_no_disk_is_an_error_once() -> None:
    """Write to a full disk: OutputFailed with the reason; what is written later is dropped."""
    with open("/dev/full", "w", encoding="utf-8") as full:  # noqa: PTH123
        with pytest.raises(OutputFailed, match="cannot write the output: No space left on device"):
            write("a", full)
        write("b", full)


@pytest.mark.parametrize(("number", "command"), [(errno.ENOSPC, "df -h"), (errno.EDQUOT, "df -h"), (errno.EIO, "")])
def test_only_a_full_disk_is_hinted_at_as_one(number: int, command: str) -> None:
    """Fail to write for several reasons: only where there is no room the hint is to look at the disk."""
    error = unwritten(OSError(number, os.strerror(number)))
    assert (error.exit_code, error.hint.rpartition(": ")[2]) == (3, command)


@contextmanager
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make stderr a pipe whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        yield


def test_a_command_goes_on_if_nobody_reads_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emit events to a closed pipe, as after `2>&1 | head`: no error, so that a run gets its result."""
    with unread(monkeypatch):
        output = Output()
        output.event(Event(kind="step", text="[1/2] begin"))
        output.event(Event(kind="line", text="step 1"))


def test_a_command_that_only_shows_ends_if_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emit an event of `attach` to a closed pipe: OutputClosed."""
    with unread(monkeypatch), pytest.raises(OutputClosed):
        Output(only_shows=True).event(Event(kind="line", text="step 1"))


@pytest.mark.parametrize("columns", [{}, {"RUN": ["", ""]}])
def test_a_table_without_a_text_is_empty_at_any_width(columns: dict[str, list[str]]) -> None:
    """Render columns without a text, for a terminal and for none: empty."""
    assert [fitted(columns, width).strip() for width in (0, 40)] == ["", ""]


def test_the_width_is_that_of_the_terminal_and_0_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for the width of a pipe and of a terminal of 60 columns, with COLUMNS set: 0 and 60."""
    monkeypatch.setenv("COLUMNS", "40")
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    reader, writer = os.pipe()
    with os.fdopen(slave, "w") as terminal, os.fdopen(writer, "w") as pipe:
        assert (width_of(pipe), width_of(terminal)) == (0, 60)
    os.close(master)
    os.close(reader)


@pytest.mark.parametrize(
    ("hint", "shown"),
    [
        ("labctl up", "labctl -C 'my lab' up"),
        ("labctl down && labctl up", "labctl -C 'my lab' down && labctl -C 'my lab' up"),
        ("labctl logs worker-0; labctl up", "labctl -C 'my lab' logs worker-0; labctl -C 'my lab' up"),
        ("re-run `labctl up` to resume", "re-run `labctl -C 'my lab' up` to resume"),
        ("`labctl init mylab` creates one", "`labctl init mylab` creates one"),
        ("`labctl --help` lists all commands", "`labctl --help` lists all commands"),
        ("as ann: labctl down -C /srv/lab", "as ann: labctl down -C /srv/lab"),
        ("docker unpause worker-0", "docker unpause worker-0"),
    ],
)
def test_a_hint_names_the_lab_directory_that_the_user_named(hint: str, shown: str) -> None:
    """Render hints with and without a directory: labctl's commands on a lab name it with -C."""
    output = Output()
    assert output.typed_here(hint) == hint
    output.directory = "my lab"
    assert output.typed_here(hint) == shown
