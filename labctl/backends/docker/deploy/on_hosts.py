"""Scripts on the hosts of a lab, objects that are left there, and versions."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from pathlib import Path

from labctl import __version__
from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.docker.lab.cluster import Cluster
from labctl.errors import Failures, HostError
from labctl.model import HERE
from labctl.records import store
from labctl.system.parallel import map_hosts
from labctl.system.process import CompletedProcess

# Every process of a run has its id in the environment.
PROCESSES = Path(__file__).with_name("processes.sh").read_text(encoding="utf-8")


def run(
    cluster: Cluster, script: str, arguments: tuple[str, ...], seconds: float, hosts: Collection[str] = ()
) -> tuple[Mapping[str, CompletedProcess], Failures]:
    """Run a script on these hosts, or on each, for ``seconds``; return results, of any exit code, and lost hosts."""

    # Limited on the host, as it would go on after the connection is closed. Errors name it by its first line.
    name, limited = script.partition("\n")[0], f'timeout -k 10 {seconds:g} sh -c {shlex.quote(script)} sh "$@"'

    def on_one(connection: Connection) -> CompletedProcess:
        return connection.run(f"{name}\n{limited}", *arguments, timeout=seconds + 15, check=False)

    if here := cluster.connections.get(HERE):
        # In this thread, so that Ctrl-C ends it.
        try:
            return {HERE: on_one(here)}, {}
        except HostError as error:
            return {}, {HERE: error}
    chosen = {host: connection for host, connection in cluster.connections.items() if not hosts or host in hosts}
    done, lost = map_hosts(on_one, chosen)
    unreached = {host: error for host, error in cluster.failed.items() if host not in cluster.connections}
    return done, {**unreached, **lost}


def remains(cluster: Cluster) -> tuple[tuple[str, ...], Failures]:
    """Return a line per container, network and process of the lab left on hosts; also the hosts that are silent."""
    runs = set(store.ids(cluster.directory))
    observed = cluster.engine.observe(cluster.settings.text("LAB_NAME"))
    silent: dict[str, HostError] = {**cluster.failed, **dict(observed.silent)}
    left = [f"container {container.name} on {container.host}" for container in (*observed.containers, *observed.probes)]
    left += [f"network {name}" for _, name in (*observed.networks, *observed.probe_networks)]
    done, lost = map_hosts(lambda connection: connection.run(PROCESSES, check=False), cluster.connections)
    for host, answer in done.items():
        lines = (line for line in answer.out.splitlines() if line.partition(" ")[0] in runs)
        left += [f"process on {host}: {line}" for line in lines]
    return tuple(left), {**silent, **lost}


def versions(cluster: Cluster) -> dict[str, str]:
    """Return the versions of labctl, of the image, and of engine and kernel of each host that answers, by name."""
    engine = cluster.engine
    asked, _ = map_hosts(lambda host: engine.capabilities(host).versions(), {host: host for host in engine.hosts})
    values = {"labctl": __version__, "image": cluster.image}
    for host, versions in asked.items():
        values |= {f"{part} of {host}": versions[part] for part in ("engine", "kernel")}
    return values
