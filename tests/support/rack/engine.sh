#!/bin/sh
# Docker Engine as of a host, containerd beside it, with a second socket for the test to watch it by.
witness=unix:///witness/docker.sock
if ! pgrep -x containerd > /dev/null; then (containerd > /var/log/containerd.log 2>&1 &); fi
(
    while kill -0 $$ && ! docker --host $witness version; do sleep 0.2; done
    chmod 666 /witness/docker.sock
) > /dev/null 2>&1 &
exec dockerd --containerd /run/containerd/containerd.sock --host unix:///var/run/docker.sock --host $witness --mtu 1400 \
    >> /var/log/dockerd.log 2>&1
