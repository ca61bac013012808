"""Checks that a workload fits in the memory of the nodes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from msgspec import Struct

from labctl import fit
from labctl.backends.devices import DeviceReport
from labctl.errors import ConfigError
from labctl.fit import training_script
from labctl.model import HERE, Job, Lab, Workload
from labctl.system import procfs
from labctl.workloads import deepspeed_config, external, script_options


class Hardware(Struct, frozen=True, kw_only=True):
    """Hardware to fit in, memory in bytes; None for the lab's."""

    nodes: int | None = None
    slots: int | None = None
    device_memory: int | None = None
    host_memory: int | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Tell if nodes or slots are given, so that it is other hardware than the lab's."""
        return bool(self.nodes or self.slots)


def why_not_fit(lab: Lab, job: Job, limit: int) -> str | None:
    """Return why a CPU workload does not fit in its nodes' memory; None if it may or its needs are not known.

    ``limit`` is that of a node in bytes, 0 for none.
    """
    if job.workload.memory is None or job.workload.deepspeed is None or lab.accelerator != "cpu":
        return None
    slots = max(node.slots for node in job.nodes)
    try:
        training = fit.of(job.workload, lab.accelerator, slots, len(job.nodes))
    except ConfigError:
        # A model whose memory is not known may run all the same.
        return None
    memory = node_memory(lab, len(job.nodes), limit)
    capacity = fit.Capacity(device=None, host=memory or None)
    if fit.fits(training, capacity) is not False:
        return None
    reason = fit.check(training, capacity, settable(job.workload))
    return f"{job.workload.name} {reason}; --rehearse runs the same path shrunk"


def how_it_fits(
    lab: Lab, workload: Workload, limit: int, asked: Hardware, devices: DeviceReport | None
) -> fit.FitReport:
    """Return the memory report of a workload on the lab, or on ``asked`` hardware. ConfigError if not known.

    ``limit`` is that of a node in bytes, 0 for none; ``devices`` are the lab's, None if they do not matter. The
    memory of other machines than the lab's is what is asked for, or unknown. ConfigError if the workload's is unknown.
    """
    count = asked.nodes or len(lab.nodes)
    on_cpu = lab.accelerator == "cpu" and not asked.device_memory
    accelerator = "cpu" if on_cpu else "device" if lab.accelerator == "cpu" else lab.accelerator
    options = settable(workload)
    if script := external.script_of(workload):
        workload = training_script.described(workload, script)
    workload = deepspeed_config.resolve_bf16(workload, accelerator, lab.hosts)
    training = fit.of(workload, accelerator, asked.slots or max(node.slots for node in lab.nodes), count)
    is_lab = on_cpu or not (asked.is_elsewhere or lab.accelerator == "cpu")
    capacity = fit.Capacity(
        device=asked.device_memory or (smallest_device(devices, lab.accelerator) if devices else None),
        host=asked.host_memory or (node_memory(lab, count, limit) if is_lab else None),
    )
    return fit.report(workload.name, count, training, capacity, options)


def smallest_device(devices: DeviceReport, accelerator: str) -> int | None:
    """Return the bytes of the smallest device of the lab's nodes; None if any is unknown or none is there."""
    every = chain.from_iterable(host.devices for host in devices.hosts)
    sizes = [device.memory for device in every if device.node and device.kind == accelerator]
    known = [size for size in sizes if size]
    return min(known) if known and len(known) == len(sizes) else None


def settable(workload: Workload) -> fit.Options:
    """Return the workload's options that can change its memory: script arguments, DeepSpeed, a CPU optimizer."""
    if external.script_of(workload):
        return fit.Options(deepspeed=False, arguments=frozenset())
    scripts = tuple(scripts_of(workload))
    made_by_deepspeed = "optimizer" in (workload.deepspeed or {})
    return fit.Options(
        cpu_optimizer=made_by_deepspeed or any("DeepSpeedCPUAdam" in procfs.read(script) for script in scripts),
        arguments=script_options.declared(scripts),
    )


def scripts_of(workload: Workload) -> Iterable[Path]:
    """Return the Python files of a workload's directory, or its script alone if that is elsewhere."""
    script = Path(workload.script)
    if script.is_absolute():
        return (script,)
    return workload.directory.rglob("*.py") if workload.directory != Path() else ()


def node_memory(lab: Lab, nodes: int, limit: int) -> int:
    """Return the bytes of memory for each of ``nodes`` nodes, at most ``limit`` (0: no limit).

    Those of one host share what it has: here what is free now, elsewhere what is built in.
    """
    here = lab.hosts[0].name == HERE
    has = procfs.memory_available() if here else min(host.memory for host in lab.hosts)
    share = has // nodes if lab.network == "bridge" else has
    return min(share, limit or share)
