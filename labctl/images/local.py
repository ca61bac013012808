"""This machine's engine: an image out of it into a file, and out of a file into it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labctl.errors import HostError
from labctl.images.archive import Archive, told
from labctl.images.remote import ASKING, STORING
from labctl.system import process
from labctl.system.files import make_private
from labctl.system.progress import Progress, amount, waiting


def described(image: str) -> dict[str, Any] | None:
    """An image as the engine describes it; None where image or engine are not here."""
    found = process.run(["docker", "image", "inspect", "--format", "{{json .}}", image], timeout=ASKING, check=False)
    return json.loads(found.out) if found.code == 0 else None


@contextmanager
def spooled(image: str, directory: Path, size: int, notice: Callable[[str], None]) -> Iterator[Archive]:
    """An image as a file, which goes with the block. ``size`` as ``save``; HostError where there is no room for it."""
    make_private(directory)
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="image-") as folder,
        process.guarded(("rm", "-rf", folder)),
    ):
        path = Path(folder) / "image.tar"
        save((image,), path, size, notice)
        yield Archive(path)


def save(images: tuple[str, ...], path: Path, size: int, notice: Callable[[str], None]) -> None:
    """Write images, of so many bytes, as one archive. The engine gathers all of them before the first byte comes."""

    def said(seconds: float) -> str:
        there = written(path.parent)
        so_far = f"{amount(there)} of about {amount(size)}" if there else "Docker gathers it"
        return f"reading {', '.join(images)}: {so_far}, {seconds:.0f} s"

    with waiting(notice, said):
        process.run(["docker", "save", "--output", str(path), *images], timeout=STORING)


def written(folder: Path) -> int:
    """Bytes of the files in a folder: docker writes one under a name of its own, and then renames it."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except FileNotFoundError:
        return 0


def load(archive: Archive, name: str, notice: Callable[[str], None]) -> bool:
    """Have the engine load an image of an archive; False where it has it. HostError with the engine's own words."""
    import requests

    import docker

    image = archive.image(name)
    found = described(name)
    if found and found["Id"] in image.ids:
        return False
    cargo = archive.cargo(image)
    progress = Progress(name, cargo.size, 0, notice)
    try:
        api: Any = docker.from_env(timeout=STORING).api

        def storing(seconds: float) -> str:
            return f"{name}: Docker stores it, {seconds:.0f} s so far" if progress.done == cargo.size else ""

        with waiting(notice, storing):
            said = [line.get("error", "") for line in api.load_image(told(cargo.chunks(), progress))]
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise HostError(f"Docker Engine did not load {name}: {error}", hint="labctl setup; df -h") from error
    if any(said):
        raise HostError(f"Docker Engine did not load {name}: {' '.join(filter(None, said))}", hint="df -h")
    progress.finish()
    return True
