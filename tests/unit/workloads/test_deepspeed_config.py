from __future__ import annotations

from typing import Any

import pytest

from labctl.errors import ConfigError
from labctl.workloads import deepspeed_config

MICRO, STEPS, BATCH = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


def complete(config: dict[str, Any], ranks: int = 4, accelerator: str = "cpu") -> dict[str, Any]:
    """Complete the configuration for these ranks and accelerator."""
    return deepspeed_config.complete(config, ranks=ranks, accelerator=accelerator, where="ds.json")


@pytest.mark.parametrize(
    ("given", "micro", "steps", "batch"),
    [
        ({MICRO: 2}, 2, 1, 8),
        ({MICRO: 2, STEPS: 3}, 2, 3, 24),
        ({BATCH: 16}, 4, 1, 16),
        ({BATCH: 16, STEPS: 2}, 2, 2, 16),
        ({BATCH: 16, MICRO: 2}, 2, 2, 16),
        ({BATCH: 16, MICRO: 2, STEPS: 2}, 2, 2, 16),
    ],
)
def test_batch_is_micro_batch_times_accumulation_times_ranks(
    given: dict[str, int], micro: int, steps: int, batch: int
) -> None:
    """Complete any two of micro-batch, accumulation and batch for 4 ranks: the third."""
    completed = complete(given)
    assert (completed[MICRO], completed[STEPS], completed[BATCH]) == (micro, steps, batch)


@pytest.mark.parametrize(
    "given", [{BATCH: 10}, {BATCH: 16, MICRO: 3}, {BATCH: 16, MICRO: 2, STEPS: 4}, {BATCH: 2}, {BATCH: 16, STEPS: 3}]
)
def test_batch_sizes_that_do_not_go_together_are_refused_with_the_sum(given: dict[str, int]) -> None:
    """Complete sizes that contradict each other: ConfigError with the product."""
    with pytest.raises(ConfigError, match=rf"ds\.json: `{BATCH}` {given[BATCH]} is not .* x 4 ranks"):
        complete(given)


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, "auto"])
def test_a_batch_size_is_a_whole_number(value: object) -> None:
    """Give a micro-batch that is no whole number above 0: ConfigError."""
    with pytest.raises(ConfigError, match="whole number above 0"):
        complete({MICRO: value})


def test_without_any_batch_size_it_is_asked_for() -> None:
    """Complete a configuration without sizes: ConfigError."""
    with pytest.raises(ConfigError, match="neither"):
        complete({})


@pytest.mark.parametrize(
    ("config", "key", "near"),
    [
        ({"train_micro_batch_size_per_gpus": 1}, "train_micro_batch_size_per_gpus", MICRO),
        ({"micro_batch_per_gpu": 16}, "micro_batch_per_gpu", MICRO),
        ({"zero_optimisation": {}}, "zero_optimisation", "zero_optimization"),
        ({"zero_optimization": {"stages": 2}}, "zero_optimization.stages", "stage"),
        ({"fp16": {"enable": True}}, "fp16.enable", "enabled"),
        ({"bfloat16": {"enabled": True}}, "bfloat16", "bf16"),
    ],
)
def test_a_misspelt_key_is_passed_on_with_a_warning_that_names_the_right_one(
    config: dict[str, Any], key: str, near: str
) -> None:
    """Complete a misspelt key: it stays, and one warning names the nearest key."""
    assert config.items() <= complete({MICRO: 1, **config}).items()
    (warning,) = deepspeed_config.unknown_keys(config, "ds.json")
    assert warning == f"ds.json: DeepSpeed 0.19 has no key `{key}` and ignores it; did you mean `{near}`?"


def test_known_keys_and_sections_of_the_wrong_type_give_no_warning() -> None:
    """Check known keys: no warning, whatever their type."""
    config = {MICRO: 1, "bf16": True, "fp16": {"enabled": False}, "zero_optimization": {"stage": 1}}
    assert list(deepspeed_config.unknown_keys(config, "ds.json")) == []


@pytest.mark.parametrize("stage", [4, -1, "2", True, 1.5])
def test_a_stage_is_one_of_four(stage: object) -> None:
    """Give an invalid stage: ConfigError."""
    with pytest.raises(ConfigError, match="must be 0, 1, 2 or 3"):
        complete({MICRO: 1, "zero_optimization": {"stage": stage}})


def test_a_section_that_is_no_object_is_refused() -> None:
    """Give a section that is no object: ConfigError."""
    with pytest.raises(ConfigError, match="`bf16` must be an object"):
        complete({MICRO: 1, "bf16": True})


def test_fp16_is_refused_where_the_device_has_none() -> None:
    """Enable fp16: ConfigError on cpu, accepted on nvidia."""
    config = {MICRO: 1, "fp16": {"enabled": True}}
    with pytest.raises(ConfigError, match="CPUs do not train in fp16"):
        complete(config)
    assert complete(config, accelerator="nvidia")["fp16"] == {"enabled": True}


def test_two_precisions_at_once_are_refused() -> None:
    """Enable fp16 and bf16: ConfigError."""
    with pytest.raises(ConfigError, match="both enabled"):
        complete({MICRO: 1, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, accelerator="nvidia")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  "train_batch_size": 80,\n}', "ds.json:2: not JSON: a comma before the closing bracket"),
        ('{"a": 1', "ds.json:1: not JSON"),
        ("[]", "ds.json:1: a DeepSpeed configuration is an object, not list"),
        ("", "ds.json:1: not JSON"),
    ],
)
def test_a_file_that_is_not_json_says_where(text: str, message: str) -> None:
    """Parse text that is no JSON object: ConfigError with file and line."""
    with pytest.raises(ConfigError) as caught:
        deepspeed_config.parse(text, "ds.json")
    assert caught.value.message.startswith(message)


def test_a_key_that_is_given_twice_is_refused() -> None:
    """Parse a key twice: ConfigError."""
    with pytest.raises(ConfigError, match=r"ds\.json: `stage` is given twice"):
        deepspeed_config.parse('{"zero_optimization": {"stage": 2, "stage": 3}}', "ds.json")


def test_sections_are_merged_and_the_later_wins() -> None:
    """Merge two configurations: sections by key, the second counts."""
    merged = deepspeed_config.merge(
        {"zero_optimization": {"stage": 2, "overlap_comm": True}, MICRO: 4}, {"zero_optimization": {"stage": 3}}
    )
    assert merged == {"zero_optimization": {"stage": 3, "overlap_comm": True}, MICRO: 4}


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("true", True), ("cpu", "cpu"), ("1e-5", 1e-5)])
def test_one_key_is_set_by_its_path(text: str, value: object) -> None:
    """Assign a key by its path: a new configuration with the value parsed, the old one unchanged."""
    before = {"zero_optimization": {"stage": 2}}
    assigned = deepspeed_config.assign(before, "zero_optimization.offload_optimizer.device", text)
    assert assigned == {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": value}}}
    assert before == {"zero_optimization": {"stage": 2}}
