"""The memory of a training run by component: bytes in each phase of a step, with formula and source.

The states are as in Rajbhandari et al. 2020, ZeRO, sections 3 and 5. Further memory of DeepSpeed 0.19 and torch's AdamW
(buckets, copies, temporary tensors) is taken from their source, which each line names.

DeepSpeed's own estimators (estimate_zero2_model_states_mem_needs of zero/stage_1_and_2.py, estimate_zero3_... of
zero/stage3.py; https://deepspeed.readthedocs.io/en/latest/memory.html) count states alone: at stage 3 18 bytes per
parameter, divided among the ranks, and 4 of the largest layer; of an offloaded optimizer 16 on the host, of offloaded
parameters as well 18, which they multiply by 1.5. The lines below replace that factor: 16-bit gradients (2 bytes) and
pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from labctl.fit.training import Model, Training

PHASES = ("build", "generate", "forward", "backward", "step")
"""Phases of a step; only RLHF generates answers, before it learns from them."""
Location = Literal["device", "host"]

ZERO = "Rajbhandari et al. 2020 (ZeRO), section 3.1 and, for the division among ranks, section 5"
STAGES = ("deepspeed/runtime/zero/stage_1_and_2.py", "deepspeed/runtime/zero/stage3.py")
INIT = "deepspeed/runtime/zero/partition_parameters.py, Init"
REFERENCE = "DeepSpeed-Chat: ZeRO-3 or none"

SYMBOLS = """\
P parameters, T those trained, F those of frozen models, L elements of the largest tensor,
w bytes of a weight, N ranks, s sequence length, a answer length, b sequences of a forward pass,
l layers, h hidden size, f width of the perceptron, v vocabulary;
pinned: each buffer rounded up to a power of two (ATen/core/CachingHostAllocator.h), unless pin_memory is false"""


class MemoryItem(Struct, frozen=True, kw_only=True):
    """Bytes per rank of a component, in each phase."""

    component: str
    formula: str
    source: str
    build: int = 0
    generate: int = 0
    forward: int = 0
    backward: int = 0
    step: int = 0
    location: Location = "device"

    def during(self, phase: str) -> int:
        """Return the item's bytes in a phase."""
        return int(getattr(self, phase))


def peak(parts: tuple[MemoryItem, ...], *places: Location) -> tuple[int, str]:
    """Return the bytes per rank in these locations in the phase with the highest sum, and that phase."""
    counted = [line for line in parts if line.location in places]
    return max((_total(counted, phase), phase) for phase in PHASES)


def _total(parts: Iterable[MemoryItem], phase: str) -> int:
    """Return the bytes of all items in a phase."""
    return sum(line.during(phase) for line in parts)


def summed(parts: Iterable[MemoryItem]) -> tuple[MemoryItem, ...]:
    """Merge items of the same component, formula and location; add up their bytes in each phase."""
    merged: dict[tuple[str, str, Location], MemoryItem] = {}
    for line in parts:
        key = line.component, line.formula, line.location
        before = merged.get(key)
        totals: dict[str, Any] = (
            {phase: before.during(phase) + line.during(phase) for phase in PHASES} if before else {}
        )
        merged[key] = replace(before or line, **totals)
    return tuple(merged.values())


def always(component: str, formula: str, source: str, size: int, location: Location = "device") -> MemoryItem:
    """Build an item that takes ``size`` bytes in the forward pass, backward pass and step."""
    return MemoryItem(
        component=component, formula=formula, source=source, forward=size, backward=size, step=size, location=location
    )


# --- counts --------------------------------------------------------------------------------------------------


def share(training: Training, model: Model, size: int, stage: int) -> int:
    """Return bytes per rank of ``size`` bytes: divided among ranks if the model's ZeRO stage is ``stage`` or more."""
    return -(-size // training.ranks) if model.stage >= stage else size


def largest(model: Model) -> int:
    """Return the elements of the model's largest tensor, at most those that are trained."""
    return min(model.shape.largest, model.trained)


def stepped(training: Training, model: Model) -> tuple[int, str]:
    """Return the elements that ZeRO's optimizer updates at once, and their formula; in stage 3 a group of the share."""
    elements = share(training, model, model.trained, 1)
    if model.stage == 3:
        return min(elements, training.sub_group), "min(T / N, sub_group_size)"
    return elements, "T / N"


def bucket(training: Training, model: Model) -> tuple[int, str]:
    """Return the bytes of a bucket of gradients and their formula; on a CPU at most those that are written."""
    if training.accelerator == "cpu":
        return training.width * min(model.trained, training.reduce_bucket), "w min(T, reduce_bucket_size)"
    return training.width * training.reduce_bucket, "w reduce_bucket_size"


def pinned(training: Training, size: int, *, locked: bool = True) -> int:
    """Return the bytes of a host buffer, which torch rounds up to a power of two if it is page-locked.

    ATen/core/CachingHostAllocator.h, allocate, of torch 2.13. On a CPU DeepSpeed locks nothing: cpu_accelerator.py.
    """
    return 1 << (size - 1).bit_length() if size and locked and training.accelerator != "cpu" else size


def held_lines(training: Training, model: Model) -> tuple[MemoryItem, ...]:
    """Return the memory that a model and its optimizer keep between steps."""
    buckets = _buckets(training, model) if model.stage == 3 else ()
    return (*_weights(training, model), *_optimiser(training, model), *buckets)


def _weights(training: Training, model: Model) -> tuple[MemoryItem, ...]:
    """Return the weights of the trained model, and of RLHF's frozen models, and those while the model is built."""
    width, sharded = training.width, model.stage == 3
    if sharded and training.offload_parameters:
        return _offloaded_weights(training, model)
    slash = " / N" if sharded else ""
    states, asked = (share(training, model, width * count, 3) for count in (model.parameters, model.asked))
    return (
        MemoryItem(
            component="weights while the model is built",
            formula="w (P + F) / N + 4 L" if sharded else "4 (P + F): in fp32 until DeepSpeed converts them",
            source=INIT if sharded else "torch: fp32 by default",
            build=states + asked + 4 * model.shape.largest if sharded else 4 * (model.parameters + model.asked),
            location="device" if training.accelerator == "cpu" or sharded else "host",
        ),
        always("weights", f"w P{slash}", ZERO, states),
        always("weights of reference and reward", f"w F{slash}", REFERENCE, asked),
    )  # fmt: skip


def _offloaded_weights(training: Training, model: Model) -> tuple[MemoryItem, ...]:
    """Return the weights of stage 3 that lie on the host, and the tensor that is built on the device.

    The trained ones are moved to a single pinned buffer. torch keeps the pinned memory in which they were built.
    """
    width = training.width
    states, trained, asked = (
        share(training, model, width * count, 3) for count in (model.parameters, model.trained, model.asked)
    )
    kept = trained if training.pin_parameters and training.accelerator != "cpu" else 0
    on_host = states - trained + pinned(training, trained)
    buffer = f"{STAGES[1]}, _create_param_groups_fp16_flat_cpu_memory"
    built = always("weights as they were built", "w (P + F) / N, then w T / N", INIT, kept, "host")
    return (
        MemoryItem(component="tensor that is built", formula="4 L", source=INIT, build=4 * model.shape.largest),
        replace(built, build=states + asked),
        always("weights", "w (P - T) / N, pinned w T / N", buffer, on_host, "host"),
        always("weights of reference and reward", "w F / N", REFERENCE, asked, "host"),
    )


def _optimiser(training: Training, model: Model) -> tuple[MemoryItem, ...]:
    """Return the optimizer's master weights and Adam's moments; if offloaded, on the host with their buffers."""
    trained, stage, slash = model.trained, model.stage, " / N" if model.stage else ""
    if training.offload_optimizer and stage:
        return _offloaded_optimiser(training, model)
    # ZeRO clones its share of the weights even if they are in fp32 already.
    master = share(training, model, 4 * trained, 1) if training.mixed_precision or stage else 0
    return (
        always("master weights", f"4 T{slash}", f"{ZERO}; {STAGES[stage == 3]}" if stage else ZERO, master),
        always("Adam's two moments", f"8 T{slash}", ZERO, share(training, model, 8 * trained, 1)),
    )


def _offloaded_optimiser(training: Training, model: Model) -> tuple[MemoryItem, ...]:
    """Return the memory of an offloaded optimizer: on the host, and in stages 1 and 2 a buffer on the device."""
    master = share(training, model, 4 * model.trained, 1)
    moments = always("Adam's two moments", "8 T / N", ZERO, share(training, model, 8 * model.trained, 1), "host")
    origin = f"{STAGES[model.stage == 3]}, initialize_optimizer_states"
    if model.stage == 3:
        groups = _pinned_groups(training, master)
        return (
            always("master weights", "4 T / N", f"{ZERO}; {STAGES[1]}", master, "host"),
            moments,
            always("offloaded gradients", "4 T / N, pinned by sub_group_size", origin, groups, "host"),
        )
    locked = pinned(training, master, locked=training.pin_optimizer)
    return (
        always("master weights", "4 T / N, pinned", f"{ZERO}; {STAGES[0]}", locked, "host"),
        moments,
        always("offloaded gradients", "4 T / N, pinned", origin, locked, "host"),
        *_transfer_buffers(training, model),
    )


def _pinned_groups(training: Training, size: int) -> int:
    """Return the bytes that ``size`` bytes take as fp32 tensors of ``sub_group_size`` elements, pinned one by one."""
    groups, rest = divmod(size, 4 * training.sub_group)
    group, last = (pinned(training, part, locked=training.pin_optimizer) for part in (4 * training.sub_group, rest))
    return groups * group + last


def _transfer_buffers(training: Training, model: Model) -> tuple[MemoryItem, ...]:
    """Return the buffers of stages 1 and 2 through which gradients go to the host, and weights to the device."""
    most = training.width * largest(model)
    updated = share(training, model, training.width * model.trained, 1)
    weights, gradient = (pinned(training, part, locked=training.pin_optimizer) for part in (updated, most))
    names = f"{STAGES[0]}, param_buffer_of_bit16_for_cpu_offload_groups, temp_grad_buffer_for_cpu_offload"
    return (
        always("buffers on the way to the device", "w T / N and w L, pinned", names, weights + gradient, "host"),
        always("buffer on the way to the host", "w L", f"{STAGES[0]}, temp_grad_buffer_for_gpu_offload", most),
    )


def _buckets(training: Training, model: Model) -> tuple[MemoryItem, ...]:
    """Return the bucket and the rank's share of the gradients, which stage 3 keeps between steps."""
    rank_share = share(training, model, training.width * model.trained, 1)
    own, source = "gradients of this rank's share", f"{ZERO}; {STAGES[1]}"
    on_host = pinned(training, rank_share, locked=training.pin_optimizer)
    size, formula = bucket(training, model)
    return (
        always(own, "w T / N, pinned", source, on_host, "host")
        if training.offload_optimizer
        else always(own, "w T / N", source, rank_share),
        always("bucket of gradients", formula, f"{STAGES[1]}, _setup_for_real_optimizer", size),
    )


PROCESS = 435 * 2**20
"""Bytes of Python, torch, DeepSpeed and transformers in a CPU rank without a model: docs/dev/figures.md."""
ALLREDUCE = 500_000_000
"""MEMORY_OPT_ALLREDUCE_SIZE of deepspeed/runtime/engine.py, in elements."""
RECOMPUTE = "Korthikanti et al. 2022 (Reducing Activation Recomputation), section 4.1"


def lines(training: Training) -> tuple[MemoryItem, ...]:
    """Return the memory components not zero in some phase; of models trained in turn, those of the highest peak.

    RLHF trains its models in turn: both stay allocated, and the model that needs more memory is counted as active.
    """
    process = PROCESS if training.accelerator == "cpu" else 0
    held = (
        replace(always("Python, torch, DeepSpeed", "constant", "measured, figures.md", process), build=process),
        *summed(line for model in training.models for line in held_lines(training, model)),
    )
    if training.task == "rlhf":
        held = (*(replace(line, generate=line.step) for line in held), *_generating(training, training.models[0]))
    each = [(*held, *_working(training, model)) for model in training.models]
    highest = max(each, key=lambda parts: peak(parts, "device", "host"))
    return tuple(line for line in highest if any(map(line.during, PHASES)))


def _generating(training: Training, actor: Model) -> tuple[MemoryItem, ...]:
    """Return RLHF's memory while the actor generates: weights gathered in stage 3, and keys and values or logits."""
    logits, formula = _logits(training)
    written = actor.shape.keys_and_values(training.tokens, training.width)
    return (
        MemoryItem(
            component="actor gathered to write answers", formula="w P of the actor",
            source="workloads/opt/rlhf.py: GatheredParameters around all of it, as DeepSpeed-Chat's hybrid engine",
            generate=training.width * actor.parameters if actor.stage == 3 else 0,
        ),
        MemoryItem(
            component="keys and values of the answers, or logits", formula=f"max(2 w l h s b, {formula})",
            source="transformers/cache_utils.py, DynamicCache; workloads/opt/ppo.py, log_probabilities",
            generate=max(written, logits),
        ),
    )  # fmt: skip


def _working(training: Training, model: Model) -> tuple[MemoryItem, ...]:
    """Return a model's memory during a step, besides what it holds: gathered weights, gradients, activations."""
    gradients = _gradients(training, model) if model.stage else _whole_gradients(training, model)
    gathered = training.width * min(model.parameters, training.max_live) if model.stage == 3 else 0
    live = MemoryItem(
        component="weights gathered from all ranks", formula="w min(P, stage3_max_live_parameters)",
        source="deepspeed/runtime/zero/partitioned_param_coordinator.py, release_sub_module",
        forward=gathered, backward=gathered,
    )  # fmt: skip
    return (live, *gradients, *_temporary(training, model), *_activations(training, model))


def _gradients(training: Training, model: Model) -> tuple[MemoryItem, ...]:
    """Return the gradients under ZeRO: they pass through a bucket, and each rank keeps its share."""
    width, kept, source = training.width, model.stage == 3, STAGES[model.stage == 3]
    accumulating = training.gradient_accumulation_steps > 1
    whole = width * model.trained if model.stage == 1 and accumulating else 0
    elements, formula = stepped(training, model)
    return (
        MemoryItem(
            component="gradients that accumulate", formula="w T", source=f"{ZERO}; {source}",
            forward=whole, backward=whole,
        ),
        *(() if kept else _passing(training, model)),
        MemoryItem(
            component="copy of the bucket", formula="w min(T, reduce_bucket_size)",
            source=f"{source}, {'__avg_scatter_contiguous_grads' if kept else 'allreduce_bucket'}",
            backward=width * min(model.trained, training.reduce_bucket),
        ),
        MemoryItem(
            component="gradients in fp32", formula=f"4 {formula}", source=f"{source}, step",
            step=0 if training.offload_optimizer else 4 * elements,
        ),
    )  # fmt: skip


def _passing(training: Training, model: Model) -> tuple[MemoryItem, ...]:
    """Return the rank's share of the gradients and the bucket, which stages 1 and 2 free after the backward pass."""
    source = STAGES[0]
    keeps_share = model.stage == 2 and training.gradient_accumulation_steps > 1
    rank_share = share(training, model, training.width * model.trained, 1)
    # If a single bucket holds all gradients, its copy is freed before this rank's share is extracted. With an offloaded
    # optimizer they go to its fp32 gradients at once.
    extracted = model.trained > training.reduce_bucket and not training.offload_optimizer
    beside = rank_share if keeps_share or extracted else 0
    size, filled = bucket(training, model)
    return (
        MemoryItem(
            component="gradients of this rank's share", formula="w T / N", source=f"{ZERO}; {source}",
            forward=rank_share if keeps_share else 0, backward=beside,
            location="host" if training.offload_optimizer else "device",
        ),
        MemoryItem(
            component="bucket of gradients", formula=filled, source=f"{source}, setup_buckets",
            backward=size * (2 if training.overlap else 1),
        ),
    )  # fmt: skip


def _whole_gradients(training: Training, model: Model) -> tuple[MemoryItem, ...]:
    """Return the gradients without ZeRO: each rank has all, and the optimizer a copy in fp32."""
    whole = training.width * model.trained
    summed = training.width * min(model.trained, ALLREDUCE) if training.ranks > 1 else 0
    return (
        MemoryItem(
            component="gradients", formula="w T", source=ZERO,
            forward=whole if training.gradient_accumulation_steps > 1 else 0, backward=whole, step=whole,
        ),
        MemoryItem(
            component="copy for the sum over ranks", formula="w min(T, 5e8)",
            source="deepspeed/runtime/engine.py, allreduce_bucket", backward=summed,
        ),
        MemoryItem(
            component="gradients in fp32", formula="4 T", source="deepspeed/runtime/fp16/unfused_optimizer.py, step",
            step=4 * model.trained if training.mixed_precision else 0,
        ),
    )  # fmt: skip


def _temporary(training: Training, model: Model) -> tuple[MemoryItem, ...]:
    """Return the temporary tensors of torch's AdamW, one at a time on a CPU, else all; () if fused or offloaded."""
    if training.fused_optimizer or training.offload_optimizer:
        return ()
    cpu = training.accelerator == "cpu"
    factor, function = (8, "_single_tensor_adam") if cpu else (4, "_multi_tensor_adam")
    if model.stage:
        elements, formula = stepped(training, model)
    else:
        elements, formula = (largest(model), "L") if cpu else (model.trained, "T")
    return (
        MemoryItem(
            component="temporary tensors of AdamW", formula=f"{factor} {formula}",
            source=f"torch/optim/adam.py, {function}", step=factor * elements,
        ),
    )  # fmt: skip


def _activations(training: Training, model: Model) -> tuple[MemoryItem, ...]:
    """Return the activations, fewer with gradient checkpointing, and logits kept for the backward pass."""
    width, tokens, shape = training.width, training.tokens, model.shape
    logits, logits_formula = _logits(training)
    layer = shape.layer_activations(tokens, width)
    kept = shape.layers * layer
    if training.gradient_checkpointing:
        kept = layer + shape.layers * width * tokens * shape.hidden
    formula = f"s b (w (8 h + {'' if shape.relu else '2 '}f){' + 2 h' if shape.dropout else ''})"
    # The backward pass frees activations layer by layer; the first bucket may fill up before all are freed.
    left = max(0.0, 1 - training.reduce_bucket / model.trained) if model.stage else 0.0
    return (
        MemoryItem(
            component="activations",
            formula=f"l w s b h + {formula}" if training.gradient_checkpointing else f"l {formula}",
            source=RECOMPUTE, forward=kept, backward=int(kept * left),
        ),
        MemoryItem(
            component="logits and their gradients", formula=logits_formula,
            source="workloads/opt/ppo.py, log_probabilities" if training.answer_length
            else "transformers/loss/loss_utils.py, torch's nll_loss and log_softmax",
            forward=logits if model.speaks else 0,
        ),
    )  # fmt: skip


def _logits(training: Training) -> tuple[int, str]:
    """Return the peak bytes of a loss over logits, between forward and backward pass, and their formula.

    Of all tokens: log-probabilities, their gradient and the logits' gradient, all fp32 (ForCausalLMLoss; log_softmax
    keeps its result, and nll_loss and log_softmax each return a gradient of that size). RLHF computes only the answer's
    logits, and its cross_entropy holds the logits, in their own precision and in fp32, transposed, and their logarithm.
    """
    vocabulary = training.model.vocabulary
    if not training.answer_length:
        return 12 * training.tokens * vocabulary, "12 s b v"
    width = 14 if training.mixed_precision else 12
    return width * training.micro_batch * training.answer_length * vocabulary, f"{width} a b v"
