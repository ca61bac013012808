"""Low-rank adapters (Hu et al., 2021) on the linear layers of a model's decoder layers."""

from __future__ import annotations

import math

import torch
from shapes import adapted
from torch import nn
from torch.nn import functional
from transformers.models.opt.modeling_opt import OPTPreTrainedModel

SCALE = 2.0
"""alpha / dim; 2 is the common choice."""


class LoRALinear(nn.Module):
    """A frozen linear layer and a trained update of low rank: W x + scale B A x."""

    def __init__(self, base: nn.Linear, dim: int) -> None:
        """Wrap a linear layer; its update of rank ``dim`` is zero at first."""
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(base.weight.new_empty(dim, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, dim))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return W x + SCALE B A x."""
        return self.base(x) + SCALE * functional.linear(functional.linear(x, self.lora_a), self.lora_b)


def add_lora(model: OPTPreTrainedModel, dim: int, modules: tuple[str, ...]) -> None:
    """Freeze the model; replace each decoder layer's linear layers named by ``modules`` with LoRALinear."""
    model.requires_grad_(False)
    layers = dict(model.model.named_modules())
    for name, layer in layers.items():
        if name.startswith("decoder.layers.") and isinstance(layer, nn.Linear) and adapted(name, modules):
            parent, _, child = name.rpartition(".")
            setattr(layers[parent], child, LoRALinear(layer, dim))
    # Reentrant checkpointing gives no gradient to a block whose inputs need none, and the embeddings are frozen.
    model.enable_input_require_grads()
