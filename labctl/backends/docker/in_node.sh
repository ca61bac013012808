#!/bin/sh
# What labctl asks in a node's container: COMMAND ARGUMENT.
# shellcheck disable=SC2317,SC2329 # every function is a command, called by the last line

# has_command NAME: true if it is on PATH. `command -v` would count the shell's builtins.
has_command() {
    case $1 in */*) [ -e "$1" ]; return ;; esac
    IFS=:
    for folder in $PATH; do
        [ ! -e "$folder/$1" ] || return 0
    done
    return 1
}

# runs VARIABLE=VALUE: true if a process that was started from outside the container has this in its environment.
runs() {
    # shellcheck disable=SC2013 # paths without blanks
    for status in $(grep -ls '^PPid:[[:space:]]*0$' /proc/[0-9]*/status); do
        ! grep -sqzFx -e "$1" "${status%status}environ" || return 0
    done
    return 1
}

# answers NODE...: the names of the nodes that let one in over ssh within a second.
answers() {
    for node; do
        timeout 2 ssh -n -o BatchMode=yes -o ConnectTimeout=1 -- "$node" hostname 2>/dev/null &
    done
    wait
}

# stand_by NODES COMMAND...: become that command, and meanwhile print `reached NODE` for each of these nodes whose sshd greets
# within two seconds, and `reached` after the last. A login would take 0.2 s, and the run's own launcher logs in next.
stand_by() {
    nodes=$1
    shift
    {
        for node in $nodes; do
            # shellcheck disable=SC2016 # for the shell within
            timeout 2 bash -c 'read -r text < "/dev/tcp/$0/$LAB_SSH_PORT" && [[ $text == SSH-* ]] && echo "reached $0"' \
                "$node" 2>/dev/null &
        done
        wait
        echo reached
    } </dev/null &
    exec "$@"
}

# if_runs COMMAND...: that command, where the agent knows of a run; most launchers know of none, and Python takes a while.
if_runs() {
    for job in /var/lib/lab/runs/*/job.json; do
        [ ! -e "$job" ] || exec "$@"
    done
}

# background COMMAND...: start that command, and leave it to itself.
background() {
    "$@" </dev/null >/dev/null 2>&1 &
}

# hears NODE...: each node with `heard`, where its sshd takes a connection, `refused`, where its machine answers and sshd is
# gone, or `silent`, where nothing answers within two seconds; no line for a node of which that is unknown.
hears() {
    for node; do
        {
            # shellcheck disable=SC2016 # for the shell within
            said=$(LC_ALL=C timeout 2 bash -c ': < "/dev/tcp/$0/$LAB_SSH_PORT"' "$node" 2>&1)
            case $?:$said in
                0:*) echo "$node heard" ;;
                *refused*) echo "$node refused" ;;
                124:* | *"No route"* | *unreachable* | *"timed out"*) echo "$node silent" ;;
            esac
        } &
    done
    wait
}

"$@"
