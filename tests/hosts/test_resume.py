"""A run over two hosts goes on from shards of which each host has written its own."""

from __future__ import annotations

import json

import pytest
from conftest import RackLabs
from support.harness import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.slow]


def test_the_shards_of_all_hosts_are_gathered_and_sent_to_all(rack_lab: RackLabs) -> None:
    lab = rack_lab(2)
    lab.call("up", limit=600).expect(0)
    words = ("opt-tiny", "--rehearse", "--set", "save-every=2")
    whole = lab.call("run", *words, "--json", limit=1200).expect(0).json
    folder = lab.path / "runs" / whole["run_id"] / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-4"]
    marker = json.loads((folder / "step-4/whole.json").read_text())
    for name, size in marker["files"].items():
        assert (folder / "step-4" / name).stat().st_size == size
    part = lab.call("run", "--resume", "latest", "--json", limit=1200).expect(0).json
    assert part["resumed"] == f"{whole['run_id']}/checkpoints/step-4"
    assert part["metrics"]["loss"] == whole["metrics"]["loss"]


def test_a_node_that_is_lost_on_another_host_is_brought_up_again_and_its_shards_are_used(rack_lab: RackLabs) -> None:
    lab = rack_lab(2)
    lab.call("up", limit=600).expect(0)
    words = ("opt-tiny", "--set", "steps=50", "--set", "save-every=10", "--retries", "1")
    with lab.start("run", *words, "--json") as running:
        wait_until(lambda: "step 25/50 " in running.err, 1200, "step 25")
        lab.containers()["worker-1"].kill("SIGKILL")
        result = running.answer(1200).json
    first = result["retried"][0].partition(":")[0]
    assert result["verdict"] == "PASS"
    assert result["resumed"] in {f"{first}/checkpoints/step-20", f"{first}/checkpoints/step-30"}
