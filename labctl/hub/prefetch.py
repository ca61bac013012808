"""``labctl cache``: downloads a workload's models and datasets into the shared cache of this host."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import ConfigError, HostError
from labctl.hub.client import Hub, Kind, Repository, Unreachable, look_up
from labctl.hub.download import complete, missing, to_come
from labctl.model import Cache
from labctl.system import filelock
from labctl.system.files import make_private, require_room, room_at
from labctl.system.progress import Progress, amount

ENDPOINT = "https://huggingface.co"
HUB = "huggingface/hub"
"""Path below the cache; in the containers HF_HOME is its ``huggingface``."""
LOCK = ".labctl.lock"
PATIENCE = 24 * 3600
"""Seconds to wait for another `labctl cache`, which may download a large model."""
WEIGHTS = (".safetensors", ".bin")
"""In order of preference; one of them is enough."""
TEXTS = (".json", ".txt", ".model", ".jinja")
"""Configuration and tokenisers."""

State = Literal["present", "to fetch", "fetched", "unchecked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A repository in the cache. ``unchecked``: complete, but not compared with the hub."""

    kind: Kind
    name: str
    revision: str
    bytes: int
    fetched_bytes: int
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """The repositories that a workload reads, in the shared cache."""

    workload: str
    cache: str
    items: tuple[Item, ...]
    seconds: float


def connect(settings: Settings, environ: Mapping[str, str]) -> Hub:
    """The hub of this environment, and its cache below HOST_CACHE_PATH."""
    endpoint = environ.get("HF_ENDPOINT") or ENDPOINT
    if not re.fullmatch(r"https?://[^\s/]\S*", endpoint):
        raise ConfigError("environment: HF_ENDPOINT is not a URL", hint=f"unset it, or write it like {ENDPOINT}")
    return Hub(
        endpoint=endpoint.rstrip("/"),
        token=settings.secret("HF_TOKEN"),
        cache=Path(settings.text("HOST_CACHE_PATH")) / HUB,
    )


def fetch(context: Context, hub: Hub, wanted: Cache, *, dry_run: bool = False) -> tuple[Item, ...]:
    """Download what is wanted and not complete in the cache.

    Nothing is downloaded before every repository was found and the disk has room for all. HostError.
    """
    repositories = names(wanted)
    if dry_run or not repositories:
        return tuple(item for _, item in survey(context, hub, repositories))
    root = hub.cache.parents[1]
    make_root(root)
    with filelock.held(root / LOCK, "labctl cache", wait=PATIENCE, notice=context.notice):
        return tuple(bring(context, hub, one, item) for one, item in survey(context, hub, repositories))


def names(wanted: Cache) -> tuple[tuple[Kind, str], ...]:
    """Each repository once."""
    models: list[tuple[Kind, str]] = [("model", name) for name in wanted.models]
    return tuple(dict.fromkeys([*models, *(("dataset", name) for name in wanted.datasets)]))


def make_root(root: Path) -> None:
    """Create the default cache. HostError if another does not exist: a typo or a disk that is not mounted."""
    if not root.is_dir() and root != Path.home() / ".cache/labctl":
        raise HostError(f"HOST_CACHE_PATH {root} does not exist", hint=f"mkdir -p {shlex.quote(str(root))}")
    make_private(root)


# --- what there is and what is missing -----------------------------------------------------------------------


def survey(context: Context, hub: Hub, repositories: Iterable[tuple[Kind, str]]) -> list[tuple[Repository, Item]]:
    """Compare each repository with the cache, and report it. HostError if one is unavailable or the disk is full."""
    found: list[tuple[Repository, Item]] = []
    absent: list[tuple[Kind, str]] = []
    failure: HostError | None = None
    for kind, name in repositories:
        try:
            if isinstance(failure, Unreachable):
                # Do not wait for the hub again.
                raise failure
            entry = compare(wanted_of(look_up(hub, kind, name)))
        except HostError as error:
            failure = error
            here = whole_here(hub, kind, name)
            if here:
                entry = here
            elif isinstance(error, Unreachable):
                absent.append((kind, name))
                continue
            else:
                raise
        found.append(entry)
        context.notice(sentence(*entry))
    if failure and absent:
        raise by_hand(hub, failure, absent)
    if failure:
        context.warn(f"not compared with the hub: {failure.message}")
    needed = sum(to_come(repository) for repository, _ in found)
    hint = "free as much, or set HOST_CACHE_PATH to a larger disk"
    require_room("the download", [(room_at(hub.cache), needed)], hint=hint)
    return found


def wanted_of(repository: Repository) -> Repository:
    """The files to fetch: all of a dataset; of a model one set of weights, configuration and tokenizer.

    HostError for a model without weights.
    """
    if repository.kind == "dataset":
        return repository
    top = [file for file in repository.files if "/" not in file.path]
    weights = next(filter(None, ([file for file in top if is_weight(file.path, suffix)] for suffix in WEIGHTS)), [])
    if not weights:
        raise HostError(
            f"{repository} has no weights in safetensors or PyTorch's format",
            hint=f"name another repository; this one holds {', '.join(sorted(file.path for file in top)[:8])}",
        )
    return replace(repository, files=(*weights, *(file for file in top if file.path.endswith(TEXTS))))


def is_weight(path: str, suffix: str) -> bool:
    """Whether a file has weights; ``training_args.bin`` does not."""
    return fnmatch.fnmatch(path, "*.safetensors" if suffix == ".safetensors" else "*model*.bin")


def compare(repository: Repository) -> tuple[Repository, Item]:
    """A repository of the hub, and its state in the cache."""
    state: State = "to fetch" if missing(repository) else "present"
    return repository, describe(repository, repository.size, state)


def describe(repository: Repository, size: int, state: State) -> Item:
    return Item(
        kind=repository.kind,
        name=repository.name,
        revision=repository.revision,
        bytes=size,
        fetched_bytes=0,
        state=state,
    )


def whole_here(hub: Hub, kind: Kind, name: str) -> tuple[Repository, Item] | None:
    """The newest snapshot that is complete by its own files; None if there is none."""
    snapshots = (hub.folder(kind, name) / "snapshots").glob("*")
    for snapshot in sorted(snapshots, key=lambda path: path.stat().st_mtime, reverse=True):
        sizes = {path.name: path.stat().st_size for path in snapshot.rglob("*") if path.is_file()}
        if sizes and (kind == "dataset" or any(has_all_weights(snapshot, suffix, set(sizes)) for suffix in WEIGHTS)):
            repository = Repository(
                kind=kind, name=name, revision=snapshot.name, files=(), folder=hub.folder(kind, name)
            )
            return repository, describe(repository, sum(sizes.values()), "unchecked")
    return None


def has_all_weights(snapshot: Path, suffix: str, files: set[str]) -> bool:
    """Whether weights of this format are complete: every part that their index names is there."""
    parts = {
        part
        for index in snapshot.glob(f"*{suffix}.index.json")
        for part in json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()
    }
    return parts <= files and any(is_weight(name, suffix) for name in files)


def by_hand(hub: Hub, failure: HostError, absent: Iterable[tuple[Kind, str]]) -> HostError:
    """The error for repositories missing while the hub is unreachable, with other ways to get them."""
    lines = ", ".join(f"{kind} {name}" for kind, name in absent)
    folders = " ".join(hub.folder(kind, name).name for kind, name in absent)
    way = (
        f"behind a proxy set HTTPS_PROXY, behind a mirror export HF_ENDPOINT; without network copy the folders "
        f"{folders} from the cache of a machine that has them (~/.cache/huggingface/hub) into {hub.cache}"
    )
    return HostError(f"{failure.message}; missing here: {lines}", hint=failure.hint or way)


def sentence(repository: Repository, item: Item) -> str:
    """One repository's state as text."""
    what = f"{repository} ({item.revision[:8]})"
    if item.state != "to fetch":
        return f"{what}: {amount(item.bytes)}, complete"
    return f"{what}: {amount(item.bytes)} in {len(repository.files)} files, {amount(to_come(repository))} to fetch"


# --- fetching ------------------------------------------------------------------------------------------------


def bring(context: Context, hub: Hub, repository: Repository, item: Item) -> Item:
    """Download a repository unless it is complete."""
    if item.state != "to fetch":
        return item
    needed = to_come(repository)
    progress = Progress(str(repository), item.bytes, item.bytes - needed, context.notice)
    try:
        complete(hub, repository, progress.advance)
    except Unreachable as error:
        raise HostError(
            f"{repository}: {error.message}; {amount(progress.done)} of {amount(progress.total)} downloaded",
            hint="re-run to resume",
        ) from error
    progress.finish()
    return replace(item, fetched_bytes=needed, state="fetched")
