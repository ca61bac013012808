"""The script that every rank of a run executes."""

from __future__ import annotations

from labctl.model import File, Job, Lab, Workload
from labctl.templates import template


def render_program(lab: Lab, job: Job, script_directory: str) -> File:
    """The script that every rank of a run executes; of a workload that starts its ranks itself, the launcher."""
    workload = job.workload
    name = "start.sh.j2" if workload.launcher == "own" else "rank.sh.j2"
    content: str = template(name).render(
        job=job,
        script_directory=script_directory,
        command=(*command(workload.script), *workload.arguments),
        prepare=(*command(workload.prepare), *workload.arguments) if workload.prepare else (),
        prepare_directory=workload_directory(lab, workload),
        environment=workload.environment,
        master_port=lab.master_port,
        ssh_port=lab.ssh_port,
    )
    return File(path="rank.sh", content=content, mode=0o755)


def workload_directory(lab: Lab, workload: Workload) -> str:
    """Where a workload's folder is in the containers."""
    return f"{lab.project_path}/workloads/{workload.directory.name}"


def command(script: str) -> tuple[str, ...]:
    """How a script is started: Python by the image's own interpreter, anything else by itself."""
    if script.endswith(".py"):
        return ("python", "-u", script)
    return (script if "/" in script else f"./{script}",)
