"""A namespace of a Kubernetes cluster: its objects, by the official client, and a lab's pods as containers.

Paths and answers are those of the Kubernetes API reference.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from labctl.backends.kubernetes.pods import own_container, trouble
from labctl.backends.state import Container, ObservedState
from labctl.errors import ConfigError, HostError
from labctl.model import LAUNCHER, Pairs
from labctl.records.lines import line_of
from labctl.system import process
from labctl.system.process import CompletedProcess

Manifest = dict[str, Any]
OnLine = Callable[[str], None]
OnLines = Callable[[Sequence[str]], object]
CACHE = "cache"
"""The role of a pod that fills a lab's claim, and is of no run."""
ENGINE = "kubernetes"
"""What the cluster is called where a host is named."""
# Seconds for an answer; for a line of a log, after which the stream is opened again; between two looks at pods.
ANSWERING, LISTENING, LOOK = 30, 60, 1.0
# Of a short program, as in a container.
EXECUTING = 120
CHUNK = 1 << 16
# Answers of a server that is overloaded or starts again, or of what stands before it.
PASSING = (429, 502, 503, 504)
# That of its store while that chooses a leader; about a program or a log in a pod, the node's.
STORE, OF_NODES = 500, ("/exec", "/log")
# Pods have at most so many lines printed before that `logs` shows.
SHOWN = 10_000

CORE, KUBEFLOW, TRAINER = "/api/v1", "/apis/kubeflow.org/v2beta1", "/apis/trainer.kubeflow.org/v1alpha1"
COLLECTIONS: Mapping[str, tuple[str, str]] = {
    "Namespace": (CORE, "namespaces"),
    "Node": (CORE, "nodes"),
    "StorageClass": ("/apis/storage.k8s.io/v1", "storageclasses"),
    "CustomResourceDefinition": ("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions"),
    "SelfSubjectAccessReview": ("/apis/authorization.k8s.io/v1", "selfsubjectaccessreviews"),
    "Secret": (CORE, "secrets"),
    "PersistentVolumeClaim": (CORE, "persistentvolumeclaims"),
    "ConfigMap": (CORE, "configmaps"),
    "Pod": (CORE, "pods"),
    "Event": (CORE, "events"),
    "ResourceQuota": (CORE, "resourcequotas"),
    "LimitRange": (CORE, "limitranges"),
    "MPIJob": (KUBEFLOW, "mpijobs"),
    "TrainingRuntime": (TRAINER, "trainingruntimes"),
    "TrainJob": (TRAINER, "trainjobs"),
}
"""Where the objects of a kind are: group and version, and the plural that rights name."""
CLUSTER_WIDE = ("Namespace", "Node", "StorageClass", "CustomResourceDefinition", "SelfSubjectAccessReview")


class Unreachable(HostError):
    """The API server does not answer."""


class Refused(HostError):
    """The API server's answer is an error; ``status`` is that of HTTP."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class Api:
    """The API server of a kubeconfig's context, and one namespace there.

    The context is the current one where none is named; KUBECONFIG and ~/.kube/config are read as kubectl reads them,
    in a pod its service account. HostError where there is none.
    """

    def __init__(self, namespace: str, context: str = "") -> None:
        from kubernetes import client, config, dynamic

        self.namespace, self.context = namespace, context
        self._configuration = client.Configuration()
        try:
            config.load_kube_config(context=context or None, client_configuration=self._configuration)
        except config.ConfigException as error:
            try:
                if context:
                    raise
                config.load_incluster_config(client_configuration=self._configuration)
            except config.ConfigException:
                raise _no_context(context, error) from error
        # Who asks decides whether to ask again.
        self._configuration.retries = False
        if not self._configuration.verify_ssl:
            import urllib3

            # The kubeconfig says so; kubectl does not warn either.
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        # Paths are known: nothing has to be discovered.
        self._client = dynamic.DynamicClient(client.ApiClient(self._configuration), discoverer=lambda *_: None)

    @property
    def server(self) -> str:
        return str(self._configuration.host)

    def path(self, kind: str, name: str = "") -> str:
        """The path of an object, or of all of a kind."""
        group, plural = COLLECTIONS[kind]
        where = "" if kind in CLUSTER_WIDE else f"/namespaces/{self.namespace}"
        return f"{group}{where}/{plural}{f'/{name}' if name else ''}"

    def request(self, method: str, path: str, body: Manifest | None = None, **options: Any) -> Any:
        """What the server answers, as JSON. Unreachable, Refused."""
        return json.loads(self._respond(method, path, body, **options).data)

    def _respond(
        self,
        method: str,
        path: str,
        body: Manifest | None = None,
        *,
        media: str = "",
        seconds: Any = ANSWERING,
        **query: Any,
    ) -> Any:
        import urllib3
        from kubernetes.client.exceptions import ApiException
        from kubernetes.dynamic.exceptions import DynamicApiError

        try:
            return self._client.request(
                method,
                path,
                body=body,
                query_params=[(name, value) for name, value in query.items() if value],
                content_type=media or "application/json",
                serialize=False,
                _request_timeout=seconds,
            )
        except (ApiException, DynamicApiError) as error:
            raise self._refused(method, path, error.status, error.body, str(error.reason)) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._silent(error) from error

    def _silent(self, error: Exception) -> Unreachable:
        why = re.sub(r"^.*?: ", "", str(error), count=1) if "Connection object" in str(error) else str(error)
        context = f"--context {shlex.quote(self.context)} " if self.context else ""
        return Unreachable(
            f"the API server {self.server} does not answer: {why}",
            hint=f"kubectl {context}cluster-info; another cluster: LAB_K8S_CONTEXT in .env",
        )

    def _refused(self, method: str, path: str, status: int | None, body: Any, reason: str) -> Refused | Unreachable:
        try:
            said = str(json.loads(body)["message"])
        except (ValueError, KeyError, TypeError):
            said = reason
        if not status:
            # The client's own word for a TLS connection that breaks.
            return self._silent(OSError(" ".join(said.split())))
        asks = method == "GET" and not path.endswith(OF_NODES)
        if status in PASSING or (status == STORE and asks):
            return self._silent(OSError(f"{status} {said}"))
        hint = ""
        if status == 401:
            said = f"the API server {self.server} does not accept the credentials of this context: {said}"
            hint = "log in to the cluster again: a token or certificate in the kubeconfig has expired, or is another's"
        elif status == 403:
            hint = grant(*asked_for(method, path), self.namespace if f"/namespaces/{self.namespace}" in path else "")
        return Refused(status, said, hint)

    def get(self, kind: str, name: str) -> Manifest | None:
        """An object; None where it is not there, or the cluster knows none of its kind."""
        try:
            return dict(self.request("GET", self.path(kind, name)))
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: str, selector: str = "", fields: str = "") -> list[Manifest]:
        """The objects of a kind, by labels and fields; none where the cluster knows none of that kind."""
        try:
            found = self.request("GET", self.path(kind), labelSelector=selector, fieldSelector=fields)
        except Refused as error:
            if error.status == 404:
                return []
            raise
        return [{"kind": kind, **one} for one in found["items"]]

    def apply(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create an object or change it to this, by server-side apply. Refused, with the object's name.

        A dry run refuses fields that the server would drop, as its definition of the object has none of that name.
        """
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        query = {"fieldManager": "labctl", "force": "true", "dryRun": "All" if dry_run else ""}
        try:
            made = self.request("PATCH", self.path(kind, name), manifest, media="application/apply-patch+yaml", **query)
        except Refused as error:
            hint = error.hint
            if error.status == 404 and kind in ("MPIJob", "TrainJob", "TrainingRuntime"):
                hint = "install its operator in the cluster; LAB_K8S_JOB names the kind of job; labctl doctor"
            raise Refused(error.status, f"{kind} {name} was refused: {error.message}", hint) from error
        if dry_run and (dropped := [*_dropped(manifest, made)]):
            message = f"{kind} {name} was refused: the cluster's definition has no field {', '.join(dropped)}"
            raise Refused(422, message, "its operator is older than the fields, or they are misspelt; labctl doctor")
        return dict(made)

    def create(self, kind: str, body: Manifest) -> Manifest:
        return dict(self.request("POST", self.path(kind), body))

    def delete(self, kind: str, name: str) -> bool:
        """Delete an object with all that it owns; whether it was there."""
        try:
            self.request("DELETE", self.path(kind, name), propagationPolicy="Background")
        except Refused as error:
            if error.status == 404:
                return False
            raise
        return True

    def lines(
        self, pod: Manifest, since: str = "", *, follow: bool = False, last: int = 0
    ) -> Iterator[tuple[str, str]]:
        """Time and text of each line that a pod has printed, after that of the time ``since``. HostError.

        With ``follow`` to its end, over another connection where it prints nothing for a while.
        """
        import urllib3

        while True:
            answer = self._respond(
                "GET",
                f"{self.path('Pod', pod['metadata']['name'])}/log",
                container=own_container(pod)["name"],
                seconds=(ANSWERING, LISTENING) if follow else ANSWERING,
                timestamps="true",
                follow="true" if follow else "",
                # To the second, and those of that second are there again.
                sinceTime=f"{since[:19]}Z" if since else "",
                tailLines=str(last or ""),
            )
            known = since
            try:
                with closing(answer):
                    for when, text in map(_timed, _whole_lines(answer)):
                        if when > known:
                            since = when
                            yield when, text
            except urllib3.exceptions.ReadTimeoutError as error:
                if not follow:
                    raise self._silent(error) from error
            except (urllib3.exceptions.HTTPError, OSError) as error:
                raise self._silent(error) from error
            else:
                return

    def execute(self, pod: str, argv: tuple[str, ...], *, stdin: bool = False, tty: bool = False) -> Any:
        """A program in a pod, begun: the client's web socket. HostError."""
        from kubernetes import client, stream
        from kubernetes.client.exceptions import ApiException
        from websocket import WebSocketBadStatusException

        found = self.get("Pod", pod)
        if not found:
            raise Refused(404, f"pod {pod} not found in namespace {self.namespace}", "labctl status")
        # Of its own: the client's web sockets change the object that makes them.
        core = client.CoreV1Api(client.ApiClient(self._configuration))
        options: dict[str, Any] = {"stdin": stdin, "stdout": True, "stderr": not tty, "tty": tty}
        try:
            socket = stream.stream(
                core.connect_get_namespaced_pod_exec,
                pod,
                self.namespace,
                command=list(argv),
                container=own_container(found)["name"],
                _preload_content=False,
                binary=True,
                **options,
            )
        except ApiException as error:
            # The client's own exception has the answer in words for developers alone.
            why = error.__context__
            if isinstance(why, WebSocketBadStatusException):
                path = f"{self.path('Pod', pod)}/exec"
                raise self._refused("GET", path, why.status_code, why.resp_body, str(error.reason)) from error
            raise self._silent(why if isinstance(why, Exception) else error) from error
        # The client keeps all that has come, but for this: a run's results may be larger than the memory here.
        socket._all = SimpleNamespace(write=len)
        return socket


def _dropped(sent: Any, made: Any, path: str = "") -> Iterator[str]:
    """The fields that were sent and did not come back; a Secret's texts come back encoded."""
    if isinstance(sent, dict) and isinstance(made, dict):
        for key, value in sent.items():
            at = f"{path}.{key}" if path else key
            if key not in made and value not in ({}, [], None) and at != "stringData":
                yield at
            elif key in made:
                yield from _dropped(value, made[key], at)
    elif isinstance(sent, list) and isinstance(made, list) and len(sent) == len(made):
        for number, (one, other) in enumerate(zip(sent, made, strict=True)):
            yield from _dropped(one, other, f"{path}[{number}]")


def _no_context(context: str, error: Exception) -> HostError:
    if context:
        return HostError(
            f"the kubeconfig has no context `{context}`: {error}",
            hint="kubectl config get-contexts lists them; LAB_K8S_CONTEXT in .env names one",
        )
    return HostError(
        f"no cluster is configured: {error}", hint="KUBECONFIG=FILE names a kubeconfig; kubectl cluster-info tries it"
    )


def _whole_lines(answer: Any) -> Iterator[bytes]:
    """The lines of a stream; one that is cut off by a lost connection is not among them."""
    rest = b""
    for piece in answer.stream(CHUNK):
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole


def _timed(line: bytes) -> tuple[str, str]:
    """Time and text. Nodes write times as their clocks show them: in UTC they can be compared, and asked for."""
    when, _, text = line.decode("utf-8", "replace").partition(" ")
    if shifted := re.fullmatch(r"([0-9T:-]{19})(\.[0-9]+)?([+-][0-9:]{5})", when):
        moment = datetime.fromisoformat(shifted[1] + shifted[3]).astimezone(timezone.utc)
        when = f"{moment:%Y-%m-%dT%H:%M:%S}{shifted[2] or ''}Z"
    return when, text


DASHES = str.maketrans(",/", "--")
VERBS = {"GET": "get", "PATCH": "patch", "POST": "create", "DELETE": "delete"}


def asked_for(method: str, path: str) -> tuple[str, str]:
    """The right that a request takes: a verb, and resources with their group, or a path that is none of a resource."""
    words = path.partition("?")[0].strip("/").split("/")
    rest = words[2:] if words[0] == "api" else words[3:]
    if not rest:
        return VERBS[method], path
    group = "" if words[0] == "api" else f".{words[1]}"
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        rest = rest[2:]
    verb = "list" if method == "GET" and len(rest) == 1 else VERBS[method]
    return verb, f"{rest[0]}{group}" + (f"/{rest[2]}" if len(rest) > 2 else "")


def grant(verbs: str, resources: str, namespace: str) -> str:
    """What an administrator types to give a person rights in a namespace, or in the cluster where none is named."""
    typed, role = (f"kubectl -n {namespace}", "role") if namespace else ("kubectl", "clusterrole")
    # A name of its own for a single right: there may be a role labctl already.
    name = (
        "labctl" if "," in resources else f"labctl-{verbs}-{resources.strip('/').partition('.')[0]}".translate(DASHES)
    )
    kind = "non-resource-url" if resources.startswith("/") else "resource"
    made = f"{typed} create {role} {name} --verb={verbs} --{kind}={resources}"
    bound = f"{typed} create {role}binding {name} --{role}={name} --user=YOU"
    return f"ask who runs the cluster for: {made}; {bound}"


# --- pods as containers --------------------------------------------------------------------------------------


def node_of(pod: Manifest) -> str:
    """What a lab calls a pod: ``launcher``, or ``worker-N`` by the number at its name's end."""
    metadata = pod["metadata"]
    if metadata.get("labels", {}).get("labctl.role") != "worker":
        return LAUNCHER
    name = metadata["name"]
    # A JobSet's pods end in a random word: their index is in a label.
    index = metadata["labels"].get("batch.kubernetes.io/job-completion-index") or metadata.get("annotations", {}).get(
        "batch.kubernetes.io/job-completion-index"
    )
    found = re.search(r"-worker-([0-9]+)$", name)
    return f"worker-{index or (found[1] if found else name)}"


def age_order(pod: Manifest) -> tuple[str, bool, str, int]:
    """The pods of the latest run first, its launcher first among them."""
    node = node_of(pod)
    number = node.rpartition("-")[2]
    run = pod["metadata"]["labels"].get("labctl.run", "")
    return (run, node != LAUNCHER, node.rstrip("0123456789"), int(number) if number.isdigit() else 0)


def by_run(pods: Iterable[Manifest]) -> list[Manifest]:
    """Pods in order: those of the run that was made last first."""
    pods = sorted(pods, key=age_order)
    began: dict[str, str] = {}
    for pod in pods:
        run = pod["metadata"]["labels"].get("labctl.run", "")
        began[run] = max(began.get(run, ""), pod["metadata"]["creationTimestamp"])
    return sorted(pods, key=lambda pod: began[pod["metadata"]["labels"].get("labctl.run", "")], reverse=True)


def is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


STATES = {"Pending": "created", "Running": "running", "Succeeded": "exited", "Failed": "dead"}


def container_of(pod: Manifest, lab: str) -> Container:
    metadata, status = pod["metadata"], pod.get("status", {})
    labels = metadata.get("labels", {})
    state = STATES.get(status.get("phase", ""), "created")
    role = labels.get("labctl.role", "?")
    ready = ("healthy" if is_ready(pod) else "starting") if state == "running" else None
    return Container(
        id=metadata["uid"],
        name=metadata["name"],
        node=node_of(pod),
        host=pod["spec"].get("nodeName", ""),
        role=role,
        slots=0,
        state="removing" if metadata.get("deletionTimestamp") else state,
        health=ready,
        fingerprint=labels.get("labctl.run", lab),
        image=own_container(pod)["image"],
        directory="",
        reason=trouble(pod),
        user="",
    )


class KubernetesEngine:
    """The pods of a lab's runs in one namespace, and programs in them; ``container`` is the name of a pod."""

    def __init__(self, api: Api, lab: str) -> None:
        self.api, self.lab = api, lab

    def pods(self, lab: str) -> list[Manifest]:
        """The pods of a lab's runs, those of its latest one first."""
        found = self.api.list("Pod", f"labctl.lab={lab}")
        return by_run(pod for pod in found if pod["metadata"]["labels"].get("labctl.role") != CACHE)

    def observe(self, lab: str, image: str | None = None, *, node: str = "") -> ObservedState:  # noqa: ARG002
        """The pods of the lab, the latest run's first. What images nodes have nobody can tell."""
        return ObservedState(host=ENGINE, containers=tuple(container_of(pod, lab) for pod in self.pods(lab)))

    def exec(
        self,
        container: str,
        argv: tuple[str, ...],
        *,
        user: str,  # noqa: ARG002 - a pod has one user
        workdir: str | None = None,
        limit: float = EXECUTING,
    ) -> CompletedProcess:
        printed = {OUT: bytearray(), ERR: bytearray()}
        with connected(self.api.execute(container, _within(argv, workdir))) as socket:
            for channel, piece in outputs_of(socket, limit, argv):
                printed[channel] += piece
            code = exit_code(socket, argv)
        return CompletedProcess(argv, code, *(printed[one].decode("utf-8", "replace") for one in (OUT, ERR)))

    def stream(
        self,
        container: str,
        argv: tuple[str, ...],
        on_lines: OnLines,
        *,
        user: str,  # noqa: ARG002
        environment: Pairs = (),
        limit: float,
    ) -> int:
        with connected(self.api.execute(container, _within(argv, None, environment), stdin=True)) as socket:
            for line in _lines(outputs_of(socket, limit, argv, pulse=True)):
                on_lines((line,))
            return exit_code(socket, argv)

    def attach(
        self,
        container: str,
        argv: tuple[str, ...],
        *,
        user: str,  # noqa: ARG002
        workdir: str | None,
        environment: tuple[str, ...] = (),
        secret_env: Mapping[str, str] | None = None,
        stdin: Literal["terminal", "pipe", "none"] = "none",
        on_line: OnLine | None = None,
    ) -> int:
        """Run a program on this process's input and output, or hand on its lines; return its code.

        A labctl that is killed leaves the program to the end of its input.
        """
        if secret_env:
            raise ConfigError("a program in a pod is given no secrets")
        mark = secrets.token_hex(8)
        pairs = tuple((name, value) for name, _, value in (one.partition("=") for one in environment))
        command = ("sh", "-c", MARKED, "sh", mark, *_within(argv, workdir, pairs))
        terminal = stdin == "terminal"
        if stdin == "pipe" and os.path.samestat(os.fstat(sys.stdin.fileno()), Path(os.devnull).stat()):
            # So its input ends at once, on servers too that cannot be told so.
            stdin = "none"
        with connected(self.api.execute(container, command, stdin=stdin != "none", tty=terminal)) as socket:
            if on_line:
                for line in _lines(outputs_of(socket, None, argv)):
                    on_line(line)
                return exit_code(socket, argv)
            from labctl.backends import terminal as terminals

            def signal(number: int) -> None:
                self.exec(container, ("sh", "-c", SIGNAL, mark, str(number)), user="")

            with _connection(argv):
                terminals.carry(socket, signal, reads=stdin != "none", raw=terminal)
            return exit_code(socket, argv)

    def logs(self, project: str, on_line: OnLine, *, node: str = "", follow: bool = False, color: bool = False) -> None:  # noqa: ARG002
        """What the pods of the latest run have printed; with ``follow`` of each to its end."""
        from labctl.system.parallel import pool

        pods = self.pods(self.lab)
        latest = [one for one in pods if one["metadata"]["labels"].get("labctl.run") == _run_of(pods)]
        chosen = [pod for pod in latest if node in ("", node_of(pod))]

        def show(pod: Manifest) -> None:
            for _, text in self.api.lines(pod, follow=follow, last=0 if follow else SHOWN):
                on_line(f"{node_of(pod)}  | {line_of(text, 0).text}")

        with pool(max(len(chosen), 1), endless=True) as threads:
            list(threads.map(show, chosen))

    def versions(self) -> dict[str, str]:
        version = self.api.request("GET", "/version")
        return {
            "engine": f"Kubernetes {version['gitVersion']}",
            "api": f"{version['major']}.{version['minor']}",
            "kernel": "",
        }


def _run_of(pods: list[Manifest]) -> str | None:
    return pods[0]["metadata"]["labels"].get("labctl.run") if pods else None


# --- programs in pods ----------------------------------------------------------------------------------------

# Channels of the exec protocol, v4.channel.k8s.io.
IN, OUT, ERR, ERROR, RESIZE = 0, 1, 2, 3, 4
# Leaves the number of the process, which leads a group of its own, where a signal for it can find it.
MARKED = 'echo $$ > "/tmp/labctl-$1"; shift; exec "$@"'
SIGNAL = 'pid=$(cat "/tmp/labctl-$0") && { kill -"$1" -- "-$pid" 2> /dev/null || kill -"$1" "$pid"; }'


def _within(argv: tuple[str, ...], workdir: str | None, environment: Pairs = ()) -> tuple[str, ...]:
    """The command, in a directory and with variables."""
    given = ("env", *(f"{name}={value}" for name, value in environment)) if environment else ()
    return ("sh", "-c", 'cd "$0" && exec "$@"', workdir, *given, *argv) if workdir else (*given, *argv)


def outputs_of(
    socket: Any, limit: float | None, argv: tuple[str, ...], *, pulse: bool = False
) -> Iterator[tuple[int, bytes]]:
    """What a program prints, by channel, to its end. ProcessTimeout after so many seconds; HostError."""
    deadline = None if limit is None else time.monotonic() + limit
    with _connection(argv):
        while True:
            open_before = socket.is_open()
            if open_before:
                socket.update(timeout=LOOK)
            for channel in (OUT, ERR):
                if piece := socket.read_channel(channel):
                    yield channel, piece
            if not open_before:
                return
            if deadline and time.monotonic() > deadline:
                raise process.ProcessTimeout(f"{shlex.join(argv)}: not done within {limit:g} s")
            if pulse and socket.is_open():
                socket.write_stdin(b"\n")


@contextmanager
def connected(socket: Any) -> Iterator[Any]:
    """A program's web socket, closed after the block: the client leaves open what the server has closed."""
    try:
        yield socket
    finally:
        socket.close()
        socket.sock.shutdown()


@contextmanager
def _connection(argv: tuple[str, ...]) -> Iterator[None]:
    """HostError for a web socket that breaks within."""
    from websocket import WebSocketException

    try:
        yield
    except (WebSocketException, OSError) as error:
        raise HostError(f"the connection to {shlex.join(argv[:1])} was lost: {error}", hint="labctl status") from error


def _lines(outputs: Iterator[tuple[int, bytes]]) -> Iterator[str]:
    """Whole lines of both channels, and what is left at the end."""
    rest = {OUT: b"", ERR: b""}
    for channel, piece in outputs:
        *whole, rest[channel] = (rest[channel] + piece).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in whole)
    yield from (line.decode("utf-8", "replace") for line in rest.values() if line)


def exit_code(socket: Any, argv: tuple[str, ...]) -> int:
    """What the program ended with. HostError where the connection was lost before."""
    said = socket.read_channel(ERROR)
    if not said:
        raise HostError(f"the connection to {shlex.join(argv[:1])} was lost", hint="labctl status")
    status = json.loads(said)
    if status.get("status") == "Success":
        return 0
    causes = status.get("details", {}).get("causes") or ()
    code = next((one["message"] for one in causes if one.get("reason") == "ExitCode"), "")
    if code.isdecimal():
        return int(code)
    # The runtime says so where there is no such program.
    return process.NOT_FOUND if "not found" in status.get("message", "") else 126
