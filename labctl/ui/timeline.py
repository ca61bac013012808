"""Timeline of a batch: which job ran on which node when, laid out in pixels. No clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from msgspec import Struct

from labctl.batches.record import Batch, BatchJob
from labctl.system import human

ROW = 22
"""Height of a node's row in pixels."""
NARROW, WIDE = 640, 20000
"""Width of a timeline, at least and at most."""
USUAL = 120
"""Width of the median job, if the whole is not too wide then: room for its name and verdict."""
THINNEST = 4
TICKS = 100
"""Pixels between two times on the axis, at least."""
STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
"""Seconds that two times on the axis may be apart."""
KINDS = {"PASS": "pass", "FAIL": "fail", "ERROR": "error"}


class Block(Struct, frozen=True, kw_only=True):
    """A job on nodes whose rows are neighbours; another block has its other nodes."""

    left: int
    top: int
    width: int
    height: int
    kind: str
    text: str
    title: str
    run: str


class Tick(Struct, frozen=True):
    """A time on the axis."""

    left: int
    text: str


class Row(Struct, frozen=True, kw_only=True):
    """A job in the table that says the same as the figure."""

    job: str
    round: int | None
    nodes: tuple[str, ...]
    kind: str
    word: str
    began: str
    seconds: str
    value: str
    share_of_median: str
    message: str
    run: str


class Timeline(Struct, frozen=True, kw_only=True):
    """A batch as blocks in rows of nodes."""

    nodes: tuple[str, ...]
    width: int
    height: int
    ticks: tuple[Tick, ...]
    blocks: tuple[Block, ...]
    waiting: int
    """Jobs that have not begun."""
    seconds: float


def lay_out(batches: Sequence[Batch], now: float) -> Timeline:
    """Return the timeline of a batch, or of those that follow each other as the rounds of a search."""
    jobs = [job for batch in batches for job in batch.jobs]
    begun = [job for job in jobs if job.began]
    first = min((job.began or 0 for job in begun), default=now)
    last = max((_end(job, now) for job in begun), default=now)
    scale = _scale([_end(job, now) - (job.began or 0) for job in begun], last - first)
    nodes = _sorted_nodes({node for job in jobs for node in job.nodes})
    rows = {node: number for number, node in enumerate(nodes)}
    blocks = tuple(block for job in begun for block in _blocks(job, rows, first, scale, now))
    width = max(NARROW, round((last - first) * scale) + THINNEST)
    return Timeline(
        nodes=nodes,
        width=width,
        height=len(nodes) * ROW,
        ticks=tuple(_ticks(scale, width)),
        blocks=blocks,
        waiting=len(jobs) - len(begun),
        seconds=last - first,
    )


def _end(job: BatchJob, now: float) -> float:
    """Return the end of a job that has begun: now, if it is under way."""
    return job.ended or max(now, job.began or 0)


def _scale(lengths: Sequence[float], seconds: float) -> float:
    """Return the pixels of a second."""
    real = [length for length in lengths if length > 0]
    usual = USUAL / median(real) if real else 1.0
    whole = max(seconds, 0.001)
    return max(NARROW / whole, min(usual, WIDE / whole))


def _sorted_nodes(nodes: Iterable[str]) -> tuple[str, ...]:
    """Return nodes by the number at the end of their names."""

    def key(node: str) -> tuple[str, int, str]:
        """Return name, number and whole name."""
        stem = node.rstrip("0123456789")
        return stem, int(node[len(stem) :] or 0), node

    return tuple(sorted(nodes, key=key))


def _blocks(job: BatchJob, rows: dict[str, int], first: float, scale: float, now: float) -> Iterator[Block]:
    """Yield a block for each run of neighbouring rows that a job has."""
    began = job.began or first
    for top, count in _neighbours(sorted(rows[node] for node in job.nodes)):
        yield Block(
            left=round((began - first) * scale),
            top=top * ROW,
            width=max(THINNEST, round((_end(job, now) - began) * scale) - 1),
            height=count * ROW - 2,
            kind=kind(job),
            text=f"{_short(job)} {word(job)}",
            title=_title(job, now),
            run=job.run_id,
        )


def _neighbours(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield first row and number of rows for each sequence without a gap."""
    start = 0
    for place, row in enumerate(rows):
        if place + 1 == len(rows) or rows[place + 1] != row + 1:
            yield rows[start], place + 1 - start
            start = place + 1


def kind(job: BatchJob) -> str:
    """Return the class of a job's state."""
    return KINDS.get(job.verdict, "error") if job.state == "done" else job.state


def word(job: BatchJob) -> str:
    """Return the state of a job in a word, and why it did not pass."""
    if job.state != "done":
        return job.state
    return f"{job.verdict} ({job.cause})" if job.cause else job.verdict


def _short(job: BatchJob) -> str:
    """Return the part of a job's name that tells it from others, as ``batch0001`` of ``2xN_batch0001``."""
    return f"{job.job.partition('_')[2] or job.job}{_turn(job)}"


def name(job: BatchJob) -> str:
    """Return the name of a job, with its turn if it is not the first."""
    return f"{job.job}{_turn(job)}"


def _turn(job: BatchJob) -> str:
    """Return which run of its hostfile a job is; empty for the first."""
    return f" ({job.repeat})" if job.repeat > 1 else ""


def _title(job: BatchJob, now: float) -> str:
    """Render a job in a line."""
    took = human.duration(_end(job, now) - (job.began or now))
    message = f": {job.message}" if job.message and job.verdict != "PASS" else ""
    return f"{name(job)} on {', '.join(job.nodes)}: {word(job)}, {took}{message}"


def _ticks(scale: float, width: int) -> Iterator[Tick]:
    """Yield times on the axis that are TICKS apart or more."""
    step = next((step for step in STEPS if step * scale >= TICKS), STEPS[-1])
    number = 0
    while (left := round(number * step * scale)) <= width - TICKS // 2:
        yield Tick(left, human.duration(number * step) if number else "0")
        number += 1


def table(batches: Sequence[Batch], now: float, *, rounds: bool) -> tuple[Row, ...]:
    """Return a row per job, in the order in which they began; with the round, and the share of the round's median."""
    rows: list[Row] = []
    for number, batch in enumerate(batches, 1):
        middle = _median(batch) if rounds else None
        jobs = sorted(batch.jobs, key=lambda job: job.began or math.inf)
        round_ = number if rounds else None
        rows += [_row(job, batch, round_, middle, since=batches[0].began, now=now) for job in jobs]
    return tuple(rows)


def _median(batch: Batch) -> float | None:
    """Return the median of the values of a batch's jobs; None with fewer than two."""
    values = [job.value for job in batch.jobs if job.value is not None]
    return median(values) if len(values) > 1 else None


def _row(job: BatchJob, batch: Batch, round_: int | None, middle: float | None, *, since: float, now: float) -> Row:
    """Return the row of a job, whose beginning is told from ``since``."""
    share = human.share(job.value / middle) if job.value is not None and middle else ""
    return Row(
        job=name(job),
        round=round_,
        nodes=job.nodes,
        kind=kind(job),
        word=word(job),
        began=human.duration(max(0.0, job.began - since)) if job.began else "",
        seconds=human.duration(_end(job, now) - job.began) if job.began else "",
        value="" if job.value is None else f"{human.number(job.value)} {batch.unit}".rstrip(),
        share_of_median=share,
        message="" if job.verdict == "PASS" else job.message,
        run=job.run_id,
    )
