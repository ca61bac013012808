"""A lab's image with packages of a person's own: built on top of it, and known by what it is made of."""

from __future__ import annotations

import hashlib
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from labctl.config.settings import Settings
from labctl.images import build, catalog, package_sources
from labctl.images.build import BuildRequest, Emit
from labctl.system import files
from labctl.system.files import make_private, write

LOCKS = ".lab/packages"
"""The versions that were installed, by the image's tag, relative to the lab directory: a rebuild installs these."""
INSTALLED = "/opt/lab/packages.txt"
"""What pip says is installed, in the image."""
_OWN = "labctl/packages:"


class Additions(Struct, frozen=True):
    """What an image is to have besides: requirements as pip reads them, and packages of its distribution."""

    python: tuple[str, ...] = ()
    apt: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.python or self.apt)

    def __str__(self) -> str:
        return ", ".join((*self.python, *self.apt))


def of(settings: Settings) -> Additions:
    """What the settings add to the lab's image."""
    return Additions(tuple(settings.text("LAB_PACKAGES").split()), tuple(settings.text("LAB_APT").split()))


def is_own(image: str) -> bool:
    """Whether labctl can build an image of that name."""
    return image.startswith(_OWN) or catalog.name_of(image) is not None


def tag(base: str, additions: Additions) -> str:
    """What the image with these additions is called; the base itself where there are none."""
    if not additions:
        return base
    own = catalog.name_of(base)
    digest = hashlib.sha256()
    for word in (base, catalog.inputs_hash(own) if own else "", *sorted(additions.python), "", *sorted(additions.apt)):
        digest.update(word.encode() + b"\0")
    for path in _inputs():
        digest.update(path.read_bytes() + b"\0")
    return f"{_OWN}{digest.hexdigest()[:12]}"


def make(request: BuildRequest, base: str, additions: Additions, emit: Emit) -> dict[str, Any]:
    """Build it on a base that the engine has. HostError with the log's last lines if a step fails."""
    began = time.monotonic()
    request = replace(request, base_image=base)
    build.require_own(request)
    lock = request.directory / LOCKS / f"{request.tag.removeprefix(_OWN)}.txt"
    pins = dict.fromkeys(package_sources.pins("\n".join(additions.python)))
    with tempfile.TemporaryDirectory(dir=build.state(request), prefix="packages-") as folder:
        wanted = Path(folder)
        (wanted / "requirements.txt").write_text("".join(f"{one}\n" for one in additions.python), encoding="utf-8")
        (wanted / "apt.txt").write_text("".join(f"{one}\n" for one in additions.apt), encoding="utf-8")
        (wanted / "lock.txt").write_text(lock.read_text(encoding="utf-8") if lock.is_file() else "", encoding="utf-8")
        with build.prepared(request, base, pins) as arguments:
            loaded = ["--load", "--tag", request.tag, "--build-context", f"wanted={wanted}", *arguments]
            emit(f"image {request.tag}: {base} with {additions}")
            build.run(files.path("docker", "Dockerfile.packages"), loaded, request, emit)
    installed = request.engine.file_of(request.tag, INSTALLED)
    make_private(lock.parent)
    write(
        lock, "".join(f"{line}\n" for line in installed.splitlines() if re.fullmatch(r"[\w.-]+==[^\s+]+", line)), 0o644
    )
    built = request.engine.image(request.tag) or {}
    return {
        "image": request.tag,
        "id": built["Id"],
        "size": built["Size"],
        "seconds": round(time.monotonic() - began, 1),
    }


def _inputs() -> tuple[Path, ...]:
    return (files.path("docker", "Dockerfile.packages"), files.path("docker", "packages.sh"))
