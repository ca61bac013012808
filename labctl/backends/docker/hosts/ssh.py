"""Connections to hosts, over ssh or to this machine: they run scripts and reach the Docker Engine."""

from __future__ import annotations

import errno
import itertools
import math
import os
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
from contextlib import closing, contextmanager
from pathlib import Path

from msgspec.structs import replace

from labctl.backends.docker.hosts import ssh_errors
from labctl.config.inventory import InventoryHost
from labctl.errors import HostError
from labctl.model import HERE
from labctl.system import human, process
from labctl.system.parallel import WIDTH, pool
from labctl.system.process import CompletedProcess

SESSIONS = 6
"""Parallel scripts per connection: with the master's and closing sessions below sshd's MaxSessions 10."""
SHORT = 5
"""Seconds after which a connection to the engine counts as long-lived, as for events and exec sessions."""
RETRIES = (0.2, 0.4, 0.8, 1.6, 3.2)
"""Seconds before each retry, if sshd closed the connection before login."""
LOGIN = 5
"""Timeout in seconds if a script needs a login of its own: ssh notices after 6 s that a host is silent."""
PATIENCE = 3
"""Minimum seconds for each host, whatever their number; afterwards the slow hosts are reported."""

# Overrides commands, forwarding and multiplexing in the user's ssh config.
_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes", "-o", "ConnectionAttempts=1", "-o", "ServerAliveInterval=1"),
    *("-o", "ServerAliveCountMax=5", "-o", "ClearAllForwardings=yes", "-o", "ForwardAgent=no", "-o", "ForwardX11=no"),
    *("-o", "RemoteCommand=none", "-o", "PermitLocalCommand=no", "-o", "ControlPersist=no"),
)
# $1: a marker, $2: the engine's socket, $3: the caller's script. `cat` keeps the session open until its input ends.
_OPENING = """
state=ready user=$(id -un 2>/dev/null)
[ -S "$2" ] || command -v docker >/dev/null 2>&1 || state=absent
[ ! -S "$2" ] || [ -w "$2" ] || state=denied
printf '\\n%s\\n' "$1"
sh -c "$3" </dev/null
printf '\\n%s %s %s %s\\n' "$1" "$?" "$state" "${user:-the user}"
exec cat >/dev/null
"""
# $1: the directory with the files of all connections. A pid may have been reused: its command line must name $1.
_CLEANUP = """
for path in "$1"/*.ctl; do ssh -F none -S "$path" -O exit host; done
for path in "$1"/*.pid; do
    read -r pid <"$path" && grep -qF "$1/" "/proc/$pid/cmdline" && kill -TERM "-$pid"
done
rm -rf "$1"
"""
LARGEST_ANSWER = 64 << 20
"""Maximum bytes of a script's output."""
# Bytes to read from the beginning and from the end of ssh's output.
ENDS = 1 << 16
# Message of ssh if sshd accepts no further session; it then logs in separately and continues.
_NO_SESSION = re.compile(r"^mux_client_request_session: session request failed: .*\n?", re.MULTILINE)


class Answer:
    """Collects a script's output; HostError if it exceeds ``LARGEST_ANSWER``."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._pieces, self._size = connection, list[bytes](), 0

    def add(self, piece: bytes) -> None:
        """Append a piece of output. HostError if it then exceeds LARGEST_ANSWER."""
        self._size += len(piece)
        if self._size > LARGEST_ANSWER:
            raise self._connection.error(f"answered with more than {human.memory(LARGEST_ANSWER)}")
        self._pieces.append(piece)

    def content(self) -> bytes:
        return b"".join(self._pieces)

    def text(self) -> str:
        return self.content().decode("utf-8", "replace")


class Connection:
    """Runs POSIX sh scripts on a host."""

    target: InventoryHost
    made = 1
    """Number of times that it was established."""
    address = ""
    """DOCKER_HOST of its engine; empty for the default of this machine's environment."""

    def argv(self, script: str, *arguments: str) -> tuple[str, ...]:
        """Return the command that runs ``sh -c script sh arguments...`` on the host."""
        raise NotImplementedError

    def run(
        self,
        script: str,
        *arguments: str,
        input: str | None = None,  # noqa: A002 - subprocess's own name for it
        timeout: float = 60,
        check: bool = True,
    ) -> CompletedProcess:
        """Run a POSIX sh script; return output and exit code. HostError on timeout or, if ``check``, failure.

        After a timeout it may still run. HostError also if the connection is lost. Over ssh at most six scripts
        run at a time, others wait.
        """
        argv = self.argv(script, *arguments)

        def work() -> CompletedProcess:
            """Run the command with or without input. HostError if output without input is too long."""
            if input is not None:
                return process.run(argv, input=input, timeout=timeout, check=False)
            answer = Answer(self)
            done = process.drain(argv, answer.add, timeout=timeout)
            return replace(done, out=answer.text())

        return self._done(script, work, timeout, check)

    def send(self, script: str, *arguments: str, chunks: Iterable[bytes], timeout: float) -> CompletedProcess:
        """Run a script with these chunks as its input; return its result. HostError on timeout or if cut off.

        The script must detect an incomplete input, as ssh may be cut off.
        """
        argv = self.argv(script, *arguments)
        return self._done(script, lambda: process.feed(argv, chunks, timeout=timeout), timeout)

    def receive(
        self, script: str, *arguments: str, on_chunk: Callable[[bytes], object], timeout: float
    ) -> CompletedProcess:
        """Run a script, pass its output to ``on_chunk``; return the result with ``out`` empty."""
        argv = self.argv(script, *arguments)
        return self._done(script, lambda: process.drain(argv, on_chunk, timeout=timeout), timeout)

    def why_lost(self) -> str:
        """Return why the connection has ended, or ends within a second; empty if it stands.

        Waits if another thread reconnects.
        """
        return ""

    @property
    def closed(self) -> bool:
        """True if labctl itself has ended the connection."""
        return False

    def reconnect(self, seconds: float) -> None:
        """Reconnect within ``seconds`` if the connection has ended. HostError if that fails."""

    def error(self, text: str) -> HostError:
        """Return a HostError of this host with a text."""
        return HostError(text, hint="labctl doctor")

    def _done(
        self, script: str, work: Callable[[], CompletedProcess], seconds: float, check: bool = False
    ) -> CompletedProcess:
        """Do the work; raise HostError with the script's name on timeout or, if ``check``, on failure."""
        title = script.strip().removeprefix("# ").partition("\n")[0][:60]
        try:
            done = self._perform(work)
        except process.ProcessTimeout as error:
            late = self.error(f"`{title}` timed out after {human.duration(seconds)}")
            raise process.ProcessTimeout(late.message, hint=late.hint, node=late.node) from error
        if check and done.code != 0:
            last = "\n".join((done.err or done.out).rstrip().splitlines()[-20:])
            raise self.error(f"`{title}` failed with exit code {done.code}\n{last}".rstrip())
        return done

    def _perform(self, work: Callable[[], CompletedProcess]) -> CompletedProcess:
        return work()


class LocalConnection(Connection):
    """Runs scripts on this machine."""

    target = InventoryHost(name=HERE)

    def argv(self, script: str, *arguments: str) -> tuple[str, ...]:
        return ("sh", "-c", script, "sh", *arguments)


class SshConnection(Connection):
    """A connection through an ssh master process, which logs in once (ControlMaster).

    Scripts and the engine's socket share it. It ends with the block of ``connected``, or with this process, however
    that ends.
    """

    def __init__(self, target: InventoryHost, stem: str, patience: float) -> None:
        """Open nothing yet. Local files begin with ``stem``, a short path; ssh tries for ``patience`` seconds."""
        self.target = target
        self.output, self.output_at = "", 0.0
        """Output of the opening script, and the time of its end, in seconds since 1970."""
        self._stem, self._control, self._log = stem, f"{stem}.ctl", Path(f"{stem}.err")
        self._ssh = ("ssh", *_OPTIONS, *ssh_errors.options(target))
        self._patience = math.ceil(patience)
        self._master: process.BackgroundProcess | None = None
        self._banner = ""
        self._closing = threading.Event()
        self._opening = threading.Lock()
        self._sessions = threading.BoundedSemaphore(SESSIONS)
        self._numbers = itertools.count()
        self._relay: EngineRelay | None = None

    def open(self, opening: str, seconds: float) -> None:
        """Log in; keep the opening script's output and a local socket of the engine. HostError on failure."""
        deadline = time.monotonic() + seconds
        self.output = self._log_in(opening, deadline)
        self.output_at = time.time()
        self.address = f"unix://{self._engine(max(0.1, deadline - time.monotonic()))}"

    def close(self) -> None:
        """End the connection, with everything that uses it."""
        self._closing.set()
        self._end_master()
        if self._relay:
            self._relay.close()

    def _end_master(self) -> None:
        if self._master:
            self._master.end()

    def reconnect(self, seconds: float) -> None:
        """Log in again if the connection has ended, at the same socket. HostError if it fails or is closed."""
        with self._opening:
            if not self._ended():
                return
            if self._closing.is_set():
                raise self._lost("")
            # A killed master leaves its socket.
            Path(self._control).unlink(missing_ok=True)
            self._start(":", seconds)
            try:
                if not self._relay:
                    self._forward(Path(self.address.removeprefix("unix://")), self.target.docker, seconds)
            except HostError:
                self._end_master()
                raise
            self.made += 1
            if self._closing.is_set():
                self._end_master()

    def argv(self, script: str, *arguments: str) -> tuple[str, ...]:
        mux = ("-o", f"ConnectTimeout={LOGIN}", "-o", "LogLevel=ERROR", "-o", "ControlMaster=no", "-S", self._control)
        return (*self._ssh, *mux, "--", ssh_errors.destination(self.target), remote(script, arguments))

    def forward(self, path: str, seconds: float = 10) -> Path:
        """Return a new local socket forwarded to a Unix socket of the host. HostError if ssh fails."""
        return self._forward(Path(f"{self._stem}-{next(self._numbers)}.sock"), path, seconds)

    def _forward(self, local: Path, path: str, seconds: float) -> Path:
        """Forward a local socket to a Unix socket of the host; return its path. HostError if that fails."""
        local.unlink(missing_ok=True)
        argv = ("ssh", "-F", "none", "-S", self._control, "-O", "forward", "-L", f"{local}:{path}", "host")
        try:
            done = process.run(argv, timeout=seconds, check=False)
        except process.ProcessTimeout as error:
            raise ssh_errors.silent(self.target, seconds) from error
        if done.code != 0:
            raise self.error(f"cannot forward its socket {path}: {done.err.strip() or f'exit code {done.code}'}")
        return local

    @property
    def closed(self) -> bool:
        """True once `close` was called; a connection that broke is not closed."""
        return self._closing.is_set()

    def why_lost(self) -> str:
        with self._opening:
            return self._lost("").message if self._ended(1) else ""

    def error(self, text: str) -> HostError:
        return ssh_errors.error(self.target, text)

    def _perform(self, work: Callable[[], CompletedProcess]) -> CompletedProcess:
        """Wait for a free ssh session, and run the work in it. HostError if the connection is lost."""
        with self._sessions:
            if self._ended():
                raise self._lost("")
            done = work()
        done = replace(done, err=_NO_SESSION.sub("", done.err))
        # 255 may be ssh's own code, or the script's.
        if done.code == 255 and self._ended(1):
            raise self._lost(done.err)
        return done

    def _ended(self, seconds: float = 0) -> bool:
        return self._master is None or self._master.ended(seconds)

    def _lost(self, stderr: str) -> HostError:
        """Return the HostError of a lost connection, with ssh's last five lines of output."""
        why = "\n".join((self._stderr().removeprefix(self._banner) or stderr).strip().splitlines()[-5:])
        return self.error(f"the connection was lost{f': {why}' if why else ''}")

    def _stderr(self) -> str:
        """Return the beginning and the end of the ssh master's error output; empty if there is none."""
        if not self._log.exists():
            return ""
        with self._log.open("rb") as log:
            text = log.read(ENDS)
            if (more := log.seek(0, os.SEEK_END) - ENDS) > 0:
                log.seek(-min(more, ENDS), os.SEEK_END)
                text += log.read()
        return ssh_errors.excerpt(text.decode("utf-8", "replace"))

    def _log_in(self, opening: str, deadline: float) -> str:
        """Start the master, retry transient errors until ``deadline``; return the script's output. Else HostError."""
        pauses = iter(RETRIES)
        earlier: HostError | None = None
        while True:
            try:
                return self._start(opening, deadline - time.monotonic())
            except HostError as error:
                # The last try may have had hardly any time: the error before it is more informative.
                if earlier and time.monotonic() >= deadline:
                    raise earlier from error
                # Random, so that connections through one gateway do not all retry at once.
                pause = next(pauses, math.inf) * random.uniform(0.5, 1.5)  # noqa: S311
                late = time.monotonic() + pause > deadline
                if late or not ssh_errors.is_transient(self._stderr()) or self._closing.wait(pause):
                    raise
                earlier = error

    def _start(self, opening: str, seconds: float) -> str:
        """Start an ssh master that runs the opening script; return the output. HostError if unusable."""
        marker = secrets.token_hex(8)
        argv = (
            *self._ssh,
            *("-o", f"ConnectTimeout={self._patience}", "-o", "LogLevel=INFO", "-o", "ControlMaster=yes"),
            *("-S", self._control, "--", ssh_errors.destination(self.target)),
            remote(_OPENING, (marker, self.target.docker, opening)),
        )
        self._end_master()
        self._master = process.BackgroundProcess(argv, self._log)
        Path(f"{self._stem}.pid").write_text(f"{self._master.number}\n", encoding="ascii")
        try:
            output, (code, engine, user) = self._read(self._master, marker, seconds)
            self._require_usable(code, engine, user.rstrip())
        except BaseException:
            self._end_master()
            raise
        self._banner = self._stderr()
        return output

    def _read(self, master: process.BackgroundProcess, marker: str, seconds: float) -> tuple[str, list[str]]:
        """Return the opening script's output and the end line's fields. HostError if not in time."""
        began = time.monotonic()
        # Output of the login shell comes before the marker.
        parts: list[list[str]] = [[]]
        answer = Answer(self)
        with closing(master.lines(seconds)) as lines:
            for line in lines:
                answer.add(line.encode())
                if len(parts) == 1 and line == f"{marker}\n":
                    if noise := "".join(parts[0]).strip():
                        raise ssh_errors.noisy_shell(self.target, noise)
                    parts.append([])
                elif len(parts) == 2 and (end := re.fullmatch(rf"{marker} (\S+) (\S+) (.*)\n", line)):
                    return "".join(parts[1]).removesuffix("\n"), list(end.groups())
                else:
                    parts[-1].append(line)
        if time.monotonic() - began >= seconds:
            raise ssh_errors.silent(self.target, seconds)
        raise ssh_errors.why(self.target, self._stderr() or "".join(parts[0]))

    def _require_usable(self, code: str, engine: str, user: str) -> None:
        """Raise HostError for a changed host key, a failed script, or an unusable engine."""
        path, stderr = self.target.docker, self._stderr()
        if ssh_errors.distrusted(stderr):
            raise ssh_errors.why(self.target, stderr)
        if code != "0":
            last = "\n".join(stderr.rstrip().splitlines()[-5:])
            raise self.error(f"collecting facts failed (exit code {code})\n{last}".rstrip())
        if engine == "absent":
            hint = f"`labctl setup` there installs it; or set `docker=` in {self.target.where or 'the inventory'}"
            raise ssh_errors.error(self.target, f"Docker Engine not found (no {path}, no docker command)", hint)
        if engine == "denied":
            hint = f"{ssh_errors.command(self.target, '-t')} sudo usermod -aG docker {shlex.quote(shlex.quote(user))}"
            raise ssh_errors.error(self.target, f"{user} may not use {path}", hint)

    def _engine(self, seconds: float) -> Path:
        """Return a local socket of the engine: forwarded, or a relay by `docker system dial-stdio`."""
        path = self.target.docker
        forwarded = self.forward(path, seconds)
        if _answers(forwarded, min(seconds, PATIENCE)):
            return forwarded
        version = 'docker --host "unix://$1" version --format "{{.Server.Version}}"'
        if self.run(version, path, timeout=seconds, check=False).code != 0:
            # No engine listens: its first caller reports that.
            return forwarded
        dial = self.argv('exec docker --host "unix://$1" system dial-stdio', path)
        self._relay = EngineRelay(Path(f"{self._stem}-dial.sock"), dial, self._sessions)
        return self._relay.path


class EngineRelay(socketserver.ThreadingUnixStreamServer):
    """A local socket that runs a process for each of its connections, until ``close``.

    Holds a session slot for the first 5 s only, so that long-lived connections do not block short ones.
    """

    daemon_threads = True
    block_on_close = False
    # A Unix socket refuses connections once its backlog is full, and compose makes one for each node, all at once.
    request_queue_size = 1024

    def __init__(self, path: Path, argv: Sequence[str], sessions: threading.Semaphore) -> None:
        self.path, self.argv, self.sessions = path, argv, sessions
        super().__init__(str(path), _RelayHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _RelayHandler(socketserver.BaseRequestHandler):
    server: EngineRelay

    def handle(self) -> None:
        process.bridge(self.server.argv, self.request.fileno(), self.server.sessions, SHORT)


@contextmanager
def connected(
    targets: Sequence[InventoryHost],
    opening: str,
    *,
    seconds: float,
    bound: int = WIDTH,
    waits: Callable[[str], object] = len,
) -> Iterator[tuple[dict[str, SshConnection], dict[str, HostError]]]:
    """Connect to hosts by ssh during the block; yield connections and errors by name; ``waits`` gets slow hosts.

    ``opening`` is a POSIX sh script that each host runs first. At most ``bound`` hosts are tried at a time; with more
    hosts each gets a share of ``seconds``, so that silent hosts leave time for the rest. ``waits`` is called once with
    the slow hosts.
    """
    if not shutil.which("ssh"):
        raise HostError("ssh client not found", hint="apt-get install openssh-client")
    deadline = time.monotonic() + seconds
    patience = min(seconds, max(PATIENCE, seconds / math.ceil(max(1, len(targets)) / bound)))
    with (
        _private_directory() as folder,
        process.guarded(("sh", "-c", _CLEANUP, "sh", folder)),
        pool(bound) as threads,
    ):
        links = [SshConnection(target, f"{folder}/{number}", patience) for number, target in enumerate(targets)]
        try:
            trials = [threads.submit(_try_open, link, opening, patience, deadline) for link in links]
            late = wait(trials, PATIENCE).not_done
            paired = list(zip(links, trials, strict=True))
            if slow := [ssh_errors.named(link.target) for link, trial in paired if trial in late]:
                waits(f"waiting for {human.listed(slow)}")
            results = {link.target.name: trial.result() for link, trial in paired}
            errors = {name: error for name, error in results.items() if error}
            yield {link.target.name: link for link in links if link.target.name not in errors}, errors
        finally:
            for link in links:
                link.close()


def _try_open(link: SshConnection, opening: str, patience: float, deadline: float) -> HostError | None:
    """Open a connection; return None, or on failure close it and return the HostError."""
    seconds = min(patience, deadline - time.monotonic())
    if seconds <= 0:
        return ssh_errors.error(link.target, "skipped: the time limit was used up by other hosts")
    try:
        link.open(opening, seconds)
    except HostError as error:
        failure = error
    except OSError as error:
        hint = "ulimit -n 8192" if error.errno == errno.EMFILE else f"df -h {tempfile.gettempdir()}; labctl doctor"
        failure = ssh_errors.error(link.target, f"cannot start ssh: {error.strerror}", hint)
    else:
        return None
    link.close()
    return failure


def _private_directory() -> tempfile.TemporaryDirectory[str]:
    """Create a temporary directory with a short path, as socket addresses have at most 107 bytes."""
    usual = tempfile.gettempdir()
    base = usual if re.fullmatch(r"[\w/.-]{1,50}", usual, re.ASCII) else "/tmp"  # noqa: S108 - the name within is random
    return tempfile.TemporaryDirectory(prefix="labctl-", dir=base, ignore_cleanup_errors=True)


def _answers(path: Path, seconds: float) -> bool:
    """Return True if a forwarded socket answers or is slow, False if it hangs up, as if sshd forbids it."""
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


def remote(script: str, arguments: Sequence[str]) -> str:
    """Return a command line for any login shell that runs a script by POSIX sh, with messages in English."""
    return " ".join(("exec env LC_ALL=C sh -c", *(_quoted(word) for word in (script, "sh", *arguments))))


def _quoted(word: str) -> str:
    """Return a word quoted for every login shell, fish included."""
    # fish treats `\` inside single quotes as an escape, so backslashes go in double quotes, doubled.
    return "'" + re.sub(r"['\\]+", lambda match: "'\"" + match[0].replace("\\", "\\\\") + "\"'", word) + "'"
