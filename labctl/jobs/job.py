"""Build the job of a run: its nodes, its launch command, and the script that every rank executes."""

from __future__ import annotations

import json
import socket
from collections import Counter
from pathlib import Path

from msgspec.structs import replace

from labctl import accelerators, launchers
from labctl.config import hostfile
from labctl.errors import ConfigError
from labctl.launchers import LaunchSpec
from labctl.model import HERE, Copy, File, Host, Job, Lab, Node, Workload
from labctl.system.templates import template
from labctl.workloads import deepspeed_config


def render_program(lab: Lab, job: Job) -> File:
    """Return rank.sh, the script of every rank, or of the one start if the workload starts its ranks itself."""
    workload = job.workload
    name = "start.sh.j2" if workload.starts_itself else "rank.sh.j2"
    project = workload.project
    work = f"{job.directory}/{WORK}"
    content: str = template(Path(__file__).with_name(name)).render(
        job=job,
        lab=lab,
        work=f"{work}/{project.work}" if project else work,
        project=f"{work}/{project.root.name}" if project else "",
        project_part=str(Path(__file__).with_name("project.sh.j2")),
        install=bool(project and project.install),
        command=workload.program,
        per_node=workload.is_per_node,
        arguments=workload.arguments,
        elastic=launchers.is_elastic(workload.launcher),
        one_thread=is_crowded(lab) and "OMP_NUM_THREADS" not in dict(lab.environment),
        prepare=(*replace(workload, script=workload.prepare).program, *workload.arguments) if workload.prepare else (),
        prepare_directory=prepare_directory(lab, job),
    )
    return File(path="rank.sh", content=content, mode=0o755)


def run_directory(lab: Lab, run_id: str) -> str:
    """Return a run's directory in the containers, below ``outputs``."""
    return f"{lab.project_path}/outputs/{run_id}"


def prepare_directory(lab: Lab, job: Job) -> str:
    """Return the container directory of ``prepare``: the run's copy of the code, else the workload's folder."""
    work = f"{WORK}/{job.workload.prepare}"
    if any(copy.path == work and copy.root == job.workload.directory.resolve() for copy in job.code):
        return f"{job.directory}/{WORK}"
    return f"{lab.project_path}/workloads/{job.workload.directory.name}"


GRACE = 5
"""Seconds between SIGTERM and SIGKILL for the processes of a run."""


def limited(job: Job) -> tuple[str, ...]:
    """Return the launch command in timeout(1), which kills it later than the agent would."""
    return ("timeout", f"--kill-after={GRACE}", f"{job.timeout + LOOKING:g}", *job.argv)


LOOKING = 15
"""Seconds that the agent has at the time limit to see what ranks wait for, before the command is ended in any case."""
WORK = "work"
"""Directory of the copied code in the run's directory; ranks start in it."""


CONFIG = "ds_config.json"
"""DeepSpeed's configuration, in the run's directory."""


def build(
    lab: Lab,
    workload: Workload,
    run_id: str,
    chosen: tuple[tuple[Node, tuple[int, ...]], ...],
    timeout: float,
    code: tuple[Copy, ...] = (),
    config_source: str = "",
) -> Job:
    """Return the job of a workload on nodes and slots, with files rendered but not written. ConfigError if rejected.

    ``code`` is copied to the directory that ranks start in; errors name ``config_source`` as the source of DeepSpeed's
    configuration. ConfigError for options that the launcher or DeepSpeed would reject.
    """
    usual = dict(accelerators.get(lab.accelerator).launchers)
    workload = replace(workload, launcher=usual.get(workload.launcher, workload.launcher))
    directory = run_directory(lab, run_id)
    numbered = any(slots != tuple(range(len(slots))) for _, slots in chosen)
    include = "@".join(f"{node.name}:{','.join(map(str, slots))}" for node, slots in chosen)
    launch = LaunchSpec(
        # If slots are chosen by number, the hostfile must include the last of them.
        entries=tuple((node.name, slots[-1] + 1 if numbered else len(slots)) for node, slots in chosen),
        include=include if numbered else "",
        directory=directory,
        program=f"{directory}/rank.sh",
        master_port=lab.master_port,
        ssh_port=lab.ssh_port,
        interface=lab.interfaces,
        addresses=lab.addresses,
        variables=(("LABCTL_RUN_ID", run_id),),
        way=launchers.way(workload.launcher),
        options=workload.launcher_arguments,
        crowded=shares_cores(lab, chosen),
    )
    launchers.check(workload.launcher, launch)
    workload = deepspeed_config.resolve_bf16(workload, lab.accelerator, lab.hosts)
    launcher = launchers.get(workload.launcher)
    files = launcher.files(launch)
    if workload.deepspeed is not None:
        source, ranks = config_source or workload.declared, sum(len(slots) for _, slots in chosen)
        config = deepspeed_config.complete(workload.deepspeed, ranks=ranks, accelerator=lab.accelerator, where=source)
        files = (*files, File(path=CONFIG, content=json.dumps(config, indent=2) + "\n", mode=0o644))
        arguments = (*workload.arguments, f"--{workload.deepspeed_option}", f"{directory}/{CONFIG}")
        workload = replace(workload, arguments=arguments)
    job = Job(
        run_id=run_id,
        workload=workload,
        nodes=tuple(replace(node, slots=len(slots)) for node, slots in chosen),
        argv=launcher.argv(launch),
        environment=(("LABCTL_RUN_ID", run_id), *launchers.environment(workload.launcher, launch)),
        files=files,
        timeout=timeout,
        directory=directory,
        code=code,
    )
    return replace(job, files=(*files, render_program(lab, job)))


def is_crowded(lab: Lab) -> bool:
    """Tell if the lab's only host has fewer cores than nodes."""
    return lab.network == "bridge" and len(lab.nodes) > len(lab.hosts[0].cpus)


def shares_cores(lab: Lab, chosen: tuple[tuple[Node, tuple[int, ...]], ...]) -> bool:
    """Tell if some of the chosen ranks have to share a core."""
    cores, ranks = Counter[object](), Counter[object]()
    for node, slots in chosen:
        owner = node.name if node.cpuset else node.host
        cores[owner] = len(node.cpuset or lab.host(node.host).cpus)
        ranks[owner] += len(slots)
    return is_crowded(lab) or any(ranks[owner] > cores[owner] for owner in ranks)


def choose(
    lab: Lab,
    entries: tuple[tuple[str, int], ...] = (),
    source: str = "hostfile",
    *,
    include: str = "",
    exclude: str = "",
) -> tuple[tuple[Node, tuple[int, ...]], ...]:
    """Return nodes with slot numbers of entries, or all, after --include or --exclude. ConfigError if unknown.

    An entry without slots has all of its node.
    """
    by_name = {node.name: node for node in lab.nodes}
    meant = nodes_of(lab, tuple(name for name, _ in entries), source)
    for node, (name, slots) in zip(meant, entries, strict=True):
        if slots > node.slots:
            called = name if name == node.name else f"{name} ({node.name})"
            raise ConfigError(f"{source}: {called} has {node.slots} slots, not {slots}")
    named = tuple((node.name, slots or node.slots) for node, (_, slots) in zip(meant, entries, strict=True))
    named = named or tuple((node.name, node.slots) for node in lab.nodes)
    return tuple((by_name[name], slots) for name, slots in hostfile.select(named, include, exclude))


THIS_MACHINE = ("localhost", "127.0.0.1")
"""Names of this machine in hostfiles, other than its hostname."""


def nodes_of(lab: Lab, names: tuple[str, ...], source: str) -> tuple[Node, ...]:
    """Return the node for each name: a node's, or its host's name or address. ConfigError if none is left.

    If a host has several nodes, it is the first that is not named otherwise.
    """
    nodes = {node.name: node for node in lab.nodes}
    free = [node for node in lab.nodes if node.name not in names]
    chosen = []
    for name in names:
        node = nodes.get(name) or next((node for node in free if _is_called(lab.host(node.host), name)), None)
        if node is None:
            hosts = "" if lab.hosts[0].name == HERE else f"; hosts: {', '.join(host.name for host in lab.hosts)}"
            used = any(_is_called(host, name) for host in lab.hosts)
            reason = f"no node of `{name}` is left" if used else f"lab {lab.name} has no node `{name}`"
            raise ConfigError(f"{source}: {reason}", hint=f"it has {', '.join(nodes)}{hosts}")
        free = [other for other in free if other is not node]
        chosen.append(node)
    return tuple(chosen)


def _is_called(host: Host, name: str) -> bool:
    """Tell if a host has this name or address, case ignored; this machine also as localhost and hostname."""
    if host.name == HERE:
        return name.lower() in (*THIS_MACHINE, socket.gethostname().lower())
    return name.lower() in (host.name.lower(), host.address)
