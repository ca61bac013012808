"""What grows with a lab: health checks of a host's nodes, open files of a launcher, addresses that a host remembers."""

from __future__ import annotations

import math

from labctl.hardware import Host
from labctl.model import Lab

CHECK_INTERVAL = 15
"""Seconds between two health checks of a node."""
NODES_PER_CORE = 4
"""Nodes of which a core is checked that often: a check takes 0.13 s of it."""
FILES, FILES_PER_RANK = 64, 4
"""Open files of a process that talks to every rank: with 1024, training on 32 nodes of 8 ranks begins, on more not."""
USUAL_FILES = 1024
"""What hosts allow a process that asks for nothing."""


def nodes_on_a_host(lab: Lab) -> int:
    return len(lab.nodes) if lab.network == "bridge" else 1


def check_interval(lab: Lab, host: Host) -> int:
    """Seconds between two health checks of a node: longer where many share a core, which would do little else."""
    crowd = nodes_on_a_host(lab) / (NODES_PER_CORE * max(1, len(host.cpus)))
    return CHECK_INTERVAL * max(1, math.ceil(crowd))


def files_needed(lab: Lab) -> int:
    """Files that one process of a run may have open at once."""
    return FILES + FILES_PER_RANK * sum(node.slots for node in lab.nodes)


def neighbours_needed(lab: Lab) -> int:
    """Entries of a host's neighbour table, which all of its containers share, when every node talks to every other."""
    return nodes_on_a_host(lab) * (len(lab.nodes) + 1)
