"""Write the files of every node without bringing the lab up."""

from __future__ import annotations

from labctl.backends.docker.compose import render
from labctl.backends.docker.deploy import preflight, provision
from labctl.backends.docker.lab.cluster import Cluster, preview_lab
from labctl.config.context import Context
from labctl.system.files import write_all


def render_all(context: Context, cluster: Cluster) -> render.RenderedFiles:
    """Write compose files, ssh configuration and secrets of all nodes; delete unset secrets; return what changed."""
    lab, usable = preview_lab(cluster)
    preflight.warn_excluded_hosts(context, usable.failed)
    for path in provision.stale_secrets(lab):
        path.unlink()
    changed = tuple(write_all(lab.directory, (*render.render(lab), *provision.secrets(lab))))
    nodes = tuple(node.name for node in lab.nodes)
    return render.RenderedFiles(lab=lab.name, directory=str(lab.directory), nodes=nodes, changed=changed)
