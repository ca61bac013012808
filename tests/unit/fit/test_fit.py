"""Memory of training: the papers' figures, DeepSpeed's own buffers, and the nearest setting that fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import builders

from labctl import fit
from labctl.cli.fit import text
from labctl.cli.output import to_json
from labctl.errors import ConfigError
from labctl.fit import memory
from labctl.fit import training as shape
from labctl.fit.memory import MemoryItem
from labctl.fit.training import Training, arguments
from labctl.model import Memory, Workload
from labctl.system import human

CONFIGS = Path(__file__).resolve().parents[3] / "workloads/opt/configs"
GIB = 2**30
OPT_13B = shape.read(CONFIGS / "opt-13b.json")
OPT_350M = shape.read(CONFIGS / "opt-350m.json")
STATES = ("weights", "master weights", "Adam's two moments", "gradients", "gradients of this rank's share")


def training(**changes: Any) -> Training:
    """Return a training of OPT-13B on 64 ranks; ``changes`` replace its fields."""
    base = Training(model=OPT_13B, accelerator="nvidia", ranks=64, slots=8, sequence_length=512)
    return replace(base, **changes)


def part(planned: Training, name: str) -> MemoryItem:
    """Return the memory item of this name."""
    return next(line for line in memory.lines(planned) if line.component == name)


def parts(planned: Training) -> set[str]:
    """Return the names of the training's memory items."""
    return {line.component for line in memory.lines(planned)}


# --- shapes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("opt-125m", 125_239_296),
        ("opt-350m", 331_196_416),
        ("opt-1.3b", 1_315_758_080),
        ("opt-13b", 12_853_473_280),
        ("opt-66b", 65_719_701_504),
    ],
)
def test_parameters_of_the_published_models(name: str, count: int) -> None:
    """Read a published configuration: its exact number of parameters."""
    assert shape.read(CONFIGS / f"{name}.json").parameters == count


def test_adapters_are_two_factors_of_every_adapted_layer() -> None:
    """Count adapters by layer or prefix: two factors each; ConfigError for a layer that is not there."""
    assert OPT_13B.adapters(8, ("q_proj", "fc1")) == 40 * 8 * (5120 + 5120 + 5120 + 20480)
    assert OPT_13B.adapters(8, ("decoder.layers.", "fc1")) == 40 * 8 * (4 * 10240 + 2 * 25600)
    assert OPT_13B.adapters(8, ("self_attn", "q_proj")) == 40 * 8 * 4 * 10240
    with pytest.raises(ConfigError, match="no linear layer `query`"):
        OPT_13B.adapters(8, ("query",))


def test_a_layer_keeps_34_sbh_as_the_paper_counts_with_gelu_and_dropout() -> None:
    """Count a layer's activations: 34 s b h with GELU, 8 less with ReLU."""
    assert replace(OPT_13B, relu=False).layer_activations(tokens=100, width=2) == 34 * 100 * 5120
    assert OPT_13B.layer_activations(tokens=100, width=2) == (34 - 8) * 100 * 5120


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "opt"}', '{"model_type": "llama"}'])
def test_what_is_no_config_of_a_known_model_is_said(tmp_path: Path, text: str) -> None:
    """Read invalid JSON or an incomplete configuration: ConfigError."""
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="config"):
        shape.read(tmp_path)


# --- the parts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "bytes_per_parameter"),
    # Section 5 of the ZeRO paper with 64 ranks: 16, then 2 + 14 / 64, then 16 / 64.
    [(0, 16), (2, 2 + 14 / 64), (3, 16 / 64)],
)
def test_states_are_those_of_the_zero_paper(stage: int, bytes_per_parameter: float) -> None:
    """Sum the states at stages 0, 2 and 3: the bytes per parameter of the ZeRO paper."""
    lines = [line for line in memory.lines(training(stage=stage)) if line.component in STATES]
    assert sum(line.backward for line in lines) / OPT_13B.parameters == pytest.approx(bytes_per_parameter, rel=1e-6)


def test_frozen_weights_have_neither_gradients_nor_states() -> None:
    """Train adapters: states and gradients of these parameters alone."""
    adapted = training(stage=0, lora_dim=8)
    trained = OPT_13B.adapters(8, ("q_proj", "v_proj"))
    assert part(adapted, "Adam's two moments").step == 8 * trained
    assert part(adapted, "gradients").backward == 2 * trained
    assert part(adapted, "weights").step == 2 * (OPT_13B.parameters + trained)


def test_fp32_needs_no_master_copy_until_zero_makes_one() -> None:
    """Train in fp32: no master weights at stage 0, a share at stage 1."""
    assert "master weights" not in parts(training(mixed_precision=False))
    assert part(training(mixed_precision=False, stage=1), "master weights").step == pytest.approx(
        OPT_13B.parameters / 16, abs=1
    )


def test_offloading_moves_states_and_weights_to_the_host() -> None:
    """Offload optimizer and parameters: states and weights are on the host, the device needs less."""
    planned = training(stage=3, offload_optimizer=True, offload_parameters=True)
    on_host = {line.component for line in memory.lines(planned) if line.location == "host"}
    assert on_host >= {"weights", "master weights", "Adam's two moments", "gradients of this rank's share"}
    assert "temporary tensors of AdamW" not in parts(planned)
    assert fit.needs(planned).device < fit.needs(training(stage=3)).device


def test_checkpointing_keeps_one_layer_and_the_inputs_of_all() -> None:
    """Checkpoint: activations are one layer's and the inputs of all."""
    kept = part(training(gradient_checkpointing=True), "activations").forward
    assert kept == 40 * 2 * 512 * 5120 + OPT_13B.layer_activations(512, 2)


def test_a_bucket_is_taken_whole_on_a_device_and_as_it_is_filled_on_a_cpu() -> None:
    """Size the gradient bucket: whole on a device, the parameters on a CPU, twice with overlap."""
    small = training(model=OPT_350M, stage=2)
    assert part(small, "bucket of gradients").backward == 2 * 500_000_000
    assert part(replace(small, accelerator="cpu"), "bucket of gradients").backward == 2 * OPT_350M.parameters
    assert part(replace(small, overlap=True), "bucket of gradients").backward == 4 * 500_000_000


def test_rlhf_holds_four_models_and_trains_two() -> None:
    """Plan RLHF: weights of actor, critic, reference and reward, moments of the first two."""
    planned = training(task="rlhf", critic=OPT_350M)
    critic = OPT_350M.parameters + OPT_350M.hidden
    assert part(planned, "weights").step == 2 * (OPT_13B.parameters + critic)
    assert part(planned, "weights of reference and reward").step == 2 * (OPT_13B.parameters + critic)
    assert part(planned, "Adam's two moments").step == 8 * (OPT_13B.parameters + critic)


def test_rlhf_gathers_the_whole_actor_to_write_answers() -> None:
    """Plan RLHF at stage 3: the gathered actor and its keys count in phase generate; not at stage 2."""
    planned = training(task="rlhf", critic=OPT_350M, stage=3, answer_length=256, lora_dim=128)
    planned = replace(planned, micro_batch=16, gradient_checkpointing=True)
    adapters = OPT_13B.adapters(128, ("q_proj", "v_proj"))
    assert part(planned, "actor gathered to write answers").generate == 2 * (OPT_13B.parameters + adapters)
    assert part(planned, "keys and values of the answers, or logits").generate == 2 * 2 * 40 * 5120 * 512 * 16
    assert fit.needs(planned).device_phase == "generate"
    assert "actor gathered to write answers" not in parts(replace(planned, stage=2))


def test_only_rlhf_generates() -> None:
    """Plan a fine-tuning: no item in phase generate."""
    assert not any(line.generate for line in memory.lines(training(stage=3)))


def test_rlhfs_loss_sees_the_logits_of_answers_alone() -> None:
    """Plan RLHF: logits of the answer's tokens alone."""
    planned = training(task="rlhf", critic=OPT_350M, stage=3, micro_batch=2, answer_length=100)
    # bf16, and three times fp32: as they are, transposed, and their logarithm.
    assert part(planned, "logits and their gradients").forward == (2 + 3 * 4) * 2 * 100 * OPT_13B.vocabulary


def test_the_critic_may_have_a_stage_of_its_own() -> None:
    """Give the critic stage 0: its moments are whole, the actor's divided."""
    planned = training(task="rlhf", critic=OPT_350M, stage=3, critic_stage=0)
    critic = OPT_350M.parameters + OPT_350M.hidden
    held = {line.formula: line.step for line in memory.lines(planned) if line.component == "Adam's two moments"}
    assert held == {"8 T / N": 8 * OPT_13B.parameters / 64, "8 T": 8 * critic}


def test_a_reward_model_sees_pairs_and_has_no_logits() -> None:
    """Plan a reward model: twice the tokens, no logits."""
    reward = training(task="reward")
    assert reward.tokens == 2 * 512
    assert "logits and their gradients" not in parts(reward)


# --- from a workload -----------------------------------------------------------------------------------------


def workload(*arguments: str, **deepspeed: Any) -> Workload:
    """Return the opt workload with these arguments and DeepSpeed keys."""
    return builders.workload(
        directory=CONFIGS.parent,
        arguments=("--model", "opt-13b", "--sequence-length", "256", *arguments),
        memory=Memory(model="configs/{model}.json"),
        deepspeed={"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, **deepspeed},
    )


def test_the_last_of_an_argument_counts() -> None:
    """Parse arguments with repeats and prefixes: the last value of each counts."""
    argv = ("--lora-dim", "4", "--on", "--modules", "a", "b", "--lora_dim=8")
    assert arguments(argv) == {"lora_dim": ["8"], "on": [], "modules": ["a", "b"]}
    assert arguments((*argv, "--actor-lora-dim", "2"))["lora_dim"] == ["2"]


def test_arguments_and_deepspeeds_keys_decide() -> None:
    """Plan from arguments and DeepSpeed's keys: the Training has them all."""
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}
    given = workload(
        "--gradient-checkpointing", "--lora-dim", "16", "--lora-modules", "fc1", "--model", "opt-350m",
        zero_optimization=zero, gradient_accumulation_steps=4,
    )  # fmt: skip
    assert fit.of(given, "cpu", 2, 3) == Training(
        model=OPT_350M, accelerator="cpu", ranks=6, slots=2, stage=3, micro_batch=2, gradient_accumulation_steps=4,
        sequence_length=256, gradient_checkpointing=True, lora_dim=16, lora_modules=("fc1",), offload_optimizer=True,
    )  # fmt: skip


def test_what_the_script_has_no_argument_for_is_declared() -> None:
    """Leave out the sequence length: ConfigError, unless the memory section declares it."""
    bare = replace(workload(), arguments=("--model", "opt-13b"))
    with pytest.raises(ConfigError, match="sequence length"):
        fit.of(bare, "cpu", 1, 2)
    declared = Memory(model="configs/{model}.json", defaults=(("sequence_length", ("64",)),))
    assert fit.of(replace(bare, memory=declared), "cpu", 1, 2).sequence_length == 64


def test_arguments_may_say_which_task_it_is_and_which_critic() -> None:
    """Plan with task and critic from arguments: they decide, and a missing answer length is ConfigError."""
    both = Memory(model="configs/{model}.json", critic="configs/{critic_model}.json", task="{mode}")
    given = replace(workload("--mode", "rlhf", "--max-prompt-length", "64"), memory=both)
    with pytest.raises(ConfigError, match="max answer length"):
        fit.of(given, "cpu", 1, 2)
    given = replace(given, arguments=(*given.arguments, "--max-answer-length", "32"))
    planned = fit.of(given, "cpu", 1, 2)
    assert (planned.task, planned.critic, planned.sequence_length) == ("rlhf", OPT_13B, 96)
    assert (planned.answer_length, planned.critic_stage) == (32, None)
    argv = ("--critic-model", "opt-350m", "--critic-zero-stage", "0")
    with_critic = fit.of(replace(given, arguments=(*given.arguments, *argv)), "cpu", 1, 2)
    assert (with_critic.critic, with_critic.critic_stage) == (OPT_350M, 0)
    plain = fit.of(replace(workload(), memory=both), "cpu", 1, 2)
    assert (plain.task, plain.critic, plain.sequence_length) == ("sft", None, 256)


def test_of_a_model_that_is_only_counted_the_states_are_known() -> None:
    """Plan a model by its number of parameters: states known, fits is None, the text says what is not counted."""
    counted = Memory(defaults=(("parameters", ("1000",)),))
    planned = fit.of(replace(workload(), memory=counted), "nvidia", 1, 2)
    assert part(planned, "Adam's two moments").step == 8000
    assert "activations" not in parts(planned)
    plenty = fit.Capacity(device=GIB, host=GIB)
    assert fit.fits(planned, plenty) is None
    report = fit.report("counted", 2, planned, plenty)
    assert "activations: not counted" in text(report, explain=True)
    assert "counted: unknown whether it fits on 2 devices on 2 hosts (activations not counted)" in text(report)
    assert "tokens" not in text(report)


@pytest.mark.parametrize("missing", ["memory", "deepspeed"])
def test_a_workload_that_does_not_say_is_told_what_to_write(missing: str) -> None:
    """Plan a workload without memory or deepspeed section: ConfigError names it."""
    with pytest.raises(ConfigError, match=f"declares no `{missing}` section"):
        fit.of(replace(workload(), **{missing: None}), "cpu", 1, 2)


# --- the verdict ---------------------------------------------------------------------------------------------


def test_what_does_not_fit_on_a_cpu_is_told_with_needed_available_and_what_to_change() -> None:
    """Check a CPU training one byte short: the reason has the need and a setting; None with enough."""
    planned = training(model=OPT_350M, accelerator="cpu", ranks=8, slots=1, micro_batch=8)
    needed = fit.needs(planned).host
    reason = fit.check(planned, fit.Capacity(device=None, host=needed - 1))
    assert reason is not None
    assert f"needs {human.memory(needed)} per node" in reason
    assert "--set deepspeed.zero_optimization.stage=1" in reason
    assert fit.check(planned, fit.Capacity(device=None, host=needed)) is None


def test_ranks_of_a_host_share_it() -> None:
    """Plan four slots on a CPU: the host needs four times as much."""
    planned = training(accelerator="cpu", slots=4)
    assert fit.needs(planned).host == 4 * fit.needs(replace(planned, slots=1)).host


def test_unknown_memory_is_no_verdict() -> None:
    """Judge with unknown host: None; with a device that is too small: False."""
    assert fit.fits(training(stage=3), fit.Capacity(device=None, host=None)) is None
    assert fit.fits(training(stage=3), fit.Capacity(device=GIB, host=None)) is False


@pytest.mark.parametrize(
    ("planned", "gib", "settings"),
    [
        (training(stage=0), 100, ["deepspeed.zero_optimization.stage=1"]),
        (training(stage=2, ranks=8), 40, ["deepspeed.zero_optimization.stage=3"]),
        (training(stage=3, micro_batch=8), 20, ["deepspeed.train_micro_batch_size_per_gpu=4",
                                                "deepspeed.gradient_accumulation_steps=2"]),
        (training(stage=3, ranks=2), 24, ["deepspeed.zero_optimization.offload_optimizer.device=cpu"]),
    ],
)  # fmt: skip
def test_the_cheapest_change_that_fits_is_advised(planned: Training, gib: int, settings: list[str]) -> None:
    """Advise for a size in GiB: the one cheapest change of settings."""
    advice = fit.advise(planned, fit.Capacity(device=gib * GIB, host=None))
    assert advice is not None
    assert [change.set for change in advice.changes] == settings


def test_what_nothing_helps_is_said() -> None:
    """Advise where nothing helps: None."""
    assert fit.advise(training(), fit.Capacity(device=GIB, host=None)) is None


def test_the_document_is_plain_data() -> None:
    """Turn a report into JSON: needs, available, lines with formula and source, advice."""
    report = fit.report("opt", 2, training(stage=3, ranks=2), fit.Capacity(device=80 * GIB, host=None))
    document = json.loads(json.dumps(to_json(report)))
    assert document["fits"] is False
    assert document["needs"]["device"] > document["available"]["device"]
    assert all(line["formula"] and line["source"] for line in document["lines"])
    assert document["advice"]["needs"]["device"] <= 80 * GIB
