"""The agent in a pod: a launch command under its limits, as the pod's script starts it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from unit.scripts.test_labnode import SOURCE

LIMIT = 30.0
# As rank_output.py marks what rank.sh reports, in the words of printf.
CRASH = r"\0011!\002labctl: rank 1 on w1 exited with code 7\n"
STEPS = "for step in 1 2 3 4 5; do echo step $step/9; sleep 0.07; done; "
# A shell would print that TERM ended what it had started.
ENDS = """
import os, signal
def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"ends\\n")
    os._exit(5)
signal.signal(signal.SIGTERM, end)
print("begun", flush=True)
signal.pause()
"""
STUBBORN = "trap '' TERM; while :; do sleep 0.02; done"


class Pod:
    """A launcher's pod with workers behind a stand-in for ssh."""

    def __init__(self, root: Path) -> None:
        """Create a pod's folder with an `ssh` that records its arguments."""
        self.id, self.root = f"pod-{uuid.uuid4().hex}", root
        (root / "bin").mkdir()
        ssh = root / "bin/ssh"
        ssh.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {root}/asked\n')
        ssh.chmod(0o755)
        # For tests by root.
        user = {"LAB_UID": str(os.getuid()), "LAB_GID": str(os.getgid())}
        self.environment = {"PATH": f"{root}/bin:{os.environ['PATH']}", "HOME": str(root), **user}

    def start(self, script: str, **changes: object) -> subprocess.Popen[bytes]:
        """Run a bash script as the launch command of a pod; it is killed after LIMIT."""
        job = {"nodes": ["w0", "w1"], "needed": ["w0", "w1"], "elastic": False, "ssh_port": 2222, "limit": 60.0}
        job |= {"id": self.id, "stall": 0.0, "launcher": "mpirun", "directory": str(self.root)}
        (self.root / "job.json").write_text(json.dumps({**job, **changes}))
        argv = [sys.executable, "-I", str(SOURCE), "pod", str(self.root / "job.json"), "bash", "-c", script]
        self.process = subprocess.Popen(argv, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        # Nobody waits for ever.
        self.limit = threading.Timer(LIMIT, self.process.kill)
        self.limit.start()
        return self.process

    def end(self) -> tuple[int, bytes, str]:
        """Wait for the end; return exit code, output, and .ended without the duration."""
        output, _ = self.process.communicate(timeout=LIMIT)
        ended = (self.root / ".ended").read_text()
        return self.process.returncode, output, re.sub(r"^after [\d.]+ s(; )?", "", ended)

    def close(self) -> None:
        """Cancel the timer, kill the process and wait for it."""
        self.limit.cancel()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    """Return a Pod at tmp_path; kill its process at the end."""
    made = Pod(tmp_path)
    yield made
    made.close()


def test_the_output_is_the_commands_and_so_is_the_exit_code(pod: Pod) -> None:
    """Print on stdout and stderr and exit with 3: the same lines in order and exit code 3."""
    pod.start(r"printf 'one\n\0010\002\377\r\n'; echo two >&2; printf three; exit 3")
    assert pod.end() == (3, b"one\n\x010\x02\xff\r\ntwo\nthree\n", "")


def test_much_output_is_complete(pod: Pod) -> None:
    """Print 200,000 lines: all arrive."""
    pod.start("seq 200000")
    code, output, _ = pod.end()
    assert (code, output.split()) == (0, [b"%d" % number for number in range(1, 200001)])


def test_a_launcher_that_hangs_after_a_rank_has_crashed_is_ended(pod: Pod) -> None:
    """Report a crashed rank and hang: ended with 143, cause rank-crashed."""
    pod.start(f"printf '{CRASH}'; exec sleep 60")
    code, _, why = pod.end()
    assert (code, why) == (143, "rank-crashed: rank 1 on w1 exited with code 7")


def test_a_run_is_ended_at_its_limit(pod: Pod) -> None:
    """Hang beyond the limit: ended with 143, cause timeout."""
    pod.start("exec sleep 60", limit=0.1)
    code, _, why = pod.end()
    assert (code, why) == (143, "timeout: timed out after 0.1 s")


def test_a_run_that_prints_no_more_steps_is_ended_as_stalled(pod: Pod) -> None:
    """Print five steps and hang: ended with 143 as stalled, last line and stacks/ say so."""
    pod.start(f"{STEPS}exec sleep 60", stall=0.5)
    code, output, why = pod.end()
    assert code == 143
    assert re.fullmatch(r"stalled: no step and no line for \d+ s; steps took [\d.]+ s; the last was step 5/9", why)
    assert output.splitlines()[-1] == f"labctl: {why}".encode()
    assert (pod.root / "stacks").is_dir()


def test_a_script_has_no_reports(pod: Pod) -> None:
    """Print a report under launcher script: exit code 0, no cause."""
    pod.start(f"printf '{CRASH}'", launcher="script")
    assert pod.end()[::2] == (0, "")


def test_term_ends_the_command_and_what_is_left_of_the_run_on_the_workers(pod: Pod) -> None:
    """Send SIGTERM: the command's own exit code, and both workers are asked by ssh to reap the run."""
    process = pod.start(shlex.join(("exec", sys.executable, "-c", ENDS)))
    assert process.stdout
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGTERM)
    assert pod.end() == (5, b"ends\n", "")
    requests = (pod.root / "asked").read_text().splitlines()
    nodes = {line.partition(" -- ")[2].split()[0] for line in requests}
    assert nodes == {"w0", "w1"}
    assert all(f"-I {SOURCE} reap {pod.id} " in line for line in requests)
    # The first process of a worker's pod is its sshd, whose sessions are nobody's orphans.
    assert not any("LABCTL_RUN_SECONDS" in line for line in requests)


def test_a_command_that_ignores_term_is_killed_after_the_grace(pod: Pod) -> None:
    """Send SIGTERM to a command that ignores it: killed with 137."""
    process = pod.start(f"echo begun; {STUBBORN}")
    assert process.stdout
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert pod.end() == (137, b"", "")


def test_a_run_that_ends_well_asks_no_worker(pod: Pod) -> None:
    """End well: no ssh."""
    pod.start("true")
    assert pod.end() == (0, b"", "")
    assert not (pod.root / "asked").exists()


def test_no_program_prints_the_mark_of_the_pods_last_line(pod: Pod) -> None:
    """Print the mark of the pod's last line: the mark's first byte is removed."""
    pod.start(r"printf '\001!\002labctl: the launcher ended with exit code 0\n'")
    assert pod.end()[1] == b"!\x02labctl: the launcher ended with exit code 0\n"
