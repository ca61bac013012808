"""`labctl jupyter`: notebooks on a loopback port with a token, from a server that listens nowhere else."""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import re
import signal
import socket
import struct
import tarfile
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.harness import Lab, Running, wait_until

pytestmark = pytest.mark.docker

NODE = "worker-0"
# A server that answers all requests with its token, and starts a process as notebooks start kernels.
STAND_IN = """#!/usr/bin/env python
import os, socket, subprocess, sys
path = next(word.split("=")[1] for word in sys.argv if word.startswith("--ServerApp.sock="))
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen()
subprocess.Popen(["sleep", "86000"], start_new_session=True)
print("[I 1 ServerApp] serving", file=sys.stderr, flush=True)
print("[E 1 ServerApp] the token is", os.environ["JUPYTER_TOKEN"], file=sys.stderr, flush=True)
while True:
    peer, _ = server.accept()
    if peer.recv(65536):
        peer.sendall(b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\n\\r\\n" + os.environ["JUPYTER_TOKEN"].encode())
    peer.close()
"""


@pytest.fixture(scope="module")
def serving(new_lab: Callable[[dict[str, str]], Lab], image: str) -> Iterator[Lab]:
    """Yield a lab, up, with a stand-in for jupyter-lab in its worker and none in its launcher."""
    lab = new_lab({"LAB_NODES": "1"})
    lab.call("up").expect(0)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo("jupyter-lab")
        entry.size, entry.mode = len(STAND_IN), 0o755
        archive.addfile(entry, io.BytesIO(STAND_IN.encode()))
    for node in ("launcher", NODE):
        lab.inside(node, "sh", "-c", "rm -f /opt/venv/bin/jupyter*", user="root")
    lab.containers()[NODE].put_archive("/opt/venv/bin", packed.getvalue())
    yield lab
    lab.destroy()


@contextmanager
def jupyter(lab: Lab, limit: float = 120) -> Iterator[tuple[Running, str]]:
    """Start `labctl jupyter` once earlier servers have ended; yield it with the URL that it printed."""
    wait_until(lambda: not any("jupyter" in line for line in processes(lab)), 120, "no other server is left")
    with lab.start("jupyter") as running:

        def url() -> str:
            """Return the URL that labctl has printed, empty before; fail if labctl has ended."""
            assert running.process.poll() is None, running.err
            return running.out.strip()

        yield running, wait_until(url, limit, "the URL")


def processes(lab: Lab) -> list[str]:
    """List the command lines of worker-0's processes."""
    return [row[-1] for row in lab.containers()[NODE].top()["Processes"]]


def get(url: str) -> str:
    """Return the body at a URL."""
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - http, as the URL's test says
        return str(answer.read().decode())


def test_the_url_leads_to_the_server_and_holds_its_token(serving: Lab) -> None:
    """The URL has a loopback port from 8888 on and the token of the server that answers there."""
    with jupyter(serving) as (_, url):
        match = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/lab\?token=(\S{32})", url)
        assert match, url
        assert int(match[1]) >= 8888
        assert get(url) == match[2]


def test_the_token_is_only_where_the_person_reads_it(serving: Lab) -> None:
    """The token is in no process's arguments, docker inspect, log, stderr or file of the lab."""
    with jupyter(serving) as (running, url):
        token = url.partition("token=")[2]
        arguments = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                arguments.append(path.read_bytes())
        assert any(b"jupyter-lab" in line for line in arguments)
        assert not any(token.encode() in line for line in arguments)
        container = serving.containers()[NODE]
        execs = [serving.engine.api.exec_inspect(identity) for identity in container.attrs["ExecIDs"]]
        assert execs
        assert token not in json.dumps([container.attrs, execs]) + container.logs().decode()
        wait_until(lambda: "the token is [REDACTED]" in running.err, 120, "the server's own words")
        assert token not in running.err
        kept = [path for path in serving.path.rglob("*") if path.is_file() and path.suffix != ".out"]
        assert not [path for path in kept if token.encode() in path.read_bytes()]


def test_nobody_else_in_the_labs_network_can_connect(serving: Lab) -> None:
    """The server opens no TCP port in its node, and the folder of its socket has mode 0700."""

    def listening() -> str:
        """Return the addresses of listening TCP sockets in worker-0."""
        return serving.inside(NODE, "sh", "-c", "cat /proc/net/tcp /proc/net/tcp6 | awk '$4 == \"0A\" {print $2}'")

    before = listening()
    with jupyter(serving):
        assert listening() == before
        assert (serving.path / ".lab/home").stat().st_mode & 0o777 == 0o700


def test_ctrl_c_ends_the_server_its_kernels_and_the_relay(serving: Lab) -> None:
    """Ctrl-C: exit code 130, no server, kernel, port or socket is left."""
    with jupyter(serving) as (running, url):
        assert "sleep 86000" in processes(serving)
        running.press(signal.SIGINT)
        answer = running.answer(60).expect(130)
        assert "open this" in answer.err
        assert answer.err.endswith("stopped\n")
        assert "serving" not in answer.err
        assert not [line for line in processes(serving) if "sleep 86000" in line or "jupyter" in line]
        with pytest.raises(OSError, match="refused"):
            get(url)
    assert not list((serving.path / ".lab/home").glob("*.sock"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_labctl_leaves_no_server_and_the_next_one_starts(serving: Lab, number: signal.Signals) -> None:
    """After SIGTERM or SIGKILL of labctl the server ends, and another `jupyter` works."""
    with jupyter(serving) as (running, _):
        running.press(number)
        assert running.ends_within(60)
        wait_until(
            lambda: not any("sleep" in line or "jupyter" in line for line in processes(serving)), 120, "all ended"
        )
    with jupyter(serving) as (_, url):
        assert get(url)


def test_a_second_one_on_the_same_node_is_refused(serving: Lab) -> None:
    """A second `jupyter` on the node exits with 2, and the first one still answers."""
    with jupyter(serving) as (_, url):
        assert f"{NODE} has a notebook server" in serving.call("jupyter").expect(2).err
        assert get(url)


def test_a_port_that_is_taken_is_refused(serving: Lab) -> None:
    """`--port` of a port in use: exit code 3, and stderr names the port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        # Another test's server may still be ending.
        answer = wait_until(
            lambda: reply if (reply := serving.call("jupyter", "--port", port)).code != 2 else None,
            60,
            "no server is there",
        )
        assert f"port {port} of 127.0.0.1" in answer.expect(3).err


def test_an_image_without_jupyter_is_refused_with_what_to_do(serving: Lab) -> None:
    """A node without jupyter: exit code 3, nothing on stdout, and `labctl build` as the hint."""
    answer = serving.call("jupyter", "--node", "launcher").expect(3)
    assert "the image of launcher has no Jupyter" in answer.err
    assert "labctl build" in answer.err
    assert answer.out == ""


# --- the real one --------------------------------------------------------------------------------------------


def test_a_kernel_computes_over_the_relay(lab: Lab) -> None:
    """With the image's own jupyter-lab, a kernel prints a product, the user's uid and the node's name."""
    container = lab.containers()[NODE]
    if container.exec_run(["sh", "-c", "command -v jupyter-lab"])[0]:
        pytest.skip("the image has no jupyter-lab")
    with jupyter(lab) as (_, url):
        place = urlsplit(url)
        token = place.query.removeprefix("token=")
        address = ("127.0.0.1", place.port or 0)
        ask = http.client.HTTPConnection(*address, timeout=60)
        ask.request("POST", f"/api/kernels?token={token}", "{}")
        identity = json.load(ask.getresponse())["id"]
        ask.close()
        with Websocket(address, f"/api/kernels/{identity}/channels?token={token}") as channel:
            channel.send(execute("import os; print(6 * 7, os.getuid(), os.uname().nodename)"))
            while (message := channel.receive())["msg_type"] != "stream":
                pass
        assert message["content"]["text"] == f"42 {os.getuid()} {NODE}\n"


def execute(code: str) -> dict[str, Any]:
    """Return the `execute_request` that runs this code in a kernel; jupyter-client.readthedocs.io, messaging."""
    header = {
        "msg_id": uuid.uuid4().hex,
        "msg_type": "execute_request",
        "session": "s",
        "username": "",
        "version": "5.3",
    }
    content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False, "stop_on_error": True}
    return {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}


class Websocket:
    """A minimal web socket client (RFC 6455) for a kernel's messages."""

    def __init__(self, address: tuple[str, int], path: str) -> None:
        """Connect to the address and open a web socket at the path; assert that the server accepts it."""
        self._socket = socket.create_connection(address, 60)
        self._stream = self._socket.makefile("rb")
        key = base64.b64encode(os.urandom(16)).decode()
        headers = {"Host": f"{address[0]}:{address[1]}", "Connection": "Upgrade", "Upgrade": "websocket",
                 "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key}  # fmt: skip
        lines = (f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", "")
        self._socket.sendall("\r\n".join(lines).encode())
        assert b" 101 " in self._stream.readline()
        while self._stream.readline().strip():
            pass

    def __enter__(self) -> Websocket:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._socket.close()

    def send(self, message: dict[str, Any]) -> None:
        """Send one text frame, masked with zeros."""
        data = json.dumps(message).encode()
        self._socket.sendall(struct.pack("!BBH4x", 0x81, 0x80 | 126, len(data)) + data)

    def receive(self) -> dict[str, Any]:
        """Return the JSON message of the next text frame; skip other frames."""
        while True:
            kind, size = struct.unpack("!BB", self._stream.read(2))
            if size >= 126:
                wide = {126: "!H", 127: "!Q"}[size]
                (size,) = struct.unpack(wide, self._stream.read(struct.calcsize(wide)))
            data = self._stream.read(size)
            if kind == 0x81:
                message: dict[str, Any] = json.loads(data)
                return message
