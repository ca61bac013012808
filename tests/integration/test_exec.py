"""`labctl exec`: the command's own bytes, signals and exit code, in the current directory."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.harness import LABCTL, Lab, wait_until

pytestmark = pytest.mark.docker

NODE = "worker-1"


@contextmanager
def under_way(lab: Lab, seconds: int, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start `labctl exec -- bash -c SCRIPT`; yield it once its `sleep SECONDS` runs; kill it after the block."""
    command = [LABCTL, "exec", "-n", NODE, "--", "bash", "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=lab.path, env=lab.environ, stdin=pipe, stdout=pipe, start_new_session=True
    ) as caller:
        try:
            wait_until(lambda: sleeping(lab, seconds), 120, "the command runs")
            yield caller
        finally:
            caller.kill()


def sleeping(lab: Lab, seconds: int) -> list[str]:
    """List the processes `sleep SECONDS` in worker-1."""
    processes = lab.containers()[NODE].top()["Processes"]
    return [row[-1] for row in processes if row[-1] == f"sleep {seconds}"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_and_its_children(lab: Lab, number: signal.Signals) -> None:
    """labctl gets the signal: exit code 128 + its number, and the command's `sleep` is gone."""
    seconds = 81_000 + number
    with under_way(lab, seconds, f"sleep {seconds}; true") as caller:
        caller.send_signal(number)
        assert caller.wait(60) == 128 + number
    assert not sleeping(lab, seconds)


def test_a_command_may_answer_a_signal_with_a_code_of_its_own(lab: Lab) -> None:
    """The command traps SIGTERM, prints and exits with 9: labctl prints that and exits with 9."""
    with under_way(lab, 82_000, "trap 'echo saved; exit 9' TERM; sleep 82000 & wait") as caller:
        caller.send_signal(signal.SIGTERM)
        assert caller.communicate(timeout=60)[0] == b"saved\n"
        assert caller.returncode == 9
    assert not sleeping(lab, 82_000)


def test_a_killed_labctl_leaves_nothing_behind(lab: Lab) -> None:
    """SIGKILL labctl while the command ignores SIGTERM: the command ends all the same."""
    with under_way(lab, 83_000, "trap '' TERM; sleep 83000; true") as caller:
        os.killpg(caller.pid, signal.SIGKILL)
        caller.wait(60)
        wait_until(lambda: not sleeping(lab, 83_000), 120, "the command has ended")


def test_what_a_command_leaves_in_the_background_on_purpose_stays(lab: Lab) -> None:
    """A `sleep` that the command put into the background runs on after exec has ended."""
    lab.call("exec", "-n", NODE, "--", "sh", "-c", "sleep 84000 > /dev/null 2>&1 &").expect(0)
    try:
        assert sleeping(lab, 84_000)
    finally:
        lab.inside(NODE, "pkill", "-f", "sleep 84000")


@pytest.mark.smoke
@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -KILL $$", 137), ("exec no-such-program", 127)])
def test_the_commands_own_code_comes_back(lab: Lab, script: str, code: int) -> None:
    """labctl exits with the command's own code: 7, 137 after SIGKILL, 127 for a missing program."""
    assert lab.call("exec", "-n", NODE, "--", "sh", "-c", script).code == code


def test_bytes_pass_unchanged_and_as_they_come(lab: Lab) -> None:
    """`cat` returns the first line before stdin ends, and then a MiB of random bytes unchanged."""
    data = os.urandom(1 << 20) + bytes(range(256))
    command = [LABCTL, "exec", "-n", NODE, "--", "cat"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=lab.path, env=lab.environ, stdin=pipe, stdout=pipe) as caller:
        assert caller.stdin
        assert caller.stdout
        caller.stdin.write(b"first\n")
        caller.stdin.flush()
        assert caller.stdout.readline() == b"first\n"
        assert caller.communicate(data, timeout=60)[0] == data
        assert caller.returncode == 0


@pytest.mark.parametrize(
    ("stands", "directory"),
    [("workloads/hello", "/workspace/workloads/hello"), ("runs", "/workspace/runs"), (".", "/workspace")],
)
def test_it_runs_where_the_person_stands(lab: Lab, stands: str, directory: str) -> None:
    """The command's directory in the node is the one of the caller below the lab's folder."""
    command = [LABCTL, "exec", "-C", str(lab.path), "-n", NODE, "--", "pwd"]
    done = subprocess.run(command, cwd=lab.path / stands, env=lab.environ, capture_output=True, text=True, check=True)
    assert done.stdout == f"{directory}\n"


def test_the_lab_is_found_from_within_it(lab: Lab) -> None:
    """exec without -C, from a folder in the lab, runs in that folder of the lab's container."""
    command = [LABCTL, "exec", "--", "pwd"]
    stands = lab.path / "workloads/hello"
    done = subprocess.run(command, cwd=stands, env=lab.environ, capture_output=True, text=True, check=True)
    assert done.stdout == "/workspace/workloads/hello\n"


def test_output_that_nobody_reads_ends_the_command_without_a_word(lab: Lab) -> None:
    """Close the pipe that reads `yes`: exit code 141, empty stderr, and `yes` has ended."""
    pipe = subprocess.PIPE
    command = [LABCTL, "exec", "-n", NODE, "--", "yes"]
    with subprocess.Popen(command, cwd=lab.path, env=lab.environ, stdin=pipe, stdout=pipe, stderr=pipe) as caller:
        assert caller.stdout
        assert caller.stderr
        assert caller.stdout.readline() == b"y\n"
        caller.stdout.close()
        assert caller.wait(60) == 141
        assert caller.stderr.read() == b""
    assert not [row for row in lab.containers()[NODE].top()["Processes"] if row[-1] == "yes"]


@pytest.mark.parametrize("command", ["no-such-program", "./no-such-program"])
def test_a_command_that_the_node_has_not_is_said(lab: Lab, command: str) -> None:
    """A missing program: exit code 127, and stderr names the node and the command."""
    answer = lab.call("exec", "-n", NODE, "--", command).expect(127)
    assert f"{NODE}: command not found: `{command}`" in answer.err


def test_a_command_that_may_not_be_run_is_not_called_missing(lab: Lab) -> None:
    """A file that is not executable: exit code 126, without `command not found`."""
    assert "command not found" not in lab.call("exec", "-n", NODE, "--", "/etc/passwd").expect(126).err


def test_a_node_that_does_not_run_is_named_with_what_mends_it(lab: Lab, fresh_lab: Callable[..., Lab]) -> None:
    """A lab that is down, or a killed worker: exit code 3 with `labctl up` or `labctl logs`."""
    assert "labctl up" in fresh_lab().call("exec", "--", "true").expect(3).err
    lab.containers()["worker-0"].kill()
    answer = lab.call("exec", "-n", "worker-0", "--", "true").expect(3)
    assert "worker-0 has stopped (exit code " in answer.err
    assert "labctl logs worker-0" in answer.err


def test_a_change_under_workloads_is_live_in_every_node(lab: Lab) -> None:
    """Change a script and run it at once, without a build or `up`."""
    script = lab.path / "workloads/live.py"
    before = lab.identities()
    for text in ("first", "second"):
        script.write_text(f"print({text!r})\n")
        for node in lab.containers():
            assert lab.inside(node, "python", "/workspace/workloads/live.py") == f"{text}\n"
    assert lab.identities() == before


def test_an_editor_in_the_launcher_changes_workloads_and_a_worker_does_not(lab: Lab) -> None:
    """The launcher writes below workloads as the user; a worker's file system is read-only."""
    write = ("--", "sh", "-c", "echo mine > workloads/note")
    lab.call("exec", "-n", "launcher", *write).expect(0)
    note: Path = lab.path / "workloads/note"
    assert (note.read_text(), note.stat().st_uid) == ("mine\n", os.getuid())
    answer = lab.call("exec", "-n", "worker-0", *write)
    assert answer.code != 0
    assert "Read-only file system" in answer.err
