"""Checks that a workload fits in the memory of the nodes."""

from __future__ import annotations

from labctl import fit
from labctl.errors import ConfigError
from labctl.fit import training_script
from labctl.model import HERE, Job, Lab, Workload
from labctl.system import procfs
from labctl.workloads import deepspeed_config, external


def why_not_fit(lab: Lab, job: Job, limit: int) -> str | None:
    """Return the reason why the workload does not fit in the nodes' memory on this CPU host; None if it may fit.

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
    reason = fit.check(training, fit.Capacity(device=None, host=memory)) if memory else None
    return f"{job.workload.name} {reason}; --rehearse runs the same path shrunk" if reason else None


def how_it_fits(
    lab: Lab, workload: Workload, limit: int, *, nodes: int | None, slots: int | None, device_memory: int | None
) -> fit.FitReport:
    """Estimate a workload's memory on the lab, or on ``nodes`` nodes with ``slots`` slots; sizes in bytes.

    ``device_memory`` is that of one device. The memory of other machines than this one is unknown.
    """
    count = nodes or len(lab.nodes)
    accelerator = "device" if device_memory and lab.accelerator == "cpu" else lab.accelerator
    if script := external.script_of(workload):
        workload = training_script.described(workload, script)
    workload = deepspeed_config.resolve_bf16(workload, accelerator, lab.hosts)
    training = fit.of(workload, accelerator, slots or max(node.slots for node in lab.nodes), count)
    elsewhere = accelerator != "cpu" and bool(nodes or slots)
    capacity = fit.Capacity(device=device_memory, host=None if elsewhere else node_memory(lab, count, limit))
    return fit.report(workload.name, count, training, capacity)


def node_memory(lab: Lab, nodes: int, limit: int) -> int:
    """Bytes of memory for each of ``nodes`` nodes, at most ``limit`` bytes; a ``limit`` of 0 means none.

    Those of one host share what it has: here what is free now, elsewhere what is built in.
    """
    here = lab.hosts[0].name == HERE
    has = procfs.memory_available() if here else min(host.memory for host in lab.hosts)
    share = has // nodes if lab.network == "bridge" else has
    return min(share, limit or share)
