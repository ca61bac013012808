"""A connection to this machine: scripts run here, or under a command prefix."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from tempfile import TemporaryFile
from typing import IO

from labctl.backends.docker.hosts.ssh import Connection
from labctl.config.inventory import InventoryHost
from labctl.errors import HostError
from labctl.system.process import CompletedProcess

PIECE = 1 << 16


class Nearby(Connection):
    """Connection to this machine: ``shell`` runs the scripts, ``environment`` extends this process's."""

    def __init__(
        self, *, shell: tuple[str, ...] = ("sh",), name: str = "gpu-1", environment: dict[str, str] | None = None
    ) -> None:
        """Run scripts by ``shell``, such as a prefix into another machine; count commands and bytes from 0."""
        self.target = InventoryHost(name=name)
        self.address = ""
        self.shell = shell
        self.environment = {**os.environ, **(environment or {})}
        self.commands = 0
        self.bytes = 0

    def argv(self, script: str, *arguments: str) -> tuple[str, ...]:
        """Return an ssh command line that would run the script; count it."""
        self.commands += 1
        return ("ssh", self.target.name, shlex.join((*self.shell, "-c", script, "sh", *arguments)))

    def run(
        self,
        script: str,
        *arguments: str,
        input: str | None = None,  # noqa: A002
        timeout: float = 60,
        check: bool = True,
    ) -> CompletedProcess:
        """Run a script here; return its output. HostError if it fails, with ``check``."""
        output: list[bytes] = []
        done = self._carry(script, arguments, (input.encode(),) if input else (), output.append, timeout)
        if check and done.code != 0:
            raise HostError(f"{self.target.name}: {done.err}", node=self.target.name)
        return CompletedProcess(done.argv, done.code, b"".join(output).decode("utf-8", "replace"), done.err)

    def send(self, script: str, *arguments: str, chunks: Iterable[bytes], timeout: float) -> CompletedProcess:
        """Run a script with these chunks as its input; drop its output."""
        return self._carry(script, arguments, chunks, len, timeout)

    def receive(
        self, script: str, *arguments: str, on_chunk: Callable[[bytes], object], timeout: float
    ) -> CompletedProcess:
        """Run a script without input; pass its output to ``on_chunk``."""
        return self._carry(script, arguments, (), on_chunk, timeout)

    def _carry(
        self,
        script: str,
        arguments: tuple[str, ...],
        chunks: Iterable[bytes],
        on_chunk: Callable[[bytes], object],
        timeout: float,
    ) -> CompletedProcess:
        """Run a script with chunks as input, then pass its output to ``on_chunk``; return its exit code and stderr.

        No script here prints much before its input ends.
        """
        self.commands += 1
        argv = (*self.shell, "-c", script, "sh", *arguments)
        with TemporaryFile() as complaints, self._child(argv, complaints, timeout) as child:
            assert child.stdin
            assert child.stdout
            with contextlib.suppress(BrokenPipeError), child.stdin:
                for chunk in chunks:
                    self.bytes += len(chunk)
                    child.stdin.write(chunk)
            while piece := os.read(child.stdout.fileno(), PIECE):
                on_chunk(piece)
            child.wait()
            complaints.seek(0)
            return CompletedProcess(argv, child.returncode, "", complaints.read().decode("utf-8", "replace"))

    @contextlib.contextmanager
    def _child(self, argv: tuple[str, ...], complaints: IO[bytes], timeout: float) -> Iterator[subprocess.Popen[bytes]]:
        """Start a child in its own session; kill the session on timeout or if the block raises."""
        pipe = subprocess.PIPE
        with subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=complaints, env=self.environment, start_new_session=True
        ) as child:

            def kill() -> None:
                """Kill the child's session, if it still exists."""
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)

            timer = threading.Timer(timeout, kill)
            timer.daemon = True
            timer.start()
            try:
                yield child
            except BaseException:
                kill()
                raise
            finally:
                timer.cancel()
