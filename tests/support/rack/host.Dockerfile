# A host of the rack: Debian with Docker Engine, its command and sshd, and nothing else that labctl could lean on.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN --mount=type=cache,id=labctl-apt-archives,target=/var/cache/apt,sharing=locked \
    --mount=type=cache,id=labctl-apt-lists,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=secret,id=apt.list,target=/run/sources/apt.list \
    --mount=type=secret,id=apt.conf,target=/etc/apt/apt.conf \
    --mount=type=secret,id=ca.crt,target=/run/sources/ca.crt \
    --mount=type=bind,source=install.sh,target=/run/sources/install.sh \
    sh /run/sources/install.sh
COPY --chmod=755 boot.sh engine.sh give.sh /opt/rack/
VOLUME /var/lib/docker
ENTRYPOINT ["/opt/rack/boot.sh"]
