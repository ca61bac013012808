# The CPU lab image: Python, ssh, pdsh, OpenMPI, torch (CPU only), DeepSpeed with its CPU communication operator.
#
# `labctl build` builds it and hands in, for the build only, where this host gets its packages from. Secrets are neither
# kept in a layer nor part of a cache key, so a renewed certificate or another mirror never costs a rebuild:
#   apt.list, apt.conf   package sources of the image's own release     pip.conf, ca.crt   Python index, certificates
#   wheels               a directory of wheels (build context, replaces the empty stage below)
# system.sh, install.sh and resolve.py are what all the images have in common.

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


# `labctl build --update-lock`: what cpu.in comes to today, taken out of this stage as a file.
FROM system AS resolve
RUN --mount=type=cache,id=labctl-pip,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/run/sources/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=cpu.in,target=/run/sources/cpu.in \
    --mount=type=bind,source=resolve.py,target=/run/sources/resolve.py \
    python /run/sources/resolve.py /run/sources/cpu.in 'labctl build --update-lock' > /cpu.lock

FROM scratch AS lock
COPY --from=resolve /cpu.lock /


# Of DeepSpeed's operators only the shared-memory communication: compiled in the first step of the first run it would
# cost a minute and a half. Portable flags (DeepSpeed's own -O2), so the image runs on any x86-64 or arm64.
FROM system AS python
ARG MAX_JOBS=2
RUN --mount=type=cache,id=labctl-pip,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/run/sources/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=cpu.lock,target=/run/sources/cpu.lock \
    --mount=type=bind,source=install.sh,target=/run/sources/install.sh \
    DS_BUILD_OPS=0 DS_BUILD_SHM_COMM=1 DS_ENABLE_NINJA=1 sh /run/sources/install.sh /run/sources/cpu.lock


FROM python AS lab
RUN mkdir -p /workspace /run/sshd
COPY sshd_config /opt/lab/sshd_config
COPY ssh_config /etc/ssh/ssh_config.d/lab.conf
COPY --chmod=755 labnode.py /opt/lab/labnode.py
COPY --chmod=644 rank_output.py step.regex stacks.py diagnosis.py sampler.py *_sampler.py /opt/lab/
WORKDIR /workspace
ENTRYPOINT ["/usr/bin/python3", "-I", "/opt/lab/labnode.py", "start"]
