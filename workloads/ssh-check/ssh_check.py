"""Check all connections that a launcher needs: ssh to each worker, TCP back, and TCP between workers both ways.

Runs once, in the launcher. Workers hold no private key, so nothing logs in from them: what launchers and collective
libraries need of them are connections to ephemeral ports of the lab's interface, to each other by the hostfile's names.
Ends with code 1 when a pair fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path

import agent

LIMIT = 60.0
"""Seconds for a worker to log in and answer, and again to try all of its peers."""
AT_ONCE = 64
"""Logins at the same time."""
PROGRAM = "import sys; exec(compile(sys.stdin.read(int(sys.argv[1])), 'agent.py', 'exec'))"
"""Command that reads the agent from the pipe by its length, so that the rest is the agent's input."""


@dataclass(frozen=True)
class Pair:
    """Result of a connection: its milliseconds, or the error."""

    source: str
    target: str
    way: str
    milliseconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Target:
    """Address that a worker connects to, and the name of the host that must answer."""

    name: str
    host: str
    port: int


def main() -> int:
    """Log in to all workers, have each connect to the others, print all pairs; return 1 if any failed, else 0."""
    slots = read_hostfile(Path(os.environ["LABCTL_HOSTFILE"]).read_text(encoding="utf-8"))
    launcher = Target(socket.gethostname(), *agent.listen())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        workers = [Worker(name, launcher.name) for name in slots]
        try:
            logins = list(pool.map(Worker.log_in, workers))
            say_ranks(slots, logins)
            targets = [Target(worker.name, worker.name, worker.port) for worker in workers]
            connections = pool.map(lambda worker: worker.try_all([launcher, *others(worker.name, targets)]), workers)
            pairs = [*logins, *(pair for found in connections for pair in found)]
        finally:
            for worker in workers:
                worker.end()
    print(*table(pairs), *summary(pairs), sep="\n", flush=True)
    return 1 if any(pair.error for pair in pairs) else 0


def read_hostfile(text: str) -> dict[str, int]:
    """Parse lines like ``worker-0 slots=8`` into slots by name."""
    lines = (line.split("#")[0].split() for line in text.splitlines())
    return {words[0]: int(words[1].partition("=")[2]) for words in lines if words}


def others(name: str, targets: list[Target]) -> list[Target]:
    """Return the other targets, from the next one on, so that the workers do not all start with the same target."""
    own = [target.name for target in targets].index(name)
    return targets[own + 1 :] + targets[:own]


def say_ranks(slots: dict[str, int], logins: Iterable[Pair]) -> None:
    """Print one line per slot of the workers that answered, as launchers' ranks print."""
    answered = {login.target for login in logins if not login.error}
    ranks = [name for name, count in slots.items() for _ in range(count)]
    for rank, name in enumerate(ranks):
        if name in answered:
            print(f"labctl: rank {rank} of {len(ranks)} on {name}", flush=True)


def table(pairs: list[Pair]) -> list[str]:
    """Return a heading and a line for each pair."""
    width = max(len(name) for pair in pairs for name in (pair.source, pair.target)) + 2
    lines = [f"{'from':<{width}}{'to':<{width}}{'way':<5}{'ms':>9}  ok"]
    for pair in pairs:
        milliseconds = "-" if pair.error else f"{pair.milliseconds:.2f}"
        ok = f"no: {pair.error}" if pair.error else "yes"
        lines.append(f"{pair.source:<{width}}{pair.target:<{width}}{pair.way:<5}{milliseconds:>9}  {ok}")
    return lines


def summary(pairs: list[Pair]) -> list[str]:
    """Summarise the pairs: number of good ones, slowest of each way, and all that failed."""
    well = [pair for pair in pairs if not pair.error]
    lines = [f"pairs: {len(well)} of {len(pairs)}"]
    for way, name in (("tcp", "slowest"), ("ssh", "slowest login")):
        slowest = max((pair for pair in well if pair.way == way), key=lambda pair: pair.milliseconds, default=None)
        if slowest:
            lines.append(f"{name}: {slowest.milliseconds:.2f} ms ({slowest.source} -> {slowest.target})")
    failed = (pair for pair in pairs if pair.error and not pair.error.startswith("not tried"))
    return [*lines, *(f"failed: {pair.source} -> {pair.target} by {pair.way}: {pair.error}" for pair in failed)]


class Silence(Exception):
    """A worker that said nothing more, with what ssh had to say instead."""


class Worker:
    """A worker under question: an ssh session in which agent.py runs."""

    def __init__(self, name: str, launcher: str) -> None:
        self.name, self.port = name, 0
        self._launcher = launcher
        self._ssh: subprocess.Popen[str] | None = None

    def log_in(self) -> Pair:
        """Start agent.py on the worker over ssh; return a Pair with the milliseconds to its answer, or an error."""
        source = Path(agent.__file__).read_text(encoding="ascii")
        command = f"hostname; exec /usr/bin/python3 -c {shlex.quote(PROGRAM)} {len(source)}"
        began = time.perf_counter()
        self._ssh = subprocess.Popen(
            ["ssh", "-o", "BatchMode=yes", "--", self.name, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            with ended_after(LIMIT, self._ssh):
                hostname = self._ask(self._ssh, source)
                milliseconds = 1000 * (time.perf_counter() - began)
                self.port = json.loads(self._ask(self._ssh))["port"]
        except Silence as silence:
            return Pair(self._launcher, self.name, "ssh", error=str(silence))
        error = "" if hostname == self.name else f"the host there calls itself `{hostname}`"
        return Pair(self._launcher, self.name, "ssh", milliseconds, error)

    def try_all(self, targets: list[Target]) -> list[Pair]:
        """Have the worker connect to all targets that listen; return a Pair each, with an error for the others."""
        if not (self._ssh and self.port):
            return [self._failed(target, f"not tried: no answer from {self.name}") for target in targets]
        there = [target for target in targets if target.port]
        absent = [target for target in targets if not target.port]
        try:
            with ended_after(LIMIT, self._ssh):
                said = self._ask(self._ssh, json.dumps([astuple(target) for target in there]) + "\n")
        except Silence as silence:
            return [self._failed(target, str(silence)) for target in targets]
        tried = zip(there, json.loads(said), strict=True)
        return [
            *(Pair(self.name, target.name, "tcp", **outcome) for target, outcome in tried),
            *(self._failed(target, f"not tried: no answer from {target.name}") for target in absent),
        ]

    def end(self) -> None:
        """Kill the ssh session, if there is one, and wait for it."""
        if self._ssh:
            self._ssh.kill()
            self._ssh.communicate()

    def _failed(self, target: Target, error: str) -> Pair:
        """Return the Pair of a connection that failed."""
        return Pair(self.name, target.name, "tcp", error=error)

    @staticmethod
    def _ask(ssh: subprocess.Popen[str], text: str = "") -> str:
        """Send text to the agent and return its next line. Silence, with ssh's last error line, if there is none."""
        with contextlib.suppress(BrokenPipeError):
            ssh.stdin.write(text)
            ssh.stdin.flush()
        line = ssh.stdout.readline().strip()
        if not line:
            said = ssh.stderr.read().strip().splitlines()
            raise Silence(said[-1] if said else f"no answer, or none within {LIMIT:g} s")
        return line


@contextlib.contextmanager
def ended_after(seconds: float, process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the process if the block takes longer than ``seconds``, so that reading from it ends."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


if __name__ == "__main__":
    sys.exit(main())
