"""A run's directory on hosts that do not see the lab's: pushed before the run, its results pulled after it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from threading import Event

from labctl import naming
from labctl.deploy import plan
from labctl.deploy.executor import Deployment, do
from labctl.engines import Backend
from labctl.errors import HostError
from labctl.hosts import pull, push, ssh_errors
from labctl.hosts.manifest import Manifest, scan
from labctl.hosts.pull import PullResult
from labctl.hosts.ssh import Connection
from labctl.lab.spec import hidden as hidden_values
from labctl.model import LAUNCHER, Host, Job, Lab, Secret
from labctl.runs import store
from labctl.system import filelock
from labctl.system.parallel import pool

# Seconds for the files of a run; what a workload wrote may be large.
SECONDS = 3600
# Seconds for a run whose nodes were removed to end.
ENDING = 300
# Paths that a warning names.
SHOWN = 3


def send(lab: Lab, job: Job, engine: Backend, path: Path, earlier: tuple[str, ...] = ()) -> Manifest:
    """Push the run's directory to each of its hosts; returns what that is. HostError where one does not get it.

    The workloads go along: what was edited since `up` is what runs, as it is on this machine. So do the ``earlier``
    runs whose results it reads; they stay there.
    """
    manifest = scan(path)
    names = dict.fromkeys(lab.host_of(name).name for name in (LAUNCHER, *(node.name for node in job.nodes)))
    hosts = tuple(lab.host(name) for name in names if naming.sent(lab.host(name)))
    folders = ("workloads", *(f"runs/{run}" for run in earlier)) if hosts else ()
    shared = {folder: scan(lab.directory / folder) for folder in folders}

    def give(host: Host) -> None:
        if connection := engine.on(host.name).connection:
            push.push(connection, host.directory, shared, seconds=SECONDS)
            push.push_new(connection, manifest, directory_on(lab, host, job.run_id), seconds=SECONDS)

    for_each_remote_host(hosts, give)
    return manifest


def fetch(
    lab: Lab,
    run_id: str,
    engine: Backend,
    path: Path,
    warn: Callable[[str], None],
    pushed: Manifest | None = None,
) -> None:
    """Pull what ranks wrote on the lab's hosts into the run's directory, and remove it there once all of it is here.

    A host from which not all comes keeps it, with a warning. Of files that several wrote the first host's stands.
    """
    done = {host.name: Event() for host in lab.hosts if naming.sent(host)}
    turns = dict(zip(done, (lambda: True, *(one.wait for one in done.values())), strict=False))

    def in_turn(host: Host) -> None:
        there = directory_on(lab, host, run_id)
        try:
            connection = engine.on(host.name).connection
            if connection and run_id in runs_on(connection, host.directory):
                result = pull.pull(connection, there, path, pushed=pushed, turn=turns[host.name], seconds=SECONDS)
                if result.complete:
                    push.remove(connection, there)
                else:
                    warn(f"{host.name}: {_missing(result)}; {kept(host.name, there)}")
                if result.aside:
                    places = ", ".join(result.aside[:SHOWN])
                    warn(f"{host.name}: another host wrote the same names: see {places} in {path}")
        except HostError as error:
            warn(f"{error.message}; {kept(host.name, there)}")
        finally:
            turns[host.name]()
            done[host.name].set()

    for_each_remote_host(lab.hosts, in_turn)


def fetch_left(
    connection: Connection, directory: str, lab: Path, hidden: tuple[Secret, ...], notice: Callable[[str], None]
) -> None:
    """Pull what runs have left in the lab's directory on a host, as where it did not answer when they ended.

    HostError where not all of a run comes: its directory stays there.
    """
    name = connection.target.name
    # One that is under way pulls its own as it ends.
    with filelock.held(lab / filelock.RUN, f"fetch from {name}", wait=ENDING, notice=notice):
        pass
    for run in runs_on(connection, directory):
        there, path = f"{directory}/runs/{run}", store.directory(lab, run)
        remedy = f"{ssh_errors.command(connection.target)} rm -r {shlex.quote(there)}  # if nobody needs it"
        if run.startswith(".") or not run:
            raise HostError(f"{name}: {directory}/runs has what is no run's directory", hint=remedy, node=name)
        try:
            result = pull.pull(connection, there, path, seconds=SECONDS)
        except HostError as error:
            raise HostError(f"{error.message}; {kept(name, there, run)}", hint=error.hint, node=name) from error
        finally:
            store.redact_ranks(path, hidden)
        notice(f"{name}: fetched what it still had of run {run}")
        if not result.complete:
            reason = f"{name}: run {run}: {_missing(result)}; {kept(name, there, run)}"
            raise HostError(reason, hint=remedy, node=name)
        push.remove(connection, there)


@do.register
def _(step: plan.FetchLeftRuns, site: Deployment) -> None:
    connection, context = site.cluster.engine.on(step.host).connection, site.context
    fetch_left(connection, step.directory, context.directory, hidden_values(site.cluster.settings), context.notice)


def runs_on(connection: Connection, directory: str) -> list[str]:
    """The runs of which results are in the lab's directory on a host; copies of earlier runs are not."""
    return connection.run(push.SCRIPT, "runs", directory).out.splitlines()


def kept(host: str, there: str, run: str = "") -> str:
    return f"what {host} has of {f'run {run}' if run else 'the run'} stays there in {there}"


def _missing(result: PullResult) -> str:
    if result.refused:
        return f"not fetched, because it is no file of the run: {', '.join(result.refused[:SHOWN])}"
    return "files changed while they were fetched"


def directory_on(lab: Lab, host: Host, run_id: str) -> str:
    return naming.own_path(lab, host, f"runs/{run_id}")


def for_each_remote_host(hosts: tuple[Host, ...], act: Callable[[Host], object]) -> None:
    """Do something for each of these hosts that does not see the run's directory here, for all at once."""
    if apart := [host for host in hosts if naming.sent(host)]:
        with pool(len(apart)) as threads:
            list(threads.map(act, apart))
