"""The memory that a training run takes, line by line: how many bytes, in which phase of a step, by which formula.

The states are those of Rajbhandari et al. 2020, ZeRO, sections 3 and 5. What DeepSpeed 0.19 and torch's AdamW hold
beside them (buckets, copies, temporary tensors) is taken from their source, which each line names.
"""

from __future__ import annotations

from dataclasses import replace

from labctl.fit import held
from labctl.fit.line import PHASES, STAGES, ZERO, Line, bucket, largest, peak, share, stepped, summed
from labctl.fit.training import Model, Training

PROCESS = 435 * 2**20
"""Bytes of Python, torch, DeepSpeed and transformers in a rank on CPU before a model is there: docs/figures.md."""
ALLREDUCE = 500_000_000
"""MEMORY_OPT_ALLREDUCE_SIZE of deepspeed/runtime/engine.py, in elements."""
RECOMPUTE = "Korthikanti et al. 2022 (Reducing Activation Recomputation), section 4.1"


def lines(training: Training) -> tuple[Line, ...]:
    """Every part that takes memory in this training.

    RLHF trains its models one after the other: both are held, and one of them, that which needs more, is at work.
    """
    always = summed(line for model in training.models for line in held.lines(training, model))
    process = PROCESS if training.accelerator == "cpu" else 0
    always = (
        Line(
            part="Python, torch, DeepSpeed", formula="constant", source="measured, docs/figures.md",
            build=process, forward=process, backward=process, step=process,
        ),
        *always,
    )  # fmt: skip
    if training.task == "rlhf":
        always = (*(replace(line, generate=line.step) for line in always), *_generating(training, training.models[0]))
    each = [(*always, *_working(training, model)) for model in training.models]
    found = max(each, key=lambda parts: peak(parts, "device", "host"))
    return tuple(line for line in found if any(map(line.during, PHASES)))


def _generating(training: Training, actor: Model) -> tuple[Line, ...]:
    """What RLHF adds while the actor writes answers, and then says how likely they were, without gradients."""
    logits, formula = _logits(training)
    written = actor.shape.keys_and_values(training.tokens, training.width)
    return (
        Line(
            part="actor gathered to write answers", formula="w P of the actor",
            source="workloads/opt/rlhf.py: GatheredParameters around all of it, as DeepSpeed-Chat's hybrid engine",
            generate=training.width * actor.parameters if actor.stage == 3 else 0,
        ),
        Line(
            part="keys and values of the answers, or logits", formula=f"max(2 w l h s b, {formula})",
            source="transformers/cache_utils.py, DynamicCache; workloads/opt/ppo.py, log_probabilities",
            generate=max(written, logits),
        ),
    )  # fmt: skip


def _working(training: Training, model: Model) -> tuple[Line, ...]:
    """What forward pass, backward pass and step of one model need beside what is held."""
    gradients = _gradients(training, model) if model.stage else _whole_gradients(training, model)
    gathered = training.width * min(model.parameters, training.max_live) if model.stage == 3 else 0
    live = Line(
        part="weights gathered from all ranks", formula="w min(P, stage3_max_live_parameters)",
        source="deepspeed/runtime/zero/partitioned_param_coordinator.py, release_sub_module",
        forward=gathered, backward=gathered,
    )  # fmt: skip
    return (live, *gradients, *_temporary(training, model), *_activations(training, model))


def _gradients(training: Training, model: Model) -> tuple[Line, ...]:
    """Under ZeRO: gradients pass through a bucket, of which each rank keeps its share."""
    width, stage, kept, source = training.width, model.stage, model.stage == 3, STAGES[model.stage == 3]
    accumulating = training.accumulation > 1
    own = share(training, model, width * model.trained, 1)
    whole = width * model.trained if stage == 1 and accumulating else 0
    # Where one bucket holds all gradients, the copy of it is gone before this rank's share is taken out.
    beside = own if (stage == 2 and accumulating) or model.trained > training.reduce_bucket else 0
    size, filled = bucket(training, model)
    elements, formula = stepped(training, model)
    passing = () if kept else (
        Line(
            part="gradients of this rank's share", formula="w T / N", source=f"{ZERO}; {source}",
            forward=own if stage == 2 and accumulating else 0, backward=beside,
            place="host" if training.offload_optimizer else "device",
        ),
        Line(
            part="bucket of gradients", formula=filled, source=f"{source}, setup_buckets",
            backward=size * (2 if training.overlap else 1),
        ),
    )  # fmt: skip
    return (
        Line(
            part="gradients that accumulate", formula="w T", source=f"{ZERO}; {source}", forward=whole, backward=whole,
        ),
        *passing,
        Line(
            part="copy of the bucket", formula="w min(T, reduce_bucket_size)",
            source=f"{source}, {'__avg_scatter_contiguous_grads' if kept else 'allreduce_bucket'}",
            backward=width * min(model.trained, training.reduce_bucket),
        ),
        Line(
            part="gradients in fp32", formula=f"4 {formula}", source=f"{source}, step",
            step=0 if training.offload_optimizer else 4 * elements,
        ),
    )  # fmt: skip


def _whole_gradients(training: Training, model: Model) -> tuple[Line, ...]:
    """Without ZeRO: every rank has all gradients, and the optimiser a copy of them in fp32."""
    whole = training.width * model.trained
    summed = training.width * min(model.trained, ALLREDUCE) if training.ranks > 1 else 0
    return (
        Line(
            part="gradients", formula="w T", source=ZERO,
            forward=whole if training.accumulation > 1 else 0, backward=whole, step=whole,
        ),
        Line(
            part="copy for the sum over ranks", formula="w min(T, 5e8)",
            source="deepspeed/runtime/engine.py, allreduce_bucket", backward=summed,
        ),
        Line(
            part="gradients in fp32", formula="4 T", source="deepspeed/runtime/fp16/unfused_optimizer.py, step",
            step=4 * model.trained if training.mixed else 0,
        ),
    )  # fmt: skip


def _temporary(training: Training, model: Model) -> tuple[Line, ...]:
    """What torch's AdamW computes beside its states: on a CPU tensor by tensor, elsewhere all tensors at once."""
    if training.fused_optimizer or training.offload_optimizer:
        return ()
    cpu = training.accelerator == "cpu"
    factor, function = (8, "_single_tensor_adam") if cpu else (4, "_multi_tensor_adam")
    if model.stage:
        elements, formula = stepped(training, model)
    else:
        elements, formula = (largest(model), "L") if cpu else (model.trained, "T")
    source = f"torch/optim/adam.py, {function}"
    return (
        Line(part="temporary tensors of AdamW", formula=f"{factor} {formula}", source=source, step=factor * elements),
    )


def _activations(training: Training, model: Model) -> tuple[Line, ...]:
    width, tokens, shape = training.width, training.tokens, model.shape
    logits, logits_formula = _logits(training)
    layer = shape.layer_activations(tokens, width)
    kept = (
        layer + shape.layers * width * tokens * shape.hidden
        if training.gradient_checkpointing
        else shape.layers * layer
    )
    formula = f"s b (w (8 h + {'' if shape.relu else '2 '}f){' + 2 h' if shape.dropout else ''})"
    # The backward pass frees a layer's activations as it goes; the first bucket may be full when some are still there.
    left = max(0.0, 1 - training.reduce_bucket / model.trained) if model.stage else 0.0
    return (
        Line(
            part="activations", formula=f"l w s b h + {formula}" if training.gradient_checkpointing else f"l {formula}",
            source=RECOMPUTE, forward=kept, backward=int(kept * left),
        ),
        Line(
            part="logits and their gradients", formula=logits_formula,
            source="workloads/opt/ppo.py, log_probabilities" if training.answer_length
            else "transformers/loss/loss_utils.py, torch's nll_loss and log_softmax",
            forward=logits if model.speaks else 0,
        ),
    )  # fmt: skip


def _logits(training: Training) -> tuple[int, str]:
    """Bytes where a loss over logits holds most, on the way from the forward to the backward pass; and as a formula.

    Of all tokens: log-probabilities, their gradient and that of the logits, all fp32 (ForCausalLMLoss; log_softmax
    keeps its result, and nll_loss and log_softmax each hand back a gradient of that size). RLHF asks for the answer's
    alone, and its cross_entropy holds the logits, themselves in fp32, these transposed, and their logarithm.
    """
    vocabulary = training.model.vocabulary
    if not training.answer_length:
        return 12 * training.tokens * vocabulary, "12 s b v"
    width = 14 if training.mixed else 12
    return width * training.micro_batch * training.answer_length * vocabulary, f"{width} a b v"
