# Shows a governor, two GPUs, whose device files are those of /dev/null, an InfiniBand port and a network port on a host that has none, until `unplant`. $1: plant or unplant.
set -eu
unplant() {
    umount --lazy /proc/driver /sys /run/planted 2> /dev/null || true
    rm -f /dev/nvidia*
}
put() {
    mkdir -p "${1%/*}"
    printf '%s\n' "$2" > "$1"
}
overlay_sys() {
    mkdir -p /run/planted
    mount -t tmpfs planted /run/planted
    mkdir /run/planted/kernel /run/planted/upper /run/planted/work
    mount -t sysfs kernel /run/planted/kernel
    mount --rbind /sys/fs/cgroup /run/planted/kernel/fs/cgroup
    mount -t overlay sys -o lowerdir=/run/planted/kernel,upperdir=/run/planted/upper,workdir=/run/planted/work /sys
    mount --rbind /run/planted/kernel/fs/cgroup /sys/fs/cgroup
    mount -t tmpfs driver /proc/driver
}
card() {
    folder=/sys/devices/planted/$1
    put "$folder/vendor" "$2"
    put "$folder/device" "$3"
    put "$folder/class" "$4"
    put "$folder/numa_node" 0
    put "$folder/local_cpulist" 0-1
    put "$folder/current_link_width" 16
    put "$folder/max_link_width" 16
    put "$folder/current_link_speed" '32.0 GT/s PCIe'
    put "$folder/max_link_speed" '32.0 GT/s PCIe'
    mkdir -p "/sys/bus/pci/drivers/$5"
    put "$folder/uevent" "DRIVER=$5"
    ln -sfn "/sys/bus/pci/drivers/$5" "$folder/driver"
    ln -sfn "../../../devices/planted/$1" "/sys/bus/pci/devices/$1"
}
gpu() {
    card "$1" 0x10de 0x2330 0x030200 nvidia
    mknod -m 666 "/dev/nvidia$2" c 1 3
    put "/proc/driver/nvidia/gpus/$1/information" "Model: NVIDIA H100 80GB HBM3
GPU UUID: GPU-0000000$2-0000-0000-0000-000000000000
Bus Location: $1
Device Minor: $2"
}
network() {
    card 0000:3b:00.0 0x15b3 0x1021 0x020000 mlx5_core
    port=/sys/class/net/rail0
    for pair in type=1 carrier=1 speed=100000 duplex=full mtu=9000 carrier_changes=2 operstate=up flags=0x1003 addr_assign_type=0; do
        put "$port/${pair%=*}" "${pair#*=}"
    done
    put "$port/address" 02:00:00:00:00:01
    put "$port/statistics/rx_crc_errors" 0
    ln -sfn /sys/devices/planted/0000:3b:00.0 "$port/device"
    mlx=/sys/class/infiniband/mlx5_0
    put "$mlx/ports/1/state" '4: ACTIVE'
    put "$mlx/ports/1/phys_state" '5: LinkUp'
    put "$mlx/ports/1/rate" '400 Gb/sec (4X NDR)'
    put "$mlx/ports/1/link_layer" InfiniBand
    put "$mlx/ports/1/counters/link_downed" 0
    put "$mlx/fw_ver" 28.43.1014
    put "$mlx/hca_type" MT4129
    put "$mlx/board_id" MT_0000000838
    ln -sfn /sys/devices/planted/0000:3b:00.0 "$mlx/device"
}
[ "$1" = plant ] || {
    unplant
    exit
}
overlay_sys
gpu 0000:18:00.0 0
gpu 0000:2a:00.0 1
put /sys/devices/system/cpu/cpu0/cpufreq/scaling_governor performance
mknod -m 666 /dev/nvidiactl c 1 3
mknod -m 666 /dev/nvidia-uvm c 1 3
network
