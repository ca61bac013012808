"""What runs on a host to put trees there and take them away: POSIX sh with coreutils, find, xargs, sed and tar.

Below a directory that shows a tree lie ``.sent/<digest>.<sender>/``, the versions of the tree; ``.now``, a link to the
one that counts; and for each name in the tree a link through ``.now``. So one rename makes every name show the new
version, also in containers that have the directory mounted. A version is filled beside all that, in ``.part.<sender>``,
with hard links for what did not change, and takes its place once the host itself has found in it what was read here.
Whoever had entered a directory before stands in its version of then, which therefore stays a while.
A sender is a process of the host: while it lives, nobody clears what is its own.
"""

from __future__ import annotations

COMMON = r"""
set -eu
LC_ALL=C; export LC_ALL
umask 077

fail() { printf '%s\n' "$*" >&2; exit 1; }

# When a process began, in ticks since the host did: with its number, what tells it from all others.
began() {
    read -r stat <"/proc/$1/stat" || return 0
    set -- ${stat##*) }
    printf '%s' "${20}"
} 2>/dev/null

alive() { [ "$(began "${1%-*}")" = "${1##*-}" ]; }

# What lies in the version $1, in the words whose SHA-256 is its digest.
describe() (
    cd "$1/tree"
    for list in dirs files links; do cat "../$list"; printf '\000'; done
    xargs -0r stat -c %f <../dirs
    xargs -0r stat -c '%f %s' <../files
    xargs -0r sha256sum <../files | sed -n 's/^\\\{0,1\}\([0-9a-f]\{64\}\) .*/\1/p'
    xargs -0r stat -c %s <../links
    xargs -0r -n 1 readlink <../links
)
digest() { describe "$1" | sha256sum | cut -d ' ' -f 1; }

# What senders that are no more have left in $1.
sweep() { for path in "$1"/.part.*; do alive "${path##*.}" || rm -rf "$path"; done; }

# Work in a directory of this sender's own below $1, which goes with it.
begin() {
    mkdir -p "$1"
    sweep "$1"
    owner=$$-$(began $$)
    work=$1/.part.$owner
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' HUP INT PIPE TERM
    mkdir "$work"
    cd "$work"
}

require() { [ "$(digest "$work/$1")" = "$2" ] || fail "what came is not what was read: a file changed meanwhile?"; }

# number:digest:name
split() { number=${1%%:*} target=$directory/${1##*:} digest=${1#*:} digest=${digest%%:*}; }

# Whether what $target has for now is the version of this digest, and unharmed.
current() {
    now=$(readlink "$target/.now") || now=
    version=$target/${now%/tree}
    case $now in
    ".sent/$digest."*) [ "$(digest "$version" 2>/dev/null)" = "$digest" ] ;;
    *) false ;;
    esac
}

# Each name of the tree $2 leads through .now.
enter() {
    for path in "$2"/* "$2"/.[!.]* "$2"/..?*; do
        entry=$1/${path##*/}
        if [ -L "$entry" ] || { [ ! -e "$path" ] && [ ! -L "$path" ]; }; then continue; fi
        [ ! -e "$entry" ] || fail "$entry is in the way: it was not sent"
        ln -sfn ".now/${path##*/}" "$entry"
    done
}

# Nothing remains in $1 but the version that counts, what living senders have, and those that a run or a shell may stand
# in: that counted in the last 30 days. Of a node's directory none does: a key or secret that was taken away is gone.
settle() {
    enter "$1" "$1/.now"
    for path in "$1"/.sent/*.*; do
        # In this order: a sender that is no more will not make its version count after this look.
        alive "${path##*.}" && continue
        case $(readlink "$1/.now") in ".sent/${path##*/}/tree") continue ;; esac
        case $1 in
        */.lab/nodes/*) ;;
        *) [ -z "$(find "$path" -prune -type d -mtime -30 2>/dev/null)" ] || continue ;;
        esac
        rm -rf "$path"
    done
    for path in "$directory"/.part.*; do
        if [ "$path" != "${work-}" ] && alive "${path##*.}"; then return 0; fi
    done
    for path in "$1"/* "$1"/.[!.]* "$1"/..?*; do
        name=${path##*/}
        [ -L "$path" ] && [ ! -e "$1/.now/$name" ] && [ ! -L "$1/.now/$name" ] || continue
        case $(readlink "$path") in .now/*) rm -f "$path" ;; esac
    done
}
"""

# Says of each tree that it is there, or else describes what is; removes other trees' directories from below $3.
ASK = (
    COMMON
    + r"""
directory=$1 trees=$2 alone=$3
! command -v rsync >/dev/null || printf rsync
[ -d "$directory" ] || exit 0
sweep "$directory"
for path in "$directory/$alone"/* "$directory/$alone"/*/*; do
    if [ -z "$alone" ] || [ ! -d "$path" ] || [ -L "$path" ]; then continue; fi
    case "$trees " in
    *":${path#"$directory/"} "* | *":${path#"$directory/"}/"*) ;;
    *) rm -rf "$path" ;;
    esac
done
for one in $trees; do
    split "$one"
    printf '\000end\000'
    if current; then
        settle "$target"
        printf same
    elif [ -n "$now" ]; then
        describe "$version" 2>/dev/null || :
    fi
done
"""
)

# Says a word of each tree and changes nothing: same; other; gone, where there is no such directory.
LOOK = (
    COMMON
    + r"""
directory=$1 trees=$2
for one in $trees; do
    split "$one"
    said=other
    if current; then
        said=same
        for path in "$version"/tree/* "$version"/tree/.[!.]* "$version"/tree/..?*; do
            if [ -e "$path" ] || [ -L "$path" ]; then [ -L "$target/${path##*/}" ] || said=other; fi
        done
    elif [ ! -d "$target" ]; then
        said=gone
    fi
    echo "$said"
done
"""
)

FILL = (
    COMMON
    + r"""
how=$1 directory=$2 trees=$3
shift 3
begin "$directory"
mkdir before
for one in $trees; do
    split "$one"
    mkdir -p "$target/.sent" "before/$number"
    [ ! -L "$target/.now" ] || ln -s "$target/$(readlink "$target/.now")" "before/$number/tree"
done
case $how in
tar) tar -xpof - ;;
rsync) rsync "$@" ;;
esac
for one in $trees; do
    split "$one"
    require "$number" "$digest"
    enter "$target" "$number/tree"
done
# From here on it is a matter of the host alone, whatever becomes of the connection.
trap '' HUP INT PIPE TERM
for one in $trees; do
    split "$one"
    mv "$number" "$target/.sent/$digest.$owner"
    ln -s ".sent/$digest.$owner/tree" "$target/.sent/now.$owner"
done
for one in $trees; do
    split "$one"
    # The date of a version is the last on which it counted.
    touch -c "$target/.now/.." || :
    mv -T "$target/.sent/now.$owner" "$target/.now"
done
for one in $trees; do
    split "$one"
    settle "$target"
done
"""
)

NEW = (
    COMMON
    + r"""
[ ! -e "$1" ] || fail "$1 is there already"
begin "${1%/*}"
tar -xpof -
require 0 "$2"
mv -T 0/tree "$1"
"""
)

REMOVE = r"""
[ -e "$1" ] || [ -L "$1" ] || exit 0
rm -rf "$1" 2>/dev/null || { chmod -R u+rwx "$1" 2>/dev/null; rm -rf "$1"; } || exit
rmdir "$2" 2>/dev/null || :
"""

FETCH = r"""
cd "$1" || exit 3
exec tar -cf - .
"""
