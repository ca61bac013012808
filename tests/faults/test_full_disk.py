"""A lab whose disk is full, before and during a run: one plain error, and no loss of data."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.harness import Lab

from docker import DockerClient

pytestmark = pytest.mark.docker


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 160 MiB; yield its directory; unmount it; skip the test unless root."""
    if os.geteuid():
        pytest.skip("to mount a file system takes root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "labctl-tests", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def fill(disk: Path) -> Path:
    """Fill the disk of this directory with the file `filler`; return its path."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    return filler


def test_a_full_disk_is_named_and_loses_nothing(disk: Path, engine: DockerClient, image: str, family: str) -> None:
    """up and run exit with 3 on a full disk; a run that fills it ends as disk-full; earlier runs stay."""
    lab = Lab.make(disk / "lab", f"{family}-full", engine, {"LAB_IMAGE": image, "LAB_NODES": "1"})
    greedy = lab.path / "workloads/greedy"
    greedy.mkdir()
    (greedy / "workload.yml").write_text(
        "description: fills the disk\nlauncher: mpirun\nscript: greedy.sh\ntimeout: 2m\n"
    )
    (greedy / "greedy.sh").write_text(
        "#!/bin/bash\ncat /dev/zero > $LABCTL_RUN_DIR/big || [[ $1 != --fail ]] || exit 1\nyes | head -c 1000000\n"
    )
    (greedy / "greedy.sh").chmod(0o755)
    try:
        filler = fill(disk)
        error = lab.call("up", "--json").expect(3).json["error"]
        assert "No space left on device" in error["message"]
        assert str(lab.path) in error["message"]
        assert lab.labelled() == []
        filler.unlink()
        lab.call("up").expect(0)
        lab.call("run", "hello").expect(0)
        (earlier,) = lab.run_ids()
        before, nodes = (lab.path / "runs" / earlier / "result.json").read_bytes(), lab.identities()
        filler = fill(disk)
        error = lab.call("run", "hello", "--json").expect(3).json["error"]
        assert f" free at {lab.path}" in error["message"]
        filler.unlink()
        result = lab.call("run", "greedy", "--json").expect(4).json
        run_id = result["run_id"]
        assert (result["verdict"], result["cause"]) == ("ERROR", "disk-full")
        full = f"{lab.path / 'runs' / run_id}/output.log: No space left on device; 0 B free at {disk}"
        assert full in result["message"]
        assert lab.processes_of(run_id) == []
        for path in (lab.path / "runs").rglob("big"):
            path.unlink()
        assert (lab.path / "runs" / earlier / "result.json").read_bytes() == before
        assert lab.call("show", run_id, "--json").expect(0).json["cause"] == "disk-full"
        result = lab.call("run", "greedy", "--json", "--", "--fail").expect(4).json
        assert (result["verdict"], result["cause"]) == ("ERROR", "disk-full")
        # The full disk stops either the node's program or labctl's own record first.
        shortage = r"(worker-0 has 0 B of 160 MiB free at /workspace/outputs|0 B free at )"
        assert re.search(f"No space left on device; {shortage}", result["message"]), result["message"]
        for path in (lab.path / "runs").rglob("big"):
            path.unlink()
        lab.call("run", "hello").expect(0)
        lab.call("up").expect(0)
        assert lab.identities() == nodes
    finally:
        lab.destroy()
