"""Output of `--dry-run` for each training script of a DeepSpeed-Chat clone.

``pytest tests/golden --update-golden`` rewrites ``tests/clones/expected.txt``; read the difference before keeping it.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone
from pathlib import Path

import pytest
from support import plans
from support.builders import host

from labctl.backends import spec
from labctl.config import settings
from labctl.jobs import request as run_request
from labctl.model import Limits

ROOT = Path(__file__).parents[2]
CLONES = ROOT / "tests/clones"
EXPECTED = CLONES / "expected.txt"
NAMES = ("run_opt-350m", "run_opt-350m_bs16", "run_opt-350m_bs24", "run_opt-350m_bs24_zero0", "run_opt-13b",
         "run_opt-13b_bs16_zero0", "run_opt-66b")  # fmt: skip
NOW = datetime(2026, 1, 2, 15, 4, 5, tzinfo=timezone.utc)


def dry_run(name: str, scratch: Path) -> str:
    """Return the dry run's text for a script of the DeepSpeed-Chat clone, with a fixed suffix in the run's id."""
    clones = {"HOST_REPO_PATH": str(CLONES / "DeepSpeedExamples"), "HOME": "/home/someone"}
    loaded = settings.load(scratch, clones, {})
    options = run_request.RunOptions()
    task = run_request.choose_workload(ROOT, f"dschat/{name}", options, loaded)
    lab = spec.build(loaded, Path("/srv/lab"), "cpu", (host(),), Limits())
    job = run_request.build_job(lab, task, options, NOW)
    return re.sub(rf"({name})-[0-9a-f]{{6}}\b", r"\1-3fa2", f"{plans.of_run(lab, job, loaded)}\n")


def test_each_script_is_started_as_it_expects(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The dry runs of all seven DeepSpeed-Chat scripts are the text of clones/expected.txt."""
    output = "\n".join(f"== dschat/{name}\n{dry_run(name, tmp_path)}" for name in NAMES)
    if request.config.getoption("--update-golden"):
        EXPECTED.write_text(output, encoding="utf-8")
    assert output == EXPECTED.read_text(encoding="utf-8")
