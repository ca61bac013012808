#!/bin/sh
# Docker Engine as of a host, with a second socket for the test to watch it by.
witness=unix:///witness/docker.sock
(
    while kill -0 $$ && ! docker --host $witness version; do sleep 0.2; done
    chmod 666 /witness/docker.sock
) > /dev/null 2>&1 &
exec dockerd --host unix:///var/run/docker.sock --host $witness --mtu 1400 >> /var/log/dockerd.log 2>&1
