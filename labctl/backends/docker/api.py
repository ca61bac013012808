"""Client of a daemon by the docker SDK, bounded in size and time. It takes 0.1 s to load."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Iterable, Iterator
from http.client import HTTPException
from typing import Any

from docker.constants import MINIMUM_DOCKER_API_VERSION
from docker.errors import DockerException, create_api_error_from_http_exception
from docker.transport.unixconn import UnixHTTPAdapter, UnixHTTPConnectionPool
from docker.utils import kwargs_from_env
from requests import PreparedRequest, Response, exceptions
from urllib3.exceptions import HTTPError, ReadTimeoutError

from docker import APIClient
from labctl.system import human, process

LARGEST_ANSWER = 64 << 20
"""Size of a daemon's answer, or of a short program's output, at most, in bytes."""
LONGEST_EVENT = 1 << 20
CHUNK = 1 << 16
HEADER = struct.Struct(">BxxxL")
"""Header of a frame: number of the stream, length of the frame (Docker Engine API, attach)."""


class Adapter(UnixHTTPAdapter):
    """Adapter that keeps one connection to a daemon: the SDK keeps one per path, and over ssh each is a session."""

    def get_connection(self, url: str | bytes, proxies: Any = None) -> UnixHTTPConnectionPool:  # noqa: ARG002
        """Return the connections of the daemon, whatever the path."""
        return super().get_connection(self.socket_path)


class Client(APIClient):
    """Client of the daemon at an address as in DOCKER_HOST, by its newest API, with a time limit per answer."""

    def __init__(self, address: str, seconds: int) -> None:
        """Connect to a daemon, and ping it for its API version. DockerException if another server answers."""
        local = address.startswith("unix:")
        tls = not local and process.variable("DOCKER_TLS_VERIFY")
        options: dict[str, Any] = dict(kwargs_from_env()) if tls else {"base_url": address}
        super().__init__(version=MINIMUM_DOCKER_API_VERSION, timeout=seconds, **options)
        # The environment's proxies do not apply to a daemon.
        self.trust_env = False
        if local:
            self.mount("http+docker://", Adapter(address.removeprefix("unix://"), seconds))
        # A ping takes 1 ms, a request of all versions 10.
        ping = self.get(f"{self.base_url}/_ping", timeout=seconds)
        ping.raise_for_status()
        if "Api-Version" not in ping.headers:
            raise DockerException(f"{address} is not a Docker Engine")
        self._version = ping.headers["Api-Version"]

    def send(self, request: PreparedRequest, **options: Any) -> Response:
        """Send as a session of requests, but limit the time of the whole answer, not of each read."""
        answer = super().send(request, **{**options, "stream": True})
        if not options.get("stream"):
            answer.raw.stream = lambda *_, **__: chunks(answer, self.timeout)  # type: ignore[method-assign]
            _ = answer.content
        return answer

    def exec_output(self, exec_id: str, seconds: float) -> tuple[str, str]:
        """Start a program, and return its stdout and stderr. TimeoutError if it has not ended after ``seconds``.

        exec_start would lose output that arrives together with the headers.
        """
        try:
            answer = self._streamed("POST", f"/exec/{exec_id}/start", json={"Tty": False}, timeout=seconds)
        except exceptions.ReadTimeout as error:
            raise TimeoutError("timed out") from error
        frames = b"".join(chunks(answer, seconds))
        printed = {1: bytearray(), 2: bytearray()}
        place = 0
        while place + HEADER.size <= len(frames):
            stream, size = HEADER.unpack_from(frames, place)
            place += HEADER.size
            printed[stream] += frames[place : place + size]
            place += size
        return printed[1].decode(errors="replace"), printed[2].decode(errors="replace")

    @contextlib.contextmanager
    def event_lines(self, **filters: list[str]) -> Iterator[Iterator[bytes]]:
        """Yield an iterator of the daemon's events as lines, for another thread; it ends when the block is left."""
        answer = self._streamed("GET", "/events", params={"filters": json.dumps(filters)}, timeout=None)
        try:
            yield lines(iter(lambda: answer.raw.read1(CHUNK, decode_content=True), b""))
        finally:
            # Closing would wait for the thread that reads.
            with contextlib.suppress(OSError, RuntimeError):
                answer.raw.shutdown()

    def _streamed(self, method: str, path: str, **options: Any) -> Response:
        """Send a request; return the response with its content unread. APIError if the daemon refuses it."""
        answer = self.request(method, f"{self.base_url}/v{self.api_version}{path}", stream=True, **options)
        try:
            answer.raise_for_status()
        except exceptions.HTTPError as error:
            create_api_error_from_http_exception(error)
        return answer


def chunks(answer: Response, seconds: float) -> Iterator[bytes]:
    """Yield a response as it arrives. TimeoutError after one or two times ``seconds``, DockerException if too big."""
    deadline, size, whole = time.monotonic() + seconds, 0, False
    try:
        while chunk := answer.raw.read1(CHUNK, decode_content=True):
            size += len(chunk)
            if size > LARGEST_ANSWER:
                raise DockerException(f"an answer has more than {human.memory(LARGEST_ANSWER)}")
            if time.monotonic() > deadline:
                raise TimeoutError("timed out")
            yield chunk
        whole = True
    except ReadTimeoutError as error:
        raise TimeoutError("timed out") from error
    finally:
        # After a whole answer the next request can use the connection.
        if whole:
            answer.raw.release_conn()
        else:
            answer.raw.close()


def lines(stream: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the complete lines of a stream, without line breaks. DockerException for one above LONGEST_EVENT."""
    rest = b""
    for chunk in stream:
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > LONGEST_EVENT:
            raise DockerException(f"an event has more than {human.memory(LONGEST_EVENT)}")
        yield from whole


def first_cause(error: BaseException) -> BaseException:
    """Follow an error's causes as long as they are HTTP errors or OSErrors; return the last, or the error itself."""
    while not error.__suppress_context__ or error.__cause__:
        cause = error.__cause__ or error.__context__
        if not isinstance(cause, (HTTPError, HTTPException, OSError)):
            break
        error = cause
    return error
