"""`labctl shell` in a terminal: a prompt in the right container."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
from support.harness import Lab, Terminal, wait_until

from labctl.backends.docker import daemon as docker

pytestmark = pytest.mark.docker


def wait_for(terminal: Terminal, pattern: str) -> None:
    """Wait up to 120 s until the terminal's output matches the pattern."""
    wait_until(lambda: re.search(pattern, terminal.output), 120, pattern)


def leave(terminal: Terminal) -> None:
    """Clear the line, type `exit`, and wait for the end of the shell."""
    terminal.press("\x15")
    terminal.type("exit")
    terminal.code(120)


def shells(lab: Lab, node: str) -> list[str]:
    """List the processes `bash` in a node."""
    return [row[-1] for row in lab.containers()[node].top()["Processes"] if row[-1] == "bash"]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("command", "node"), [((), "launcher"), (("worker-1",), "worker-1")], ids=["launcher", "worker"]
)
def test_shell_gives_a_prompt_in_the_right_container(lab: Lab, command: tuple[str, ...], node: str) -> None:
    """The prompt names lab and node; the shell runs as the user on a terminal and returns code 7."""
    with lab.in_terminal("shell", *command) as terminal:
        wait_for(terminal, rf"lab@{lab.name}/{node}:\S*[$#]")
        terminal.type("echo here: $(hostname) $(id -u) $PROJECT_PATH; tty; exit 7")
        assert terminal.code(120) == 7
        wait_until(lambda: re.search(r"exit\s+$", terminal.output), 30, "the last word is read")
    assert f"\rhere: {node} {os.getuid()} /workspace\r\n/dev/" in terminal.output


def test_history_and_directory_outlive_the_shell_and_the_lab(fresh_lab: Callable[..., Lab]) -> None:
    """After `down` and `up` a new shell has the old directory and history."""
    lab = fresh_lab(LAB_NODES="1")
    lab.call("up").expect(0)
    with lab.in_terminal("shell", "worker-0") as first:
        wait_for(first, r"worker-0:/workspace[$#]")
        first.type("cd runs; echo remember-$((40 + 2))")
        wait_for(first, r"\rremember-42\r")
        leave(first)
    lab.call("down").expect(0)
    lab.call("up").expect(0)
    with lab.in_terminal("shell", "worker-0") as second:
        wait_for(second, r"worker-0:/workspace/runs[$#]")
        # The last command is `exit`.
        second.press("\x10\x10")
        wait_for(second, r"cd runs; echo remember-\$")
        leave(second)


def test_a_shell_opens_where_the_person_stands(lab: Lab) -> None:
    """The shell opens in the directory of the caller below the lab's folder."""
    with lab.in_terminal("shell", "-C", str(lab.path), "worker-1", cwd=lab.path / "workloads/hello") as terminal:
        wait_for(terminal, r"worker-1:/workspace/workloads/hello[$#]")
        leave(terminal)


def test_a_terminal_that_closes_ends_the_shell_and_its_jobs(lab: Lab) -> None:
    """Hanging up ends the shell and its job, but not a job with nohup."""

    def sleepers() -> str:
        """Return the `sleep 8500*` processes in worker-1, joined by spaces."""
        return " ".join(row[-1] for row in lab.containers()["worker-1"].top()["Processes"] if "sleep 8500" in row[-1])

    with lab.in_terminal("shell", "worker-1") as terminal:
        wait_for(terminal, rf"lab@{lab.name}/worker-1")
        terminal.type("nohup sleep 85002 & sleep 85001 &")
        wait_until(lambda: "sleep 85001" in sleepers() and "sleep 85002" in sleepers(), 120, "the jobs run")
        terminal.hang_up()
        try:
            wait_until(lambda: sleepers() == "sleep 85002", 120, "only the job that asked to stay is left")
            assert not shells(lab, "worker-1")
        finally:
            lab.inside("worker-1", "pkill", "sleep")


def test_keys_that_docker_would_take_for_itself_reach_the_shell(lab: Lab) -> None:
    """Ctrl-P Ctrl-Q reach the shell as the bytes 020 021."""
    with lab.in_terminal("shell", "worker-1") as terminal:
        wait_for(terminal, rf"lab@{lab.name}/worker-1")
        terminal.type("stty raw -echo; echo ready-$((40 + 2)); head -c 2 | od -An -b; stty sane")
        # Without raw mode the terminal would intercept Ctrl-Q.
        wait_for(terminal, r"\rready-42")
        terminal.press("\x10\x11")
        wait_for(terminal, "020 021")
        leave(terminal)


def test_a_shell_that_docker_lets_go_of_leaves_nothing_behind(lab: Lab) -> None:
    """docker's detach keys end labctl with code 3 and the shell too."""
    with lab.in_terminal("shell", "worker-1") as terminal:
        wait_for(terminal, rf"lab@{lab.name}/worker-1")
        letters = [key.removeprefix("ctrl-") for key in docker.DETACH_KEYS.split(",")]
        terminal.press("".join(chr(ord(letter.upper()) - ord("@")) for letter in letters))
        # Exit code for errors of the environment.
        assert terminal.code(120) == 3
    assert not shells(lab, "worker-1")


def test_shell_in_a_node_that_is_not_there_says_which_are(lab: Lab) -> None:
    """`shell worker-7`: exit code 2, and stderr names it and worker-1."""
    answer = lab.call("shell", "worker-7").expect(2)
    assert "worker-7" in answer.err
    assert "worker-1" in answer.err
