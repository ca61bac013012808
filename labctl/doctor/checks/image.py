"""The lab's image: there, up to date, and of a release that the host's driver supports."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import partial

from labctl import accelerators
from labctl.doctor.examination import UP, CheckContext, Finding, error, ok, warn
from labctl.images import catalog
from labctl.model import HERE


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
    variables = partial(ctx.daemon.image_variables, lab.image)
    found = accelerators.get(lab.accelerator).image_check(version, lab.image, base, variables)
    if found and not found.summary:
        yield ok("LAB-IMAGE-003", f"driver {version} supports image {lab.image}")
    elif found:
        impact = "; ".join(filter(None, ("the image's libraries do not work with another driver", found.impact)))
        fix = f"labctl build && {UP}"
        if found.fix:
            fix = ctx.as_root(found.fix.replace("{sudo}", ctx.access.sudo))
        elif ctx.settings.origin("LAB_BASE_IMAGE") != "default":
            fix = f"{ctx.unset_setting('LAB_BASE_IMAGE')} && {fix}"
        yield error(found.code, found.summary, impact=impact, fix=fix)
