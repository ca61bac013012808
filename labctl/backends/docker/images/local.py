"""This machine's engine: saves images into a file, and loads an image of an archive."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.images.archive import Archive, report
from labctl.backends.docker.images.remote import ASKING, STORING
from labctl.errors import HostError
from labctl.system import process
from labctl.system.files import make_private
from labctl.system.progress import Progress, amount, waiting


def described(image: str) -> dict[str, Any] | None:
    """``docker image inspect``; None if image or engine are not here."""
    try:
        return DockerEngine(seconds=ASKING).image(image)
    except HostError:
        return None


@contextmanager
def spooled(image: str, directory: Path, size: int, notice: Callable[[str], None]) -> Iterator[Archive]:
    """An image as a file in the directory, removed after the block. ``size`` as ``save``."""
    make_private(directory)
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="image-") as folder,
        process.guarded(("rm", "-rf", folder)),
    ):
        path = Path(folder) / "image.tar"
        save((image,), path, size, notice)
        yield Archive(path)


def save(images: tuple[str, ...], path: Path, size: int, notice: Callable[[str], None]) -> None:
    """Write images, of about ``size`` bytes, as one archive. The engine collects all before the first byte comes."""

    def text(seconds: float) -> str:
        # docker writes a file of another name and then renames it.
        written = sum(one.lstat().st_size for one in path.parent.glob("*"))
        so_far = f"{amount(written)} of about {amount(size)}" if written else "Docker collects it"
        return f"reading {', '.join(images)}: {so_far}, {seconds:.0f} s"

    with waiting(notice, text):
        # Not the SDK: one archive of several images, killed when its time is up.
        process.run(["docker", "save", "--output", str(path), *images], timeout=STORING)


def load(archive: Archive, name: str, notice: Callable[[str], None]) -> None:
    """Load an image of an archive, unless the engine has it. HostError with the engine's own words."""
    image = archive.image(name)
    found = described(name)
    if found and found["Id"] in image.ids:
        return
    stream = archive.stream(image)
    progress = Progress(name, stream.size, 0, notice)

    def storing(seconds: float) -> str:
        return f"{name}: Docker stores it, {seconds:.0f} s so far" if progress.done == stream.size else ""

    with waiting(notice, storing):
        done = process.feed(["docker", "load", "--quiet"], report(stream.chunks(), progress), timeout=STORING)
    if done.code != 0:
        raise HostError(f"Docker Engine did not load {name}: {done.err.strip()}", hint="labctl setup; df -h")
    progress.finish()
