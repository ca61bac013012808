#!/bin/bash
# SCRIPT HOSTFILES OUTPUT TIMEOUT: starts other scripts, so it is none to run on one hostfile.
for hostfile in "$2"/hostfile_*; do
    timeout "$4" "./$1.sh" "${hostfile##*hostfile_}" "$hostfile" "$3" &
done
wait
