"""The images that labctl builds: ``docker/<name>.Dockerfile`` -> image ``labctl/<name>``, possibly based on another."""

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
"""Tag that an image was built as: images based on it inherit its labels, but have another tag."""

BASE_ID_LABEL = "labctl.base-id"
"""Engine's id of the lab image that packages or a Dockerfile were added to: its name may move to another id."""
FROM = "labctl/from:"
"""Prefix of the tag of an image of `labctl build --from`."""
PACKAGES = "labctl/packages:"
"""Prefix of the tag of an image with the user's packages or Dockerfile."""

_OWN = "labctl/"


def names() -> tuple[str, ...]:
    """Return the names of the images that labctl can build, by the files in ``docker/``."""
    return tuple(sorted(path.stem for path in files.path("docker").glob("*.Dockerfile")))


def tag(name: str) -> str:
    """Return the tag of labctl's own image with this name."""
    return f"{_OWN}{name}"


def name_of(image: str) -> str | None:
    """Return the name of labctl's own image with this tag; None for other images."""
    name = image.removeprefix(_OWN).removesuffix(":latest")
    return name if image.startswith(_OWN) and name in names() else None


def is_hashed(image: str) -> bool:
    """Tell if an image's tag is a hash of its sources: labctl built it here, and no registry has it."""
    return image.startswith((FROM, PACKAGES))


def is_unknown(image: str) -> bool:
    """Tell if an image has a name of labctl's that labctl does not build, so that no registry has it either."""
    return image.startswith(_OWN) and name_of(image) is None and not is_hashed(image)


def how_to_get(image: str) -> str:
    """Return the hint for a missing image that `labctl build` does not make: build --from, unset or pull."""
    if image.startswith(FROM):
        return "labctl build --from IMAGE, with the image that it was made of, or labctl bundle load FILE"
    if image.startswith(PACKAGES):
        return "unset LAB_IMAGE: LAB_PACKAGES, LAB_APT and LAB_DOCKERFILE say what to build"
    if is_unknown(image):
        return f"unset LAB_IMAGE, or choose one that labctl builds: {', '.join(map(tag, names()))}"
    return f"docker pull {image}, or unset LAB_IMAGE"


def file(name: str, kind: str) -> Path:
    """Return the path of an image's file in ``docker/`` by its kind: ``Dockerfile``, ``lock``, ``in`` or other."""
    return files.path("docker", f"{name}.{kind}")


def dockerfile(name: str) -> Path:
    """Return an image's Dockerfile; raise HostError if labctl has none."""
    path = file(name, "Dockerfile")
    if not path.is_file():
        raise HostError(f"{path} not found", hint="set LAB_IMAGE to an image that has what the lab needs")
    return path


def base(name: str) -> str:
    """Return the default base in an image's Dockerfile; empty if it depends on the host."""
    match = re.search(r"^ARG BASE_IMAGE=(\S+)", dockerfile(name).read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else ""


def base_of(name: str) -> str | None:
    """Return the name of labctl's own image that an image is based on; None for any other base."""
    return name_of(base(name))


def inputs(name: str) -> tuple[Path, ...]:
    """Return the files that an image is built from: its Dockerfile, and files that this mounts or copies."""
    return sources(dockerfile(name))


def sources(path: Path) -> tuple[Path, ...]:
    """Return a Dockerfile, and the files that it mounts or copies from its folder."""
    text = path.read_text(encoding="utf-8")
    mounted = re.findall(r"--mount=type=bind,source=([^,\s]+)", text)
    copied = re.findall(r"^COPY (?:--chmod=\S+ )?(?!-)(.+) \S+$", text, re.MULTILINE)
    patterns = {*mounted, *" ".join(copied).split()}
    return (path, *sorted({file for pattern in patterns for file in path.parent.glob(pattern)}))


def inputs_hash(name: str) -> str:
    """Return a SHA-256 of the files that labctl's own image, and its base if that is labctl's, are built from."""
    digest = hashlib.sha256()
    for path in inputs(name):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    if below := base_of(name):
        digest.update(inputs_hash(below).encode())
    return digest.hexdigest()


def is_labctls(tag: str, labels: Mapping[str, str]) -> bool:
    """Return True if an image's labels say that labctl built it as this tag, so that it may be replaced."""
    if TAG_LABEL in labels:
        return labels[TAG_LABEL].removesuffix(":latest") == tag.removesuffix(":latest")
    return tag.startswith(_OWN) and (INPUTS_LABEL in labels or BASE_LABEL in labels)


def is_stale(labels: Mapping[str, str], name: str) -> bool:
    """Return True if an image's labels have another hash than the current files of labctl's image ``name``."""
    return labels.get(INPUTS_LABEL) != inputs_hash(name)
