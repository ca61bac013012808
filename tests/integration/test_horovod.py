"""MNIST over Horovod on two nodes: Keras and PyTorch, Gloo and MPI; and a person's programs, as they are given."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hangs.cases import PROGRAMS
from support import repository as repositories
from support.harness import Lab
from support.repository import WORDS, said

from docker import DockerClient

# Building a missing image takes ten minutes and more.
pytestmark = pytest.mark.docker

IMAGE = "labctl/horovod"
TWO = ("--include", "worker-0@worker-1")
SHORT = (*TWO, "--set", "images=4000", "--set", "epochs=2")
WAYS = ("horovod", "horovod:mpi")
VARIABLE = r'a b  $HOME \ "q" * `id` ; é -x'


@pytest.fixture(scope="session")
def horovod_image(engine: DockerClient, new_lab: Callable[[dict[str, str]], Lab]) -> str:
    """Return the name of the Horovod image; build it if it is missing."""
    if not engine.images.list(filters={"reference": f"{IMAGE}:latest"}):
        new_lab({}).call("build", "--workload", "mnist-horovod", limit=3600).expect(0)
    return IMAGE


@pytest.fixture(scope="module")
def horovod_lab(horovod_image: str, new_lab: Callable[[dict[str, str]], Lab]) -> Lab:
    """A lab of four nodes of the Horovod image, up."""
    settings = {"LAB_IMAGE": horovod_image, "LAB_SHM_SIZE": "256m", "LAB_NODES": "4", "LAB_ENV_TRICKY": VARIABLE}
    lab = new_lab(settings)
    lab.call("up", limit=300).expect(0)
    return lab


@pytest.mark.parametrize(
    ("workload", "way"),
    [
        ("mnist-horovod", "gloo"),
        pytest.param("mnist-horovod-torch", "mpi", marks=pytest.mark.slow),
        pytest.param("mnist-horovod", "mpi", marks=pytest.mark.slow),
        pytest.param("mnist-horovod-torch", "gloo", marks=pytest.mark.slow),
    ],
)
def test_the_loss_falls_on_all_ranks_together(horovod_lab: Lab, workload: str, way: str) -> None:
    """MNIST over Horovod with Gloo or MPI passes on two nodes: the loss falls, the accuracy is above 0.7."""
    answer = horovod_lab.call("run", workload, "--launcher", f"horovod:{way}", *SHORT, "--json", limit=600)
    result = answer.expect(0).json
    assert (result["verdict"], result["launcher"].partition(":")[0]) == ("PASS", "horovod")
    assert result["ranks"] == [{"rank": 0, "node": "worker-0"}, {"rank": 1, "node": "worker-1"}]
    metrics = result["metrics"]
    assert metrics["loss"]["last"] < metrics["loss"]["first"]
    assert 0.7 < metrics["accuracy"]["value"] <= 1
    assert 0.7 < metrics["test_accuracy"]["value"] <= 1
    assert metrics["throughput"]["value"] > 0
    output = (horovod_lab.path / "runs" / result["run_id"] / "output.log").read_text()
    assert f"world size 2, {'MPI' if way == 'mpi' else 'Gloo'}" in output
    assert "data: Fashion-MNIST" in output
    assert horovod_lab.processes_of(result["run_id"]) == []


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a repository with a script, a module and a command that print how they were started; return its path."""
    return repositories.make(tmp_path_factory.mktemp("projects") / "my repo")


@pytest.mark.parametrize(
    ("launcher", "program"),
    [
        ("horovod", ("--script", "src/train.py", "--")),
        ("horovod", ("--", "./tool")),
        ("horovod:mpi", ("--script", "src/train.py", "--")),
        ("horovod:mpi", ("-m", "package.says", "--")),
    ],
)
def test_a_program_has_its_words_and_variables_as_they_are_given(
    horovod_lab: Lab, repository: Path, launcher: str, program: tuple[str, ...]
) -> None:
    """Arguments and a variable with special characters reach both Horovod ranks unchanged."""
    command = ("run", *TWO, "--launcher", launcher, "--json", *program, *WORDS)
    shown = said(horovod_lab, horovod_lab.call(*command, here=repository).expect(0).json)
    assert [(entry["rank"], entry["world"]) for entry in shown] == [("0", "2"), ("1", "2")]
    for entry in shown:
        assert (entry["argv"], entry["variable"]) == ([*WORDS], VARIABLE)
        assert (entry["cwd"], entry["word"]) == ("my repo", "of the package")


@pytest.mark.parametrize(("flag", "ranks"), [("--per-node", ["0", "1"]), ("--once", [None])])
def test_what_is_started_by_node_or_once_has_its_words_as_they_are_given(
    horovod_lab: Lab, repository: Path, flag: str, ranks: list[str | None]
) -> None:
    """With --per-node or --once, arguments and a variable arrive unchanged."""
    command = ("run", *TWO, flag, "--json", "-m", "package.says", "--project", str(repository), "--", *WORDS)
    shown = said(horovod_lab, horovod_lab.call(*command).expect(0).json)
    assert [entry["rank"] for entry in shown] == ranks
    assert all((entry["argv"], entry["variable"]) == ([*WORDS], VARIABLE) for entry in shown)


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["mnist-horovod", "mnist-horovod-torch"])
def test_a_rehearsal_needs_no_images(horovod_lab: Lab, workload: str) -> None:
    """A rehearsal passes with generated images, and its log says so."""
    result = horovod_lab.call("run", workload, *TWO, "--rehearse", "--json", limit=300).expect(0).json
    assert result["verdict"] == "PASS"
    assert "data: generated" in (horovod_lab.path / "runs" / result["run_id"] / "output.log").read_text()


@pytest.mark.slow
def test_images_in_the_cache_go_before_the_packages_and_broken_ones_are_refused(horovod_lab: Lab) -> None:
    """A broken mnist.npz in the cache: exit code 4, and the message says it."""
    cache = horovod_lab.path / "cache/mnist"
    cache.mkdir()
    (cache / "mnist.npz").write_text("<html>not here</html>")
    try:
        answer = horovod_lab.call("run", "mnist-horovod-torch", *SHORT, "--json", limit=300)
    finally:
        (cache / "mnist.npz").unlink()
        cache.rmdir()
    # The run's lines include a traceback of horovodrun.
    assert (answer.code, answer.json["cause"]) == (4, "rank-crashed")
    assert "is not Keras's mnist.npz" in answer.json["message"]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("launcher", WAYS)
def test_every_one_of_so_many_nodes_has_its_rank(horovod_lab: Lab, launcher: str, nodes: int) -> None:
    """`hello` under Horovod on 1, 2 and 4 nodes has rank N on worker-N."""
    names = [f"worker-{number}" for number in range(nodes)]
    argv = ("run", "hello", "--launcher", launcher, "--include", "@".join(names), "--json")
    document = horovod_lab.call(*argv).expect(0).json
    assert [(rank["rank"], rank["node"]) for rank in document["ranks"]] == list(enumerate(names))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", WAYS)
def test_ctrl_c_ends_the_run_and_leaves_nothing_of_it(horovod_lab: Lab, launcher: str) -> None:
    """Ctrl-C during a Horovod run: exit code 130, cause interrupted, no process is left."""
    with horovod_lab.stubborn_run("--launcher", launcher, *TWO, "--json") as (running, run_id):
        running.press()
        answer = running.answer(30)
    assert (answer.code, answer.json["cause"]) == (130, "interrupted")
    assert horovod_lab.processes_of(run_id) == []


@pytest.mark.slow
@pytest.mark.parametrize("launcher", WAYS)
def test_the_time_limit_ends_even_what_does_not_listen(horovod_lab: Lab, launcher: str) -> None:
    """Ranks ignore signals and `--timeout` is 12 s: exit code 124, no process is left."""
    argv = ("run", "stubborn", "--launcher", launcher, *TWO, "--timeout", "12", "--json")
    answer = horovod_lab.call(*argv, limit=60)
    assert (answer.code, answer.json["cause"]) == (124, "timeout")
    assert horovod_lab.processes_of(answer.json["run_id"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("launcher", WAYS)
def test_a_worker_that_is_killed_ends_the_run_and_is_named(horovod_lab: Lab, launcher: str) -> None:
    """Kill worker-1 during a Horovod run: exit code 4, cause node-lost, worker-1 and rank 1 are named."""
    with horovod_lab.stubborn_run("--launcher", launcher, *TWO, "--json") as (running, run_id):
        horovod_lab.containers()["worker-1"].kill("SIGKILL")
        answer = running.answer(30)
    assert (answer.code, answer.json["cause"]) == (4, "node-lost")
    assert "worker-1 (rank 1)" in answer.json["message"]
    assert horovod_lab.processes_of(run_id) == []
    horovod_lab.call("up").expect(0)


def test_a_rank_that_misses_an_allreduce_is_named_with_the_lines_of_both(horovod_lab: Lab) -> None:
    """Rank 1 sleeps instead of joining an allreduce of Horovod: stalled, the sentence names rank, node and lines."""
    program = PROGRAMS / "others/skipped_by_horovod.py"
    shutil.copy(program, horovod_lab.path)
    lines = program.read_text().splitlines()
    waits, apart = (
        f"{program.name}:{next(number for number, line in enumerate(lines, 1) if line.endswith(mark))}"
        for mark in ("# others wait", "# apart")
    )
    argv = ("--script", program.name, "--launcher", "horovod", *TWO, "--timeout", "2m", "-s", "LAB_STALL_SECONDS=4")
    document = horovod_lab.call("run", *argv, "--json", limit=300).json
    assert (document["cause"], document["hang"]["kind"]) == ("stalled", "missing-rank")
    sentence = document["hang"]["sentence"]
    assert sentence.startswith("rank 1 (worker-1) has not joined allreduce")
    assert (waits in sentence, apart in "\n".join(document["hang"]["lines"])) == (True, True)
