"""Steps of a run, as its plan prints them."""

from __future__ import annotations

from pathlib import Path

from labctl.model import Copy
from labctl.runs.steps import StageRun


def test_the_step_that_copies_code_counts_the_files_of_the_project() -> None:
    """Render the step with two files of a project, and without code."""
    code = tuple(Copy(root=Path("/srv/mine"), path=name, name=name) for name in ("a.py", "b.py"))
    staged = StageRun(cause="", run_id="r1", job=(), record=(), code=code, reads_health=False)
    assert "ranks/, work/ (2 files of project `mine`) to " in str(staged)
    assert "ranks/, work/ to " in str(StageRun(cause="", run_id="r1", job=(), record=(), code=(), reads_health=False))
