"""Lab + Workload -> Job: what the launcher executes, the files it needs, and where."""

from __future__ import annotations

from labctl import launchers, render
from labctl.errors import ConfigError
from labctl.launchers import Launch
from labctl.model import File, Job, Lab, Node, Workload


def build(
    lab: Lab,
    workload: Workload,
    run_id: str,
    entries: tuple[tuple[str, int], ...],
    timeout: float,
    hostfile: str = "hostfile",
) -> Job:
    """A run of this workload on these nodes of the lab, ready to start.

    Raises ConfigError when the hostfile names a node or slots that the lab does not have.
    """
    chosen = choose(lab, entries, hostfile)
    directory = f"{lab.project_path}/runs/{run_id}"
    launch = Launch(
        entries=tuple((node.name, node.slots) for node in chosen),
        directory=directory,
        program=f"{directory}/rank.sh",
        master_port=lab.master_port,
        ssh_port=lab.ssh_port,
        variables=(("LABCTL_RUN_ID", run_id),),
    )
    launcher = launchers.get(workload.launcher)
    job = Job(
        run_id=run_id,
        workload=workload,
        launcher=workload.launcher,
        nodes=chosen,
        argv=launcher.argv(launch),
        environment=(("LABCTL_RUN_ID", run_id),),
        files=launcher.files(launch),
        timeout=timeout,
        directory=directory,
    )
    return _with_rank_script(lab, job)


def choose(lab: Lab, entries: tuple[tuple[str, int], ...], hostfile: str = "hostfile") -> tuple[Node, ...]:
    """The lab's nodes that a hostfile names, in its order, with its slots; all of them for an empty one."""
    from dataclasses import replace

    known = {node.name: node for node in lab.nodes}
    for name, slots in entries:
        if name not in known:
            raise ConfigError(f"{hostfile}: lab {lab.name} has no node `{name}`", hint=f"it has {', '.join(known)}")
        if slots > known[name].slots:
            raise ConfigError(f"{hostfile}: {name} has {known[name].slots} slots, not {slots}")
    return tuple(replace(known[name], slots=slots) for name, slots in entries) or lab.nodes


def _with_rank_script(lab: Lab, job: Job) -> Job:
    from dataclasses import replace

    workload = job.workload
    script = render.render_rank(
        job,
        directory=job.directory,
        script_directory=f"{lab.project_path}/workloads/{workload.directory.name}",
        command=("python", "-u", workload.script, *workload.arguments),
        variables=workload.environment,
    )
    return replace(job, files=(*job.files, File(path="rank.sh", content=script, mode=0o755)))
