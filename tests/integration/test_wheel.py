"""The installed wheel, used outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from labctl import accelerators

ROOT = Path(__file__).parents[2]


def run(*argv: str | Path, cwd: Path) -> str:
    """Run a command without PYTHONPATH; return its stdout; assert that it exits with 0."""
    # A checkout on the path would take precedence over the installed package.
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(list(map(str, argv)), cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_installed_wheel_makes_and_renders_a_lab_anywhere(tmp_path: Path) -> None:
    """A wheel in a new venv makes and renders a lab, and has all templates and workloads."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    (wheel,) = tmp_path.glob("labctl-*.whl")
    run(tmp_path / "env/bin/pip", "install", "--quiet", "--no-compile", wheel, cwd=tmp_path)
    labctl = tmp_path / "env/bin/labctl"

    run(labctl, "init", "lab", cwd=tmp_path)
    run(labctl, "render", "--setting", "LAB_ACCELERATOR=cpu", cwd=tmp_path / "lab")

    rendered = (tmp_path / "lab/.lab/nodes/worker-1/compose.yml").read_text()
    assert f'source: "{tmp_path}/lab/workloads"' in rendered
    assert "opt-tiny" in run(labctl, "workloads", cwd=tmp_path / "lab")
    shipped = run(tmp_path / "env/bin/python", "-c", "import labctl; print(labctl.__file__)", cwd=tmp_path)
    assert str(tmp_path) in shipped
    templates = {path.name for path in Path(shipped.strip()).parent.rglob("*.j2")}
    fragments = {f"{name}.yml.j2" for name in accelerators.modules()}
    pages = {"curves.html.j2", "metrics.html.j2", "page.html.j2", "runs.html.j2", "validation.html.j2"}
    scripts = {"project.sh.j2", "rank.sh.j2", "start.sh.j2"}
    assert templates == {"node.yml.j2", "ssh_config.j2", *scripts, *pages, *fragments}
    assert (tmp_path / "lab/workloads/common/script_exit.py").is_file()
