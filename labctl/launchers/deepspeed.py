"""DeepSpeed's launcher over pdsh.

Facts from deepspeed/launcher/{runner,multinode_runner}.py: a hostfile that is missing means a silent local run, one
host alone is started locally unless ``--force_multi``, and ``.deepspeed_env`` is read from the current directory with
``line.split('=')``, so it may hold neither blank lines nor comments, and its values reach a shell unquoted.
"""

from __future__ import annotations

from labctl.hostfile import format_hostfile
from labctl.launchers import Launch
from labctl.model import File


def argv(launch: Launch) -> tuple[str, ...]:
    """The command for the launcher container, to be run in the run's directory."""
    return (
        "deepspeed",
        "--hostfile", f"{launch.directory}/hostfile",
        "--master_addr", launch.entries[0][0],
        "--master_port", str(launch.master_port),
        "--ssh_port", str(launch.ssh_port),
        "--launcher", "pdsh",
        "--force_multi",
        "--no_python",
        "--no_local_rank",
        launch.program,
    )  # fmt: skip


def files(launch: Launch) -> tuple[File, ...]:
    """The hostfile and the environment, relative to the run's directory."""
    variables = "".join(f"{name}={value}\n" for name, value in launch.variables)
    return (
        File(path="hostfile", content=format_hostfile(launch.entries), mode=0o644),
        File(path=".deepspeed_env", content=variables, mode=0o644),
    )
