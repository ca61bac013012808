# The lab image for NVIDIA GPUs: ssh, pdsh, OpenMPI, torch with CUDA and NCCL, DeepSpeed. What it is handed: see
# cpu.Dockerfile.
#
# Two bases. A plain Debian or Ubuntu gets nvidia.lock, whose torch brings CUDA's libraries as wheels, but no compiler:
# operators that DeepSpeed compiles at their first use (FusedAdam, CPUAdam for offload) need nvcc. NVIDIA's own PyTorch
# image, LAB_BASE_IMAGE=nvcr.io/nvidia/pytorch:<tag>, has nvcc, keeps its torch, and gets nvidia.in around it.

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


FROM system AS python
RUN --mount=type=cache,id=labctl-pip,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/run/sources/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=nvidia.in,target=/run/sources/nvidia.in \
    --mount=type=bind,source=nvidia.lock,target=/run/sources/nvidia.lock \
    --mount=type=bind,source=install.sh,target=/run/sources/install.sh \
    if [ -d /opt/venv ]; then asked=nvidia.lock; else asked=nvidia.in; fi \
    && DS_BUILD_OPS=0 sh /run/sources/install.sh "/run/sources/$asked"


FROM python AS lab
RUN mkdir -p /workspace /run/sshd
COPY sshd_config /opt/lab/sshd_config
COPY ssh_config /etc/ssh/ssh_config.d/lab.conf
COPY --chmod=755 labnode.py /opt/lab/labnode.py
WORKDIR /workspace
ENTRYPOINT ["/usr/bin/python3", "-I", "/opt/lab/labnode.py", "start"]
