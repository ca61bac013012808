"""The record of a run, ``runs/<id>/``: written while it runs, read back by `runs` and `show`."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from labctl import naming
from labctl.config.settings import Settings
from labctl.engines import Backend
from labctl.errors import ConfigError
from labctl.model import File, Job, Lab, Rank, Result, Secret
from labctl.system import filelock, files


def record(
    lab: Lab, settings: Settings, job: Job, versions: dict[str, Any], *, preview: bool = False
) -> tuple[File, ...]:
    """Files for the run's directory, relative to it; a ``preview`` has those that `up` is yet to write, too."""
    # As they are on disk, which is what the containers were made from.
    composed = ((path, lab.directory / path) for path in (naming.compose_path(node.name) for node in lab.nodes))
    described = {
        "run_id": job.run_id,
        "workload": job.workload.name,
        "launcher": job.workload.launcher,
        "argv": job.argv,
        "rank_argv": [job.workload.script, *job.workload.arguments],
        "environment": dict(job.workload.environment),
        "timeout": job.timeout,
        "nodes": [{"name": node.name, "slots": node.slots} for node in job.nodes],
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


def versions(lab: Lab, engine: Backend, image_id: str | None) -> dict[str, Any]:
    """Versions of all that a run depends on."""
    import platform
    from importlib import metadata

    return {
        "labctl": metadata.version("labctl"),
        "python": platform.python_version(),
        **engine.capabilities(lab.hosts[0].name).versions(),
        "image": lab.image,
        "image_id": image_id,
    }


def _json(path: str, content: object) -> File:
    return File(path=path, content=json.dumps(content, indent=2) + "\n")


SCHEMA = 1
RESULT = "result.json"
OUTPUT = "output.log"
LOCK = "run.lock"
# Logs that ranks and scripts write themselves; below hosts/, where several hosts wrote the same name.
LOGS = ("*.log", "ranks/*.log", "hosts/*/*.log", "hosts/*/ranks/*.log")
RANK_REPORTED = re.compile(r"labctl: rank (\d+) of \d+ on (\S+)$")
# Printed on each node by DeepSpeed's launcher before it starts the ranks; deepspeed/launcher/launch.py.
RANKS_STARTED = re.compile(r"^(\S+): .*\bglobal_rank_mapping=defaultdict\(<class 'list'>, (\{.*\})\)$")


def new_id(workload: str, now: datetime) -> str:
    """A new run id, which sorts by time: ``20260102-150405-opt-tiny-3fa2``."""
    return f"{now:%Y%m%d-%H%M%S}-{workload.replace('/', '-')}-{secrets.token_hex(2)}"


def directory(lab: Path, run_id: str) -> Path:
    return lab / "runs" / run_id


def create(lab: Lab, run_id: str, content: Iterable[File]) -> Path:
    """Make the run's directory with what it needs and what is known before it starts."""
    path = directory(lab.directory, run_id)
    files.make_private(path / "ranks")
    files.write_all(path, content)
    return path


class RunLog:
    """Keeps a run's output, with the lab's secrets redacted; ``lines`` are those that the verdict needs, as printed."""

    def __init__(self, path: Path, lab: Lab, wanted: Iterable[str]) -> None:
        self._stream: TextIO = (path / OUTPUT).open("w", encoding="utf-8", buffering=1)
        self._hidden = lab.hidden
        self._path = path
        self._wanted = (RANK_REPORTED, RANKS_STARTED, *map(re.compile, wanted))
        self.lines: list[str] = []

    def keep(self, line: str) -> str:
        """Write one line; returns it redacted."""
        if any(pattern.search(line) for pattern in self._wanted):
            self.lines.append(line)
        line = redact(line, self._hidden)
        self._stream.write(line + "\n")
        return line

    def close(self) -> None:
        """Close the log and redact what ranks wrote themselves; once is enough."""
        if not self._stream.closed:
            self._stream.close()
            redact_ranks(self._path, self._hidden)


def redact_ranks(path: Path, hidden: tuple[Secret, ...]) -> None:
    """Redact secrets in the logs that ranks and scripts wrote themselves."""
    for log in (log for place in LOGS for log in path.glob(place)):
        # A workload may create anything with such a name.
        if log.is_symlink() or not log.is_file():
            continue
        text = log.read_text(encoding="utf-8", errors="surrogateescape")
        clean = redact(text, hidden)
        if clean != text:
            log.write_text(clean, encoding="utf-8", errors="surrogateescape")


def redact(text: str, hidden: tuple[Secret, ...]) -> str:
    for value in hidden:
        text = text.replace(value.reveal(), "[REDACTED]")
    return text


def finish(lab: Path, result: Result) -> Result:
    """Write ``result.json``, the last file of a run, with ``seconds`` rounded; returns what was written."""
    result = replace(result, seconds=round(result.seconds, 3))
    content = json.dumps({"schema": SCHEMA, **msgspec.to_builtins(result)}, indent=2, allow_nan=False) + "\n"
    files.write(directory(lab, result.run_id) / RESULT, content, 0o644)
    return result


def abandon(lab: Lab, run_id: str) -> None:
    """Close the record of a run whose labctl process was killed."""
    path = directory(lab.directory, run_id)
    redact_ranks(path, lab.hidden)
    try:
        job = json.loads((path / "job.json").read_text())
    except (OSError, ValueError):
        job = {"workload": "unknown", "launcher": "unknown"}
    result = Result(
        run_id=run_id,
        workload=job["workload"],
        launcher=job["launcher"],
        lab=lab.name,
        verdict="ERROR",
        cause="interrupted",
        message="labctl ended before the run did",
        exit_code=130,
    )
    finish(lab.directory, result)


class RunSummary(Struct, frozen=True, kw_only=True):
    """A run in a list; what is only in its result is None without one.

    ``state``: ``done``; ``running`` while its process lives; ``orphaned`` when that ended without a result.
    """

    run_id: str
    state: str
    workload: str | None = None
    verdict: str | None = None
    cause: str | None = None
    seconds: float | None = None
    started: str | None = None


class RunList(Struct, frozen=True):
    """The lab's runs, the latest first."""

    runs: tuple[RunSummary, ...]


def read(lab: Path, run_id: str) -> Result | RunSummary:
    """The result of a run, or its summary without one. ConfigError for an unknown id; ``latest`` is one."""
    if run_id == "latest":
        if not (latest := listing(lab, 1)):
            raise ConfigError(f"no runs in {lab / 'runs'}", hint="labctl run opt-tiny")
        run_id = latest[0].run_id
    path = directory(lab, run_id)
    if path.parent != lab / "runs" or path.name in ("", ".", "..") or not path.is_dir():
        known = [run.run_id for run in listing(lab, 5)]
        raise ConfigError(f"no run `{run_id}` in {lab / 'runs'}", hint=f"the latest are {', '.join(known) or 'none'}")
    return read_result(lab, run_id) or summary(lab, run_id)


def read_result(lab: Path, run_id: str) -> Result | None:
    """The result of a run; None where ``result.json`` is missing or broken."""
    try:
        return msgspec.json.decode((directory(lab, run_id) / RESULT).read_bytes(), type=Result)
    except (OSError, ValueError, msgspec.DecodeError):
        return None


def state(lab: Path, run_id: str) -> str:
    """The state of a run, as in ``RunSummary``."""
    if (directory(lab, run_id) / RESULT).exists():
        return "done"
    return "running" if filelock.is_held(directory(lab, run_id) / LOCK) else "orphaned"


def listing(lab: Path, limit: int | None = None) -> tuple[RunSummary, ...]:
    """The lab's runs, the latest first."""
    records = (path.name for path in (lab / "runs").glob("*") if (path / LOCK).exists() or (path / RESULT).exists())
    return tuple(summary(lab, run_id) for run_id in sorted(records, reverse=True)[:limit])


def summary(lab: Path, run_id: str) -> RunSummary:
    result = read_result(lab, run_id)
    known = ("workload", "verdict", "cause", "seconds", "started")
    values: dict[str, Any] = {name: getattr(result, name, None) for name in known}
    return RunSummary(run_id=run_id, state=state(lab, run_id), **values)


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
