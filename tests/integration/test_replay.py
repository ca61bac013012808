"""Reproducible results: a complete record, a replay that is identical to the bit, and detected drift."""

from __future__ import annotations

import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import FreshLab
from support.harness import Lab

from docker import DockerClient

pytestmark = pytest.mark.docker

LIMIT = 1200
DIGEST = re.compile(r"[0-9a-f]{64}")
IMAGE = re.compile(r"sha256:[0-9a-f]{64}")
# Schema of a record's documents: a type, a pattern, a list of one kind, or a mapping by name (`str`) or by key.
VERSIONS: Any = {
    "labctl": str, "python": str, "engine": str, "api": str, "kernel": str, "image": str, "image_id": IMAGE,
    "images": {str: IMAGE}, "packages": {str: str}, "cache": {str: {str: (str, None)}},
    "devices": {str: [{"id": str, "name": str, "uuid": str, "firmware": str, "driver": str}]},
    "code": [{"host": str, "path": str, "commit": re.compile("[0-9a-f]{40}"), "dirty": bool}],
}  # fmt: skip
RECORD: dict[str, Any] = {
    "versions.json": VERSIONS,
    "settings.json": [{"key": str, "value": str, "origin": str}],
    "job.json": {
        "run_id": str, "workload": str, "launcher": str, "argv": [str], "rank_argv": [str], "environment": {str: str},
        "timeout": float, "nodes": [{"name": str, "slots": int}], "request": dict, "resumed": str, "retried": [str],
        "replays": str, "files": {str: DIGEST}, "code": {str: DIGEST}, "shared": {str: DIGEST}, "job": dict,
    },
    "result.json": {
        "schema": int, "run_id": str, "workload": str, "launcher": str, "lab": str, "verdict": str,
        "cause": (str, None), "message": str, "exit_code": int, "world_size": int,
        "ranks": [{"rank": int, "node": str}], "metrics": {str: dict}, "notes": {str: str},
        "checks": [{"criterion": str, "value": (float, None), "passed": bool}],
        "seconds": float, "started": str, "resumed": str, "retried": [str], "replays": str,
        "domain": (str, None), "retry": (str, None), "evidence": str, "hang": (dict, None),
        "straggler": (dict, None), "pace": (dict, None), "node_changes": list,
    },
}  # fmt: skip


def walk(schema: Any, value: Any, path: str) -> None:
    """Raise AssertionError, with the path, at the first place where the value violates the schema."""
    if isinstance(schema, tuple):
        if value is not None:
            walk(schema[0], value, path)
    elif isinstance(schema, re.Pattern):
        assert isinstance(value, str), path
        assert schema.fullmatch(value), path
    elif isinstance(schema, list):
        assert isinstance(value, list), path
        for number, item in enumerate(value):
            walk(schema[0], item, f"{path}[{number}]")
    elif isinstance(schema, dict):
        assert isinstance(value, dict), path
        named = str in schema
        assert named or value.keys() == schema.keys(), path
        for key, item in value.items():
            walk(schema[str if named else key], item, f"{path}.{key}")
    else:
        assert isinstance(value, (int, float) if schema is float else schema), path


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a git repository with one commit and a file that has been changed since."""
    path = tmp_path_factory.mktemp("clone")
    (path / "tools.py").write_text("x = 1\n")
    identity = ("-c", "user.name=ann", "-c", "user.email=ann@example.org")
    for arguments in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "first")):
        subprocess.run(["git", *arguments], cwd=path, check=True)
    (path / "tools.py").write_text("x = 2\n")
    return path


def read(record: Path, name: str) -> Any:
    """Return a JSON document of a record, with the run's id replaced by RUN."""
    return json.loads((record / name).read_text().replace(record.name, "RUN"))


def fingerprint(record: Path) -> str:
    """Return the SHA-256 of the losses of all steps, which the run printed."""
    match = re.search(r"Loss curve: \d+ steps, SHA-256 (\w+)", (record / "output.log").read_text())
    assert match
    return match[1]


def test_a_replay_of_opt_tiny_is_the_same_to_the_bit_and_its_record_is_whole(fresh_lab: FreshLab, clone: Path) -> None:
    """A replay has the same losses and files with the recorded code; a changed shared file gives exit code 3."""
    lab = fresh_lab(LAB_SHM_SIZE="256m", LAB_MOUNTS=f"{clone}:/clone:ro")
    lab.call("up", limit=300).expect(0)
    small = ("sequence-length=16", "deepspeed.train_micro_batch_size_per_gpu=6", "steps=40")
    argv = ("run", "opt-tiny", "--launcher", "mpirun", "--expect", "loss<9", "--json")
    first = lab.call(*argv, *(word for change in small for word in ("--set", change)), limit=LIMIT).expect(0).json
    record = lab.path / "runs" / first["run_id"]
    for name, schema in RECORD.items():
        walk(schema, read(record, name), name)
    versions = read(record, "versions.json")
    assert {"torch", "deepspeed", "deb/libc6"} <= versions["packages"].keys()
    assert [(entry["path"], entry["dirty"]) for entry in versions["code"]] == [(str(clone), True)]
    assert {"work/train.py", "work/configs/opt-tiny.json"} <= read(record, "job.json")["code"].keys()
    # Change the workload: the replay uses the recorded code.
    (lab.path / "workloads/opt/train.py").write_text("raise SystemExit('another script')\n")
    second = lab.call("replay", first["run_id"], "--json", limit=LIMIT).expect(0).json
    assert (second["replays"], second["verdict"]) == (first["run_id"], "PASS")
    again = lab.path / "runs" / second["run_id"]
    jobs = [read(path, "job.json") for path in (record, again)]
    assert jobs[0]["argv"] == jobs[1]["argv"]
    assert jobs[0]["rank_argv"] == jobs[1]["rank_argv"]
    assert jobs[0]["code"] == jobs[1]["code"]
    assert read(again, "versions.json") == versions
    for name in ("rank.sh", "hostfile", "ds_config.json"):
        assert (record / name).read_text().replace(record.name, "RUN") == (again / name).read_text().replace(
            again.name, "RUN"
        )
    assert fingerprint(record) == fingerprint(again)
    shared = lab.path / "workloads/common/rank_group.py"
    shared.write_text(f"{shared.read_text()}\n# changed\n")
    refused = lab.call("replay", first["run_id"]).expect(3)
    assert "workloads/common/rank_group.py: changed since" in refused.err


def drift(lab: Lab) -> set[tuple[str, str]]:
    """Run `verify`, which must exit with 5; return what drifted and where, for each difference."""
    return {
        (difference["what"], difference["where"]) for difference in lab.call("verify", "--json").expect(5).json["drift"]
    }


def test_verify_finds_a_script_data_an_image_and_the_image_of_one_node(
    fresh_lab: FreshLab, engine: DockerClient, image: str
) -> None:
    """After `freeze`, `verify` passes, then names a changed script, data file and image."""
    lab = fresh_lab(LAB_ACCELERATOR="cpu")
    tag = f"{lab.name}/cpu"
    task = lab.path / "workloads/hello/workload.yml"
    declared = task.read_text()
    task.write_text(f"{declared}inputs: {{data: file}}\narguments: [--data, corpus.txt]\n")
    corpus = lab.path / "cache/corpus.txt"
    corpus.write_text("to be or not to be\n")
    lab.configure({"LAB_IMAGE": tag})
    engine.images.get(image).tag(tag)
    try:
        lab.call("up", limit=300).expect(0)
        lab.call("freeze").expect(0)
        assert "as frozen in" in lab.call("verify").expect(0).out
        script = next(task.parent.glob("*.py"))
        script.write_text(f"{script.read_text()}\n# changed\n")
        corpus.write_text("to be\n")
        expected = {(f"files {script.relative_to(lab.path)}", "lab"), (f"data {corpus}", "local")}
        assert drift(lab) == expected
        engine.images.build(fileobj=io.BytesIO(f"FROM {image}\nLABEL other=1\n".encode()), tag=tag, rm=True)
        expected.add(("image", "local"))
        assert drift(lab) == expected
        compose = ("docker", "compose", "-p", f"labctl-{lab.name}", "-f", ".lab/nodes/worker-1/compose.yml")
        subprocess.run([*compose, "up", "-d", "worker-1"], cwd=lab.path, check=True, capture_output=True)
        assert drift(lab) == expected | {("image", "worker-1")}
    finally:
        lab.destroy()
        engine.images.remove(tag, force=True)
