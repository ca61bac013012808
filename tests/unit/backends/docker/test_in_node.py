"""The shell script that labctl runs in a node's container."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from labctl.backends.docker.agent import IN_NODE


@pytest.fixture
def port() -> Iterator[int]:
    """Yield a port on which 127.0.0.1 greets as sshd, 127.0.0.2 as another server, and 127.0.0.3 not at all."""
    with closing(socket.create_server(("127.0.0.1", 0))) as greets:
        number = greets.getsockname()[1]
        servers = [closing(socket.create_server((f"127.0.0.{last}", number))) for last in (2, 3)]
        with servers[0] as other, servers[1]:

            def serve(server: socket.socket, greeting: bytes) -> None:
                """Accept one connection and send the greeting."""
                taken, _ = server.accept()
                with taken:
                    taken.sendall(greeting)

            threading.Thread(target=serve, args=(greets, b"SSH-2.0-OpenSSH_9.2\r\n"), daemon=True).start()
            threading.Thread(target=serve, args=(other, b"220 mail\r\n"), daemon=True).start()
            yield number


def test_a_node_is_reached_if_its_sshd_greets_while_the_command_runs(port: int) -> None:
    """`stand_by` runs the command with stdin, and prints `reached` for the one address that greets as sshd."""
    nodes = "127.0.0.1 127.0.0.2 127.0.0.3 127.0.0.4"
    script = ("sh", "-c", IN_NODE, "sh", "stand_by", nodes, "sh", "-c", "read line; echo told $line")
    variables = {**os.environ, "LAB_SSH_PORT": str(port)}
    done = subprocess.run(script, env=variables, input="go\n", capture_output=True, text=True, timeout=30, check=True)
    echoed, *reached = sorted(done.stdout.splitlines(), key=lambda line: line != "told go")
    assert (echoed, reached) == ("told go", ["reached 127.0.0.1", "reached"])
