"""One ssh connection per host for the time of a command: scripts, bytes and the engine's socket all go over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from labctl.errors import HostError
from labctl.hosts import Target
from labctl.shell import Completed


class Connection:
    """An open connection to a host; it ends with the block of ``connected``, or with this process."""

    target: Target
    told: str
    """What the opening script printed."""
    address: str
    """Where the host's engine is reached from here, for DOCKER_HOST and the SDK's ``base_url``."""

    def argv(self, script: str, *words: str) -> tuple[str, ...]:
        """The ssh command that runs ``sh -c script sh words...`` on the host over this connection."""
        raise NotImplementedError

    def run(
        self,
        script: str,
        *words: str,
        input: str | None = None,  # noqa: A002
        timeout: float = 60,
        check: bool = True,
    ) -> Completed:
        """Run a script on the host to its end. HostError, which names the host, as ``shell.run`` says."""
        raise NotImplementedError

    def send(self, script: str, *words: str, chunks: Iterable[bytes], timeout: float, check: bool = True) -> Completed:
        """As ``run``, with these bytes for the script's input."""
        raise NotImplementedError

    def receive(
        self, script: str, *words: str, on_chunk: Callable[[bytes], object], timeout: float, check: bool = True
    ) -> Completed:
        """As ``run``, handing on the bytes that the script prints; ``out`` of what returns is empty."""
        raise NotImplementedError

    def rsh(self) -> str:
        """The command for ``rsync -e``: over this connection, whatever host it is given."""
        raise NotImplementedError

    def forward(self, socket: str) -> Path:
        """A socket here that leads to the Unix socket of this path on the host. HostError where sshd forbids it."""
        raise NotImplementedError


@contextmanager
def connected(
    targets: Sequence[Target], opening: str, *, seconds: float, bound: int = 32
) -> Iterator[tuple[dict[str, Connection], dict[str, HostError]]]:
    """Connections to the hosts that answer within so many seconds, and why the others do not; both by name, in order.

    ``opening`` is a POSIX sh script that each host runs at once; at most ``bound`` hosts are asked at a time.
    """
    if targets:
        raise NotImplementedError(opening, seconds, bound)
    yield {}, {}
