"""A cluster in which a run proceeds: its job and pods, their output, and the change from one request to the next."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from labctl.backends.kubernetes.api import OUT, Manifest
from labctl.backends.kubernetes.backend import NewClusterRun
from labctl.backends.kubernetes.lab import ClusterLab
from labctl.backends.kubernetes.run import ClusterRun
from labctl.jobs.request import RunOptions, choose_workload
from labctl.records import store
from labctl.runs import start
from labctl.runs.start import Request
from support import clusters
from support.api_server import SUCCESS, web_socket
from support.fake_api import FakeApi

WORKLOAD = """\
description: says hello
launcher: mpirun
script: hello.py
timeout: {timeout}
metrics:
  answer: {{pattern: 'answer: (\\d+)'}}
"""
MARK = "\x01!\x02labctl: the launcher ended with exit code "
"""Prefix of the command's exit code in the launcher's last line."""
Step = Callable[[], object]
Programs = Callable[[str, tuple[str, ...]], tuple[tuple[int, bytes], ...]]
"""Function from a pod and a command to the frames of its output."""
MOST_LOOKS = 3000
"""Limit of requests to a cluster that no longer changes."""


class RunningApi(FakeApi):
    """An API server in which a job proceeds: each request for the job takes the next of ``steps``.

    ``printed`` has the lines of pods, ``broken`` the breaks of their logs; programs in pods answer with frames.
    """

    def __init__(self, *objects: Manifest, **options: Any) -> None:
        """Store these objects; no steps, no output, no breaks, programs without results."""
        super().__init__(*objects, **options)
        self.steps: list[Step] = []
        self.printed: dict[str, list[str]] = {}
        self.broken: list[tuple[int, Exception]] = []
        """Number of lines after which a log breaks off, and the error, for each time it is read."""
        self.programs: Programs = without_results
        self.executed: list[tuple[str, ...]] = []
        self._looks = 0

    def _respond(self, method: str, path: str, body: Manifest | None = None, **options: Any) -> Any:
        """Answer a request; one for a job takes the next step first, one for a log streams its lines."""
        if method == "GET" and ("/mpijobs/" in path or "/trainjobs/" in path):
            self._take_step()
        found = super()._respond(method, path.removesuffix("/log"), body, **options)
        if path.endswith("/log"):
            return SimpleNamespace(stream=lambda _: self._log(path.split("/")[-2]), close=lambda: None)
        return found

    def _take_step(self) -> None:
        """Take the next of ``steps``, if any; fail at the request MOST_LOOKS."""
        self._looks += 1
        assert self._looks < MOST_LOOKS, f"nothing ends the run: {self.asked[-20:]}"
        if self.steps:
            self.steps.pop(0)()

    def _log(self, pod: str) -> Iterator[bytes]:
        """Yield the printed lines of a pod; with a break planned, only its first lines, then its error."""
        most, error = self.broken.pop(0) if self.broken else (None, None)
        for line in self.printed.get(pod, [])[:most]:
            yield f"{line}\n".encode()
        if error:
            raise error

    def prints(self, pod: str, *lines: str, second: int = 0) -> None:
        """Append lines to the pod's log, with timestamps a millisecond apart."""
        known = self.printed.setdefault(pod, [])
        known += [f"2026-01-02T03:04:{second:02}.{len(known) + n:03}000000Z {line}" for n, line in enumerate(lines)]

    def execute(self, pod: str, argv: tuple[str, ...], **options: bool) -> Any:  # noqa: ARG002
        """Record a command in a pod; return a web socket with the frames that ``programs`` gives."""
        self.executed.append(argv)
        return web_socket(*self.programs(pod, argv))


def without_results(_: str, argv: tuple[str, ...]) -> tuple[tuple[int, bytes], ...]:
    """Return the frames of a program that succeeds without output; for tar, of an empty archive."""
    return ((OUT, bytes(10240)), SUCCESS) if "tar -C" in " ".join(argv) else (SUCCESS,)


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> tuple[tuple[int, bytes], ...]:
    """Return the frames of a tar of these members, 1000 bytes each."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    whole = stream.getvalue()
    return tuple((OUT, whole[at : at + 1000]) for at in range(0, len(whole), 1000))


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    """Build the tar header of a member, by default a regular file of mode 0644."""
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, link, 0o644
    return made


def serving(*members: tuple[tarfile.TarInfo, bytes], end: tuple[int, bytes] = SUCCESS) -> Programs:
    """Return the answers of a launcher's programs: tar prints these members and ends with ``end``, others succeed."""
    return lambda _, argv: (*archive(*members), end) if "tar -C" in argv[2] else (SUCCESS,)


def own_workload(directory: Path, timeout: str = "60s") -> Path:
    """Write the workload `hello` into a lab directory; return the directory."""
    folder = directory / "workloads/hello"
    folder.mkdir(parents=True)
    (folder / "workload.yml").write_text(WORKLOAD.format(timeout=timeout))
    (folder / "hello.py").write_text("print('hello')\n")
    return directory


def asked(of: ClusterLab, **options: Any) -> Request:
    """Build the request of a run of `hello`."""
    chosen = RunOptions(**options)
    workload = choose_workload(of.directory, "hello", chosen, of.settings)
    return Request(workload=workload, options=chosen)


def begun(of: ClusterLab) -> NewClusterRun:
    """Build a run of `hello` that is neither recorded nor submitted."""
    request = asked(of)
    new = clusters.backend(of).begin(request.workload, request.options, datetime.now().astimezone())
    assert isinstance(new, NewClusterRun)
    return new


def recorded(of: ClusterLab, new: NewClusterRun) -> None:
    """Write the record of a run that is not submitted."""
    store.create(new.lab, new.run_id, new.job.files, clusters.backend(of).plan_run(new).record)


def launched(of: ClusterLab, **status: Any) -> ClusterRun:
    """Submit a run of `hello` without following it; return it; with ``status`` add its pods."""
    backend = clusters.backend(of)
    run = of.run(start.launch(backend, asked(of, detach=True)).run_id)
    for node in ("launcher", "worker-0", "worker-1") if status else ():
        put(of, pod_of(run, node, **status))
    return run


def put(of: ClusterLab, *objects: Manifest) -> None:
    """Store objects in the lab's in-memory cluster."""
    assert isinstance(of.api, FakeApi)
    for manifest in objects:
        of.api.put(manifest)


def prints(of: ClusterLab, run: ClusterRun, *lines: str) -> None:
    """Append lines to the log of a run's launcher."""
    assert isinstance(of.api, RunningApi)
    of.api.prints(f"{run.name}-launcher", *lines)


def pod_of(run: ClusterRun, node: str, *, deleted: bool = False, uid: str = "", **status: Any) -> Manifest:
    """Build a pod of a run as the mpi-operator makes it, with this status."""
    role = node.partition("-")[0]
    labels = {"labctl.lab": run.lab.name, "labctl.run": run.run_id, "labctl.role": role}
    name = f"{run.name}-{node}"
    metadata = {"name": name, "uid": uid or name, "labels": labels, "creationTimestamp": "2026-01-02T03:04:00Z"}
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-02T03:05:00Z"
    spec = {"nodeName": "n0", "containers": [{"name": role, "image": run.lab.image}]}
    return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Pending", **status}}


def state(phase: str, **of: dict[str, Any]) -> dict[str, Any]:
    """Build the status of a pod whose container is in this state."""
    return {"phase": phase, "containerStatuses": [{"name": name, "state": of} for name in ("launcher", "worker")]}


def runs(since: str = "2026-01-02T03:04:00Z") -> dict[str, Any]:
    """Build the status of a running pod, started at ``since``."""
    return state("Running", running={"startedAt": since})


def waits(reason: str, message: str = "") -> dict[str, Any]:
    """Build the status of a pending pod whose container waits for this reason."""
    return state("Pending", waiting={"reason": reason, "message": message})


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    """Build the status of a pod that ended with this exit code."""
    return state("Failed" if code else "Succeeded", terminated={"exitCode": code, "reason": reason})


def unplaced(message: str) -> dict[str, Any]:
    """Build the status of a pod that the scheduler did not place."""
    return {"conditions": [{"type": "PodScheduled", "status": "False", "message": message}]}


def labelled(name: str, lab: str = "demo", **more: Any) -> dict[str, Any]:
    """Build an object that has only metadata: name, the lab's label, and ``more``."""
    return {"metadata": {"name": name, "labels": {"labctl.lab": lab}, **more}}


def condition(kind: str, reason: str = "", message: str = "") -> dict[str, Any]:
    """Build the status of a job with this condition."""
    return {"status": {"conditions": [{"type": kind, "status": "True", "reason": reason, "message": message}]}}
