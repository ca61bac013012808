# Makes what a host needs beside a lab's files: IMAGE CACHES LOCKS FOLDER...
# The folders are the user's alone; the first CACHES of them are emptied unless this image filled them. LOCKS, one word
# each, are files by whose locks devices are leased.
# shellcheck shell=sh
umask 077
image=$1 caches=$2 locks=$3
shift 3
mkdir -p -- "$@" || exit
while [ "$caches" -gt 0 ]; do
    if [ -L "$1/image" ] || [ ! -f "$1/image" ] || [ "$(cat "$1/image")" != "$image" ]; then
        find "$1" -mindepth 1 -delete
        # Containers write there, too: what has the name now may lead elsewhere.
        (set -C && printf %s "$image" > "$1/image") || exit
    fi
    shift
    caches=$((caches - 1))
done
umask 0
for lock in $locks; do [ -e "$lock" ] || : >> "$lock" || exit; done
