"""`labctl shell` in a terminal: a prompt in the right container."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest

from integration.harness import LABCTL, Lab, wait_until

pytestmark = pytest.mark.docker

Tmux = Callable[..., str]


@pytest.fixture
def tmux(family: str, lab: Lab) -> Iterator[Tmux]:
    """A terminal multiplexer of this test's own."""
    if not shutil.which("tmux"):
        pytest.skip("there is no tmux here")

    def call(*words: str) -> str:
        command = ["tmux", "-L", family, "-f", "/dev/null", *words]
        return subprocess.run(
            command, cwd=lab.path, env={**lab.environ, "TERM": "xterm"}, capture_output=True, text=True, check=True
        ).stdout

    yield call
    subprocess.run(["tmux", "-L", family, "kill-server"], capture_output=True, check=False)


@pytest.mark.parametrize(("words", "node"), [((), "launcher"), (("worker-1",), "worker-1")], ids=["launcher", "worker"])
def test_shell_gives_a_prompt_in_the_right_container(lab: Lab, tmux: Tmux, words: tuple[str, ...], node: str) -> None:
    tmux("new-session", "-d", "-x", "160", "-y", "40", LABCTL, "shell", *words)

    def screen() -> str:
        return tmux("capture-pane", "-p")

    wait_until(lambda: re.search(rf"lab@{node}:\S*[$#]", screen()), 20, f"a prompt in {node}")
    tmux("send-keys", "echo here: $(hostname) $(id -u) $PROJECT_PATH; tty", "Enter")
    wait_until(lambda: re.search(rf"^here: {node} \d+ /workspace$", screen(), re.MULTILINE), 10, "the answer")
    assert "not a tty" not in screen()
    tmux("send-keys", "exit", "Enter")


def test_shell_in_a_node_that_is_not_there_says_which_are(lab: Lab) -> None:
    answer = lab.call("shell", "worker-7").expect(2)
    assert "worker-7" in answer.err
    assert "worker-1" in answer.err
