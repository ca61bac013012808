"""Fills the lab's claim by a pod: with models and datasets, which it downloads, and with the code of runs."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from labctl.backends.kubernetes import packing, pods, render
from labctl.backends.kubernetes.api import Manifest, Unreachable
from labctl.backends.kubernetes.job import PROGRAM, one_pod
from labctl.backends.kubernetes.lab import ClusterLab
from labctl.backends.kubernetes.run import LOOK, SILENT_FOR, prepare
from labctl.backends.kubernetes.waiting import IMAGE_PATIENCE
from labctl.backends.owner import owner
from labctl.errors import ConfigError, HostError
from labctl.hub.client import Kind
from labctl.hub.report import Item
from labctl.system import files, human

SENDING = 3600
"""Seconds in which a project is sent to the claim."""
START = '[[ ! -r /run/secrets/environment ]] || . /run/secrets/environment; exec python -u "/etc/labctl/files/$0" "$@"'


def fill(
    lab: ClusterLab, repositories: Iterable[tuple[Kind, str]], endpoint: str, *, dry_run: bool = False
) -> tuple[Item, ...]:
    """Download repositories to the claim by a pod, or list them. ConfigError without a claim, HostError on failure.

    A dry run does not ask the hub, which may be unreachable from this machine: revision and size are empty.
    """
    target = lab.target
    if not target.storage:
        raise ConfigError(
            "the lab has no claim to download to", hint="LAB_K8S_STORAGE_SIZE=500g in .env makes one, for all its runs"
        )
    if dry_run:
        unknown: dict[str, Any] = {"revision": "", "bytes": 0, "fetched_bytes": 0}
        return tuple(Item(kind=kind, name=name, state="to fetch", **unknown) for kind, name in repositories)
    name, program = f"{lab.name}-cache-{secrets.token_hex(2)}", files.path("docker", "fetch_models.py").read_bytes()
    built = one_pod(lab.settings, lab.directory, target, name, program, (("HF_ENDPOINT", endpoint),), owner())
    command = ["bash", "-c", START, PROGRAM, *(f"{kind}:{repository}" for kind, repository in repositories)]
    objects = prepare(lab.api, lab.name, render.single(target, built, command))
    try:
        for manifest in objects:
            lab.api.apply(manifest)
        return tuple(_follow(lab, name))
    finally:
        with suppress(HostError):
            for manifest in objects:
                lab.api.delete(manifest["kind"], manifest["metadata"]["name"])


def _follow(lab: ClusterLab, name: str) -> Iterator[Item]:
    """Yield an Item per repository that the pod has downloaded. HostError with the pod's last line if it fails.

    An unreachable API server is asked again for SILENT_FOR seconds.
    """
    pod, last_line = _started(lab, name), ""
    place, silent, read = "", 0.0, False
    while not read:
        try:
            ended = pods.has_ended(pod)
            for when, line in lab.api.lines(pod, place, follow=True):
                place, silent = when, 0.0
                if line.startswith("{"):
                    fetched = json.loads(line)
                    yield Item(**fetched, fetched_bytes=fetched["bytes"], state="fetched")
                else:
                    last_line = line or last_line
            pod, silent, read = _present_pod(lab, name), 0.0, ended
        except Unreachable as error:
            if not silent:
                silent = time.monotonic()
                patience = human.duration(SILENT_FOR)
                lab.context.notice(f"{error.message}; the download goes on, and labctl asks again for {patience}")
            if time.monotonic() > silent + SILENT_FOR:
                raise
        time.sleep(0 if read else LOOK)
    if pods.code_of(pod):
        raise HostError(last_line or pods.trouble(pod), hint="re-run to resume: complete files stay on the claim")


# Ends at TERM, which the first process of a pod ignores by default.
HOLD = "trap 'exit 0' TERM; sleep 3600 & wait"
# Under a name of its own until it is whole: runs with the same code may send it at once.
RECEIVE = """
mkdir -p "${0%/*}" && head -c "$1" > "$0.$2" && echo "$3  $0.$2" | sha256sum --check --status && mv "$0.$2" "$0"
"""


def send(lab: ClusterLab, place: str, content: bytes) -> None:
    """Write a file to the claim by a pod, unless one of that name is there. HostError if that fails."""
    unique = secrets.token_hex(2)
    name = f"{lab.name}-code-{unique}"
    built = one_pod(lab.settings, lab.directory, lab.target, name, b"", (), owner())
    objects = prepare(lab.api, lab.name, render.single(lab.target, built, ["bash", "-c", HOLD]))
    try:
        for manifest in objects:
            lab.api.apply(manifest)
        _started(lab, name)
        if lab.engine.exec(name, ("test", "-e", place), user="").code == 0:
            return
        receive = ("sh", "-c", RECEIVE, place, str(len(content)), unique, packing.digest(content))
        done = lab.engine.exec(name, receive, user="", limit=SENDING, content=content)
        if done.code:
            why = done.err.strip() or f"exit code {done.code}"
            raise HostError(f"cannot write {place} to claim {lab.name}-storage: {why}", hint="labctl doctor")
    finally:
        with suppress(HostError):
            for manifest in objects:
                lab.api.delete(manifest["kind"], manifest["metadata"]["name"])


def _present_pod(lab: ClusterLab, name: str) -> Manifest:
    """Return a pod that labctl created, in its present state. HostError if it was deleted."""
    if pod := lab.api.get("Pod", name):
        return pod
    raise HostError(f"pod {name} was deleted", hint="re-run to resume")


def _started(lab: ClusterLab, name: str) -> Manifest:
    """Wait for a pod to start; notice why it waits; return it. HostError if it is late or gets no image."""
    patience = lab.settings.number("LAB_K8S_PATIENCE")
    deadline, reason, refused = time.monotonic() + patience, "", 0.0
    while not pods.has_started(pod := _present_pod(lab, name)):
        refused = (refused or time.monotonic()) if (missing := pods.image_error(pod)) else 0.0
        if missing and time.monotonic() > refused + IMAGE_PATIENCE:
            raise HostError(f"pod {name} cannot pull its image: {missing}", hint="LAB_IMAGE in .env; labctl doctor")
        if (why := pods.trouble(pod)) and why != reason:
            lab.context.notice(f"pod {name}: {why}")
            reason = why
        if time.monotonic() > deadline:
            why = f": {reason}" if reason else ""
            raise HostError(
                f"pod {name} did not start within {patience} s (LAB_K8S_PATIENCE){why}", hint="labctl doctor"
            )
        time.sleep(LOOK)
    return pod
