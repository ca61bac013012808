"""Locks between real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from labctl.errors import HostError
from labctl.system import filelock

HOLDER = """
import sys
from pathlib import Path
from labctl.system import filelock
with filelock.held(Path(sys.argv[1]), "labctl up"):
    print("held", flush=True)
    sys.stdin.readline()
print("given up", flush=True)
"""


@contextmanager
def other(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start another process that holds the lock; yield it, and kill it at the end of the block."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def give_up(process: subprocess.Popen[str]) -> None:
    """Let the process release the lock, and wait for its end."""
    process.communicate("\n", timeout=60)


def test_a_second_process_loses_and_learns_who_holds_it(tmp_path: Path) -> None:
    """Take a lock that another process holds: HostError, exit code 3, with command and pid."""
    path = tmp_path / ".lab/lock"
    with other(path) as process, pytest.raises(HostError) as caught, filelock.held(path, "labctl down"):
        pytest.fail("two hold the lock")
    assert "`labctl up` by " in caught.value.message
    assert f"pid {process.pid} on " in caught.value.message
    assert caught.value.exit_code == 3


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    """Kill the holder: the lock is free and can be taken."""
    path = tmp_path / "lock"
    with other(path) as process:
        assert filelock.is_held(path)
        process.kill()
        process.wait(timeout=60)
        assert not filelock.is_held(path)
        with filelock.held(path, "labctl down"):
            assert "labctl down" in filelock.holder(path)


def test_waiting_gets_it_when_the_other_gives_it_up(tmp_path: Path) -> None:
    """Wait for a lock: one notice names the holder, and it is taken once released."""
    path = tmp_path / "lock"
    notices: list[str] = []
    with other(path) as process:

        def notice(text: str) -> None:
            """Record the notice and let the holder release the lock."""
            # Told that it waits, it is time for the other to go.
            notices.append(text)
            give_up(process)

        with filelock.held(path, "labctl down", wait=60, notice=notice):
            assert "labctl down" in filelock.holder(path)
    assert len(notices) == 1
    assert notices[0].startswith("waiting for `labctl up` by ")


def test_waiting_has_a_limit(tmp_path: Path) -> None:
    """Wait for a lock for 0.05 s: HostError."""
    with other(tmp_path / "lock"), pytest.raises(HostError), filelock.held(tmp_path / "lock", "labctl down", wait=0.05):
        pytest.fail("two hold the lock")


def test_the_holder_is_forgotten_with_the_lock(tmp_path: Path) -> None:
    """Raise inside the block: the lock file is empty, the holder unknown."""
    path = tmp_path / "lock"
    with pytest.raises(ValueError, match="inside"), filelock.held(path, "labctl up"):
        raise ValueError("inside")
    assert path.read_text() == ""
    assert filelock.holder(path) == "another labctl"


def test_two_threads_never_hold_it_at_once(tmp_path: Path) -> None:
    """Take a lock in four threads: never more than one inside."""
    inside, most = [0], [0]
    guard = threading.Lock()

    def work() -> None:
        """Take the lock and count how many are inside."""
        with filelock.held(tmp_path / "lock", "labctl up", wait=60):
            with guard:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            with guard:
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1]


def test_who_waited_for_a_lock_that_was_removed_holds_the_one_that_is_there(tmp_path: Path) -> None:
    """Remove the lock file while one waits: the waiting one holds a new file at the path."""
    path = tmp_path / "lock"
    with other(path) as process:
        waiting = threading.Event()
        got = threading.Event()

        def wait() -> None:
            """Wait for the lock; check that the file at the path is held."""
            with filelock.held(path, "labctl up", wait=60, notice=lambda _: waiting.set()):
                got.set()
                assert filelock.is_held(path)

        thread = threading.Thread(target=wait)
        thread.start()
        assert waiting.wait(60)
        path.unlink()
        give_up(process)
        thread.join(60)
    assert got.is_set()
    assert path.exists()


def test_a_lock_that_nobody_made_is_free(tmp_path: Path) -> None:
    """Ask for a lock without a file: not held."""
    assert not filelock.is_held(tmp_path / "lock")


def test_a_lock_that_cannot_be_made_is_an_error_for_people(tmp_path: Path) -> None:
    """Take a lock below a file: HostError."""
    (tmp_path / ".lab").write_text("")
    with pytest.raises(HostError), filelock.held(tmp_path / ".lab/lock", "labctl up"):
        pytest.fail("there is no lock")


def test_a_file_that_is_there_is_not_opened_as_one_to_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail as the kernel with fs.protected_regular, for another user's file in a world-writable folder."""
    path = tmp_path / "lock"
    with filelock.held(path, "labctl up", mode=0o666):
        pass
    really = os.open

    def protected(name: str | Path, flags: int, mode: int = 0o777, **options: int) -> int:
        """Raise PermissionError for O_CREAT on an existing file; else open it."""
        if flags & os.O_CREAT and Path(name).exists():
            raise PermissionError(13, "Permission denied")
        return really(name, flags, mode, **options)

    monkeypatch.setattr(os, "open", protected)
    with filelock.held(path, "labctl up", mode=0o666):
        assert "labctl up" in filelock.holder(path)


def test_a_labs_own_lock_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a lock where hard links are refused: held, mode 0600."""

    def unsupported(*_: object, **__: object) -> None:
        """Raise PermissionError."""
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    path = tmp_path / ".lab/lock"
    with filelock.held(path, "labctl up"):
        assert filelock.is_held(path)
    assert path.stat().st_mode & 0o777 == 0o600
