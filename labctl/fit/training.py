"""The parameters of a training run that determine its memory: model shape, DeepSpeed's settings, arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from labctl.errors import ConfigError
from labctl.model import Workload
from labctl.workloads import deepspeed_config
from labctl.workloads.schema import TASKS

LAYER = "decoder.layers.N."


class DecoderConfig(Struct, frozen=True, kw_only=True):
    """The shape of a decoder of the OPT family; ``projected`` is the width of the word embeddings.

    Of other models only ``counted``, the number of parameters, is set: their activations are not counted.
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
        """Linear layers of a decoder layer by dotted name: (inputs, outputs)."""
        attention = [f"{LAYER}self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")]
        perceptron = {f"{LAYER}fc1": (self.hidden, self.feed_forward), f"{LAYER}fc2": (self.feed_forward, self.hidden)}
        return dict.fromkeys(attention, (self.hidden, self.hidden)) | perceptron

    @property
    def parameters(self) -> int:
        """Number of parameters: ``counted`` if set, else computed from the shape.

        Zhang et al. 2022, OPT: tied embeddings, positions offset by 2, biases, two norms per layer.
        """
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
        """Return the number of LoRA parameters: rank x (inputs + outputs) per layer named. ConfigError if none is.

        Hu et al. 2021, LoRA. As in DeepSpeed-Chat, a layer is adapted if its dotted name contains one of ``modules``.
        ConfigError for a module that no layer contains.
        """
        for module in modules:
            if not any(module in name for name in self.linear):
                layers = ", ".join(self.linear)
                raise ConfigError(f"{self.name} has no linear layer `{module}` for LoRA", hint=f"it has {layers}")
        adapted = (sizes for name, sizes in self.linear.items() if _names_any(name, modules))
        return self.layers * rank * sum(map(sum, adapted))

    def layer_activations(self, tokens: int, width: int) -> int:
        """Return the bytes that a layer keeps for its backward pass, at ``width`` bytes per value.

        ``tokens`` is micro-batch x sequence, ``width`` 2 or 4. Korthikanti et al. 2022, section 4.1, sbh(34 + 5as/h):
        the inputs of both norms, Q, K, V and the result of attention, the inputs of both layers of the perceptron and
        of its activation function, and two dropout masks. 5as/h is not kept: the attention that torch and transformers
        choose (scaled_dot_product_attention) recomputes it, as in the paper's section 5. ReLU keeps its result, which
        is the second layer's input, and nothing else.
        """
        kept = 8 * self.hidden + self.feed_forward * (1 if self.relu else 2)
        masks = 2 * self.hidden if self.dropout else 0
        return tokens * (width * kept + masks)

    def keys_and_values(self, tokens: int, width: int) -> int:
        """Return the bytes of attention's keys and values in all layers, at ``width`` bytes per value."""
        return 2 * width * self.layers * self.hidden * tokens


def _names_any(layer: str, modules: tuple[str, ...]) -> bool:
    """Return True if the layer's name contains one of ``modules``."""
    return any(module in layer for module in modules)


def read(path: Path) -> DecoderConfig:
    """Read a model's shape from a config.json, or a directory with it. ConfigError if it is invalid or not OPT's."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if config["model_type"] != "opt":
            raise ConfigError(f"{file}: the memory of a model of type `{config['model_type']}` is not known; opt is")
        return DecoderConfig(
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
        raise ConfigError(f"{file}: is not a model's config.json: {error!r}") from error


# Defaults in elements, as in deepspeed/runtime/zero/config.py.
REDUCE_BUCKET, MAX_LIVE, SUB_GROUP = 500_000_000, 1_000_000_000, 1_000_000_000
LORA_MODULES = ("q_proj", "v_proj")
ALIASES = {"actor_lora_dim": "lora_dim"}


class Model(Struct, frozen=True, kw_only=True):
    """A trained model: its parameters, how many of them are trained, and its ZeRO stage."""

    shape: DecoderConfig
    parameters: int
    trained: int
    stage: int
    asked: int = 0
    """Parameters of its frozen counterpart in RLHF: the actor's reference, the critic's reward model."""
    speaks: bool = True
    """True if it ends in logits; reward models and critics end in a number per token."""


class Training(Struct, frozen=True, kw_only=True):
    """A training run on ``ranks`` devices; ``slots`` of them share a host's memory."""

    model: DecoderConfig
    critic: DecoderConfig | None = None
    task: str = "sft"
    """``sft``, ``reward``, or ``rlhf``, which has a critic."""
    accelerator: str
    ranks: int
    slots: int
    stage: int = 0
    critic_stage: int | None = None
    """ZeRO stage of critic and reward model; None: the actor's."""
    mixed_precision: bool = True
    """True for 2-byte weights (bf16, fp16) with a master copy in fp32; False for fp32 only."""
    micro_batch: int = 1
    gradient_accumulation_steps: int = 1
    sequence_length: int
    answer_length: int = 0
    """Tokens of a sequence that RLHF's actor generates."""
    gradient_checkpointing: bool = False
    lora_dim: int = 0
    lora_modules: tuple[str, ...] = LORA_MODULES
    offload_optimizer: bool = False
    """Only at stages 1 to 3."""
    offload_parameters: bool = False
    """Only at stage 3."""
    pin_optimizer: bool = True
    """True if the buffers of an offloaded optimizer are page-locked, as by default."""
    pin_parameters: bool = True
    """True if offloaded parameters are page-locked when they are built, as by default."""
    fused_optimizer: bool = False
    """True for DeepSpeed's optimizer, which needs no temporary tensors; False for torch's AdamW."""
    overlap: bool = False
    reduce_bucket: int = REDUCE_BUCKET
    max_live: int = MAX_LIVE
    sub_group: int = SUB_GROUP

    @property
    def width(self) -> int:
        """Bytes of a weight."""
        return 2 if self.mixed_precision else 4

    @property
    def tokens(self) -> int:
        """Tokens of a forward pass; a reward model processes a chosen and a rejected answer of each sample."""
        return self.micro_batch * self.sequence_length * (2 if self.task == "reward" else 1)

    @property
    def models(self) -> tuple[Model, ...]:
        """The trained models; the actor is the first."""
        first = self._model(self.model, self.stage, self.lora_dim, speaks=self.task != "reward")
        if not self.critic:
            return (first,)
        stage = self.stage if self.critic_stage is None else self.critic_stage
        return first, self._model(self.critic, stage, 0, speaks=False)

    def _model(self, shape: DecoderConfig, stage: int, lora_dim: int, *, speaks: bool) -> Model:
        """Build a trained model; without logits (``speaks``) it ends in a head of a number per token."""
        head = 0 if speaks else shape.hidden
        adapters = shape.adapters(lora_dim, self.lora_modules) if lora_dim else 0
        total = shape.parameters + head + adapters
        return Model(
            shape=shape,
            parameters=total,
            trained=adapters + head if lora_dim else total,
            stage=stage,
            asked=shape.parameters + head if self.critic else 0,
            speaks=speaks,
        )


def of(workload: Workload, accelerator: str, slots: int, nodes: int) -> Training:
    """Build the training that a workload's memory and deepspeed sections describe. ConfigError if it is unknown."""
    memory, config = workload.memory, workload.deepspeed
    if memory is None or config is None:
        missing = "memory" if memory is None else "deepspeed"
        raise ConfigError(
            f"{workload.name}: its memory is unknown: {workload.declared} declares no `{missing}` section",
            hint="write `memory: {model: config.json, sequence_length: 512}` beside `deepspeed: {...}`",
        )
    given = {**{name: list(values) for name, values in memory.defaults}, **arguments(workload.arguments)}
    counted = _whole(workload, given, "parameters")
    model = DecoderConfig(name=workload.name, counted=counted) if counted else _shape(workload, memory.model, given)
    if model is None:
        raise ConfigError(f"{workload.declared}: `memory.model` {memory.model} names an argument that is not given")
    task = _filled(memory.task, given) or TASKS[0]
    if task not in TASKS:
        hint = f"known: {', '.join(TASKS)}"
        raise ConfigError(f"{workload.name}: the memory of task `{task}` is not known", hint=hint)
    sequence, answer = (0, 0) if counted else _lengths(workload, task, given)
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    batch = deepspeed_config.batch_sizes(config, slots * nodes, workload.declared)
    return Training(
        model=model,
        critic=(_shape(workload, memory.critic, given) or model) if task == "rlhf" else None,
        task=task,
        accelerator=accelerator,
        ranks=slots * nodes,
        slots=slots,
        stage=stage,
        critic_stage=_whole(workload, given, "critic_zero_stage") if given.get("critic_zero_stage") else None,
        mixed_precision=any(config.get(name, {}).get("enabled", False) for name in ("bf16", "fp16")),
        micro_batch=batch[deepspeed_config.MICRO],
        gradient_accumulation_steps=batch[deepspeed_config.STEPS],
        sequence_length=sequence,
        answer_length=answer,
        gradient_checkpointing=_is_on(given.get("gradient_checkpointing", ["no"])),
        lora_dim=_whole(workload, given, "lora_dim"),
        lora_modules=tuple(given.get("lora_modules", LORA_MODULES)),
        offload_optimizer=stage > 0 and _offloaded(zero, "offload_optimizer"),
        offload_parameters=stage == 3 and _offloaded(zero, "offload_param"),
        pin_optimizer=_pinned(zero, "offload_optimizer"),
        pin_parameters=_pinned(zero, "offload_param"),
        fused_optimizer="optimizer" in config,
        overlap=bool(zero.get("overlap_comm", False)),
        reduce_bucket=int(zero.get("reduce_bucket_size", REDUCE_BUCKET)),
        max_live=int(zero.get("stage3_max_live_parameters", MAX_LIVE)),
        sub_group=max(1, int(zero.get("sub_group_size", SUB_GROUP))),
    )


def _is_on(values: list[str]) -> bool:
    """Tell if an option is on: it is given, alone or with any value but a no."""
    return {"false", "off", "no", "0"}.isdisjoint(value.lower() for value in values)


def arguments(argv: tuple[str, ...]) -> dict[str, list[str]]:
    """Parse ``--lora-modules q_proj v_proj`` into ``lora_modules: [q_proj, v_proj]``; the last occurrence counts."""
    options: dict[str, list[str]] = {}
    values: list[str] = []
    for word in argv:
        if word.startswith("--"):
            option, equals, value = word.removeprefix("--").partition("=")
            name = option.replace("-", "_")
            options[ALIASES.get(name, name)] = values = [value] if equals else []
        else:
            values.append(word)
    return options


def _shape(workload: Workload, declared: str | None, given: Mapping[str, list[str]]) -> DecoderConfig | None:
    """Read a model's shape from the declared path, ``{name}`` filled from ``--name``; None if either is missing."""
    path = _filled(declared or "", given)
    return read(workload.directory / path) if path else None


def _lengths(workload: Workload, task: str, given: Mapping[str, list[str]]) -> tuple[int, int]:
    """Return the tokens of a sequence, and how many of them RLHF generates. ConfigError if a length is not given."""
    names = ("max_prompt_length", "max_answer_length") if task == "rlhf" else ("sequence_length",)
    lengths = [_whole(workload, given, name) for name in names]
    if not all(lengths):
        missing = [name.replace("_", " ") for name in names if not _whole(workload, given, name)]
        raise ConfigError(f"{workload.declared}: neither `memory` nor the arguments give {' and '.join(missing)}")
    return sum(lengths), lengths[-1] if task == "rlhf" else 0


def _filled(text: str, given: Mapping[str, list[str]]) -> str:
    """Return the text with ``{name}`` replaced by the argument ``--name``; empty if that is not given."""
    try:
        return text.format_map({name: values[-1] for name, values in given.items() if values})
    except (KeyError, ValueError, IndexError):
        return ""


def _whole(workload: Workload, given: Mapping[str, list[str]], name: str) -> int:
    """Return an argument as a whole number; 0 if it is not given. ConfigError for other text."""
    values = given.get(name)
    if not values:
        return 0
    try:
        return int(values[-1])
    except ValueError:
        option = name.replace("_", "-")
        raise ConfigError(f"{workload.name}: --{option} {values[-1]} is not a whole number") from None


def _offloaded(zero: Mapping[str, Any], key: str) -> bool:
    """Return True if a section of ZeRO's configuration names a device other than ``none``."""
    return str((zero.get(key) or {}).get("device", "none")) != "none"


def _pinned(zero: Mapping[str, Any], key: str) -> bool:
    """Tell if what a section of ZeRO's configuration offloads is page-locked: yes by default, as in DeepSpeed."""
    return bool((zero.get(key) or {}).get("pin_memory", True))
