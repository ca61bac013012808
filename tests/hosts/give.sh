#!/bin/sh
# Gives a volume, as the directory of another engine, an image of the engine whose own directory is /engine. Every file
# is a hard link, as both engines only ever read it: no bytes are copied. give.sh VOLUME REPOSITORIES IMAGE LAYER...
set -eu
umask 077
own=/engine/image/overlay2
data=/engine/volumes/$1/_data
theirs=$data/image/overlay2
repositories=$2
image=$3
shift 3
mkdir -p "$data/overlay2/l" "$theirs/layerdb/sha256" "$theirs/imagedb/content/sha256"
for layer; do
    if [ -d "$theirs/layerdb/sha256/$layer" ]; then continue; fi
    files=$(cat "$own/layerdb/sha256/$layer/cache-id")
    cp --archive --link "/engine/overlay2/$files" "$data/overlay2/"
    ln --symbolic "../$files/diff" "$data/overlay2/l/$(cat "/engine/overlay2/$files/link")"
    cp --archive "$own/layerdb/sha256/$layer" "$theirs/layerdb/sha256/"
done
cp --archive "$own/imagedb/content/sha256/$image" "$theirs/imagedb/content/sha256/"
printf %s "$repositories" > "$theirs/repositories.json"
