"""Shapes of the OPT family without torch: published configurations, parameter counts, the stand-in of a rehearsal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from script_exit import InputError

Config = dict[str, Any]

CONFIGS = Path(__file__).resolve().parent / "configs"
UNPUBLISHED = ("opt-tiny",)
"""Models of which there are no weights to download."""
LORA_MODULES = ("q_proj", "v_proj")
LINEAR_LAYERS = {
    "decoder.layers.N.self_attn.q_proj": ("hidden_size", "hidden_size"),
    "decoder.layers.N.self_attn.k_proj": ("hidden_size", "hidden_size"),
    "decoder.layers.N.self_attn.v_proj": ("hidden_size", "hidden_size"),
    "decoder.layers.N.self_attn.out_proj": ("hidden_size", "hidden_size"),
    "decoder.layers.N.fc1": ("hidden_size", "ffn_dim"),
    "decoder.layers.N.fc2": ("ffn_dim", "hidden_size"),
}
"""Linear layers of one decoder layer, and the keys of their in_features and out_features."""


def names() -> list[str]:
    """Return the sorted names of the models with a configuration file here."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def load(name: str) -> Config:
    """Return a model's configuration as in Hugging Face's config.json. InputError if it is unknown."""
    if name not in names():
        raise InputError(f"no model {name!r}; there are {', '.join(names())}")
    config: Config = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return config


def random_weights(name: str, hub: Path) -> str:
    """Return why a model starts with random weights: it has no published ones, or they are not in the cache."""
    if name in UNPUBLISHED:
        return "random (this model has no published weights)"
    return f"random (facebook/{name} is not in the cache {hub})"


def linear_layers(config: Config) -> dict[str, tuple[int, int]]:
    """Return (in_features, out_features) of each linear layer of a decoder layer, by name."""
    return {name: (config[inputs], config[outputs]) for name, (inputs, outputs) in LINEAR_LAYERS.items()}


def adapted(name: str, modules: tuple[str, ...]) -> bool:
    """Return True if one of ``modules`` is part of the layer's dotted name."""
    return any(module in name for module in modules)


def parameters(config: Config) -> int:
    """Return the number of weights of a configuration, computed from its shape."""
    hidden, projected = config["hidden_size"], config["word_embed_proj_dim"]
    norm = 2 * hidden
    layer = 2 * norm + sum(inputs * outputs + outputs for inputs, outputs in linear_layers(config).values())
    embeddings = config["vocab_size"] * projected + (config["max_position_embeddings"] + 2) * hidden
    projections = 0 if projected == hidden else 2 * projected * hidden
    final_norm = norm if config["do_layer_norm_before"] else 0
    return embeddings + projections + config["num_hidden_layers"] * layer + final_norm


def lora_parameters(config: Config, dim: int, modules: tuple[str, ...] = LORA_MODULES) -> int:
    """Return the number of LoRA weights in all layers. InputError for a module that no layer contains."""
    layers = linear_layers(config)
    for module in modules:
        if not any(adapted(name, (module,)) for name in layers):
            raise InputError(f"no linear layer {module!r} in a decoder layer; there are {', '.join(layers)}")
    one = sum(dim * sum(sizes) for name, sizes in layers.items() if adapted(name, modules))
    return int(config["num_hidden_layers"] * one)


def shrink(config: Config) -> Config:
    """Return a tiny configuration of the same kind, with 2 layers of width 64."""
    hidden = 64
    projects = config["word_embed_proj_dim"] != config["hidden_size"]
    return config | {
        "vocab_size": 2048,
        "max_position_embeddings": 128,
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 4 * hidden,
        "word_embed_proj_dim": hidden // 2 if projects else hidden,
    }
