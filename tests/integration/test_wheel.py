"""The installed wheel, used outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import NOT_INHERITED, Lab

from docker import DockerClient
from labctl import __version__, accelerators

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.docker


def run(*argv: str | Path, cwd: Path) -> str:
    """Run a command without PYTHONPATH and settings; return its stdout; assert that it exits with 0."""
    # A checkout on the path would take precedence over the installed package.
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", *NOT_INHERITED))}
    done = subprocess.run(list(map(str, argv)), cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new virtual environment with the wheel, built from the source archive as by `make wheel`."""
    path = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--outdir", path, ROOT, cwd=path)
    run(sys.executable, "-m", "venv", path / "env", cwd=path)
    (wheel,) = path.glob("labctl_train-*.whl")
    run(path / "env/bin/pip", "install", "--quiet", "--no-compile", wheel, cwd=path)
    return path / "env"


def test_an_installed_wheel_makes_and_renders_a_lab_anywhere(venv: Path, tmp_path: Path) -> None:
    """A wheel in a new venv makes and renders a lab, and has all templates and workloads."""
    labctl = venv / "bin/labctl"

    run(labctl, "init", "lab", cwd=tmp_path)
    run(labctl, "render", "--setting", "LAB_ACCELERATOR=cpu", cwd=tmp_path / "lab")

    assert run(labctl, "--version", cwd=tmp_path).startswith(f"labctl {__version__}\n")
    assert f"Version: {__version__}\n" in run(venv / "bin/pip", "show", "labctl-train", cwd=tmp_path)
    rendered = (tmp_path / "lab/.lab/nodes/worker-1/compose.yml").read_text()
    assert f'source: "{tmp_path}/lab/workloads"' in rendered
    assert "opt-tiny" in run(labctl, "workloads", cwd=tmp_path / "lab")
    shipped = run(venv / "bin/python", "-c", "import labctl; print(labctl.__file__)", cwd=tmp_path)
    assert str(venv) in shipped
    package = Path(shipped.strip()).parent
    templates = {path.name for path in package.rglob("*.j2")}
    fragments = {f"{name}.yml.j2" for name in accelerators.modules()}
    pages = {path.name for part in ("reports", "ui") for path in (ROOT / "labctl" / part).rglob("*.html.j2")}
    scripts = {"project.sh.j2", "rank.sh.j2", "start.sh.j2"}
    assert templates == {"node.yml.j2", "ssh_config.j2", *scripts, *pages, *fragments}
    static = {path.relative_to(ROOT / "labctl") for path in (ROOT / "labctl").glob("*/static/*")}
    assert {path.relative_to(package) for path in package.glob("*/static/*")} == static
    assert (tmp_path / "lab/workloads/common/script_exit.py").is_file()


def test_an_installed_wheel_runs_a_workload(
    venv: Path, tmp_path: Path, engine: DockerClient, image: str, family: str
) -> None:
    """A wheel in a new venv brings a lab up with the image that is here, and hello-mpi passes in it."""
    labctl, name = venv / "bin/labctl", f"{family}-wheel"
    lab = Lab(tmp_path / name, name, engine, {})
    run(labctl, "init", lab.path, cwd=tmp_path)
    (lab.path / "cache").mkdir()
    lab.configure({"LAB_IMAGE": image})
    try:
        run(labctl, "up", cwd=lab.path)
        result = json.loads(run(labctl, "run", "hello-mpi", "--json", cwd=lab.path))
    finally:
        lab.destroy()
    assert result["verdict"] == "PASS"
