"""Processes that wait in the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from support import host_health
from support.host_health import conditions, look, put, read

from labctl.health import processes
from labctl.health.processes import NAME, SUBJECT

KEY = ("", NAME)
# The child of posix_spawn(3) waits for a writer of the pipe, and until then its parent waits in the kernel.
PARENT = """
import os, sys
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])
"""


def stat(pid: int, name: str, state: str, core: int = 0) -> str:
    """Return a line of /proc/PID/stat."""
    return f"{pid} ({name}) {state} {' '.join(['1'] * 35)} {core} 0 0\n"


def process(pid: int, name: str, since: float, function: str = "rpc_wait_bit_killable") -> dict[str, str]:
    """Return the files of a process in state D since this second of its core's clock."""
    return {
        f"proc/{pid}/stat": stat(pid, name, "D"),
        f"proc/{pid}/sched": f"{name} ({pid}, #threads: 1)\n---\nse.exec_start   :   {since * 1000:.6f}\nnr : 1\n",
        f"proc/{pid}/wchan": function,
        f"proc/{pid}/cgroup": "0::/user.slice\n",
    }


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a root whose only core's clock is at 1000 s, and whose processes run or sleep."""
    put(
        tmp_path,
        {
            "proc/1/stat": stat(1, "systemd", "S"),
            "proc/2/stat": stat(2, "a) D 1 (b", "R"),
            "proc/self/stat": stat(99, "grep", "R"),
            "proc/self/sched": "grep (99, #threads: 1)\nse.exec_start : 1000000.250000\n",
        },
    )
    return tmp_path


def test_no_process_waits(tree: Path) -> None:
    """Return an empty text if nothing is in state D."""
    assert read(SUBJECT, tree)[KEY].value == ""


def test_a_process_that_waits_for_long(tree: Path) -> None:
    """Name the process, the seconds and the function, and not one that waits shortly."""
    put(tree, {**process(4711, "pt (main) x", 875), **process(12, "jbd2/sda1-8", 999)})
    assert read(SUBJECT, tree)[KEY].value == "4711 pt (main) x 125 s rpc_wait_bit_killable"
    now = msgspec.structs.replace(look(SUBJECT, tree), lines_why="")
    condition = conditions(SUBJECT, now)["uninterruptible"]
    assert condition.level == "bad"
    assert condition.text.endswith(": 4711 pt (main) x 125 s rpc_wait_bit_killable")


def test_two_processes(tree: Path) -> None:
    """Separate several by a semicolon; a function that only root may see is left out."""
    put(tree, {**process(5, "a", 900, "0"), **process(6, "b", 800)})
    assert read(SUBJECT, tree)[KEY].value == "5 a 100 s; 6 b 200 s rpc_wait_bit_killable"


@pytest.mark.parametrize("function", processes.EXPECTED)
def test_frozen_and_vfork_are_expected(tree: Path, function: str) -> None:
    """Leave out what waits for a person or a program."""
    put(tree, process(5, "a", 1, function))
    assert read(SUBJECT, tree)[KEY].value == ""


def test_frozen_container_of_another_user(tree: Path) -> None:
    """Leave out a process in a frozen group, whose function only root may see."""
    put(tree, {**process(5, "a", 1, "0"), "proc/5/cgroup": "7:freezer:/docker/0a\n0::/\n"})
    put(tree, {"sys/fs/cgroup/freezer/docker/0a/freezer.state": "FROZEN\n"})
    assert read(SUBJECT, tree)[KEY].value == ""


def test_unknown_without_the_time(tree: Path) -> None:
    """Answer unknown if a process waits, and the kernel does not tell since when."""
    put(tree, process(5, "a", 1))
    (tree / "proc/5/sched").unlink()
    condition = conditions(SUBJECT, msgspec.structs.replace(look(SUBJECT, tree), lines_why=""))["uninterruptible"]
    assert condition.level == "unknown"
    assert "/proc/PID/sched" in condition.text


def test_unknown_if_processes_are_hidden(tree: Path) -> None:
    """Answer unknown if other users' processes are hidden."""
    (tree / "proc/1/stat").unlink()
    assert "hidepid" in read(SUBJECT, tree)[KEY].why


def test_damaged_output(tree: Path) -> None:
    """Raise only what the frame catches."""
    put(tree, process(5, "a", 1))
    host_health.fuzz(SUBJECT, host_health.output(SUBJECT, tree), seed=4)


def test_a_real_process_in_state_d(tmp_path: Path) -> None:
    """Measure how long a process of this machine waits, by the clock of its core."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    began = time.monotonic()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(pipe)])
    try:
        status = Path(f"/proc/{parent.pid}/stat")
        while ") D " not in status.read_text():
            time.sleep(0.01)
        time.sleep(1)
        dump = host_health.dump_of(SUBJECT)
        longest = time.monotonic() - began
    finally:
        pipe.write_text("")
        parent.wait(60)
    fields = dump.facts["uninterruptible"]
    assert str(parent.pid) in fields
    dump.facts["waits in"] = ""
    (found,) = (process for process in processes.waiting(dump) if process.pid == parent.pid)
    assert found.seconds is not None
    assert 0.9 < found.seconds < longest + 0.1


def test_this_machine() -> None:
    """Find nothing wrong with the machine that runs the test."""
    assert host_health.wrong_here(SUBJECT) == []
