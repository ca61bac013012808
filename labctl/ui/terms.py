"""Terms of the list's filter that compare an argument, setting or metric of a run with a value."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable

from msgspec import Struct

from labctl.errors import ConfigError

SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}
COLUMNS = ("loss", "throughput", "time", "run", "workload", "verdict", "cause", "node", "note")
"""Names that the page compares itself, by ``COMPARED`` in filter.js."""
# A single leading dash is for "not"; the prefixes are those of MLflow.
_FORM = re.compile(r"(-(?!-))?(?:(metric|param)s?\.)?([^<>=!]+)(<=|>=|!=|=|<|>)(.*)", re.DOTALL)


class Term(Struct, frozen=True, kw_only=True):
    """A comparison of what a run has by a name with a value."""

    shown: str
    """Its name as it was typed."""
    name: str
    """Its name as by ``canonical``."""
    kind: str = ""
    """``metric`` or ``param`` if only these have it; empty for any."""
    sign: str
    value: str
    """Empty for any value."""
    is_negated: bool = False

    def matches(self, values: Iterable[str | float]) -> bool:
        """Return True if one of a run's values holds, or none does if the term is negated."""
        return any(map(self._holds, values)) != self.is_negated

    def _holds(self, value: str | float) -> bool:
        """Return True if a value holds: both are compared as numbers if they are, else as texts for equality."""
        if not self.value:
            return True
        own, limit = number(value), number(self.value)
        if own is not None and limit is not None:
            return SIGNS[self.sign](own, limit)
        is_same = str(value).lower() == self.value.lower()
        return is_same if self.sign == "=" else self.sign == "!=" and not is_same


def read(text: str) -> Term:
    """Return the term that a text is, such as ``--lr<0.01`` or ``-params.lr=0.01``. ConfigError if it is none."""
    match = _FORM.fullmatch(text)
    if not match:
        raise ConfigError(f"cannot parse filter term `{text}`", hint="NAME=VALUE, such as --lr=0.01")
    dash, kind, name, sign, value = match.groups()
    return Term(shown=name, name=canonical(name), kind=kind or "", sign=sign, value=value, is_negated=bool(dash))


def canonical(name: str) -> str:
    """Return a name without its leading dashes, small, with ``_`` for ``-``: ``learning_rate`` is --learning-rate.

    MLflow has names with a dash in backticks.
    """
    return name.strip("`").lstrip("-").replace("-", "_").lower()


def meant(term: Term, names: Iterable[str]) -> list[str]:
    """Return the names that a term means."""
    return [name for name in names if canonical(name) == term.name]


def number(value: str | float) -> float | None:
    """Return a value as a number; None if it is none."""
    try:
        parsed = float(value)
    except ValueError:
        return None
    return None if math.isnan(parsed) else parsed
