"""Charts of HTML pages: drawn by matplotlib as SVG, in the page's own colors and font."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from labctl.reports.page import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS = 12
"""Bars with a name; the rest share one row."""
BINS = 80
# Inches: so narrow that text of 10 points is readable on a phone, where the page shrinks it.
_WIDTH, _ROW, _FRAME = 4.2, 0.23, 0.5
# Colors that stand for the page's own, which differ in the dark and in print.
_INK, _GRID, _GOOD, _BAD = "#1f2328", "#d0d7de", "#0072b2", "#b54708"
_COLORS = {_INK: "var(--ink)", _GRID: "var(--line)", _GOOD: "var(--good)", _BAD: "var(--bad)"}


class Bar(Struct, frozen=True, kw_only=True):
    """A value with its limit, both in the chart's unit; ``passed`` is None without a limit."""

    name: str
    value: float | None
    limit: float | None = None
    passed: bool | None = None


def bars(bars: Sequence[Bar], unit: str, alt: str) -> str:
    """An SVG of horizontal bars from zero: the first ``ROWS`` by name, and how all the others are distributed.

    A dashed line is the limit. A bar that missed it is hatched, and has a cross: it shows without color too.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown, others = bars[:ROWS], bars[ROWS:]
    names = [_short(bar.name) for bar in shown] + ([_count(others)] if others else [])
    # Text stays text, and a `$` begins no formula. The salt makes ids the same every time, and different by chart.
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "text.parse_math": False,
        "svg.hashsalt": alt,
        "hatch.linewidth": 1.5,
        "font.family": "DejaVu Sans",
    }
    with rc_context(style), StringIO() as stream:
        figure = Figure(figsize=(_WIDTH, _FRAME + _ROW * (len(names) + 1)), layout="constrained")
        axes = figure.subplots()
        _frame(axes, names, unit, max(map(_end, bars)))
        for row, bar in enumerate(shown):
            _bar(axes, row, bar)
        if others:
            _others(axes, len(shown), others)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
        return _inline(stream.getvalue(), alt)


def _frame(axes: Axes, names: Sequence[str], unit: str, longest: float) -> None:
    axes.set_xlim(0, 1.2 * longest or 1)  # Room for the number behind the longest bar.
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names)
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    axes.set_xlabel(unit, color=_INK)
    axes.tick_params(length=0, labelcolor=_INK)
    axes.grid(visible=True, axis="x", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _bar(axes: Axes, row: int, bar: Bar) -> None:
    missed = bar.passed is False
    if bar.value is not None:
        axes.barh(row, bar.value, 0.66, **_fill(missed=missed))
    _limit(axes, row, bar.limit)
    text = f"{'✕ ' if missed else ''}{number(bar.value)}"
    axes.annotate(text, (_end(bar), row), (4, 0), textcoords="offset points", va="center", color=_INK)


def _end(bar: Bar) -> float:
    """Where the number stands: behind the bar and its limit."""
    return max(bar.value or 0, bar.limit or 0)


def _others(axes: Axes, row: int, others: Sequence[Bar]) -> None:
    """How many of the others have which value: a histogram as high as a row, those that missed on top."""
    import numpy as np

    edges = np.linspace(*axes.get_xlim(), BINS + 1)
    missed, rest = (
        np.histogram([bar.value for bar in others if bar.value is not None and (bar.passed is False) == bad], edges)[0]
        for bad in (True, False)
    )
    base, scale = row + 0.4, 0.8 / max(1, *(missed + rest))
    middle, top = base - scale * rest, base - scale * (missed + rest)
    axes.stairs(middle, edges, baseline=base, **_fill(missed=False))
    if any(missed):
        axes.stairs(top, edges, baseline=middle, **_fill(missed=True) | {"linewidth": 0})
    if len({bar.limit for bar in others}) == 1:
        _limit(axes, row, others[0].limit)


def _limit(axes: Axes, row: int, limit: float | None) -> None:
    """A part of the dashed line; each row has its own, as limits may differ."""
    if limit is not None:
        axes.plot([limit, limit], [row - 0.5, row + 0.5], color=_INK, linewidth=1.5, dashes=(2.5, 1.5))


def _fill(*, missed: bool) -> dict[str, Any]:
    if missed:
        return {"facecolor": "none", "edgecolor": _BAD, "hatch": "////", "linewidth": 1, "fill": True}
    return {"facecolor": _GOOD, "edgecolor": _GOOD, "linewidth": 0, "fill": True}


def _count(others: Sequence[Bar]) -> str:
    missed = sum(bar.passed is False for bar in others)
    return f"{len(others):,} others" + (f", ✕ {missed:,}" if missed else "")


def _short(name: str) -> str:
    return name if len(name) <= 26 else f"{name[:12]}…{name[-13:]}"


def _inline(drawing: str, alt: str) -> str:
    """The drawing as a part of a page: without what only a file of its own needs, and in the page's colors."""
    from html import escape

    body = drawing[drawing.index(">", drawing.index("<svg")) + 1 :]
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.DOTALL)
    # Ids of groups are the same in each drawing, and nothing uses them.
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href=", "href=")
    body = re.sub("|".join(_COLORS), lambda color: _COLORS[color[0]], body)
    body = re.sub(r"\s*\n\s*", " ", body).strip()
    size = re.search(r'viewBox="[^"]*"', drawing)
    return f'<svg {size[0] if size else ""} role="img" aria-label="{escape(alt)}">{body}'
