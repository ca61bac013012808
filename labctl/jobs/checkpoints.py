"""Find the last complete checkpoint of a run, and resume a workload from it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from labctl.errors import ConfigError
from labctl.jobs import inputs
from labctl.model import Lab, Resume, Workload
from labctl.records import store
from labctl.system.decode import decode

SAVED = re.compile(r"\.(?:pt|pth|ckpt)$|^checkpoint[^.]*$", re.IGNORECASE)
"""Names of files that look like checkpoints."""


class Checkpoint(Struct, frozen=True, kw_only=True):
    """A complete checkpoint: its run, its path in the run's directory, and its number of ranks if known."""

    run_id: str
    path: str
    ranks: int | None = None

    def __str__(self) -> str:
        return f"{self.run_id}/{self.path}"


class Marker(Struct, frozen=True):
    """Optional content of a checkpoint's marker file: the number of ranks, and files with their sizes in bytes."""

    world_size: int | None = None
    files: Mapping[str, int] = field(default_factory=dict)


def going_on(lab: Lab, workload: Workload, run_id: str, ranks: int) -> tuple[Workload, str]:
    """Return the workload with the argument to resume a run, and its checkpoint's name. ConfigError if it cannot.

    It is raised if the workload does not declare how to resume, the run has no complete checkpoint, or the number of
    ranks differs.
    """
    if workload.resume is None:
        raise ConfigError(
            f"{workload.declared}: `{workload.name}` does not declare how it resumes",
            hint=_by_hand(lab, workload, run_id),
        )
    checkpoint, why = last(lab.directory, run_id, workload.resume)
    if checkpoint is None:
        raise ConfigError(
            f"run {run_id} has no complete checkpoint: {why}",
            hint=f"{_other_pattern(lab, workload, run_id)}; from the beginning: labctl run {workload.name}",
        )
    if checkpoint.ranks not in (None, ranks) and not workload.elastic:
        raise ConfigError(
            f"checkpoint {checkpoint} was saved by {checkpoint.ranks} ranks, and this run has {ranks}",
            hint=f"choose {checkpoint.ranks} slots by --hostfile, --include or --exclude",
        )
    option = workload.resume.argument
    path = store.directory(lab.directory, checkpoint.run_id) / checkpoint.path
    return replace(
        workload,
        arguments=(*workload.arguments, option, str(path)),
        inputs=(*workload.inputs, (option.removeprefix("--"), "path")),
    ), str(checkpoint)


def _by_hand(lab: Lab, workload: Workload, run_id: str) -> str:
    """Return how to resume a run of a workload that does not declare it, from what looks like a checkpoint if any."""
    saved = newest(store.directory(lab.directory, run_id))
    pattern = _pattern(saved) if saved else "work/checkpoints/*"
    resume = f"`resume: {{argument: --resume, checkpoint: '{pattern}'}}`"
    if workload.directory != Path():
        return f"if the script has such an option, add {resume} to {workload.declared.partition(':')[0]}"
    path = in_nodes(run_id, saved or "work/CHECKPOINT")
    dashes = "" if workload.declared.startswith("-- ") else "-- "
    words = shlex.join([*workload.arguments, "--resume", path])
    return (
        f"pass the checkpoint by the script's own option, as in: labctl run {workload.declared} {dashes}{words}; "
        f"or declare {resume} in a workload.yml of the lab"
    )


def _other_pattern(lab: Lab, workload: Workload, run_id: str) -> str:
    """Return the pattern that what looks like a checkpoint of the run matches; else how to have some saved."""
    top = store.directory(lab.directory, run_id)
    saved = newest(top)
    if saved is None or (workload.resume and any(top.glob(workload.resume.checkpoint))):
        return "have the script save checkpoints, as opt-*, lora-clm and vit do with --set save-every=STEPS"
    return f"the run has {saved}, which `checkpoint: '{_pattern(saved)}'` matches"


def newest(top: Path) -> PurePosixPath | None:
    """Return the newest file that looks like a checkpoint, by its path in a run's directory; None if none.

    A file that was copied with the code is none.
    """
    copied = store.job(top).code
    named_so = (path for path in top.rglob("*") if SAVED.search(path.name) and path.is_file())
    saved = [path for path in named_so if str(path.relative_to(top)) not in copied]
    last_saved = max(saved, key=lambda path: path.stat().st_mtime, default=None)
    return PurePosixPath(last_saved.relative_to(top)) if last_saved else None


def in_nodes(run_id: str, saved: PurePosixPath | str) -> str:
    """Return the path at which ranks see a file of a run."""
    return f"/workspace/{inputs.RUNS}/{run_id}/{saved}"


def _pattern(saved: PurePosixPath) -> str:
    """Return the pattern of files beside a checkpoint of the same kind."""
    return str(saved.with_name(f"*{saved.suffix}"))


def last(lab: Path, run_id: str, declared: Resume) -> tuple[Checkpoint | None, str]:
    """Return the last complete checkpoint of a run, or of the runs it resumed, and ""; (None, reason) if none."""
    first = ""
    while True:
        checkpoint, why = last_of(lab, run_id, declared)
        if checkpoint:
            return checkpoint, ""
        first = first or why
        earlier = store.job(store.directory(lab, run_id)).resumed.partition("/")[0]
        if not earlier or not store.is_run(lab, earlier) or earlier >= run_id:
            return None, first
        run_id = earlier


def last_of(lab: Path, run_id: str, declared: Resume) -> tuple[Checkpoint | None, str]:
    """Return (checkpoint, "") of a run's own last complete one; (None, reason) if none matches or is complete."""
    top = store.directory(lab, run_id)
    # Links out of the run's directory are not of this run.
    places = [path for path in top.glob(declared.checkpoint) if path.resolve().is_relative_to(top.resolve())]
    reason = f"nothing in {top} matches {declared.checkpoint}"
    for number, place in enumerate(sorted(places, key=lambda path: by_number(str(path)), reverse=True)):
        marker, why = whole(place, declared.marker)
        if marker:
            return Checkpoint(run_id=run_id, path=str(place.relative_to(top)), ranks=marker.world_size), ""
        reason = f"{place.relative_to(top)}: {why}" if number == 0 else reason
    return None, reason


def by_number(path: str) -> list[tuple[int, str]]:
    """Return a sort key for paths that puts step-9 before step-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split("([0-9]+)", path)]


def whole(place: Path, name: str) -> tuple[Marker | None, str]:
    """Return (marker, "") of a complete checkpoint, a blank marker without ``name``; (None, reason) if incomplete.

    Without a marker name, every checkpoint is complete. A marker in JSON must be valid.
    """
    if not name:
        return Marker(), ""
    content = store.read_record(place / name)
    if content is None:
        return None, f"no {name}"
    marker = Marker()
    if name.endswith(".json"):
        try:
            marker = decode(content, Marker)
        except msgspec.ValidationError:
            pass  # JSON of another program, without a list of files.
        except (ValueError, RecursionError) as error:
            return None, f"{name}: {error}"
    missing = [file for file, size in marker.files.items() if not is_file(place / file, size)]
    if missing:
        return None, f"{len(missing)} of {len(marker.files)} files missing or truncated, such as {missing[0]}"
    return marker, ""


def is_file(path: Path, size: int) -> bool:
    """Tell if a path is a file of exactly this size."""
    return path.is_file() and path.stat().st_size == size
