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
from labctl.system import human, process
from labctl.system.process import CompletedProcess

Manifest = dict[str, Any]
OnLine = Callable[[str], None]
OnLines = Callable[[Sequence[str]], object]
CACHE = "cache"
"""Role of a pod that downloads to a lab's claim and belongs to no run."""
ENGINE = "kubernetes"
"""Name of the cluster in place of a host."""
# Seconds for a response; for a line of a log, after which the stream is reopened; between two reads of a web socket.
ANSWERING, LISTENING, LOOK = 30, 60, 1.0
# Seconds for a short program, as in a container.
EXECUTING = 120
CHUNK = 1 << 16
# HTTP statuses of a server or proxy that is overloaded or restarts.
PASSING = (429, 502, 503, 504)
# Status while etcd elects a leader; for these paths the status comes from the node.
STORE, OF_NODES = 500, ("/exec", "/log")
# Earlier lines of each pod that `logs` shows at most.
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
"""API group with version, and plural name as in RBAC rules, by kind."""
CLUSTER_WIDE = ("Namespace", "Node", "StorageClass", "CustomResourceDefinition", "SelfSubjectAccessReview")


class Unreachable(HostError):
    """The API server is unreachable."""


class Refused(HostError):
    """The API server responded with an error; ``status`` is the HTTP status."""

    def __init__(self, status: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class Api:
    """The API server of a kubeconfig's context, and one namespace there."""

    def __init__(self, namespace: str, context: str = "") -> None:
        """Load a kubeconfig, else a pod's service account; connect to nothing. HostError if none or no ``context``.

        An empty ``context`` is the current one.
        """
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
        # The caller decides on retries.
        self._configuration.retries = False
        if not self._configuration.verify_ssl:
            import urllib3

            # The kubeconfig says so; kubectl does not warn either.
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        # Paths are fixed, so skip discovery.
        self._client = dynamic.DynamicClient(client.ApiClient(self._configuration), discoverer=lambda *_: None)

    @property
    def server(self) -> str:
        return str(self._configuration.host)

    def path(self, kind: str, name: str = "") -> str:
        """Return the API path of an object, or of all objects of the kind if ``name`` is empty."""
        group, plural = COLLECTIONS[kind]
        scope = "" if kind in CLUSTER_WIDE else f"/namespaces/{self.namespace}"
        return f"{group}{scope}/{plural}{f'/{name}' if name else ''}"

    def request(self, method: str, path: str, body: Manifest | None = None, **options: Any) -> Any:
        """Send a request; return its JSON, decoded. Unreachable without an answer, Refused for an error response."""
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
        """Send a request; return the raw response. Unreachable without an answer, Refused for an error status."""
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
        """Return the Unreachable of a request that got no response, with the reason and a kubectl hint."""
        why = re.sub(r"^.*?: ", "", str(error), count=1) if "Connection object" in str(error) else str(error)
        context = f"--context {shlex.quote(self.context)} " if self.context else ""
        return Unreachable(
            f"the API server {self.server} does not answer: {why}",
            hint=f"kubectl {context}cluster-info; another cluster: LAB_K8S_CONTEXT in .env",
        )

    def _refused(self, method: str, path: str, status: int | None, body: Any, reason: str) -> Refused | Unreachable:
        """Return Refused for an error response, with a hint for 401 and 403; Unreachable if it may pass."""
        try:
            message = str(json.loads(body)["message"])
        except (ValueError, KeyError, TypeError):
            message = reason
        if not status:
            # The client reports a broken TLS connection so.
            return self._silent(OSError(" ".join(message.split())))
        asks = method == "GET" and not path.endswith(OF_NODES)
        if status in PASSING or (status == STORE and asks):
            return self._silent(OSError(f"{status} {message}"))
        hint = ""
        if status == 401:
            message = f"the API server {self.server} does not accept the credentials of this context: {message}"
            hint = "log in to the cluster again: its token or certificate has expired, or is of another cluster"
        elif status == 403:
            hint = grant(*asked_for(method, path), self.namespace if f"/namespaces/{self.namespace}" in path else "")
        return Refused(status, message, hint)

    def get(self, kind: str, name: str) -> Manifest | None:
        """Return an object; None if it or its kind does not exist. Refused or Unreachable otherwise."""
        try:
            return dict(self.request("GET", self.path(kind, name)))
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: str, selector: str = "", fields: str = "") -> list[Manifest]:
        """Return the objects of a kind that match labels and fields; empty if the kind does not exist."""
        try:
            response = self.request("GET", self.path(kind), labelSelector=selector, fieldSelector=fields)
        except Refused as error:
            if error.status == 404:
                return []
            raise
        return [{"kind": kind, **item} for item in response["items"]]

    def apply(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create or update an object by server-side apply; return it. Refused names the object.

        A dry run also raises Refused for fields that the server would drop as unknown.
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
        """Create an object by POST; return it as stored."""
        return dict(self.request("POST", self.path(kind), body))

    def delete(self, kind: str, name: str) -> bool:
        """Delete an object, and in the background its dependents; return False if it does not exist."""
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
        """Yield time and text of each log line of a pod after ``since``. HostError if the log cannot be read.

        ``follow``: until the pod ends, reconnecting if it prints nothing for a while. ``last``: only so many lines.
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
                # In whole seconds: lines of that second come again.
                sinceTime=f"{since[:19]}Z" if since else "",
                tailLines=str(last or ""),
            )
            seen = since
            try:
                with closing(answer):
                    for when, text in map(_timed, _whole_lines(answer)):
                        if when > seen:
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
        """Start a program in a pod and return its open web socket. Refused or Unreachable if it cannot be started."""
        from kubernetes import client, stream
        from kubernetes.client.exceptions import ApiException
        from websocket import WebSocketBadStatusException

        manifest = self.get("Pod", pod)
        if not manifest:
            raise Refused(404, f"pod {pod} not found in namespace {self.namespace}", "labctl status")
        # A separate client: opening a web socket changes the client object.
        core = client.CoreV1Api(client.ApiClient(self._configuration))
        options: dict[str, Any] = {"stdin": stdin, "stdout": True, "stderr": not tty, "tty": tty}
        try:
            socket = stream.stream(
                core.connect_get_namespaced_pod_exec,
                pod,
                self.namespace,
                command=list(argv),
                container=own_container(manifest)["name"],
                _preload_content=False,
                binary=True,
                **options,
            )
        except ApiException as error:
            # The client's exception hides the response in text for developers.
            why = error.__context__
            if isinstance(why, WebSocketBadStatusException):
                path, body = f"{self.path('Pod', pod)}/exec", (why.resp_body or b"").decode("utf-8", "replace")
                raise self._refused("GET", path, why.status_code, body, f"{pod}: {body}") from error
            raise self._silent(why if isinstance(why, Exception) else error) from error
        # Otherwise the client keeps all output, and a run's results may exceed this machine's memory.
        socket._all = SimpleNamespace(write=len)
        return socket


def _dropped(sent: Any, made: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of fields that were sent but not stored, except stringData, which is stored encoded."""
    if isinstance(sent, dict) and isinstance(made, dict):
        for key, value in sent.items():
            at = f"{path}.{key}" if path else key
            if key not in made and value not in ({}, [], None) and at != "stringData":
                yield at
            elif key in made:
                yield from _dropped(value, made[key], at)
    elif isinstance(sent, list) and isinstance(made, list) and len(sent) == len(made):
        for number, (part, echoed) in enumerate(zip(sent, made, strict=True)):
            yield from _dropped(part, echoed, f"{path}[{number}]")


def _no_context(context: str, error: Exception) -> HostError:
    """Return the HostError of a missing context or, if ``context`` is empty, of no kubeconfig."""
    if context:
        return HostError(
            f"the kubeconfig has no context `{context}`: {error}",
            hint="kubectl config get-contexts lists them; LAB_K8S_CONTEXT in .env names one",
        )
    return HostError(
        f"no cluster is configured: {error}", hint="KUBECONFIG=FILE names a kubeconfig; kubectl cluster-info tries it"
    )


def _whole_lines(answer: Any) -> Iterator[bytes]:
    """Yield the complete lines of a stream; a line cut off at its end is dropped."""
    rest = b""
    for piece in answer.stream(CHUNK):
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole


def _timed(line: bytes) -> tuple[str, str]:
    """Return a log line's time, in UTC, and its text; UTC times compare as text and serve as ``sinceTime``."""
    when, _, text = line.decode("utf-8", "replace").partition(" ")
    if shifted := re.fullmatch(r"([0-9T:-]{19})(\.[0-9]+)?([+-][0-9:]{5})", when):
        moment = datetime.fromisoformat(shifted[1] + shifted[3]).astimezone(timezone.utc)
        when = f"{moment:%Y-%m-%dT%H:%M:%S}{shifted[2] or ''}Z"
    return when, text


DASHES = str.maketrans(",/", "--")
VERBS = {"GET": "get", "PATCH": "patch", "POST": "create", "DELETE": "delete"}


def asked_for(method: str, path: str) -> tuple[str, str]:
    """Return verb and resource, with its API group or a non-resource path, of the right that a request needs."""
    parts = path.partition("?")[0].strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    if not rest:
        return VERBS[method], path
    group = "" if parts[0] == "api" else f".{parts[1]}"
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        rest = rest[2:]
    verb = "list" if method == "GET" and len(rest) == 1 else VERBS[method]
    return verb, f"{rest[0]}{group}" + (f"/{rest[2]}" if len(rest) > 2 else "")


def grant(verbs: str, resources: str, namespace: str) -> str:
    """Return a hint with the kubectl commands that grant rights in a namespace, or cluster-wide if that is empty."""
    typed, role = (f"kubectl -n {namespace}", "role") if namespace else ("kubectl", "clusterrole")
    # A single right gets its own name: a role named labctl may exist already.
    name = (
        "labctl" if "," in resources else f"labctl-{verbs}-{resources.strip('/').partition('.')[0]}".translate(DASHES)
    )
    kind = "non-resource-url" if resources.startswith("/") else "resource"
    made = f"{typed} create {role} {name} --verb={verbs} --{kind}={resources}"
    bound = f"{typed} create {role}binding {name} --{role}={name} --user=YOU"
    return f"ask who runs the cluster for: {made}; {bound}"


# --- pods as containers --------------------------------------------------------------------------------------


def node_of(pod: Manifest) -> str:
    """Return a pod's node name in the lab: ``worker-N`` by its index, ``launcher`` for any other role."""
    metadata = pod["metadata"]
    if metadata.get("labels", {}).get("labctl.role") != "worker":
        return LAUNCHER
    name = metadata["name"]
    # Names of a JobSet's pods end in random characters: their index is in a label.
    completion = "batch.kubernetes.io/job-completion-index"
    index = metadata["labels"].get(completion) or metadata.get("annotations", {}).get(completion)
    number = re.search(r"-worker-([0-9]+)$", name)
    return f"worker-{index or (number[1] if number else name)}"


def age_order(pod: Manifest) -> tuple[str, bool, str, int]:
    """Return a sort key: by run id, launcher first, then workers by number."""
    node = node_of(pod)
    number = node.rpartition("-")[2]
    run = pod["metadata"]["labels"].get("labctl.run", "")
    return (run, node != LAUNCHER, node.rstrip("0123456789"), int(number) if number.isdigit() else 0)


def by_run(pods: Iterable[Manifest]) -> list[Manifest]:
    """Return pods sorted by run, the latest created first; in each run launcher, then workers by number."""
    pods = sorted(pods, key=age_order)
    began: dict[str, str] = {}
    for pod in pods:
        run = pod["metadata"]["labels"].get("labctl.run", "")
        began[run] = max(began.get(run, ""), pod["metadata"]["creationTimestamp"])
    return sorted(pods, key=lambda pod: began[pod["metadata"]["labels"].get("labctl.run", "")], reverse=True)


def is_ready(pod: Manifest) -> bool:
    """Return True if the pod's condition Ready is True."""
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


STATES = {"Pending": "created", "Running": "running", "Succeeded": "exited", "Failed": "dead"}


def container_of(pod: Manifest, lab: str) -> Container:
    """Return the Container that stands for a pod; ``fingerprint`` is the run's label, ``lab`` without one."""
    metadata, status = pod["metadata"], pod.get("status", {})
    labels = metadata.get("labels", {})
    state = STATES.get(status.get("phase", ""), "created")
    role = labels.get("labctl.role", "?")
    readiness: Literal["healthy", "starting"] = "healthy" if is_ready(pod) else "starting"
    return Container(
        id=metadata["uid"],
        name=metadata["name"],
        node=node_of(pod),
        host=pod["spec"].get("nodeName", ""),
        role=role,
        slots=0,
        state="removing" if metadata.get("deletionTimestamp") else state,
        health=readiness if state == "running" else None,
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
        """Return the pods of a lab's runs, the latest run first; pods that fill the cache are left out."""
        pods = self.api.list("Pod", f"labctl.lab={lab}")
        return by_run(pod for pod in pods if pod["metadata"]["labels"].get("labctl.role") != CACHE)

    def observe(self, lab: str, image: str | None = None, *, node: str = "") -> ObservedState:  # noqa: ARG002
        """Return the pods of a lab's runs as containers, latest run first; no image's id."""
        return ObservedState(host=ENGINE, containers=tuple(container_of(pod, lab) for pod in self.pods(lab)))

    def exec(
        self,
        container: str,
        argv: tuple[str, ...],
        *,
        user: str,  # noqa: ARG002 - a pod has one user
        workdir: str | None = None,
        limit: float = EXECUTING,
        content: bytes = b"",
    ) -> CompletedProcess:
        """Run a program in a pod; return exit code and output. HostError after ``limit`` s or if cut off.

        It gets ``content`` on its stdin, of which it has to know the size: the protocol cannot end it on every server.
        """
        printed = {OUT: bytearray(), ERR: bytearray()}
        with connected(self.api.execute(container, _within(argv, workdir), stdin=bool(content))) as socket:
            with _connection(argv):
                for at in range(0, len(content), CHUNK):
                    socket.write_stdin(content[at : at + CHUNK])
            for channel, piece in outputs_of(socket, limit, argv):
                printed[channel] += piece
            code = exit_code(socket, argv)
        return CompletedProcess(argv, code, *(printed[channel].decode("utf-8", "replace") for channel in (OUT, ERR)))

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
        """Run a program in a pod; pass its lines on, write empty lines to its stdin; return the code."""
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
        """Run a program in a pod on terminal, pipe or ``on_line``; return its exit code. ConfigError for secrets.

        If labctl is killed, the program goes on until the end of its input.
        """
        if secret_env:
            raise ConfigError("a program in a pod cannot be given secrets")
        mark = secrets.token_hex(8)
        parts = [variable.partition("=") for variable in environment]
        pairs = tuple((name, value) for name, _, value in parts)
        command = ("sh", "-c", MARKED, "sh", mark, *_within(argv, workdir, pairs))
        terminal = stdin == "terminal"
        if stdin == "pipe" and os.path.samestat(os.fstat(sys.stdin.fileno()), Path(os.devnull).stat()):
            # The protocol cannot close stdin on every server: without one its input ends at once.
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
        """Pass on the last log lines of the latest run's pods, marked by node; all with ``follow``."""
        from labctl.system.parallel import pool

        pods = self.pods(self.lab)
        run = _run_of(pods)
        latest = [pod for pod in pods if pod["metadata"]["labels"].get("labctl.run") == run]
        chosen = [pod for pod in latest if node in ("", node_of(pod))]

        def show(pod: Manifest) -> None:
            for _, text in self.api.lines(pod, follow=follow, last=0 if follow else SHOWN):
                on_line(f"{node_of(pod)}  | {line_of(text, 0).text}")

        with pool(max(len(chosen), 1), endless=True) as threads:
            list(threads.map(show, chosen))

    def versions(self) -> dict[str, str]:
        """Return the versions of Kubernetes and its API; the kernel is empty."""
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
# Writes the pid, which leads its own process group, to a file that SIGNAL reads.
MARKED = 'echo $$ > "/tmp/labctl-$1"; shift; exec "$@"'
SIGNAL = 'pid=$(cat "/tmp/labctl-$0") && { kill -"$1" -- "-$pid" 2> /dev/null || kill -"$1" "$pid"; }'


def _within(argv: tuple[str, ...], workdir: str | None, environment: Pairs = ()) -> tuple[str, ...]:
    """Return a command that runs ``argv`` in a directory, if given, and with these variables."""
    given = ("env", *(f"{name}={value}" for name, value in environment)) if environment else ()
    return ("sh", "-c", 'cd "$0" && exec "$@"', workdir, *given, *argv) if workdir else (*given, *argv)


def outputs_of(
    socket: Any, limit: float | None, argv: tuple[str, ...], *, pulse: bool = False
) -> Iterator[tuple[int, bytes]]:
    """Yield channel and bytes of a program's output to its end. ProcessTimeout after ``limit`` s, else HostError.

    ``pulse``: write empty lines to its stdin meanwhile.
    """
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
                raise process.ProcessTimeout(f"`{shlex.join(argv)}` timed out after {human.duration(limit or 0)}")
            if pulse and socket.is_open():
                socket.write_stdin(b"\n")


@contextmanager
def connected(socket: Any) -> Iterator[Any]:
    """Yield a program's web socket; close it and its TCP connection after the block."""
    try:
        yield socket
    finally:
        socket.close()
        socket.sock.shutdown()


@contextmanager
def _connection(argv: tuple[str, ...]) -> Iterator[None]:
    """Raise a WebSocketException or OSError in the block again as HostError on the lost connection."""
    from websocket import WebSocketException

    try:
        yield
    except (WebSocketException, OSError) as error:
        raise HostError(f"the connection to {shlex.join(argv[:1])} was lost: {error}", hint="labctl status") from error


def _lines(outputs: Iterator[tuple[int, bytes]]) -> Iterator[str]:
    """Yield the lines of stdout and stderr as text; an unfinished line of each comes last."""
    rest = {OUT: b"", ERR: b""}
    for channel, piece in outputs:
        *whole, rest[channel] = (rest[channel] + piece).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in whole)
    yield from (line.decode("utf-8", "replace") for line in rest.values() if line)


def exit_code(socket: Any, argv: tuple[str, ...]) -> int:
    """Return a program's exit code, 127 or 126 if it did not start. HostError if the connection was lost."""
    output = socket.read_channel(ERROR)
    if not output:
        raise HostError(f"the connection to {shlex.join(argv[:1])} was lost", hint="labctl status")
    status = json.loads(output)
    if status.get("status") == "Success":
        return 0
    causes = status.get("details", {}).get("causes") or ()
    code = next((cause["message"] for cause in causes if cause.get("reason") == "ExitCode"), "")
    if code.isdecimal():
        return int(code)
    # The runtime's message for a missing program.
    return process.NOT_FOUND if "not found" in status.get("message", "") else 126
