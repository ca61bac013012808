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
    """Return True if the daemon refuses a container with these options for ``because``. HostError if for another."""
    message = refusal(docker, lab, image, options)
    if message and because not in message:
        raise HostError(f"cannot start a container: {message}", hint="labctl doctor")
    return bool(message)


def refusal(docker: tuple[str, ...], lab: str, image: str, options: tuple[str, ...]) -> str:
    """Create, start and remove a container with these options; return docker's error, empty if it starts."""
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
    """Run a container for its `ulimit -Hn`; return it, ``sys.maxsize`` if unlimited. HostError if none runs."""
    done = _run(docker, "run", "--rm", *_fixed(lab, "/bin/sh"), image, "-c", "ulimit -Hn")
    if done.code:
        raise HostError(f"cannot start a container: {_complaint(done)}", hint="labctl doctor")
    limit = done.out.strip()
    return int(limit) if limit.isdigit() else sys.maxsize


def device_options(mapping: DeviceMapping) -> tuple[str, ...]:
    """Return the `docker create` options that give a container a node's devices, as its compose file does."""
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
    """Return the value of `--gpus` for these device ids: CSV, with the field of the ids quoted."""
    return f'driver={driver},"device={",".join(ids)}"'


def _fixed(lab: str, program: str) -> tuple[str, ...]:
    """Return the options of each throw-away container: entrypoint, labels, no network, no pull."""
    labels = (f"labctl.lab={lab}", f"labctl.node={ROLE}", f"labctl.role={ROLE}")
    return ("--entrypoint", program, "--network", "none", "--pull", "never", *_repeated("--label", labels))


def _repeated(option: str, values: Iterable[str]) -> tuple[str, ...]:
    """Return an option once per value."""
    return tuple(chain.from_iterable((option, value) for value in values))


def _run(docker: tuple[str, ...], *arguments: str) -> process.CompletedProcess:
    return process.run((*docker, *arguments), timeout=PATIENCE, check=False)


def _complaint(done: process.CompletedProcess) -> str:
    """Return the error lines of a failed command without those that only repeat or point to help; else empty."""
    lines = done.err.strip().splitlines()
    kept = [line for line in lines if not line.startswith(("Error: failed to start", "See 'docker", "Run 'docker"))]
    return "" if done.code == 0 else "\n".join(kept or lines) or f"exit code {done.code}"
