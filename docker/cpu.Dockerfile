# The CPU lab image: Python, ssh, pdsh, OpenMPI, torch (CPU only), DeepSpeed with its CPU communication operator.
#
# `labctl build` builds it and hands in, for the build only, where this host gets its packages from. Secrets are neither
# kept in a layer nor part of a cache key, so a renewed certificate or another mirror never costs a rebuild:
#   apt.list, apt.conf   package sources of the image's own release     pip.conf, ca.crt   Python index, certificates
#   wheels               a directory of wheels (build context, replaces the empty stage below)

ARG BASE_IMAGE=debian:bookworm-slim

FROM scratch AS wheels


FROM ${BASE_IMAGE} AS system
# The server package makes host keys when it is installed: gone within the same layer, or every copy would share them.
RUN --mount=type=cache,id=labctl-apt-archives,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=labctl-apt-lists,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=secret,id=apt.list,target=/run/sources/apt.list \
    --mount=type=secret,id=apt.conf,target=/etc/apt/apt.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt <<'SCRIPT'
set -eu
export DEBIAN_FRONTEND=noninteractive
rm -f /etc/apt/apt.conf.d/docker-clean
apt-get update
apt-get install --yes --no-install-recommends \
    ca-certificates iproute2 less procps \
    openssh-client openssh-server pdsh \
    openmpi-bin libopenmpi-dev \
    g++ make python3 python3-dev python3-venv
rm -f /etc/ssh/ssh_host_*
python3 -m venv /opt/venv
SCRIPT
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin


# `labctl build --update-lock`: what cpu.in comes to today, taken out of this stage as a file.
FROM system AS resolve
RUN --mount=type=cache,id=labctl-pip,target=/root/.cache/pip \
    --mount=type=bind,source=cpu.in,target=/run/sources/cpu.in \
    --mount=type=bind,from=wheels,target=/run/sources/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=tmpfs,target=/report <<'SCRIPT'
set -eu
pip install --dry-run --ignore-installed --report /report/json --requirement /run/sources/cpu.in
python > /cpu.lock <<'PYTHON'
import json, re
found = [package["metadata"] for package in json.load(open("/report/json"))["install"]]
print("# What cpu.in comes to. Update it with: labctl build --update-lock")
print(*sorted(re.sub(r"[-_.]+", "-", p["name"]).lower() + "==" + p["version"] for p in found), sep="\n")
PYTHON
SCRIPT

FROM scratch AS lock
COPY --from=resolve /cpu.lock /


FROM system AS python
# Everything but DeepSpeed, which is compiled against the torch that is installed here.
RUN --mount=type=cache,id=labctl-pip,target=/root/.cache/pip \
    --mount=type=bind,source=cpu.lock,target=/run/sources/cpu.lock \
    --mount=type=bind,from=wheels,target=/run/sources/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt <<'SCRIPT'
set -eu
grep -v '^deepspeed==' /run/sources/cpu.lock > /tmp/requirements
pip install --no-deps --requirement /tmp/requirements
rm /tmp/requirements
SCRIPT


FROM python AS deepspeed
# Only the shared-memory communication operator: compiled in the first step of the first run it would cost a minute and
# a half. Portable flags (DeepSpeed's own -O2), so the image runs on any x86-64 or arm64.
ARG MAX_JOBS=2
RUN --mount=type=cache,id=labctl-pip,target=/root/.cache/pip \
    --mount=type=bind,source=cpu.lock,target=/run/sources/cpu.lock \
    --mount=type=bind,from=wheels,target=/run/sources/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt <<'SCRIPT'
set -eu
export DS_BUILD_OPS=0 DS_BUILD_SHM_COMM=1 DS_ENABLE_NINJA=1 MAX_JOBS="$MAX_JOBS"
pip install --no-deps --no-build-isolation --no-cache-dir "$(grep '^deepspeed==' /run/sources/cpu.lock)"
pip check
SCRIPT


FROM deepspeed AS lab
RUN mkdir -p /workspace /run/sshd
COPY sshd_config /opt/lab/sshd_config
COPY --chmod=755 labnode.py /opt/lab/labnode.py
WORKDIR /workspace
ENTRYPOINT ["/usr/bin/python3", "-I", "/opt/lab/labnode.py", "start"]
