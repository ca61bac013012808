# The lab image for NVIDIA GPUs: ssh, pdsh, OpenMPI, torch with CUDA and NCCL, DeepSpeed. What it is handed: see
# cpu.Dockerfile.
#
# Two bases. A plain Debian or Ubuntu gets nvidia.lock, whose wheels bring CUDA's libraries and compiler. NVIDIA's own
# PyTorch image, LAB_BASE_IMAGE=nvcr.io/nvidia/pytorch:<tag>, keeps its torch and compiler, and gets nvidia.in around them.

ARG BASE_IMAGE=debian:bookworm-slim

FROM scratch AS wheels


FROM ${BASE_IMAGE} AS system
RUN --mount=type=cache,id=labctl-apt-archives,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=labctl-apt-lists,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=secret,id=apt.list,target=/run/sources/apt.list \
    --mount=type=secret,id=apt.conf,target=/etc/apt/apt.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=system.sh,target=/run/sources/system.sh \
    sh /run/sources/system.sh
ENV PATH=/opt/venv/bin:${PATH}


FROM system AS resolve
RUN --mount=type=cache,id=labctl-pip,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/run/sources/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=nvidia.in,target=/run/sources/nvidia.in \
    --mount=type=bind,source=resolve.py,target=/run/sources/resolve.py \
    python /run/sources/resolve.py /run/sources/nvidia.in \
        'labctl build -s LAB_ACCELERATOR=nvidia --update-lock' > /nvidia.lock

FROM scratch AS lock
COPY --from=resolve /nvidia.lock /


# DeepSpeed's fused optimizers are compiled here, for the GPUs from T4 to Blackwell, which needs none: at their first use it would
# take minutes, on every node. What is built for the CPU of this host (CPUAdam, for offload) is left to the first use.
FROM system AS python
ARG MAX_JOBS=2
RUN --mount=type=cache,id=labctl-pip,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/run/sources/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=nvidia.in,target=/run/sources/nvidia.in \
    --mount=type=bind,source=nvidia.lock,target=/run/sources/nvidia.lock \
    --mount=type=bind,source=install.sh,target=/run/sources/install.sh \
    --mount=type=bind,source=cuda.sh,target=/run/sources/cuda.sh <<'SCRIPT'
set -eu
sources=/run/sources
export DS_BUILD_OPS=0
if [ ! -d /opt/venv ]; then
    grep -vE '^nvidia-(cuda-|nvvm)' "$sources/nvidia.in" > /tmp/nvidia.in
    exec sh "$sources/install.sh" /tmp/nvidia.in
fi
# First what DeepSpeed is compiled with.
grep -v '^deepspeed' "$sources/nvidia.lock" > /tmp/nvidia.lock
sh "$sources/install.sh" /tmp/nvidia.lock
sh "$sources/cuda.sh"
export CUDA_HOME=/usr/local/cuda DS_ACCELERATOR=cuda DS_ENABLE_NINJA=1
export TORCH_CUDA_ARCH_LIST='7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX' PATH="/usr/local/cuda/bin:$PATH"
# A torch of another index may be for another CUDA, for which DeepSpeed compiles nothing with this compiler.
compiler=$(nvcc --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
torch=$(python -c 'import torch; print((torch.version.cuda or "none").split(".")[0])')
if [ "$compiler" = "$torch" ]; then
    export DS_BUILD_FUSED_ADAM=1 DS_BUILD_FUSED_LAMB=1
else
    echo "FusedAdam and FusedLamb are not compiled: torch is for CUDA $torch, and the compiler of CUDA $compiler"
fi
sh "$sources/install.sh" "$sources/nvidia.lock"
rm /tmp/nvidia.lock
SCRIPT


FROM python AS lab
ENV CUDA_HOME=/usr/local/cuda PATH=${PATH}:/usr/local/cuda/bin
RUN mkdir -p /workspace /run/sshd
COPY sshd_config /opt/lab/sshd_config
COPY ssh_config /etc/ssh/ssh_config.d/lab.conf
COPY --chmod=755 labnode.py /opt/lab/labnode.py
COPY --chmod=644 rank_output.py step.regex stacks.py diagnosis.py sampler.py *_sampler.py /opt/lab/
WORKDIR /workspace
ENTRYPOINT ["/usr/bin/python3", "-I", "/opt/lab/labnode.py", "start"]
