"""The lab's image: there, of labctl's own files as they are now, and of a release that this host's driver serves."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from labctl.doctor.finding import UP, Examination, Finding, error, ok, warn
from labctl.engines.docker import DockerEngine
from labctl.images import catalog, gaudi
from labctl.model import HERE

DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""Oldest driver for each CUDA. Source: CUDA's release notes, "Minimum Required Driver Version" for minor versions."""


def image(examination: Examination) -> Iterator[Finding]:
    """The lab's image: there, and built from the files that labctl has now."""
    lab = examination.lab
    own = catalog.name_of(lab.image)
    if examination.observed.image is None and examination.name != HERE:
        yield warn("LAB-IMAGE-001", f"no image {lab.image}", why="the next `labctl up` brings it", fix=UP)
    elif examination.observed.image is None and own:
        why = "the first `labctl up` builds it"
        yield warn("LAB-IMAGE-001", f"no image {lab.image}", why=why, fix="labctl build")
    elif examination.observed.image is None:
        fix = examination.place.there(f"docker pull {shlex.quote(lab.image)}")
        yield error("LAB-IMAGE-001", f"no image {lab.image}", why="nodes are made of it", fix=fix)
    elif own and catalog.is_stale(examination.daemon.image_labels(lab.image), own):
        seen = f"image {lab.image} was built from other files than labctl's own now"
        # Not for --fix to run: every lab of this host is made of that image.
        yield warn("LAB-IMAGE-002", seen, why="nodes run old code", fix=f"labctl build && {UP}")
    else:
        yield ok("LAB-IMAGE-001", f"image {lab.image}")


def driver(examination: Examination) -> Iterator[Finding]:
    """Whether this host's driver serves what the image was built from; nothing where the image does not tell."""
    lab, version = examination.lab, examination.here.driver
    if not version or not examination.observed.image:
        return
    base = examination.daemon.image_labels(lab.image).get(catalog.BASE_LABEL, "")
    if lab.accelerator == "habana":
        reason = gaudi.why_mismatch(version, base or lab.image) or ""
        fix = f"{examination.drop('LAB_BASE_IMAGE')} && labctl build && {UP}"
        if examination.settings.origin("LAB_BASE_IMAGE") == "default":
            fix = f"labctl build && {UP}"
    elif lab.accelerator == "nvidia" and (cuda := cuda_of(lab.image, base, examination.daemon)):
        reason, sudo = why_too_old(version, cuda), examination.place.sudo
        wanted = DRIVERS[cuda].partition(".")[0] if reason else ""
        fix = examination.place.there(f"{sudo}apt-get install --yes cuda-drivers-{wanted} && {sudo}reboot")
    else:
        return
    if reason:
        why = "the image's libraries talk to that driver, and refuse another"
        if lab.accelerator == "nvidia":
            why += "; the package is in NVIDIA's own archive: add it first (CUDA Installation Guide)"
        yield error("LAB-IMAGE-003", reason, why=why, fix=fix)
    else:
        yield ok("LAB-IMAGE-003", f"driver {version} serves image {lab.image}")


def cuda_of(image: str, base: str, engine: DockerEngine) -> int:
    """Major version of CUDA in labctl's own image; 0 for another's, whose runtime asks by itself, or where none tells.

    On a plain base the lock tells it, on one of NVIDIA's own its CUDA_VERSION does.
    """
    lock = catalog.file("nvidia", "lock")
    if catalog.name_of(image) != "nvidia":
        return 0
    if not is_plain(base):
        told = engine.image_variables(image).get("CUDA_VERSION", "").partition(".")[0]
        return int(told) if told.isdecimal() else 0
    if not lock.is_file():
        return 0
    found = re.search(r"^nvidia-cuda-runtime\S*==(\d+)", lock.read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) if found else 0


def is_plain(base: str) -> bool:
    """Whether an image is a distribution without CUDA or torch, from whatever registry."""
    return re.search(r"(^|/)(debian|ubuntu|labctl/base)(:|@|$)", base) is not None


def why_too_old(version: str, cuda: int) -> str:
    """Why a driver cannot serve a CUDA; empty where it can, or where nothing is known of that CUDA."""
    oldest = DRIVERS.get(cuda, "")
    if not oldest or numbers(version) >= numbers(oldest):
        return ""
    return f"driver {version} is too old for the image's CUDA {cuda}, which needs {oldest} or newer"


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
