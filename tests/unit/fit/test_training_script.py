"""Parameters that `fit` reads from scripts of the user's clone of DeepSpeed-Chat."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders import workload

from labctl import fit
from labctl.errors import ConfigError
from labctl.fit import training_script
from labctl.fit.training import Training

DSCHAT = Path(__file__).resolve().parents[3] / "workloads/dschat"
SETUP = """\
model="$1"
if [ "$model" = "opt-66b" ] && [ "$step" = "1" ]; then
    export ZERO_STAGE=3
elif [ "$model" = "opt-13b" ] && [ "$step" = "3" ]; then
    export ACTOR_ZERO_STAGE=3
    export CRITIC_ZERO_STAGE=2
    export ACTOR_MODEL_CACHE=${PROJECT_PATH}/hub/models--facebook--opt-13b/snapshots/e5
    export CRITIC_MODEL_CACHE=${PROJECT_PATH}/hub/models--facebook--opt-350m/snapshots/08
else
    exit 1
fi
"""
THIRD = """\
OUTPUT_PATH=${3:-"output"}
# MODEL_NAME=opt-350m
# deepspeed $SCRIPT_PATH/main.py --max_seq_len 64
MODEL_NAME=opt-13b
STEP_NAME=3
source ./setup_env.sh $MODEL_NAME $STEP_NAME && \\
deepspeed --hostfile=$2 --master_port 12346 $SCRIPT_PATH/main.py \\
   --actor_model_name_or_path $ACTOR_MODEL_CACHE --critic_model_name_or_path $CRITIC_MODEL_CACHE \\
   --per_device_train_batch_size 8 --max_answer_seq_len 128 --deepspeed \\
   --actor_zero_stage $ACTOR_ZERO_STAGE --critic_zero_stage $CRITIC_ZERO_STAGE \\
   --actor_gradient_checkpointing --actor_lora_dim 128 --max_steps 50 2>&1 | tee -a $OUTPUT_PATH/log
"""
OF_STEP = """\
OUTPUT=$1
ZERO_STAGE=$2
if [ "$ZERO_STAGE" == "" ]; then
    ZERO_STAGE=2
fi
deepspeed main.py --data_path Dahoas/rm-static --model_name_or_path facebook/opt-1.3b --offload \\
   --gradient_accumulation_steps 4 --zero_stage $ZERO_STAGE --output_dir $OUTPUT &> $OUTPUT/training.log
"""


def training(script: Path, text: str) -> Training:
    """Write the script and its setup_env.sh; return the training that fit reads from them."""
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(text)
    (script.parent / "setup_env.sh").write_text(SETUP)
    return fit.of(training_script.described(workload(directory=DSCHAT), script), "nvidia", 8, 2)


def test_a_script_that_sources_its_models_is_read_with_what_it_sources(tmp_path: Path) -> None:
    """Read a script that sources its models: RLHF with actor, critic, stages, lengths and adapters."""
    parsed = training(tmp_path / "run_opt-13b.sh", THIRD)
    assert (parsed.task, parsed.model.name, parsed.critic and parsed.critic.name) == ("rlhf", "opt-13b", "opt-350m")
    assert (parsed.stage, parsed.critic_stage, parsed.micro_batch) == (3, 2, 8)
    assert (parsed.sequence_length, parsed.answer_length) == (256 + 128, 128)
    assert (parsed.lora_dim, parsed.gradient_checkpointing, parsed.offload_optimizer) == (128, True, False)


def test_a_script_of_a_step_is_read_with_its_defaults(tmp_path: Path) -> None:
    """Read a step's script: task from its folder, values from its options and DeepSpeed-Chat's defaults."""
    parsed = training(tmp_path / "step1_supervised_finetuning/training_scripts/opt/run_1.3b.sh", OF_STEP)
    assert (parsed.task, parsed.model.name, parsed.stage, parsed.micro_batch) == ("sft", "opt-1.3b", 2, 16)
    assert (parsed.sequence_length, parsed.gradient_accumulation_steps, parsed.lora_dim) == (512, 4, 0)
    assert parsed.offload_optimizer
    assert parsed.fused_optimizer
    reward = training(tmp_path / "step2_reward_model_finetuning/run_1.3b.sh", OF_STEP)
    assert reward.task == "reward"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("step1_supervised/run.sh", OF_STEP.replace("facebook/opt-1.3b", "mine/bloom"), "named `mine/bloom`"),
        ("step3_rlhf/run.sh", OF_STEP.replace("facebook/opt-1.3b", "$1"), "named by an argument"),
        ("step2_dpo/run.sh", OF_STEP, "the memory of its step is unknown"),
    ],
)
def test_a_script_whose_training_is_not_known_is_refused(tmp_path: Path, name: str, text: str, why: str) -> None:
    """Read a script with unknown model or step: ConfigError with the reason."""
    with pytest.raises(ConfigError, match=why):
        training(tmp_path / name, text)
