"""Loads a bundle: verifies it, writes its files, and brings its images and cache to hosts."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

from msgspec import Struct

from labctl.backends.docker.deploy import cache as host_caches
from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.docker.images import distribute, local
from labctl.backends.docker.images.archive import Archive, ArchiveStream, Range, report
from labctl.backends.docker.images.distribute import Failures, ImageTargets
from labctl.backends.docker.lab import cluster
from labctl.bundle.format import AGAIN, Bundle, BundleEntry
from labctl.bundle.save import CACHED, FOLDERS, NODES, SKIPPED, ExcludedFile, folder_of_dockerfile, is_override
from labctl.config import dotenv, mount_sources
from labctl.config import settings as config
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError
from labctl.hub.prefetch import make_root
from labctl.model import HostFailure
from labctl.system import filelock
from labctl.system.files import make_private, require_room, room_at
from labctl.system.parallel import map_hosts
from labctl.system.progress import Progress, listed
from labctl.system.tar import END, member_header, padding

Notice = Callable[[str], None]
LOCKS = ".lab/bundle"
"""Directory of the images' lock files, relative to the lab directory."""
CACHE = "HOST_CACHE_PATH"
OWN = frozenset({*mount_sources.EXAMPLES, "LAB_PORTS"})
"""Settings that open this machine to containers or its ports to others, which no bundle chooses."""
MAKEFILES = frozenset({"makefile", "gnumakefile"})
HARMLESS = frozenset({".gitignore", ".gitkeep", ".dockerignore"})
"""Names that begin with a dot, of files that nothing runs."""
ABOUT = {"lab": str, "written": str, "labctl": str, "images": list, "left_out": list}
"""What every bundle of a lab says of itself."""


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
    skipped: tuple[str, ...] = ()
    """Files that programs of this machine may run, and that nobody wanted."""
    cache: str = ""
    """Where the cache is, if the bundle has one; on each host."""
    cache_files: int = 0


def load_bundle(
    context: Context, file: Path, *, force: bool = False, ask: Callable[[str], bool] | None = None
) -> LoadedBundle:
    """Unpack a bundle into the context's directory, and load its images into Docker here or on the lab's hosts.

    The whole bundle is verified before anything is changed. Files that programs of this machine may run are written
    only if ``ask`` says yes.
    """
    bundle = checked(file, context.notice)
    with tempfile.TemporaryDirectory(prefix="labctl-") as folder:
        env, dropped = own_settings(bundle, Path(folder, ".env"), context.flags)
        if dropped:
            context.warn(
                f"not taken from the bundle: {listed(dropped, len(dropped))}, which open this machine: "
                f"those that this machine has go into {context.directory / '.env'}"
            )
        settings = config.load(Path(folder), context.environ, context.flags)
        cache = Path(settings.text(CACHE))
        files, cached = of_lab(bundle, env, context.directory, force=force), of_cache(bundle, cache)
        if outside := sorted(bundle.below("cache").keys() - cached_in(bundle).keys()):
            context.warn(f"not written: {listed(outside, 3)}: only {' and '.join(CACHED)} go into a cache")
        skipped = unwanted(files, context, ask)
        files = {path: member for path, member in files.items() if path not in skipped}
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
        skipped=tuple(str(path.relative_to(context.directory)) for path in skipped),
        cache=str(cache) if cached_in(bundle) else "",
        cache_files=len(cached),
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
    require_saved(bundle)
    return bundle


def own_settings(bundle: Bundle, path: Path, chosen: Mapping[str, str]) -> tuple[BundleEntry, tuple[str, ...]]:
    """The bundle's .env, written to a path, with the directories that are mounted as the person chose them.

    Otherwise they are this machine's own; returns the settings that were dropped, too.
    """
    lines = settings_of(bundle).split("\n")
    dropped: dict[str, None] = {}
    for entry in dotenv.parse("\n".join(lines), path.name):
        if entry.key in OWN and chosen.get(entry.key):
            lines[entry.line - 1] = f"{entry.key}={dotenv.quote(chosen[entry.key])}"
        elif entry.key in OWN:
            lines[entry.line - 1] = f"# {entry.key}: this machine's own"
            dropped[entry.key] = None
    size = path.write_bytes("\n".join(lines).encode())
    return BundleEntry(content=Range(path, 0, size), mode=bundle.below("lab")[".env"].mode), tuple(dropped)


def settings_of(bundle: Bundle) -> str:
    """The text of the bundle's .env. HostError if it is none."""
    try:
        return b"".join(bundle.below("lab")[".env"].content.chunks()).decode("utf-8")
    except UnicodeDecodeError as error:
        raise HostError(f"{bundle.path}: .env in it is not UTF-8", hint="do not use this file") from error


def require_saved(bundle: Bundle) -> None:
    """HostError if the bundle holds a file that no `labctl bundle save` writes."""
    named = {entry.key: entry.value for entry in dotenv.parse(settings_of(bundle), ".env")}
    known = {".env", named.get("LAB_HOSTS"), named.get("LAB_REQUIREMENTS")}
    folders = tuple(f"{one}/" for one in (*FOLDERS, *folder_of_dockerfile(named.get("LAB_DOCKERFILE", ""))))
    files = bundle.below("lab")
    odd = [f"lab/{name}" for name in files if name not in known and not name.startswith(folders)]
    odd += [f"lab/{name}" for name in files if SKIPPED & {*PurePosixPath(name).parts} or is_override(name)]
    odd += [f"locks/{name}" for name in bundle.below("locks") if not re.fullmatch(r"[\w.-]+\.lock", name)]
    if odd:
        raise HostError(f"{bundle.path}: `{odd[0]}` in it is no file of a lab", hint="do not use this file")


def unwanted(files: Iterable[Path], context: Context, ask: Callable[[str], bool] | None) -> tuple[Path, ...]:
    """Those files that programs of this machine may run, such as editors and make, unless the person wants them."""
    found = tuple(path for path in files if may_run(path.relative_to(context.directory).as_posix()))
    if not found:
        return ()
    names = listed((str(path.relative_to(context.directory)) for path in found), len(found))
    what = f"programs of this machine, such as editors, may run what is in {names}"
    if ask is None:
        context.warn(f"not written: {what} (--yes writes it)")
    elif ask(f"{what}. Write it?"):
        return ()
    return found


def may_run(name: str) -> bool:
    """Whether a file of the lab is one that programs look for by its name: most begin with a dot."""
    if name == ".env" or name.startswith((f"{NODES}/", f"{LOCKS}/")):
        return False
    parts = PurePosixPath(name.lower()).parts
    return any(part.startswith(".") and part not in HARMLESS for part in parts) or parts[-1] in MAKEFILES


def of_lab(bundle: Bundle, env: BundleEntry, directory: Path, *, force: bool) -> dict[Path, BundleEntry]:
    """The files to write for the lab, by path. ConfigError if that would change files, unless forced.

    Existing node directories are kept, with the keys that no bundle contains.
    """
    wanted = {directory / name: member for name, member in {**bundle.below("lab"), ".env": env}.items()}
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
    wanted = {cache / name: member for name, member in cached_in(bundle).items()}
    missing = {path: member for path, member in wanted.items() if not os.path.lexists(path)}
    for path in missing:
        require_no_link(path, cache)
    return missing


def cached_in(bundle: Bundle) -> dict[str, BundleEntry]:
    """The bundle's models and data; what else it would write into a cache is passed over."""
    return {name: member for name, member in bundle.below("cache").items() if name.startswith(CACHED)}


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
    members = cached_in(bundle)
    if not members:
        return {}
    folder = host_caches.folder_on_hosts(settings)

    def bring(connection: Connection) -> None:
        _, there = host_caches.read(connection, folder)
        lacking = {name: member for name, member in members.items() if name not in there}
        if lacking:
            unpack(connection, folder, cargo(lacking), notice)

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
    host_caches.unpack(connection, folder, report(cargo.chunks(), progress))
    progress.finish()
