"""The caller's labs on this machine, for the page of the cluster."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from labctl import flows
from labctl.errors import HostError
from labctl.system import human
from labctl.ui.site import Site, as_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

    from labctl.backends.docker.lab.labs import OwnLab

KINDS = {"up": "good", "partial": "unsure", "stopped": "not-reached"}


def routes(site: Site) -> list[BaseRoute]:
    """Return the address of the list."""
    from starlette.routing import Route

    def labs(_: Request) -> Response:
        """Return the labs, or why they cannot be listed."""
        try:
            return as_json({"labs": [row(lab, site) for lab in flows.own_labs()]})
        except HostError as error:
            return as_json({"labs": [], "why": f"Cannot list labs: {error.message}"})

    return [Route("/cluster/labs.json", labs)]


def row(lab: OwnLab, site: Site) -> dict[str, object]:
    """Return a lab as the page shows it, with the command that opens its pages."""
    state = lab.state if lab.is_there else f"{lab.state}, directory deleted"
    return {
        "name": lab.name,
        "directory": lab.directory,
        "state": {"text": state, "kind": KINDS[lab.state]},
        "nodes": human.listed(lab.nodes),
        "command": f"labctl -C {shlex.quote(lab.directory)} ui" if lab.is_there else "",
        "here": lab.directory == str(site.directory),
    }
