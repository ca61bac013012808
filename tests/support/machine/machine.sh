#!/bin/bash
# Makes, in mount and network namespaces of its own, a machine that is this one but for what is planted in it; holds it
# until standard input ends. $1: an empty directory for what is planted, $2: one on a disk, for the engine's images.
set -eu
scratch=$1 images=$2

mount -t tmpfs -o mode=755 stand-in "$scratch"
mkdir "$scratch"/{dev,etc,opt,sys,kernel,pts,shm}
mkdir "$scratch"/{dev,etc,opt,sys}/{upper,work}
layer() { mount -t overlay "$1" -o "lowerdir=$2,upperdir=$scratch/$1/upper,workdir=$scratch/$1/work" "/$1"; }

mount --bind /dev/pts "$scratch/pts"
mount --bind /dev/shm "$scratch/shm"
layer dev /dev
mount --bind "$scratch/pts" /dev/pts
mount --bind "$scratch/shm" /dev/shm

# A new sysfs shows the interfaces of this network namespace.
mount -t sysfs kernel "$scratch/kernel"
mount --rbind /sys/fs/cgroup "$scratch/kernel/fs/cgroup"
layer sys "$scratch/kernel"
mount --rbind "$scratch/kernel/fs/cgroup" /sys/fs/cgroup

# What this machine has itself is hidden; underneath nothing changes.
rm -rf /dev/{dri,accel,infiniband} /dev/nvidia* /sys/class/{drm,accel,infiniband} /sys/bus/pci/devices/*

layer etc /etc
layer opt /opt
rm -rf /etc/docker /etc/cdi
mkdir /etc/docker
mount -t tmpfs -o mode=755 run /run
mkdir -p /run/stand-in/bin
mkdir -m 1777 /run/lock
mount -t tmpfs -o mode=755 driver /proc/driver
# The first engine's mounts are of no use here, and a second one would take them for its own.
umount --recursive --lazy /var/lib/docker 2>/dev/null || true
mkdir -p /var/lib/docker
mount --bind "$images" /var/lib/docker
ip link set lo up

echo ready
read -r || true
if [ -f /run/docker.pid ]; then
    engine=$(< /run/docker.pid)
    kill "$engine" && timeout 60 tail --pid="$engine" -f /dev/null
fi
