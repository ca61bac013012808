"""The Docker daemon and its command: answering, new enough, with its plugins, its clock, its disk, its limits."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shlex
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from labctl.compose import render
from labctl.doctor import daemon
from labctl.doctor.finding import GIB, LIMIT, UP, Examination, Finding, error, gib, ok, warn
from labctl.errors import HostError
from labctl.lab import capabilities as kernel_limits
from labctl.model import HERE
from labctl.setup.requirements import OLDEST_ENGINE, major
from labctl.system import process

IMAGE_SPACE = 8 * GIB
"""What an image and its build cache take."""
SPARE = 1 * GIB
SKEW = 5.0
"""Seconds between two clocks that certificates, tokens and logs put up with."""
DROP_INS = ("docker.service.d", "containerd.service.d")
"""A container's limits are within those of containerd, which starts it."""


def silent(examination: Examination, failure: HostError) -> Finding:
    """The finding of a daemon that does not answer."""
    place = examination.place
    if place.name != HERE:
        why = "none of its nodes is reached without it"
        fix = place.there(f"{place.sudo}systemctl start docker")
        return error("LAB-ENGINE-001", failure.message, why=why, fix=fix)
    address = examination.environ.get("DOCKER_HOST", "")
    if "ermission denied" in failure.message:
        return error(
            "LAB-ENGINE-004",
            failure.message,
            why="nothing runs without the engine, and only root and members of its group may open its socket",
            fix=join_group(),
        )
    where = f" (DOCKER_HOST={address})" if address else ""
    told = f"{place.sudo}journalctl -u docker -n 50" if failure.hint == "labctl doctor" else failure.hint
    fix = "unset DOCKER_HOST" if address else told
    return error("LAB-ENGINE-001", failure.message + where, why="nothing runs without it", fix=fix)


def join_group() -> str:
    """The command that lets this person open the engine's socket from now on."""
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


def version(examination: Examination) -> Iterator[Finding]:
    """The daemon's version."""
    found = str(examination.info["ServerVersion"])
    if major(found) < OLDEST_ENGINE:
        why = f"labctl asks it for what only {OLDEST_ENGINE} and newer have"
        local = examination.name == HERE
        asked = f"docker version  # and install Docker Engine {OLDEST_ENGINE} or newer there"
        fix = "labctl setup" if local else examination.place.there(asked)
        yield error("LAB-ENGINE-001", f"Docker Engine {found}", why=why, fix=fix)
    else:
        yield ok("LAB-ENGINE-001", f"Docker Engine {found}")


def compose(examination: Examination) -> Iterator[Finding]:
    """The plugin that makes containers of the rendered files."""
    yield from plugin(examination, "LAB-ENGINE-002", "compose", "containers are made by it")


def buildx(examination: Examination) -> Iterator[Finding]:
    """The plugin that builds images; a lab that has its image does without."""
    judged = error if examination.builds else warn
    yield from plugin(examination, "LAB-ENGINE-003", "buildx", "images are built by it", judged)


def plugin(
    examination: Examination, code: str, name: str, why: str, judged: Callable[..., Finding] = error
) -> Iterator[Finding]:
    done = process.run(["docker", name, "version"], check=False, timeout=LIMIT - 1)
    said = (done.out.strip() or done.err.strip() or "no word of it").splitlines()[0]
    if done.code == 0:
        yield ok(code, said)
        return
    folder = examination.environ.get("DOCKER_CONFIG") or f"{examination.settings.home}/.docker"
    own = Path(folder) / f"cli-plugins/docker-{name}"
    # A plugin of the person's own hides that of the system, also when it does not work.
    fix = f"mv {shlex.quote(str(own))} {shlex.quote(f'{own}.broken')}" if os.path.lexists(own) else "labctl setup"
    yield judged(code, f"docker {name} does not work: {said}", why=why, fix=fix)


def groups(examination: Examination) -> Iterator[Finding]:
    """NVIDIA's device hook and systemd's cgroups do not go together. Source: nvidia-container-toolkit issue 48."""
    lab = examination.lab
    driver = str(examination.info.get("CgroupDriver", ""))
    if lab.accelerator == "nvidia" and driver == "systemd" and examination.here.request != "cdi":
        sudo = examination.place.sudo
        yield warn(
            "LAB-ENGINE-005",
            "cgroup driver systemd, and GPUs are handed in behind its back",
            why="`systemctl daemon-reload` takes the GPUs from running nodes (NVML: Unknown Error); by CDI they stay; "
            + daemon.RESTART_ENDS,
            fix=examination.place.there(
                f"{sudo}nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml && "
                f"{sudo}nvidia-ctk runtime configure --runtime=docker --cdi.enabled && "
                f"{sudo}systemctl restart docker"
            ),
        )
    else:
        yield ok("LAB-ENGINE-005", f"cgroup driver {driver}")


def clock(examination: Examination) -> Iterator[Finding]:
    """The daemon's clock against this one's, which differ only where it runs on another machine; or a host's own."""
    if facts := examination.place.facts:
        yield judge_skew(examination, facts.skew, examination.name)
        return
    before = time.time()
    said = str(examination.daemon.information()["SystemTime"])
    yield judge_clock(examination, seconds_of(said), before, time.time())


def judge_clock(examination: Examination, theirs: float, before: float, after: float, node: str = HERE) -> Finding:
    """A clock that was read between two readings of ours, all in seconds since 1970."""
    return judge_skew(examination, theirs - after if theirs > after else min(0.0, theirs - before), node)


def judge_skew(examination: Examination, skew: float, node: str) -> Finding:
    """So many seconds that a clock is ahead."""
    whose = "the engine's clock" if node == HERE else "its clock"
    if abs(skew) > SKEW:
        return warn(
            "LAB-CLOCK-001",
            f"{whose} is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}",
            why="certificates and tokens are refused, and the ranks' logs cannot be put in order",
            fix=examination.place.there(f"{examination.place.sudo}timedatectl set-ntp true"),
            node=node,
        )
    return ok("LAB-CLOCK-001", f"{whose} is right to {SKEW:.0f} s", node=node)


def seconds_of(text: str) -> float:
    """``2026-01-02T15:04:05.123456789Z`` in seconds since 1970."""
    match = re.fullmatch(r"(\S+T[\d:]+)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)", text)
    if match is None:
        raise HostError(f"the engine's clock says {text!r}, which is no time", hint="docker info")
    whole, fraction, zone = match.groups()
    # Python 3.10 reads neither nanoseconds nor Z.
    return datetime.fromisoformat(f"{whole}.{fraction or '':0<6.6}{'+00:00' if zone == 'Z' else zone}").timestamp()


def space(examination: Examination) -> Iterator[Finding]:
    """The disk that images lie on, where it is one of this host's."""
    folder = Path(str(examination.info["DockerRootDir"]))
    if examination.name == HERE and not folder.is_dir():
        return
    free = examination.place.free(folder)
    needed = SPARE if examination.observed.image else IMAGE_SPACE
    seen = f"{gib(free)} free at {folder}"
    if free < needed:
        yield warn(
            "LAB-DISK-001",
            seen,
            why="containers write there" if examination.observed.image else "an image and its build cache take 8 GiB",
            fix=examination.place.there("docker builder prune --force"),
        )
    else:
        yield ok("LAB-DISK-001", seen)


def limits(examination: Examination) -> Iterator[Finding]:
    """Kernel limits that this host refused to raise, where they matter to this lab; those are tried again."""
    lab = examination.lab
    asked = kernel_limits.wanted(examination.settings)
    refused = [name for name in ("memlock", "nofile") if getattr(lab.limits, name) != getattr(asked, name)]
    few_files = render.files_needed(lab) > (lab.limits.nofile or render.USUAL_FILES)
    needs = {
        "memlock": "RDMA pins memory" if examination.here.infiniband else "",
        "nofile": f"a launcher opens up to {render.files_needed(lab)} files" if few_files else "",
    }
    missed = {name: needs[name] for name in refused if needs[name]}
    granted = (
        kernel_limits.try_again(examination.settings, lab, examination.name, examination.daemon, tuple(missed))
        if missed
        else ()
    )
    for code, name, key in (("LAB-LIMIT-001", "memlock", "LimitMEMLOCK"), ("LAB-LIMIT-002", "nofile", "LimitNOFILE")):
        if name in granted:
            made = ", and the nodes were made when it could not" if examination.observed.containers else ""
            seen = f"this host can raise {name} by now{made}"
            yield warn(code, seen, why=missed[name], fix=UP, runnable=True)
        elif name in missed:
            value = "infinity" if name == "memlock" else examination.settings.text("LAB_NOFILE")
            # An `up` refuses what is known to be too few.
            judged = error if name == "nofile" and lab.limits.nofile else warn
            yield judged(
                code,
                f"this host cannot raise {name} for a container",
                why=f"{missed[name]}; {daemon.RESTART_ENDS}",
                fix=examination.place.there(raise_limit(examination.place.sudo, key, value)),
            )
        elif name in refused:
            yield ok(code, f"{name} stays at this host's own limit, which does for this lab")
        else:
            yield ok(code, f"{name} as asked")


def raise_limit(sudo: str, key: str, value: str) -> str:
    """The command that lets the services which start containers hand out more."""
    folders = [f"/etc/systemd/system/{name}" for name in DROP_INS]
    files = " ".join(f"{folder}/labctl.conf" for folder in folders)
    steps = (
        f"{sudo}mkdir -p {' '.join(folders)}",
        f"printf '[Service]\\n{key}={value}\\n' | {sudo}tee -a {files}",
        f"{sudo}systemctl daemon-reload",
        f"{sudo}systemctl restart containerd docker",
    )
    return " && ".join(steps)
