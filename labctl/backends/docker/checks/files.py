"""The lab directory: owner of the lab's name, ssh keys, rendered files."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from labctl import naming
from labctl.backends.docker.checks.examination import UP, CheckContext
from labctl.backends.docker.compose import ssh_keys
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.deploy import plan
from labctl.backends.finding import LIMIT, Finding, error, ok, warn
from labctl.config import override as overriding
from labctl.errors import nearest
from labctl.model import LAUNCHER
from labctl.system import human
from labctl.system.files import outdated, write_all

COMPOSED = re.compile(r"(?:validating )?\S*\.lab/nodes/\S+\.yml: ")
"""A rendered file in compose's messages: the user wrote another."""
UNKNOWN_KEY = re.compile(r"[Aa]dditional propert(?:y|ies) '?([\w-]+)'?")
SERVICE_KEYS = (
    *("cap_add", "cap_drop", "command", "configs", "cpus", "depends_on", "devices", "dns", "entrypoint", "env_file"),
    *("environment", "extra_hosts", "group_add", "healthcheck", "hostname", "image", "init", "ipc", "labels"),
    *("mem_limit", "networks", "ports", "privileged", "restart", "secrets", "security_opt", "shm_size", "sysctls"),
    *("tmpfs", "ulimits", "user", "volumes", "working_dir"),
)
"""Usual keys of a compose service."""


def lab_name(ctx: CheckContext) -> Iterator[Finding]:
    """Yield an error if containers with the lab's name are of another directory or user; else nothing."""
    lab = ctx.lab
    if other := ctx.named.owner_elsewhere(lab.directory, lab.owner):
        fix = ctx.set_setting("LAB_NAME", f"{lab.name[:36].rstrip('-')}-2")
        impact = "two labs of one name would take each other's nodes"
        yield error("LAB-NAME-001", f"lab `{lab.name}` belongs to {other.name}", impact, fix)


def workloads(ctx: CheckContext) -> Iterator[Finding]:
    """Yield a warning per workload of the lab directory that cannot be read or lacks its script, or ok, if any."""
    from labctl import launchers
    from labctl.jobs import inputs
    from labctl.workloads import loader

    directory = ctx.lab.directory / "workloads"
    if not directory.is_dir():
        return
    listed, errors = loader.list_all(directory, launchers.accepted())
    for failure in errors:
        yield broken_workload(failure.message)
    gone = [workload for workload in listed if workload.script and not (workload.directory / workload.script).exists()]
    for workload in gone:
        yield broken_workload(f"{workload.declared}: script {workload.script} not found")
    windows = [path for path in map(inputs.windows_script, listed) if path]
    for path in windows:
        summary, impact = f"{path} has Windows line ends (CRLF)", "`labctl run` refuses the workload"
        yield warn("LAB-WORKLOAD-001", summary, impact, inputs.to_unix(path))
    if not errors and not gone and not windows:
        yield ok("LAB-WORKLOAD-001", f"{human.count(len(listed), 'workload')} can be read")


def broken_workload(message: str) -> Finding:
    """Return the warning of a workload; its message begins with file and line."""
    file, _, rest = message.partition(":")
    line = rest.partition(":")[0]
    place = f"+{line} {shlex.quote(file)}" if line.isdecimal() else shlex.quote(file)
    return warn("LAB-WORKLOAD-001", message, "`labctl run` refuses the workload", f"${{EDITOR:-vi}} {place}")


def override(ctx: CheckContext) -> Iterator[Finding]:
    """Yield ok, or an error if docker compose refuses compose.override.yml; nothing without the file."""
    if not ctx.lab.override:
        return
    reason = refused_by_compose(ctx)
    if not reason:
        yield ok("LAB-FILES-002", f"docker compose accepts {overriding.FILE}")
        return
    fix, unknown = f"${{EDITOR:-vi}} {overriding.FILE}", UNKNOWN_KEY.search(reason)
    if unknown and (near := nearest(unknown[1], SERVICE_KEYS)):
        fix = corrected(ctx, unknown[1], near)
    yield error("LAB-FILES-002", f"{overriding.FILE}: {reason}", "docker compose creates no node with it", fix)


def corrected(ctx: CheckContext, unknown: str, near: str) -> str:
    """Return the command that corrects a misspelt key; an editor if a variable or volume may have the same name."""
    text = (ctx.lab.directory / overriding.FILE).read_text(encoding="utf-8")
    if len(re.findall(rf"\b{unknown}:", text)) == 1:
        return shlex.join(("sed", "-i", f"s/\\b{unknown}:/{near}:/", overriding.FILE))
    return f"${{EDITOR:-vi}} {overriding.FILE}  # {near} instead of {unknown}"


def refused_by_compose(ctx: CheckContext) -> str:
    """Return why docker compose refuses the nodes' files with the user's additions; empty if it accepts them."""
    with TemporaryDirectory(prefix="labctl-") as folder:
        write_all(Path(folder), ctx.rendered)
        composed = [file.path for file in ctx.rendered if file.path.endswith(".yml")]
        added = {naming.override_path(node.name) for node in ctx.lab.nodes}
        # Compose of this machine creates the containers of all hosts.
        refusal = partial(DockerEngine().compose_refusal, Path(folder), seconds=LIMIT / 2 - 1)
        reason = refusal(composed)
        # What compose also says without the additions is not about them, as if it does not work.
        about_additions = reason and not refusal([path for path in composed if path not in added])
    return COMPOSED.sub("", reason).strip() if about_additions else ""


def keys(ctx: CheckContext) -> Iterator[Finding]:
    """Check the nodes' ssh keys: present, pinned, readable only by their owner; nothing if the lab is down."""
    if not ctx.observed.containers:
        return
    lab = ctx.lab
    try:
        missing = ssh_keys.missing(lab)
        unpinned = () if missing else ssh_keys.unpinned(lab)
        readable = () if missing else [path for path in ssh_keys.private(lab) if path.stat().st_mode & 0o077]
    except PermissionError as failure:
        # They belong to another user, as after `sudo labctl up`.
        summary = f"{failure.filename} cannot be read: {failure.strerror}"
        impact = "labctl compares keys and creates nodes with them"
        fix = f"sudo chown -R {os.getuid()}:{os.getgid()} {shlex.quote(str(lab.directory / '.lab'))}"
        yield error("LAB-KEY-001", summary, impact, fix)
        return
    yield from judged_keys(ctx, missing, unpinned)
    if readable:
        shown = [str(path.relative_to(lab.directory)) for path in readable]
        summary, fix = f"others may read {', '.join(shown)}", shlex.join(("chmod", "600", *shown))
        impact = "who has the key may log in to the nodes, or impersonate one"
        yield warn("LAB-KEY-003", summary, impact, fix, auto_fixable=True)


def judged_keys(ctx: CheckContext, missing: Collection[str], unpinned: Collection[str]) -> Iterator[Finding]:
    """Yield an error per node whose key is missing or not pinned; ok if there is none."""
    # Without the launcher's key all nodes count as missing theirs, which have been made for it.
    absent = {LAUNCHER} if LAUNCHER in missing else missing
    for node in ctx.names:
        if node in absent:
            impact = "without it the node cannot be created or restarted"
            yield error("LAB-KEY-001", "private key not found", impact, UP, node=node, auto_fixable=True)
        elif node in unpinned:
            summary = "its host key differs from the launcher's known_hosts, or the launcher's key is not authorized"
            impact = "the launcher will not log in to it"
            yield error("LAB-KEY-002", summary, impact, UP, node=node, auto_fixable=True)
    if not missing and not unpinned:
        yield ok("LAB-KEY-002", "host keys match known_hosts")


def rendered(ctx: CheckContext) -> Iterator[Finding]:
    """Warn of rendered files that were edited since `up`; nothing if the lab is down or its nodes are out of date."""
    if not ctx.observed.containers or plan.not_current(ctx.lab, ctx.rendered, ctx.observed, ctx.lab.containers):
        return
    paths = [file.path for file in outdated(ctx.lab.directory, ctx.rendered)]
    changed = [path for path in paths if not ctx.only or Path(path).parts[2] == ctx.only]
    if not changed:
        yield ok("LAB-FILES-001", f"files under {naming.node_directory('')} are as rendered")
        return
    summary = f"{human.listed(changed, 3)}: edited or removed since labctl wrote it"
    impact = "`docker compose` by hand would create other nodes than `labctl up`, which overwrites it"
    yield warn("LAB-FILES-001", summary, impact, "labctl render", auto_fixable=True)
