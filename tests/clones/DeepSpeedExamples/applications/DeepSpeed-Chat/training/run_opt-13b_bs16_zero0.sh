#!/bin/bash
JOB_NAME=${1:-"1xN"}
HOSTFILE_NAME=${2:-""}
OUTPUT_PATH=${3:-"output"}
LOG=${OUTPUT_PATH}/opt-13b_1_${JOB_NAME}.log
cat $HOSTFILE_NAME | tee $LOG
echo >> $LOG
source ./setup_env.sh opt-13b 1 && \
deepspeed --hostfile=$HOSTFILE_NAME --master_addr $(head -n 1 $HOSTFILE_NAME | cut -d" " -f1) \
    $SCRIPT_PATH/main.py --data_output_path $DATA_OUTPUT_PATH \
    --model_name_or_path $MODEL_PATH --per_device_train_batch_size 16 --max_steps 3 --deepspeed 2>&1 | tee -a $LOG
