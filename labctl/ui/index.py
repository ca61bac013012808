"""Rows of the list of runs, kept in memory: only records that are new or changed are read."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from labctl.errors import nearest
from labctl.model import LOSSES
from labctl.records import store
from labctl.records.active import ActiveRun
from labctl.records.metrics import Sample
from labctl.records.store import RunSummary
from labctl.records.verdict import final
from labctl.runs import compare, series
from labctl.runs.compare import Parameters
from labctl.system import filelock
from labctl.ui import terms
from labctl.ui.terms import Term

CHUNK = 50
"""Records that are read before the rows of others can be asked for."""
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
    loss: float | str | None = None
    """``nan`` or ``inf`` as text, as ``value``: JSON does not have them as numbers."""
    metric: str = ""
    """Name of the metric in the column of throughputs: that of a run without loss or throughput is its first one."""
    value: float | str | None = None
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


class Names(Struct, frozen=True):
    """Names that the runs of a lab have, by which they are filtered, and which are further columns."""

    differing: list[str]
    """Arguments, then settings, that are not the same in all runs."""
    metrics: list[str]
    same: list[str]
    """Arguments, then settings, that are the same in all runs."""


class Index:
    """Rows of a lab's runs by id, each with the number of the change that brought it. Threads may share it."""

    def __init__(self, lab: Path) -> None:
        self._lab = lab
        self._lock = threading.Lock()
        """Held while rows are taken out or put in, not while records are read."""
        self._reading = threading.Lock()
        """Held while all records are read, that others do not read them too."""
        self._ids: Sequence[str] = ()
        self._listed = 0
        """When the folder of all records had changed before they were listed."""
        self._short: Mapping[str, str] = {}
        self._kept: dict[str, ReadRun] = {}
        self._changed: dict[str, int] = {}
        """Number of the last change of each run, of removed ones too."""
        self._change = 0
        self._asked: Collection[str] = ()
        self._active: Mapping[str, ActiveRun] = {}
        self._metric_names: set[str] = set()
        self._parameter_names: set[str] = set()

    def latest(self, limit: int | None = None) -> Rows:
        """Return the rows of the latest runs, all without a limit; records that have changed are read."""
        self._refresh(limit)
        with self._lock:
            ids = self._ids[:limit]
            rows = [self._kept[run_id].row for run_id in ids if run_id in self._kept]
            return Rows(self._change, len(self._ids), rows)

    def since(self, change: int) -> Rows:
        """Return the rows that came after a change, of what is in memory."""
        with self._lock:
            changed = [run_id for run_id, number in self._changed.items() if number > change]
            rows = [self._kept[run_id].row for run_id in changed if run_id in self._kept]
            removed = [run_id for run_id in changed if run_id not in self._kept]
            return Rows(self._change, len(self._ids), rows, removed)

    def without_result(self) -> list[str]:
        """Return the ids of the runs in memory that have no result."""
        with self._lock:
            return [run_id for run_id, run in self._kept.items() if run.row.state != "done"]

    def keep_states(self, asked: Collection[str], active: Mapping[str, ActiveRun]) -> None:
        """Keep what the nodes report of runs without a result: of ``asked`` those that are ``active``."""
        with self._lock:
            self._asked, self._active = frozenset(asked), active
        self._refresh(None)

    # --- records ---------------------------------------------------------------------------------------------

    def _refresh(self, limit: int | None) -> None:
        """Read the records that have changed, of the latest ``limit`` runs; drop the rows of removed ones."""
        with nullcontext() if limit else self._reading:
            ids = iter(self._listed_ids()[:limit])
            here = {path.stem for path in filelock.held_below(self._lab / filelock.RUNS)}
            while chunk := list(islice(ids, CHUNK)):
                read = [self._read_again(run_id, short, here) for run_id, short in chunk]
                with self._lock:
                    self._keep(filter(None, read))

    def _listed_ids(self) -> list[tuple[str, str]]:
        """Return the ids and short ids of all runs; list the records if their folder has changed."""
        with self._lock:
            self._change += 1
            if (when := _changed_at(self._lab / "runs")) != self._listed or not when:
                self._listed = when
                self._list()
            return [(run_id, self._short[run_id]) for run_id in self._ids]

    def _list(self) -> None:
        """List the records, and drop the rows of those that are gone."""
        ids = store.ids(self._lab)
        if ids == self._ids:
            return
        self._ids, self._short = ids, store.short_ids(ids)
        for run_id in self._kept.keys() - self._short.keys():
            del self._kept[run_id]
            self._changed[run_id] = self._change

    def _read_again(self, run_id: str, short: str, here: Collection[str]) -> ReadRun | None:
        """Read a record if its folder has changed, it has no result yet, or its short id is another; None if not.

        ``here``: runs that processes of this machine record.
        """
        kept, folder = self._kept.get(run_id), f"{self._lab}/runs/{run_id}"
        when = _changed_at(folder)
        if kept and kept.row.state == "done" and kept.row.short == short and when and kept.when == when:
            return None
        active = self._active if run_id in self._asked or run_id in here else _unknown(run_id)
        run = _with_last_metrics(store.summary(self._lab, run_id, active), self._lab)
        parameters = compare.parameters(folder)
        return ReadRun(when=when, row=_row(run, short), metrics=_values(run.metrics), parameters=parameters)

    def _keep(self, read: Iterable[ReadRun]) -> None:
        """Keep runs that were read, except for those removed since, with the number of a new change."""
        self._change += 1
        for run in read:
            run_id = run.row.id
            if run_id not in self._short:
                continue
            before, self._kept[run_id] = self._kept.get(run_id), run
            if not before or replace(before, when=run.when) != run:
                self._metric_names.update(run.metrics)
                self._parameter_names.update(run.parameters.own, run.parameters.settings)
                self._changed[run_id] = self._change

    # --- settings and arguments ------------------------------------------------------------------------------

    def matching(self, sought: Sequence[str]) -> list[str]:
        """Return the ids of the runs that match all of these terms, as ``terms.read`` takes them."""
        self._read_all()
        spelled = [(term, self._spellings(term)) for term in map(terms.read, sought)]
        return [
            run_id
            for run_id in tuple(self._ids)
            if all(term.matches(self._values(run_id, *names)) for term, names in spelled)
        ]

    def unknown(self, sought: Sequence[str]) -> dict[str, str]:
        """Map the names in these terms that no run has to the most similar name; empty if none is similar."""
        self._read_all()
        return {term.shown: self._similar(term) for term in map(terms.read, sought) if not any(self._spellings(term))}

    def column(self, name: str, since: int = 0) -> dict[str, str | float]:
        """Map ids to the metric, argument or setting of this name of the runs that have it and came after a change."""
        self._read_all()
        changed = [run_id for run_id, change in tuple(self._changed.items()) if change > since]
        values = ((run_id, next(self._values(run_id, [name], [name]), None)) for run_id in changed)
        return {run_id: value for run_id, value in values if value is not None}

    def names(self) -> Names:
        """Return the names of all metrics, arguments and settings of the runs."""
        self._read_all()
        given = [run.parameters for run in tuple(self._kept.values())]
        by_kind = sorted(self._parameter_names, key=lambda name: (not name.startswith("--"), name))
        differing = [name for name in by_kind if len({parameters.get(name) for parameters in given}) > 1]
        same = [name for name in by_kind if name not in set(differing)]
        return Names(differing=differing, metrics=sorted(self._metric_names), same=same)

    def _read_all(self) -> None:
        """Read the records of all runs, unless all have been read."""
        if not self._ids or len(self._kept) < len(self._ids):
            self._refresh(None)

    def _spellings(self, term: Term) -> tuple[list[str], list[str]]:
        """Return the names of metrics, and of arguments and settings, that a term means."""
        metrics, params = self._of_kind(term.kind)
        return terms.meant(term, metrics), terms.meant(term, params)

    def _similar(self, term: Term) -> str:
        """Return the name most like that of a term; empty if none is similar."""
        columns = () if term.kind else terms.COLUMNS
        known = {terms.canonical(name): name for name in chain(columns, *self._of_kind(term.kind))}
        return known.get(nearest(term.name, known), "")

    def _of_kind(self, kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return all names of metrics, and of arguments and settings, without those of the other kind."""
        metrics = () if kind == "param" else tuple(self._metric_names)
        params = () if kind == "metric" else tuple(self._parameter_names)
        return metrics, params

    def _values(self, run_id: str, metrics: Iterable[str], params: Iterable[str]) -> Iterator[str | float]:
        """Yield what a run has by these names of metrics, and of arguments and settings."""
        if run := self._kept.get(run_id):
            yield from (run.metrics[name] for name in metrics if name in run.metrics)
            yield from filter(None, map(run.parameters.get, params))


class ReadRun(Struct, frozen=True):
    """A run as it was read."""

    when: int
    """When its folder had changed, as by ``_changed_at``."""
    row: Row
    metrics: Mapping[str, float | str]
    parameters: Parameters


def _unknown(run_id: str) -> Mapping[str, ActiveRun]:
    """Return the state of a run whose nodes were not asked for it."""
    return {run_id: ActiveRun(id=run_id, nodes=(), state="unknown")}


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
        loss=_value(loss),
        metric=name,
        value=_value(metric),
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


def _value(metric: Recorded) -> float | str | None:
    """Return a metric's number, ``nan`` or ``inf``; None if it has none of these."""
    value = metric.get(final(metric))
    if value is None and "note" in metric:
        return sys.intern(str(metric["note"]))
    return value if isinstance(value, int | float) else None


def _values(metrics: Mapping[str, Recorded]) -> dict[str, float | str]:
    """Return the values of the metrics that have one."""
    values = {sys.intern(name): _value(metric) for name, metric in metrics.items()}
    return {name: value for name, value in values.items() if value is not None}


def _with_last_metrics(run: RunSummary, lab: Path) -> RunSummary:
    """Return a run with its metrics: those of its result, or those that it printed last if it has none."""
    if run.state == "done":
        return run
    record = store.directory(lab, run.run_id)
    samples = series.last(record)
    units = {metric.name: metric.unit for metric in store.workload(record).metrics}
    metrics = {name: _last(sample, units.get(name, "")) for name, sample in samples.items()}
    return replace(run, metrics=metrics)


def _last(sample: Sample, unit: str) -> Recorded:
    """Return a sample as a metric of a result."""
    return {"last": sample.value, "unit": unit, **({"note": sample.note} if sample.note else {})}
