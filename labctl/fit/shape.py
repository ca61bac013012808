"""A Hugging Face config.json -> what a decoder's shape says of its memory: weights, adapters, activations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labctl.errors import ConfigError

LAYER = "decoder.layers.N."


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder of the OPT family; ``projected`` is the width of the word embeddings.

    Of another model only ``counted``, the number of its parameters, is known: its activations are not counted.
    """

    name: str
    counted: int = 0
    hidden: int = 0
    layers: int = 0
    feed_forward: int = 0
    vocabulary: int = 0
    positions: int = 0
    projected: int = 0
    norm_before: bool = True
    relu: bool = True
    dropout: bool = False

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """Linear layers of one decoder layer: dotted name -> (inputs, outputs)."""
        attention = [f"{LAYER}self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")]
        perceptron = {f"{LAYER}fc1": (self.hidden, self.feed_forward), f"{LAYER}fc2": (self.feed_forward, self.hidden)}
        return dict.fromkeys(attention, (self.hidden, self.hidden)) | perceptron

    @property
    def parameters(self) -> int:
        """Zhang et al. 2022, OPT: tied embeddings, positions offset by 2, biases, two norms per layer."""
        if self.counted:
            return self.counted
        norm = 2 * self.hidden
        layer = 2 * norm + sum(inputs * outputs + outputs for inputs, outputs in self.linear.values())
        embeddings = self.vocabulary * self.projected + (self.positions + 2) * self.hidden
        projections = 0 if self.projected == self.hidden else 2 * self.projected * self.hidden
        return embeddings + projections + self.layers * layer + (norm if self.norm_before else 0)

    @property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max(self.vocabulary * self.projected, self.hidden * self.feed_forward)

    def adapters(self, rank: int, modules: tuple[str, ...]) -> int:
        """Hu et al. 2021, LoRA: rank x (inputs + outputs) per adapted linear layer.

        As in DeepSpeed-Chat, a layer is adapted when one of the words is in its dotted name. ConfigError for a word
        that is in none.
        """
        for module in modules:
            if not any(module in name for name in self.linear):
                known = ", ".join(self.linear)
                raise ConfigError(f"{self.name} has no linear layer `{module}` for LoRA", hint=f"it has {known}")
        adapted = [sizes for name, sizes in self.linear.items() if any(module in name for module in modules)]
        return self.layers * sum(rank * sum(sizes) for sizes in adapted)

    def layer_activations(self, tokens: int, width: int) -> int:
        """Bytes that one layer keeps for its backward pass; ``tokens`` is micro-batch x sequence, ``width`` 2 or 4.

        Korthikanti et al. 2022, section 4.1, sbh(34 + 5as/h): the inputs of both norms and of the three products of
        attention, Q, K, V and the attention's result, the input of the first layer of the perceptron and of the
        second, of its activation function too, and two masks of dropout. 5as/h is not kept: the attention that torch
        and transformers choose (scaled_dot_product_attention) computes it anew, as in the paper's section 5. ReLU
        keeps its result, which is the second layer's input, and no other.
        """
        kept = 8 * self.hidden + self.feed_forward * (1 if self.relu else 2)
        masks = 2 * self.hidden if self.dropout else 0
        return tokens * (width * kept + masks)

    def keys_and_values(self, tokens: int, width: int) -> int:
        """Bytes of what attention remembers of the tokens so far, of two tensors per layer."""
        return 2 * width * self.layers * self.hidden * tokens


def read(path: Path) -> Shape:
    """The shape that a config.json, or a directory with one, describes. ConfigError where it cannot be told."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if config["model_type"] != "opt":
            raise ConfigError(f"{file}: the memory of a model of type `{config['model_type']}` is not known; opt is")
        return Shape(
            name=path.stem,
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            feed_forward=config["ffn_dim"],
            vocabulary=config["vocab_size"],
            positions=config["max_position_embeddings"],
            projected=config["word_embed_proj_dim"],
            norm_before=config["do_layer_norm_before"],
            relu=config["activation_function"] == "relu",
            dropout=config["dropout"] > 0,
        )
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: is no config.json of a model: {error!r}") from error
