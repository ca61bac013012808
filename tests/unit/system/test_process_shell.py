from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from labctl.errors import HostError, OutputClosed
from labctl.system import process


def test_run_gives_output_and_code() -> None:
    """Run a program with input: output, errors and exit code."""
    done = process.run(["sh", "-c", "cat; echo oops >&2; exit 3"], input="hello", check=False)
    assert (done.out, done.err, done.code) == ("hello", "oops\n", 3)


def test_a_failure_says_what_ran_and_the_last_of_what_it_said() -> None:
    """Fail a program: HostError with the command, the code and the last lines, exit code 3."""
    with pytest.raises(HostError) as caught:
        process.run(["sh", "-c", "seq 1 30 >&2; exit 7"])
    assert "sh -c 'seq 1 30 >&2; exit 7': exit code 7\n11\n12" in caught.value.message
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("start", [process.run, lambda argv: process.stream(argv, print)])
def test_a_missing_program_is_named(start: object) -> None:
    """Start a missing program: HostError names it."""
    with pytest.raises(HostError, match="no-such-program: command not found"):
        start(["no-such-program", "x"])  # type: ignore[operator]


def test_a_missing_program_unchecked_has_the_code_of_a_shell() -> None:
    """Run a missing program unchecked: code NOT_FOUND."""
    assert process.run(["no-such-program"], check=False).code == process.NOT_FOUND


def test_the_environment_is_added_to() -> None:
    """Run with another variable: it is added to the environment."""
    done = process.run(["sh", "-c", 'echo $ADDED; test -n "$PATH"'], env={"ADDED": "yes"})
    assert done.out == "yes\n"


@pytest.mark.parametrize("start", [process.run, lambda argv, timeout: process.stream(argv, print, timeout=timeout)])
def test_a_time_limit_ends_grandchildren_too(start: object, tmp_path: Path) -> None:
    """Exceed the limit of a program with a child: HostError, and the child is killed."""
    mark = f"STARTED_BY={tmp_path}"
    began = time.monotonic()
    with pytest.raises(HostError, match=r"timed out after 0.5 s"):
        start(["env", mark, "sh", "-c", "sleep 60 & wait"], timeout=0.5)  # type: ignore[operator]
    # It was not waited for.
    assert time.monotonic() - began < 60
    # Signals are delivered after kill() returns.
    assert _until(lambda: not _marked(mark), within=30)


def test_stream_hands_on_each_line_of_both_outputs() -> None:
    """Stream a program: each line of stdout and stderr, and the whole output."""
    lines: list[str] = []
    done = process.stream(["sh", "-c", "echo a; echo b >&2; printf c"], lines.append)
    assert (lines, done.out) == (["a", "b", "c"], "a\nb\nc")


def test_stream_ends_the_child_when_the_reader_fails() -> None:
    """Raise KeyboardInterrupt in the reader: raised at once, the program is ended."""

    def refuse(line: str) -> None:
        """Raise KeyboardInterrupt."""
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        process.stream(["sh", "-c", "echo a; exec sleep 60"], refuse)
    # It was not waited for.
    assert time.monotonic() - began < 60


ATTACHED = """
import signal, sys
from labctl.system import process as shell
got, pid = sys.argv[1:]
with shell.begun() as begin:
    forward = lambda number: begin(["sh", "-c", f"echo {number.name} > {got}; kill -{int(number)} $(cat {pid})"])
    sys.exit(shell.attached(["sh", "-c", f"echo $$ > {pid}; exec sleep 60"], forward))
"""
GUARDED = """
import sys
from labctl.system import process as shell
with shell.guarded(["sh", "-c", f"echo ran > {sys.argv[1]}"]):
    print("within", flush=True)
    sys.stdin.readline()
"""

NESTED = """
import sys
from labctl.system import process as shell
with shell.guarded(["sh", "-c", f"echo outer >> {sys.argv[1]}"]):
    with shell.guarded(["sh", "-c", f"sleep 0.5; echo inner >> {sys.argv[1]}"]):
        print("within", flush=True)
        sys.stdin.readline()
"""


def _python(program: str, *arguments: Path, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start a Python program in its own session, with pipes for stdin and stdout."""
    pipe = subprocess.PIPE
    command = [*before, sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_an_attached_program_is_handed_on(tmp_path: Path, number: signal.Signals) -> None:
    """Signal a process that is attached to a program: the forwarder runs with the signal, and the program ends."""
    got, pid = tmp_path / "got", tmp_path / "pid"
    with _python(ATTACHED, got, pid) as caller:
        assert _until(lambda: pid.exists() and pid.read_text(), within=60)
        os.killpg(caller.pid, number)
        # The stand-in ends the program itself by the signal, which is no way for it to end.
        assert caller.wait(60) == 1
    assert got.read_text() == f"{number.name}\n"
    assert not _alive(int(pid.read_text()))


def test_a_signal_that_this_process_was_told_to_ignore_is_ignored(tmp_path: Path) -> None:
    """Send SIGHUP to a process under nohup, then SIGTERM: only SIGTERM is forwarded."""
    got, pid = tmp_path / "got", tmp_path / "pid"
    with _python(ATTACHED, got, pid, before=["nohup"]) as caller:
        assert _until(lambda: pid.exists() and pid.read_text(), within=60)
        caller.send_signal(signal.SIGHUP)
        caller.send_signal(signal.SIGTERM)
        caller.wait(60)
    assert got.read_text() == "SIGTERM\n"


def test_an_attached_program_gives_its_code() -> None:
    """Attach to a program that exits with 7: 7, and the signal handlers are restored."""
    before = signal.getsignal(signal.SIGTERM)
    assert process.attached(["sh", "-c", "exit 7"], print) == 7
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_attached_program_that_nobody_reads_any_more_is_told_from_one_that_broke() -> None:
    """Kill an attached program: OutputClosed for SIGPIPE, HostError for SIGKILL."""
    with pytest.raises(OutputClosed):
        process.attached(("sh", "-c", "kill -PIPE $$"), lambda _: None)
    with pytest.raises(HostError, match="SIGKILL"):
        process.attached(("sh", "-c", "kill -KILL $$"), lambda _: None)


def test_what_was_begun_has_ended_when_the_block_is_left(tmp_path: Path) -> None:
    """Begin a program in a block: it has ended after the block."""
    with process.begun() as begin:
        begin(["sh", "-c", f"sleep 0.1; echo done > {tmp_path}/file"])
    assert (tmp_path / "file").read_text() == "done\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_guard_acts_when_its_process_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    """End the process inside a guarded block by a signal: the guard's command runs."""
    with _python(GUARDED, tmp_path / "ran") as caller:
        assert caller.stdout
        assert caller.stdout.readline() == "within\n"
        os.killpg(caller.pid, number)
        caller.wait(60)
    assert _until((tmp_path / "ran").exists, within=60)


def test_a_guard_waits_for_those_that_began_after_it(tmp_path: Path) -> None:
    """Kill the process inside two guards: the inner command runs before the outer."""
    ran = tmp_path / "ran"
    with _python(NESTED, ran) as caller:
        assert caller.stdout
        assert caller.stdout.readline() == "within\n"
        caller.kill()
    assert _until(lambda: ran.exists() and "outer" in ran.read_text(), within=60)
    assert ran.read_text() == "inner\nouter\n"


def test_the_guard_rests_when_the_block_is_left_well(tmp_path: Path) -> None:
    """Leave a guarded block normally: the command is not run."""
    with process.guarded(["touch", str(tmp_path / "ran")]):
        pass
    assert not (tmp_path / "ran").exists()


def test_the_guard_has_acted_when_the_block_was_left_by_an_exception(tmp_path: Path) -> None:
    """Leave a guarded block by an exception: the command has run."""
    with pytest.raises(KeyboardInterrupt), process.guarded(["touch", str(tmp_path / "ran")]):
        raise KeyboardInterrupt
    assert (tmp_path / "ran").exists()


def _marked(mark: str) -> list[str]:
    """Return the processes with this variable in their environment."""
    marked: list[str] = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        # Of others, or ended meanwhile.
        with contextlib.suppress(OSError):
            if mark.encode() in environ.read_bytes().split(b"\0"):
                marked.append(environ.parent.name)
    return marked


def _until(condition: Callable[[], object], within: float) -> bool:
    """Wait for the condition; return it."""
    deadline = time.monotonic() + within
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def _alive(pid: int) -> bool:
    """Return True if a process is running; zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
