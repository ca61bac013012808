"""Hostfile sets: a list of machines is split into groups, and a directory gets one hostfile per group.

Named as in Lambda's benchmark: ``4nodes_2xN/hostfile_2xN_batch0001`` is the first group of two out of four nodes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Literal, cast, get_args

from msgspec import Struct

from labctl import backends
from labctl.config import hostfile, inventory
from labctl.config.context import Context, is_lab, require_initialised
from labctl.config.hostfile import PREFIX
from labctl.errors import ConfigError, HostError, did_you_mean
from labctl.jobs import job
from labctl.system import files, human

Pattern = Literal["sequential", "pairs", "ring", "all-pairs", "random"]
Group = tuple[str, ...]
SLOTS = 8
"""Slots of a machine if the list gives none."""
LEFT_BY_EDITORS = ("~", ".bak", ".orig", ".swp")


class HostfileSet(Struct, frozen=True, kw_only=True):
    """A set of hostfiles that was written, and the machines that are in none of them."""

    directory: str
    pattern: Pattern
    size: int
    hostfiles: tuple[str, ...]
    left_over: tuple[str, ...]
    drained: tuple[str, ...] = ()
    """Machines that the lab leaves out."""


def pattern_named(word: str) -> Pattern:
    """Return the pattern of this name. ConfigError if it does not exist."""
    patterns = get_args(Pattern)
    if word not in patterns:
        raise ConfigError(f"--pattern {word}: no such pattern", hint=did_you_mean(word, patterns))
    return cast("Pattern", word)


def groups(names: tuple[str, ...], size: int, pattern: Pattern, seed: int = 0) -> tuple[Group, ...]:
    """Return groups of ``size`` names by a pattern; names may be left over. ConfigError if size or pattern don't fit.

    ``sequential``: consecutive names; ``random``: the same of a shuffled list; ``pairs``: the first half with the
    second half; ``ring``: each name with the next ones; ``all-pairs``: each name with each other one. ConfigError if
    there are too few names, or the pattern is one of pairs and ``size`` is not 2.
    """
    if size > len(names):
        raise ConfigError(f"--size {size}: the list has only {human.count(len(names), 'node')}")
    if pattern in ("pairs", "all-pairs") and size != 2:
        raise ConfigError(f"--pattern {pattern} makes pairs, not groups of {size}", hint="--size 2, or another pattern")
    if pattern == "all-pairs":
        return tuple(pair for turn in round_robin(names) for pair in turn)
    if pattern == "pairs":
        half = len(names) // 2
        return tuple(zip(names[:half], names[half : 2 * half], strict=True))
    if pattern == "ring":
        return tuple(dict.fromkeys(_rings(names, size)))
    listed = list(names)
    if pattern == "random":
        random.Random(seed).shuffle(listed)  # noqa: S311 - repeatable, not secret
    whole = range(0, len(listed) - size + 1, size)
    return tuple(tuple(listed[first : first + size]) for first in whole)


def _rings(names: tuple[str, ...], size: int) -> Iterator[Group]:
    """Yield each name with the ``size`` - 1 names after it in a ring, so ordered that neighbours seldom overlap."""
    for start in range(size):
        for first in range(start, len(names), size):
            places = sorted((first + step) % len(names) for step in range(size))
            yield tuple(names[place] for place in places)


def round_robin(names: tuple[str, ...]) -> Iterator[tuple[Group, ...]]:
    """Yield rounds of pairs, until each name has met each other one; of an odd number, one is idle per round."""
    first, *circle = names if len(names) % 2 == 0 else (*names, "")
    for turn in range(len(circle)):
        others = circle[turn:] + circle[:turn]
        half = len(others) // 2
        met = ((first, others[0]), *zip(others[1 : half + 1], reversed(others[half + 1 :]), strict=True))
        yield tuple(pair for pair in met if all(pair))


def make(
    context: Context, file: Path | None, *, size: int, pattern: Pattern, slots: int, out: Path | None, seed: int
) -> HostfileSet:
    """Write hostfiles of listed machines, or of the lab's nodes; return the set. ConfigError without the file."""
    machines, left_out = listed_machines(context, file) if file else nodes_of_lab(context)
    names = tuple(machines)
    chosen = groups(names, size, pattern, seed)
    slots_of = {name: slots or of_list for name, of_list in machines.items()}
    if not all(slots_of.values()):
        slots_of = {name: slots_of[name] or usual for name, usual in slots_in_lab(context, names).items()}
    directory = out or context.directory / default_directory(len(names), size, pattern)
    written = texts(chosen, slots_of)
    write(directory, written)
    used = {*chain.from_iterable(chosen)}
    left_over = tuple(name for name in names if name not in used)
    return HostfileSet(
        directory=str(directory),
        pattern=pattern,
        size=size,
        hostfiles=tuple(written),
        left_over=left_over,
        drained=left_out,
    )


def listed_machines(context: Context, file: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return slots by listed machine not drained (0 if unset), and drained names. ConfigError without the file."""
    if not file.is_file():
        raise ConfigError(
            f"{file}: no such file", hint="write a machine per line: its name, its IP address or worker-N"
        )
    machines, drained = inventory.in_use(context.directory, inventory.read(file))
    left_out = tuple(name for name, _ in drained)
    return {host.name: host.slots for host in machines}, left_out


def nodes_of_lab(context: Context) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return slots by usable node of the lab, and other nodes' names, each noted. HostError if none is left."""
    require_initialised(context)
    with backends.connect(context) as backend:
        nodes, unusable = backend.lab().nodes, backend.unusable()
    reasons = inventory.drained_reasons(context.directory) | dict(unusable)
    left_out = [node.name for node in nodes if node.name in reasons]
    for name in left_out:
        context.notice(f"{name} is left out: {reasons[name]}")
    used = {node.name: node.slots for node in nodes if node.name not in left_out}
    if not used:
        raise HostError("no node of the lab is in use", hint="labctl devices")
    return used, tuple(left_out)


def slots_in_lab(context: Context, names: tuple[str, ...]) -> dict[str, int]:
    """Return the slots of the lab's node for each name; if the directory is no lab, SLOTS for each."""
    if not is_lab(context.directory):
        return dict.fromkeys(names, SLOTS)
    with backends.connect(context) as backend:
        lab = backend.lab()
    return {name: job.nodes_of(lab, (name,), "the list")[0].slots for name in names}


def default_directory(count: int, size: int, pattern: Pattern) -> Path:
    """Return a set's default directory, ``hostfiles/4nodes_2xN_PATTERN``; without PATTERN if sequential."""
    suffix = "" if pattern == "sequential" else f"_{pattern}"
    return Path("hostfiles", f"{count}node{'s' * (count > 1)}_{size}xN{suffix}")


def texts(chosen: tuple[Group, ...], slots: Mapping[str, int]) -> dict[str, str]:
    """Map the file name of each group's hostfile to its text, numbered in order."""
    digits = max(4, len(str(len(chosen))))
    by_name = {}
    for number, group in enumerate(chosen, start=1):
        entries = ((name, slots[name]) for name in group)
        by_name[f"{PREFIX}{len(group)}xN_batch{number:0{digits}}"] = hostfile.format_hostfile(entries)
    return by_name


def write(directory: Path, hostfiles: Mapping[str, str]) -> None:
    """Write hostfiles into a directory. ConfigError, with nothing written, if one there has another name or text.

    HostError if it cannot be written.
    """
    present = {path.name: path for path in directory.glob(f"{PREFIX}*")}
    others = sorted(present.keys() - hostfiles.keys())
    if not others:
        others = [name for name in sorted(present) if present[name].read_text(errors="replace") != hostfiles[name]]
    if others:
        hint = f"rm -r {directory}, or choose another directory: --out DIR"
        raise ConfigError(f"{directory / others[0]} does not belong to this set of hostfiles", hint=hint)
    with files.writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in hostfiles.items():
            (directory / name).write_text(text, encoding="utf-8")


def listed(directory: Path) -> tuple[Path, ...]:
    """Return a set's hostfiles, sorted, without editors' copies. ConfigError if there are none or no directory."""
    if directory.is_file():
        raise ConfigError(f"{directory}: not a directory", hint=f"name the directory: {directory.parent}")
    if not directory.is_dir():
        near = "" if directory.parent.is_dir() else f", nor {directory.parent}"
        raise ConfigError(f"{directory}: no such directory{near}", hint="labctl hostfiles NODES.txt --size 2 makes one")
    named = (path for path in directory.iterdir() if path.name.startswith(PREFIX) and path.is_file())
    hostfiles = tuple(sorted(path for path in named if not path.name.endswith(LEFT_BY_EDITORS)))
    if not hostfiles:
        some = ", ".join(path.name for path in islice(directory.iterdir(), 3)) or "nothing"
        raise ConfigError(f"{directory} has no file {PREFIX}*, it has {some}", hint=f"name each {PREFIX}JOB")
    return hostfiles
