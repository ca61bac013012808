"""node-bandwidth: a line per node, the slowest node is the metric, and skipped measurements are reported."""

from __future__ import annotations

import re

import pytest
from support.harness import Answer, Lab

pytestmark = pytest.mark.docker

LINE = re.compile(r"([a-z-]+ \w+) of (worker-\d): ([\d.]+) GB/s, median ([\d.]+), (.*)")


def rates(answer: Answer) -> dict[str, dict[str, float]]:
    """Return measurement -> node -> best GB/s of the printed lines; assert that no median is above its best."""
    by_name: dict[str, dict[str, float]] = {}
    for name, node, best, median, _ in LINE.findall(answer.err):
        assert 0 < float(median) <= float(best)
        by_name.setdefault(name, {})[node] = float(best)
    return by_name


@pytest.mark.parametrize(
    ("workload", "names"),
    [
        (
            "memory-bandwidth",
            {
                "memory-copy": "memory copy",
                "memory-scale": "memory scale",
                "memory-add": "memory add",
                "memory": "memory triad",
            },
        ),
        ("disk-read", {"disk": "disk read"}),
        (
            "copy-bandwidth",
            {"host-to-device": "host-to-device copy", "device-to-host": "device-to-host copy"},
        ),
    ],
)
def test_each_node_is_measured_and_the_slowest_is_the_metric(lab: Lab, workload: str, names: dict[str, str]) -> None:
    """A rehearsal prints a rate per node; each metric is the lowest, whose node is named."""
    answer = lab.call("run", workload, "--rehearse", "--json").expect(0)
    measured = rates(answer)
    assert set(measured) == set(names.values())
    assert all(set(nodes) == {"worker-0", "worker-1"} for nodes in measured.values())
    metrics = answer.json["metrics"]
    assert {name: metric["value"] for name, metric in metrics.items()} == {
        metric: min(measured[name].values()) for metric, name in names.items()
    }
    for metric, name in names.items():
        slowest = min(measured[name], key=lambda node: measured[name][node])
        assert f"{metric}: {measured[name][slowest]:.3f} GB/s on {slowest}, the slowest of 2" in answer.err
    if workload == "disk-read":
        # Bypass the page cache, and leave no file behind.
        assert len(re.findall(r"(?:O_DIRECT|POSIX_FADV_DONTNEED) on \w+, 16 MiB", answer.err)) == 2
        run = lab.path / "runs" / answer.json["run_id"]
        assert max(path.stat().st_size for path in run.rglob("*") if path.is_file()) < 1 << 20


def test_a_node_without_an_accelerator_has_no_device_to_copy_to(lab: Lab) -> None:
    """`--measure copy` without an accelerator says so and fails."""
    here = ("RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29611", "PYTHONPATH=workloads/common")
    script = "python workloads/node-bandwidth/node_bandwidth.py --measure copy 2>&1; echo code $?"
    output = lab.inside("worker-0", "env", *here, "bash", "-c", script)
    assert "worker-0 has no accelerator, so there is no device to copy to" in output
    assert not output.endswith("code 0\n")


def test_a_value_of_an_array_that_is_wrong_is_found(lab: Lab) -> None:
    """`Stream.wrong` is empty, and after one element is changed it names the array and the values."""
    script = (
        "import memory\n"
        "stream = memory.Stream(1 << 20, 0)\n"
        "stream.round(), stream.round()\n"
        "assert stream.wrong() == ''\n"
        "stream._b[77] += 1\n"
        "print(stream.wrong())"
    )
    argv = ["env", "PYTHONPATH=workloads/node-bandwidth", "PYTHONDONTWRITEBYTECODE=1", "python", "-c", script]
    assert lab.inside("worker-0", *argv) == "array b has values from 45 to 46, not 45\n"
