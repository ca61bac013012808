"""Ports of the server."""

from __future__ import annotations

import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from labctl.config.context import Context
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_server_as_an_exception_so_that_its_files_are_removed(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / ".env").write_text("LAB_NAME=demo\n")
    site = server.new_site(Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={}))
    with server.listen(None) as listener:

        def end() -> None:
            """Send the signal once the server answers: before, its default would end the tests."""
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(f"http://127.0.0.1:{listener.getsockname()[1]}/")
            os.kill(os.getpid(), number)

        threading.Thread(target=end).start()
        with pytest.raises(KeyboardInterrupt):
            server.serve(site, listener)
