"""Launcher programs: one module each; a new file is a new launcher.

Each module has ``WAYS`` (the first is the usual one; ``horovod:mpi`` asks for another), ``OPTIONS`` (known options,
with the number of values of each; others are passed on with a warning), ``RESERVED`` (what labctl sets itself), where
an elastic way needs some of the first nodes ``NEEDED`` (how many), and three pure functions: ``check`` refuses what
the program cannot do, ``argv`` is its command, ``files`` is what it reads.
The program that it starts on every rank is one script, ``rank.sh``, so that nothing a person wrote passes
through a launcher's own quoting.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Protocol, cast

from msgspec import Struct

from labctl.config.hostfile import format_hostfile
from labctl.errors import ConfigError, did_you_mean, nearest
from labctl.model import File, Pairs

ELASTIC = "elastic"
"""The way of a launcher that goes on by itself when it loses ranks."""
PLAIN = re.compile(r"[A-Za-z0-9._/:,=+@%^-]+")

# These select the network of Open MPI; an accelerator adds variables for its own libraries.
OPEN_MPI_NETWORK = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include")


class LaunchSpec(Struct, frozen=True, kw_only=True):
    """What a launcher needs to know of a run."""

    entries: tuple[tuple[str, int], ...]
    """Nodes and their slots, in rank order."""
    directory: str
    """The run's directory in the containers."""
    program: str
    """What each rank executes."""
    master_port: int
    ssh_port: int
    interface: str
    """The lab's network interface, by its name in the containers; several with commas between where hosts differ."""
    addresses: str
    """The same for Open MPI: the name, or the network of all hosts' addresses."""
    variables: Pairs
    """What must be in the environment on every node before the program starts; no blanks in the values."""
    way: str = ""
    options: tuple[str, ...] = ()
    """Words that a person adds to the launcher's own."""
    crowded: bool = False
    """Whether ranks share cores."""
    include: str = ""
    """Slots by number, ``worker-0:1@worker-1:0,2``, where they are not the first ones of each node."""

    @property
    def ranks(self) -> int:
        return sum(slots for _, slots in self.entries)


class LauncherModule(Protocol):
    """What a module in this package offers."""

    WAYS: tuple[str, ...]
    OPTIONS: Mapping[str, int]
    RESERVED: frozenset[str]

    def check(self, launch: LaunchSpec) -> None: ...

    def argv(self, launch: LaunchSpec) -> tuple[str, ...]: ...

    def files(self, launch: LaunchSpec) -> tuple[File, ...]: ...


def names() -> tuple[str, ...]:
    """The launchers that labctl knows, by the files in this folder."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def known() -> tuple[str, ...]:
    """Every launcher, and every other way of one: ``horovod``, ``horovod:mpi``."""
    found: list[str] = []
    for launcher in names():
        _, *others = get(launcher).WAYS
        found += [launcher, *(f"{launcher}:{other}" for other in others)]
    return tuple(found)


def get(text: str) -> LauncherModule:
    """The module of a launcher, whichever its way; ConfigError lists the known ones."""
    launcher, _, asked = text.partition(":")
    if launcher not in names():
        raise ConfigError(f"unknown launcher `{text}`", hint=f"known: {', '.join(known())}")
    module = cast(LauncherModule, import_module(f"{__name__}.{launcher}"))
    if asked and asked not in module.WAYS:
        raise ConfigError(f"unknown launcher `{text}`", hint=f"{launcher} has {', '.join(module.WAYS)}")
    return module


def name(text: str) -> str:
    """``horovod`` of ``horovod:mpi``."""
    return text.partition(":")[0]


def way(text: str) -> str:
    """The way that ``horovod:mpi`` asks for; the launcher's usual one for ``horovod``."""
    return text.partition(":")[2] or get(text).WAYS[0]


def is_elastic(text: str) -> bool:
    """Whether the launcher itself starts ranks again that fail."""
    return way(text) == ELASTIC


def needed(text: str, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of a run's nodes without which it cannot go on."""
    return nodes[: getattr(get(text), "NEEDED", 0)] if is_elastic(text) else nodes


def environment(text: str, launch: LaunchSpec) -> Pairs:
    """What the launcher finds in its environment: options of the MPI that Horovod starts, whichever the image has.

    Open MPI's, which another one would refuse as arguments, and those of MPICH's family.
    """
    if (name(text), launch.way) != ("horovod", "mpi"):
        return ()
    words = open_mpi_options(launch)
    open_mpi = ((f"OMPI_MCA_{option}", value) for option, value in zip(words[1::3], words[2::3], strict=True))
    return (*open_mpi, ("I_MPI_HYDRA_IFACE", launch.interface), ("FI_TCP_IFACE", launch.interface))


def check(text: str, launch: LaunchSpec) -> None:
    """ConfigError for options that labctl sets itself, and for what the launcher cannot do."""
    unknown_options(text, launch.options)
    get(text).check(launch)


def unknown_options(text: str, words: Iterable[str]) -> list[str]:
    """A warning for each option that is not in the launcher's ``OPTIONS``: it is passed on, with the words after it.

    ConfigError for an option that labctl sets, also abbreviated; for one without its values; for a stray word, which
    would be taken for the program; and for characters that a shell would interpret: some launchers use one.
    """
    module, launcher, left, warnings = get(text), name(text), list(words), []
    for word in left:
        if not PLAIN.fullmatch(word):
            raise ConfigError(
                f"{launcher} option `{word}` holds more than letters, digits and . _ / : , = + @ % ^ -",
                hint="give each word by itself: --launcher-arg=--map-by --launcher-arg=node",
            )
    while left:
        word = left.pop(0)
        option, equals, _ = word.partition("=")
        values = 0 if equals else module.OPTIONS.get(option, 0)
        if option not in module.OPTIONS:
            if any(_means(option, one) for one in module.RESERVED):
                hint = "leave it out of the arguments"
                raise ConfigError(f"{launcher} option `{option}` is set by labctl", hint=hint)
            if not module.OPTIONS or not option.startswith("-"):
                raise ConfigError(f"unknown {launcher} option `{word}`", hint=did_you_mean(option, module.OPTIONS))
            near = nearest(option, module.OPTIONS)
            hint = f"; did you mean `{near}`?" if near else ""
            warnings.append(f"{launcher} option `{option}` is unknown to labctl and passed on as it is{hint}")
            values = next((place for place, one in enumerate(left) if one.startswith("-")), len(left))
        if len(left) < values:
            raise ConfigError(f"{launcher} option `{option}` needs {values} value{'s' * (values > 1)}")
        del left[:values]
    return warnings


def _means(option: str, reserved: str) -> bool:
    """Whether it is that option for some launcher: they take ``-`` for ``--`` or for ``_``, and unique beginnings."""
    option, full = (one.replace("_", "-") for one in (option, reserved))
    return option.lstrip("-") == full.lstrip("-") or (len(option) > 3 and full.startswith(option))


def first_slots_only(launcher: str, launch: LaunchSpec) -> None:
    """ConfigError where slots are asked for by number: only DeepSpeed's own launcher can place ranks so."""
    if launch.include:
        raise ConfigError(
            f"{launcher} takes the first slots of a node; it cannot take `{launch.include}`",
            hint="leave out the slot numbers, or use --launcher deepspeed",
        )


def one_interface_only(launcher: str, launch: LaunchSpec) -> None:
    """ConfigError where hosts name their interfaces differently: some launchers take one name for all."""
    if "," in launch.interface:
        raise ConfigError(
            f"{launcher} takes one name for the network interface of all hosts, and they have {launch.interface}",
            hint="use --launcher deepspeed, torchrun or mpirun, or give the interfaces one name on the hosts",
        )


def hostfile(launch: LaunchSpec) -> tuple[File, ...]:
    """The nodes in the dialect that most launchers read, in the run's directory: the only file that most need."""
    return (File(path="hostfile", content=format_hostfile(launch.entries), mode=0o644),)


def open_mpi_options(launch: LaunchSpec) -> tuple[str, ...]:
    """The lab's network for Open MPI; workers hold no private key, so the launcher starts all daemons itself."""
    return (
        "--mca", "plm_rsh_no_tree_spawn", "1",
        "--mca", "btl_tcp_if_include", launch.addresses,
        "--mca", "oob_tcp_if_include", launch.addresses,
        # One that waits for a message would else keep the core from the rank that is to send it.
        *(("--mca", "mpi_yield_when_idle", "1") if launch.crowded else ()),
    )  # fmt: skip
