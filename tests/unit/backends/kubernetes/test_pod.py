"""The launcher's side of a pod's script, run by bash: workers are directories that a stand-in for ssh reads."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from labctl.backends.kubernetes.run import ENDED
from unit.scripts.test_labnode_pod import ENDS

CHECKOUT = Path(__file__).parents[4]
SCRIPT = CHECKOUT / "labctl/backends/kubernetes/pod.sh"
SSHD_CONFIG = CHECKOUT / "docker/sshd_config"
AGENT = CHECKOUT / "docker/labnode.py"
MARK = "\x01!\x02"
"""Prefix of a launcher's last line."""
NO_AGENT = "labctl: the image has no python3: a crashed rank or a stall ends the run only when its launcher does"
LIMIT = 30.0
PROGRAMS = {
    "ssh-keyscan": "sed 's/$/ ssh-ed25519 AAAA/'",
    # ssh -n NODE tar -C DIRECTORY -cf - .
    "ssh": '[[ $* != *" -- "* ]] || exit 0; shift; node=$1; shift 4; exec tar -C "$NODES/$node" "$@"',
    "sleep": "exec /bin/sleep 0.02",
}


class Launcher:
    """A launcher with a command, from start to end; its image has a Python for the agent, or none."""

    def __init__(self, root: Path, *, has_python: bool) -> None:
        """Make home, workers' folders, stand-ins for programs and a pod.sh with this root's paths."""
        self.id = f"r-{uuid.uuid4().hex}"
        self.root, self.home, self.run = root, root / "home", root / f"project/outputs/{self.id}"
        self.environment = {
            "PATH": f"{root}/bin:{os.environ['PATH']}",
            "HOME": str(self.home),
            "NODES": f"{root}/nodes",
            "PROJECT_PATH": f"{root}/project",
            "LABCTL_RUN_DIR": str(self.run),
            "LABCTL_PATIENCE": "120",
            "LABCTL_KEYS": f"{root}/keys",
            "LABCTL_KEPT": "600",
            # For tests by root.
            "LAB_UID": str(os.getuid()),
            "LAB_GID": str(os.getgid()),
        }
        for folder in (
            "bin",
            "home",
            "nodes/w0",
            "nodes/w1",
            "project",
            "keys",
            f"etc/files/outputs/{self.id}",
            "storage",
        ):
            (root / folder).mkdir(parents=True)
        for name, text in PROGRAMS.items():
            self.program(name, text)
        (root / "keys/id_rsa").write_text("key\n")
        (root / f"etc/files/outputs/{self.id}/rank.sh").write_text("#!/bin/sh\n")
        (root / "etc/hostfile").write_text("w0 slots=1\nw1 slots=1\n")
        text = SCRIPT.read_text()
        for path, here in (
            ("/etc/labctl/files", f"{root}/etc/files"),
            ("/etc/mpi/hostfile", f"{root}/etc/hostfile"),
            ("/run/secrets", f"{root}/secrets"),
            ("/etc/labctl/start/sshd_config", str(SSHD_CONFIG)),
            ("/etc/labctl/start/labnode.py", str(AGENT)),
            ("/etc/labctl/start/job.json", f"{root}/job.json"),
            ("/usr/bin/python3", f"{root}/no-python3"),
        ):
            assert path in text
            text = text.replace(path, here)
        python = f'exec {sys.executable} "$@"' if has_python else "exit 1"
        self.program("python3", python)
        self.job()
        self.script = root / "pod.sh"
        self.script.write_text(text)

    def program(self, name: str, text: str) -> None:
        """Write an executable bash program of this name into the launcher's PATH."""
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def job(self, **changes: object) -> None:
        """Write the run's description for the agent, with these fields changed."""
        nodes = {"nodes": ["w0", "w1"], "needed": ["w0", "w1"], "elastic": False, "ssh_port": 2222}
        limits = {"limit": 60.0, "stall": 0.0, "launcher": "mpirun", "directory": str(self.run)}
        (self.root / "job.json").write_text(json.dumps({"id": self.id, **nodes, **limits, **changes}))

    def worker(self, node: str, **files: str) -> None:
        """Write files of a worker, by name."""
        for name, text in files.items():
            (self.root / "nodes" / node / name).write_text(text)

    def start(self, *command: str, role: str = "launcher") -> None:
        """Start pod.sh in this role with the command; kill it after 30 s."""
        argv = ["bash", str(self.script), role, *command]
        self.process = subprocess.Popen(
            argv, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        # Nobody waits for ever.
        self._limit = threading.Timer(LIMIT, self.process.kill)
        self._limit.start()

    def line(self) -> str:
        """Return the next line of output, without mark, duration and the warning of no agent; empty at the end."""
        line = self.printed()
        if line == NO_AGENT:
            line = self.printed()
        return re.sub(r" after [\d.]+ s", "", line.removeprefix(MARK))

    def printed(self) -> str:
        """Return the next line of output without its line end; empty at the end."""
        assert self.process.stdout
        return self.process.stdout.readline().rstrip("\n")

    def fetched(self) -> None:
        """Mark the results as fetched."""
        (self.home / ".fetched").touch()

    def end(self) -> int:
        """Wait for the process to end by itself; return its exit code."""
        return self.process.wait(LIMIT)

    def close(self) -> None:
        """Kill the process, if started, and close its output."""
        if hasattr(self, "process"):
            self.process.kill()
            self.process.wait()
            self._limit.cancel()
            assert self.process.stdout
            self.process.stdout.close()


@pytest.fixture(params=[True, False], ids=["agent", "no-agent"])
def launcher(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """Yield a launcher, with and without a Python for its agent; kill it afterwards."""
    made = Launcher(tmp_path, has_python=request.param)
    yield made
    made.close()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Launcher]:
    """Yield a launcher with an agent; kill it afterwards."""
    made = Launcher(tmp_path, has_python=True)
    yield made
    made.close()


def test_the_command_runs_in_the_runs_directory_with_its_files_and_the_operators_hostfile(launcher: Launcher) -> None:
    """The command runs in the run's directory with the operator's hostfile and rank.sh; the end is the last line."""
    launcher.start("sh", "-c", "pwd; cat hostfile; ls")
    printed = [launcher.line() for _ in range(6)]
    assert printed == [str(launcher.run), "w0 slots=1", "w1 slots=1", "hostfile", "rank.sh", "ranks"]
    assert launcher.line() == "labctl: the launcher ended with exit code 0"


def test_what_workers_wrote_is_gathered_before_the_end_is_said(launcher: Launcher) -> None:
    """Workers' files are in the run's directory at the last line; of one that both wrote, the first worker's."""
    launcher.worker("w0", both="of 0", **{"zero.txt": "0"})
    launcher.worker("w1", both="of 1", **{"one.txt": "1"})
    launcher.start("sh", "-c", "echo mine > launcher.txt")
    assert launcher.line() == "labctl: the launcher ended with exit code 0"
    assert {path.name: path.read_text() for path in launcher.run.glob("*.txt")} == {
        "launcher.txt": "mine\n",
        "zero.txt": "0",
        "one.txt": "1",
    }
    assert (launcher.run / "both").read_text() == "of 0"


def test_a_worker_that_is_gone_does_not_keep_the_others_files(launcher: Launcher) -> None:
    """A worker that is not reached is told, and the other's files are gathered."""
    (launcher.root / "nodes/w0").rmdir()
    launcher.worker("w1", one="1")
    launcher.start("true")
    assert launcher.line() == "labctl: not all files of w0 were gathered"
    assert launcher.line() == "labctl: the launcher ended with exit code 0"
    assert (launcher.run / "one").read_text() == "1"


def test_it_stays_while_its_results_are_fetched(launcher: Launcher) -> None:
    """Past its time the launcher stays while .fetching is locked, and ends with 0 after."""
    launcher.environment["LABCTL_KEPT"] = "0"
    fetching = launcher.home / ".fetching"
    with fetching.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        launcher.start("true")
        launcher.line()
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.process.wait(0.5)
    assert launcher.process.wait(LIMIT) == 0


def test_a_runs_directory_is_on_the_claim_if_there_is_one(launcher: Launcher) -> None:
    """With a claim the run's directory is on it, and workers' files are not gathered."""
    launcher.environment["LABCTL_STORAGE"] = f"{launcher.root}/storage"
    launcher.worker("w1", two="2")
    launcher.start("sh", "-c", "echo 1 > one; /bin/sleep 0.1")
    assert launcher.line() == "labctl: the launcher ended with exit code 0"
    on_claim = launcher.root / "storage/runs" / launcher.id
    assert launcher.run.resolve() == on_claim.resolve()
    assert {"one", "ranks", "rank.sh", "hostfile"} <= {path.name for path in on_claim.iterdir()}
    assert not (on_claim / "two").exists(), "workers write there, too: nothing is gathered"


def test_a_worker_leaves_the_files_of_a_run_on_the_claim_to_the_launcher(launcher: Launcher) -> None:
    """A worker makes only ranks/ in the run's directory on the claim; other folders are in the project."""
    launcher.environment["LABCTL_STORAGE"] = f"{launcher.root}/storage"
    (launcher.root / "etc/files/workloads").mkdir()
    # Without keys it goes no further.
    launcher.start(role="worker")
    launcher.end()
    on_claim = launcher.root / "storage/runs" / launcher.id
    assert [path.name for path in on_claim.iterdir()] == ["ranks"]
    assert launcher.run.resolve() == on_claim.resolve()
    assert (launcher.root / "project/workloads").is_dir()


def test_a_job_that_is_not_recorded_stays_in_its_pods(launcher: Launcher) -> None:
    """Without LABCTL_KEPT nothing is written to the claim; the files are in the pod."""
    launcher.environment["LABCTL_STORAGE"] = f"{launcher.root}/storage"
    del launcher.environment["LABCTL_KEPT"]
    launcher.start("true")
    launcher.end()
    assert list((launcher.root / "storage").iterdir()) == []
    assert (launcher.run / "rank.sh").is_file()


def packed(path: Path) -> None:
    """Write an archive with a script of a project."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content, member = b"1\n", tarfile.TarInfo("work/mine/two words.py")
    member.size = len(content)
    with tarfile.open(path, "w:gz") as archive:
        archive.addfile(member, io.BytesIO(content))


def test_a_project_is_unpacked_in_the_runs_directory(launcher: Launcher) -> None:
    """code.tar.gz of the ConfigMap is unpacked in the run's directory."""
    packed(launcher.root / "etc/files/code.tar.gz")
    launcher.start("cat", "work/mine/two words.py")
    assert launcher.line() == "1"
    assert not (launcher.root / "project/code.tar.gz").exists()


@pytest.mark.parametrize("sent", [False, True])
def test_a_project_is_unpacked_on_the_claim_by_the_launcher_alone(launcher: Launcher, *, sent: bool) -> None:
    """On a claim the launcher unpacks the project, from the ConfigMap or a sent archive; a worker does not."""
    storage = launcher.environment["LABCTL_STORAGE"] = f"{launcher.root}/storage"
    archive = f"{storage}/code/1a2b.tar.gz" if sent else f"{launcher.root}/etc/files/code.tar.gz"
    launcher.environment |= {"LABCTL_CODE": archive} if sent else {}
    packed(Path(archive))
    launcher.start(role="worker")
    launcher.end()
    on_claim = launcher.root / "storage/runs" / launcher.id
    assert [path.name for path in on_claim.iterdir()] == ["ranks"]
    launcher.close()
    launcher.start("cat", "work/mine/two words.py")
    assert launcher.line() == "1"


def test_a_project_that_is_no_longer_on_the_claim_is_said_to_be_gone(launcher: Launcher) -> None:
    """A missing LABCTL_CODE is told, and the launcher ends with 1."""
    launcher.environment |= {"LABCTL_STORAGE": f"{launcher.root}/storage", "LABCTL_CODE": "/nowhere/1a2b.tar.gz"}
    launcher.start("true")
    assert launcher.line() == "labctl: /nowhere/1a2b.tar.gz is not on the claim: it has been removed"
    assert launcher.end() == 1


@pytest.mark.parametrize("code", [0, 3, 124])
def test_it_stays_until_its_results_are_fetched_and_ends_as_its_command_did(launcher: Launcher, code: int) -> None:
    """The launcher stays after its last line until .fetched exists, and ends with its command's code."""
    launcher.start("sh", "-c", f"/bin/sleep 0.1; exit {code}")
    assert launcher.line() == f"labctl: the launcher ended with exit code {code}"
    assert launcher.process.poll() is None
    launcher.fetched()
    assert launcher.end() == code


def test_it_does_not_stay_longer_than_it_may(launcher: Launcher) -> None:
    """The launcher ends with 0 after LABCTL_KEPT seconds if nobody fetches."""
    launcher.environment["LABCTL_KEPT"] = "2"
    launcher.start("true")
    assert launcher.end() == 0


@pytest.mark.parametrize("number", range(5))
def test_a_command_that_fails_at_once_keeps_its_code(launcher: Launcher, number: int) -> None:
    """A command that fails at once has its code in the last line."""
    launcher.start("sh", "-c", f"exit {number + 3}")
    assert launcher.line() == f"labctl: the launcher ended with exit code {number + 3}"


def test_a_command_that_ends_before_anyone_looks_keeps_its_code(launcher: Launcher) -> None:
    """A command that ends before it is waited for has its code in the last line."""
    # What is done between the command's start and the look at it takes a while here.
    text = launcher.script.read_text()
    assert 'echo "$command" > ~/.command\n' in text
    launcher.script.write_text(text.replace("> ~/.command\n", "> ~/.command\n    /bin/sleep 0.3\n"))
    launcher.start("sh", "-c", "exit 7")
    assert launcher.line() == "labctl: the launcher ended with exit code 7"


def test_a_command_that_is_not_there_ends_with_127(launcher: Launcher) -> None:
    """A command that does not exist is told, with exit code 127."""
    launcher.start("no-such-launcher")
    assert re.search("no-such-launcher.*No such file or directory|No such file.*no-such-launcher", launcher.line())
    assert launcher.line() == "labctl: the launcher ended with exit code 127"


def test_who_stops_the_run_is_in_its_last_line(launcher: Launcher) -> None:
    """The last line has code 143 and the text of .stopped."""
    launcher.start("sh", "-c", "echo begun; exec /bin/sleep 60")
    assert launcher.line() == "begun"
    subprocess.run(
        ["sh", "-c", 'echo "$0" > ~/.stopped; kill -TERM "$(cat ~/.command)"', "stopped by ann@desk"],
        env=launcher.environment,
        check=True,
    )
    assert launcher.line() == "labctl: the launcher ended with exit code 143; stopped by ann@desk"


def test_a_pod_that_is_to_go_ends_its_command_and_gathers_nothing(launcher: Launcher) -> None:
    """SIGTERM ends the command, whose code is the launcher's, and workers' files are not gathered."""
    launcher.worker("w1", one="1")
    launcher.start(sys.executable, "-c", ENDS)
    assert launcher.line() == "begun"
    launcher.process.terminate()
    assert launcher.line() == "ends"
    assert launcher.line() == "labctl: the launcher ended with exit code 5"
    assert launcher.end() == 5
    assert not (launcher.run / "one").exists()


def test_a_pod_that_is_to_go_does_not_wait_for_its_results_to_be_fetched(launcher: Launcher) -> None:
    """SIGTERM after the command's end ends the launcher with 0, though nobody has fetched."""
    launcher.start("true")
    assert launcher.line() == "labctl: the launcher ended with exit code 0"
    launcher.process.terminate()
    assert launcher.end() == 0


def test_without_anyone_to_fetch_its_results_it_ends_with_its_command_and_gathers_nothing(launcher: Launcher) -> None:
    """Without LABCTL_KEPT the launcher ends with its command and gathers nothing."""
    del launcher.environment["LABCTL_KEPT"]
    launcher.worker("w1", one="1")
    launcher.start("sh", "-c", "exit 4")
    assert launcher.line() == "labctl: the launcher ended with exit code 4"
    assert launcher.line() == ""
    assert launcher.end() == 4
    assert not (launcher.run / "one").exists()


def test_the_command_alone_has_the_runs_id(launcher: Launcher) -> None:
    """LABCTL_RUN_ID is a variable of the command, and not of the launcher's shell."""
    launcher.start("sh", "-c", "echo $LABCTL_RUN_ID; tr '\\0' '\\n' < /proc/$PPID/environ | grep -c ^LABCTL_RUN_ID=")
    assert [launcher.line(), launcher.line()] == [launcher.id, "0"]


def test_an_image_without_python_is_said_once_to_have_no_agent(launcher: Launcher) -> None:
    """Without python3 one line says so, and the command runs."""
    (launcher.root / "bin/python3").unlink()
    launcher.program("python3", "exit 127")
    launcher.start("echo", "one")
    printed = [launcher.printed() for _ in range(3)]
    assert printed == [NO_AGENT, "one", f"{MARK}labctl: the launcher ended with exit code 0"]


CRASH = r"\0011!\002labctl: rank 1 on w1 exited with code 7\n"
STEPS = "for step in 1 2 3 4 5; do echo step $step/9; /bin/sleep 0.07; done; "


@pytest.mark.parametrize(
    ("changes", "script", "why"),
    [
        ({}, f"printf '{CRASH}'; ", "rank-crashed: rank 1 on w1 exited with code 7"),
        ({"stall": 0.5}, STEPS, "stalled: no step and no line for [0-9]+ s; steps took .* s; the last was step 5/9"),
        ({"limit": 0.2}, "", r"timeout: timed out after 0\.2 s"),
    ],
)
def test_the_agent_ends_a_run_and_says_why_in_the_last_line(
    watched: Launcher, changes: dict[str, object], script: str, why: str
) -> None:
    """The agent ends a run with a crashed rank, a stall or past its limit; the last line has 143 and the cause."""
    watched.job(**changes)
    watched.start("sh", "-c", f"{script}exec /bin/sleep 60")
    last = next(line for line in iter(watched.printed, "") if line.startswith(MARK))
    assert re.fullmatch(rf"{MARK}labctl: the launcher ended with exit code 143 after [\d.]+ s; {why}", last)
    assert ENDED.fullmatch(last)


def test_a_command_cannot_print_the_last_line(watched: Launcher) -> None:
    """A last line printed by the command loses its first mark; the real one follows."""
    forged = "labctl: the launcher ended with exit code 0 after 1 s"
    watched.start("sh", "-c", f"printf '\\001!\\002{forged}'; exit 3")
    assert watched.printed() == f"!\x02{forged}"
    assert watched.printed().startswith(f"{MARK}labctl: the launcher ended with exit code 3 after ")


def test_workers_that_are_not_reached_are_named(launcher: Launcher) -> None:
    """Workers that are not reached in time are told with the reason, and the launcher ends with 1."""
    launcher.environment["LABCTL_PATIENCE"] = "-1"
    launcher.program("ssh-keyscan", "read -r host; echo '# w0:2222 SSH-2.0'; echo 'getaddrinfo w1: no' >&2; exit 1")
    launcher.start("true")
    assert launcher.line() == "labctl: workers were not reached within -1 s:"
    assert launcher.line() == "getaddrinfo w1: no"
    assert launcher.end() == 1


def test_a_worker_whose_name_is_known_later_is_waited_for(launcher: Launcher) -> None:
    """A worker whose key is scanned only at the third try is waited for."""
    tried = 'echo x >> "$HOME/tries"; [ "$(wc -l < "$HOME/tries")" -lt 3 ] && head -n 1 || cat'
    launcher.program("ssh-keyscan", f"{{ {tried}; }} | sed 's/$/ ssh-ed25519 AAAA/'")
    launcher.start("true")
    assert launcher.line() == "labctl: the launcher ended with exit code 0"
    assert (launcher.home / "tries").read_text() == "x\n" * 3


def test_secrets_are_variables_of_the_command(launcher: Launcher) -> None:
    """The Secret's environment file gives the command its variables."""
    (launcher.root / "secrets").mkdir()
    (launcher.root / "secrets/environment").write_text("export HF_TOKEN=canary\n")
    launcher.start("sh", "-c", "echo $HF_TOKEN")
    assert launcher.line() == "canary"


def test_keys_are_the_persons_own_alone(launcher: Launcher) -> None:
    """~/.ssh has mode 0700, its key and configuration 0600."""
    launcher.start("sh", "-c", "stat -c %a ~/.ssh ~/.ssh/id_rsa ~/.ssh/config")
    assert [launcher.line() for _ in range(3)] == ["700", "600", "600"]


@pytest.mark.parametrize(("given", "level"), [({}, "ERROR"), ({"LAB_SSHD_LOG_LEVEL": "DEBUG"}, "DEBUG")])
def test_a_workers_sshd_tells_of_no_probe_unless_it_is_asked_to(
    launcher: Launcher, given: dict[str, str], level: str
) -> None:
    """A worker's sshd has LogLevel ERROR, or LAB_SSHD_LOG_LEVEL."""
    launcher.environment |= given
    (launcher.root / "keys/authorized_keys").write_text("key\n")
    launcher.program("ssh-keygen", ":")
    launcher.program("sshd", 'grep ^LogLevel "${@: -1}"')
    launcher.start(role="worker")
    assert launcher.line() == f"LogLevel {level}"


def test_a_workers_sshd_takes_the_variables_that_a_labs_nodes_take(launcher: Launcher) -> None:
    """A worker's sshd has the AcceptEnv line of docker/sshd_config."""
    (launcher.root / "keys/authorized_keys").write_text("key\n")
    launcher.program("ssh-keygen", ":")
    launcher.program("sshd", 'grep ^AcceptEnv "${@: -1}"')
    launcher.start(role="worker")
    accepted = launcher.line()
    assert accepted.startswith("AcceptEnv LABCTL_*")
    assert accepted in SSHD_CONFIG.read_text().splitlines()


def test_settings_that_are_the_pods_own_do_not_come_from_the_nodes_file(launcher: Launcher) -> None:
    """No option occurs twice in a worker's sshd configuration."""
    (launcher.root / "keys/authorized_keys").write_text("key\n")
    launcher.program("ssh-keygen", ":")
    launcher.program("sshd", 'cut -d " " -f 1 "${@: -1}" | sort | uniq -d; echo end')
    launcher.start(role="worker")
    assert launcher.line() == "end"
