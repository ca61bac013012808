#!/bin/sh
# Stands in for NVIDIA's hook: makes both GPUs' device files in a container that asks for any.
state=$(cat)
pid=$(printf %s "$state" | sed -n 's/.*"pid":\([0-9]*\).*/\1/p')
bundle=$(printf %s "$state" | sed -n 's/.*"bundle":"\([^"]*\)".*/\1/p')
root=$(sed -n 's/.*"root":{"path":"\([^"]*\)".*/\1/p' "$bundle/config.json")
grep -o 'NVIDIA_VISIBLE_DEVICES=[0-9]' "$bundle/config.json" > /dev/null || exit 0
nsenter --mount --target "$pid" -- sh -euc "
  mknod -m 666 $root/dev/nvidia0 c 195 0; mknod -m 666 $root/dev/nvidia1 c 195 1
  mknod -m 666 $root/dev/nvidiactl c 195 255; mknod -m 666 $root/dev/nvidia-uvm c 510 0"
