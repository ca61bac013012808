"""DeepSpeed's configuration: read strictly, completed for a world size, and checked, with the reason for each error.

Keys as in deepspeed/runtime/{config,constants}.py and deepspeed/runtime/zero/config.py of DeepSpeed 0.19. DeepSpeed
ignores unknown keys, so labctl warns about keys that are not in 0.19 and passes them on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from labctl.errors import ConfigError, nearest
from labctl.model import Host, Workload

Config = Mapping[str, Any]

_TOP = """
    activation_checkpointing aio amp autotuning bf16 check_overflow checkpoint comms_logger
    communication_data_type compile compression_training csv_monitor curriculum_learning data_efficiency data_types
    dataloader_drop_last disable_allgather disable_python_gc dump_state eigenvalue elasticity flops_profiler fp16
    gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor hybrid_engine
    log_level managed_gradient_accumulation memory_breakdown nebula optimizer pipeline prescale_gradients
    progressive_layer_drop quantize_training scheduler seq_parallel_communication_data_type sequence_parallel_size
    sparse_attention sparse_gradients steps_per_print tensor_parallel tensorboard torch_autocast train_batch_size
    train_micro_batch_size_per_gpu use_data_before_expert_parallelism use_node_local_storage vocabulary_size
    wall_clock_breakdown wandb zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
_ZERO = """
    allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients cpu_offload
    cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks
    gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module
    legacy_stage1 load_from_fp32_weights log_trace_cache_warnings max_live_parameters max_reuse_distance
    memory_efficient_linear mics_hierarchical_params_gather mics_shard_size model_persistence_threshold
    module_granularity_threshold offload_optimizer offload_param overlap_comm override_module_apply
    param_persistence_threshold parameter_alignment pipeline_loading_checkpoint prefetch_bucket_size
    reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory stage
    stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
    stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
    stage3_module_granularity_threshold stage3_param_persistence_threshold stage3_prefetch_bucket_size
    stage3_use_all_reduce_for_fetch_params sub_group_size use_all_reduce_for_fetch_params
    use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size zero_quantized_gradients
    zero_quantized_nontrainable_weights zero_quantized_weights
"""
_FP16 = """
    auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power loss_scale
    loss_scale_window min_loss_scale
"""
_BF16 = """
    bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update
"""
SECTIONS = {
    "zero_optimization": frozenset(_ZERO.split()),
    "fp16": frozenset(_FP16.split()),
    "bf16": frozenset(_BF16.split()),
    "optimizer": frozenset({"type", "params", "legacy_fusion"}),
    "scheduler": frozenset({"type", "params"}),
}

MICRO, STEPS, BATCH = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
ALIASES = {"micro_batch_per_gpu": MICRO, "micro_batch_size": MICRO, "batch_size": BATCH, "bfloat16": "bf16"}


def parse(text: str, where: str) -> dict[str, Any]:
    """Parse a configuration file; raise ConfigError if it is not a JSON object, or has a key twice."""
    try:
        config = json.loads(text, object_pairs_hook=lambda pairs: _distinct(pairs, where))
    except json.JSONDecodeError as error:
        before = text[: error.pos].rstrip()
        reason = "a comma before the closing bracket" if before.endswith(",") else error.msg
        line = before.count("\n") + 1 if before.endswith(",") else error.lineno
        raise ConfigError(f"{where}:{line}: not JSON: {reason}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{where}:1: a DeepSpeed configuration is an object, not {type(config).__name__}")
    return config


def _distinct(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    """Return the entries of an object; raise ConfigError for a duplicate key, which DeepSpeed rejects too."""
    config = dict(pairs)
    if len(config) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{where}: `{twice}` is given twice", hint="keep one of the two")
    return config


def merge(base: Config, over: Config) -> dict[str, Any]:
    """Merge two configurations, nested objects key by key; ``over`` wins."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def assign(config: Config, dotted: str, text: str) -> dict[str, Any]:
    """Return the configuration with a dotted key set to a value, which is parsed as JSON if possible."""
    try:
        over: Any = json.loads(text)
    except ValueError:
        over = text
    for key in reversed(dotted.split(".")):
        over = {key: over}
    return merge(config, over)


def resolve_bf16(workload: Workload, accelerator: str, hosts: Iterable[Host]) -> Workload:
    """Replace ``bf16.enabled: auto`` by true, or by false if any host is a CPU without bf16; else unchanged."""
    config = workload.deepspeed or {}
    if config.get("bf16", {}).get("enabled") != "auto":
        return workload
    fast = accelerator != "cpu" or all(host.bf16 for host in hosts)
    return replace(workload, deepspeed=merge(config, {"bf16": {"enabled": fast}}))


def complete(config: Config, *, ranks: int, accelerator: str, where: str) -> dict[str, Any]:
    """Return the configuration with all batch sizes. ConfigError for invalid sections, sizes, or fp16 on CPUs.

    The batch is micro-batch x accumulation steps x ranks.
    """
    check_sections(config, where)
    enabled = {name: config.get(name, {}).get("enabled", False) for name in ("fp16", "bf16")}
    for name, value in enabled.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: `{name}.enabled` must be true or false, not {json.dumps(value)}")
    if all(enabled.values()):
        raise ConfigError(f"{where}: fp16 and bf16 are both enabled", hint="set one of them to false")
    if enabled["fp16"] and accelerator == "cpu":
        raise ConfigError(
            f"{where}: fp16 is enabled, and CPUs do not train in fp16 (half and float mix in their kernels)",
            hint="--set deepspeed.fp16.enabled=false --set deepspeed.bf16.enabled=true",
        )
    return dict(config) | batch_sizes(config, ranks, where)


def unknown_keys(config: Config, where: str) -> Iterator[str]:
    """Yield a warning for each key that DeepSpeed 0.19 does not have, with the nearest existing key."""
    for section, keys in {"": frozenset(_TOP.split()), **SECTIONS}.items():
        inner = config.get(section) if section else config
        for key in inner if isinstance(inner, Mapping) else ():
            if key in keys:
                continue
            shown = f"{section}.{key}" if section else key
            near = nearest(ALIASES.get(key, key), keys)
            hint = f"; did you mean `{near}`?" if near else ""
            yield f"{where}: DeepSpeed 0.19 has no key `{shown}` and ignores it{hint}"


def check_sections(config: Config, where: str) -> None:
    """Raise ConfigError for a section that is not an object, and for an invalid ZeRO stage."""
    for section in SECTIONS:
        inner = config.get(section, {})
        if not isinstance(inner, Mapping):
            raise ConfigError(f"{where}: `{section}` must be an object, not {json.dumps(inner)}")
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ConfigError(f"{where}: `zero_optimization.stage` must be 0, 1, 2 or 3, not {json.dumps(stage)}")


def batch_sizes(config: Config, ranks: int, where: str) -> dict[str, int]:
    """Return micro-batch, accumulation steps and batch by key, computing missing ones. ConfigError if they contradict.

    From deepspeed/runtime/config.py, ``_set_batch_related_parameters``.
    """
    micro, steps, batch = (_positive(config, key, where) for key in (MICRO, STEPS, BATCH))
    if batch is None and micro is None:
        raise ConfigError(f"{where}: neither `{BATCH}` nor `{MICRO}` is given", hint=f"give {MICRO}")
    parts = ranks * (micro or 1) * (steps or 1)
    batch = batch or parts
    if batch % parts or (micro and steps and batch != parts):
        counted = f"{micro or 'micro-batch'} x {steps or 'steps'} x {ranks} ranks"
        raise ConfigError(
            f"{where}: `{BATCH}` {batch} is not micro-batch x accumulation steps x ranks ({counted})",
            hint=f"{parts} goes, or leave `{BATCH}` out",
        )
    micro = micro or batch // parts
    return {MICRO: micro, STEPS: batch // (micro * ranks), BATCH: batch}


def _positive(config: Config, key: str, where: str) -> int | None:
    """Return a positive whole number of the configuration; None if the key is missing. ConfigError for other values."""
    if key not in config:
        return None
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: `{key}` must be a whole number above 0, not {json.dumps(value)}")
    return value
