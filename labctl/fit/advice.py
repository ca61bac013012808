"""Changes of settings, or else of hardware, after which a training fits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from labctl.fit.capacity import Capacity, Requirement, Unknown, fits, needs, unknown
from labctl.fit.training import Training

LORA_DIM = 8
"""Rank of the suggested LoRA adapters: the smallest that Hu et al. 2021, section 7.2, find sufficient."""
MOST_HOSTS = 4096
"""Hosts up to which a training is tried to fit."""


class Options(Struct, frozen=True, kw_only=True):
    """Settings that a workload takes by ``--set``; the others are advised in words."""

    deepspeed: bool = True
    """False if its configuration of DeepSpeed is not labctl's, as in a script of DeepSpeed-Chat."""
    cpu_optimizer: bool = True
    """True if it trains with DeepSpeedCPUAdam when the optimizer is offloaded: DeepSpeed refuses torch's AdamW."""
    arguments: frozenset[str] = frozenset({"gradient-checkpointing", "lora-dim"})
    """Names of its scripts' options."""


EVERY = Options()
"""Options of a workload that takes every setting, as workloads/opt does."""


class Change(Struct, frozen=True, kw_only=True):
    """A change in words, and its cost; ``set`` is the text of ``--set``, empty if the workload has no option for it."""

    set: str
    words: str
    reason: str


class FitAdvice(Struct, frozen=True, kw_only=True):
    """The cheapest changes after which a training fits, the memory that it requires then, and what decides it still."""

    changes: tuple[Change, ...]
    required: Requirement
    unknown: tuple[Unknown, ...]
    adapters: bool
    """True if it trains LoRA adapters then, and not the weights."""


class Least(Struct, frozen=True, kw_only=True):
    """The least hardware on which a training of the same weights fits with some settings; None if none suffices."""

    hosts: int | None
    """Hosts with as many devices, and as much memory, as now (nodes on a CPU)."""
    host: int | None
    """Bytes of memory of each host, with as many hosts and devices as now."""


def advise(training: Training, capacity: Capacity, options: Options = EVERY) -> FitAdvice | None:
    """Return the cheapest changes after which the training may fit; None if no changes suffice."""
    for _, changed in sorted(_candidates(training), key=lambda candidate: candidate[0]):
        if fits(changed, capacity) is not False:
            return FitAdvice(
                changes=tuple(_changes(training, changed, options)),
                required=needs(changed),
                unknown=unknown(changed, capacity),
                adapters=changed.lora_dim != training.lora_dim,
            )
    return None


def least(training: Training, capacity: Capacity) -> Least:
    """Return the fewest hosts, and the least memory per host, on which some settings fit; LoRA stays as it is."""
    candidates = [changed for _, changed in _candidates(training) if changed.lora_dim == training.lora_dim]
    unlimited = Capacity(device=capacity.device, host=None)
    on_devices = [changed for changed in candidates if fits(changed, unlimited) is not False]
    return Least(
        hosts=_fewest_hosts(training, capacity, candidates),
        host=min((needs(changed).host for changed in on_devices), default=None),
    )


def _fewest_hosts(training: Training, capacity: Capacity, candidates: list[Training]) -> int | None:
    """Bisect for the fewest hosts, more than now, on which a candidate fits; None if MOST_HOSTS are not enough."""

    def suffices(hosts: int) -> bool:
        """Return True if any candidate may fit on that many hosts."""
        ranks = hosts * training.slots
        return any(fits(replace(changed, ranks=ranks), capacity) is not False for changed in candidates)

    few, many = training.ranks // training.slots, MOST_HOSTS
    if not suffices(many):
        return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if suffices(middle) else (middle, many)
    return many


def _candidates(training: Training) -> Iterator[tuple[float, Training]]:
    """Yield every combination of changes with its cost, in times of a step; the cheapest is the fastest.

    What costs speed, from the least to the most:

    - ZeRO stages 1 and 2: nothing, as they send as much as plain data parallelism (Rajbhandari et al. 2020, ZeRO,
      section 7).
    - A smaller micro-batch with as many more accumulation steps: the same operations in smaller products. A tenth for
      each halving is an assumption, which tries three of them before the next change.
    - Gradient checkpointing: a second forward pass, which is a third of a step's operations (Chen et al. 2016, Training
      Deep Nets with Sublinear Memory Cost).
    - Stage 3: half as much again to send (ZeRO, section 7), half a step if the network decides its time.
    - The optimizer offloaded: gradients and weights pass the host's bus, and its cores compute Adam while the device
      waits (Ren et al. 2021, ZeRO-Offload).
    - Parameters offloaded as well: all weights pass the bus in every pass (Rajbhandari et al. 2021, ZeRO-Infinity).
    - LoRA comes last, as it changes what is trained.

    The documentation of transformers (DeepSpeed, "Select a ZeRO stage") orders them alike, except that it offloads the
    optimizer at stage 2 before it goes to stage 3, which is faster if the network is slower than the host's bus.
    """
    stages = range(training.stage, 4)
    checkpointing = sorted({training.gradient_checkpointing, True})
    micros = [training.micro_batch >> halving for halving in range(training.micro_batch.bit_length())]
    for stage, recompute, (halvings, micro), (optimizer, parameters), lora in product(
        stages, checkpointing, enumerate(micros), _offloads(training), _lora_dims(training)
    ):
        if (optimizer and not stage) or (parameters and stage < 3):
            continue
        cost = 0.02 * (stage - training.stage) + 0.5 * (stage == 3 != training.stage) + 0.1 * halvings
        cost += 0.33 * (recompute != training.gradient_checkpointing) + 1.0 * (optimizer != training.offload_optimizer)
        cost += 2.0 * (parameters != training.offload_parameters) + 10.0 * (lora != training.lora_dim)
        changed = replace(
            training,
            stage=stage,
            gradient_checkpointing=recompute,
            micro_batch=micro,
            gradient_accumulation_steps=training.gradient_accumulation_steps * (training.micro_batch // micro),
            offload_optimizer=optimizer,
            offload_parameters=parameters,
            lora_dim=lora,
        )
        yield cost, changed


def _offloads(training: Training) -> list[tuple[bool, bool]]:
    """Return pairs of booleans to try, (optimizer, parameters) offloaded: as now, and more unless on a CPU."""
    now = (training.offload_optimizer, training.offload_parameters)
    if training.accelerator == "cpu":
        return [now]
    return list(dict.fromkeys([now, (True, training.offload_parameters), (True, True)]))


def _lora_dims(training: Training) -> list[int]:
    """Return the LoRA ranks to try: as now and, if now 0 and the model's layers are known, LORA_DIM."""
    return sorted({training.lora_dim, training.lora_dim or (0 if training.model.counted else LORA_DIM)})


def _changes(old: Training, new: Training, options: Options) -> Iterator[Change]:
    """Yield a Change for each difference between the old training and the new one, with its cost."""

    def change(setting: str, words: str, reason: str, *, taken: bool = options.deepspeed) -> Change:
        """Build a Change; its ``set`` is empty unless the workload takes the setting."""
        return Change(set=setting if taken else "", words=words, reason=reason)

    if new.stage != old.stage:
        reason = "1.5 times the communication" if new.stage == 3 else "no extra communication"
        yield change(f"deepspeed.zero_optimization.stage={new.stage}", f"ZeRO stage {new.stage}", reason)
    if new.gradient_checkpointing != old.gradient_checkpointing:
        taken = "gradient-checkpointing" in options.arguments
        yield change("gradient-checkpointing=on", "gradient checkpointing", "a third more time", taken=taken)
    if new.micro_batch != old.micro_batch:
        micro, steps = new.micro_batch, new.gradient_accumulation_steps
        setting = f"deepspeed.train_micro_batch_size_per_gpu={micro}"
        yield change(setting, f"a micro-batch of {micro}", "smaller products")
        setting = f"deepspeed.gradient_accumulation_steps={steps}"
        yield change(setting, f"gradients accumulated over {steps} steps", "keeps the batch as large as it was")
    if new.offload_optimizer != old.offload_optimizer:
        offloaded = "the optimizer offloaded to the host" + ("" if options.cpu_optimizer else ", as DeepSpeedCPUAdam")
        setting = "deepspeed.zero_optimization.offload_optimizer.device=cpu"
        taken = options.deepspeed and options.cpu_optimizer
        yield change(setting, offloaded, "the device waits while the host computes the step", taken=taken)
    if new.offload_parameters != old.offload_parameters:
        setting = "deepspeed.zero_optimization.offload_param.device=cpu"
        yield change(setting, "the parameters offloaded to the host", "weights pass the host's bus in every pass")
    if new.lora_dim != old.lora_dim:
        taken = "lora-dim" in options.arguments
        adapters = f"LoRA adapters of rank {new.lora_dim}"
        yield change(f"lora-dim={new.lora_dim}", adapters, "trains adapters, not the weights", taken=taken)
