"""Fills the lab's claim: a pod in the cluster downloads models and datasets to where jobs look for them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from labctl.backends.kubernetes import pods, render
from labctl.backends.kubernetes.api import Manifest, Unreachable
from labctl.backends.kubernetes.job import PROGRAM, one_pod
from labctl.backends.kubernetes.lab import ClusterLab
from labctl.backends.kubernetes.run import LOOK, SILENT_FOR, prepare
from labctl.backends.kubernetes.waiting import IMAGE_PATIENCE
from labctl.backends.owner import owner
from labctl.errors import ConfigError, HostError
from labctl.hub.client import Kind
from labctl.hub.report import Item
from labctl.system import files

START = '[[ ! -r /run/secrets/environment ]] || . /run/secrets/environment; exec python -u "/etc/labctl/files/$0" "$@"'


def fill(
    lab: ClusterLab, wanted: Iterable[tuple[Kind, str]], endpoint: str, *, dry_run: bool = False
) -> tuple[Item, ...]:
    """Download what is wanted into the claim, from the hub at ``endpoint``. ConfigError, HostError.

    A dry run does not ask the hub, which the cluster may reach and this machine may not: revision and size are empty.
    """
    target = lab.target
    if not target.storage:
        raise ConfigError(
            "the lab has no claim to download to", hint="LAB_K8S_STORAGE_SIZE=500g in .env makes one, for all its runs"
        )
    if dry_run:
        unknown: dict[str, Any] = {"revision": "", "bytes": 0, "fetched_bytes": 0}
        return tuple(Item(kind=kind, name=name, state="to fetch", **unknown) for kind, name in wanted)
    name, program = f"{lab.name}-cache-{secrets.token_hex(2)}", files.path("docker", "fetch_models.py").read_bytes()
    built = one_pod(lab.settings, lab.directory, target, name, program, (("HF_ENDPOINT", endpoint),), owner())
    command = ["bash", "-c", START, PROGRAM, *(f"{kind}:{repository}" for kind, repository in wanted)]
    own = prepare(lab.api, lab.name, render.single(target, built, command))
    try:
        for one in own:
            lab.api.apply(one)
        return tuple(_follow(lab, name))
    finally:
        with suppress(HostError):
            for one in own:
                lab.api.delete(one["kind"], one["metadata"]["name"])


def _follow(lab: ClusterLab, name: str) -> Iterator[Item]:
    """What the pod has downloaded, one by one. HostError with what it said where it failed."""
    pod, said = _started(lab, name), ""
    place, silent, read = "", 0.0, False
    while not read:
        try:
            ended = pods.has_ended(pod)
            for when, line in lab.api.lines(pod, place, follow=True):
                place, silent = when, 0.0
                if line.startswith("{"):
                    found = json.loads(line)
                    yield Item(**found, fetched_bytes=found["bytes"], state="fetched")
                else:
                    said = line or said
            pod, silent, read = _there(lab, name), 0.0, ended
        except Unreachable as error:
            if not silent:
                silent = time.monotonic()
                lab.context.notice(f"{error.message}; the download goes on, and labctl asks again for {SILENT_FOR} s")
            if time.monotonic() > silent + SILENT_FOR:
                raise
        time.sleep(0 if read else LOOK)
    if pods.code_of(pod):
        raise HostError(said or pods.trouble(pod), hint="re-run to resume: what is whole stays on the claim")


def _there(lab: ClusterLab, name: str) -> Manifest:
    if found := lab.api.get("Pod", name):
        return found
    raise HostError(f"pod {name} was deleted while it downloaded", hint="re-run to resume")


def _started(lab: ClusterLab, name: str) -> Manifest:
    """The pod, once it runs. HostError where it does not start in time, or does not get its image."""
    patience = lab.settings.number("LAB_K8S_PATIENCE")
    deadline, told, refused = time.monotonic() + patience, "", 0.0
    while not pods.has_started(pod := _there(lab, name)):
        refused = (refused or time.monotonic()) if (missing := pods.image_error(pod)) else 0.0
        if missing and time.monotonic() > refused + IMAGE_PATIENCE:
            raise HostError(f"pod {name} does not get its image: {missing}", hint="LAB_IMAGE in .env; labctl doctor")
        if (why := pods.trouble(pod)) and why != told:
            lab.context.notice(f"pod {name}: {why}")
            told = why
        if time.monotonic() > deadline:
            why = f": {told}" if told else ""
            raise HostError(
                f"pod {name} did not start within {patience} s (LAB_K8S_PATIENCE){why}", hint="labctl doctor"
            )
        time.sleep(LOOK)
    return pod
