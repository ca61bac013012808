"""The answer of `labctl cache`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from labctl.hub.client import Kind
from labctl.model import HostFailure

State = Literal["present", "to fetch", "fetched", "unchecked"]


class HostCache(Struct, frozen=True, kw_only=True):
    """Part of the cache that a host was sent, or is to be sent: nothing if it had all."""

    host: str
    files: int
    bytes: int


class Item(Struct, frozen=True, kw_only=True):
    """A repository in the cache. ``unchecked``: complete, but not compared with the hub."""

    kind: Kind
    name: str
    revision: str
    bytes: int
    fetched_bytes: int
    state: State


class CacheReport(Struct, frozen=True, kw_only=True):
    """The repositories that were asked for, in the shared cache; ``workload`` is empty if none was named."""

    workload: str
    cache: str
    items: tuple[Item, ...]
    seconds: float
    hosts: tuple[HostCache, ...] = ()
    """Parts of the cache that each host was sent, or with a dry run is to be sent."""
    failed: tuple[HostFailure, ...] = ()
    """Hosts that did not get it."""
