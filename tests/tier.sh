#!/usr/bin/env bash
# Run stages of make targets one after the other, the targets of a stage (such as lint+unit) side by side, until one
# fails; print how long each took. Each target is a process group, which is interrupted if it still runs at the end.
set -eumo pipefail

took=()
finish() {
    jobs -p | sed 's/^/-/' | xargs --no-run-if-empty kill -INT -- 2> /dev/null || true
    wait
    printf '%s\n' "${took[@]}" "$SECONDS s in all"
}
trap finish EXIT

run() {
    "${MAKE:-make}" --no-print-directory "$1" < /dev/null 2>&1 | sed --unbuffered "s/^/$1 | /"
}

for stage in "$@"; do
    declare -A targets=()
    began=$SECONDS
    for target in ${stage//+/ }; do
        run "$target" &
        targets[$!]=$target
    done
    while ((${#targets[@]})); do
        code=0
        wait -n -p ended "${!targets[@]}" || code=$?
        took+=("$((SECONDS - began)) s ${targets[$ended]}$( ((code == 0)) || echo ": failed, exit code $code")")
        unset "targets[$ended]"
        ((code == 0)) || exit "$code"
    done
done
