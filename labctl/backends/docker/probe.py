"""Throw-away containers, to find limits that an engine does not report."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from itertools import chain

from labctl.errors import HostError
from labctl.model import DeviceMapping
from labctl.system import process

ROLE = "probe"
# Time limit in seconds: a host with many GPUs, without persistence mode, initializes them first.
PATIENCE = 120


def refused(docker: tuple[str, ...], lab: str, image: str, options: tuple[str, ...], *, because: str) -> bool:
    """Tell if the daemon refuses a container with these options, by an error with ``because``. HostError for another.

    HostError if it refuses for another reason.
    """
    message = refusal(docker, lab, image, options)
    if message and because not in message:
        raise HostError(f"cannot start a container: {message}", hint="labctl doctor")
    return bool(message)


def refusal(docker: tuple[str, ...], lab: str, image: str, options: tuple[str, ...]) -> str:
    """Return the error of starting a container with these options of `docker create`; empty if it starts."""
    container = ""
    try:
        made = _run(docker, "create", *_fixed(lab, "/bin/true"), *options, image)
        container = made.out.strip()
        return _complaint(made) or _complaint(_run(docker, "start", container))
    except HostError as error:
        return error.message
    finally:
        # If it cannot be removed now, `down` removes it by its label.
        with contextlib.suppress(HostError):
            if container:
                _run(docker, "rm", "--force", container)


def most_files(docker: tuple[str, ...], lab: str, image: str) -> int:
    """Return how many files a process in a container may open, ``sys.maxsize`` if unlimited. HostError if none runs."""
    done = _run(docker, "run", "--rm", *_fixed(lab, "/bin/sh"), image, "-c", "ulimit -Hn")
    if done.code:
        raise HostError(f"cannot start a container: {_complaint(done)}", hint="labctl doctor")
    limit = done.out.strip()
    return int(limit) if limit.isdigit() else sys.maxsize


def device_options(mapping: DeviceMapping) -> tuple[str, ...]:
    """Return the options that pass the devices of a node's compose file."""
    by_name = mapping.driver == "cdi"
    devices = (*mapping.paths, *(mapping.requests if by_name else ()))
    reserved = () if by_name else mapping.requests
    variables = (f"{name}={value}" for name, value in mapping.environment)
    return (
        *_repeated("--device", devices),
        *_repeated("--env", variables),
        *(("--runtime", mapping.runtime) if mapping.runtime else ()),
        *(("--gpus", reservation(mapping.driver, reserved)) if reserved else ()),
    )


def reservation(driver: str, ids: tuple[str, ...]) -> str:
    """Render these devices for ``--gpus``: fields of CSV; the field of the ids contains commas itself."""
    return f'driver={driver},"device={",".join(ids)}"'


def _fixed(lab: str, program: str) -> tuple[str, ...]:
    """Return the options of every throw-away container."""
    labels = (f"labctl.lab={lab}", f"labctl.node={ROLE}", f"labctl.role={ROLE}")
    return ("--entrypoint", program, "--network", "none", "--pull", "never", *_repeated("--label", labels))


def _repeated(option: str, values: Iterable[str]) -> tuple[str, ...]:
    """Return an option once per value."""
    return tuple(chain.from_iterable((option, value) for value in values))


def _run(docker: tuple[str, ...], *arguments: str) -> process.CompletedProcess:
    return process.run((*docker, *arguments), timeout=PATIENCE, check=False)


def _complaint(done: process.CompletedProcess) -> str:
    """Return the error of a command that failed, without lines that repeat it or name the help; empty if it passed."""
    lines = done.err.strip().splitlines()
    kept = [line for line in lines if not line.startswith(("Error: failed to start", "See 'docker", "Run 'docker"))]
    return "" if done.code == 0 else "\n".join(kept or lines) or f"exit code {done.code}"
