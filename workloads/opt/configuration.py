"""DeepSpeed's configuration: read, checked, completed; without torch."""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_file import read_config
from script_exit import InputError

DEFAULT = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}}
"""Default configuration, if no file is given."""
MICRO, ACCUMULATION, TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


@dataclass(frozen=True)
class Configuration:
    """Configuration of DeepSpeed, and the values in it that the scripts use."""

    content: dict[str, Any]
    micro_batch: int
    """Samples per rank and forward pass."""
    accumulation: int
    """Forward passes per step of the optimiser."""
    stage: int
    precision: str
    """``bf16``, ``fp16`` or ``fp32``."""
    hybrid_engine: bool
    """True to use DeepSpeed's engine for generating in training."""

    def at_stage(self, stage: int) -> dict[str, Any]:
        """Return a copy of DeepSpeed's configuration with another ZeRO stage."""
        content = deepcopy(self.content)
        content["zero_optimization"]["stage"] = stage
        return content


def read(path: Path | None, world: int) -> Configuration:
    """Read and complete DeepSpeed's configuration, the default without a path. InputError for contradictions."""
    content, where = (read_config(path), str(path)) if path else (deepcopy(DEFAULT), "the default configuration")
    if MICRO not in content:
        raise InputError(f"{where}: no {MICRO}")
    micro_batch = _count(content, MICRO, where)
    content.setdefault(ACCUMULATION, 1)
    accumulation = _count(content, ACCUMULATION, where)
    total = content.setdefault(TOTAL, micro_batch * accumulation * world)
    if total != micro_batch * accumulation * world:
        made = f"{MICRO} {micro_batch} x {ACCUMULATION} {accumulation} x {world} ranks"
        raise InputError(f"{where}: {TOTAL} is {total}, but {made} make {micro_batch * accumulation * world}")
    zero = content.setdefault("zero_optimization", {})
    stage = zero.setdefault("stage", 0)
    if stage not in range(4):
        raise InputError(f"{where}: zero_optimization.stage is {stage!r}, not 0, 1, 2 or 3")
    zero.setdefault("stage3_gather_16bit_weights_on_model_save", True)
    content.setdefault("steps_per_print", sys.maxsize)
    return Configuration(
        content=content,
        micro_batch=micro_batch,
        accumulation=accumulation,
        stage=stage,
        precision=_precision(content, where),
        # Taken out because DeepSpeed would build it for every model, frozen ones and critics included.
        hybrid_engine=bool(content.pop("hybrid_engine", {}).get("enabled", False)),
    )


def _count(content: dict[str, Any], key: str, where: str) -> int:
    """Return a positive whole number of the configuration. InputError otherwise."""
    value = content[key]
    if type(value) is not int or value < 1:
        raise InputError(f"{where}: {key} is {value!r}, not a whole number of at least 1")
    return value


def _precision(content: dict[str, Any], where: str) -> str:
    """Return ``bf16``, ``fp16`` or ``fp32`` as enabled. InputError if both are, or for other than booleans."""
    enabled = []
    for name in ("bf16", "fp16"):
        value = content.get(name, {}).get("enabled", False)
        if type(value) is not bool:
            raise InputError(f"{where}: {name}.enabled is {value!r}, not true or false")
        enabled += [name] * value
    if len(enabled) > 1:
        raise InputError(f"{where}: bf16 and fp16 are both enabled")
    return enabled[0] if enabled else "fp32"
