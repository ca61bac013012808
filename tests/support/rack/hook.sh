#!/bin/sh
# Stands in for NVIDIA's hook: makes both GPUs' device files in a container that asks for any.
state=$(cat)
pid=$(printf %s "$state" | sed -n 's/.*"pid":\([0-9]*\).*/\1/p')
bundle=$(printf %s "$state" | sed -n 's/.*"bundle":"\([^"]*\)".*/\1/p')
root=$(sed -n 's/.*"root":{"path":"\([^"]*\)".*/\1/p' "$bundle/config.json")
grep -o 'NVIDIA_VISIBLE_DEVICES=[0-9]' "$bundle/config.json" > /dev/null || exit 0
for name in nvidia0 nvidia1 nvidiactl nvidia-uvm; do
    nsenter --mount --target "$pid" -- mknod -m 666 "$root/dev/$name" c 1 3
done
