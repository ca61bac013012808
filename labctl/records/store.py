"""Record of a run, ``runs/<id>/``: written while the run is under way, read by `runs` and `show`."""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import chain, repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from labctl import __version__, naming
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError, nearest
from labctl.model import (
    Cause,
    Copy,
    File,
    Hang,
    Job,
    Lab,
    Metric,
    Pace,
    Progress,
    Project,
    Rank,
    Result,
    Resume,
    Secret,
    Workload,
)
from labctl.records import note as notes
from labctl.records import outlook
from labctl.records.active import ActiveRun
from labctl.records.lines import Line
from labctl.records.metrics import searched
from labctl.records.progress import tracker_of
from labctl.records.redaction import REDACTED
from labctl.system import decode as decoding
from labctl.system import filelock, files, human
from labctl.system.decode import convert


def record(
    lab: Lab, settings: Settings, job: Job, versions: dict[str, Any], *, preview: bool = False
) -> tuple[File, ...]:
    """Return job.json, settings.json and versions.json of a run, unwritten; code has no digests if ``preview``."""
    nodes = [{"name": node.name, "slots": node.slots} for node in job.nodes]
    copies = () if preview else tuple((copy.path, copy.root / copy.name) for copy in job.code)
    described = {
        "run_id": job.run_id,
        "workload": job.workload.name,
        "launcher": job.workload.launcher,
        "argv": job.argv,
        "rank_argv": [*job.workload.called, *job.workload.arguments],
        "environment": dict(job.workload.environment),
        "timeout": job.timeout,
        "nodes": nodes,
        "request": job.request,
        "resumed": job.resumed,
        "retried": job.retried,
        "replays": job.replays,
        # A replay takes the files and code from the record, and the shared code from the lab.
        "files": {file.path: sha256(file.content.encode()) for file in job.files},
        "code": digests(copies),
        "shared": {} if preview else digests(shared_code(lab.directory)),
        # Read when the run is followed or judged later.
        "job": msgspec.to_builtins(replace(job, files=(), code=(), request={}), enc_hook=str),
    }
    rows = [dict(zip(("key", "value", "origin"), row, strict=True)) for row in settings.rows()]
    return (
        _json("job.json", described),
        _json("settings.json", rows),
        _json("versions.json", versions),
    )


def shared_code(lab: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each file in the folder that the workloads' scripts share."""
    folder = lab / SHARED
    return ((f"{SHARED}/{name}", folder / name) for name in files.walk(folder))


def digests(paths: Iterable[tuple[str, Path]]) -> dict[str, str]:
    """Map names to the SHA-256 of files, or of links' targets; unreadable and missing ones are left out."""
    sums = {}
    for name, path in paths:
        with suppress(OSError):
            if path.is_symlink():
                sums[name] = sha256(os.fsencode(path.readlink()))
            else:
                with files.open_regular(path) as stream:
                    digest = hashlib.sha256()
                    while piece := stream.read(PIECE):
                        digest.update(piece)
                    sums[name] = digest.hexdigest()
    return sums


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def versions(lab: Lab, engine: Mapping[str, str], image_id: str | None) -> dict[str, Any]:
    """Return the versions of labctl, Python, engine and image, as versions.json records them."""
    import platform

    return {
        "labctl": __version__,
        "python": platform.python_version(),
        **engine,
        "image": lab.image,
        "image_id": image_id,
    }


def plan_file(text: str) -> File:
    """Return plan.txt with this text."""
    return File(path="plan.txt", content=text)


def _json(path: str, content: object) -> File:
    """Return a file with the content as indented JSON."""
    return File(path=path, content=json.dumps(content, indent=2) + "\n")


SCHEMA = 1
SHARED = "workloads/common"
MOST_HANG_LINES = 6
RESULT = "result.json"
OUTPUT = "output.log"
METRICS = "metrics.jsonl"
TIMES = "output.times"
"""File with a line per line of the output: its time in seconds since 1970, and its rank or ``-``."""
MARK, FORMER_MARK = "started", "run.lock"
"""File that marks a run's record from its beginning; and that of earlier records."""
SHORTEST_ID = 6
"""Characters of a short id, unless it needs more: the random end of an id."""
SHORTEST_NAME = 4
"""Characters of an id that can name a run, at least."""
LATEST = 64
"""Runs, the last to begin, of which one may be under way: all may be ten thousand."""
MOST_MEANT = 5
"""Runs that an error lists at most where a name means several."""
REACHED = "reached"
"""Name of the note with the last step of a run that did not pass."""
EVIDENCE = "evidence.tar.gz"
HANG = "stacks/hang.json"
"""File with the explanation of a run's silence, in its outputs and then in its record."""
PLACE = "cluster.json"
"""File with the server, namespace and job of a run in a cluster."""
PODS = "pods.json"
"""Pods of a run in a cluster, in its record."""
KEPT = (RESULT, OUTPUT, TIMES, METRICS, EVIDENCE, PODS, MARK, FORMER_MARK, notes.FILE)
"""Files of a record that only labctl writes: files with these names from a run or a host go aside."""
# Logs that ranks and scripts write themselves; those in hosts/ had a name that another host took.
LOGS = ("*.log", "ranks/*.log", "hosts/*/*.log", "hosts/*/ranks/*.log")
RANK_REPORTED = re.compile(r"labctl: rank (\d+) of \d+ on (\S+)$")
# Printed on each node by DeepSpeed's launcher before it starts the ranks; deepspeed/launcher/launch.py.
RANKS_STARTED = re.compile(r"^(\S+): .*\bglobal_rank_mapping=defaultdict\(<class 'list'>, (\{.*\})\)$")


# Name of a run in runs/, into which workloads may put anything: characters of ``new_id``, safe to print.
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
LARGEST_RECORD = 16 << 20
# Bytes of a log in memory at once.
PIECE = 1 << 20
REDACTED_KEYS = ("message", "evidence", "ranks", "metrics", "notes", "checks")
"""Keys of a result whose texts come from the run."""
T = TypeVar("T")


class RecordError(HostError):
    """The output of a run cannot be recorded."""


class DiskFull(RecordError):
    """The output of a run cannot be recorded, because its disk is full."""


def new_id(workload: str, now: datetime) -> str:
    """Return a new run id with time, workload and a random end, ``20260102-150405-opt-tiny-3fa2c1``."""
    return f"{now:%Y%m%d-%H%M%S}-{workload.replace('/', '-')}-{secrets.token_hex(3)}"


def directory(lab: Path, run_id: str) -> Path:
    """Return the path of a run's record."""
    return lab / f"runs/{run_id}"


def outputs(lab: Path, run_id: str) -> Path:
    """Return the directory that a run's containers write to until it ends."""
    return lab / naming.OUTPUTS / run_id


def samples(lab: Path, run_id: str, node: str) -> Path:
    """Return the file that a node of a run under way writes its samples to, if the node is on this machine."""
    return outputs(lab, run_id) / f"samples/{node}.csv"


def create(
    lab: Lab, run_id: str, job: tuple[File, ...], record: Iterable[File] = (), code: tuple[Copy, ...] = ()
) -> Path:
    """Create a new run's record and outputs with their files and copied code; return the record's path."""
    path = directory(lab.directory, run_id)
    files.create_all(path, (*job, *record, File(path=MARK, content="")))
    files.create_all(outputs(lab.directory, run_id), job, folders=("ranks", "work"), copies=code)
    return path


class RunLog:
    """Keeps a run's output, with the lab's secrets redacted, its times, and the samples of its metrics.

    In memory it keeps only what the verdict needs: numbers, and the ``lines`` that name ranks or match a note first.
    """

    def __init__(self, path: Path, lab: Lab, workload: Workload, *, over: bool = False) -> None:
        """Create output, times and metrics files of the record, or replace them if ``over``. HostError on failure."""
        with files.writing(path / OUTPUT), files.opened(path) as folder:
            if over:
                for name in (OUTPUT, TIMES, METRICS):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)
            self._stream = files.create(OUTPUT, folder, 0o644)
            self._times = files.create(TIMES, folder, 0o644)
            self._series = files.create(METRICS, folder, 0o644)
        self._hidden = lab.hidden
        self._path = path
        self._tracker = tracker_of(workload)
        self._notes = [re.compile(pattern) for _, pattern in workload.notes]
        # Reports of ranks that a script starts itself may be in its own output.
        self._starts_itself = workload.starts_itself
        self._is_full = False
        self.lines: list[str] = []

    @property
    def values(self) -> Mapping[str, Sequence[float]]:
        """Map each declared metric to its numbers, in order."""
        return self._tracker.values

    def found(self) -> dict[str, dict[str, Any]]:
        """Return the undeclared metrics that were found, reduced, each with its format and a redacted line."""
        return self._tracker.found(lambda text: redact(text, self._hidden))

    def progress(self) -> Progress:
        """Return the progress of the run so far."""
        return self._tracker.progress()

    @property
    def pace(self) -> Pace | None:
        """Return the seconds of the run's first step and of its longest; None without a step."""
        return self._tracker.pace

    def keep(self, lines: Sequence[Line]) -> Sequence[Line]:
        """Write lines redacted, with times and samples; return them redacted. RecordError if that fails."""
        shown = redact_lines(lines, self._hidden)
        try:
            self._read(lines)
            ranks = ("-" if line.rank is None else line.rank for line in lines)
            times = (f"{line.when:.3f} {rank}\n" for line, rank in zip(lines, ranks, strict=True))
            self._times.write("".join(times).encode())
            self._stream.write("".join(f"{line.text}\n" for line in shown).encode())
            # If labctl is killed, all files end at the same line.
            for stream in (self._series, self._times, self._stream):
                stream.flush()
        except OSError as error:
            raise self._unwritten(error) from error
        return shown

    def _unwritten(self, error: OSError) -> RecordError:
        """Return the error, not raised, of output that cannot be written: DiskFull with room left, or RecordError."""
        path = self._path / OUTPUT
        message, hint = f"cannot write {path}: {error.strerror}", f"df -h {path.parent}"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return RecordError(message, hint=hint)
        self._is_full = True
        room = files.room_at(path)
        return DiskFull(f"{message}; {human.memory(room.free)} free at {room.filesystem}", hint=hint)

    def keep_and_show(self, on_lines: Callable[[Iterable[str]], object]) -> Callable[[Sequence[Line]], Sequence[Line]]:
        """Return a ``keep`` that also passes the texts of redacted lines to ``on_lines``."""

        def keep(lines: Sequence[Line]) -> Sequence[Line]:
            """Write lines, pass their redacted text to ``on_lines`` if any, and return them."""
            kept = self.keep(lines)
            if kept:
                on_lines([line.text for line in kept])
            return kept

        return keep

    def _read(self, lines: Sequence[Line]) -> None:
        """Write the samples of lines, and keep in ``lines`` those that name ranks or match a note."""
        samples = self._tracker.read(lines)
        self._series.write(b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples))
        for line in lines:
            # Most lines are of neither kind.
            if not self._notes and "rank" not in line.text:
                continue
            text = searched(line.text)
            matched = [note for note in self._notes if note.search(text)]
            if matched or self._names_ranks(line, text):
                self.lines.append(text)
                self._notes = [note for note in self._notes if note not in matched]

    def _names_ranks(self, line: Line, text: str) -> bool:
        """Tell if a line reports that a rank started, or is DeepSpeed's list of started ranks."""
        if "rank" not in text:
            return False
        if RANK_REPORTED.match(line.said) if line.report else self._starts_itself and RANK_REPORTED.search(text):
            return True
        return bool(RANKS_STARTED.search(text))

    def close(self) -> None:
        """Close the log, if open, and redact ranks' logs. HostError if that fails, unless the disk was full before.

        A disk that was full before has ended the run already.
        """
        if not self._stream.closed:
            try:
                with files.writing(self._path / OUTPUT), self._series, self._times, self._stream:
                    pass
            except HostError:
                if not self._is_full:
                    raise
            finally:
                redact_ranks(self._path, self._hidden)


def redact_ranks(path: Path, hidden: tuple[Secret, ...]) -> None:
    """Redact secrets in logs that ranks wrote, in files without another hard link. HostError if it fails.

    A workload may create anything with such a name: only files without another hard link are changed.
    """
    if not hidden:
        return
    with suppress(OSError), files.opened(path) as folder:
        for place in LOGS:
            for log, parent in _matching(path, folder, place.split("/")):
                _redact_log(log, parent, hidden)


def _matching(path: Path, folder: int, pattern: list[str]) -> Iterator[tuple[Path, int]]:
    """Yield path and folder descriptor of entries that match a pattern of parts, without following links."""
    for name in fnmatch.filter(os.listdir(folder), pattern[0]):
        if len(pattern) == 1:
            yield path / name, folder
            continue
        with suppress(OSError), files.opened(name, folder) as below:
            yield from _matching(path / name, below, pattern[1:])


def _redact_log(path: Path, parent: int, hidden: tuple[Secret, ...]) -> None:
    """Redact a log if it holds a secret and is a regular file with one link. HostError if it cannot be written."""
    try:
        log = files.open_regular(path.name, parent)
    except OSError:
        return
    with log, files.writing(path):
        status = os.fstat(log.fileno())
        # A log that was redacted before is copied again, unchanged.
        if status.st_nlink == 1 and any(REDACTED.encode() in piece for piece in _redacted(_pieces(log), hidden)):
            files.replace_in(parent, path.name, _redacted(_pieces(log), hidden), stat.S_IMODE(status.st_mode))


def _pieces(log: BinaryIO) -> Iterator[bytes]:
    """Yield a file's content in pieces, without its holes."""
    handle, place, size = log.fileno(), 0, os.fstat(log.fileno()).st_size
    while place < size:
        try:
            place = os.lseek(handle, place, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = min(os.lseek(handle, place, os.SEEK_HOLE), size)
        while place < end:
            piece = os.pread(handle, min(PIECE, end - place), place)
            if not piece:
                return
            place += len(piece)
            yield piece


def _redacted(pieces: Iterable[bytes], hidden: tuple[Secret, ...]) -> Iterator[bytes]:
    """Yield pieces with secrets replaced, even those that span two pieces."""
    values = sorted((value.reveal().encode("utf-8", "surrogateescape") for value in hidden), key=len, reverse=True)
    pattern, mark = re.compile(b"|".join(map(re.escape, values))), REDACTED.encode()
    rest = b""
    for piece in pieces:
        rest += piece
        # A secret that begins before this position is complete, whichever it is.
        whole, clean, done = len(rest) - len(values[0]) + 1, [], 0
        for match in pattern.finditer(rest):
            if match.start() < whole:
                clean += [rest[done : match.start()], mark]
                done = match.end()
        end = max(done, whole, 0)
        yield b"".join((*clean, rest[done:end]))
        rest = rest[end:]
    yield pattern.sub(mark, rest)


def redact(text: str, hidden: tuple[Secret, ...]) -> str:
    """Return a text with each secret replaced by REDACTED."""
    for value in hidden:
        text = text.replace(value.reveal(), REDACTED)
    return text


def redact_lines(lines: Sequence[Line], hidden: tuple[Secret, ...]) -> Sequence[Line]:
    """Return lines with secrets replaced in text and output; the same lines if there are none."""
    text = "\n".join(line.text for line in lines) if hidden else ""
    # Most lines have no secret.
    if not any(value.reveal() in text for value in hidden):
        return lines
    return [replace(line, text=redact(line.text, hidden), said=redact(line.said, hidden)) for line in lines]


def _redact_texts(value: Any, hidden: tuple[Secret, ...]) -> Any:
    """Return a JSON value with secrets replaced in its texts."""
    if isinstance(value, str):
        return redact(value, hidden)
    if isinstance(value, dict):
        return {key: _redact_texts(item, hidden) for key, item in value.items()}
    return [_redact_texts(item, hidden) for item in value] if isinstance(value, (list, tuple)) else value


def finish(lab: Lab, result: Result) -> Result:
    """Write result.json, redacted, and return the result as written. HostError if that fails."""
    result = final_result(lab, result)
    text = json.dumps({"schema": SCHEMA, **msgspec.to_builtins(result)}, indent=2, allow_nan=False) + "\n"
    path = directory(lab.directory, result.run_id)
    with files.writing(path / RESULT), files.opened(path) as folder:
        files.replace_in(folder, RESULT, [text.encode()], 0o644)
    return result


def final_result(lab: Lab, result: Result) -> Result:
    """Return a result with secrets redacted and seconds rounded to milliseconds."""
    content = msgspec.to_builtins(result)
    texts = {key: _redact_texts(content[key], lab.hidden) for key in REDACTED_KEYS}
    return convert({**content, **texts, "seconds": round(result.seconds, 3)}, Result)


def output(lab: Path, run_id: str, rank: int | None = None) -> Iterator[tuple[float | None, str]]:
    """Yield time (or None) and text of each line of a run, or of one rank. ConfigError for a rank without a log."""
    path = directory(lab, run_id)
    logs = [path / OUTPUT]
    if rank is not None:
        logs = _rank_logs((path, outputs(lab, run_id)), rank)
        if not logs:
            hint = f"`labctl show {run_id}` lists its ranks; -f follows a run that is under way"
            raise ConfigError(f"run {run_id} has no log of rank {rank} here", hint=hint)
    # With several logs of a rank, the times cannot be assigned.
    times = chain(_times(path / TIMES, rank) if len(logs) == 1 else (), repeat(None))
    for log in logs:
        with suppress(OSError), files.open_regular(log) as stream:
            for line in stream:
                when = next(times)
                yield from ((when, part) for part in line.decode("utf-8", "replace").splitlines())


def _rank_logs(places: Iterable[Path], rank: int) -> list[Path]:
    """Return a rank's log files in several directories, those of other hosts included, sorted."""
    # An elastic launcher's rank has its node in the name; a log whose name is taken by another host's lies in hosts/.
    name = f"rank-{rank}[.@]*log"
    logs: list[Path] = []
    for place in places:
        logs += [*sorted(place.glob(f"ranks/{name}")), *sorted(place.glob(f"hosts/*/ranks/{name}"))]
    return logs


def last_output(lab: Path, run_id: str, ranks: Collection[int], size: int) -> dict[int, list[tuple[float | None, str]]]:
    """Map each rank to time (or None) and text of the last lines of its log, of ``size`` bytes of all logs."""
    path = directory(lab, run_id)
    times: dict[str, list[float | None]] = {}
    for row in last_lines(path / TIMES, size):
        when, _, whose = row.partition(" ")
        if whose:
            times.setdefault(whose, []).append(moment(when))
    lines: dict[int, list[tuple[float | None, str]]] = {}
    for rank in ranks:
        logs = _rank_logs((path, outputs(lab, run_id)), rank)
        text = list(chain.from_iterable(last_lines(log, size // len(ranks)) for log in logs))
        # With several logs of a rank, the times cannot be assigned.
        lines[rank] = list(_timed(text, times.get(str(rank), []) if len(logs) == 1 else []))
    return lines


def _timed(lines: Sequence[str], times: Sequence[float | None]) -> Iterator[tuple[float | None, str]]:
    """Yield each line's time (or None) and text; both lists are the ends of longer ones."""
    missing = len(lines) - len(times)
    aligned = [*repeat(None, missing), *times] if missing > 0 else times[-len(lines) :]
    for when, line in zip(aligned, lines, strict=False):
        yield from ((when, part) for part in line.splitlines())


def last_lines(path: Path, size: int) -> list[str]:
    """Return the whole lines in a file's last ``size`` bytes; none if it is not a file."""
    try:
        with files.open_regular(path) as stream:
            begin = max(0, stream.seek(0, 2) - size)
            stream.seek(begin)
            lines = stream.read().decode("utf-8", "replace").removesuffix("\n").split("\n")
    except OSError:
        return []
    return lines[1:] if begin else lines


def _times(path: Path, rank: int | None) -> Iterator[float | None]:
    """Yield the recorded time of each line, or of those of one rank; nothing without a times file."""
    with suppress(OSError), files.open_regular(path) as stream:
        for line in stream:
            when, _, whose = line.strip().partition(b" ")
            if rank is None or whose == b"%d" % rank:
                yield moment(when)


def moment(text: str | bytes) -> float | None:
    """Return a time of a line as output.times has it; None if it was not written whole, as on a full disk."""
    try:
        return float(text)
    except ValueError:
        return None


def load_job(lab: Path, run_id: str) -> Job:
    """Return a run's job as recorded, without files and code. HostError if the record does not hold it."""
    content = read_record(directory(lab, run_id) / "job.json")
    try:
        recorded = msgspec.json.decode(content or b"")["job"]
        return convert(recorded, Job)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        path = directory(lab, run_id) / "job.json"
        raise HostError(f"{path} does not hold the run's job: {error}", hint=f"labctl stop {run_id}") from error


class NamedNode(Struct, frozen=True):
    """A node of a run."""

    name: str


class JobSummary(Struct, frozen=True):
    """Parts of ``job.json`` that are read of a run that ended; earlier records do not have all of them."""

    workload: str = "unknown"
    launcher: str = "unknown"
    nodes: tuple[NamedNode, ...] = ()
    request: dict[str, Any] | None = None
    resumed: str = ""
    files: dict[str, str] = {}
    """SHA-256 by path of the files that labctl wrote; ``code`` and ``shared`` of the code of its ranks."""
    code: dict[str, str] = {}
    shared: dict[str, str] = {}


class DeclaredWorkload(Struct, frozen=True):
    """Parts of the workload that are read from ``job.json``, as declared when the run began."""

    script: str = ""
    arguments: tuple[str, ...] = ()
    launcher: str = ""
    project: Project | None = None
    metrics: tuple[Metric, ...] = ()
    launcher_arguments: tuple[str, ...] = ()
    resume: Resume | None = None


class _DeclaredJob(Struct, frozen=True):
    workload: DeclaredWorkload = DeclaredWorkload()


class _JobRecord(Struct, frozen=True):
    job: _DeclaredJob = _DeclaredJob()


def workload(path: Path) -> DeclaredWorkload:
    """Return the declared part of a run's recorded workload; an empty one if it is not recorded."""
    return (decode(path / "job.json", _JobRecord) or _JobRecord()).job.workload


def settings(path: Path) -> dict[str, str]:
    """Return the values of a run's recorded settings, as they are shown; none if they are not recorded."""
    return settings_in(read_record(path / "settings.json") or b"[]")


class SettingRow(Struct, frozen=True):
    """A setting in ``settings.json``, as it is shown."""

    key: str
    value: str


def settings_in(content: bytes) -> dict[str, str]:
    """Return the values in a settings.json; none if it is broken."""
    try:
        return {row.key: row.value for row in decoding.decode(content, list[SettingRow])}
    except (ValueError, RecursionError):
        return {}


def age(path: Path) -> float:
    """Return the seconds since a run's record was made; 0 if its mark is missing."""
    for mark in (MARK, FORMER_MARK):
        with suppress(OSError):
            return max(0, time.time() - (path / mark).lstat().st_mtime)
    return 0


def job(path: Path) -> JobSummary:
    """Return the summary in a run's job.json; an empty one if it is missing or broken."""
    return decode(path / "job.json", JobSummary) or JobSummary()


def abandon(
    lab: Lab, run_id: str, cause: Cause = "interrupted", message: str = "labctl ended before the run did"
) -> Result:
    """Write an ERROR result for a run without one, with its logs redacted; return it. HostError if it fails."""
    path = directory(lab.directory, run_id)
    redact_ranks(path, lab.hidden)
    recorded, expected = job(path), outlook.of(cause, message)
    result = Result(
        run_id=run_id,
        workload=recorded.workload,
        launcher=recorded.launcher,
        lab=lab.name,
        verdict="ERROR",
        cause=cause,
        message=message,
        exit_code=130 if cause == "interrupted" else 4,
        domain=expected.domain,
        retry=expected.retry,
        evidence=expected.evidence,
    )
    return finish(lab, result)


class RunSummary(Struct, frozen=True, kw_only=True):
    """A run in a list; fields of its result are None before it has one.

    ``state``: ``done``; ``running``; ``waiting`` for nodes of other runs; ``ended`` if not judged yet; ``orphaned`` if
    its launcher was restarted; ``unknown`` if the launcher is unreachable. ``age``: seconds since it began, None if
    done.
    """

    run_id: str
    short_id: str = ""
    """The shortest end of its id that names no other run of the list."""
    state: str
    workload: str | None = None
    verdict: str | None = None
    outcome: str | None = None
    """As ``Result.outcome``."""
    cause: str | None = None
    seconds: float | None = None
    started: str | None = None
    age: float | None = None
    nodes: tuple[str, ...] = ()
    """Nodes of a run that is under way, or those with ranks of a run that has ended."""
    world_size: int | None = None
    """Number of ranks of a run that has ended."""
    step: str = ""
    """The last step or epoch that it printed, such as ``step 12/100``."""
    metrics: Mapping[str, Mapping[str, Any]] = {}
    """Metrics of its result."""
    note: str = ""
    """As `labctl note` keeps it; empty without one."""

    @property
    def shown_state(self) -> str:
        """Return its state; ``unreadable`` if it has ended and its result cannot be read."""
        return self.state if self.verdict or self.state != "done" else "unreadable"


class ShownRun(Struct, frozen=True):
    """A run: its summary, and its result if it has one."""

    summary: RunSummary
    result: Result | None


class RunFilter(Struct, frozen=True, kw_only=True):
    """Filter of a list of runs; an empty field matches all."""

    workload: str = ""
    verdict: str = ""
    since: datetime | None = None
    """Local time."""

    def has(self, run: RunSummary) -> bool:
        """Tell if a run began at or after ``since`` and has workload and verdict; an empty field matches any."""
        # Ids begin with the local time.
        first = f"{self.since:%Y%m%d-%H%M%S}" if self.since else ""
        return run.run_id >= first and self.workload in ("", run.workload) and self.verdict in ("", run.verdict)


class RunList(Struct, frozen=True):
    """The lab's runs that match a filter, the latest first, and the number of all runs."""

    runs: tuple[RunSummary, ...]
    total: int


def read(lab: Path, run_id: str) -> ShownRun:
    """Return a run's summary and result (None without), by id or ``latest``. ConfigError for an unknown id."""
    run_id = find(lab, run_id)
    return ShownRun(summary(lab, run_id), read_result(lab, run_id))


def find(lab: Path, run_id: str) -> str:
    """Return the id of the run that this names. ConfigError if there is none, or several.

    A run is named by its id, by SHORTEST_NAME characters or more that begin it, begin its last part or end it, if no
    other run matches, by ``latest``, or by ``-1``, ``-2`` and so on, counted back.
    """
    if is_run(lab, run_id):
        return run_id
    run_ids = ids(lab)
    place = 1 if run_id == "latest" else _counted_back(run_id)
    if place and not run_ids:
        raise ConfigError(f"no runs in {lab / 'runs'}", hint="labctl run opt-tiny")
    if place and place <= len(run_ids):
        return run_ids[place - 1]
    meant = [each for each in run_ids if run_id and _is_named(each, run_id)]
    if meant and len(run_id) < SHORTEST_NAME:
        hint = f"type at least {SHORTEST_NAME} characters of its id"
        raise ConfigError(f"`{run_id}` is too short to name a run", hint=hint)
    if len(meant) == 1:
        return meant[0]
    if meant:
        hint = f"one of {human.listed(meant, MOST_MEANT)}"
        raise ConfigError(f"`{run_id}` is ambiguous: {len(meant)} runs match", hint=hint)
    near = nearest(run_id, run_ids)
    hint = f"did you mean `{near}`?" if near else f"the latest are {', '.join(run_ids[:5]) or 'none'}"
    raise ConfigError(f"no run `{run_id}` in {lab / 'runs'}", hint=hint)


def _is_named(run_id: str, text: str) -> bool:
    """Tell if an id, or its last part, begins with a text, or ends with it."""
    return run_id.startswith(text) or run_id.endswith(text) or run_id.rpartition("-")[2].startswith(text)


def _counted_back(text: str) -> int:
    """Return 1 for ``-1``, the latest run, 2 for ``-2``, and so on; 0 for other texts."""
    return int(text[1:]) if re.fullmatch(r"-[0-9]{1,6}", text) else 0


def read_result(lab: Path, run_id: str) -> Result | None:
    """Return the result of a run; None if ``result.json`` is missing or broken."""
    return decode(directory(lab, run_id) / RESULT, Result)


def read_hang(lab: Lab, run_id: str) -> Hang | None:
    """Return what a run's ranks waited for, from stacks/hang.json, redacted; None if it is missing."""
    hang = decode(directory(lab.directory, run_id) / HANG, Hang)
    return redacted_hang(hang, lab) if hang else None


def redacted_hang(hang: Hang, lab: Lab) -> Hang:
    """Return what ranks waited for, with the lab's secrets redacted, and its first lines only."""
    lines = tuple(redact(line, lab.hidden) for line in hang.lines[:MOST_HANG_LINES])
    return replace(hang, sentence=redact(hang.sentence, lab.hidden), lines=lines)


def decode(path: Path | str, kind: type[T]) -> T | None:
    """Return a record's JSON file as this type; None if it is missing, too large or broken."""
    content = read_record(path)
    try:
        return None if content is None else decoding.decode(content, kind)
    except (ValueError, RecursionError):
        return None


def read_record(path: Path | str) -> bytes | None:
    """Return the bytes of a file in a record; None unless it is a readable regular file of at most 16 MiB."""
    try:
        with files.open_regular(path) as stream:
            # Python takes the memory for as many bytes as it is asked for, which is slow for 16 MiB.
            size = os.fstat(stream.fileno()).st_size
            content = stream.read(min(size, LARGEST_RECORD) + 1)
    except OSError:
        return None
    return content if len(content) <= LARGEST_RECORD else None


def state(lab: Path, run_id: str, active: Mapping[str, ActiveRun] = MappingProxyType({})) -> str:
    """Return ``done`` with a result, else its state in ``active``, ``running`` if locked, or ``orphaned``."""
    if os.path.lexists(directory(lab, run_id) / RESULT):
        return "done"
    if run_id in active and active[run_id].state != "lost":
        return active[run_id].state
    # A lock in the record would be one that containers can hold, too.
    return "running" if filelock.is_held(lock(lab, run_id)) else "orphaned"


def lock(lab: Path, run_id: str) -> Path:
    """Return the path of a run's lock, held while it is recorded and judged."""
    return lab / filelock.RUNS / f"{run_id}.lock"


def purpose(run_id: str) -> str:
    """Return ``run ID``, by which the holder of a lock is named."""
    return f"run {run_id}"


@contextmanager
def recording(lab: Path, run_id: str) -> Iterator[None]:
    """Hold the lock of a run in the block, and remove it after. LockHeld if another process holds it."""
    path = lock(lab, run_id)
    with filelock.held(path, purpose(run_id)):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def unjudged(lab: Path) -> list[str]:
    """Return ids of runs without result.json, latest first."""
    runs = f"{lab}/runs"
    names = (name for name in _directories(lab) if not os.path.lexists(f"{runs}/{name}/{RESULT}"))
    return sorted((name for name in names if _has_any(f"{runs}/{name}", MARK, FORMER_MARK)), reverse=True)


def ran_within(lab: Path, seconds: float) -> bool:
    """Tell if one of the latest runs has no result, or got it within these seconds."""
    since = time.time() - seconds
    latest = sorted(_directories(lab), reverse=True)[:LATEST]
    results = (directory(lab, run_id) / RESULT for run_id in latest)
    return any(not os.path.lexists(path) or path.lstat().st_mtime > since for path in results)


def unknown(lab: Path) -> dict[str, ActiveRun]:
    """Map runs without a result, which no process here records, to an ActiveRun in state ``unknown``."""
    here = {path.stem for path in filelock.held_below(lab / filelock.RUNS)}
    waiting = [run_id for run_id in unjudged(lab) if run_id not in here]
    return {run_id: ActiveRun(id=run_id, nodes=(), state="unknown") for run_id in waiting}


def listing(
    lab: Path, limit: int | None = None, active: Mapping[str, ActiveRun] = MappingProxyType({})
) -> tuple[RunSummary, ...]:
    """Return the summaries of the lab's runs, latest first, at most ``limit``; ``active`` as in ``state``."""
    run_ids = ids(lab)
    short = short_ids(run_ids)
    summaries = (summary(lab, run_id, active) for run_id in run_ids[:limit])
    return tuple(replace(run, short_id=short[run.run_id]) for run in summaries)


def short_ids(run_ids: Sequence[str]) -> dict[str, str]:
    """Map ids to their shortest end, of 6 characters or more, that neither begins nor ends another id."""
    short: dict[str, str] = {}
    length, pending = SHORTEST_ID, list(run_ids)
    while pending:
        ends = Counter(chain.from_iterable({run_id[:length], run_id[-length:]} for run_id in run_ids))
        # A word that begins with a dash would be taken for an option.
        short |= {
            run_id: end
            for run_id in pending
            if len(end := run_id[-length:]) == len(run_id) or (ends[end] == 1 and not end.startswith("-"))
        }
        pending = [run_id for run_id in pending if run_id not in short]
        length += 1
    return short


def ids(lab: Path) -> list[str]:
    """Return the ids of the lab's runs, the latest first."""
    names = (name for name in _directories(lab) if _has_any(f"{lab}/runs/{name}", MARK, FORMER_MARK, RESULT))
    return sorted(names, reverse=True)


def _directories(lab: Path) -> list[str]:
    """Return the names in `runs/` that can be run ids and are directories; none if it cannot be read.

    It handles paths as text: a lab may have ten thousand runs, and each job of a batch lists all.
    """
    try:
        with os.scandir(lab / "runs") as entries:
            return [entry.name for entry in entries if _is_id(entry.name) and entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _has_any(directory: str, *names: str) -> bool:
    return any(os.path.lexists(f"{directory}/{name}") for name in names)


def is_run(lab: Path, run_id: str) -> bool:
    """Tell if `runs/ID` is a directory, no link, with a name that can be a run's."""
    path = directory(lab, run_id)
    return _is_id(run_id) and path.is_dir() and not path.is_symlink()


def backend(lab: Path, run_id: str) -> str:
    """Return ``kubernetes`` if a run's record has a place in a cluster, else `docker`."""
    return "kubernetes" if os.path.lexists(directory(lab, run_id) / PLACE) else "docker"


def _is_id(name: str) -> bool:
    """Tell if a name has a run id's form and is not the notebooks' folder."""
    return bool(RUN_ID.fullmatch(name)) and f"runs/{name}" != naming.NOTEBOOKS


def summary(lab: Path, run_id: str, active: Mapping[str, ActiveRun] = MappingProxyType({})) -> RunSummary:
    """Return a run's summary: from its result if done, else its state, age and nodes; ``active`` as in ``state``."""
    path, run = directory(lab, run_id), active.get(run_id)
    result = decode(f"{path}/{RESULT}", Result)
    fields = ("workload", "verdict", "outcome", "cause", "seconds", "started")
    values: dict[str, Any] = {name: getattr(result, name, None) for name in fields}
    values["started"] = values["started"] or began(run_id)
    values["note"] = notes.read(path)
    # Of ten thousand runs all but a few have a result.
    now = "done" if result else state(lab, run_id, active)
    if result:
        nodes = tuple(dict.fromkeys(rank.node for rank in result.ranks))
        values |= {"nodes": nodes, "world_size": result.world_size, "metrics": result.metrics}
    if now == "done":
        return RunSummary(run_id=run_id, state=now, **values)
    values["workload"] = job(path).workload
    seconds = age(path)
    if seconds:
        # As its result will have it: a second or two after the time of its id.
        values["started"] = datetime.fromtimestamp(time.time() - seconds).astimezone().isoformat(timespec="seconds")
    if run:
        now, values = "waiting" if run.waits else now, {**values, "nodes": run.nodes, "step": run.step}
    return RunSummary(run_id=run_id, state=now, age=seconds, **values)


def began(run_id: str) -> str | None:
    """Return the ISO time that a run's id begins with; None if it has none."""
    try:
        return datetime.strptime(run_id[:15], "%Y%m%d-%H%M%S").astimezone().isoformat()
    except ValueError:
        return None


def start(run_id: str, started: str | None) -> datetime | None:
    """Return when a run began: the time of its result, else that of its id; None if neither is a time."""
    with suppress(ValueError):
        return datetime.fromisoformat(started or "").astimezone()
    first = began(run_id)
    return datetime.fromisoformat(first) if first else None


def ranks_of(lines: Iterable[str]) -> tuple[Rank, ...]:
    """Return the ranks that reported their start with their nodes, else those that DeepSpeed lists; sorted.

    The latter is for scripts that start their ranks themselves.
    """
    lines = tuple(lines)
    nodes = {int(match[1]): match[2] for line in lines if (match := RANK_REPORTED.search(line))}
    if not nodes:
        for started in filter(None, map(RANKS_STARTED.search, lines)):
            node = started[1]
            numbers = re.search(rf"'{re.escape(node)}': \[([\d, ]*)\]", started[2])
            if numbers and numbers[1].strip():
                nodes |= dict.fromkeys(map(int, numbers[1].split(",")), node)
    return tuple(Rank(rank=rank, node=nodes[rank]) for rank in sorted(nodes))
