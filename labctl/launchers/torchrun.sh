#!/bin/bash
# torchrun.sh NODE,NODE... COMMAND...: on every node. Its end on the first one, where ranks meet, is the run's.
IFS=, read -ra nodes <<< "$1"
shift
# Each ssh is in a group of its own.
set -m
on() {
    ssh -n -- "$1" "$2" --local-addr "$1" "${@:3}" 2>&1 | stdbuf -oL sed "s/^/$1: /"
    return "${PIPESTATUS[0]}"
}
for node in "${nodes[@]:1}"; do
    on "$node" "$@" &
done
on "${nodes[0]}" "$@"
code=$?
# The others end too, unless they are lost.
for ((tenths = 0; tenths < 30; tenths++)); do
    [[ $(jobs -r) ]] || break
    sleep 0.1
done
for group in $(jobs -p); do
    kill -- "-$group" 2> /dev/null
done
exit $code
