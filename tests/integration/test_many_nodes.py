"""A lab with many workers on this machine, under one launcher."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from conftest import FreshLab
from support.harness import Lab

from labctl.backends.docker.lab import capabilities

pytestmark = pytest.mark.docker

LOGINS = """
for number in $(seq "$2"); do ssh "$1" hostname & done
wait
"""


@pytest.fixture(scope="module", params=[12, pytest.param(64, marks=pytest.mark.slow)])
def many(request: pytest.FixtureRequest, lend_module: FreshLab) -> Lab:
    """Return a lab, up, with 12 workers, and in slow tests also one with 64."""
    return lend_module(LAB_NODES=str(request.param))


def workers(lab: Lab) -> list[str]:
    """List the names of the lab's worker containers, sorted."""
    return sorted(set(lab.containers()) - {"launcher"})


def test_all_of_them_are_up_and_a_second_up_changes_nothing(many: Lab) -> None:
    """Each of LAB_NODES workers has a container, and a second `up` keeps all of them."""
    settings = dict(line.split("=") for line in (many.path / ".env").read_text().splitlines())
    count = int(settings["LAB_NODES"].strip('"'))
    assert set(workers(many)) == {f"worker-{number}" for number in range(count)}
    before = many.identities()
    many.call("up", limit=300).expect(0)
    assert many.identities() == before


def test_every_rank_of_them_answers(many: Lab) -> None:
    """hello-mpi passes with a rank on every worker, and `exec --all` prints the hostname of each."""
    result = many.call("run", "hello-mpi", "--json", limit=600).expect(0).json
    assert (result["verdict"], result["metrics"]["answers"]["value"]) == ("PASS", len(workers(many)))
    assert {rank["node"] for rank in result["ranks"]} == set(workers(many))
    answer = many.call("exec", "--all", "--", "hostname").expect(0)
    assert sorted(answer.out.splitlines()) == sorted(f"{name}: {name}" for name in workers(many))


# By default sshd drops logins from the eleventh concurrent one on.
@pytest.mark.parametrize("logins", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_many_logins_into_one_worker_at_once_all_succeed(lab: Lab, logins: int) -> None:
    """Start 30 (slow: 100) ssh logins to worker-1 at once: all print its hostname."""
    output = lab.inside("launcher", "bash", "-c", LOGINS, "bash", "worker-1", str(logins))
    assert Counter(output.split()) == {"worker-1": logins}


@pytest.mark.slow
def test_every_pair_of_them_can_talk_or_the_table_that_is_too_small_is_named(many: Lab) -> None:
    """ssh-check reaches all pairs; if gc_thresh3 is too small for them, doctor and `up` name it."""
    table, nodes = int((Path("/") / capabilities.NEIGHBOURS).read_text()), len(workers(many))
    if table < nodes * (nodes + 1):
        findings = json.loads(many.call("doctor", "--json", limit=300).stdout)["findings"]
        assert "LAB-NET-006" in {finding["code"] for finding in findings if finding["level"] != "ok"}
        assert f"gc_thresh3={table}" in many.call("up", limit=300).expect(0).err
        return
    result = many.call("run", "ssh-check", "--json", limit=600).expect(0).json
    assert result["metrics"]["pairs"]["value"] == nodes * (nodes + 1)
