from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from labctl import launchers
from labctl.backends.kubernetes import importing
from labctl.config import dotenv, settings
from labctl.errors import ConfigError
from labctl.workloads import loader

MANIFEST = Path(__file__).with_name("mpijob.yaml")


def test_what_a_lab_has_settings_for_is_read() -> None:
    """read() gives the settings of mpijob.yaml: namespace, nodes, resources, image, selector and proxy."""
    assert dict(importing.read(MANIFEST).settings) == {
        "LAB_K8S_NAMESPACE": "workloads",
        "LAB_NODES": "1",
        "LAB_ACCELERATOR": "habana",
        "LAB_SLOTS": "8",
        "LAB_MEMORY": "250g",
        "LAB_K8S_HUGEPAGES": "312600m",
        "LAB_IMAGE": "registry.example.com/gaudi/pytorch:1.18",
        "LAB_K8S_HOST_IPC": "true",
        "LAB_K8S_NODE_SELECTOR": "example.com/rack=7",
        "LAB_K8S_TOLERATIONS": "reserved=lab:NoSchedule",
        "HTTP_PROXY": "http://proxy:3128",
    }


def test_its_lines_are_those_of_an_env_file() -> None:
    """The lines for .env are parsed back as the settings."""
    found = importing.read(MANIFEST)
    assert {one.key: one.value for one in dotenv.parse(found.env, ".env")} == dict(found.settings)


def test_its_launcher_is_a_workload(tmp_path: Path) -> None:
    """The files are a loadable workload with launcher script, the job's variables and its command in start.sh."""
    found = importing.read(MANIFEST)
    for one in found.files:
        path = tmp_path / one.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(one.content)
        path.chmod(one.mode)
    workload = loader.load(tmp_path / "workloads", "gaudi-llm-ds-ft", launchers.known())
    assert (workload.launcher, workload.script) == ("script", "start.sh")
    assert workload.environment == (("LLM_MODEL", "meta-llama/Meta-Llama-3.1-8B-Instruct"), ("NUM_HPU", "8"))
    script = (tmp_path / "workloads/gaudi-llm-ds-ft/start.sh").read_text()
    assert script.endswith("--use_deepspeed run.py --model $LLM_MODEL\n")


def test_what_is_left_out_is_said_and_a_token_is_copied_nowhere() -> None:
    """left_out lists what has no setting, and tokens by name; no file has the token."""
    found = importing.read(MANIFEST)
    assert found.left_out == (
        "PersistentVolumeClaim shared-model: not part of the job",
        "resource example.com/nic: 1",
        "HUGGING_FACE_HUB_TOKEN: not copied; set HF_TOKEN= in .env",
        "WANDB_API_KEY: its value is in another object of the cluster; set LAB_ENV_WANDB_API_KEY= in .env",
        "spec.runPolicy.cleanPodPolicy: Running",
        "spec.mpiReplicaSpecs.Launcher.template.spec.hostIPC: True",
        "spec.mpiReplicaSpecs.Launcher.template.spec.volumes[0].name: workspace",
        "spec.mpiReplicaSpecs.Launcher.template.spec.volumes[0].persistentVolumeClaim.claimName: shared-model",
        "spec.mpiReplicaSpecs.Launcher.template.spec.containers[0].volumeMounts[0].name: workspace",
        "spec.mpiReplicaSpecs.Launcher.template.spec.containers[0].volumeMounts[0].mountPath: /storage",
    )
    assert "hf_in_clear_text" not in str((found.env, [one.content for one in found.files]))


def read_changed(directory: Path, change: Callable[[dict[str, Any]], None]) -> importing.ImportedJob:
    """Apply ``change`` to the example manifest's job and import it; return the imported job."""
    _, job = yaml.safe_load_all(MANIFEST.read_text())
    change(job)
    (directory / "job.yaml").write_text(yaml.safe_dump(job))
    return importing.read(directory / "job.yaml")


def pod_spec(job: dict[str, Any], role: str = "Launcher") -> dict[str, Any]:
    """Return the pod specification of a role in the job."""
    found: dict[str, Any] = job["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]
    return found


@pytest.mark.parametrize(
    ("typed", "script", "name"),
    [
        (
            "login --token hf_Canary12345",
            'login --token $(cat "$HF_TOKEN_PATH")',
            "HF_TOKEN: not copied; set HF_TOKEN=",
        ),
        (
            "export HF_TOKEN=hf_Canary12345",
            'export HF_TOKEN=$(cat "$HF_TOKEN_PATH")',
            "HF_TOKEN: not copied; set HF_TOKEN=",
        ),
        ("export WANDB_API_KEY='Canary12345'", "export WANDB_API_KEY='$WANDB_API_KEY'", "LAB_ENV_WANDB_API_KEY="),
        ("wandb login --api-key Canary12345 now", "wandb login --api-key $API_KEY now", "LAB_ENV_API_KEY="),
        ("git clone https://me:Canary@host/x", "git clone https://me:$URL_PASSWORD@host/x", "LAB_ENV_URL_PASSWORD="),
    ],
)
def test_a_token_in_the_command_is_a_variable_and_is_said(tmp_path: Path, typed: str, script: str, name: str) -> None:
    """A token in the command is replaced by a variable, and left_out names it; it is nowhere in the result."""

    def change(job: dict[str, Any]) -> None:
        """Make this the launcher's command."""
        pod_spec(job)["containers"][0]["args"] = [typed]

    found = read_changed(tmp_path, change)
    assert found.files[1].content.endswith(f"\n{script}\n")
    assert any(name in one and ": not copied; set " in one for one in found.left_out)
    assert "Canary" not in str(found)


@pytest.mark.parametrize("typed", ["run --tokenizer_name a/model-name --max_tokens 10000000", "TOKEN_FILE=$HOME/token"])
def test_a_command_without_a_token_stays_as_it_is(tmp_path: Path, typed: str) -> None:
    """A command with words like `token` but no token is copied unchanged."""

    def change(job: dict[str, Any]) -> None:
        """Make this the launcher's command."""
        pod_spec(job)["containers"][0]["args"] = [typed]

    assert read_changed(tmp_path, change).files[1].content.endswith(f"\n{typed}\n")


def test_what_is_left_out_is_named_without_its_tokens(tmp_path: Path) -> None:
    """left_out names annotations, init containers and URLs without their tokens and passwords."""

    def change(job: dict[str, Any]) -> None:
        """Add an annotation, an init container and a variable with a token each."""
        job["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": "hf_Canary12345"}
        environment = [{"name": "API_KEY", "value": "Canary"}, {"name": "A", "value": "hf_Canary12345"}]
        pod_spec(job)["initContainers"] = [
            {"env": environment, "command": ["login", "--password", "Canary12345", "--verbose"]}
        ]
        pod_spec(job)["containers"][0]["env"].append({"name": "INDEX", "value": "https://me:Canary@host/simple"})

    found = read_changed(tmp_path, change)
    assert "Canary" not in str(found)
    first = "spec.mpiReplicaSpecs.Launcher.template.spec.initContainers[0]"
    assert f"{first}.env[0].value: ..." in found.left_out
    assert f"{first}.command: login --password $PASSWORD --verbose" in found.left_out
    assert "INDEX: not copied; set LAB_ENV_INDEX= in .env" in found.left_out


def test_the_workers_own_variables_are_the_workloads_and_the_launchers_win(tmp_path: Path) -> None:
    """Workers' variables are in the workload; of one that both have the launcher's, and left_out tells so."""

    def change(job: dict[str, Any]) -> None:
        """Give the worker a variable of its own and one that the launcher has too."""
        pod_spec(job, "Worker")["containers"][0]["env"] = [
            {"name": "HCCL_OVER_OFI", "value": "1"},
            {"name": "NUM_HPU", "value": "4"},
        ]

    found = read_changed(tmp_path, change)
    environment = yaml.safe_load(found.files[0].content)["environment"]
    assert (environment["HCCL_OVER_OFI"], environment["NUM_HPU"]) == ("1", "8")
    assert "the workers' NUM_HPU=4: launcher and workers share one value" in found.left_out


@pytest.mark.parametrize(
    ("resource", "amount", "key", "value"),
    [
        ("cpu", 1.5, "LAB_K8S_CPU", "1500m"),
        ("cpu", "500m", "LAB_K8S_CPU", "500m"),
        ("cpu", 32, "LAB_K8S_CPU", "32"),
        ("memory", "1.5Gi", "LAB_MEMORY", "1536m"),
        ("memory", "512M", "LAB_MEMORY", "500000k"),
    ],
)
def test_amounts_are_written_as_settings_have_them(
    tmp_path: Path, resource: str, amount: object, key: str, value: str
) -> None:
    """Amounts of cpu and memory are written as LAB_K8S_CPU and LAB_MEMORY, which load unchanged."""

    def change(job: dict[str, Any]) -> None:
        """Make this the worker's only limit."""
        pod_spec(job, "Worker")["containers"][0]["resources"] = {"limits": {resource: amount}}

    found = dict(read_changed(tmp_path, change).settings)
    assert found[key] == value
    assert settings.load(tmp_path, {"HOME": "/home/someone", key: value}, {}).text(key) == value


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (["mpirun", "-n", "2", "a b"], "exec mpirun -n 2 'a b'"),
        (["sh", "-c", "echo $1", "name", "x y"], "set -- 'x y'\necho $1"),
        (["bash", "-lc", "true"], "true"),
    ],
)
def test_a_command_is_a_script(tmp_path: Path, command: list[str], script: str) -> None:
    """A command of words becomes `exec` with quoted words, one of `sh -c` its script."""

    def change(job: dict[str, Any]) -> None:
        """Make this the launcher's command without arguments."""
        pod_spec(job)["containers"][0] |= {"command": command, "args": []}

    assert read_changed(tmp_path, change).files[1].content.endswith(f"\n{script}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has 0 MPIJobs, not one"),
        ("kind: Pod\n", "it has 0 MPIJobs, not one"),
        ("{kind: MPIJob, apiVersion: kubeflow.org/v1}\n", "its MPIJob is of kubeflow.org/v1"),
        ("a: [\n", "job.yaml:2: not YAML"),
        ("{kind: MPIJob, apiVersion: kubeflow.org/v2beta1}\n", "the launcher has no command"),
    ],
)
def test_a_file_without_a_job_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """A file without one MPIJob of v2beta1 with a command raises ConfigError."""
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        importing.read(tmp_path / "job.yaml")


WORKER = "spec.mpiReplicaSpecs.Worker.template.spec"
CONTAINER = f"{WORKER}.containers[0]"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (f"{CONTAINER}.resources.limits.memory", "31ttp", "31ttp is not a quantity, such as 500m or 8Gi"),
        (f"{CONTAINER}.resources.limits.memory", float("inf"), "inf is not a quantity, such as 500m or 8Gi"),
        (f"{CONTAINER}.resources.limits.cpu", -1, "-1 is not a quantity, such as 500m or 8Gi"),
        (f"{CONTAINER}.resources", ["memory"], "expected mapping or null, got list"),
        (f"{CONTAINER}.command", ["mpirun", {"-n": 2}], "expected whole number or number or text, got mapping"),
        (f"{CONTAINER}.command", "mpirun", "expected list or null, got text"),
        (f"{WORKER}.containers", [], "expected list of length >= 1"),
        (WORKER, None, "expected mapping, got null"),
        (f"{WORKER}.nodeSelector.rack", 7, "expected text, got whole number"),
        ("metadata", [], "expected mapping or null, got list"),
        ("spec.slotsPerWorker", "8", "expected whole number or null, got text"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(tmp_path: Path, place: str, value: Any, message: str) -> None:
    """A wrong value raises ConfigError with the file, the path of the field and the expected type."""
    with pytest.raises(ConfigError) as error:
        read_changed(tmp_path, lambda job: put(job, steps(place), value))
    inner = r"(\[\d\])?" if isinstance(value, list) else ""
    assert re.fullmatch(
        f"{re.escape(str(tmp_path / 'job.yaml'))}: {re.escape(place)}{inner}: {re.escape(message)}", str(error.value)
    )


def test_a_null_is_a_field_that_is_not_there(tmp_path: Path) -> None:
    """A field that is null counts as missing: without resources the accelerator is cpu."""

    def change(job: dict[str, Any]) -> None:
        """Set resources, labels and run policy to null."""
        put(job, steps(f"{CONTAINER}.resources"), None)
        put(job, steps("metadata.labels"), None)
        put(job, steps("spec.runPolicy"), None)

    assert dict(read_changed(tmp_path, change).settings)["LAB_ACCELERATOR"] == "cpu"


def test_a_hundred_broken_manifests_are_read_or_refused_by_the_place_that_is_broken(tmp_path: Path) -> None:
    """Of 100 manifests with one broken value, each is read or raises ConfigError that names its place."""
    values: tuple[Any, ...] = (
        None,
        [],
        [[]],
        {},
        {"a": {"b": 1}},
        "",
        "31ttp",
        float("inf"),
        float("nan"),
        -1,
        10**40,
        True,
        "2026-01-01",
    )
    draw = random.Random(35)  # noqa: S311 - the same manifests each time
    original = list(yaml.safe_load_all(MANIFEST.read_text()))
    places = list(paths(original))
    refused = 0
    for _ in range(100):
        place, value = draw.choice(places), draw.choice(values)
        broken = copy.deepcopy(original)
        put(broken, place, value)
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump_all(broken))
        try:
            importing.read(file)
        except ConfigError as error:
            refused += 1
            message = str(error)
            assert message.startswith(f"{file}: "), message
            if place[1:2] not in ((), ("kind",), ("apiVersion",)) and "no command" not in message:
                named = message.removeprefix(f"{file}: ").partition(": ")[0]
                around = dotted(place[1:])
                assert around.startswith(named) or named.startswith(around), (message, place, value)
    assert 30 < refused < 100


Steps = tuple[str | int, ...]


def steps(place: str) -> Steps:
    """Parse a path such as ``a.b[0]`` into keys and numbers."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"\.|\[|\]\.?", place) if part)


def dotted(place: Steps) -> str:
    """Write keys and numbers as a path such as ``a.b[0]``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).removeprefix(".")


def put(at: Any, place: Steps, value: Any) -> None:
    """Set the value at a path inside nested mappings and lists; make missing mappings."""
    *path, last = place
    for step in path:
        at = at.setdefault(step, {}) if isinstance(at, dict) else at[step]
    at[last] = value


def paths(value: Any, place: Steps = ()) -> Iterator[Steps]:
    """Yield the paths of all items in a value."""
    if place:
        yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, below in inner:
        yield from paths(below, (*place, step))
