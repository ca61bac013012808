#!/usr/bin/env bash
# Make the wheels that measure.sh needs beside torch and transformers, where pip reaches a package index.
#
#     wheels.sh DIR [PYTHON [GROUP...]]
#
# PYTHON is the version on the machine with the GPU (3.12). Groups: labctl, deepspeed, upstream (for the script of
# DeepSpeed-Chat, which needs transformers before 5). Under 64 MiB in all. Python here needs pip, setuptools and wheel.
set -euo pipefail

if [[ ${1:--} == -* ]]; then
    echo 'usage: wheels.sh DIR [PYTHON [GROUP...]]' >&2
    exit 2
fi
folder=$1
python=${2:-3.12}
shift $(($# < 2 ? $# : 2))
groups=("$@")
(($#)) || groups=(labctl deepspeed upstream)
root=$(cd "$(dirname "$0")/../.." && pwd)
pinned() { # a requirement as the NVIDIA image has it
    grep -oE "^$1==[^ +]+" "$root/docker/nvidia.lock"
}
fetch() {
    local platforms=()
    for glibc in 39 35 34 31 28 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
    python3 -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "$python" \
        "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest "$1" "${@:2}"
}

for group in "${groups[@]}"; do
    case $group in
        labctl) fetch "$folder" msgspec ;;
        deepspeed)
            fetch "$folder" "$(pinned hjson)" "$(pinned pydantic)" "$(pinned pydantic-core)" "$(pinned py-cpuinfo)" \
                "$(pinned annotated-types)" "$(pinned typing-inspection)"
            # Its operators are built where they are used.
            DS_BUILD_OPS=0 python3 -m pip wheel --quiet --no-deps --no-build-isolation --no-binary deepspeed \
                --wheel-dir "$folder" "$(pinned deepspeed)" ;;
        upstream)
            fetch "$folder/upstream" 'transformers<5' 'huggingface_hub<1' 'tokenizers>=0.22,<=0.23.0' 'datasets<5' dill multiprocess ;;
        *) echo "unknown group: $group" >&2; exit 2 ;;
    esac
done
du -sh "$folder"
