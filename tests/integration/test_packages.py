"""The user's own packages in the lab's image: built once, and recorded."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import FreshLab
from support.harness import Lab

from docker import DockerClient
from labctl.backends.docker.images import packages

pytestmark = pytest.mark.docker

SCRIPT = """\
import os, pathlib
import einops, helper
pathlib.Path(f"seen-{os.environ['RANK']}").write_text(f"{helper.WORD}, {pathlib.Path('/data/word').read_text()}")
print("einops", einops.__version__, os.environ["WORD"])
"""


@pytest.fixture
def added(tmp_path: Path) -> dict[str, str]:
    """Write data, a Dockerfile and a file for it; return settings with them and the Debian package tree."""
    for name in ("data", "image"):
        (tmp_path / name).mkdir()
    (tmp_path / "data/word").write_text("from the data")
    dockerfile = tmp_path / "image/Dockerfile"
    # An image that an interrupted session left is not this one.
    unique = f"LABEL session={secrets.token_hex(8)}\n"
    dockerfile.write_text(f"ARG BASE_IMAGE\nFROM ${{BASE_IMAGE}}\nCOPY word /etc/word\nENV WORD=of-the-image\n{unique}")
    (tmp_path / "image/word").write_text("copied")
    return {"LAB_APT": "tree", "LAB_MOUNTS": f"{tmp_path}/data:/data:ro", "LAB_DOCKERFILE": str(dockerfile)}


@pytest.fixture
def lab(fresh_lab: FreshLab, engine: DockerClient, image: str, added: dict[str, str]) -> Iterator[Lab]:
    """Yield a lab with the settings ``added`` and the package einops, up; remove its images afterwards."""
    made = fresh_lab(LAB_PACKAGES="einops==0.8.0", **added)
    made.call("up").expect(0)
    tag = made.image()
    under = packages.tag(image, packages.Additions(dockerfile=added["LAB_DOCKERFILE"]))
    yield made
    made.call("down")
    engine.images.remove(tag, force=True)
    engine.images.remove(under, force=True)


def test_a_script_finds_packages_and_a_lab_that_came_up_for_a_workload_is_what_other_commands_expect(
    lab: Lab, added: dict[str, str]
) -> None:
    """Packages are in the image and the record; a workload's packages keep the image."""
    tag = lab.image()
    assert tag.startswith("labctl/packages:")
    assert lab.inside("worker-1", "tree", "--version").startswith("tree v")
    assert lab.inside("worker-1", "cat", "/etc/word") == "copied"
    mine = lab.path / "mine"
    mine.mkdir()
    (mine / "train.py").write_text(SCRIPT)
    (mine / "helper.py").write_text("WORD = 'beside it'\n")
    argv = ("--script", str(mine / "train.py"), "--launcher", "mpirun")
    document = lab.call("run", *argv, "--json").expect(0).json
    record = lab.path / "runs" / document["run_id"]
    assert (document["verdict"], document["message"]) == ("PASS", "2 ranks ended with code 0; no criteria.")
    assert [(record / f"work/mine/seen-{rank}").read_text() for rank in range(2)] == ["beside it, from the data"] * 2
    assert sorted(path.name for path in mine.iterdir()) == ["helper.py", "train.py"]
    assert (record / "output.log").read_text().count("einops 0.8.0 of-the-image") == 2
    assert tag in (record / "versions.json").read_text()
    assert "einops==0.8.0" in (record / "settings.json").read_text()
    (lock,) = (lab.path / ".lab/packages").iterdir()
    assert "einops==0.8.0" in lock.read_text().splitlines()
    lab.call("doctor").expect(0)
    lab.call("down").expect(0)

    # Equal packages give the same image, also for another lab, without an index, which is unreachable here.
    lab.configure({**added, "LAB_PIP_INDEX_URL": "http://127.0.0.1:9/simple"})
    declared = lab.path / "workloads/hello/workload.yml"
    declared.write_text(f"{declared.read_text()}packages: [einops==0.8.0]\n")
    lab.call("up", "--workload", "hello").expect(0)
    assert lab.image() == tag
    before = lab.identities()
    lab.call("doctor").expect(0)
    lab.call("up").expect(0)
    lab.call("run", "hello").expect(0)
    assert lab.identities() == before
    lab.call("down").expect(0)
    (build, *_) = lab.call("up", "--dry-run", "--json").expect(0).json["plan"]
    assert ("build image labctl/packages:" in build, tag in build) == (True, False)
