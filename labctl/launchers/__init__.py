"""Launcher programs: a module each; a new file is a new launcher.

Each module has

- ``PROGRAM``: the program that the image must have; empty if the job brings it,
- ``WAYS`` of starting ranks: the first is the usual one, ``horovod:mpi`` asks for another; one that is called
  ``elastic`` continues by itself after it loses ranks,
- ``OPTIONS``: known options and the number of values of each; others are passed on with a warning, but none is if
  there are no known ones,
- ``RESERVED``: options that labctl sets itself,
- three pure functions: ``check`` rejects what the program cannot do, ``argv`` is its command, ``files`` is its input,
- optionally ``NEEDED``, how many of the first nodes an elastic run cannot lose, and ``environment``, a pure function
  that returns variables for the program itself.

On every rank the launcher starts a single script, ``rank.sh``, so that nothing a user wrote passes through a
launcher's own quoting. ``rank.sh`` reads the number of its rank from the variables that the program sets.
Functions that several launchers use are here: launchers do not import each other.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import PurePosixPath
from typing import Protocol, cast

from msgspec import Struct

from labctl.config.hostfile import format_hostfile
from labctl.errors import ConfigError, did_you_mean, nearest
from labctl.model import File, Pairs
from labctl.system import human

ELASTIC = "elastic"
"""The way of a launcher that continues by itself after it loses ranks."""
PLAIN = re.compile(r"[A-Za-z0-9._/:,=+@%^-]+")

# These select the network of Open MPI; an accelerator adds variables for its own libraries.
OPEN_MPI_NETWORK = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include")


class LaunchSpec(Struct, frozen=True, kw_only=True):
    """Everything about a run that a launcher's command depends on."""

    entries: tuple[tuple[str, int], ...]
    """Nodes and their slots, in rank order."""
    directory: str
    """The run's directory in the containers."""
    program: str
    """Program that each rank executes."""
    master_port: int
    ssh_port: int
    interface: str
    """Name of the lab's network interface in the containers; comma-separated names if hosts differ."""
    addresses: str
    """The interface for Open MPI: its name, or the network of all hosts' addresses."""
    variables: Pairs
    """Environment that every node needs before the program starts; no blanks in the values.

    A launcher whose daemons start the ranks passes it on; ssh by itself passes on what begins with ``LABCTL_``.
    """
    way: str
    options: tuple[str, ...] = ()
    """Arguments that the user adds to the launcher's command."""
    crowded: bool = False
    """True if ranks share cores."""
    include: str = ""
    """Slots by number, ``worker-0:1@worker-1:0,2``; empty for the first slots of each node."""

    @property
    def ranks(self) -> int:
        return sum(slots for _, slots in self.entries)


class LauncherModule(Protocol):
    """Interface of the modules in this package."""

    PROGRAM: str
    WAYS: tuple[str, ...]
    OPTIONS: Mapping[str, int]
    RESERVED: frozenset[str]

    def check(self, launch: LaunchSpec) -> None: ...

    def argv(self, launch: LaunchSpec) -> tuple[str, ...]: ...

    def files(self, launch: LaunchSpec) -> tuple[File, ...]: ...


def names() -> tuple[str, ...]:
    """Return the names of all launchers, which are the files in this folder whose names begin with a letter."""
    files = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in files if not name.startswith("_")))


def known() -> tuple[str, ...]:
    """Return every launcher, and its ways but the default one, as ``horovod`` and ``horovod:mpi``."""
    usual = {f"{launcher}:{get(launcher).WAYS[0]}" for launcher in names()}
    return tuple(text for text in accepted() if text not in usual)


def accepted() -> tuple[str, ...]:
    """Return every launcher, and each of its ways, as ``horovod``, ``horovod:gloo`` and ``horovod:mpi``."""
    accepted: list[str] = []
    for launcher in names():
        accepted += [launcher, *(f"{launcher}:{way}" for way in get(launcher).WAYS)]
    return tuple(accepted)


def get(text: str) -> LauncherModule:
    """Return a launcher's module, for any of its ways. ConfigError if launcher or way is unknown."""
    launcher, _, asked = text.partition(":")
    if launcher not in names():
        raise ConfigError(f"unknown launcher `{text}`", hint=f"known: {', '.join(known())}")
    module = cast(LauncherModule, import_module(f"{__name__}.{launcher}"))
    if asked and asked not in module.WAYS:
        raise ConfigError(f"unknown launcher `{text}`", hint=f"{launcher} has {', '.join(module.WAYS)}")
    return module


def name(text: str) -> str:
    """Return the launcher's name without the way: ``horovod`` of ``horovod:mpi``."""
    return text.partition(":")[0]


def way(text: str) -> str:
    """Return the way in ``horovod:mpi``, ``mpi``; for ``horovod`` alone the launcher's first."""
    return text.partition(":")[2] or get(text).WAYS[0]


def is_elastic(text: str) -> bool:
    """Return True if the launcher's way is ``elastic``: it goes on after it loses ranks."""
    return way(text) == ELASTIC


def needed(text: str, nodes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the nodes that a run cannot lose: all, or under an elastic launcher only the first ``NEEDED``."""
    return nodes[: getattr(get(text), "NEEDED", 0)] if is_elastic(text) else nodes


def environment(text: str, launch: LaunchSpec) -> Pairs:
    """Return the variables that the launcher's module sets for its program; empty for most launchers."""
    of_module: Callable[[LaunchSpec], Pairs] = getattr(get(text), "environment", lambda _: ())
    return of_module(launch)


def check(text: str, launch: LaunchSpec) -> None:
    """Raise ConfigError for a user's options that are reserved or malformed, and for a launch that it cannot do."""
    unknown_options(text, launch.options)
    get(text).check(launch)


def unknown_options(text: str, arguments: Iterable[str]) -> list[str]:
    """Return a warning for each option not in ``OPTIONS``; ConfigError for one that is reserved or malformed.

    An unknown option is passed on with its values.
    ConfigError for an option that labctl sets, also abbreviated; for one without its values; for a stray word, which
    the launcher would take for the program; and for characters that a shell would interpret: some launchers use one.
    """
    module, launcher, rest, warnings = get(text), name(text), list(arguments), []
    _require_plain(launcher, rest)
    while rest:
        word = rest.pop(0)
        option, equals, _ = word.partition("=")
        values = 0 if equals else module.OPTIONS.get(option, 0)
        if option not in module.OPTIONS:
            warnings.append(_unknown_option(module, launcher, word))
            values = next((count for count, following in enumerate(rest) if following.startswith("-")), len(rest))
        if len(rest) < values:
            raise ConfigError(f"{launcher} option `{option}` needs {human.count(values, 'value')}")
        del rest[:values]
    return warnings


def _require_plain(launcher: str, arguments: Iterable[str]) -> None:
    """Raise ConfigError if an argument has characters that a shell would interpret."""
    for word in arguments:
        if not PLAIN.fullmatch(word):
            raise ConfigError(
                f"{launcher} option `{word}` contains more than letters, digits and . _ / : , = + @ % ^ -",
                hint="give each word by itself: --launcher-arg=--map-by --launcher-arg=node",
            )


def _unknown_option(module: LauncherModule, launcher: str, word: str) -> str:
    """Return the warning for an unknown option; ConfigError if it is reserved, no option, or if none may be unknown."""
    option = word.partition("=")[0]
    if any(_means(option, reserved) for reserved in module.RESERVED):
        hint = "leave it out of the arguments"
        raise ConfigError(f"{launcher} option `{option}` is set by labctl", hint=hint)
    if not module.OPTIONS or not option.startswith("-"):
        raise ConfigError(f"unknown {launcher} option `{word}`", hint=did_you_mean(option, module.OPTIONS))
    near = nearest(option, module.OPTIONS)
    hint = f"; did you mean `{near}`?" if near else ""
    return f"{launcher} option `{option}` is unknown to labctl and passed on as it is{hint}"


def _means(option: str, reserved: str) -> bool:
    """Tell if a launcher may read ``option`` as the reserved one: with ``-`` for ``--`` or ``_``, or abbreviated."""
    option, full = option.replace("_", "-"), reserved.replace("_", "-")
    return option.lstrip("-") == full.lstrip("-") or (len(option) > 3 and full.startswith(option))


def first_slots_only(launcher: str, launch: LaunchSpec) -> None:
    """Raise ConfigError if slots are chosen by number: only DeepSpeed's own launcher can do that."""
    if launch.include:
        raise ConfigError(
            f"{launcher} takes the first slots of a node; it cannot take `{launch.include}`",
            hint="leave out the slot numbers, or use --launcher deepspeed",
        )


def one_interface_only(launcher: str, launch: LaunchSpec) -> None:
    """Raise ConfigError if hosts name their interfaces differently: some launchers take a single name."""
    if "," in launch.interface:
        raise ConfigError(
            f"{launcher} takes one name for the network interface of all hosts, and they have {launch.interface}",
            hint="use --launcher deepspeed, torchrun or mpirun, or give the interfaces one name on the hosts",
        )


def hostfile(launch: LaunchSpec) -> tuple[File, ...]:
    """Return the hostfile for the run's directory, in the dialect that most launchers read."""
    return (File(path="hostfile", content=format_hostfile(launch.entries), mode=0o644),)


def open_mpi_options(launch: LaunchSpec) -> tuple[str, ...]:
    """Return Open MPI's options: SSH from the launcher only, the lab's network, and for ranks that share cores.

    Workers hold no private key, so the launcher starts all daemons itself. Runs start at once in one launcher, and
    Open MPI 4 fails if another mpirun makes or removes the directory that all of a user's share; Open MPI 5 has one
    for each mpirun.
    """
    return (
        "--mca", "plm_rsh_no_tree_spawn", "1",
        "--mca", "btl_tcp_if_include", launch.addresses,
        "--mca", "oob_tcp_if_include", launch.addresses,
        "--mca", "orte_tmpdir_base", f"/tmp/{PurePosixPath(launch.directory).name}",  # noqa: S108 - in the containers
        # Otherwise a rank that waits for a message would block the core of the rank that sends it.
        *(("--mca", "mpi_yield_when_idle", "1") if launch.crowded else ()),
    )  # fmt: skip
