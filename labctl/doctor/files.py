"""What lies in the lab's directory: whose lab it is, its keys, its rendered files."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from labctl import model, naming
from labctl.compose import ssh_keys
from labctl.deploy import plan
from labctl.doctor.finding import UP, Examination, Finding, error, ok, warn
from labctl.system.files import outdated


def name(examination: Examination) -> Iterator[Finding]:
    """Whether the containers of this name are this directory's."""
    lab = examination.lab
    other = examination.named.owner_elsewhere(lab.directory, lab.owner)
    if other:
        yield error(
            "LAB-NAME-001",
            f"lab `{lab.name}` belongs to {other.name}",
            why="two labs of one name would take each other's nodes",
            fix=examination.put("LAB_NAME", f"{lab.name[:36].rstrip('-')}-2"),
        )


def private_keys(examination: Examination) -> Iterator[Finding]:
    """The keys that the nodes were made with: on disk, pinned, and for nobody else to read."""
    if not examination.observed.containers:
        return
    try:
        yield from judged(examination)
    except PermissionError as failure:
        yield unreadable(examination, failure)


def judged(examination: Examination) -> Iterator[Finding]:
    lab = examination.lab
    gone = ssh_keys.missing(lab)
    for node in examination.names:
        if node in gone:
            why = "without it the node cannot be made or started again"
            yield error("LAB-KEY-001", "its private key is gone", why=why, fix=UP, node=node, runnable=True)
    if gone:
        return
    unpinned = ssh_keys.unpinned(lab)
    for node in (one for one in examination.names if one in unpinned):
        yield error(
            "LAB-KEY-002",
            "its host key is not the one in the launcher's known_hosts, or it does not let the launcher's key in",
            why="the launcher will not log in to it",
            fix=UP,
            node=node,
            runnable=True,
        )
    if not unpinned:
        yield ok("LAB-KEY-002", "host keys are pinned as they are")
    yield from exposed(examination)


def unreadable(examination: Examination, failure: PermissionError) -> Finding:
    """Keys of another user, as `sudo labctl up` leaves them."""
    return error(
        "LAB-KEY-001",
        f"{failure.filename} cannot be read: {failure.strerror}",
        why="labctl compares keys and makes nodes with them",
        fix=f"sudo chown -R {os.getuid()}:{os.getgid()} {shlex.quote(str(examination.lab.directory / '.lab'))}",
    )


def exposed(examination: Examination) -> Iterator[Finding]:
    """Private keys that others than their owner may read."""
    directory = examination.lab.directory
    readable = [path for path in ssh_keys.private(examination.lab) if path.stat().st_mode & 0o077]
    if readable:
        shown = [str(path.relative_to(directory)) for path in readable]
        yield warn(
            "LAB-KEY-003",
            f"others may read {', '.join(shown)}",
            why="who has the key may log in to the nodes, or pass for one",
            fix=shlex.join(("chmod", "600", *shown)),
            runnable=True,
        )


def rendered(examination: Examination) -> Iterator[Finding]:
    """Files that were changed since the nodes were made of them; changed settings are told of node by node."""
    lab = examination.lab
    if not examination.observed.containers or plan.not_current(
        lab, examination.files, examination.observed, (model.LAUNCHER, *(node.name for node in lab.nodes))
    ):
        return
    changed = [file.path for file in outdated(lab.directory, examination.files) if not by_node(examination, file.path)]
    if changed:
        yield warn(
            "LAB-FILES-001",
            f"{', '.join(changed[:3])}{' ...' if len(changed) > 3 else ''}: not what labctl wrote",
            why="`docker compose` by hand would make other nodes than `labctl up`, which writes it anew",
            fix="labctl render",
            runnable=True,
        )
    else:
        yield ok("LAB-FILES-001", f"files under {naming.node_directory('')} are as rendered")


def by_node(examination: Examination, path: str) -> bool:
    """Whether a file is another node's than the one asked about."""
    return bool(examination.only) and Path(path).parts[2] != examination.only
