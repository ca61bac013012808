"""The relay from a loopback port to a Unix socket."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from support.harness import free_port

from labctl.backends import spec
from labctl.backends.docker.attach import jupyter
from labctl.errors import HostError

LIMIT = 60.0


@contextmanager
def echo(path: Path) -> Iterator[None]:
    """Run a server on this Unix socket that sends back all it received once its peer has finished sending."""
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(path.parent, os.O_PATH)
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
        server.listen()

        def serve() -> None:
            """Accept one connection after another and send back what it sent; return when the server is shut down."""
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer, peer.makefile("rb") as stream, suppress(BrokenPipeError):
                    peer.sendall(stream.read())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(LIMIT)


def ask(port: int, data: bytes) -> bytes:
    """Send data to the port and close that direction; return the answer up to its end."""
    with socket.create_connection((jupyter.LOOPBACK, port), LIMIT) as connection, connection.makefile("rb") as stream:

        def send() -> None:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        answer = stream.read()
        sender.join(LIMIT)
        return answer


def test_bytes_pass_both_ways_and_so_does_the_end_of_them(tmp_path: Path) -> None:
    """Several chunks and an empty message come back unchanged from an echo server behind the relay."""
    data = os.urandom(3 * jupyter.CHUNK + 17)
    port = free_port()
    with echo(tmp_path / "s"), jupyter.relaying(range(port, port + 1), tmp_path / "s") as chosen:
        assert chosen == port
        assert [ask(port, data), ask(port, b"")] == [data, b""]


def test_a_socket_whose_path_is_longer_than_such_an_address_may_be(tmp_path: Path) -> None:
    """A socket path of more than 120 characters is reached: answers() is True and data comes back."""
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    port = free_port()
    with echo(folder / "s"), jupyter.relaying(range(port, port + 1), folder / "s"):
        assert jupyter.answers(folder / "s")
        assert ask(port, b"hello") == b"hello"


def test_a_connection_ends_where_nobody_listens_yet(tmp_path: Path) -> None:
    """The socket does not exist: answers() is False and a client reads an empty answer."""
    port = free_port()
    with jupyter.relaying(range(port, port + 1), tmp_path / "none"):
        assert not jupyter.answers(tmp_path / "none")
        assert ask(port, b"") == b""


def test_only_this_host_can_connect(tmp_path: Path) -> None:
    """The relay's port listens on 127.0.0.1, as in /proc/net/tcp."""
    port = free_port()
    with jupyter.relaying(range(port, port + 1), tmp_path / "s"):
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert f"0100007F:{port:04X}" in listening


def test_the_first_free_port_is_taken_and_none_is_an_error_that_names_them(tmp_path: Path) -> None:
    """With the first port taken the next free one is used; with no other in the range, HostError names it."""
    with ExitStack() as stack:
        first = free_port()
        stack.enter_context(socket.create_server((jupyter.LOOPBACK, first)))
        with jupyter.relaying(range(first, first + 50), tmp_path / "s") as chosen:
            assert first < chosen < first + 50
        with pytest.raises(HostError, match=f"port {first} of 127.0.0.1: Address already in use"):
            stack.enter_context(jupyter.relaying(range(first, first + 1), tmp_path / "s"))


def test_nothing_listens_afterwards(tmp_path: Path) -> None:
    """After the relay has ended, a connection is refused."""
    port = free_port()
    with jupyter.relaying(range(port, port + 1), tmp_path / "s"):
        pass
    with pytest.raises(ConnectionRefusedError):
        ask(port, b"")


def test_a_link_that_a_container_planted_leads_the_relay_nowhere(tmp_path: Path) -> None:
    """A symbolic link to another socket in the socket's place: answers() is False, and no data reaches the other.

    Containers can write the folder, and the relay must not expose the engine's socket.
    """
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "s").symlink_to(tmp_path / "docker.sock")
    port = free_port()
    with echo(tmp_path / "docker.sock"), jupyter.relaying(range(port, port + 1), kept / "s"):
        assert not jupyter.answers(kept / "s")
        answer = b""
        with socket.create_connection((jupyter.LOOPBACK, port), LIMIT) as connection, suppress(OSError):
            connection.sendall(b"GET /containers/json")
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(jupyter.CHUNK)
        assert answer == b""


def test_a_folder_that_is_a_link_leads_the_relay_nowhere(tmp_path: Path) -> None:
    """A socket below a folder that is a symbolic link: answers() is False."""
    (tmp_path / "run").mkdir()
    (tmp_path / "kept").symlink_to("run")
    with echo(tmp_path / "run/s"):
        assert jupyter.answers(tmp_path / "run/s")
        assert not jupyter.answers(tmp_path / "kept/s")


def test_what_a_container_put_in_the_sockets_place_is_said(tmp_path: Path) -> None:
    """A directory at the socket's path raises HostError that says so."""
    (tmp_path / spec.KEPT / "jupyter-worker-0.sock").mkdir(parents=True)
    with pytest.raises(HostError, match=r"cannot remove .*: Is a directory"):
        jupyter.free_socket(tmp_path, "worker-0")
