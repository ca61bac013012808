"""Server-sent events of a run under way: to each page what it has not got yet."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
from msgspec.structs import asdict

from labctl.ui import log
from labctl.ui.growth import Batch, Metrics, read_samples
from labctl.ui.watch import State, Watch, Watches

TICK = 0.5
"""Seconds between two looks at what is new."""
HEARTBEAT = 15
"""Seconds of silence after which a page is told that it is connected."""
RETRY, BEAT = "retry: 2000\n\n", ": connected\n\n"
FIRST_LINES, MOST_LINES = 300, 150
"""Lines of the log that a page gets at first, and with each look, at most."""
PLACE = re.compile(r"\d{1,15}(-\d{1,15})+")
"""Id of the last of several events: offsets in the log, in the metrics, and in the samples of each node."""


async def stream(watches: Watches, run_id: str, place: str) -> AsyncIterator[str]:
    """Yield the events of a run behind a place (empty: all), until it has ended."""
    import anyio
    from anyio.to_thread import run_sync

    with watches.watching(run_id) as watch:
        reader = Reader(watch, place)
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
    """What a page has got of a run, and what is new."""

    def __init__(self, watch: Watch, place: str) -> None:
        """Begin behind a place; empty for nothing got yet."""
        self.ended = False
        self._watch = watch
        offsets = [int(number) for number in place.split("-")] if PLACE.fullmatch(place) else [0, 0]
        self._log: int | None = offsets[0] or None
        self._metrics = offsets[1]
        nodes = len(watch.tables)
        self._samples = (offsets[2:] + [0] * nodes)[:nodes]
        self._of_metrics = Metrics(watch.growth, watch.job)
        self._charts: set[str] = set()
        self._state: State | None = None

    def read(self) -> str:
        """Return the events that are new, the last one with the place behind all; empty if there is none."""
        # Asked first: what was printed before the end is read below.
        self.ended = self._watch.has_ended
        events = [*self._points(), *self._lines(), *self._changed()]
        if self.ended:
            events.append(_event("ended", {}))
        if not events:
            return ""
        place = "-".join(map(str, (self._log or 0, self._metrics, *self._samples)))
        return "\n".join(events) + f"id: {place}\n\n"

    def _points(self) -> Iterator[str]:
        """Yield the charts that have appeared, and the points that are new."""
        batch = Batch()
        self._metrics = self._of_metrics.read(self._watch.folder, self._metrics, batch)
        read_samples(self._watch.growth, self._watch.tables, self._samples, batch)
        for name, chart in batch.charts.items():
            if name not in self._charts:
                self._charts.add(name)
                yield _event("chart", {**asdict(chart), "section": self._watch.growth.section(chart)})
        if points := batch.points():
            yield _event("points", points)

    def _lines(self) -> Iterator[str]:
        """Yield the lines that are new."""
        most = FIRST_LINES if self._log is None else MOST_LINES
        if new := log.news(self._watch.folder, self._log, most):
            self._log = new.end
            yield _event("log", new)

    def _changed(self) -> Iterator[str]:
        """Yield the state if more than the time has changed."""
        state = self._watch.state()
        if self._state != (same := msgspec.structs.replace(state, seconds=0)):
            self._state = same
            yield _event("state", flat(state))


def _event(name: str, data: Any) -> str:
    """Return an event without the empty line that ends it."""
    return f"event: {name}\ndata: {msgspec.json.encode(data).decode()}\n"


def flat(state: State) -> dict[str, Any]:
    """Return a state with the fields of its progress beside its own."""
    fields = asdict(state)
    return {**asdict(fields.pop("progress")), **fields}
