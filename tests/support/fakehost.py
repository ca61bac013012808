# ruff: noqa: ARG002 - it has the arguments of a Connection
"""Hosts that are directories of this machine: their shell is this one's, their engine and ssh a few lines of Python.

The engine keeps and refuses images as Docker's classic store does: by chains of layers, and by digest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from labctl.backends.docker.hosts.ssh import Connection
from labctl.config.inventory import InventoryHost
from labctl.system.process import CompletedProcess

DOCKER = """#!{python} -IS
import json, pathlib, re, sys
root = pathlib.Path("{engine}")
words = sys.argv[3:] if sys.argv[1] == "--host" else sys.argv[1:]
images = lambda: [json.loads(path.read_text()) for path in sorted(root.glob("*.json"))]
def inspect(name):
    return next((one for one in images() if name in (one["Id"], *one["RepoTags"])), None)
def load(path):
    import hashlib, tarfile
    if (root / "broken").exists():
        sys.exit("write /var/lib/docker: input/output error")
    held = {{tuple(one["RootFS"]["Layers"][:n]) for one in images() for n in range(9)}}
    whole = (root / "wants-all").exists()
    with tarfile.open(path) as tar:
        names = tar.getnames()
        read = lambda name: tar.extractfile(name).read()
        entry = json.loads(read("manifest.json"))[0]
        config = read(entry["Config"])
        layers = json.loads(config)["rootfs"]["diff_ids"]
        for n, (layer, name) in enumerate(zip(layers, entry["Layers"]), 1):
            if name not in names:
                if tuple(layers[:n]) not in held or whole:
                    sys.exit(f"open /var/lib/docker/tmp/{{name}}: no such file or directory")
            elif "sha256:" + hashlib.sha256(read(name)).hexdigest() != layer:
                sys.exit(f"invalid diffID for layer {{n}}")
    identity = "sha256:" + hashlib.sha256(config).hexdigest()
    image = dict(Id=identity, RepoTags=entry["RepoTags"], RootFS=dict(Layers=layers), Created="now",
                 Config=json.loads(config).get("config") or dict())
    for one in images():
        left = [tag for tag in one["RepoTags"] if tag not in entry["RepoTags"]]
        (root / (one["Id"][7:] + ".json")).write_text(json.dumps(dict(one, RepoTags=left)))
    (root / (identity[7:] + ".json")).write_text(json.dumps(image))
if (root / "down").exists():
    sys.exit("Cannot connect to the Docker daemon. Is the docker daemon running?")
if words[0] == "info":
    text = re.sub("{{{{range.*{{{{end}}}}", "", words[-1])
    print(text.replace("{{{{.ID}}}}", "{name}-0000").replace("{{{{.DockerRootDir}}}}", str(root)))
elif words[:2] == ["image", "ls"]:
    print("\\n".join(one["Id"] for one in images()))
elif words[:2] == ["image", "inspect"]:
    found = [inspect(name) for name in words[4:]]
    for one in filter(None, found):
        whole = one["Id"] if ".Id" in words[3] else json.dumps(one)
        print(json.dumps(one["RootFS"]["Layers"]) if "RootFS" in words[3] else whole)
    sys.exit(None in found)
elif words[0] == "load":
    load(words[-1])
elif words[0] == "pull":
    registry = root / "registry"
    if not registry.exists():
        sys.exit(f"Error response from daemon: pull access denied for {{words[-1]}}")
    load(registry)
"""
SSH = """#!/bin/sh
# ssh ... -- HOST COMMAND
while [ "$1" != -- ]; do shift; done
host={rack}/$2
[ -d "$host" ] && ! [ -e "$host/unreachable" ] || exit 255
HOME=$host PATH=$host/bin:$PATH exec sh -c "$3"
"""


class FakeHost(Connection):
    """A host whose home is a directory of this machine; ``sent`` counts the bytes that labctl sent to it."""

    def __init__(self, rack: Path, name: str) -> None:
        """Make the host's home below ``rack`` with a fake docker and a fake ssh in its bin."""
        self.target = InventoryHost(name=name)
        self.address = ""
        self.home = rack / name
        self.engine = self.home / "engine"
        self.engine.mkdir(parents=True)
        self.sent = 0
        for program, text in (("docker", DOCKER), ("ssh", SSH)):
            path = self.home / "bin" / program
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.format(python=sys.executable, engine=self.engine, name=name, rack=rack))
            path.chmod(0o755)

    @property
    def staged(self) -> list[Path]:
        """List the files without a suffix below ``.labctl``: sent, and not yet loaded into the engine."""
        return sorted(path for path in (self.home / ".labctl").rglob("*") if path.is_file() and not path.suffix)

    @property
    def images(self) -> list[str]:
        """List the tags of the images in the host's engine."""
        return [tag for path in self.engine.glob("*.json") for tag in json.loads(path.read_text())["RepoTags"]]

    def run(
        self,
        script: str,
        *arguments: str,
        input: str | None = None,  # noqa: A002
        timeout: float = 60,
        check: bool = True,
    ) -> CompletedProcess:
        """Run a script with this input; return its result, whatever its exit code."""
        return self._ran(script, arguments, (input or "").encode())

    def send(self, script: str, *arguments: str, chunks: Iterable[bytes], timeout: float) -> CompletedProcess:
        """Run a script with these chunks as input, counted in ``sent``; return its result."""
        data = bytearray()
        for chunk in chunks:
            data += chunk
        self.sent += len(data)
        return self._ran(script, arguments, bytes(data))

    def receive(
        self, script: str, *arguments: str, on_chunk: Callable[[bytes], object], timeout: float
    ) -> CompletedProcess:
        """Run a script; pass all of its output to ``on_chunk`` at once; return its result."""
        done = self._ran(script, arguments, b"")
        on_chunk(done.out.encode())
        return done

    def _ran(self, script: str, arguments: tuple[str, ...], data: bytes) -> CompletedProcess:
        """Run a script in sh on this machine, with the host's home as HOME and its bin first in PATH."""
        environ = {**os.environ, "HOME": str(self.home), "PATH": f"{self.home}/bin:{os.environ['PATH']}"}
        argv = ("sh", "-c", script, "sh", *arguments)
        done = subprocess.run(argv, input=data, capture_output=True, env=environ, timeout=60, check=False)
        return CompletedProcess(argv, done.returncode, done.stdout.decode(), done.stderr.decode())
