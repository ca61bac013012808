"""The Docker daemon and its plugins: answering, new enough, clock, disk, limits; and commands that configure it."""

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
from pathlib import Path
from typing import Any

from labctl import accelerators
from labctl.compose import render
from labctl.doctor.examination import GIB, LIMIT, UP, CheckContext, Finding, Level, error, gib, ok, problem, warn
from labctl.errors import HostError
from labctl.lab import capabilities as kernel_limits
from labctl.model import HERE
from labctl.setup.requirements import OLDEST_ENGINE, major, plugin_version

DAEMON = "/etc/docker/daemon.json"
RESTART_ENDS = "restarting Docker ends every container of this host"
"""What a person should know before typing that; live-restore, where it is on, keeps them."""
IMAGE_SPACE = 8 * GIB
"""What an image and its build cache take."""
SPARE = 1 * GIB
SKEW = 5.0
"""Seconds between two clocks that certificates, tokens and logs tolerate."""
DROP_INS = ("docker.service.d", "containerd.service.d")
"""A container's limits are within those of containerd, which starts it."""


def configure(ctx: CheckContext, wanted: Mapping[str, Any]) -> str:
    """The command that, typed on the host, merges settings into the daemon's configuration file."""
    text, sudo = json.dumps(wanted), ctx.access.sudo
    if (ctx.root / DAEMON.lstrip("/")).exists():
        # Not a pipe from jq: it would leave an empty file where jq is missing.
        return f"""merged=$(jq '. * {text}' {DAEMON}) && echo "$merged" | {sudo}tee {DAEMON}"""
    return f"{sudo}mkdir -p /etc/docker && echo '{text}' | {sudo}tee {DAEMON}"


def restart(ctx: CheckContext) -> str:
    return f"{ctx.access.sudo}systemctl restart docker"


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
    return error(code, summary, impact=impact, fix=fix, node=ctx.name)


def join_group() -> str:
    """The command that lets this person open the engine's socket."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        # A number without a name cannot be put into a group.
        return f"ls -l /var/run/docker.sock  # and have user {os.geteuid()} be in its group"
    try:
        member = name in grp.getgrnam("docker").gr_mem
    except KeyError:
        return f"sudo groupadd docker && sudo usermod -aG docker {name} && sudo systemctl restart docker"
    return "newgrp docker" if member else f"sudo usermod -aG docker {name} && newgrp docker"


def version(ctx: CheckContext) -> Iterator[Finding]:
    found = str(ctx.info["ServerVersion"])
    if major(found) >= OLDEST_ENGINE:
        yield ok("LAB-ENGINE-001", f"Docker Engine {found}")
        return
    install = f"docker version  # and install Docker Engine {OLDEST_ENGINE} or newer there"
    fix = "labctl setup" if ctx.name == HERE else ctx.access.command(install)
    impact = f"labctl needs {OLDEST_ENGINE} or newer"
    yield error("LAB-ENGINE-001", f"Docker Engine {found}", impact=impact, fix=fix)


def compose(ctx: CheckContext) -> Iterator[Finding]:
    """The plugin that creates the containers."""
    yield plugin(ctx, "error", "LAB-ENGINE-002", "compose", "containers are created by it")


def buildx(ctx: CheckContext) -> Iterator[Finding]:
    """The plugin that builds images; not needed where the lab has its image."""
    yield plugin(ctx, "error" if ctx.builds else "warn", "LAB-ENGINE-003", "buildx", "images are built by it")


def plugin(ctx: CheckContext, level: Level, code: str, name: str, impact: str) -> Finding:
    version, reason = plugin_version(name, LIMIT - 1)
    if version:
        return ok(code, version.splitlines()[0])
    own = Path(ctx.environ.get("DOCKER_CONFIG") or f"{ctx.settings.home}/.docker") / f"cli-plugins/docker-{name}"
    # A plugin of the person's own hides that of the system, also when it does not work.
    move = f"mv {shlex.quote(str(own))} {shlex.quote(f'{own}.broken')}"
    summary = f"docker {name} does not work: {reason.splitlines()[0]}"
    return problem(level, code, summary, impact=impact, fix=move if os.path.lexists(own) else "labctl setup")


def cgroups(ctx: CheckContext) -> Iterator[Finding]:
    """A hook that hands devices in does not work with systemd's cgroups, which CDI does."""
    driver = str(ctx.info.get("CgroupDriver", ""))
    access = accelerators.get(ctx.lab.accelerator).engine
    if not access.cdi or driver != "systemd" or ctx.host.request == "cdi":
        yield ok("LAB-ENGINE-005", f"cgroup driver {driver}")
        return
    yield warn(
        "LAB-ENGINE-005",
        "cgroup driver systemd, and GPUs are handed in by a hook that it does not know",
        impact="`systemctl daemon-reload` takes the GPUs from running nodes; by CDI they stay; " + RESTART_ENDS,
        fix=ctx.as_root(
            f"{access.generate_cdi.format(folder='/etc/cdi')} && {ctx.access.sudo}{access.enable_cdi} && {restart(ctx)}"
        ),
    )


def clock(ctx: CheckContext) -> Iterator[Finding]:
    """A host's clock, or the daemon's, which is another one where it runs on another machine."""
    if facts := ctx.access.facts:
        yield judge_skew(ctx, facts.skew, ctx.name)
        return
    before = time.time()
    theirs = seconds_of(str(ctx.daemon.information()["SystemTime"]))
    yield judge_skew(ctx, skew(theirs, before), HERE)


def skew(theirs: float, before: float) -> float:
    """Seconds that a clock is ahead, which was read since ``before``; all in seconds since 1970."""
    now = time.time()
    return theirs - now if theirs > now else min(0.0, theirs - before)


def judge_skew(ctx: CheckContext, skew: float, node: str) -> Finding:
    whose = "the engine's clock" if node == HERE else "its clock"
    if abs(skew) <= SKEW:
        return ok("LAB-CLOCK-001", f"{whose} is right to {SKEW:.0f} s", node)
    summary = f"{whose} is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}"
    impact = "certificates and tokens are refused, and the ranks' logs cannot be put in order"
    return warn("LAB-CLOCK-001", summary, impact=impact, fix=ctx.as_root("timedatectl set-ntp true"), node=node)


def seconds_of(text: str) -> float:
    """``2026-01-02T15:04:05.123456789Z`` in seconds since 1970."""
    match = re.fullmatch(r"(\S+T[\d:]+)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)", text)
    if match is None:
        raise HostError(f"invalid time from the engine: {text!r}", hint="docker info")
    whole, fraction, zone = match.groups()
    # Python 3.10 reads neither nanoseconds nor Z.
    return datetime.fromisoformat(f"{whole}.{fraction or '':0<6.6}{'+00:00' if zone == 'Z' else zone}").timestamp()


def space(ctx: CheckContext) -> Iterator[Finding]:
    """The disk that has the images, where it is one of this host's."""
    folder = Path(str(ctx.info["DockerRootDir"]))
    if ctx.name == HERE and not folder.is_dir():
        return
    free = ctx.access.free(folder)
    summary, image = f"{gib(free)} free at {folder}", ctx.observed.image
    if free >= (SPARE if image else IMAGE_SPACE):
        yield ok("LAB-DISK-001", summary)
        return
    impact = "containers write there" if image else "an image and its build cache take 8 GiB"
    yield warn("LAB-DISK-001", summary, impact=impact, fix=ctx.access.command("docker builder prune --force"))


def limits(ctx: CheckContext) -> Iterator[Finding]:
    """Kernel limits that this host refused to raise, where they matter to this lab; those are tried again."""
    lab, asked, needed = ctx.lab, kernel_limits.wanted(ctx.settings), render.files_needed(ctx.lab)
    refused = [name for name in ("memlock", "nofile") if getattr(lab.limits, name) != getattr(asked, name)]
    needs = {
        "memlock": "RDMA pins memory" if ctx.host.infiniband else "",
        "nofile": f"a launcher opens up to {needed} files"
        if needed > (lab.limits.nofile or render.USUAL_FILES)
        else "",
    }
    missed = {name: needs[name] for name in refused if needs[name]}
    granted = kernel_limits.try_again(ctx.settings, lab, ctx.name, ctx.daemon, tuple(missed)) if missed else ()
    for code, name, key in (("LAB-LIMIT-001", "memlock", "LimitMEMLOCK"), ("LAB-LIMIT-002", "nofile", "LimitNOFILE")):
        if name in granted:
            created = ", but could not when the nodes were created" if ctx.observed.containers else ""
            summary = f"this host can raise {name} now{created}"
            yield warn(code, summary, impact=missed[name], fix=UP, auto_fixable=True)
        elif name in missed:
            value = "infinity" if name == "memlock" else ctx.settings.text("LAB_NOFILE")
            # `up` refuses what is known to be too few.
            level: Level = "error" if name == "nofile" and lab.limits.nofile else "warn"
            summary, impact = f"this host cannot raise {name} for a container", f"{missed[name]}; {RESTART_ENDS}"
            yield problem(level, code, summary, impact=impact, fix=raise_limit(ctx, key, value))
        elif name in refused:
            yield ok(code, f"{name} stays at this host's own limit, which is enough for this lab")
        else:
            yield ok(code, f"{name} as asked")


def raise_limit(ctx: CheckContext, key: str, value: str) -> str:
    """The command that raises a limit of the services that start containers."""
    sudo, folders = ctx.access.sudo, [f"/etc/systemd/system/{name}" for name in DROP_INS]
    files = " ".join(f"{folder}/labctl.conf" for folder in folders)
    return ctx.as_root(
        f"mkdir -p {' '.join(folders)} && printf '[Service]\\n{key}={value}\\n' | {sudo}tee -a {files} && "
        f"{sudo}systemctl daemon-reload && {sudo}systemctl restart containerd docker"
    )
