"""The last whole checkpoint of a run, and the workload that goes on from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from labctl.errors import ConfigError
from labctl.model import Lab, Resume, Workload
from labctl.records import store


class Checkpoint(Struct, frozen=True, kw_only=True):
    """A whole checkpoint: the run that wrote it, its path in that run's directory, and its number of ranks if known."""

    run_id: str
    path: str
    ranks: int | None = None

    def __str__(self) -> str:
        return f"{self.run_id}/{self.path}"


class Marker(Struct, frozen=True):
    """What a marker may say, as JSON: the ranks that wrote the checkpoint, and its files with their sizes in bytes."""

    world_size: int | None = None
    files: Mapping[str, int] = field(default_factory=dict)


def going_on(lab: Lab, workload: Workload, run_id: str, ranks: int) -> tuple[Workload, str]:
    """The workload with the argument that has it go on from a run, and the checkpoint's name.

    ConfigError where the workload does not say how, the run has no whole checkpoint, or one of other ranks.
    """
    if workload.resume is None:
        raise ConfigError(
            f"{workload.declared}: `{workload.name}` does not say how it resumes",
            hint="declare `resume: {argument: --resume, checkpoint: 'checkpoints/*'}`: docs/bring-your-own.md#resume",
        )
    found, why = last(lab.directory, run_id, workload.resume)
    if found is None:
        raise ConfigError(
            f"run {run_id} has no whole checkpoint: {why}",
            hint=f"have the script save some, as opt-*, lora-clm and vit do with --set save-every=STEPS; "
            f"from the beginning: labctl run {workload.name}",
        )
    if found.ranks not in (None, ranks) and not workload.elastic:
        raise ConfigError(
            f"checkpoint {found} is of {found.ranks} ranks, and this run has {ranks}",
            hint="choose as many slots by --hostfile, --include or --exclude",
        )
    option = workload.resume.argument
    path = store.directory(lab.directory, found.run_id) / found.path
    return replace(
        workload,
        arguments=(*workload.arguments, option, str(path)),
        inputs=(*workload.inputs, (option.removeprefix("--"), "path")),
    ), str(found)


def last(lab: Path, run_id: str, declared: Resume) -> tuple[Checkpoint | None, str]:
    """The last whole checkpoint of a run, else of the one that it went on from; and why the last one is not whole."""
    first = ""
    while True:
        found, why = last_of(lab, run_id, declared)
        if found:
            return found, ""
        first = first or why
        earlier = store.job(store.directory(lab, run_id)).resumed.partition("/")[0]
        if not earlier or not store.is_run(lab, earlier) or earlier >= run_id:
            return None, first
        run_id = earlier


def last_of(lab: Path, run_id: str, declared: Resume) -> tuple[Checkpoint | None, str]:
    """The last whole checkpoint in a run's own directory; and why the last one there is not whole."""
    top = store.directory(lab, run_id)
    # What leads out of the run's directory was not written by the run.
    places = [path for path in top.glob(declared.checkpoint) if path.resolve().is_relative_to(top.resolve())]
    reason = f"nothing in {top} matches {declared.checkpoint}"
    for number, place in enumerate(sorted(places, key=lambda path: by_number(str(path)), reverse=True)):
        marker, why = whole(place, declared.marker)
        if marker:
            return Checkpoint(run_id=run_id, path=str(place.relative_to(top)), ranks=marker.world_size), ""
        reason = f"{place.relative_to(top)}: {why}" if number == 0 else reason
    return None, reason


def by_number(path: str) -> list[tuple[int, str]]:
    """Has step-9 come before step-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split("([0-9]+)", path)]


def whole(place: Path, name: str) -> tuple[Marker | None, str]:
    """What the marker of this name says of a checkpoint; None, and the reason, for one that is not whole.

    Without a name every checkpoint is whole. A marker that is JSON must be so to its end.
    """
    if not name:
        return Marker(), ""
    content = store.read_record(place / name)
    if content is None:
        return None, f"no {name}"
    marker = Marker()
    if name.endswith(".json"):
        try:
            marker = msgspec.json.decode(content, type=Marker)
        except msgspec.ValidationError:
            pass  # Another program's, which says nothing of files.
        except (ValueError, RecursionError) as error:
            return None, f"{name}: {error}"
    missing = [file for file, size in marker.files.items() if not is_file(place / file, size)]
    if missing:
        return None, f"{len(missing)} of {len(marker.files)} files missing or cut, such as {missing[0]}"
    return marker, ""


def is_file(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
