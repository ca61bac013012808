#!/bin/sh
# Receives a Docker image on a host: COMMAND ARGUMENT... Needs a POSIX shell, coreutils and Docker.
# The archive is collected in ~/.labctl/images, where an interrupted upload resumes, and then loaded.
# shellcheck disable=SC2317,SC2329 # every function is a command, called by the last line
umask 077
folder=$HOME/.labctl/images

engine() { docker --host "unix://$socket" "$@"; }

# state SOCKET IMAGE: user, home and engine id; df of the home and of the images' disk; the image; all images' layers.
state() {
    set -e
    socket=$1
    type='{{range .DriverStatus}}{{if eq (index . 0) "driver-type"}}{{index . 1}}{{end}}{{end}}'
    info=$(engine info --format "{{.ID}} $type {{.DockerRootDir}}")
    type=${info#* } root=${info#* * }
    # New Engines 29 store images in the host's containerd: docs.docker.com/engine/storage/containerd
    [ "${type%% *}" != io.containerd.snapshotter.v1 ] || [ ! -S /run/containerd/containerd.sock ] || root=/var/lib/containerd
    image=$(engine image inspect --format '{{json .}}' "$2" 2>/dev/null) || image=
    printf '%s\n' "$(id -u) $HOME ${info%% *}" "$(room "$HOME")" "$(room "$root")" "$image"
    all=$(engine image ls --all --quiet --no-trunc)
    # shellcheck disable=SC2086 # one id a word
    [ -z "$all" ] || engine image inspect --format '{{json .RootFS.Layers}}' $all 2>/dev/null || true
}
room() { df -Pk "$1" 2>/dev/null | tail -n 1; }

# identity SOCKET: the first line of state.
identity() {
    socket=$1
    echo "$(id -u) $HOME $(engine info --format '{{.ID}}')"
}

# True if an upload writes to the file. Each upload leaves a mark: a symlink, made atomically, to its process id. Marks
# are removed after the file only, so the next free mark is the next writer's.
is_written() {
    mark=0
    while writer=$(readlink "$1.writer.$mark"); do
        [ "$(readlink "/proc/$writer/fd/1")" != "$(pwd -P)/$1" ] || return 0
        mark=$((mark + 1))
    done 2>/dev/null
    return 1
}
bytes() { wc -c 2>/dev/null <"$1" || echo 0; }

# size FILE SECONDS: bytes received so far. Waits for another upload of the same file to end, and kills one that
# received nothing for that many seconds. Removes what was not touched for a week.
size() {
    cd "$folder" 2>/dev/null || { echo 0; exit; }
    find . ! -type d -mtime +7 -exec rm -f {} +
    while is_written "$1"; do
        before=$(bytes "$1")
        sleep "$2"
        [ "$(bytes "$1")" != "$before" ] || kill "$writer" 2>/dev/null || true
    done
    bytes "$1"
}

# append FILE OFFSET: append stdin, which starts at this offset. Exits with 75 if another upload has written or writes.
append() {
    mkdir -p "$folder" && cd "$folder" && exec >>"$1" || exit 1
    ! is_written "$1" || exit 75
    ln -s $$ "$1.writer.$mark" || { [ ! -L "$1.writer.$mark" ] || exit 75; exit 1; }
    [ "$(wc -c <"$1")" -eq "$2" ] || exit 75
    exec cat
}

# relay FILE SIZE OFFSET PROGRAM...: feed a growing file to a program, from the offset on, and print the progress. Stops
# if the file did not grow for half a minute, or if the output has no reader.
relay() {
    file=$1 size=$2 at=$3
    shift 3
    exec 4>&1
    {
        idle=0
        while [ "$at" -lt "$size" ]; do
            new=$(($(bytes "$folder/$file") - at))
            if [ "$new" -gt 0 ]; then
                tail -c "+$((at + 1))" "$folder/$file" | head -c "$new" || exit
                at=$((at + new)) idle=0
            else
                idle=$((idle + 1))
                [ "$idle" -lt 150 ] || exit
            fi
            echo "$at" >&4 || exit
            [ "$new" -ge 16777216 ] || [ "$at" -ge "$size" ] || sleep 0.2
        done
    } | "$@"
}

# reach PROGRAM...: run a program without input.
reach() { exec "$@" </dev/null; }

# load SOCKET FILE IMAGE: load the file and print the image's id. Another attempt may have loaded and removed the file.
load() {
    socket=$1
    engine load --quiet --input "$folder/$2" >&2 || [ ! -e "$folder/$2" ] || exit
    engine image inspect --format '{{.Id}}' "$3"
}

# pull SOCKET IMAGE
pull() {
    socket=$1
    engine pull --quiet "$2"
}

digest() { sha256sum <"$folder/$1"; }

remove() {
    rm -f "$folder/$1" "$folder/$1.writer"*
    rmdir "$folder" "$HOME/.labctl" 2>/dev/null || true
}

"$@"
