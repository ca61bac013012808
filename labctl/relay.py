"""A loopback port of this host, relayed to a Unix socket: bytes only, so that websockets pass too."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

from labctl.errors import HostError

LOOPBACK = "127.0.0.1"
CHUNK = 1 << 16


class Relay(socketserver.ThreadingTCPServer):
    """Listens from the start; relays while it is served."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, target: Path) -> None:
        self.target = target
        super().__init__((LOOPBACK, port), _Connection)


class _Connection(socketserver.BaseRequestHandler):
    server: Relay

    def handle(self) -> None:
        with contextlib.suppress(OSError), connected(self.server.target) as inner:
            back = threading.Thread(target=pump, args=(inner, self.request), daemon=True)
            back.start()
            pump(self.request, inner)
            back.join()


def pump(source: socket.socket, sink: socket.socket) -> None:
    """Bytes from one to the other until the first says that it is done; the second is told so."""
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    """A connection to a Unix socket, by its directory's descriptor: its path may be longer than such addresses are."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.connect(f"/proc/self/fd/{folder}/{path.name}")
            yield made
    finally:
        os.close(folder)


def answers(path: Path) -> bool:
    """Whether somebody listens on a Unix socket."""
    try:
        with connected(path):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def relaying(ports: range, target: Path) -> Iterator[int]:
    """Relay the first free port to the socket; HostError when none is free."""
    with _first_free(ports, target) as relay:
        threading.Thread(target=relay.serve_forever, daemon=True).start()
        try:
            yield relay.server_address[1]
        finally:
            relay.shutdown()


def _first_free(ports: range, target: Path) -> Relay:
    for port in ports:
        try:
            return Relay(port, target)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise HostError(f"cannot listen on {LOOPBACK}:{port}: {error.strerror}") from error
            refused = error.strerror
    tried = f"port {ports[0]}" if len(ports) == 1 else f"any port from {ports[0]} to {ports[-1]}"
    raise HostError(f"cannot listen on {tried} of {LOOPBACK}: {refused}", hint="labctl jupyter --port PORT")
