"""Logs of benchmark runs, in the format of DeepSpeed-Chat's scripts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

LINE = "ml-{node:03}: [2024-07-08 06:02:01,235] [INFO] [logging.py:96:log_dist] [Rank 0] step={step}, lr=[1e-10]\n"


def write_log(directory: Path, job: str, hosts: Iterable[str], *lines: str) -> Path:
    """Write the log of a job, hostfile lines and then ``lines``, into a directory; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"opt-350m_1_{job}.log"
    head = [*(f"{host} slots=8" for host in hosts), ""]
    path.write_text("".join(f"{line}\n" for line in (*head, *lines)), encoding="utf-8")
    return path


def throughput(value: object) -> str:
    """Return the log line with this throughput."""
    return f"ml-001: Throughput: {value} samples/sec"


def write_logs(directory: Path, count: int, size: int) -> None:
    """Write ``count`` logs of one node and about ``size`` bytes each, with different throughputs."""
    body = "".join(LINE.format(node=step % 16, step=step) for step in range(size // len(LINE)))[:size]
    last = "ml-001: Process 1984655 exits successfully.\n" * 8
    for number in range(count):
        lines = (body, throughput(900 + number % 50), last)
        write_log(directory, f"1xN_batch{number:05}", [f"ml-{number:05}"], *lines)
