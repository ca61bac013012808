"""One command on many workers at once, over ssh from the launcher, for `labctl exec --all`.

labctl hands this text to the launcher's Python, marked like what it starts. Standard library only, Python >= 3.8:

    NODES COMMAND...    NODES with commas between, empty for all that the launcher knows

Each line that comes back is marked with its node. The exit code is the largest of the nodes'.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import selectors
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO, NoReturn

RUN_VARIABLE = "LABCTL_RUN_ID"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Logins under way at the same time; those that have logged in do not count, so the command runs everywhere at once.
LOGINS = 64
# Seconds for a login, which shares this machine's cores with that many others.
CONNECT = 30
# What a node without a single newline may hold back.
LONGEST = 1 << 16
# Pipes to each node, and what this program opens besides.
FILES_PER_NODE, FILES = 3, 32
# A worker's side. What reads the pipe hands signals on, and ends the command when the pipe closes before it: so it does
# when the launcher's side dies in any way. No exec, or the code of a command that a signal ended would be lost, and no
# word of this shell's about such a command: its code is told anyway.
REMOTE = """
echo {mark}
cd -- {directory} || exit
exec 3<&0 < /dev/null
{{
    while read -ru 3 number; do {agent} signal {mark} "$number"; done
    kill -0 $$ && exec {agent} reap {mark} 2
}} > /dev/null 2>&1 &
exec 4>&2 2> /dev/null
env {variable}={mark} {command} 2>&4 3<&- 4>&-
exit
"""
CONFIG = Path("/home/lab/.ssh/config")
AGENT = "/usr/bin/python3 -I /opt/lab/labnode.py"


def main(asked: str, *command: str) -> NoReturn:
    # Before there are threads: all of them, and each ssh, are to leave these alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    nodes = chosen(asked)
    make_room(len(nodes))
    mark = os.environ[RUN_VARIABLE]
    script = REMOTE.format(
        mark=mark,
        variable=RUN_VARIABLE,
        directory=shlex.quote(os.getcwd()),
        agent=AGENT,
        command=" ".join(map(shlex.quote, command)),
    )
    everywhere = Everywhere([Node(name, mark) for name in nodes], script)
    threading.Thread(target=everywhere.hand_signals_on, daemon=True).start()
    everywhere.run()
    sys.exit(everywhere.report())


def chosen(asked: str) -> list[str]:
    """The nodes asked for, each once; all that the launcher's ssh knows where none is."""
    known = re.findall(r"^Host (?!\*)(\S+)", CONFIG.read_text(), re.MULTILINE)
    wanted = list(dict.fromkeys(filter(None, asked.split(",")))) or known
    for name in wanted:
        if name not in known:
            say(f"error: the lab has no worker `{name}`", f"hint: it has {known[0]} to {known[-1]}")
            sys.exit(2)
    return wanted


def make_room(nodes: int) -> None:
    """Allow as many open files as so many nodes take, or say how many that is."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_PER_NODE * nodes + FILES
    if most != resource.RLIM_INFINITY and most < needed:
        say(
            f"error: {nodes} nodes at once take {needed} open files, and a process here may have {most}",
            "hint: name fewer nodes with -n; `labctl doctor` says what raises the limit",
        )
        sys.exit(3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Node:
    """A worker, the ssh session to it, and what came of it."""

    def __init__(self, name: str, mark: str) -> None:
        self.name, self.label, self.mark = name, f"{name}: ".encode(), mark.encode()
        self.ssh: subprocess.Popen[bytes] | None = None
        self.begun = False
        self.code: int | None = None
        self._rest: dict[int, bytes] = {1: b"", 2: b""}

    def log_in(self, script: str) -> subprocess.Popen[bytes]:
        # Sent along, the mark would be on the worker's side of this too, which must outlive the command.
        environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
        pipe = subprocess.PIPE
        self.ssh = subprocess.Popen(
            ["/usr/bin/ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT}", "--", self.name, script],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            env=environment,
            close_fds=False,
        )
        return self.ssh

    def take(self, number: int, data: bytes) -> bytes:
        """The whole lines that this completes, marked; no data is the end. The first says that the command begins."""
        *lines, rest = (self._rest[number] + data).split(b"\n")
        if rest and (not data or len(rest) > LONGEST):
            lines, rest = [*lines, rest], b""
        self._rest[number] = rest
        if number == 1 and not self.begun and self.mark in lines:
            self.begun = True
            lines.remove(self.mark)
        return b"".join(self.label + line + b"\n" for line in lines)

    def signal(self, number: int) -> None:
        """Hand a signal to the command; a login that is not through is broken off."""
        if self.ssh and self.ssh.stdin and self.begun:
            with contextlib.suppress(OSError, ValueError):
                self.ssh.stdin.write(b"%d\n" % number)
        elif self.ssh:
            self.ssh.kill()


class Everywhere:
    """The command on all nodes."""

    def __init__(self, nodes: list[Node], script: str) -> None:
        self.nodes, self.script = nodes, script
        self.waiting = list(reversed(nodes))
        self.stopped_by = 0
        self._selector = selectors.DefaultSelector()
        self._guard = threading.Lock()

    def run(self) -> None:
        """Log in to one after the other, hand on what they say, and end with the last."""
        logging_in = 0
        while True:
            while logging_in < LOGINS and self.start_next():
                logging_in += 1
            if not self._selector.get_map():
                return
            for key, _ in self._selector.select():
                node, number = key.data
                was_in = node.begun
                data = os.read(key.fd, LONGEST)
                write(sys.stdout.buffer if number == 1 else sys.stderr.buffer, node.take(number, data))
                if not data:
                    self.close(key.fileobj, node)
                if not was_in and (node.begun or node.code is not None):
                    logging_in -= 1

    def start_next(self) -> bool:
        with self._guard:
            if self.stopped_by or not self.waiting:
                return False
            node = self.waiting.pop()
            ssh = node.log_in(self.script)
        for number, stream in ((1, ssh.stdout), (2, ssh.stderr)):
            self._selector.register(stream, selectors.EVENT_READ, (node, number))
        return True

    def close(self, stream: BinaryIO, node: Node) -> None:
        """One of a node's streams has ended; with the second the node has."""
        self._selector.unregister(stream)
        stream.close()
        ssh = node.ssh
        if ssh.stdout.closed and ssh.stderr.closed:
            code = ssh.wait()
            node.code = code if code >= 0 else 128 - code

    def hand_signals_on(self) -> None:
        while True:
            number = signal.sigwait(SIGNALS)
            with self._guard:
                self.stopped_by = number
                for node in self.nodes:
                    node.signal(number)

    def report(self) -> int:
        """Name the nodes that failed; the largest code."""
        stopped = 128 + self.stopped_by if self.stopped_by else 0
        # What was not reached because it was to end is not to blame.
        codes = {node: stopped if stopped and not node.begun else node.code for node in self.nodes}
        for code in sorted(set(codes.values()) - {0, stopped}):
            for begun, what in ((True, f"ended with code {code}"), (False, "not reached")):
                names = [node.name for node in self.nodes if codes[node] == code and node.begun is begun]
                if names:
                    say(f"{what}: {', '.join(names)}")
        return max(codes.values(), default=0)


def write(stream: BinaryIO, data: bytes) -> None:
    if data:
        stream.write(data)
        stream.flush()


def say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
