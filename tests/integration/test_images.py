"""The NVIDIA image, built from a plain base on a machine without driver and device."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from support.harness import Lab

from docker import DockerClient
from labctl.backends.docker.images import catalog

pytestmark = [pytest.mark.docker, pytest.mark.slow]

IMAGE = catalog.tag("nvidia")
REPORT = """
import json, deepspeed, torch
print(json.dumps({
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "available": torch.cuda.is_available(),
    "nccl": torch.distributed.is_nccl_available(),
}))
"""


@pytest.fixture(scope="module")
def nvidia(engine: DockerClient, new_lab: Callable[[dict[str, str]], Lab]) -> str:
    """Return the name of the NVIDIA image; build it if it is missing or out of date."""
    here = engine.images.list(filters={"reference": f"{IMAGE}:latest"})
    if not here or catalog.is_stale(here[0].labels, "nvidia"):
        new_lab({"LAB_ACCELERATOR": "nvidia", "LAB_IMAGE": IMAGE}).call("build", limit=1800).expect(0)
    return IMAGE


def test_its_torch_imports_and_names_its_cuda_though_the_driver_is_absent(engine: DockerClient, nvidia: str) -> None:
    """Without a driver, torch has CUDA 13 and NCCL, and no device is available."""
    out = engine.containers.run(nvidia, ["-c", REPORT], entrypoint="python", remove=True, network_mode="none")
    document: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert "+cpu" not in document["torch"]
    assert document["cuda"].startswith("13.")
    assert document["nccl"] is True
    assert document["available"] is False


def test_its_nodes_reach_each_other_and_run_mpi(nvidia: str, fresh_lab: Callable[..., Lab]) -> None:
    """A CPU lab of the NVIDIA image comes up and hello-mpi passes."""
    lab = fresh_lab(LAB_IMAGE=nvidia, LAB_ACCELERATOR="cpu")
    lab.call("up", limit=300).expect(0)
    assert lab.call("run", "hello-mpi", "--json", limit=120).expect(0).json["verdict"] == "PASS"


def test_without_its_devices_up_says_so_before_it_builds_anything(fresh_lab: Callable[..., Lab]) -> None:
    """`up` for habana without Gaudis: exit code 3, and no image is built."""
    lab = fresh_lab(LAB_IMAGE="", LAB_ACCELERATOR="habana")
    answer = lab.call("up", limit=60).expect(3)
    assert "this host has no habana device" in answer.err
    assert "building" not in answer.err


def test_deepspeeds_fused_optimizers_are_compiled_and_the_compiler_is_there(engine: DockerClient, nvidia: str) -> None:
    """ds_report has fused Adam and Lamb, whose library has CUDA code; nvcc is 13.0."""
    code = (
        "set -e; ds_report 2> /dev/null; nvcc --version; "
        "ops=$(python -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')/deepspeed/ops; "
        "nm --dynamic --demangle $ops/adam/fused_adam_op*.so; "
        "python -c 'import torch; from torchvision.ops import nms; print(nms(torch.eye(4), torch.ones(4), 0.5))'"
    )
    out = engine.containers.run(
        nvidia, ["-c", code], entrypoint="bash", environment={"DS_ACCELERATOR": "cuda"}, remove=True
    )
    output = re.sub(r"\x1b\[\d+m", "", out.decode())
    for operator in ("fused_adam", "fused_lamb"):
        assert re.search(rf"^{operator} \.+ \[YES\] \.+ \[OKAY\]", output, re.MULTILINE), output
    assert " T multi_tensor_adam_cuda(" in output
    assert "release 13.0" in output
