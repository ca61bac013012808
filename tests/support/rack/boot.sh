#!/bin/sh
# A host starts, for the first time or again: the person, the keys and an image if they are not there yet, then sshd and
# Docker. boot.sh [what give.sh takes]
set -eu

# Under cgroup v2 a group with processes of its own can hand no controllers down: they move to one of their own.
groups=/sys/fs/cgroup
if [ -f $groups/cgroup.controllers ]; then
    mkdir -p $groups/init
    xargs -rn1 < $groups/cgroup.procs > $groups/init/cgroup.procs || true
    sed -e 's/ / +/g' -e 's/^/+/' < $groups/cgroup.controllers > $groups/cgroup.subtree_control
fi

if ! id "$RACK_USER" > /dev/null 2>&1; then
    useradd --create-home --shell /bin/bash --uid "$RACK_UID" --groups docker "$RACK_USER"
    for owner in root "$RACK_USER"; do
        keys=$(getent passwd "$owner" | cut -d: -f6)/.ssh
        mkdir -m 700 "$keys"
        echo "$RACK_KEY" > "$keys/authorized_keys"
        chown -R "$owner:" "$keys"
    done
    echo "Port $RACK_PORT" > /etc/ssh/sshd_config.d/port.conf
    ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key
    if [ $# != 0 ]; then /opt/rack/give.sh "$@"; fi
fi

mkdir -p /run/sshd
/usr/sbin/sshd
# Orphans, so that the container's init reaps them.
(/opt/rack/engine.sh &)
exec sleep infinity
