"""Models and datasets fetched by `labctl cache` and Lambda's scripts are readable by the workloads without network."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.fakehub import REVISION, FakeHub, serving
from support.harness import LABCTL, NOT_INHERITED

from docker import DockerClient

pytestmark = pytest.mark.docker
WORKLOADS = Path(__file__).resolve().parents[2] / "workloads"
WEIGHTS = bytes(200_000)
ROWS = b'{"prompt": "how?", "chosen": "so"}\n' * 5000
READ = """
import sys
from pathlib import Path
sys.path[:0] = ["/workloads/opt", "/workloads/common"]
import datasets, model, training_text
print("model", model.find_snapshot("opt-350m")[0])
print("rows", len(datasets.load_dataset(training_text.fetched_dataset("Dahoas/rm-static"), split="train")))
# Store the data set of that name as the library does.
kept = Path("/cache/huggingface/datasets")
made = datasets.load_dataset_builder("/cache/full-hh-rlhf", cache_dir=str(kept))
made.download_and_prepare()
made = next(path for path in kept.iterdir() if path.is_dir()).rename(kept / "Dahoas___full-hh-rlhf")
for arrow in made.rglob("*.arrow"):
    arrow.rename(arrow.with_name("full-hh-rlhf-train.arrow"))
print("Lambda's model", model.find_snapshot("opt-1.3b")[0])
print("Lambda's rows", len(training_text.cached_dataset("Dahoas/full-hh-rlhf")))
try:
    training_text.cached_dataset("yitingxie/rlhf-reward-datasets")
except training_text.InputError as error:
    print("missing", error)
"""


def test_what_was_fetched_and_what_lambdas_scripts_have_cached_is_read_without_network(
    engine: DockerClient, image: str, tmp_path: Path
) -> None:
    """Workloads find all of it in a container without network; a missing data set is named."""
    workload, shared = tmp_path / "workloads/reads", tmp_path / "shared"
    lambdas = shared / "huggingface/transformers/models--facebook--opt-1.3b/snapshots/08ab"
    for folder in (workload, lambdas, shared / "full-hh-rlhf"):
        folder.mkdir(parents=True)
    (lambdas / "pytorch_model.bin").write_bytes(WEIGHTS)
    (shared / "full-hh-rlhf/train.jsonl").write_bytes(ROWS)
    (workload / "reads.py").touch()
    (workload / "workload.yml").write_text(
        "description: reads\nlauncher: deepspeed\nscript: reads.py\ntimeout: 1m\n"
        "cache: {models: [facebook/opt-350m], datasets: [Dahoas/rm-static]}\n"
    )
    model, rows = {"config.json": b"{}", "pytorch_model.bin": WEIGHTS}, {"README.md": b"#\n", "data/train.jsonl": ROWS}
    with serving(FakeHub(models={"facebook/opt-350m": model}, datasets={"Dahoas/rm-static": rows})) as hub:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
        argv = [LABCTL, "cache", "reads", "-C", str(tmp_path), "-s", f"HOST_CACHE_PATH={shared}"]
        subprocess.run(argv, env={**environ, "HF_ENDPOINT": hub.endpoint}, check=True, timeout=300)
    output = engine.containers.run(
        image,
        ["-c", READ],
        entrypoint="python3",
        user=f"{os.getuid()}:{os.getgid()}",
        network_mode="none",
        environment={
            "HF_HOME": "/cache/huggingface",
            "HF_DATASETS_CACHE": "/cache/datasets",
            "HOME": "/tmp",  # noqa: S108
            # As for ranks: imports before the workload's code would otherwise retry the hub for a minute.
            "HF_HUB_OFFLINE": "1",
        },
        volumes={str(shared): {"bind": "/cache"}, str(WORKLOADS): {"bind": "/workloads", "mode": "ro"}},
        remove=True,
    ).decode()
    *read, missing = (line for line in output.splitlines() if line.startswith(("model", "rows", "Lambda", "missing")))
    assert read == [
        f"model /cache/huggingface/hub/models--facebook--opt-350m/snapshots/{REVISION}",
        "rows 5000",
        "Lambda's model /cache/huggingface/transformers/models--facebook--opt-1.3b/snapshots/08ab",
        "Lambda's rows 5000",
    ]
    assert missing.startswith("missing yitingxie/rlhf-reward-datasets is not in the cache")
