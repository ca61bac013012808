#!/bin/bash
# What every rank of run 20260102-150405-ask-3fa2 executes. Written by labctl.
export RANK=${RANK:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${HOROVOD_RANK:-0}}}}
export WORLD_SIZE=${WORLD_SIZE:-${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-${HOROVOD_SIZE:-1}}}}
export LOCAL_RANK=${LOCAL_RANK:-${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-${HOROVOD_LOCAL_RANK:-0}}}}
export LOCAL_WORLD_SIZE=${LOCAL_WORLD_SIZE:-${LOCAL_SIZE:-${OMPI_COMM_WORLD_LOCAL_SIZE:-${MPI_LOCALNRANKS:-${HOROVOD_LOCAL_SIZE:-1}}}}}
export MASTER_ADDR=${MASTER_ADDR:-worker-2} MASTER_PORT=${MASTER_PORT:-29500}
# A launcher that hands on its whole environment hands on its own name too.
node=$(uname -n)
# Whole lines only: a launcher that marks each piece of output with its rank would else mark the middle of one. And no
# NUL, at which pdsh ends a line.
exec > >(stdbuf -oL tr -d '\0' | LC_ALL=C grep --text --line-buffered '' | tee /workspace/outputs/20260102-150405-ask-3fa2/ranks/rank-"$RANK".log) 2>&1
trap 'code=$?; [[ $code == 0 ]] || echo "labctl: rank $RANK on $node exited with code $code"' EXIT
echo "labctl: rank $RANK of $WORLD_SIZE on $node"
export LABCTL_RUN_ID=20260102-150405-ask-3fa2 LABCTL_RUN_DIR=/workspace/outputs/20260102-150405-ask-3fa2
export GREETING='a "b" $HOME'
export N=1
# What the workloads' scripts share; last, so that modules of the same name found elsewhere win.
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}/workspace/workloads/common
cd /workspace/outputs/20260102-150405-ask-3fa2/work || exit
# The first rank of each node prepares it; the others wait, so that no two compile the same thing.
mkdir -p ~/.cache && exec {lock}>>~/.cache/labctl-prepare && flock "$lock" || exit
if [[ $(< ~/.cache/labctl-prepare) != 20260102-150405-ask-3fa2 ]]; then
    # What a compilation that was killed has left: torch would wait for it without end.
    find ~/.cache/torch_extensions -name lock -delete 2> /dev/null
    echo 20260102-150405-ask-3fa2 > ~/.cache/labctl-prepare
fi
exec {lock}>&-
# A rank outlives its launcher by no more than this, whatever became of labctl. Nobody answers what it asks. Its group is
# its own, in which SIGINT means what it does to a program that a person starts.
set -m
timeout --kill-after=10 120 python -u ask.py --say 'it'"'"'s; $(touch x)' '' --count 3 < /dev/null &
wait $!
code=$?
# The launcher waits for whoever has the output open.
for ((tenths = 0; tenths < 50; tenths++)); do
    kill -0 -- -$! 2> /dev/null || exit $code
    sleep 0.1
done
left=$(pgrep -a -g $! | cut -d' ' -f2- | paste -sd ';')
echo "labctl: rank $RANK on $node has ended; what it started and left is ended too: $left"
kill -TERM -- -$!
sleep 1
kill -KILL -- -$! 2> /dev/null
exit $code
