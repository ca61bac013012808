#!/bin/bash
# What every rank of run 20260102-150405-ask-3fa2 executes. Written by labctl.
rank=${RANK:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${HOROVOD_RANK:-0}}}}
world=${WORLD_SIZE:-${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-${HOROVOD_SIZE:-1}}}}
exec > >(exec tee /workspace/runs/20260102-150405-ask-3fa2/ranks/rank-"$rank".log) 2>&1
trap 'code=$?; [[ $code == 0 ]] || echo "labctl: rank $rank on $HOSTNAME exited with code $code"' EXIT
echo "labctl: rank $rank of $world on $HOSTNAME"
export GREETING='a "b" $HOME'
export N=1
cd /workspace/workloads/ask || exit
# A rank outlives its launcher by no more than this, whatever became of labctl.
timeout --kill-after=10 120 python -u ask.py --say 'it'"'"'s; $(touch x)' '' --count 3
