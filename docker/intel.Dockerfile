# The lab image for Intel GPUs: ssh, pdsh, OpenMPI, the distribution's compute runtime, torch with XPU (whose own backend
# xccl brings oneCCL), DeepSpeed. What it is handed: see cpu.Dockerfile.
#
# On Ubuntu 24.04 or Debian 12. The newest GPUs need a newer runtime: LAB_BASE_IMAGE=intel/deep-learning-essentials:<tag>
# has one. There is no intel.lock: intel.in pins torch, torch pins what belongs to it, and cpu.lock pins the rest.

ARG BASE_IMAGE=ubuntu:24.04

FROM scratch AS wheels


FROM ${BASE_IMAGE} AS system
RUN --mount=type=cache,id=labctl-apt-archives,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=labctl-apt-lists,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=secret,id=apt.list,target=/run/sources/apt.list \
    --mount=type=secret,id=apt.conf,target=/etc/apt/apt.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=system.sh,target=/run/sources/system.sh <<'SCRIPT'
set -eu
# Debian has the Level Zero driver in the package of the OpenCL one.
if grep -q '^ID=ubuntu' /etc/os-release; then driver=libze-intel-gpu1; else driver=; fi
sh /run/sources/system.sh intel-opencl-icd libze1 $driver
SCRIPT
ENV PATH=/opt/venv/bin:${PATH}


FROM system AS python
RUN --mount=type=cache,id=labctl-pip,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/run/sources/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=cpu.lock,target=/run/sources/cpu.lock \
    --mount=type=bind,source=intel.in,target=/run/sources/intel.in \
    --mount=type=bind,source=install.sh,target=/run/sources/install.sh \
    DS_BUILD_OPS=0 sh /run/sources/install.sh /run/sources/intel.in /run/sources/cpu.lock


FROM python AS lab
RUN mkdir -p /workspace /run/sshd
COPY sshd_config /opt/lab/sshd_config
COPY ssh_config /etc/ssh/ssh_config.d/lab.conf
COPY --chmod=755 labnode.py /opt/lab/labnode.py
COPY --chmod=644 rank_output.py step.regex stacks.py diagnosis.py sampler.py *_sampler.py /opt/lab/
WORKDIR /workspace
ENTRYPOINT ["/usr/bin/python3", "-I", "/opt/lab/labnode.py", "start"]
