"""A connection that leads no further than this machine: scripts run here, or wherever a prefix takes them."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable

from labctl.connection import Connection
from labctl.errors import HostError
from labctl.hosts import Target
from labctl.shell import Completed

LIMIT = 60


class Nearby(Connection):
    """``shell`` is what runs a script there; ``path`` stands for PATH there, before this machine's own."""

    def __init__(self, *, shell: tuple[str, ...] = ("sh",), path: str = "", name: str = "gpu-1") -> None:
        self.target = Target(name=name)
        self.told = self.address = ""
        self.shell = shell
        self.environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"} if path else None
        self.commands = 0
        self.received = 0

    def argv(self, script: str, *words: str) -> tuple[str, ...]:
        return ("ssh", self.target.name, shlex.join((*self.shell, "-c", script, "sh", *words)))

    def run(
        self,
        script: str,
        *words: str,
        input: str | None = None,  # noqa: A002
        timeout: float = 60,
        check: bool = True,
    ) -> Completed:
        return self._carry(script, words, (input.encode(),) if input else (), None, check)

    def send(self, script: str, *words: str, chunks: Iterable[bytes], timeout: float, check: bool = True) -> Completed:
        return self._carry(script, words, chunks, None, check)

    def receive(
        self, script: str, *words: str, on_chunk: Callable[[bytes], object], timeout: float, check: bool = True
    ) -> Completed:
        return self._carry(script, words, (), on_chunk, check)

    def rsh(self) -> str:
        # As ssh does: the words after the host are one text for a shell there.
        return "sh -c 'shift; exec sh -c \"$*\"' sh"

    def _carry(
        self,
        script: str,
        words: tuple[str, ...],
        chunks: Iterable[bytes],
        on_chunk: Callable[[bytes], object] | None,
        check: bool,
    ) -> Completed:
        """Feed and read at once, in a session of its own, which is gone at the end."""
        self.commands += 1
        argv = (*self.shell, "-c", script, "sh", *words)
        pipe = subprocess.PIPE
        with subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, env=self.environment, start_new_session=True
        ) as child:
            assert child.stdin
            assert child.stdout
            assert child.stderr
            out: list[bytes] = []
            err: list[bytes] = []
            readers = [
                threading.Thread(target=_drain, args=(child.stdout.read1, on_chunk or out.append)),
                threading.Thread(target=_drain, args=(child.stderr.read, err.append)),
            ]
            timer = threading.Timer(LIMIT, lambda: os.killpg(child.pid, signal.SIGKILL))
            for thread in (*readers, timer):
                thread.start()
            with contextlib.suppress(BrokenPipeError), child.stdin:
                for chunk in chunks:
                    self.received += len(chunk)
                    child.stdin.write(chunk)
            for thread in readers:
                thread.join()
            child.wait()
            timer.cancel()
        text = b"".join(out).decode("utf-8", "replace")
        done = Completed(argv, child.returncode, text, b"".join(err).decode("utf-8", "replace"))
        if check and done.code != 0:
            raise HostError(f"{self.target.name}: exit code {done.code}: {done.err}", node=self.target.name)
        return done


def _drain(read: Callable[[], bytes], keep: Callable[[bytes], object]) -> None:
    while piece := read():
        keep(piece)
