"""Words that shells complete: read from files, without an engine, and none where they cannot be read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import get_args

import typer

from labctl.config.context import Context, find_lab
from labctl.errors import LabError

Words = Callable[[Context], Iterable[str]]
"""Function that returns the words of a lab."""
NODES = 2
"""Nodes of a lab that has not been up and sets no number."""


def completed(ctx: typer.Context, incomplete: str, words: Words) -> list[str]:
    """Return those of a lab's words that begin with a text; none for a lab or files that cannot be read."""
    with suppress(LabError, OSError, ValueError):
        return [word for word in words(lab(ctx)) if word.startswith(incomplete)]
    return []


def lab(ctx: typer.Context) -> Context:
    """Return the lab of -C, or the nearest one."""
    named = ctx.params.get("directory")
    directory = Path(named) if named and Path(named) != Path() else find_lab(Path.cwd(), os.environ)
    return Context(directory=directory, environ=os.environ, emit=lambda _: None, flags={})


def run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return runs, the latest first."""
    from labctl.records import store

    return completed(ctx, incomplete, lambda lab: ["latest", *store.ids(lab.directory)])


def workload(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of workloads."""
    from labctl import flows

    return completed(ctx, incomplete, lambda lab: [each.name for each in flows.workloads(lab).workloads])


def node(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the launcher and the workers."""
    return completed(ctx, incomplete, nodes)


def node_or_host(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the workers, and the hosts of LAB_HOSTS."""
    return completed(ctx, incomplete, lambda lab: [*nodes(lab)[1:], *hosts(lab)])


def nodes(lab: Context) -> list[str]:
    """Return the launcher and the workers that a lab has rendered, else those that it will have."""
    rendered = sorted(path.name for path in (lab.directory / ".lab/nodes").glob("worker-*"))
    expected = len(hosts(lab)) or int(lab.declared().text("LAB_NODES") or NODES)
    return ["launcher", *(rendered or (f"worker-{number}" for number in range(expected)))]


def hosts(lab: Context) -> list[str]:
    """Return the names in the file of LAB_HOSTS; none without one."""
    from labctl.config import inventory

    file = lab.declared().text("LAB_HOSTS")
    return [host.name for host in inventory.read(lab.directory / file)] if file else []


def launcher(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the launchers."""
    from labctl import launchers

    return completed(ctx, incomplete, lambda _: launchers.known())


def profile(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the profiles of `validate`."""
    from labctl.batches import profile as profiles

    return completed(ctx, incomplete, lambda _: profiles.names())


def pattern(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the patterns of `hostfiles`."""
    from labctl.batches.hostfiles import Pattern

    return completed(ctx, incomplete, lambda _: get_args(Pattern))


def setting(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return ``KEY=`` for each setting, in bash also ``KEY=VALUE``, without which it adds a blank after ``=``."""
    from labctl.config.settings import SETTINGS

    ends = ("=", "=VALUE") if os.environ.get("_LABCTL_COMPLETE") == "complete_bash" else ("=",)
    return completed(ctx, incomplete, lambda _: [f"{each.key}{end}" for each in SETTINGS for end in ends])


def hostfile_set(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the directories of hostfiles below ``hostfiles/`` of the current directory."""
    return completed(ctx, incomplete, lambda _: sorted({str(path.parent) for path in Path().glob(HOSTFILES)}))


HOSTFILES = "hostfiles/*/hostfile*"
