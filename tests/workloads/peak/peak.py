"""Train an OPT model of a given shape for two steps and print the peak memory of each phase.

Peak and present resident memory of the process (VmHWM and VmRSS of proc(5)) above what it held before the model was
built. A model too small to matter is trained first, so that what libraries load and keep on first use is held by then.
"""

# mypy: ignore-errors
import argparse
import json
import os
from pathlib import Path

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from transformers.initialization import no_init_weights
from transformers.models.opt.configuration_opt import OPTConfig
from transformers.models.opt.modeling_opt import OPTForCausalLM

RANK = int(os.environ["RANK"])
SMALLEST = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_dim": 64,
    "word_embed_proj_dim": 64,
    "num_hidden_layers": 1,
}


class Meter:
    """Peaks by phase, in bytes above the current memory."""

    def __init__(self) -> None:
        self.base, self.peak = resident("VmRSS"), 0
        self.reset()

    def reset(self) -> None:
        """Reset the peak to the current memory: 5 in clear_refs, proc(5)."""
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")

    def phase(self, name: str) -> None:
        """Print the peak since the last phase, and the current memory; keep the largest peak, and reset it."""
        peak, remaining = resident("VmHWM") - self.base, resident("VmRSS") - self.base
        self.peak = max(self.peak, peak)
        print(f"rank {RANK} {name}: peak {peak / 2**20:.0f} MiB, left {remaining / 2**20:.0f} MiB", flush=True)
        self.reset()


def main() -> None:
    """Train a small model to warm up, then the given one, and print the peak memory of this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--deepspeed_config", type=Path, required=True)
    parser.add_argument("--sequence-length", type=int, required=True)
    parser.add_argument("--gradient-checkpointing", nargs="?", const="on")
    parser.add_argument("--local_rank", type=int)
    args = parser.parse_args()
    config = json.loads(args.config.read_text(encoding="utf-8"))

    torch.set_num_threads(1)
    deepspeed.init_distributed()
    train(config | SMALLEST, args, Meter(), "warm-up ")
    print(f"rank {RANK} before: {resident('VmRSS') / 2**20:.0f} MiB")
    meter = Meter()
    train(config, args, meter)
    print(f"Peak memory: {meter.peak} bytes", flush=True)


def train(config: dict, args: argparse.Namespace, meter: Meter, label: str = "") -> None:
    """Train two steps, printing the peak memory of each phase under ``label``."""
    settings = json.loads(args.deepspeed_config.read_text(encoding="utf-8"))
    model = build(config, settings)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    meter.phase(f"{label}build")
    offloaded = settings["zero_optimization"].get("offload_optimizer", {}).get("device", "none") != "none"
    optimizer = (DeepSpeedCPUAdam if offloaded else torch.optim.AdamW)(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    meter.phase(f"{label}initialize")
    for _ in range(2 * engine.gradient_accumulation_steps()):
        shape = settings["train_micro_batch_size_per_gpu"], args.sequence_length
        batch = torch.randint(4, config["vocab_size"], shape)
        loss = engine(input_ids=batch, labels=batch).loss
        meter.phase(f"{label}forward")
        engine.backward(loss)
        meter.phase(f"{label}backward")
        engine.step()
        meter.phase(f"{label}step")


def build(config: dict, settings: dict) -> OPTForCausalLM:
    """Build the model with random weights; under ZeRO-3 this rank's share."""
    partitioned = settings["zero_optimization"]["stage"] == 3
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=partitioned), no_init_weights():
        model = OPTForCausalLM(OPTConfig(**config, use_cache=False))
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.normal_(0.0, 0.02)
    return model


def resident(name: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return next(int(fields[1]) * 1024 for fields in lines if fields[0] == f"{name}:")


main()
os._exit(0)
