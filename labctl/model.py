"""The data of a lab, a workload, a run and its result; frozen, without behaviour."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from msgspec import Struct, field

HERE = "local"
"""Name of this machine among hosts."""
BRIDGED = "eth0"
"""Interface of a lab's bridge network inside its containers."""

Request = Literal["reservation", "cdi", "runtime"]
"""Ways to request a device from an engine: by reservation, as a CDI device, or through its vendor's runtime."""


class Device(Struct, frozen=True, kw_only=True):
    """An accelerator of a host as its kernel reports it; name, memory (bytes), uuid and health come from its vendor.

    ``health`` is empty if no fault is known.
    """

    id: str
    """Id to request it by: the index of a card, or a render node such as ``/dev/dri/renderD128``."""
    path: str
    pci: str = ""
    """PCI address, such as ``0000:3b:00.0``."""
    module: str = ""
    """Id of its slot, if the vendor has that: unlike an index, it is stable across reboots."""
    numa: int | None = None
    cpus: tuple[int, ...] = ()
    """Nearby cores."""
    link: str = ""
    """Name below ``/dev/dri/by-path``."""
    integrated: bool = False
    """Part of the processor, without memory of its own."""
    name: str = ""
    memory: int | None = None
    uuid: str = ""
    firmware: str = ""
    """Version of its firmware, if the driver reports it."""
    health: str = ""


class Fabric(Struct, frozen=True, kw_only=True):
    """An RDMA device, such as ``mlx5_0``: ``layer`` is InfiniBand or Ethernet (RoCE), ``state`` its port's."""

    name: str
    layer: str
    state: str
    numa: int | None = None
    interface: str = ""


class Host(Struct, frozen=True, kw_only=True):
    """A machine with a container engine, as examined. ``memory`` in bytes."""

    name: str
    number: int = 0
    """Index among the lab's hosts."""
    address: str = ""
    """IPv4 address by which nodes on other hosts reach it."""
    interface: str = BRIDGED
    """Interface for traffic between nodes, by its name in the containers."""
    home: str = ""
    """The user's home directory there."""
    directory: str = ""
    """The lab's directory there; empty if the host sees the lab directory itself."""
    slots: int = 0
    """Slots that the inventory sets; 0 if it sets none."""
    cpus: tuple[int, ...]
    memory: int
    mtu: int
    uid: int
    gid: int
    bf16: bool = True
    """True if its processor has bf16 instructions."""
    devices: tuple[Device, ...] = ()
    """Devices of the lab's accelerator."""
    driver: str = ""
    """Version of the devices' kernel driver."""
    request: Request = "reservation"
    groups: tuple[int, ...] = ()
    """Ids of the groups that may open the devices."""
    numa: tuple[tuple[int, ...], ...] = ()
    """Cores of each NUMA node."""
    infiniband: tuple[str, ...] = ()
    """Character devices of RDMA, such as ``/dev/infiniband/uverbs0``."""
    files: tuple[str, ...] = ()
    """Existing files among those that the accelerator's module checks for."""
    locks: str = "/run/lock"
    """Folder of the devices' locks."""


class Mount(NamedTuple):
    """A bind mount of an absolute path on the node's host at an absolute path in the container."""

    source: str
    target: str
    read_only: bool = False


class DeviceMapping(Struct, frozen=True, kw_only=True):
    """The container options that devices require; a template turns them into YAML."""

    devices: tuple[Device, ...] = ()
    runtime: str | None = None
    driver: str = ""
    """The engine's device driver for ``requests``; ``cdi`` for CDI devices."""
    requests: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    """Device files that are mapped to the same path."""
    links: tuple[tuple[str, str], ...] = ()
    """Links below ``/dev/dri/by-path`` and their targets."""
    environment: tuple[tuple[str, str], ...] = ()
    launcher_environment: tuple[tuple[str, str], ...] = ()
    """Environment of the launcher, which gets no device."""
    cap_add: tuple[tuple[str, str], ...] = ()
    """Pairs of capability and reason."""
    group_add: tuple[int, ...] = ()
    mounts: tuple[Mount, ...] = ()


Network = Literal["bridge", "host"]
Pairs = tuple[tuple[str, str], ...]
LAUNCHER = "launcher"


class Secret:
    """Text that only ``reveal()`` returns; not a string, so that nothing prints or serializes it by accident."""

    __slots__ = ("__value",)

    def __init__(self, value: str) -> None:
        self.__value = value

    def reveal(self) -> str:
        """Return the secret text."""
        return self.__value

    def __bool__(self) -> bool:
        return bool(self.__value)

    def __repr__(self) -> str:
        """Return ``[REDACTED]``."""
        return "[REDACTED]"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.__value == other.__value

    def __hash__(self) -> int:
        return hash(self.__value)

    def __deepcopy__(self, memo: object) -> Secret:
        """Return the same object."""
        return self

    def __reduce__(self) -> NoReturn:
        """Raise TypeError, as a secret cannot be pickled."""
        raise TypeError("a secret cannot be pickled")


# --- the lab -------------------------------------------------------------------------------------------------


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of a container in bytes or counts: ``-1`` is unlimited, ``None`` the engine's default."""

    memlock: int | None = -1
    stack: int | None = 67_108_864
    nofile: int | None = 1_048_576
    pids: int = 8192

    @property
    def ulimits(self) -> dict[str, int]:
        """Return the ulimits that are not None, by their names in compose."""
        asked = {"memlock": self.memlock, "stack": self.stack, "nofile": self.nofile}
        return {name: value for name, value in asked.items() if value is not None}


class Node(Struct, frozen=True, kw_only=True):
    """A worker container: a line of the hostfile."""

    name: str
    host: str
    slots: int
    cpuset: tuple[int, ...] = ()
    """Cores that it may use; empty for all of the host's."""
    devices: DeviceMapping = field(default_factory=DeviceMapping)


class Lab(Struct, frozen=True, kw_only=True):
    """The complete description of a lab: everything that templates and launchers need."""

    name: str
    directory: Path
    accelerator: str
    """Name of a module in ``accelerators/``."""
    image: str
    nodes: tuple[Node, ...]
    hosts: tuple[Host, ...]
    network: Network = "bridge"
    """``bridge`` if all nodes are on the same host; else ``host``: each node uses its host's network."""
    owner: str = ""
    """Creator of the lab, as ``user@machine``."""
    home: str = ""
    ssh_port: int
    master_port: int
    shm_size: str
    limits: Limits
    memory: str | None
    project_path: str
    mounts: tuple[Mount, ...]
    clones: Pairs = ()
    """Mount sources that are copied to hosts, and the folder of each below the lab's directory there."""
    environment: Pairs
    ports: tuple[tuple[str, int, int], ...] = ()
    """Ports that the launcher publishes: address and port of its host, port in the container."""
    sshd_log_level: str = "VERBOSE"
    override: Pairs = ()
    """The user's additions to the compose files, as JSON by service; the empty name has the other sections."""
    secrets: tuple[tuple[str, Secret], ...] = ()
    """Contents of files in ``/run/secrets``."""
    hidden: tuple[Secret, ...] = ()
    """Values to redact in records."""

    @property
    def interfaces(self) -> str:
        """Return the interfaces for traffic between nodes, each once, comma-separated."""
        return ",".join(dict.fromkeys(host.interface for host in self.hosts))

    @property
    def addresses(self) -> str:
        """Return the interface for Open MPI, or the smallest network with all hosts if interfaces differ."""
        if "," not in self.interfaces:
            return self.interfaces
        numbers = [int(IPv4Address(host.address)) for host in self.hosts]
        differing = (min(numbers) ^ max(numbers)).bit_length()
        return str(IPv4Network((min(numbers), 32 - differing), strict=False))

    def host_of(self, node: str) -> Host:
        """Return the host of a worker; for another name, such as the launcher's, the host of the first node."""
        return self.host(next((worker.host for worker in self.nodes if worker.name == node), self.nodes[0].host))

    @property
    def containers(self) -> tuple[str, ...]:
        """Return the names of the launcher and the workers."""
        return (LAUNCHER, *(node.name for node in self.nodes))

    def containers_on(self, host: str) -> tuple[str, ...]:
        """Return the names of a host's containers: the launcher first if it runs there, then the workers."""
        workers = tuple(node.name for node in self.nodes if node.host == host)
        return (LAUNCHER, *workers) if self.nodes[0].host == host else workers

    def host(self, name: str) -> Host:
        """Return the host of this name."""
        return next(host for host in self.hosts if host.name == name)


class File(Struct, frozen=True, kw_only=True):
    """A file to write: path relative to the lab directory, bytes as text, mode; or a link to its content."""

    path: str
    content: str
    mode: int = 0o600
    link: bool = False

    def __repr__(self) -> str:
        """Return the path without the content, which may be a secret."""
        return f"File({self.path!r})"  # its content may be a secret


class Copy(Struct, frozen=True, kw_only=True):
    """A file or link to copy from ``name`` below ``root`` to ``path``."""

    path: str
    root: Path
    name: str


# --- the workload --------------------------------------------------------------------------------------------

Reduce = Literal["first", "last", "min", "max", "mean", "median", "first-last"]


class Metric(Struct, frozen=True, kw_only=True):
    """A number parsed from the output: ``pattern`` has a single group; the first ``skip`` samples are left out.

    A run without an ``optional`` metric passes silently.
    """

    name: str
    pattern: str
    unit: str = ""
    skip: int = 0
    reduce: Reduce = "last"
    optional: bool = False


LOSSES = ("loss", "train_loss")
"""Metrics of the column of losses in a list of runs: the first that a run has."""
Sign = Literal[">=", "<=", ">", "<"]
BOUNDS: dict[Sign, str] = {">=": "min", "<=": "max", ">": "above", "<": "below"}
"""Field of a criterion for each comparison."""


class Relative(NamedTuple):
    """A bound relative to another run's value: a share of -0.05 is 5 % below.

    ``run`` is an id, or `latest`: the workload's latest run that passed.
    """

    sign: Sign
    share: float
    run: str


class Criterion(Struct, frozen=True, kw_only=True):
    """Bounds on a metric, or a ``decrease`` by at least a share (0.2: 20 %).

    ``above`` and ``below`` exclude the bound itself. A ``relative`` criterion also has its bound, once the other run
    has been read.
    """

    metric: str
    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None
    decrease: float | None = None
    relative: Relative | None = None


class Memory(NamedTuple):
    """Input of `fit`: ``{name}`` in a path is argument ``--name``; ``defaults`` replace arguments not given."""

    model: str = ""
    critic: str | None = None
    task: str = "sft"
    defaults: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Cache(Struct, frozen=True, kw_only=True):
    """Models and datasets on the hub that can be downloaded before a run."""

    models: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()


class Resume(NamedTuple):
    """The option of a script that takes a checkpoint, and the checkpoints' path in the run's directory.

    ``checkpoint`` is a glob of files or directories; ``marker``, if set, is a file that a directory has once it is
    complete.
    """

    argument: str
    checkpoint: str
    marker: str = ""


class Project(Struct, frozen=True, kw_only=True):
    """Folder of a person's code, which a run copies under its own name."""

    root: Path
    start: str = "."
    """Directory that ranks start in, relative to it."""
    install: bool = False
    """Install its Python package, editable, before the ranks start."""

    @property
    def work(self) -> str:
        """Return the directory that ranks start in, relative to that of the copied code."""
        return posixpath.normpath(f"{self.root.name}/{self.start}")


PER_NODE, ONCE = "pdsh", "script:once"
"""Launchers of a program that starts the ranks of its node itself, and of one that runs once and starts none."""


class Workload(Struct, frozen=True, kw_only=True):
    """A program, its launcher and its criteria. ``timeout`` in seconds.

    The program is a script, relative to the directory that ranks start in or absolute, a module or a command.
    """

    name: str
    description: str
    declared: str
    """``file:line`` of its declaration."""
    directory: Path
    launcher: str
    script: str
    """Empty for a module or a command."""
    arguments: tuple[str, ...]
    environment: Pairs
    timeout: float
    metrics: tuple[Metric, ...]
    criteria: tuple[Criterion, ...]
    launcher_arguments: tuple[str, ...] = ()
    module: str = ""
    """Module that Python runs as a program (``python -m``)."""
    command: tuple[str, ...] = ()
    """Program of the image, with its first arguments."""
    project: Project | None = None
    """None for the workload's own folder."""
    image: str = ""
    packages: tuple[str, ...] = ()
    """Additional Python packages of its image, as pip requirements."""
    apt: tuple[str, ...] = ()
    prepare: str = ""
    """Script that runs once on each node before the ranks start."""
    inputs: Pairs = ()
    """Arguments that are paths on the host, and the required kind: directory, file, path (either) or model."""
    required_inputs: tuple[str, ...] = ()
    """Inputs that a run must be given, but not a rehearsal."""
    deepspeed: Mapping[str, Any] | None = None
    deepspeed_option: str = "deepspeed_config"
    """The script's option for DeepSpeed's configuration; ``deepspeed`` in Hugging Face's scripts."""
    cache: Cache = Cache()
    memory: Memory | None = None
    local_rank: bool = False
    """True if the script gets ``--local_rank N``, as from DeepSpeed's launcher."""
    notes: Pairs = ()
    """Texts of the output to record: pairs of a name and a pattern with a single group."""
    resume: Resume | None = None
    known_metrics: Literal["none", "asked", "all"] = "none"
    """Undeclared metrics to find in its output: those that criteria ask for, or all that are printed in known ways."""
    elastic: bool = False
    """True if it can resume a checkpoint with fewer ranks, after a node is lost for good."""

    @property
    def starts_itself(self) -> bool:
        """Tell if the program runs once, in the launcher, and starts its ranks itself, if any."""
        return self.launcher.partition(":")[0] == "script"

    @property
    def is_per_node(self) -> bool:
        """Tell if the program runs once on each node, and starts the ranks of its node itself."""
        return self.launcher.partition(":")[0] == PER_NODE

    @property
    def called(self) -> tuple[str, ...]:
        """Return the command, `-m MODULE` or the script, as a user would name it."""
        return self.command or (("-m", self.module) if self.module else (self.script,))

    @property
    def program(self) -> tuple[str, ...]:
        """Return the command that starts the program: `python -u` for modules and .py files, else itself."""
        if self.module or self.script.endswith(".py"):
            return ("python", "-u", *self.called)
        if self.command or "/" in self.script:
            return self.called
        return (f"./{self.script}",)

    @property
    def has_own_image(self) -> bool:
        """Tell if it declares an image, Python packages or apt packages."""
        return bool(self.image or self.packages or self.apt)


class Job(Struct, frozen=True, kw_only=True):
    """A run, ready to start: the launcher's command and the files it needs."""

    run_id: str
    workload: Workload
    nodes: tuple[Node, ...]
    argv: tuple[str, ...]
    environment: Pairs
    files: tuple[File, ...]
    timeout: float
    directory: str
    """Absolute path of the run's directory inside the containers."""
    code: tuple[Copy, ...] = ()
    """Files in the directory that ranks start in."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Options of the command that requested it, as JSON values."""
    resumed: str = ""
    """Checkpoint that it resumes, as ``RUN/checkpoints/step-60``."""
    retried: tuple[str, ...] = ()
    """Earlier attempts, and how each ended."""
    replays: str = ""
    """Id of the run that it replays."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks: one per slot, or per node if it is per node; 0 if it runs ``once``."""
        if self.workload.is_per_node:
            return len(self.nodes)
        return 0 if self.workload.launcher == ONCE else sum(node.slots for node in self.nodes)

    @property
    def containers(self) -> tuple[str, ...]:
        """Return the names of the launcher and the job's nodes."""
        return (LAUNCHER, *(node.name for node in self.nodes))


# --- events and results --------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """Progress of a plan; ``text`` of a ``line`` may be several lines, printed at once."""

    kind: Literal["step", "line", "notice", "warning", "waiting"]
    text: str
    node: str | None = None


class CriterionResult(Struct, frozen=True, kw_only=True):
    """A criterion, the metric's value, and whether it passed."""

    criterion: str
    value: float | None
    passed: bool


class Progress(Struct, frozen=True, kw_only=True):
    """A run's progress as the run reports it; None if it does not."""

    counts: Literal["step", "epoch"] = "step"
    """Unit of ``step`` and ``steps``."""
    step: int | None = None
    steps: int | None = None
    """Total number of steps."""
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Last value of each metric, with its unit."""
    seconds_per_step: float | None = None
    """Median of the last few hundred steps."""
    seconds_left: float | None = None
    last_line: float | None = None
    """Time of the last line, in seconds since 1970."""


Cause = Literal[
    "timeout", "stalled", "node-lost", "device-lost", "rank-crashed", "out-of-memory",
    "launcher-failed", "no-metric", "criteria", "does-not-fit", "interrupted", "no-image", "lab-lost", "disk-full",
    "no-progress",
]  # fmt: skip


class Verdict(Struct, frozen=True, kw_only=True):
    """PASS, FAIL (ran, but missed its criteria) or ERROR (did not run as requested), with the exit code."""

    status: Literal["PASS", "FAIL", "ERROR"]
    cause: Cause | None
    message: str
    exit_code: int
    checks: tuple[CriterionResult, ...] = ()


COMPLETED = "completed"
"""Outcome of a run that passed and was not judged."""


class HostFailure(Struct, frozen=True):
    """A host that failed or does not answer, with a hint of what to type next."""

    host: str
    message: str
    hint: str


class Rank(Struct, frozen=True, kw_only=True):
    """A rank that reported in, and its node."""

    rank: int
    node: str


class Hang(Struct, frozen=True, kw_only=True):
    """Explanation of a run that stands still: what its ranks wait for. Kinds: docs/records.md."""

    kind: str
    sentence: str
    lines: tuple[str, ...] = ()
    """Activity of the ranks that others wait for."""
    ranks: tuple[int, ...] = ()
    """Ranks that others wait for; empty if it may be any."""
    nodes: tuple[str, ...] = ()
    collective: str = ""
    """Operation that ranks wait in, and its position in their group, as ``all_reduce #6``."""
    place: str = ""
    """File and line of the person's code that calls it."""
    seconds: float | None = None
    """Seconds that a rank has waited for the others."""


class Pace(Struct, frozen=True, kw_only=True):
    """Seconds that a run took to its first step, and at most from one step to the next; 0 if not known."""

    first_step: float = 0
    longest_step: float = 0


class Straggler(Struct, frozen=True, kw_only=True):
    """A node that the others wait for."""

    node: str
    share: float
    """Share of time that its ranks are in collectives, of the one that waits least; ``others``: of the next node."""
    others: float
    behind: float | None = None
    """Seconds of each step that the others wait; None if the time of a step is not known."""


class Result(Struct, frozen=True, kw_only=True):
    """The outcome of a run, as written to ``result.json``. ``seconds`` is wall-clock time."""

    run_id: str
    workload: str
    launcher: str
    lab: str
    # Values of ``Verdict``; a later labctl may have written others.
    verdict: str
    cause: str | None
    message: str
    exit_code: int
    domain: str | None = None
    """Whose failure it was: workload, infrastructure or unknown; None if it passed, as ``retry``."""
    retry: str | None = None
    """Effect of another attempt: helps, does not or unknown."""
    evidence: str = ""
    """Line or fact that both were decided from."""
    world_size: int = 0
    ranks: tuple[Rank, ...] = ()
    metrics: Mapping[str, Mapping[str, float | int | str | None]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    """Texts that the script printed, such as its weights and data, by the names that the workload declares."""
    checks: tuple[CriterionResult, ...] = ()
    seconds: float = 0.0
    started: str = ""
    resumed: str = ""
    """Checkpoint that it resumed, as ``RUN/checkpoints/step-60``."""
    retried: tuple[str, ...] = ()
    """Earlier attempts, and how each ended."""
    replays: str = ""
    """Id of the run that it replayed."""
    hang: Hang | None = None
    """Explanation of its last silence, or of its end; None for a run that passed."""
    straggler: Straggler | None = None
    """Node that the others waited for, over the whole run; None if there is none."""
    pace: Pace | None = None
    """Its steps; None if it printed none."""
    node_changes: tuple[str, ...] = ()
    """Changes of its nodes' health while it ran, as ``worker-3 mlx5_0/1: link_downed +2``, the bad first."""

    @property
    def outcome(self) -> str:
        """Return the verdict; COMPLETED if it passed and there were no criteria."""
        return COMPLETED if self.verdict == "PASS" and not self.checks else self.verdict

    @property
    def outlook(self) -> str:
        """Return a line on whether another attempt helps, why, and whose failure it was; empty if none."""
        if not self.retry:
            return ""
        helps = {"helps": "helps", "does not": "does not help"}.get(self.retry)
        whose = "workload or infrastructure" if self.domain == "unknown" else self.domain
        if not helps:
            return f"may help: cause unclear ({whose})"
        evidence = "" if self.evidence == self.message else f": {self.evidence}"
        return f"{helps}{evidence} ({whose})"
