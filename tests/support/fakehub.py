"""A Hugging Face hub on a local port: the requests that a download makes, and settings for its failures."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REVISION = "08ab08cc4b72ff5593870b5d527cf4230323703c"
LARGE = 100_000
"""Size in bytes from which a file is stored with LFS."""

Files = dict[str, bytes]


@dataclass(frozen=True)
class Request:
    """A request as the hub received it."""

    method: str
    path: str
    first: int
    """Offset of the first byte requested."""
    token: str | None


@dataclass
class FakeHub:
    """The hub's repositories, the requests received, and settings for failures."""

    models: dict[str, Files] = field(default_factory=dict)
    datasets: dict[str, Files] = field(default_factory=dict)
    token: str | None = None
    """Token that every request must carry; None for public access."""
    ranges: bool = True
    break_after: int | None = None
    """Bytes of the next large file to send before the connection is cut."""
    hold_after: int | None = None
    """Bytes of the next large file to send before waiting for ``go``."""
    spoil: bool = False
    """Send wrong content for large files."""
    claims: int | None = None
    """Wrong size to announce for large files."""
    lies: dict[str, Any] = field(default_factory=dict)
    """Wrong fields to announce for the first file, and for the repository (``sha``)."""
    storage: str | None = None
    """Endpoint that requests for large files are redirected to."""
    asked: list[Request] = field(default_factory=list)
    holding: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    endpoint: str = ""

    def fetched(self, name: str) -> list[Request]:
        """List the GET requests for files of that name."""
        return [request for request in self.asked if request.method == "GET" and request.path.endswith(f"/{name}")]


@contextmanager
def serving(hub: FakeHub, address: str = "127.0.0.1") -> Iterator[FakeHub]:
    """Serve the hub on a local port within the block, with the port's URL as its ``endpoint``."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer((address, 0), handler) as server:
        server.daemon_threads = True
        hub.endpoint = f"http://{address}:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.go.set()
            server.shutdown()
            thread.join()


def blob_of(content: bytes) -> str:
    """Return the SHA-256 of a large file, or the git object id of a small file."""
    if len(content) >= LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Do not log."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        """Answer a request about a repository or a file; 401 or 403 for a wrong token, 404 if unknown."""
        # A proxy request has a full URL.
        path = unquote(urlsplit(self.path).path)
        first = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.hub.asked.append(Request(self.command, path, first, token))
        if self.hub.token and token != self.hub.token:
            self.send(401 if token is None else 403, b"{}")
            return
        for prefix, shelf in (("datasets", self.hub.datasets), ("models", self.hub.models)):
            for name, files in shelf.items():
                if path.startswith(f"/api/{prefix}/{name}"):
                    self.describe(path.removeprefix(f"/api/{prefix}/{name}"), name, files)
                    return
                where = f"/{'datasets/' if prefix == 'datasets' else ''}{name}/resolve/{REVISION}/"
                if path.startswith(where) and path.removeprefix(where) in files:
                    self.deliver(files[path.removeprefix(where)], first)
                    return
        self.send(404, b"{}")

    def describe(self, rest: str, name: str, files: Files) -> None:
        """Send a repository's description, with the ``lies`` if any, or for /tree/ the list of its files."""

        def entry(content: bytes, **names: Any) -> dict[str, Any]:
            """Return the description of a file: its size, and of a large one its LFS data."""
            if len(content) < LARGE:
                return {**names, "size": len(content)}
            size = self.hub.claims or len(content)
            lfs = {"sha256": blob_of(content), "oid": blob_of(content), "size": size, "pointerSize": 132}
            return {**names, "size": size, "lfs": lfs}

        if rest.startswith("/tree/"):
            listing = [entry(content, type="file", path=path, oid=blob_of(content)) for path, content in files.items()]
            self.send(200, json.dumps(listing).encode())
            return
        siblings = [entry(content, rfilename=path, blobId=blob_of(content)) for path, content in sorted(files.items())]
        lies = {key: value for key, value in self.hub.lies.items() if key != "sha"}
        siblings[0] = {**siblings[0], **lies}
        about = {
            "id": name,
            "sha": self.hub.lies.get("sha", REVISION),
            "siblings": siblings,
            "tags": [],
            "private": False,
            "downloads": 0,
        }
        self.send(200, json.dumps(about).encode())

    def deliver(self, content: bytes, first: int) -> None:
        """Send a file, of a large one the part from ``first`` on if ``ranges``, or redirect to ``storage``."""
        headers = {"ETag": f'"{blob_of(content)}"', "X-Repo-Commit": REVISION}
        if len(content) < LARGE or self.command == "HEAD":
            self.send(200, content, headers)
        elif self.hub.storage:
            self.send(302, b"", {**headers, "Location": f"{self.hub.storage}{self.path}"})
        elif first and self.hub.ranges:
            span = {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"}
            self.send(206, content[first:], {**headers, **span})
        else:
            self.send(200, content, headers)

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send a response; the body of a large file goes through ``misbehave``."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if len(body) >= LARGE:
            body = self.misbehave(body)
        self.wfile.write(body)

    def misbehave(self, body: bytes) -> bytes:
        """Return the body to send: as it is, zeros, cut, or the rest after a part was sent and ``go`` is set."""
        hub = self.hub
        if hub.spoil:
            return bytes(len(body))
        if hub.break_after is not None:
            body, hub.break_after = body[: hub.break_after], None
            self.close_connection = True
        elif hub.hold_after is not None:
            self.wfile.write(body[: hub.hold_after])
            body, hub.hold_after = body[hub.hold_after :], None
            hub.holding.set()
            hub.go.wait(30)
        return body
