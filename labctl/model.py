"""The nouns: what a lab, a workload, a run and its result are. Frozen data; nothing here acts."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from msgspec import Struct, field

HERE = "local"
"""The name of this machine among hosts."""
BRIDGED = "eth0"
"""The interface of a lab's bridge network, as a container on it sees it."""

Request = Literal["reservation", "cdi", "runtime"]
"""How an engine is asked for a device: by a reservation, as a CDI device, or through its vendor's runtime."""


class Device(Struct, frozen=True, kw_only=True):
    """One accelerator of a host, as its kernel shows it; name, memory (bytes), uuid and health are its vendor's words.

    ``health`` is empty while nothing is known to be wrong.
    """

    id: str
    """How it is asked for: the index of a card, or a render node such as ``/dev/dri/renderD128``."""
    path: str
    pci: str = ""
    """PCI address, such as ``0000:3b:00.0``."""
    module: str = ""
    """Id of its slot, where its vendor gives one: indices may change with a reboot, this does not."""
    numa: int | None = None
    cpus: tuple[int, ...] = ()
    """Cores near it."""
    link: str = ""
    """Name below ``/dev/dri/by-path``."""
    integrated: bool = False
    """Part of the processor, without memory of its own."""
    name: str = ""
    memory: int | None = None
    uuid: str = ""
    firmware: str = ""
    """Version of what runs on it, where its driver shows that."""
    health: str = ""


class Fabric(Struct, frozen=True, kw_only=True):
    """An RDMA device, such as ``mlx5_0``: ``layer`` is InfiniBand or Ethernet (RoCE), ``state`` that of its port."""

    name: str
    layer: str
    state: str
    numa: int | None = None
    interface: str = ""


class Host(Struct, frozen=True, kw_only=True):
    """A machine with a Docker daemon, as it was found. ``memory`` in bytes."""

    name: str
    number: int = 0
    """Its place among the lab's hosts."""
    address: str = ""
    """The IPv4 address by which nodes on other hosts reach it."""
    interface: str = BRIDGED
    """What nodes use to talk to each other, by its name in the containers."""
    home: str = ""
    """The person's home there."""
    directory: str = ""
    """The lab's directory there; empty where it is the lab directory itself."""
    slots: int = 0
    """Slots that the list of hosts gives it; 0 where it says nothing."""
    cpus: tuple[int, ...]
    memory: int
    mtu: int
    uid: int
    gid: int
    bf16: bool = True
    """Whether its processor has bf16 instructions."""
    devices: tuple[Device, ...] = ()
    """Those of the lab's accelerator."""
    driver: str = ""
    """Version of their kernel driver."""
    request: Request = "reservation"
    groups: tuple[int, ...] = ()
    """Numeric render and video groups of this host."""
    numa: tuple[tuple[int, ...], ...] = ()
    """The cores of each NUMA node."""
    infiniband: tuple[str, ...] = ()
    """Character devices of RDMA, such as ``/dev/infiniband/uverbs0``."""
    files: tuple[str, ...] = ()
    """Those of the files that its accelerator's module asks for that are there."""
    locks: str = "/run/lock"
    """Where the locks of its devices lie."""


class Mount(NamedTuple):
    """A bind mount: an absolute path on the node's host to an absolute path in the container."""

    source: str
    target: str
    read_only: bool = False


class DeviceMapping(Struct, frozen=True, kw_only=True):
    """What an accelerator asks of a container; one template turns it into YAML."""

    devices: tuple[Device, ...] = ()
    runtime: str | None = None
    driver: str = ""
    """The engine's device driver that gets ``requests``; ``cdi`` for CDI devices."""
    requests: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    """Device files that are mapped under their own names."""
    links: tuple[tuple[str, str], ...] = ()
    """Names below ``/dev/dri/by-path`` and where they lead."""
    environment: tuple[tuple[str, str], ...] = ()
    launcher_environment: tuple[tuple[str, str], ...] = ()
    """That of the launcher, which gets no device."""
    cap_add: tuple[tuple[str, str], ...] = ()
    """Capability and the reason for it."""
    group_add: tuple[int, ...] = ()
    mounts: tuple[Mount, ...] = ()


Network = Literal["bridge", "host"]
Pairs = tuple[tuple[str, str], ...]
LAUNCHER = "launcher"


class Secret:
    """Text that only ``reveal()`` gives; it is not a string, so that nothing prints or serializes it by accident."""

    __slots__ = ("__value",)

    def __init__(self, value: str) -> None:
        self.__value = value

    def reveal(self) -> str:
        """The plain value."""
        return self.__value

    def __bool__(self) -> bool:
        return bool(self.__value)

    def __repr__(self) -> str:
        return "[REDACTED]"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.__value == other.__value

    def __hash__(self) -> int:
        return hash(self.__value)

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret cannot be pickled")


# --- the lab -------------------------------------------------------------------------------------------------


class Limits(Struct, frozen=True, kw_only=True):
    """Kernel limits of a container: ``-1`` is unlimited, ``None`` is whatever the engine gives. Bytes or counts."""

    memlock: int | None = -1
    stack: int | None = 67_108_864
    nofile: int | None = 1_048_576
    pids: int = 8192

    @property
    def ulimits(self) -> dict[str, int]:
        """Those that a daemon may refuse to raise, by their names in compose."""
        asked = {"memlock": self.memlock, "stack": self.stack, "nofile": self.nofile}
        return {name: value for name, value in asked.items() if value is not None}


class Node(Struct, frozen=True, kw_only=True):
    """One worker container: one line of the hostfile."""

    name: str
    host: str
    slots: int
    cpuset: tuple[int, ...] = ()
    """Cores it may use; empty means all of the host's."""
    devices: DeviceMapping = field(default_factory=DeviceMapping)


class Lab(Struct, frozen=True, kw_only=True):
    """A lab in full: everything that the templates and the launchers need, nothing that acts."""

    name: str
    directory: Path
    accelerator: str
    """Name of a module in ``accelerators/``."""
    image: str
    nodes: tuple[Node, ...]
    hosts: tuple[Host, ...]
    network: Network = "bridge"
    """One host's nodes share a bridge; where there are several hosts, a node has its host's own network."""
    owner: str = ""
    """Who makes it, as ``person@machine``."""
    home: str = ""
    ssh_port: int
    master_port: int
    shm_size: str
    limits: Limits
    memory: str | None
    project_path: str
    mounts: tuple[Mount, ...]
    clones: Pairs = ()
    """Those mount sources that are sent to hosts, and the folder that each gets below the lab's directory there."""
    environment: Pairs
    ports: tuple[tuple[str, int, int], ...] = ()
    """What the launcher publishes: address and port of its host, port in the container."""
    sshd_log_level: str = "VERBOSE"
    override: Pairs = ()
    """What a person adds to services of the compose files, as JSON by service; under the empty name what is for all."""
    secrets: tuple[tuple[str, Secret], ...] = ()
    """Files under ``/run/secrets``."""
    hidden: tuple[Secret, ...] = ()
    """Values that no record may show."""

    @property
    def interfaces(self) -> str:
        """The interfaces that nodes use to talk to each other, commas between where hosts name them differently."""
        return ",".join(dict.fromkeys(host.interface for host in self.hosts))

    @property
    def addresses(self) -> str:
        """The same for Open MPI, which takes no two names: the smallest network that has all hosts' addresses."""
        if "," not in self.interfaces:
            return self.interfaces
        numbers = [int(IPv4Address(host.address)) for host in self.hosts]
        differing = (min(numbers) ^ max(numbers)).bit_length()
        return str(IPv4Network((min(numbers), 32 - differing), strict=False))

    def host_of(self, node: str) -> Host:
        """The host of a worker, or of the launcher, which is with the first node."""
        return self.host(next((one.host for one in self.nodes if one.name == node), self.nodes[0].host))

    @property
    def containers(self) -> tuple[str, ...]:
        """The names of all that it runs: the launcher, then the workers."""
        return (LAUNCHER, *(node.name for node in self.nodes))

    def containers_on(self, host: str) -> tuple[str, ...]:
        """The names of what runs on a host: the launcher first where it has it, then its workers."""
        workers = tuple(node.name for node in self.nodes if node.host == host)
        return (LAUNCHER, *workers) if self.nodes[0].host == host else workers

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)


class File(Struct, frozen=True, kw_only=True):
    """A file to be written: path relative to the lab directory, bytes as text, mode; or a link to its content."""

    path: str
    content: str
    mode: int = 0o600
    link: bool = False

    def __repr__(self) -> str:
        return f"File({self.path!r})"  # its content may be a secret


class Copy(Struct, frozen=True, kw_only=True):
    """A file, or a link, to be copied: the path that it gets, and the directory that it is in and its path there."""

    path: str
    root: Path
    name: str


# --- the workload --------------------------------------------------------------------------------------------

Reduce = Literal["first", "last", "min", "max", "mean", "median", "first-last"]


class Metric(Struct, frozen=True, kw_only=True):
    """A number read off the output: ``pattern`` has one group; the first ``skip`` samples are left out.

    A run without an ``optional`` one is not remarked.
    """

    name: str
    pattern: str
    unit: str = ""
    skip: int = 0
    reduce: Reduce = "last"
    optional: bool = False


Sign = Literal[">=", "<=", ">", "<"]
BOUNDS: dict[Sign, str] = {">=": "min", "<=": "max", ">": "above", "<": "below"}
"""The field of a criterion that has each bound."""


class Relative(NamedTuple):
    """A bound that is what a run has recorded, more or less a share of it: -0.05 is 5 % below.

    ``run`` is an id, or `latest`: the workload's latest run that passed.
    """

    sign: Sign
    share: float
    run: str


class Criterion(Struct, frozen=True, kw_only=True):
    """What a metric must satisfy: bounds, of which ``above`` and ``below`` do not hold for the bound itself; or to have
    fallen by a share, ``decrease`` (0.2: 20 %).

    A ``relative`` one has its bound, too, once its run has been read.
    """

    metric: str
    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None
    decrease: float | None = None
    relative: Relative | None = None


class Memory(NamedTuple):
    """What `fit` needs: ``{name}`` in a path is argument ``--name``; ``defaults`` stand for arguments not given."""

    model: str = ""
    critic: str | None = None
    task: str = "sft"
    defaults: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Cache(Struct, frozen=True, kw_only=True):
    """What can be fetched before a run: names of models and datasets on the hub."""

    models: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()


class Resume(NamedTuple):
    """How a script goes on: the option that takes a checkpoint, and where in the run's directory it writes them.

    ``checkpoint`` is a pattern of files or directories; ``marker``, if there is one, is the file that a directory has
    from when it is whole.
    """

    argument: str
    checkpoint: str
    marker: str = ""


class Workload(Struct, frozen=True, kw_only=True):
    """A script, in its directory or by absolute path, under a launcher; and how to judge it. ``timeout`` in seconds."""

    name: str
    description: str
    declared: str
    """``file:line`` of its declaration."""
    directory: Path
    launcher: str
    script: str
    arguments: tuple[str, ...]
    environment: Pairs
    timeout: float
    metrics: tuple[Metric, ...]
    criteria: tuple[Criterion, ...]
    launcher_arguments: tuple[str, ...] = ()
    image: str = ""
    packages: tuple[str, ...] = ()
    """Python packages that its image is to have besides, as pip names them."""
    apt: tuple[str, ...] = ()
    prepare: str = ""
    """A script that one rank of each node runs before the ranks start."""
    inputs: Pairs = ()
    """Arguments that are paths on the host, and what must be there: directory, file, path (either) or model."""
    required_inputs: tuple[str, ...] = ()  # inputs that a run, but no rehearsal, must be given
    deepspeed: Mapping[str, Any] | None = None
    deepspeed_option: str = "deepspeed_config"
    """The script's option for DeepSpeed's configuration; ``deepspeed`` in Hugging Face's."""
    cache: Cache = Cache()
    memory: Memory | None = None
    local_rank: bool = False
    """Whether the script gets ``--local_rank N``, as DeepSpeed's launcher gives it."""
    notes: Pairs = ()
    """What the record quotes of the output: names, and patterns with one group."""
    resume: Resume | None = None
    elastic: bool = False
    """Whether it goes on with fewer ranks than those of a checkpoint, when a node is lost for good."""

    @property
    def has_own_image(self) -> bool:
        """Whether it needs another image than the lab's usual one."""
        return bool(self.image or self.packages or self.apt)


class Job(Struct, frozen=True, kw_only=True):
    """One run, ready to start: what the launcher container executes and the files it needs."""

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
    """What its ranks find where they start."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """The options that it was asked for with, as JSON has them."""
    resumed: str = ""
    """The checkpoint that it goes on from, as ``RUN/checkpoints/step-60``."""
    retried: tuple[str, ...] = ()
    """The attempts before it, and how each ended."""
    replays: str = ""
    """The run that it repeats with the same everything."""

    @property
    def containers(self) -> tuple[str, ...]:
        """The names of what it runs in: the launcher, then its nodes."""
        return (LAUNCHER, *(node.name for node in self.nodes))


# --- what happens --------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """Something that happened while a plan was carried out; ``text`` of a ``line`` may be several, printed at once."""

    kind: Literal["step", "line", "notice", "warning", "waiting"]
    text: str
    node: str | None = None


class CriterionResult(Struct, frozen=True, kw_only=True):
    """A criterion, the value it met, and whether it held."""

    criterion: str
    value: float | None
    passed: bool


class Progress(Struct, frozen=True, kw_only=True):
    """How far a run says it is; None where it does not say."""

    counts: Literal["step", "epoch"] = "step"
    """What ``step`` and ``steps`` count."""
    step: int | None = None
    steps: int | None = None
    """How many there will be."""
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The last value of each, with its unit."""
    seconds_per_step: float | None = None
    """Their median, of the last few hundred."""
    seconds_left: float | None = None
    last_line: float | None = None
    """When that was printed, in seconds since 1970."""


Cause = Literal[
    "timeout", "stalled", "node-lost", "device-lost", "rank-crashed", "out-of-memory",
    "launcher-failed", "no-metric", "criteria", "does-not-fit", "interrupted", "no-image", "lab-lost",
]  # fmt: skip


class Verdict(Struct, frozen=True, kw_only=True):
    """PASS, FAIL (ran, but missed its criteria) or ERROR (did not run as asked), with the exit code that says so."""

    status: Literal["PASS", "FAIL", "ERROR"]
    cause: Cause | None
    message: str
    exit_code: int
    checks: tuple[CriterionResult, ...] = ()


class HostFailure(Struct, frozen=True):
    """A host that failed or does not answer, with the hint what to type next."""

    host: str
    message: str
    hint: str


class Rank(Struct, frozen=True, kw_only=True):
    """A rank that reported in, and the node it ran on."""

    rank: int
    node: str


class Result(Struct, frozen=True, kw_only=True):
    """The outcome of a run, key by key as written to ``result.json``. ``seconds`` is wall-clock time."""

    run_id: str
    workload: str
    launcher: str
    lab: str
    # Those of ``Verdict``; a later labctl may have written others.
    verdict: str
    cause: str | None
    message: str
    exit_code: int
    world_size: int = 0
    ranks: tuple[Rank, ...] = ()
    metrics: Mapping[str, Mapping[str, float | int | str | None]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    """What the script said of itself, such as its weights and data, by the names that the workload declares."""
    checks: tuple[CriterionResult, ...] = ()
    seconds: float = 0.0
    started: str = ""
    resumed: str = ""
    """The checkpoint that it went on from, as ``RUN/checkpoints/step-60``."""
    retried: tuple[str, ...] = ()
    """The attempts before it, and how each ended."""
    replays: str = ""
    """The run that it repeated with the same everything."""
