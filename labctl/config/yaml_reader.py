"""A strict YAML reader; errors are ``path:line: reason``."""

from __future__ import annotations

import math
import os
import re
import shlex
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from msgspec import Struct

from labctl.errors import ConfigError, did_you_mean

LARGEST = 1 << 20
"""Maximum size of a file in bytes."""
MOST_VALUES = 200_000
"""Maximum number of values in a document, with its aliases expanded."""
DEEPEST = 100
"""Maximum depth of a document, with its aliases expanded."""


def compose(path: Path, shown: str, hint: str = "") -> Value:
    """Return the root of a YAML file, named ``shown`` in errors. ConfigError if unreadable, invalid or empty.

    It is raised for a file that is invalid, not UTF-8, empty (``hint``), too large or nested too deeply.
    """
    import yaml

    (root,) = _nodes(path, shown, lambda text: [yaml.compose(text, Loader=yaml.SafeLoader)])
    if root is None:
        raise ConfigError(f"{shown}:1: is empty", hint=hint)
    return Value(shown, root.start_mark.line + 1, path.name, root)


def documents(path: Path, shown: str) -> list[Value]:
    """Return the roots of a YAML file's documents without empty ones. ConfigError if unreadable or invalid."""
    import yaml

    nodes = _nodes(path, shown, lambda text: list(yaml.compose_all(text, Loader=yaml.SafeLoader)))
    filled = (node for node in nodes if node.id != "scalar" or node.value)
    return [Value(shown, node.start_mark.line + 1, path.name, node) for node in filled]


def _nodes(path: Path, shown: str, parse: Callable[[str], list[Any]]) -> list[Any]:
    """Return a file's YAML nodes by ``parse``. ConfigError with line if it is not text, not YAML, or too large."""
    import yaml

    text = ""
    try:
        text = content(path, shown).decode("utf-8")
        nodes = parse(text)
        for node in filter(None, nodes):
            _measure(node, shown, {})
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown}:{error.object.count(10, 0, error.start) + 1}: is not UTF-8") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{shown}:{line}: contains a control character") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        hint = "indent with spaces, not with tabs" if r"'\t'" in str(error.problem) else ""
        raise ConfigError(f"{shown}:{line}: not YAML: {error.problem}", hint=hint) from error
    except RecursionError as error:
        raise ConfigError(f"{shown}:1: is nested too deeply") from error
    return nodes


def content(path: Path, shown: str) -> bytes:
    """Return a regular file's bytes without waiting for a pipe. ConfigError if no file or larger than 1 MiB."""
    try:
        # Opening a named pipe without a writer would block.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{shown}:1: is not a regular file", hint=f"ls -l {shlex.quote(str(path))}")
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"{shown}:1: cannot be read: {error.strerror}") from error
    if len(data) > LARGEST:
        raise ConfigError(f"{shown}:1: is larger than 1 MiB", hint=f"ls -lh {shlex.quote(str(path))}")
    return data


def _measure(node: Any, shown: str, measured: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Return a node's number of values and depth, aliases expanded. ConfigError beyond the limits or a loop.

    ``measured`` has the result by id of each node visited, None for the nodes around this one.
    """
    where = f"{shown}:{node.start_mark.line + 1}"
    if id(node) in measured:
        if not (result := measured[id(node)]):
            raise ConfigError(f"{where}: an alias contains itself", hint="write it out")
        return result
    measured[id(node)] = None
    children = [_measure(child, shown, measured) for child in _children(node)]
    values = 1 + sum(count for count, _ in children)
    depth = 1 + max((levels for _, levels in children), default=0)
    if values > MOST_VALUES:
        raise ConfigError(f"{where}: holds more than {MOST_VALUES} values with its aliases")
    if depth > DEEPEST:
        raise ConfigError(f"{where}: is nested too deeply, over {DEEPEST} levels")
    measured[id(node)] = values, depth
    return values, depth


def _children(node: Any) -> Iterable[Any]:
    """Return the nodes below a node: keys and values of a mapping, items of a sequence, none of a scalar."""
    if node.id == "mapping":
        return chain(*node.value)
    return () if node.id == "scalar" else node.value


class Value(Struct, frozen=True):
    """A YAML node with its name and line; methods raise ConfigError, ``path:line: reason``."""

    path: str
    line: int
    name: str
    node: Any

    def error(self, reason: str, hint: str = "") -> ConfigError:
        """Return a ConfigError, not raised, that names file and line."""
        return ConfigError(f"{self.path}:{self.line}: {reason}", hint=hint)

    def read(
        self, schema: Schema, required: Iterable[str] = (), former: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Return a mapping with each value converted by the schema. ConfigError for unknown and missing keys.

        ``former`` maps deprecated keys, still accepted, to the current ones.
        """
        entries = self.entries(schema, former)
        for key in required:
            if key not in entries:
                raise self.error(f"`{self.name}` has no `{key}`")
        return {key: schema[key](value) for key, value in entries.items()}

    def entries(self, keys: Collection[str] | None = None, former: Mapping[str, str] | None = None) -> dict[str, Value]:
        """Return a mapping's values by key, ``former`` keys renamed. ConfigError for duplicate and unknown keys."""
        self._must_be("mapping")
        entries: dict[str, Value] = {}
        for key, node in self.node.value:
            value = Value(self.path, key.start_mark.line + 1, str(key.value), node)
            if key.id != "scalar":
                raise value.error(f"a key of `{self.name}` must be text")
            name = (former or {}).get(value.name, value.name)
            if keys is not None and name not in keys:
                raise value.error(f"unknown key `{name}`", hint=did_you_mean(name, keys))
            if name in entries:
                raise value.error(f"duplicate key `{name}`, first on line {entries[name].line}")
            entries[name] = value
        return entries

    def items(self) -> list[Value]:
        """Return the items of a sequence. ConfigError for another type."""
        self._must_be("sequence")
        return [Value(self.path, node.start_mark.line + 1, self.name, node) for node in self.node.value]

    def flag(self) -> bool:
        """Return true or false. ConfigError for another type."""
        flag = self.data()
        if not isinstance(flag, bool):
            raise self.error(f"`{self.name}` must be true or false")
        return flag

    def text(self) -> str:
        """Return the text of a string, integer or float. ConfigError for other types, such as dates and ``yes``."""
        self._must_be("scalar")
        text, kind = str(self.node.value), self.node.tag.rpartition(":")[2]
        if kind not in ("str", "int", "float"):
            raise self.error(f"`{self.name}` is {text or 'empty'}, which YAML reads as {kind}; quote it")
        if "\0" in text:
            raise self.error(f"`{self.name}` contains a NUL byte")
        return text

    def number(self) -> float:
        """Return the finite number of an unquoted scalar. ConfigError otherwise."""
        number = finite(self.text()) if self.node.style is None else None
        if number is None:
            raise self.error(f"`{self.name}` must be a number, not `{self.node.value}`")
        return number

    def whole(self) -> int:
        """Return the whole number, 0 or more, of an unquoted scalar. ConfigError otherwise."""
        text = self.text()
        if self.node.style is not None or not re.fullmatch("0|[1-9][0-9_]{0,29}", text):
            raise self.error(f"`{self.name}` must be a whole number, not `{text}`")
        return int(text.replace("_", ""))

    def choice(self, choices: Collection[str]) -> str:
        """Return the text if it is one of the choices. ConfigError, with the nearest as hint, otherwise."""
        text = self.text()
        if text not in choices:
            raise self.error(f"unknown {self.name} `{text}`", hint=did_you_mean(text, choices))
        return text

    def data(self, tags: Collection[str] = ()) -> Any:
        """Return plain data, with ``{tag: value}`` for values with an allowed tag. ConfigError for other tags.

        1e-5, which YAML 1.1 reads as text, is a number.
        """
        tag = self.node.tag
        if tag.startswith("!") and tag not in tags:
            raise self.error(f"unknown tag `{tag}`", hint="quote the value if it begins with `!`")
        if self.node.id == "mapping":
            value: Any = {name: value.data(tags) for name, value in self.entries().items()}
        elif self.node.id == "sequence":
            value = [item.data(tags) for item in self.items()]
        else:
            value = self._scalar()
        return {tag: value} if tag in tags else value

    def _scalar(self) -> Any:
        """Return a scalar as YAML 1.1 reads it, but unquoted finite numbers as numbers. ConfigError if invalid."""
        import yaml

        loader: Any = yaml.SafeLoader("")
        node, plain = self.node, self.node.style is None
        if node.tag.startswith("!"):
            node = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, node.value, (plain, not plain)), node.value)
        try:
            value = loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise self.error(
                f"`{self.name}` cannot be read as {node.tag}: {getattr(error, 'problem', error)}"
            ) from error
        number = finite(value) if isinstance(value, str) and plain else None
        return value if number is None else number

    def _must_be(self, kind: str) -> None:
        """Raise ConfigError unless the node is a ``mapping``, ``sequence`` or ``scalar``, as ``kind`` says."""
        if self.node.id != kind:
            raise self.error(f"`{self.name}` must be {_KINDS[kind]}, not {_KINDS[self.node.id]}")


Schema = dict[str, Callable[[Value], Any]]
_KINDS = {"scalar": "text", "sequence": "a list", "mapping": "a mapping"}


def finite(text: str) -> float | None:
    """Parse a finite number; return None for nan, infinity and any other text."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
