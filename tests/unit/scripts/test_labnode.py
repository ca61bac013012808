"""The agent of containers, on real processes of this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict
from support.nearby import Nearby

from labctl import accelerators
from labctl.backends.docker.hosts import push
from labctl.backends.state import lost
from labctl.records import manifest

SOURCE = Path(__file__).resolve().parents[3] / "docker/labnode.py"
LIMIT = 30.0
"""Time limit of a test in seconds."""

# Each prints its pid when it is ready, and would live for a minute.
PLAIN = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + PLAIN
# It starts a child in a session of its own, which does not carry the run's id.
PARENT = (
    "import subprocess, sys, time; "
    "subprocess.Popen([sys.executable, '-c', sys.argv[1]], env={{}}, start_new_session=True); "
    "{before}time.sleep(60)"
)
# What adopts orphans, as a container's init does, and a program that has lost its parent and cleaned its environment.
INIT = (
    "import ctypes, subprocess, sys, time; "
    "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); "
    "start = ['sh', '-c', 'setsid \"$@\" &', 'sh', sys.executable, '-c', sys.argv[1]]; "
    "subprocess.run(start, env=dict(one.split('=') for one in sys.argv[2:])); "
    "time.sleep(60)"
)


def load() -> ModuleType:
    """Import docker/labnode.py from its file; return the module."""
    spec = importlib.util.spec_from_file_location("labnode", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


labnode = load()


class Run:
    """Processes with a run's id in their environment, as launchers start them."""

    def __init__(self) -> None:
        """Choose a random run id; no process is started."""
        self.id = f"test-{uuid.uuid4().hex}"
        self.children: list[subprocess.Popen[str]] = []
        self.pids: list[int] = []

    def start(self, program: str, *arguments: str, run_id: str | None = None) -> int:
        """Start a program; return the pid that it reports first, which may be a child's."""
        command = [sys.executable, "-c", program, *arguments]
        environment = {"PATH": os.environ["PATH"], "LABCTL_RUN_ID": run_id or self.id}
        child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        self.children.append(child)
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        self.pids += [child.pid, pid]
        return pid

    def close(self) -> None:
        """Kill all processes that were reported or started, and wait for them."""
        for pid in self.pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        for child in self.children:
            child.communicate()


@pytest.fixture
def run() -> Iterator[Run]:
    """Return a Run; kill its processes at the end."""
    started = Run()
    yield started
    started.close()


def alive(pid: int) -> bool:
    """Return True if the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool]) -> bool:
    """Wait for the condition up to LIMIT; return False if it does not come true."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True


# --- find and reap -------------------------------------------------------------------------------------------


def test_only_processes_of_the_run_are_found(run: Run) -> None:
    """Start processes of two runs: each run's id finds its own, an unknown id none."""
    mine, other = run.start(PLAIN), run.start(PLAIN, run_id=f"{run.id}-other")
    assert list(labnode.processes(run.id)) == [mine]
    assert list(labnode.processes(f"{run.id}-other")) == [other]
    assert not labnode.processes(f"{run.id}-none")


def test_a_grandchild_in_its_own_session_without_the_id_is_found(run: Run) -> None:
    """Start a child in another session without the id: it is found by its parent."""
    grandchild = run.start(PARENT.format(before=""), PLAIN)
    assert sorted(labnode.processes(run.id)) == sorted([run.children[0].pid, grandchild])


def test_reap_ends_the_run_and_nothing_else(run: Run) -> None:
    """Reap a run: its process ends, another run's lives."""
    mine, other = run.start(PLAIN), run.start(PLAIN, run_id=f"{run.id}-other")
    labnode.reap(run.id, "5")
    assert (alive(mine), alive(other)) == (False, True)


def test_reap_kills_what_ignores_term(run: Run) -> None:
    """Reap a process that ignores SIGTERM: it is killed."""
    pid = run.start(STUBBORN)
    labnode.reap(run.id, "0.1")
    assert not alive(pid)


def test_reap_ends_a_grandchild_in_its_own_session_without_the_id(run: Run) -> None:
    """Reap a run with a child in another session: both end."""
    grandchild = run.start(PARENT.format(before=""), PLAIN)
    labnode.reap(run.id, "5")
    assert wait_for(lambda: not alive(grandchild))
    assert not alive(run.children[0].pid)


def test_reap_ends_a_grandchild_that_outlives_its_parent_by_ignoring_term(run: Run) -> None:
    """Reap a run whose child ignores SIGTERM and outlives its parent: it is killed.

    Once the parent has ended, neither environment nor ancestors identify the child.
    """
    grandchild = run.start(PARENT.format(before=""), STUBBORN)
    labnode.reap(run.id, "0.2")
    assert not alive(grandchild)


def test_reap_gives_time_to_end_well(run: Run, tmp_path: Path) -> None:
    """Reap with a grace of 10 s: the process writes its file on SIGTERM first."""
    program = (
        "import os, signal, sys, time; "
        "signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1], 'w').close(), os._exit(0))); " + PLAIN
    )
    run.start(program, str(tmp_path / "saved"))
    labnode.reap(run.id, "10")
    assert (tmp_path / "saved").exists()


def test_reap_ends_what_left_the_run_since_it_began_and_no_earlier_or_marked_orphan(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reap with orphans: those begun since the run end; earlier, marked and the node's own ones live."""
    earlier = run.start(INIT, PLAIN, run_id="elsewhere")
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    # Start times are in ticks.
    assert wait_for(lambda: time.clock_gettime(time.CLOCK_BOOTTIME) > began + 0.05)
    folder, marked, program = (
        run.start(INIT, STUBBORN, run_id="elsewhere"),
        run.start(INIT, PLAIN, "LABCTL_RUN_ID=person-1", run_id="elsewhere"),
        run.start(INIT, PLAIN, run_id="elsewhere"),
    )
    pids = (earlier, folder, marked, program)
    parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
    (tmp_path / "ready").write_text(str(program))
    monkeypatch.setattr(labnode, "STATE", tmp_path)
    assert parents == {child.pid for child in run.children}
    monkeypatch.setattr(labnode, "START_MARGIN", 0)
    for init in parents:
        monkeypatch.setattr(labnode, "INIT", init)
        monkeypatch.setenv("LABCTL_RUN_SECONDS", str(time.clock_gettime(time.CLOCK_BOOTTIME) - began - 0.02))
        labnode.reap(run.id, "0.1")
    assert [alive(pid) for pid in pids] == [True, False, True, True]


def test_a_program_that_is_not_to_be_read_is_left_over_as_any_other(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deny reading an orphan's environment: it counts as left over, unless it is another user's."""
    pid = run.start(INIT, PLAIN, run_id="elsewhere")
    monkeypatch.setattr(labnode, "INIT", run.children[-1].pid)
    read = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        """Raise PermissionError for the orphan's environment; read other files."""
        if str(path) == f"/proc/{pid}/environ":
            raise PermissionError
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert pid in labnode.processes(run.id, {}, 0)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert pid not in labnode.processes(run.id, {}, 0), "another user's"


def test_reap_of_a_run_that_is_over_waits_for_nothing_and_is_silent(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reap a run without processes: two looks, no wait and no output."""
    looks: list[str] = []
    processes = labnode.processes

    def counted(run_id: str, *rest: Any) -> dict[int, str]:
        """Record the run id and look as before."""
        looks.append(run_id)
        commands: dict[int, str] = processes(run_id, *rest)
        return commands

    monkeypatch.setattr(labnode, "processes", counted)
    labnode.reap(run.id, "5")
    # For what to end, and for what is left of it.
    assert looks == [run.id] * 2
    assert capsys.readouterr().out == ""


def test_reap_that_cannot_lists_what_is_left(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reap a run whose process does not end: exit code 1, its pid as JSON on stdout."""
    pid = run.start(PLAIN)
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(labnode, "signal_all", lambda *_: None)
    monkeypatch.setattr(labnode.time, "monotonic", lambda: next(clock))
    with pytest.raises(SystemExit) as caught:
        labnode.reap(run.id, "0")
    assert caught.value.code == 1
    assert json.loads(capsys.readouterr().out)["pid"] == pid


# --- signal --------------------------------------------------------------------------------------------------


def test_a_signal_reaches_every_process_of_the_run_and_nothing_else(run: Run) -> None:
    """Signal a run: its processes end, a child in another session too, another run's lives."""
    other = run.start(PLAIN, run_id=f"{run.id}-other")
    grandchild = run.start(PARENT.format(before=""), PLAIN)
    labnode.signal_run(run.id, str(int(signal.SIGTERM)))
    assert wait_for(lambda: not alive(grandchild))
    assert wait_for(lambda: not alive(run.children[1].pid))
    assert alive(other)


def test_a_signal_waits_for_a_process_that_is_about_to_start(run: Run) -> None:
    """Signal a run before its process starts: the process gets the signal."""
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(labnode.signal_run, run.id, str(int(signal.SIGTERM)))
        with subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], "LABCTL_RUN_ID": run.id}) as late:
            assert late.wait(LIMIT) == -signal.SIGTERM
        sent.result(LIMIT)


# --- health --------------------------------------------------------------------------------------------------


def test_a_node_is_healthy_while_its_sshd_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check health with a listening port: nothing; without: SystemExit "does not listen"."""
    monkeypatch.setattr(labnode, "RETRY_DELAY", 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("LAB_SSH_PORT", str(server.getsockname()[1]))
        labnode.health()
    with pytest.raises(SystemExit, match="does not listen"):
        labnode.health()


def test_an_sshd_that_listens_at_the_second_look_is_well(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sshd listen at the second look: healthy."""
    looks = iter((False, True))
    monkeypatch.setattr(labnode, "sshd_listens", lambda: next(looks))
    devices.given("intel:1", "dri/renderD128")
    assert devices.reason() == ""
    assert list(looks) == []


class Devices:
    """A node's device folder and vendor's tool, for its health check."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        """Create folders for devices and tools; make them labnode's, with a listening sshd."""
        self.dev, self._tools, self._patch = folder / "dev", folder / "bin", patch
        for path in (self.dev, self._tools, folder / "state"):
            path.mkdir()
        patch.setenv("PATH", f"{self._tools}:/usr/bin:/bin")
        patch.setattr(labnode, "DEV", self.dev)
        patch.setattr(labnode, "STATE", folder / "state")
        patch.setattr(labnode, "RETRY_DELAY", 0)
        patch.setattr(labnode, "sshd_listens", lambda: True)
        patch.setattr(labnode, "become_user", lambda *_: None)

    def given(self, expected: str, *files: str) -> None:
        """Create device files, set the expected count such as ``nvidia:2``, and record the devices of the start."""
        for name in files:
            path = self.dev / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
        for name, value in (("LAB_HEALTH_DEVICES", expected), ("LAB_UID", "1000"), ("LAB_GID", "1000")):
            self._patch.setenv(name, value)
        watch = accelerators.get(expected.partition(":")[0]).watch
        assert watch
        labnode.record_devices(json.dumps(asdict(watch)).encode())

    def tool(self, name: str, script: str) -> None:
        """Write an executable with this shell script onto the node's PATH."""
        path = self._tools / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def reason(self) -> str:
        """Return the reason why the node is unhealthy; empty if it is healthy."""
        try:
            labnode.health()
        except SystemExit as leaving:
            return str(leaving.code)
        return ""


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Devices:
    """Return Devices at tmp_path."""
    return Devices(tmp_path, monkeypatch)


GPU = "echo 'GPU 0: Stand-in (UUID: GPU-0)'"


def test_a_node_is_healthy_while_its_tool_lists_every_device(devices: Devices) -> None:
    """List both GPUs by nvidia-smi: healthy."""
    devices.given("nvidia:2", "nvidia0", "nvidia1", "nvidiactl")
    devices.tool("nvidia-smi", f"{GPU}; echo 'GPU 1: Stand-in (UUID: GPU-1)'")
    assert devices.reason() == ""


def test_a_tool_that_the_image_lacks_says_nothing_about_the_device(devices: Devices) -> None:
    """Have no nvidia-smi: healthy."""
    devices.given("nvidia:1", "nvidia0")
    assert devices.reason() == ""


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'Failed to initialize NVML: Unknown Error'; exit 255", "`Failed to initialize NVML: Unknown Error`"),
        (f"echo 'Unable to determine the device handle for gpu 0000:18:00.0: Unknown Error'; {GPU}", "0000:18:00.0"),
        (GPU, "nvidia-smi lists 1 of 2 devices and ends with code 0"),
        ("kill -SEGV $$", "nvidia-smi lists 0 of 2 devices and ends with code -11"),
    ],
)
def test_a_tool_that_does_not_list_every_device_is_quoted_with_the_remedy(
    devices: Devices, script: str, message: str
) -> None:
    """Let nvidia-smi fail or list one of two GPUs: "device lost", its words and `labctl up` in one line."""
    devices.given("nvidia:2", "nvidia0", "nvidia1")
    devices.tool("nvidia-smi", script)
    reason = devices.reason()
    assert reason.startswith("device lost: ")
    assert message in reason
    assert "`labctl up`" in reason
    assert "\n" not in reason


def test_a_tool_that_hangs_is_given_up_and_is_no_lost_device(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nvidia-smi hang: unhealthy without "device lost", and the process is killed."""
    monkeypatch.setattr(labnode, "TOOL_LIMIT", 2)
    monkeypatch.setattr(labnode, "QUICK_CHECK", 2)
    devices.given("nvidia:1", "nvidia0")
    devices.tool("nvidia-smi", f"echo $$ >> {devices.dev}/asked; exec sleep 60")
    reason = devices.reason()
    assert reason.startswith("nvidia-smi gives no answer within 2 s;")
    assert lost(reason) is None
    (pid,) = (devices.dev / "asked").read_text().split()
    assert not alive(int(pid))


def test_a_tool_is_not_started_while_one_that_could_not_be_ended_lives(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """Leave a hanging tool alive: it is not started again; once it is gone the node is healthy.

    The tool is in a session of its own, which SIGKILL does not reach.
    """
    monkeypatch.setattr(labnode, "TOOL_LIMIT", 2)
    monkeypatch.setattr(labnode, "QUICK_CHECK", 2)
    devices.given("nvidia:1", "nvidia0")
    devices.tool("nvidia-smi", f"setsid sleep 60 > /dev/null 2>&1 & echo $! >> {devices.dev}/asked; exec sleep 60")
    assert "no answer" in devices.reason()
    assert "no answer" in devices.reason()
    (pid,) = (devices.dev / "asked").read_text().split()
    run.pids.append(int(pid))
    run.close()
    devices.tool("nvidia-smi", GPU)
    assert devices.reason() == ""


def test_a_tool_that_fails_once_is_asked_again(devices: Devices) -> None:
    """Fail nvidia-smi the first time: healthy."""
    devices.given("nvidia:1", "nvidia0")
    devices.tool("nvidia-smi", f"{GPU}; mkdir {devices.dev}/asked || exit 0; exit 1")
    assert devices.reason() == ""


@pytest.mark.parametrize(
    ("expected", "files"),
    [
        ("nvidia:2", ("nvidia0", "nvidiactl", "nvidia-uvm")),
        ("habana:2", ("accel/accel0", "accel/accel_controlD0")),
        ("intel:2", ("dri/renderD128", "dri/card0")),
    ],
)
def test_a_node_that_starts_with_fewer_devices_than_it_was_given_has_lost_them(
    devices: Devices, expected: str, files: tuple[str, ...]
) -> None:
    """Start with one of two device files: "device lost"."""
    devices.given(expected, *files)
    assert devices.reason().startswith("device lost: the node started with 1 of 2 device files ")


@pytest.mark.parametrize("kind", ["habana", "intel", "nvidia"])
def test_a_device_file_that_is_gone_is_named(devices: Devices, kind: str) -> None:
    """Remove a device file: "device lost" names it."""
    name = {"habana": "accel/accel3", "intel": "dri/renderD129", "nvidia": "nvidia1"}[kind]
    devices.given(f"{kind}:1", name)
    assert devices.reason() == ""
    (devices.dev / name).unlink()
    assert f"device lost: {devices.dev / name} is gone;" in devices.reason()


def test_a_device_file_that_may_not_be_opened_any_more_is_named(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deny opening a device file: the reason names it."""
    devices.given("intel:2", "dri/renderD128", "dri/renderD129")
    monkeypatch.setattr(labnode.os, "access", lambda path, _: not str(path).endswith("129"))
    assert f"the lab's user may not open {devices.dev}/dri/renderD129;" in devices.reason()


def test_files_of_other_devices_are_none_of_its_business(devices: Devices) -> None:
    """Remove files of other devices: healthy."""
    devices.given("intel:1", "dri/renderD128", "dri/card0", "nvidia0")
    (devices.dev / "dri/card0").unlink()
    (devices.dev / "nvidia0").unlink()
    assert devices.reason() == ""


@pytest.mark.parametrize(("listed", "healthy"), [("0\\n1\\n", True), ("0\\n", False)])
def test_gaudis_are_counted_by_their_indices(devices: Devices, listed: str, healthy: bool) -> None:
    """Count Gaudis by hl-smi's indices: healthy only if both are listed."""
    devices.given("habana:2", "accel/accel0", "accel/accel1")
    devices.tool("hl-smi", f'test "$*" = "-Q index -f csv,noheader" && printf "{listed}"')
    assert (devices.reason() == "") is healthy


# --- reach ---------------------------------------------------------------------------------------------------


def test_a_launcher_learns_of_nodes_that_came_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reach a worker that came later: ssh config and known_hosts are copied again, exit code 0."""
    home, keys, state = (tmp_path / name for name in ("home", "keys", "state"))
    for folder in (home / ".ssh", keys, state):
        folder.mkdir(parents=True)
    (state / "ready").touch()
    for name, content in (("config", "Host worker-9\n"), ("known_hosts", "[worker-9]:12345 key\n")):
        (keys / name).write_text(content)
        (home / ".ssh" / name).write_text("old")
    for name, path in (("HOME", home), ("KEYS", keys), ("STATE", state)):
        monkeypatch.setattr(labnode, name, path)
    monkeypatch.setattr(labnode, "reach_one", lambda *_: "worker-9" in (home / ".ssh/config").read_text())
    with pytest.raises(SystemExit) as caught:
        labnode.reach("1", "worker-9")
    assert caught.value.code == 0
    assert (home / ".ssh/known_hosts").read_text() == "[worker-9]:12345 key\n"
    assert (home / ".ssh/known_hosts").stat().st_mode & 0o777 == 0o600


def test_keys_that_were_sent_to_the_host_are_found_among_their_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Push keys to a host: read_keys finds the pushed version."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here/id_ed25519").write_text("key")
    push.push(Nearby(), str(tmp_path / "there"), {"launcher": manifest.scan(tmp_path / "here")})
    monkeypatch.setattr(labnode, "KEYS", tmp_path / "there/launcher")
    assert labnode.read_keys() == {"id_ed25519": b"key"}


# --- the environment of sessions -----------------------------------------------------------------------------

VALUES = st.binary(max_size=30).map(lambda value: value.replace(b"\0", b""))
PRINTED = [f"V{index}" for index in range(8)]


class Session:
    """A node's home directory, and bash as sshd starts it there."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def write(self, environment: dict[bytes, bytes], secret: str = "") -> None:
        """Write the session environment of a container with these variables and secrets."""
        (self.home / "secrets").mkdir(exist_ok=True)
        if secret:
            (self.home / "secrets/environment").write_text(secret, encoding="utf-8")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(labnode, "HOME", self.home)
            patch.setattr(labnode, "SECRETS", self.home / "secrets")
            patch.setattr(labnode.os, "environb", environment)
            labnode.write_session_environment()

    def values(self, *names: str, **sent: str) -> list[bytes | None]:
        """Return the values of these variables in a session; None if unset."""
        script = "".join(f'printf "%s:%s\\0" "${{{name}+x}}" "${name}"\n' for name in names)
        environment = {"PATH": "/session/bin", "BASH_ENV": str(self.home / ".lab-env"), **sent}
        done = subprocess.run(["/bin/bash", "-c", script], env=environment, capture_output=True, check=True)
        assert done.stderr == b""
        return [value[2:] if value.startswith(b"x:") else None for value in done.stdout.split(b"\0")[:-1]]


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """Return a Session at tmp_path."""
    return Session(tmp_path)


@given(values=st.lists(VALUES, min_size=8, max_size=8))
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_value_reaches_a_session_byte_for_byte(values: list[bytes]) -> None:
    """Write any values: a session has them byte for byte."""
    with tempfile.TemporaryDirectory() as directory:
        session = Session(Path(directory))
        session.write(dict(zip((name.encode() for name in PRINTED), values, strict=True)))
        assert session.values(*PRINTED) == values


def test_what_a_session_was_sent_stays_and_path_is_the_containers(session: Session) -> None:
    """Send variables with the session: they stay, the container's fill in, PATH is the container's."""
    session.write({b"SENT": b"container", b"EMPTY": b"container", b"OWN": b"container", b"PATH": b"/opt/bin:/bin"})
    assert session.values("SENT", "EMPTY", "OWN", "PATH", SENT="session", EMPTY="") == [
        b"session",
        b"",
        b"container",
        b"/opt/bin:/bin",
    ]


def test_what_every_session_has_of_its_own_is_not_handed_on(session: Session) -> None:
    """Write HOSTNAME, HOME, TERM and an invalid name: none is handed on, BASH_ENV is unset."""
    session.write({b"HOSTNAME": b"other", b"HOME": b"/root", b"TERM": b"dumb", b"not a name": b"x"})
    text = (session.home / ".lab-env").read_text()
    assert text == "unset BASH_ENV\n"
    assert session.values("BASH_ENV") == [None]


def test_secret_variables_come_along(session: Session) -> None:
    """Write a secret variable: a session has it."""
    session.write({b"PLAIN": b"1"}, secret="export API_KEY='a'\"'\"'b $(id)'\n")  # noqa: S106
    assert session.values("PLAIN", "API_KEY") == [b"1", b"a'b $(id)"]


@pytest.mark.parametrize("exists", [True, False])
def test_keras_finds_what_is_kept_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    """Link Keras' cache twice: ~/.keras leads to it, and its folder is created if missing."""
    kept = tmp_path / "cache/keras"
    if exists:
        kept.mkdir(parents=True)
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(labnode, "HOME", tmp_path / "home")
    monkeypatch.setenv("KERAS_HOME", str(kept))
    for _ in range(2):
        labnode.link_keras()
        (tmp_path / "home/.keras/datasets").mkdir(exist_ok=True)
    assert (kept / "datasets").is_dir()


def test_a_cache_that_cannot_be_written_keeps_no_node_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make the cache a file: no link, and no error."""
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(labnode, "HOME", tmp_path)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "cache/keras"))
    labnode.link_keras()
    assert not (tmp_path / ".keras").is_symlink()


def test_the_sessions_files_are_private(session: Session) -> None:
    """Write the session environment: its files have mode 0600."""
    session.write({b"A": b"1"})
    assert {path.name: path.stat().st_mode & 0o777 for path in session.home.iterdir() if path.is_file()} == {
        ".lab-env": 0o600,
        ".bashrc": 0o600,
        ".profile": 0o600,
    }


# --- start ---------------------------------------------------------------------------------------------------


def test_a_restarted_container_registers_its_user_once(tmp_path: Path) -> None:
    """Prepend the user's line to passwd twice: it stands there once, first."""
    passwd = tmp_path / "passwd"
    passwd.write_text("root:x:0:0::/root:/bin/bash\n")
    labnode.prepend(passwd, "lab:x:1000:1000::/home/lab:/bin/bash\n")
    labnode.prepend(passwd, "lab:x:1000:1000::/home/lab:/bin/bash\n")
    assert passwd.read_text() == "lab:x:1000:1000::/home/lab:/bin/bash\nroot:x:0:0::/root:/bin/bash\n"


@pytest.mark.parametrize(
    ("command", "code", "out", "err"),
    [
        (("echo", "a  b"), 0, "a  b\n", ""),
        (("sh", "-c", "exit 7"), 7, "", ""),
        (("no-such-program",), 127, "", "no-such-program: No such file or directory\n"),
        ((), 1, "", "usage: docker run IMAGE COMMAND [ARGS...]; `labctl up` starts nodes\n"),
    ],
)
def test_an_image_runs_a_command_in_place_of_a_node(command: tuple[str, ...], code: int, out: str, err: str) -> None:
    """Start an image with a command: its output and exit code; 127 for a missing program, usage without one."""
    done = subprocess.run(
        [sys.executable, "-I", SOURCE, "start", *command], capture_output=True, text=True, check=False, timeout=LIMIT
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)
