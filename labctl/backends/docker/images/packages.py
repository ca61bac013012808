"""The lab's image with the user's packages or Dockerfile added, tagged by a hash of its sources."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from labctl.backends.docker.images import build, catalog, foreign, package_sources
from labctl.backends.docker.images.build import BuildRequest, Emit
from labctl.config.settings import Settings
from labctl.errors import ConfigError
from labctl.model import Pairs
from labctl.system import files, human
from labctl.system.files import PASSWORDS, make_private, write

LOCKS = ".lab/packages"
"""Folder of the installed versions by the image's tag, relative to the lab directory; a rebuild installs the same."""
INSTALLED = "/opt/lab/packages.txt"
"""Path in the image of pip's list of installed packages."""
LARGEST = 50_000_000
"""Maximum bytes of a Dockerfile's folder, which every command reads to compute the image's tag."""


class Additions(Struct, frozen=True):
    """Additions to an image: pip requirements, packages of its distribution, and a Dockerfile."""

    python: tuple[str, ...] = ()
    apt: tuple[str, ...] = ()
    dockerfile: str = ""
    """Path of a Dockerfile; it is built before the packages are added."""

    def __bool__(self) -> bool:
        return bool(self.python or self.apt or self.dockerfile)

    def __str__(self) -> str:
        return ", ".join((*self.python, *self.apt))


def of(settings: Settings) -> Additions:
    """Return the settings' additions to the lab's image."""
    return Additions(
        python=tuple(settings.text("LAB_PACKAGES").split()),
        apt=tuple(settings.text("LAB_APT").split()),
        dockerfile=settings.text("LAB_DOCKERFILE"),
    )


def is_own(image: str) -> bool:
    """Return True if labctl builds images of that name: its own, or with the user's packages or Dockerfile."""
    return image.startswith(catalog.PACKAGES) or catalog.name_of(image) is not None


def tag(base: str, additions: Additions) -> str:
    """Return the base's tag with these additions, a hash of all inputs; the base if none. ConfigError if unfit."""
    if not additions:
        return base
    image = catalog.name_of(base)
    digest = hashlib.sha256()
    inputs = catalog.inputs_hash(image) if image else ""
    for word in (base, inputs, *sorted(additions.python), "", *sorted(additions.apt)):
        digest.update(word.encode() + b"\0")
    for path in _inputs():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    if additions.dockerfile:
        dockerfile = Path(additions.dockerfile)
        digest.update(os.fsencode(dockerfile.name) + b"\0")
        with _readable(dockerfile):
            for path in folder_of(dockerfile):
                name = f"{path.relative_to(dockerfile.parent)} {path.stat().st_mode & 0o100:o}"
                digest.update(os.fsencode(name) + b"\0" + path.read_bytes() + b"\0")
    return f"{catalog.PACKAGES}{digest.hexdigest()[:12]}"


def is_stale(labels: Mapping[str, str], base_id: str | None) -> bool:
    """Return True if an image's labels name another base id than ``base_id``; False if that is None."""
    return base_id is not None and labels.get(catalog.BASE_ID_LABEL) != base_id


def make(request: BuildRequest, base: str, additions: Additions, emit: Emit) -> dict[str, Any]:
    """Build the base with additions, unless up to date; return a report. HostError if it fails or is no node."""
    began = time.monotonic()
    engine = request.engine
    build.require_own(request)
    below = engine.image(base) or {}
    root = (below["Config"].get("Labels") or {}).get(catalog.BASE_LABEL, base)
    labels = ((catalog.BASE_LABEL, root), (catalog.BASE_ID_LABEL, below["Id"]))
    if not is_stale(engine.image_labels(request.tag), below["Id"]):
        emit(f"image {request.tag} is up to date; `docker image rm {request.tag}` and re-run to build it again")
    else:
        lower = base
        if additions.dockerfile:
            lower = _make_from_dockerfile(request, base, Path(additions.dockerfile), labels, emit)
        if additions.python or additions.apt:
            # The lock's versions belong to labctl's own image by name, to any other image by content.
            of = base if catalog.name_of(base) else f"{base} {below['Id']}"
            _add_packages(request, lower, additions, labels, of, emit)
    foreign.require_node(engine, request.tag, base)
    built = engine.image(request.tag) or {}
    return {
        "image": request.tag,
        "id": built["Id"],
        "size": built["Size"],
        "seconds": round(time.monotonic() - began, 1),
    }


def _make_from_dockerfile(request: BuildRequest, base: str, dockerfile: Path, labels: Pairs, emit: Emit) -> str:
    """Build the user's Dockerfile on the base image; return the tag of the result. HostError if it fails."""
    made = replace(request, tag=tag(base, Additions(dockerfile=str(dockerfile))), base_image=base)
    build.require_own(made)
    with build.prepared(made, base, {}, labels=labels) as arguments:
        emit(f"image {made.tag}: {base} with {dockerfile}")
        build.run(dockerfile, ["--load", "--tag", made.tag, *arguments], made, emit)
    return made.tag


def _add_packages(request: BuildRequest, base: str, additions: Additions, labels: Pairs, of: str, emit: Emit) -> None:
    """Build the image with the packages, pinned by the lock if that is of ``of``; rewrite the lock file."""
    request = replace(request, base_image=base)
    heading = f"# {of}\n"
    lock = request.directory / LOCKS / f"{request.tag.removeprefix(catalog.PACKAGES)}.txt"
    pins = dict.fromkeys(package_sources.pins("\n".join(additions.python)))
    with tempfile.TemporaryDirectory(dir=build.state(request), prefix="packages-") as folder:
        inputs = Path(folder)
        (inputs / "requirements.txt").write_text("".join(f"{name}\n" for name in additions.python), encoding="utf-8")
        (inputs / "apt.txt").write_text("".join(f"{name}\n" for name in additions.apt), encoding="utf-8")
        locked = lock.read_text(encoding="utf-8") if lock.is_file() else ""
        (inputs / "lock.txt").write_text(locked if locked.startswith(heading) else "", encoding="utf-8")
        with build.prepared(request, base, pins, labels=labels) as arguments:
            loaded = ["--load", "--tag", request.tag, "--build-context", f"wanted={inputs}", *arguments]
            emit(f"image {request.tag}: {base} with {additions}")
            build.run(files.path("docker", "Dockerfile.packages"), loaded, request, emit, asked=pins.keys())
    installed = request.engine.file_of(request.tag, INSTALLED)
    make_private(lock.parent)
    versions = (line for line in installed.splitlines() if re.fullmatch(r"[\w.-]+==[^\s+]+", line))
    write(lock, heading + "".join(f"{line}\n" for line in versions), 0o644)


def folder_of(dockerfile: Path) -> list[Path]:
    """Return all files in the folder of the user's Dockerfile, which its build reads. ConfigError if unfit.

    ConfigError if it is unreadable, not based on the lab's image, or its folder has passwords, a lab, or more than
    ``LARGEST`` bytes.
    """
    label = f"LAB_DOCKERFILE: {dockerfile}"
    with _readable(dockerfile):
        text = dockerfile.read_text(encoding="utf-8")
        paths = sorted(path for path in dockerfile.parent.rglob("*") if path.is_file())
        size = sum(path.stat().st_size for path in paths)
    if not _is_on_base(text):
        hint = "ARG BASE_IMAGE, then FROM ${BASE_IMAGE} as its last FROM"
        raise ConfigError(f"{label}: not built on the lab's image", hint=hint)
    names = [path.relative_to(dockerfile.parent) for path in paths]
    why = next((f"holds {name}" for name in names if ".lab" in name.parts or name.name in PASSWORDS), "")
    if size > LARGEST:
        why = f"is {human.size(size)}, more than {human.size(LARGEST)}"
    if why:
        hint = "keep the Dockerfile in a folder of its own, with what it copies"
        raise ConfigError(f"{label}: its folder goes into the build, and {why}", hint=hint)
    return paths


@contextmanager
def _readable(dockerfile: Path) -> Iterator[None]:
    """Raise an OSError or UnicodeDecodeError in the block again as ConfigError that names the file."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        file, reason = getattr(error, "filename", None) or dockerfile, getattr(error, "strerror", None) or error
        hint = "name a Dockerfile" if Path(file) == dockerfile else f"ls -l {file}; its folder goes into the build"
        raise ConfigError(f"LAB_DOCKERFILE: {file}: cannot be read: {reason}", hint=hint) from error


def _is_on_base(dockerfile: str) -> bool:
    """Return True if the last FROM of a Dockerfile is BASE_IMAGE, directly or through another stage."""
    stages: set[str] = set()
    ours = False
    # Whole lines: Python in a heredoc has lines that begin with `from`.
    line = r"^[ \t]*FROM[ \t]+(?:--\S+[ \t]+)*(\S+)(?:[ \t]+AS[ \t]+(\S+))?[ \t]*$"
    for image, name in re.findall(line, dockerfile, re.MULTILINE | re.IGNORECASE):
        ours = bool(re.match(r"\$(BASE_IMAGE\b|\{BASE_IMAGE\b)", image)) or image.lower() in stages
        stages |= {name.lower()} if ours and name else set()
    return ours


def _inputs() -> tuple[Path, ...]:
    return (files.path("docker", "Dockerfile.packages"), files.path("docker", "packages.sh"))
