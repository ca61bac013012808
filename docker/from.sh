#!/bin/sh
# Adds what a node needs to anyone's image, of the Debian or the Red Hat family: ssh, pdsh where there is one, an MPI where
# there is none, and the distribution's Python beside whichever comes first on PATH. What the image has stays as it is.
set -eu
fail() {
    echo "from.sh: $*" >&2
    exit 1
}
mpi=
if ! command -v mpirun > /dev/null; then mpi=yes; fi
host_keys=$(ls /etc/ssh/ssh_host_* 2> /dev/null || true)
if command -v apt-get > /dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    # It would empty the build's cache of packages.
    clean=/etc/apt/apt.conf.d/docker-clean
    if [ -e "$clean" ]; then mv "$clean" /run/docker-clean; fi
    apt-get update
    apt-get install --yes --no-install-recommends --no-upgrade \
        ca-certificates iproute2 openssh-client openssh-server pdsh procps python3 ${mpi:+openmpi-bin}
    if [ -e /run/docker-clean ]; then mv /run/docker-clean "$clean"; fi
else
    install=$(command -v dnf || command -v microdnf || command -v yum) ||
        fail 'neither apt-get nor dnf, microdnf or yum in this image'
    "$install" install -y ca-certificates findutils hostname iproute openssh-clients openssh-server procps-ng python3 \
        util-linux ${mpi:+openmpi}
    # Only EPEL has it; without it torchrun's launcher is not there.
    "$install" install -y pdsh pdsh-rcmd-ssh || true
    if [ "$mpi" ]; then
        # Red Hat's packages are out of PATH until `module load`.
        for program in mpirun orted; do ln -sf "/usr/lib64/openmpi/bin/$program" "/usr/local/bin/$program"; done
    fi
    "$install" clean all
fi
# The server package may make host keys when it is installed: gone within the same layer, or every copy would share them.
if [ -z "$host_keys" ]; then rm -f /etc/ssh/ssh_host_*; fi
# Ranks are started by this name.
if ! command -v python > /dev/null; then ln -s "$(command -v python3)" /usr/local/bin/python; fi
# What an old distribution lacks is said here, not by a node that does not come up.
/usr/bin/python3 -I -c 'import sys; sys.exit(sys.version_info < (3, 8))' || fail 'its /usr/bin/python3 is older than 3.8'
mkdir -p /run/sshd
ssh-keygen -q -t ed25519 -N '' -f /run/host_key
too_old='its OpenSSH rejects the settings of the lab: it is older than 8.5, or restricts algorithms'
/usr/sbin/sshd -t -f /run/sources/sshd_config -h /run/host_key || fail "$too_old"
ssh -G -F /run/sources/ssh_config worker-0 > /dev/null || fail "$too_old"
rm /run/host_key /run/host_key.pub
