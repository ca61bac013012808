"""The ssh check on this machine: the agent's results over loopback, and the report."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unit.scripts.conftest import ImportScripts

FOLDER = Path(__file__).resolve().parents[3] / "workloads/ssh-check"
HERE = socket.gethostname()


@pytest.fixture
def agent(import_scripts: ImportScripts, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module agent of workload ssh-check, for interface lo."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    module: ModuleType = import_scripts("ssh-check", "agent").agent
    return module


@pytest.fixture
def check(import_scripts: ImportScripts) -> ModuleType:
    """Return the module ssh_check."""
    module: ModuleType = import_scripts("ssh-check", "ssh_check").ssh_check
    return module


@pytest.fixture
def listening(agent: ModuleType) -> Iterator[subprocess.Popen[str]]:
    """Start agent.py as a process; yield it, and end it with the test."""
    argv = [sys.executable, str(FOLDER / "agent.py")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


def port_of(process: subprocess.Popen[str]) -> int:
    """Return the port that the agent prints."""
    assert process.stdout
    return int(json.loads(process.stdout.readline())["port"])


def test_a_connection_is_timed_and_whoever_answers_is_known(
    agent: ModuleType, listening: subprocess.Popen[str]
) -> None:
    """Connect to the agent: milliseconds; an error if another name answers."""
    port = port_of(listening)
    assert 0 < agent.connect(HERE, "127.0.0.1", port, 60.0)["milliseconds"] < 60_000
    wrong = agent.connect("worker-7", "127.0.0.1", port, 60.0)
    assert wrong == {"error": f"127.0.0.1 port {port} is `{HERE}`"}


def test_the_agent_tries_its_peers_and_ends_with_its_input(listening: subprocess.Popen[str]) -> None:
    """Ask the agent for two peers: one answers, one refuses; it ends with code 0 when its input closes."""
    port = port_of(listening)
    # Nobody else gets a port that is bound, and who connects to it is refused as long as nothing listens there.
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        peers = [(HERE, "127.0.0.1", port), ("worker-1", "127.0.0.1", silent.getsockname()[1])]
        output, _ = listening.communicate(json.dumps(peers) + "\n", timeout=60)
    well, refused = json.loads(output)
    assert well["milliseconds"] > 0
    assert "Connection refused" in refused["error"]
    assert listening.returncode == 0


def test_an_interface_that_is_not_there_ends_the_agent_with_its_name() -> None:
    """Start the agent with a missing interface: exit code 1 names it."""
    argv = [sys.executable, str(FOLDER / "agent.py")]
    done = subprocess.run(argv, env={"GLOO_SOCKET_IFNAME": "ib7"}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot listen on ib7" in done.stderr


def test_a_connection_without_time_left_is_not_tried(agent: ModuleType) -> None:
    """Connect with no time left: "not tried"."""
    assert "not tried" in agent.connect(HERE, "127.0.0.1", 1, -0.5)["error"]


def test_a_hostfile_is_read_past_comments_and_blank_lines(check: ModuleType) -> None:
    """Read a hostfile with comments: slots by name."""
    assert check.read_hostfile("# two\nworker-0 slots=8\n\nworker-1 slots=2 # b\n") == {"worker-0": 8, "worker-1": 2}


def test_every_worker_begins_with_the_one_after_it(check: ModuleType) -> None:
    """List a worker's targets: in order from the one after it."""
    targets = [check.Target(f"worker-{number}", "", 1) for number in range(4)]
    for number in range(4):
        names = [target.name for target in check.others(f"worker-{number}", targets)]
        assert names == [f"worker-{(number + step) % 4}" for step in (1, 2, 3)]


def test_ranks_are_said_of_the_workers_that_answered(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Print ranks: only those of workers whose login worked."""
    logins = [pair(check, "launcher", "worker-0", "ssh", 90.0), pair(check, "launcher", "worker-1", "ssh", error="no")]
    check.say_ranks({"worker-0": 2, "worker-1": 1}, logins)
    assert capsys.readouterr().out == "labctl: rank 0 of 3 on worker-0\nlabctl: rank 1 of 3 on worker-0\n"


def test_the_table_and_the_summary_name_what_failed(check: ModuleType) -> None:
    """Format pairs: a table, and a summary with slowest and failed ones."""
    pairs = [
        pair(check, "launcher", "worker-0", "ssh", 90.0),
        pair(check, "worker-0", "launcher", "tcp", 0.25),
        pair(check, "worker-0", "worker-1", "tcp", 1.5),
        pair(check, "worker-1", "worker-0", "tcp", error="timed out"),
        pair(check, "worker-1", "worker-2", "tcp", error="not tried: no answer from worker-2"),
    ]
    assert check.table(pairs)[2:5] == [
        "worker-0  launcher  tcp       0.25  yes",
        "worker-0  worker-1  tcp       1.50  yes",
        "worker-1  worker-0  tcp          -  no: timed out",
    ]
    assert check.summary(pairs) == [
        "pairs: 3 of 5",
        "slowest: 1.50 ms (worker-0 -> worker-1)",
        "slowest login: 90.00 ms (launcher -> worker-0)",
        "failed: worker-1 -> worker-0 by tcp: timed out",
    ]


def pair(check: ModuleType, source: str, target: str, way: str, milliseconds: float = 0.0, error: str = "") -> Any:
    """Return a Pair with this time or error."""
    return check.Pair(source, target, way, milliseconds, error)


def test_a_login_that_fails_says_what_ssh_said(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail a login: the error is ssh's last line, and the worker's pairs are "not tried"."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho 'Permission denied (publickey).' >&2\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    worker = check.Worker("worker-0", "launcher")
    try:
        assert worker.log_in().error == "Permission denied (publickey)."
        (pair,) = worker.try_all([check.Target("launcher", "127.0.0.1", 1)])
    finally:
        worker.end()
    assert pair.error == "not tried: no answer from worker-0"


def test_a_worker_is_asked_over_ssh_and_must_be_the_one_that_was_meant(
    check: ModuleType, agent: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log in through an ssh that stays on this machine: only the worker of this name is accepted and connects."""
    # An ssh that logs in to this very machine, whatever the name; the command is its last word.
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor command; do :; done\nexec sh -c "$command"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    launcher = check.Target(HERE, *agent.listen())
    meant, other = check.Worker(HERE, HERE), check.Worker("worker-9", HERE)
    try:
        assert meant.log_in().error == ""
        assert other.log_in().error == f"the host there calls itself `{HERE}`"
        (pair,) = meant.try_all([launcher])
    finally:
        meant.end()
        other.end()
    assert pair.error == ""
    assert pair.milliseconds > 0
