#!/bin/sh
# Installs what a person asked for into the lab's image: apt.txt, a package a line, by apt; requirements.txt by pip, in the
# versions of lock.txt where that has any. What was compiled for the image's torch stays as it is, torch too.
set -eu
wanted=/run/sources/wanted
if [ -s "$wanted/apt.txt" ]; then
    rm -f /etc/apt/apt.conf.d/docker-clean
    apt-get update
    # shellcheck disable=SC2046 # a word a package
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $(cat "$wanted/apt.txt")
fi
if [ -s "$wanted/requirements.txt" ]; then
    command -v pip > /dev/null || {
        echo 'no pip in this image: LAB_APT=python3-pip adds the one of Debian and Ubuntu' >&2
        exit 1
    }
    work=$(mktemp -d)
    constraints=$work/constraints
    pip check > "$work/before" || true
    # Not `pip freeze`, which has no version of what came from a file or a URL, as a vendor's torch did.
    pip list --format freeze > "$work/frozen"
    grep -iE '^(torch|deepspeed|horovod|mpi4py|tensorflow|intel-[a-z-]*|habana-[a-z-]*)==' "$work/frozen" > "$constraints" || true
    cat "$wanted/lock.txt" >> "$constraints"
    # A distribution's own Python takes packages only if told to.
    if [ ! -d /opt/venv ]; then export PIP_BREAK_SYSTEM_PACKAGES=1; fi
    pip install --requirement "$wanted/requirements.txt" --constraint "$constraints"
    # What is left without something that it needs, as datasets is where huggingface_hub grew older, moves along.
    left=$(pip check | grep -E ' (has requirement|requires) ' | grep -vxFf "$work/before" || true)
    if [ "$left" ]; then
        pip list --format freeze | grep -vxFf "$work/frozen" >> "$constraints"
        # shellcheck disable=SC2046 # a word a package
        pip install --constraint "$constraints" $(echo "$left" | cut -d' ' -f1 | sort -u)
        if pip check | grep -E ' (has requirement|requires) ' | grep -vxFf "$work/before" >&2; then
            echo 'these packages conflict: name other versions in LAB_PACKAGES' >&2
            exit 1
        fi
    fi
    rm -r "$work"
fi
# Built for another torch they install as well, and fail in the first rank.
for name in torchvision torchaudio; do
    if command -v pip > /dev/null && pip show --quiet $name 2> /dev/null && ! python -c "import $name" 2> /dev/null; then
        echo "this $name is not built for the image's torch, $(pip show torch | sed -n 's/^Version: //p'): take it from" \
            "that torch's index (LAB_TORCH_INDEX), or as a wheel from a directory of LAB_PIP_FIND_LINKS" >&2
        exit 1
    fi
done
mkdir -p /opt/lab
# Anyone's image may have no pip, and packages of its distribution all the same.
if command -v pip > /dev/null; then pip freeze; fi > /opt/lab/packages.txt
