#!/bin/sh
# Gives the engine here, which does not run, an image of the engine whose directory is mounted at /given: what describes
# it is copied, and its files stay where they are, as both engines only ever read them.
# give.sh REPOSITORIES IMAGE LAYER...
set -eu
umask 077
own=/given/image/overlay2
here=/var/lib/docker/image/overlay2
repositories=$1
image=$2
shift 2
mkdir -p /var/lib/docker/overlay2/l $here/layerdb/sha256 $here/imagedb/content/sha256
for layer; do
    if [ -d "$here/layerdb/sha256/$layer" ]; then continue; fi
    name=$(cat "$own/layerdb/sha256/$layer/cache-id")
    files=/var/lib/docker/overlay2/$name
    mkdir "$files"
    cp "/given/overlay2/$name/link" "$files"
    if [ -f "/given/overlay2/$name/lower" ]; then cp "/given/overlay2/$name/lower" "$files"; fi
    ln -s "/given/overlay2/$name/diff" "$files/diff"
    # Never to be mounted for writing, as docker save would otherwise.
    touch "$files/committed"
    ln -s "../$name/diff" "/var/lib/docker/overlay2/l/$(cat "$files/link")"
    cp -r "$own/layerdb/sha256/$layer" $here/layerdb/sha256/
done
cp "$own/imagedb/content/sha256/$image" $here/imagedb/content/sha256/
printf %s "$repositories" > $here/repositories.json
