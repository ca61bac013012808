"""What ranks wrote, here and on hosts that do not see the lab's directory, comes into the run's record."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from labctl import naming
from labctl.backends.docker.deploy import provision
from labctl.backends.docker.engine import Backend, connection_to
from labctl.backends.docker.hosts import pull, push, ssh_errors
from labctl.backends.docker.hosts.ssh import Connection
from labctl.errors import HostError
from labctl.model import Host, Job, Lab, Secret
from labctl.records import outputs, store
from labctl.records.manifest import Manifest, scan
from labctl.system import filelock
from labctl.system.parallel import pool

# Seconds for the files of a run; what a workload wrote may be large.
SECONDS = 3600
# Seconds for a run whose nodes were removed to end.
ENDING = 300
# Paths that a warning names.
SHOWN = 3


def hosts_apart(lab: Lab, job: Job) -> tuple[Host, ...]:
    """The hosts of a run that do not see the lab's directory."""
    hosts = {host.name: host for host in map(lab.host_of, job.containers)}
    return tuple(filter(naming.sent, hosts.values()))


def send(lab: Lab, job: Job, engine: Backend, earlier: tuple[str, ...] = ()) -> Manifest:
    """Push the run's directory to each of its hosts; returns what that is. HostError where one does not get it.

    Workloads and clones go along: what was edited since `up` is what runs, as it is on this machine. So do the
    ``earlier`` runs whose results it reads; they stay there.
    """
    manifest = scan(store.outputs(lab.directory, job.run_id))
    hosts = hosts_apart(lab, job)
    shared = provision.shared(lab) if hosts else {}
    shared |= {f"runs/{run}": scan(lab.directory / "runs" / run) for run in earlier} if hosts else {}

    def give(host: Host) -> None:
        connection = connection_to(engine, host.name)
        push.push(connection, host.directory, shared, seconds=SECONDS)
        push.push_new(connection, manifest, outputs_on(lab, host, job.run_id), seconds=SECONDS)

    with pool(len(hosts)) as threads:
        list(threads.map(give, hosts))
    return manifest


def outputs_on(lab: Lab, host: Host, run_id: str) -> str:
    """What a run writes on a host."""
    return naming.own_path(lab, host, f"{naming.OUTPUTS}/{run_id}")


def collect(
    lab: Lab, run_id: str, engine: Backend, warn: Callable[[str], None], pushed: Manifest | None = None
) -> None:
    """Move what ranks wrote on this machine into the run's record, then what they wrote on the lab's hosts.

    What cannot be moved stays, with a warning. Of files that several wrote the first host's stands.
    """
    path, hosts = store.directory(lab.directory, run_id), tuple(filter(naming.sent, lab.hosts))
    written = store.outputs(lab.directory, run_id)
    moved = outputs.move(written, path)
    if moved.aside:
        warn(f"run {run_id}: labctl writes files of the same names: see {first(moved.aside)} in {path}")
    if moved.stayed:
        with warned(warn):
            store.redact_ranks(written, lab.hidden)
        stays = f"{first(moved.stayed)}; it stays in {naming.OUTPUTS}/{run_id}"
        warn(f"run {run_id}: not moved, because it is no file of the run or its name is taken: {stays}")
    done = {host.name: Event() for host in hosts}
    turns = dict(zip(done, (lambda: True, *(one.wait for one in done.values())), strict=False))

    def in_turn(host: Host) -> None:
        there = outputs_on(lab, host, run_id)
        try:
            connection = connection_to(engine, host.name)
            if run_id in runs_on(connection, host.directory):
                bring(connection, there, path, warn, pushed=pushed, turn=turns[host.name])
        except HostError as error:
            warn(f"{error.message}; what {host.name} has of the run stays there in {there}")
        finally:
            turns[host.name]()
            done[host.name].set()

    with pool(len(hosts)) as threads:
        list(threads.map(in_turn, hosts))


@contextmanager
def warned(warn: Callable[[str], None]) -> Iterator[None]:
    """A HostError within is a warning: whatever a workload made of its directory, its run comes to an end."""
    try:
        yield
    except HostError as error:
        warn(error.message)


def bring(connection: Connection, there: str, path: Path, warn: Callable[[str], None], **options: Any) -> None:
    """Pull a run's directory from a host and remove it there. HostError where not all of it comes: then it stays."""
    name = connection.target.name
    result = pull.pull(connection, there, path, reserved=store.KEPT, seconds=SECONDS, **options)
    if result.aside:
        warn(f"{name}: labctl or another host writes files of the same names: see {first(result.aside)} in {path}")
    if not result.complete:
        reason = "files changed while they were fetched"
        if result.refused:
            reason = f"not fetched, because it is no file of the run: {first(result.refused)}"
        raise HostError(f"{name}: run {path.name}: {reason}", hint=remedy(connection, there), node=name)
    push.remove(connection, there)


def first(names: list[str]) -> str:
    """The first of some names, as they can be printed."""
    return f"{', '.join(map(shown, names[:SHOWN]))}{', ...' if names[SHOWN:] else ''}"


def shown(name: str) -> str:
    """A name that a host or a workload chose, as it can be printed."""
    return name if name.isprintable() and len(name) <= 100 else ascii(name)[:100]


def remedy(connection: Connection, there: str) -> str:
    return f"{ssh_errors.command(connection.target)} rm -r {shlex.quote(there)}  # if nobody needs it"


def fetch_left(
    connection: Connection, directory: str, lab: Path, hidden: tuple[Secret, ...], notice: Callable[[str], None]
) -> None:
    """Pull what runs have left in the lab's directory on a host, as where it did not answer when they ended.

    HostError where not all of a run comes: its directory stays there.
    """
    name = connection.target.name
    # One that is followed pulls its own as it ends.
    for lock in filelock.held_below(lab / filelock.RUNS):
        with filelock.held(lock, f"fetch from {name}", wait=ENDING, notice=notice):
            pass
    for run in runs_on(connection, directory):
        there, path = f"{directory}/{naming.OUTPUTS}/{run}", store.directory(lab, run)
        # The name is the host's word: what it brings goes to no other place than that of a run which was sent there.
        if not store.is_run(lab, run):
            unexpected = f"{name}: {directory}/{naming.OUTPUTS} has what is no run of this lab: {ascii(run)[:100]}"
            raise HostError(unexpected, hint=remedy(connection, there), node=name)
        try:
            bring(connection, there, path, notice)
        except HostError as error:
            stays = f"what {name} has of run {run} stays there in {there}"
            raise HostError(f"{error.message}; {stays}", hint=error.hint, node=name) from error
        finally:
            store.redact_ranks(path, hidden)
        notice(f"{name}: fetched what it still had of run {run}")


def runs_on(connection: Connection, directory: str) -> list[str]:
    """The runs of which results are in the lab's directory on a host."""
    return connection.run(push.SCRIPT, "folders", f"{directory}/{naming.OUTPUTS}").out.splitlines()
