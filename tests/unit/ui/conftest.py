"""The pages of a lab that is not up."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from labctl.config.context import Context
from labctl.ui import app
from labctl.ui.site import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Return the pages of a lab in ``tmp_path``."""
    (tmp_path / ".env").write_text("LAB_NAME=demo\n")
    context = Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={})
    return Site(context=context, lab="demo", token="token")  # noqa: S106


@pytest.fixture
def client(site: Site) -> TestClient:
    """Return a client of the pages."""
    return TestClient(app.application(site), base_url="http://127.0.0.1")
