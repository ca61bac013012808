"""Load a bundle: verify it, write its files, and load its images and cache on this machine or the lab's hosts."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath

from msgspec import Struct
from msgspec.structs import replace

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
from labctl.system import filelock, human
from labctl.system.files import make_private, require_room, room_at
from labctl.system.parallel import map_hosts
from labctl.system.progress import Progress
from labctl.system.tar import END, member_header, padding

Notice = Callable[[str], None]
LOCKS = ".lab/bundle"
"""Directory of the images' lock files, relative to the lab directory."""
CACHE = "HOST_CACHE_PATH"
OWN = frozenset({*mount_sources.EXAMPLES, "LAB_PORTS"})
"""Settings that mount host directories or publish ports: a bundle must not set them."""
MAKEFILES = frozenset({"makefile", "gnumakefile"})
HARMLESS = frozenset({".gitignore", ".gitkeep", ".dockerignore"})
"""Names of dot files that no program executes."""
ABOUT = {"lab": str, "written": str, "labctl": str, "images": list, "left_out": list}
"""Types of the metadata that every bundle of a lab has."""


class LoadedBundle(Struct, frozen=True, kw_only=True):
    """Result of loading a bundle into a directory: the files that were written, and the hosts that failed."""

    lab: str
    images: tuple[str, ...]
    created: str
    labctl: str
    excluded: tuple[ExcludedFile, ...]
    directory: str
    files: tuple[str, ...]
    failed: tuple[HostFailure, ...]
    skipped: tuple[str, ...] = ()
    """Files that programs of this machine may execute, which the user did not accept."""
    cache: str = ""
    """Directory of the cache, on each host; empty if the bundle has none."""
    cache_files: int = 0


def load_bundle(
    context: Context, file: Path, *, force: bool = False, ask: Callable[[str], bool] | None = None
) -> LoadedBundle:
    """Verify a bundle, unpack it and its cache here; load its images here, or send both to the lab's remote hosts.

    The whole bundle is verified before anything is changed. Files that programs of this machine may execute are written
    only if ``ask`` returns True.
    """
    bundle = checked(file, context.notice)
    with tempfile.TemporaryDirectory(prefix="labctl-") as folder:
        env, dropped = own_settings(bundle, Path(folder, ".env"), context.flags)
        if dropped:
            context.warn(
                f"settings left out: {human.listed(dropped, len(dropped))}, which mount directories or publish "
                f"ports of this machine; set your own in {context.directory / '.env'}"
            )
        settings = config.load(Path(folder), context.environ, context.flags)
        cache = Path(settings.text(CACHE))
        files = of_lab(bundle, env, context.directory, force=force)
        cached = of_cache(bundle, cache)
        if outside := sorted(bundle.below("cache").keys() - cached_in(bundle).keys()):
            context.warn(f"not written: {human.listed(outside, 3)}: only {' and '.join(CACHED)} belong in a cache")
        skipped = unwanted(files, context, ask)
        files = {path: member for path, member in files.items() if path not in skipped}
        to_write = {**files, **cached}
        require_room("the bundle", [(room_at(path), len(member.content)) for path, member in to_write.items()])
        if cached:
            make_root(cache)
        with filelock.held(context.directory / filelock.LAB, "labctl bundle load"):
            write(files, context.directory)
    if cached:
        progress = Progress("cache", sum(len(member.content) for member in cached.values()), 0, context.notice)
        write(cached, cache, progress)
        progress.finish()
    failures = hand_out(context, bundle, settings)
    loaded = summary(bundle, context.directory, files, skipped)
    failed = [HostFailure(host=host, message=error.message, hint=error.hint) for host, error in failures.items()]
    return replace(loaded, failed=tuple(failed), cache=str(cache) if cached_in(bundle) else "", cache_files=len(cached))


def summary(bundle: Bundle, directory: Path, files: Iterable[Path], skipped: Iterable[Path]) -> LoadedBundle:
    """Return the result of loading a bundle, without its cache and hosts; paths are relative to the directory."""
    about = bundle.about
    excluded = [ExcludedFile(entry["what"], entry["why"]) for entry in about["left_out"]]
    return LoadedBundle(
        lab=about["lab"],
        images=tuple(about["images"]),
        created=about["written"],
        labctl=about["labctl"],
        excluded=tuple(excluded),
        directory=str(directory),
        files=relative_names(files, directory),
        failed=(),
        skipped=relative_names(skipped, directory),
    )


def relative_names(paths: Iterable[Path], directory: Path) -> tuple[str, ...]:
    """Return the paths relative to a directory, as text."""
    return tuple(str(path.relative_to(directory)) for path in paths)


def checked(path: Path, notice: Notice) -> Bundle:
    """Open and verify a bundle of a lab. ConfigError if it cannot be read, HostError if it is damaged or of no lab."""
    bundle = Bundle(path)
    bundle.check(notice)
    about = bundle.about
    complete = all(isinstance(about.get(key), kind) for key, kind in ABOUT.items())
    if not complete or not all(isinstance(image, str) for image in about["images"]):
        raise HostError(f"{path} does not say which lab it holds", hint=AGAIN)
    env = bundle.below("lab").get(".env")
    if env is None or env.target:
        raise HostError(f"{path} has no .env, so it is not the bundle of a lab", hint=AGAIN)
    require_saved(bundle)
    return bundle


def own_settings(bundle: Bundle, path: Path, chosen: Mapping[str, str]) -> tuple[BundleEntry, tuple[str, ...]]:
    """Write the bundle's .env to a path, mounts and ports only from ``chosen``; return the entry and the dropped keys.

    Settings that are not chosen are commented out.
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
    """Return the text of the bundle's .env. HostError if it is not UTF-8."""
    try:
        return b"".join(bundle.below("lab")[".env"].content.chunks()).decode("utf-8")
    except UnicodeDecodeError as error:
        raise HostError(f"{bundle.path}: .env in it is not UTF-8", hint="do not use this file") from error


def require_saved(bundle: Bundle) -> None:
    """Raise HostError if the bundle has a file that `labctl bundle save` never writes."""
    values = {entry.key: entry.value for entry in dotenv.parse(settings_of(bundle), ".env")}
    single = {".env", values.get("LAB_HOSTS"), values.get("LAB_REQUIREMENTS")}
    folders = (*FOLDERS, *folder_of_dockerfile(values.get("LAB_DOCKERFILE", "")))
    prefixes = tuple(f"{folder}/" for folder in folders)
    files = bundle.below("lab")
    odd = [f"lab/{name}" for name in files if name not in single and not name.startswith(prefixes)]
    odd += [f"lab/{name}" for name in files if SKIPPED & {*PurePosixPath(name).parts} or is_override(name)]
    odd += [f"locks/{name}" for name in bundle.below("locks") if not re.fullmatch(r"[\w.-]+\.lock", name)]
    if odd:
        raise HostError(f"{bundle.path}: `{odd[0]}` does not belong in a lab", hint="do not use this file")


def unwanted(files: Iterable[Path], context: Context, ask: Callable[[str], bool] | None) -> tuple[Path, ...]:
    """Ask to write files that programs such as editors and make may execute; return these files if not accepted."""
    risky = tuple(path for path in files if may_run(path.relative_to(context.directory).as_posix()))
    if not risky:
        return ()
    names = human.listed(relative_names(risky, context.directory), len(risky))
    risk = f"programs of this machine, such as editors, may run what is in {names}"
    if ask is None:
        context.warn(f"not written: {risk} (--yes writes it)")
    elif ask(f"{risk}. Write it?"):
        return ()
    return risky


def may_run(name: str) -> bool:
    """Tell if programs look for a file of this name and may execute it: most such names begin with a dot."""
    if name == ".env" or name.startswith((f"{NODES}/", f"{LOCKS}/")):
        return False
    parts = PurePosixPath(name.lower()).parts
    return any(part.startswith(".") and part not in HARMLESS for part in parts) or parts[-1] in MAKEFILES


def of_lab(bundle: Bundle, env: BundleEntry, directory: Path, *, force: bool) -> dict[Path, BundleEntry]:
    """Return the lab's missing or differing files to write, by path. ConfigError if one differs, unless ``force``.

    Existing node directories are kept: they have the keys, which no bundle contains.
    """
    members = {directory / name: member for name, member in {**bundle.below("lab"), ".env": env}.items()}
    members |= {directory / LOCKS / name: member for name, member in bundle.below("locks").items()}
    if (directory / NODES).exists():
        members = {path: member for path, member in members.items() if not path.is_relative_to(directory / NODES)}
    missing = {path: member for path, member in members.items() if not holds(member, path)}
    others = sorted(str(path.relative_to(directory)) for path in missing if os.path.lexists(path))
    if others and not force:
        raise ConfigError(
            f"files in {directory} differ from those of the bundle: {human.listed(others, 3)}",
            hint="load it into another directory, or --force to replace those files",
        )
    for path in missing:
        require_no_link(path, directory)
    return missing


def of_cache(bundle: Bundle, cache: Path) -> dict[Path, BundleEntry]:
    """Return the cache files to write, by path; existing ones are kept. HostError for a link in the way."""
    members = {cache / name: member for name, member in cached_in(bundle).items()}
    missing = {path: member for path, member in members.items() if not os.path.lexists(path)}
    for path in missing:
        require_no_link(path, cache)
    return missing


def cached_in(bundle: Bundle) -> dict[str, BundleEntry]:
    """Return the models and data sets of the bundle; its other cache members are ignored."""
    return {name: member for name, member in bundle.below("cache").items() if name.startswith(CACHED)}


def require_no_link(path: Path, root: Path) -> None:
    """Raise HostError if a parent of the path, below the root, is a symbolic link."""
    for parent in path.parents:
        if parent == root:
            return
        if parent.is_symlink():
            raise HostError(
                f"cannot write {path}: {parent} is a link", hint=f"put a directory in its place: ls -ld {parent}"
            )


def write(members: Mapping[Path, BundleEntry], root: Path, progress: Progress | None = None) -> None:
    """Write members below a directory, each atomically. HostError for a link in the way or a failed write."""
    for path, member in members.items():
        # Checked again: the bundle itself may just have written such a link.
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
    """Tell if a path already has the content of a member."""
    if member.target:
        return path.is_symlink() and str(path.readlink()) == member.target
    if path.is_symlink() or not path.is_file() or path.stat().st_size != len(member.content):
        return False
    with path.open("rb") as file:
        return all(file.read(len(piece)) == piece for piece in member.content.chunks())


def hand_out(context: Context, bundle: Bundle, settings: Settings) -> Failures:
    """Load the images here or, if the lab has remote hosts, send images and cache to those; return host failures."""
    archive = Archive(bundle.path)
    with cluster.connect(context, settings) as connected:
        if not connected.remote_hosts:
            for image in bundle.about["images"]:
                local.load(archive, image, context.notice)
            return {}
        failures = dict(connected.failed)

        def left() -> dict[str, Connection]:
            """Return the hosts that have not failed so far."""
            return {host: link for host, link in connected.remote_hosts.items() if host not in failures}

        for image in bundle.about["images"]:
            failures |= distribute.hand_out(
                archive, image, ImageTargets(hosts=left(), notice=context.notice, addresses={})
            )
        return failures | send_cache(bundle, settings, left(), context.notice)


def send_cache(bundle: Bundle, settings: Settings, hosts: Mapping[str, Connection], notice: Notice) -> Failures:
    """Send hosts the cache files that they do not have, in parallel; return failures by host."""
    members = cached_in(bundle)
    if not members:
        return {}
    folder = host_caches.folder_on_hosts(settings)

    def bring(connection: Connection) -> None:
        """Send a host the cache files that it does not have."""
        _, present = host_caches.read(connection, folder)
        missing = {name: member for name, member in members.items() if name not in present}
        if missing:
            unpack(connection, folder, cargo(missing), notice)

    return map_hosts(bring, hosts)[1]


def cargo(members: Mapping[str, BundleEntry]) -> ArchiveStream:
    """Build a tar archive of members, to stream."""
    parts: list[bytes | Range] = []
    for name, member in members.items():
        size = len(member.content)
        parts += [member_header(name, size, member.mode, member.target), member.content, padding(size)]
    return ArchiveStream(parts=(*parts, END))


def unpack(connection: Connection, folder: str, cargo: ArchiveStream, notice: Notice) -> None:
    """Stream an archive to a host and unpack it in a directory. HostError if it is incomplete."""
    progress = Progress(f"{connection.target.name}: cache", cargo.size, 0, notice)
    host_caches.unpack(connection, folder, report(cargo.chunks(), progress))
    progress.finish()
