"""Settings that changed since `up`, by the digests that it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import builders

from labctl.backends.docker.compose import render
from labctl.backends.docker.deploy import applied, plan
from labctl.backends.docker.deploy.plan import CHANGED
from labctl.backends.docker.deploy.readiness import named
from labctl.backends.docker.deploy.steps import NoteSettings
from labctl.backends.plan import Step
from labctl.backends.state import ObservedState
from labctl.config import override
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import HostError
from labctl.model import File
from labctl.system import files


def settings(directory: Path, **flags: str) -> Settings:
    """Load the settings of a lab with these flags."""
    return Context(directory=directory, environ={}, emit=lambda _: None, flags=flags).settings()


def test_a_changed_setting_is_named_and_no_value_is_kept(tmp_path: Path) -> None:
    """Settings that containers are made from are named, secrets and the override file included, and no others."""
    assert applied.changed(tmp_path, settings(tmp_path)) == ()
    made = settings(tmp_path, LAB_ENV_API_KEY="CANARY", LAB_ENV_SEED="1")
    files.write_all(tmp_path, (applied.file(tmp_path, made),))
    assert "CANARY" not in (tmp_path / applied.FILE).read_text(encoding="utf-8")
    assert applied.changed(tmp_path, made) == ()
    now = settings(tmp_path, LAB_ENV_API_KEY="other", LAB_SHM_SIZE="1g", LAB_STALL_SECONDS="5")
    assert applied.changed(tmp_path, now) == ("LAB_ENV_API_KEY", "LAB_ENV_SEED", "LAB_SHM_SIZE")
    (tmp_path / override.FILE).write_text("services: {}\n", encoding="utf-8")
    assert applied.changed(tmp_path, made) == (override.FILE,)


@pytest.mark.parametrize("text", ["[]", "1", "{", '{"LAB_NAME": "x"}', '{"salt": 1, "digests": []}'])
def test_a_file_that_says_nothing_names_nothing(tmp_path: Path, text: str) -> None:
    """A file of digests that is no JSON, or not of this form, is as none."""
    files.write_all(tmp_path, (File(path=applied.FILE, content=text),))
    assert applied.changed(tmp_path, settings(tmp_path)) == ()


def test_equal_values_have_other_digests_in_another_lab(tmp_path: Path) -> None:
    """Digests of the same settings differ, so that a value is not told by a list of digests."""
    first, second = (json.loads(applied.file(tmp_path, settings(tmp_path)).content)["digests"] for _ in range(2))
    assert first.keys() == second.keys()
    assert not set(first.values()) & set(second.values())


def test_settings_that_no_container_is_made_from_are_not_named(tmp_path: Path) -> None:
    """The base image of a build, and what runs wait for, are no reason of an outdated container."""
    files.write_all(tmp_path, (applied.file(tmp_path, settings(tmp_path)),))
    other = settings(tmp_path, LAB_BASE_IMAGE="debian:12", LAB_RUN_PATIENCE="11", LAB_TORCH_INDEX="https://x/y")
    assert applied.changed(tmp_path, other) == ()


def plan_of_up(observed: ObservedState, **options: Any) -> list[str]:
    """Return the kinds of the steps of `up` with settings to write."""
    of = builders.lab()
    steps = plan.up(of, render.render(of), observed, applied=File(path=applied.FILE, content="{}"), **options).steps
    return [type(step).__name__ for step in steps]


def test_settings_are_written_once_containers_were_made_from_them() -> None:
    """They come after compose, and not at all if no container changes or a host has failed."""
    assert plan_of_up(ObservedState())[-3:] == ["ApplyProject", "NoteSettings", "WaitForSsh"]
    step: Step = NoteSettings(files=(), cause="x")
    assert step.without(None, {"blue": HostError("lost")}) is None
    assert plan_of_up(builders.observed(builders.lab())) == ["WaitForSsh"]
    assert plan_of_up(ObservedState(), failed=("blue",)) == ["ApplyProject", "WaitForSsh"]


def test_the_changed_settings_are_the_reason_of_an_outdated_container() -> None:
    """The reason of an outdated container is replaced by the settings, any other reason stays."""
    lacking = [("launcher", CHANGED), ("worker-0", "exited")]
    assert named(lacking, ("LAB_MOUNTS",)) == [("launcher", "LAB_MOUNTS changed"), ("worker-0", "exited")]
    assert named(lacking, ()) == lacking
