#!/bin/sh
# Installs what a node needs into anyone's image, of the Debian or the Red Hat family: ssh, pdsh where there is one, an MPI
# where there is none, and the distribution's Python beside whichever comes first on PATH.
set -eu
mpi=
if ! command -v mpirun > /dev/null; then mpi=yes; fi
if command -v apt-get > /dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    rm -f /etc/apt/apt.conf.d/docker-clean
    apt-get update
    apt-get install --yes --no-install-recommends \
        ca-certificates iproute2 openssh-client openssh-server pdsh procps python3 ${mpi:+openmpi-bin}
else
    install=$(command -v dnf || command -v microdnf || command -v yum) || {
        echo "from.sh: neither apt-get nor dnf, microdnf or yum in this image" >&2
        exit 1
    }
    "$install" install -y ca-certificates findutils iproute openssh-clients openssh-server procps-ng python3 util-linux \
        ${mpi:+openmpi}
    # Only EPEL has it; without it torchrun's launcher is not there.
    "$install" install -y pdsh pdsh-rcmd-ssh || true
    if [ "$mpi" ]; then
        # Red Hat's packages are out of PATH until `module load`.
        for program in mpirun orted; do ln -sf "/usr/lib64/openmpi/bin/$program" "/usr/local/bin/$program"; done
    fi
    "$install" clean all
fi
# The server package may make host keys when it is installed: gone within the same layer, or every copy would share them.
rm -f /etc/ssh/ssh_host_*
# Ranks are started by this name.
if ! command -v python > /dev/null; then ln -s /usr/bin/python3 /usr/local/bin/python; fi
