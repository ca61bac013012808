# network interfaces
# shellcheck shell=sh
# Prints NAME DRIVER STATE CARRIER SPEED. Of an interface that is down, carrier and speed cannot be read:
# linux/Documentation/ABI/testing/sysfs-class-net.
for path in /sys/class/net/*; do
    [ -e "$path/device" ] || continue
    driver=$(readlink "$path/device/driver") state=$(cat "$path/operstate")
    carrier=$(cat "$path/carrier" 2>/dev/null) speed=$(cat "$path/speed" 2>/dev/null)
    printf '%s %s %s %s %s\n' "${path##*/}" "${driver##*/}" "${state:-unknown}" "${carrier:-0}" "${speed:--1}"
done
