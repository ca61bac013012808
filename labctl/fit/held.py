"""What a trained model holds from one step to the next: weights, the optimiser's states, stage 3's buckets."""

from __future__ import annotations

from labctl.fit.line import STAGES, ZERO, Line, Place, always, bucket, largest, share
from labctl.fit.training import Model, Training


def lines(training: Training, model: Model) -> tuple[Line, ...]:
    """What a model and its optimiser hold from one step to the next."""
    buckets = _buckets(training, model) if model.stage == 3 else ()
    return (*_weights(training, model), *_optimiser(training, model), *buckets)


def _weights(training: Training, model: Model) -> tuple[Line, ...]:
    width, cpu, sharded = training.width, training.accelerator == "cpu", model.stage == 3
    place: Place = "host" if training.offload_parameters and sharded else "device"
    slash = " / N" if sharded else ""
    states, asked = (share(training, model, width * count, 3) for count in (model.parameters, model.asked))
    return (
        Line(
            part="weights while the model is built",
            formula="w (P + F) / N + 4 L" if sharded else "4 (P + F): in fp32 until DeepSpeed converts them",
            source="deepspeed/runtime/zero/partition_parameters.py, Init" if sharded else "torch: fp32 by default",
            build=states + asked + 4 * model.shape.largest if sharded else 4 * (model.parameters + model.asked),
            place="device" if cpu or sharded else "host",
        ),
        always("weights", f"w P{slash}", ZERO, states, place),
        always("weights of reference and reward", f"w F{slash}", "DeepSpeed-Chat: ZeRO-3 or none", asked, place),
    )  # fmt: skip


def _optimiser(training: Training, model: Model) -> tuple[Line, ...]:
    trained, stage, slash = model.trained, model.stage, " / N" if model.stage else ""
    place: Place = "host" if training.offload_optimizer else "device"
    # ZeRO clones its share of the weights also where they are in fp32 already.
    master = share(training, model, 4 * trained, 1) if training.mixed or stage else 0
    return (
        always("master weights", f"4 T{slash}", f"{ZERO}; {STAGES[stage == 3]}" if stage else ZERO, master, place),
        always("Adam's two moments", f"8 T{slash}", ZERO, share(training, model, 8 * trained, 1), place),
        *(_offloaded(training, model) if training.offload_optimizer else ()),
    )


def _offloaded(training: Training, model: Model) -> tuple[Line, ...]:
    """What offloading the optimiser adds: on the host, and in stages 1 and 2 on the device."""
    width, source = training.width, STAGES[model.stage == 3]
    most = width * largest(model)
    gradients, updated = (share(training, model, size * model.trained, 1) for size in (4, width))
    grads = always("offloaded gradients", "4 T / N", f"{source}, initialize_optimizer_states", gradients, "host")
    if model.stage == 3:
        return (grads,)
    buffers = f"{source}, param_buffer_of_bit16_for_cpu_offload_groups, temp_grad_buffer_for_cpu_offload"
    return (
        grads,
        always("buffers on the way to the device", "w (T / N + L)", buffers, updated + most, "host"),
        always("buffer on the way to the host", "w L", f"{source}, temp_grad_buffer_for_gpu_offload", most),
    )


def _buckets(training: Training, model: Model) -> tuple[Line, ...]:
    """Stage 3 keeps its bucket, and this rank's share of the gradients, for the next step."""
    own = share(training, model, training.width * model.trained, 1)
    place: Place = "host" if training.offload_optimizer else "device"
    size, formula = bucket(training, model)
    return (
        always("gradients of this rank's share", "w T / N", f"{ZERO}; {STAGES[1]}", own, place),
        always("bucket of gradients", formula, f"{STAGES[1]}, _setup_for_real_optimizer", size),
    )
