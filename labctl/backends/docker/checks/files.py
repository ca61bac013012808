"""The lab directory: owner of the lab's name, ssh keys, rendered files."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from labctl import naming
from labctl.backends.docker.checks.examination import UP, CheckContext
from labctl.backends.docker.compose import ssh_keys
from labctl.backends.docker.deploy import plan
from labctl.backends.finding import Finding, error, ok, warn
from labctl.system import human
from labctl.system.files import outdated


def lab_name(ctx: CheckContext) -> Iterator[Finding]:
    """Yield an error if containers with the lab's name are of another directory or user; else nothing."""
    lab = ctx.lab
    if other := ctx.named.owner_elsewhere(lab.directory, lab.owner):
        fix = ctx.set_setting("LAB_NAME", f"{lab.name[:36].rstrip('-')}-2")
        impact = "two labs of one name would take each other's nodes"
        yield error("LAB-NAME-001", f"lab `{lab.name}` belongs to {other.name}", impact, fix)


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
    for node in ctx.names:
        if node in missing:
            impact = "without it the node cannot be created or restarted"
            yield error("LAB-KEY-001", "private key not found", impact, UP, node=node, auto_fixable=True)
        elif node in unpinned:
            summary = "its host key differs from the launcher's known_hosts, or the launcher's key is not authorized"
            impact = "the launcher will not log in to it"
            yield error("LAB-KEY-002", summary, impact, UP, node=node, auto_fixable=True)
    if not missing and not unpinned:
        yield ok("LAB-KEY-002", "host keys match known_hosts")
    if readable:
        shown = [str(path.relative_to(lab.directory)) for path in readable]
        summary, fix = f"others may read {', '.join(shown)}", shlex.join(("chmod", "600", *shown))
        impact = "who has the key may log in to the nodes, or impersonate one"
        yield warn("LAB-KEY-003", summary, impact, fix, auto_fixable=True)


def rendered(ctx: CheckContext) -> Iterator[Finding]:
    """Warn of rendered files that were edited since `up`; nothing if the lab is down or its nodes are out of date."""
    if not ctx.observed.containers or plan.not_current(ctx.lab, ctx.rendered, ctx.observed, ctx.lab.containers):
        return
    paths = [file.path for file in outdated(ctx.lab.directory, ctx.rendered)]
    changed = [path for path in paths if not ctx.only or Path(path).parts[2] == ctx.only]
    if not changed:
        yield ok("LAB-FILES-001", f"files under {naming.node_directory('')} are as rendered")
        return
    summary = f"{human.listed(changed, 3)}: changed since labctl wrote it"
    impact = "`docker compose` by hand would create other nodes than `labctl up`, which overwrites it"
    yield warn("LAB-FILES-001", summary, impact, "labctl render", auto_fixable=True)
