"""`fit`: its output, and its estimate of memory compared with real runs."""

from __future__ import annotations

import pytest
from support.harness import Lab

pytestmark = pytest.mark.docker

TOLERANCE = 0.15
LONG = ("sequence-length=256", "deepspeed.train_micro_batch_size_per_gpu=8")


def predicted(lab: Lab, workload: str, *settings: str) -> int:
    """Return the estimate of `fit` for a rank's host memory, in bytes above that of the bare process."""
    document = lab.call("fit", workload, "--json", *settings).json
    process = next(line["forward"] for line in document["lines"] if line["formula"] == "constant")
    return int(document["needs"]["host"]) - int(process)


def measured(lab: Lab, workload: str, launcher: str, *settings: str) -> int:
    """Run the workload under this launcher; return its metric `peak` in bytes."""
    result = lab.call("run", workload, "--launcher", launcher, "--json", *settings, limit=1200).expect(0).json
    return int(result["metrics"]["peak"]["value"])


def compare(lab: Lab, workload: str, settings: tuple[str, ...], launcher: str = "deepspeed") -> None:
    """Assert that the estimate of `fit` is within 15% of the peak that a run with these settings measures."""
    argv = [word for setting in settings for word in ("--set", setting)]
    expected, actual = predicted(lab, workload, *argv), measured(lab, workload, launcher, *argv)
    report = f"{expected / 2**20:.0f} MiB predicted, {actual / 2**20:.0f} MiB measured, {expected / actual - 1:+.1%}"
    assert expected == pytest.approx(actual, rel=TOLERANCE), report


def stage(number: int) -> str:
    return f"deepspeed.zero_optimization.stage={number}"


def offload(key: str) -> str:
    return f"deepspeed.zero_optimization.offload_{key}.device=cpu"


def test_a_run_takes_as_much_memory_as_predicted(lab: Lab) -> None:
    """peak-small with ZeRO 2 in fp32 takes within 15% of the memory that `fit` predicts."""
    # bf16 would take 13 s per step of 64 tokens on processors without it.
    compare(lab, "peak-small", (stage(2), "deepspeed.bf16.enabled=false", "sequence-length=16"), launcher="mpirun")


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 2, 3])
@pytest.mark.parametrize("workload", ["peak-small", "peak-medium", "peak-large"])
def test_runs_of_every_size_and_stage_take_as_much_as_predicted(lab: Lab, workload: str, number: int) -> None:
    """Three model sizes with ZeRO 0, 2 and 3 take within 15% of the memory that `fit` predicts."""
    compare(lab, workload, (stage(number),))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        LONG,
        (*LONG, "gradient-checkpointing=on"),
        (stage(1), "deepspeed.gradient_accumulation_steps=2"),
        (stage(0), "deepspeed.bf16.enabled=false"),
        (stage(3), "deepspeed.bf16.enabled=false"),
    ],
    ids=["activations", "checkpointing", "accumulation", "fp32-0", "fp32-3"],
)
def test_other_settings_take_as_much_as_predicted(lab: Lab, settings: tuple[str, ...]) -> None:
    """Long sequences, checkpointing, accumulation and fp32 take within 15% of the predicted memory."""
    compare(lab, "peak-small", settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        (stage(1), offload("optimizer")),
        (stage(2), offload("optimizer")),
        (stage(3), offload("optimizer"), offload("param")),
    ],
    ids=["1", "2", "3"],
)
def test_offloaded_runs_take_as_much_as_predicted(lab: Lab, settings: tuple[str, ...]) -> None:
    """peak-large with offload to the CPU, ZeRO 1 to 3, takes within 15% of the predicted memory."""
    compare(lab, "peak-large", settings)


def test_what_needs_more_than_there_is_does_not_fit(lab: Lab) -> None:
    """`fit` with 3 GB and ZeRO 0: exit code 3 and a hint to ZeRO 1, which fits on two nodes."""
    answer = lab.call("fit", "peak-large", "-s", "LAB_MEMORY=3g", "--set", stage(0)).expect(3)
    assert "does not fit" in answer.out
    assert "--set deepspeed.zero_optimization.stage=1" in answer.out
    assert lab.call("fit", "peak-large", "--nodes", "2", "-s", "LAB_MEMORY=3g", "--set", stage(1)).code == 0


def test_devices_that_are_not_here_are_computed_with(lab: Lab) -> None:
    """`fit` computes 4 nodes of 8 devices with 80 GiB each; `--device-memory lots` gives exit code 2."""
    document = lab.call("fit", "peak-large", "--nodes", "4", "--slots", "8", "--device-memory", "80g", "--json").json
    assert (document["training"]["ranks"], document["available"]) == (32, {"device": 80 << 30, "host": None})
    assert lab.call("fit", "peak-large", "--device-memory", "lots").expect(2).err


def test_a_run_that_cannot_fit_is_refused_before_it_starts(lab: Lab) -> None:
    """peak-large with 1 GB: exit code 3, cause does-not-fit, and the message names `labctl fit`."""
    document = lab.call("run", "peak-large", "-s", "LAB_MEMORY=1g", "--json").expect(3).json
    assert (document["verdict"], document["cause"]) == ("ERROR", "does-not-fit")
    assert "labctl fit" in document["message"]
