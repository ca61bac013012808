"""A run's files where its ranks are: sent to the hosts that do not see the lab's directory, results brought back."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from threading import Event

from labctl import naming
from labctl.engines import Backend, connection_to
from labctl.errors import HostError
from labctl.hosts import manifest, pull, push, ssh_errors
from labctl.hosts.ssh import Connection
from labctl.model import LAUNCHER, Host, Job, Lab, Secret
from labctl.runs import store
from labctl.system import filelock
from labctl.system.parallel import pool

# Seconds for the files of a run; what a workload wrote may be large.
SECONDS = 3600
# Seconds for a run whose nodes were removed to end.
ENDING = 300
IS_THERE = '[ ! -d "$1" ] || echo yes'
# The runs of which something lies below a directory, but for copies of earlier ones, which were sent.
LEFT = r"""
for path in "$1"/runs/*; do
    [ ! -d "$path" ] || [ -L "$path" ] || [ -L "$path/.now" ] || printf '%s\n' "${path##*/}"
done
"""
# Paths that a warning names.
SHOWN = 3


def send(lab: Lab, job: Job, engine: Backend, path: Path, earlier: tuple[str, ...] = ()) -> manifest.Tree:
    """The run's directory, to each of its hosts; returns what that is. HostError where one does not get it.

    The workloads go along: what was edited since `up` is what runs, as it is on this machine. So do the ``earlier``
    runs whose results it reads; they stay there.
    """
    files = manifest.of(path)
    names = dict.fromkeys(lab.host_of(name).name for name in (LAUNCHER, *(node.name for node in job.nodes)))
    hosts = tuple(lab.host(name) for name in names if naming.sent(lab.host(name)))
    folders = ("workloads", *(f"runs/{run}" for run in earlier)) if hosts else ()
    trees = {folder: manifest.of(lab.directory / folder) for folder in folders}

    def give(host: Host) -> None:
        if connection := connection_to(engine, host.name):
            push.send(connection, host.directory, trees, seconds=SECONDS)
            push.send_new(connection, files, directory_on(lab, host, job.run_id), seconds=SECONDS)

    on_each(hosts, give)
    return files


def fetch(
    lab: Lab, run_id: str, engine: Backend, path: Path, warn: Callable[[str], None], sent: manifest.Tree | None = None
) -> None:
    """What ranks wrote on the lab's hosts, back into the run's directory, and off the hosts once all of it is here.

    A host that does not give it keeps it, and is warned of. Of files that several wrote the first host's stands.
    """
    done = {host.name: Event() for host in lab.hosts if naming.sent(host)}
    turns = dict(zip(done, (lambda: True, *(one.wait for one in done.values())), strict=False))

    def in_turn(host: Host) -> None:
        try:
            bring(host)
        finally:
            turns[host.name]()
            done[host.name].set()

    def bring(host: Host) -> None:
        there = directory_on(lab, host, run_id)
        kept = f"what {host.name} has of the run stays there in {there}"
        try:
            connection = connection_to(engine, host.name)
            if not connection or not connection.run(IS_THERE, there).out:
                return
            came = pull.fetch(connection, there, path, sent=sent, turn=turns[host.name], seconds=SECONDS)
            if came.whole:
                push.remove(connection, there)
        except HostError as error:
            warn(f"{error.message}; {kept}")
            return
        if came.aside:
            warn(f"{host.name}: another host wrote the same names: see {', '.join(came.aside[:SHOWN])} in {path}")
        if came.refused:
            why = f"not fetched, because it is no file of the run: {', '.join(came.refused[:SHOWN])}"
            warn(f"{host.name}: {why}; {kept}")
        elif not came.whole:
            warn(f"{host.name}: files changed while they were fetched; {kept}")

    on_each(lab.hosts, in_turn)


def fetch_left(
    connection: Connection, directory: str, lab: Path, hidden: tuple[Secret, ...], notice: Callable[[str], None]
) -> None:
    """What runs have left in the lab's directory on a host, as where it did not answer when they ended, to here.

    HostError where not all of a run comes: its directory stays there.
    """
    name = connection.target.name
    # One that is under way fetches its own as it ends.
    with filelock.held(lab / filelock.RUN, f"fetch from {name}", wait=ENDING, notice=notice):
        pass
    for run in connection.run(LEFT, directory).out.splitlines():
        there, path = f"{directory}/runs/{run}", store.directory(lab, run)
        remedy = f"{ssh_errors.command(connection.target)} rm -r {shlex.quote(there)}  # if nobody needs it"
        kept = f"what {name} has of run {run} stays there in {there}"
        if run.startswith(".") or not run:
            raise HostError(f"{name}: {directory}/runs has what is no run's directory", hint=remedy, node=name)
        try:
            came = pull.fetch(connection, there, path, seconds=SECONDS)
        except HostError as error:
            raise HostError(f"{error.message}; {kept}", hint=error.hint, node=name) from error
        finally:
            store.redact_ranks(path, hidden)
        notice(f"{name}: fetched what it still had of run {run}")
        if not came.whole:
            lacks = f"not {', '.join(came.refused[:SHOWN])}" if came.refused else "files changed meanwhile"
            raise HostError(f"{name}: fetched run {run}, but {lacks}; {kept}", hint=remedy, node=name)
        push.remove(connection, there)


def directory_on(lab: Lab, host: Host, run_id: str) -> str:
    return naming.own_path(lab, host, f"runs/{run_id}")


def on_each(hosts: tuple[Host, ...], act: Callable[[Host], object]) -> None:
    """Do something for each of these hosts that does not see the run's directory here, for all at once."""
    if apart := [host for host in hosts if naming.sent(host)]:
        with pool(len(apart)) as threads:
            list(threads.map(act, apart))
