"""Run a command on many workers at once, over ssh from the launcher, for `labctl exec --all`.

labctl passes this text to the launcher's Python and sets a run id. Standard library only, Python >= 3.8:

    NODES COMMAND...    NODES separated by commas; empty for all nodes of the launcher's ssh config

Each line of output has the name of its node as prefix. The exit code is the largest exit code of the nodes.
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
# Concurrent logins. Sessions that have logged in do not count, so the command runs on all nodes at once.
LOGINS = 64
# Timeout of a login in seconds: all of them share the cores of this machine.
CONNECT = 30
# Bytes. Longer lines are split.
LONGEST = 1 << 16
# Open files per node, and those that this program needs otherwise.
FILES_PER_NODE, FILES = 3, 32
# The script on a worker. The loop forwards signals from stdin. It ends the command if stdin closes first, as it does
# when the launcher's side dies in any way. The command runs in a subshell, so that the shell returns its exit code also
# if a signal ends it. The shell's own message about that is discarded.
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


def main(names: str, *command: str) -> NoReturn:
    """Run the command on the named nodes, or on all if `names` is empty; exit with their largest exit code."""
    # Before the first thread: threads and ssh processes inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    nodes = choose_nodes(names)
    raise_file_limit(len(nodes))
    mark = os.environ[RUN_VARIABLE]
    script = REMOTE.format(
        mark=mark,
        variable=RUN_VARIABLE,
        directory=shlex.quote(str(Path.cwd())),
        agent=AGENT,
        command=" ".join(map(shlex.quote, command)),
    )
    fanout = Fanout(nodes, script, mark)
    fanout.run()
    sys.exit(fanout.report())


def choose_nodes(names: str) -> list[str]:
    """Return the named nodes without duplicates, or all of the ssh config; exit with code 2 if one is unknown."""
    workers = re.findall(r"^Host (?!\*)(\S+)", CONFIG.read_text(), re.MULTILINE)
    nodes = list(dict.fromkeys(filter(None, names.split(",")))) or workers
    for name in nodes:
        if name not in workers:
            print_error(f"error: the lab has no worker `{name}`", f"hint: it has {workers[0]} to {workers[-1]}")
            sys.exit(2)
    return nodes


def raise_file_limit(nodes: int) -> None:
    """Raise the limit of open files to its maximum; exit with code 3 if this many nodes need more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_PER_NODE * nodes + FILES
    if most != resource.RLIM_INFINITY and most < needed:
        print_error(
            f"error: {nodes} nodes at once need {needed} open files, and a process here may have {most}",
            "hint: name fewer nodes with -n; `labctl doctor` has the command that raises the limit",
        )
        sys.exit(3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Session:
    """An ssh session that runs the command on a worker."""

    def __init__(self, name: str, script: str, mark: str) -> None:
        """Start ssh to the worker with the script, without the run id in its environment."""
        self.begun = False
        self._label, self._mark = f"{name}: ".encode(), mark.encode()
        self._rest = {STDOUT: b"", STDERR: b""}
        # ssh must not send the run id: the script on the worker would have it too, and must outlive the command.
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

    def add(self, number: int, data: bytes) -> bytes:
        """Return the lines of a stream that the data completes, each with its prefix; empty data ends the stream.

        The script's first line, the run id, is left out: it shows that the command begins.
        """
        *lines, rest = (self._rest[number] + data).split(b"\n")
        if rest and (not data or len(rest) > LONGEST):
            lines, rest = [*lines, rest], b""
        self._rest[number] = rest
        if number == STDOUT and not self.begun and self._mark in lines:
            self.begun = True
            lines.remove(self._mark)
        return b"".join(self._label + line + b"\n" for line in lines)

    def signal(self, number: int) -> None:
        """Send a signal's number to the script on the worker, or kill ssh if the command has not begun."""
        if not self.begun:
            self.ssh.kill()
            return
        # A session that has ended reads nothing, and its stdin may be closed.
        with contextlib.suppress(OSError, ValueError):
            self._stdin.write(b"%d\n" % number)

    def exit_code(self) -> int:
        """Wait for ssh and return the command's exit code; 255 if ssh failed, 128 + N if signal N ended ssh."""
        code = self.ssh.wait()
        self._stdin.close()
        return code if code >= 0 else 128 - code


class Fanout:
    """The command on all nodes.

    A thread of its own forwards signals: the main thread blocks while a slow reader takes the output.
    """

    def __init__(self, nodes: list[str], script: str, mark: str) -> None:
        """Keep the nodes to start, in order, without starting any session."""
        self._pending = list(reversed(nodes))
        self._script, self._mark = script, mark
        self._sessions: dict[str, Session] = {}
        self._codes: dict[str, int] = {}
        self._stopped_by = 0
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Start a session per node, at most 64 logins at once; print all output until the last session has ended."""
        threading.Thread(target=self._forward_signals, daemon=True).start()
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
                write(OUTPUTS[number], session.add(number, data))
                if not data:
                    self._close(name, number)
                if not before and (session.begun or name in self._codes):
                    logging_in -= 1

    def _start_next(self) -> bool:
        """Start the next node's session and watch its output; return False if no node is left or a signal came."""
        with self._lock:
            if self._stopped_by or not self._pending:
                return False
            name = self._pending.pop()
            session = self._sessions[name] = Session(name, self._script, self._mark)
        for number, stream in session.streams.items():
            self._selector.register(stream, selectors.EVENT_READ, (name, number))
        return True

    def _close(self, name: str, number: int) -> None:
        """Close a stream of a node; after its second stream, wait for ssh and record the exit code."""
        session = self._sessions[name]
        stream = session.streams.pop(number)
        self._selector.unregister(stream)
        stream.close()
        if not session.streams:
            self._codes[name] = session.exit_code()

    def _forward_signals(self) -> None:
        """Wait for signals forever; forward each to all sessions, and start no more of them."""
        while True:
            number = signal.sigwait(SIGNALS)
            with self._lock:
                self._stopped_by = number
                for session in self._sessions.values():
                    session.signal(number)

    def report(self) -> int:
        """Print the nodes that failed or were not reached to stderr; return the largest exit code.

        A node on which a signal came before the command has the exit code of that signal.
        """
        failed: dict[str, list[str]] = {}
        stopped = 128 + self._stopped_by if self._stopped_by else 0
        for name in sorted(self._codes, key=node_order):
            begun = self._sessions[name].begun
            if stopped and not begun:
                self._codes[name] = stopped
            if self._codes[name] not in (0, stopped):
                error = f"ended with code {self._codes[name]}" if begun else LOST
                failed.setdefault(error, []).append(name)
        for error, names in failed.items():
            print_error(f"{error}: {', '.join(names)}")
        if unreached := failed.get(LOST):
            print_error(f"hint: labctl doctor --node {unreached[0]}")
        return max([*self._codes.values(), stopped if self._pending else 0])


def node_order(name: str) -> tuple[str, int]:
    """Return the sort key of a node: its name before the last hyphen, then the number after it, or 0."""
    prefix, _, number = name.rpartition("-")
    return prefix, int(number) if number.isdigit() else 0


def write(stream: BinaryIO, data: bytes) -> None:
    if data:
        stream.write(data)
        stream.flush()


def print_error(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
