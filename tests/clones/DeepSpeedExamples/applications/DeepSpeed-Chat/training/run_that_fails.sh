#!/bin/bash
JOB_NAME=${1:-"1xN"}
HOSTFILE_NAME=${2:-""}
OUTPUT_PATH=${3:-"output"}
LOG=${OUTPUT_PATH}/opt-350m_1_${JOB_NAME}.log
cat $HOSTFILE_NAME | tee $LOG
echo >> $LOG
source ./setup_env.sh opt-350m 1 && \
/home/${USER}/.local/bin/deepspeed --hostfile=$HOSTFILE_NAME --master_port 12346 \
    $SCRIPT_PATH/main.py --data_output_path $DATA_OUTPUT_PATH \
    --model_name_or_path $MODEL_PATH --per_device_train_batch_size 4 --max_steps 0 --deepspeed 2>&1 | tee -a $LOG
