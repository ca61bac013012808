"""Packages of a person's own in the lab's image: built once, and recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.harness import Lab

from docker import DockerClient
from labctl.images import packages

# Two of them add the same package, and one would remove the other's image.
pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("packages")]

SCRIPT = """\
import os, pathlib
import einops, helper
pathlib.Path(f"seen-{os.environ['RANK']}").write_text(f"{helper.WORD}, {pathlib.Path('/data/word').read_text()}")
print("einops", einops.__version__, os.environ["WORD"])
"""


@pytest.fixture
def lab(fresh_lab: Callable[..., Lab], engine: DockerClient, image: str, tmp_path: Path) -> Iterator[Lab]:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/word").write_text("from the data")
    mounts = f"{tmp_path}/data:/data:ro"
    folder = tmp_path / "image"
    folder.mkdir()
    (folder / "Dockerfile").write_text(
        "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nCOPY word /etc/word\nENV WORD=of-the-image\n"
    )
    (folder / "word").write_text("copied")
    made = fresh_lab(
        LAB_PACKAGES="einops==0.8.0", LAB_APT="tree", LAB_MOUNTS=mounts, LAB_DOCKERFILE=f"{folder}/Dockerfile"
    )
    made.call("up").expect(0)
    tag = made.image()
    under = packages.tag(image, packages.Additions(dockerfile=f"{folder}/Dockerfile"))
    yield made
    made.call("down")
    engine.images.remove(tag, force=True)
    engine.images.remove(under, force=True)


def test_a_script_finds_the_packages_the_files_beside_it_and_room_to_write(lab: Lab) -> None:
    tag = lab.image()
    assert tag.startswith("labctl/packages:")
    assert lab.inside("worker-1", "tree", "--version").startswith("tree v")
    assert lab.inside("worker-1", "cat", "/etc/word") == "copied"
    mine = lab.path / "mine"
    mine.mkdir()
    (mine / "train.py").write_text(SCRIPT)
    (mine / "helper.py").write_text("WORD = 'beside it'\n")
    document = lab.call("run", "--script", str(mine / "train.py"), "--json").expect(0).json
    record = lab.path / "runs" / document["run_id"]
    assert (document["verdict"], document["message"]) == ("PASS", "Completed on 2 ranks; no criteria.")
    assert [(record / f"work/seen-{rank}").read_text() for rank in range(2)] == ["beside it, from the data"] * 2
    assert sorted(path.name for path in mine.iterdir()) == ["helper.py", "train.py"]
    assert (record / "output.log").read_text().count("einops 0.8.0 of-the-image") == 2
    assert tag in (record / "versions.json").read_text()
    assert "einops==0.8.0" in (record / "settings.json").read_text()
    # The same packages are the same image, and nothing is asked for it: no index answers here.
    lab.call("down").expect(0)
    lab.call("up", "-s", "LAB_PIP_INDEX_URL=http://127.0.0.1:9/simple").expect(0)
    (lock,) = (lab.path / ".lab/packages").iterdir()
    assert "einops==0.8.0" in lock.read_text().splitlines()
    lab.call("doctor").expect(0)


def test_a_lab_that_came_up_for_a_workload_is_the_one_that_other_commands_expect(
    fresh_lab: Callable[..., Lab], engine: DockerClient, image: str
) -> None:
    lab = fresh_lab()
    declared = lab.path / "workloads/hello/workload.yml"
    declared.write_text(f"{declared.read_text()}packages: [einops==0.8.0]\n")
    lab.call("up", "--workload", "hello").expect(0)
    tag = lab.image()
    try:
        before = lab.identities()
        lab.call("doctor").expect(0)
        lab.call("up").expect(0)
        lab.call("run", "hello").expect(0)
        assert lab.identities() == before
        lab.call("down").expect(0)
        lab.call("up").expect(0)
        assert (tag.startswith("labctl/packages:"), lab.image()) == (True, image)
    finally:
        lab.call("down")
        engine.images.remove(tag, force=True)
