# The lab image for Intel GPUs with TensorFlow: Intel's extension for it, and Horovod over Intel MPI and oneCCL. What it is
# handed: see cpu.Dockerfile. LAB_IMAGE=labctl/intel-tensorflow builds and takes it.
#
# Debian 12, whose Python is the 3.11 that Intel's last Horovod was built for.

ARG BASE_IMAGE=debian:bookworm-slim

FROM scratch AS wheels


FROM ${BASE_IMAGE} AS system
RUN --mount=type=cache,id=labctl-apt-archives,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=labctl-apt-lists,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=secret,id=apt.list,target=/run/sources/apt.list \
    --mount=type=secret,id=apt.conf,target=/etc/apt/apt.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=system.sh,target=/run/sources/system.sh \
    sh /run/sources/system.sh dataset-fashion-mnist intel-opencl-icd libze1
ENV PATH=/opt/venv/bin:${PATH}


FROM system AS resolve
RUN --mount=type=cache,id=labctl-pip,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/run/sources/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=intel-tensorflow.in,target=/run/sources/intel-tensorflow.in \
    --mount=type=bind,source=resolve.py,target=/run/sources/resolve.py \
    python /run/sources/resolve.py /run/sources/intel-tensorflow.in \
        'labctl build -s LAB_IMAGE=labctl/intel-tensorflow --update-lock' > /intel-tensorflow.lock

FROM scratch AS lock
COPY --from=resolve /intel-tensorflow.lock /


FROM system AS python
RUN --mount=type=cache,id=labctl-pip,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/run/sources/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=intel-tensorflow.lock,target=/run/sources/intel-tensorflow.lock \
    --mount=type=bind,source=install.sh,target=/run/sources/install.sh \
    sh /run/sources/install.sh /run/sources/intel-tensorflow.lock


FROM python AS lab
# Where pip puts what the extension and Horovod are linked against; and no greetings of TensorFlow's.
ENV LD_LIBRARY_PATH=/opt/venv/lib:/opt/venv/lib/python3.11/site-packages/intel_extension_for_tensorflow \
    I_MPI_ROOT=/opt/venv CCL_ROOT=/opt/venv TF_CPP_MIN_LOG_LEVEL=2
RUN mkdir -p /workspace /run/sshd
COPY sshd_config /opt/lab/sshd_config
COPY ssh_config /etc/ssh/ssh_config.d/lab.conf
COPY --chmod=755 labnode.py /opt/lab/labnode.py
COPY --chmod=644 rank_output.py step.regex stacks.py diagnosis.py sampler.py *_sampler.py /opt/lab/
WORKDIR /workspace
ENTRYPOINT ["/usr/bin/python3", "-I", "/opt/lab/labnode.py", "start"]
