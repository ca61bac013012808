"""The LoRA workload without torch: texts, arguments, the check of target modules, declarations."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from unit.scripts.conftest import ImportScripts

LORA = Path(__file__).resolve().parents[3] / "workloads" / "lora-clm"
DECLARED: dict[str, Any] = yaml.safe_load((LORA / "workload.yml").read_text(encoding="utf-8"))
CONFIG = ["--deepspeed_config", "ds_config.json"]


@pytest.fixture(scope="module")
def lora(import_scripts: ImportScripts) -> SimpleNamespace:
    """Return the modules of lora-clm that need no torch."""
    return import_scripts("lora-clm", "arguments", "texts", "training_text", "deepspeed_file", "script_exit")


def texts(lora: SimpleNamespace, path: Path) -> list[str]:
    """Return the texts of the dataset at this path."""
    return list(lora.texts.load(path, None)[1])


def test_the_declared_parameters_are_those_of_the_published_job(lora: SimpleNamespace) -> None:
    """Parse the declared arguments: the published job's parameters and DeepSpeed configuration."""
    args = lora.arguments.parse([*CONFIG, *map(str, DECLARED["variants"]["lora-clm"]["arguments"])])
    assert (args.lora_rank, args.lora_alpha, args.lora_dropout) == (8, 16, 0.05)
    assert args.target_modules == ["q_proj", "v_proj"]
    assert (args.sequence_length, args.epochs, args.validation_percentage) == (512, 3, 4)
    assert (args.learning_rate, args.warmup_ratio, args.dataset) == (3e-4, 0.03, "tatsu-lab/alpaca")
    assert DECLARED["deepspeed"] == {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": "auto"},
    }


def test_a_rehearsal_needs_neither_model_nor_dataset(lora: SimpleNamespace) -> None:
    """Parse the rehearsal's arguments: a random model, no dataset, fewer than 10 steps."""
    declared = map(str, DECLARED["variants"]["lora-clm"]["arguments"])
    args = lora.arguments.parse([*CONFIG, *declared, *DECLARED["rehearse"]["arguments"]])
    lora.arguments.check(args)
    assert (args.model, args.dataset, args.random_model) == (None, None, True)
    assert args.max_steps < 10


def test_instruction_records_become_alpacas_prompts(lora: SimpleNamespace, tmp_path: Path) -> None:
    """Load instruction records: Alpaca's prompts with and without input."""
    path = tmp_path / "alpaca.json"
    records = [
        {"instruction": "Add them.", "input": "1 {and} 2", "output": "3"},
        {"instruction": "Say yes.", "input": "", "output": "yes"},
    ]
    path.write_text(json.dumps(records), encoding="utf-8")
    first, second = texts(lora, path)
    assert first.endswith("### Instruction:\nAdd them.\n\n### Input:\n1 {and} 2\n\n### Response:\n3")
    assert second.endswith("### Instruction:\nSay yes.\n\n### Response:\nyes")


def test_a_directory_is_read_in_order_and_other_files_are_passed_over(lora: SimpleNamespace, tmp_path: Path) -> None:
    """Load a folder: texts of .txt and .jsonl in order of names."""
    (tmp_path / "b.jsonl").write_text('{"text": "second"}\n\n{"text": "third"}\n', encoding="utf-8")
    (tmp_path / "a.txt").write_text("first\n", encoding="utf-8")
    (tmp_path / "c.png").write_bytes(b"\x89PNG")
    assert texts(lora, tmp_path) == ["first\n", "second", "third"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", '{"text": "one"}\n{"prompt": "two"}\n', r"a\.jsonl:2: expected a record .* it has prompt"),
        ("a.jsonl", '{"text": "one"\n', r"a\.jsonl:1: not JSON"),
        ("a.json", '{"text": "one"}', "expected a list of records, not one dict"),
        ("a.json", "[1]", "record 1: .* it is one int"),
        ("a.csv", "text\n", r"no text there; expected \.txt"),
    ],
)
def test_records_that_cannot_be_read_are_named(
    lora: SimpleNamespace, tmp_path: Path, name: str, content: str, reason: str
) -> None:
    """Load invalid records: InputError with file, line and reason."""
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(lora.script_exit.InputError, match=reason):
        texts(lora, tmp_path / name if name != "a.csv" else tmp_path)


def test_a_fetched_dataset_is_found_in_the_hubs_cache(
    lora: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ask for a fetched dataset: the snapshot's folder in the hub's cache, else None."""
    snapshot = tmp_path / "hub" / "datasets--tatsu-lab--alpaca" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert lora.training_text.fetched_dataset("tatsu-lab/alpaca") == str(snapshot)
    assert lora.training_text.fetched_dataset("tatsu-lab/other") is None


LAYERS = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "lm_head"]


@pytest.mark.parametrize("target", ["q_proj", "self_attn.v_proj", "lm_head"])
def test_target_modules_that_the_model_has_are_taken(lora: SimpleNamespace, target: str) -> None:
    """Check target modules that the model has: accepted."""
    lora.arguments.check_targets([target], LAYERS)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("q_projection", r"no layer `q_projection` .*; the nearest is `q_proj`, there are lm_head, q_proj, v_proj"),
        ("proj", "no layer `proj`"),
        ("xyz", "no layer `xyz` that takes adapters; there are"),
    ],
)
def test_target_modules_that_the_model_lacks_are_refused(lora: SimpleNamespace, target: str, reason: str) -> None:
    """Check target modules that it lacks: InputError with the nearest."""
    with pytest.raises(lora.script_exit.InputError, match=reason):
        lora.arguments.check_targets([target], LAYERS)


def check(lora: SimpleNamespace, *argv: str) -> None:
    """Parse these arguments and check them."""
    lora.arguments.check(lora.arguments.parse([*CONFIG, *argv]))


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "no model to fine-tune"),
        (["--random-model", "--lora-rank", "0"], "--lora-rank 0 is not at least 1"),
        (["--random-model", "--lora-dropout", "1"], "--lora-dropout 1 is not from 0 to below 1"),
        (["--random-model", "--validation-percentage", "0"], "nothing to measure the perplexity on"),
        (["--random-model", "--target-modules", ","], "names no layer"),
    ],
)
def test_impossible_arguments_are_refused_with_the_reason(lora: SimpleNamespace, argv: list[str], reason: str) -> None:
    """Check impossible arguments: InputError with the reason."""
    with pytest.raises(lora.script_exit.InputError, match=reason):
        check(lora, *argv)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([], "has no config.json"),
        (["config.json"], "there are none"),
        (["config.json", "pytorch_model.bin"], r"only pytorch_model\.bin, a pickle"),
        (["config.json", "model.safetensors"], None),
    ],
)
def test_only_a_model_with_safetensors_is_taken(
    lora: SimpleNamespace, tmp_path: Path, files: list[str], reason: str | None
) -> None:
    """Check a model folder: safetensors with config.json are accepted; others are an InputError with the reason."""
    for name in files:
        (tmp_path / name).touch()
    if reason is None:
        check(lora, "--model", str(tmp_path))
    else:
        with pytest.raises(lora.script_exit.InputError, match=reason):
            check(lora, "--model", str(tmp_path))
