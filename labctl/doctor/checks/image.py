"""The lab's image: there, up to date, and of a release that the host's driver supports."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from labctl.doctor.examination import UP, CheckContext, Finding, error, ok, warn
from labctl.engines import Daemon
from labctl.images import catalog, gaudi
from labctl.model import HERE

DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""Oldest driver for each CUDA. Source: CUDA's release notes, "Minimum Required Driver Version" for minor versions."""


def image(ctx: CheckContext) -> Iterator[Finding]:
    """The lab's image: there, and built from the files that labctl has now."""
    name, own = ctx.lab.image, catalog.name_of(ctx.lab.image)
    absent = f"image {name} not found"
    if ctx.observed.image is None and ctx.name != HERE:
        yield warn("LAB-IMAGE-001", absent, impact="the next `labctl up` delivers it", fix=UP)
    elif ctx.observed.image is None and own:
        yield warn("LAB-IMAGE-001", absent, impact="the first `labctl up` builds it", fix="labctl build")
    elif ctx.observed.image is None:
        fix = ctx.access.command(f"docker pull {shlex.quote(name)}")
        yield error("LAB-IMAGE-001", absent, impact="nodes are created from it", fix=fix)
    elif own and catalog.is_stale(ctx.daemon.image_labels(name), own):
        # Not for --fix: every lab of this host uses that image.
        yield warn(
            "LAB-IMAGE-002", f"image {name} is out of date", impact="nodes run old code", fix=f"labctl build && {UP}"
        )
    else:
        yield ok("LAB-IMAGE-001", f"image {name}")


def driver(ctx: CheckContext) -> Iterator[Finding]:
    """Whether the host's driver supports what the image was built from; nothing where that is unknown."""
    lab, version = ctx.lab, ctx.host.driver
    if not version or not ctx.observed.image:
        return
    base = ctx.daemon.image_labels(lab.image).get(catalog.BASE_LABEL, "")
    impact = "the image's libraries do not work with another driver"
    if lab.accelerator == "habana":
        reason, fix = gaudi.why_mismatch(version, base or lab.image), f"labctl build && {UP}"
        if ctx.settings.origin("LAB_BASE_IMAGE") != "default":
            fix = f"{ctx.unset_setting('LAB_BASE_IMAGE')} && {fix}"
    elif lab.accelerator == "nvidia" and (cuda := cuda_of(lab.image, base, ctx.daemon)):
        reason, package = why_too_old(version, cuda), f"cuda-drivers-{DRIVERS.get(cuda, '').partition('.')[0]}"
        fix = ctx.as_root(f"apt-get install --yes {package} && {ctx.access.sudo}reboot")
        impact += "; the package is in NVIDIA's own archive: add it first (CUDA Installation Guide)"
    else:
        return
    if reason:
        yield error("LAB-IMAGE-003", reason, impact=impact, fix=fix)
    else:
        yield ok("LAB-IMAGE-003", f"driver {version} supports image {lab.image}")


def cuda_of(image: str, base: str, engine: Daemon) -> int:
    """Major version of CUDA in labctl's own image; 0 where it is unknown, or the image another's that checks it itself.

    On a distribution's image the lock file has it, on one of NVIDIA's own its CUDA_VERSION.
    """
    lock = catalog.file("nvidia", "lock")
    if catalog.name_of(image) != "nvidia":
        return 0
    if not re.search(r"(^|/)(debian|ubuntu|labctl/base)(:|@|$)", base):
        version = engine.image_variables(image).get("CUDA_VERSION", "").partition(".")[0]
        return int(version) if version.isdecimal() else 0
    text = lock.read_text(encoding="utf-8") if lock.is_file() else ""
    found = re.search(r"^nvidia-cuda-runtime\S*==(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def why_too_old(version: str, cuda: int) -> str:
    """Why a driver does not support a CUDA; empty where it does, or where nothing is known of that CUDA."""
    from packaging.version import Version

    oldest = DRIVERS.get(cuda, "")
    if not oldest or Version(version) >= Version(oldest):
        return ""
    return f"driver {version} is too old for the image's CUDA {cuda}, which needs {oldest} or newer"
