"""A vision transformer (Dosovitskiy et al., 2020) of torchvision's shapes and initialisation."""

from __future__ import annotations

import math

import torch
from shapes import Shape
from torch import nn
from torch.nn import functional


class VisionTransformer(nn.Module):
    """Images (batch, 3, image, image) -> logits (batch, classes), read off a class token."""

    def __init__(self, shape: Shape) -> None:
        """Build the layers of a shape; the head starts at zero."""
        super().__init__()
        self.patches = nn.Conv2d(3, shape.hidden, kernel_size=shape.patch, stride=shape.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, shape.hidden))
        self.positions = nn.Parameter(torch.empty(1, shape.patches + 1, shape.hidden).normal_(std=0.02))
        self.blocks = nn.Sequential(*(Block(shape.hidden, shape.heads) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.hidden, eps=1e-6)
        self.head = nn.Linear(shape.hidden, shape.classes)
        nn.init.trunc_normal_(self.patches.weight, std=math.sqrt(1 / (3 * shape.patch**2)))
        for layer in (self.patches.bias, self.head.weight, self.head.bias):
            nn.init.zeros_(layer)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch of images."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x)[:, 0]))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around a residual: (batch, tokens, hidden) -> the same."""

    def __init__(self, hidden: int, heads: int) -> None:
        """Build a layer of this width and number of attention heads."""
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(hidden, eps=1e-6)
        self.attention_in = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.norm_2 = nn.LayerNorm(hidden, eps=1e-6)
        self.mlp_in = nn.Linear(hidden, 4 * hidden)
        self.mlp_out = nn.Linear(4 * hidden, hidden)
        for layer in (self.attention_in, self.attention_out, self.mlp_in, self.mlp_out):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.norm_2(x))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Return multi-head self-attention of ``x``."""
        batch, tokens, hidden = x.shape
        # (3, batch, heads, tokens, hidden / heads)
        query, key, value = self.attention_in(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value)
        return self.attention_out(attended.transpose(1, 2).reshape(batch, tokens, hidden))
