"""The cheapest change of settings that makes a training fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from labctl.fit.training import Training

LORA_DIM = 8
"""Rank of the adapters that are suggested: the smallest that Hu et al. 2021 find enough, section 7.2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One setting to change: what to type, and what it costs."""

    set: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    changes: tuple[Change, ...]
    training: Training


def nearest(training: Training, fits: Callable[[Training], bool]) -> Advice | None:
    """The changes of least cost after which it fits; None where none does."""
    tried = sorted(_candidates(training), key=lambda candidate: candidate[0])
    found = next((changed for _, changed in tried if fits(changed)), None)
    return Advice(changes=tuple(_changes(training, found)), training=found) if found else None


def _candidates(training: Training) -> Iterator[tuple[float, Training]]:
    """Every combination of changes, with its cost in steps' time.

    Stage 3 sends half as much again (ZeRO, section 7), recomputation takes a third more time (Korthikanti et al.,
    table 2); offloading waits for the host; a smaller micro-batch uses the device less well; LoRA changes what is
    learnt and so comes last.
    """
    stages = range(training.stage, 4)
    checkpointing = sorted({training.gradient_checkpointing, True})
    micros = [training.micro_batch >> halving for halving in range(training.micro_batch.bit_length())]
    offloads = [
        (training.offload_optimizer, training.offload_parameters),
        (True, training.offload_parameters),
        (True, True),
    ]
    adapters = sorted({training.lora_dim, training.lora_dim or LORA_DIM})
    for stage, recompute, (halvings, micro), (optimizer, parameters), lora in product(
        stages, checkpointing, enumerate(micros), dict.fromkeys(offloads), adapters
    ):
        if (optimizer and not stage) or (parameters and stage < 3):
            continue
        cost = 0.02 * (stage - training.stage) + 0.5 * (stage == 3 != training.stage) + 0.1 * halvings
        cost += 0.33 * (recompute != training.gradient_checkpointing) + 1.0 * (optimizer != training.offload_optimizer)
        cost += 2.0 * (parameters != training.offload_parameters) + 10.0 * (lora != training.lora_dim)
        yield (
            cost,
            replace(
                training,
                stage=stage,
                gradient_checkpointing=recompute,
                micro_batch=micro,
                gradient_accumulation_steps=training.gradient_accumulation_steps * (training.micro_batch // micro),
                offload_optimizer=optimizer,
                offload_parameters=parameters,
                lora_dim=lora,
            ),
        )


def _changes(old: Training, new: Training) -> Iterator[Change]:
    if new.stage != old.stage:
        reason = "1.5 times the communication" if new.stage == 3 else "no extra communication"
        yield Change(set=f"deepspeed.zero_optimization.stage={new.stage}", reason=reason)
    if new.gradient_checkpointing != old.gradient_checkpointing:
        yield Change(set="gradient-checkpointing=on", reason="a third more time")
    if new.micro_batch != old.micro_batch:
        yield Change(set=f"deepspeed.train_micro_batch_size_per_gpu={new.micro_batch}", reason="shorter products")
        steps = f"deepspeed.gradient_accumulation_steps={new.gradient_accumulation_steps}"
        yield Change(set=steps, reason="keeps the batch as large as it was")
    for name in ("optimizer", "param"):
        attribute = "offload_parameters" if name == "param" else "offload_optimizer"
        if getattr(new, attribute) != getattr(old, attribute):
            key = f"deepspeed.zero_optimization.offload_{name}.device=cpu"
            yield Change(set=key, reason="the host's memory, and waiting for it")
    if new.lora_dim != old.lora_dim:
        yield Change(set=f"lora-dim={new.lora_dim}", reason="trains adapters, not the weights")
