"""PyTorch's torchrun, started on every node at once by pdsh.

Ranks meet at the first node without an election (``--node-rank`` is given, so the rendezvous is static). pdsh sends
``%n`` as the place of a node in its list, which DeepSpeed's launcher relies on too.
"""

from __future__ import annotations

from labctl.errors import ConfigError
from labctl.launchers import LaunchSpec, first_slots_only, hostfile

WAYS = ("pdsh",)
OPTIONS = {
    "--local-ranks-filter": 1,
    "--monitor-interval": 1,
    "--numa-binding": 1,
    "--rdzv-conf": 1,
    "--role": 1,
    "--shutdown-timeout": 1,
    "--start-method": 1,
}
RESERVED = frozenset({
    "--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port", "--no-python", "--standalone",
     "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "-m", "--module",
})  # fmt: skip


def check(launch: LaunchSpec) -> None:
    """As many slots on every node, and not by number."""
    first_slots_only("torchrun", launch)
    counts = {slots: name for name, slots in reversed(launch.entries)}
    if len(counts) > 1:
        said = ", ".join(f"{name} has {slots}" for slots, name in counts.items())
        raise ConfigError(
            f"torchrun starts as many ranks on every node, but the slots differ: {said}",
            hint="give all nodes the same slots in the hostfile, or use --launcher deepspeed or mpirun",
        )


def argv(launch: LaunchSpec) -> tuple[str, ...]:
    """The command for the launcher container."""
    nodes = [name for name, _ in launch.entries]
    return (
        "pdsh", "-S", "-R", "ssh", "-f", str(len(nodes)), "-w", ",".join(nodes),
        "torchrun",
        "--nnodes", str(len(nodes)),
        "--node-rank", "%n",
        "--nproc-per-node", str(launch.entries[0][1]),
        "--master-addr", nodes[0],
        "--master-port", str(launch.master_port),
        "--no-python",
        *launch.options,
        launch.program,
    )  # fmt: skip


# For the record: pdsh is given the nodes by name.
files = hostfile
