"""Will a training run fit in memory? A lower bound from parameter counts and ZeRO stage."""

from __future__ import annotations

from labctl.model import Memory


def needed(memory: Memory, world_size: int) -> int:
    """Bytes per rank for weights, gradients and Adam's states.

    Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models": section 3.1 has
    2 + 2 + 12 bytes per parameter in mixed precision (4 + 4 + 8 in fp32, which needs no master copy); section 5
    divides optimiser states (stage 1), gradients (2) and weights (3) among the ranks. Frozen weights have only weights.
    """
    master_copy = 4 if memory.bytes_per_weight < 4 else 0
    weights = memory.parameters * memory.bytes_per_weight
    gradients = memory.trainable * memory.bytes_per_weight
    optimiser = memory.trainable * (master_copy + 4 + 4)
    parts = ((3, weights), (2, gradients), (1, optimiser))
    return sum(-(-size // (world_size if memory.zero_stage >= stage else 1)) for stage, size in parts)


def check(memory: Memory, slots_per_node: int, world_size: int, available_bytes_per_node: int) -> str | None:
    """Why the run cannot fit on a node with so many of its ranks, or None where it may: activations are not counted."""
    per_rank = needed(memory, world_size)
    per_node = per_rank * slots_per_node
    if per_node <= available_bytes_per_node:
        return None
    ranks = f"{slots_per_node} rank{'' if slots_per_node == 1 else 's'}"
    return (
        f"needs at least {_gib(per_node)} per node, {_gib(available_bytes_per_node)} available "
        f"({ranks} of {_gib(per_rank)} for weights, gradients and optimiser states, ZeRO stage {memory.zero_stage} "
        f"over a world of {world_size}; activations come on top)"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
