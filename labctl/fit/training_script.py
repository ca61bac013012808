"""The training in a DeepSpeed-Chat script of a user's clone, read from the script's text.

Expects the form of Microsoft's and Lambda's scripts: a step's main.py with its arguments, whose variables are assigned
by the script or its ``setup_env.sh MODEL STEP``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from msgspec.structs import replace

from labctl.errors import ConfigError
from labctl.fit.training import arguments
from labctl.model import Memory, Workload
from labctl.system import procfs
from labctl.workloads import deepspeed_config
from labctl.workloads.schema import TASKS

CONFIGS = "../opt/configs"
"""Folder of OPT's shapes, relative to the workload's directory."""
# Defaults of the steps' main.py, in DeepSpeed-Chat's training/step*/main.py.
DEFAULTS = {
    "max_seq_len": "512",
    "max_prompt_seq_len": "256",
    "max_answer_seq_len": "256",
    "per_device_train_batch_size": "16",
    "lora_module_name": "decoder.layers.",
}
# Options of main.py and their names in ``workloads/opt``; step 3 prefixes the actor's options.
NAMES = {
    "max_seq_len": "sequence_length",
    "max_prompt_seq_len": "max_prompt_length",
    "max_answer_seq_len": "max_answer_length",
    "lora_module_name": "lora_modules",
}
# Assignments, except of positional arguments: ``OUTPUT=$1``.
_ASSIGNED = re.compile(r"(?<!\S)(\w+)=((?!\$\{?\d)[^\s;&|\"']+)")


def described(workload: Workload, script: Path) -> Workload:
    """Return a script's workload with model, DeepSpeed configuration and arguments for `fit`. ConfigError if unknown.

    ConfigError if the script does not name the OPT model or the step that it trains.
    """
    code = _code(procfs.read(script))
    variables = dict(_ASSIGNED.findall(code))
    if setup := re.search(r"setup_env\.sh\s+(\S+)\s+(\S+)", code):
        model, number = (_filled(word, variables) for word in setup.groups())
        variables = {"MODEL_PATH": model, **variables, **_setup_variables(script, model, number)}
        step = f"step{number}_"
    else:
        step = next((part for part in script.parts if re.match(r"step[123]_", part)), "")
    given = {**DEFAULTS, **_options(code, variables)}
    if not re.match(r"step([123]_$|1_supervised|2_reward|3_rlhf)", step):
        raise ConfigError(f"{script}: the memory of its step is unknown", hint="`fit` supports steps 1 to 3")
    task = TASKS[int(step[4]) - 1]
    critic = _shape(script, given.get("critic_model_name_or_path", "")) if task == "rlhf" else None
    return replace(
        workload,
        memory=Memory(model=_shape(script, given.get("model_name_or_path", "")), critic=critic, task=task),
        deepspeed=_config(given),
        arguments=_fit_arguments(given),
    )


def _setup_variables(script: Path, model: str, step: str) -> dict[str, str]:
    """Return the variables that setup_env.sh assigns for a model and a step; empty if it has no such branch."""
    case = rf'"\$model" = "{re.escape(model)}" \] && \[ "\$step" = "{re.escape(step)}" \];'
    setup_env = _code(procfs.read(script.parent / "setup_env.sh"))
    branch = re.search(rf"{case}(.*?)\n(?:elif|else|fi)\b", setup_env, re.DOTALL)
    return dict(_ASSIGNED.findall(branch[1])) if branch else {}


def _options(code: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return main.py's options in the script, variables filled in, names without ``actor_``; {} without main.py."""
    command = re.search(r"\bmain\.py\b([^\n]*)", code)
    argv = shlex.split(re.split(r"\s(?:\d?>|&>|\|)", command[1])[0]) if command else []
    options = arguments(tuple(_filled(word, variables) for word in argv))
    return {_plain(name): " ".join(values) for name, values in options.items()}


def _fit_arguments(given: Mapping[str, str]) -> tuple[str, ...]:
    """Return the options that matter to memory, as arguments of ``workloads/opt``."""
    relevant = (*NAMES, "lora_dim", "gradient_checkpointing", "critic_zero_stage")
    options = [(f"--{NAMES.get(name, name)}", *value.split()) for name, value in given.items() if name in relevant]
    return tuple(chain.from_iterable(options))


def _code(text: str) -> str:
    """Return a shell script without comments, each command on a single line."""
    return re.sub(r"(?m)^\s*#.*$", "", text).replace("\\\n", " ")


def _filled(word: str, variables: Mapping[str, str]) -> str:
    """Replace the known shell variables in a word; leave unknown ones."""
    return re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], match[0]), word)


def _plain(name: str) -> str:
    """Return the name that the other steps use for an option of step 3."""
    name = name.removeprefix("actor_")
    return "per_device_train_batch_size" if name == "per_device_training_batch_size" else name


def _shape(script: Path, named: str) -> str:
    """Return the path of an OPT model's shape, by repository or snapshot in the hub's cache. ConfigError for others."""
    match = re.search(r"(?:models--facebook--|^facebook/|^)(opt-[\w.]+)", named)
    if not match:
        named = f"`{named}`" if named and "$" not in named else "by an argument"
        raise ConfigError(
            f"{script}: its model is named {named}, which `fit` does not support",
            hint="`labctl fit opt-13b` and the others of `labctl workloads` that begin with opt-",
        )
    return f"{CONFIGS}/{match[1]}.json"


def _config(given: Mapping[str, str]) -> deepspeed_config.Config:
    """Return the parts of DeepSpeed-Chat's configuration (training/utils/ds_utils.py) that matter to memory."""
    device = "cpu" if "offload" in given else "none"
    stage = given.get("zero_stage", "0")
    return {
        "train_micro_batch_size_per_gpu": int(given["per_device_train_batch_size"]),
        "gradient_accumulation_steps": int(given.get("gradient_accumulation_steps", "1")),
        "fp16": {"enabled": True},
        # FusedAdam, or CPUAdam if the optimizer is offloaded.
        "optimizer": {},
        "zero_optimization": {
            "stage": int(stage) if stage.isdigit() else 0,
            "offload_param": {"device": device},
            "offload_optimizer": {"device": device},
            "stage3_max_live_parameters": 30_000_000,
        },
    }
