#!/bin/bash
# Starts a program on the machine that process $1 holds, in this same directory, with what is planted there on PATH.
pid=$1
shift
unset DOCKER_HOST DOCKER_CONTEXT
export PATH=/run/stand-in/bin:$PATH
exec nsenter --target="$pid" --mount --net -- bash -c 'cd "$0" && exec "$@"' "$PWD" "$@"
