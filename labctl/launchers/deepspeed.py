"""DeepSpeed's launcher, over pdsh or over Open MPI.

Facts from deepspeed/launcher/{runner,multinode_runner}.py: a hostfile that is missing means a silent local run, one
host alone is started locally unless ``--force_multi``, and ``.deepspeed_env`` is read from the current directory with
``line.split('=')``, so it may hold neither blank lines nor comments, and its values reach a shell unquoted. Over
Open MPI it takes neither ``--include`` nor a port for ssh, which the lab's ssh configuration gives.
"""

from __future__ import annotations

import shlex

from labctl.launchers import LaunchSpec, first_slots_only, hostfile, open_mpi_options
from labctl.model import File

PROGRAM = "deepspeed"
WAYS = ("pdsh", "openmpi")
OPTIONS = {
    "--bind_core_list": 1,
    "--bind_cores_to_rank": 0,
    "--enable_each_rank_log": 1,
    "--log_level": 1,
    "--no_ssh_check": 0,
    "--quiet": 0,
    "--save_pid": 0,
    "--venv_script": 1,
}
RESERVED = frozenset({
    "--hostfile", "-H", "--include", "-i", "--exclude", "-e", "--num_nodes", "--num_gpus", "--master_addr",
     "--master_port", "--ssh_port", "--launcher", "--launcher_args", "--force_multi", "--no_python",
     "--no_local_rank", "--module",
})  # fmt: skip


def check(launch: LaunchSpec) -> None:
    """Raise ConfigError if slots are chosen by number over Open MPI; over pdsh that is allowed."""
    if launch.way == "openmpi":
        first_slots_only("deepspeed:openmpi", launch)


def argv(launch: LaunchSpec) -> tuple[str, ...]:
    """Return the ``deepspeed`` command for the launcher container, with Open MPI's options if that is the way."""
    # Options that DeepSpeed does not pass to mpirun by itself.
    options = ("--allow-run-as-root", "--tag-output", "--bind-to", "none", *open_mpi_options(launch))
    mpi = ("--launcher_args", shlex.join(options)) if launch.way == "openmpi" else ()
    return (
        "deepspeed",
        "--hostfile", f"{launch.directory}/hostfile",
        *(("--include", launch.include) if launch.include else ()),
        "--master_addr", launch.entries[0][0],
        "--master_port", str(launch.master_port),
        "--ssh_port", str(launch.ssh_port),
        "--launcher", launch.way,
        "--force_multi",
        "--no_python",
        "--no_local_rank",
        *mpi,
        *launch.options,
        launch.program,
    )  # fmt: skip


def files(launch: LaunchSpec) -> tuple[File, ...]:
    """Return the files for the run's directory: the hostfile, and .deepspeed_env with the launch's variables."""
    variables = "".join(f"{name}={value}\n" for name, value in launch.variables)
    return (*hostfile(launch), File(path=".deepspeed_env", content=variables, mode=0o644))
