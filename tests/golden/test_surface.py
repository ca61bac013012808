"""All commands, flags, settings and doctor codes of surface.json still exist; new ones are allowed."""

from __future__ import annotations

from pathlib import Path

from support import surface
from support.surface import BEFORE, LABCTL

import labctl
from labctl.config import scaffold


def test_commands_and_flags_stay() -> None:
    now = surface.of_source(Path(labctl.__file__).parent)["commands"]
    gone = {name: set(flags) - set(now.get(name, ())) for name, flags in BEFORE["commands"].items()}
    assert set(BEFORE["commands"]) <= set(now)
    assert {name: flags for name, flags in gone.items() if flags} == {}


def test_doctors_codes_stay() -> None:
    assert set(BEFORE["doctor"]) - set(surface.of_source(Path(labctl.__file__).parent)["doctor"]) == set()


def test_settings_stay(tmp_path: Path) -> None:
    scaffold.initialise(tmp_path / "lab")
    assert set(BEFORE["settings"]) - set(surface.settings(LABCTL, tmp_path / "lab")) == set()
