"""What the hosts of a lab have for it, and what its settings come to on them."""

from __future__ import annotations

from typing import Any

from labctl import device_requests, execute, files, inventory, loading, site, survey
from labctl.context import Context
from labctl.engines.docker_engine import DockerEngine
from labctl.errors import HostError, LabError
from labctl.model import Node
from labctl.observe import observe
from labctl.settings import Settings
from labctl.site import Site
from labctl.vendor_tools import Run

Rows = tuple[tuple[str, str, str], ...]


def devices(context: Context) -> list[dict[str, Any]]:
    """Each host in the form that scripts rely on; those that do not answer are left out, with a warning."""
    found = context.settings()
    if not found.text("LAB_HOSTS"):
        return [inventory.of_host(found, context.directory)]
    with site.opened(context, found, demand=False) as where:
        if not where.connections:
            execute.raise_all(where.failed)
        for error in where.failed.values():
            context.warn(error.message)
        return each(where)


def each(where: Site) -> list[dict[str, Any]]:
    """Those that ssh reaches, in the order of the list."""
    nodes, troubles = nodes_of(where)
    with files.scratch() as scratch:
        return [
            inventory.described(
                where.settings,
                tuple(node for node in nodes if node.host == name),
                troubles.get(name, ""),
                name=name,
                root=survey.lay_out(where.told[name], scratch / str(number)),
                person=survey.person_of(where.told[name]),
                run=tool_on(where, name),
            )
            for number, name in enumerate(where.connections)
        ]


def nodes_of(where: Site) -> tuple[tuple[Node, ...], dict[str, str]]:
    """The lab's nodes, and on which hosts there can be none and why."""
    try:
        lab, able = loading.foresee_lab(where)
    except LabError as error:
        return (), dict.fromkeys(where.connections, error.message)
    troubles = {name: error.message for name, error in able.failed.items() if name not in where.failed}
    return tuple(node for node in lab.nodes if node.host not in troubles), troubles


def tool_on(where: Site, name: str) -> Run:
    """Runs a maker's tool on a host."""
    connection = where.connections[name]
    return lambda argv, seconds: connection.run('exec "$@"', *argv, timeout=seconds, check=False)


def decided(context: Context) -> Rows:
    """What the settings leave to be found out, and the reason."""
    found = context.settings()
    if found.text("LAB_HOSTS"):
        return (("accelerator", *on_hosts(context, found)),)
    accelerator, why = inventory.choice(found)
    if accelerator is None:
        return (("accelerator", "none", why),)
    chosen, here = observe(accelerator)
    request = device_requests.described(found, chosen, here, context.directory, DockerEngine())
    return ("accelerator", accelerator, why), ("device request", *request)


def on_hosts(context: Context, found: Settings) -> tuple[str, str]:
    """The accelerator of the hosts that are listed, as far as they answer or did when they were last reached."""
    wanted = found.text("LAB_ACCELERATOR")
    with site.opened(context, found, demand=False) as where:
        silent = [one.message for one in where.failed.values()]
        try:
            able = where.equipped()
            names = [host.name for host in where.hosts if host.name not in able.failed or host.name in where.failed]
            lacking = [one.message for name, one in able.failed.items() if name not in where.failed]
            chosen: str = where.accelerator
        except HostError as error:
            if error not in where.failed.values():
                return "none", "; ".join((execute.about(error.node or "", error), *silent))
            names, lacking, chosen = [], [], "unknown" if wanted == "auto" else wanted
        heard = ", ".join(name for name in names if name in where.connections)
        before = ", ".join(name for name in names if name not in where.connections)
        parts = (
            f"on {heard}" if heard else "",
            f"on {before} when last reached" if before else "",
            *lacking,
            *silent,
            "`labctl doctor` says what to type" if silent else "",
        )
        return chosen, f"{wanted}: {'; '.join(filter(None, parts))}"
