from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from support.harness import wait_until

from labctl.backends.docker.hosts.ssh import EngineRelay
from labctl.errors import HostError
from labctl.system import process


def test_bytes_are_fed_as_they_come() -> None:
    """Feed bytes to a program: its output, errors and exit code."""
    done = process.feed(
        ["sh", "-c", "cat; echo oops >&2; exit 3"], (bytes([255, number]) for number in b"ab"), timeout=60
    )
    assert (done.out, done.err, done.code) == ("\ufffda\ufffdb", "oops\n", 3)


def test_a_program_that_reads_no_further_says_why_by_its_code() -> None:
    """Feed a program that ends early: its exit code and errors, no exception."""
    done = process.feed(["sh", "-c", "echo full >&2; exit 9"], (bytes(1 << 16) for _ in range(64)), timeout=60)
    assert (done.code, done.err) == (9, "full\n")


def test_bytes_are_handed_on_while_the_program_still_runs(tmp_path: Path) -> None:
    """Drain a running program: bytes arrive before its end."""
    received = tmp_path / "seen"
    wait = f"printf first; until [ -e {received} ]; do sleep 0.05; done; printf second"
    got: list[bytes] = []

    def take(chunk: bytes) -> None:
        """Keep the chunk and create the file."""
        got.append(chunk)
        received.touch()

    assert process.drain(["sh", "-c", wait], take, timeout=60).code == 0
    assert b"".join(got) == b"firstsecond"


def _feed(argv: list[str], timeout: float) -> process.CompletedProcess:
    """Feed the program 4 MiB with this time limit."""
    return process.feed(argv, (bytes(1 << 16) for _ in range(64)), timeout=timeout)


def _drain(argv: list[str], timeout: float) -> process.CompletedProcess:
    """Drain the program with this time limit."""
    return process.drain(argv, lambda _: None, timeout=timeout)


@pytest.mark.parametrize("start", [_feed, _drain])
def test_a_time_limit_ends_what_the_program_started_too(start: Callable[[list[str], float], object]) -> None:
    """Exceed the limit of a program with children: ProcessTimeout without waiting for them."""
    began = time.monotonic()
    with pytest.raises(process.ProcessTimeout, match=r"timed out after 0.3 s"):
        start(["sh", "-c", "sleep 60 | sleep 60"], 0.3)
    # Nobody waited for the end of both.
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("start", [_feed, _drain])
def test_a_program_that_is_not_there_is_named(start: Callable[[list[str], float], object]) -> None:
    """Start a missing program: HostError names it."""
    with pytest.raises(HostError, match="no-such-program: command not found"):
        start(["no-such-program"], 1)


def test_the_program_is_killed_when_what_feeds_it_fails(tmp_path: Path) -> None:
    """Fail the source of the bytes: its OSError is raised, and the program is killed."""
    pid = tmp_path / "pid"

    def chunks() -> Iterator[bytes]:
        """Wait for the program's pid, yield bytes, and raise OSError."""
        wait_until(lambda: pid.exists() and pid.read_text(), 60, "the program")
        yield b"half"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        process.feed(["sh", "-c", f"echo $$ > {pid}; sleep 60"], chunks(), timeout=60)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_what_is_held_ends_as_soon_as_it_is_let_go(tmp_path: Path) -> None:
    """End a program that ignores SIGTERM: killed after 0.2 s, its errors are in the file."""
    held = process.BackgroundProcess(["sh", "-c", "echo off >&2; trap '' TERM; echo on; cat"], tmp_path / "errors")
    with contextlib.closing(held.lines(60)) as lines:
        assert next(lines) == "on\n"
    assert not held.ended()
    held.end(0.2)
    assert (held.ended(), (tmp_path / "errors").read_text()) == (True, "off\n")


def test_each_connection_to_a_dialer_is_a_program_of_its_own(tmp_path: Path) -> None:
    """Connect twice to a relay: a program each, which echoes, and ends with its connection."""
    with contextlib.closing(
        EngineRelay(tmp_path / "s", ["sh", "-c", "echo $$; cat"], threading.Semaphore(2))
    ) as dialer:
        with _dialled(dialer.path) as first, _dialled(dialer.path) as second:
            programs = {int(first.readline()), int(second.readline())}
            second.write(b"there and back\n")
            second.flush()
            assert second.readline() == b"there and back\n"
        assert len(programs) == 2
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in programs), 60, "their end")


@contextlib.contextmanager
def _dialled(path: Path) -> Iterator[BinaryIO]:
    """Connect to the socket; yield it as a stream."""
    with socket.socket(socket.AF_UNIX) as made:
        made.settimeout(60)
        made.connect(str(path))
        with made.makefile("rwb") as stream:
            yield stream  # type: ignore[misc]
