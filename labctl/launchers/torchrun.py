"""PyTorch's torchrun, started on every node at once by pdsh; or elastic, started over ssh.

Ranks meet at the first node without an election (``--node-rank`` is given, so the rendezvous is static). pdsh replaces
``%n`` by a node's position in its list, which DeepSpeed's launcher relies on too.

``torchrun:elastic``: after a rank fails or a node is lost, torchrun restarts the ranks on the remaining nodes, with a
smaller world. The first node holds the rendezvous (c10d), so its end is the run's. pdsh would exit with 255 for each
lost node.
"""

from __future__ import annotations

from pathlib import Path

from labctl.errors import ConfigError
from labctl.launchers import ELASTIC, LaunchSpec, first_slots_only, hostfile
from labctl.model import File

PROGRAM = "torchrun"
WAYS = ("pdsh", ELASTIC)
NEEDED = 1
OPTIONS = {
    "--local-ranks-filter": 1,
    "--max-restarts": 1,
    "--monitor-interval": 1,
    "--numa-binding": 1,
    "--rdzv-conf": 1,
    "--role": 1,
    "--shutdown-timeout": 1,
    "--start-method": 1,
}
RESERVED = frozenset({
    "--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port", "--no-python", "--standalone",
     "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--local-addr", "-m", "--module",
})  # fmt: skip


def check(launch: LaunchSpec) -> None:
    """Raise ConfigError if slots are chosen by number, or if nodes have different numbers of them."""
    first_slots_only("torchrun", launch)
    counts = {slots: name for name, slots in reversed(launch.entries)}
    if len(counts) > 1:
        listed = ", ".join(f"{name} has {slots}" for slots, name in counts.items())
        raise ConfigError(
            f"torchrun starts the same number of ranks on every node, but the slots differ: {listed}",
            hint="give all nodes the same slots in the hostfile, or use --launcher deepspeed or mpirun",
        )


def argv(launch: LaunchSpec) -> tuple[str, ...]:
    """Return the command for the launcher container: pdsh starts torchrun on each node, or SCRIPT if elastic."""
    nodes = [name for name, _ in launch.entries]
    if launch.way == ELASTIC:
        return (
            "bash", f"{launch.directory}/{SCRIPT}", ",".join(nodes),
            "torchrun",
            "--nnodes", f"1:{len(nodes)}",
            "--nproc-per-node", str(launch.entries[0][1]),
            "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{nodes[0]}:{launch.master_port}",
            "--rdzv-id", launch.directory.rpartition("/")[2],
            "--rdzv-conf", f"last_call_timeout={LAST_CALL}",
            "--max-restarts", str(RESTARTS),
            "--no-python",
            *launch.options,
            launch.program,
        )  # fmt: skip
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


# Restarts of the ranks, and seconds that a new rendezvous waits for more nodes, unless the options say otherwise.
RESTARTS, LAST_CALL = 10, 5
SCRIPT = "torchrun.sh"
ON_EVERY_NODE = Path(__file__).with_name(SCRIPT).read_text(encoding="utf-8")


def files(launch: LaunchSpec) -> tuple[File, ...]:
    """Return the hostfile, for the record only, and for an elastic run the script that starts torchrun on every node.

    pdsh gets the nodes as arguments.
    """
    script = File(path=SCRIPT, content=ON_EVERY_NODE, mode=0o755)
    return (*hostfile(launch), *((script,) if launch.way == ELASTIC else ()))
