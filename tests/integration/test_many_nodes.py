"""Sixty-four workers on this machine, under one launcher."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.harness import Lab

from labctl.lab import capabilities

pytestmark = [pytest.mark.docker, pytest.mark.slow]

NODES = 64
WORKERS = [f"worker-{number}" for number in range(NODES)]
# As many logins as sshd's own defaults would drop nine of ten of.
LOGINS = """
for number in $(seq 100); do ssh "$1" hostname & done
wait
"""


@pytest.fixture(scope="module")
def many(new_lab: Callable[[dict[str, str]], Lab], image: str) -> Lab:
    lab = new_lab({"LAB_NODES": str(NODES)})
    lab.call("up", limit=600).expect(0)
    return lab


def test_all_of_them_are_up_and_a_second_up_changes_nothing(many: Lab) -> None:
    assert set(many.containers()) == {"launcher", *WORKERS}
    before = many.identities()
    many.call("up", limit=300).expect(0)
    assert many.identities() == before


def test_a_hundred_logins_into_one_worker_at_once_all_succeed(many: Lab) -> None:
    said = many.inside("launcher", "bash", "-c", LOGINS, "bash", "worker-5")
    assert Counter(said.split()) == {"worker-5": 100}


def test_one_command_reaches_them_all(many: Lab) -> None:
    answer = many.call("exec", "--all", "--", "hostname").expect(0)
    assert sorted(answer.out.splitlines()) == sorted(f"{name}: {name}" for name in WORKERS)


def test_every_rank_of_hello_mpi_answers(many: Lab) -> None:
    result = many.call("run", "hello-mpi", "--json", limit=600).expect(0).json
    assert (result["verdict"], result["metrics"]["answers"]["value"]) == ("PASS", NODES)
    assert {rank["node"] for rank in result["ranks"]} == set(WORKERS)


def test_every_pair_of_them_can_talk_or_the_table_that_is_too_small_is_named(many: Lab) -> None:
    """From the launcher to each, from each back to it, and from each to each."""
    table = int((Path("/") / capabilities.NEIGHBOURS).read_text())
    if table < NODES * (NODES + 1):
        findings = json.loads(many.call("doctor", "--json", limit=300).stdout)["findings"]
        assert "LAB-NET-006" in {one["code"] for one in findings if one["level"] != "ok"}
        assert f"gc_thresh3={table}" in many.call("up", limit=300).expect(0).err
        return
    result = many.call("run", "ssh-check", "--json", limit=600).expect(0).json
    assert result["metrics"]["pairs"]["value"] == NODES * (NODES + 1)
