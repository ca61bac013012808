#!/bin/sh
# What code, data and models a host has, for words in pairs of KIND and PATH; prints lines of KIND, PATH and value
# between tabs, none of what is not there:
#   code      a directory in a git repository: its commit, with ` changed` where what is below it differs from that
#   data      a file, or a directory: SHA-256 of the content, or of those of all files in it with their names
#   snapshot  a repository of the Hugging Face cache: its newest revision

code() {
    cd -- "$1" && found=$(git rev-parse HEAD --show-toplevel --git-path index --git-path objects) || return
    {
        read -r commit
        read -r top
        read -r index
        read -r objects
    } <<END
$found
END
    # With a git directory of its own: that of the clone, which containers may write to, can name programs to be run.
    own=$(mktemp -d) || return
    mkdir "$own/refs" "$own/objects"
    echo "$commit" >"$own/HEAD"
    state=$(GIT_DIR=$own GIT_WORK_TREE=$top GIT_INDEX_FILE=$(absolute "$index") GIT_OBJECT_DIRECTORY=$(absolute "$objects") \
        git --no-optional-locks status --porcelain --ignore-submodules=all -- .) || state=unknown
    rm -r "$own"
    say code "$1" "$commit${state:+ changed}"
}

absolute() {
    case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac
}

data() {
    if [ -d "$1" ]; then
        sums=$(cd -- "$1" && find -L . -type f -exec sha256sum {} + | LC_ALL=C sort -k 2 | sha256sum)
    else
        sums=$(sha256sum <"$1")
    fi && say data "$1" "${sums%% *}"
}

snapshot() {
    # shellcheck disable=SC2012 # names of snapshots are commits
    newest=$(cd -- "$1/snapshots" && ls -1t | head -n 1) && [ "$newest" ] && say snapshot "$1" "$newest"
}

say() {
    printf '%s\t%s\t%s\n' "$@"
}

while [ $# -gt 0 ]; do
    "$1" "$2" 2>/dev/null &
    shift 2
done
wait
