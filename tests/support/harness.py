"""A lab as the user drives it: the console script in a lab directory, and the Docker SDK as an independent witness."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from docker.errors import APIError, NotFound
from docker.models.containers import Container
from docker.models.networks import Network

from docker import DockerClient

LABCTL = str(Path(sys.executable).with_name("labctl"))
WORKLOADS = Path(__file__).resolve().parents[1] / "workloads"
# Variables that the user may have exported must not affect the tests.
NOT_INHERITED = ("LAB_", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HOST_", "PROJECT_PATH", "DOCKER_SSH", "DOCKER_MASTER")

# torchrun and deepspeed print their own tracebacks, for a node that leaves its barrier last or a killed launcher.
OWN_FRAME = re.compile(r'File "[^"]*(?:/labctl/|/bin/labctl|/opt/lab/|/workspace/)')

T = TypeVar("T")


def wait_until(condition: Callable[[], T | None], limit: float, description: str) -> T:
    """Call the condition until it is true; return its value. Fail the test after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while True:
        began = time.monotonic()
        if value := condition():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit} s: {description}")
        # A condition that starts labctl must leave half of the core to the process that it waits for.
        time.sleep(max(0.05, time.monotonic() - began))


def free_port() -> int:
    """Return a free port of 127.0.0.1 between 20000 and 30000, outside the range of ephemeral ports."""
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", random.randrange(20_000, 30_000))) as server,  # noqa: S311
        ):
            return int(server.getsockname()[1])


@dataclass(frozen=True)
class Answer:
    """A command's output, exit code and duration in seconds."""

    command: tuple[str, ...]
    code: int
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def out(self) -> str:
        return self.stdout.decode("utf-8", "backslashreplace")

    @property
    def err(self) -> str:
        return self.stderr.decode("utf-8", "backslashreplace")

    @property
    def json(self) -> Any:
        """Parse stdout, which must be exactly one JSON document."""
        return json.loads(self.stdout)

    def expect(self, code: int) -> Answer:
        """Return this answer; fail on another exit code, or on a traceback of labctl, its agent or a workload."""
        report = f"labctl {' '.join(self.command)}: code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"
        assert self.code == code, report
        assert not OWN_FRAME.search(self.out + self.err), report
        return self


class Running:
    """A running labctl, in its own session and process group."""

    def __init__(self, command: tuple[str, ...], process: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        """Keep the process and the files of its output; its time begins at once."""
        self.command, self.process = command, process
        self._out, self._err = out, err
        self._began = time.monotonic()

    @property
    def out(self) -> str:
        """Standard output so far."""
        return self._out.read_text(encoding="utf-8", errors="backslashreplace")

    @property
    def err(self) -> str:
        """Standard error so far."""
        return self._err.read_text(encoding="utf-8", errors="backslashreplace")

    def press(self, number: signal.Signals = signal.SIGINT) -> None:
        """Send the signal to the whole group, as the terminal does on Ctrl-C; ignore a group that has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def ends_within(self, seconds: float) -> bool:
        """Return True if labctl ends within so many seconds."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def answer(self, limit: float) -> Answer:
        """Wait for labctl to end and return its answer; fail the test after ``limit`` seconds."""
        assert self.ends_within(limit), f"labctl {' '.join(self.command)} still runs after {limit} s:\n{self.err}"
        seconds = time.monotonic() - self._began
        return Answer(self.command, self.process.returncode, self._out.read_bytes(), self._err.read_bytes(), seconds)


class Terminal:
    """A program in a pseudo-terminal of unknown size."""

    def __init__(self, argv: tuple[str, ...], cwd: Path, environ: dict[str, str]) -> None:
        """Start a program in a new session, whose terminal is a pseudo-terminal that a thread reads."""
        self._master, self._slave = pty.openpty()
        self._process = subprocess.Popen(
            ["setsid", "--ctty", *argv],
            cwd=cwd,
            env=environ,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
        )
        self._seen = b""
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Collect the terminal's output until it is closed."""
        while not self._closing.is_set():
            if select.select([self._master], [], [], 0.1)[0]:
                self._seen += os.read(self._master, 4096)

    @property
    def output(self) -> str:
        """Output in the terminal so far."""
        return self._seen.decode("utf-8", "replace")

    def type(self, line: str) -> None:
        """Type a line and Enter."""
        self.press(f"{line}\r")

    def press(self, keys: str) -> None:
        """Press keys; `\\x03` is Ctrl-C."""
        os.write(self._master, keys.encode())

    def code(self, limit: float) -> int:
        """Wait for the program to end and return its exit code; raise TimeoutExpired after ``limit`` seconds."""
        return self._process.wait(limit)

    def hang_up(self) -> None:
        """Close the terminal, which sends SIGHUP to its processes."""
        self._closing.set()
        self._reader.join()
        os.close(self._slave)
        os.close(self._master)

    def close(self) -> None:
        """Kill the program and close the terminal."""
        self._process.kill()
        self._process.wait()
        if not self._closing.is_set():
            self.hang_up()


@dataclass(frozen=True)
class Lab:
    """A lab: its directory, its name, and the environment and command prefix of labctl."""

    path: Path
    name: str
    engine: DockerClient
    environ: dict[str, str]
    prefix: tuple[str, ...] = ()
    canaries: list[str] = field(default_factory=list)
    """Commands that `plant_canary` has started."""

    @classmethod
    def make(
        cls, path: Path, name: str, engine: DockerClient, settings: dict[str, str], *, prefix: tuple[str, ...] = ()
    ) -> Lab:
        """Make a lab directory with `labctl init`, the tests' workloads, and these settings over the defaults."""
        environ = {key: value for key, value in os.environ.items() if not key.startswith(NOT_INHERITED)}
        lab = cls(path, name, engine, environ, prefix)
        subprocess.run([*prefix, LABCTL, "init", str(path)], env=environ, check=True, capture_output=True)
        shutil.copytree(WORKLOADS, path / "workloads", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        (path / "cache").mkdir()
        lab.configure(settings)
        return lab

    def configure(self, settings: dict[str, str]) -> None:
        """Write .env: the default settings, replaced by these."""
        plain = {
            "LAB_NAME": self.name,
            "LAB_ACCELERATOR": "cpu",
            "LAB_SHM_SIZE": "64m",
            "HOST_CACHE_PATH": str(self.path / "cache"),
        }
        lines = (f"{key}={quoted(value)}\n" for key, value in {**plain, **settings}.items())
        (self.path / ".env").write_text("".join(lines), encoding="utf-8")

    # --- driving it ---

    def call(
        self,
        *arguments: str,
        limit: float = 300,
        environ: dict[str, str] | None = None,
        here: Path | None = None,
    ) -> Answer:
        """Run labctl in the lab's directory, or ``here`` with -C; return output and exit code, whatever the code."""
        began = time.monotonic()
        if here:
            arguments = (arguments[0], "-C", str(self.path), *arguments[1:])
        done = subprocess.run(
            [*self.prefix, LABCTL, *arguments],
            cwd=here or self.path,
            env={**self.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit,
            check=False,
        )
        return Answer(arguments, done.returncode, done.stdout, done.stderr, time.monotonic() - began)

    @contextlib.contextmanager
    def start(self, *arguments: str) -> Iterator[Running]:
        """Start labctl in the background; kill its process group at the end of the block."""
        logs = self.path / "started"
        logs.mkdir(exist_ok=True)
        stem = f"{len(list(logs.iterdir())):03}"
        out, err = logs / f"{stem}.out", logs / f"{stem}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [*self.prefix, LABCTL, *arguments],
                cwd=self.path,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        running = Running(arguments, process, out, err)
        try:
            yield running
        finally:
            running.press(signal.SIGKILL)
            process.wait()

    @contextlib.contextmanager
    def in_terminal(self, *arguments: str, cwd: Path | None = None) -> Iterator[Terminal]:
        """Start labctl in a terminal; kill it at the end of the block."""
        terminal = Terminal((*self.prefix, LABCTL, *arguments), cwd or self.path, {**self.environ, "TERM": "xterm"})
        try:
            yield terminal
        finally:
            terminal.close()

    @contextlib.contextmanager
    def stubborn_run(self, *flags: str, workload: str = "stubborn") -> Iterator[tuple[Running, str]]:
        """Start a run that never ends by itself; yield it with its id once its ranks are up on both nodes."""
        before = set(self.run_ids())
        with self.start("run", workload, *flags) as running:

            def up() -> str | None:
                """Return the new run's id once both of its ranks are up, else None; fail if labctl ends before."""
                for run_id in set(self.run_ids()) - before:
                    logs = list((self.path / "runs/.outputs" / run_id / "ranks").glob("rank-*.log"))
                    if len(logs) == 2 and all("does not listen" in log.read_text() for log in logs):
                        return run_id
                assert running.process.poll() is None, f"the run ended before its time:\n{running.err}"
                return None

            yield running, wait_until(up, 120, "both ranks of the stubborn run are up")

    def ensure_up(self) -> None:
        """Bring the lab up unless two workers and the launcher are running."""
        running = {node for node, container in self.containers().items() if container.status == "running"}
        if running != {"launcher", "worker-0", "worker-1"}:
            self.call("up").expect(0)

    def run_ids(self) -> list[str]:
        """Return the sorted ids of the runs in the lab's ``runs``."""
        runs, not_runs = self.path / "runs", ("notebooks", ".outputs")
        return sorted(path.name for path in runs.iterdir() if path.name not in not_runs) if runs.is_dir() else []

    # --- watching it ---

    def containers(self) -> dict[str, Container]:
        """Return the lab's containers by node, in any state."""
        containers = self.engine.containers.list(
            all=True, filters={"label": f"labctl.lab={self.name}"}, ignore_removed=True
        )
        return {container.labels["labctl.node"]: container for container in containers}

    def image(self) -> str:
        """Return the name of the image that all nodes were created from."""
        (name,) = {container.attrs["Config"]["Image"] for container in self.containers().values()}
        return str(name)

    def networks(self) -> list[Network]:
        """Return the lab's networks in the engine."""
        return self.engine.networks.list(filters={"label": f"labctl.lab={self.name}"})

    def identities(self) -> dict[str, tuple[str, str]]:
        """Return id and start time of every container, which change if a container is recreated or restarted."""
        return {
            node: (container.id or "", container.attrs["State"]["StartedAt"])
            for node, container in self.containers().items()
        }

    def labelled(self) -> list[str]:
        """List the names of the lab's containers, networks and volumes in the engine."""
        mark = {"label": f"labctl.lab={self.name}"}
        volumes = [volume.id or "" for volume in self.engine.volumes.list(filters=mark)]
        return [*self.containers(), *(network.name or "" for network in self.networks()), *volumes]

    def inside(self, node: str, *argv: str, user: str = "") -> str:
        """Run a command in a node by the engine, as this user or ``user``; return its output; it must exit with 0."""
        return self.inside_bytes(node, *argv, user=user).decode()

    def inside_bytes(self, node: str, *argv: str, user: str = "") -> bytes:
        """Run a command in a node by the engine; return its output. Fail unless it exits with 0."""
        for _ in range(5):
            code, output = self.containers()[node].exec_run(list(argv), user=user or f"{os.getuid()}:{os.getgid()}")
            # A busy engine sometimes loses the output of a short command.
            if output or code or argv[0] not in ("cat", "env", "hostname", "id", "python"):
                break
        assert code == 0, f"{node}: {argv}: code {code}: {output!r}"
        assert isinstance(output, bytes)
        return output

    def processes_of(self, run_id: str) -> list[str]:
        """List the processes with the run's id in their environment, as ``node: path``, in all running containers."""
        search = 'grep -slaF -- "$0" /proc/[0-9]*/environ || true'
        return [
            f"{node}: {path}"
            for node, container in self.containers().items()
            if container.status == "running"
            for path in self.inside(node, "sh", "-c", search, f"LABCTL_RUN_ID={run_id}").split()
        ]

    def processes(self) -> dict[tuple[str, str], dict[str, str]]:
        """Return the commands of running containers by pid, each container by node and start time."""
        return {
            (node, container.attrs["State"]["StartedAt"]): {row[1]: row[-1] for row in container.top()["Processes"]}
            for node, container in self.containers().items()
            if container.status == "running"
        }

    def left_since(self, before: dict[tuple[str, str], dict[str, str]]) -> list[str]:
        """List processes that are not in ``before`` and still run after half a minute, except canaries.

        Containers that were started since are skipped.
        """
        deadline = time.monotonic() + 30
        while True:
            new = [
                f"{started[0]}: {command}"
                for started, commands in self.processes().items()
                for pid, command in commands.items()
                if pid not in before.get(started, commands) and command not in self.canaries
            ]
            if not new or time.monotonic() > deadline:
                return new
            time.sleep(0.05)

    def plant_canary(self, node: str) -> Callable[[], bool]:
        """Start a long sleep in a node and wait for it; return a function that tells if it still runs."""
        seconds = str(80_000 + time.monotonic_ns() % 9_000)
        container = self.containers()[node]
        self.canaries.append(f"sleep {seconds}")
        container.exec_run(["sleep", seconds], detach=True)

        def alive() -> bool:
            """Return True if the canary is among the container's processes."""
            return any(f"sleep {seconds}" in " ".join(row) for row in container.top()["Processes"])

        wait_until(alive, 120, "the canary lives")
        return alive

    def destroy(self) -> None:
        """Remove the lab's containers and networks, without labctl."""
        remove_labelled(self.engine, lambda name: name == self.name)


def pause(container: Container) -> None:
    """Pause a container; retry, as on a busy machine the kernel may fail to freeze all processes."""

    def paused() -> bool:
        """Try to pause the container; return True if that succeeds."""
        with contextlib.suppress(APIError):
            container.pause()
            return True
        return False

    wait_until(paused, 120, "the container is paused")


def remove_labelled(engine: DockerClient, ours: Callable[[str], bool]) -> None:
    """Remove all containers and networks of labs whose name satisfies ``ours``."""
    mark: dict[str, str | list[str] | bool] = {"label": "labctl.lab"}
    for container in engine.containers.list(all=True, filters=mark, ignore_removed=True):
        if ours(container.labels["labctl.lab"]):
            with contextlib.suppress(NotFound, APIError):
                container.remove(force=True, v=True)
    for network in engine.networks.list(filters=mark):
        if ours(network.attrs["Labels"]["labctl.lab"]):
            with contextlib.suppress(NotFound):
                network.remove()


def quoted(value: str) -> str:
    """Return a value in double quotes for .env, with backslashes, quotes and white space escaped."""
    for character, escape in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        value = value.replace(character, escape)
    return f'"{value}"'
