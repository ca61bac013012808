"""LoRA fine-tuning on two nodes: the rehearsal, the user's own model and data, and refusals."""

from __future__ import annotations

import json

import pytest
from support.harness import Lab

pytestmark = pytest.mark.docker

# DeepSpeed's launcher takes more than twice as long to start ranks.
MPIRUN = ("--launcher", "mpirun")
MAKE_MODEL = """
import sys
sys.path[:0] = ["/workspace/workloads/lora-clm", "/workspace/workloads/common"]
import model
from transformers import LlamaForCausalLM
tokenizer = model.byte_tokenizer()
tokenizer.save_pretrained(sys.argv[1])
LlamaForCausalLM(model.random_shape(64, len(tokenizer))).save_pretrained(sys.argv[1])
"""


def test_the_rehearsal_trains_and_saves_adapters(lab: Lab) -> None:
    """A rehearsal on two ranks lowers the perplexity and saves LoRA adapters with the declared shape."""
    result = lab.call("run", "lora-clm", *MPIRUN, "--rehearse", "--json", limit=1200).expect(0).json
    assert (result["verdict"], result["world_size"]) == ("PASS", 2)
    assert result["metrics"]["perplexity"]["last"] < result["metrics"]["perplexity"]["first"]
    run = lab.path / "runs" / result["run_id"]
    adapters = json.loads((run / "adapters" / "adapter_config.json").read_text())
    assert (adapters["r"], adapters["lora_alpha"], adapters["lora_dropout"]) == (8, 16, 0.05)
    assert sorted(adapters["target_modules"]) == ["q_proj", "v_proj"]
    assert (run / "adapters" / "adapter_model.safetensors").stat().st_size > 1000
    assert "random weights" in (run / "output.log").read_text()


def test_a_model_and_instructions_of_ones_own_are_learnt_under_zero_3(lab: Lab) -> None:
    """A tiny model and Alpaca data in the cache are trained with ZeRO 3; all checks pass."""
    lab.inside("worker-0", "python", "-c", MAKE_MODEL, "/workspace/outputs/model")
    (lab.path / "runs/.outputs/model").rename(lab.path / "cache" / "model")
    records = [{"instruction": f"Add {n} and 1.", "input": "", "output": str(n + 1)} for n in range(60)]
    (lab.path / "cache" / "alpaca.json").write_text(json.dumps(records), encoding="utf-8")
    settings = {
        "model": "model",
        "data": "alpaca.json",
        "sequence-length": "64",
        "max-steps": "4",
        "learning-rate": "1e-2",
        "deepspeed.zero_optimization.stage": "3",
        "deepspeed.train_micro_batch_size_per_gpu": "4",
    }
    argv = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    result = lab.call("run", "lora-clm", *MPIRUN, *argv, "--json", limit=1200).expect(0).json
    assert [check["passed"] for check in result["checks"]] == [True, True]
    log = (lab.path / "runs" / result["run_id"] / "output.log").read_text()
    assert "model: /workspace/.cache/model" in log
    assert "data: /workspace/.cache/alpaca.json" in log


def test_without_a_model_nothing_is_launched(lab: Lab) -> None:
    """No model, or one without config.json: exit code 2 with the remedy, and no record of a run."""
    before = lab.run_ids()
    (lab.path / "cache" / "no-model").mkdir(exist_ok=True)
    answer = lab.call("run", "lora-clm", "--json").expect(2)
    assert "--set model=PATH" in answer.json["error"]["hint"]
    answer = lab.call("run", "lora-clm", "--json", "--set", "model=no-model").expect(2)
    assert "no config.json" in answer.json["error"]["message"]
    assert lab.run_ids() == before
