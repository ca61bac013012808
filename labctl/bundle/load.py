"""Loads a bundle: verifies it, writes its files, and sends its cache to hosts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from labctl.bundle.contents import NODES
from labctl.bundle.format import AGAIN, Bundle, BundleEntry
from labctl.config import settings
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError
from labctl.hosts.ssh import Connection
from labctl.images.archive import ArchiveStream, Range, report
from labctl.images.distribute import Emit, Failures
from labctl.images.remote import ASKING, MOVING, failed
from labctl.model import Event
from labctl.system.files import make_private
from labctl.system.parallel import map_hosts
from labctl.system.progress import Progress
from labctl.system.tar import END, member_header, padding

Notice = Callable[[str], None]
LOCKS = ".lab/bundle"
"""Directory of the images' lock files, relative to the lab directory."""


def checked(path: Path, notice: Notice) -> Bundle:
    """Open and verify a bundle. ConfigError, HostError if it is damaged."""
    bundle = Bundle(path)
    progress = Progress(f"checking {path.name}", bundle.size, 0, notice)
    bundle.check(progress.advance)
    require_lab(bundle)
    return bundle


def require_lab(bundle: Bundle) -> None:
    """HostError unless its metadata is complete and it has a .env."""
    about, env = bundle.about, bundle.below("lab").get(".env")
    images, left_out = about.get("images"), about.get("left_out")
    if (
        not all(isinstance(about.get(key), str) for key in ("lab", "written", "labctl"))
        or not (isinstance(images, list) and all(isinstance(one, str) for one in images))
        or not isinstance(left_out, list)
    ):
        raise HostError(f"{bundle.path} does not say which lab it holds", hint=AGAIN)
    if env is None or env.target:
        raise HostError(f"{bundle.path} holds no .env: it is not a lab's", hint=AGAIN)


def settings_of(bundle: Bundle, environ: Mapping[str, str], flags: Mapping[str, str]) -> settings.Settings:
    """The settings of the lab in the bundle, with this environment and flags."""
    with tempfile.TemporaryDirectory(prefix="labctl-") as folder:
        copy(bundle, bundle.below("lab")[".env"], Path(folder, ".env"))
        return settings.load(Path(folder), environ, flags)


def of_lab(bundle: Bundle, directory: Path, *, force: bool) -> dict[Path, BundleEntry]:
    """The files to write for the lab, by path. ConfigError if that would change files, unless forced.

    Existing node directories are kept, with the keys that no bundle contains.
    """
    wanted = {directory / name: member for name, member in bundle.below("lab").items()}
    wanted |= {directory / LOCKS / name: member for name, member in bundle.below("locks").items()}
    if (directory / NODES).exists():
        wanted = {path: member for path, member in wanted.items() if not path.is_relative_to(directory / NODES)}
    missing = {path: member for path, member in wanted.items() if not holds(bundle, member, path)}
    others = sorted(str(path.relative_to(directory)) for path in missing if os.path.lexists(path))
    if others and not force:
        few = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise ConfigError(
            f"{directory} has other content than the bundle: {few}",
            hint="load it into another directory, or --force to replace those files",
        )
    for path in missing:
        require_no_link(path, directory)
    return missing


def of_cache(bundle: Bundle, cache: Path) -> dict[Path, BundleEntry]:
    """The cache files to write, by path; existing ones are kept."""
    wanted = {cache / name: member for name, member in bundle.below("cache").items()}
    missing = {path: member for path, member in wanted.items() if not os.path.lexists(path)}
    for path in missing:
        require_no_link(path, cache)
    return missing


def require_no_link(path: Path, root: Path) -> None:
    """HostError if a parent of the path below the root is a link."""
    for parent in path.parents:
        if parent == root:
            return
        if parent.is_symlink():
            raise HostError(
                f"cannot write {path}: {parent} is a link", hint=f"put a directory in its place: ls -ld {parent}"
            )


def write(bundle: Bundle, wanted: Mapping[Path, BundleEntry], root: Path, progress: Progress | None = None) -> None:
    """Write these files, each atomically. HostError names the one that cannot be written."""
    for path, member in wanted.items():
        require_no_link(path, root)
        make_private(path.parent)
        try:
            copy(bundle, member, path)
        except OSError as error:
            raise HostError(
                f"cannot write {path}: {error.strerror}", hint=f"ls -ld {path.parent}; df -h {path.parent}"
            ) from error
        if progress:
            progress.advance(member.size)


def copy(bundle: Bundle, member: BundleEntry, path: Path) -> None:
    """Write a member to a path, atomically."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
        new = Path(folder, "file")
        if member.target:
            new.symlink_to(member.target)
        else:
            with new.open("wb") as stream:
                stream.writelines(bundle.chunks(member))
            new.chmod(member.mode & 0o777)
        new.replace(path)


def holds(bundle: Bundle, member: BundleEntry, path: Path) -> bool:
    """Whether a path has the content of a member."""
    if member.target:
        return path.is_symlink() and str(path.readlink()) == member.target
    if path.is_symlink() or not path.is_file() or path.stat().st_size != member.size:
        return False
    with path.open("rb") as file:
        return all(file.read(len(piece)) == piece for piece in bundle.chunks(member))


SCRIPT = Path(__file__).with_name("cache.sh").read_text(encoding="utf-8")


def cache(bundle: Bundle, found: Settings, hosts: Mapping[str, Connection], emit: Emit) -> Failures:
    """Send the bundle's cache to hosts in parallel; returns the failures."""
    members = bundle.below("cache")
    if not members:
        return {}
    folder = place(found)

    def bring(connection: Connection) -> None:
        listed = connection.run(SCRIPT, folder, "list", timeout=ASKING, check=False)
        if listed.code != 0:
            raise failed(connection, f"cannot use its cache {folder}", listed.err, "ls -ld ~/.cache/labctl; df -h")
        there = {line.removeprefix("./") for line in listed.out.splitlines()}
        lacking = {name: member for name, member in members.items() if name not in there}
        if lacking:
            unpack(connection, folder, cargo(bundle, lacking), emit)

    return map_hosts(bring, hosts)[1]


def place(found: Settings) -> str:
    """HOST_CACHE_PATH on a host: relative to the home there if it is below the home here."""
    path = Path(found.text("HOST_CACHE_PATH"))
    return str(path.relative_to(found.home)) if path.is_relative_to(found.home) else str(path)


def cargo(bundle: Bundle, members: Mapping[str, BundleEntry]) -> ArchiveStream:
    """A tar archive of these members."""
    parts: list[bytes | Range] = []
    for name, member in members.items():
        parts.append(member_header(name, member.size, member.mode, member.target))
        if not member.target:
            parts += [Range(member.offset, member.size), padding(member.size)]
    return ArchiveStream(path=bundle.path, parts=(*parts, END))


def unpack(connection: Connection, folder: str, cargo: ArchiveStream, emit: Emit) -> None:
    """Send an archive and unpack it in a directory. HostError if it is incomplete."""
    host = connection.target.name

    def notice(text: str) -> None:
        emit(Event(kind="notice", text=text, node=host))

    progress = Progress(f"{host}: cache", cargo.size, 0, notice)
    chunks = report(cargo.chunks(), progress)
    done = connection.send(SCRIPT, folder, "unpack", chunks=chunks, timeout=MOVING)
    if done.code != 0:
        raise failed(connection, "the cache did not come whole", done.err, "df -h")
    progress.finish()
