"""What a validation asks of the hosts themselves: scripts on each of them, what is left there, and versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from labctl.config import inventory
from labctl.config.context import Context
from labctl.errors import Failures, HostError
from labctl.lab.cluster import connect
from labctl.system.parallel import map_hosts
from labctl.system.process import CompletedProcess


class Operator(Struct, frozen=True, kw_only=True):
    """What the operator of a cluster says besides its hosts: TEST_CONFIGURATION, SKIP_NETWORK_SETUP, L3_ENABLED."""

    test_configuration: str = ""
    skip_network_setup: bool = False
    l3_enabled: bool = False


# $@: ids of runs, which all of their processes have in the environment.
PROCESSES = """# processes of runs
for id in "$@"; do
    for path in $(grep -slaF -- "LABCTL_RUN_ID=$id" /proc/[0-9]*/environ); do
        printf '%s %s\\n' "$id" "$(tr '\\0' ' ' <"${path%environ}cmdline" | head -c 100)"
    done
done
"""


def run(
    context: Context, script: str, words: tuple[str, ...], seconds: float
) -> tuple[Mapping[str, CompletedProcess], Failures]:
    """Run a script on each host of the lab: what came of it, by host, and the hosts where it did not end."""
    with connect(context, context.settings(), demand=False) as cluster:
        done, lost = map_hosts(
            lambda connection: connection.run(script, *words, timeout=seconds, check=False), cluster.connections
        )
        unreached = {host: error for host, error in cluster.failed.items() if host not in cluster.connections}
        return done, {**unreached, **lost}


def remains(context: Context, run_ids: tuple[str, ...]) -> tuple[tuple[str, ...], Failures]:
    """What the hosts have of the lab and of these runs, in words, and which hosts do not answer."""
    settings = context.settings()
    with connect(context, settings, demand=False) as cluster:
        observed = cluster.engine.observe(settings.text("LAB_NAME"))
        silent: dict[str, HostError] = {**cluster.failed, **dict(observed.silent)}
        containers = (*observed.containers, *observed.probes)
        left = [f"container {one.name} on {one.host}" for one in containers]
        left += [f"network {name}" for _, name in (*observed.networks, *observed.probe_networks)]
        if run_ids:
            done, lost = map_hosts(
                lambda connection: connection.run(PROCESSES, *run_ids, check=False), cluster.connections
            )
            silent |= lost
            left += [f"process on {host}: {line}" for host, found in done.items() for line in found.out.splitlines()]
        return tuple(left), silent


def versions(context: Context) -> dict[str, str]:
    """Versions of labctl, of the image, and of engine and kernel of each host that answers."""
    from importlib import metadata

    with connect(context, context.settings()) as cluster:
        asked, _ = map_hosts(
            lambda host: cluster.engine.capabilities(host).versions(), {host: host for host in cluster.engine.hosts}
        )
        found = {"labctl": metadata.version("labctl"), "image": cluster.image}
        for host, its in asked.items():
            found |= {f"{what} of {host}": its[what] for what in ("engine", "kernel")}
        return found


def operator(context: Context) -> Operator:
    """What the environment, or the file of hosts, says besides the hosts' addresses."""
    name = context.settings().text("LAB_HOSTS")
    said = inventory.operator_words(context.directory / Path(name).expanduser(), name) if name else {}
    said |= {key: context.environ[key] for key in inventory.OPERATOR_WORDS if key in context.environ}
    return Operator(
        test_configuration=said.get("TEST_CONFIGURATION", ""),
        skip_network_setup=_yes(said.get("SKIP_NETWORK_SETUP", "")),
        l3_enabled=_yes(said.get("L3_ENABLED", "")),
    )


def _yes(text: str) -> bool:
    return text.strip().lower() in ("true", "1", "yes")
