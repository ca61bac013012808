"""A lab's image with packages or a Dockerfile of a person's own: built on top of it, known by what it is made of."""

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
from labctl.system import files
from labctl.system.files import PASSWORDS, make_private, write

LOCKS = ".lab/packages"
"""The versions that were installed, by the image's tag, relative to the lab directory: a rebuild installs these."""
INSTALLED = "/opt/lab/packages.txt"
"""What pip says is installed, in the image."""
LARGEST = 50_000_000
"""Bytes of the folder of a Dockerfile, which every command reads to know the image's name."""


class Additions(Struct, frozen=True):
    """What an image is to have besides: requirements as pip reads them, and packages of its distribution."""

    python: tuple[str, ...] = ()
    apt: tuple[str, ...] = ()
    dockerfile: str = ""
    """A file's path: what it makes of the image comes before the packages."""

    def __bool__(self) -> bool:
        return bool(self.python or self.apt or self.dockerfile)

    def __str__(self) -> str:
        return ", ".join((*self.python, *self.apt))


def of(settings: Settings) -> Additions:
    """What the settings add to the lab's image."""
    return Additions(
        python=tuple(settings.text("LAB_PACKAGES").split()),
        apt=tuple(settings.text("LAB_APT").split()),
        dockerfile=settings.text("LAB_DOCKERFILE"),
    )


def is_own(image: str) -> bool:
    """Whether labctl can build an image of that name."""
    return image.startswith(catalog.PACKAGES) or catalog.name_of(image) is not None


def tag(base: str, additions: Additions) -> str:
    """What the image with these additions is called; the base itself where there are none. Errors as ``folder_of``."""
    if not additions:
        return base
    own = catalog.name_of(base)
    digest = hashlib.sha256()
    for word in (base, catalog.inputs_hash(own) if own else "", *sorted(additions.python), "", *sorted(additions.apt)):
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
    """Whether an image with these labels was made of another image than its base is now; of one not here, who knows."""
    return base_id is not None and labels.get(catalog.BASE_ID_LABEL) != base_id


def make(request: BuildRequest, base: str, additions: Additions, emit: Emit) -> dict[str, Any]:
    """Build it on a base that the engine has, unless it has it of that base. HostError if a step fails."""
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
            # Which versions fit is known of labctl's own image by its name, of anyone's by its content.
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
    """Build a person's own Dockerfile on the base, and return the image's tag."""
    made = replace(request, tag=tag(base, Additions(dockerfile=str(dockerfile))), base_image=base)
    build.require_own(made)
    with build.prepared(made, base, {}, labels=labels) as arguments:
        emit(f"image {made.tag}: {base} with {dockerfile}")
        build.run(dockerfile, ["--load", "--tag", made.tag, *arguments], made, emit)
    return made.tag


def _add_packages(request: BuildRequest, base: str, additions: Additions, labels: Pairs, of: str, emit: Emit) -> None:
    """Install them, in the versions that were installed before on what ``of`` names, and note those."""
    request = replace(request, base_image=base)
    heading = f"# {of}\n"
    lock = request.directory / LOCKS / f"{request.tag.removeprefix(catalog.PACKAGES)}.txt"
    pins = dict.fromkeys(package_sources.pins("\n".join(additions.python)))
    with tempfile.TemporaryDirectory(dir=build.state(request), prefix="packages-") as folder:
        wanted = Path(folder)
        (wanted / "requirements.txt").write_text("".join(f"{one}\n" for one in additions.python), encoding="utf-8")
        (wanted / "apt.txt").write_text("".join(f"{one}\n" for one in additions.apt), encoding="utf-8")
        noted = lock.read_text(encoding="utf-8") if lock.is_file() else ""
        (wanted / "lock.txt").write_text(noted if noted.startswith(heading) else "", encoding="utf-8")
        with build.prepared(request, base, pins, labels=labels) as arguments:
            loaded = ["--load", "--tag", request.tag, "--build-context", f"wanted={wanted}", *arguments]
            emit(f"image {request.tag}: {base} with {additions}")
            build.run(files.path("docker", "Dockerfile.packages"), loaded, request, emit, asked=pins.keys())
    installed = request.engine.file_of(request.tag, INSTALLED)
    make_private(lock.parent)
    versions = (line for line in installed.splitlines() if re.fullmatch(r"[\w.-]+==[^\s+]+", line))
    write(lock, heading + "".join(f"{line}\n" for line in versions), 0o644)


def folder_of(dockerfile: Path) -> list[Path]:
    """The files that a build of a person's Dockerfile reads: it, and what is beside it.

    ConfigError if it cannot be read, is not on the lab's image, or is beside passwords, a lab or more than ``LARGEST``.
    """
    what = f"LAB_DOCKERFILE: {dockerfile}"
    with _readable(dockerfile):
        text = dockerfile.read_text(encoding="utf-8")
        found = sorted(path for path in dockerfile.parent.rglob("*") if path.is_file())
        size = sum(path.stat().st_size for path in found)
    if not _is_on_base(text):
        hint = "ARG BASE_IMAGE, then FROM ${BASE_IMAGE} as its last FROM"
        raise ConfigError(f"{what}: not built on the lab's image", hint=hint)
    names = [path.relative_to(dockerfile.parent) for path in found]
    why = next((f"holds {name}" for name in names if ".lab" in name.parts or name.name in PASSWORDS), "")
    if size > LARGEST:
        why = f"is {size / 1e6:.0f} MB, more than {LARGEST // 10**6}"
    if why:
        hint = "keep the Dockerfile in a folder of its own, with what it copies"
        raise ConfigError(f"{what}: its folder goes into the build, and {why}", hint=hint)
    return found


@contextmanager
def _readable(dockerfile: Path) -> Iterator[None]:
    """ConfigError if it, or a file beside it, cannot be read."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        file, reason = getattr(error, "filename", None) or dockerfile, getattr(error, "strerror", None) or error
        hint = "name a Dockerfile" if Path(file) == dockerfile else f"ls -l {file}; its folder goes into the build"
        raise ConfigError(f"LAB_DOCKERFILE: {file}: cannot be read: {reason}", hint=hint) from error


def _is_on_base(dockerfile: str) -> bool:
    """Whether the last stage is on the lab's image, itself or by another stage."""
    stages: set[str] = set()
    ours = False
    # Whole lines: Python in a script begins lines with `from` too.
    line = r"^[ \t]*FROM[ \t]+(?:--\S+[ \t]+)*(\S+)(?:[ \t]+AS[ \t]+(\S+))?[ \t]*$"
    for image, name in re.findall(line, dockerfile, re.MULTILINE | re.IGNORECASE):
        ours = bool(re.match(r"\$(BASE_IMAGE\b|\{BASE_IMAGE\b)", image)) or image.lower() in stages
        stages |= {name.lower()} if ours and name else set()
    return ours


def _inputs() -> tuple[Path, ...]:
    return (files.path("docker", "Dockerfile.packages"), files.path("docker", "packages.sh"))
