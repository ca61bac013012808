"""All JSON keys of tests/golden/surface.json are in the command's document."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import surface
from support.harness import Lab
from support.surface import BEFORE, LABCTL

pytestmark = pytest.mark.docker


def test_keys_of_json_stay(fresh_lab: Callable[..., Lab]) -> None:
    """Every JSON key that tests/golden/surface.json lists for a command is in its document today."""
    lab = fresh_lab()
    now = surface.json_keys(LABCTL, lab.path)
    gone = {command: set(keys) - set(now[command]) for command, keys in BEFORE["json"].items()}
    assert {command: keys for command, keys in gone.items() if keys} == {}
