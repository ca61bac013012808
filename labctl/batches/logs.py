"""Read logs of benchmark runs, of labctl and others: the number that each reports, the nodes in its head."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct
from msgspec.structs import replace

from labctl.batches import record
from labctl.batches.record import Batch, BatchJob
from labctl.config.hostfile import quote
from labctl.errors import ConfigError
from labctl.system import files, human

THROUGHPUT = r"Throughput: (\S+) samples/sec"
"""Line that DeepSpeed-Chat's scripts and labctl's own workloads print."""
TAIL = 1 << 14
"""Bytes of a log's end to read first: the last numbers, and the closing lines of 128 ranks."""
LONGEST_LINE = 1 << 12
LARGEST = 1e100
"""Largest number that counts as a measurement: sums and squares of such numbers are finite."""
_HOST = re.compile(rb"\s*([^\s#]\S*)\s+slots=\d+\s*(?:#.*)?$")
# Lambda's logs are MODEL_STEP_JOB.log, and their jobs begin with the number of nodes.
_JOB = re.compile(r"(?:(?P<workload>.*?)_)?(?P<job>(?P<nodes>[1-9]\d{0,5})xN(?:_.*)?)", re.DOTALL)
_LAMBDA = re.compile(rb"Throughput: (\d+\.\d+) samples/sec")


class Measured(Struct, frozen=True, kw_only=True):
    """Result of a run of a job: its number, or cause and message if it failed or has none."""

    directory: str
    set: str
    """Name of its hostfile's directory in a batch of labctl; else of the log's directory."""
    workload: str
    job: str
    log: str
    names: tuple[str, ...]
    """Nodes as named in the hostfile; empty if unknown."""
    size: int | None
    """Number of its nodes; None if unknown."""
    unit: str
    value: float | None = None
    cause: str = ""
    message: str = ""


def compile_pattern(text: str) -> re.Pattern[bytes]:
    """Compile a multi-line expression for bytes with one group, the number. ConfigError if invalid."""
    try:
        pattern = re.compile(text.encode(errors="surrogateescape"), re.MULTILINE)
    except re.error as error:
        raise ConfigError(f"--pattern {quote(text)}: {error}", hint=f"--pattern '{THROUGHPUT}'") from error
    if pattern.groups != 1:
        hint = f"write one capturing group, around the number: '{THROUGHPUT}'; (?:...) does not capture"
        raise ConfigError(f"--pattern {quote(text)} has {pattern.groups or 'no'} capturing groups", hint=hint)
    return pattern


def read(directory: Path, pattern: str = "") -> tuple[Measured, ...]:
    """Return the runs of a directory, by its batch record or else its ``*.log`` files. ConfigError if there are none.

    ``pattern`` replaces THROUGHPUT. ConfigError if the directory does not exist or has no runs.
    """
    compiled = compile_pattern(pattern or THROUGHPUT)
    unit = "" if pattern else "samples/s"
    logs = find(directory)
    if batch := recorded(directory):
        runs = of_batch(batch, str(directory))
    else:
        runs = tuple(_logged(log, compiled, unit) for log in logs)
    if not runs:
        nested = sorted({str(path.parent) for path in directory.glob("*/*.log")})
        hint = f"labctl eval {' '.join(nested[:4])}" if nested else "logs are named like opt-350m_1_1xN_batch0001.log"
        raise ConfigError(f"{directory}: no *.log file found", hint=hint)
    return runs


def recorded(directory: Path) -> Batch | None:
    """Load the batch recorded in a directory, or its jobs of the parent's recorded batch; None if neither has any."""
    batch, folder = record.load(directory), f"{directory.resolve().name}/"
    if batch or not (above := record.load(directory.resolve().parent)):
        return batch
    jobs = tuple(replace(job, log=job.log[len(folder) :]) for job in above.jobs if job.log.startswith(folder))
    return replace(above, jobs=jobs) if jobs else None


def paths(directory: Path) -> list[str]:
    """Return a directory's logs, sorted: of its batch record, else its ``*.log`` files. ConfigError if unreadable."""
    batch = recorded(directory)
    return sorted(str(directory / job.log) for job in batch.jobs) if batch else find(directory)


def find(directory: Path) -> list[str]:
    """List the ``*.log`` files of a directory, sorted by name. ConfigError if the directory cannot be read."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.path for entry in entries if entry.name.endswith(".log"))
    except OSError as error:
        reason = "no such directory" if isinstance(error, FileNotFoundError) else error.strerror
        raise ConfigError(f"{directory}: {reason}", hint="labctl eval DIR, where the batch's logs are") from error


def of_batch(batch: Batch, directory: str) -> tuple[Measured, ...]:
    """Return a Measured for each job of a batch's record; ``directory`` is where its logs are."""
    return tuple(_recorded(batch, job, directory) for job in batch.jobs)


def _recorded(batch: Batch, job: BatchJob, directory: str) -> Measured:
    """Return a job's Measured from its record; unfinished, or without the batch's metric, is a failure cause."""
    cause, message = job.cause or job.verdict.lower(), job.message
    if job.state != "done" or job.cause in record.UNFINISHED:
        cause, message = "not-finished", job.message or job.state
    elif job.verdict == "PASS":
        absent = job.value is None and batch.metric
        cause, message = ("no-metric", f"no `{batch.metric}` in its record") if absent else ("", "")
    return Measured(
        directory=directory,
        set=job.set,
        workload=batch.workload,
        job=job.job,
        log=job.log,
        names=job.names,
        size=len(job.names),
        unit=batch.unit,
        value=job.value,
        cause=cause,
        message=message,
    )


def _logged(path: str, pattern: re.Pattern[bytes], unit: str) -> Measured:
    """Return the Measured of a log file; unreadable, or without a number, has a cause of failure."""
    directory, log = os.path.split(path)
    stem = log[: -len(".log")]
    named = _JOB.fullmatch(stem)
    names: tuple[str, ...] = ()
    value: float | None = None
    cause = message = ""
    try:
        with files.open_regular(path, follow=True) as stream:
            names = tuple(dict.fromkeys(_hosts(iter(lambda: stream.readline(LONGEST_LINE), b""))))
            value, odd = _last_in_file(stream, pattern)
        if value is not None and value <= 0 and unit:
            value, odd = None, f"{human.number(value)} {unit} is not a throughput"
        if value is None:
            cause, message = "no-metric", odd or f"nothing matches `{pattern.pattern.decode(errors='replace')}`"
    except OSError as error:
        cause, message = "unreadable", f"cannot be read: {error.strerror}"
    return Measured(
        directory=directory,
        set=directory.rpartition("/")[2],
        workload=(named["workload"] or "") if named else "",
        job=named["job"] if named else stem,
        log=log,
        names=names,
        size=len(names) or (int(named["nodes"]) if named else None),
        unit=unit,
        value=value,
        cause=cause,
        message=message,
    )


def _last_in_file(stream: BinaryIO, pattern: re.Pattern[bytes]) -> tuple[float | None, str]:
    """Return the last number of a file and a message on odd text; search all of it only if its end has none."""
    size = os.fstat(stream.fileno()).st_size
    stream.seek(max(0, size - TAIL))
    tail = stream.read()
    if size <= TAIL:
        return last_number(tail, pattern)
    value, odd = last_number(tail[tail.find(b"\n") + 1 or len(tail) :], pattern)
    if value is not None:
        return value, odd
    with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        return last_number(whole, pattern)


def _hosts(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the nodes of the hostfile that a log begins with, up to the first other line that is no comment."""
    for line in lines:
        if host := _HOST.match(line):
            yield host[1].decode(errors="replace")
        elif not line.startswith(b"#"):
            return


def last_number(data: bytes | mmap.mmap, pattern: re.Pattern[bytes]) -> tuple[float | None, str]:
    """Return the last match's number, None if there is none or it is no number, and a message on odd text.

    A number at the very end of the data does not count: it may be incomplete.
    """
    value, odd = None, ""
    for match in pattern.finditer(data):
        text = match[1] or b""
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        quoted = quote(text.decode(errors="replace"))
        if match.end(1) == len(data):
            odd = f"{quoted} at the end of the log may be cut"
        elif abs(number) <= LARGEST:
            value = number
        else:
            value, odd = None, f"{quoted} is not a number"
    return value, odd


def lambda_row(path: str) -> tuple[tuple[str, ...], float | None]:
    """Return hosts and throughput of a log as Lambda's eval_batch.py reads it; () and None if unreadable.

    The first ``Throughput: DIGITS.DIGITS samples/sec`` counts, and every line with ``slots=`` before it names a host.
    """
    try:
        with files.open_regular(path, follow=True) as stream:
            # As text files are read in Python.
            data = stream.read().replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    except OSError:
        return (), None
    value, end = None, len(data)
    for match in _LAMBDA.finditer(data):
        if b"slots=" not in _line(data, match.start()):
            value, end = float(match[1]), match.start()
            break
    hosts = []
    at = data.find(b"slots=", 0, end)
    while at >= 0:
        line = _line(data, at)
        hosts.append(line.split()[0].decode(errors="replace"))
        at = data.find(b"slots=", data.rfind(b"\n", 0, at) + 1 + len(line), end)
    return tuple(hosts), value


def _line(data: bytes, at: int) -> bytes:
    """Return the line at an offset."""
    end = data.find(b"\n", at)
    return data[data.rfind(b"\n", 0, at) + 1 : end if end >= 0 else len(data)]
