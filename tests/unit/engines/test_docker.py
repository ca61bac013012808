"""What a daemon is given time for, and what its docker command is told: that is a program of these tests."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from labctl.engines import docker
from labctl.engines.docker import DockerEngine
from labctl.errors import HostError
from labctl.hosts.ssh import Connection

ENDLESS = "#!/bin/sh\nexec sleep 60\n"
DEAF = "#!/bin/sh\ntrap '' TERM\nexec sleep 60\n"


@pytest.fixture
def hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], DockerEngine]:
    """The engine of a host, whose docker command is this one; it has 0.1 s."""

    def make(program: str) -> DockerEngine:
        path = tmp_path / "docker"
        path.write_text(program)
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        for name in ("CHANGING", "EACH", "GRACE"):
            monkeypatch.setattr(docker, name, 0.1)
        way = SimpleNamespace(address="unix:///none", target=SimpleNamespace(name="blue"))
        return DockerEngine(cast(Connection, way))

    return make


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (
            lambda engine: engine.apply("blue", "labctl-demo", (Path("compose.yml"),)),
            "docker compose -p labctl-demo up",
        ),
        (lambda engine: engine.remove("blue", "container", ("one", "two")), "docker container rm"),
        (lambda engine: engine.remove("blue", "network", ("one",)), "docker network rm"),
        (lambda engine: engine.remove("blue", "image", ("image",)), "docker image rm image"),
    ],
)
def test_what_a_daemon_never_gets_done_ends_with_the_hosts_name(
    hang: Callable[[str], DockerEngine], act: Callable[[Any], None], what: str
) -> None:
    with pytest.raises(HostError, match=f"blue: `{what}` timed out after") as caught:
        act(hang(ENDLESS))
    assert (caught.value.node, "restart docker" in caught.value.hint) == ("blue", True)


def test_a_command_that_does_not_heed_its_time_is_killed(hang: Callable[[str], DockerEngine]) -> None:
    with pytest.raises(HostError, match="timed out after"):
        hang(DEAF).remove("blue", "container", ("one",))


def test_what_the_environment_says_of_another_daemon_is_kept_from_a_hosts(
    hang: Callable[[str], DockerEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_CONTEXT", "DOCKER_TLS", "DOCKER_API_VERSION"):
        monkeypatch.setenv(name, "1")
    engine = hang("#!/bin/sh\n! env | grep ^DOCKER_ >&2\n")
    monkeypatch.setattr(docker, "CHANGING", 30)
    engine.remove("blue", "container", ("one",))
    assert engine.exec("one", ("true",), user="0").err == ""


class Answers(BaseHTTPRequestHandler):
    """A daemon that knows its version, refuses to say what it is, and has neither an image nor addresses."""

    def do_GET(self) -> None:
        answers = {"/version": (200, VERSION), "/info": (500, {"message": "layer store is locked"})}
        self.answer(*answers.get(self.path.partition("?")[0], (404, {"message": "No such image"})))

    def do_POST(self) -> None:
        self.answer(404, {"message": "no address pool"})

    def do_DELETE(self) -> None:
        self.answer(404, {"message": "No such network"})

    def answer(self, code: int, said: dict[str, str]) -> None:
        body = json.dumps(said).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


VERSION = {"Version": "26.1", "ApiVersion": "1.45"}


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerEngine]:
    """This machine's engine, where DOCKER_HOST leads to a port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_port}")
        yield DockerEngine()
        server.shutdown()
        thread.join()


def test_an_engine_is_read_where_docker_host_leads(over_tcp: DockerEngine) -> None:
    assert over_tcp.versions() == {"engine": "26.1", "api": "1.45", "kernel": ""}
    assert over_tcp.image_id("nothing") is None
    with pytest.raises(HostError, match=r"^Docker Engine: layer store is locked$"):
        over_tcp.information()


def test_a_network_that_is_gone_is_an_error_of_the_engine(over_tcp: DockerEngine) -> None:
    with pytest.raises(HostError, match=r"^Docker Engine: network nothing not found$"):
        over_tcp.network("nothing")


def test_a_daemon_that_has_no_addresses_left_says_so_with_404(over_tcp: DockerEngine) -> None:
    assert over_tcp.try_network("demo") == "no address pool"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("unix:///nowhere/docker.sock", "No such file or directory (DOCKER_HOST=unix:///nowhere/docker.sock)"),
        ("tcp://127.0.0.1:1", "Connection refused (DOCKER_HOST=tcp://127.0.0.1:1)"),
        ("ssh://red", "DOCKER_HOST=ssh://red is neither unix:// nor tcp://"),
    ],
)
def test_an_engine_that_is_not_there_is_said_with_the_reason(
    address: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", address)
    with pytest.raises(HostError, match=f"^Docker Engine does not answer: {re.escape(said)}$") as caught:
        DockerEngine().versions()
    assert caught.value.hint == "unset DOCKER_HOST"
