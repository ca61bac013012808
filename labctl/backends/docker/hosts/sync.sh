# Sync directories
# shellcheck shell=sh
# Receives, compares, gives back and removes directories on a host; run as `sh -c SCRIPT sh COMMAND ARGUMENTS`.
# POSIX sh with coreutils, find, grep, xargs and tar, those of busybox too.
#
# A pushed directory is laid out as Kubernetes lays out a ConfigMap volume: its versions are .versions/<id>/, .current is
# a link to the one in force, and every name in that is a link through .current. One rename switches all names at once,
# also in containers that have the directory mounted. Each push works in .incoming.<pid> and names its version <pid>.*:
# while it lives, no other push removes them.
set -eu
export LC_ALL=C
umask 077

fail() {
    printf '%s\n' "$*" >&2
    exit 1
}

# Whether process $1 runs this script.
alive() { grep -qs '\.incoming' "/proc/$1/cmdline"; }

# Remove what ended pushes left in $1.
sweep() { for path in "$1"/.incoming.*; do alive "${path##*.}" || rm -rf "$path"; done; }

# Unpack the input in a directory of this process below $1; a tar that a broken connection cut off has no `complete`.
unpack() {
    work=$1/.incoming.$$
    rm -rf "$work"
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' HUP INT PIPE TERM
    mkdir -p "$work/before"
    cd "$work"
    for item in $2; do ln -s "$directory/${item#*:}/.current/" "before/${item%%:*}"; done
    tar -xpof -
    [ -f complete ] || fail "the connection broke off"
}

# Link each name of the version $2 into $1.
link_names() {
    for path in "$2"/* "$2"/.[!.]* "$2"/..?*; do
        name=$1/${path##*/} target=.current/${path##*/}
        if [ ! -e "$path" ] && [ ! -L "$path" ]; then continue; fi
        if [ -e "$name" ] && [ ! -L "$name" ]; then fail "$name is in the way: it was not sent"; fi
        [ "$(readlink "$name")" = "$target" ] || ln -sfn "$target" "$name"
    done
}

# Bring $1 in line with its version in force. Earlier ones stay for 30 days, as a run or a shell may be in them; those of
# a node do not: a key or secret that was removed must be gone.
settle() {
    link_names "$1" "$1/.current"
    for path in "$1"/.versions/*; do
        # In this order: a push that has ended does not put its version in force after this look.
        id=${path##*/}
        if alive "${id%%.*}" || [ "$(readlink "$1/.current")" = ".versions/$id" ]; then continue; fi
        case $1 in
        */.lab/nodes/*) ;;
        *) [ -z "$(find "$path" -prune -mtime -30)" ] || continue ;;
        esac
        rm -rf "$path"
    done
    # Another push may have linked names that its version will have.
    for path in "$directory"/.incoming.*; do
        if [ "$path" != "${work-}" ] && alive "${path##*.}"; then return; fi
    done
    for path in "$1"/* "$1"/.[!.]* "$1"/..?*; do
        if [ -e "$path" ] || [ -L "$1/.current/${path##*/}" ]; then continue; fi
        case $(readlink "$path") in .current/*) rm -f "$path" ;; esac
    done
}

list() { find -H .current -mindepth 1 -name __pycache__ -prune -o -type "$1" -print0; }

# Describe the version in force of the directory where this runs: lists of NUL-ended names, each ended by an empty one,
# then NUL-ended texts with a line for each name.
describe() {
    for kind in d f l; do
        list "$kind"
        printf '\000'
    done
    # shellcheck disable=SC2016 # the inner shell expands it
    list l | xargs -0r -n 1 sh -c 'readlink "$0"; printf "\000"'
    printf '\000'
    list d | xargs -0r stat -c %f
    printf '\000'
    list f | xargs -0r stat -c '%f %s'
    printf '\000'
    list f | xargs -0r sha256sum
    printf '\000'
}

command=$1 directory=$2
shift 2
case $command in
inspect) # NUMBER:NAME...: describe these directories; with `tidy`, remove what failed pushes and, below $3, other nodes left
    if [ "$2" = tidy ]; then
        sweep "$directory"
        for path in "$directory/$3"/* "$directory/$3"/*/*; do
            if [ -z "$3" ] || [ ! -d "$path" ] || [ -L "$path" ]; then continue; fi
            case "$1 " in
            *":${path#"$directory/"} "* | *":${path#"$directory/"}/"*) ;;
            *) rm -rf "$path" ;;
            esac
        done
    fi
    for item in $1; do
        if cd "$directory/${item#*:}" 2>/dev/null; then
            if [ "$2" = tidy ] && [ -e .current ]; then settle "$PWD"; fi
            find . -maxdepth 1 \( -name . -o -type l \) -print0
            printf '\000'
            (set +e; describe 2>/dev/null)
        else
            printf '\000'
        fi
    done
    ;;
push) # NUMBER:NAME...: make these directories show the trees that come
    mkdir -p "$directory"
    sweep "$directory"
    for item in $1; do mkdir -p "$directory/${item#*:}/.versions"; done
    unpack "$directory" "$1"
    for item in $1; do link_names "$directory/${item#*:}" "${item%%:*}"; done
    # From here on a broken connection changes nothing.
    trap '' HUP INT PIPE TERM
    for item in $1; do
        version=$(mktemp -d "$directory/${item#*:}/.versions/$$.XXXXXX")
        mv -T "${item%%:*}" "$version"
        ln -s ".versions/${version##*/}" "current.${item%%:*}"
    done
    for item in $1; do
        # The date of a version is the last on which it was in force.
        touch -c "$directory/${item#*:}/.current/." || :
        mv -T "current.${item%%:*}" "$directory/${item#*:}/.current"
    done
    for item in $1; do settle "$directory/${item#*:}"; done
    ;;
create) # make a new directory of the tree that comes
    [ ! -e "$directory" ] || fail "$directory is there already"
    mkdir -p "${directory%/*}"
    # Containers write to the directory above it.
    sweep "${directory%/*/*}"
    unpack "${directory%/*/*}" ""
    mv -T 0 "$directory"
    ;;
folders) # list the folders
    for path in "$directory"/*; do
        [ ! -d "$path" ] || [ -L "$path" ] || printf '%s\n' "${path##*/}"
    done
    ;;
pull)
    cd "$directory" || exit 3
    exec tar -cf - .
    ;;
remove) # with $1, the directory above, where that is empty then
    if [ ! -e "$directory" ] && [ ! -L "$directory" ]; then exit 0; fi
    rm -rf "$directory" 2>/dev/null || { chmod -R u+rwx "$directory" 2>/dev/null; rm -rf "$directory"; }
    rmdir "$1" 2>/dev/null || :
    ;;
esac
