"""Other people's images: a node's requirements are added to a copy, and no file is overwritten."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest
from support.harness import Lab

from docker import DockerClient

pytestmark = pytest.mark.docker

MINE = "labctl-tests/anyones:1"
# As in images with conda, another Python comes first on PATH; the entrypoint is a vendor's.
DOCKERFILE = """\
FROM {base}
COPY --from={donor} /usr/lib/python3.11 /opt/conda/lib/python3.11
COPY --from={donor} /usr/bin/python3.11 /opt/conda/bin/python
COPY --from={donor} /lib/x86_64-linux-gnu/libexpat.so.1 /lib/x86_64-linux-gnu/libz.so.1 /opt/conda/lib/
RUN echo 'WORD = "of conda"' > /opt/conda/lib/python3.11/only_here.py
ENV PATH=/opt/conda/bin:$PATH LD_LIBRARY_PATH=/opt/conda/lib
ENTRYPOINT ["/bin/sh", "-c", "echo a banner; exec \\"$@\\"", "--"]
"""
SCRIPT = "import only_here, os, sys\nprint('rank', os.environ['RANK'], sys.executable, only_here.WORD)\n"


@pytest.fixture(scope="module")
def mine(engine: DockerClient, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Build an image with conda's Python and a vendor's entrypoint, without labctl's files; yield its id."""
    folder = tmp_path_factory.mktemp("image")
    base = engine.images.get(image).labels["labctl.base"]
    (folder / "Dockerfile").write_text(DOCKERFILE.format(base=base, donor=image))
    subprocess.run(["docker", "build", "--quiet", "--tag", MINE, folder], check=True, capture_output=True)
    yield str(engine.images.get(MINE).id)
    engine.images.remove(MINE, force=True)


def test_a_lab_of_anyones_image_runs_with_what_that_brings(
    mine: str, fresh_lab: Callable[..., Lab], engine: DockerClient
) -> None:
    """`build --from` makes a node's image of it, once; a run uses its Python, and `up` without it is refused."""
    lab = fresh_lab(LAB_IMAGE=MINE)
    refused = lab.call("up").expect(3)
    assert (f"image {MINE} is not a node" in refused.err, lab.containers()) == (True, {})
    assert f"hint: labctl build --from {MINE}" in refused.err
    built = lab.call("build", "--from", MINE, "--json").expect(0).json
    made = ("-s", f"LAB_IMAGE={built['image']}")
    try:
        lab.call("up", *made).expect(0)
        assert lab.image() == built["image"]
        (lab.path / "who.py").write_text(SCRIPT)
        run = lab.call("run", *made, "--script", "who.py", "--launcher", "mpirun", "--json").expect(0).json
        text = (lab.path / "runs" / run["run_id"] / "output.log").read_text()
        assert [f"rank {rank} /opt/conda/bin/python of conda" in text for rank in (0, 1)] == [True, True]
        again = lab.call("build", "--from", MINE, "--json").expect(0).json
        # A second build would change the id.
        assert (again["image"], again["id"]) == (built["image"], built["id"])
        # The image already has what a node needs, so nothing is added.
        assert "is a node already" in lab.call("build", "--from", built["image"]).expect(3).err
    finally:
        lab.call("down", *made)
        engine.images.remove(built["image"], force=True)
    assert engine.images.get(MINE).id == mine


@pytest.mark.parametrize("command", ["build", "build --workload mnist-horovod", "up", "up --workload mnist-horovod"])
def test_an_image_that_labctl_did_not_build_is_not_written_over(
    command: str, mine: str, fresh_lab: Callable[..., Lab], engine: DockerClient
) -> None:
    """`build` and `up` end with code 3, name `build --from`, and leave the image as it is."""
    lab = fresh_lab(LAB_IMAGE=MINE)
    assert f"labctl build --from {MINE}" in lab.call(*command.split()).expect(3).err
    assert engine.images.get(MINE).id == mine
