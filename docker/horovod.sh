#!/bin/sh
# Compiles Horovod's wheel into /wheel, for the frameworks that are installed here; takes it from /compiled where this
# was done before. $1: horovod.lock
set -eu
key=$({ python --version; pip freeze; cat "$0"; } | sha256sum | cut -c1-32)
compiled=/compiled/$key
if [ ! -d "$compiled" ]; then
    cd "$(mktemp -d)"
    # From its source, and past pip's cache, which does not know what a wheel was compiled for.
    grep '^horovod==' "$1" > requirements
    pip download --no-deps --no-build-isolation --no-cache-dir --no-binary horovod --require-hashes -r requirements
    tar -xzf horovod-*.tar.gz
    cd horovod-*/
    # The headers of today's torch are C++17.
    sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' CMakeLists.txt horovod/torch/CMakeLists.txt
    # horovodrun tells ssh on its command line to take any host key, which would win over the lab's ssh_config, where
    # every node's key is pinned.
    sed -i 's/StrictHostKeyChecking=no/StrictHostKeyChecking=yes/' horovod/runner/util/remote.py
    grep -q 'StrictHostKeyChecking=yes' horovod/runner/util/remote.py
    export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1
    # On an image with CUDA's compiler, over NCCL too, for the GPUs that DeepSpeed's operators are compiled for.
    if [ -x "${CUDA_HOME:-}/bin/nvcc" ]; then
        sed -i 's/CMAKE_CUDA_STANDARD 11/CMAKE_CUDA_STANDARD 17/' horovod/common/ops/cuda/CMakeLists.txt
        sed -i 's/-std=c++11/-std=c++17/' CMakeLists.txt
        nccl=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/nccl
        ln -sf libnccl.so.2 "$nccl/lib/libnccl.so"
        export HOROVOD_CUDA_HOME="$CUDA_HOME" HOROVOD_GPU=CUDA HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED
        export HOROVOD_NCCL_INCLUDE="$nccl/include" HOROVOD_NCCL_LIB="$nccl/lib"
        export HOROVOD_BUILD_CUDA_CC_LIST=75,80,86,89,90,100,120
    fi
    export MAKEFLAGS="-j$MAX_JOBS" CXXFLAGS=-w LDFLAGS=-s
    pip wheel --no-deps --no-build-isolation --no-cache-dir --wheel-dir "$compiled.new" .
    mv "$compiled.new" "$compiled"
fi
mkdir -p /wheel
cp "$compiled"/*.whl /wheel/
