"""Matches Habana's images with drivers. Versions are of the Gaudi software, which both are part of.

Sources: ``docker/habana.releases``; names of images, and that driver and image are of one release: Support Matrix and
installation guide of docs.habana.ai.
"""

from __future__ import annotations

import re
from pathlib import Path

from labctl import accelerators
from labctl.errors import HostError
from labctl.images import catalog
from labctl.system import process

ROOT = Path("/")


def driver(root: Path = ROOT) -> str:
    """The version of this host's habanalabs driver, such as ``1.22.0``; empty where there is none."""
    said = accelerators.get("habana").driver(root)
    if not said:
        said = process.run(["hl-smi", "-Q", "driver_version", "-f", "csv,noheader"], check=False, timeout=10).out
    return _version(said)


def base_of_host() -> str:
    """Habana's PyTorch image for this host's driver. HostError if there is none."""
    installed = driver()
    if installed:
        return base_for(installed)
    raise HostError(
        "the base image for Gaudi depends on the driver, and this host has none",
        hint=f"set LAB_BASE_IMAGE to the image of the nodes' driver, such as {_image(list(_torch_of())[-1])}",
    )


def base_for(driver: str) -> str:
    """Habana's PyTorch image for a driver. HostError if its release is not known."""
    known = _torch_of()
    same = [software for software in known if _minor(software) == _minor(driver)]
    if not same:
        minors = ", ".join(dict.fromkeys(map(_minor, known)))
        raise HostError(
            f"Habana's image for driver {driver} is not known: known are the releases {minors}",
            hint=f"set LAB_BASE_IMAGE to the image of the driver's own release, named like {_image(list(known)[-1])}",
        )
    return _image(driver if driver in known else same[-1])


def why_mismatch(driver: str, image: str) -> str | None:
    """Why an image of Habana's cannot run under a driver; None if it can, or if its name has no release.

    A patch release apart is no mismatch.
    """
    # Docker tells a registry, whose address may look like a version, by a dot or a colon.
    first, _, rest = image.partition("/")
    software = _version(rest if rest and ("." in first or ":" in first) else image)
    if not ("gaudi" in image or "habana" in image) or not software or _minor(software) == _minor(driver):
        return None
    return f"image {image} is of Gaudi software {software}, this host's driver of {driver}: they must be of one release"


def require_match(image: str) -> None:
    """HostError if an image cannot run under this host's driver; nothing is known on a host without one."""
    installed = driver()
    why = why_mismatch(installed, image) if installed else None
    if why:
        raise HostError(why, hint="unset LAB_BASE_IMAGE and LAB_IMAGE, then: labctl build")


def _torch_of() -> dict[str, str]:
    """Software -> torch of its image, oldest first."""
    rows = catalog.file("habana", "releases").read_text(encoding="utf-8").splitlines()
    return {row.split()[0]: row.split()[1] for row in rows if row and not row.startswith("#")}


def _image(software: str) -> str:
    torch = _torch_of()[software]
    return f"vault.habana.ai/gaudi-docker/{software}/ubuntu22.04/habanalabs/pytorch-installer-{torch}:latest"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _version(text: str) -> str:
    found = re.search(r"(?<![\d.])\d+\.\d+\.\d+", text)
    return found[0] if found else ""
