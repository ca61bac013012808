"""An OPT model ready for DeepSpeed: built, under ZeRO-3 already partitioned, and initialised or loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from script_exit import InputError
from shapes import Config, random_weights
from torch import nn
from transformers.initialization import no_init_weights
from transformers.models.opt.configuration_opt import OPTConfig
from transformers.models.opt.modeling_opt import OPTModel, OPTPreTrainedModel

HEAD = "value_head.weight"


class ValueModel(OPTPreTrainedModel):
    """OPT with one number per token instead of logits: a reward model, or PPO's critic."""

    def __init__(self, config: OPTConfig) -> None:
        super().__init__(config)
        self.model = OPTModel(config)
        self.value_head = nn.Linear(config.word_embed_proj_dim, 1, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embeddings."""
        return self.model.decoder.embed_tokens

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return a value for each token, (batch, length); each sees its own token and those before."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.value_head(hidden).squeeze(-1).float()


def build(
    kind: type[OPTPreTrainedModel], config: Config, ds_config: dict[str, Any], weights: Path | None, *, dropout: bool
) -> OPTPreTrainedModel:
    """Build a model, initialised randomly or from ``weights``, partitioned under ZeRO-3; dropout 0 unless asked."""
    partitioned = ds_config["zero_optimization"]["stage"] == 3
    rates = {} if dropout else {"dropout": 0.0, "attention_dropout": 0.0}
    # zero.Init empties every module as soon as it is made, so weights are set afterwards; and outside of it, because
    # it changes the dtype of tensors that torch.load makes.
    with deepspeed.zero.Init(config_dict_or_path=ds_config, enabled=partitioned), no_init_weights():
        model = kind(OPTConfig(**config | rates, use_cache=False))
    model.tie_weights()
    initialise(model, config["init_std"], only={HEAD} if weights else None)
    if weights:
        load_weights(model, weights)
    return model


@torch.no_grad()
def initialise(model: nn.Module, std: float, only: set[str] | None) -> None:
    """Initialise as OPT: weights normal, biases 0, norms 1; if ``only`` is given, only the weights it names."""
    for prefix, module in model.named_modules():
        if only is not None and f"{prefix}.weight" not in only:
            continue
        with deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.normal_(0.0, std)
            elif isinstance(module, nn.LayerNorm):
                module.weight.fill_(1.0)
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()


def find_snapshot(name: str) -> tuple[Path | None, str]:
    """Return the newest cached snapshot with weights of facebook/NAME, None if there is none, and a description.

    Also where Lambda's DeepSpeed-Chat scripts keep models: ``transformers``, beside the hub's own folder.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    hubs = (Path(os.environ.get("HF_HUB_CACHE") or home / "hub"), home / "transformers")
    snapshots = (path for hub in hubs for path in (hub / f"models--facebook--{name}" / "snapshots").glob("*"))
    if found := [path for path in snapshots if weight_files(path)]:
        newest = max(found, key=lambda path: path.stat().st_mtime)
        return newest, str(newest)
    return None, random_weights(name, hubs[0])


def choose_weights(name: str, given: Path | None, *, rehearse: bool) -> tuple[Path | None, str]:
    """Return the path of a model's weights, None for random ones, and a description. InputError if absent."""
    if rehearse:
        return None, "random (a rehearsal)"
    if given is None:
        return find_snapshot(name)
    if not weight_files(given):
        raise InputError(f"{given}: neither model*.safetensors nor pytorch_model*.bin")
    return given, str(given)


def weight_files(snapshot: Path) -> list[Path]:
    """Return a snapshot's weight files: safetensors, else PyTorch's; empty without any."""
    return sorted(snapshot.glob("model*.safetensors")) or sorted(snapshot.glob("pytorch_model*.bin"))


@torch.no_grad()
def load_weights(model: nn.Module, snapshot: Path) -> None:
    """Copy a snapshot's tensors to the model, skip unknown ones. InputError for a wrong shape or missing tensor."""
    parameters = dict(model.named_parameters())
    missing = set(parameters) - {HEAD}
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
    """Yield names and tensors of a snapshot's weight files, one at a time."""
    for file in weight_files(snapshot):
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(file, framework="pt") as tensors:
                yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118
        else:
            yield from torch.load(file, map_location="cpu", mmap=True, weights_only=True).items()
