"""Loads a bundle: verifies it, writes its files, and brings its images and cache to hosts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from labctl.bundle.format import AGAIN, Bundle, BundleEntry
from labctl.bundle.save import NODES, ExcludedFile
from labctl.config import settings as config
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError
from labctl.hosts.ssh import Connection
from labctl.hub.prefetch import make_root
from labctl.images import distribute, local
from labctl.images.archive import Archive, ArchiveStream, Range, report
from labctl.images.distribute import Failures, ImageTargets
from labctl.images.remote import ASKING, MOVING, failed
from labctl.lab import cluster
from labctl.model import HostFailure
from labctl.system import filelock
from labctl.system.files import make_private, require_room, room_at
from labctl.system.parallel import map_hosts
from labctl.system.progress import Progress, listed
from labctl.system.tar import END, member_header, padding

Notice = Callable[[str], None]
LOCKS = ".lab/bundle"
"""Directory of the images' lock files, relative to the lab directory."""
ABOUT = {"lab": str, "written": str, "labctl": str, "images": list, "left_out": list}
"""What every bundle of a lab says of itself."""
SCRIPT = Path(__file__).with_name("cache.sh").read_text(encoding="utf-8")


class LoadedBundle(Struct, frozen=True, kw_only=True):
    """A bundle that was unpacked into a directory: the files that were written, and the hosts that failed."""

    lab: str
    images: tuple[str, ...]
    created: str
    labctl: str
    excluded: tuple[ExcludedFile, ...]
    directory: str
    files: tuple[str, ...]
    failed: tuple[HostFailure, ...]


def load_bundle(context: Context, file: Path, *, force: bool = False) -> LoadedBundle:
    """Unpack a bundle into the context's directory, and load its images into Docker here or on the lab's hosts.

    The whole bundle is verified before anything is changed.
    """
    bundle = checked(file, context.notice)
    with tempfile.TemporaryDirectory(prefix="labctl-") as folder:
        Path(folder, ".env").write_bytes(b"".join(bundle.below("lab")[".env"].content.chunks()))
        settings = config.load(Path(folder), context.environ, context.flags)
    cache = Path(settings.text("HOST_CACHE_PATH"))
    files, cached = of_lab(bundle, context.directory, force=force), of_cache(bundle, cache)
    wanted = {**files, **cached}
    require_room("the bundle", [(room_at(path), len(member.content)) for path, member in wanted.items()])
    if cached:
        make_root(cache)
    with filelock.held(context.directory / filelock.LAB, "labctl bundle load"):
        write(files, context.directory)
    if cached:
        progress = Progress("cache", sum(len(member.content) for member in cached.values()), 0, context.notice)
        write(cached, cache, progress)
        progress.finish()
    failures = hand_out(context, bundle, settings)
    about = bundle.about
    return LoadedBundle(
        lab=about["lab"],
        images=tuple(about["images"]),
        created=about["written"],
        labctl=about["labctl"],
        excluded=tuple(ExcludedFile(entry["what"], entry["why"]) for entry in about["left_out"]),
        directory=str(context.directory),
        files=tuple(str(path.relative_to(context.directory)) for path in files),
        failed=tuple(
            HostFailure(host=host, message=error.message, hint=error.hint) for host, error in failures.items()
        ),
    )


def checked(path: Path, notice: Notice) -> Bundle:
    """Open and verify a bundle of a lab. ConfigError, HostError if it is damaged."""
    bundle = Bundle(path)
    bundle.check(notice)
    about = bundle.about
    whole = all(isinstance(about.get(key), kind) for key, kind in ABOUT.items())
    if not whole or not all(isinstance(image, str) for image in about["images"]):
        raise HostError(f"{path} does not say which lab it holds", hint=AGAIN)
    env = bundle.below("lab").get(".env")
    if env is None or env.target:
        raise HostError(f"{path} holds no .env: it is not a lab's", hint=AGAIN)
    return bundle


def of_lab(bundle: Bundle, directory: Path, *, force: bool) -> dict[Path, BundleEntry]:
    """The files to write for the lab, by path. ConfigError if that would change files, unless forced.

    Existing node directories are kept, with the keys that no bundle contains.
    """
    wanted = {directory / name: member for name, member in bundle.below("lab").items()}
    wanted |= {directory / LOCKS / name: member for name, member in bundle.below("locks").items()}
    if (directory / NODES).exists():
        wanted = {path: member for path, member in wanted.items() if not path.is_relative_to(directory / NODES)}
    missing = {path: member for path, member in wanted.items() if not holds(member, path)}
    others = sorted(str(path.relative_to(directory)) for path in missing if os.path.lexists(path))
    if others and not force:
        raise ConfigError(
            f"{directory} has other content than the bundle: {listed(others, 3)}",
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


def write(wanted: Mapping[Path, BundleEntry], root: Path, progress: Progress | None = None) -> None:
    """Write these files below a directory, each atomically. HostError names the one that cannot be written."""
    for path, member in wanted.items():
        # A link of the bundle itself may be such a parent by now.
        require_no_link(path, root)
        make_private(path.parent)
        try:
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
                new = Path(folder, "file")
                if member.target:
                    new.symlink_to(member.target)
                else:
                    with new.open("wb") as stream:
                        stream.writelines(member.content.chunks())
                    new.chmod(member.mode & 0o777)
                new.replace(path)
        except OSError as error:
            raise HostError(
                f"cannot write {path}: {error.strerror}", hint=f"ls -ld {path.parent}; df -h {path.parent}"
            ) from error
        if progress:
            progress.advance(len(member.content))


def holds(member: BundleEntry, path: Path) -> bool:
    """Whether a path has the content of a member."""
    if member.target:
        return path.is_symlink() and str(path.readlink()) == member.target
    if path.is_symlink() or not path.is_file() or path.stat().st_size != len(member.content):
        return False
    with path.open("rb") as file:
        return all(file.read(len(piece)) == piece for piece in member.content.chunks())


def hand_out(context: Context, bundle: Bundle, settings: Settings) -> Failures:
    """Load the images into Docker here, or send them and the cache to the lab's hosts."""
    archive = Archive(bundle.path)
    with cluster.connect(context, settings) as where:
        if not where.remote_hosts:
            for image in bundle.about["images"]:
                local.load(archive, image, context.notice)
            return {}
        failures = dict(where.failed)

        def left() -> dict[str, Connection]:
            return {host: one for host, one in where.remote_hosts.items() if host not in failures}

        for image in bundle.about["images"]:
            failures |= distribute.hand_out(
                archive, image, ImageTargets(hosts=left(), notice=context.notice, addresses={})
            )
        return failures | send_cache(bundle, settings, left(), context.notice)


def send_cache(bundle: Bundle, settings: Settings, hosts: Mapping[str, Connection], notice: Notice) -> Failures:
    """Send the bundle's cache to hosts in parallel; returns the failures."""
    members = bundle.below("cache")
    if not members:
        return {}
    folder = Path(settings.text("HOST_CACHE_PATH"))
    if folder.is_relative_to(settings.home):
        folder = folder.relative_to(settings.home)

    def bring(connection: Connection) -> None:
        found = connection.run(SCRIPT, str(folder), "list", timeout=ASKING, check=False)
        if found.code != 0:
            raise failed(connection, f"cannot use its cache {folder}", found.err, "ls -ld ~/.cache/labctl; df -h")
        there = {line.removeprefix("./") for line in found.out.splitlines()}
        lacking = {name: member for name, member in members.items() if name not in there}
        if lacking:
            unpack(connection, str(folder), cargo(lacking), notice)

    return map_hosts(bring, hosts)[1]


def cargo(members: Mapping[str, BundleEntry]) -> ArchiveStream:
    """A tar archive of these members."""
    parts: list[bytes | Range] = []
    for name, member in members.items():
        size = len(member.content)
        parts += [member_header(name, size, member.mode, member.target), member.content, padding(size)]
    return ArchiveStream(parts=(*parts, END))


def unpack(connection: Connection, folder: str, cargo: ArchiveStream, notice: Notice) -> None:
    """Send an archive and unpack it in a directory. HostError if it is incomplete."""
    progress = Progress(f"{connection.target.name}: cache", cargo.size, 0, notice)
    chunks = report(cargo.chunks(), progress)
    done = connection.send(SCRIPT, folder, "unpack", chunks=chunks, timeout=MOVING)
    if done.code != 0:
        raise failed(connection, "the cache did not come whole", done.err, "df -h")
    progress.finish()
