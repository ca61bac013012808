"""Charts of the HTML pages, drawn by matplotlib as SVG in the page's colors and font."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from labctl.reports.curves import STYLES, Chart, Line
from labctl.system import human

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS = 12
"""Bars with a row of their own; the others share one row."""
BINS = 80
"""Bins of the histogram in the shared row."""
POINTS = 240
"""Points of a line above which it is thinned out."""
# Inches: narrow enough that text of 10 points is readable on a phone, on which the page shrinks it.
_WIDTH, _ROW, _FRAME, _CURVE = 4.2, 0.23, 0.5, 2.6
# Placeholders of the page's CSS variables, which differ in dark mode and in print.
_INK, _GRID, _GOOD, _BAD = "#1f2328", "#d0d7de", "#0072b2", "#b54708"
_COLORS = {_INK: "var(--ink)", _GRID: "var(--line)", _GOOD: "var(--bar)", _BAD: "var(--bad)"}


class Bar(Struct, frozen=True, kw_only=True):
    """A value with its limit, in the chart's unit; ``passed`` is None without a limit."""

    name: str
    value: float | None
    limit: float | None = None
    passed: bool | None = None


class Drawing:
    """A chart, to render as part of a page or as a picture; ``alt`` is its text alternative."""

    def __init__(self, figure: Figure, alt: str) -> None:
        self._figure, self.alt = figure, alt

    def svg(self) -> str:
        """Render the chart as SVG, in the page's colors and font."""
        with _style(self.alt), StringIO() as stream:
            nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            self._figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
            return _inline(stream.getvalue(), self.alt)

    def png(self) -> bytes:
        """Render the chart as PNG on white, for print."""
        with _style(self.alt), BytesIO() as stream:
            self._figure.savefig(stream, format="png", dpi=200, facecolor="white")
            return stream.getvalue()


def bars(bars: Sequence[Bar], unit: str, alt: str) -> Drawing:
    """Draw horizontal bars from zero: the first ``ROWS`` in a row each, the others as a histogram in one row.

    The limit is a dashed line. A bar that missed it is hatched and has a cross, so that it shows without color.
    """
    shown, others = bars[:ROWS], bars[ROWS:]
    names = [_short(bar.name) for bar in shown] + ([_count(others)] if others else [])
    with _style(alt):
        figure, axes = _figure(_FRAME + _ROW * (len(names) + 1))
        _frame(axes, names, unit, max(map(_end, bars)))
        for row, bar in enumerate(shown):
            _bar(axes, row, bar)
        if others:
            _others(axes, len(shown), others)
        return Drawing(figure, alt)


def curves(chart: Chart) -> Drawing:
    """Draw a chart's lines over a number such as the step, with different colors, dashes and marks.

    A line of many points, or with several of one x, is drawn as the median of each part in a band of all values.
    """
    alt, lines = f"{chart.title}: {chart.caption}", chart.lines
    with _style(alt):
        figure, axes = _figure(_CURVE + (_ROW * math.ceil(len(lines) / 2) if len(lines) > 1 else 0))
        for line in lines:
            _plot(axes, line)
        _axes(axes)
        axes.set_xlabel(chart.along, color=_INK)
        axes.set_ylabel(f"{chart.title} ({chart.unit})" if chart.unit else chart.title, color=_INK)
        axes.locator_params(nbins=6)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: human.number(value))
        if len(lines) > 1:
            figure.legend(loc="outside lower center", ncols=2, frameon=False, labelcolor=_INK, handlelength=3.5)
        return Drawing(figure, alt)


def _plot(axes: Any, line: Line) -> None:
    """Draw a line with its color, dashes and marks, and its band if it has one."""
    color, (_, dashes, mark) = STYLES[line.color][0], STYLES[line.dash]
    x, middle, low, high = _with_band(line) if line.band else _thinned(line.points)
    axes.plot(
        x, middle, label=_short(line.name), color=color, dashes=dashes or (None, None), linewidth=1.5,
        marker=mark, markersize=4, markevery=_marked(middle),
    )  # fmt: skip
    if low is not None:
        axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def _marked(y: Any) -> list[int]:
    """Return the indices of a line's marks: each sixth of it, and points between gaps, which no line shows."""
    import numpy as np

    gap = np.isnan([math.nan, *y, math.nan])
    alone = ~gap[1:-1] & gap[:-2] & gap[2:]
    return sorted({*range(0, len(y), max(1, len(y) // 6)), *np.flatnonzero(alone).tolist()})


def _with_band(line: Line) -> tuple[Any, Any, Any, Any]:
    """Return x, y, lowest and highest values of a line that stands for several."""
    import numpy as np

    return *np.array(line.points, dtype=float).T, *np.array(line.band, dtype=float).T


def _thinned(points: Sequence[tuple[float, float | None]]) -> tuple[Any, Any, Any, Any]:
    """Return x, y, None, None; if too many or one x twice, x, medians, minima and maxima of POINTS parts."""
    import numpy as np

    x, y = np.array([(at, math.nan if value is None else value) for at, value in points], dtype=float).T
    if len(x) <= POINTS and len(np.unique(x)) == len(x):
        return x, y, None, None
    parts = np.unique(np.floor((x - x.min()) / ((x.max() - x.min()) or 1) * (POINTS - 1)), return_inverse=True)[1]
    kept = [y[(parts == part) & np.isfinite(y)] for part in range(parts.max() + 1)]
    middles = [np.mean(x[parts == part]) for part in range(parts.max() + 1)]
    rows = [(np.median(values), values.min(), values.max()) if len(values) else (math.nan,) * 3 for values in kept]
    return np.array(middles), *np.array(rows).T


def _style(alt: str) -> AbstractContextManager[None]:
    """Set matplotlib's style for a block: text stays text without formulas, and ids are stable and unique per chart."""
    from matplotlib import rc_context

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "text.parse_math": False,
        "svg.hashsalt": alt,
        "hatch.linewidth": 1.5,
        "font.family": "DejaVu Sans",
    }
    return rc_context(style)


def _figure(height: float) -> tuple[Figure, Axes]:
    """Create a figure of this height in inches, with its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _axes(axes: Axes) -> None:
    """Style the axes: a grid, no ticks, no frame."""
    axes.tick_params(length=0, labelcolor=_INK)
    axes.grid(visible=True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _frame(axes: Axes, names: Sequence[str], unit: str, longest: float) -> None:
    """Set up axes for bars: a row per name, the x axis from 0 to 1.2 times the longest, labelled with the unit."""
    axes.set_xlim(0, 1.2 * longest or 1)  # Room for the number behind the longest bar.
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names)
    axes.locator_params(axis="x", nbins=6)
    axes.xaxis.set_major_formatter(lambda value, _: human.number(value))
    axes.set_xlabel(unit, color=_INK)
    _axes(axes)
    axes.grid(visible=False, axis="y")


def _bar(axes: Axes, row: int, bar: Bar) -> None:
    """Draw a bar, none without a value, with limit and number; hatched and with a cross if it missed the limit."""
    missed = bar.passed is False
    if bar.value is not None:
        axes.barh(row, bar.value, 0.66, **_fill(missed=missed))
    _limit(axes, row, bar.limit)
    text = f"{'✕ ' if missed else ''}{human.number(bar.value)}"
    axes.annotate(text, (_end(bar), row), (4, 0), textcoords="offset points", va="center", color=_INK)


def _end(bar: Bar) -> float:
    """Return the bar's value or its limit, whichever is larger: where its number is written."""
    return max(bar.value or 0, bar.limit or 0)


def _others(axes: Axes, row: int, others: Sequence[Bar]) -> None:
    """Draw bars as a histogram in one row, those that missed on top, with their limit if all have the same."""
    import numpy as np

    edges = np.linspace(*axes.get_xlim(), BINS + 1)
    missed = np.histogram(_values(bar for bar in others if bar.passed is False), edges)[0]
    rest = np.histogram(_values(bar for bar in others if bar.passed is not False), edges)[0]
    base, scale = row + 0.4, 0.8 / max(1, *(missed + rest))
    middle, top = base - scale * rest, base - scale * (missed + rest)
    axes.stairs(middle, edges, baseline=base, **_fill(missed=False))
    if any(missed):
        axes.stairs(top, edges, baseline=middle, **_fill(missed=True) | {"linewidth": 0})
    if len({bar.limit for bar in others}) == 1:
        _limit(axes, row, others[0].limit)


def _values(bars: Iterable[Bar]) -> list[float]:
    """Return the values of bars that have one."""
    return [bar.value for bar in bars if bar.value is not None]


def _limit(axes: Axes, row: int, limit: float | None) -> None:
    """Draw a row's part of the dashed limit line; limits may differ by row."""
    if limit is not None:
        axes.plot([limit, limit], [row - 0.5, row + 0.5], color=_INK, linewidth=1.5, dashes=(2.5, 1.5))


def _fill(*, missed: bool) -> dict[str, Any]:
    """Return matplotlib's arguments for the area of a bar, hatched if it missed its limit."""
    if missed:
        return {"facecolor": "none", "edgecolor": _BAD, "hatch": "////", "linewidth": 1, "fill": True}
    return {"facecolor": _GOOD, "edgecolor": _GOOD, "linewidth": 0, "fill": True}


def _count(others: Sequence[Bar]) -> str:
    """Return ``20 others``, and how many of them missed their limit, if any."""
    missed = sum(bar.passed is False for bar in others)
    return f"{len(others):,} others" + (f", ✕ {missed:,}" if missed else "")


def _short(name: str) -> str:
    """Return a name, with its middle cut out if it has more than 26 characters."""
    return name if len(name) <= 26 else f"{name[:12]}…{name[-13:]}"


def _inline(drawing: str, alt: str) -> str:
    """Return the SVG as part of a page: in the page's colors, without metadata, styles and ids."""
    from html import escape

    body = drawing[drawing.index(">", drawing.index("<svg")) + 1 :]
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.DOTALL)
    # Ids of groups are equal in all drawings, and are not used.
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href=", "href=")
    body = re.sub("|".join(_COLORS), lambda color: _COLORS[color[0]], body)
    body = re.sub(r"\s*\n\s*", " ", body).strip()
    size = re.search(r'viewBox="[^"]*"', drawing)
    return f'<svg {size[0] if size else ""} role="img" aria-label="{escape(alt)}">{body}'
