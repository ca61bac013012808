"""This machine's engine: an image out of it into a file, and out of a file into it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labctl import shell
from labctl.errors import HostError
from labctl.files import make_private
from labctl.progress import Progress
from labctl.shipping.archive import Archive, told
from labctl.shipping.host import ASKING, STORING


def described(image: str) -> dict[str, Any] | None:
    """An image as the engine describes it; None where image or engine are not here."""
    found = shell.run(["docker", "image", "inspect", "--format", "{{json .}}", image], timeout=ASKING, check=False)
    return json.loads(found.out) if found.code == 0 else None


@contextmanager
def spooled(image: str, directory: Path) -> Iterator[Archive]:
    """An image as a file, which goes with the block. HostError where there is no room for it."""
    make_private(directory)
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="image-") as folder,
        shell.guarded(("rm", "-rf", folder)),
    ):
        path = Path(folder) / "image.tar"
        shell.run(["docker", "save", "--output", str(path), image], timeout=STORING)
        yield Archive(path)


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
        said = [line.get("error", "") for line in api.load_image(told(cargo.chunks(), progress))]
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise HostError(f"Docker Engine did not load {name}: {error}", hint="labctl setup; df -h") from error
    if any(said):
        raise HostError(f"Docker Engine did not load {name}: {' '.join(filter(None, said))}", hint="df -h")
    progress.finish()
    return True
