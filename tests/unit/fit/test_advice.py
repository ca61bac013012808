"""Changes that make a training fit: the cheapest settings, as options or in words, and else the least hardware."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from labctl import fit
from labctl.fit import Capacity, Options
from labctl.fit.training import DecoderConfig, Training
from unit.fit.test_fit import GIB, OPT_13B, training

OFFLOADED = "deepspeed.zero_optimization.offload_{}.device=cpu"
NO_OPTIONS = Options(deepspeed=False, cpu_optimizer=False, arguments=frozenset())


def single(**changes: Any) -> Training:
    """Return a ZeRO-3 training of OPT-13B on one rank with checkpointing."""
    return training(ranks=1, slots=1, stage=3, micro_batch=4, gradient_checkpointing=True, **changes)


def advised(planned: Training, *, device: int | None, host: int | None, options: Options) -> list[str]:
    """Return the advised settings or words for these sizes in GiB; [] without advice."""
    sizes = (size and size * GIB for size in (device, host))
    advice = fit.advise(planned, Capacity(**dict(zip(("device", "host"), sizes, strict=True))), options)
    return [change.set or change.words for change in advice.changes] if advice else []


def test_13_billion_parameters_on_a_card_of_24_gib_take_both_offloads_and_the_host_memory_for_them() -> None:
    """Advise OPT-13B on 24 GiB with an unknown host: both offloads, and the host memory that they need."""
    advice = fit.advise(single(), Capacity(device=24 * GIB, host=None))
    assert advice is not None
    assert [change.set for change in advice.changes] == [OFFLOADED.format("optimizer"), OFFLOADED.format("param")]
    # DeepSpeed's estimator: 18 bytes per parameter, and half as much for buffers.
    assert 18 * OPT_13B.parameters < advice.required.host < 27 * OPT_13B.parameters
    assert (advice.unknown, advice.adapters) == (("host",), False)


def test_offloading_is_only_advised_where_the_host_has_the_memory_for_it() -> None:
    """Advise with 256 and 128 GiB of host memory: the optimizer's offload, and adapters."""
    planned = single()
    every = Options()
    assert advised(planned, device=80, host=256, options=every) == [OFFLOADED.format("optimizer")]
    assert advised(planned, device=80, host=128, options=every) == ["lora-dim=8"]


def test_what_the_workload_has_no_option_for_is_advised_in_words() -> None:
    """Advise for a workload without options: the changes are words."""
    assert advised(single(), device=24, host=None, options=NO_OPTIONS) == [
        "the optimizer offloaded to the host, as DeepSpeedCPUAdam",
        "the parameters offloaded to the host",
    ]
    cluttered = training(stage=0, ranks=8, micro_batch=8)
    assert advised(cluttered, device=26, host=64, options=NO_OPTIONS)[0] == "ZeRO stage 3"
    without_checkpointing = replace(Options(), arguments=frozenset({"lora-dim"}))
    small = training(stage=3, micro_batch=1, sequence_length=16384)
    assert advised(small, device=24, host=None, options=without_checkpointing) == ["gradient checkpointing"]


@pytest.mark.parametrize(
    ("device", "host", "hosts", "gib"),
    [
        # Of 24 GiB the bucket takes 0.9 and the step of a group up to 7.5, so 16 bytes per parameter take 13 devices.
        (24, 0, 13, 284),
        (80, 128, 2, 228),
        (1, 1024, None, None),
    ],
)
def test_the_least_hardware_is_named(device: int, host: int, hosts: int | None, gib: int | None) -> None:
    """Ask for the least hardware: number of hosts and GiB of a host, None where none is enough."""
    least = fit.least(single(), Capacity(device=device * GIB, host=host * GIB))
    assert (least.hosts, least.host and round(least.host / GIB)) == (hosts, gib)


def test_one_host_less_than_the_least_is_too_few() -> None:
    """Advise with the least number of hosts and one fewer: only the first keeps the weights."""
    capacity = Capacity(device=24 * GIB, host=64 * GIB)
    least = fit.least(single(), capacity)
    assert least.hosts is not None
    enough, fewer = (replace(single(), ranks=hosts) for hosts in (least.hosts, least.hosts - 1))
    same_weights = [
        advice is not None and not advice.adapters
        for advice in (fit.advise(planned, capacity) for planned in (enough, fewer))
    ]
    assert same_weights == [True, False]


def test_hardware_is_named_beside_adapters_which_change_what_is_trained() -> None:
    """Report with adapters as advice: the least hardware is named too, and not with an offload."""
    report = fit.report("opt", 1, single(), Capacity(device=80 * GIB, host=128 * GIB))
    assert report.advice is not None
    assert report.advice.adapters
    assert report.least is not None
    report = fit.report("opt", 1, single(), Capacity(device=80 * GIB, host=256 * GIB))
    assert report.least is None


def test_a_cpu_is_not_advised_to_offload_to_itself() -> None:
    """Advise a CPU training: adapters, and no offload."""
    planned = training(accelerator="cpu", ranks=2, slots=1, stage=3, micro_batch=2)
    assert advised(planned, device=None, host=64, options=Options()) == ["lora-dim=8"]


def test_a_model_of_unknown_layers_is_not_advised_to_have_adapters() -> None:
    """Advise a model of which only the parameters are known: nothing."""
    counted = training(model=DecoderConfig(name="vit", counted=10**9), sequence_length=0)
    assert advised(counted, device=1, host=4, options=Options()) == []
