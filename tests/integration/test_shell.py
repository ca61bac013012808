"""`labctl shell` in a terminal: a prompt in the right container."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.harness import LABCTL, Lab, wait_until

from labctl.engines import docker

pytestmark = pytest.mark.docker

Tmux = Callable[..., str]


@pytest.fixture
def tmux(family: str, lab: Lab) -> Iterator[Tmux]:
    """A terminal multiplexer of this test's own."""
    if not shutil.which("tmux"):
        pytest.skip("there is no tmux here")
    # A server that is about to end would take a new session with it.
    name = f"{family}-{secrets.token_hex(2)}"

    def call(*words: str) -> str:
        command = ["tmux", "-L", name, "-f", "/dev/null", *words]
        return subprocess.run(
            command, cwd=lab.path, env={**lab.environ, "TERM": "xterm"}, capture_output=True, text=True, check=False
        ).stdout

    yield call
    subprocess.run(["tmux", "-L", name, "kill-server"], capture_output=True, check=False)


@pytest.mark.smoke
@pytest.mark.parametrize(("words", "node"), [((), "launcher"), (("worker-1",), "worker-1")], ids=["launcher", "worker"])
def test_shell_gives_a_prompt_in_the_right_container(lab: Lab, words: tuple[str, ...], node: str) -> None:
    with lab.in_terminal("shell", *words) as terminal:
        wait_until(lambda: re.search(rf"lab@{lab.name}/{node}:\S*[$#]", terminal.seen), 120, f"a prompt in {node}")
        terminal.type("echo here: $(hostname) $(id -u) $PROJECT_PATH; tty; exit 7")
        assert terminal.code(120) == 7
        wait_until(lambda: re.search(r"exit\s+$", terminal.seen), 30, "the last word is read")
    assert f"\rhere: {node} {os.getuid()} /workspace\r\n/dev/" in terminal.seen


class Screen:
    """A shell in a terminal of the multiplexer."""

    def __init__(self, tmux: Tmux, lab: Lab, stands: Path, *words: str) -> None:
        self.tmux = tmux
        command = [LABCTL, "shell", "-C", str(lab.path), *words]
        tmux("new-session", "-d", "-x", "160", "-y", "40", "-c", str(stands), *command)
        self.wait_for(rf"^lab@{lab.name}/")

    def wait_for(self, pattern: str) -> None:
        wait_until(lambda: re.search(pattern, self.tmux("capture-pane", "-p"), re.MULTILINE), 120, pattern)

    def type(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def leave(self) -> None:
        """End it, and wait until the terminal is gone with it."""
        self.type("C-u")
        self.type("exit", "Enter")
        wait_until(lambda: not self.tmux("list-sessions"), 120, "the shell ended")


def test_history_and_directory_outlive_the_shell_and_the_lab(tmux: Tmux, fresh_lab: Callable[..., Lab]) -> None:
    lab = fresh_lab(LAB_NODES="1")
    lab.call("up").expect(0)
    first = Screen(tmux, lab, lab.path, "worker-0")
    first.type("cd runs; echo remember-$((40 + 2))", "Enter")
    first.wait_for("^remember-42")
    first.leave()
    lab.call("down").expect(0)
    lab.call("up").expect(0)
    second = Screen(tmux, lab, lab.path, "worker-0")
    second.wait_for(r"worker-0:/workspace/runs[$#]")
    # The latest command is `exit`.
    second.type("Up", "Up")
    second.wait_for(r"runs. cd runs; echo remember-\$")
    second.leave()


def test_a_shell_opens_where_the_person_stands(tmux: Tmux, lab: Lab) -> None:
    screen = Screen(tmux, lab, lab.path / "workloads/hello", "worker-1")
    screen.wait_for(r"worker-1:/workspace/workloads/hello[$#]")
    screen.leave()


def test_a_terminal_that_closes_ends_the_shell_and_its_jobs(tmux: Tmux, lab: Lab) -> None:
    screen = Screen(tmux, lab, lab.path, "worker-1")

    def sleepers() -> str:
        return " ".join(row[-1] for row in lab.containers()["worker-1"].top()["Processes"] if "sleep 8500" in row[-1])

    screen.type("nohup sleep 85002 & sleep 85001 &", "Enter")
    wait_until(lambda: "sleep 85001" in sleepers() and "sleep 85002" in sleepers(), 120, "the jobs run")
    tmux("kill-server")
    try:
        wait_until(lambda: sleepers() == "sleep 85002", 120, "only the job that asked to stay is left")
        assert not [row for row in lab.containers()["worker-1"].top()["Processes"] if row[-1] == "bash"]
    finally:
        lab.inside("worker-1", "pkill", "sleep")


def test_keys_that_docker_would_take_for_itself_reach_the_shell(tmux: Tmux, lab: Lab) -> None:
    screen = Screen(tmux, lab, lab.path, "worker-1")
    screen.type("stty raw -echo; echo ready-$((40 + 2)); head -c 2 | od -An -b; stty sane", "Enter")
    # Before that, the terminal would take C-q for its own.
    screen.wait_for("^ready-42")
    screen.type("C-p", "C-q")
    screen.wait_for("020 021")
    screen.leave()


def test_a_shell_that_docker_lets_go_of_leaves_nothing_behind(tmux: Tmux, lab: Lab) -> None:
    tmux("new-session", "-d", "-x", "160", "-y", "40", "bash", "--norc")
    tmux("send-keys", f"{LABCTL} shell worker-1; echo code-$?", "Enter")
    wait_until(lambda: f"lab@{lab.name}/worker-1" in tmux("capture-pane", "-p"), 120, "a prompt in worker-1")
    for key in docker.DETACH_KEYS.split(","):
        tmux("send-keys", key.replace("ctrl-", "C-"))
    wait_until(lambda: "code-3" in tmux("capture-pane", "-p"), 120, "the environment's fault")
    assert not [row for row in lab.containers()["worker-1"].top()["Processes"] if row[-1] == "bash"]


def test_shell_in_a_node_that_is_not_there_says_which_are(lab: Lab) -> None:
    answer = lab.call("shell", "worker-7").expect(2)
    assert "worker-7" in answer.err
    assert "worker-1" in answer.err
