"""The OPT workload without torch: published shapes, parameter counts, declarations that agree with both."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from support.builders import read_values

from labctl.workloads import deepspeed_config
from labctl.workloads.loader import load
from unit.scripts.conftest import ImportScripts

OPT = Path(__file__).resolve().parents[3] / "workloads" / "opt"
DECLARED: dict[str, Any] = yaml.safe_load((OPT / "workload.yml").read_text(encoding="utf-8"))
VARIANTS: dict[str, dict[str, Any]] = DECLARED["variants"]
LAUNCHERS = ("deepspeed",)


@pytest.fixture(scope="module")
def opt(import_scripts: ImportScripts) -> SimpleNamespace:
    """Return the modules of opt that need no torch."""
    return import_scripts("opt", "shapes", "arguments", "configuration", "flops", "deepspeed_file", "script_exit")


Opt = SimpleNamespace


@pytest.mark.parametrize(
    ("name", "hidden", "layers", "heads", "projected", "norm_before"),
    [
        ("opt-125m", 768, 12, 12, 768, True),
        ("opt-350m", 1024, 24, 16, 512, False),
        ("opt-1.3b", 2048, 24, 32, 2048, True),
        ("opt-13b", 5120, 40, 40, 5120, True),
        ("opt-66b", 9216, 64, 72, 9216, True),
    ],
)
def test_shapes_are_the_published_ones(
    opt: Opt, name: str, hidden: int, layers: int, heads: int, projected: int, norm_before: bool
) -> None:
    """Load published configurations: sizes as published, ffn 4 x hidden, 50272 tokens, 2048 positions."""
    config = opt.shapes.load(name)
    assert (config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]) == (
        hidden,
        layers,
        heads,
    )
    assert config["ffn_dim"] == 4 * hidden
    assert config["vocab_size"] == 50272
    assert config["max_position_embeddings"] == 2048
    assert config["word_embed_proj_dim"] == projected
    assert config["do_layer_norm_before"] is norm_before


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
def test_parameter_counts_are_the_known_ones(opt: Opt, name: str, count: int) -> None:
    """Count parameters of published models: the known numbers."""
    shapes = opt.shapes
    assert shapes.parameters(shapes.load(name)) == count


def test_lora_counts_both_factors_of_every_adapted_layer(opt: Opt) -> None:
    """Count LoRA parameters: two factors of every adapted layer, 0 without a rank."""
    shapes = opt.shapes
    config = shapes.load("opt-125m")
    assert shapes.lora_parameters(config, 8) == 12 * 2 * 8 * (768 + 768)
    assert shapes.lora_parameters(config, 8, ("fc1",)) == 12 * 8 * (768 + 3072)
    assert shapes.lora_parameters(config, 0) == 0


def test_tiny_has_a_few_million_parameters(opt: Opt) -> None:
    """Count parameters of opt-tiny: 1 to 5 million."""
    shapes = opt.shapes
    assert 1_000_000 < shapes.parameters(shapes.load("opt-tiny")) < 5_000_000


def test_a_word_adapts_every_linear_layer_that_has_it_in_its_name(opt: Opt) -> None:
    """Count LoRA parameters by a word: every layer with it in its name."""
    shapes = opt.shapes
    config = shapes.load("opt-13b")
    attention, feed_forward = 4 * (5120 + 5120), 2 * (5120 + 20480)
    assert shapes.lora_parameters(config, 128, ("decoder.layers.",)) == 40 * 128 * (attention + feed_forward)
    assert shapes.lora_parameters(config, 128, ("self_attn", "q_proj")) == 40 * 128 * attention


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_declared_variant_can_be_run_and_what_labctl_writes_can_be_read(
    opt: Opt, variant: str, tmp_path: Path
) -> None:
    """Load each variant: its arguments are accepted, and the completed DeepSpeed file is read back."""
    workload = deepspeed_config.resolve_bf16(load(OPT.parent, variant, LAUNCHERS), "cuda", ())
    args = opt.arguments.parse(workload.arguments)
    opt.arguments.check(args)
    path = tmp_path / "ds.json"
    assert workload.deepspeed
    complete = deepspeed_config.complete(workload.deepspeed, ranks=16, accelerator="cuda", where="here")
    path.write_text(json.dumps(complete))
    ds = opt.configuration.read(path, 16)
    assert ds.micro_batch * ds.accumulation * 16 == complete["train_batch_size"]
    assert (ds.stage, ds.precision) == (workload.deepspeed["zero_optimization"]["stage"], "bf16")
    assert ds.hybrid_engine is (variant == "opt-13b-rlhf")
    assert "hybrid_engine" not in ds.content


@pytest.mark.parametrize("variant", VARIANTS)
def test_rehearsal_is_tiny_and_of_the_same_kind(opt: Opt, variant: str) -> None:
    """Load each rehearsal: below 500,000 parameters and 10 steps, otherwise like the variant."""
    shapes, arguments = opt.shapes, opt.arguments
    real, rehearsal = (load(OPT.parent, variant, LAUNCHERS, rehearse=small) for small in (False, True))
    assert real.deepspeed
    assert rehearsal.deepspeed
    full, args = arguments.parse(real.arguments), arguments.parse(rehearsal.arguments)
    for config, name in zip(arguments.check(args), (full.model, full.critic_model), strict=True):
        published = shapes.load(name)
        assert shapes.parameters(config) < 500_000
        assert config["do_layer_norm_before"] is published["do_layer_norm_before"]
        assert (config["word_embed_proj_dim"] == config["hidden_size"]) is (
            published["word_embed_proj_dim"] == published["hidden_size"]
        )
    assert args.steps < 10
    assert rehearsal.deepspeed["train_micro_batch_size_per_gpu"] == 2
    assert rehearsal.deepspeed["zero_optimization"] == real.deepspeed["zero_optimization"]
    assert (args.mode, args.gradient_checkpointing) == (full.mode, full.gradient_checkpointing)
    assert bool(args.lora_dim) is bool(full.lora_dim)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--model", "opt-2b"], "no model 'opt-2b'; there are opt-1.3b"),
        (["--mode", "rlhf", "--critic-model", "opt-2b"], "no model 'opt-2b'"),
        (["--sequence-length", "4096"], "takes 2 to 2048"),
        (["--mode", "rlhf", "--max-answer-length", "1800"], "take 2048 together"),
        (["--mode", "rlhf", "--max-prompt-length", "0"], "--max-prompt-length 0 is not at least 1"),
        (["--steps", "5", "--warmup-steps", "5"], "leaves none of 5 steps to time"),
        (["--ppo-epochs", "0"], "--ppo-epochs 0 is not at least 1"),
        (["--lora-dim", "-1"], "is negative"),
        (["--lora-dim", "4", "--lora-modules", "query"], "no linear layer 'query'"),
    ],
)
def test_impossible_arguments_are_refused_with_the_reason(opt: Opt, argv: list[str], reason: str) -> None:
    """Check impossible arguments: InputError with the reason."""
    with pytest.raises(opt.script_exit.InputError, match=reason):
        opt.arguments.check(opt.arguments.parse(argv))


def test_the_critic_is_like_the_actor_unless_said_otherwise(opt: Opt) -> None:
    """Parse the critic's arguments: the actor's unless given."""
    args = opt.arguments.parse(["--mode", "rlhf", "--model", "opt-13b", "--learning-rate", "3e-5"])
    assert (args.critic_model, args.critic_learning_rate) == ("opt-13b", 3e-5)
    args = opt.arguments.parse(["--model", "opt-13b", "--critic-model", "opt-350m", "--critic-learning-rate", "1e-6"])
    assert (args.critic_model, args.critic_learning_rate) == ("opt-350m", 1e-6)


MICRO = "train_micro_batch_size_per_gpu"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({MICRO: 2, "train_batch_size": 12}, "train_batch_size is 12, but .* make 8"),
        ({"train_batch_size": 8}, f"no {MICRO}"),
        ({MICRO: 0}, f"{MICRO} is 0, not a whole number"),
        ({MICRO: 2, "gradient_accumulation_steps": "2"}, "gradient_accumulation_steps is '2'"),
        ({MICRO: 2, "zero_optimization": {"stage": 4}}, "stage is 4"),
        ({MICRO: 2, "bf16": {"enabled": "auto"}}, "bf16.enabled is 'auto'"),
        ({MICRO: 2, "bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both enabled"),
        ([], "is not a JSON object"),
    ],
)
def test_configurations_that_would_not_train_as_written_are_refused(
    opt: Opt, content: object, reason: str, tmp_path: Path
) -> None:
    """Read DeepSpeed configurations that would not train: InputError with the reason."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    with pytest.raises(opt.script_exit.InputError, match=reason):
        opt.configuration.read(path, 4)


def test_a_configuration_that_is_absent_or_not_json_is_refused(opt: Opt, tmp_path: Path) -> None:
    """Read a missing or invalid DeepSpeed file: InputError."""
    with pytest.raises(opt.script_exit.InputError, match="No such file"):
        opt.configuration.read(tmp_path / "ds.json", 1)
    (tmp_path / "ds.json").write_text("{,}")
    with pytest.raises(opt.script_exit.InputError, match="is not JSON"):
        opt.configuration.read(tmp_path / "ds.json", 1)


def test_what_a_configuration_leaves_out_is_filled_in(opt: Opt, tmp_path: Path) -> None:
    """Read a configuration with the micro-batch alone: the defaults, and train_batch_size for 4 ranks."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({MICRO: 3}))
    ds = opt.configuration.read(path, 4)
    assert (ds.micro_batch, ds.accumulation, ds.stage, ds.precision) == (3, 1, 0, "fp32")
    assert ds.content["train_batch_size"] == 12


def test_another_stage_for_the_critic_leaves_the_actors_alone(opt: Opt) -> None:
    """Ask for another stage: a copy, the original stays."""
    ds = opt.configuration.read(None, 1)
    assert ds.at_stage(3)["zero_optimization"]["stage"] == 3
    assert ds.content["zero_optimization"]["stage"] == 0


def test_operations_follow_the_stated_formula(opt: Opt) -> None:
    """Compute operations of training and forward pass: 6 or 4 for each parameter and token, and attention."""
    config, count, attention = opt.shapes.load("opt-125m"), 125_239_296, 12 * 12 * 768 * 512
    assert opt.flops.train(config, 512) == 6 * count + attention
    assert opt.flops.train(config, 512, adapters=1000) == 4 * count + 6 * 1000 + attention
    assert opt.flops.forward(config, 512) == 2 * count + attention / 3
    assert opt.flops.forward(config, 512, values=True) == 2 * (count - 50272 * 768) + attention / 3


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA TITAN V", None),
    ],
)
def test_the_peak_is_found_by_the_devices_name(opt: Opt, name: str, peak: float | None) -> None:
    """Find a device's peak by its name: None if unknown."""
    assert opt.flops.peak(name) == peak


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("opt-tiny", "random (this model has no published weights)"),
        ("opt-125m", "random (facebook/opt-125m is not in the cache /hub)"),
    ],
)
def test_random_weights_say_whether_there_are_others(opt: Opt, name: str, why: str) -> None:
    """Describe random weights: of a model without published ones, and of one that is not in the cache."""
    assert opt.shapes.random_weights(name, Path("/hub")) == why


OUTPUT = {
    "learning_rate": ("worker-0: step 3/8 loss 0.8887 lr 1.0e-03 tokens/s 166 accuracy 0.2500", 1e-3),
    "loss": ("worker-0: step 3/8 loss 0.8887 lr 1.0e-03 tokens/s 166 accuracy 0.2500", 0.8887),
    "accuracy": ("worker-0: Accuracy: 0.6250 in the last 2 steps", 0.625),
    "reward": ("worker-0: step 2/6 loss -1.9 lr 6.7e-04 tokens/s 31 reward -1.1890 critic_loss 2.0292 kl 0.4", -1.189),
    "critic_loss": ("worker-0: step 2/6 loss 1 lr 6.7e-04 tokens/s 3 reward -1.1 critic_loss 2.0292 kl 0.4", 2.0292),
    "reward_gain": (
        "worker-0: Reward gain: -0.3543, from -1.2194 in the first 1 steps to -1.5737 in the last 1",
        -0.3543,
    ),
    "throughput": ("worker-0: Throughput: 27.5785 samples/sec", 27.5785),
    "step_tokens": ("worker-0: step 3/8 loss 0.8887 lr 1.0e-03 tokens/s 166 accuracy 0.2500", 166),
    "tokens": ("worker-0: Tokens: 58.7 tokens/sec", 58.7),
    "peak_memory": ("worker-0: Peak memory: 0.532 GiB", 0.532),
    "mfu": ("worker-0: MFU: 41.2 % of 989.4 TFLOP/s (NVIDIA H200)", 41.2),
}


@pytest.mark.parametrize("metric", DECLARED["metrics"])
def test_every_metric_is_read_from_the_line_that_carries_it(metric: str) -> None:
    """Read a line of the workload by each declared metric: its value."""
    line, value = OUTPUT[metric]
    declared = load(OPT.parent, "opt-tiny", LAUNCHERS).metrics
    assert read_values(declared, [line])[metric] == [value]
