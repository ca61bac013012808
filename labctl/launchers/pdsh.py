"""A program that starts the ranks of its node itself, started on every node at once by pdsh.

It reads its node's number and the meeting point from NODE_RANK, NNODES, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT;
torchrun reads them by the same names with ``PET_`` in front. pdsh replaces ``%n`` by a node's position in its list.
"""

from __future__ import annotations

from labctl.launchers import LaunchSpec, first_slots_only, hostfile

PROGRAM = "pdsh"
WAYS = ("ssh",)
OPTIONS = {"-t": 1, "-u": 1}
RESERVED = frozenset({"-w", "-x", "-R", "-S", "-f", "-l"})


def check(launch: LaunchSpec) -> None:
    """Raise ConfigError if slots are chosen by number."""
    first_slots_only("pdsh", launch)


def argv(launch: LaunchSpec) -> tuple[str, ...]:
    """Return the ``pdsh`` command that starts the program once per node, with LABCTL_NODE_RANK, over ssh."""
    nodes = [name for name, _ in launch.entries]
    return (
        "pdsh", "-S", "-R", "ssh", "-f", str(len(nodes)), "-w", ",".join(nodes),
        *launch.options,
        "env", "LABCTL_NODE_RANK=%n", launch.program,
    )  # fmt: skip


files = hostfile
