"""A Unix socket here, each of whose connections is the input and output of a program of its own."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from labctl import pipes

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
        pipes.bridge(self.server.argv, self.request.fileno(), self.server.gate, SHORT)
