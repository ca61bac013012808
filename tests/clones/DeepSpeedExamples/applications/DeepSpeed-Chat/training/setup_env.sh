#!/bin/bash
# Sourced: MODEL STEP -> where the step's main.py is, and what it is given. An unknown pair ends the script.
here=${PROJECT_PATH}/DeepSpeedExamples/applications/DeepSpeed-Chat/training
case $1/$2 in
    opt-66b/1 | opt-13b/1 | opt-350m/1) step=step1_supervised_finetuning ;;
    opt-350m/2) step=step2_reward_model_finetuning ;;
    opt-13b/3) step=step3_rlhf_finetuning ;;
    *) echo "no such model and step: $1 $2"; exit 1 ;;
esac
export SCRIPT_PATH=$here/$step MODEL_PATH=facebook/$1 DATA_OUTPUT_PATH=${PROJECT_PATH}/.cache/data_files/$1_step$2
