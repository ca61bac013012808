"""The docker SDK's client of one daemon, bounded in size and time. It takes 0.1 s to load."""

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
from labctl.system import process

LARGEST_ANSWER = 64 << 20
"""Bytes of a daemon's answer, and of what a short program prints."""
LONGEST_EVENT = 1 << 20
CHUNK = 1 << 16
HEADER = struct.Struct(">BxxxL")
"""The stream's number and the length of what follows (Docker Engine API, attach)."""


class Adapter(UnixHTTPAdapter):
    """Keep one connection to a daemon. The SDK keeps one for each path that it asks, and over ssh each is a session."""

    def get_connection(self, url: str | bytes, proxies: Any = None) -> UnixHTTPConnectionPool:  # noqa: ARG002
        return super().get_connection(self.socket_path)


class Client(APIClient):
    """A daemon by an address as DOCKER_HOST has it, in the newest version of its API; so many seconds for an answer."""

    def __init__(self, address: str, seconds: int) -> None:
        local = address.startswith("unix:")
        tls = not local and process.variable("DOCKER_TLS_VERIFY")
        options: dict[str, Any] = dict(kwargs_from_env()) if tls else {"base_url": address}
        super().__init__(version=MINIMUM_DOCKER_API_VERSION, timeout=seconds, **options)
        # The environment's proxies are not for a daemon.
        self.trust_env = False
        if local:
            self.mount("http+docker://", Adapter(address.removeprefix("unix://"), seconds))
        # It answers in 1 ms; to tell all versions takes the daemon 10.
        ping = self.get(f"{self.base_url}/_ping", timeout=seconds)
        ping.raise_for_status()
        if "Api-Version" not in ping.headers:
            raise DockerException(f"{address} is something else")
        self._version = ping.headers["Api-Version"]

    def send(self, request: PreparedRequest, **options: Any) -> Response:
        """As a session of requests; that bounds only the time of each read."""
        answer = super().send(request, **{**options, "stream": True})
        if not options.get("stream"):
            answer.raw.stream = lambda *_, **__: chunks(answer, self.timeout)  # type: ignore[method-assign]
            _ = answer.content
        return answer

    def exec_output(self, exec_id: str, seconds: float) -> tuple[str, str]:
        """Start a program; stdout and stderr once it has ended, TimeoutError if it has not after so many seconds.

        Unlike exec_start, which loses what arrives together with the headers.
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
        """Events as lines, for another thread to read: they end with the block."""
        answer = self._streamed("GET", "/events", params={"filters": json.dumps(filters)}, timeout=None)
        try:
            yield lines(iter(lambda: answer.raw.read1(CHUNK, decode_content=True), b""))
        finally:
            # To close what another thread reads would wait for it.
            with contextlib.suppress(OSError, RuntimeError):
                answer.raw.shutdown()

    def _streamed(self, method: str, path: str, **options: Any) -> Response:
        answer = self.request(method, f"{self.base_url}/v{self.api_version}{path}", stream=True, **options)
        try:
            answer.raise_for_status()
        except exceptions.HTTPError as error:
            create_api_error_from_http_exception(error)
        return answer


def chunks(answer: Response, seconds: float) -> Iterator[bytes]:
    """An answer as it arrives. TimeoutError after once or twice the seconds, DockerException if it is too long."""
    deadline, size, whole = time.monotonic() + seconds, 0, False
    try:
        while chunk := answer.raw.read1(CHUNK, decode_content=True):
            size += len(chunk)
            if size > LARGEST_ANSWER:
                raise DockerException(f"an answer has more than {LARGEST_ANSWER >> 20} MiB")
            if time.monotonic() > deadline:
                raise TimeoutError("timed out")
            yield chunk
        whole = True
    except ReadTimeoutError as error:
        raise TimeoutError("timed out") from error
    finally:
        # The next request takes the connection of one that was read to its end.
        if whole:
            answer.raw.release_conn()
        else:
            answer.raw.close()


def lines(stream: Iterable[bytes]) -> Iterator[bytes]:
    """Lines of a stream, which are events; DockerException for one that is too long."""
    rest = b""
    for chunk in stream:
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > LONGEST_EVENT:
            raise DockerException(f"an event has more than {LONGEST_EVENT >> 20} MiB")
        yield from whole


def first_cause(error: BaseException) -> BaseException:
    """The error that requests and urllib3 have wrapped."""
    while not error.__suppress_context__ or error.__cause__:
        cause = error.__cause__ or error.__context__
        if not isinstance(cause, (HTTPError, HTTPException, OSError)):
            break
        error = cause
    return error
