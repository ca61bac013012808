#!/bin/sh
# Makes CUDA's compiler and headers, which came as Python packages, a toolkit as other programs know it: /usr/local/cuda.
set -eu
toolkit=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13
ln -s "$toolkit" /usr/local/cuda
ln -s lib "$toolkit/lib64"
# The linker looks for names without a version.
for library in "$toolkit"/lib/lib*.so.[0-9]*; do
    name=${library%%.so.*}.so
    if [ ! -e "$name" ]; then ln -s "$(basename "$library")" "$name"; fi
done
