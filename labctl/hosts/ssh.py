"""The ssh process behind a connection to a host: it logs in, and what goes to that host goes through it."""

from __future__ import annotations

import errno
import itertools
import math
import random
import re
import secrets
import shlex
import shutil
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from labctl.config.inventory import InventoryHost
from labctl.errors import HostError
from labctl.hosts import ssh_errors
from labctl.hosts.ssh_errors import destination
from labctl.system import process
from labctl.system.parallel import WIDTH, pool
from labctl.system.process import CompletedProcess
from labctl.system.progress import listed

# Seconds after which a connection is taken for one that stays, as those to events and to what runs in a container do.
SHORT = 5


class Dialer(socketserver.ThreadingUnixStreamServer):
    """Listens from the start, until it is closed.

    A connection is served within the gate until it proves to stay: one of few, that must not keep others waiting.
    """

    daemon_threads = True
    block_on_close = False
    # Who comes to a Unix socket whose queue is full is turned away, and compose comes once for each node, all at once.
    request_queue_size = 1024

    def __init__(self, path: Path, argv: Sequence[str], gate: AbstractContextManager[object]) -> None:
        self.path = path
        self.argv = argv
        self.gate = gate
        super().__init__(str(path), _Dialled)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Dialled(socketserver.BaseRequestHandler):
    server: Dialer

    def handle(self) -> None:
        process.bridge(self.server.argv, self.request.fileno(), self.server.gate, SHORT)


# Seconds before another try at a host whose sshd hung up before the login.
PAUSES = (0.2, 0.4, 0.8, 1.6, 3.2)
# Seconds for a login of its own that a script may need. When a host falls silent ssh sees it after eight, and a script
# that had just begun tries this before it gives up.
AGAIN = 5
# What the person's own config may say of commands, forwarding and multiplexing is not meant for these.
_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes", "-o", "ConnectionAttempts=1", "-o", "ServerAliveInterval=2"),
    *("-o", "ServerAliveCountMax=3", "-o", "ClearAllForwardings=yes", "-o", "ForwardAgent=no", "-o", "ForwardX11=no"),
    *("-o", "RemoteCommand=none", "-o", "PermitLocalCommand=no", "-o", "ControlPersist=no"),
)
# Words: a mark, the engine's socket, the caller's script. `cat` ends with its input, and with it the connection.
_OPENING = """
state=ready user=$(id -un 2>/dev/null)
[ -S "$2" ] || command -v docker >/dev/null 2>&1 || state=absent
[ ! -S "$2" ] || [ -w "$2" ] || state=denied
printf '\\n%s\\n' "$1"
sh -c "$3" </dev/null
printf '\\n%s %s %s %s\\n' "$1" "$?" "$state" "${user:-somebody}"
exec cat >/dev/null
"""


class ControlMaster:
    """Nothing is opened yet. Its files begin with ``stem``, a short path; ssh tries for so many seconds."""

    def __init__(self, target: InventoryHost, stem: str, patience: float) -> None:
        self.target = target
        self._control, self._errors, self._number = f"{stem}.ctl", Path(f"{stem}.err"), Path(f"{stem}.pid")
        self._ssh = ("ssh", *_OPTIONS, *ssh_errors.options(target))
        self._patience = math.ceil(patience)
        through = ("-o", "LogLevel=ERROR", "-o", "ControlMaster=no", "-S", self._control)
        self.client = (*self._ssh, "-o", f"ConnectTimeout={AGAIN}", *through)
        """The ssh command that goes through here; where sshd takes no further session it logs in by itself."""
        self._master: process.BackgroundProcess | None = None
        self._greeting = ""
        self._closing = threading.Event()

    def open(self, opening: str, seconds: float) -> str:
        """Log in and run the opening script; returns what that printed. HostError, after so many seconds at most."""
        deadline = time.monotonic() + seconds
        pauses = iter(PAUSES)
        refused: HostError | None = None
        while True:
            try:
                return self._greeted(opening, deadline - time.monotonic())
            except HostError as error:
                # A last try may have had next to no time: why the one before failed says more.
                if refused and time.monotonic() >= deadline:
                    raise refused from error
                # Others may be at the door too, as where one gate leads to all hosts.
                wait = next(pauses, math.inf) * random.uniform(0.5, 1.5)  # noqa: S311 - so that not all come back at once
                late = time.monotonic() + wait > deadline
                if late or not ssh_errors.passing(self.said()) or self._closing.wait(wait):
                    raise
                refused = error

    def forward(self, path: str, here: Path, seconds: float) -> None:
        """Make a socket here that leads to that of this path on the host. HostError names the host."""
        words = ("ssh", "-F", "none", "-S", self._control, "-O", "forward", "-L", f"{here}:{path}", "host")
        try:
            done = process.run(words, timeout=seconds, check=False)
        except process.ProcessTimeout as error:
            raise ssh_errors.silent(self.target, seconds) from error
        if done.code != 0:
            said = done.err.strip() or f"code {done.code}"
            raise ssh_errors.error(self.target, f"its socket {path} cannot be forwarded: {said}")

    def said(self) -> str:
        """What this ssh said on its standard error."""
        return self._errors.read_text(encoding="utf-8", errors="replace") if self._errors.exists() else ""

    def said_since(self) -> str:
        """What it said after it had logged in: not the banner of the host's sshd, nor what scripts say at login."""
        return self.said().removeprefix(self._greeting)

    def lost(self, seconds: float = 0) -> bool:
        """Whether it has ended, or does within so many seconds."""
        return self._master is None or self._master.ended(seconds)

    def close(self) -> None:
        """End it, with whatever still goes through."""
        self._closing.set()
        if self._master:
            self._master.end()

    def _greeted(self, opening: str, seconds: float) -> str:
        mark = secrets.token_hex(8)
        command = remote(_OPENING, (mark, self.target.docker, opening))
        waiting = ("-o", f"ConnectTimeout={self._patience}", "-o", "LogLevel=INFO")
        shared = ("-o", "ControlMaster=yes", "-S", self._control)
        words = (*self._ssh, *waiting, *shared, "--", destination(self.target), command)
        self._master = process.BackgroundProcess(words, self._errors)
        self._number.write_text(f"{self._master.number}\n", encoding="ascii")
        try:
            told, end = self._told(self._master, mark, seconds)
            self._judge(*end)
            self._greeting = self.said()
        except BaseException:
            self._master.end()
            raise
        return told

    def _told(self, master: process.BackgroundProcess, mark: str, seconds: float) -> tuple[str, list[str]]:
        """What the opening script printed, and the words that come after it."""
        began = time.monotonic()
        # What the login itself prints comes before the mark.
        before: list[str] = []
        told: list[str] | None = None
        with closing(master.lines(seconds)) as lines:
            for line in lines:
                if told is None and line == f"{mark}\n":
                    if noise := "".join(before).strip():
                        raise ssh_errors.talkative(self.target, noise)
                    told = []
                elif told is not None and line.startswith(f"{mark} "):
                    return "".join(told).removesuffix("\n"), line.split(maxsplit=3)[1:]
                else:
                    (before if told is None else told).append(line)
        if time.monotonic() - began >= seconds:
            raise ssh_errors.silent(self.target, seconds)
        raise ssh_errors.why(self.target, self.said() or "".join(before))

    def _judge(self, code: str, engine: str, user: str) -> None:
        """HostError if the host cannot be used, by the code of the opening script and what was seen of the engine."""
        path, user = self.target.docker, user.rstrip()
        if ssh_errors.distrusted(self.said()):
            raise ssh_errors.why(self.target, self.said())
        if code != "0":
            last = "\n".join(self.said().rstrip().splitlines()[-5:])
            raise ssh_errors.error(self.target, f"cannot say what it has: code {code}\n{last}".rstrip())
        if engine == "absent":
            hint = f"`labctl setup` there installs it; or say `docker=` in {self.target.where or 'the inventory'}"
            text = f"has no Docker Engine: neither {path} nor a docker command; without it a host cannot have nodes"
            raise ssh_errors.error(self.target, text, hint)
        if engine == "denied":
            hint = f"{ssh_errors.command(self.target, '-t')} sudo usermod -aG docker {shlex.quote(shlex.quote(user))}"
            raise ssh_errors.error(self.target, f"{user} may not use {path}", hint)


def remote(script: str, words: Sequence[str]) -> str:
    """A command line for the login shell over there, whichever it is: it starts a POSIX one that speaks English."""
    return " ".join(("exec env LC_ALL=C sh -c", *(_quoted(word) for word in (script, "sh", *words))))


def _quoted(word: str) -> str:
    # To fish a backslash between single quotes is a sign; between double quotes two are one to every shell.
    return "'" + re.sub(r"['\\]+", lambda found: _between_double_quotes(found[0]), word) + "'"


def _between_double_quotes(signs: str) -> str:
    doubled = signs.replace("\\", "\\\\")
    return f"'\"{doubled}\"'"


# With the link's own, and those that sshd has not quite closed yet: below the ten of its MaxSessions.
SESSIONS = 6
# Should it still take no further session, ssh says this, logs in by itself and goes on.
_REFUSED = re.compile(r"^mux_client_request_session: session request failed: .*\n?", re.MULTILINE)
# Seconds that each host is given at least, however many there are, and after which a person is told of those that wait.
PATIENCE = 3
# Its links' files lie in this directory. One that still dials hears of nothing; its number may be another's by now.
_ENDING = """
for path in "$1"/*.ctl; do ssh -F none -S "$path" -O exit host; done
for path in "$1"/*.pid; do
    read -r pid <"$path" && grep -qF "$1/" "/proc/$pid/cmdline" && kill -TERM "-$pid"
done
rm -rf "$1"
"""


class Connection:
    """A connection to a host; it ends with the block of ``connected``, or with this process however that ends."""

    def __init__(self, target: InventoryHost, stem: str, patience: float) -> None:
        """Nothing is opened yet. Its files here begin with ``stem``, a short path; ssh tries for so many seconds."""
        self.target = target
        self.told = ""
        """What the opening script printed."""
        self.told_at = 0.0
        """When it had printed all that, by this machine's clock, in seconds since 1970."""
        self.address = ""
        """Where the host's engine is reached from here, for DOCKER_HOST and the SDK's ``base_url``."""
        self._stem = stem
        self._link = ControlMaster(target, stem, patience)
        self._sessions = threading.BoundedSemaphore(SESSIONS)
        self._numbers = itertools.count()
        self._dialer: Dialer | None = None

    def open(self, opening: str, seconds: float) -> None:
        """Log in, run the opening script, find the engine. HostError, after so many seconds at most."""
        deadline = time.monotonic() + seconds
        self.told = self._link.open(opening, seconds)
        self.told_at = time.time()
        self.address = f"unix://{self._engine(max(0.1, deadline - time.monotonic()))}"

    def close(self) -> None:
        """End it, with whatever still goes over it."""
        self._link.close()
        if self._dialer:
            self._dialer.close()

    def argv(self, script: str, *words: str) -> tuple[str, ...]:
        """The ssh command that runs ``sh -c script sh words...`` on the host over this connection."""
        return (*self._link.client, "--", ssh_errors.destination(self.target), remote(script, words))

    def run(
        self,
        script: str,
        *words: str,
        input: str | None = None,  # noqa: A002 - subprocess's own name for it
        timeout: float = 60,
        check: bool = True,
    ) -> CompletedProcess:
        """Run a script on the host to its end.

        At most six at a time, others wait. HostError names the host: not done in time (it may still go on
        over there), the connection lost and, with ``check``, a code other than 0.
        """
        argv = self.argv(script, *words)
        return self._done(script, lambda: process.run(argv, input=input, timeout=timeout, check=False), timeout, check)

    def send(
        self, script: str, *words: str, chunks: Iterable[bytes], timeout: float, check: bool = True
    ) -> CompletedProcess:
        """As ``run``, with these bytes for the script's input.

        To the script an input that was cut off looks like one that ended: it must know by itself what is whole.
        """
        argv = self.argv(script, *words)
        return self._done(script, lambda: process.feed(argv, chunks, timeout=timeout), timeout, check)

    def receive(
        self, script: str, *words: str, on_chunk: Callable[[bytes], object], timeout: float, check: bool = True
    ) -> CompletedProcess:
        """As ``run``, handing on the bytes that the script prints; ``out`` of what returns is empty."""
        argv = self.argv(script, *words)
        return self._done(script, lambda: process.drain(argv, on_chunk, timeout=timeout), timeout, check)

    def forward(self, path: str, seconds: float = 10) -> Path:
        """A socket here that leads to the Unix socket of this path on the host, where its sshd allows that."""
        here = Path(f"{self._stem}-{next(self._numbers)}.sock")
        self._link.forward(path, here, seconds)
        return here

    def _engine(self, seconds: float) -> Path:
        """The engine's socket, forwarded, or where sshd forbids that, one that a docker command on the host serves."""
        path = self.target.docker
        forwarded = self.forward(path, seconds)
        if _leads_on(forwarded, min(seconds, PATIENCE)):
            return forwarded
        asked = 'docker --host "unix://$1" version --format "{{.Server.Version}}"'
        if self.run(asked, path, timeout=seconds, check=False).code != 0:
            # Nobody listens over there: that is for whoever asks the engine to say.
            return forwarded
        served = Path(f"{self._stem}-dial.sock")
        dial = self.argv('exec docker --host "unix://$1" system dial-stdio', path)
        self._dialer = Dialer(served, dial, self._sessions)
        return served

    def _done(self, script: str, work: Callable[[], CompletedProcess], seconds: float, check: bool) -> CompletedProcess:
        what = script.strip().removeprefix("#!/bin/sh\n").removeprefix("# ").partition("\n")[0][:60]
        with self._sessions:
            if self._link.lost():
                raise self._lost("")
            try:
                done = work()
            except process.ProcessTimeout as error:
                told = ssh_errors.error(self.target, f"`{what}` is not done within {seconds:.3g} s")
                raise process.ProcessTimeout(told.message, hint=told.hint, node=told.node) from error
        done = replace(done, err=_REFUSED.sub("", done.err))
        # The code may be ssh's own, or the script's.
        if done.code == 255 and self._link.lost(1):
            raise self._lost(done.err)
        if check and done.code != 0:
            last = "\n".join((done.err or done.out).rstrip().splitlines()[-20:])
            raise ssh_errors.error(self.target, f"`{what}` ended with code {done.code}\n{last}".rstrip())
        return done

    def why_lost(self) -> str:
        """What ssh said of the connection if it has ended, or does within a second; empty while it stands."""
        return self._lost("").message if self._link.lost(1) else ""

    def _lost(self, said: str) -> HostError:
        why = "\n".join((self._link.said_since() or said).strip().splitlines()[-5:])
        return ssh_errors.error(self.target, f"the connection was lost{f': {why}' if why else ''}")


@contextmanager
def connected(
    targets: Sequence[InventoryHost],
    opening: str,
    *,
    seconds: float,
    bound: int = WIDTH,
    waits: Callable[[str], object] = len,
) -> Iterator[tuple[dict[str, Connection], dict[str, HostError]]]:
    """Connections to the hosts that answer within so many seconds, and why the others do not; both by name, in order.

    ``opening`` is a POSIX sh script that each host runs at once. At most ``bound`` hosts are asked at a time; where
    there are more, a host that does not answer is left before it uses up the time of those behind it. ``waits`` is told
    once who makes the others wait. HostError where there is no ssh here.
    """
    if not shutil.which("ssh"):
        raise HostError("this machine has no ssh, and hosts are reached by it", hint="apt-get install openssh-client")
    deadline = time.monotonic() + seconds
    patience = min(seconds, max(PATIENCE, seconds / math.ceil(max(1, len(targets)) / bound)))
    with (
        _private_directory() as folder,
        process.guarded(("sh", "-c", _ENDING, "sh", str(folder))),
        pool(bound) as threads,
    ):
        links = [Connection(target, f"{folder}/{number}", patience) for number, target in enumerate(targets)]
        try:
            trials = [threads.submit(_tried, link, opening, patience, deadline) for link in links]
            late = wait(trials, PATIENCE).not_done
            if slow := [ssh_errors.named(one) for one, trial in zip(targets, trials, strict=True) if trial in late]:
                waits(f"waiting for {listed(slow)}")
            errors = [trial.result() for trial in trials]
            found = [(link.target.name, link, error) for link, error in zip(links, errors, strict=True)]
            yield (
                {name: link for name, link, error in found if error is None},
                {name: error for name, _, error in found if error is not None},
            )
        finally:
            for link in links:
                link.close()


def _tried(link: Connection, opening: str, patience: float, deadline: float) -> HostError | None:
    """Open it; why not, where that fails."""
    seconds = min(patience, deadline - time.monotonic())
    if seconds <= 0:
        return ssh_errors.untried(link.target)
    try:
        link.open(opening, seconds)
    except HostError as error:
        link.close()
        return error
    except OSError as error:
        link.close()
        hint = "ulimit -n 8192" if error.errno == errno.EMFILE else f"df -h {tempfile.gettempdir()}; labctl doctor"
        return ssh_errors.error(link.target, f"cannot be asked from here: {error.strerror}", hint)
    return None


@contextmanager
def _private_directory() -> Iterator[Path]:
    """A new directory with a short path: sockets have addresses of at most 107 bytes, and ssh adds 17 for a while."""
    usual = tempfile.gettempdir()
    base = usual if re.fullmatch(r"[\w/.-]{1,50}", usual, re.ASCII) else "/tmp"  # noqa: S108 - the name within is random
    path = Path(tempfile.mkdtemp(prefix="labctl-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _leads_on(path: Path, seconds: float) -> bool:
    """Whether what is sent into the socket arrives: where sshd forbids forwarding it hangs up at once."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(seconds)
        try:
            asking.connect(str(path))
            asking.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return asking.recv(1) != b""
        except TimeoutError:
            return True
        except OSError:
            return False
