"""Time limits of a daemon, and arguments of the docker command, with a stand-in program for both."""

from __future__ import annotations

import json
import re
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from support import builders

from labctl.backends.docker import api
from labctl.backends.docker import daemon as docker
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.state import Container
from labctl.errors import HostError
from labctl.system.process import ProcessTimeout

ENDLESS = "#!/bin/sh\nexec sleep 60\n"
DEAF = "#!/bin/sh\ntrap '' TERM\nexec sleep 60\n"


@pytest.fixture
def hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], DockerEngine]:
    """Return a function that makes a host's engine with this docker command and time limits of 0.1 s."""

    def make(program: str) -> DockerEngine:
        """Put this program on PATH as docker; return a host's engine with time limits of 0.1 s."""
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
    ("act", "description"),
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
    hang: Callable[[str], DockerEngine], act: Callable[[Any], None], description: str
) -> None:
    """A docker command that never ends raises HostError with command and host, and to restart docker as hint."""
    with pytest.raises(HostError, match=f"blue: `{description}` timed out after") as caught:
        act(hang(ENDLESS))
    assert (caught.value.node, "restart docker" in caught.value.hint) == ("blue", True)


def test_a_command_that_does_not_heed_its_time_is_killed(hang: Callable[[str], DockerEngine]) -> None:
    """A docker command that ignores SIGTERM is killed, and raises HostError."""
    with pytest.raises(HostError, match="timed out after"):
        hang(DEAF).remove("blue", "container", ("one",))


def test_what_the_environment_says_of_another_daemon_is_kept_from_a_hosts(
    hang: Callable[[str], DockerEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """docker commands for a host run without the DOCKER_ variables of the environment."""
    for name in ("DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_CONTEXT", "DOCKER_TLS", "DOCKER_API_VERSION"):
        monkeypatch.setenv(name, "1")
    engine = hang("#!/bin/sh\n! env | grep ^DOCKER_ >&2\n")
    monkeypatch.setattr(docker, "CHANGING", 30)
    engine.remove("blue", "container", ("one",))
    messages: list[str] = []
    engine.stream("one", ("true",), messages.extend, user="0", limit=30)
    assert messages == []


class Answers(BaseHTTPRequestHandler):
    """A daemon that reports its version, refuses its information, and has no images and no addresses."""

    version = "1.45"

    def do_GET(self) -> None:
        """Answer ping and version with the version, information with an error 500, others with 404."""
        if self.path in ("/_ping", "/version"):
            self.answer(200, VERSION)
        elif self.path == "/v1.45/info":
            self.answer(500, {"message": "layer store is locked"})
        else:
            self.answer(404, {"message": "No such image"})

    def do_POST(self) -> None:
        """Answer 404, no address pool."""
        self.answer(404, {"message": "no address pool"})

    def do_DELETE(self) -> None:
        """Answer 404, no such network."""
        self.answer(404, {"message": "No such network"})

    def answer(self, code: int, body: Mapping[str, object] | list[Any]) -> None:
        """Send this status, the API version if any, and the body as JSON."""
        text = json.dumps(body).encode()
        self.send_response(code)
        if self.version:
            self.send_header("Api-Version", self.version)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


VERSION = {"Version": "26.1", "ApiVersion": "1.45"}


def frame(stream: int, text: bytes) -> bytes:
    """Return a frame of Docker's multiplexed output: stream, length and text."""
    return bytes((stream, 0, 0, 0)) + len(text).to_bytes(4, "big") + text


class Execs(Answers):
    """A daemon with a running container, `one`, whose program prints on both streams and exits with 7."""

    ended: int | None = 7

    def do_GET(self) -> None:
        """Answer ping with an empty object, others with the program's exit code."""
        self.answer(200, {} if self.path == "/_ping" else {"ExitCode": self.ended})

    def do_POST(self) -> None:
        """Answer the requests that start a program: container one runs it, any other is not running."""
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1.45/containers/one/exec":
            self.answer(201, {"Id": "its"})
        elif self.path.startswith("/v1.45/containers/"):
            self.answer(409, {"message": "container two is not running"})
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(frame(1, b"a\xff") + frame(2, b"why\n") + frame(1, b"b" * 100_000))
            self.wfile.flush()
            self.rest()

    def rest(self) -> None:
        """Do nothing after the output, so that the response ends; a subclass may wait here."""


class Cut(Execs):
    """A daemon whose program goes on after the end of its output."""

    ended = None


class Endless(Execs):
    """A daemon whose program runs longer than any time limit."""

    def rest(self) -> None:
        """Wait for input that never comes."""
        self.rfile.read(1)


@contextmanager
def daemon(answers: type[Answers], monkeypatch: pytest.MonkeyPatch, seconds: int = 30) -> Iterator[DockerEngine]:
    """Serve these answers as a Docker daemon on a local port; yield the engine with DOCKER_HOST set to it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_port}")
        try:
            yield DockerEngine(seconds=seconds)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerEngine]:
    """Yield an engine of a daemon that has no images, by DOCKER_HOST."""
    with daemon(Answers, monkeypatch) as engine:
        yield engine


def test_a_programs_streams_and_code_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """exec() returns code 7 with stdout and stderr apart; of a container that does not run, code 1 and the reason."""
    with daemon(Execs, monkeypatch) as engine:
        done = engine.exec("one", ("true",), user="lab")
        refused = engine.exec("two", ("true",), user="lab")
    assert (done.code, done.out, done.err) == (7, "a\ufffd" + "b" * 100_000, "why\n")
    assert (refused.code, refused.out, refused.err) == (1, "", "container two is not running\n")


def test_a_program_that_does_not_end_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that runs past limit 0.1 raises ProcessTimeout with its name."""
    with (
        daemon(Endless, monkeypatch) as engine,
        pytest.raises(ProcessTimeout, match=r"^`sleep 9` timed out after 0.1 s$"),
    ):
        engine.exec("one", ("sleep", "9"), user="lab", limit=0.1)


def test_a_program_whose_end_is_not_known_is_not_taken_for_one_that_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output that ends while the program has no exit code raises HostError that the connection was lost."""
    with (
        daemon(Cut, monkeypatch) as engine,
        pytest.raises(HostError, match=r"^one: the connection to sleep was lost$"),
    ):
        engine.exec("one", ("sleep", "9"), user="lab")


def test_an_answer_that_is_too_large_is_refused(over_tcp: DockerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of more bytes than the limit raises HostError."""
    over_tcp.versions()
    monkeypatch.setattr(api, "LARGEST_ANSWER", 20)
    with pytest.raises(HostError, match=r"an answer has more than 20 B"):
        over_tcp.versions()


class Local(Answers):
    """A daemon that keeps connections open."""

    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        """Record the client of the connection."""
        super().setup()
        self.server.connections.append(self.client_address)  # type: ignore[attr-defined]


def test_all_questions_of_a_block_take_one_connection_which_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three questions in one _api() block use one connection, which is closed after it."""

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        connections: ClassVar[list[object]] = []

    path = str(tmp_path / "docker.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with Server(path, Local) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with DockerEngine()._api() as client:
                for image in ("a", "b", "c"):
                    assert docker.inspect(client, "image", image) is None
        finally:
            server.shutdown()
            thread.join()
    # The threads that serve connections are waited for above: none is open.
    assert len(Server.connections) == 1


class Cluttered(Execs):
    """A daemon whose program's output ends within a frame's header."""

    ended = None

    def rest(self) -> None:
        """Send half a frame's header."""
        self.wfile.write(frame(1, b"")[:5])


def test_a_program_whose_output_is_cut_off_is_told_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output that ends within a frame's header raises HostError that the connection was lost."""
    with daemon(Cluttered, monkeypatch) as engine, pytest.raises(HostError, match=r"the connection to sleep was lost$"):
        engine.exec("one", ("sleep", "9"), user="lab")


class Other(Answers):
    """A web server other than a daemon."""

    version = ""


class Busy(Answers):
    """A daemon, or a proxy before it, that does not answer now."""

    def do_GET(self) -> None:
        """Answer 503."""
        self.answer(503, {"message": "try later"})


@pytest.mark.parametrize(
    ("answers", "reason"), [(Other, "is not a Docker Engine"), (Busy, "503 Server Error: Service Unavailable")]
)
def test_what_is_no_daemon_is_an_error_of_the_engine(
    answers: type[Answers], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A web server that is no daemon, or an answer 503, raises HostError of Docker Engine."""
    with daemon(answers, monkeypatch) as engine, pytest.raises(HostError, match=f"^Docker Engine.*{reason}"):
        engine.versions()


def test_events_that_are_refused_are_an_error(over_tcp: DockerEngine) -> None:
    """An error answer to events() raises HostError."""
    with pytest.raises(HostError, match=r"^Docker Engine: No such image$"):
        next(over_tcp.events("demo"))


class Slow(Answers):
    """A daemon whose answer never ends, with each byte in time."""

    def answer(self, code: int, body: Mapping[str, object] | list[Any]) -> None:  # noqa: ARG002
        """Send a space each 0.1 s, without end."""
        self.send_response(code)
        self.send_header("Api-Version", self.version)
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(b" ")
                self.server.paused.wait(0.1)  # type: ignore[attr-defined]


def test_an_answer_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that never ends raises HostError after the limit of 1 s."""
    monkeypatch.setattr(ThreadingHTTPServer, "paused", threading.Event(), raising=False)
    with daemon(Slow, monkeypatch, seconds=1) as engine, pytest.raises(HostError, match=r"does not answer.*timed out"):
        engine.versions()


def test_an_engine_is_read_where_docker_host_leads(over_tcp: DockerEngine) -> None:
    """With DOCKER_HOST versions() are read, image_id() of a missing image is None, and an error 500 is HostError."""
    assert over_tcp.versions() == {"engine": "26.1", "api": "1.45", "kernel": ""}
    assert over_tcp.image_id("nothing") is None
    with pytest.raises(HostError, match=r"^Docker Engine: layer store is locked$"):
        over_tcp.information()


def test_a_network_that_is_gone_is_an_error_of_the_engine(over_tcp: DockerEngine) -> None:
    """network() of a missing network raises HostError."""
    with pytest.raises(HostError, match=r"^Docker Engine: network nothing not found$"):
        over_tcp.network("nothing")


def test_a_daemon_that_has_no_addresses_left_says_so_with_404(over_tcp: DockerEngine) -> None:
    """try_network() returns the daemon's message if it has no addresses."""
    assert over_tcp.try_network("demo") == "no address pool"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("unix:///nowhere/docker.sock", "No such file or directory (DOCKER_HOST=unix:///nowhere/docker.sock)"),
        ("tcp://127.0.0.1:1", "Connection refused (DOCKER_HOST=tcp://127.0.0.1:1)"),
        ("tcp://127.0.0.1:99999", "Port out of range 0-65535 (DOCKER_HOST=tcp://127.0.0.1:99999)"),
        ("ssh://red", "DOCKER_HOST=ssh://red is neither unix:// nor tcp://"),
    ],
)
def test_an_engine_that_is_not_there_is_said_with_the_reason(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DOCKER_HOST that cannot be reached or is invalid raises HostError with it, and to unset it as hint."""
    monkeypatch.setenv("DOCKER_HOST", address)
    with pytest.raises(HostError, match=f"^Docker Engine does not answer: {re.escape(message)}$") as caught:
        DockerEngine().versions()
    assert caught.value.hint == "unset DOCKER_HOST"


def test_certificates_that_are_missing_are_named_by_their_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """DOCKER_TLS_VERIFY with a missing DOCKER_CERT_PATH raises HostError with the files and the folder."""
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", "/nowhere")
    with pytest.raises(HostError, match=r"no cert\.pem, key\.pem and ca\.pem in /nowhere"):
        DockerEngine().versions()


@pytest.mark.parametrize(
    "slots", ["many", "", "-1", "²", "9" * 5000], ids=["word", "none", "negative", "square", "huge"]
)
def test_labels_that_a_stranger_wrote_are_read_as_far_as_they_make_sense(slots: str) -> None:
    """container_of() reads an invalid number of slots as 0 and removes control characters from the owner."""
    labels = {"labctl.slots": slots, "labctl.node": "worker-0", "labctl.owner": "bob\x1b]0;title\x07@desk"}
    listed = {"Id": "1" * 64, "Names": ["/x"], "Labels": labels, "State": "running", "ImageID": "2"}
    container = docker.container_of(listed, "local")
    assert (container.slots, container.node, container.owner) == (0, "worker-0", "bob]0;title@desk")


LIMITS = {"Memory": 0, "NanoCpus": 0, "CpuQuota": 0, "CpuShares": 0, "PidsLimit": None, "CpusetCpus": ""}
ENDPOINT = {"Aliases": ["labctl-demo-worker-0-1", "worker-0"]}


class Labelled(Answers):
    """A daemon with a worker of a lab."""

    mode = "labctl-demo"
    networks: ClassVar[dict[str, Any]] = {"labctl-demo": ENDPOINT}
    limits: ClassVar[dict[str, Any]] = LIMITS
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        """Record the path; answer with the planted container, no lab networks, or its networks and limits."""
        self.asked.append(self.path)
        labels = {"labctl.node": "worker-0", "labctl.role": "worker", "labctl.limits": "pids=8192"}
        listed = {"Id": "1", "Labels": labels, "State": "running", "ImageID": "2"}
        listed |= {"HostConfig": {"NetworkMode": self.mode}, "NetworkSettings": {"Networks": self.networks}}
        if self.path.startswith("/v1.45/containers/json"):
            self.answer(200, [listed])
        elif self.path.startswith("/v1.45/networks"):
            self.answer(200, [])
        else:
            self.answer(200, {"NetworkSettings": {"Networks": self.networks}, "HostConfig": self.limits})


def observed_container(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> Container:
    """Observe the lab's only container, with these answers of the daemon; fail if it takes not three requests."""
    monkeypatch.setattr(Labelled, "asked", [])
    for name, value in answers.items():
        monkeypatch.setattr(Labelled, name, value)
    with daemon(Labelled, monkeypatch) as engine:
        (container,) = engine.observe("demo").containers
    assert len([path for path in Labelled.asked if path != "/_ping"]) == 3
    return container


@pytest.mark.parametrize(
    ("mode", "networks", "made_for", "on"),
    [
        ("labctl-demo", {"labctl-demo": ENDPOINT}, "labctl-demo", ("labctl-demo",)),
        ("labctl-demo", {"labctl-demo": ENDPOINT, "mine": {}}, "labctl-demo", ("labctl-demo", "mine")),
        ("labctl-demo", {"labctl-demo": {"Aliases": None}}, "labctl-demo", ()),
        ("labctl-demo", {}, "labctl-demo", ()),
        ("host", {"host": {"Aliases": None}}, "", ("host",)),
        ("container:1", {}, "", ()),
    ],
    ids=["its own", "another too", "connected by hand", "disconnected", "host", "a container's"],
)
def test_a_container_is_on_the_networks_that_know_its_node(
    monkeypatch: pytest.MonkeyPatch, mode: str, networks: dict[str, Any], made_for: str, on: tuple[str, ...]
) -> None:
    """Container.networks has the networks on which the container has its node's alias; `network` is its own."""
    container = observed_container(monkeypatch, mode=mode, networks=networks)
    assert (container.network, container.networks) == (made_for, on)


def test_the_limits_of_a_container_are_those_that_are_set_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Container.limits has the set limits, empty without any; rendered_limits is the label."""
    assert observed_container(monkeypatch).limits == ()
    limits = {**LIMITS, "Memory": 1 << 30, "NanoCpus": 5, "PidsLimit": 0, "CpusetCpus": "0,1"}
    container = observed_container(monkeypatch, limits=limits)
    assert container.limits == (("memory", "1073741824"), ("pids", "0"), ("cpuset", "0,1"), ("cpus", "5 0 0"))
    assert container.rendered_limits == "pids=8192"


CONFLICT = (
    'Error response from daemon: Conflict. The container name "/labctl-demo-worker-0-1" is already in use by container'
    ' "5a14b7df". You have to remove (or rename) that container to be able to reuse that name.'
)
COMPOSE_2 = f"""\
 Network labctl-demo  Creating
 Network labctl-demo  Created
 Container labctl-demo-worker-0-1  Creating
{CONFLICT}
"""
COMPOSE_5 = f"""\
 Network labctl-demo Creating\x20
 Network labctl-demo Creating\x20
 Network labctl-demo Created\x20
 Network labctl-demo Created\x20
 Container labctl-demo-worker-0-1 Creating\x20
 service:worker-0:1 {CONFLICT}\x20
{CONFLICT}
"""


@pytest.mark.parametrize("printed", [COMPOSE_2, COMPOSE_5], ids=["2.26", "5.6"])
def test_a_name_in_use_is_said_once_with_what_to_type_by_old_and_new_compose(printed: str) -> None:
    """Compose's error of a name in use is shown once, with `docker rename` as hint."""
    error = DockerEngine()._failed("docker compose up", 1, printed, 60)
    assert len(error.message.splitlines()) == 5
    assert error.message.endswith(f"Creating\n{CONFLICT}")
    assert error.hint.startswith("docker rename labctl-demo-worker-0-1 labctl-demo-worker-0-1-other")


def test_errors_of_several_services_are_all_shown() -> None:
    """without_repeats() removes an error line that Compose repeats, and keeps other services' errors."""
    printed = " service:worker-0:1 Error: a\n service:worker-1:1 Error: b\nError: b\n"
    assert docker.without_repeats(printed) == [" service:worker-0:1 Error: a", "Error: b"]
    assert docker.without_repeats("") == []


@pytest.mark.parametrize(
    "message",
    [
        "Error starting userland proxy: listen tcp4 127.0.0.1:6006: bind: address already in use",
        "Bind for 127.0.0.1:6006 failed: port is already allocated",
        "failed to bind host port for 127.0.0.1:6006:172.18.0.2:80/tcp: address already in use",
        "failed to bind host port 127.0.0.1:6006/tcp: address already in use",
    ],
)
def test_a_port_in_use_is_said_with_what_to_change(message: str) -> None:
    """A port in use, in each wording of Docker, is one message with LAB_PORTS as hint."""
    error = DockerEngine()._failed("docker compose up", 1, message, 60)
    assert error.message == "port 6006 of 127.0.0.1 is in use"
    assert "LAB_PORTS" in error.hint


# --- networks and ports of others ----------------------------------------------------------------------------


class Shared(Answers):
    """A daemon with a network of others, which only a stopped container uses, and a port on two addresses."""

    def do_GET(self) -> None:
        """Answer with the network, and with a stopped and a publishing container."""
        ports = [
            {"IP": address, "PrivatePort": 80, "PublicPort": 9001, "Type": kind}
            for address, kind in (("192.0.2.5", "tcp"), ("192.0.2.6", "tcp"), ("192.0.2.7", "udp"))
        ]
        stopped = {"Names": ["/web"], "Labels": {}, "Ports": ports, "NetworkSettings": {"Networks": {"taken": {}}}}
        if self.path.startswith("/v1.45/networks/"):
            name = self.path.rpartition("/")[2]
            self.answer(200, {"Name": name, "Id": f"id-{name}", "Labels": {}, "Containers": {}})
        else:
            self.answer(200, [stopped] if "/containers/" in self.path else VERSION)


def test_a_network_that_a_stopped_container_refers_to_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign network without running containers is unused only if no container refers to it."""
    with daemon(Shared, monkeypatch) as engine:
        assert [engine.foreign_network(name, "demo") for name in ("taken", "free")] == [True, False]


def test_publishers_have_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that publishes a TCP port on two addresses is listed with each, but not with that of UDP."""
    with daemon(Shared, monkeypatch) as engine:
        assert engine.publishers(9001) == (("web", "", "192.0.2.5"), ("web", "", "192.0.2.6"))


def test_a_docker_context_does_not_lead_the_command_elsewhere() -> None:
    """The docker command of this machine has the default context, whose engine the SDK asks too."""
    assert DockerEngine().docker == ("docker", "--context=default")


def test_a_container_that_could_not_be_started_has_the_engines_error() -> None:
    """start_error() is the engine's error, and empty for a container that runs: it has started since."""
    inspected = {"State": {"Error": "no such device"}}
    assert docker.start_error(builders.container("worker-0", state="created"), inspected) == "no such device"
    assert docker.start_error(builders.container("worker-0"), inspected) == ""
