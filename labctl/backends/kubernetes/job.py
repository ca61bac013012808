"""A workload as a job in a cluster: its names, its lab of pods, and the files that they need."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from labctl import accelerators, launchers
from labctl.backends import spec
from labctl.backends.kubernetes.target import USUAL_SLOTS, Target, read
from labctl.config import context as contexts
from labctl.config.context import Context
from labctl.config.settings import USUAL_NODES, Settings
from labctl.errors import ConfigError
from labctl.jobs import code, inputs, job
from labctl.jobs.request import RunOptions, choose_workload, config_source
from labctl.launchers import OPEN_MPI_NETWORK
from labctl.model import Host, Job, Lab, Limits, Node, Pairs, Workload
from labctl.system.files import path as packaged
from labctl.system.files import walk
from labctl.workloads import external

PORT = 2222
"""Of sshd in the pods, which are not root's."""
UID = 1000
KEPT = 600
"""Seconds that the launcher of a run stays after its end, for its results to be fetched."""
STORAGE = "/storage"
"""Where pods have the claim."""
MOST_BYTES = 1 << 20
"""Of a ConfigMap: kubernetes.io, ConfigMaps."""


class ClusterPods(Struct, frozen=True, kw_only=True):
    """What pods of a lab have: a name, and files and variables."""

    name: str
    run_id: str
    """That ranks see; the name where no run of labctl's is recorded."""
    owner: str
    """Who has submitted them, as ``person@machine``; empty where labctl did not."""
    lab: Lab
    files: tuple[tuple[str, bytes, bool], ...]
    """Paths below the project's directory in the pods, contents, and whether they are programs."""
    environment: Pairs
    """Of every pod."""
    launch: str = ""
    """The run as the agent in the launcher is given it, in JSON; empty for pods without a launcher."""

    @property
    def start(self) -> dict[str, str]:
        """Return the files that pods start with, by name."""
        return start_files(self.launch)


class ClusterJob(ClusterPods, frozen=True, kw_only=True):
    """A job of a lab of pods."""

    job: Job


class Launch(Struct, frozen=True, kw_only=True):
    """A run as the agent in a launcher's pod is given it; labnode.py says what it does with each."""

    id: str
    nodes: tuple[str, ...]
    """Names of the workers, as in the operator's hostfile."""
    directory: str
    launcher: str
    limit: float
    """Seconds that the command has."""
    stall: float
    """Seconds of silence after which a run that had steps may be stalled; 0 for never."""
    ssh_port: int
    needed: tuple[str, ...]
    """Nodes without which the run cannot go on."""
    elastic: bool
    """The launcher restarts ranks that fail."""


def launch_of(lab: Lab, built: Job, stall: float) -> Launch:
    """Return the run of a job as the agent is given it."""
    launcher, nodes = built.workload.launcher, tuple(node.name for node in built.nodes)
    return Launch(
        id=built.run_id,
        nodes=nodes,
        directory=built.directory,
        launcher=launcher,
        limit=built.timeout,
        stall=stall,
        ssh_port=lab.ssh_port,
        needed=launchers.needed(launcher, nodes),
        elastic=launchers.is_elastic(launcher),
    )


def start_files(launch: str) -> dict[str, str]:
    """Return the files that pods start with, by name; with the agent and its run if there is one to ``launch``."""
    texts = {
        "pod.sh": Path(__file__).with_name("pod.sh").read_text(encoding="utf-8"),
        # An image that was not made by labctl has none.
        "sshd_config": packaged("docker", "sshd_config").read_text(encoding="utf-8"),
        # ssh and sshd ask for the name of their user, whatever the image.
        "passwd": f"root:x:0:0:root:/root:/bin/bash\nsshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n"
        f"lab:x:{UID}:{UID}:labctl:{HOME}:/bin/bash\n",
    }
    if launch:
        agent = {name: packaged("docker", name).read_text(encoding="utf-8") for name in AGENT}
        texts |= {**agent, "job.json": launch}
    return texts


def build(
    settings: Settings,
    directory: Path,
    target: Target,
    workload: Workload,
    options: RunOptions,
    run_id: str = "",
    owner: str = "",
) -> ClusterJob:
    """The job of a workload on the lab's pods, for a run that is recorded if it has an id.

    ConfigError for what its launcher or DeepSpeed would reject, for paths of this machine, and for files that are too
    large for a ConfigMap.
    """
    accelerator = settings.text("LAB_ACCELERATOR")
    name = job_name(settings.text("LAB_NAME"), workload.name, run_id)
    run_id = run_id or name
    lab = lab_of_pods(settings, directory, accelerator, target, name)
    inputs.require(workload)
    if target.storage:
        workload = inputs.named_models(workload, f"{STORAGE}/models")
    for path in inputs.given(workload):
        if not path.startswith(f"{STORAGE}/"):
            raise ConfigError(
                f"{workload.name}: {path} is not on the claim",
                hint=f"name a path below {STORAGE}, or a model that `labctl cache --model NAME` has fetched",
            )
    where = job.run_directory(lab, run_id)
    workload = external.at(workload, f"{len(lab.nodes)}xN", where)
    workload, chosen = code.choose(lab, workload)
    nodes = tuple((node, tuple(range(node.slots))) for node in lab.nodes)
    timeout = options.timeout or workload.timeout
    built = job.build(
        lab, workload, run_id, nodes, timeout, code=chosen.copies, config_source=config_source(workload, options)
    )
    launch = msgspec.json.encode(launch_of(lab, built, settings.number("LAB_STALL_SECONDS"))).decode()
    # By the run's id the agent knows what is the run's: the launch command and its ranks have it, and no other process.
    variables = tuple((name, value) for name, value in built.environment if name != "LABCTL_RUN_ID")
    return ClusterJob(
        name=name,
        run_id=run_id,
        owner=owner,
        lab=lab,
        job=built,
        files=files(built, workload, run_id, launch),
        environment=environment(lab, target, built.directory, variables, kept=KEPT if owner else 0),
        launch=launch,
    )


def of_workload(context: Context, name: str, options: RunOptions) -> tuple[Target, ClusterJob]:
    """Build the job of a workload by its name, which no run is recorded of, and say where it is to run. ConfigError."""
    contexts.require_initialised(context)
    settings = context.settings()
    workload = choose_workload(context.directory, name, options, settings)
    target = read(settings, settings.text("LAB_ACCELERATOR"))
    return target, build(settings, context.directory, target, workload, options)


def one_pod(
    settings: Settings, directory: Path, target: Target, name: str, program: bytes, variables: Pairs, owner: str
) -> ClusterPods:
    """What a single pod has that runs a program of labctl's own, ``program`` in its project's directory."""
    lab = lab_of_pods(settings, directory, settings.text("LAB_ACCELERATOR"), target, name)
    given = environment(lab, target, f"{lab.project_path}/{name}", variables)
    files = ((PROGRAM, program, False),)
    return ClusterPods(name=name, run_id=name, owner=owner, lab=lab, files=files, environment=given)


PROGRAM = "program.py"


MOST_OF_NAME = 39
"""With the end of a run's id and ``-launcher-0-0-abcde``, which a JobSet adds, a pod's name has 63 characters."""


def job_name(lab: str, workload: str, run_id: str = "") -> str:
    """A name that a Service may have, not longer than those of its pods may be.

    With the random end of a run's id, where it is one.
    """
    what = _slug(workload)[: MOST_OF_NAME - 10]
    whose = _slug(lab) if lab[:1].isalpha() else f"lab-{_slug(lab)}"
    name = "-".join(part.strip("-") for part in (whose[: MOST_OF_NAME - 1 - len(what)], what))
    return f"{name}-{run_id.rpartition('-')[2]}" if run_id else name


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def pod_names(target: Target, name: str, count: int) -> tuple[str, ...]:
    """The workers' names as the operator's hostfile has them.

    Sources: kubeflow/mpi-operator, pkg/controller/mpi_job_controller.go (v2beta1); kubeflow/trainer, runtime/framework/
    plugins/mpi, whose pods are those of a JobSet.
    """
    if target.kind == "mpijob":
        return tuple(f"{name}-worker-{index}.{name}.{target.namespace}.svc" for index in range(count))
    return tuple(f"{name}-node-0-{index}.{name}" for index in range(count))


def lab_of_pods(settings: Settings, directory: Path, accelerator: str, target: Target, name: str) -> Lab:
    """The lab whose nodes are the job's worker pods."""
    slots = settings.number("LAB_SLOTS") or (USUAL_SLOTS if target.resource else 1)
    names = pod_names(target, name, settings.number("LAB_NODES") or USUAL_NODES)
    # Nobody knows the nodes' cores; each rank has at least one.
    hosts = tuple(
        Host(name=one, interface=target.interface, cpus=tuple(range(slots)), memory=0, mtu=1500, uid=UID, gid=UID)
        for one in names
    )
    nodes = tuple(Node(name=one, host=one, slots=slots) for one in names)
    made = spec.build(settings, directory, accelerator, hosts, Limits(), network="host", lacking=names)
    # In a pod the probes of its readiness would fill the log of a sshd that tells of each connection.
    usual = settings.origin("LAB_SSHD_LOG_LEVEL") == "default"
    return replace(made, nodes=nodes, ssh_port=PORT, sshd_log_level="" if usual else made.sshd_log_level)


def environment(lab: Lab, target: Target, directory: str, added: Pairs, *, kept: int = 0) -> Pairs:
    """What every pod has: what the lab's containers have, with caches on the claim where there is one.

    ``kept``: seconds that the launcher stays for its results to be fetched.
    """
    cache = f"{lab.project_path}/.cache"
    place = STORAGE if target.storage else cache
    own = {
        name: place + value.removeprefix(cache) if value.startswith(cache) else value for name, value in lab.environment
    }
    network = {"GLOO_SOCKET_IFNAME": target.interface}
    network |= dict.fromkeys(OPEN_MPI_NETWORK, target.interface)
    # The cluster's device plugin hands devices in; the rest is what libraries read.
    mapping = accelerators.get(lab.accelerator).mapping(lab.hosts[0], ())
    devices = {name: value for name, value in mapping.environment if value}
    run = {"LABCTL_RUN_DIR": directory, "LABCTL_KEYS": KEYS, "HOME": HOME, "LABCTL_PATIENCE": str(target.patience)}
    run |= {"LABCTL_KEPT": str(kept)} if kept else {}
    run |= {"LABCTL_STORAGE": STORAGE} if target.storage else {}
    run |= {"LAB_SSHD_LOG_LEVEL": lab.sshd_log_level} if lab.sshd_log_level else {}
    return tuple({**network, **devices, **run, **dict(added), **own}.items())


KEYS, HOME = "/etc/labctl/ssh", "/home/lab"
RANK_OUTPUT = "rank_output.py"
"""The program that prints what a rank does, which labctl's images have."""
AGENT = ("labnode.py", "step.regex")
"""The agent of labctl's images, which keeps the limits of a run, and what it reads steps with."""


def files(built: Job, workload: Workload, run_id: str, launch: str) -> tuple[tuple[str, bytes, bool], ...]:
    """The run's own files, the workload's, and what workloads share. ConfigError where they are too large."""
    run = f"outputs/{run_id}"
    common = workload.directory.parent / "common"
    found = [(f"{run}/{file.path}", file.content.encode(), bool(file.mode & 0o100)) for file in built.files]
    # The operator writes it.
    found = [one for one in found if one[0] != f"{run}/hostfile"]
    # Whose the image is, is not known.
    program = packaged("docker", RANK_OUTPUT).read_bytes()
    found.append((f"{run}/{RANK_OUTPUT}", program, False))
    copies = [(f"{run}/{copy.path}", copy.root / copy.name) for copy in built.code]
    if common.is_dir():
        copies += [(f"workloads/common/{path}", common / path) for path in walk(common)]
    found += [(path, source.read_bytes(), bool(source.stat().st_mode & 0o100)) for path, source in copies]
    size = sum(len(path) + len(content) for path, content, _ in found)
    size += sum(len(name) + len(text.encode()) for name, text in start_files(launch).items())
    if size > MOST_BYTES:
        largest = max(found, key=lambda one: len(one[1]))
        raise ConfigError(
            f"{workload.name}: {size:,} bytes of files, most in {largest[0]}, and a ConfigMap holds {MOST_BYTES:,}",
            hint=f"build an image with them (LAB_IMAGE), or put them on the claim ({STORAGE})",
        )
    return tuple(sorted(found))
