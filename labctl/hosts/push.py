"""Trees of this machine become directories of a host: what they show is all of a tree or all of the one before."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Literal, cast

from labctl.errors import HostError
from labctl.hosts import ssh_errors
from labctl.hosts.manifest import PIECE, Entry, Kind, Tree, parse
from labctl.hosts.ssh import Connection
from labctl.system import process
from labctl.system.files import is_below
from labctl.system.process import CompletedProcess
from labctl.system.tar import END, header, padding

COMMON = r"""
set -eu
LC_ALL=C; export LC_ALL
umask 077

fail() { printf '%s\n' "$*" >&2; exit 1; }

# When a process began, in ticks since the host did: with its number, what tells it from all others.
began() {
    read -r stat <"/proc/$1/stat" || return 0
    set -- ${stat##*) }
    printf '%s' "${20}"
} 2>/dev/null

alive() { [ "$(began "${1%-*}")" = "${1##*-}" ]; }

# What lies in the version $1, in the words whose SHA-256 is its digest.
describe() (
    cd "$1/tree"
    for list in dirs files links; do cat "../$list"; printf '\000'; done
    xargs -0r stat -c %f <../dirs
    xargs -0r stat -c '%f %s' <../files
    xargs -0r sha256sum <../files | sed -n 's/^\\\{0,1\}\([0-9a-f]\{64\}\) .*/\1/p'
    xargs -0r stat -c %s <../links
    xargs -0r -n 1 readlink <../links
)
digest() { describe "$1" | sha256sum | cut -d ' ' -f 1; }

# What senders that are no more have left in $1.
sweep() { for path in "$1"/.part.*; do alive "${path##*.}" || rm -rf "$path"; done; }

# Work in a directory of this sender's own below $1, which goes with it.
begin() {
    mkdir -p "$1"
    sweep "$1"
    owner=$$-$(began $$)
    work=$1/.part.$owner
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' HUP INT PIPE TERM
    mkdir "$work"
    cd "$work"
}

require() { [ "$(digest "$work/$1")" = "$2" ] || fail "what came is not what was read: a file changed meanwhile?"; }

# number:digest:name
split() { number=${1%%:*} target=$directory/${1##*:} digest=${1#*:} digest=${digest%%:*}; }

# Whether what $target has for now is the version of this digest, and unharmed.
current() {
    now=$(readlink "$target/.now") || now=
    version=$target/${now%/tree}
    case $now in
    ".sent/$digest."*) [ "$(digest "$version" 2>/dev/null)" = "$digest" ] ;;
    *) false ;;
    esac
}

# Each name of the tree $2 leads through .now.
enter() {
    for path in "$2"/* "$2"/.[!.]* "$2"/..?*; do
        entry=$1/${path##*/}
        if [ -L "$entry" ] || { [ ! -e "$path" ] && [ ! -L "$path" ]; }; then continue; fi
        [ ! -e "$entry" ] || fail "$entry is in the way: it was not sent"
        ln -sfn ".now/${path##*/}" "$entry"
    done
}

# Nothing remains in $1 but the version that counts, what living senders have, and those that a run or a shell may stand
# in: that counted in the last 30 days. Of a node's directory none does: a key or secret that was taken away is gone.
settle() {
    enter "$1" "$1/.now"
    for path in "$1"/.sent/*.*; do
        # In this order: a sender that is no more will not make its version count after this look.
        alive "${path##*.}" && continue
        case $(readlink "$1/.now") in ".sent/${path##*/}/tree") continue ;; esac
        case $1 in
        */.lab/nodes/*) ;;
        *) [ -z "$(find "$path" -prune -type d -mtime -30 2>/dev/null)" ] || continue ;;
        esac
        rm -rf "$path"
    done
    for path in "$directory"/.part.*; do
        if [ "$path" != "${work-}" ] && alive "${path##*.}"; then return 0; fi
    done
    for path in "$1"/* "$1"/.[!.]* "$1"/..?*; do
        name=${path##*/}
        [ -L "$path" ] && [ ! -e "$1/.now/$name" ] && [ ! -L "$1/.now/$name" ] || continue
        case $(readlink "$path") in .now/*) rm -f "$path" ;; esac
    done
}
"""

# Says of each tree that it is there, or else describes what is; removes other trees' directories from below $3.
ASK = (
    COMMON
    + r"""
directory=$1 trees=$2 alone=$3
! command -v rsync >/dev/null || printf rsync
[ -d "$directory" ] || exit 0
sweep "$directory"
for path in "$directory/$alone"/* "$directory/$alone"/*/*; do
    if [ -z "$alone" ] || [ ! -d "$path" ] || [ -L "$path" ]; then continue; fi
    case "$trees " in
    *":${path#"$directory/"} "* | *":${path#"$directory/"}/"*) ;;
    *) rm -rf "$path" ;;
    esac
done
for one in $trees; do
    split "$one"
    printf '\000end\000'
    if current; then
        settle "$target"
        printf same
    elif [ -n "$now" ]; then
        describe "$version" 2>/dev/null || :
    fi
done
"""
)

# Says a word of each tree and changes nothing: same; other; gone, where there is no such directory.
LOOK = (
    COMMON
    + r"""
directory=$1 trees=$2
for one in $trees; do
    split "$one"
    said=other
    if current; then
        said=same
        for path in "$version"/tree/* "$version"/tree/.[!.]* "$version"/tree/..?*; do
            if [ -e "$path" ] || [ -L "$path" ]; then [ -L "$target/${path##*/}" ] || said=other; fi
        done
    elif [ ! -d "$target" ]; then
        said=gone
    fi
    echo "$said"
done
"""
)

FILL = (
    COMMON
    + r"""
how=$1 directory=$2 trees=$3
shift 3
begin "$directory"
mkdir before
for one in $trees; do
    split "$one"
    mkdir -p "$target/.sent" "before/$number"
    [ ! -L "$target/.now" ] || ln -s "$target/$(readlink "$target/.now")" "before/$number/tree"
done
case $how in
tar) tar -xpof - ;;
rsync) rsync "$@" ;;
esac
for one in $trees; do
    split "$one"
    require "$number" "$digest"
    enter "$target" "$number/tree"
done
# From here on it is a matter of the host alone, whatever becomes of the connection.
trap '' HUP INT PIPE TERM
for one in $trees; do
    split "$one"
    mv "$number" "$target/.sent/$digest.$owner"
    ln -s ".sent/$digest.$owner/tree" "$target/.sent/now.$owner"
done
for one in $trees; do
    split "$one"
    # The date of a version is the last on which it counted.
    touch -c "$target/.now/.." || :
    mv -T "$target/.sent/now.$owner" "$target/.now"
done
for one in $trees; do
    split "$one"
    settle "$target"
done
"""
)

NEW = (
    COMMON
    + r"""
[ ! -e "$1" ] || fail "$1 is there already"
begin "${1%/*}"
tar -xpof -
require 0 "$2"
mv -T 0/tree "$1"
"""
)

REMOVE = r"""
[ -e "$1" ] || [ -L "$1" ] || exit 0
rm -rf "$1" 2>/dev/null || { chmod -R u+rwx "$1" 2>/dev/null; rm -rf "$1"; } || exit
rmdir "$2" 2>/dev/null || :
"""

FETCH = r"""
cd "$1" || exit 3
exec tar -cf - .
"""

LISTS: tuple[tuple[str, Kind], ...] = (("dirs", "dir"), ("files", "file"), ("links", "link"))
NAMES = "names"


@dataclass(frozen=True, slots=True)
class Part:
    """One tree on its way, and what the host shows in its place."""

    name: str
    tree: Tree
    there: frozenset[Entry] = frozenset()

    @property
    def new(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.tree.entries if entry not in self.there)


def stream(parts: Iterable[Part]) -> Iterator[bytes]:
    """A tar stream of the trees, each below its number; what is there comes as hard links into ``before/<number>``.

    HostError for a file that cannot be read any more.
    """
    for number, part in enumerate(parts):
        for name, kind in LISTS:
            names = part.tree.names[kind]
            yield header(f"{number}/{name}", tarfile.REGTYPE, 0o600, size=len(names))
            yield names + padding(len(names))
        yield header(f"{number}/tree", tarfile.DIRTYPE, 0o700)
        for entry in part.tree.entries:
            yield from _member(part, entry, f"{number}/tree/{entry.path}")
    yield END


def _member(part: Part, entry: Entry, name: str) -> Iterator[bytes]:
    if entry.kind == "dir":
        yield header(name, tarfile.DIRTYPE, entry.mode)
    elif entry.kind == "link":
        yield header(name, tarfile.SYMTYPE, entry.mode, link=entry.content)
    elif entry in part.there:
        yield header(name, tarfile.LNKTYPE, entry.mode, link=f"before/{name}")
    else:
        yield from _file(part.tree.root / entry.path, entry, name)


def _file(path: Path, entry: Entry, name: str) -> Iterator[bytes]:
    """As many bytes as the entry says: of a file that has changed since, the host finds that they are not its own."""
    left = entry.size
    try:
        with path.open("rb", buffering=0) as source:
            yield header(name, tarfile.REGTYPE, entry.mode, size=left, time=os.fstat(source.fileno()).st_mtime)
            while left and (piece := source.read(min(left, PIECE))):
                left -= len(piece)
                yield piece
    except OSError as error:
        raise HostError(f"cannot read {path}: {error.strerror}", hint="the same command again") from error
    yield bytes(left)
    yield padding(entry.size)


def lay_out(stage: Path, parts: Iterable[Part]) -> None:
    """Lay out the same in an empty directory for rsync, with the list of all that it is to take, each ended by NUL."""
    taken = b""
    for number, part in enumerate(parts):
        folder = stage / str(number)
        folder.mkdir()
        (folder / "tree").symlink_to(part.tree.root)
        for name, kind in LISTS:
            (folder / name).write_bytes(part.tree.names[kind])
            taken += os.fsencode(f"{number}/{name}\0")
        taken += b"".join(os.fsencode(f"{number}/tree/{entry.path}\0") for entry in part.tree.entries)
    (stage / NAMES).write_bytes(taken)


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
    done = connection.send(NEW, directory, tree.digest, chunks=stream(parts), timeout=seconds, check=False)
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
        hint = f"{ssh_errors.command(connection.target, '-t')} sudo rm -r {shlex.quote(directory)}"
        raise ssh_errors.error(connection.target, f"cannot remove {directory}: {reason(done)}", hint)


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


def _fill(
    connection: Connection, directory: str, parts: tuple[Part, ...], *, rsync: bool, seconds: float
) -> CompletedProcess:
    words = (directory, _words(parts))
    if not rsync:
        return connection.send(FILL, "tar", *words, chunks=stream(parts), timeout=seconds, check=False)
    with TemporaryDirectory() as stage:
        lay_out(Path(stage), parts)
        try:
            return process.run(_rsync(connection, Path(stage), words), timeout=seconds, check=False)
        except process.ProcessTimeout as error:
            text = f"cannot write {directory}: rsync is not done within {seconds:.0f} s"
            raise ssh_errors.error(connection.target, text) from error


def _rsync(connection: Connection, stage: Path, words: tuple[str, ...]) -> tuple[str, ...]:
    """The command that fills by rsync; the host's end of it is started by the script that fills by tar."""
    # The last word of the ssh command is what the host's shell reads; rsync adds its own arguments to that.
    there = connection.argv(FILL, "rsync", *words)[-1]
    name = ssh_errors.destination(connection.target)
    return (
        "rsync",
        # Contents are compared, as a date may lie; of a directory no more is sent than what is named.
        *("--checksum", "--links", "--perms", "--times", "--dirs", "--no-implied-dirs", "--chmod=Du+rwx,ugo-s,-t"),
        *("--link-dest=before", "--from0", f"--files-from={stage / NAMES}"),
        *("--rsh", connection.rsh(), f"--rsync-path={there}"),
        *(f"{stage}/", f"[{name}]:." if ":" in name else f"{name}:."),
    )


def _require(done: CompletedProcess, connection: Connection, directory: str) -> None:
    """HostError unless it was done."""
    if done.code != 0:
        why = reason(done)
        look = "df -h" if "No space left" in why or "quota" in why else "ls -ld"
        hint = f"{ssh_errors.command(connection.target)} {look} {shlex.quote(directory)}"
        raise ssh_errors.error(connection.target, f"cannot write {directory}: {why}", hint)


def reason(done: CompletedProcess) -> str:
    """What a script complained of first: what follows only follows from it."""
    lines = (line for line in done.err.splitlines() if line.strip() and "in the future" not in line)
    return next(lines, f"exit code {done.code}")
