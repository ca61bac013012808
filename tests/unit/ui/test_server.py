"""Ports of the server."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from starlette.responses import StreamingResponse

from labctl.errors import HostError
from labctl.ui import server


@pytest.fixture
def taken() -> socket.socket:
    """Return a socket that listens on a free port of 127.0.0.1."""
    return socket.create_server((server.LOOPBACK, 0))


def test_a_port_that_is_in_use_is_named(taken: socket.socket) -> None:
    number = taken.getsockname()[1]
    with taken, pytest.raises(HostError, match=f"cannot listen on port {number} of 127.0.0.1: Address already in use"):
        server.listening(number)


def test_without_a_port_the_first_free_one_is_taken(taken: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    first = taken.getsockname()[1]
    monkeypatch.setattr(server, "PORTS", (first, 0))
    with taken, server.listening(None) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert listener.getsockname()[1] != first


def test_answers_that_last_end_with_the_server() -> None:
    """As if the browser had left: what they hold is given back."""
    seen: list[str] = []

    async def beats() -> AsyncIterator[str]:
        """Yield without end."""
        try:
            while True:
                yield "beat"
                await anyio.sleep(0.01)
        finally:
            seen.append("given back")

    async def receive() -> Any:
        """Wait for a browser that stays."""
        await anyio.sleep_forever()

    async def ask() -> None:
        """Ask for a stream, and end the server after its first piece."""
        closing = anyio.Event()

        async def send(message: Any) -> None:
            """Keep what is sent."""
            seen.append(message["type"])
            if message.get("body"):
                closing.set()

        with anyio.fail_after(30):
            await server.until(closing, StreamingResponse(beats()))({"type": "http"}, receive, send)

    anyio.run(ask)
    body = "http.response.body"
    assert (seen[0], seen[-2:]) == ("http.response.start", ["given back", body])
