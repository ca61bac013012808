"""A second machine on this host: separate /dev, /sys, /etc, /run, network and Docker engine, with stand-in devices.

What is planted there is real to every program that is started in it, so nothing of labctl has to know.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import docker
from docker import DockerClient
from support.harness import Lab, wait_until

HERE = Path(__file__).parent
DOCKER = HERE.parents[2] / "docker"
PROGRAMS = [
    DOCKER / "labnode.py",
    DOCKER / "rank_output.py",
    DOCKER / "step.regex",
    DOCKER / "stacks.py",
    DOCKER / "diagnosis.py",
    DOCKER / "sampler.py",
    *DOCKER.glob("*_sampler.py"),
]
NODE_IMAGE = "stand-in/node"
FORBIDDEN = ("Operation not permitted", "Permission denied", "permission denied")
# /dev/full: containers may open it, and writes have no effect.
HARMLESS = os.makedev(1, 7)
# Omitted from the lab's image: all that is not needed to start, log in, run Python or MPI programs, and run pip.
LEFT_OUT = (
    "./dev/*", "./proc/*", "./sys/*", "./var/lib/apt", "./var/lib/dpkg", "./var/cache/*",
    *(f"./opt/venv/lib/*/site-packages/{word}*" for word in ("[!p]", "p[!i]", "pi[!p]")), "./opt/venv/share/*",
    "./usr/include", "./usr/lib/gcc", "./usr/bin/*-linux-gnu-*", "*.a",
    "./usr/lib/*/perl", "./usr/lib/*/gconv", "./usr/lib/*/lib*san.so.*",
    "./usr/share/doc/*", "./usr/share/javascript", "./usr/share/locale/*", "./usr/share/man/*", "./usr/share/perl*",
)  # fmt: skip
BASE_CONFIG: dict[str, Any] = {
    # The host's systemd, if any, is not reachable from the machine.
    "exec-opts": ["native.cgroupdriver=cgroupfs"],
    "mtu": 1400,
}
VENDORS = ("nvidia-container-runtime-hook", "nvidia-container-runtime", "habana-container-runtime")


class Dockerd(NamedTuple):
    """Configuration of the engine."""

    daemon_json: dict[str, Any] = {}  # noqa: RUF012 - not written to
    """Keys of daemon.json that extend the default file."""
    nvidia_hook: bool = False
    """Offer reservations of NVIDIA devices, by the vendor's hook."""


HABANA_RUNTIME = {"runtimes": {"habana": {"path": "/run/stand-in/bin/habana-container-runtime"}}}
EVERY_VENDOR = Dockerd(HABANA_RUNTIME, nvidia_hook=True)


class Machine:
    """The machine; ``root`` is its file system as seen from here, ``prefix`` starts a program in it.

    Absolute links below ``root`` lead back to this machine: name ``/run``, not ``/var/run``.
    """

    def __init__(self, directory: Path) -> None:
        """Start the process that holds the machine's namespaces, and install Habana's stand-in runtimes."""
        self.directory = directory
        self._images = directory / "images"
        self._images.mkdir(parents=True)
        (directory / "scratch").mkdir()
        self._holder = _hold(directory / "scratch", self._images)
        self.root = Path(f"/proc/{self._holder.pid}/root")
        self.prefix = ("bash", str(HERE / "enter.sh"), str(self._holder.pid))
        self._dockerd: subprocess.Popen[bytes] | None = None
        self._configured: Dockerd | None = None
        self._planted: list[tuple[Path, bytes | None]] = []
        for name in VENDORS[1:]:
            self.program(name, (HERE / "vendor.py").read_text(), keep=True)

    # --- what is in it ---

    def run(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program on the machine to its end; return its output; with ``check`` raise if it fails."""
        return subprocess.run([*self.prefix, *argv], check=check, capture_output=True, text=True, timeout=300)

    def at(self, path: str) -> Path:
        """Translate a path of the machine into a path on this host."""
        return self.root / path.lstrip("/")

    def device(self, path: str, *, mode: int = 0o666, gid: int = 0) -> None:
        """Plant a character device of /dev/full's number, safe to open, owned by root and ``gid``."""
        where = self._place(path)
        os.mknod(where, stat.S_IFCHR | mode, HARMLESS)
        where.chmod(mode)
        os.chown(where, 0, gid)

    def file(self, path: str, text: str) -> None:
        """Write a file on the machine; `clear` restores what was there."""
        where = self._place(path)
        where.write_text(text)

    def link(self, path: str, target: str) -> None:
        """Plant a symbolic link, relative as the kernel's are."""
        self._place(path).symlink_to(target)

    def program(self, name: str, text: str, *, keep: bool = False) -> None:
        """Put a program on PATH, in Python unless it begins with ``#!``; `clear` removes it unless ``keep``."""
        where = self.at(f"/run/stand-in/bin/{name}") if keep else self._place(f"/run/stand-in/bin/{name}")
        where.write_text(text if text.startswith("#!") else f"#!{sys.executable}\n{text}")
        where.chmod(0o755)

    def clear(self) -> None:
        """Remove planted files, restore those they replaced, and delete the record of the vendors' programs."""
        while self._planted:
            path, before = self._planted.pop()
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.rmdir()
            elif before is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(before)
        self.at("/run/stand-in/requests.jsonl").unlink(missing_ok=True)

    def requests(self) -> list[dict[str, Any]]:
        """List the recorded calls of the vendors' programs, in order."""
        record = self.at("/run/stand-in/requests.jsonl")
        return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []

    def _place(self, path: str) -> Path:
        """Make the parent folders of a path to be planted, and record what to restore; return the path on this host."""
        where = self.at(path)
        missing = [parent for parent in where.parents if not parent.exists()]
        for parent in reversed(missing):
            parent.mkdir()
            self._planted.append((parent, None))
        self._planted.append((where, where.read_bytes() if where.is_file() else None))
        return where

    # --- its engine ---

    def configure(self, config: Dockerd) -> None:
        """Start dockerd with this configuration, stopping another; do nothing if it already runs with it."""
        if self._dockerd and self._configured == config:
            return
        self.stop_engine()
        hook = VENDORS[0]
        if config.nvidia_hook:
            self.program(hook, (HERE / "vendor.py").read_text(), keep=True)
        else:
            self.at(f"/run/stand-in/bin/{hook}").unlink(missing_ok=True)
        self.at("/etc/docker/daemon.json").write_text(json.dumps({**BASE_CONFIG, **config.daemon_json}, indent=2))
        self._configured = config
        self.start_engine()

    def start_engine(self) -> None:
        """Start dockerd and wait until it answers."""
        log = self.directory / "dockerd.log"
        with log.open("ab") as stream:
            self._dockerd = subprocess.Popen(
                [*self.prefix, "dockerd"],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

        def answers() -> bool:
            """Return True if `docker version` succeeds; fail if dockerd has ended."""
            assert self._dockerd
            assert self._dockerd.poll() is None, f"dockerd ended:\n{log.read_text()[-3000:]}"
            return self.run("docker", "version", check=False).returncode == 0

        wait_until(answers, 120, "the second engine answers")

    def stop_engine(self) -> None:
        """Stop dockerd and wait for its end, if it runs."""
        if self._dockerd:
            self._dockerd.terminate()
            self._dockerd.wait(120)
            self._dockerd = None

    @cached_property
    def engine(self) -> DockerClient:
        """Client of the engine's socket, as an independent witness."""
        return docker.DockerClient(base_url=f"unix://{self.root}/run/docker.sock", version="1.44", timeout=300)

    def lab(self, path: Path, name: str, settings: dict[str, str]) -> Lab:
        """Make a lab on the machine, with the small node image."""
        plain = {"LAB_IMAGE": NODE_IMAGE, "LAB_SHM_SIZE": "512m"}
        return Lab.make(path, name, self.engine, {**plain, **settings}, prefix=self.prefix)

    def load_node(self, image: str) -> None:
        """Make the small node image from the lab's ``image``, and import it into the engine."""
        import_node(image, NODE_IMAGE, prefix=self.prefix)

    def close(self) -> None:
        """Stop the engine, end the namespaces, and remove the images."""
        self.stop_engine()
        if "engine" in self.__dict__:
            self.engine.close()
        assert self._holder.stdin
        self._holder.stdin.close()
        self._holder.wait(90)
        shutil.rmtree(self._images, ignore_errors=True)


def import_node(image: str, name: str, *, prefix: tuple[str, ...] = ()) -> None:
    """Import a small node image under ``name``: ``image`` without large files, with this checkout's programs.

    ``prefix`` leads to the engine that imports it.
    """
    excluded = [f"--exclude={pattern}" for pattern in LEFT_OUT]
    mounts = [f"--volume={program}:/opt/lab/{program.name}:ro" for program in PROGRAMS]
    # Disable the log driver, which would store the whole output again.
    pack = ["docker", "run", "--rm", "--log-driver=none", "--network=none", "--entrypoint=tar", *mounts, image]
    changes = [
        'ENTRYPOINT ["/usr/bin/python3", "-I", "/opt/lab/labnode.py", "start"]',
        "ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "WORKDIR /workspace",
    ]
    unpack = ["docker", "import", *(word for change in changes for word in ("--change", change)), "-", name]
    with subprocess.Popen([*pack, "-C", "/", "-cf", "-", *excluded, "."], stdout=subprocess.PIPE) as packed:
        subprocess.run([*prefix, *unpack], stdin=packed.stdout, check=True, capture_output=True, timeout=600)
    assert packed.returncode == 0, f"tar in {image}: code {packed.returncode}"


def _hold(scratch: Path, images: Path) -> subprocess.Popen[bytes]:
    """Start the process that holds the machine's namespaces; skip the test unless root and allowed by the kernel."""
    if os.geteuid() != 0:
        pytest.skip("a machine with stand-in devices needs root: mounts, namespaces, device files")
    script = ["bash", str(HERE / "machine.sh"), str(scratch), str(images)]
    errors = scratch.parent / "machine.err"
    with errors.open("wb") as stream:
        holder = subprocess.Popen(
            ["unshare", "--mount", "--net", "--propagation=private", *script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            start_new_session=True,
        )
    assert holder.stdout
    with holder.stdout:
        greeting = holder.stdout.readline()
    if greeting != b"ready\n":
        assert holder.stdin
        holder.stdin.close()
        holder.wait(90)
        reason = errors.read_text().strip()
        if any(word in reason for word in FORBIDDEN):
            pytest.skip(f"this kernel forbids a machine with stand-in devices: {reason}")
        pytest.fail(f"no machine with stand-in devices: {reason}")
    return holder
