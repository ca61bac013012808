"""The program that downloads to a claim, with an in-memory hub."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

SOURCE = Path(__file__).resolve().parents[3] / "docker/fetch_models.py"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """Import docker/fetch_models.py from its file; return the module."""
    spec = importlib.util.spec_from_file_location("fetch_models", SOURCE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Hub:
    """Repositories with their files, and the errors of those that fail."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace huggingface_hub's HfApi and snapshot_download by this hub."""
        self.folder = folder
        self.files: dict[str, tuple[str, ...]] = {}
        self.fails: dict[str, Exception] = {}
        self.ignored: dict[str, list[str]] = {}
        api = SimpleNamespace(list_repo_files=self.list_repo_files)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def list_repo_files(self, name: str, repo_type: str) -> list[str]:
        """Return the repository's files, or raise its planted error."""
        if name in self.fails:
            raise self.fails[name]
        return list(self.files[f"{repo_type}:{name}"])

    def snapshot_download(self, name: str, repo_type: str, ignore_patterns: list[str]) -> str:
        """Record the ignored patterns and write each file with 5 bytes; return the snapshot's folder."""
        self.ignored[name] = ignore_patterns
        made = self.folder / repo_type / name / "snapshots/1a2b"
        made.mkdir(parents=True)
        for file in self.files[f"{repo_type}:{name}"]:
            (made / file).write_bytes(b"12345")
        return str(made)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Set LABCTL_STORAGE; return an in-memory hub."""
    monkeypatch.setenv("LABCTL_STORAGE", str(tmp_path / "storage"))
    return Hub(tmp_path / "storage", monkeypatch)


def run(program: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Run the program with these arguments; return its error, "" if it succeeds."""
    monkeypatch.setattr(sys, "argv", ["fetch_models.py", *arguments])
    try:
        program.main()
    except SystemExit as stop:
        return str(stop.code)
    return ""


def test_each_repository_is_a_line_with_its_revision_and_size(
    program: ModuleType, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fetch a model and a dataset: a JSON line for each with revision and bytes."""
    hub.files = {"model:acme/tiny": ("config.json", "model.safetensors"), "dataset:acme/words": ("a.csv",)}
    assert run(program, monkeypatch, "model:acme/tiny", "dataset:acme/words") == ""
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"kind": "model", "name": "acme/tiny", "revision": "1a2b", "bytes": 10},
        {"kind": "dataset", "name": "acme/words", "revision": "1a2b", "bytes": 5},
    ]


def test_other_forms_of_weights_are_left_out_only_where_there_are_safetensors(
    program: ModuleType, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetch models: *.bin is ignored only where there are safetensors."""
    hub.files = {"model:safe": ("model.safetensors", "pytorch_model.bin"), "model:old": ("pytorch_model.bin",)}
    run(program, monkeypatch, "model:safe", "model:old")
    assert "*.bin" in hub.ignored["safe"]
    assert hub.ignored["old"] == []


def test_a_model_is_found_by_its_name_also_when_it_is_fetched_again(
    program: ModuleType, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetch a model again: models/<name> becomes a relative link to it; a dataset gets none."""
    hub.files = {"model:acme/tiny": ("config.json",), "dataset:acme/words": ("a.csv",)}
    for place in (hub.folder / "models/acme/tiny", hub.folder / "first"):
        place.parent.mkdir(parents=True, exist_ok=True)
    (hub.folder / "models/acme/tiny").symlink_to(hub.folder / "first")
    assert run(program, monkeypatch, "model:acme/tiny", "dataset:acme/words") == ""
    assert (hub.folder / "models/acme/tiny/config.json").read_bytes() == b"12345"
    assert not (hub.folder / "models/acme/tiny").readlink().is_absolute()
    assert not (hub.folder / "models/acme/words").exists()


def refused(kind: Any, message: str = "403 Client Error") -> Exception:
    """Return a hub's error of this kind."""
    response = SimpleNamespace(headers={}, request=None, status_code=403)
    error: Exception = kind(message, response=response)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (refused(errors.GatedRepoError), "model acme/tiny is gated: accept its terms on its page at the hub"),
        (refused(errors.RepositoryNotFoundError), "model acme/tiny not found, or private: set HF_TOKEN in .env"),
        (refused(errors.HfHubHTTPError, "403 Forbidden: None.\nCannot access"),
         "model acme/tiny: 403 Forbidden: None.; set HF_TOKEN in .env to a token that may read it"),
        (OSError(28, "No space left on device"), "model acme/tiny: [Errno 28] No space left on device"),
        (errors.HFValidationError("Repo id must be 'name'"), "model acme/tiny: Repo id must be 'name'"),
    ],
)  # fmt: skip
def test_what_the_hub_refuses_is_said_in_words_and_ends_it(
    program: ModuleType, hub: Hub, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    """Let the hub refuse a model: the program ends with the reason, and fetches no other."""
    hub.fails, hub.files = {"acme/tiny": error}, {"model:later": ("a",)}
    assert run(program, monkeypatch, "model:acme/tiny", "model:later").startswith(message)
    assert hub.ignored == {}


def test_what_came_before_a_failure_is_told(
    program: ModuleType, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fail the second repository: the first one's line is printed."""
    hub.files, hub.fails = {"model:first": ("a",)}, {"second": OSError("no route to host")}
    assert run(program, monkeypatch, "model:first", "model:second") == "model second: no route to host"
    assert json.loads(capsys.readouterr().out)["name"] == "first"
