"""Scripts of the user's clones on two nodes: run unchanged, judged by their output."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import FreshLab
from support.harness import Lab

pytestmark = pytest.mark.docker

CLONES = Path(__file__).parents[1] / "clones"


@pytest.fixture(scope="module")
def cloned(lend_module: FreshLab, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Return a lab of two nodes with copies of the test clones of DeepSpeedExamples and optimum-habana."""
    root = tmp_path_factory.mktemp("clones") / "clones"
    shutil.copytree(CLONES, root, symlinks=True)
    return lend_module(
        HOST_REPO_PATH=str(root / "DeepSpeedExamples"), HOST_OPTIMUM_HABANA_PATH=str(root / "optimum-habana")
    )


def test_a_deepspeed_chat_script_runs_unmodified_on_all_nodes(cloned: Lab) -> None:
    """A DeepSpeed-Chat script passes on two nodes, with its own log file and a log per rank."""
    result = cloned.call("run", "dschat/run_opt-350m_bs24_zero0", "--json").expect(0).json
    assert result["verdict"] == "PASS"
    assert result["ranks"] == [{"rank": 0, "node": "worker-0"}, {"rank": 1, "node": "worker-1"}]
    assert result["metrics"]["throughput"]["value"] > 0
    record = cloned.path / "runs" / result["run_id"]
    log = (record / "opt-350m_1_2xN.log").read_text()
    assert log.startswith("worker-0 slots=1\nworker-1 slots=1\n\n")
    for rank in (0, 1):
        line = f"rank {rank} local 0 run {result['run_id']} port 29500"
        assert f"worker-{rank}: {line}" in log
        assert line in (record / f"ranks/rank-{rank}.log").read_text().splitlines()
    assert cloned.processes_of(result["run_id"]) == []


def test_on_one_node_it_runs_in_that_node_its_own_words_win_and_it_fails_with_the_reason(cloned: Lab) -> None:
    """A failing script keeps its own port; exit code 4 and the last line it wrote."""
    (cloned.path / "one").write_text("worker-1 slots=1\n")
    # The script also names its author's home.
    answer = cloned.call("run", "dschat/run_that_fails", "--hostfile", "one", "--json")
    result = answer.json
    assert result["ranks"] == [{"rank": 0, "node": "worker-1"}]
    assert "port 12346" in (cloned.path / "runs" / result["run_id"] / "output.log").read_text()
    assert answer.code == 4
    assert (result["verdict"], result["cause"]) == ("ERROR", "rank-crashed")
    assert result["message"] == "rank 0 on worker-1 exited with code 1; the last it wrote: nothing to do"


@pytest.mark.parametrize("node", ["launcher", "worker-1"])
def test_nothing_in_a_container_writes_to_a_clone(cloned: Lab, node: str) -> None:
    """`touch` in both clones fails as on a read-only file system, in the launcher and a worker."""
    write = "for clone in DeepSpeedExamples optimum-habana; do touch $PROJECT_PATH/$clone/.envrc && exit 7; done; :"
    answer = cloned.call("exec", "--node", node, "--", "sh", "-c", write).expect(0)
    assert answer.err.count("Read-only file system") == 2


def test_a_gaudi_example_is_refused_here_and_checked_on_every_node(cloned: Lab) -> None:
    """Without Gaudis `run` gives exit code 3; with --rehearse both nodes check the arguments."""
    name = "gaudi/language-modeling/run_lora_clm"
    assert "needs Gaudis" in cloned.call("run", name).expect(3).err
    arguments = ("--set", "lora_rank=8", "--set", "use_habana=")
    argv = ("--launcher", "mpirun", "--rehearse", *arguments, "--json")
    result = cloned.call("run", name, *argv).expect(0).json
    assert result["metrics"]["checked"]["value"] == 2
    assert result["world_size"] == 2
