"""`labctl exec --all`: a command on all workers: prefixes, exit code, signals, and no processes left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.harness import LABCTL, Lab, Running, wait_until

pytestmark = pytest.mark.docker

WORKERS = ("worker-0", "worker-1")


@contextmanager
def under_way(lab: Lab, seconds: int, script: str) -> Iterator[Running]:
    """Start `labctl exec --all -- bash -c SCRIPT`; yield it once both workers run `sleep SECONDS`; then kill it."""
    with lab.start("exec", "--all", "--", "bash", "-c", script) as running:
        wait_until(lambda: sleeping(lab, seconds) == list(WORKERS), 120, "the command runs on both")
        yield running


def sleeping(lab: Lab, seconds: int) -> list[str]:
    """List the workers that run `sleep SECONDS`."""
    containers = lab.containers()
    rows = {name: containers[name].top()["Processes"] for name in WORKERS}
    return [name for name, processes in rows.items() if any(row[-1] == f"sleep {seconds}" for row in processes)]


def left_behind(lab: Lab) -> list[str]:
    """List `NODE: COMMAND` of the open ssh clients and sessions in all of the lab's containers."""
    rows = [(name, row[-1]) for name, container in lab.containers().items() for row in container.top()["Processes"]]
    return [f"{name}: {command}" for name, command in rows if "ssh -T" in command or "notty" in command]


def test_lines_are_marked_with_the_node_and_stay_on_their_stream(lab: Lab) -> None:
    """Each line of stdout and stderr, also one without newline, has its node as prefix."""
    answer = lab.call("exec", "--all", "--", "sh", "-c", "hostname; printf 'no end'; echo to err >&2").expect(0)
    for name in WORKERS:
        lines = [line for line in answer.out.splitlines() if line.startswith(f"{name}: ")]
        assert lines == [f"{name}: {name}", f"{name}: no end"]
    assert sorted(answer.err.splitlines()) == [f"{name}: to err" for name in WORKERS]


def test_arguments_arrive_as_they_were_given_where_the_person_stands(lab: Lab) -> None:
    """Odd arguments reach both workers unchanged, in the caller's directory."""
    arguments = ["a b", "it's", "$HOME", "two\nlines", "", "-n", "é*"]
    command = [LABCTL, "exec", "-n", "worker-1,worker-0", "--", "sh", "-c", 'pwd; printf "<%s>" "$@"', "sh", *arguments]
    done = subprocess.run(command, cwd=lab.path / "workloads/hello", env=lab.environ, capture_output=True, check=True)
    output = "/workspace/workloads/hello\n" + "".join(f"<{word}>" for word in arguments)
    for name in WORKERS:
        lines = [line for line in done.stdout.decode().splitlines() if line.startswith(f"{name}: ")]
        assert [line.removeprefix(f"{name}: ") for line in lines] == output.splitlines()


def test_the_code_is_the_largest_and_the_nodes_that_failed_are_named(lab: Lab) -> None:
    """worker-1 exits with 7: so does labctl, and names it; SIGKILL on both gives 137."""
    script = "[ $(hostname) = worker-0 ] || exit 7"
    answer = lab.call("exec", "--all", "--", "sh", "-c", script).expect(7)
    assert answer.err == "ended with code 7: worker-1\n"
    answer = lab.call("exec", "--all", "--", "sh", "-c", "kill -KILL $$").expect(137)
    assert answer.err == "ended with code 137: worker-0, worker-1\n"


def test_it_leaves_what_is_to_be_read_alone(lab: Lab, tmp_path: Path) -> None:
    """`exec --all -- cat` reads nothing from its stdin."""
    (tmp_path / "lines").write_text("first\nsecond\n")
    with (tmp_path / "lines").open() as lines:
        command = [LABCTL, "exec", "--all", "--", "cat"]
        subprocess.run(command, cwd=lab.path, env=lab.environ, stdin=lines, check=True, timeout=60)
        assert os.lseek(lines.fileno(), 0, os.SEEK_CUR) == 0


def test_ctrl_c_ends_the_command_everywhere(lab: Lab) -> None:
    """Ctrl-C: exit code 130, empty stderr, and the command has ended on both workers."""
    with under_way(lab, 85_000, "sleep 85000; true") as running:
        running.press()
        assert running.answer(60).err == ""
        assert running.process.returncode == 128 + signal.SIGINT
    assert not sleeping(lab, 85_000)


def test_commands_may_answer_a_signal_with_a_code_of_their_own(lab: Lab) -> None:
    """Both workers trap SIGTERM and exit with 9: labctl prints both lines and exits with 9."""
    with under_way(lab, 86_000, "trap 'echo saved; exit 9' TERM; sleep 86000 & wait") as running:
        running.press(signal.SIGTERM)
        answer = running.answer(60).expect(9)
    assert sorted(answer.out.splitlines()) == [f"{name}: saved" for name in WORKERS]
    assert not sleeping(lab, 86_000)


def test_a_killed_labctl_leaves_nothing_behind_anywhere(lab: Lab) -> None:
    """SIGKILL labctl while commands ignore SIGTERM: they and all ssh sessions end."""
    with under_way(lab, 87_000, "trap '' TERM; sleep 87000; true") as running:
        running.press(signal.SIGKILL)
        wait_until(lambda: not sleeping(lab, 87_000) and not left_behind(lab), 120, "the commands have ended")


def test_output_that_nobody_reads_ends_the_command_everywhere(lab: Lab) -> None:
    """Close the pipe that reads `yes`: exit code 141, and no ssh session is left."""
    command = [LABCTL, "exec", "--all", "--", "yes"]
    with subprocess.Popen(command, cwd=lab.path, env=lab.environ, stdout=subprocess.PIPE) as caller:
        assert caller.stdout
        assert caller.stdout.readline().endswith(b": y\n")
        caller.stdout.close()
        assert caller.wait(60) == 141
    wait_until(lambda: not left_behind(lab), 120, "the commands have ended")


def test_a_node_that_is_not_reached_is_named_and_the_others_go_on(lab: Lab) -> None:
    """worker-0 is killed: worker-1 answers, exit code 255, and worker-0 is named."""
    lab.containers()["worker-0"].kill()
    answer = lab.call("exec", "--all", "--", "hostname").expect(255)
    assert answer.out == "worker-1: worker-1\n"
    assert "worker-0: ssh: " in answer.err
    assert answer.err.endswith("not reached: worker-0\nhint: labctl doctor --node worker-0\n")


def test_a_node_that_is_not_there_is_said_before_anything_runs(lab: Lab) -> None:
    """`-n worker-0,worker-9`: exit code 2, nothing runs; --all with -n is refused too."""
    answer = lab.call("exec", "-n", "worker-0,worker-9", "--", "hostname").expect(2)
    assert answer.out == ""
    assert "no worker `worker-9`" in answer.err
    assert "use either --all or -n" in lab.call("exec", "--all", "-n", "worker-0", "--", "hostname").expect(2).err
