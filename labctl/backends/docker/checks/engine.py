"""Docker: daemon and plugins answer and are new enough, clock, disk, limits; the lab's image; how to configure it."""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from labctl import accelerators
from labctl.backends.docker.checks.examination import GIB, LIMIT, UP, CheckContext, gib
from labctl.backends.docker.compose import render
from labctl.backends.docker.deploy import images
from labctl.backends.docker.images import catalog, packages
from labctl.backends.docker.lab import capabilities as kernel_limits
from labctl.backends.finding import Finding, Level, error, ok, problem, warn
from labctl.errors import HostError
from labctl.model import HERE

DAEMON = "/etc/docker/daemon.json"
RESTART = "systemctl restart docker"
RESTART_ENDS = "restarting Docker ends every container of this host"
"""What a person should know before typing that; live-restore, where it is on, keeps them."""
IMAGE_SPACE = 8 * GIB
"""What an image and its build cache take."""
SPARE = 1 * GIB
SKEW = 5.0
"""Seconds between two clocks that certificates, tokens and logs tolerate."""


def configure(ctx: CheckContext, wanted: Mapping[str, Any]) -> str:
    """The command that, typed on the host, merges settings into the daemon's configuration file."""
    text, sudo = json.dumps(wanted), ctx.sudo
    if (ctx.root / DAEMON.lstrip("/")).exists():
        # Not a pipe from jq: it would leave an empty file where jq is missing.
        return f"""merged=$(jq '. * {text}' {DAEMON}) && echo "$merged" | {sudo}tee {DAEMON}"""
    return f"{sudo}mkdir -p /etc/docker && echo '{text}' | {sudo}tee {DAEMON}"


def silent(ctx: CheckContext, failure: HostError) -> Finding:
    """The finding of a daemon that does not answer."""
    code, summary, impact, fix = "LAB-ENGINE-001", failure.message, "nothing runs without it", failure.hint
    address = ctx.environ.get("DOCKER_HOST", "")
    if ctx.name != HERE:
        impact, fix = "none of its nodes is reachable", ctx.as_root("systemctl start docker")
    elif "ermission denied" in summary:
        code, fix = "LAB-ENGINE-004", join_group()
        impact = "nothing runs without the engine, and only root and members of its group may open its socket"
    elif address:
        summary = summary if address in summary else f"{summary} (DOCKER_HOST={address})"
        fix = "unset DOCKER_HOST"
    elif fix in ("", "labctl doctor"):
        fix = ctx.as_root("journalctl -u docker -n 50")
    return error(code, summary, impact, fix, node=ctx.name)


def join_group() -> str:
    """The command that lets this person open the engine's socket."""
    try:
        user = pwd.getpwuid(os.geteuid())
    except KeyError:
        # A number without a name cannot be put into a group.
        return f"ls -l /var/run/docker.sock  # and have user {os.geteuid()} be in its group"
    join = f"sudo usermod -aG docker {user.pw_name}"
    try:
        docker = grp.getgrnam("docker").gr_gid
    except KeyError:
        return f"sudo groupadd docker && {join} && sudo {RESTART}"
    member = docker in os.getgrouplist(user.pw_name, user.pw_gid)
    return "newgrp docker" if member else f"{join} && newgrp docker"


def version(ctx: CheckContext) -> Iterator[Finding]:
    from labctl.system.setup.requirements import OLDEST_ENGINE, is_older

    found = str(ctx.info["ServerVersion"])
    if not is_older(found, OLDEST_ENGINE):
        yield ok("LAB-ENGINE-001", f"Docker Engine {found}")
        return
    install = f"docker version  # and install Docker Engine {OLDEST_ENGINE} or newer there"
    fix = "labctl setup" if ctx.name == HERE else ctx.command(install)
    yield error("LAB-ENGINE-001", f"Docker Engine {found}", f"labctl needs {OLDEST_ENGINE} or newer", fix)


def compose(ctx: CheckContext) -> Iterator[Finding]:
    """This machine's docker compose, which creates the containers of all hosts."""
    from labctl.system.setup.requirements import OLDEST_COMPOSE

    yield plugin(ctx, "LAB-ENGINE-002", "compose", OLDEST_COMPOSE, "error", "containers are created by it")


def buildx(ctx: CheckContext) -> Iterator[Finding]:
    """This machine's docker buildx, which is not needed if the lab has its image."""
    from labctl.system.setup.requirements import OLDEST_BUILDX

    level: Level = "error" if ctx.builds else "warn"
    yield plugin(ctx, "LAB-ENGINE-003", "buildx", OLDEST_BUILDX, level, "images are built by it")


def plugin(ctx: CheckContext, code: str, name: str, oldest: str, level: Level, impact: str) -> Finding:
    """A plugin of the docker command works and is not older than this. One that does not say its version is taken."""
    from labctl.system.setup.requirements import first_version, is_older, plugin_version

    printed, reason = plugin_version(name, LIMIT - 1)
    version = first_version(printed)
    if printed and not (version and is_older(version, oldest)):
        return ok(code, printed.splitlines()[0])
    own = Path(ctx.environ.get("DOCKER_CONFIG") or f"{ctx.settings.home}/.docker") / f"cli-plugins/docker-{name}"
    # A plugin of the user's own hides the system's, also if it does not work.
    fix = shlex.join(("mv", str(own), f"{own}.broken")) if os.path.lexists(own) else "labctl setup"
    if printed:
        return problem(level, code, f"docker {name} {version}", f"labctl needs {oldest} or newer", fix)
    return problem(level, code, f"docker {name} does not work: {reason.splitlines()[0]}", impact, fix)


def cgroups(ctx: CheckContext) -> Iterator[Finding]:
    """A hook that hands devices in does not work with systemd's cgroups, which CDI does."""
    driver = str(ctx.info.get("CgroupDriver", ""))
    access = accelerators.get(ctx.lab.accelerator).engine
    if not access.cdi or driver != "systemd" or ctx.host.request == "cdi":
        yield ok("LAB-ENGINE-005", f"cgroup driver {driver}")
        return
    summary = "cgroup driver systemd, and GPUs are handed in by a hook that it does not know"
    impact = f"`systemctl daemon-reload` takes the GPUs from running nodes; by CDI they stay; {RESTART_ENDS}"
    steps = (access.generate_cdi.format(folder="/etc/cdi"), access.enable_cdi, RESTART)
    yield warn("LAB-ENGINE-005", summary, impact, ctx.as_root(f" && {ctx.sudo}".join(steps)))


def clock(ctx: CheckContext) -> Iterator[Finding]:
    """A host's clock, or the daemon's, which is another one where it runs on another machine."""
    if ctx.facts:
        yield judge_skew(ctx, ctx.facts.skew, "its clock")
        return
    before = time.time()
    theirs = seconds_of(str(ctx.daemon.information()["SystemTime"]))
    yield judge_skew(ctx, skew(theirs, before), "the engine's clock")


def skew(theirs: float, before: float) -> float:
    """Seconds that a clock is ahead, which was read since ``before``; all in seconds since 1970."""
    now = time.time()
    return theirs - now if theirs > now else min(0.0, theirs - before)


def judge_skew(ctx: CheckContext, skew: float, whose: str) -> Finding:
    if abs(skew) <= SKEW:
        return ok("LAB-CLOCK-001", f"{whose} is right to {SKEW:.0f} s")
    summary = f"{whose} is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}"
    impact = "certificates and tokens are refused, and the ranks' logs cannot be put in order"
    return warn("LAB-CLOCK-001", summary, impact, ctx.as_root("timedatectl set-ntp true"))


def seconds_of(text: str) -> float:
    """``2026-01-02T15:04:05.123456789Z`` in seconds since 1970."""
    # Python 3.10 reads neither nanoseconds nor Z.
    fraction = re.search(r"\.\d+", text)
    whole = datetime.fromisoformat(re.sub(r"\.\d+", "", text).replace("Z", "+00:00"))
    return whole.timestamp() + float(fraction[0] if fraction else 0)


def space(ctx: CheckContext) -> Iterator[Finding]:
    """The disk that has the images, where it is one of this host's."""
    folder = image_folder(ctx.info)
    if ctx.name == HERE and not folder.is_dir():
        return
    free = ctx.free(folder)
    summary, image = f"{gib(free)} free at {folder}", ctx.observed.image
    if free >= (SPARE if image else IMAGE_SPACE):
        yield ok("LAB-DISK-001", summary)
        return
    impact = "containers write there" if image else "an image and its build cache take 8 GiB"
    yield warn("LAB-DISK-001", summary, impact, ctx.command("docker builder prune --force"))


def image_folder(info: Mapping[str, Any]) -> Path:
    """Folder that has an engine's images: containerd's, if the host's containerd stores them, as with new Engines 29.

    Source: docs.docker.com/engine/storage/containerd.
    """
    in_containerd = ["driver-type", "io.containerd.snapshotter.v1"] in (info.get("DriverStatus") or ())
    of_the_host = (info.get("Containerd") or {}).get("Address") == "/run/containerd/containerd.sock"
    return Path("/var/lib/containerd" if in_containerd and of_the_host else str(info["DockerRootDir"]))


def limits(ctx: CheckContext) -> Iterator[Finding]:
    """Kernel limits that this host refused to raise, where they matter to this lab; those are tried again."""
    lab, asked, needed = ctx.lab, kernel_limits.wanted(ctx.settings), render.files_needed(ctx.lab)
    pins = "RDMA pins memory" if ctx.host.infiniband else ""
    opens = f"a launcher opens up to {needed} files" if needed > (lab.limits.nofile or render.USUAL_FILES) else ""
    rows = (
        ("LAB-LIMIT-001", "memlock", "infinity", pins),
        ("LAB-LIMIT-002", "nofile", ctx.settings.text("LAB_NOFILE"), opens),
    )
    refused = {name for _, name, *_ in rows if getattr(lab.limits, name) != getattr(asked, name)}
    missed = tuple(name for _, name, _, need in rows if need and name in refused)
    granted = kernel_limits.try_again(ctx.settings, lab, ctx.name, ctx.daemon, missed) if missed else ()
    for code, name, value, need in rows:
        if name in granted:
            created = ", but could not when the nodes were created" if ctx.observed.containers else ""
            yield warn(code, f"this host can raise {name} now{created}", need, UP, auto_fixable=True)
        elif name in missed:
            # `up` refuses what is known to be too few.
            level: Level = "error" if name == "nofile" and lab.limits.nofile else "warn"
            summary, impact = f"this host cannot raise {name} for a container", f"{need}; {RESTART_ENDS}"
            yield problem(level, code, summary, impact, raise_limit(ctx, name, value))
        elif name in refused:
            yield ok(code, f"{name} stays at this host's own limit, which is enough for this lab")
        else:
            yield ok(code, f"{name} as asked")


def raise_limit(ctx: CheckContext, name: str, value: str) -> str:
    """The command that raises a limit of the services: a container's are within those of containerd."""
    sudo, folders = ctx.sudo, "/etc/systemd/system/docker.service.d /etc/systemd/system/containerd.service.d"
    files = " ".join(f"{folder}/labctl.conf" for folder in folders.split())
    write = f"printf '[Service]\\nLimit{name.upper()}={value}\\n' | {sudo}tee -a {files}"
    restart = f"{sudo}systemctl daemon-reload && {sudo}systemctl restart containerd docker"
    return ctx.as_root(f"mkdir -p {folders} && {write} && {restart}")


# --- the image -----------------------------------------------------------------------------------------------


def image(ctx: CheckContext) -> Iterator[Finding]:
    """The lab's image: there, and built from the files that labctl has now."""
    name, own = ctx.lab.image, catalog.name_of(ctx.lab.image)
    absent = f"image {name} not found"
    if ctx.observed.image is None and ctx.name != HERE:
        yield warn("LAB-IMAGE-001", absent, "the next `labctl up` delivers it", UP)
    elif ctx.observed.image is None and catalog.is_hashed(name) and name == ctx.settings.text("LAB_IMAGE"):
        yield error("LAB-IMAGE-001", absent, "nodes are created from it", catalog.how_to_get(name))
    elif ctx.observed.image is None and packages.is_own(name):
        yield warn("LAB-IMAGE-001", absent, "the first `labctl up` builds it", images.build_command(ctx.settings))
    elif ctx.observed.image is None:
        fix = ctx.command(f"docker pull {shlex.quote(name)}")
        yield error("LAB-IMAGE-001", absent, "nodes are created from it", fix)
    elif own and catalog.is_stale(ctx.daemon.image_labels(name), own):
        # Not for --fix: every lab of this host uses that image.
        build = images.build_command(ctx.settings)
        yield warn("LAB-IMAGE-002", f"image {name} is out of date", "nodes run old code", f"{build} && {UP}")
    else:
        yield ok("LAB-IMAGE-001", f"image {name}")


def driver(ctx: CheckContext) -> Iterator[Finding]:
    """Whether the host's driver supports what the image was built from; nothing where that is unknown."""
    lab, version = ctx.lab, ctx.host.driver
    if not version or not ctx.observed.image:
        return
    base = ctx.daemon.image_labels(lab.image).get(catalog.BASE_LABEL, "")
    variables = partial(ctx.daemon.image_variables, lab.image)
    # What a person adds to labctl's image leaves its libraries as they are.
    below = ctx.settings.text("LAB_IMAGE") or catalog.tag(lab.accelerator)
    found = accelerators.get(lab.accelerator).image_check(version, below, base, variables)
    if found and not found.summary:
        yield ok("LAB-IMAGE-003", f"driver {version} supports image {lab.image}")
    elif found:
        impact = "; ".join(filter(None, ("the image's libraries do not work with another driver", found.impact)))
        fix = f"{images.build_command(ctx.settings)} && {UP}"
        if found.fix:
            fix = ctx.as_root(found.fix.replace("{sudo}", ctx.sudo))
        elif ctx.settings.origin("LAB_BASE_IMAGE") != "default":
            fix = f"{ctx.unset_setting('LAB_BASE_IMAGE')} && {fix}"
        yield error(found.code, found.summary, impact, fix)
