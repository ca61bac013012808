#!/bin/bash
# What every rank of run 20260102-150405-ask-3fa2 executes. Written by labctl.
export RANK=${RANK:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${HOROVOD_RANK:-0}}}}
export WORLD_SIZE=${WORLD_SIZE:-${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-${HOROVOD_SIZE:-1}}}}
export LOCAL_RANK=${LOCAL_RANK:-${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-${HOROVOD_LOCAL_RANK:-0}}}}
export LOCAL_WORLD_SIZE=${LOCAL_WORLD_SIZE:-${LOCAL_SIZE:-${OMPI_COMM_WORLD_LOCAL_SIZE:-${MPI_LOCALNRANKS:-${HOROVOD_LOCAL_SIZE:-1}}}}}
export MASTER_ADDR=${MASTER_ADDR:-worker-2} MASTER_PORT=${MASTER_PORT:-29500}
# A launcher that hands on its whole environment hands on its own name too.
node=$(uname -n)
# Whole lines only, in writes that a pipe keeps together: a launcher that marks each piece of output with its rank would else
# mark the middle of one. Launchers that name the node alone do not say whose a line is: labctl reads a mark. Lines of this
# script have another, which no program can print: they come through a pipe of their own. A rank that its launcher starts
# again goes on in its log. What a rank prints when it is told to end has to arrive, too.
log=/workspace/outputs/20260102-150405-ask-3fa2/ranks/rank-"$RANK".log
greeting="labctl: rank $RANK of $WORLD_SIZE on $node"
# Beside the run's own files where the image may be anyone's.
output=/workspace/outputs/20260102-150405-ask-3fa2/rank_output.py
[[ -r $output ]] || output=/opt/lab/rank_output.py
if python=$(command -v /usr/bin/python3 || command -v python3); then
    exec {reports}<> <(:)
    exec > >(trap '' TERM INT HUP; exec "$python" -IS "$output" "$RANK" "$log" "$reports" "$greeting") 2>&1
    mark=
else
    # Its lines have no marks, but those of this script do.
    exec {reports}>&1 2>&1
    mark=$'\x01'$RANK$'!\x02'
    echo "$mark$greeting"
fi
report() {
    echo "$mark$*" >&"$reports"
}
# How many processes of this node the kernel has ended for want of memory, as cgroup v2 or v1 has it.
count_killed() {
    local name number
    killed=0
    while read -r name number; do [[ $name != oom_kill ]] || killed=$number; done \
        < /sys/fs/cgroup/memory.events || while read -r name number; do [[ $name != oom_kill ]] || killed=$number; done \
        < /sys/fs/cgroup/memory/memory.oom_control
} 2> /dev/null
say_failed() {
    code=$?
    [[ $code != 0 ]] || return
    local before=$killed
    count_killed
    [[ $killed == "$before" ]] || report "labctl: $node ran out of memory: the kernel killed $((killed - before)) of its processes"
    report "labctl: rank $RANK on $node exited with code $code"
}
count_killed
trap say_failed EXIT
# A rank that is ended by SIGSEGV or SIGABRT writes where it was, and so does one of a stalled run.
export PYTHONFAULTHANDLER=${PYTHONFAULTHANDLER:-1}
export LABCTL_RUN_ID=20260102-150405-ask-3fa2 LABCTL_RUN_DIR=/workspace/outputs/20260102-150405-ask-3fa2
export GREETING='a "b" $HOME'
export N=1
own_path=$PYTHONPATH
# What the workloads' scripts share; last, so that modules of the same name found elsewhere win.
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}/workspace/workloads/common
cd /workspace/outputs/20260102-150405-ask-3fa2/work || exit
# Says so where the code asks the Hugging Face hub, but no hub answers: its library would try for minutes.
hub_is_missed() {
    local hub=${HF_ENDPOINT:-https://huggingface.co} port=443 proxy=$HTTPS_PROXY$https_proxy code file
    [[ $hub == https:* ]] || port=80 proxy=$HTTP_PROXY$http_proxy
    [[ ! -v HF_HUB_OFFLINE && -z $proxy$ALL_PROXY$all_proxy ]] || return
    IFS=: read -ra code <<< "$own_path"
    # What decides by itself whether it asks, as labctl's workloads do beside a script in the lab's directory, is left to that.
    while read -r file; do
        grep -qsF HF_HUB_OFFLINE ./*.py "${file%/*}"/*.py || break
    done < <(grep -rlsE --include='*.py' 'from_pretrained\(|load_dataset\(|(import|from) huggingface_hub' . "${code[@]}")
    [[ $file ]] || return
    hub=${hub#*://} hub=${hub%%/*}
    [[ $hub != *:* ]] || port=${hub##*:} hub=${hub%:*}
    ! timeout 3 bash -c ': < "/dev/tcp/$0/$1"' "$hub" "$port" 2> /dev/null || return
    echo "labctl: $hub is not reached from $node within 3 s, so its ranks read the cache alone (HF_HUB_OFFLINE=1);" \
        "\`labctl cache --model NAME\` or \`--dataset NAME\` fills it"
}
# The first rank of each node prepares it, and decides for all; the others wait, so that no two compile the same thing.
mkdir -p ~/.cache && exec {lock}>>~/.cache/labctl-prepare && flock "$lock" || exit
read -r prepared hub < ~/.cache/labctl-prepare
if [[ $prepared != 20260102-150405-ask-3fa2 ]]; then
    # What a compilation that was killed has left: torch would wait for it without end.
    find ~/.cache/torch_extensions -name lock -delete 2> /dev/null
    hub=reached
    ! hub_is_missed || hub=missed
    # What an earlier program has left there.
    read -r _ size _ free _ < <(df -Pk /dev/shm 2> /dev/null | tail -n 1)
    ((${free:-0} * 10 >= ${size:-0})) || echo "labctl: $node has $((free / 1024)) of $((size / 1024)) MiB free in /dev/shm;" \
        "ranks die of SIGBUS when it is full, and \`labctl doctor\` has the command that empties it"
    echo 20260102-150405-ask-3fa2 $hub > ~/.cache/labctl-prepare
fi
exec {lock}>&-
[[ $hub != missed ]] || export HF_HUB_OFFLINE=1
# A rank outlives its launcher by no more than this, whatever became of labctl. Nobody answers what it asks. Its group is
# its own, in which SIGINT means what it does to a program that a person starts.
set -m
timeout --kill-after=10 120 python -u ask.py --say 'it'"'"'s; $(touch x)' '' --count 3 < /dev/null {reports}>&- &
wait $!
code=$?
# The launcher waits for whoever has the output open: the rank's group, or what it started in a session of its own.
find_left() {
    local fd pid
    left=()
    for fd in /proc/[0-9]*/fd/[12]; do
        pid=${fd#/proc/} pid=${pid%%/*}
        [[ $pid == $$ || ! $fd -ef /proc/$$/fd/1 ]] || left+=("$pid")
    done
}
# What has left the rank, and has its output elsewhere, is a child of the node's init that is younger than the rank; in a pod,
# whose init is sshd, ssh sessions are, too. The agent of the node ends what is left of a run, and looks for it if a rank says so.
report_leavers() {
    local file stat fields began
    [[ -e /opt/lab/labnode.py && ! -v LABCTL_KEYS ]] || return
    for file in /proc/$$/stat /proc/[0-9]*/stat; do
        stat=
        read -rd '' stat < "$file"
        # state, parent, and in the 20th place when it started, in hundredths of a second, which what started the rank may
        # share; behind a name in parentheses that may be anything; proc(5).
        read -ra fields <<< "${stat##*)}"
        : "${began:=${fields[19]}}"
        [[ ${fields[1]} != 1 || ${fields[0]} == [ZX] ]] || ((fields[19] <= began)) || break
        file=
    done 2> /dev/null
    [[ -z $file ]] || report "labctl: rank $RANK on $node left processes behind"
}
for ((tenths = 0; tenths < 50; tenths++)); do
    find_left
    [[ -v left ]] || kill -0 -- -$! 2> /dev/null || {
        report_leavers
        exit $code
    }
    sleep 0.1
done
left+=($(pgrep -g $!))
names=$(ps -o args= -p "${left[*]}" | paste -sd ';')
report "labctl: rank $RANK on $node has ended; what it started and left is ended too: $names"
kill -TERM -- -$! "${left[@]}" 2> /dev/null
sleep 1
find_left
kill -KILL -- -$! "${left[@]}" 2> /dev/null
exit $code
