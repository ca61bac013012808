"""Settings that changed since `up`, by the digests that it wrote."""

from __future__ import annotations

from pathlib import Path

from labctl.backends.docker.deploy import applied
from labctl.backends.docker.deploy.plan import CHANGED
from labctl.backends.docker.deploy.readiness import named
from labctl.config import override
from labctl.config.context import Context
from labctl.config.settings import Settings
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


def test_the_changed_settings_are_the_reason_of_an_outdated_container() -> None:
    """The reason of an outdated container is replaced by the settings, any other reason stays."""
    lacking = [("launcher", CHANGED), ("worker-0", "exited")]
    assert named(lacking, ("LAB_MOUNTS",)) == [("launcher", "LAB_MOUNTS changed"), ("worker-0", "exited")]
    assert named(lacking, ()) == lacking
