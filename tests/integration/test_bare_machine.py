"""A machine that has Docker Engine, buildx, compose and pipx, and nothing of labctl's: install the wheel, run a lab."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker.models.containers import Container
from support.rack import images

from docker import DockerClient
from labctl.backends.docker.images import build, package_sources
from labctl.backends.docker.images.package_sources import PipSources, local_path

pytestmark = [pytest.mark.docker, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
CERTIFICATES = package_sources.CA_BUNDLES[0]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INSTALL = """
until docker version; do sleep 0.2; done
echo 'APT::Default-Release "/^bookworm/";' > /etc/apt/apt.conf.d/release
apt-get update
apt-get install --yes --no-install-recommends docker-buildx/trixie docker-compose/trixie pipx
"""
FIRST_RUN = """
pipx install /dist/*.whl
cd
labctl init mylab
cd mylab
labctl up
labctl run hello-mpi
"""


@pytest.fixture
def machine(engine: DockerClient, family: str, tmp_path: Path) -> Iterator[Container]:
    """Yield the machine, a container with an engine of its own, this one's package sources, and the wheel in /dist."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", tmp_path / "dist", ROOT], check=True, cwd=tmp_path)
    pip = package_sources.of_host()
    apt = "".join(build.apt_list("debian", release, "") for release in images.RELEASES)
    if not apt:
        pytest.skip("this host's apt has no source of Debian packages")
    (tmp_path / "sources.list").write_text(apt)
    container = engine.containers.run(
        images.ensure(engine, tmp_path),
        name=f"{family}-bare",
        detach=True,
        init=True,
        privileged=True,
        tmpfs={"/run": "exec,mode=755", "/witness": ""},
        volumes=[
            f"{tmp_path}/dist:/dist:ro",
            f"{tmp_path}/sources.list:/etc/apt/sources.list:ro",
            *(f"{path}:{path}:ro" for path in read_by_pip(pip)),
        ],
        environment={"RACK_USER": "ann", "RACK_UID": "1000", "RACK_PORT": "22", "RACK_KEY": "", **variables(pip)},
    )
    try:
        yield container
    finally:
        container.remove(force=True, v=True)


def read_by_pip(pip: PipSources) -> Iterator[Path]:
    """Yield what pip reads of this machine: certificates, folders of packages, and those that hold an index."""
    if Path(CERTIFICATES).exists():
        yield Path(CERTIFICATES)
    yield from filter(None, map(local_path, pip.find_links))
    yield from (path.parent for path in filter(None, map(local_path, (pip.index, *pip.extra_indexes))))


def variables(pip: PipSources) -> dict[str, str]:
    """Return the variables that tell pip its sources, and programs the proxies."""
    told = {
        "PIP_INDEX_URL": pip.index,
        "PIP_EXTRA_INDEX_URL": " ".join(pip.extra_indexes),
        "PIP_FIND_LINKS": " ".join(pip.find_links),
        "PIP_TRUSTED_HOST": " ".join(pip.trusted_hosts),
        "PIP_CERT": CERTIFICATES if pip.cert else "",
        **{name: os.environ.get(name, "") for name in build.PROXIES},
    }
    return {name: value for name, value in told.items() if value}


def run(machine: Container, script: str) -> str:
    """Run a script on the machine; return its output; assert that it ends with 0."""
    environment = ["--env=DEBIAN_FRONTEND=noninteractive", f"--env=PATH=/root/.local/bin:{PATH}"]
    argv = ["docker", "exec", *environment, str(machine.name), "bash", "-euc", script]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_that_pipx_installs_builds_its_image_and_runs_a_workload(machine: Container) -> None:
    """Install the wheel by pipx, type `init`, `up` and `run hello-mpi`: the image is built, and the run passes."""
    run(machine, INSTALL)
    run(machine, FIRST_RUN)
    assert json.loads(run(machine, "labctl show --json -C ~/mylab"))["verdict"] == "PASS"
