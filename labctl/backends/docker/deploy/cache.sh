# Cache of models and data
# shellcheck shell=sh
# Lists or fills it on a host: FOLDER COMMAND ARGUMENT...; the folder is below the home unless it begins with /.
# POSIX sh with coreutils, find and tar, those of busybox too.
umask 077
cd || exit 1
folder=$1 command=$2
shift 2

# list: a line of df, where the folder is or will be; SIZE MTIME ./NAME of each file; an empty line; then of each link a
# line with its name and one with its target.
if [ "$command" = list ]; then
    at=$folder
    while [ ! -e "$at" ]; do
        case $at in */*) at=${at%/*} ;; *) at=. ;; esac
        at=${at:-/}
    done
    df -Pk "$at" | tail -n 1
    [ -e "$folder" ] || exit 0
    cd "$folder" || exit 1
    # What is removed meanwhile, or cannot be read, counts as missing.
    find . -name '.labctl-coming.*' -type d -prune -o -type f -exec stat -c '%s %Y %n' {} + 2>/dev/null
    echo
    # shellcheck disable=SC2016 # expanded by the inner shell
    find . -name '.labctl-coming.*' -type d -prune -o -type l \
        -exec sh -c 'for one; do echo "$one"; readlink "$one"; done' sh {} + 2>/dev/null
    exit 0
fi

# Hosts may share the cache: each collects what comes in a directory of its own, removed on exit. Killed ones leave it, as
# broken connections leave parts of large files; these are removed two days after the last write.
mkdir -p "$folder" && cd "$folder" || exit 1
find . -maxdepth 1 -name '.labctl-coming.*' -mtime +1 -exec rm -rf {} +
coming=$(mktemp -d ./.labctl-coming.XXXXXX) || exit 1
cache=$PWD
trap 'cd "$cache" && rm -rf "$coming"' EXIT
trap 'exit 1' HUP INT PIPE TERM
case $command in
unpack) # a tar archive
    tar -xf - -C "$coming" || exit 1
    ;;
append) # PART MEBIBYTES NAME SIZE MTIME: a file from so many MiB on, which an earlier call has put into its part
    part=./.labctl-coming.$1
    # Containers write here.
    if [ -L "$part" ] || { [ -e "$part" ] && [ "$(stat -c %h "$part")" != 1 ]; }; then
        rm -f "$part"
    fi
    # A writer whose connection broke may not have noticed: it writes the same bytes at the same place.
    exec 3<>"$part" || exit 1
    dd bs=1048576 "count=$2" <&3 >/dev/null 2>&1
    cat >&3 || exit 1
    size=$(wc -c <"$part")
    [ "$size" -eq "$4" ] || { echo "$3: $size of $4 bytes received" >&2; exit 1; }
    touch -d "@$5" "$part" && mkdir -p "$coming/$(dirname "$3")" && mv "$part" "$coming/$3" || exit 1
    ;;
esac
cd "$coming" || exit 1
# shellcheck disable=SC2016
find . -type d -exec sh -c '
for one; do
    if [ -L "../$one" ]; then echo "${one#./} is a link" >&2; exit 1; fi
    mkdir -p "../$one" || exit 1
done' sh {} + || exit 1
# A link to a directory would be followed.
# shellcheck disable=SC2016
find . ! -type d -exec sh -c '
for one; do
    [ ! -L "../$one" ] || rm -f "../$one"
    mv -f "$one" "../$one" || exit 1
done' sh {} + || exit 1
