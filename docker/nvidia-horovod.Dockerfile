# The Horovod image for NVIDIA GPUs: the NVIDIA image with TensorFlow, and Horovod for TensorFlow and PyTorch over NCCL,
# Gloo and MPI.
#
# `labctl build --workload mnist-horovod` builds it on an NVIDIA lab, and the NVIDIA image before it. What it is handed: see
# cpu.Dockerfile.

ARG BASE_IMAGE=labctl/nvidia

FROM scratch AS wheels


# `labctl build --update-lock`: what nvidia-horovod.in comes to today beside the base image's own packages.
FROM ${BASE_IMAGE} AS resolve
RUN --mount=type=cache,id=labctl-pip,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/run/sources/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=nvidia.in,target=/run/sources/nvidia.in \
    --mount=type=bind,source=nvidia-horovod.in,target=/run/sources/nvidia-horovod.in \
    --mount=type=bind,source=resolve.py,target=/run/sources/resolve.py \
    python /run/sources/resolve.py /run/sources/nvidia-horovod.in 'labctl build -s LAB_ACCELERATOR=nvidia --workload mnist-horovod --update-lock' \
        --beside /run/sources/nvidia.in > /nvidia-horovod.lock

FROM scratch AS lock
COPY --from=resolve /nvidia-horovod.lock /


FROM ${BASE_IMAGE} AS frameworks
# Fashion-MNIST: images in MNIST's own format, for who has no MNIST in the cache.
RUN --mount=type=cache,id=labctl-apt-archives,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=labctl-apt-lists,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=secret,id=apt.list,target=/run/sources/apt.list \
    --mount=type=secret,id=apt.conf,target=/etc/apt/apt.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=system.sh,target=/run/sources/system.sh \
    sh /run/sources/system.sh dataset-fashion-mnist
RUN --mount=type=cache,id=labctl-pip,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/run/sources/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=nvidia-horovod.lock,target=/run/sources/nvidia-horovod.lock \
    --mount=type=bind,source=install.sh,target=/run/sources/install.sh \
    sh -ec 'grep -v ^nvidia-nccl- /run/sources/nvidia-horovod.lock > /tmp/nvidia-horovod.lock; \
        sh /run/sources/install.sh /tmp/nvidia-horovod.lock; rm /tmp/nvidia-horovod.lock'


# Compiled in a stage of its own, so that cmake and the sources stay behind.
FROM frameworks AS compile
ARG MAX_JOBS=2
RUN --mount=type=cache,id=labctl-apt-archives,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=labctl-apt-lists,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=secret,id=apt.list,target=/run/sources/apt.list \
    --mount=type=secret,id=apt.conf,target=/etc/apt/apt.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=system.sh,target=/run/sources/system.sh \
    sh /run/sources/system.sh cmake
# Minutes of work: what it comes to is kept for the next build whose frameworks are the same.
RUN --mount=type=cache,id=labctl-compiled,target=/compiled,sharing=locked \
    --mount=type=bind,source=nvidia-horovod.lock,target=/run/sources/nvidia-horovod.lock \
    --mount=type=bind,source=horovod.sh,target=/run/sources/horovod.sh \
    --mount=type=bind,from=wheels,target=/run/sources/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    MAX_JOBS="$MAX_JOBS" sh /run/sources/horovod.sh /run/sources/nvidia-horovod.lock


FROM frameworks AS lab
# No greetings of TensorFlow's, several lines a process: horovodrun imports it too.
ENV TF_CPP_MIN_LOG_LEVEL=2
RUN --mount=type=bind,from=compile,source=/wheel,target=/run/sources/wheel <<'SCRIPT'
set -eu
pip install --no-deps --no-index --no-cache-dir /run/sources/wheel/*.whl
pip check
# What the base image is for, with the numpy that it has here: not all who need a newer one tell pip.
python -c "import accelerate, datasets, deepspeed, mpi4py, peft, transformers"
for framework in tensorflow torch; do
    python -c "import horovod.$framework as horovod; assert horovod.gloo_built() and horovod.mpi_built()
assert horovod.nccl_built() and horovod.cuda_built()"
done
SCRIPT
