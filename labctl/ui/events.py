"""Server-sent events of a run under way: each page gets what is new to it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
from msgspec.structs import asdict

from labctl.ui import log
from labctl.ui.live_charts import MetricsReader, NewPoints, read_samples
from labctl.ui.site import event
from labctl.ui.watcher import State, Watcher, Watchers

TICK = 0.5
"""Seconds between two checks for new data."""
HEARTBEAT = 15
"""Seconds of silence after which a page is told that it is connected."""
RETRY, BEAT = "retry: 2000\n\n", ": connected\n\n"
FIRST_LINES, MOST_LINES = 300, 150
"""Lines of the log in the first and in each later event, at most."""
News = tuple[str, Any]
"""Name and data of an event."""
PLACE = re.compile(r"\d{1,15}(-\d{1,15})+")
"""Id of the last of several events: offsets in the log, in the metrics, and in the samples of each node."""


async def stream(watchers: Watchers, run_id: str, place: str) -> AsyncIterator[str]:
    """Yield the events of a run after the one with this id (empty: all), until the run has ended."""
    import anyio
    from anyio.to_thread import run_sync

    with watchers.watching(run_id) as watcher:
        reader = Reader(watcher, place)
        yield RETRY
        silence = 0.0
        while not reader.ended:
            text = await run_sync(reader.read)
            silence = 0 if text else silence + TICK
            if text or silence >= HEARTBEAT:
                yield text or BEAT
                silence = 0
            await anyio.sleep(TICK)


class Reader:
    """Reader of the events of a run, which remembers what its page has received."""

    def __init__(self, watcher: Watcher, place: str) -> None:
        """Begin after the event with this id; from the beginning if it is empty."""
        self.ended = False
        self._watcher = watcher
        offsets = [int(number) for number in place.split("-")] if PLACE.fullmatch(place) else [0, 0]
        self._log: int | None = offsets[0] or None
        self._metrics = offsets[1]
        nodes = len(watcher.tables)
        self._samples = (offsets[2:] + [0] * nodes)[:nodes]
        self._of_metrics = MetricsReader(watcher.charts, watcher.job)
        self._charts: set[str] = set()
        self._new = NewPoints()
        self._state: State | None = None

    def read(self) -> str:
        """Return the new events, the last one with the id of them all; empty if there are none."""
        # Asked first: what was printed before the end is read below.
        self.ended = self._watcher.has_ended
        news = [*self._points(), *self._lines(), *self._changed()]
        if self.ended:
            news.append(("ended", {}))
        if not news:
            return ""
        *others, last = news
        place = "-".join(map(str, (self._log or 0, self._metrics, *self._samples)))
        return "".join((*(event(*each) for each in others), event(*last, place)))

    def _points(self) -> Iterator[News]:
        """Yield new charts, then new points."""
        new = self._new = NewPoints(self._new)
        self._metrics = self._of_metrics.read(self._watcher.folder, self._metrics, new)
        read_samples(self._watcher.charts, self._watcher.tables, self._samples, new)
        for name, chart in new.charts.items():
            if name not in self._charts:
                self._charts.add(name)
                yield "chart", {**asdict(chart), "section": self._watcher.charts.section(chart)}
        if points := new.points():
            yield "points", points

    def _lines(self) -> Iterator[News]:
        """Yield the new lines of the log."""
        most = FIRST_LINES if self._log is None else MOST_LINES
        if new := log.new_lines(self._watcher.folder, self._log, most):
            self._log = new.end
            yield "log", new

    def _changed(self) -> Iterator[News]:
        """Yield the state of the run if more than its time has changed."""
        state = self._watcher.state()
        if self._state != (same := msgspec.structs.replace(state, seconds=0)):
            self._state = same
            yield "state", flat(state)


def flat(state: State) -> dict[str, Any]:
    """Return a state with the fields of its progress beside its own."""
    fields = asdict(state)
    return {**asdict(fields.pop("progress")), **fields}
