"""Files that `labctl cache` selects, considers complete, and reports; the hub itself is in contract/."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from labctl.config import settings
from labctl.config.context import Context
from labctl.errors import ConfigError, HostError
from labctl.hub.client import Hub, Kind, RemoteFile, Repository
from labctl.hub.prefetch import ENDPOINT, connect, describe, download, missing, names, to_come, wanted_of, whole_here
from labctl.model import Cache
from labctl.system.progress import Progress

NAME = "facebook/opt-13b"


def hub(cache: Path) -> Hub:
    """Return a Hub with the default endpoint, no token and this cache."""
    return Hub(endpoint=ENDPOINT, token=None, cache=cache)


def repository(*paths: str, kind: Kind = "model", folder: Path = Path("/nowhere")) -> Repository:
    """Return a repository with a file of 10 bytes for each path; .bin and .safetensors are large."""
    files = tuple(RemoteFile(path, 10, f"blob-{path}", large=path.endswith((".bin", ".safetensors"))) for path in paths)
    return Repository(kind=kind, name=NAME, revision="0a1b", files=files, folder=folder)


def chosen(*paths: str) -> set[str]:
    """Return the paths that wanted_of selects from a model with these files."""
    return {file.path for file in wanted_of(repository(*paths)).files}


def snapshot(cache: Path, revision: str, *paths: str, parts: dict[str, tuple[str, ...]] | None = None) -> Path:
    """Write a snapshot with these files, and index files from ``parts``, to the cache; return its folder."""
    made = hub(cache).folder("model", NAME) / "snapshots" / revision
    made.mkdir(parents=True)
    for path in paths:
        (made / path).write_bytes(b"0123456789")
    for index, shards in (parts or {}).items():
        (made / index).write_text(json.dumps({"weight_map": dict(enumerate(shards))}), encoding="utf-8")
    return made


# --- what is wanted ------------------------------------------------------------------------------------------


def test_of_a_model_one_set_of_weights_its_configuration_and_its_tokeniser_are_wanted() -> None:
    """Select from a model: texts and one set of weights, .safetensors before .bin, no other format."""
    texts = {"config.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "pytorch_model.bin.index.json"}
    unused = {"flax_model.msgpack", "tf_model.h5", "training_args.bin", "README.md", ".gitattributes"}
    weights = {"pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"}
    assert chosen(*texts, *unused, *weights) == texts | weights
    assert chosen(*texts, *weights, "model.safetensors") == texts | {"model.safetensors"}


def test_weights_in_folders_are_other_formats_of_the_same() -> None:
    """Select from a model with an onnx folder: only the weights at the top."""
    assert chosen("pytorch_model.bin", "onnx/model.safetensors", "onnx/config.json") == {"pytorch_model.bin"}


def test_of_a_dataset_everything_is_wanted() -> None:
    """Select from a dataset: every file."""
    everything = repository("README.md", "data/train.parquet", kind="dataset")
    assert wanted_of(everything) == everything


def test_a_model_without_weights_is_an_error_that_says_what_it_holds() -> None:
    """Select from a model without weights: HostError names it, and the hint lists its files."""
    with pytest.raises(HostError, match=r"model facebook/opt-13b has no weights") as raised:
        wanted_of(repository("config.json", "model.gguf"))
    assert "config.json, model.gguf" in raised.value.hint


def test_what_is_declared_twice_is_wanted_once() -> None:
    """Declare a model twice: names() lists each model and dataset once."""
    expected = Cache(models=("a/b", "c/d", "a/b"), datasets=("a/b",))
    assert names(expected) == (("model", "a/b"), ("model", "c/d"), ("dataset", "a/b"))


# --- what is here --------------------------------------------------------------------------------------------


def test_bytes_to_come_count_what_an_interrupted_call_left(tmp_path: Path) -> None:
    """Count the bytes to download: less what a partial or whole blob has; missing() is empty once links are there."""
    snapshot = repository("model.safetensors", "config.json", folder=tmp_path)
    large, small = snapshot.files
    assert to_come(snapshot) == 20
    snapshot.partial(large).parent.mkdir()
    snapshot.partial(large).write_bytes(b"0123")
    assert to_come(snapshot) == 16
    snapshot.blob(small).write_bytes(b"0123456789")
    assert (to_come(snapshot), missing(snapshot)) == (6, (large, small))
    for file in snapshot.files:
        snapshot.link(file).parent.mkdir(parents=True, exist_ok=True)
        snapshot.link(file).write_bytes(b"0123456789")
    assert missing(snapshot) == ()


@pytest.mark.parametrize(
    ("paths", "parts", "whole"),
    [
        (("config.json", "model.safetensors"), {}, True),
        (("config.json", "pytorch_model.bin"), {}, True),
        (("config.json",), {}, False),
        (("a.safetensors",), {"model.safetensors.index.json": ("a.safetensors", "b.safetensors")}, False),
        (("a.safetensors", "b.safetensors"), {"model.safetensors.index.json": ("a.safetensors",)}, True),
        (("a.safetensors",), {"pytorch_model.bin.index.json": ("pytorch_model-1.bin",)}, True),
    ],
)
def test_a_model_is_whole_when_every_part_of_one_format_is_here(
    tmp_path: Path, paths: tuple[str, ...], parts: dict[str, tuple[str, ...]], whole: bool
) -> None:
    """Write snapshots: whole_here returns one only if every part of one format is there; its state is "unchecked"."""
    snapshot(tmp_path, "0a1b", *paths, parts=parts)
    lacking = whole_here(hub(tmp_path), "model", NAME)
    assert bool(lacking) == whole
    if lacking:
        assert (lacking[1].state, lacking[1].revision, missing(lacking[0])) == ("unchecked", "0a1b", ())


def test_of_several_whole_snapshots_the_newest_counts(tmp_path: Path) -> None:
    """Write three snapshots, the newest incomplete: whole_here returns the newer of the two whole ones."""
    for age, revision in enumerate(("new", "old", "older")):
        made = snapshot(tmp_path, revision, "model.safetensors" if revision != "new" else "config.json")
        os.utime(made, (1e9 - age, 1e9 - age))
    missing = whole_here(hub(tmp_path), "model", NAME)
    assert missing is not None
    assert missing[1].revision == "old"


def test_nothing_is_whole_in_an_empty_cache(tmp_path: Path) -> None:
    """Look in an empty cache: whole_here returns None for a model and a dataset."""
    assert whole_here(hub(tmp_path), "model", NAME) is None
    assert whole_here(hub(tmp_path), "dataset", NAME) is None


def make_huge(made: Path) -> None:
    """Write an index file of 1 TiB into the snapshot, without using disk space."""
    (made / "model.safetensors.index.json").touch()
    os.truncate(made / "model.safetensors.index.json", 1 << 40)


@pytest.mark.parametrize(
    "spoil",
    [
        *(
            lambda made, text=text: (made / "model.safetensors.index.json").write_text(text)
            for text in ("[]", "{", '{"weight_map": []}', '{"weight_map": {"a": []}}', "[" * 100_000)
        ),
        lambda made: (made / "model.safetensors.index.json").write_bytes(b'{"weight_map": {"a": "\xff"}}'),
        lambda made: os.mkfifo(made / "model.safetensors.index.json"),
        make_huge,
        lambda made: (made.parent / "dangling").symlink_to("nowhere"),
    ],
)
def test_a_snapshot_that_a_container_spoilt_is_not_whole_and_stops_nothing(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    """Spoil the newest snapshot's index (bad JSON, FIFO, huge file): whole_here returns the older one."""
    older = snapshot(tmp_path, "older", "model.safetensors")
    os.utime(older, (1e9, 1e9))
    spoil(snapshot(tmp_path, "spoilt", "a.txt"))
    missing = whole_here(hub(tmp_path), "model", NAME)
    assert missing is not None
    assert missing[1].revision == "older"


# --- links that a container planted ---------------------------------------------------------------------------


@pytest.mark.parametrize("large", [False, True])
def test_a_link_that_comes_while_files_are_fetched_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Plant links to a project's files as blobs and snapshots: HostError, and those files stay unchanged."""
    theirs = tmp_path / "project"
    theirs.mkdir()
    digest = "b" * (64 if large else 40)
    for name in ("config.json", digest):
        (theirs / name).write_text("years of work")
    local = hub(tmp_path / "cache/huggingface/hub")
    file = RemoteFile("config.json", 3, digest, large)
    snapshot = Repository(kind="model", name=NAME, revision="0" * 40, files=(file,), folder=local.folder("model", NAME))

    for path in (snapshot.blob(file).parent, snapshot.link(file).parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(theirs)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: None)
    context = Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={})
    with pytest.raises(HostError, match="cannot fetch model"):
        download(context, local, snapshot, describe(snapshot, 3, "to fetch"))
    assert {path.name: path.read_text() for path in theirs.iterdir()} == dict.fromkeys(
        ("config.json", digest), "years of work"
    )


# --- where the hub is ----------------------------------------------------------------------------------------


def test_the_hub_and_its_cache_come_from_settings_and_environment(tmp_path: Path) -> None:
    """Take endpoint and token from the environment and the cache from HOME; the token is not in the repr."""
    environ = {"HF_ENDPOINT": "https://mirror.example/hub/", "HF_TOKEN": "hf_x", "HOME": "/home/ann"}
    connected = connect(settings.load(tmp_path, environ, {}), environ)
    assert (connected.endpoint, connected.credential) == ("https://mirror.example/hub", "hf_x")
    assert connected.cache == Path("/home/ann/.cache/labctl/huggingface/hub")
    assert "hf_x" not in repr(connected)


def test_without_a_token_the_library_may_not_look_for_one(tmp_path: Path) -> None:
    """Connect without a token: the credential is False, so that the library looks for none."""
    connected = connect(settings.load(tmp_path, {}, {}), {})
    assert (connected.endpoint, connected.credential) == (ENDPOINT, False)


@pytest.mark.parametrize("endpoint", ["huggingface.co", "ftp://x", "https://", "https:// x"])
def test_an_endpoint_that_is_no_url_is_a_setting_to_mend(tmp_path: Path, endpoint: str) -> None:
    """Set HF_ENDPOINT to something else than a URL: ConfigError names the setting."""
    with pytest.raises(ConfigError, match="HF_ENDPOINT is not a URL"):
        connect(settings.load(tmp_path, {}, {}), {"HF_ENDPOINT": endpoint})


# --- what is said --------------------------------------------------------------------------------------------


def test_progress_says_share_and_rate_now_and_then() -> None:
    """Advance over 10 s: messages give share and rate every few seconds, the last one the total."""
    messages: list[str] = []
    now = 0.0
    progress = Progress("model m", 1_000_000_000, 200_000_000, messages.append, clock=lambda: now)
    now = 1.0
    progress.advance(100_000_000)
    assert messages == []
    now = 5.0
    progress.advance(200_000_000)
    assert messages == ["model m: 50 % of 1 GB, 60 MB/s"]
    now = 8.0
    progress.advance(500_000_000)
    now = 10.0
    progress.finish()
    assert messages[1:] == ["model m: 100 %, 800 MB in 10 s, 80 MB/s"]


# --- what workloads do to the cache --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        "",
        "models--facebook--opt-13b",
        "models--facebook--opt-13b/blobs",
        "models--facebook--opt-13b/refs",
        "models--facebook--opt-13b/snapshots",
        "models--facebook--opt-13b/snapshots/0a1b",
        "models--facebook--opt-13b/snapshots/0a1b/deep",
        ".locks",
        ".locks/models--facebook--opt-13b",
    ],
)
def test_nothing_is_downloaded_or_removed_through_a_link_in_the_cache(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant a link to a person's files in the cache: the download raises HostError, and the files stay."""
    import huggingface_hub

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the hub's own program writes through links")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    mine = tmp_path / "mine"
    (mine / "deep").mkdir(parents=True)
    for name in ("config.json", "deep/config.json"):
        (mine / name).write_text("precious")
    link = tmp_path / "cache/hub" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(mine)
    where = hub(tmp_path / "cache/hub")
    expected = repository("config.json", "deep/config.json", folder=where.folder("model", NAME))
    context = Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={})
    with pytest.raises(HostError):
        download(context, where, expected, describe(expected, 20, "to fetch"))
    assert sorted(path.name for path in mine.rglob("*")) == ["config.json", "config.json", "deep"]


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": 7}', '{"weight_map": {"a": []}}', "[" * 100_000])
def test_an_index_that_is_none_makes_a_snapshot_incomplete(tmp_path: Path, content: str) -> None:
    """Write an invalid index file: whole_here returns None."""
    made = snapshot(tmp_path, "0a1b", "model.safetensors")
    (made / "model.safetensors.index.json").write_text(content)
    (made.parent / "gone").symlink_to("nowhere")
    assert whole_here(hub(tmp_path), "model", NAME) is None
