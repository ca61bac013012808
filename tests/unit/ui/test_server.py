"""Ports of the server."""

from __future__ import annotations

import socket

import pytest

from labctl.errors import HostError
from labctl.ui import server


@pytest.fixture
def taken() -> socket.socket:
    """Return a socket that listens on a free port of 127.0.0.1."""
    return socket.create_server((server.LOOPBACK, 0))


def test_a_port_that_is_in_use_is_named(taken: socket.socket) -> None:
    number = taken.getsockname()[1]
    with taken, pytest.raises(HostError, match=f"cannot listen on port {number} of 127.0.0.1: Address already in use"):
        server.listen(number)


def test_without_a_port_the_first_free_one_is_taken(taken: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    first = taken.getsockname()[1]
    monkeypatch.setattr(server, "PORTS", (first, 0))
    with taken, server.listen(None) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert listener.getsockname()[1] != first
