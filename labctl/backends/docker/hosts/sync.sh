# Sync directories
# shellcheck shell=sh
# Receives, compares, gives back and removes directories on a host; run as `sh -c SCRIPT sh COMMAND ARGUMENTS`.
# POSIX sh with coreutils, find, grep, xargs and tar, those of busybox too.
#
# A pushed directory has the layout of a Kubernetes ConfigMap volume: its versions are .versions/<id>/, .current is a
# link to the active version, and every name in that is a link through .current. A single rename switches all names,
# also in containers that mount the directory. Each push works in .incoming.<pid> and names its version <pid>.*: while
# it runs, no other push removes them.
set -eu
export LC_ALL=C
umask 077

fail() {
    printf '%s\n' "$*" >&2
    exit 1
}

# True if process $1 runs this script.
alive() { grep -qs '\.incoming' "/proc/$1/cmdline"; }

# Remove leftovers of ended pushes in $1.
sweep() { for path in "$1"/.incoming.*; do alive "${path##*.}" || rm -rf "$path"; done; }

# Unpack the input in this process's directory below $1; a tar cut off by a broken connection has no `complete`.
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

# Make $1 match its active version. Earlier versions stay for 30 days, as a run or a shell may use them; but not a
# node's: a removed key or secret must disappear.
settle() {
    link_names "$1" "$1/.current"
    for path in "$1"/.versions/*; do
        # In this order: an ended push does not activate its version after this check.
        id=${path##*/}
        if alive "${id%%.*}" || [ "$(readlink "$1/.current")" = ".versions/$id" ]; then continue; fi
        case $1 in
        */.lab/nodes/*) ;;
        *) [ -z "$(find "$path" -prune -mtime -30)" ] || continue ;;
        esac
        rm -rf "$path"
    done
    # Another push may have linked the names of its coming version.
    for path in "$directory"/.incoming.*; do
        if [ "$path" != "${work-}" ] && alive "${path##*.}"; then return; fi
    done
    for path in "$1"/* "$1"/.[!.]* "$1"/..?*; do
        if [ -e "$path" ] || [ -L "$1/.current/${path##*/}" ]; then continue; fi
        case $(readlink "$path") in .current/*) rm -f "$path" ;; esac
    done
}

list() { find -H .current -mindepth 1 -name __pycache__ -prune -o -type "$1" -print0; }

# Describe the active version of the current directory: lists of NUL-terminated names, each ended by an empty name, then
# NUL-terminated texts with a line for each name.
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
inspect) # NUMBER:NAME...: describe these directories; with `tidy`, remove leftovers of failed pushes and, below $3, of other nodes
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
push) # NUMBER:NAME...: replace these directories by the trees in the input
    mkdir -p "$directory"
    sweep "$directory"
    for item in $1; do mkdir -p "$directory/${item#*:}/.versions"; done
    unpack "$directory" "$1"
    for item in $1; do link_names "$directory/${item#*:}" "${item%%:*}"; done
    # From here on a broken connection does no harm.
    trap '' HUP INT PIPE TERM
    for item in $1; do
        version=$(mktemp -d "$directory/${item#*:}/.versions/$$.XXXXXX")
        mv -T "${item%%:*}" "$version"
        ln -s ".versions/${version##*/}" "current.${item%%:*}"
    done
    for item in $1; do
        # The date of a version is the last time that it was active.
        touch -c "$directory/${item#*:}/.current/." || :
        mv -T "current.${item%%:*}" "$directory/${item#*:}/.current"
    done
    for item in $1; do settle "$directory/${item#*:}"; done
    ;;
create) # create a directory from the tree in the input
    [ ! -e "$directory" ] || fail "$directory already exists"
    mkdir -p "${directory%/*}"
    # Containers can write to its parent directory.
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
remove) # also remove $1, its parent directory, if that is empty then
    if [ ! -e "$directory" ] && [ ! -L "$directory" ]; then exit 0; fi
    rm -rf "$directory" 2>/dev/null || { chmod -R u+rwx "$directory" 2>/dev/null; rm -rf "$directory"; }
    rmdir "$1" 2>/dev/null || :
    ;;
esac
