"""The OPT workload in its three modes, and rehearsals of big models, on two CPU nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.harness import Answer, Lab

from docker import DockerClient
from labctl.reports import samples

pytestmark = pytest.mark.docker

WORKLOADS = Path(__file__).resolve().parents[2] / "workloads"
LIMIT = 1200
"""Time limit of a run in seconds, many times its duration on idle cores."""
MPIRUN = ("--launcher", "mpirun")
"""Flags for tests that do not depend on the launcher: mpirun starts ranks in less than half of DeepSpeed's time."""


def metrics_of(answer: Answer) -> dict[str, Any]:
    """Assert that a run passed on two ranks, one per node, with plausible metrics; return the metrics."""
    result = answer.expect(0).json
    assert result["verdict"] == "PASS"
    assert result["ranks"] == [{"rank": 0, "node": "worker-0"}, {"rank": 1, "node": "worker-1"}]
    metrics: dict[str, Any] = result["metrics"]
    assert metrics["throughput"]["value"] > 0
    assert 0.1 < metrics["peak_memory"]["value"] < 4
    assert "mfu" not in metrics
    return metrics


@pytest.mark.smoke
def test_fine_tuning_teaches_a_tiny_model_and_each_node_is_sampled(lab: Lab) -> None:
    """opt-tiny lowers its loss by a fifth; CPU and memory of both nodes are sampled."""
    answer = lab.call("run", "opt-tiny", "--set", "steps=40", "--json", limit=LIMIT)
    metrics = metrics_of(answer)
    assert metrics["loss"]["last"] < 0.8 * metrics["loss"]["first"]
    tracks = samples.read(lab.path / "runs" / str(answer.json["run_id"]))
    most = {(track.node, track.what): max(value or 0 for _, value in track.points) for track in tracks}
    for node in ("worker-0", "worker-1"):
        assert 0.1 < most[node, "CPU"] < 64
        # The model and torch.
        assert 200 < most[node, "memory"] < 8000


@pytest.mark.slow
def test_a_reward_model_learns_which_answer_is_the_true_one(lab: Lab) -> None:
    """opt-tiny-reward passes with an accuracy of 0.7 or more."""
    metrics = metrics_of(lab.call("run", "opt-tiny-reward", "--json", limit=LIMIT))
    assert metrics["accuracy"]["value"] >= 0.7


def test_reinforcement_moves_the_actor_to_what_scores_better_and_leaves_the_hybrid_engine_out(lab: Lab) -> None:
    """opt-tiny-rlhf gains reward; the hybrid engine is not used on CPUs."""
    hybrid = ("--set", "deepspeed.hybrid_engine.enabled=true")
    answer = lab.call("run", "opt-tiny-rlhf", *MPIRUN, *hybrid, "--set", "steps=20", "--json", limit=LIMIT)
    metrics = metrics_of(answer)
    assert metrics["reward_gain"]["value"] > 0
    assert metrics["critic_loss"].keys() >= {"first", "last"}
    assert "hybrid engine: not used, as its kernels need CUDA" in answer.err


@pytest.mark.parametrize(
    "workload",
    [
        "opt-13b",
        pytest.param("opt-66b", marks=pytest.mark.slow),
        pytest.param("opt-350m_bs24_zero0", marks=pytest.mark.slow),
        pytest.param("opt-350m_bs24", marks=pytest.mark.slow),
        pytest.param("opt-13b_bs16_zero0", marks=pytest.mark.slow),
        pytest.param("opt-13b-rlhf", marks=pytest.mark.slow),
    ],
)
def test_a_big_model_is_rehearsed(lab: Lab, workload: str) -> None:
    """A rehearsal of each big OPT workload passes on two CPU nodes."""
    metrics_of(lab.call("run", workload, "--rehearse", "--json", limit=LIMIT))


def test_a_reward_model_is_rehearsed_and_a_key_of_the_configuration_reaches_it(lab: Lab) -> None:
    """A rehearsal with `deepspeed.zero_optimization.stage=3` says ZeRO stage 3."""
    stage = ("--set", "deepspeed.zero_optimization.stage=3")
    answer = lab.call("run", "opt-350m_bs24", "--rehearse", *MPIRUN, *stage, "--json", limit=LIMIT)
    metrics_of(answer)
    assert "ZeRO stage: 3" in answer.err


PPO = """
import sys
sys.path[:0] = ["/workloads/opt", "/workloads/common"]
import ppo, torch
answers = torch.tensor([[7, 2, 9, 2], [7, 8, 9, 5]])
mask = ppo.answer_mask(answers, eos=2)
print(mask.int().tolist())
reward = ppo.rewards(torch.tensor([9.0, 3.0]), torch.full((2, 4), 0.5), mask, 0.1)
print([[round(x, 3) + 0.0 for x in row] for row in reward.tolist()])
one = torch.ones(1, 2)
advantage, returns = ppo.advantages(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]]), one)
print([round(x, 3) for x in (*advantage[0].tolist(), *returns[0].tolist())])
up = torch.log(torch.tensor([[1.5, 1.5]]))
print([round(ppo.policy_loss(up, 0 * up, sign * one, one).item(), 3) for sign in (1, -1)])
print(round(ppo.value_loss(torch.tensor([[1.0]]), torch.tensor([[0.0]]), torch.tensor([[1.0]]), one[:, :1]).item(), 3))
print([round(x, 3) for x in ppo.log_probabilities(torch.zeros(1, 1, 4), torch.tensor([[3]]))[0].tolist()])
"""
EXPECTED = [
    # An answer ends with its first </s>.
    "[[1, 1, 0, 0], [1, 1, 1, 1]]",
    # The score, at most 5, is added to the last token; each token pays for its drift.
    "[[-0.05, 4.95, 0.0, 0.0], [-0.05, -0.05, -0.05, 2.95]]",
    # The advantages' differences are 2 - 1 and 4 - 2; the first token is credited with 0.95 of the second.
    "[2.9, 2.0, 3.9, 4.0]",
    # A ratio of 1.5 gains as much as 1.2, and loses in full.
    "[-1.2, 1.5]",
    # A value that moved by 1 towards the return counts as if it had moved by 0.2.
    "0.32",
    "[-1.386]",
]


def test_ppo_is_what_the_papers_say(engine: DockerClient, image: str) -> None:
    """Mask, rewards, advantages and losses of ppo, run in the image, equal values computed by hand."""
    output = engine.containers.run(
        image,
        ["-c", PPO],
        entrypoint="python3",
        network_mode="none",
        volumes={str(WORKLOADS): {"bind": "/workloads", "mode": "ro"}},
        remove=True,
    ).decode()
    assert output.splitlines() == EXPECTED
