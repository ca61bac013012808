"""Stand-ins for the engine programs of NVIDIA and Habana: record each call, and add the stand-in devices.

Installed under the names of the programs that it stands in for:

    nvidia-container-runtime-hook    started by the engine for a reservation, before the container's first process
    nvidia-container-runtime         runc, for containers whose environment asks for devices
    habana-container-runtime
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

RECORD = Path("/run/stand-in/requests.jsonl")
TOOLS = Path("/run/stand-in/bin")
KINDS = {
    "nvidia": ("NVIDIA_VISIBLE_DEVICES", "/dev/nvidia{}", ("/dev/nvidiactl", "/dev/nvidia-uvm"), "nvidia-smi"),
    "habana": ("HABANA_VISIBLE_DEVICES", "/dev/accel/accel{}", (), "hl-smi"),
}


def main() -> None:
    """Act as a vendor's runtime, which changes the bundle and starts runc, or as its hook, by the program's name."""
    program = Path(sys.argv[0]).name
    if program.endswith("-hook"):
        state = json.load(sys.stdin)
        bundle = Path(state["bundle"])
        config = read(bundle)
        record(program, config)
        bring(config, "nvidia", state["pid"])
        return
    if "create" in sys.argv:
        bundle = Path(sys.argv[sys.argv.index("--bundle") + 1])
        config = read(bundle)
        record(program, config)
        add(config, program.partition("-")[0])
        (bundle / "config.json").write_text(json.dumps(config))
    os.execvp("runc", ["runc", *sys.argv[1:]])  # noqa: S606


def read(bundle: Path) -> dict[str, Any]:
    """Read the bundle's config.json."""
    config: dict[str, Any] = json.loads((bundle / "config.json").read_text())
    return config


def environment(config: dict[str, Any]) -> dict[str, str]:
    """Return the environment of the container's first process."""
    return dict(pair.split("=", 1) for pair in config["process"]["env"])


def record(program: str, config: dict[str, Any]) -> None:
    """Record a call: program, node, and the environment, capabilities and devices of the first process."""
    line = {
        "program": program,
        "node": config["hostname"],
        "environment": environment(config),
        "capabilities": config["process"]["capabilities"],
        "devices": [device["path"] for device in config["linux"].get("devices") or ()],
    }
    with RECORD.open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def files(config: dict[str, Any], kind: str) -> tuple[list[str], Path]:
    """Return the device files that a container's environment requests, and the path of the vendor's tool."""
    variable, pattern, common, tool = KINDS[kind]
    requested = environment(config).get(variable, "")
    ids = [] if requested in ("", "void", "none") else requested.split(",")
    every = sorted(path.name for path in Path(pattern).parent.glob(Path(pattern).name.format("[0-9]*")))
    paths = [str(Path(pattern).parent / name) for name in every] if ids == ["all"] else list(map(pattern.format, ids))
    return [*paths, *(common if paths else ())], TOOLS / tool


def add(config: dict[str, Any], kind: str) -> None:
    """Add the requested devices and the vendor's tool to the configuration that runc reads, as a runtime does."""
    paths, tool = files(config, kind)
    for path in paths:
        number = Path(path).stat().st_rdev
        where = {"type": "c", "major": os.major(number), "minor": os.minor(number)}
        config["linux"].setdefault("devices", []).append({"path": path, "fileMode": 0o666, **where})
        config["linux"]["resources"].setdefault("devices", []).append({"allow": True, "access": "rwm", **where})
    if paths and tool.exists():
        target = f"/usr/bin/{tool.name}"
        config["mounts"].append({"type": "bind", "source": str(tool), "destination": target, "options": ["bind", "ro"]})


def bring(config: dict[str, Any], kind: str, pid: int) -> None:
    """Create the requested devices and the vendor's tool in the container's file system, as a prestart hook does."""
    paths, tool = files(config, kind)
    root = config["root"]["path"]
    lines = []
    for path in paths:
        number = Path(path).stat().st_rdev
        lines.append(f"mknod -m 666 {root}{path} c {os.major(number)} {os.minor(number)}")
    if paths and tool.exists():
        lines.append(f"printf %s {shlex.quote(tool.read_text())} > {root}/usr/bin/{tool.name}")
        lines.append(f"chmod 755 {root}/usr/bin/{tool.name}")
    enter = ["nsenter", "--mount", "--target", str(pid), "--", "sh", "-euc", "\n".join(lines)]
    subprocess.run(enter, check=True, stdout=sys.stderr)


main()
