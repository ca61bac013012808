"""The memory that a training run takes, line by line: how many bytes, in which phase of a step, by which formula.

The states are those of Rajbhandari et al. 2020, ZeRO, sections 3 and 5. What DeepSpeed 0.19 and torch's AdamW hold
beside them (buckets, copies, temporary tensors) is taken from their source, which each line names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from labctl.fit.training import Training

PHASES = ("build", "forward", "backward", "step")
Place = Literal["device", "host"]

PROCESS = 435 * 2**20
"""Bytes of Python, torch, DeepSpeed and transformers in a rank on CPU before a model is there: docs/figures.md."""
ALLREDUCE = 500_000_000
"""MEMORY_OPT_ALLREDUCE_SIZE of deepspeed/runtime/engine.py, in elements."""

ZERO = "Rajbhandari et al. 2020 (ZeRO), section 3.1 and, for the division among ranks, section 5"
RECOMPUTE = "Korthikanti et al. 2022 (Reducing Activation Recomputation), section 4.1"
STAGES = ("deepspeed/runtime/zero/stage_1_and_2.py", "deepspeed/runtime/zero/stage3.py")

SYMBOLS = """\
P parameters, T those trained, F those of models that are only asked, L elements of the largest tensor,
w bytes of a weight, N ranks, s sequence length, b sequences of a forward pass,
l layers, h hidden size, f width of the perceptron, v vocabulary"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Bytes per rank of one part of the memory, in each phase."""

    part: str
    formula: str
    source: str
    build: int = 0
    forward: int = 0
    backward: int = 0
    step: int = 0
    place: Place = "device"

    def during(self, phase: str) -> int:
        return int(getattr(self, phase))


def lines(training: Training) -> tuple[Line, ...]:
    """Every part that takes memory in this training."""
    gradients = _gradients(training) if training.stage else _whole_gradients(training)
    found = (*_weights(training), *_optimiser(training), *gradients, *_activations(training))
    return tuple(line for line in found if any(map(line.during, PHASES)))


def peak(parts: tuple[Line, ...], *places: Place) -> tuple[int, str]:
    """Bytes per rank in these places, in the phase that takes most, and that phase."""
    return max((sum(line.during(phase) for line in parts if line.place in places), phase) for phase in PHASES)


def _always(part: str, formula: str, source: str, size: int, place: Place = "device") -> Line:
    """A part that is there all through a step."""
    return Line(part=part, formula=formula, source=source, forward=size, backward=size, step=size, place=place)


# --- the lines -----------------------------------------------------------------------------------------------


def _weights(training: Training) -> tuple[Line, ...]:
    width, cpu, sharded = training.width, training.accelerator == "cpu", training.stage == 3
    parameters, most = _parameters(training), max(count for _, count, _ in training.trained)
    place: Place = "host" if training.offload_parameters and sharded else "device"
    slash, process = " / N" if sharded else "", PROCESS if cpu else 0
    live = width * min(most, training.max_live) if sharded else 0
    largest = 4 * max(shape.largest for shape, _, _ in training.trained)
    states = _share(training, width * parameters, 3)
    asked = _share(training, width * training.frozen, 3)
    return (
        Line(
            part="Python, torch, DeepSpeed", formula="constant", source="measured, docs/figures.md",
            build=process, forward=process, backward=process, step=process,
        ),
        Line(
            part="weights while the model is built",
            formula="w (P + F) / N + 4 L" if sharded else "4 P + w F: in fp32 until DeepSpeed converts them",
            source="deepspeed/runtime/zero/partition_parameters.py, Init" if sharded else "torch: fp32 by default",
            build=states + asked + largest if sharded else 4 * most + width * training.frozen,
            place="device" if cpu or sharded else "host",
        ),
        _always("weights", f"w P{slash}", ZERO, states, place),
        _always("weights of reference and reward", f"w F{slash}", "DeepSpeed-Chat: ZeRO-3 or none", asked, place),
        Line(
            part="weights gathered from all ranks", formula="w min(P, stage3_max_live_parameters)",
            source="deepspeed/runtime/zero/partitioned_param_coordinator.py, release_sub_module",
            forward=live, backward=live,
        ),
    )  # fmt: skip


def _optimiser(training: Training) -> tuple[Line, ...]:
    trained, stage, slash = _trained(training), training.stage, " / N" if training.stage else ""
    place: Place = "host" if training.offload_optimizer else "device"
    # ZeRO clones its share of the weights also where they are in fp32 already.
    master = _share(training, 4 * trained, 1) if training.mixed or stage else 0
    source = f"{ZERO}; {STAGES[stage == 3]}" if stage else ZERO
    added = _offloaded(training) if training.offload_optimizer else _temporary(training)
    return (
        _always("master weights", f"4 T{slash}", source, master, place),
        _always("Adam's two moments", f"8 T{slash}", ZERO, _share(training, 8 * trained, 1), place),
        *added,
    )


def _temporary(training: Training) -> tuple[Line, ...]:
    """What torch's AdamW computes beside its states: on a CPU tensor by tensor, elsewhere all tensors at once."""
    if training.fused_optimizer:
        return ()
    cpu = training.accelerator == "cpu"
    factor, function = (8, "_single_tensor_adam") if cpu else (4, "_multi_tensor_adam")
    if training.stage:
        elements, formula = _stepped(training)
    else:
        elements, formula = (_largest(training), "L") if cpu else (_most(training), "T")
    source = f"torch/optim/adam.py, {function}"
    return (
        Line(part="temporary tensors of AdamW", formula=f"{factor} {formula}", source=source, step=factor * elements),
    )


def _offloaded(training: Training) -> tuple[Line, ...]:
    """What offloading the optimiser adds: on the host, and in stages 1 and 2 on the device."""
    width, source, held = training.width, STAGES[training.stage == 3], _trained(training)
    largest = width * _largest(training)
    gradients, updated = _share(training, 4 * held, 1), _share(training, width * held, 1)
    grads = _always("offloaded gradients", "4 T / N", f"{source}, initialize_optimizer_states", gradients, "host")
    if training.stage == 3:
        return (grads,)
    buffers = f"{source}, param_buffer_of_bit16_for_cpu_offload_groups, temp_grad_buffer_for_cpu_offload"
    return (
        grads,
        _always("buffers on the way to the device", "w (T / N + L)", buffers, updated + largest, "host"),
        _always("buffer on the way to the host", "w L", f"{source}, temp_grad_buffer_for_gpu_offload", largest),
    )


def _gradients(training: Training) -> tuple[Line, ...]:
    """Under ZeRO: gradients pass through a bucket, of which each rank keeps its share."""
    width, stage, cpu, source = (
        training.width,
        training.stage,
        training.accelerator == "cpu",
        STAGES[training.stage == 3],
    )
    counts = [count for _, _, count in training.trained]
    filled = [width * min(count, training.reduce_bucket) for count in counts]
    # torch.empty takes all of a bucket; on a CPU memory is taken when it is first written to.
    taken = filled if cpu else [width * training.reduce_bucket for _ in counts]
    kept = stage == 3
    bucket = sum(taken) if kept else max(taken) * (2 if training.overlap else 1)
    accumulating = training.accumulation > 1
    own = _share(training, width * sum(counts), 1)
    # Where one bucket holds all gradients, the copy of it is gone before this rank's share is taken out.
    beside = own if kept or (stage == 2 and accumulating) or max(counts) > training.reduce_bucket else 0
    whole = width * sum(counts) if stage == 1 and accumulating else 0
    elements, formula = _stepped(training)
    step = 0 if training.offload_optimizer else 4 * elements
    return (
        Line(
            part="gradients that accumulate", formula="w T", source=f"{ZERO}; {source}", forward=whole, backward=whole,
        ),
        Line(
            part="gradients of this rank's share", formula="w T / N", source=f"{ZERO}; {source}",
            forward=own if kept or (stage == 2 and accumulating) else 0, backward=beside, step=own if kept else 0,
            place="host" if training.offload_optimizer else "device",
        ),
        Line(
            part="bucket of gradients", formula=f"w {'min(T, reduce_bucket_size)' if cpu else 'reduce_bucket_size'}",
            source=f"{source}, {'_setup_for_real_optimizer' if kept else 'setup_buckets'}",
            forward=bucket if kept else 0, backward=bucket, step=bucket if kept else 0,
        ),
        Line(
            part="copy of the bucket", formula="w min(T, reduce_bucket_size)",
            source=f"{source}, {'__avg_scatter_contiguous_grads' if kept else 'allreduce_bucket'}",
            backward=max(filled),
        ),
        Line(part="gradients in fp32", formula=f"4 {formula}", source=f"{source}, step", step=step),
    )  # fmt: skip


def _whole_gradients(training: Training) -> tuple[Line, ...]:
    """Without ZeRO: every rank has all gradients, and the optimiser a copy of them in fp32."""
    width, most = training.width, _most(training)
    held = width * _trained(training) if training.accumulation > 1 else 0
    summed = width * min(most, ALLREDUCE) if training.ranks > 1 else 0
    return (
        Line(part="gradients", formula="w T", source=ZERO, forward=held, backward=width * most, step=width * most),
        Line(
            part="copy for the sum over ranks", formula="w min(T, 5e8)",
            source="deepspeed/runtime/engine.py, allreduce_bucket", backward=summed,
        ),
        Line(
            part="gradients in fp32", formula="4 T", source="deepspeed/runtime/fp16/unfused_optimizer.py, step",
            step=4 * most if training.mixed else 0,
        ),
    )  # fmt: skip


def _activations(training: Training) -> tuple[Line, ...]:
    width, tokens, model = training.width, training.tokens, training.model
    kept = max(_kept(training, shape.layers, shape.hidden, shape.layer_activations(tokens, width))
               for shape, _, _ in training.trained)  # fmt: skip
    layer = f"s b (w (8 h + {'' if model.relu else '2 '}f){' + 2 h' if model.dropout else ''})"
    # The backward pass frees a layer's activations as it goes; the first bucket may be full when some are still there.
    left = max(0.0, 1 - training.reduce_bucket / _most(training)) if training.stage else 0.0
    return (
        Line(
            part="activations", formula=f"l w s b h + {layer}" if training.gradient_checkpointing else f"l {layer}",
            source=RECOMPUTE, forward=kept, backward=int(kept * left),
        ),
        Line(
            part="logits and their gradients", formula="12 s b v",
            source="transformers/loss/loss_utils.py, torch's nll_loss and log_softmax",
            forward=0 if training.task == "reward" else model.logits(tokens),
        ),
    )  # fmt: skip


def _kept(training: Training, layers: int, hidden: int, layer: int) -> int:
    """With checkpointing the input of each layer and all of one layer; else all of every layer."""
    return (
        layers * training.width * training.tokens * hidden + layer
        if training.gradient_checkpointing
        else layers * layer
    )


# --- counts --------------------------------------------------------------------------------------------------


def _share(training: Training, size: int, stage: int) -> int:
    """The bytes of one rank, where ZeRO divides this from the given stage on."""
    return -(-size // training.ranks) if training.stage >= stage else size


def _parameters(training: Training) -> int:
    return sum(count for _, count, _ in training.trained)


def _trained(training: Training) -> int:
    return sum(count for _, _, count in training.trained)


def _most(training: Training) -> int:
    """Trained parameters of the model that has most: the models of RLHF take their steps one after the other."""
    return max(count for _, _, count in training.trained)


def _largest(training: Training) -> int:
    return max(min(shape.largest, count) for shape, _, count in training.trained)


def _stepped(training: Training) -> tuple[int, str]:
    """Elements that ZeRO's optimiser updates at once, and as a formula: this rank's share, in stage 3 by groups."""
    share = _share(training, _most(training), 1)
    return (min(share, training.sub_group), "min(T / N, sub_group_size)") if training.stage == 3 else (share, "T / N")
