#!/usr/bin/env bash
# Measure labctl on a machine with an NVIDIA GPU: Python with torch and transformers, no Docker, no network.
#
#     measure.sh --out DIR [--wheels DIR] [--upstream DIR] [--toy] [PART...]
#
# Wheels of what the machine's Python does not have are made by wheels.sh. See measure.py for the parts.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
wheels=
arguments=()
while (($#)); do
    case $1 in
        --wheels) wheels=$(cd "$2" && pwd); shift 2 ;;
        *) arguments+=("$1"); shift ;;
    esac
done

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
install() { # the wheels of a folder, beside each other and apart from the machine's own packages
    python3 -m pip install --quiet --no-index --no-deps --no-compile --root-user-action=ignore --target "$site/$1" "$2"/*.whl
}
paths=$root
if [[ $wheels ]]; then
    install own "$wheels"
    paths=$site/own:$paths
    [[ ! -d $wheels/upstream ]] || install upstream "$wheels/upstream"
fi
export PATH="$site/own/bin:$PATH" PYTHONPATH="$paths" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# DeepSpeed does not read an architecture such as 9.0a; without the variable it asks the card.
unset TORCH_CUDA_ARCH_LIST
export UPSTREAM_SITE="$site/upstream"
python3 "$here/measure.py" "${arguments[@]}"
