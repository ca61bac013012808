#!/bin/bash
# One rank on every node over ssh, as a script of somebody's own might do it.
mapfile -t nodes < <(cut -d' ' -f1 "$LABCTL_HOSTFILE")
for rank in "${!nodes[@]}"; do
    echo "labctl: rank $rank of ${#nodes[@]} on ${nodes[rank]}"
    ssh -n "${nodes[rank]}" "RANK=$rank exec python -u '$PROJECT_PATH/workloads/stubborn/stubborn.py'" \
        | tee "$LABCTL_RUN_DIR/ranks/rank-$rank.log" &
done
wait
