"""The OPT workload without torch: published shapes, parameter counts, declarations that agree with both."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

OPT = Path(__file__).resolve().parents[2] / "workloads" / "opt"
DECLARED: dict[str, Any] = yaml.safe_load((OPT / "workload.yml").read_text(encoding="utf-8"))
VARIANTS: dict[str, dict[str, Any]] = DECLARED["variants"]


@pytest.fixture(scope="module")
def opt() -> Iterator[tuple[ModuleType, ModuleType]]:
    """The modules ``shapes`` and ``arguments``, found as the script finds them: beside itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(OPT))
        yield import_module("shapes"), import_module("arguments")
    for name in ("shapes", "arguments"):
        del sys.modules[name]


Opt = tuple[ModuleType, ModuleType]


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
    config = opt[0].load(name)
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
    shapes = opt[0]
    assert shapes.parameters(shapes.load(name)) == count


def test_lora_counts_both_factors_of_every_adapted_layer(opt: Opt) -> None:
    shapes = opt[0]
    config = shapes.load("opt-125m")
    assert shapes.lora_parameters(config, 8) == 12 * 2 * 8 * (768 + 768)
    assert shapes.lora_parameters(config, 8, ("fc1",)) == 12 * 8 * (768 + 3072)
    assert shapes.lora_parameters(config, 0) == 0


def test_tiny_has_a_few_million_parameters(opt: Opt) -> None:
    shapes = opt[0]
    assert 1_000_000 < shapes.parameters(shapes.load("opt-tiny")) < 5_000_000


@pytest.mark.parametrize("variant", VARIANTS)
def test_rehearsal_is_tiny_and_of_the_same_kind(opt: Opt, variant: str) -> None:
    shapes, arguments = opt
    declared = [str(argument) for argument in VARIANTS[variant]["arguments"]]
    args = arguments.parse([*declared, *DECLARED["rehearse"]["arguments"]])
    full, small = arguments.parse(declared), arguments.check(args)
    published = shapes.load(variant)
    assert shapes.parameters(small) < 500_000
    assert small["do_layer_norm_before"] is published["do_layer_norm_before"]
    assert (small["word_embed_proj_dim"] == small["hidden_size"]) is (
        published["word_embed_proj_dim"] == published["hidden_size"]
    )
    assert args.steps < 10
    assert args.zero_stage == full.zero_stage
    assert args.gradient_checkpointing is full.gradient_checkpointing
    assert bool(args.lora_dim) is bool(full.lora_dim)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--model", "opt-2b"], "no model 'opt-2b'; there are opt-1.3b"),
        (["--sequence-length", "4096"], "takes 2 to 2048"),
        (["--steps", "5", "--warmup-steps", "5"], "leaves none of 5 steps to time"),
        (["--micro-batch", "0"], "--micro-batch 0 is not at least 1"),
        (["--lora-dim", "-1"], "is negative"),
        (["--lora-dim", "4", "--lora-modules", "query"], "no linear layer 'query'"),
    ],
)
def test_impossible_arguments_are_refused_with_the_reason(opt: Opt, argv: list[str], reason: str) -> None:
    shapes, arguments = opt
    with pytest.raises(shapes.InputError, match=reason.replace("?", r"\?")):
        arguments.check(arguments.parse(argv))
