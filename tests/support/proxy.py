"""A TCP proxy that a test can cut and restore."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """A local port that forwards to a server, unless the proxy is down."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on a free local port and forward its connections to the server in a thread."""
        self._server = (host, port)
        self._open: set[socket.socket] = set()
        self.down = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close all connections, and refuse new ones."""
        self.down = True
        for connection in [*self._open]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def restore(self) -> None:
        """Accept connections again."""
        self.down = False

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        """Accept connections and carry each in both directions; while ``down``, close it at once."""
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self.down:
                    near.close()
                    continue
                far = socket.create_connection(self._server)
                self._open |= {near, far}
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        """Copy bytes until the source ends, then shut both sockets down."""
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open -= {source}
        # The thread of the other direction closes the socket that it reads from.
        source.close()
