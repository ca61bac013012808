"""Rows of the list of runs, kept in memory: only records that are new or changed are read."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import Struct

from labctl.records import store
from labctl.records.active import ActiveRun
from labctl.records.store import RunSummary
from labctl.records.verdict import final
from labctl.runs import compare
from labctl.system import filelock

LOSSES = ("loss", "train_loss")
"""Metrics of the column of losses: the first that a run has."""
SETTLED = 1_000_000_000
"""Nanoseconds after which a folder that changes again has another time of change."""


class Row(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run in the list."""

    id: str
    short: str
    state: str
    """As ``RunSummary.state``."""
    workload: str = ""
    verdict: str = ""
    outcome: str = ""
    cause: str = ""
    step: str = ""
    started: float | None = None
    """Seconds since 1970."""
    seconds: float | None = None
    loss: float | None = None
    metric: str = ""
    """Name of the metric in the column of throughputs: that of a run without loss or throughput is its first one."""
    value: float | None = None
    unit: str = ""
    nodes: tuple[str, ...] = ()
    note: str = ""


class Rows(Struct, frozen=True):
    """Rows of a lab, the latest first, at a change."""

    change: int
    total: int
    """Number of the lab's runs."""
    runs: Sequence[Row]
    removed: Sequence[str] = ()
    """Ids of runs whose records are gone."""


class Index:
    """Rows of a lab's runs by id, each with the number of the change that brought it. Threads may share it."""

    def __init__(self, lab: Path) -> None:
        self._lab = lab
        self._lock = threading.Lock()
        self._ids: Sequence[str] = ()
        self._listed = 0
        """When the folder of all records had changed before they were listed."""
        self._short: Mapping[str, str] = {}
        self._rows: dict[str, Row] = {}
        self._read: dict[str, int] = {}
        """When the folder of each record that was read had changed."""
        self._changed: dict[str, int] = {}
        """Number of the last change of each run, of removed ones too."""
        self._change = 0
        self._asked: Collection[str] = ()
        self._active: Mapping[str, ActiveRun] = {}
        self._parameters: dict[str, tuple[str, ...]] = {}

    def latest(self, limit: int | None = None) -> Rows:
        """Return the rows of the latest runs, all without a limit; records that have changed are read."""
        with self._lock:
            self._refresh(limit)
            ids = self._ids[:limit]
            return Rows(self._change, len(self._ids), [self._rows[run_id] for run_id in ids if run_id in self._rows])

    def since(self, change: int) -> Rows:
        """Return the rows that came after a change, of what is in memory."""
        with self._lock:
            changed = [run_id for run_id, number in self._changed.items() if number > change]
            rows = [self._rows[run_id] for run_id in changed if run_id in self._rows]
            removed = [run_id for run_id in changed if run_id not in self._rows]
            return Rows(self._change, len(self._ids), rows, removed)

    def without_result(self) -> list[str]:
        """Return the ids of the runs in memory that have no result."""
        with self._lock:
            return [run_id for run_id, row in self._rows.items() if row.state != "done"]

    def keep_states(self, asked: Collection[str], active: Mapping[str, ActiveRun]) -> None:
        """Keep what the nodes report of runs without a result: of ``asked`` those that are ``active``."""
        with self._lock:
            self._asked, self._active = frozenset(asked), active
            self._refresh(None)

    # --- records ---------------------------------------------------------------------------------------------

    def _refresh(self, limit: int | None) -> None:
        """Read the records that have changed, of the latest ``limit`` runs; drop the rows of removed ones."""
        self._change += 1
        runs = self._lab / "runs"
        if (when := _changed_at(runs)) != self._listed or not when:
            self._listed = when
            self._list()
        for run_id in islice(self._ids, limit):
            self._update(run_id, _changed_at(f"{runs}/{run_id}"))

    def _list(self) -> None:
        """List the records, and drop the rows of those that are gone."""
        ids = store.ids(self._lab)
        if ids == self._ids:
            return
        self._ids, self._short = ids, store.short_ids(ids)
        for run_id in self._rows.keys() - self._short.keys():
            del self._rows[run_id], self._read[run_id]
            self._parameters.pop(run_id, None)
            self._changed[run_id] = self._change

    def _update(self, run_id: str, when: int) -> None:
        """Read a record again if its folder has changed, it has no result yet, or its short id is another."""
        row = self._rows.get(run_id)
        short = self._short[run_id]
        if row and row.state == "done" and row.short == short and when and self._read[run_id] == when:
            return
        self._read[run_id] = when
        now = _row(store.summary(self._lab, run_id, self._state(run_id)), short)
        if now != row:
            self._rows[run_id] = now
            self._changed[run_id] = self._change

    def _state(self, run_id: str) -> Mapping[str, ActiveRun]:
        """Return what is known of a run without a result: nothing if its nodes were not asked for it."""
        if run_id in self._asked or filelock.is_held(store.lock(self._lab, run_id)):
            return self._active
        return {run_id: ActiveRun(id=run_id, nodes=(), state="unknown")}

    # --- settings and arguments ------------------------------------------------------------------------------

    def matching(self, terms: Sequence[str]) -> list[str]:
        """Return the ids of the runs with all of these settings and arguments, ``NAME=VALUE`` or ``NAME=`` for any."""
        sought = [{term, f"--{term}"} for term in terms if not term.endswith("=")]
        names = [(term, f"--{term}") for term in terms if term.endswith("=")]
        return [run_id for run_id in tuple(self._ids) if _has(self._parameters_of(run_id), sought, names)]

    def read_parameters(self) -> None:
        """Read the settings and arguments of all runs that were not read yet."""
        for run_id in tuple(self._ids):
            self._parameters_of(run_id)

    def _parameters_of(self, run_id: str) -> tuple[str, ...]:
        """Return the settings and arguments of a run as ``NAME=VALUE``, from memory once they were read."""
        known = self._parameters.get(run_id)
        if known is None:
            parameters = compare.parameters(store.directory(self._lab, run_id))
            # Most runs share most of them.
            known = tuple(sys.intern(f"{name}={value}") for name, value in parameters.items())
            self._parameters[run_id] = known
        return known


def _changed_at(folder: Path | str) -> int:
    """Return when a folder changed, in nanoseconds; 0 if it is gone, or may change again without another time."""
    try:
        when = os.stat(folder).st_mtime_ns  # noqa: PTH116 (a path object for each of ten thousand takes longer)
    except OSError:
        return 0
    return when if when < time.time_ns() - SETTLED else 0


def _row(run: RunSummary, short: str) -> Row:
    """Return the row of a run; texts that runs share are kept once."""
    start = store.start(run.run_id, run.started)
    loss = _first(run.metrics, LOSSES)
    name, metric = _other(run.metrics, has_loss=bool(loss))
    return Row(
        id=run.run_id,
        short=short,
        state=sys.intern(run.state),
        workload=sys.intern(run.workload or ""),
        verdict=sys.intern(run.verdict or ""),
        outcome=sys.intern(run.outcome or ""),
        cause=sys.intern(run.cause or ""),
        step=run.step,
        started=start.timestamp() if start else None,
        seconds=run.seconds,
        loss=_number(loss),
        metric=name,
        value=_number(metric),
        unit=sys.intern(str(metric.get("unit", ""))),
        nodes=tuple(map(sys.intern, run.nodes)),
        note=run.note,
    )


Recorded = Mapping[str, Any]
"""A metric of a result."""


def _first(metrics: Mapping[str, Recorded], names: Iterable[str]) -> Recorded:
    """Return the first of these metrics that a run has; empty without one."""
    return next((metrics[name] for name in names if name in metrics), {})


def _other(metrics: Mapping[str, Recorded], *, has_loss: bool) -> tuple[str, Recorded]:
    """Return name and metric of a run's throughput, or of its first metric if it has no loss either."""
    if "throughput" in metrics:
        return "", metrics["throughput"]
    return next(iter(metrics.items())) if metrics and not has_loss else ("", {})


def _number(metric: Recorded) -> float | None:
    """Return a metric's value; None if it has none that is a number."""
    value = metric.get(final(metric))
    return value if isinstance(value, int | float) else None


def _has(parameters: Collection[str], sought: Iterable[set[str]], names: Iterable[tuple[str, str]]) -> bool:
    """Return True if a run has one of each set of parameters, and one that begins with one of each pair of names."""
    if any(each.isdisjoint(parameters) for each in sought):
        return False
    return all(any(parameter.startswith(pair) for parameter in parameters) for pair in names)
