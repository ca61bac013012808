"""Working directory of a session in a container."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders import container

from labctl.backends.docker.attach import session


def test_who_stands_in_a_directory_that_was_removed_stands_nowhere_in_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """here_in() maps the working directory into the node, and returns None once it is removed."""
    node = container("launcher", mounts=((str(tmp_path), "/workspace"),))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert session.here_in(node) == "/workspace/gone"
    gone.rmdir()
    assert session.here_in(node) is None
