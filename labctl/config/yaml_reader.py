"""A strict YAML reader; errors are ``path:line: reason``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from labctl.errors import ConfigError, did_you_mean


def compose(path: Path, shown: str, hint: str = "") -> Value:
    """The root of a YAML file; ConfigError with ``shown:line`` for what is not YAML, not UTF-8 or empty (``hint``)."""
    import yaml

    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{shown}:1: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown}:{error.object.count(10, 0, error.start) + 1}: is not UTF-8") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{shown}:{line}: contains a control character") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{shown}:{line}: is not YAML: {error.problem}") from error
    except RecursionError as error:
        raise ConfigError(f"{shown}:1: is nested too deeply") from error
    if node is None:
        raise ConfigError(f"{shown}:1: is empty", hint=hint)
    return Value(shown, node.start_mark.line + 1, path.name, node)


class Value(Struct, frozen=True):
    """A YAML node with its name and line; methods raise ConfigError, ``path:line: reason``."""

    path: str
    line: int
    name: str
    node: Any

    def error(self, reason: str, hint: str = "") -> ConfigError:
        return ConfigError(f"{self.path}:{self.line}: {reason}", hint=hint)

    def read(
        self, schema: Schema, required: Iterable[str] = (), former: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The mapping, each key read by the schema; unknown keys are errors.

        ``former`` maps deprecated keys, still accepted, to the current ones.
        """
        entries = self.entries(schema, former)
        for key in required:
            if key not in entries:
                raise self.error(f"`{self.name}` has no `{key}`")
        return {key: schema[key](value) for key, value in entries.items()}

    def entries(
        self, known: Collection[str] | None = None, former: Mapping[str, str] | None = None
    ) -> dict[str, Value]:
        self._must_be("mapping")
        entries: dict[str, Value] = {}
        for key, node in self.node.value:
            value = Value(self.path, key.start_mark.line + 1, str(key.value), node)
            if key.id != "scalar":
                raise value.error(f"a key of `{self.name}` must be text")
            name = (former or {}).get(value.name, value.name)
            if known is not None and name not in known:
                raise value.error(f"unknown key `{name}`", hint=did_you_mean(name, known))
            if name in entries:
                raise value.error(f"duplicate key `{name}`, first on line {entries[name].line}")
            entries[name] = value
        return entries

    def items(self) -> list[Value]:
        self._must_be("sequence")
        return [Value(self.path, node.start_mark.line + 1, self.name, node) for node in self.node.value]

    def text(self) -> str:
        self._must_be("scalar")
        text, kind = str(self.node.value), self.node.tag.rpartition(":")[2]
        if kind not in ("str", "int", "float"):
            raise self.error(f"`{self.name}` is {text or 'empty'}, which YAML reads as {kind}; quote it")
        if "\0" in text:
            raise self.error(f"`{self.name}` contains a NUL byte")
        return text

    def number(self) -> float:
        number = finite(self.text()) if self.node.style is None else None
        if number is None:
            raise self.error(f"`{self.name}` must be a number, not `{self.node.value}`")
        return number

    def whole(self) -> int:
        text = self.text()
        if self.node.style is not None or not re.fullmatch("0|[1-9][0-9_]{0,29}", text):
            raise self.error(f"`{self.name}` must be a whole number, not `{text}`")
        return int(text.replace("_", ""))

    def choice(self, known: Collection[str]) -> str:
        text = self.text()
        if text not in known:
            raise self.error(f"unknown {self.name} `{text}`", hint=did_you_mean(text, known))
        return text

    def data(self) -> Any:
        """The value as plain data; 1e-5, text in YAML 1.1, is a number."""
        if self.node.id == "mapping":
            return {name: value.data() for name, value in self.entries().items()}
        if self.node.id == "sequence":
            return [item.data() for item in self.items()]
        import yaml

        value = yaml.SafeLoader("").construct_object(self.node)
        number = finite(value) if isinstance(value, str) and self.node.style is None else None
        return value if number is None else number

    def _must_be(self, kind: str) -> None:
        if self.node.id != kind:
            raise self.error(f"`{self.name}` must be {_KINDS[kind]}, not {_KINDS[self.node.id]}")


Schema = dict[str, Callable[[Value], Any]]
_KINDS = {"scalar": "text", "sequence": "a list", "mapping": "a mapping"}


def finite(text: str) -> float | None:
    """The text as a number; None for nan, infinity and anything else."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
