"""Floating-point operations of a step, and what devices can do at most; without torch.

Per token a weight costs 2 operations forward, 2 to pass the gradient on, and 2 for its own gradient, which frozen
weights do not have (Kaplan et al., 2020: 6 x parameters). Attention costs 12 x layers x hidden x sequence on top, a
third of it forward (Chowdhery et al., 2022, appendix B). Recomputation for gradient checkpointing is not counted.
"""

from __future__ import annotations

import re

from shapes import Config, parameters

PEAK_TFLOPS = {
    "H100": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756,
    "H200": 989.4,
    "H200 NVL": 835.5,
    "A100": 312,
    "A10": 125,
    "A10G": 70,
    "L4": 121,
}
"""Dense bf16 (and fp16) TFLOP/s by words of the device's name, from NVIDIA's data sheets; plain names are SXM."""


def forward(config: Config, sequence: int, *, values: bool = False) -> float:
    """Return the operations per token of a forward pass; with ``values``, of a value model."""
    return 2 * _multiplied(config, values) + _attention(config, sequence)


def train(config: Config, sequence: int, adapters: int = 0, *, values: bool = False) -> float:
    """Return the operations per token of forward and backward pass; with adapters, only those are trained."""
    weights = _multiplied(config, values)
    weights = 4 * weights + 6 * adapters if adapters else 6 * weights
    return weights + 3 * _attention(config, sequence)


def peak(device_name: str) -> float | None:
    """Return a device's dense bf16 TFLOP/s by the words in its name; None if it is not listed."""
    words = set(re.split(r"[\s-]+", device_name))
    found = [name for name in PEAK_TFLOPS if words.issuperset(name.split())]
    return PEAK_TFLOPS[max(found, key=len)] if found else None


def _multiplied(config: Config, values: bool) -> int:
    """Return the number of weights that a token is multiplied with; a value model has no output embedding."""
    return parameters(config) - values * config["vocab_size"] * config["word_embed_proj_dim"]


def _attention(config: Config, sequence: int) -> float:
    return 4 * float(config["num_hidden_layers"] * config["hidden_size"] * sequence)
