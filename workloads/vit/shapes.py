"""Shapes of vision transformers without torch, and their parameter counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A vision transformer (Dosovitskiy et al., 2020); sizes in pixels, the MLP is four times as wide as ``hidden``."""

    image: int
    patch: int
    hidden: int
    layers: int
    heads: int
    classes: int = 10

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2


MODELS = {
    "vit-b-16": Shape(image=224, patch=16, hidden=768, layers=12, heads=12),
    "vit-tiny": Shape(image=32, patch=4, hidden=64, layers=4, heads=4),
}


def parameters(shape: Shape) -> int:
    """Number of weights: patch projection, class token, positions, two norms, attention and MLP per layer, head."""
    hidden = shape.hidden
    embedding = (3 * shape.patch**2 + 1) * hidden + hidden + (shape.patches + 1) * hidden
    attention = (hidden + 1) * 3 * hidden + (hidden + 1) * hidden
    mlp = (hidden + 1) * 4 * hidden + (4 * hidden + 1) * hidden
    norm = 2 * hidden
    return embedding + shape.layers * (2 * norm + attention + mlp) + norm + (hidden + 1) * shape.classes
