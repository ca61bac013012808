# The lab image for Intel Gaudi: Habana's PyTorch image with ssh, pdsh, DeepSpeed and optimum-habana of its release. What
# it is handed: see cpu.Dockerfile.
#
# labctl chooses the base by the host's driver and habana.releases, unless LAB_BASE_IMAGE names it. Its torch, Python and
# Open MPI stay.

ARG BASE_IMAGE

FROM scratch AS wheels


FROM ${BASE_IMAGE} AS system
RUN --mount=type=cache,id=labctl-apt-archives,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=labctl-apt-lists,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=secret,id=apt.list,target=/run/sources/apt.list \
    --mount=type=secret,id=apt.conf,target=/etc/apt/apt.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=system.sh,target=/run/sources/system.sh \
    sh /run/sources/system.sh git


# Versions that belong to the base's release, which its own plug-in names: 1.22.0.740 is of release 1.22.
FROM system AS python
RUN --mount=type=cache,id=labctl-pip,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/run/sources/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=habana.in,target=/run/sources/habana.in \
    --mount=type=bind,source=habana.releases,target=/run/sources/habana.releases \
    --mount=type=bind,source=install.sh,target=/run/sources/install.sh <<'SCRIPT'
set -eu
release=$(python3 -c 'from importlib.metadata import version; print(*version("habana_torch_plugin").split(".")[:2], sep=".")')
row=$(grep "^$release\." /run/sources/habana.releases | tail -n 1)
if [ -z "$row" ]; then
    known=$(grep -oE '^[0-9]+\.[0-9]+' /run/sources/habana.releases | uniq | paste -s -d ' ')
    echo "the base image is of Gaudi release $release, which habana.releases does not list: known are $known" >&2
    exit 1
fi
# shellcheck disable=SC2086 # a row's columns
set -- $row
export DEEPSPEED=$3 OPTIMUM_HABANA=$4 GIT_SSL_CAINFO=/run/sources/ca.crt
[ -f "$GIT_SSL_CAINFO" ] || unset GIT_SSL_CAINFO
DS_BUILD_OPS=0 sh /run/sources/install.sh /run/sources/habana.in
SCRIPT


FROM python AS lab
# The first only comes with an interactive shell otherwise; the second is root's own folder in the base.
ENV GC_KERNEL_PATH=/usr/lib/habanalabs/libtpc_kernels.so HABANA_LOGS=/tmp/habana_logs/
RUN mkdir -p /workspace /run/sshd
COPY sshd_config /opt/lab/sshd_config
COPY ssh_config /etc/ssh/ssh_config.d/lab.conf
COPY --chmod=755 labnode.py /opt/lab/labnode.py
COPY --chmod=644 rank_output.py step.regex stacks.py diagnosis.py sampler.py *_sampler.py /opt/lab/
WORKDIR /workspace
ENTRYPOINT ["/usr/bin/python3", "-I", "/opt/lab/labnode.py", "start"]
