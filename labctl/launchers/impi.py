"""Intel MPI's mpiexec.hydra, in its own dialect: a machine file with ``name:slots``, ``-genv``, ``-iface``.

Options as in the Intel MPI Library Developer Reference, "Hydra Process Manager Command Reference". ssh takes the port
from the lab's ssh configuration.
"""

from __future__ import annotations

from labctl.launchers import LaunchSpec, first_slots_only, one_interface_only
from labctl.model import File

PROGRAM = "mpiexec.hydra"
WAYS = ("hydra",)
OPTIONS = {
    "-bind-to": 1,
    "-genv": 2,
    "-map-by": 1,
    "-ordered-output": 0,
    "-perhost": 1,
    "-ppn": 1,
    "-print-rank-map": 0,
    "-verbose": 0,
}
RESERVED = frozenset({
    "-machinefile", "-f", "-host", "-hostfile", "-hosts", "-n", "-np", "-bootstrap", "-iface", "-prepend-rank",
})  # fmt: skip


def check(launch: LaunchSpec) -> None:
    """Raise ConfigError if slots are chosen by number, or if interface names differ between hosts."""
    first_slots_only("impi", launch)
    one_interface_only("impi", launch)


def argv(launch: LaunchSpec) -> tuple[str, ...]:
    """Return the ``mpiexec.hydra`` command for the launcher container, each variable passed by ``-genv``."""
    return (
        "mpiexec.hydra",
        "-machinefile", f"{launch.directory}/machinefile",
        "-n", str(launch.ranks),
        "-bootstrap", "ssh",
        "-iface", launch.interface,
        "-prepend-rank",
        "-genv", "FI_TCP_IFACE", launch.interface,
        *(word for name, value in launch.variables for word in ("-genv", name, value)),
        *launch.options,
        launch.program,
    )  # fmt: skip


def files(launch: LaunchSpec) -> tuple[File, ...]:
    """Return the machine file, lines ``name:slots``, for the run's directory."""
    lines = "".join(f"{name}:{slots}\n" for name, slots in launch.entries)
    return (File(path="machinefile", content=lines, mode=0o644),)
