"""Docker: daemon and plugins, clock, disk, limits, and the lab's image; commands that configure the daemon."""

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
from labctl.backends.docker.checks.examination import GIB, UP, CheckContext
from labctl.backends.docker.deploy import images
from labctl.backends.docker.images import catalog, foreign, packages
from labctl.backends.docker.lab import capabilities as kernel_limits
from labctl.backends.finding import LIMIT, Finding, Level, error, ok, problem, warn
from labctl.errors import HostError, nearest
from labctl.model import HERE
from labctl.system import human

ARCHITECTURES = {"x86_64": "amd64", "i686": "386", "aarch64": "arm64", "armv7l": "arm"}
"""Names of processors in the kernel, and in images."""
DAEMON = "/etc/docker/daemon.json"
SECURITY = "https://docs.docker.com/engine/security"
RESTART = "systemctl restart docker"
RESTART_ENDS = "restarting Docker ends every container of this host"
"""Caution for the user of RESTART; containers survive if live-restore is on."""
IMAGE_SPACE = 8 * GIB
"""Disk that an image and its build cache take."""
SPARE = 1 * GIB
"""Disk that must be free once the image exists."""
SKEW = 5.0
"""Seconds between clocks that certificates, tokens and logs tolerate."""


def configure(ctx: CheckContext, configuration: Mapping[str, Any]) -> str:
    """Return the command that merges settings into the host's daemon.json, or writes it if there is none."""
    text, sudo = json.dumps(configuration), ctx.sudo
    if (ctx.root / DAEMON.lstrip("/")).exists():
        # Not a pipe from jq: it would leave an empty file if jq is missing.
        return f"""merged=$(jq '. * {text}' {DAEMON}) && echo "$merged" | {sudo}tee {DAEMON}"""
    return f"{sudo}mkdir -p /etc/docker && echo '{text}' | {sudo}tee {DAEMON}"


def silent(ctx: CheckContext, failure: HostError) -> Finding:
    """Return the error of a daemon that does not answer, with a fix by its cause: rights, DOCKER_HOST or other."""
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
    """Return the command that puts the user into the docker group, which is created if missing."""
    try:
        user = pwd.getpwuid(os.geteuid())
    except KeyError:
        # A user without a name cannot be added to a group.
        return f"ls -l /var/run/docker.sock  # and have user {os.geteuid()} be in its group"
    join = f"sudo usermod -aG docker {user.pw_name}"
    try:
        docker = grp.getgrnam("docker").gr_gid
    except KeyError:
        return f"sudo groupadd docker && {join} && sudo {RESTART}"
    member = docker in os.getgrouplist(user.pw_name, user.pw_gid)
    return "newgrp docker" if member else f"{join} && newgrp docker"


def version(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok, or an error if Docker Engine is older than OLDEST_ENGINE."""
    from labctl.system.setup.requirements import OLDEST_ENGINE, is_older

    installed = str(ctx.info["ServerVersion"])
    if not is_older(installed, OLDEST_ENGINE):
        yield ok("LAB-ENGINE-001", f"Docker Engine {installed}")
        return
    install = f"docker version  # and install Docker Engine {OLDEST_ENGINE} or newer there"
    fix = "labctl setup" if ctx.name == HERE else ctx.command(install)
    yield error("LAB-ENGINE-001", f"Docker Engine {installed}", f"labctl needs {OLDEST_ENGINE} or newer", fix)


def compose(ctx: CheckContext) -> Iterator[Finding]:
    """Check that docker compose on this machine, which creates all hosts' containers, works and is new enough."""
    from labctl.system.setup.requirements import OLDEST_COMPOSE

    oldest = f"{OLDEST_COMPOSE} or newer, which reads `!override` in compose.override.yml"
    yield plugin(ctx, "LAB-ENGINE-002", "compose", oldest, "error", "containers are created by it")


def buildx(ctx: CheckContext) -> Iterator[Finding]:
    """Check that docker buildx here works and is new enough; a warning unless the lab's image must be built."""
    from labctl.system.setup.requirements import OLDEST_BUILDX

    level: Level = "error" if ctx.builds else "warn"
    oldest = f"{OLDEST_BUILDX} or newer, which has `--provenance`"
    yield plugin(ctx, "LAB-ENGINE-003", "buildx", oldest, level, "images are built by it")


def plugin(ctx: CheckContext, code: str, name: str, needed: str, level: Level, impact: str) -> Finding:
    """Return the finding about a docker plugin: at ``level`` if it fails or is too old; an unknown version is ok.

    ``needed`` begins with the oldest version that labctl can use.
    """
    from labctl.system.setup.requirements import first_version, is_older, plugin_version

    printed, reason = plugin_version(name, LIMIT - 1)
    version = first_version(printed)
    if printed and not (version and is_older(version, needed.split(maxsplit=1)[0])):
        return ok(code, printed.splitlines()[0])
    in_home = Path(ctx.environ.get("DOCKER_CONFIG") or f"{ctx.settings.home}/.docker") / f"cli-plugins/docker-{name}"
    # A plugin in the user's home hides the system's, also if it is broken.
    fix = shlex.join(("mv", str(in_home), f"{in_home}.broken")) if os.path.lexists(in_home) else "labctl setup"
    if printed:
        return problem(level, code, f"docker {name} {version}", f"labctl needs {needed}", fix)
    return problem(level, code, f"docker {name} does not work: {reason.splitlines()[0]}", impact, fix)


def user_mapping(ctx: CheckContext) -> Iterator[Finding]:
    """Warn of an engine that maps the users of containers to others of the host; nothing if it does not."""
    options = " ".join(ctx.info.get("SecurityOptions") or ())
    impact = "ranks run as another user than you: they cannot write to the lab's runs and cache"
    if "name=rootless" in options:
        fix = ctx.command(f"docker info | grep rootless  # use an engine that root runs: {SECURITY}/rootless")
        if ctx.name == HERE and ctx.environ.get("DOCKER_HOST"):
            fix = "unset DOCKER_HOST"
        yield warn("LAB-ENGINE-007", "Docker Engine is rootless", impact, fix)
    elif "name=userns" in options:
        fix = ctx.command(f"grep -n userns-remap {DAEMON}  # remove it and restart Docker: {SECURITY}/userns-remap")
        yield warn("LAB-ENGINE-007", "Docker Engine maps users of containers (userns-remap)", impact, fix)


def cgroups(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok, or a warning if the cgroup driver is systemd and GPUs are given by a hook instead of CDI."""
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
    """Yield ok or a warning about the host's clock or, without facts, about that of the daemon."""
    if ctx.facts:
        yield judge_skew(ctx, ctx.facts.skew, "its clock")
        return
    before = time.time()
    theirs = seconds_of(str(ctx.daemon.information()["SystemTime"]))
    yield judge_skew(ctx, skew(theirs, before), "the engine's clock")


def skew(theirs: float, before: float) -> float:
    """Return the seconds that a clock is ahead, negative if behind; its time was read between ``before`` and now."""
    now = time.time()
    return theirs - now if theirs > now else min(0.0, theirs - before)


def judge_skew(ctx: CheckContext, skew: float, whose: str) -> Finding:
    """Return the finding about a clock that is ``skew`` seconds ahead: ok up to SKEW either way, else a warning."""
    if abs(skew) <= SKEW:
        return ok("LAB-CLOCK-001", f"{whose} is right to {human.duration(SKEW)}")
    summary = f"{whose} is {human.duration(abs(skew))} {'ahead' if skew > 0 else 'behind'}"
    impact = "certificates and tokens are refused, and the ranks' logs cannot be put in order"
    return warn("LAB-CLOCK-001", summary, impact, ctx.as_root("timedatectl set-ntp true"))


def seconds_of(text: str) -> float:
    """Parse ``2026-01-02T15:04:05.123456789Z`` into seconds since 1970."""
    # Python 3.10 parses neither nanoseconds nor Z.
    fraction = re.search(r"\.\d+", text)
    whole = datetime.fromisoformat(re.sub(r"\.\d+", "", text).replace("Z", "+00:00"))
    return whole.timestamp() + float(fraction[0] if fraction else 0)


def space(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok or a warning on free disk where the engine keeps images; nothing if this machine has no such path."""
    folder = image_folder(ctx.info)
    if ctx.name == HERE and not folder.is_dir():
        return
    free = ctx.free(folder)
    summary, image = f"{human.memory(free)} free at {folder}", ctx.observed.image
    if free >= (SPARE if image else IMAGE_SPACE):
        yield ok("LAB-DISK-001", summary)
        return
    impact = "containers write there" if image else "an image and its build cache take 8 GiB"
    yield warn("LAB-DISK-001", summary, impact, ctx.command("docker builder prune --force"))


def image_folder(info: Mapping[str, Any]) -> Path:
    """Return the folder of an engine's images: containerd's if it stores them, else the engine's own root folder.

    Source: docs.docker.com/engine/storage/containerd.
    """
    in_containerd = ["driver-type", "io.containerd.snapshotter.v1"] in (info.get("DriverStatus") or ())
    of_the_host = (info.get("Containerd") or {}).get("Address") == "/run/containerd/containerd.sock"
    return Path("/var/lib/containerd" if in_containerd and of_the_host else str(info["DockerRootDir"]))


def limits(ctx: CheckContext) -> Iterator[Finding]:
    """Yield, for memlock and nofile, ok, or a warning or error if this lab needs more than the host granted."""
    lab, asked, needs = ctx.lab, kernel_limits.wanted(ctx.settings), kernel_limits.needs(ctx.lab, ctx.host)
    rows = (
        ("LAB-LIMIT-001", "memlock", "infinity", needs.get("memlock", "")),
        ("LAB-LIMIT-002", "nofile", ctx.settings.text("LAB_NOFILE"), needs.get("nofile", "")),
    )
    refused = {name for _, name, *_ in rows if getattr(lab.limits, name) != getattr(asked, name)}
    missed = tuple(name for _, name, _, need in rows if need and name in refused)
    granted = kernel_limits.try_again(ctx.settings, lab, ctx.name, ctx.daemon, missed) if missed else ()
    for code, name, value, need in rows:
        if name in granted:
            created = ", but could not when the nodes were created" if ctx.observed.containers else ""
            yield warn(code, f"this host can raise {name} now{created}", need, UP, auto_fixable=True)
        elif name in missed:
            yield refused_limit(ctx, code, name, value, need)
        elif name in refused:
            yield ok(code, f"{name} stays at this host's own limit, which is enough for this lab")
        else:
            yield ok(code, f"{name} as asked")


def refused_limit(ctx: CheckContext, code: str, name: str, value: str, need: str) -> Finding:
    """Return the finding about a limit that the host cannot raise: an error for a set nofile, else a warning."""
    # `up` refuses a number of files that is too low.
    level: Level = "error" if name == "nofile" and ctx.lab.limits.nofile else "warn"
    summary, impact = f"this host cannot raise {name} for a container", f"{need}; {RESTART_ENDS}"
    return problem(level, code, summary, impact, raise_limit(ctx, name, value))


def raise_limit(ctx: CheckContext, name: str, value: str) -> str:
    """Return the root command that raises a limit of the docker and containerd services, and restarts both."""
    sudo, folders = ctx.sudo, "/etc/systemd/system/docker.service.d /etc/systemd/system/containerd.service.d"
    files = " ".join(f"{folder}/labctl.conf" for folder in folders.split())
    write = f"printf '[Service]\\nLimit{name.upper()}={value}\\n' | {sudo}tee -a {files}"
    restart = f"{sudo}systemctl daemon-reload && {sudo}systemctl restart containerd docker"
    return ctx.as_root(f"mkdir -p {folders} && {write} && {restart}")


# --- the image -----------------------------------------------------------------------------------------------


def image(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok if the lab's image exists and is of labctl's current files, else a warning or error with the fix."""
    name, labctl_image = ctx.lab.image, catalog.name_of(ctx.lab.image)
    absent = f"image {name} not found"
    if ctx.observed.image is None and ctx.name != HERE:
        yield warn("LAB-IMAGE-001", absent, "the next `labctl up` delivers it", UP)
    elif ctx.observed.image is None and catalog.is_hashed(name) and name == ctx.settings.text("LAB_IMAGE"):
        yield error("LAB-IMAGE-001", absent, "nodes are created from it", catalog.how_to_get(name))
    elif ctx.observed.image is None and catalog.is_unknown(name):
        near = nearest(name.partition("/")[2], catalog.names(), cutoff=0.8)
        fix = ctx.set_setting("LAB_IMAGE", catalog.tag(near)) if near else ctx.unset_setting("LAB_IMAGE")
        yield error("LAB-IMAGE-001", absent, "labctl builds no image of this name, and no registry has it", fix)
    elif ctx.observed.image is None and packages.is_own(name):
        yield warn("LAB-IMAGE-001", absent, "the first `labctl up` builds it", images.build_command(ctx.settings))
    elif ctx.observed.image is None:
        fix = ctx.command(f"docker pull {shlex.quote(name)}")
        yield error("LAB-IMAGE-001", absent, "nodes are created from it", fix)
    elif labctl_image and catalog.is_stale(ctx.daemon.image_labels(name), labctl_image):
        # Not auto-fixable: other labs of this host use the image too.
        build = images.build_command(ctx.settings)
        yield warn("LAB-IMAGE-002", f"image {name} is out of date", "nodes run old code", f"{build} && {UP}")
    else:
        yield ok("LAB-IMAGE-001", f"image {name}")


def image_fit(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok if the lab's image is a node's and for this host, else errors; nothing without the image."""
    name = ctx.lab.image
    described = ctx.daemon.image(name)
    if described is None:
        return
    base = ctx.settings.text("LAB_IMAGE") or catalog.tag(ctx.lab.accelerator)
    try:
        foreign.require_node(ctx.daemon, name, base)
    except HostError as failure:
        made = foreign.tag(described["Id"])
        fix = f"labctl build --from {shlex.quote(base)} && {ctx.set_setting('LAB_IMAGE', made)}"
        in_dockerfile = name != base
        yield error("LAB-IMAGE-005", failure.message, "`labctl up` refuses it", failure.hint if in_dockerfile else fix)
        return
    yield processor_fit(ctx, name, described["Architecture"])


def processor_fit(ctx: CheckContext, name: str, wanted: str) -> Finding:
    """Return ok, or a warning if an image is for another processor than the host's."""
    has = ARCHITECTURES.get(ctx.info["Architecture"], ctx.info["Architecture"])
    if has == wanted:
        return ok("LAB-IMAGE-005", f"image {name} has a node's entrypoint, for {has}")
    summary, impact = f"image {name} is for {wanted}, the host is {has}", "its programs do not start, or are emulated"
    fix = ctx.command(f"docker pull --platform linux/{has} {shlex.quote(name)}")
    if packages.is_own(name):
        fix = images.build_command(ctx.settings)
    return warn("LAB-IMAGE-006", summary, impact, fix)


def driver(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok, or an error if the image's libraries do not work with the host's driver; nothing if not known."""
    lab, version = ctx.lab, ctx.host.driver
    if not version or not ctx.observed.image:
        return
    base = ctx.daemon.image_labels(lab.image).get(catalog.BASE_LABEL, "")
    variables = partial(ctx.daemon.image_variables, lab.image)
    # Layers that a user adds to labctl's image do not change its libraries.
    below = ctx.settings.text("LAB_IMAGE") or catalog.tag(lab.accelerator)
    result = accelerators.get(lab.accelerator).image_check(version, below, base, variables)
    if result and not result.summary:
        yield ok("LAB-IMAGE-003", f"driver {version} supports image {lab.image}")
    elif result:
        impact = "; ".join(filter(None, ("the image's libraries do not work with another driver", result.impact)))
        fix = f"{images.build_command(ctx.settings)} && {UP}"
        if result.fix:
            fix = ctx.as_root(result.fix.replace("{sudo}", ctx.sudo))
        elif ctx.settings.origin("LAB_BASE_IMAGE") != "default":
            fix = f"{ctx.unset_setting('LAB_BASE_IMAGE')} && {fix}"
        yield error(result.code, result.summary, impact, fix)
