"""Causes of failed runs, in the exit code, the message and the archive for a bug report."""

from __future__ import annotations

import re
import tarfile

import pytest
from conftest import NewLab
from support.harness import Lab

pytestmark = pytest.mark.docker

TOKEN = "canary-of-a-token"  # noqa: S105
KILLED = r"worker-1 \(rank 1\): container ran out of memory; a node has LAB_MEMORY=512m"
COUNTED = (
    r"rank 1 on worker-1 exited with code 137 \(SIGKILL\): ran out of memory: the kernel killed \d of its processes; "
    "a node has LAB_MEMORY=512m"
)


@pytest.fixture(scope="module")
def lab(new_lab: NewLab, image: str) -> Lab:
    """Return a lab of two nodes with 512 MB each and a secret, up."""
    made = new_lab({"LAB_MEMORY": "512m", "LAB_SHM_SIZE": "64m", "LAB_ENV_SERVICE_TOKEN": TOKEN})
    made.call("up", limit=300).expect(0)
    return made


def evidence(lab: Lab, run_id: str) -> dict[str, str]:
    """Return name -> text of the files in a run's evidence.tar.gz."""
    with tarfile.open(lab.path / "runs" / run_id / "evidence.tar.gz") as archive:
        contents = {member.name: archive.extractfile(member) for member in archive}
        texts = {name: content.read().decode() for name, content in contents.items() if content}
    return {name.removeprefix(f"evidence-{run_id}/"): text for name, text in texts.items()}


def slow(*values: object) -> object:
    """Return a parameter set that is marked as slow: unit tests cover its message too."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("how", "code", "cause", "message", "line"),
    [
        ("host-memory", 4, "out-of-memory", f"{KILLED}|{COUNTED}", "worker-1-1: oom"),
        ("device-memory", 4, "out-of-memory", "rank 1 on worker-1 .*out of memory.*", "Tried to allocate 20.00 GiB"),
        slow("library-memory", 4, "out-of-memory", "rank 1 on worker-1 .*ALLOC_FAILED.*", "CUBLAS_STATUS_ALLOC_FAILED"),
        slow("exit", 4, "rank-crashed", "rank 1 on worker-1 exited with code 3.*", "on worker-1 exited with code 3"),
        ("timeout", 124, "timeout", r"timed out after 6 s.*", "step 3/3 loss 1"),
        slow("criteria", 5, "criteria", r"1 of 1 criterion not met: loss 1 \(<= 0\.5 wanted\)\.", "step 3/3 loss 1"),
        slow("no-metric", 4, "no-metric", "Metric `loss` not found in the output, .*", "rank 0 of 2 on worker-0"),
        slow("nan", 4, "no-metric", "Metric `loss` is nan; its criteria cannot be checked.", "loss nan"),
    ],
    ids=["host-memory", "device-memory", "library-memory", "exit", "timeout", "criteria", "no-metric", "nan"],
)
def test_the_cause_of_a_failure_is_named_with_the_lines_that_show_it(
    lab: Lab, how: str, code: int, cause: str, message: str, line: str
) -> None:
    """Eight ways to fail give their cause and exit code; the archive has the line and no secret."""
    options = ("--timeout", "6s") if how == "timeout" else ()
    answer = lab.call("run", "fails", *options, "--json", "--", how)
    document = answer.json
    assert (answer.code, document["cause"]) == (code, cause)
    assert re.fullmatch(message, document["message"])
    if how == "host-memory":
        assert any("OOM kills of the host +" in change for change in document["node_changes"])
    texts = evidence(lab, document["run_id"])
    assert document["message"] in texts["evidence.txt"]
    assert line in texts["evidence.txt"].partition("first to fail:")[2] + texts["hosts/local.txt"]
    assert {"result.json", "settings.json", "ranks/rank-0.log", "ranks/rank-1.log", "hosts/local.txt"} <= texts.keys()
    assert f"/{lab.containers()['worker-1'].name}: running" in texts["hosts/local.txt"]
    assert TOKEN not in "".join(texts.values())
    assert "the token is [REDACTED]" in texts["ranks/rank-0.log"]


def test_a_run_that_nobody_followed_is_out_of_memory_by_the_kernels_count(lab: Lab) -> None:
    """A detached run exceeds LAB_MEMORY: `attach` says out-of-memory."""
    run_id = lab.call("run", "fails", "--detach", "--json", "--", "host-memory").expect(0).json["run_id"]
    document = lab.call("attach", run_id, "--json", limit=120).json
    assert (document["cause"], bool(re.fullmatch(f"{KILLED}|{COUNTED}", document["message"]))) == (
        "out-of-memory",
        True,
    )
