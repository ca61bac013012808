"""A run's files where its ranks are: sent to the hosts that do not see the lab's directory, results brought back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from labctl import fetching, render, sending, tree
from labctl.connection import Connection
from labctl.engines import Engine
from labctl.errors import HostError
from labctl.model import LAUNCHER, Job, Lab

# Hosts that are worked on at once.
WIDTH = 32
# Seconds for the files of a run; what a workload wrote may be large.
SENDING = 120
FETCHING = 3600
# Paths that a warning names.
SHOWN = 3


def send(lab: Lab, job: Job, engine: Engine, path: Path) -> tree.Tree:
    """The run's directory, to each of its hosts; returns what that is. HostError where one does not get it."""
    files = tree.of(path)
    on_hosts(lab, job, engine, lambda connection, there: sending.send_new(connection, files, there, seconds=SENDING))
    return files


def fetch(lab: Lab, job: Job, engine: Engine, path: Path, sent: tree.Tree, warn: Callable[[str], None]) -> None:
    """What ranks wrote on their hosts, back into the run's directory; a host that does not give it is warned of."""

    def bring(connection: Connection, there: str) -> None:
        host = connection.target.name
        try:
            came = fetching.fetch(connection, there, path, sent=sent, seconds=FETCHING)
        except HostError as error:
            warn(error.message)
            return
        if came.aside:
            warn(f"{host}: another host wrote the same names: see {', '.join(came.aside[:SHOWN])} in {path}")
        if came.refused:
            warn(f"{host}: not fetched, because it is no file of the run: {', '.join(came.refused[:SHOWN])}")

    on_hosts(lab, job, engine, bring)


def on_hosts(lab: Lab, job: Job, engine: Engine, act: Callable[[Connection, str], object]) -> None:
    """Do something with the run's directory on each host that does not see it here, on all at once."""
    names = dict.fromkeys(lab.host_of(name).name for name in (LAUNCHER, *(node.name for node in job.nodes)))
    hosts = [lab.host(name) for name in names if render.sent(lab.host(name))]
    if not hosts:
        return
    connections = [engine.on(host.name).connection for host in hosts]
    directories = [render.own_path(lab, host, f"runs/{job.run_id}") for host in hosts]
    with ThreadPoolExecutor(min(len(hosts), WIDTH)) as pool:
        list(pool.map(act, (one for one in connections if one), directories))
