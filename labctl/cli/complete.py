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
HOSTFILES = "hostfiles/*/hostfile*"


def of_lab(ctx: typer.Context, incomplete: str, words: Words) -> list[str]:
    """Return those of a lab's words that begin with a text; none for a lab or files that cannot be read."""
    # A home directory that is not known is a RuntimeError.
    with suppress(LabError, OSError, ValueError, RuntimeError):
        return beginning(incomplete, words(lab_of(ctx)))
    return []


def beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    """Return the words that begin with a text."""
    return [word for word in words if word.startswith(incomplete)]


def lab_of(ctx: typer.Context) -> Context:
    """Return the lab of -C, or the nearest one."""
    named = Path(ctx.params.get("directory") or "").expanduser()
    directory = find_lab(Path.cwd(), os.environ) if named == Path() else named
    return Context(directory=directory, environ=os.environ, emit=lambda _: None, flags={})


def run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return runs, the latest first; short ids if no id begins so."""

    def names(lab: Context) -> Iterable[str]:
        from labctl.records import store

        run_ids = store.ids(lab.directory)
        whole = ["latest", *run_ids]
        return whole if beginning(incomplete, whole) else store.short_ids(run_ids).values()

    return of_lab(ctx, incomplete, names)


def workload(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of workloads."""
    from labctl import flows

    return of_lab(ctx, incomplete, lambda lab: [each.name for each in flows.workloads(lab).workloads])


def node(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the launcher and the workers."""
    return of_lab(ctx, incomplete, nodes)


def node_or_host(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the workers, and the hosts of LAB_HOSTS."""
    return of_lab(ctx, incomplete, lambda lab: [*nodes(lab)[1:], *hosts(lab)])


def nodes(lab: Context) -> list[str]:
    """Return the launcher and the workers that a lab has rendered, else those that it will have."""
    rendered = [path.name for path in (lab.directory / ".lab/nodes").glob("worker-*")]
    if rendered:
        return ["launcher", *sorted(rendered, key=lambda name: (len(name), name))]
    expected = len(hosts(lab)) or int(lab.declared().text("LAB_NODES") or NODES)
    return ["launcher", *(f"worker-{number}" for number in range(expected))]


def hosts(lab: Context) -> list[str]:
    """Return the names in the file of LAB_HOSTS; none without one."""
    from labctl.config import inventory

    file = lab.declared().text("LAB_HOSTS")
    return [host.name for host in inventory.read(lab.directory / file)] if file else []


def launcher(incomplete: str) -> list[str]:
    """Return the launchers."""
    from labctl import launchers

    return beginning(incomplete, launchers.known())


def profile(incomplete: str) -> list[str]:
    """Return the profiles of `validate`."""
    from labctl.batches import profile as profiles

    return beginning(incomplete, profiles.names())


def pattern(incomplete: str) -> list[str]:
    """Return the patterns of `hostfiles`."""
    from labctl.batches.hostfiles import Pattern

    return beginning(incomplete, get_args(Pattern))


def setting(incomplete: str) -> list[str]:
    """Return ``KEY=`` for each setting; of a single one in bash also ``KEY=VALUE``, or it adds a blank after ``=``."""
    from labctl.config.settings import SETTINGS

    keys = beginning(incomplete, (f"{each.key}=" for each in SETTINGS))
    if len(keys) == 1 and os.environ.get("_LABCTL_COMPLETE") == "complete_bash":
        keys += beginning(incomplete, [f"{keys[0]}VALUE"])
    return keys


def hostfile_set(incomplete: str) -> list[str]:
    """Return the directories of hostfiles below ``hostfiles/`` of the current directory."""
    return beginning(incomplete, sorted({str(path.parent) for path in Path().glob(HOSTFILES)}))
