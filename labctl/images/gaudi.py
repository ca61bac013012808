"""Which of Habana's images belongs to which driver. Versions are of the Gaudi software, which both are part of.

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


def base_for(driver: str) -> str:
    """Habana's PyTorch image for that driver; HostError for one whose release is not known."""
    known = _torch_of()
    same = [software for software in known if _minor(software) == _minor(driver)]
    if not same:
        raise HostError(
            f"Habana's image for driver {driver} is not known: known are the releases {', '.join(_minors(known))}",
            hint=f"set LAB_BASE_IMAGE to the image of the driver's own release, named like {_image(*_newest(known))}",
        )
    software = driver if driver in known else same[-1]
    return _image(software, known[software])


def why_mismatch(driver: str, image: str) -> str | None:
    """Why an image of Habana's cannot serve under that driver; None where it can, or where its name tells no release.

    A patch release apart is no mismatch.
    """
    software = software_of(image)
    if not software or _minor(software) == _minor(driver):
        return None
    return f"image {image} is of Gaudi software {software}, this host's driver of {driver}: they must be of one release"


def require_match(image: str) -> None:
    """HostError where that image cannot serve under this host's driver; a host without one cannot tell."""
    installed = driver()
    why = why_mismatch(installed, image) if installed else None
    if why:
        raise HostError(why, hint="unset LAB_BASE_IMAGE and LAB_IMAGE, then: labctl build")


def software_of(image: str) -> str:
    """The Gaudi software's version that an image's name tells; empty where it tells none."""
    return _version(_without_registry(image)) if "gaudi" in image or "habana" in image else ""


def newest() -> str:
    """The newest image that is known."""
    return _image(*_newest(_torch_of()))


def _torch_of() -> dict[str, str]:
    """Software -> torch of its image, oldest first."""
    rows = catalog.file("habana", "releases").read_text(encoding="utf-8").splitlines()
    return {row.split()[0]: row.split()[1] for row in rows if row and not row.startswith("#")}


def _image(software: str, torch: str) -> str:
    return f"vault.habana.ai/gaudi-docker/{software}/ubuntu22.04/habanalabs/pytorch-installer-{torch}:latest"


def _newest(known: dict[str, str]) -> tuple[str, str]:
    return list(known.items())[-1]


def _minors(known: dict[str, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(_minor, known)))


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _without_registry(image: str) -> str:
    """The registry's address, which may be an IP, is no part of a version. Docker tells it by a dot or a colon."""
    first, _, rest = image.partition("/")
    return rest if rest and ("." in first or ":" in first) else image


def _version(text: str) -> str:
    found = re.search(r"(?<![\d.])\d+\.\d+\.\d+", text)
    return found[0] if found else ""
