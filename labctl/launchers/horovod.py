"""Horovod's horovodrun, with Gloo or with the image's MPI.

Facts from Horovod 0.28.1 as it was tried across containers: with several networks it may pick different interfaces on
different nodes, so the interface is named; its cache of checked hosts outlives the containers that were checked, so it
is off; it hands the launcher's whole environment to every rank.
"""

from __future__ import annotations

from labctl.launchers import LaunchSpec, first_slots_only, hostfile, one_interface_only

WAYS = ("gloo", "mpi")
OPTIONS = {
    "--autotune": 0,
    "--cycle-time-ms": 1,
    "--fusion-threshold-mb": 1,
    "--gloo-timeout-seconds": 1,
    "--log-level": 1,
    "--no-stall-check": 0,
    "--stall-check-warning-time-seconds": 1,
    "--start-timeout": 1,
    "--timeline-filename": 1,
    "--verbose": 0,
}
RESERVED = frozenset({
    "-np", "--num-proc", "-H", "--hosts", "--hostfile", "-p", "--ssh-port", "--gloo", "--mpi",
     "--mpi-args", "--network-interfaces", "--disable-cache",
})  # fmt: skip


def check(launch: LaunchSpec) -> None:
    """Slots cannot be chosen by number, nor interfaces by host."""
    first_slots_only("horovod", launch)
    one_interface_only("horovod", launch)


def argv(launch: LaunchSpec) -> tuple[str, ...]:
    """The command for the launcher container."""
    return (
        "horovodrun",
        "-np", str(launch.ranks),
        "--hostfile", f"{launch.directory}/hostfile",
        "--network-interfaces", launch.interface,
        "--ssh-port", str(launch.ssh_port),
        "--disable-cache",
        f"--{launch.way}",
        *launch.options,
        launch.program,
    )  # fmt: skip


files = hostfile
