"""A workload as a job in a cluster: its names, its lab of pods, and their files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from labctl import accelerators, launchers
from labctl.backends import spec
from labctl.backends.kubernetes.packing import ARCHIVE, digest, pack
from labctl.backends.kubernetes.target import USUAL_SLOTS, Target, read
from labctl.backends.owner import owner as submitter
from labctl.config import context as contexts
from labctl.config.context import Context
from labctl.config.settings import USUAL_NODES, Settings
from labctl.errors import ConfigError
from labctl.jobs import checkpoints, code, inputs, job, request
from labctl.jobs.request import RunOptions, choose_workload, config_source, recorded
from labctl.launchers import OPEN_MPI_NETWORK
from labctl.model import Copy, Host, Job, Lab, Limits, Node, Pace, Pairs, Workload
from labctl.records.pace import earlier
from labctl.system import human
from labctl.system.files import path as packaged
from labctl.system.files import walk
from labctl.workloads import external

PORT = 2222
"""Port of sshd in the pods, which do not run as root."""
UID = 1000
KEPT = 600
"""Seconds that the launcher of a run stays after its command has ended, for its results to be fetched."""
STORAGE = "/storage"
"""Mount point of the claim in pods."""
HOSTNAME = "kubernetes.io/hostname"
"""Label of a node with its hostname. Source: the Kubernetes documentation, Well-Known Labels."""
MOST_BYTES = 1 << 20
"""Size limit of a ConfigMap. Source: the Kubernetes documentation, ConfigMaps."""
PLAIN_NAME = re.compile(r"[-._/a-zA-Z0-9]{1,150}")
"""Path that is a key of a ConfigMap once `render` has replaced slashes: letters, digits, ``-._``, 253 characters."""


class Placement(Struct, frozen=True, kw_only=True):
    """Nodes of the cluster for the workers of a run, by their label HOSTNAME; the cluster chooses if none is named."""

    nodes: tuple[str, ...] = ()
    """Names of the nodes, each for one worker."""
    hostnames: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    """Hostnames of nodes that get no worker."""
    slots: int = 0
    """Slots of each worker; 0 for those of the lab."""


ANYWHERE = Placement()


class ClusterPods(Struct, frozen=True, kw_only=True):
    """Pods of a lab: their name, files and variables."""

    name: str
    run_id: str
    """Id of the run, as ranks see it; equal to ``name`` if no run is recorded."""
    owner: str
    """User who submitted them, as ``person@machine``; empty if no run is recorded."""
    lab: Lab
    files: tuple[tuple[str, bytes, bool], ...]
    """Paths below the project's directory in the pods, contents, and True for executables."""
    environment: Pairs
    """Variables of every pod."""
    launch: str = ""
    """JSON of the run for the agent in the launcher; empty for pods without a launcher."""
    placement: Placement = ANYWHERE

    @property
    def start(self) -> dict[str, str]:
        """Return the files that pods start with, by name."""
        return start_files(self.launch)


class ClusterJob(ClusterPods, frozen=True, kw_only=True):
    """A job of a lab of pods."""

    job: Job
    waits: bool = False
    """It waits for room on its nodes for as long as that takes."""
    on_claim: bytes = b""
    """Archive of its code if that goes by the claim, as it is too large for a ConfigMap."""


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
    pace: Pace
    """Steps of an earlier run of the same program."""
    ssh_port: int
    needed: tuple[str, ...]
    """Nodes without which the run cannot go on."""
    elastic: bool
    """The launcher restarts ranks that fail."""


def launch_of(lab: Lab, built: Job, stall: float, pace: Pace) -> Launch:
    """Return the Launch of a job, which the agent in the launcher's pod reads as JSON."""
    launcher, nodes = built.workload.launcher, tuple(node.name for node in built.nodes)
    return Launch(
        id=built.run_id,
        nodes=nodes,
        directory=built.directory,
        launcher=launcher,
        limit=built.timeout,
        stall=stall,
        pace=pace,
        ssh_port=lab.ssh_port,
        needed=launchers.needed(launcher, nodes),
        elastic=launchers.is_elastic(launcher),
    )


def start_files(launch: str) -> dict[str, str]:
    """Return the text of each file that pods start with, by name; the agent too if ``launch`` is not empty."""
    texts = {
        "pod.sh": Path(__file__).with_name("pod.sh").read_text(encoding="utf-8"),
        # An image that was not made by labctl has none.
        "sshd_config": packaged("docker", "sshd_config").read_text(encoding="utf-8"),
        # ssh and sshd ask for the name of their user, whatever the image.
        "passwd": f"root:x:0:0:root:/root:/bin/bash\nsshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n"
        f"lab:x:{UID}:{UID}:labctl:{HOME}:/bin/bash\n",
    }
    if launch:
        names = (*AGENT, *(path.name for path in packaged("docker").glob("*_sampler.py")))
        agent = {name: packaged("docker", name).read_text(encoding="utf-8") for name in sorted(names)}
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
    placement: Placement = ANYWHERE,
    warn: Callable[[str], None] = lambda _: None,
) -> ClusterJob:
    """Build the job of a workload on the lab's pods, or of a run if ``run_id``; write nothing. ConfigError if unfit.

    It is raised for settings that the launcher or DeepSpeed would reject, for paths of this machine, and for files that
    are too large for a ConfigMap and have no claim. ``warn`` gets a line on files that are not copied.
    """
    accelerator = settings.text("LAB_ACCELERATOR")
    name = job_name(settings.text("LAB_NAME"), workload.name, run_id)
    run_id = run_id or name
    lab = lab_of_pods(settings, directory, accelerator, target, name, placement)
    inputs.require(workload)
    asked, checkpoint = recorded(workload, options), ""
    if options.resume:
        workload, checkpoint = going_on(lab, target, workload, options.resume)
    if target.storage:
        workload = inputs.named_models(workload, f"{STORAGE}/models")
    for path in inputs.given(workload):
        if not path.startswith(f"{STORAGE}/"):
            raise ConfigError(
                f"{workload.name}: {path} is not on the claim",
                hint=f"name a path below {STORAGE}, or a model that `labctl cache --model NAME` has fetched",
            )
    of_set = request.job_name(options, len(lab.nodes))
    workload = external.at(workload, of_set, job.run_directory(lab, run_id))
    workload, chosen = code.choose(lab, workload)
    if text := code.remark(chosen):
        warn(text)
    nodes = tuple((node, tuple(range(node.slots))) for node in lab.nodes)
    timeout = options.timeout or workload.timeout
    built = job.build(
        lab, workload, run_id, nodes, timeout, code=chosen.copies, config_source=config_source(workload, options)
    )
    built = replace(built, request=asked, resumed=checkpoint, retried=options.retried)
    known = launch_of(lab, built, settings.number("LAB_STALL_SECONDS"), earlier(lab.directory, built))
    launch = msgspec.json.encode(known).decode()
    # By the run's id the agent knows what is the run's: the launch command and its ranks have it, and no other process.
    variables = tuple((name, value) for name, value in built.environment if name != "LABCTL_RUN_ID")
    carried, on_claim = carry(lab, built, workload, run_id, launch, claim=bool(target.storage and owner))
    if on_claim:
        variables = (*variables, ("LABCTL_CODE", place_of_code(on_claim)))
    # The record has what its commit lacks; ranks have the files themselves.
    built = replace(built, files=(*built.files, *chosen.files))
    return ClusterJob(
        name=name,
        run_id=run_id,
        owner=owner,
        lab=lab,
        job=built,
        files=carried,
        environment=environment(lab, target, built.directory, variables, kept=KEPT if owner else 0),
        launch=launch,
        placement=placement,
        # A batch waits for its own jobs itself.
        waits=options.wait and not options.batch,
        on_claim=on_claim,
    )


def going_on(lab: Lab, target: Target, workload: Workload, run_id: str) -> tuple[Workload, str]:
    """Return the workload that resumes a run, and its checkpoint. ConfigError without checkpoint or claim."""
    workload, checkpoint = checkpoints.going_on(lab, workload, run_id, sum(node.slots for node in lab.nodes))
    if not target.storage:
        raise ConfigError(
            f"checkpoint {checkpoint} is on this machine, and pods have no claim to read it from",
            hint="LAB_K8S_STORAGE_SIZE in .env, such as 100g: the files of later runs are on the claim",
        )
    return replace(workload, arguments=(*workload.arguments[:-1], f"{STORAGE}/runs/{checkpoint}")), checkpoint


def of_workload(context: Context, name: str, options: RunOptions) -> tuple[Target, ClusterJob]:
    """Return the target and job of a named workload, without a run's record. ConfigError if unfit."""
    contexts.require_initialised(context)
    settings = context.settings()
    workload = choose_workload(context.directory, name, options, settings)
    target = read(settings, settings.text("LAB_ACCELERATOR"))
    return target, build(settings, context.directory, target, workload, options, warn=context.warn)


def one_pod(
    settings: Settings, directory: Path, target: Target, name: str, program: bytes, variables: Pairs, owner: str
) -> ClusterPods:
    """Return a single pod that has ``program`` as a file and these variables."""
    lab = lab_of_pods(settings, directory, settings.text("LAB_ACCELERATOR"), target, name)
    given = environment(lab, target, f"{lab.project_path}/{name}", variables)
    files = ((PROGRAM, program, False),)
    return ClusterPods(name=name, run_id=name, owner=owner, lab=lab, files=files, environment=given)


PROGRAM = "program.py"


MOST_OF_NAME = 39
"""Characters of a job's name: with the end of a run's id and ``-launcher-0-0-abcde`` of a JobSet they make 63."""


def job_name(lab: str, workload: str, run_id: str = "") -> str:
    """Return a job's name, of lab, workload and the run id's random part, short enough for its pods' names."""
    workload_part = _slug(workload)[: MOST_OF_NAME - 10]
    whose = _slug(lab) if lab[:1].isalpha() else f"lab-{_slug(lab)}"
    name = "-".join(part.strip("-") for part in (whose[: MOST_OF_NAME - 1 - len(workload_part)], workload_part))
    return f"{name}-{run_id.rpartition('-')[2]}" if run_id else name


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def pod_names(target: Target, name: str, count: int) -> tuple[str, ...]:
    """Return the host names of a job's workers, as the operator writes them into its hostfile.

    Sources: kubeflow/mpi-operator, pkg/controller/mpi_job_controller.go (v2beta1); kubeflow/trainer, runtime/framework/
    plugins/mpi, whose pods are those of a JobSet.
    """
    if target.kind == "mpijob":
        return tuple(f"{name}-worker-{index}.{name}.{target.namespace}.svc" for index in range(count))
    return tuple(f"{name}-node-0-{index}.{name}" for index in range(count))


def lab_of_pods(
    settings: Settings,
    directory: Path,
    accelerator: str,
    target: Target,
    name: str,
    placement: Placement = ANYWHERE,
) -> Lab:
    """Return the lab whose nodes are the job's worker pods, as many as placement or settings say."""
    slots = placement.slots or settings.number("LAB_SLOTS") or (USUAL_SLOTS if target.resource else 1)
    count = len(placement.nodes) or settings.number("LAB_NODES") or USUAL_NODES
    names = pod_names(target, name, count)
    # The nodes' cores are unknown; each rank has at least one.
    hosts = tuple(
        Host(name=pod, interface=target.interface, cpus=tuple(range(slots)), memory=0, mtu=1500, uid=UID, gid=UID)
        for pod in names
    )
    nodes = tuple(Node(name=pod, host=pod, slots=slots) for pod in names)
    made = spec.build(
        settings, directory, accelerator, hosts, Limits(), network="host", lacking=names, owner=submitter()
    )
    # Readiness probes would fill the log of an sshd that logs each connection.
    usual = settings.origin("LAB_SSHD_LOG_LEVEL") == "default"
    return replace(made, nodes=nodes, ssh_port=PORT, sshd_log_level="" if usual else made.sshd_log_level)


def environment(lab: Lab, target: Target, directory: str, added: Pairs, *, kept: int = 0) -> Pairs:
    """Return the variables of each pod: network, devices, run, ``added``, and the lab's; caches on the claim.

    ``kept``: seconds that the launcher stays for its results to be fetched.
    """
    cache = f"{lab.project_path}/.cache"
    place = STORAGE if target.storage else cache
    of_lab = {
        name: place + value.removeprefix(cache) if value.startswith(cache) else value for name, value in lab.environment
    }
    network = {"GLOO_SOCKET_IFNAME": target.interface}
    network |= dict.fromkeys(OPEN_MPI_NETWORK, target.interface)
    # The cluster's device plugin provides the devices; libraries read these variables.
    mapping = accelerators.get(lab.accelerator).mapping(lab.hosts[0], ())
    devices = {name: value for name, value in mapping.environment if value}
    run = {"LABCTL_RUN_DIR": directory, "LABCTL_KEYS": KEYS, "HOME": HOME, "LABCTL_PATIENCE": str(target.patience)}
    run |= {"LABCTL_KEPT": str(kept)} if kept else {}
    run |= {"LABCTL_STORAGE": STORAGE} if target.storage else {}
    run |= {"LAB_SSHD_LOG_LEVEL": lab.sshd_log_level} if lab.sshd_log_level else {}
    return tuple({**network, **devices, **run, **dict(added), **of_lab}.items())


KEYS, HOME = "/etc/labctl/ssh", "/home/lab"
RANK_OUTPUT = "rank_output.py"
"""Program that prints a rank's output, also part of labctl's images."""
AGENT = ("labnode.py", "step.regex", "stacks.py", "diagnosis.py", "sampler.py")
"""Agent of labctl's images, which keeps the limits of a run, its pattern of steps, and the sampler that it starts."""


Carried = tuple[tuple[str, bytes, bool], ...]
"""Paths, contents, and True for executables."""


def carry(lab: Lab, built: Job, workload: Workload, run_id: str, launch: str, *, claim: bool) -> tuple[Carried, bytes]:
    """Return the files of a job's ConfigMap, and its packed code if that goes by the claim. ConfigError if too large.

    A project is packed, and a workload that has no place in a ConfigMap as it is. ConfigError if the archive has none
    there either, and there is no ``claim``.
    """
    if not workload.project and all(map(_is_plain, built.code)):
        whole = files(lab, built, workload, run_id, built.code)
        if _size(whole, launch) <= MOST_BYTES:
            return whole, b""
    packed, carried = pack(built.code), files(lab, built, workload, run_id, ())
    together = (*carried, (ARCHIVE, packed, False))
    if _size(together, launch) <= MOST_BYTES:
        return together, b""
    if not claim or _size(carried, launch) > MOST_BYTES:
        raise _too_large(built, workload, len(packed), _size(carried, launch))
    return carried, packed


def _too_large(built: Job, workload: Workload, packed: int, others: int) -> ConfigError:
    """Return the ConfigError for code that is too large for a ConfigMap, with its largest file."""
    what = f"project {workload.project.root}" if workload.project else f"workload {workload.name}"
    largest = max(built.code, key=lambda copy: (copy.root / copy.name).lstat().st_size, default=None)
    named = f", its largest file {largest.name}" if largest else ""
    return ConfigError(
        f"{what} is {human.memory(packed)} when packed{named}; with {human.memory(others)} of labctl's files "
        f"that is more than a ConfigMap holds ({human.memory(MOST_BYTES)})",
        hint="`labctl run` sends it by the lab's claim, which LAB_K8S_STORAGE_SIZE=100g in .env makes; "
        "--project DIR names a smaller folder, .gitignore leaves files out",
    )


def _is_plain(copy: Copy) -> bool:
    """Return True if a file's name is valid in a ConfigMap and it is no symbolic link."""
    return bool(PLAIN_NAME.fullmatch(copy.name)) and not (copy.root / copy.name).is_symlink()


def place_of_code(packed: bytes) -> str:
    """Return the path of a code archive on the claim, by its digest: runs with the same code share it."""
    return f"{STORAGE}/code/{digest(packed)}.tar.gz"


def files(lab: Lab, built: Job, workload: Workload, run_id: str, code: tuple[Copy, ...]) -> Carried:
    """Return path, content and execute bit of a run's files, ``common`` and ``code``, without the hostfile."""
    run = f"outputs/{run_id}"
    workloads = lab.directory / "workloads" if workload.directory == Path() else workload.directory.parent
    common = workloads / "common"
    contents = [(f"{run}/{file.path}", file.content.encode(), bool(file.mode & 0o100)) for file in built.files]
    # The operator writes the hostfile.
    contents = [entry for entry in contents if entry[0] != f"{run}/hostfile"]
    # The image may not be labctl's.
    program = packaged("docker", RANK_OUTPUT).read_bytes()
    contents.append((f"{run}/{RANK_OUTPUT}", program, False))
    copies = [(f"{run}/{copy.path}", copy.root / copy.name) for copy in code]
    if common.is_dir():
        copies += [(f"workloads/common/{path}", common / path) for path in walk(common)]
    contents += [(path, source.read_bytes(), bool(source.stat().st_mode & 0o100)) for path, source in copies]
    return tuple(sorted(contents))


def _size(carried: Carried, launch: str) -> int:
    """Return the bytes of a ConfigMap with these files and those that pods start with."""
    size = sum(len(path) + len(content) for path, content, _ in carried)
    return size + sum(len(name) + len(text.encode()) for name, text in start_files(launch).items())
