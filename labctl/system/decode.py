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
    """Decode JSON into a ``kind``. ValueError, as msgspec.ValidationError is, or RecursionError if that fails."""
    with _LOCK:
        return msgspec.json.decode(content, type=kind, dec_hook=_hook)


def decode_lines(content: bytes, kind: type[T]) -> list[T]:
    """Decode a JSON value per line into ``kind``. Errors as ``decode``; quicker than line by line."""
    with _LOCK:
        return msgspec.json.Decoder(kind, dec_hook=_hook).decode_lines(content)


def convert(value: Any, kind: type[T]) -> T:
    """Convert decoded JSON into a ``kind``. msgspec.ValidationError if it does not match."""
    with _LOCK:
        return msgspec.convert(value, kind, dec_hook=_hook)


def _hook(kind: type, value: Any) -> Any:
    """Return the value as a path if that is the type, else unchanged."""
    return kind(value) if issubclass(kind, Path) else value
