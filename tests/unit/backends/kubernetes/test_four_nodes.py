"""Commands on nodes by name, on a cluster in memory with four of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clusters import node, pod
from support.fake_backend import Failed
from support.harness import WORKLOADS, wait_until
from support.running import MARK, ended, entry, serving
from support.sites import ClusterInMemory, Lasts

from labctl import flows
from labctl.backends.kubernetes import lab as labs
from labctl.backends.kubernetes import run as cluster_runs
from labctl.backends.kubernetes import steps
from labctl.backends.kubernetes.api import Manifest
from labctl.batches import evidence, search
from labctl.batches.evaluate import Limits
from labctl.config.context import Context
from labctl.errors import ConfigError, HostError
from labctl.jobs.request import RunOptions
from labctl.model import Event
from labctl.runs import judge
from labctl.ui.tiles import Known, tiles

NODES = ("n0", "n1", "n2", "n3")
RESUMES = """\
description: saves a checkpoint
launcher: mpirun
script: train.py
timeout: 3m
resume: {argument: --resume, checkpoint: 'checkpoints/step-*'}
"""
PROFILE = """\
description: one number of each node
within: 20%
checks:
  - workload: hello
    nodes: each
    metrics:
      answer: {}
"""


class FourNodes(ClusterInMemory):
    """Four nodes; a run is as slow as the slowest that it has."""

    def __init__(self) -> None:
        """Have four nodes with this run's program, usual speed and no worker to lose."""
        super().__init__(self._program, NODES)
        self.slow: dict[str, float] = {}
        """Share of its usual speed, by node."""
        self.launched: list[tuple[str, ...]] = []
        """Nodes of each run, in the order of their launch."""
        self.loses_workers = 0
        """Runs that lose their first worker."""
        self.programs = self._programs

    def _program(self, container: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Print the ranks' output for ``mpirun``, and samples for a shell that reads a file of samples."""
        if argv[0] == "mpirun":
            yield from self._ranks(argv[1])
        elif argv[:2] == ("sh", "-c") and "samples" in argv[-1]:
            assert argv[-1].endswith(f"/samples/{container[-8:]}.csv")
            yield from ("seconds (s),lost samples (count),CPU (cores)", "7.000,0,1.5")

    def _ranks(self, run: str) -> Iterator[str]:
        """Yield the output of a run, its figure that of the slowest node; its id decides if it fails or lasts."""
        nodes = self.nodes_of(run)
        self.launched.append(nodes)
        for rank in range(len(nodes) or 2):
            yield f"\x01{rank}!\x02labctl: rank {rank} of {len(nodes) or 2} on worker-{rank}"
        yield "step 3/10"
        if "stubborn" in run or self.loses_workers:
            raise Lasts
        if "fails" in run:
            raise Failed(1)
        yield f"\x010\x02answer {100 * min([self.slow.get(node, 1.0) for node in nodes], default=1.0):g}"

    def _make(self, pod: str, job: str, role: str, template: Manifest, host: str) -> None:
        """Make the pod; let worker-0 have ended with 137 if a run is to lose a worker."""
        super()._make(pod, job, role, template, host)
        if self.loses_workers and pod.endswith("worker-0"):
            self.objects["Pod", pod]["status"] = ended(137)

    def _programs(self, pod: str, argv: tuple[str, ...]) -> tuple[tuple[int, bytes], ...]:
        """End the launcher with 143 at TERM if a worker is lost; answer tar with a checkpoint, others as usual."""
        command = " ".join(argv)
        if "kill -TERM" in command and self.loses_workers:
            self.loses_workers -= 1
            self.prints(pod, f"{MARK}143")
        if "tar -C" in command:
            return serving((entry("checkpoints/step-3/weights"), b"w"))(pod, argv)
        return self._run(pod, argv)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses between requests to 0.01 s."""
    for module in (cluster_runs, labs, steps, judge):
        monkeypatch.setattr(module, "LOOK", 0.01)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FourNodes:
    """Replace the API by a cluster in memory with four nodes; return it."""
    made = FourNodes()
    monkeypatch.setattr("labctl.backends.kubernetes.lab.Api", lambda *_: made)
    return made


@pytest.fixture
def events() -> list[Event]:
    """Return an empty list, to which the context adds its events."""
    return []


@pytest.fixture
def context(tmp_path: Path, events: list[Event], api: FourNodes) -> Context:
    """Return the context of a lab on Kubernetes, in a directory with the tests' workloads."""
    flows.init(tmp_path)
    shutil.copytree(WORKLOADS, tmp_path / "workloads", dirs_exist_ok=True)
    settings = ("LAB_NAME=demo", "LAB_ACCELERATOR=cpu", "LAB_ENGINE=kubernetes", f"HOST_CACHE_PATH={tmp_path}")
    (tmp_path / ".env").write_text("\n".join(settings))
    return Context(directory=tmp_path, environ={}, emit=events.append, flags={})


def pairs(context: Context, **flags: str) -> Path:
    """Write hostfiles that pair the nodes in sequence; return their directory."""
    flagged = Context(directory=context.directory, environ={}, emit=context.emit, flags=flags)
    out = context.directory / "pairs"
    made = flows.hostfiles(flagged, None, size=2, pattern="sequential", slots=0, out=out, seed=0)
    return Path(made.directory)


def batch(context: Context, directory: Path, workload: str = "hello", **how: Any) -> Any:
    """Run a batch of the hostfiles in this directory; return its report."""
    return flows.batch(context, workload, (directory,), RunOptions(), lambda _: None, **how)


def add_setting(context: Context, line: str) -> None:
    """Append a line to .env."""
    with (context.directory / ".env").open("a") as settings:
        settings.write(f"\n{line}\n")


def add_saves(context: Context) -> None:
    """Add the workload `saves`, whose runs save a checkpoint that others resume from."""
    folder = context.directory / "workloads/saves"
    folder.mkdir()
    (folder / "workload.yml").write_text(RESUMES)
    (folder / "train.py").write_text("")


def cordon(api: FourNodes, name: str, *, cordoned: bool = True) -> None:
    """Set or clear unschedulable of a node."""
    api.objects["Node", name]["spec"]["unschedulable"] = cordoned


def texts(events: list[Event], kind: str) -> list[str]:
    """Return the texts of the events of this kind."""
    return [event.text for event in events if event.kind == kind]


# --- hostfiles and batches -----------------------------------------------------------------------------------


def test_hostfiles_are_made_of_the_clusters_nodes(context: Context, api: FourNodes) -> None:
    """hostfiles() pairs the four nodes, and leaves out one with a taint."""
    api.put(node("other", taints=("dedicated=them:NoSchedule",)))
    names = [path.read_text() for path in sorted(pairs(context).iterdir())]
    assert names == ["n0 slots=1\nn1 slots=1\n", "n2 slots=1\nn3 slots=1\n"]


def test_hostfiles_are_made_of_the_nodes_that_are_selected_and_in_use(
    context: Context, api: FourNodes, events: list[Event]
) -> None:
    """hostfiles() leaves out a node without the selected label and, with a notice, a cordoned one."""
    api.objects["Node", "n3"]["metadata"]["labels"]["rack"] = "8"
    cordon(api, "n0")
    directory = pairs(context, LAB_K8S_NODE_SELECTOR="rack=7")
    assert [path.read_text() for path in directory.iterdir()] == ["n1 slots=1\nn2 slots=1\n"]
    assert "n0 is left out: cordoned" in texts(events, "notice")


def test_a_batch_runs_each_pair_on_its_nodes(context: Context, api: FourNodes) -> None:
    """batch() runs each pair on its two nodes, in any order; both pass and evaluate() too."""
    report = batch(context, pairs(context))
    assert (report.passed, report.failed) == (2, 0)
    assert sorted(api.launched) == [("n0", "n1"), ("n2", "n3")]
    assert [job.nodes for job in report.batch.jobs] == [("n0", "n1"), ("n2", "n3")]
    evaluated = flows.evaluate([Path(report.directory)], Limits(min=41))
    assert [job.status for job in evaluated.jobs] == ["PASS", "PASS"]


def test_jobs_on_nodes_that_are_out_of_use_are_left_out_until_they_are_back(
    context: Context, api: FourNodes, events: list[Event]
) -> None:
    """A job with a cordoned node is interrupted with a warning; --resume runs it once the node is back."""
    directory = pairs(context)
    cordon(api, "n3")
    first = batch(context, directory, "hello", out=context.directory / "out")
    left = "n3 is left out: cordoned"
    assert [(job.verdict, job.cause) for job in first.batch.jobs] == [("PASS", None), ("ERROR", "interrupted")]
    assert first.batch.jobs[1].message == left
    assert left in (context.directory / "out/batch.jsonl").read_text()
    assert f"{left}; `--resume` runs its jobs once it is back" in texts(events, "warning")
    assert api.launched == [("n0", "n1")]
    cordon(api, "n3", cordoned=False)
    second = batch(context, directory, "hello", out=context.directory / "out", resume=True)
    assert (second.passed, second.failed) == (2, 0)
    assert api.launched == [("n0", "n1"), ("n2", "n3")]


def test_a_node_without_room_for_a_worker_is_left_out(context: Context, api: FourNodes, events: list[Event]) -> None:
    """A node with less free cpu than LAB_K8S_CPU is left out of a batch, with a warning."""
    directory = pairs(context)
    api.put(pod("full", on="n2", cpu="14"))
    add_setting(context, "LAB_K8S_CPU=4")
    assert batch(context, directory).failed == 1
    assert [text for text in texts(events, "warning") if "n2 is left out: 2 of cpu free, not 4" in text]


def test_a_node_that_lost_a_device_is_named(context: Context, api: FourNodes) -> None:
    """A node with less allocatable than a worker needs makes its job fail with that message."""
    add_setting(context, "LAB_K8S_CPU=16")
    directory = pairs(context)
    status = api.objects["Node", "n3"]["status"]
    status["capacity"], status["allocatable"] = status["allocatable"], {**status["allocatable"], "cpu": "15"}
    report = batch(context, directory)
    assert [job.message for job in report.batch.jobs if job.verdict != "PASS"] == [
        "n3 is left out: 15 of cpu free, not 16"
    ]


def test_pods_that_end_and_those_of_the_lab_itself_are_not_in_the_way(context: Context, api: FourNodes) -> None:
    """Requests of pods that are being deleted, or of this lab's earlier runs, do not count as used."""
    ending, own = pod("ending", on="n0", cpu="16"), pod("own", on="n1", namespace="demo", cpu="16")
    ending["metadata"]["deletionTimestamp"] = "2026-01-02T03:05:00Z"
    own["metadata"]["labels"] = {"labctl.lab": "demo", "labctl.role": "worker", "labctl.run": "earlier"}
    own["metadata"]["creationTimestamp"] = "2026-01-02T03:04:00Z"
    api.put(ending)
    api.put(own)
    add_setting(context, "LAB_K8S_CPU=4")
    assert batch(context, pairs(context)).passed == 2


def test_a_drained_node_gets_no_worker_unless_it_is_named(context: Context, api: FourNodes) -> None:
    """Nodes in drained.txt and --exclude get no worker, and none of bisect; --include of one is taken."""
    (context.directory / "drained.txt").write_text("n2  # slow\n")
    run_id = flows.launch(context, "stubborn", RunOptions(exclude="n0")).run_id
    manifests = (context.directory / "runs" / run_id / "rendered/manifests.yaml").read_text()
    assert re.search(r"operator: NotIn\n\s+values:\n\s+- n0\n\s+- n2\n", manifests)
    flows.stop(context, run_id, 1)
    report = flows.bisect(context, "hello", RunOptions(), lambda _: None)
    assert "n2" not in [node for nodes in api.launched for node in nodes]
    assert report.exit_code == 0
    assert flows.run(context, "hello", RunOptions(include="n2")).verdict == "PASS"


def test_a_slow_node_is_found_by_bisection(context: Context, api: FourNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """bisect() reports the slow node n2 and no slow link."""
    monkeypatch.setattr(search, "PAUSE", 0)
    api.slow["n2"] = 0.5
    report = flows.bisect(context, "hello", RunOptions(), lambda _: None, within=0.2)
    assert [(bad.node, bad.kind) for bad in report.diagnosis.bad] == [("n2", "slow")]
    assert report.diagnosis.links == ()


def test_a_cluster_is_validated_without_its_hosts(
    context: Context, api: FourNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """validate() finds n1 slow and the cordoned n3 not reached, skips the network step and cleans up."""
    monkeypatch.setattr(evidence, "PAUSE", 0)
    profile = context.directory / "numbers.yml"
    profile.write_text(PROFILE)
    api.slow["n1"] = 0.5
    cordon(api, "n3")
    validation = flows.validate(context, str(profile)).validation
    verdicts = {verdict.node: verdict.verdict for verdict in validation.nodes}
    assert verdicts == {"n0": "good", "n1": "slow", "n2": "good", "n3": "not reached"}
    assert validation.nodes[3].advice == "`kubectl describe node n3`"
    statuses = {step.name: (step.status, step.message) for step in validation.steps}
    assert statuses["network"] == ("skipped", "labctl reaches no host of a cluster")
    assert statuses["up"] == ("passed", "3 nodes on 4 hosts")
    assert statuses["clean-up"][0] == "passed"
    assert flows.status(context).nodes == ()


def test_the_usual_profile_is_that_of_clusters(context: Context) -> None:
    """validate() without a profile uses `cluster`."""
    report = flows.validate(context)
    assert report.validation.profile == "cluster"


# --- one run -------------------------------------------------------------------------------------------------


def hostfile(context: Context, text: str) -> RunOptions:
    """Write a hostfile; return the options that name it."""
    path = context.directory / "chosen"
    path.write_text(text)
    return RunOptions(hostfile=path)


def test_nodes_are_named_by_hostfile_include_and_exclude(context: Context, api: FourNodes) -> None:
    """A run uses the nodes of a hostfile, by name or address, and of --include; --exclude leaves the choice open."""
    api.objects["Node", "n2"]["status"]["addresses"] = [{"type": "InternalIP", "address": "10.0.0.2"}]
    assert flows.run(context, "hello", hostfile(context, "n3 slots=1\n10.0.0.2 slots=1\n")).verdict == "PASS"
    assert flows.run(context, "hello", RunOptions(include="n1")).verdict == "PASS"
    assert flows.run(context, "hello", RunOptions(exclude="n1@n2")).verdict == "PASS"
    assert api.launched == [("n3", "n2"), ("n1",), ()]


def test_the_manifests_require_the_nodes_and_one_worker_on_each(context: Context) -> None:
    """The manifests of a run with --include have a node affinity by hostname and a pod anti-affinity."""
    run_id = flows.launch(context, "stubborn", RunOptions(include="n1@n3")).run_id
    record = context.directory / "runs" / run_id / "rendered/manifests.yaml"
    text = record.read_text()
    assert "- key: kubernetes.io/hostname\n                    operator: In\n" in text
    assert "podAntiAffinity" in text
    flows.stop(context, "latest", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RunOptions(include="n9"), "no node `n9`"),
        (RunOptions(exclude="n0@n1@n2@n3"), "leaves no slots"),
    ],
)
def test_nodes_that_cannot_be_chosen_are_a_mistake(context: Context, options: RunOptions, message: str) -> None:
    """An unknown node, or an exclusion of all, raises ConfigError."""
    with pytest.raises(ConfigError, match=message):
        flows.run(context, "hello", options)


def test_slots_by_number_are_the_clusters_choice(context: Context) -> None:
    """Slots by number, and different numbers of slots in a hostfile, raise ConfigError."""
    add_setting(context, "LAB_SLOTS=2")
    with pytest.raises(ConfigError, match="n1:1 chooses slots by number"):
        flows.run(context, "hello", RunOptions(include="n1:1"))
    with pytest.raises(ConfigError, match="all workers of a job must have the same number of slots"):
        flows.run(context, "hello", hostfile(context, "n0 slots=1\nn1 slots=2\n"))


def test_a_named_node_that_is_not_free_is_refused_but_waited_for_if_asked(context: Context, api: FourNodes) -> None:
    """A node in use raises HostError, unless --wait is given or the pods are being deleted; a cordoned one always."""
    first = flows.launch(context, "stubborn", RunOptions(include="n1")).run_id
    wait_until(lambda: [pod for kind, pod in api.objects if kind == "Pod"], 60, "its pods are there")
    with pytest.raises(HostError, match=f"n1: in use by run {first}"):
        flows.launch(context, "hello", RunOptions(include="n1"))
    flows.launch(context, "hello", RunOptions(include="n1", wait=True))
    flows.stop(context, first, 1)
    for kind, name in [*api.objects]:
        if kind == "Pod":
            api.objects[kind, name]["metadata"]["deletionTimestamp"] = "2026-01-02T03:05:00Z"
    result = flows.run(context, "hello", RunOptions(include="n1"))
    assert result.verdict == "PASS", result.message
    cordon(api, "n2")
    with pytest.raises(HostError, match="n2 is out of use: cordoned"):
        flows.run(context, "hello", RunOptions(include="n2"))


def test_top_shows_the_steps_and_what_pods_use(context: Context) -> None:
    """top() shows the step, and the CPU of each worker from its samples."""
    run_id = flows.launch(context, "stubborn", RunOptions(include="n1@n2")).run_id
    view = flows.top(context)
    assert (view.run_id, view.state, view.progress.step) == (run_id, "running", 3)
    used = [(samples.node, samples.values["CPU"].value) for samples in view.nodes]
    assert used == [("worker-0", 1.5), ("worker-1", 1.5)]
    flows.stop(context, run_id, 1)


def test_a_run_is_replayed_from_its_manifests(context: Context, api: FourNodes) -> None:
    """replay() passes on the same nodes from the recorded manifests, without the workload's folder."""
    first = flows.run(context, "hello", RunOptions(include="n1@n2"))
    shutil.rmtree(context.directory / "workloads/hello")
    again = flows.replay(context, first.run_id)
    assert (again.verdict, again.replays) == ("PASS", first.run_id)
    assert api.launched == [("n1", "n2")] * 2
    record = context.directory / "runs" / again.run_id
    assert first.run_id not in (record / "rendered/manifests.yaml").read_text()
    pods = json.loads((record / "pods.json").read_text())
    assert [(kept["node"], kept["on"]) for kept in pods][1:] == [("worker-0", "n1"), ("worker-1", "n2")]


def test_what_a_replay_misses_is_named(context: Context, api: FourNodes) -> None:
    """replay() raises HostError if the cluster lacks a recorded node."""
    first = flows.run(context, "hello", RunOptions(include="n1"))
    del api.objects["Node", "n1"]
    with pytest.raises(HostError, match="cannot be replayed: the cluster has no node n1"):
        flows.replay(context, first.run_id)


def test_a_run_that_loses_a_pod_goes_on_from_its_checkpoint_on_the_claim(context: Context, api: FourNodes) -> None:
    """A run with a lost worker and a claim is retried, and resumes from the first try's checkpoint on the claim."""
    add_setting(context, "LAB_K8S_STORAGE_SIZE=1g")
    add_saves(context)
    api.loses_workers = 1
    result = flows.run(context, "saves", RunOptions(retries=2))
    (retried,) = result.retried
    first, cause, *_ = retried.split(": ")
    assert cause == "node-lost"
    assert result.resumed == f"{first}/checkpoints/step-3"
    job = json.loads((context.directory / "runs" / result.run_id / "job.json").read_text())
    assert job["rank_argv"][-2:] == ["--resume", f"/storage/runs/{first}/checkpoints/step-3"]


def test_without_a_claim_no_checkpoint_is_read(context: Context) -> None:
    """RunOptions.resume without a claim raises ConfigError."""
    add_saves(context)
    first = flows.run(context, "saves", RunOptions())
    with pytest.raises(ConfigError, match="pods have no claim to read it from"):
        flows.run(context, "", RunOptions(resume=first.run_id))


def test_a_checkpoint_of_a_run_without_a_claim_is_refused(context: Context) -> None:
    """resume of a run made before the claim raises ConfigError; of one on the claim it gives the checkpoint."""
    add_saves(context)
    first = flows.run(context, "saves", RunOptions())
    add_setting(context, "LAB_K8S_STORAGE_SIZE=1g")
    with pytest.raises(ConfigError, match=f"{first.run_id}/checkpoints/step-3 is not on the claim"):
        flows.run(context, "", RunOptions(resume=first.run_id))
    second = flows.run(context, "saves", RunOptions())
    assert flows.run(context, "", RunOptions(resume=second.run_id)).resumed == f"{second.run_id}/checkpoints/step-3"


# --- freeze --------------------------------------------------------------------------------------------------


def test_what_has_changed_since_a_freeze_is_named(context: Context, api: FourNodes) -> None:
    """verify() finds no drift after freeze(), then a node's changed kernel and a changed workload file."""
    lock = context.directory / "lab.lock"
    api.objects["Node", "n1"]["status"]["nodeInfo"] = {"kernelVersion": "6.1"}
    assert flows.freeze(context, lock).facts > 8
    assert flows.verify(context, lock).drift == ()
    api.objects["Node", "n1"]["status"]["nodeInfo"] = {"kernelVersion": "6.6"}
    (context.directory / "workloads/hello/hello.py").write_text("other")
    drift = {(fact.where, fact.what): (fact.was, fact.now) for fact in flows.verify(context, lock).drift}
    assert drift["n1", "kernelVersion"] == ("6.1", "6.6")
    assert ("lab", "files workloads/hello/hello.py") in drift


# --- pages ---------------------------------------------------------------------------------------------------


def test_the_tiles_of_two_runs_at_once_have_their_own_run_and_samples(context: Context) -> None:
    """The pods of both have the same short names; each worker's tile has its run and what it uses."""
    first, second = (flows.launch(context, "stubborn", RunOptions()).run_id for _ in range(2))
    shown = {(tile.run, tile.values) for tile in tiles(flows.look(context), Known()) if tile.role == "worker"}
    assert shown == {(first, ("CPU 1.5 cores",)), (second, ("CPU 1.5 cores",))}
