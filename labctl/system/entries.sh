# Functions that print a host's report of itself, for any POSIX sh with coreutils, as any user.
# shellcheck shell=sh disable=SC2015 # `A && B || continue` is meant as that
# An entry is a line, `kind name`, and its content: lines that begin with a tab, or a number and a tab. Empty lines are
# ignored. Paths are without their leading slash. hostdump.py reads it, from `begin` to `finish`.
# $1: the folder with /proc, /sys, /dev, /etc and /run; the host's root by default.

LC_ALL=C
PATH=$PATH:/usr/sbin:/sbin
export LC_ALL PATH
cd -P "${1:-/}" || exit 1
root=${PWD%/}/

fact() { printf 'fact %s\n\t%s\n' "$1" "$2"; }

# Print an entry's lines; the last may have no newline.
body() {
    cat -n
    echo
}

# Print whole files.
text() {
    for file in "$@"; do
        [ -f "$file" ] && [ -r "$file" ] || continue
        printf 'file %s\n' "$file"
        body < "$file"
    done
}

# Print files of a single line. There are many, and a process for each would be slow; `read` reads byte by byte, with
# which cpulist of a NUMA node seems empty. /dev/null makes head print names even for a single file.
lines() {
    printf 'lines\n'
    head -n 1 /dev/null "$@" 2> /dev/null | body
}

# Print files whose existence is all that matters.
there() {
    for file in "$@"; do
        [ ! -f "$file" ] || printf 'file %s\n' "$file"
    done
}

# Print folders and their modes.
folder() {
    for folder in "$@"; do
        [ ! -d "$folder" ] || printf 'folder %s\n\t%s\n' "$folder" "$(stat -L -c %a "$folder")"
    done
}

# Print links and the paths that they resolve to.
link() {
    for link in "$@"; do
        [ -h "$link" ] && [ -e "$link" ] && real=$(readlink -f "$link") || continue
        printf 'link %s\n\t%s\n' "$link" "${real#"$root"}"
    done
}

# Output of a login shell may not end with a newline.
begin() { printf '\nlabctl survey\n'; }

# The clock comes last, so that it is read as soon as it is printed.
finish() {
    fact clock "$(date +%s.%N)"
    printf 'end\n'
}

