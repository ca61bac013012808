"""Code, data and models on a host: commits of clones, digests of data, revisions in the cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Literal

from labctl.backends.docker.hosts.ssh import Connection

Kind = Literal["code", "data", "snapshot"]
Sources = Mapping[tuple[Kind, str], str]
SCRIPT = Path(__file__).with_name("sources.sh").read_text(encoding="utf-8")
CHANGED = " changed"
"""Suffix of the commit of a clone that differs from it."""


def read(connection: Connection, asked: Iterable[tuple[Kind, str]], seconds: float) -> Sources:
    """Return the commit, digest or revision of each path on the host that has one. HostError if the script fails."""
    keys = list(asked)
    if not keys:
        return {}
    lines = connection.run(SCRIPT, *chain.from_iterable(keys), timeout=seconds).out.splitlines()
    rows = (line.split("\t") for line in lines)
    values: dict[tuple[str, str], str] = {(row[0], row[1]): row[2] for row in rows if len(row) == 3}
    return {key: values[key] for key in keys if key in values}
