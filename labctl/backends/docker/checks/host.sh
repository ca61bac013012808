#!/bin/sh
# What doctor asks a host, this machine or one over ssh: COMMAND ARGUMENT...
# shellcheck disable=SC2317,SC2329 # every function is a command, called by the last line

# status PATH...: owner, group, mode and access (r, w, rw or -) of each, a line each; of one that cannot be read what
# stat says.
status() {
    for path; do
        access=
        [ ! -r "$path" ] || access=r
        [ ! -w "$path" ] || access=${access}w
        LC_ALL=C stat -L -c "%u %g %f ${access:--}" -- "$path" 2>&1
    done
    true
}

# free PATH: free blocks, their size, free and all inodes of the file system that it is, or would be, on.
free() {
    place=$1
    until [ -e "$place" ]; do place=${place%/*}; place=${place:-/}; done
    stat -f -c '%a %S %d %c' -- "$place"
}

# mounted PATH: mount point and options of its file system; nothing on a host without findmnt.
mounted() {
    findmnt --noheadings --output TARGET,OPTIONS --target "$1" 2> /dev/null || true
}

# locks BYTES PATH...: `held` and so many bytes of what its holder wrote for each lock that is held, an empty line for
# others. Regular files only: a pipe would wait for a writer.
locks() {
    command -v flock > /dev/null || exit 127
    longest=$1
    shift
    for path; do
        if [ -f "$path" ] && [ ! -h "$path" ] && [ -r "$path" ] && { flock -n -s 9 9< "$path"; [ $? = 1 ]; }; then
            printf 'held '
            head -c "$longest" < "$path" | tr -cd '\040-\176'
        fi
        echo
    done
}

"$@"
