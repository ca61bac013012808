"""The record of a run, ``runs/<id>/``: written while it runs, read back by `runs` and `show`."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import chain, repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from labctl import naming
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError, nearest
from labctl.model import Cause, Copy, File, Job, Lab, Metric, Progress, Rank, Result, Secret, Workload
from labctl.records.active import ActiveRun
from labctl.records.lines import Line
from labctl.records.metrics import searched
from labctl.records.progress import Tracker
from labctl.system import filelock, files


def record(
    lab: Lab, settings: Settings, job: Job, versions: dict[str, Any], *, preview: bool = False
) -> tuple[File, ...]:
    """Files for the run's directory, relative to it; a ``preview`` has those that `up` is yet to write, too."""
    # As they are on disk, which is what the containers were made from; the first node's has the launcher.
    owners = dict.fromkeys((lab.nodes[0].name, *(node.name for node in job.nodes)))
    composed = ((path, lab.directory / path) for path in map(naming.compose_path, owners))
    described = {
        "run_id": job.run_id,
        "workload": job.workload.name,
        "launcher": job.workload.launcher,
        "argv": job.argv,
        "rank_argv": [job.workload.script, *job.workload.arguments],
        "environment": dict(job.workload.environment),
        "timeout": job.timeout,
        "nodes": [{"name": node.name, "slots": node.slots} for node in job.nodes],
        "request": job.request,
        "resumed": job.resumed,
        "retried": job.retried,
        "replays": job.replays,
        # What a replay of the run takes from its directory, and what it finds in the lab's.
        "files": {file.path: sha256(file.content.encode()) for file in job.files},
        "code": {} if preview else digests((one.path, one.root / one.name) for one in job.code),
        "shared": {} if preview else digests(shared_code(lab.directory)),
        # What whoever follows the run later judges it by.
        "job": msgspec.to_builtins(replace(job, files=(), code=(), request={}), enc_hook=str),
    }
    return (
        _json("job.json", described),
        _json("settings.json", [dict(zip(("key", "value", "origin"), row, strict=True)) for row in settings.rows()]),
        _json("versions.json", versions),
        *(
            File(path=f"rendered/{name.removeprefix('.lab/')}", content=path.read_text() if path.exists() else "")
            for name, path in composed
            if preview or path.exists()
        ),
    )


def shared_code(lab: Path) -> Iterator[tuple[str, Path]]:
    """What the workloads' scripts share, which ranks import from the lab's directory itself."""
    folder = lab / SHARED
    return ((f"{SHARED}/{name}", folder / name) for name in files.walk(folder))


def digests(paths: Iterable[tuple[str, Path]]) -> dict[str, str]:
    """SHA-256 of each file's content, of a link of where it leads, by the name given; nothing of what is gone."""
    found = {}
    for name, path in paths:
        with suppress(OSError):
            if path.is_symlink():
                found[name] = sha256(os.fsencode(path.readlink()))
            else:
                with files.open_regular(path) as stream:
                    digest = hashlib.sha256()
                    while piece := stream.read(PIECE):
                        digest.update(piece)
                    found[name] = digest.hexdigest()
    return found


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def versions(lab: Lab, engine: Mapping[str, str], image_id: str | None) -> dict[str, Any]:
    """Versions of all that a run depends on; ``engine``: those that the engine of its first node reports."""
    import platform
    from importlib import metadata

    return {
        "labctl": metadata.version("labctl"),
        "python": platform.python_version(),
        **engine,
        "image": lab.image,
        "image_id": image_id,
    }


def plan_file(text: str) -> File:
    """The file of a run's record that holds the text of its plan."""
    return File(path="plan.txt", content=text)


def _json(path: str, content: object) -> File:
    return File(path=path, content=json.dumps(content, indent=2) + "\n")


SCHEMA = 1
SHARED = "workloads/common"
RESULT = "result.json"
OUTPUT = "output.log"
METRICS = "metrics.jsonl"
TIMES = "output.times"
"""Of each line of the output the seconds since 1970, and its rank or ``-``."""
MARK, FORMER_MARK = "started", "run.lock"
"""What the record of a run has from its beginning; and what earlier records have."""
REACHED = "reached"
"""The note of a run that did not pass: how far it came."""
EVIDENCE = "evidence.tar.gz"
KEPT = (RESULT, OUTPUT, TIMES, METRICS, EVIDENCE, MARK, FORMER_MARK)
"""What labctl alone writes into a record: nothing of these names comes from a run or a host."""
# Logs that ranks and scripts write themselves; below hosts/, where several hosts wrote the same name.
LOGS = ("*.log", "ranks/*.log", "hosts/*/*.log", "hosts/*/ranks/*.log")
RANK_REPORTED = re.compile(r"labctl: rank (\d+) of \d+ on (\S+)$")
# Printed on each node by DeepSpeed's launcher before it starts the ranks; deepspeed/launcher/launch.py.
RANKS_STARTED = re.compile(r"^(\S+): .*\bglobal_rank_mapping=defaultdict\(<class 'list'>, (\{.*\})\)$")


# What names a run in runs/, into which workloads may put anything: letters of ``new_id``, fit to be printed.
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
LARGEST_RECORD = 16 << 20
# Bytes of a log that are in memory at once.
PIECE = 1 << 20
REDACTED = "[REDACTED]"
T = TypeVar("T")


class RecordError(HostError):
    """What a run prints cannot be recorded."""


def new_id(workload: str, now: datetime) -> str:
    """A new run id, which sorts by time: ``20260102-150405-opt-tiny-3fa2c1``."""
    return f"{now:%Y%m%d-%H%M%S}-{workload.replace('/', '-')}-{secrets.token_hex(3)}"


def directory(lab: Path, run_id: str) -> Path:
    return lab / "runs" / run_id


def outputs(lab: Path, run_id: str) -> Path:
    """What a run writes until it ends; containers can write there, and to no other part of ``runs/``."""
    return lab / naming.OUTPUTS / run_id


def create(
    lab: Lab, run_id: str, job: tuple[File, ...], record: Iterable[File] = (), code: tuple[Copy, ...] = ()
) -> Path:
    """Make the run's directories, which must be new: with its record, and with what its ranks need and write."""
    path = directory(lab.directory, run_id)
    files.create_all(path, (*job, *record, File(path=MARK, content="")))
    files.create_all(outputs(lab.directory, run_id), job, folders=("ranks", "work"), copies=code)
    return path


class RunLog:
    """Keeps a run's output, with the lab's secrets redacted, its times, and the samples of its metrics.

    It holds no more in memory than the verdict needs: numbers, and ``lines`` that name ranks or have a note first.
    """

    def __init__(self, path: Path, lab: Lab, workload: Workload, *, over: bool = False) -> None:
        """``over``: replace what another has recorded, as who follows the run from its beginning does."""
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
        self._tracker = Tracker(workload.metrics)
        self._notes = [re.compile(pattern) for _, pattern in workload.notes]
        # Ranks that a script starts itself may report in by what it prints.
        self._starts_itself = workload.launcher == "script"
        self.lines: list[str] = []

    @property
    def values(self) -> Mapping[str, Sequence[float]]:
        """The numbers of each metric, in order."""
        return self._tracker.values

    def progress(self) -> Progress:
        """How far the run is."""
        return self._tracker.progress()

    def keep(self, lines: Sequence[Line]) -> Sequence[Line]:
        """Write lines; returns them redacted. RecordError where they cannot be written."""
        shown = redact_lines(lines, self._hidden)
        try:
            self._read(lines)
            ranks = ("-" if line.rank is None else line.rank for line in lines)
            times = (f"{line.when:.3f} {rank}\n" for line, rank in zip(lines, ranks, strict=True))
            self._times.write("".join(times).encode())
            self._stream.write("".join(f"{line.text}\n" for line in shown).encode())
            # What labctl leaves when it is killed is as long in each.
            for stream in (self._series, self._times, self._stream):
                stream.flush()
        except OSError as error:
            path = self._path / OUTPUT
            raise RecordError(f"cannot write {path}: {error.strerror}", hint=f"df -h {path.parent}") from error
        return shown

    def keep_and_show(self, on_lines: Callable[[Iterable[str]], object]) -> Callable[[Sequence[Line]], Sequence[Line]]:
        """``keep``, with what it returns handed on as text."""

        def keep(lines: Sequence[Line]) -> Sequence[Line]:
            kept = self.keep(lines)
            on_lines([line.text for line in kept])
            return kept

        return keep

    def _read(self, lines: Sequence[Line]) -> None:
        self._series.write(b"".join(msgspec.json.encode(sample) + b"\n" for sample in self._tracker.read(lines)))
        for line in lines:
            # Most lines are of neither kind.
            if not self._notes and "rank" not in line.text:
                continue
            text = searched(line.text)
            found = [note for note in self._notes if note.search(text)]
            if found or self._names_ranks(line, text):
                self.lines.append(text)
                self._notes = [note for note in self._notes if note not in found]

    def _names_ranks(self, line: Line, text: str) -> bool:
        """Whether it is the report of a rank that has started, or what DeepSpeed's launcher says of ranks."""
        if "rank" not in text:
            return False
        if RANK_REPORTED.match(line.said) if line.report else self._starts_itself and RANK_REPORTED.search(text):
            return True
        return bool(RANKS_STARTED.search(text))

    def close(self) -> None:
        """Close the log and redact what ranks wrote themselves; once is enough. HostError for what is not written."""
        if not self._stream.closed:
            try:
                with files.writing(self._path / OUTPUT), self._series, self._times, self._stream:
                    pass
            finally:
                redact_ranks(self._path, self._hidden)


def redact_ranks(path: Path, hidden: tuple[Secret, ...]) -> None:
    """Redact secrets in the logs that ranks and scripts wrote themselves. HostError for one that cannot be written.

    A workload may create anything with such a name: only files that have no other are touched.
    """
    if not hidden:
        return
    with suppress(OSError), files.opened(path) as folder:
        for place in LOGS:
            for log, parent in _matching(path, folder, place.split("/")):
                _redact_log(log, parent, hidden)


def _matching(path: Path, folder: int, pattern: list[str]) -> Iterator[tuple[Path, int]]:
    """What matches below a directory, through no link, with the descriptor of the directory that it is in."""
    for name in fnmatch.filter(os.listdir(folder), pattern[0]):
        if len(pattern) == 1:
            yield path / name, folder
            continue
        with suppress(OSError), files.opened(name, folder) as below:
            yield from _matching(path / name, below, pattern[1:])


def _redact_log(path: Path, parent: int, hidden: tuple[Secret, ...]) -> None:
    try:
        log = files.open_regular(path.name, parent)
    except OSError:
        return
    with log, files.writing(path):
        found = os.fstat(log.fileno())
        # The copy of one that was redacted before is the same.
        if found.st_nlink == 1 and any(REDACTED.encode() in piece for piece in _redacted(_pieces(log), hidden)):
            files.replace_in(parent, path.name, _redacted(_pieces(log), hidden), stat.S_IMODE(found.st_mode))


def _pieces(log: BinaryIO) -> Iterator[bytes]:
    """What a file holds now, less its holes: those may be larger than any disk."""
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
    """The same bytes without secrets, also those that begin in one piece and end in the next."""
    values = sorted((value.reveal().encode("utf-8", "surrogateescape") for value in hidden), key=len, reverse=True)
    pattern, mark = re.compile(b"|".join(map(re.escape, values))), REDACTED.encode()
    rest = b""
    for piece in pieces:
        rest += piece
        # What begins before is here to its end, whichever secret it is.
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
    for value in hidden:
        text = text.replace(value.reveal(), REDACTED)
    return text


def redact_lines(lines: Sequence[Line], hidden: tuple[Secret, ...]) -> Sequence[Line]:
    """The same lines, and what their ranks said, redacted: most have no secret."""
    text = "\n".join(line.text for line in lines) if hidden else ""
    if not any(value.reveal() in text for value in hidden):
        return lines
    return [replace(line, text=redact(line.text, hidden), said=redact(line.said, hidden)) for line in lines]


def _redact_texts(value: Any, hidden: tuple[Secret, ...]) -> Any:
    if isinstance(value, str):
        return redact(value, hidden)
    if isinstance(value, dict):
        return {key: _redact_texts(item, hidden) for key, item in value.items()}
    return [_redact_texts(item, hidden) for item in value] if isinstance(value, (list, tuple)) else value


def finish(lab: Lab, result: Result) -> Result:
    """Write ``result.json``, the last file of a run, redacted and with ``seconds`` rounded; returns what was written.

    HostError where it cannot be written.
    """
    content = msgspec.to_builtins(result)
    said = {key: _redact_texts(content[key], lab.hidden) for key in ("message", "ranks", "metrics", "notes", "checks")}
    content = {"schema": SCHEMA, **content, **said, "seconds": round(result.seconds, 3)}
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    path = directory(lab.directory, result.run_id)
    with files.writing(path / RESULT), files.opened(path) as folder:
        files.replace_in(folder, RESULT, [text.encode()], 0o644)
    return msgspec.convert(content, Result)


def output(lab: Path, run_id: str, rank: int | None = None) -> Iterator[tuple[float | None, str]]:
    """The lines that a run, or one rank of it, has printed as far as its record has them, each with its time.

    That is in seconds since 1970, and None where the record does not say. ConfigError for a rank without a log.
    """
    path = directory(lab, run_id)
    logs = [path / OUTPUT]
    if rank is not None:
        # That of an elastic launcher's rank names its node, too; those of the same name on several hosts are apart.
        name, places = f"rank-{rank}[.@]*log", (path, outputs(lab, run_id))
        patterns = (f"ranks/{name}", f"hosts/*/ranks/{name}")
        logs = [log for place in places for pattern in patterns for log in sorted(place.glob(pattern))]
        if not logs:
            hint = f"`labctl show {run_id}` lists its ranks; -f follows a run that is under way"
            raise ConfigError(f"run {run_id} has no log of rank {rank} here", hint=hint)
    # Which lines are in which of several logs is not known.
    times = chain(_times(path / TIMES, rank) if len(logs) == 1 else (), repeat(None))
    for log in logs:
        with suppress(OSError), files.open_regular(log) as stream:
            for line in stream:
                when = next(times)
                yield from ((when, part) for part in line.decode("utf-8", "replace").splitlines())


def last_lines(path: Path, size: int) -> list[str]:
    """The last lines of a file of a record, whole ones, in so many bytes of its end; none of what is no file."""
    try:
        with files.open_regular(path) as stream:
            begin = max(0, stream.seek(0, 2) - size)
            stream.seek(begin)
            lines = stream.read().decode("utf-8", "replace").removesuffix("\n").split("\n")
    except OSError:
        return []
    return lines[1:] if begin else lines


def _times(path: Path, rank: int | None) -> Iterator[float | None]:
    with suppress(OSError), files.open_regular(path) as stream:
        for line in stream:
            when, _, whose = line.decode("ascii").strip().partition(" ")
            if rank is None or whose == str(rank):
                yield float(when)


def load_job(lab: Path, run_id: str) -> Job:
    """The job of a run, less its files. HostError where its record does not hold it."""
    content = read_record(directory(lab, run_id) / "job.json")
    try:
        recorded = msgspec.json.decode(content or b"")["job"]
        return msgspec.convert(recorded, Job, dec_hook=lambda kind, value: kind(value))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        path = directory(lab, run_id) / "job.json"
        raise HostError(f"{path} does not hold the run's job: {error}", hint=f"labctl stop {run_id}") from error


class NamedNode(Struct, frozen=True):
    """A node of a run."""

    name: str


class JobSummary(Struct, frozen=True):
    """What is asked of the ``job.json`` of a run that has ended; earlier records do not have all of it."""

    workload: str = "unknown"
    launcher: str = "unknown"
    nodes: tuple[NamedNode, ...] = ()
    request: dict[str, Any] | None = None
    resumed: str = ""
    files: dict[str, str] = {}
    """SHA-256 of what labctl wrote for it, of the code that its ranks began with, and of what that shares."""
    code: dict[str, str] = {}
    shared: dict[str, str] = {}


class DeclaredWorkload(Struct, frozen=True):
    """What is asked of the workload in ``job.json``, as it was declared then."""

    script: str = ""
    metrics: tuple[Metric, ...] = ()
    launcher_arguments: tuple[str, ...] = ()


class _DeclaredJob(Struct, frozen=True):
    workload: DeclaredWorkload = DeclaredWorkload()


class _JobRecord(Struct, frozen=True):
    job: _DeclaredJob = _DeclaredJob()


def workload(path: Path) -> DeclaredWorkload:
    """What is known of a run's workload; nothing of those whose record does not have it."""
    return (decode(path / "job.json", _JobRecord) or _JobRecord()).job.workload


def age(path: Path) -> float:
    """Seconds since a run began; 0 where its record does not say."""
    for mark in (MARK, FORMER_MARK):
        with suppress(OSError):
            return max(0, time.time() - (path / mark).lstat().st_mtime)
    return 0


def job(path: Path) -> JobSummary:
    """What is known of a run's job."""
    return decode(path / "job.json", JobSummary) or JobSummary()


def abandon(
    lab: Lab, run_id: str, cause: Cause = "interrupted", message: str = "labctl ended before the run did"
) -> Result:
    """Close the record of a run that nothing supervises any more. HostError if it cannot be written."""
    path = directory(lab.directory, run_id)
    redact_ranks(path, lab.hidden)
    known = job(path)
    result = Result(
        run_id=run_id,
        workload=known.workload,
        launcher=known.launcher,
        lab=lab.name,
        verdict="ERROR",
        cause=cause,
        message=message,
        exit_code=130 if cause == "interrupted" else 4,
    )
    return finish(lab, result)


class RunSummary(Struct, frozen=True, kw_only=True):
    """A run in a list; what is only in its result is None without one.

    ``state``: ``done``; ``running``; ``waiting`` for nodes of other runs; ``ended`` where nobody has judged it yet;
    ``orphaned`` where its launcher was restarted; ``unknown`` where that does not answer. ``age``, of one that is not
    done, in seconds since it began.
    """

    run_id: str
    state: str
    workload: str | None = None
    verdict: str | None = None
    cause: str | None = None
    seconds: float | None = None
    started: str | None = None
    age: float | None = None
    nodes: tuple[str, ...] = ()
    """Those of a run that is under way."""
    step: str = ""
    """The last that it has printed of where it is, such as ``step 12/100``."""


class RunFilter(Struct, frozen=True, kw_only=True):
    """Which runs of a list are asked for; an empty field asks for all."""

    workload: str = ""
    verdict: str = ""
    since: datetime | None = None
    """Local time."""

    def has(self, run: RunSummary) -> bool:
        # An id begins with the local time of its run.
        first = f"{self.since:%Y%m%d-%H%M%S}" if self.since else ""
        return run.run_id >= first and self.workload in ("", run.workload) and self.verdict in ("", run.verdict)


class RunList(Struct, frozen=True):
    """The lab's runs, the latest first."""

    runs: tuple[RunSummary, ...]


def read(lab: Path, run_id: str) -> Result | RunSummary:
    """The result of a run, or its summary without one. ConfigError for an unknown id; ``latest`` is one."""
    run_id = find(lab, run_id)
    return read_result(lab, run_id) or summary(lab, run_id)


def find(lab: Path, run_id: str) -> str:
    """The id of a run that is there. ConfigError, with the nearest, for an unknown one; ``latest`` is one."""
    if run_id == "latest":
        if not (known := ids(lab)):
            raise ConfigError(f"no runs in {lab / 'runs'}", hint="labctl run opt-tiny")
        return known[0]
    if not is_run(lab, run_id):
        known = ids(lab)
        near = nearest(run_id, known)
        hint = f"did you mean `{near}`?" if near else f"the latest are {', '.join(known[:5]) or 'none'}"
        raise ConfigError(f"no run `{run_id}` in {lab / 'runs'}", hint=hint)
    return run_id


def read_result(lab: Path, run_id: str) -> Result | None:
    """The result of a run; None where ``result.json`` is missing or broken."""
    return decode(directory(lab, run_id) / RESULT, Result)


def decode(path: Path, kind: type[T]) -> T | None:
    """A JSON file of a record; None where it is not there, or is something else."""
    content = read_record(path)
    try:
        return None if content is None else msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError):
        return None


def read_record(path: Path) -> bytes | None:
    """The content of a file in a run's directory, where workloads may put anything.

    None unless it is a file of at most 16 MiB that can be read.
    """
    try:
        with files.open_regular(path) as stream:
            content = stream.read(LARGEST_RECORD + 1)
    except OSError:
        return None
    return content if len(content) <= LARGEST_RECORD else None


def state(lab: Path, run_id: str, active: Mapping[str, ActiveRun] = MappingProxyType({})) -> str:
    """The state of a run, as in ``RunSummary``; ``active`` are those that the agent in the launcher knows."""
    if os.path.lexists(directory(lab, run_id) / RESULT):
        return "done"
    if run_id in active and active[run_id].state != "lost":
        return active[run_id].state
    # A lock in the record would be one that containers can hold, too.
    return "running" if filelock.is_held(lock(lab, run_id)) else "orphaned"


def lock(lab: Path, run_id: str) -> Path:
    """What is locked by who records and judges a run."""
    return lab / filelock.RUNS / f"{run_id}.lock"


def purpose(run_id: str) -> str:
    """What a run's lock is held for."""
    return f"run {run_id}"


@contextmanager
def recording(lab: Path, run_id: str) -> Iterator[None]:
    """Hold the lock of who records and judges a run, and remove it. LockHeld where another does."""
    path = lock(lab, run_id)
    with filelock.held(path, purpose(run_id)):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def unjudged(lab: Path) -> list[str]:
    """The runs without a result, the latest first: they are under way, or nobody has looked since they ended."""
    runs = f"{lab}/runs"
    found = (name for name in _directories(lab) if not os.path.lexists(f"{runs}/{name}/{RESULT}"))
    return sorted((name for name in found if _has_any(f"{runs}/{name}", MARK, FORMER_MARK)), reverse=True)


def unknown(lab: Path) -> dict[str, ActiveRun]:
    """Return the runs without a result as of unknown state, but for those that a labctl on this machine records."""
    here = {path.stem for path in filelock.held_below(lab / filelock.RUNS)}
    waiting = [run_id for run_id in unjudged(lab) if run_id not in here]
    return {run_id: ActiveRun(id=run_id, nodes=(), state="unknown") for run_id in waiting}


def listing(
    lab: Path, limit: int | None = None, active: Mapping[str, ActiveRun] = MappingProxyType({})
) -> tuple[RunSummary, ...]:
    """The lab's runs, the latest first; ``active`` as ``state``."""
    return tuple(summary(lab, run_id, active) for run_id in ids(lab)[:limit])


def ids(lab: Path) -> list[str]:
    """The ids of the lab's runs, the latest first."""
    found = (name for name in _directories(lab) if _has_any(f"{lab}/runs/{name}", MARK, FORMER_MARK, RESULT))
    return sorted(found, reverse=True)


def _directories(lab: Path) -> list[str]:
    """What may be runs. Paths are text here: a lab may have ten thousand, and each job of a batch looks at all."""
    try:
        with os.scandir(lab / "runs") as entries:
            return [one.name for one in entries if _is_id(one.name) and one.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _has_any(directory: str, *names: str) -> bool:
    return any(os.path.lexists(f"{directory}/{name}") for name in names)


def is_run(lab: Path, run_id: str) -> bool:
    """Whether this names a directory of a run, which is no link."""
    path = directory(lab, run_id)
    return _is_id(run_id) and path.is_dir() and not path.is_symlink()


def _is_id(name: str) -> bool:
    """Whether a directory in ``runs/`` of this name may be a run's; containers write into that of notebooks."""
    return bool(RUN_ID.fullmatch(name)) and f"runs/{name}" != naming.NOTEBOOKS


def summary(lab: Path, run_id: str, active: Mapping[str, ActiveRun] = MappingProxyType({})) -> RunSummary:
    result = read_result(lab, run_id)
    known = ("workload", "verdict", "cause", "seconds", "started")
    values: dict[str, Any] = {name: getattr(result, name, None) for name in known}
    path, of, now = directory(lab, run_id), active.get(run_id), state(lab, run_id, active)
    if now == "done":
        return RunSummary(run_id=run_id, state=now, **values)
    values["workload"] = job(path).workload
    if of:
        now, values = "waiting" if of.waits else now, {**values, "nodes": of.nodes, "step": of.step}
    return RunSummary(run_id=run_id, state=now, age=age(path), **values)


def ranks_of(lines: Iterable[str]) -> tuple[Rank, ...]:
    """The ranks that reported in with their first line; else those that DeepSpeed's launcher says it started, as for
    a script that starts its ranks itself."""
    lines = tuple(lines)
    found = {int(match[1]): match[2] for line in lines if (match := RANK_REPORTED.search(line))}
    if not found:
        for line in lines:
            if started := RANKS_STARTED.search(line):
                own = re.search(rf"'{re.escape(started[1])}': \[([\d, ]*)\]", started[2])
                found |= dict.fromkeys(map(int, own[1].split(",") if own and own[1].strip() else ()), started[1])
    return tuple(Rank(rank=rank, node=found[rank]) for rank in sorted(found))
