"""Throw-away containers, by which an engine is asked for what it does not tell of itself."""

from __future__ import annotations

import contextlib
import sys

from labctl.errors import HostError
from labctl.model import DeviceMapping
from labctl.system import process

ROLE = "probe"
# Seconds. A host with many GPUs and nothing that keeps them awake wakes them first.
PATIENCE = 120


def refused(docker: tuple[str, ...], lab: str, image: str, options: tuple[str, ...], *, because: str) -> bool:
    """Whether the daemon refuses to start a container with these options, in such words; HostError for any others."""
    said = refusal(docker, lab, image, options)
    if said and because not in said:
        raise HostError(f"cannot start a container: {said}", hint="labctl doctor")
    return bool(said)


def refusal(docker: tuple[str, ...], lab: str, image: str, options: tuple[str, ...]) -> str:
    """What came back where a container with these options of `docker create` does not start; empty where it does."""
    container = ""
    try:
        made = _run(docker, "create", *_fixed(lab, "/bin/true"), *options, image)
        container = made.out.strip()
        return _complaint(made) or _complaint(_run(docker, "start", container))
    except HostError as error:
        return error.message
    finally:
        # One that cannot be removed now goes with `down`, by its label.
        with contextlib.suppress(HostError):
            if container:
                _run(docker, "rm", "--force", container)


def most_files(docker: tuple[str, ...], lab: str, image: str) -> int:
    """How many files a process in a container may open, whatever it asks for; HostError where none starts."""
    done = _run(docker, "run", "--rm", *_fixed(lab, "/bin/sh"), image, "-c", "ulimit -Hn")
    if done.code:
        raise HostError(f"cannot start a container: {_complaint(done)}", hint="labctl doctor")
    said = done.out.strip()
    return int(said) if said.isdigit() else sys.maxsize


def device_options(mapping: DeviceMapping) -> tuple[str, ...]:
    """The options that hand in what a node's compose file hands in."""
    by_name = mapping.driver == "cdi"
    devices = (*mapping.paths, *(mapping.requests if by_name else ()))
    reserved = () if by_name else mapping.requests
    return (
        *(word for device in devices for word in ("--device", device)),
        *(word for name, value in mapping.environment for word in ("--env", f"{name}={value}")),
        *(("--runtime", mapping.runtime) if mapping.runtime else ()),
        *(("--gpus", reservation(mapping.driver, reserved)) if reserved else ()),
    )


def reservation(driver: str, ids: tuple[str, ...]) -> str:
    """These devices in the words of ``--gpus``: fields of CSV, of which one has commas itself."""
    return f'driver={driver},"device={",".join(ids)}"'


def _fixed(lab: str, program: str) -> tuple[str, ...]:
    """The options of every such container."""
    labels = (f"labctl.lab={lab}", f"labctl.node={ROLE}", f"labctl.role={ROLE}")
    marks = tuple(word for label in labels for word in ("--label", label))
    return ("--entrypoint", program, "--network", "none", "--pull", "never", *marks)


def _run(docker: tuple[str, ...], *words: str) -> process.CompletedProcess:
    return process.run((*docker, *words), timeout=PATIENCE, check=False)


def _complaint(done: process.CompletedProcess) -> str:
    """What a command that failed said; its last line only repeats that it did."""
    lines = done.err.strip().splitlines()
    kept = [line for line in lines if not line.startswith(("Error: failed to start", "See 'docker", "Run 'docker"))]
    return "" if done.code == 0 else "\n".join(kept or lines) or f"exit code {done.code}"
