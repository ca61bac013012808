"""Trees of this machine become directories of a host: what they show is all of a tree or all of the one before."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Literal, cast

from labctl import packing, shell, ssh_words
from labctl.connection import Connection
from labctl.errors import HostError
from labctl.host_scripts import ASK, FILL, LOOK, NEW, REMOVE
from labctl.packing import Part
from labctl.resources import is_below
from labctl.shell import Completed
from labctl.tree import Tree, parse

Shown = Literal["same", "other", "gone"]
"""What a host shows of a tree: that very one; another, or a part; or there is no directory for it."""
NAME = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Sent:
    """What a host did not have yet."""

    paths: tuple[str, ...]
    size: int
    """Bytes of the files among them."""


def shown(
    connection: Connection, directory: str, trees: Mapping[str, Tree], *, seconds: float = 600
) -> dict[str, Shown]:
    """What ``directory/<name>`` of the host shows of the tree of that name; nothing is changed there."""
    words = _words(tuple(Part(name, tree) for name, tree in trees.items()))
    said = connection.run(LOOK, directory, words, timeout=seconds).out.split()
    return {name: cast(Shown, word) for name, word in zip(trees, said, strict=True)}


def send(
    connection: Connection, directory: str, trees: Mapping[str, Tree], *, alone: str = "", seconds: float = 600
) -> Sent:
    """Make ``directory/<name>`` of the host show the tree of that name, all of them in one step each.

    Below ``directory/<alone>`` other trees' directories are removed. Nothing is sent of what the host has.
    HostError, with all as it was, for what the host refuses, or when it is not done within so many seconds.
    """
    for name in trees:
        if not NAME.fullmatch(name) or not is_below(name):
            raise ValueError(name)
    rsync, parts = _ask(connection, directory, trees, alone, seconds)
    if not parts:
        return Sent((), 0)
    done = _fill(connection, directory, parts, rsync=rsync, seconds=seconds)
    if done.code != 0 and (rsync or any(part.there for part in parts)):
        # No hard links there, another sender meanwhile, an rsync that does not work: what is sent whole needs none.
        parts = tuple(Part(part.name, part.tree) for part in parts)
        done = _fill(connection, directory, parts, rsync=False, seconds=seconds)
    _require(done, connection, directory)
    return _sent(parts)


def send_new(connection: Connection, tree: Tree, directory: str, *, seconds: float = 600) -> Sent:
    """Make a directory of the host that appears at once and complete. HostError where there is one already."""
    parts = (Part("", tree),)
    done = connection.send(NEW, directory, tree.digest, chunks=packing.stream(parts), timeout=seconds, check=False)
    _require(done, connection, directory)
    return _sent(parts)


def remove(connection: Connection, directory: str, *, seconds: float = 120) -> None:
    """Remove what labctl made on a host: a directory below a ``.labctl``, and that where it is empty then.

    HostError for any other directory, and for what cannot be removed.
    """
    path = PurePosixPath(directory)
    if not path.is_absolute() or ".." in path.parts or ".labctl" not in path.parts[:-1]:
        raise HostError(f"{directory} is not below a .labctl directory: labctl removes nothing else from a host")
    done = connection.run(REMOVE, str(path), _owned(path), timeout=seconds, check=False)
    if done.code != 0:
        hint = f"{ssh_words.command(connection.target, '-t')} sudo rm -r {shlex.quote(directory)}"
        raise ssh_words.error(connection.target, f"cannot remove {directory}: {reason(done)}", hint)


def _owned(path: PurePosixPath) -> str:
    return next(str(parent) for parent in path.parents if parent.name == ".labctl")


def _sent(parts: tuple[Part, ...]) -> Sent:
    new = tuple((str(PurePosixPath(part.name, entry.path)), entry.size) for part in parts for entry in part.new)
    return Sent(tuple(path for path, _ in new), sum(size for _, size in new))


def _ask(
    connection: Connection, directory: str, trees: Mapping[str, Tree], alone: str, seconds: float
) -> tuple[bool, tuple[Part, ...]]:
    """Whether both ends have rsync, and the trees that the host does not show."""
    said: list[bytes] = []
    every = tuple(Part(name, tree) for name, tree in trees.items())
    words = (directory, _words(every), alone)
    done = connection.receive(ASK, *words, on_chunk=said.append, timeout=seconds, check=False)
    _require(done, connection, directory)
    rsync, *answers = b"".join(said).split(b"\0end\0")
    # A host without the directory says nothing of any.
    answers += [b""] * (len(every) - len(answers))
    known = zip(every, answers, strict=True)
    parts = tuple(Part(part.name, part.tree, parse(there)) for part, there in known if there != b"same")
    return rsync == b"rsync" and shutil.which("rsync") is not None, parts


def _words(parts: tuple[Part, ...]) -> str:
    return " ".join(f"{number}:{part.tree.digest}:{part.name}" for number, part in enumerate(parts))


def _fill(connection: Connection, directory: str, parts: tuple[Part, ...], *, rsync: bool, seconds: float) -> Completed:
    words = (directory, _words(parts))
    if not rsync:
        return connection.send(FILL, "tar", *words, chunks=packing.stream(parts), timeout=seconds, check=False)
    with TemporaryDirectory() as stage:
        packing.lay_out(Path(stage), parts)
        try:
            return shell.run(_rsync(connection, Path(stage), words), timeout=seconds, check=False)
        except shell.OutOfTime as error:
            text = f"cannot write {directory}: rsync is not done within {seconds:.0f} s"
            raise ssh_words.error(connection.target, text) from error


def _rsync(connection: Connection, stage: Path, words: tuple[str, ...]) -> tuple[str, ...]:
    """The command that fills by rsync; the host's end of it is started by the script that fills by tar."""
    # The last word of the ssh command is what the host's shell reads; rsync adds its own arguments to that.
    there = connection.argv(FILL, "rsync", *words)[-1]
    name = ssh_words.destination(connection.target)
    return (
        "rsync",
        # Contents are compared, as a date may lie; of a directory no more is sent than what is named.
        *("--checksum", "--links", "--perms", "--times", "--dirs", "--no-implied-dirs", "--chmod=Du+rwx,ugo-s,-t"),
        *("--link-dest=before", "--from0", f"--files-from={stage / packing.NAMES}"),
        *("--rsh", connection.rsh(), f"--rsync-path={there}"),
        *(f"{stage}/", f"[{name}]:." if ":" in name else f"{name}:."),
    )


def _require(done: Completed, connection: Connection, directory: str) -> None:
    """HostError unless it was done."""
    if done.code != 0:
        why = reason(done)
        look = "df -h" if "No space left" in why or "quota" in why else "ls -ld"
        hint = f"{ssh_words.command(connection.target)} {look} {shlex.quote(directory)}"
        raise ssh_words.error(connection.target, f"cannot write {directory}: {why}", hint)


def reason(done: Completed) -> str:
    """What a script complained of first: what follows only follows from it."""
    lines = (line for line in done.err.splitlines() if line.strip() and "in the future" not in line)
    return next(lines, f"exit code {done.code}")
