#!/bin/sh
# Prints the code, data and models on a host, for arguments in pairs of KIND and PATH: lines of KIND, PATH and value,
# separated by tabs, for each that exists:
#   code      a directory in a git repository: its commit, with ` changed` if its files differ from the commit
#   data      SHA-256 of a file's content, or of the names and digests of all files in a directory
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
    # With a separate git directory: containers may write to the clone's own, which can name programs to run.
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
