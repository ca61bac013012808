# Make folders
# shellcheck shell=sh
# What a host needs beside files: folders for the person alone, $2 caches first among them, of which those that another
# image than $1 filled are emptied; and the files by whose locks devices are leased ($3).
umask 077
image=$1 caches=$2 locks=$3
shift 3
mkdir -p -- "$@" || exit
while [ "$caches" -gt 0 ]; do
    if [ "$(cat "$1/image" 2> /dev/null)" != "$image" ]; then
        find "$1" -mindepth 1 -delete
        printf %s "$image" > "$1/image" || exit
    fi
    shift
    caches=$((caches - 1))
done
umask 0
for lock in $locks; do [ -e "$lock" ] || : >> "$lock" || exit; done
