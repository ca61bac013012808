"""One ssh connection per host for the time of a command: scripts, bytes and the engine's socket all go over it."""

from __future__ import annotations

import errno
import itertools
import math
import re
import shlex
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from labctl import pipes, shell, ssh_words
from labctl.dialing import Dialer
from labctl.errors import HostError
from labctl.hosts import Target
from labctl.link import Link, remote
from labctl.progress import listed
from labctl.shell import Completed
from labctl.side_by_side import WIDTH, pool

# With the link's own, one for rsync, and those that sshd has not quite closed yet: below the ten of its MaxSessions.
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

    def __init__(self, target: Target, stem: str, patience: float) -> None:
        """Nothing is opened yet. Its files here begin with ``stem``, a short path; ssh tries for so many seconds."""
        self.target = target
        self.told = ""
        """What the opening script printed."""
        self.told_at = 0.0
        """When it had printed all that, by this machine's clock, in seconds since 1970."""
        self.address = ""
        """Where the host's engine is reached from here, for DOCKER_HOST and the SDK's ``base_url``."""
        self._stem = stem
        self._link = Link(target, stem, patience)
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
        return (*self._link.client, "--", ssh_words.destination(self.target), remote(script, words))

    def run(
        self,
        script: str,
        *words: str,
        input: str | None = None,  # noqa: A002 - subprocess's own name for it
        timeout: float = 60,
        check: bool = True,
    ) -> Completed:
        """Run a script on the host to its end.

        At most six at a time, others wait. HostError names the host: not done in time (it may still go on
        over there), the connection lost and, with ``check``, a code other than 0.
        """
        argv = self.argv(script, *words)
        return self._done(script, lambda: shell.run(argv, input=input, timeout=timeout, check=False), timeout, check)

    def send(self, script: str, *words: str, chunks: Iterable[bytes], timeout: float, check: bool = True) -> Completed:
        """As ``run``, with these bytes for the script's input.

        To the script an input that was cut off looks like one that ended: it must know by itself what is whole.
        """
        argv = self.argv(script, *words)
        return self._done(script, lambda: pipes.feed(argv, chunks, timeout=timeout), timeout, check)

    def receive(
        self, script: str, *words: str, on_chunk: Callable[[bytes], object], timeout: float, check: bool = True
    ) -> Completed:
        """As ``run``, handing on the bytes that the script prints; ``out`` of what returns is empty."""
        argv = self.argv(script, *words)
        return self._done(script, lambda: pipes.drain(argv, on_chunk, timeout=timeout), timeout, check)

    def rsh(self) -> str:
        """The command for ``rsync -e``: over this connection, whatever host it is given."""
        return shlex.join(self._link.client)

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

    def _done(self, script: str, work: Callable[[], Completed], seconds: float, check: bool) -> Completed:
        what = script.strip().partition("\n")[0][:60]
        with self._sessions:
            if self._link.lost():
                raise self._lost("")
            try:
                done = work()
            except shell.OutOfTime as error:
                told = ssh_words.error(self.target, f"`{what}` is not done within {seconds:.3g} s")
                raise shell.OutOfTime(told.message, hint=told.hint, node=told.node) from error
        done = replace(done, err=_REFUSED.sub("", done.err))
        # The code may be ssh's own, or the script's.
        if done.code == 255 and self._link.lost(1):
            raise self._lost(done.err)
        if check and done.code != 0:
            last = "\n".join((done.err or done.out).rstrip().splitlines()[-20:])
            raise ssh_words.error(self.target, f"`{what}` ended with code {done.code}\n{last}".rstrip())
        return done

    def why_lost(self) -> str:
        """What ssh said of the connection if it has ended, or does within a second; empty while it stands."""
        return self._lost("").message if self._link.lost(1) else ""

    def _lost(self, said: str) -> HostError:
        why = "\n".join((self._link.said_since() or said).strip().splitlines()[-5:])
        return ssh_words.error(self.target, f"the connection was lost{f': {why}' if why else ''}")


@contextmanager
def connected(
    targets: Sequence[Target],
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
        shell.guarded(("sh", "-c", _ENDING, "sh", str(folder))),
        pool(bound) as threads,
    ):
        links = [Connection(target, f"{folder}/{number}", patience) for number, target in enumerate(targets)]
        try:
            trials = [threads.submit(_tried, link, opening, patience, deadline) for link in links]
            late = wait(trials, PATIENCE).not_done
            if slow := [ssh_words.named(one) for one, trial in zip(targets, trials, strict=True) if trial in late]:
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
        return ssh_words.untried(link.target)
    try:
        link.open(opening, seconds)
    except HostError as error:
        link.close()
        return error
    except OSError as error:
        link.close()
        hint = "ulimit -n 8192" if error.errno == errno.EMFILE else f"df -h {tempfile.gettempdir()}; labctl doctor"
        return ssh_words.error(link.target, f"cannot be asked from here: {error.strerror}", hint)
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
