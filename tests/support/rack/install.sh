#!/bin/sh
# Installs Docker Engine and sshd. Debian 12's own engine is too old for a lab: the next release's is taken.
set -eu
export DEBIAN_FRONTEND=noninteractive
rm -f /etc/apt/apt.conf.d/docker-clean
# Where no list is handed in: that would name both releases.
for own in /etc/apt/sources.list.d/*.sources; do
    if [ -f "$own" ]; then sed 's/bookworm/trixie/' "$own" > "${own%.sources}-next.sources"; fi
done
apt-get update
apt-get install --yes --no-install-recommends \
    --option APT::Default-Release='/^bookworm/' --option Dpkg::Options::=--force-unsafe-io \
    docker.io/trixie docker-cli/trixie iproute2 iptables mount openssh-server procps rsync
# A host has rsync only where a test puts it on PATH.
mkdir /opt/programs
mv /usr/bin/rsync /opt/programs/
# Every copy would share them.
rm -f /etc/ssh/ssh_host_*
