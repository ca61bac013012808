"""Open MPI's mpirun.

ssh takes the port from the lab's ssh configuration. Ranks are not bound to cores unless the user asks for it: the cores
of a node are its cpuset, which several ranks may share.
"""

from __future__ import annotations

from labctl.launchers import LaunchSpec, first_slots_only, hostfile, open_mpi_options

PROGRAM = "mpirun"
WAYS = ("openmpi",)
OPTIONS = {
    "--bind-to": 1,
    "--display-map": 0,
    "--map-by": 1,
    "--mca": 2,
    "-mca": 2,
    "--oversubscribe": 0,
    "--prefix": 1,
    "--rank-by": 1,
    "--report-bindings": 0,
    "--timestamp-output": 0,
    "-x": 1,
}
RESERVED = frozenset({
    "--hostfile", "--host", "-H", "-np", "-n", "-c", "--allow-run-as-root", "--tag-output", "--machinefile",
})  # fmt: skip


def check(launch: LaunchSpec) -> None:
    """Raise ConfigError if slots are chosen by number."""
    first_slots_only("mpirun", launch)


def argv(launch: LaunchSpec) -> tuple[str, ...]:
    """Return the ``mpirun`` command for the launcher container, with ``--bind-to none`` unless the user binds."""
    bound = any(word.partition("=")[0] == "--bind-to" for word in launch.options)
    return (
        "mpirun",
        "--hostfile", f"{launch.directory}/hostfile",
        "-np", str(launch.ranks),
        "--allow-run-as-root",
        "--tag-output",
        *(() if bound else ("--bind-to", "none")),
        *open_mpi_options(launch),
        *(word for name, value in launch.variables for word in ("-x", f"{name}={value}")),
        *launch.options,
        launch.program,
    )  # fmt: skip


files = hostfile
