"""Results of ranks: push the run's directory to hosts, and move results from hosts and this machine to the record."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from labctl import naming
from labctl.backends.docker.deploy import provision
from labctl.backends.docker.engine import Engine, connection_to
from labctl.backends.docker.hosts import pull, push, ssh_errors
from labctl.backends.docker.hosts.ssh import Connection
from labctl.errors import HostError
from labctl.model import Host, Job, Lab, Secret
from labctl.records import outputs, store
from labctl.records.manifest import Manifest, scan
from labctl.system import filelock, human
from labctl.system.parallel import pool

SECONDS = 3600
"""Time limit of a transfer: the results of a run may be large."""
ENDING = 300
"""Seconds to wait for a run whose nodes were removed to end."""
SHOWN = 3
"""Paths that a warning names at most."""


def hosts_apart(lab: Lab, job: Job) -> tuple[Host, ...]:
    """Return the hosts of a run to which files are sent, as they do not see the lab directory."""
    hosts = {host.name: host for host in map(lab.host_of, job.containers)}
    return tuple(filter(naming.sent, hosts.values()))


def send(lab: Lab, job: Job, engine: Engine, earlier: tuple[str, ...] = ()) -> Manifest:
    """Push a run's directory, code and ``earlier`` runs to its hosts; return its manifest. HostError if a host fails.

    Hosts that share the lab directory are left out. Workloads and clones are pushed so that edits since `up` are used,
    ``earlier`` runs because the run reads their results. HostError if a host fails.
    """
    manifest = scan(store.outputs(lab.directory, job.run_id))
    hosts = hosts_apart(lab, job)
    shared = provision.shared(lab) if hosts else {}
    if hosts:
        shared |= {f"runs/{run}": scan(lab.directory / "runs" / run) for run in earlier}

    def give(host: Host) -> None:
        """Push the shared files and the run's directory to one host."""
        connection = connection_to(engine, host.name)
        push.push(connection, host.directory, shared, seconds=SECONDS)
        push.push_new(connection, manifest, outputs_on(lab, host, job.run_id), seconds=SECONDS)

    with pool(len(hosts)) as threads:
        list(threads.map(give, hosts))
    return manifest


def outputs_on(lab: Lab, host: Host, run_id: str) -> str:
    """Return the path of a run's output directory on a host."""
    return naming.own_path(lab, host, f"{naming.OUTPUTS}/{run_id}")


def collect(lab: Lab, run_id: str, engine: Engine, warn: Callable[[str], None], pushed: Manifest | None = None) -> None:
    """Move results of ranks into the run's record, from this machine, then from hosts; warn of those that stay.

    Files that cannot be moved stay, with a warning. If several hosts wrote a file, that of the first host is kept.
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
        warn(f"run {run_id}: not moved, because it is not a file of the run or its name is taken: {stays}")
    done = {host.name: Event() for host in hosts}
    turns = dict(zip(done, (lambda: True, *(event.wait for event in done.values())), strict=False))

    def in_turn(host: Host) -> None:
        """Fetch the run's results from one host and place them in the hosts' order; warn if that fails."""
        folder = outputs_on(lab, host, run_id)
        try:
            connection = connection_to(engine, host.name)
            if run_id in runs_on(connection, host.directory):
                bring(connection, folder, path, warn, pushed=pushed, turn=turns[host.name])
        except HostError as error:
            warn(f"{error.message}; files of the run stay on {host.name} in {folder}")
        finally:
            turns[host.name]()
            done[host.name].set()

    with pool(len(hosts)) as threads:
        list(threads.map(in_turn, hosts))


@contextmanager
def warned(warn: Callable[[str], None]) -> Iterator[None]:
    """Pass a HostError raised in the block to ``warn`` instead, so that the run is judged regardless."""
    try:
        yield
    except HostError as error:
        warn(error.message)


def bring(connection: Connection, folder: str, path: Path, warn: Callable[[str], None], **options: Any) -> None:
    """Pull a run's directory into its record, remove it on the host, warn of name clashes. HostError if partial."""
    name = connection.target.name
    result = pull.pull(connection, folder, path, reserved=store.KEPT, seconds=SECONDS, **options)
    if result.aside:
        warn(f"{name}: labctl or another host writes files of the same names: see {first(result.aside)} in {path}")
    if not result.complete:
        reason = "files changed while they were fetched"
        if result.refused:
            reason = f"not fetched, because it is not a file of the run: {first(result.refused)}"
        raise HostError(f"{name}: run {path.name}: {reason}", hint=remedy(connection, folder), node=name)
    push.remove(connection, folder)


def first(names: list[str]) -> str:
    """Return the first ``SHOWN`` of these names, and how many more there are, as text."""
    return human.listed(map(shown, names), SHOWN)


def shown(name: str) -> str:
    """Render a name chosen by a host or workload: escaped if not printable, at most 100 characters."""
    return name if name.isprintable() and len(name) <= 100 else ascii(name)[:100]


def remedy(connection: Connection, folder: str) -> str:
    """Return the ssh command that removes a directory on a host, for a hint."""
    return f"{ssh_errors.command(connection.target)} rm -r {shlex.quote(folder)}  # if nobody needs it"


def fetch_left(
    connection: Connection, directory: str, lab: Path, hidden: tuple[Secret, ...], notice: Callable[[str], None]
) -> None:
    """Wait for followed runs, then move earlier runs' results from a host to records. HostError if one is incomplete.

    A host has such results if it did not answer when a run ended. HostError if a run's results are incomplete: its
    directory stays on the host.
    """
    name = connection.target.name
    # Runs that are followed pull their own results: wait for them to end.
    for lock in filelock.held_below(lab / filelock.RUNS):
        with filelock.held(lock, f"fetch from {name}", wait=ENDING, notice=notice):
            pass
    for run in runs_on(connection, directory):
        folder, path = f"{directory}/{naming.OUTPUTS}/{run}", store.directory(lab, run)
        # The name comes from the host: accept only runs of this lab, so that no other directory is written.
        if not store.is_run(lab, run):
            unexpected = f"{name}: {directory}/{naming.OUTPUTS} contains {ascii(run)[:100]}, not a run of this lab"
            raise HostError(unexpected, hint=remedy(connection, folder), node=name)
        try:
            bring(connection, folder, path, notice)
        except HostError as error:
            stays = f"files of run {run} stay on {name} in {folder}"
            raise HostError(f"{error.message}; {stays}", hint=error.hint, node=name) from error
        finally:
            store.redact_ranks(path, hidden)
        notice(f"{name}: fetched the remaining files of run {run}")


def runs_on(connection: Connection, directory: str) -> list[str]:
    """Return the names in the output directory on a host: ids of runs with results there."""
    return connection.run(push.SCRIPT, "folders", f"{directory}/{naming.OUTPUTS}").out.splitlines()
