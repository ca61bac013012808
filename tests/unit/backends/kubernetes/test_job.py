from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from labctl.backends.kubernetes import job, render, target
from labctl.backends.kubernetes.job import ClusterJob
from labctl.backends.kubernetes.target import Target
from labctl.config import settings
from labctl.errors import ConfigError
from labctl.jobs import program
from labctl.jobs.request import RunOptions, choose_workload

ROOT = Path(__file__).parents[4]
ENVIRON = {"LAB_NAME": "demo", "HOME": "/home/someone", "LAB_ACCELERATOR": "cpu"}
NOTHING = RunOptions()
TOKENS = {"HF_TOKEN": "hf_canary", "LAB_ENV_API_TOKEN": "also_canary"}
WORKLOAD = "description: mine\nlauncher: mpirun\nscript: mine.py\ntimeout: 5m\n"


def built(name: str, directory: Path = ROOT, options: RunOptions = NOTHING, **given: str) -> tuple[Target, ClusterJob]:
    """Build the job of a workload with these settings; return the target and the job."""
    found = settings.load(directory / "nowhere", {**ENVIRON, **given}, {})
    where = target.read(found, found.text("LAB_ACCELERATOR"))
    return where, job.build(found, directory, where, choose_workload(directory, name, options, found), options)


def own(directory: Path) -> Path:
    """Write a user's own workload `mine` to a lab directory; return the workload's folder."""
    folder = directory / "workloads/mine"
    folder.mkdir(parents=True)
    (folder / "workload.yml").write_text(WORKLOAD)
    (folder / "mine.py").write_text("print('hello')\n")
    return folder


@pytest.mark.parametrize(
    ("lab", "workload", "name"),
    [
        ("demo", "opt-13b", "demo-opt-13b"),
        ("demo", "dschat/run_opt-13b", "demo-dschat-run-opt-13b"),
        ("7th", "hello", "lab-7th-hello"),
        ("a", "b" * 60, "a-" + "b" * 29),
        # Two workloads of a lab have two jobs, whatever its name.
        ("a" * 40, "hello", "a" * 33 + "-hello"),
        ("7" * 40, "hello", "lab-" + "7" * 29 + "-hello"),
        ("a" * 27 + "-bc", "b" * 60, "a" * 9 + "-" + "b" * 29),
    ],
)
def test_a_job_has_a_name_that_services_and_pods_may_have(lab: str, workload: str, name: str) -> None:
    """job_name() is a DNS label of lab and workload, cut so that the pods' names have at most 63 characters."""
    assert job.job_name(lab, workload) == name
    assert len(f"{job.job_name(lab, workload, '20260102-030405-hello-1a2b')}-launcher-0-0-abcde") <= 63


def test_ranks_meet_at_the_names_that_the_operators_give_their_pods() -> None:
    """Nodes have the names of the pods' services: with namespace for MPIJob, short for TrainJob."""
    _, mpi = built("hello-mpi", LAB_K8S_NAMESPACE="team")
    assert [node.name for node in mpi.job.nodes] == [
        "demo-hello-mpi-worker-0.demo-hello-mpi.team.svc",
        "demo-hello-mpi-worker-1.demo-hello-mpi.team.svc",
    ]
    _, train = built("hello-mpi", LAB_K8S_JOB="trainjob")
    assert [node.name for node in train.job.nodes] == [
        "demo-hello-mpi-node-0-0.demo-hello-mpi",
        "demo-hello-mpi-node-0-1.demo-hello-mpi",
    ]


def test_the_agent_is_given_the_runs_nodes_and_limits() -> None:
    """job.json has the run's nodes, directory, launcher, limit, stall and port; labnode.py is docker/labnode.py."""
    where, made = built("hello-mpi", LAB_STALL_SECONDS="300", LAB_K8S_NAMESPACE="team")
    (texts,) = (one["data"] for one in render.manifests(where, made) if one["kind"] == "ConfigMap")
    nodes = ["demo-hello-mpi-worker-0.demo-hello-mpi.team.svc", "demo-hello-mpi-worker-1.demo-hello-mpi.team.svc"]
    assert json.loads(texts["job.json"]) == {
        "id": "demo-hello-mpi",
        "nodes": nodes,
        "directory": "/workspace/outputs/demo-hello-mpi",
        "launcher": "mpirun",
        "limit": made.job.timeout,
        "stall": 300,
        "pace": {"first_step": 0, "longest_step": 0},
        "ssh_port": 2222,
        "needed": nodes,
        "elastic": False,
    }
    assert texts["labnode.py"] == (ROOT / "docker/labnode.py").read_text()


def test_an_elastic_run_needs_its_first_node_alone() -> None:
    """With torchrun:elastic job.json is elastic and needs the first node alone."""
    _, made = built("hello-mpi", options=RunOptions(launcher="torchrun:elastic"))
    given = json.loads(made.launch)
    assert (given["elastic"], given["needed"]) == (True, given["nodes"][:1])


def test_no_process_of_a_pod_has_the_runs_id_by_which_the_agent_ends_its_processes() -> None:
    """LABCTL_RUN_ID is not among the pods' variables."""
    _, made = built("hello-mpi")
    assert "LABCTL_RUN_ID" not in dict(made.environment)


def test_nodes_with_accelerators_have_eight_unless_it_is_said() -> None:
    """Slots are 8 with an accelerator, 1 for cpu, or LAB_SLOTS; LAB_ACCELERATOR=auto raises ConfigError."""
    assert built("hello-mpi", LAB_ACCELERATOR="habana")[1].lab.nodes[0].slots == 8
    assert built("hello-mpi", LAB_ACCELERATOR="habana", LAB_SLOTS="2")[1].lab.nodes[0].slots == 2
    assert built("hello-mpi")[1].lab.nodes[0].slots == 1
    with pytest.raises(ConfigError, match="LAB_ACCELERATOR: must name the accelerator of the cluster's nodes"):
        built("hello-mpi", LAB_ACCELERATOR="auto")


def test_the_workloads_files_are_where_its_ranks_start_and_programs_stay_programs(tmp_path: Path) -> None:
    """The workload's files are in the ConfigMap below work/, executable as before, binary ones as base64."""
    folder = own(tmp_path)
    (folder / "sub").mkdir()
    (folder / "sub/helper.sh").write_text("#!/bin/sh\n")
    (folder / "sub/helper.sh").chmod(0o755)
    (folder / "weights.bin").write_bytes(b"\xff\xfe\x00")
    where, made = built("mine", tmp_path)
    run = "outputs/demo-mine"
    assert {path: program for path, _, program in made.files} == {
        f"{run}/rank.sh": True,
        f"{run}/rank_output.py": False,
        f"{run}/work/mine.py": False,
        f"{run}/work/sub/helper.sh": True,
        f"{run}/work/weights.bin": False,
        f"{run}/work/workload.yml": False,
    }
    config = next(one for one in render.manifests(where, made) if one["kind"] == "ConfigMap")
    assert config["binaryData"] == {"outputs_.demo-mine_.work_.weights.bin": "//4A"}
    assert config["data"]["outputs_.demo-mine_.work_.mine.py"] == "print('hello')\n"


def test_a_workload_that_no_config_map_holds_is_refused_with_its_largest_file(tmp_path: Path) -> None:
    """A workload of more than 1 MiB packed raises ConfigError with its largest file."""
    (own(tmp_path) / "data.bin").write_bytes(os.urandom(1 << 20))
    with pytest.raises(
        ConfigError, match=r"^workload mine is 1\.\d+ MiB when packed, its largest file data\.bin; with "
    ):
        built("mine", tmp_path)


def test_a_workload_that_gets_small_enough_is_packed(tmp_path: Path) -> None:
    """A workload of more than 1 MiB that packs well is in code.tar.gz."""
    (own(tmp_path) / "data.txt").write_text("x" * (1 << 20))
    assert "code.tar.gz" in [path for path, _, _ in built("mine", tmp_path)[1].files]


def test_a_workload_with_names_that_are_no_keys_or_with_links_is_packed(tmp_path: Path) -> None:
    """A workload with a blank in a name, or with a link, is in code.tar.gz."""
    folder = own(tmp_path)
    (folder / "two words.txt").write_text("x")
    (folder / "link").symlink_to("/nowhere")
    where, made = built("mine", tmp_path)
    paths = [path for path, _, _ in made.files]
    assert paths == ["outputs/demo-mine/rank.sh", "outputs/demo-mine/rank_output.py", "code.tar.gz"]
    config = next(one for one in render.manifests(where, made) if one["kind"] == "ConfigMap")
    assert all(re.fullmatch("[-._a-zA-Z0-9]+", key) for key in (*config["data"], *config["binaryData"]))


def project(directory: Path, size: int) -> RunOptions:
    """Write a project with a file of this size that does not get smaller; return the options that run its script."""
    root = directory / "mine"
    root.mkdir()
    (root / "train.py").write_text("print('hello')\n")
    (root / "data.bin").write_bytes(os.urandom(size))
    return RunOptions(script=root / "train.py", here=root)


def of_script(directory: Path, options: RunOptions, owner: str = "ann@desk", **given: str) -> ClusterJob:
    """Build the job of a script with these options, recorded unless the owner is empty."""
    found = settings.load(directory / "nowhere", {**ENVIRON, **given}, {})
    where = target.read(found, found.text("LAB_ACCELERATOR"))
    run_id = "20260102-030405-train-1a2b" if owner else ""
    return job.build(found, directory, where, program.of(options), options, run_id, owner)


def test_a_project_is_packed_into_the_config_map(tmp_path: Path) -> None:
    """A small project is in code.tar.gz of the ConfigMap, not on the claim."""
    made = of_script(tmp_path, project(tmp_path, 1000))
    assert not [path for path, _, _ in made.files if "/work/" in path]
    assert "code.tar.gz" in [path for path, _, _ in made.files]
    assert "LABCTL_CODE" not in dict(made.environment)
    assert not made.on_claim


def test_a_project_that_no_config_map_holds_goes_by_the_claim(tmp_path: Path) -> None:
    """A large project with a claim is in on_claim, and LABCTL_CODE is its place, the same for equal code."""
    options = project(tmp_path, 1 << 20)
    made = of_script(tmp_path, options, LAB_K8S_STORAGE_SIZE="1g")
    assert "code.tar.gz" not in [path for path, _, _ in made.files]
    assert len(made.on_claim) > 1 << 20
    again = of_script(tmp_path, options, LAB_K8S_STORAGE_SIZE="1g")
    assert dict(again.environment)["LABCTL_CODE"] == job.place_of_code(made.on_claim), "equal code has one place"


@pytest.mark.parametrize(("owner", "size"), [("ann@desk", ""), ("", "1g")])
def test_a_project_that_no_config_map_holds_is_refused_without_a_claim_and_by_hand(
    tmp_path: Path, owner: str, size: str
) -> None:
    """A large project without a claim, or for a job by hand, raises ConfigError with LAB_K8S_STORAGE_SIZE as hint."""
    options = project(tmp_path, 1 << 20)
    told = (
        r"/mine is 1\.\d+ MiB when packed, its largest file data\.bin; with .* more than a ConfigMap holds \(1 MiB\)$"
    )
    with pytest.raises(ConfigError, match=told) as raised:
        of_script(tmp_path, options, owner, LAB_K8S_STORAGE_SIZE=size)
    assert raised.value.hint.startswith("`labctl run` sends it by the lab's claim, which LAB_K8S_STORAGE_SIZE=100g")


def test_inputs_are_paths_on_the_claim() -> None:
    """--model below /storage is passed on; another path, or none, raises ConfigError."""

    def with_model(path: str) -> RunOptions:
        """Return the options with this path as --model."""
        return RunOptions(arguments=(("model", path),))

    _, made = built("lora-clm", options=with_model("/storage/llama"))
    assert "/storage/llama" in made.job.workload.arguments
    with pytest.raises(ConfigError, match="/home/someone/llama is not on the claim"):
        built("lora-clm", options=with_model("/home/someone/llama"))
    with pytest.raises(ConfigError, match="lora-clm needs a path for --model"):
        built("lora-clm")


def test_a_model_that_is_named_as_on_the_hub_is_on_the_claim() -> None:
    """--model as a hub's name is its folder on the claim; without a claim it raises ConfigError."""
    options = RunOptions(arguments=(("model", "acme/llama-7b"),))
    _, made = built("lora-clm", options=options, LAB_K8S_STORAGE_SIZE="10g")
    assert "/storage/models/acme/llama-7b" in made.job.workload.arguments
    with pytest.raises(ConfigError, match="acme/llama-7b is not on the claim") as raised:
        built("lora-clm", options=options)
    assert "labctl cache --model" in raised.value.hint


def test_caches_are_on_the_claim_where_there_is_one() -> None:
    """HF_HOME is on the claim, or below /workspace without one."""
    assert dict(built("hello-mpi")[1].environment)["HF_HOME"] == "/workspace/.cache/huggingface"
    assert dict(built("hello-mpi", LAB_K8S_STORAGE_SIZE="10g")[1].environment)["HF_HOME"] == "/storage/huggingface"


def test_what_sshd_logs_is_said_to_pods_where_it_is_set() -> None:
    """LAB_SSHD_LOG_LEVEL is a variable of the pods only if it is set."""
    assert "LAB_SSHD_LOG_LEVEL" not in dict(built("matmul")[1].environment)
    for level in ("VERBOSE", "DEBUG"):
        assert dict(built("matmul", LAB_SSHD_LOG_LEVEL=level)[1].environment)["LAB_SSHD_LOG_LEVEL"] == level


def test_a_secret_is_in_the_secret_alone() -> None:
    """Tokens are in the Secret and in no other object; a plain variable is in another."""
    where, made = built("hello-mpi", ROOT, NOTHING, LAB_ENV_PLAIN="seen", **TOKENS)
    secret, *others = sorted(render.manifests(where, made), key=lambda one: one["kind"] != "Secret")
    assert secret["stringData"]["hf_token"] == TOKENS["HF_TOKEN"]
    assert "also_canary" in secret["stringData"]["environment"]
    assert "canary" not in render.text(others)
    assert "seen" in render.text(others)


def test_pods_have_no_rights_and_a_time_limit() -> None:
    """Pods run as non-root without a service account, capabilities and host paths; the job has a deadline."""
    where, made = built("hello-mpi", options=RunOptions(timeout=90))
    job_object = render.manifests(where, made)[-1]
    policy = job_object["spec"]["runPolicy"]
    assert (policy["activeDeadlineSeconds"], policy["backoffLimit"]) == (90 + 1800 + render.RESULTS_WAIT, 0)
    for replica in job_object["spec"]["mpiReplicaSpecs"].values():
        spec = replica["template"]["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert not spec["automountServiceAccountToken"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert not any("hostPath" in volume for volume in spec["volumes"])


def test_the_same_settings_give_the_same_text_which_yaml_reads_back() -> None:
    """Two builds give the same YAML, which is parsed back as the manifests."""
    where, made = built("opt-tiny", LAB_ENV_ODD="two\nlines: $HOME 'x' \"y\"\t")
    text = render.rendered(where, made).yaml
    assert text == render.rendered(*built("opt-tiny", LAB_ENV_ODD="two\nlines: $HOME 'x' \"y\"\t")).yaml
    assert list(yaml.safe_load_all(text)) == render.manifests(where, made)


def test_files_for_kustomize_have_every_object_but_the_secret() -> None:
    """kustomization() has a file per object but the Secret, returned as left out; no token is in a file."""
    where, made = built("hello-mpi", ROOT, NOTHING, **TOKENS)
    files, left_out = render.kustomization(render.manifests(where, made))
    index = yaml.safe_load(next(one.content for one in files if one.path == "kustomization.yaml"))
    assert index["resources"] == ["namespace.yaml", "configmap.yaml", "mpijob.yaml"] == [one.path for one in files[:-1]]
    assert left_out == ("Secret demo-hello-mpi",)
    assert not any("canary" in one.content for one in files)
