"""What a DeepSpeed-Chat script of a person's clone trains, read from its text.

As Microsoft's scripts and Lambda's are written: a step's main.py with its arguments, whose variables the script, or its
``setup_env.sh MODEL STEP``, assigns.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from labctl.errors import ConfigError
from labctl.fit.training import arguments
from labctl.model import Memory, Workload
from labctl.system import procfs
from labctl.workloads import deepspeed_config
from labctl.workloads.schema import TASKS

CONFIGS = "../opt/configs"
"""The shapes of OPT, relative to the workload's directory."""
# Defaults of the steps' main.py, in DeepSpeed-Chat's training/step*/main.py.
DEFAULTS = {
    "max_seq_len": "512",
    "max_prompt_seq_len": "256",
    "max_answer_seq_len": "256",
    "per_device_train_batch_size": "16",
    "lora_module_name": "decoder.layers.",
}
# Its options under the names of ``workloads/opt``; step 3 gives the actor's under another one.
NAMES = {
    "max_seq_len": "sequence_length",
    "max_prompt_seq_len": "max_prompt_length",
    "max_answer_seq_len": "max_answer_length",
    "lora_module_name": "lora_modules",
}
# But for what a person gives: ``OUTPUT=$1``.
_ASSIGNED = re.compile(r"(?<!\S)(\w+)=((?!\$\{?\d)[^\s;&|\"']+)")


def described(workload: Workload, script: Path) -> Workload:
    """The workload of a script with its model, DeepSpeed's configuration and arguments, as `fit` takes them.

    ConfigError where the script does not say which OPT model it trains.
    """
    code = _code(procfs.read(script))
    variables = dict(_ASSIGNED.findall(code))
    if setup := re.search(r"setup_env\.sh\s+(\S+)\s+(\S+)", code):
        model, step = (_filled(word, variables) for word in setup.groups())
        case = rf'"\$model" = "{re.escape(model)}" \] && \[ "\$step" = "{re.escape(step)}" \];'
        setup_env = _code(procfs.read(script.parent / "setup_env.sh"))
        found = re.search(rf"{case}(.*?)\n(?:elif|else|fi)\b", setup_env, re.DOTALL)
        variables = {"MODEL_PATH": model, **variables, **dict(_ASSIGNED.findall(found[1] if found else ""))}
        step = f"step{step}_"
    else:
        step = next((part for part in script.parts if re.match(r"step[123]_", part)), "")
    command = re.search(r"\bmain\.py\b([^\n]*)", code)
    words = shlex.split(re.split(r"\s(?:\d?>|&>|\|)", command[1])[0]) if command else []
    said = arguments(tuple(_filled(word, variables) for word in words))
    given = {**DEFAULTS, **{_plain(name): " ".join(values) for name, values in said.items()}}
    if not re.match(r"step([123]_$|1_supervised|2_reward|3_rlhf)", step):
        raise ConfigError(f"{script}: the memory of its step is not known", hint="those of steps 1 to 3 are")
    task = TASKS[int(step[4]) - 1]
    critic = _shape(script, given.get("critic_model_name_or_path", "")) if task == "rlhf" else None
    return replace(
        workload,
        memory=Memory(model=_shape(script, given.get("model_name_or_path", "")), critic=critic, task=task),
        deepspeed=_config(given),
        arguments=tuple(
            word
            for name, value in given.items()
            if name in (*NAMES, "lora_dim", "gradient_checkpointing", "critic_zero_stage")
            for word in (f"--{NAMES.get(name, name)}", *value.split())
        ),
    )


def _code(text: str) -> str:
    """A shell script without comments, each command on one line."""
    return re.sub(r"(?m)^\s*#.*$", "", text).replace("\\\n", " ")


def _filled(word: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], found[0]), word)


def _plain(name: str) -> str:
    """An option of step 3 by the name that the other steps have for it."""
    name = name.removeprefix("actor_")
    return "per_device_train_batch_size" if name == "per_device_training_batch_size" else name


def _shape(script: Path, named: str) -> str:
    """The file with the shape of a model that is named by its repository, or by its snapshot in the hub's cache."""
    found = re.search(r"(?:models--facebook--|^facebook/|^)(opt-[\w.]+)", named)
    if not found:
        named = f"`{named}`" if named and "$" not in named else "by an argument"
        raise ConfigError(
            f"{script}: its model is named {named}, and of that `fit` does not know the memory",
            hint="`labctl fit opt-13b` and the others of `labctl workloads` that begin with opt-",
        )
    return f"{CONFIGS}/{found[1]}.json"


def _config(given: Mapping[str, str]) -> deepspeed_config.Config:
    """DeepSpeed's configuration as DeepSpeed-Chat's training/utils/ds_utils.py makes it."""
    device = "cpu" if "offload" in given else "none"
    stage = given.get("zero_stage", "0")
    return {
        "train_micro_batch_size_per_gpu": int(given["per_device_train_batch_size"]),
        "gradient_accumulation_steps": int(given.get("gradient_accumulation_steps", "1")),
        "fp16": {"enabled": True},
        # FusedAdam, or CPUAdam where the optimizer is offloaded.
        "optimizer": {},
        "zero_optimization": {
            "stage": int(stage) if stage.isdigit() else 0,
            "offload_param": {"device": device},
            "offload_optimizer": {"device": device},
            "stage3_max_live_parameters": 30_000_000,
        },
    }
