#!/bin/sh
# Installs Python packages for every user of the image:
#
#     install.sh NAME.lock              exactly those that it lists, with these hashes; torch, which differs by source,
#                                       without one
#     install.sh NAME.in [LOCK]         those that it asks for, in LOCK's versions; where the base brings a torch of its
#                                       own, around what is there: nothing is replaced, and that torch is the one
#
# DeepSpeed comes last: it looks at the torch that is installed, and past pip's cache, which does not know for which torch
# a wheel was made. Horovod is compiled by its own Dockerfile.
set -eu
requirements=$1
versions=${2:-/dev/null}
work=$(mktemp -d)

case $requirements in
*.lock)
    if grep '^torch==' "$requirements" > "$work/torch"; then
        pip install --no-deps --requirement "$work/torch"
    fi
    set -- --no-deps --require-hashes
    separate='^torch=='
    ;;
*)
    set -- --constraint "$work/constraints"
    sed -e '/^torch==/d' -e 's/ --hash=.*//' "$versions" > "$work/constraints"
    separate='^$'
    if [ ! -d /opt/venv ]; then
        # A distribution's Python takes no packages unless told so.
        export PIP_BREAK_SYSTEM_PACKAGES=1
        pip list --format freeze > "$work/constraints"
        separate='^torch=='
    fi
    ;;
esac

grep -vE "^deepspeed|^horovod==|$separate" "$requirements" > "$work/requirements"
pip install "$@" --requirement "$work/requirements"
if grep '^deepspeed' "$requirements" > "$work/deepspeed"; then
    pip install "$@" --no-build-isolation --no-cache-dir --requirement "$work/deepspeed"
fi
rm -r "$work"
# Tornado, which Jupyter is built on, brings the private key of its own tests.
rm -rf "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tornado/test"
# What a vendor put together is the vendor's.
if [ -d /opt/venv ]; then pip check; fi
