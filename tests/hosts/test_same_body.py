"""Same test on two labs: on this machine, and on several hosts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.harness import Lab
from support.rack.rack import RackLab

pytestmark = pytest.mark.docker

WHERE = (
    "one machine",
    pytest.param("several hosts", marks=[pytest.mark.xdist_group("shared_rack"), pytest.mark.smoke]),
)
RANKS = [{"rank": 0, "node": "worker-0"}, {"rank": 1, "node": "worker-1"}]

MINE = """\
import os, pathlib, sys
from lib import words
pathlib.Path(f"rank-{os.environ['RANK']}.txt").write_text(" ".join((words.WORD, *sys.argv[1:])))
"""


@pytest.fixture(params=WHERE)
def lab(request: pytest.FixtureRequest) -> Lab:
    """Return a lab of two nodes, not up: both on this machine, or each on its own host."""
    if request.param == "one machine":
        fresh_lab: Callable[[], Lab] = request.getfixturevalue("fresh_lab")
        return fresh_lab()
    rack_lab: Callable[[int], RackLab] = request.getfixturevalue("rack_lab")
    return rack_lab(2)


@pytest.fixture
def launcher(lab: Lab) -> str:
    """Return deepspeed over hosts, mpirun on one machine, where many other tests cover deepspeed."""
    return "deepspeed" if isinstance(lab, RackLab) else "mpirun"


def test_a_lab_lives_and_ends_alike(lab: Lab, launcher: str) -> None:
    """up, status, exec, logs, an edited workload, a script, a crash and down do the same in both labs."""
    lab.call("up").expect(0)
    before = lab.identities()
    assert sorted(before) == ["launcher", "worker-0", "worker-1"]
    (step,) = lab.call("up", "--dry-run", "--json").expect(0).json["plan"]
    assert step.startswith("#1 reach worker-0, worker-1 over ssh")
    assert "[1/1] reach" in lab.call("up").expect(0).err
    assert lab.identities() == before

    status = lab.call("status", "--json").expect(0).json
    assert status["state"] == "up"
    assert [(node["name"], node["role"], node["state"]) for node in status["nodes"]] == [
        ("launcher", "launcher", "running"),
        ("worker-0", "worker", "running"),
        ("worker-1", "worker", "running"),
    ]
    assert lab.call("exec", "-n", "worker-1", "--", "hostname").expect(0).out == "worker-1\n"
    assert lab.call("exec", "--", "ssh", "worker-1", "exit 7").expect(7)
    assert "worker-1" in lab.call("logs", "worker-1").expect(0).out

    program = lab.path / "workloads/hello/hello.py"
    program.write_text(f'{program.read_text()}\nprint("as it was edited", flush=True)\n')
    edited = lab.call("run", "hello", "--json").expect(0).json
    assert (edited["verdict"], edited["ranks"]) == ("PASS", RANKS)
    record = lab.path / "runs" / edited["run_id"]
    assert (record / "output.log").read_text().count("as it was edited") == 2
    for rank in (0, 1):
        log = (record / f"ranks/rank-{rank}.log").read_text()
        assert f"rank {rank} of 2 on worker-{rank}" in log
        assert "as it was edited" in log

    mine = lab.path / "mine"
    (mine / "lib").mkdir(parents=True)
    (mine / "train.py").write_text(MINE)
    (mine / "lib/words.py").write_text("WORD = 'beside it'\n")
    options = ("--script", str(mine / "train.py"), "--launcher", launcher, "--local-rank", "--json")
    result = lab.call("run", *options, "--", "--steps", "3").expect(0).json
    assert (result["verdict"], result["ranks"], result["workload"]) == ("PASS", RANKS, "train")
    work = lab.path / "runs" / result["run_id"] / "work/mine"
    texts = [(work / f"rank-{rank}.txt").read_text() for rank in (0, 1)]
    assert texts == ["beside it --local_rank=0 --steps 3"] * 2
    assert sorted(path.name for path in mine.iterdir()) == ["lib", "train.py"]

    failed = lab.call("run", "crash", "--launcher", "mpirun", "--json").expect(4).json
    assert (failed["verdict"], failed["cause"], failed["ranks"]) == ("ERROR", "rank-crashed", RANKS)
    assert "rank 1" in failed["message"]
    assert lab.processes_of(failed["run_id"]) == []

    lab.call("down").expect(0)
    assert lab.labelled() == []
    assert lab.call("status", "--json").expect(0).json["state"] == "down"
    lab.call("down").expect(0)
