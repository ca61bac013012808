from __future__ import annotations

from collections.abc import Iterator
from errno import ENOSPC
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import FileSystemBytecodeCache, UndefinedError

from labctl.system import templates

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@pytest.fixture
def none_loaded() -> Iterator[None]:
    """Clear the cache of templates before and after the test."""
    templates._environment.cache_clear()
    yield
    templates._environment.cache_clear()


@given(TEXT)
def test_any_text_survives_as_a_yaml_string(value: str) -> None:
    """Quote any text for YAML: one line, and the same text when parsed."""
    text = templates.yaml_string(value)
    assert "\n" not in text
    # Compose reads `$$` as a dollar.
    assert yaml.safe_load(text).replace("$$", "$") == value


@pytest.mark.usefixtures("none_loaded")
def test_compiled_templates_that_cannot_be_kept_are_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail to cache a compiled template: it is rendered all the same."""
    tried: list[object] = []

    def full(*bucket: object) -> None:
        """Record the call; raise "No space left on device"."""
        tried.append(bucket)
        raise OSError(ENOSPC, "No space left on device")

    (tmp_path / "__pycache__").mkdir()
    monkeypatch.setattr(templates, "__file__", str(tmp_path / "templates.py"))
    monkeypatch.setattr(FileSystemBytecodeCache, "load_bytecode", lambda *_: None)
    monkeypatch.setattr(FileSystemBytecodeCache, "dump_bytecode", full)
    (tmp_path / "a.j2").write_text("name: {{ name | q }}\n")
    assert templates.template(tmp_path / "a.j2").render(name="x") == 'name: "x"\n'
    assert tried


@pytest.mark.usefixtures("none_loaded")
def test_a_template_that_asks_for_what_is_not_there_fails(tmp_path: Path) -> None:
    """Render a template with an unknown name: UndefinedError."""
    (tmp_path / "a.j2").write_text("{{ nothing }}")
    with pytest.raises(UndefinedError):
        templates.template(tmp_path / "a.j2").render()
