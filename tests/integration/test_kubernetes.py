"""Runs as jobs of a real cluster of one node, with a stand-in for the mpi-operator.

The node's engine is this machine's, and has the lab's image.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from conftest import ClusterLabs
from support.fakehub import FakeHub, serving
from support.harness import Answer, Lab, Running, wait_until
from support.operator import Operator
from support.podnames import BRIDGE
from support.proxy import Proxy

pytestmark = [pytest.mark.docker, pytest.mark.kubernetes, pytest.mark.xdist_group("kubernetes")]
CANARY = "hf_canary_of_this_test"


STOPS = """
import time
for step in range(1, 6):
    print(f"step {step}/9", flush=True)
    time.sleep(0.1)
time.sleep(600)
"""
KINDS = ("MPIJob", "Pod", "ConfigMap", "Secret", "Service")


def labelled(operator: Operator, lab: Lab) -> list[str]:
    """List `KIND NAME` of the jobs, pods, config maps, secrets and services that begin with the lab's name."""
    names = [(kind, name) for kind in KINDS for name in operator.objects(kind)]
    return [f"{kind} {name}" for kind, name in names if name.startswith(f"{lab.name}-")]


def pods(operator: Operator, lab: Lab) -> dict[str, dict[str, Any]]:
    """Return the lab's pods that are not being deleted, by the end of their names, such as ``worker-1``."""
    by_name = {}
    for name, pod in operator.objects("Pod").items():
        if name.startswith(f"{lab.name}-") and "deletionTimestamp" not in pod["metadata"]:
            role = pod["metadata"]["labels"].get("labctl.role")
            by_name["-".join(name.split("-")[-2:]) if role == "worker" else str(role)] = pod
    return by_name


def verdict(answer: Answer) -> tuple[str, str | None]:
    """Return verdict and cause of an answer's JSON."""
    return answer.json["verdict"], answer.json["cause"]


def stubborn(lab: Lab) -> Iterator[Running]:
    """Start a run that never ends by itself; yield it once both ranks are up; then kill its labctl."""
    with lab.start("run", "stubborn", "--json") as running:
        wait_until(lambda: running.err.count("does not listen") == 2, 120, f"both ranks are up:\n{running.err}")
        yield running


def test_two_pods_answer_and_the_record_is_here(cluster_lab: ClusterLabs, operator: Operator) -> None:
    """hello-mpi passes on two pods; output, rank logs and manifests are in the record, the token is not."""
    lab = cluster_lab(HF_TOKEN=CANARY)
    result = lab.call("run", "hello-mpi", "--json").expect(0).json
    assert result["verdict"] == "PASS"
    assert result["ranks"] == [{"rank": 0, "node": "worker-0"}, {"rank": 1, "node": "worker-1"}]
    record = lab.path / "runs" / result["run_id"]
    assert "ranks answered: 2 of 2" in (record / "output.log").read_text()
    for rank in range(2):
        assert f"rank {rank} of 2" in (record / f"ranks/rank-{rank}.log").read_text()
    assert (record / "rank.sh").exists()
    manifests = (record / "rendered/manifests.yaml").read_text()
    assert "kind: MPIJob" in manifests
    assert CANARY not in "".join(path.read_text() for path in record.rglob("*") if path.is_file())
    assert lab.call("show", "--json").expect(0).json["run_id"] == result["run_id"]
    assert "ranks answered" in lab.call("logs", "--run", "latest").expect(0).out


def test_training_on_two_pods_passes(cluster_lab: ClusterLabs) -> None:
    """A rehearsal of opt-tiny on two pods passes with a throughput above 0."""
    answer = cluster_lab().call("run", "opt-tiny", "--rehearse", "--json").expect(0)
    assert answer.json["world_size"] == 2
    assert answer.json["metrics"]["throughput"]["value"] > 0


def test_a_batch_runs_on_the_clusters_nodes_and_a_run_of_it_is_replayed(
    cluster_lab: ClusterLabs, operator: Operator
) -> None:
    """A hostfile of the cluster's node gives one passed job on that node, and its replay passes."""
    lab = cluster_lab()
    made = lab.call("hostfiles", "--size", "1", "--out", "nodes", "--json").expect(0).json
    (node,) = operator.objects("Node")
    assert (lab.path / made["directory"] / made["hostfiles"][0]).read_text() == f"{node} slots=1\n"
    report = lab.call("batch", "hello-mpi", made["directory"], "--json").expect(0).json
    (job,) = report["batch"]["jobs"]
    assert (job["nodes"], job["verdict"]) == ([node], "PASS")
    kept = json.loads((lab.path / "runs" / job["run_id"] / "pods.json").read_text())
    assert {(pod["node"], pod["on"]) for pod in kept} == {("launcher", node), ("worker-0", node)}
    replayed = lab.call("replay", job["run_id"], "--json").expect(0).json
    assert (replayed["verdict"], replayed["replays"], replayed["world_size"]) == ("PASS", job["run_id"], 1)


def test_the_steps_of_a_run_and_what_its_pods_use_are_shown(cluster_lab: ClusterLabs) -> None:
    """`top` shows the memory of both workers during a run; the record keeps their samples."""
    lab = cluster_lab()
    with lab.start("run", "stubborn", "--json") as running:
        wait_until(lambda: running.err.count("does not listen") == 2, 120, "both ranks are up")
        view = wait_until(lambda: sampled(lab), 60, "both pods are sampled")
        assert view["state"] == "running"
        assert [node["node"] for node in view["nodes"]] == ["worker-0", "worker-1"]
        running.press(signal.SIGINT)
        assert verdict(running.answer(120).expect(130)) == ("ERROR", "interrupted")
    record = lab.path / "runs" / view["run_id"]
    assert {path.name for path in (record / "samples").iterdir()} == {"worker-0.csv", "worker-1.csv"}


def sampled(lab: Lab) -> Any:
    """Return the JSON of `top` if each node in it has a value for memory; else None."""
    view = lab.call("top", "--json").expect(0).json
    return view if all("memory" in node["values"] for node in view["nodes"]) else None


def test_a_run_whose_steps_stop_is_ended_with_the_stacks_of_its_ranks(cluster_lab: ClusterLabs) -> None:
    """Steps stop with LAB_STALL_SECONDS=5: cause stalled, exit code 124, two stack files."""
    lab = cluster_lab(LAB_STALL_SECONDS="5")
    (lab.path / "stops.py").write_text(STOPS)
    answer = lab.call("run", "--script", "stops.py", "--launcher", "mpirun", "--json")
    assert (answer.code, *verdict(answer)) == (124, "ERROR", "stalled")
    assert "left processes behind" not in answer.err, "samplers are labctl's own"
    stacks = lab.path / "runs" / answer.json["run_id"] / "stacks"
    assert len([path for path in stacks.iterdir() if "worker" in path.name]) == 2


def test_a_token_is_in_the_secret_alone(cluster_lab: ClusterLabs, operator: Operator) -> None:
    """HF_TOKEN is in the run's Secret, plain or in base64, and in no other object of it."""
    lab = cluster_lab(HF_TOKEN=CANARY)
    run_id = lab.call("run", "stubborn", "--detach", "--json").expect(0).json["run_id"]
    wait_until(lambda: "launcher" in pods(operator, lab), 60, "the launcher is made")
    objects = {kind: json.dumps([*operator.objects(kind).values()], default=str) for kind in (*KINDS, "Job")}
    encoded = base64.b64encode(CANARY.encode()).decode()
    assert [kind for kind, text in objects.items() if CANARY in text or encoded in text] == ["Secret"]
    lab.call("stop", run_id)


def test_a_detached_run_is_looked_at_entered_and_stopped(cluster_lab: ClusterLabs, operator: Operator) -> None:
    """status, exec, logs and attach work on the pods of a detached run, and `stop` ends it as interrupted."""
    lab = cluster_lab()
    run_id = lab.call("run", "stubborn", "--detach", "--json").expect(0).json["run_id"]
    wait_until(lambda: lab.call("status", "--json").json["state"] == "up", 60, "its pods run")
    wait_until(lambda: "does not listen" in lab.call("logs", "--run", run_id).out, 60, "its ranks run")
    status = lab.call("status", "--json").expect(0).json
    assert [node["name"] for node in status["nodes"]] == ["launcher", "worker-0", "worker-1"]
    assert [(run["run_id"], run["state"]) for run in status["runs"]] == [(run_id, "running")]
    assert [node["run"] for node in status["nodes"]] == ["", run_id, run_id]
    assert lab.call("exec", "-n", "worker-1", "--", "hostname").expect(0).out.strip().endswith("-worker-1")
    assert lab.call("exec", "-n", "worker-0", "--", "sh", "-c", "exit 7").code == 7
    lines = lab.call("exec", "--all", "--", "id", "-u").expect(0).out.splitlines()
    assert sorted(lines) == ["worker-0: 1000", "worker-1: 1000"]
    assert "no node `worker-9`" in lab.call("exec", "-n", "worker-9", "--", "true").expect(2).err
    assert "worker-1  | " in lab.call("logs", "worker-1").expect(0).out
    with lab.start("attach", run_id, "--json") as attached:
        wait_until(lambda: "does not listen" in attached.err, 60, "it prints what the run has printed")
        stopped = lab.call("stop", run_id, "--json").expect(0)
        assert verdict(stopped) == ("ERROR", "interrupted")
        assert attached.answer(90).json["cause"] == "interrupted"
    assert lab.call("runs", "--json").expect(0).json["runs"][0]["state"] == "done"


def cores(operator: Operator) -> int:
    """Return the number of allocatable CPUs of the cluster's only node."""
    (node,) = operator.kind("Node").get().to_dict()["items"]
    return int(node["status"]["allocatable"]["cpu"])


def test_a_worker_that_no_node_can_ever_hold_is_refused(cluster_lab: ClusterLabs) -> None:
    """A node selector that no node matches: exit code 3 and no record of a run."""
    lab = cluster_lab(LAB_K8S_NODE_SELECTOR="example.com/nowhere=7")
    answer = lab.call("run", "hello-mpi").expect(3)
    assert "no node can hold a worker" in answer.err
    assert lab.run_ids() == []


def test_a_run_that_finds_no_place_says_what_the_scheduler_says(cluster_lab: ClusterLabs, operator: Operator) -> None:
    """Both workers do not fit: exit code 3, cause does-not-fit, with the scheduler's words."""
    # The node has room for one worker, but not for both.
    lab = cluster_lab(LAB_K8S_CPU=f"{cores(operator) * 600}m", LAB_K8S_PATIENCE="10")
    answer = lab.call("run", "hello-mpi", "--json").expect(3)
    assert verdict(answer) == ("ERROR", "does-not-fit")
    assert "nodes are available" in answer.json["message"]
    assert ": 0/1 nodes are available" in answer.err


def test_an_image_that_the_cluster_does_not_get_is_named(cluster_lab: ClusterLabs) -> None:
    """An image that does not exist: exit code 3, cause no-image, with the image's name."""
    lab = cluster_lab(LAB_IMAGE="labctl/nowhere:1", LAB_K8S_PATIENCE="15")
    answer = lab.call("run", "hello-mpi", "--json").expect(3)
    assert verdict(answer) == ("ERROR", "no-image")
    assert "labctl/nowhere:1" in answer.json["message"]


def test_a_rank_that_fails_ends_the_run(cluster_lab: ClusterLabs) -> None:
    """Rank 1 exits with code 7: exit code 4, cause rank-crashed, with node and code."""
    answer = cluster_lab().call("run", "crash", "--json").expect(4)
    assert verdict(answer) == ("ERROR", "rank-crashed")
    assert "on worker-1 exited with code 7" in answer.json["message"]


def test_a_worker_that_is_lost_ends_the_run(cluster_lab: ClusterLabs, operator: Operator) -> None:
    """Delete the pod of worker-1 during the run: exit code 4, cause node-lost, worker-1 is named."""
    lab = cluster_lab()
    for running in stubborn(lab):
        name = pods(operator, lab)["worker-1"]["metadata"]["name"]
        operator.kind("Pod").delete(name=name, namespace=operator.namespace, grace_period_seconds=0)
        answer = running.answer(120).expect(4)
        assert verdict(answer) == ("ERROR", "node-lost")
        assert answer.json["message"].startswith("worker-1: ")


def test_a_run_ends_with_its_time(cluster_lab: ClusterLabs) -> None:
    """`--timeout 12s` with ranks that never end: exit code 124, cause timeout."""
    answer = cluster_lab().call("run", "stubborn", "--timeout", "12s", "--json").expect(124)
    assert verdict(answer) == ("ERROR", "timeout")
    assert "12 s" in answer.json["message"]


def test_the_clusters_own_limit_is_a_timeout(cluster_lab: ClusterLabs, operator: Operator) -> None:
    """Set activeDeadlineSeconds of the launcher's Job to 1 during the run: exit code 124, cause timeout."""
    lab = cluster_lab()
    for running in stubborn(lab):
        (name,) = [name for name in operator.objects("Job") if name.startswith(f"{lab.name}-")]
        operator.kind("Job").patch(name=name, namespace=operator.namespace, body={"spec": {"activeDeadlineSeconds": 1}})
        assert verdict(running.answer(120).expect(124)) == ("ERROR", "timeout")


def test_a_job_that_somebody_deletes_is_said_to_be_deleted(cluster_lab: ClusterLabs, operator: Operator) -> None:
    """Delete the MPIJob during the run: exit code 130, cause interrupted, the job is named."""
    lab = cluster_lab()
    for running in stubborn(lab):
        (name,) = [name for name in operator.objects("MPIJob") if name.startswith(f"{lab.name}-")]
        operator.kind("MPIJob").delete(name=name, namespace=operator.namespace)
        answer = running.answer(120).expect(130)
        assert verdict(answer) == ("ERROR", "interrupted")
        assert f"MPIJob {name} was deleted" in answer.json["message"]


def test_ctrl_c_ends_the_job(cluster_lab: ClusterLabs, operator: Operator) -> None:
    """Ctrl-C during the run: exit code 130, its pods end, and nothing of the lab is left after `down`."""
    lab = cluster_lab()
    for running in stubborn(lab):
        running.press(signal.SIGINT)
        assert verdict(running.answer(120).expect(130)) == ("ERROR", "interrupted")
    wait_until(lambda: not pods(operator, lab), 60, "its pods end")
    assert "is down" in lab.call("down").expect(0).out
    wait_until(lambda: labelled(operator, lab) == [], 60, "nothing is left of the lab")


def test_a_run_outlives_an_api_server_that_is_gone_for_a_while(
    cluster_lab: ClusterLabs, kubeconfig: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Cut the connection to the API server during training: the run passes, each line comes once."""
    lab = cluster_lab()
    content = yaml.safe_load(kubeconfig.read_text())
    server = urlsplit(content["clusters"][0]["cluster"]["server"])
    assert server.hostname
    assert server.port
    proxy = Proxy(server.hostname, server.port)
    request.addfinalizer(proxy.close)
    content["clusters"][0]["cluster"]["server"] = f"https://{server.hostname}:{proxy.port}"
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(content))
    lab.environ["KUBECONFIG"] = str(tmp_path / "kubeconfig")
    argv = ("run", "opt-tiny", "--set", "steps=60", "--set", "sequence-length=16", "--json")
    with lab.start(*argv) as running:
        wait_until(lambda: "step 10/60" in running.err, 120, f"it trains:\n{running.err}")
        proxy.cut()
        wait_until(lambda: "does not answer" in running.err, 30, f"the loss is noticed:\n{running.err}")
        proxy.restore()
        answer = running.answer(180).expect(0)
    steps = [line for line in answer.err.splitlines() if "step " in line and "/60" in line]
    numbers = [int(line.partition("step ")[2].partition("/")[0]) for line in steps]
    assert numbers == sorted(set(numbers)), "each line once, and in order"
    assert numbers[-1] == 60


LOOK = """\
from pathlib import Path
print("weights", Path("/storage/models/acme/tiny/model.safetensors").stat().st_size)
"""


@pytest.fixture
def volume(operator: Operator, tmp_path: Path) -> Iterator[Path]:
    """Create a PersistentVolume with its own storage class on a directory of this machine; yield the directory."""
    directory = tmp_path / f"volume-of-{operator.namespace}"
    directory.mkdir()
    directory.chmod(0o777)
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteMany"],
        "hostPath": {"path": str(directory)},
        "storageClassName": directory.name,
    }
    volumes = operator.kind("PersistentVolume")
    volumes.create(body={"metadata": {"name": directory.name}, "spec": spec})
    yield directory
    volumes.delete(name=directory.name)


def test_a_model_is_downloaded_to_the_claim_and_found_there_by_name(
    cluster_lab: ClusterLabs, operator: Operator, volume: Path
) -> None:
    """`cache --model` writes to the claim, a run reads it there, a wrong token gets exit code 3."""
    weights = bytes(range(256)) * 1000
    hub = FakeHub(models={"acme/tiny": {"config.json": b"{}", "model.safetensors": weights}}, token=CANARY)
    storage = {"LAB_K8S_STORAGE_SIZE": "1g", "LAB_K8S_STORAGE_CLASS": volume.name}
    lab = cluster_lab(HF_TOKEN=CANARY, **storage)
    folder = lab.path / "workloads/look"
    folder.mkdir()
    folder.joinpath("look.py").write_text(LOOK)
    metrics = "metrics: {weights: {pattern: 'weights (.+)', reduce: last}}"
    folder.joinpath("workload.yml").write_text(
        f"description: looks\nlauncher: mpirun\nscript: look.py\ntimeout: 2m\n{metrics}\n"
    )
    with serving(hub, BRIDGE[0]):
        lab.environ["HF_ENDPOINT"] = hub.endpoint
        (item,) = lab.call("cache", "--model", "acme/tiny", "--json").expect(0).json["items"]
        other = {"HF_TOKEN": "hf_of_somebody_else"}
        refused = lab.call("cache", "--model", "acme/tiny", environ=other).expect(3)
    assert (item["name"], item["state"], item["fetched_bytes"]) == ("acme/tiny", "fetched", len(weights) + 2)
    assert "HF_TOKEN" in refused.err
    assert (volume / "models/acme/tiny/model.safetensors").read_bytes() == weights
    assert pods(operator, lab) == {}
    result = lab.call("run", "look", "--json").expect(0).json
    assert result["metrics"]["weights"]["value"] == len(weights)
    assert "weights" in (volume / "runs" / result["run_id"] / "ranks/rank-0.log").read_text()
    assert f"keep claim {lab.name}-storage" in lab.call("down").expect(0).err
    assert f"{lab.name}-storage" in operator.objects("PersistentVolumeClaim")
    operator.kind("PersistentVolumeClaim").delete(name=f"{lab.name}-storage", namespace=operator.namespace)


SUMS = """\
import hashlib, sys
from pathlib import Path
print("sum", hashlib.sha256(Path("two words é.bin").read_bytes()).hexdigest(), sys.argv[1:], flush=True)
"""


def test_a_project_that_no_config_map_holds_goes_by_the_claim_once(
    cluster_lab: ClusterLabs, operator: Operator, volume: Path
) -> None:
    """A project of 3 MB is copied to the claim for the run, and not again for its replay."""
    lab = cluster_lab(LAB_K8S_STORAGE_SIZE="1g", LAB_K8S_STORAGE_CLASS=volume.name)
    project, data = lab.path / "mine", os.urandom(3_000_000)
    project.mkdir()
    (project / "two words é.bin").write_bytes(data)
    (project / "sums.py").write_text(SUMS)
    given = 'it\'s "$X" *\n\\ é'
    result = lab.call("run", "--script", "mine/sums.py", "--json", "--", given).expect(0).json
    printed = (lab.path / "runs" / result["run_id"] / "output.log").read_text()
    assert printed.count(f"sum {hashlib.sha256(data).hexdigest()} {[given]!r}\n") == 2
    again = lab.call("replay", result["run_id"], "--json").expect(0).json
    assert again["verdict"] == "PASS"
    assert len(list((volume / "code").iterdir())) == 1
    operator.kind("PersistentVolumeClaim").delete(name=f"{lab.name}-storage", namespace=operator.namespace)


def test_steps_by_hand_make_and_remove_the_same_job(cluster_lab: ClusterLabs, operator: Operator) -> None:
    """`k8s submit` makes a job that succeeds; `k8s delete` removes its objects, and fails the second time."""
    lab = cluster_lab()
    made = lab.call("k8s", "submit", "hello-mpi", "--json").expect(0).json
    name = made["name"]
    succeeded = partial(_has_condition, operator, name, "Succeeded")
    wait_until(succeeded, 90, f"{name} succeeds")
    gone = lab.call("k8s", "delete", "hello-mpi", "--json").expect(0).json
    assert {"MPIJob", "ConfigMap"} <= {name.partition("/")[0] for name in gone["objects"]}
    assert "not found" in lab.call("k8s", "delete", "hello-mpi").expect(2).err


def _has_condition(operator: Operator, name: str, kind: str) -> bool:
    """Return True if the MPIJob has this condition with status True."""
    conditions = operator.objects("MPIJob")[name].get("status", {}).get("conditions", ())
    return any(condition["type"] == kind and condition["status"] == "True" for condition in conditions)
