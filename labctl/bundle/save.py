"""Save a lab as one file for offline use: its images, settings, workloads and, optionally, its cache."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct

from labctl import __version__
from labctl.backends.docker.deploy import images as prepare
from labctl.backends.docker.deploy.cache import is_data
from labctl.backends.docker.images import catalog, local, packages
from labctl.backends.docker.lab import cluster
from labctl.bundle.format import BundleWriter
from labctl.config import dotenv
from labctl.config import settings as config
from labctl.config.context import OF_THE_IMAGE, Context, require_initialised
from labctl.config.override import FILE as OVERRIDE
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError
from labctl.jobs import request
from labctl.naming import override_path
from labctl.system import human, process
from labctl.system.files import PASSWORDS, is_below, leads_out
from labctl.system.progress import Progress

NODES = ".lab/nodes"
FOLDERS = ("workloads", "hostfiles", NODES)
"""Folders of a lab directory to save, beside .env and the list of hosts."""
CACHED = ("datasets/", "huggingface/")
"""Folders of a cache to save."""
SKIPPED = frozenset({"__pycache__", ".git"})
KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----|^PuTTY-User-Key-File", re.MULTILINE)
HEAD = 1 << 20
"""Bytes at the beginning of a file to search for a private key."""
ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*\S")
LOGIN = re.compile(r"://\S*@|_proxy=\S*@|\bhf_[A-Za-z0-9]{8}", re.IGNORECASE)
"""Matches a URL with a password, and a token of the Hugging Face Hub."""


class Entry(Struct, frozen=True, kw_only=True):
    """A file to save, by its path in the lab directory: with a source (path or content), or the target of a link."""

    name: str
    mode: int = 0o644
    source: Path | bytes = b""
    target: str = ""

    def __repr__(self) -> str:
        return f"Entry({self.name!r})"  # without content, which may be secret


class ExcludedFile(Struct, frozen=True):
    """A file, or a setting of .env, that is not in the bundle, with the reason."""

    path: str
    reason: str


class SavedBundle(Struct, frozen=True, kw_only=True):
    """A bundle that was written, and its contents."""

    file: str
    bytes: int
    labctl: str
    lab: str
    images: tuple[str, ...]
    created: str
    cache: bool
    secrets: bool
    excluded: tuple[ExcludedFile, ...]


def save_bundle(
    context: Context, file: Path, *, workloads: Iterable[str] = (), cache: bool = False, secrets: bool = False
) -> SavedBundle:
    """Write the lab with the images of its nodes and of these workloads to a file, without secrets unless asked.

    HostError if an image is not found or the disk is full. An existing file is replaced atomically.
    """
    settings = context.settings()
    require_initialised(context)
    commands = build_commands(context, settings, workloads)
    images = tuple(commands)
    folder = Path(settings.text("HOST_CACHE_PATH"))
    if cache and not folder.is_dir():
        raise HostError(f"HOST_CACHE_PATH {folder} does not exist", hint="labctl cache WORKLOAD, or omit --with-cache")
    size = size_of_images(commands)
    if file.is_dir():
        raise ConfigError(f"{file} is a directory", hint=f"name a file in it: {shlex.quote(str(file / 'lab.bundle'))}")
    entries, excluded = of_lab(context.directory, secrets=secrets)
    excluded += not_cached(folder) if cache else []
    # Keys of the file format: they must stay readable by every labctl.
    about: dict[str, Any] = {
        "labctl": __version__,
        "lab": settings.text("LAB_NAME"),
        "images": images,
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cache": cache,
        "secrets": secrets,
        "left_out": [{"what": entry.path, "why": entry.reason} for entry in excluded],
    }
    try:
        with (
            tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as beside,
            process.guarded(("rm", "-rf", beside)),
        ):
            partial = Path(beside, "partial")
            context.notice(f"writing {', '.join(images)}")
            local.save(images, partial, size, context.notice)
            partial.chmod(0o600)
            with BundleWriter(partial, about) as writer:
                for entry in entries:
                    writer.add(f"lab/{entry.name}", entry.source, entry.mode, entry.target)
                for name, lock in locks_of(images).items():
                    writer.add(f"locks/{name}", lock)
                if cache:
                    add_cache(writer, folder, context)
            size = partial.stat().st_size
            partial.replace(file)
    except OSError as error:
        hint = f"df -h {shlex.quote(str(file.parent))}"
        raise HostError(f"cannot write {file}: {error.strerror}", hint=hint) from error
    context.notice(f"{file}: {human.size(size)}")
    for left_out in excluded:
        context.notice(f"excluded: {left_out.path} ({left_out.reason})")
    return SavedBundle(
        file=str(file),
        bytes=size,
        labctl=about["labctl"],
        lab=about["lab"],
        images=images,
        created=about["written"],
        cache=cache,
        secrets=secrets,
        excluded=tuple(excluded),
    )


def build_commands(context: Context, settings: Settings, workloads: Iterable[str]) -> dict[str, str]:
    """Return the images of the lab and of these workloads, each with the command that builds it."""
    # The declared image too: a lab that is up for a workload uses it again after `labctl down`.
    variants = [context.declared(), settings]
    for name in workloads:
        workload = request.choose_workload(context.directory, name, request.RunOptions(), settings)
        variants.append(prepare.for_workload(context, settings, workload))
    distinct = {tuple(map(variant.text, OF_THE_IMAGE)): variant for variant in variants}
    return {image_of(context, variant): prepare.build_command(variant) for variant in distinct.values()}


def size_of_images(commands: Mapping[str, str]) -> int:
    """Return the total size of images in bytes. HostError, with the command that builds it, if one is not found."""
    size = 0
    for image, command in commands.items():
        described = local.described(image)
        if described is None:
            raise HostError(f"image {image} not found on this machine", hint=f"{command}, or docker pull")
        size += described["Size"]
    return size


def image_of(context: Context, settings: Settings) -> str:
    """Return the image of the lab's nodes; hosts are contacted only if the image depends on their devices."""

    def detect() -> str:
        """Ask the hosts for their accelerator."""
        with cluster.connect(context, settings) as connected:
            return connected.accelerator

    return packages.tag(cluster.base_image(settings, detect), packages.of(settings))


def of_lab(directory: Path, *, secrets: bool) -> tuple[list[Entry], list[ExcludedFile]]:
    """Return settings, inventory, workloads and node directories of the lab to save, and the files that are excluded.

    Keys and passwords are excluded, unless ``secrets``.
    """
    env = config.load(directory, {}, {})
    text = (directory / ".env").read_text(encoding="utf-8")
    excluded: list[ExcludedFile] = []
    if not secrets:
        text, blanked = without_secrets(text, env)
        excluded += [ExcludedFile(f".env: {key}", "a secret") for key in blanked]
    entries = {".env": Entry(name=".env", mode=0o600, source=text.encode())}
    for name in filter(None, (env.text("LAB_HOSTS"), env.text("LAB_REQUIREMENTS"))):
        if is_below(name) and (directory / name).is_file():
            entries[name] = Entry(name=name, source=directory / name)
        else:
            excluded.append(ExcludedFile(name, "not in the lab directory"))
    dockerfile = env.text("LAB_DOCKERFILE")
    folders = (*FOLDERS, *folder_of_dockerfile(dockerfile))
    if dockerfile and folders == FOLDERS:
        excluded.append(ExcludedFile(dockerfile, "not in a subfolder of the lab directory"))
    if (directory / OVERRIDE).exists():
        excluded.append(
            ExcludedFile(OVERRIDE, "it may give containers access to the machine that loads it: copy it yourself")
        )
    for entry in chain.from_iterable(walk(directory, folder) for folder in folders):
        if is_override(entry.name):
            continue
        if reason := why_excluded(entry, secrets=secrets):
            excluded.append(ExcludedFile(entry.name, reason))
        else:
            entries[entry.name] = entry
    return list(entries.values()), excluded


def why_excluded(entry: Entry, *, secrets: bool) -> str:
    """Return the reason to exclude a file; empty to save it."""
    if leads_out(entry.name, entry.target):
        return "points outside the lab"
    return "" if secrets else why_secret(entry)


def folder_of_dockerfile(name: str) -> tuple[str, ...]:
    """Return LAB_DOCKERFILE's folder, its build context; empty if not below the lab directory, or if labctl's own."""
    folder = PurePosixPath(name).parent
    reserved = folder.parts[:1] in ((), (".lab",), ("runs",))
    return (folder.as_posix(),) if is_below(name) and not reserved else ()


def is_override(name: str) -> bool:
    """Tell if a file is the part of compose.override.yml that a node was given."""
    return PurePosixPath(name).match(override_path("*"))


def not_cached(cache: Path) -> list[ExcludedFile]:
    """List the folders and files of the cache that are not saved, except labctl's own files."""
    others = (path for path in sorted(cache.iterdir()) if not f"{path.name}/".startswith((*CACHED, ".labctl")))
    return [ExcludedFile(str(path), f"only {' and '.join(CACHED)} of a cache are saved") for path in others]


def add_cache(writer: BundleWriter, cache: Path, context: Context) -> None:
    """Add the models and data sets of the cache, without locks, partial downloads, tokens and links that lead out."""
    data = (entry for entry in walk(cache, ".") if entry.name.startswith(CACHED) and is_data(entry.name))
    entries = [entry for entry in data if not leads_out(entry.name, entry.target)]
    sizes = {entry.name: entry.source.stat().st_size for entry in entries if isinstance(entry.source, Path)}
    progress = Progress(str(cache), sum(sizes.values()), 0, context.notice)
    for entry in entries:
        writer.add(f"cache/{entry.name}", entry.source, entry.mode, entry.target)
        progress.advance(sizes.get(entry.name, 0))
    progress.finish()


def locks_of(names: Iterable[str]) -> dict[str, Path]:
    """Return the lock files of labctl's images among these names, and of their base images."""
    locks: dict[str, Path] = {}
    for name in names:
        image = catalog.name_of(name)
        while image:
            if catalog.file(image, "lock").is_file():
                locks[f"{image}.lock"] = catalog.file(image, "lock")
            image = catalog.base_of(image)
    return locks


def without_secrets(text: str, env: Settings) -> tuple[str, list[str]]:
    """Replace the lines of a .env that have secrets by comments; return the new text and the removed keys."""
    entries = {f".env:{entry.line}": entry for entry in dotenv.parse(text, ".env")}
    secret = {origin for _, shown, origin in env.rows() if origin in entries and is_secret(entries[origin], shown)}
    hidden: list[str] = []
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        origin = f".env:{number}"
        if origin in secret or tells_secret(line.partition("#")[2]):
            hidden.append(entries[origin].key if origin in entries else f"line {number}")
            lines[number - 1] = f"# {hidden[-1]}: left out of the bundle"
    return "\n".join(lines), hidden


def is_secret(entry: dotenv.Entry, shown: str) -> bool:
    """Tell if ``config`` redacts a value, or if it is a proxy with a login or a URL with one."""
    is_login = entry.key.lower().endswith("_proxy") and "@" in entry.value
    return is_login or shown == "set" != entry.value or bool(re.search(r"://\S*@", entry.value))


def tells_secret(comment: str) -> bool:
    """Tell if a comment seems to have a secret, such as a commented-out setting."""
    return bool(LOGIN.search(comment)) or any(config.sounds_secret(key) for key in ASSIGNED.findall(comment))


def walk(root: Path, folder: str) -> Iterator[Entry]:
    """Yield files and links below a directory by sorted path from the root, without ``__pycache__`` and ``.git``."""
    for parent, folders, files in os.walk(root / folder):
        folders[:] = sorted(set(folders) - SKIPPED)
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for name in sorted([*files, *links]):
            path = Path(parent, name)
            relative = path.relative_to(root).as_posix()
            if path.is_symlink():
                yield Entry(name=relative, target=str(path.readlink()))
            elif path.is_file():
                yield Entry(name=relative, mode=path.stat().st_mode & 0o777, source=path)


def why_secret(entry: Entry) -> str:
    """Return the reason why a file is secret; empty if it is not. ConfigError if it cannot be read."""
    if entry.name.startswith(NODES) and "secrets" in PurePosixPath(entry.name).parts:
        return "a secret"
    if PurePosixPath(entry.name).name in PASSWORDS:
        return "may contain passwords"
    if isinstance(entry.source, Path):
        try:
            with entry.source.open("rb") as file:
                return "a private key" if KEY.search(file.read(HEAD)) else ""
        except OSError as error:
            raise ConfigError(f"cannot read {entry.source}: {error.strerror}", hint=f"ls -l {entry.source}") from error
    return ""
