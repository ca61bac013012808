# Prints the facts about a host that labctl needs first. Runs in any POSIX sh with coreutils, as any user.
# shellcheck shell=sh disable=SC2015,SC2086,SC2154 # `A && B || continue` is meant as that; facts.py sets the lists of patterns
# Its functions are those of entries.sh.
# Every file that procfs.py and pci.py read must be printed here. The files for accelerators/ come from variables that
# facts.py sets: accelerator_nodes, accelerator_attributes (below the folder of a device in sysfs), accelerator_texts
# and accelerator_present, each a list of patterns.

# Print a device in sysfs: its folder, the link to it, and named attributes only, not `config`, `vpd` and the like.
device() {
    [ -d "$1" ] && where=$(readlink -f "$1") || return 0
    where=${where#"$root"}
    printf 'link %s\n\t%s\n' "$1" "$where"
    case $devices in *" $where "*) return 0 ;; esac
    devices="$devices $where "
    real=
    link "$where/driver"
    set --
    for attribute in $accelerator_attributes; do
        set -- "$@" "$where"/$attribute
    done
    lines "$where/class" "$where/vendor" "$where/numa_node" "$where/local_cpulist" "$@" "sys/module/${real##*/}/version"
}

# Print listening sockets. The kernel lists them before all others, which may be very many: 0A is listening; 03, a
# connection being made, is beside its listener in older kernels.
listening() {
    [ -r "$1" ] || return 0
    printf 'file %s\n' "$1"
    head -n 5000 "$1" | {
        read -r _
        while read -r slot local remote state rest; do
            case $state in
            0A) printf '\t%s %s %s %s %s\n' "$slot" "$local" "$remote" "$state" "$rest" ;;
            03) ;;
            *) break ;;
            esac
        done
    }
}

# Print the free space at a folder, which need not exist: blocks and their size.
free() {
    place=$2
    case $place in /*) ;; *) return 0 ;; esac
    until [ -e "$place" ]; do
        place=${place%/*}
        place=${place:-/}
    done
    fact "free $1" "$(stat -f -c '%a %S' "$place")"
}

begin

# The user, and the address at which ssh reached the host.
fact id "$(id)"
fact home "$HOME"
fact ssh "$SSH_CONNECTION"

# The system.
text proc/self/status proc/meminfo etc/passwd
# The first core with its flags; all cores would be long.
[ ! -r proc/cpuinfo ] || {
    printf 'file proc/cpuinfo\n'
    head -n 30 proc/cpuinfo | body
}
lines proc/sys/kernel/osrelease proc/sys/kernel/numa_balancing proc/sys/vm/nr_hugepages \
    proc/sys/kernel/random/boot_id proc/sys/net/ipv4/neigh/default/gc_thresh3 \
    proc/cmdline proc/loadavg sys/devices/system/cpu/online sys/devices/system/node/node[0-9]*/cpulist
there etc/docker/daemon.json $accelerator_present
folder run/lock
if groups=$(getent group render video 2> /dev/null) && [ -n "$groups" ]; then
    printf 'file etc/group\n'
    printf '%s\n' "$groups" | body
else
    text etc/group
fi

# The network, without containers' interfaces: those are many and lead to no other host.
set --
for interface in sys/class/net/*; do
    case ${interface##*/} in
    veth*) ;;
    *) set -- "$@" "$interface/mtu" ;;
    esac
done
lines "$@"
text proc/net/route proc/net/if_inet6
if addresses=$(ip -o -4 addr show 2> /dev/null) && [ -n "$addresses" ]; then
    printf 'fact addresses\n'
    printf '%s\n' "$addresses" | body
else
    text proc/net/fib_trie
fi
listening proc/net/tcp
listening proc/net/tcp6

# The engine's CDI specifications.
link var/run
text etc/cdi/*.json etc/cdi/*.yaml run/cdi/*.json run/cdi/*.yaml
free home "$HOME"

# Device files and their groups, and the kernel's facts about display controllers and accelerators.
printf 'nodes\n'
stat -L -c '%g %n' $accelerator_nodes dev/infiniband/* 2> /dev/null | body
link dev/dri/by-path/*-render
devices=
for card in sys/bus/pci/devices/*; do
    [ -r "$card/class" ] && read -r class < "$card/class" || continue
    case $class in
    0x03* | 0x12*) device "$card" ;;
    esac
done
for card in sys/class/accel/accel*/device sys/class/drm/renderD*/device; do
    device "$card"
done
text $accelerator_texts
for card in sys/class/infiniband/*; do
    folder "$card" "$card"/device/net/*
    lines "$card/ports/1/link_layer" "$card/ports/1/state" "$card/device/numa_node"
done

finish
