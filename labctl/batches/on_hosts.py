"""What a validation asks of the hosts themselves: scripts on each of them, what is left there, and versions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.docker.lab.cluster import connect
from labctl.config import dotenv, inventory
from labctl.config.context import Context
from labctl.errors import ConfigError, Failures, HostError
from labctl.model import HERE
from labctl.records import store
from labctl.system import files
from labctl.system.parallel import map_hosts
from labctl.system.process import CompletedProcess


class Operator(Struct, frozen=True, kw_only=True):
    """What the operator of a cluster says besides its hosts: TEST_CONFIGURATION, SKIP_NETWORK_SETUP, L3_ENABLED."""

    test_configuration: str = ""
    skip_network_setup: bool = False
    l3_enabled: bool = False


# Every process of a run has its id in the environment.
PROCESSES = r"""# processes of runs
for path in $(grep -slaF LABCTL_RUN_ID= /proc/[0-9]*/environ); do
    id=$(tr '\0' '\n' <"$path" | sed -n 's/^LABCTL_RUN_ID=//p')
    printf '%s %s\n' "$id" "$(tr '\0' ' ' <"${path%environ}cmdline" | head -c 100)"
done
"""


def run(
    context: Context, script: str, words: tuple[str, ...], seconds: float
) -> tuple[Mapping[str, CompletedProcess], Failures]:
    """Run a script on each host of the lab: what came of it, by host, and the hosts where it did not end."""

    # Ended there, as it would go on behind a connection that is closed. The first line is what errors call it.
    name, limited = script.partition("\n")[0], f'timeout -k 10 {seconds:g} sh -c {shlex.quote(script)} sh "$@"'

    def on_one(connection: Connection) -> CompletedProcess:
        return connection.run(f"{name}\n{limited}", *words, timeout=seconds + 15, check=False)

    with connect(context, context.settings(), demand=False) as cluster:
        if here := cluster.connections.get(HERE):
            # In this thread, where Ctrl-C ends it.
            try:
                return {HERE: on_one(here)}, {}
            except HostError as error:
                return {}, {HERE: error}
        done, lost = map_hosts(on_one, cluster.connections)
        unreached = {host: error for host, error in cluster.failed.items() if host not in cluster.connections}
        return done, {**unreached, **lost}


def remains(context: Context) -> tuple[tuple[str, ...], Failures]:
    """What the hosts have of the lab and of its runs, in words, and which hosts do not answer."""
    settings, runs = context.settings(), set(store.ids(context.directory))
    with connect(context, settings, demand=False) as cluster:
        observed = cluster.engine.observe(settings.text("LAB_NAME"))
        silent: dict[str, HostError] = {**cluster.failed, **dict(observed.silent)}
        containers = (*observed.containers, *observed.probes)
        left = [f"container {one.name} on {one.host}" for one in containers]
        left += [f"network {name}" for _, name in (*observed.networks, *observed.probe_networks)]
        done, lost = map_hosts(lambda connection: connection.run(PROCESSES, check=False), cluster.connections)
        silent |= lost
        for host, found in done.items():
            lines = (line for line in found.out.splitlines() if line.partition(" ")[0] in runs)
            left += [f"process on {host}: {line}" for line in lines]
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


HOSTS = ".lab/hosts.env"
"""The file of hosts that is made of the environment's words, in the lab directory."""


def with_hosts(context: Context) -> Context:
    """The context with the hosts of MASTER_IP and MEMBER_IPS in the environment, where LAB_HOSTS names none.

    They are in a file, which later commands can be given. HostError where it cannot be written.
    """
    said = {key: context.environ[key] for key in inventory.HOST_WORDS if context.environ.get(key)}
    if not said or context.settings().text("LAB_HOSTS"):
        return context
    text = "".join(f"{key}={dotenv.quote(value)}\n" for key, value in said.items())
    files.write(context.directory / HOSTS, text, mode=0o644)
    context.notice(
        f"{' and '.join(said)} of the environment are in {HOSTS}: LAB_HOSTS={HOSTS} gives them to other commands"
    )
    return replace(context, environ={**context.environ, "LAB_HOSTS": HOSTS})


def drained(context: Context) -> tuple[str, ...]:
    """The hosts that are left out, and why. ConfigError for a list of hosts that cannot be read."""
    name = context.settings().text("LAB_HOSTS")
    listed = inventory.read(context.directory / Path(name).expanduser(), name) if name else ()
    _, left_out = inventory.in_use(context.directory, listed)
    return tuple(f"{host} ({why})" for host, why in left_out)


def operator(context: Context) -> Operator:
    """What the environment, or the file of hosts, says besides the hosts' addresses. ConfigError for another word."""
    name = context.settings().text("LAB_HOSTS")
    said = inventory.operator_words(context.directory / Path(name).expanduser(), name) if name else {}
    said |= {key: context.environ[key] for key in inventory.OPERATOR_WORDS if key in context.environ}
    return Operator(
        test_configuration=said.get("TEST_CONFIGURATION", ""),
        skip_network_setup=_flag(said, "SKIP_NETWORK_SETUP"),
        l3_enabled=_flag(said, "L3_ENABLED"),
    )


def _flag(said: Mapping[str, str], key: str) -> bool:
    word = said.get(key, "").strip().lower()
    if word not in ("", *YES, *NO):
        raise ConfigError(f"{key}={said[key]} is neither true nor false", hint=f"{key}=true or {key}=false")
    return word in YES


YES, NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
