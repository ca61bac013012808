"""Images of this machine's engine: save them into a file, load an image from an archive."""

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
from labctl.system import human, process
from labctl.system.files import make_private
from labctl.system.progress import Progress, waiting


def described(image: str) -> dict[str, Any] | None:
    """Return ``docker image inspect`` of this machine's image; None if not found or the engine is silent."""
    try:
        return DockerEngine(seconds=ASKING).image(image)
    except HostError:
        return None


@contextmanager
def spooled(image: str, directory: Path, size: int, notice: Callable[[str], None]) -> Iterator[Archive]:
    """Save an image into a temporary file in the directory; yield its Archive; remove the file after the block."""
    make_private(directory)
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="image-") as folder,
        process.guarded(("rm", "-rf", folder)),
    ):
        path = Path(folder) / "image.tar"
        save((image,), path, size, notice)
        yield Archive(path)


def save(images: tuple[str, ...], path: Path, size: int, notice: Callable[[str], None]) -> None:
    """Run `docker save` of images, of about ``size`` bytes, into a file, with progress lines. HostError if it fails.

    The engine collects all of it before it sends the first byte.
    """

    def text(seconds: float) -> str:
        """Return a progress line with the size of the archive written so far."""
        # docker writes to a temporary file and renames it.
        written = sum(file.lstat().st_size for file in path.parent.glob("*"))
        so_far = f"{human.size(written)} of about {human.size(size)}" if written else "Docker collects it"
        return f"reading {', '.join(images)}: {so_far}, {human.duration(seconds)}"

    with waiting(notice, text):
        # The SDK cannot save several images into one archive, nor be killed after a timeout.
        process.run(["docker", "save", "--output", str(path), *images], timeout=STORING)


def load(archive: Archive, name: str, notice: Callable[[str], None]) -> None:
    """Run `docker load` on an image of an archive, unless the engine has its id. HostError if it is not loaded."""
    image = archive.image(name)
    present = described(name)
    if present and present["Id"] in image.ids:
        return
    stream = archive.stream(image)
    progress = Progress(name, stream.size, 0, notice)

    def storing(seconds: float) -> str:
        """Return a progress line once all is sent to the engine; else an empty text."""
        return f"{name}: Docker stores it, {human.duration(seconds)} so far" if progress.done == stream.size else ""

    with waiting(notice, storing):
        done = process.feed(["docker", "load", "--quiet"], report(stream.chunks(), progress), timeout=STORING)
    if done.code != 0:
        raise HostError(f"Docker Engine did not load {name}: {done.err.strip()}", hint="labctl setup; df -h")
    progress.finish()
