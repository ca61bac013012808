"""The images that labctl builds: ``docker/<name>.Dockerfile`` -> image ``labctl/<name>``, some on top of another."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from labctl.errors import HostError
from labctl.system import files

INPUTS_LABEL = "labctl.inputs"
BASE_LABEL = "labctl.base"
TAG_LABEL = "labctl.image"
"""The tag that an image was built as: an image on top of it inherits its labels, and has another tag."""

BASE_ID_LABEL = "labctl.base-id"
"""The engine's id of the lab's image that packages or a Dockerfile were added to: its name may come to mean another."""
FROM = "labctl/from:"
"""How the tag of an image of `labctl build --from` begins."""
PACKAGES = "labctl/packages:"
"""How the tag of an image with packages or a Dockerfile of a person's own begins."""

_OWN = "labctl/"


def names() -> tuple[str, ...]:
    """The images that labctl can build, by the files in ``docker/``."""
    return tuple(sorted(path.stem for path in files.path("docker").glob("*.Dockerfile")))


def tag(name: str) -> str:
    """What labctl's own image of that name is called."""
    return f"{_OWN}{name}"


def name_of(image: str) -> str | None:
    """Which of labctl's own an image is, by what it is called; None for another's."""
    name = image.removeprefix(_OWN).removesuffix(":latest")
    return name if image.startswith(_OWN) and name in names() else None


def is_hashed(image: str) -> bool:
    """Whether an image's tag is a hash of what it was made of: it was made here, and no registry has it."""
    return image.startswith((FROM, PACKAGES))


def how_to_get(image: str) -> str:
    """What a person types to have an image that `labctl build` does not make."""
    if image.startswith(FROM):
        return "labctl build --from IMAGE, with the image that it was made of, or labctl bundle load FILE"
    if image.startswith(PACKAGES):
        return "unset LAB_IMAGE: LAB_PACKAGES, LAB_APT and LAB_DOCKERFILE say what to build"
    return f"docker pull {image}, or unset LAB_IMAGE"


def file(name: str, kind: str) -> Path:
    """Its ``Dockerfile``, its ``lock`` (pinned Python packages), its ``in`` (what is asked for) or its ``releases``."""
    return files.path("docker", f"{name}.{kind}")


def dockerfile(name: str) -> Path:
    """What the image is built from; HostError where labctl has none."""
    path = file(name, "Dockerfile")
    if not path.is_file():
        raise HostError(f"{path} not found", hint="set LAB_IMAGE to an image that has what the lab needs")
    return path


def base(name: str) -> str:
    """The image that it is built on unless a person chooses another; empty where the host decides."""
    found = re.search(r"^ARG BASE_IMAGE=(\S+)", dockerfile(name).read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def base_of(name: str) -> str | None:
    """Which of labctl's own images it is built on; None for another's."""
    return name_of(base(name))


def inputs(name: str) -> tuple[Path, ...]:
    """The files that the image comes from: see ``sources``."""
    return sources(dockerfile(name))


def sources(path: Path) -> tuple[Path, ...]:
    """Return a Dockerfile, and the files that it mounts or copies from its folder."""
    text = path.read_text(encoding="utf-8")
    mounted = re.findall(r"--mount=type=bind,source=([^,\s]+)", text)
    copied = re.findall(r"^COPY (?:--chmod=\S+ )?(?!-)(.+) \S+$", text, re.MULTILINE)
    patterns = {*mounted, *" ".join(copied).split()}
    return (path, *sorted({file for pattern in patterns for file in path.parent.glob(pattern)}))


def inputs_hash(name: str) -> str:
    """A hash over the files that the image, and the one it is built on, come from."""
    digest = hashlib.sha256()
    for path in inputs(name):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    if below := base_of(name):
        digest.update(inputs_hash(below).encode())
    return digest.hexdigest()


def is_labctls(tag: str, labels: Mapping[str, str]) -> bool:
    """Whether labctl built the image with these labels as this tag, and may replace it."""
    if TAG_LABEL in labels:
        return labels[TAG_LABEL].removesuffix(":latest") == tag.removesuffix(":latest")
    return tag.startswith(_OWN) and (INPUTS_LABEL in labels or BASE_LABEL in labels)


def is_stale(labels: Mapping[str, str], name: str) -> bool:
    """Whether an image with these labels was built from other files than there are now."""
    return labels.get(INPUTS_LABEL) != inputs_hash(name)
