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
# when the launcher's side dies in any way. The shell stays, or the code of a command that a signal ended would be lost,
# and has no word of its own about such a command: its code is told anyway.
REMOTE = """
echo {mark}
cd -- {directory} || exit
exec 3<&0 < /dev/null
{{
    while read -ru 3 number; do {agent} signal {mark} "$number"; done
    kill -0 $$ && exec {agent} reap {mark} 2
}} > /dev/null 2>&1 &
exec 4>&2 2> /dev/null
({variable}={mark} exec -- {command} 2>&4 3<&- 4>&-)
exit
"""
LOST = "not reached"
CONFIG = Path("/home/lab/.ssh/config")
STDOUT, STDERR = 1, 2
OUTPUTS = {STDOUT: sys.stdout.buffer, STDERR: sys.stderr.buffer}
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
        directory=shlex.quote(str(Path.cwd())),
        agent=AGENT,
        command=" ".join(map(shlex.quote, command)),
    )
    everywhere = Everywhere(nodes, script, mark)
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


class Session:
    """The command on one worker: the ssh session that it runs in."""

    def __init__(self, name: str, script: str, mark: str) -> None:
        self.begun = False
        self._label, self._mark = f"{name}: ".encode(), mark.encode()
        self._rest = {STDOUT: b"", STDERR: b""}
        # Sent along, the mark would be on the worker's side of this too, which must outlive the command.
        environment = {key: value for key, value in os.environ.items() if key != RUN_VARIABLE}
        pipe = subprocess.PIPE
        self.ssh = subprocess.Popen(
            ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT}", "--", name, script],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            env=environment,
            close_fds=False,
        )
        assert self.ssh.stdin
        assert self.ssh.stdout
        assert self.ssh.stderr
        self._stdin = self.ssh.stdin
        self.streams = {STDOUT: self.ssh.stdout, STDERR: self.ssh.stderr}

    def take(self, number: int, data: bytes) -> bytes:
        """The lines that this completes, each marked; no data is the end. The first says that the command begins."""
        *lines, rest = (self._rest[number] + data).split(b"\n")
        if rest and (not data or len(rest) > LONGEST):
            lines, rest = [*lines, rest], b""
        self._rest[number] = rest
        if number == STDOUT and not self.begun and self._mark in lines:
            self.begun = True
            lines.remove(self._mark)
        return b"".join(self._label + line + b"\n" for line in lines)

    def signal(self, number: int) -> None:
        """Hand a signal to the command; a login that is not through is broken off."""
        if not self.begun:
            self.ssh.kill()
            return
        # One that has ended reads nothing more, and may be closed.
        with contextlib.suppress(OSError, ValueError):
            self._stdin.write(b"%d\n" % number)

    def code(self) -> int:
        """The command's exit code, 255 where ssh failed; waits for it."""
        code = self.ssh.wait()
        self._stdin.close()
        return code if code >= 0 else 128 - code


class Everywhere:
    """The command on all nodes. A thread hands signals on: one that waits for a slow reader to take lines could not."""

    def __init__(self, nodes: list[str], script: str, mark: str) -> None:
        self._waiting = list(reversed(nodes))
        self._script, self._mark = script, mark
        self._sessions: dict[str, Session] = {}
        self._codes: dict[str, int] = {}
        self._stopped_by = 0
        self._selector = selectors.DefaultSelector()
        self._guard = threading.Lock()

    def run(self) -> None:
        """Log in to one after the other and hand on what they say, until the last has ended."""
        threading.Thread(target=self._hand_signals_on, daemon=True).start()
        logging_in = 0
        while True:
            while logging_in < LOGINS and self._start_next():
                logging_in += 1
            if not self._selector.get_map():
                return
            for key, _ in self._selector.select():
                name, number = key.data
                session = self._sessions[name]
                before = session.begun
                data = os.read(key.fd, LONGEST)
                write(OUTPUTS[number], session.take(number, data))
                if not data:
                    self._close(name, number)
                if not before and (session.begun or name in self._codes):
                    logging_in -= 1

    def _start_next(self) -> bool:
        with self._guard:
            if self._stopped_by or not self._waiting:
                return False
            name = self._waiting.pop()
            session = self._sessions[name] = Session(name, self._script, self._mark)
        for number, stream in session.streams.items():
            self._selector.register(stream, selectors.EVENT_READ, (name, number))
        return True

    def _close(self, name: str, number: int) -> None:
        """One of a node's streams has ended; with the second the command has."""
        session = self._sessions[name]
        stream = session.streams.pop(number)
        self._selector.unregister(stream)
        stream.close()
        if not session.streams:
            self._codes[name] = session.code()

    def _hand_signals_on(self) -> None:
        while True:
            number = signal.sigwait(SIGNALS)
            with self._guard:
                self._stopped_by = number
                for session in self._sessions.values():
                    session.signal(number)

    def report(self) -> int:
        """Name the nodes that failed; the largest code. A node that a signal kept from beginning has that signal's."""
        failed: dict[str, list[str]] = {}
        stopped = 128 + self._stopped_by if self._stopped_by else 0
        for name in sorted(self._codes, key=in_order):
            begun = self._sessions[name].begun
            if stopped and not begun:
                self._codes[name] = stopped
            if self._codes[name] not in (0, stopped):
                what = f"ended with code {self._codes[name]}" if begun else LOST
                failed.setdefault(what, []).append(name)
        for what, names in failed.items():
            say(f"{what}: {', '.join(names)}")
        if unreached := failed.get(LOST):
            say(f"hint: labctl doctor --node {unreached[0]}")
        return max([*self._codes.values(), stopped if self._waiting else 0])


def in_order(name: str) -> tuple[str, int]:
    """Workers by number."""
    stem, _, number = name.rpartition("-")
    return stem, int(number) if number.isdigit() else 0


def write(stream: BinaryIO, data: bytes) -> None:
    if data:
        stream.write(data)
        stream.flush()


def say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
