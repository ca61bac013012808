"""Horovod's horovodrun, with Gloo, with the image's MPI, or elastic.

Facts from Horovod 0.28.1, tried across containers: with several networks it may pick different interfaces on different
nodes, so the interface is named; its cache of checked hosts outlives the containers that were checked, so it is off; it
passes the launcher's whole environment to every rank.

``horovod:elastic``: a script with ``hvd.elastic`` continues from its last commit with the ranks of the remaining nodes.
horovodrun gets the list of remaining nodes from a script of the run.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from labctl.launchers import ELASTIC, LaunchSpec, first_slots_only, hostfile, one_interface_only, open_mpi_options
from labctl.model import File, Pairs

PROGRAM = "horovodrun"
WAYS = ("gloo", "mpi", ELASTIC)
OPTIONS = {
    "--autotune": 0,
    "--blacklist-cooldown-range": 2,
    "--cycle-time-ms": 1,
    "--elastic-timeout": 1,
    "--fusion-threshold-mb": 1,
    "--gloo-timeout-seconds": 1,
    "--log-level": 1,
    "--no-stall-check": 0,
    "--reset-limit": 1,
    "--stall-check-warning-time-seconds": 1,
    "--start-timeout": 1,
    "--timeline-filename": 1,
    "--verbose": 0,
}
RESERVED = frozenset({
    "-np", "--num-proc", "-H", "--hosts", "--hostfile", "-p", "--ssh-port", "--gloo", "--mpi",
     "--mpi-args", "--network-interfaces", "--disable-cache", "--min-np", "--max-np", "--min-num-proc",
     "--max-num-proc", "--host-discovery-script",
})  # fmt: skip


def check(launch: LaunchSpec) -> None:
    """Raise ConfigError if slots are chosen by number, or if interface names differ between hosts."""
    first_slots_only("horovod", launch)
    one_interface_only("horovod", launch)


def argv(launch: LaunchSpec) -> tuple[str, ...]:
    """Return the ``horovodrun`` command for the launcher container; elastic with a discovery script, not hostfile."""
    elastic = launch.way == ELASTIC
    return (
        "horovodrun",
        "-np", str(launch.ranks),
        *(("--min-np", "1", "--max-np", str(launch.ranks)) if elastic else ()),
        *(("--host-discovery-script", f"{launch.directory}/{SCRIPT}") if elastic else ()),
        *(() if elastic else ("--hostfile", f"{launch.directory}/hostfile")),
        "--network-interfaces", launch.interface,
        "--ssh-port", str(launch.ssh_port),
        "--disable-cache",
        "--gloo" if elastic else f"--{launch.way}",
        *launch.options,
        launch.program,
    )  # fmt: skip


def environment(launch: LaunchSpec) -> Pairs:
    """Return variables with the options of the MPI that Horovod starts; empty unless the way is ``mpi``.

    Both as Open MPI's variables, which other MPIs would reject as arguments, and as those of MPICH's family.
    """
    if launch.way != "mpi":
        return ()
    options = open_mpi_options(launch)
    open_mpi = ((f"OMPI_MCA_{option}", value) for option, value in zip(options[1::3], options[2::3], strict=True))
    return (*open_mpi, ("I_MPI_HYDRA_IFACE", launch.interface), ("FI_TCP_IFACE", launch.interface))


SCRIPT = "nodes.sh"
NODES = Path(__file__).with_name(SCRIPT).read_text(encoding="utf-8")


def files(launch: LaunchSpec) -> tuple[File, ...]:
    """Return the hostfile and, for an elastic run, the script that lists reachable nodes."""
    if launch.way != ELASTIC:
        return hostfile(launch)
    nodes = shlex.join(f"{name}:{slots}" for name, slots in launch.entries)
    settings = f"#!/bin/bash\nport={launch.ssh_port} nodes=({nodes})\n"
    return (*hostfile(launch), File(path=SCRIPT, content=settings + NODES, mode=0o755))
