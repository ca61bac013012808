"""Records of many runs, or of one with a long log, written within seconds: `python -m page.records LAB 10000`."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from support import records

WORKLOADS = ("opt-tiny", "opt-125m", "vit", "allreduce", "hello")
RATES = ("1e-4", "3e-4", "1e-3", "3e-3")
FIRST = datetime(2026, 1, 1).astimezone()
STEPS = 40
LINES_AT_ONCE = 50_000
LINKED = ("settings.json", "versions.json", "metrics.jsonl", "output.log", "started")
"""Files that runs of the same workload and learning rate share, by hard links."""


def write_many(lab: Path, count: int) -> list[str]:
    """Write the records of ``count`` ended runs of several workloads, verdicts and learning rates; return their ids."""
    draw = random.Random(7)  # noqa: S311
    patterns = [_pattern(lab, workload, rate) for workload in WORKLOADS for rate in RATES]
    return [_write_one(lab, number, draw.choice(patterns), draw) for number in range(count)]


def _pattern(lab: Path, workload: str, rate: str) -> Path:
    """Write the record of a run, from which others are made; return its directory."""
    losses = [8 - 3 * step / STEPS for step in range(STEPS)]
    path = records.write(
        lab,
        f"20251231-000000-{workload}-{RATES.index(rate):06x}",
        workload=workload,
        losses=losses,
        throughput=80.0,
        arguments=("--model", workload, "--learning-rate", rate),
        log="".join(f"step {step + 1}/{STEPS} loss {loss:.4f}\n" for step, loss in enumerate(losses)),
    )
    job = path / "job.json"
    job.write_text(job.read_text().replace('"workload": "opt-tiny"', f'"workload": "{workload}"'))
    return path


def _write_one(lab: Path, number: int, pattern: Path, draw: random.Random) -> str:
    """Write the record of a run like the pattern's, with results of its own; return its id."""
    workload = pattern.name[16:-7]
    started = FIRST + timedelta(minutes=number)
    run_id = f"{started:%Y%m%d-%H%M%S}-{workload}-{number:06x}"
    path = lab / "runs" / run_id
    path.mkdir()
    for name in LINKED:
        os.link(pattern / name, path / name)
    for name, changes in (("job.json", {}), ("result.json", _result(draw, started))):
        document = json.loads((pattern / name).read_bytes()) | {"run_id": run_id} | changes
        (path / name).write_text(json.dumps(document))
    return run_id


def _result(draw: random.Random, started: datetime) -> dict[str, Any]:
    """Return fields of a result: mostly passed ones."""
    metrics = {
        "loss": {"first": 8.0, "last": round(draw.uniform(3, 6), 4)},
        "throughput": {"value": round(draw.gauss(80, 5), 2), "unit": "samples/s"},
    }
    made = {"metrics": metrics, "seconds": round(draw.uniform(20, 60), 1), "started": started.isoformat()}
    if draw.random() < 0.1:
        failed = {"verdict": "ERROR", "cause": "rank-crashed", "message": "rank 1 exited with code 1", "exit_code": 4}
        return made | failed
    return made


def write_long_log(lab: Path, run_id: str, lines: int) -> Path:
    """Write the record of a run with so many log lines, of two ranks, one in a thousand odd; return its directory."""
    path = records.write(lab, run_id, losses=(8.0, 5.0), throughput=80.0)
    texts, times = _lines(lines), _times(lines)
    with (path / "output.log").open("w") as log, (path / "output.times").open("w") as beside:
        for _ in range(0, lines, LINES_AT_ONCE):
            log.write("".join(islice(texts, LINES_AT_ONCE)))
            beside.write("".join(islice(times, LINES_AT_ONCE)))
    return path


def _lines(count: int) -> Iterator[str]:
    """Yield the lines of a log."""
    for number in range(1, count + 1):
        odd = " warning: gradient norm is large" if number % 1000 == 0 else ""
        yield f"worker-{number % 2}: step {number}/{count} loss {8 - number % 997 / 400:.4f} lr 3e-3{odd}\n"


def _times(count: int) -> Iterator[str]:
    """Yield when each line came, and of which rank."""
    began = FIRST.timestamp()
    return (f"{began + number / 1000:.3f} {number % 2}\n" for number in range(1, count + 1))


if __name__ == "__main__":
    write_many(Path(sys.argv[1]), int(sys.argv[2]))
