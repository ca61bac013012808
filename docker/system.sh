#!/bin/sh
# Installs what every node needs of its distribution, and these packages besides: system.sh [PACKAGE...]
#
# On Debian 12 and Ubuntu 22.04 or 24.04. What a base brings stays: a vendor's Open MPI, and a Python that has torch
# already. Any other base gets an empty environment in /opt/venv.
set -eu
export DEBIAN_FRONTEND=noninteractive
rm -f /etc/apt/apt.conf.d/docker-clean

mpi='openmpi-bin libopenmpi-dev'
if command -v mpirun > /dev/null; then mpi=; fi
apt-get update
# shellcheck disable=SC2086 # one word a package
apt-get install --yes --no-install-recommends \
    ca-certificates iproute2 less procps \
    openssh-client openssh-server pdsh \
    g++ make python3 python3-dev python3-venv \
    $mpi "$@"
# The server package makes host keys when it is installed: gone within the same layer, or every copy would share them.
rm -f /etc/ssh/ssh_host_*

if ! python3 -c 'import sys, importlib.util; sys.exit(importlib.util.find_spec("torch") is None)'; then
    python3 -m venv /opt/venv
elif ! command -v python > /dev/null; then
    ln -s "$(command -v python3)" /usr/local/bin/python
fi
