"""Structs from JSON, in any thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
# msgspec reads the annotations of a struct when it is first decoded, and crashes if two threads do that at once (0.22).
_LOCK = threading.Lock()


def decode(content: bytes | str, kind: type[T]) -> T:
    """Decode JSON. ValueError, of which msgspec.ValidationError is one, or RecursionError if it is no such document."""
    with _LOCK:
        return msgspec.json.decode(content, type=kind, dec_hook=_hook)


def convert(value: Any, kind: type[T]) -> T:
    """Convert decoded JSON. msgspec.ValidationError if it is no such document."""
    with _LOCK:
        return msgspec.convert(value, kind, dec_hook=_hook)


def _hook(kind: type, value: Any) -> Any:
    """Return a path or another type that JSON does not have."""
    return kind(value) if issubclass(kind, Path) else value
