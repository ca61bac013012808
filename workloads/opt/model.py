"""An OPT model ready for DeepSpeed: built, under ZeRO-3 already partitioned, initialised or loaded, LoRA added."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from shapes import Config, InputError
from torch import nn
from torch.nn import functional
from transformers.initialization import no_init_weights
from transformers.models.opt.configuration_opt import OPTConfig
from transformers.models.opt.modeling_opt import OPTForCausalLM

LORA_SCALE = 2.0
"""alpha / dim; 2 is the common choice."""


def build(config: Config, ds_config: dict[str, Any], snapshot: Path | None, args: Namespace) -> OPTForCausalLM:
    """The model on this rank: whole, or under ZeRO-3 this rank's share of every parameter."""
    partitioned = ds_config["zero_optimization"]["stage"] == 3
    # zero.Init empties every module as soon as it is made, so weights are set afterwards; and outside of it, because
    # it changes the dtype of tensors that torch.load makes.
    with deepspeed.zero.Init(config_dict_or_path=ds_config, enabled=partitioned), no_init_weights():
        model = OPTForCausalLM(OPTConfig(**config, use_cache=False))
    model.tie_weights()
    if snapshot:
        load_weights(model, snapshot)
    else:
        initialise(model, config["init_std"])
    if args.lora_dim:
        add_lora(model, args.lora_dim, args.lora_modules)
    if args.gradient_checkpointing:
        # Reentrant: ZeRO-3 empties weights between forward pass and recomputation, an error to the other kind.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model


@torch.no_grad()
def initialise(model: nn.Module, std: float) -> None:
    """OPT's initialisation: weights normal with ``std``, biases 0, norms 1 and 0; of partitioned weights, by rank 0."""
    for module in model.modules():
        with deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.normal_(0.0, std)
            elif isinstance(module, nn.LayerNorm):
                module.weight.fill_(1.0)
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()


class LoRALinear(nn.Module):
    """A frozen linear layer and a trained update of low rank: W x + scale B A x (Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, dim: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(base.weight.new_empty(dim, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, dim))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        return self.base(x) + LORA_SCALE * functional.linear(functional.linear(x, self.lora_a), self.lora_b)


def add_lora(model: OPTForCausalLM, dim: int, modules: list[str]) -> None:
    """Freeze the model and adapt the named linear layers of every decoder layer."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in modules and isinstance(child, nn.Linear):
                setattr(parent, name, LoRALinear(child, dim))
    # Reentrant checkpointing gives no gradient to a block whose inputs need none, and the embeddings are frozen.
    model.enable_input_require_grads()


def find_snapshot(name: str) -> tuple[Path | None, str]:
    """The newest snapshot with weights of facebook/NAME in the Hugging Face cache, and a line that says what it is."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = hub / f"models--facebook--{name}" / "snapshots"
    found = [path for path in snapshots.glob("*") if weight_files(path)]
    if found:
        newest = max(found, key=lambda path: path.stat().st_mtime)
        return newest, str(newest)
    return None, f"random initialisation from configs/{name}.json (no snapshot of facebook/{name} under {hub})"


def weight_files(snapshot: Path) -> list[Path]:
    """Weight files of a snapshot, all shards; safetensors before pickles."""
    return sorted(snapshot.glob("model*.safetensors")) or sorted(snapshot.glob("pytorch_model*.bin"))


@torch.no_grad()
def load_weights(model: nn.Module, snapshot: Path) -> None:
    """Copy a snapshot into the model tensor by tensor, so that no rank ever holds all of a partitioned model."""
    parameters = dict(model.named_parameters())
    missing = set(parameters)
    for key, tensor in read_weights(snapshot):
        # Early OPT checkpoints are of OPTModel, without the head: the same names less the prefix.
        name = key if key in parameters else f"model.{key}"
        if name not in parameters:
            continue
        with deepspeed.zero.GatheredParameters([parameters[name]], modifier_rank=0):
            if parameters[name].shape != tensor.shape:
                raise InputError(
                    f"{snapshot}: {key} is {tuple(tensor.shape)}, configured {tuple(parameters[name].shape)}"
                )
            parameters[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise InputError(f"{snapshot} lacks {len(missing)} parameters, the first {min(missing)}")


def read_weights(snapshot: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a snapshot, read from the mapped files one at a time."""
    for file in weight_files(snapshot):
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(file, framework="pt") as tensors:
                yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118
        else:
            yield from torch.load(file, map_location="cpu", mmap=True, weights_only=True).items()
