"""Writes a lab as one file for offline use: its images, settings, workloads and, on request, its cache."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Iterator
from datetime import datetime
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct

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
from labctl.system import process
from labctl.system.files import PASSWORDS, is_below, leads_out
from labctl.system.progress import Progress, amount

NODES = ".lab/nodes"
FOLDERS = ("workloads", "hostfiles", NODES)
"""Of a lab directory, beside .env and the list of hosts."""
CACHED = ("datasets/", "huggingface/")
"""Of a cache."""
SKIPPED = frozenset({"__pycache__", ".git"})
KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----|^PuTTY-User-Key-File", re.MULTILINE)
HEAD = 1 << 20
"""Bytes of a file to search for the begin of a private key."""
ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*\S")
LOGIN = re.compile(r"://\S*@|_proxy=\S*@|\bhf_[A-Za-z0-9]{8}", re.IGNORECASE)
"""A URL with a password, and a token of the hub."""


class Entry(Struct, frozen=True, kw_only=True):
    """A file by its path in the lab directory, with its source (a file or content) or a link's target."""

    name: str
    mode: int = 0o644
    source: Path | bytes = b""
    target: str = ""

    def __repr__(self) -> str:
        return f"Entry({self.name!r})"  # its content may be a secret


class ExcludedFile(Struct, frozen=True):
    """A file, or a line of .env, that is not in the bundle."""

    path: str
    reason: str


class SavedBundle(Struct, frozen=True, kw_only=True):
    """A bundle that was written, and what is in it."""

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
    """Write the lab in the context's directory, with the images of its nodes and of these workloads, into a file.

    HostError if an image is not found or the disk is full. An existing file is replaced atomically.
    """
    settings = context.settings()
    require_initialised(context)
    asked = [request.choose_workload(context.directory, name, request.RunOptions(), settings) for name in workloads]
    # Of a lab that is up for a workload the image that its settings name, too: `labctl down` has it expected again.
    every = (context.declared(), settings, *(prepare.for_workload(context, settings, task) for task in asked))
    needing = {tuple(map(one.text, OF_THE_IMAGE)): one for one in every}.values()
    commands = {image_of(context, one): prepare.build_command(one) for one in needing}
    images = tuple(commands)
    folder = Path(settings.text("HOST_CACHE_PATH"))
    if cache and not folder.is_dir():
        raise HostError(f"HOST_CACHE_PATH {folder} does not exist", hint="labctl cache WORKLOAD, or omit --with-cache")
    size = 0
    for image in images:
        described = local.described(image)
        if described is None:
            hint = f"{commands[image]}, or docker pull"
            raise HostError(f"image {image} not found on this machine", hint=hint)
        size += described["Size"]
    if file.is_dir():
        raise ConfigError(f"{file} is a directory", hint=f"name a file in it: {shlex.quote(str(file / 'lab.bundle'))}")
    entries, excluded = of_lab(context.directory, secrets=secrets)
    excluded += not_cached(folder) if cache else []
    # The format of the file, as in its first version: these keys stay.
    about: dict[str, Any] = {
        "labctl": metadata.version("labctl"),
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
    context.notice(f"{file}: {amount(size)}")
    for one in excluded:
        context.notice(f"excluded: {one.path} ({one.reason})")
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


def image_of(context: Context, settings: Settings) -> str:
    """The image of the lab's nodes; hosts are contacted only if their devices decide."""

    def detect() -> str:
        with cluster.connect(context, settings) as where:
            return where.accelerator

    return packages.tag(cluster.base_image(settings, detect), packages.of(settings))


def of_lab(directory: Path, *, secrets: bool) -> tuple[list[Entry], list[ExcludedFile]]:
    """The lab's settings, inventory, workloads and node directories, and what is excluded.

    Keys and passwords are, unless ``secrets``.
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
        excluded.append(ExcludedFile(dockerfile, "not in a folder of the lab directory"))
    if (directory / OVERRIDE).exists():
        excluded.append(ExcludedFile(OVERRIDE, "it may open the machine that loads it: copy it yourself"))
    for entry in (entry for folder in folders for entry in walk(directory, folder) if not is_override(entry.name)):
        reason = "" if secrets else why_secret(entry)
        if leads_out(entry.name, entry.target):
            reason = "points outside the lab"
        if reason:
            excluded.append(ExcludedFile(entry.name, reason))
        else:
            entries[entry.name] = entry
    return list(entries.values()), excluded


def folder_of_dockerfile(name: str) -> tuple[str, ...]:
    """The folder that LAB_DOCKERFILE's build reads, if it is below the lab directory."""
    folder = PurePosixPath(name).parent
    own = folder.parts[:1] in ((), (".lab",), ("runs",))
    return (folder.as_posix(),) if is_below(name) and not own else ()


def is_override(name: str) -> bool:
    """Whether a file is what a node got of compose.override.yml."""
    return PurePosixPath(name).match(override_path("*"))


def not_cached(cache: Path) -> list[ExcludedFile]:
    """What else is in the shared cache, but for labctl's own files."""
    others = (one for one in sorted(cache.iterdir()) if not f"{one.name}/".startswith((*CACHED, ".labctl")))
    return [ExcludedFile(str(one), f"only {' and '.join(CACHED)} of a cache go along") for one in others]


def add_cache(writer: BundleWriter, cache: Path, context: Context) -> None:
    """Add the models and data of the shared cache, without locks, partial downloads and tokens."""
    entries = [
        entry
        for entry in walk(cache, ".")
        if entry.name.startswith(CACHED) and is_data(entry.name) and not leads_out(entry.name, entry.target)
    ]
    sizes = {entry.name: entry.source.stat().st_size for entry in entries if isinstance(entry.source, Path)}
    progress = Progress(str(cache), sum(sizes.values()), 0, context.notice)
    for entry in entries:
        writer.add(f"cache/{entry.name}", entry.source, entry.mode, entry.target)
        progress.advance(sizes.get(entry.name, 0))
    progress.finish()


def locks_of(names: Iterable[str]) -> dict[str, Path]:
    """The lock files of labctl's images among these, and of their base images."""
    found: dict[str, Path] = {}
    for name in names:
        own = catalog.name_of(name)
        while own:
            if catalog.file(own, "lock").is_file():
                found[f"{own}.lock"] = catalog.file(own, "lock")
            own = catalog.base_of(own)
    return found


def without_secrets(text: str, env: Settings) -> tuple[str, list[str]]:
    """The text of .env without secrets, and their keys."""
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
    """Whether a value is redacted by ``config`` or has a password in a URL; a digest has an @ too."""
    is_login = entry.key.lower().endswith("_proxy") and "@" in entry.value
    return is_login or shown == "set" != entry.value or bool(re.search(r"://\S*@", entry.value))


def tells_secret(comment: str) -> bool:
    """Whether a comment looks like it has a secret, such as a commented-out setting."""
    return bool(LOGIN.search(comment)) or any(config.sounds_secret(key) for key in ASSIGNED.findall(comment))


def walk(root: Path, folder: str) -> Iterator[Entry]:
    """Files and links below a directory, by sorted paths relative to the root."""
    for where, folders, files in os.walk(root / folder):
        folders[:] = sorted(set(folders) - SKIPPED)
        here = Path(where)
        for name in sorted([*files, *(one for one in folders if (here / one).is_symlink())]):
            path = here / name
            relative = path.relative_to(root).as_posix()
            if path.is_symlink():
                yield Entry(name=relative, target=str(path.readlink()))
            elif path.is_file():
                yield Entry(name=relative, mode=path.stat().st_mode & 0o777, source=path)


def why_secret(entry: Entry) -> str:
    """Why a file is secret; empty if it is not."""
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
