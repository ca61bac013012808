"""An HTTP API server on this machine, and the web sockets over which programs in its pods answer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import yaml
from kubernetes.stream import ws_client
from websocket import ABNF, WebSocketConnectionClosedException

ERR, ERROR = 2, 3
SUCCESS = (ERROR, b'{"metadata":{},"status":"Success"}')
Answer = tuple[int, bytes]
"""Status and body."""
CUT, SILENT = b"\0cut", b"\0silent"
"""Suffixes of a body: cut the connection after it, or keep it open and send no more."""
Respond = Callable[[str, str], Answer]
"""Method and path, with its query -> the answer."""


def failure(code: int) -> tuple[int, bytes]:
    """Build the frame in which the runtime reports a non-zero exit code."""
    causes = [{"reason": "ExitCode", "message": str(code)}]
    message = f"command terminated with non-zero exit code: exit status {code}"
    status = {"status": "Failure", "message": message, "reason": "NonZeroExitCode", "details": {"causes": causes}}
    return ERROR, json.dumps({"metadata": {}, **status}).encode()


class Frames:
    """Stand-in for the client's WebSocket connection: hands out frames, then is closed, or lost if ``lost``."""

    subprotocol = ws_client.V4_CHANNEL_PROTOCOL

    def __init__(self, frames: tuple[tuple[int, bytes], ...], *, lost: bool = False, silent: bool = False) -> None:
        """Queue these frames; after them the connection closes, breaks if ``lost``, or stays open if ``silent``."""
        self.connected, self.sent = True, list[bytes]()
        self._lost, self._frames = lost, list(frames)
        self.sock, self._far = socket.socketpair()
        # A readable byte announces a frame, the end of file a closed connection.
        self._far.sendall(b"." * len(frames))
        if not silent:
            self.end()

    def recv_data_frame(self, _: bool) -> tuple[int, Any]:
        """Return the next frame; at the end a close, or raise the error of a lost connection."""
        self.sock.recv(1)
        if self._frames:
            channel, data = self._frames.pop(0)
            return ABNF.OPCODE_BINARY, SimpleNamespace(data=bytes([channel]) + data)
        self.connected = False
        if self._lost:
            raise WebSocketConnectionClosedException("Connection to remote host was lost.")
        return ABNF.OPCODE_CLOSE, None

    def send(self, payload: bytes, opcode: int) -> None:  # noqa: ARG002
        """Keep what the client sends in ``sent``."""
        self.sent.append(payload)

    def end(self) -> None:
        """Signal the end of the connection to the client, after the last frame."""
        self._far.sendall(b".")

    def close(self) -> None:
        """Do nothing: the server has already closed the connection."""

    def shutdown(self) -> None:
        """Close both ends of the stand-in's socket."""
        self.connected = False
        self.sock.close()
        self._far.close()


def web_socket(*frames: tuple[int, bytes], **options: bool) -> Any:
    """Return the client's own web socket, fed with these frames: channel and data."""
    with mock.patch.object(ws_client, "create_websocket", return_value=Frames(frames, **options)):
        return ws_client.WSClient(None, "wss://cluster", None, capture_all=False, binary=True)


@contextmanager
def serving(respond: Respond) -> Iterator[str]:
    """Serve ``respond`` over HTTP in the block; yield the URL. A body that ends in CUT breaks off, in SILENT hangs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            """Send the response in chunks; close early, or stay silent, if its body ends in CUT or SILENT."""
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, body = respond(self.command, self.path)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in body.removesuffix(CUT).removesuffix(SILENT).splitlines(keepends=True):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.close_connection = body.endswith((CUT, SILENT))
            if body.endswith(SILENT):
                # Wait until the client hangs up.
                self.rfile.read(1)
            elif not self.close_connection:
                self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def kubeconfig(path: Path, server: str) -> str:
    """Write a kubeconfig for a server, with one context ``here``; return its path."""
    content = {
        "clusters": [{"name": "here", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "current-context": "here",
    }
    path.write_text(yaml.safe_dump(content))
    return str(path)
