from __future__ import annotations

import time
from pathlib import Path

import pytest

from labctl import shell
from labctl.errors import HostError


def test_run_gives_output_and_code() -> None:
    done = shell.run(["sh", "-c", "cat; echo oops >&2; exit 3"], input="hello", check=False)
    assert (done.out, done.err, done.code) == ("hello", "oops\n", 3)


def test_a_failure_says_what_ran_and_the_last_of_what_it_said() -> None:
    with pytest.raises(HostError) as caught:
        shell.run(["sh", "-c", "seq 1 30 >&2; exit 7"])
    assert "sh -c 'seq 1 30 >&2; exit 7': exit code 7\n11\n12" in caught.value.message
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("start", [shell.run, lambda argv: shell.stream(argv, print)])
def test_a_missing_program_is_named(start: object) -> None:
    with pytest.raises(HostError, match="no-such-program: no such program"):
        start(["no-such-program", "x"])  # type: ignore[operator]


def test_a_missing_program_unchecked_has_the_code_of_a_shell() -> None:
    assert shell.run(["no-such-program"], check=False).code == shell.NOT_FOUND


def test_the_environment_is_added_to() -> None:
    done = shell.run(["sh", "-c", 'echo $ADDED; test -n "$PATH"'], env={"ADDED": "yes"})
    assert done.out == "yes\n"


@pytest.mark.parametrize("start", [shell.run, lambda argv, timeout: shell.stream(argv, print, timeout=timeout)])
def test_a_time_limit_ends_grandchildren_too(start: object, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    began = time.monotonic()
    with pytest.raises(HostError, match=r"not done within 0.5 s"):
        start(["sh", "-c", f"sleep 60 & echo $! > {pid_file}; wait"], timeout=0.5)  # type: ignore[operator]
    assert time.monotonic() - began < 5
    # Signals are delivered after kill() returns.
    assert _ends(int(pid_file.read_text()), within=5)


def test_stream_hands_on_each_line_of_both_outputs() -> None:
    lines: list[str] = []
    done = shell.stream(["sh", "-c", "echo a; echo b >&2; printf c"], lines.append)
    assert (lines, done.out) == (["a", "b", "c"], "a\nb\nc")


def test_stream_ends_the_child_when_the_reader_fails() -> None:
    def refuse(line: str) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        shell.stream(["sh", "-c", "echo a; exec sleep 60"], refuse)
    assert time.monotonic() - began < 5


def test_replace_of_a_missing_program() -> None:
    with pytest.raises(HostError, match="cannot run no-such-program"):
        shell.replace(["no-such-program"])


def _ends(pid: int, within: float) -> bool:
    deadline = time.monotonic() + within
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not _alive(pid)


def _alive(pid: int) -> bool:
    """Whether a process still runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
