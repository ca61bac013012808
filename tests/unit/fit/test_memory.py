"""Memory against DeepSpeed's own estimators, and the memory of what is offloaded."""

from __future__ import annotations

from typing import Any

import pytest

from labctl import fit
from labctl.fit import memory
from labctl.fit.training import Training
from unit.fit.test_fit import GIB, OPT_13B, part, training

P = OPT_13B.parameters


def estimated(*, ranks: int, optimizer: bool, parameters: bool) -> tuple[int, int]:
    """Return DeepSpeed's estimate in bytes of a host and of a device of one node at stage 3.

    Source: estimate_zero3_model_states_mem_needs for one node, with zero.Init.
    """
    largest_layer = 4 * OPT_13B.largest
    if optimizer:
        return int(P * (18 if parameters else 16) * 1.5), largest_layer + (0 if parameters else 2 * P // ranks)
    return int(OPT_13B.largest * 4 * ranks * 1.5), largest_layer + 18 * P // ranks


def planned(ranks: int, **changes: Any) -> Training:
    """Return a ZeRO-3 training of OPT-13B on one node with checkpointing."""
    checkpointed = {"stage": 3, "micro_batch": 4, "gradient_checkpointing": True}
    return training(ranks=ranks, slots=ranks, **checkpointed | changes)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("parameters", [False, True])
def test_an_offloaded_training_takes_what_deepspeed_estimates_for_the_host(ranks: int, parameters: bool) -> None:
    """Plan an offloaded training: host and device are within bounds of DeepSpeed's estimate."""
    needed = fit.needs(planned(ranks, offload_optimizer=True, offload_parameters=parameters))
    host, device = estimated(ranks=ranks, optimizer=True, parameters=parameters)
    # Its factor of 1.5 for buffers is meant to be high.
    assert host / 1.5 < needed.host < host
    # Buckets, gathered weights, activations and logits, which it does not count.
    assert device < needed.device < device + 6 * GIB


def test_a_sharded_training_takes_what_deepspeed_estimates_for_the_device() -> None:
    """Plan a sharded training: the device is within 5 GiB of DeepSpeed's estimate, the host 0."""
    _, device = estimated(ranks=8, optimizer=False, parameters=False)
    assert fit.needs(planned(8)).device == pytest.approx(device, abs=5 * GIB)
    assert fit.needs(planned(8)).host == 0


def test_an_offloaded_parameter_takes_20_bytes_of_the_host_that_pins_nothing() -> None:
    """Plan an offloaded CPU training: 20 bytes per parameter on the host."""
    # In the measurement of docs/dev/figures.md 20.5.
    offloaded = planned(1, accelerator="cpu", offload_optimizer=True, offload_parameters=True)
    on_host = [line for line in memory.lines(offloaded) if line.location == "host"]
    assert sum(line.step for line in on_host) == 20 * P


@pytest.mark.parametrize(("size", "taken"), [(0, 0), (1, 1), (2**31, 2**31), (2**31 + 1, 2**32)])
def test_pinned_memory_is_rounded_up_to_a_power_of_two(size: int, taken: int) -> None:
    """Pin memory: rounded up to a power of two on a device, exact if not locked or on a CPU."""
    assert memory.pinned(planned(1), size) == taken
    assert memory.pinned(planned(1), size, locked=False) == size
    assert memory.pinned(planned(1, accelerator="cpu"), size) == size


def test_pinned_gradients_are_rounded_group_by_group() -> None:
    """Offload gradients: rounded for each group if pinned, 4 bytes per parameter if not."""
    offloaded = planned(1, offload_optimizer=True)
    assert part(offloaded, "offloaded gradients").step == 13 * 2**32
    assert part(planned(1, offload_optimizer=True, pin_optimizer=False), "offloaded gradients").step == 4 * P


def test_offloaded_parameters_are_built_on_the_host_and_their_pinned_memory_is_kept() -> None:
    """Offload parameters: pinned memory of the build is kept, unless pinning is off."""
    offloaded = planned(1, offload_optimizer=True, offload_parameters=True)
    assert part(offloaded, "tensor that is built").build == 4 * OPT_13B.largest
    assert part(offloaded, "weights as they were built").step == 2 * P
    assert part(offloaded, "weights").step == 2**35
    loose = planned(1, offload_optimizer=True, offload_parameters=True, pin_parameters=False)
    assert part(loose, "weights as they were built").step == 0
