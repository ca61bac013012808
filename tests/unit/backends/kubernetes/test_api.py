"""An API server over HTTP that answers, refuses and breaks off; pods as containers, and programs in them."""

from __future__ import annotations

import io
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.api_server import CUT, ERR, SILENT, SUCCESS, Answer, Frames, failure, kubeconfig, serving, web_socket
from support.fake_api import FakeApi
from websocket import WebSocketBadStatusException

from labctl.backends.kubernetes import api as kubernetes
from labctl.backends.kubernetes.api import (
    OUT,
    Api,
    KubernetesEngine,
    Manifest,
    Refused,
    Unreachable,
    asked_for,
    by_run,
    container_of,
    grant,
    node_of,
)
from labctl.errors import ConfigError, HostError, OutputClosed
from labctl.system.process import NOT_FOUND, ProcessTimeout

POD: Manifest = {"kind": "Pod", "metadata": {"name": "demo-m-launcher"}, "spec": {"containers": [{"name": "launcher"}]}}
OK = (200, b"{}")
Client = Callable[[Callable[[str, str], Answer]], Api]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Return a function that makes a client of an API server with these answers."""
    blocks = []

    def make(asked: Callable[[str, str], Answer]) -> Api:
        """Serve these answers; return a client of them."""
        blocks.append(serving(asked))
        return client_of(blocks[-1].__enter__(), tmp_path, monkeypatch)

    yield make
    for block in blocks:
        block.__exit__(None, None, None)


def client_of(server: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Api:
    """Write a kubeconfig for this server as the default; return a client of namespace demo."""
    path = kubeconfig(directory / "kubeconfig", server)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", path)
    return Api("demo")


def status(code: int, message: str) -> Answer:
    """Return an answer of this code with a Status object of this message."""
    return code, json.dumps({"kind": "Status", "status": "Failure", "message": message, "code": code}).encode()


# --- who asks for what ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "right"),
    [
        ("GET", "/api/v1/namespaces/demo/pods", ("list", "pods")),
        ("GET", "/api/v1/namespaces/demo/pods?labelSelector=a", ("list", "pods")),
        ("GET", "/api/v1/namespaces/demo/pods/p", ("get", "pods")),
        ("GET", "/api/v1/namespaces/demo/pods/p/log", ("get", "pods/log")),
        ("GET", "/api/v1/namespaces/demo/pods/p/exec", ("get", "pods/exec")),
        ("DELETE", "/api/v1/namespaces/demo/secrets/s", ("delete", "secrets")),
        ("GET", "/api/v1/namespaces/demo", ("get", "namespaces")),
        ("GET", "/api/v1/nodes", ("list", "nodes")),
        ("PATCH", "/apis/kubeflow.org/v2beta1/namespaces/demo/mpijobs/m", ("patch", "mpijobs.kubeflow.org")),
        ("GET", "/apis/storage.k8s.io/v1/storageclasses", ("list", "storageclasses.storage.k8s.io")),
        ("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
         ("create", "selfsubjectaccessreviews.authorization.k8s.io")),
        ("GET", "/version", ("get", "/version")),
        ("GET", "/apis/kubeflow.org/v2beta1", ("get", "/apis/kubeflow.org/v2beta1")),
    ],
)  # fmt: skip
def test_a_request_takes_the_right_that_kubectl_names(method: str, path: str, right: tuple[str, str]) -> None:
    """asked_for() gives verb and resource, or path, of a request as kubectl names them."""
    assert asked_for(method, path) == right


@pytest.mark.parametrize(
    ("given", "made", "bound"),
    [
        (("list", "pods", "demo"), "kubectl -n demo create role labctl-list-pods --verb=list --resource=pods",
         "kubectl -n demo create rolebinding labctl-list-pods --role=labctl-list-pods --user=YOU"),
        (("get", "pods/log", "demo"), "kubectl -n demo create role labctl-get-pods-log --verb=get --resource=pods/log",
         "rolebinding labctl-get-pods-log "),
        (("patch", "mpijobs.kubeflow.org", "demo"), "role labctl-patch-mpijobs --verb=patch --resource=mpijobs.kubeflo",
         "--role=labctl-patch-mpijobs "),
        (("list", "nodes", ""), "kubectl create clusterrole labctl-list-nodes --verb=list --resource=nodes",
         "kubectl create clusterrolebinding labctl-list-nodes --clusterrole=labctl-list-nodes --user=YOU"),
        (("get", "/version", ""), "clusterrole labctl-get-version --verb=get --non-resource-url=/version",
         "--clusterrole=labctl-get-version "),
        (("get,list", "pods,secrets", "demo"), "role labctl --verb=get,list --resource=pods,secrets", "--role=labctl "),
    ],
)  # fmt: skip
def test_who_lacks_a_right_is_told_what_an_administrator_types(
    given: tuple[str, str, str], made: str, bound: str
) -> None:
    """grant() gives the kubectl commands for a role and its binding, cluster-wide without a namespace."""
    said = grant(*given)
    assert said.startswith("ask who runs the cluster for: kubectl ")
    assert made in said
    assert bound in said


# --- errors in words -----------------------------------------------------------------------------------------


def test_credentials_that_are_not_accepted_are_said_to_be_old(client: Client) -> None:
    """Status 401 raises Refused, with to log in again as hint."""
    api = client(lambda *_: status(401, "Unauthorized"))
    with pytest.raises(Refused, match="does not accept the credentials of this context: Unauthorized") as refused:
        api.list("Pod")
    assert refused.value.status == 401
    assert "log in to the cluster again" in refused.value.hint


def test_a_right_that_is_missing_is_named_with_what_gives_it(client: Client) -> None:
    """Status 403 raises Refused with the server's message, and kubectl commands for the role as hint."""
    said = 'pods is forbidden: User "ann" cannot list resource "pods" in API group "" in the namespace "demo"'
    api = client(lambda *_: status(403, said))
    with pytest.raises(Refused) as refused:
        api.list("Pod")
    assert refused.value.message == said
    assert "kubectl -n demo create role labctl-list-pods" in refused.value.hint
    with pytest.raises(Refused) as refused:
        api.list("Node")
    assert "kubectl create clusterrole labctl-list-nodes" in refused.value.hint


def test_what_is_not_there_is_none_and_of_an_unknown_kind_there_are_none(client: Client) -> None:
    """On 404 get() is None, list() empty and delete() silent."""
    api = client(lambda *_: (404, b"404 page not found\n"))
    assert api.get("MPIJob", "m") is None
    assert api.list("MPIJob") == []
    api.delete("MPIJob", "m")


def test_a_job_of_a_kind_that_the_cluster_lacks_asks_for_its_operator(client: Client) -> None:
    """apply() of a job kind that the server does not have raises Refused with its operator as hint."""
    api = client(lambda *_: (404, b"404 page not found\n"))
    with pytest.raises(Refused, match="MPIJob demo-m was refused") as refused:
        api.apply({"kind": "MPIJob", "metadata": {"name": "demo-m"}})
    assert "install its operator" in refused.value.hint
    with pytest.raises(Refused, match="ConfigMap demo-m was refused") as refused:
        api.apply({"kind": "ConfigMap", "metadata": {"name": "demo-m"}})
    assert refused.value.hint == ""


def test_what_a_server_refuses_is_said_with_the_objects_name(client: Client) -> None:
    """Status 422 raises Refused with kind, name and the server's message."""
    api = client(lambda *_: status(422, "MPIJob is invalid: spec.slotsPerWorker: must be positive"))
    with pytest.raises(Refused, match=r"MPIJob demo-m was refused: MPIJob is invalid: spec\.slotsPerWorker") as refused:
        api.apply({"kind": "MPIJob", "metadata": {"name": "demo-m"}})
    assert refused.value.status == 422


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_a_server_that_starts_again_does_not_answer(client: Client, code: int) -> None:
    """Status 429 or 5xx of a read raises Unreachable with server and code."""
    api = client(lambda *_: (code, b"<html>Bad Gateway</html>"))
    with pytest.raises(Unreachable, match=rf"the API server http://127\.0\.0\.1:\d+ does not answer: {code} "):
        api.get("Pod", "p")


def test_a_server_that_fails_at_a_change_has_refused_it(client: Client) -> None:
    """Status 500 of apply() raises Refused with the server's message."""
    api = client(lambda *_: status(500, "etcdserver: request timed out"))
    with pytest.raises(Refused, match="MPIJob demo-m was refused: etcdserver: request timed out"):
        api.apply({"kind": "MPIJob", "metadata": {"name": "demo-m"}})


def test_a_node_that_has_no_log_does_not_stand_for_its_server(client: Client) -> None:
    """Status 500 of a pod's log raises Refused, not Unreachable."""
    api = client(lambda *_: status(500, "the node has no such container"))
    with pytest.raises(Refused, match=r"^the node has no such container$"):
        [*api.lines({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "worker"}]}})]


def test_a_server_that_is_not_there_is_named_with_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused connection raises Unreachable with server and reason; the hint names the context."""
    api = client_of("http://127.0.0.1:1", tmp_path, monkeypatch)
    with pytest.raises(Unreachable) as silent:
        api.get("Pod", "p")
    assert silent.value.message.startswith("the API server http://127.0.0.1:1 does not answer: ")
    assert "Connection refused" in silent.value.message
    assert "object at 0x" not in silent.value.message
    assert silent.value.hint.startswith("kubectl cluster-info;")
    assert "kubectl --context here cluster-info" in _in_context(tmp_path).hint


def test_a_tls_connection_that_breaks_is_a_server_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TLS connection that is closed at once raises Unreachable."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def hang_up() -> None:
            """Accept a connection and close it."""
            listener.accept()[0].close()

        threads.submit(hang_up)
        api = client_of(f"https://127.0.0.1:{listener.getsockname()[1]}", tmp_path, monkeypatch)
        with pytest.raises(Unreachable, match=r"does not answer: "):
            api.get("Pod", "p")


def _in_context(directory: Path) -> Unreachable:
    """Return the error of a client of context `here` whose server does not listen."""
    kubeconfig(directory / "kubeconfig", "http://127.0.0.1:1")
    with pytest.raises(Unreachable) as silent:
        Api("demo", "here").get("Pod", "p")
    return silent.value


def test_a_kubeconfig_that_is_missing_and_a_context_that_is_not_in_it_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing kubeconfig, and an unknown context, raise HostError with what to set as hint."""
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(HostError, match="no cluster is configured") as nothing:
        Api("demo")
    assert "KUBECONFIG=FILE" in nothing.value.hint
    client_of("http://127.0.0.1:1", tmp_path, monkeypatch)
    with pytest.raises(HostError, match="the kubeconfig has no context `prod`") as other:
        Api("demo", "prod")
    assert "kubectl config get-contexts" in other.value.hint


# --- lines ---------------------------------------------------------------------------------------------------


def stamped(second: int, text: str, fraction: str = "000000000", zone: str = "Z") -> bytes:
    """Return a pod's log line with its time, as the API server sends it."""
    return f"2026-01-02T03:04:{second:02}.{fraction}{zone} {text}\n".encode()


def test_lines_come_with_their_times(client: Client) -> None:
    """lines() yields each line's time and text, also of an empty line."""
    body = stamped(5, "one") + stamped(5, "", "000000001") + stamped(6, "two  words")
    api = client(lambda *_: (200, body))
    assert list(api.lines(POD)) == [
        ("2026-01-02T03:04:05.000000000Z", "one"),
        ("2026-01-02T03:04:05.000000001Z", ""),
        ("2026-01-02T03:04:06.000000000Z", "two  words"),
    ]


def test_a_line_that_is_cut_off_by_a_lost_connection_is_not_handed_on(client: Client) -> None:
    """A line without its end when the connection is lost is not yielded; the next one raises Unreachable."""
    api = client(lambda *_: (200, stamped(5, "whole") + stamped(6, "half of it")[:-4] + CUT))
    lines = api.lines(POD, follow=True)
    assert next(lines)[1] == "whole"
    with pytest.raises(Unreachable, match="does not answer"):
        next(lines)


def test_lines_after_a_time_are_asked_for_to_the_second_and_known_ones_left_out(client: Client) -> None:
    """lines() after a time asks for sinceTime in whole seconds and leaves out the lines known by their fraction."""
    asked: list[str] = []

    def answer(_: str, path: str) -> Answer:
        """Record the path; answer with a line at the known time and a later one."""
        asked.append(path)
        return 200, stamped(5, "known", "100000000") + stamped(5, "new", "200000000")

    found = list(client(answer).lines(POD, "2026-01-02T03:04:05.100000000Z"))
    assert [text for _, text in found] == ["new"]
    assert "sinceTime=2026-01-02T03%3A04%3A05Z" in asked[0]
    assert "follow" not in asked[0]


def test_times_of_a_node_with_a_clock_of_its_own_zone_are_in_utc(client: Client) -> None:
    """Times with an offset are converted to UTC; a line that does not begin with a time is split at its blank."""
    body = stamped(5, "east", "123456789", "+02:00") + stamped(6, "west", "5", "-05:30") + b"no time\n"
    assert list(client(lambda *_: (200, body)).lines(POD)) == [
        ("2026-01-02T01:04:05.123456789Z", "east"),
        ("2026-01-02T08:34:06.5Z", "west"),
        ("no", "time"),
    ]


def test_a_pod_that_prints_nothing_for_a_while_is_followed_on(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """lines(follow=True) asks again after a pause without output, and yields each line once."""
    monkeypatch.setattr(kubernetes, "LISTENING", 0.05)
    numbers = count()

    def answer(*_: str) -> Answer:
        """Answer twice with one line and silence, then with a second line."""
        first = stamped(5, "one")
        return (200, first + SILENT) if next(numbers) < 2 else (200, first + stamped(9, "two"))

    assert [text for _, text in client(answer).lines(POD, follow=True)] == ["one", "two"]


# --- pods as containers --------------------------------------------------------------------------------------


def pod(name: str, role: str = "worker", run: str = "m", made: str = "2026-01-02T03:04:05Z", **given: Any) -> Manifest:
    """Return a running pod of lab `demo` with this role and run, on node n0."""
    labels = {"labctl.lab": "demo", "labctl.role": role, "labctl.run": run, **given.pop("labels", {})}
    metadata = {"name": name, "uid": f"id-{name}", "creationTimestamp": made, "labels": labels}
    metadata |= given.pop("metadata", {})
    spec = {"nodeName": "n0", "containers": [{"name": role, "image": "labctl/cpu"}]}
    return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Running", **given}}


INDEX = "batch.kubernetes.io/job-completion-index"


@pytest.mark.parametrize(
    ("found", "node"),
    [
        (pod("demo-m-launcher-x7k2p", "launcher"), "launcher"),
        (pod("demo-m-worker-0"), "worker-0"),
        (pod("demo-m-worker-12"), "worker-12"),
        (pod("demo-my-worker-3-worker-1"), "worker-1"),
        (pod("demo-m-node-0-3-x7k2p", labels={INDEX: "3"}), "worker-3"),
        (pod("demo-m-node-0-0-x7k2p", labels={INDEX: "0"}), "worker-0"),
        (pod("demo-m-node-0-3-x7k2p", metadata={"annotations": {INDEX: "3"}}), "worker-3"),
        ({"metadata": {"name": "somebody"}}, "launcher"),
    ],
)  # fmt: skip
def test_a_pod_is_called_by_its_number_in_the_job(found: Manifest, node: str) -> None:
    """node_of() is worker-N by name or completion index, `launcher` for a launcher and for a stranger's pod."""
    assert node_of(found) == node


def test_the_latest_run_comes_first_with_its_launcher_and_workers_in_the_order_of_their_numbers() -> None:
    """by_run() sorts the newest run first, each with its launcher, then workers by number."""
    late, early = "2026-01-02T04:00:00Z", "2026-01-02T03:00:00Z"
    found = [
        *(pod(f"a-worker-{number}", run="a", made=early) for number in (10, 9, 0)),
        pod("a-launcher", "launcher", run="a", made=early),
        # A pod of a later run may have been made first, another of an earlier one again.
        pod("b-worker-1", run="b", made="2026-01-02T03:30:00Z"),
        pod("b-worker-0", run="b", made=late),
        pod("b-launcher", "launcher", run="b", made=late),
    ]
    names = [one["metadata"]["name"] for one in by_run(found)]
    assert names == [
        "b-launcher", "b-worker-0", "b-worker-1", "a-launcher", "a-worker-0", "a-worker-9", "a-worker-10",
    ]  # fmt: skip


READY = [{"type": "Ready", "status": "True"}]


@pytest.mark.parametrize(
    ("found", "state", "health"),
    [
        (pod("demo-m-worker-0", phase="Pending"), "created", None),
        (pod("demo-m-worker-0"), "running", "starting"),
        (pod("demo-m-worker-0", conditions=READY), "running", "healthy"),
        (pod("demo-m-worker-0", phase="Succeeded"), "exited", None),
        (pod("demo-m-worker-0", phase="Failed"), "dead", None),
        (pod("demo-m-worker-0", phase="Unknown"), "created", None),
        (pod("demo-m-worker-0", conditions=READY, metadata={"deletionTimestamp": "now"}), "removing", "healthy"),
    ],
)
def test_a_pod_is_a_container_of_its_node(found: Manifest, state: str, health: str | None) -> None:
    """container_of() maps the pod's phase to a state and its Ready condition to health, with id, node and host."""
    made = container_of(found, "demo")
    assert (made.state, made.health) == (state, health)
    assert (made.id, made.name, made.node) == ("id-demo-m-worker-0", "demo-m-worker-0", "worker-0")
    assert (made.host, made.role, made.fingerprint, made.image) == ("n0", "worker", "m", "labctl/cpu")


def test_a_pod_that_waits_says_why() -> None:
    """The reason of a pending pod's container is its scheduling condition's message."""
    conditions = [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}]
    assert container_of(pod("w-worker-0", phase="Pending", conditions=conditions), "demo").reason == (
        "0/1 nodes are available"
    )


# --- programs in pods ----------------------------------------------------------------------------------------


class Programs(FakeApi):
    """Pods in which each program is a web socket with these frames."""

    def __init__(self, *frames: tuple[int, bytes], **options: bool) -> None:
        """Answer each program with these frames."""
        super().__init__(POD)
        self.frames, self.options = frames, options
        self.begun: list[tuple[str, ...]] = []
        self.asked_for_input: list[bool] = []

    def execute(self, pod: str, argv: tuple[str, ...], **options: bool) -> Any:  # noqa: ARG002
        """Record the command and if it has stdin; return a web socket with the planted frames."""
        self.begun.append(argv)
        self.asked_for_input.append(options.get("stdin", False))
        self.socket = web_socket(*self.frames, **self.options)
        return self.socket


def executed(*frames: tuple[int, bytes], **options: bool) -> Any:
    """Run `make` in a pod that sends these frames; return its output and code."""
    api = Programs(*frames, **options)
    return KubernetesEngine(api, "demo").exec("demo-m-launcher", ("make",), user="", limit=30)


def test_a_program_ends_with_its_output_and_code() -> None:
    """exec() returns stdout, stderr and code, 0 for Success, else that of the failure."""
    done = executed((OUT, b"on"), (ERR, b"care"), (OUT, b"e\n"), SUCCESS)
    assert (done.code, done.out, done.err) == (0, "one\n", "care")
    assert executed((OUT, b"x"), failure(7)).code == 7
    assert executed(failure(137)).code == 137


def test_a_letter_may_come_in_two_frames() -> None:
    """A UTF-8 character split over two frames is decoded."""
    assert executed((OUT, "ü".encode()[:1]), (OUT, "ü\n".encode()[1:]), SUCCESS).out == "ü\n"


def test_a_program_that_is_not_there_is_not_found_and_what_does_not_start_is_126() -> None:
    """exec() of a missing program returns NOT_FOUND, of one that is not executable 126."""

    def refused(message: str) -> tuple[int, bytes]:
        """Return the frame of a program that the runtime does not start."""
        return 3, json.dumps({"status": "Failure", "message": message, "reason": "InternalError"}).encode()

    runtime = 'OCI runtime exec failed: exec failed: unable to start container process: exec: "make": '
    assert executed(refused(f"{runtime}executable file not found in $PATH: unknown")).code == NOT_FOUND
    assert executed(refused(f"{runtime}permission denied: unknown")).code == 126


def test_a_connection_that_is_lost_is_no_end_of_the_program() -> None:
    """A connection that breaks, or closes without a status, raises HostError."""
    with pytest.raises(HostError, match="the connection to make was lost: Connection to remote host was lost") as lost:
        executed((OUT, b"half"), lost=True)
    assert lost.value.hint == "labctl status"
    with pytest.raises(HostError, match=r"the connection to make was lost$"):
        executed((OUT, b"closed without a word"))


def test_a_program_that_takes_too_long_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program past its limit raises ProcessTimeout, and the connection is closed."""
    monkeypatch.setattr(kubernetes, "LOOK", 0.01)
    api = Programs((OUT, b"still\n"), silent=True)
    with pytest.raises(ProcessTimeout, match=r"`make` timed out after 0\.03 s"):
        KubernetesEngine(api, "demo").exec("demo-m-launcher", ("make",), user="", limit=0.03)
    assert not api.socket.is_open()


def test_a_directory_and_variables_are_given_by_programs_that_every_image_has() -> None:
    """exec() sets a directory by `sh -c cd`, stream() variables by `env`."""
    api = Programs(SUCCESS)
    engine = KubernetesEngine(api, "demo")
    engine.exec("demo-m-launcher", ("make", "it"), user="", workdir="/work dir")
    engine.stream("demo-m-launcher", ("make",), print, user="", environment=(("A", "1 2"),), limit=30)
    assert api.begun == [
        ("sh", "-c", 'cd "$0" && exec "$@"', "/work dir", "make", "it"),
        ("env", "A=1 2", "make"),
    ]


def test_lines_are_whole_across_frames_and_the_last_may_have_no_end() -> None:
    """stream() joins the parts of a line for stdout and stderr apart, and hands on a last line without an end."""
    api, heard = Programs((OUT, b"a\nb"), (ERR, b"care"), (OUT, b"c\nd"), (ERR, b"ful\n"), failure(3)), list[str]()
    assert KubernetesEngine(api, "demo").stream("demo-m-launcher", ("make",), heard.extend, user="", limit=30) == 3
    assert sorted(heard) == ["a", "bc", "careful", "d"]
    assert heard[-1] == "d"


def test_who_is_handed_lines_may_fail_and_that_is_no_lost_connection() -> None:
    """OSError of the function that gets the lines is raised by stream() as it is."""

    def full(_: Sequence[str]) -> None:
        """Raise OSError that the disk is full."""
        raise OSError("disk is full")

    engine = KubernetesEngine(Programs((OUT, b"a\n"), SUCCESS), "demo")
    with pytest.raises(OSError, match="disk is full"):
        engine.stream("demo-m-launcher", ("make",), full, user="", limit=30)


def attached(api: Programs, **options: Any) -> int:
    """Attach to `make` in a pod; return its exit code."""
    return KubernetesEngine(api, "demo").attach("demo-m-launcher", ("make",), user="", workdir=None, **options)


def test_an_attached_program_prints_here_and_its_code_is_the_answer(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """attach() writes the program's bytes to stdout and stderr of this process and returns its code."""
    assert attached(Programs((OUT, b"out\xff\n"), (ERR, b"err\n"), failure(9))) == 9
    assert capfdbinary.readouterr() == (b"out\xff\n", b"err\n")


def test_an_attached_programs_lines_can_be_had() -> None:
    """attach() with on_line hands on whole lines, also one that came in two frames."""
    heard: list[str] = []
    assert attached(Programs((OUT, b"one\ntw"), (OUT, b"o"), SUCCESS), on_line=heard.append) == 0
    assert heard == ["one", "two"]


def test_an_attached_program_reads_what_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """attach() with stdin=pipe sends what is typed on channel 0."""
    reading, writing = os.pipe()
    os.write(writing, b"typed\n")
    os.close(writing)
    api = Programs(SUCCESS, silent=True)
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        # The program ends once it has read a line.
        send = Frames.send
        monkeypatch.setattr(Frames, "send", lambda self, *given, **named: (send(self, *given, **named), self.end()))
        assert attached(api, stdin="pipe") == 0
    assert api.socket.sock.sent == [b"\0typed\n"]


def test_a_program_in_a_terminal_hears_of_its_size_and_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """attach() with stdin=terminal sends the terminal's size, and again when it changes."""
    sizes = iter([os.terminal_size((80, 24)), os.terminal_size((100, 30))])
    monkeypatch.setattr("shutil.get_terminal_size", lambda: next(sizes))
    send = Frames.send

    def told(self: Frames, payload: bytes, **named: Any) -> None:
        """Send the payload; end the program once the second size was sent."""
        send(self, payload, **named)
        if b"100" in payload:
            self.end()

    monkeypatch.setattr(Frames, "send", told)
    api = Programs(SUCCESS, silent=True)
    near, far = os.openpty()
    with os.fdopen(near), os.fdopen(far) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert attached(api, stdin="terminal") == 0
    assert api.socket.sock.sent == [b'\4{"Width": 80, "Height": 24}', b'\4{"Width": 100, "Height": 30}']


def test_a_program_whose_input_is_empty_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """attach() with stdin=pipe and /dev/null as stdin asks the server for no input."""
    api = Programs(SUCCESS)
    with Path(os.devnull).open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert attached(api, stdin="pipe") == 0
    assert api.asked_for_input == [False]


def test_the_end_of_what_is_typed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With protocol v5 attach() sends the close of channel 0 at the end of stdin."""
    monkeypatch.setattr(Frames, "subprotocol", "v5.channel.k8s.io")
    api = Programs(SUCCESS, silent=True)
    empty = tmp_path / "empty"
    empty.touch()
    with empty.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        # The program ends once it has read all.
        send = Frames.send
        monkeypatch.setattr(Frames, "send", lambda self, *given, **named: (send(self, *given, **named), self.end()))
        assert attached(api, stdin="pipe") == 0
    assert api.socket.sock.sent == [b"\xff\0"]


def test_a_lost_connection_ends_an_attached_program_with_words() -> None:
    """attach() over a connection that breaks raises HostError."""
    with pytest.raises(HostError, match="the connection to make was lost: Connection to remote host was lost"):
        attached(Programs((OUT, b"half"), lost=True))


def test_a_reader_that_has_gone_is_no_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """attach() whose stdout is a closed pipe raises OutputClosed."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        with pytest.raises(OutputClosed):
            attached(Programs((OUT, b"more than is wanted\n"), SUCCESS))


def test_secrets_are_not_given_to_a_program_in_a_pod() -> None:
    """attach() with secret_env raises ConfigError."""
    with pytest.raises(ConfigError, match="cannot be given secrets"):
        attached(Programs(), secret_env={"TOKEN": "canary"})


def beginning(api: FakeApi, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> Any:
    """Start `make it` in a pod through the real client; its connection is planted, or fails with this error."""
    from kubernetes import client
    from kubernetes.stream import ws_client

    def connect(*_: Any) -> Any:
        """Return a connection with 1,000 bytes of output, or raise the planted error."""
        if error:
            raise error
        return Frames(((OUT, 1000 * b"x"), SUCCESS))

    api._configuration = client.Configuration()
    monkeypatch.setattr(ws_client, "create_websocket", connect)
    return api.execute("demo-m-launcher", ("make", "it"))


def test_what_a_program_has_printed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """outputs_of() yields all output, and the client's socket keeps no buffer of it."""
    with kubernetes.connected(beginning(FakeApi(POD), monkeypatch)) as socket:
        pieces = [piece for _, piece in kubernetes.outputs_of(socket, 30, ("make",))]
        assert b"".join(pieces) == 1000 * b"x"
        kept = [one for one in vars(socket).values() if isinstance(one, (io.BytesIO, io.StringIO))]
        assert kept == []


def test_who_may_not_enter_pods_is_told_the_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake refused with 403 raises Refused with the server's message and the pods/exec role as hint."""
    body = json.dumps({"message": 'pods "demo-m-launcher" is forbidden: User "ann" cannot get "pods/exec"'}).encode()
    denied = WebSocketBadStatusException("Handshake status 403 Forbidden -+-+- {'audit-id': '1'}", 403, resp_body=body)
    with pytest.raises(Refused) as refused:
        beginning(FakeApi(POD), monkeypatch, denied)
    assert refused.value.message == 'pods "demo-m-launcher" is forbidden: User "ann" cannot get "pods/exec"'
    assert refused.value.status == 403
    assert "--resource=pods/exec" in refused.value.hint


def test_a_pod_whose_container_has_ended_is_named_in_the_nodes_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake refused by the node, as text, raises Refused with pod and text, without the headers."""
    text, body = "Handshake status 500 -+-+- {'date': 'Mon'} -+-+- gone", b'container not found ("worker")'
    with pytest.raises(Refused) as refused:
        beginning(FakeApi(POD), monkeypatch, WebSocketBadStatusException(text, 500, resp_body=body))
    assert refused.value.message == 'demo-m-launcher: container not found ("worker")'


def test_a_program_does_not_begin_where_the_server_is_gone_or_its_pod_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """execute() raises Unreachable for a server that refuses connections, HostError for a missing pod."""
    with pytest.raises(Unreachable, match=r"the API server https://cluster:6443 does not answer: .*refused"):
        beginning(FakeApi(POD), monkeypatch, ConnectionRefusedError(111, "Connection refused"))
    with pytest.raises(HostError, match="pod demo-m-launcher not found in namespace demo"):
        FakeApi().execute("demo-m-launcher", ("make",))
