"""Golden cases, one per folder: ``case.env`` and ``host.json`` in, all files under ``expected/`` out.

``pytest tests/golden --update-golden`` rewrites what is expected; read the difference before keeping it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import plans

from labctl import accelerators, launchers
from labctl.backends import spec
from labctl.backends.docker.compose import render, ssh_keys
from labctl.backends.docker.deploy import plan, steps
from labctl.backends.docker.lab import capabilities
from labctl.backends.state import ObservedState
from labctl.config import hostfile, settings
from labctl.jobs import job
from labctl.model import Device, Host, Job, Lab, Network
from labctl.workloads import loader

HERE = Path(__file__).parent
DIRECTORY = Path("/srv/lab")
ON_HOSTS = ("cpu-3-hosts", "nvidia-3-hosts")
"""Cases with a node on each of several hosts; the others are labs on one machine."""
CASES = (
    *(f"{accelerator}-{size}" for accelerator in sorted(accelerators.modules()) for size in ("1-node", "3-nodes")),
    *ON_HOSTS,
)
COMPOSE_FILES = sorted(HERE.glob("*/expected/nodes/*/compose.yml"))


def load_settings(folder: Path, scratch: Path) -> settings.Settings:
    """Copy case.env to ``scratch`` as .env and load the settings."""
    shutil.copyfile(folder / "case.env", scratch / ".env")
    return settings.load(scratch, {"HOME": "/home/someone"}, {})


def load_case(folder: Path, scratch: Path) -> Lab:
    """Build the lab of a case from case.env and host.json; with network ``host`` if it has several hosts."""
    loaded = load_settings(folder, scratch)
    facts = json.loads((folder / "host.json").read_text(encoding="utf-8"))
    hosts = tuple(map(load_host, facts)) if isinstance(facts, list) else (load_host(facts),)
    accelerator: Any = loaded.text("LAB_ACCELERATOR")
    network: Network = "host" if len(hosts) > 1 else "bridge"
    return spec.build(loaded, DIRECTORY, accelerator, hosts, capabilities.wanted(loaded), network=network)


def load_host(facts: dict[str, Any]) -> Host:
    """Build a Host, with its devices, from its JSON."""
    facts = {key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()}
    return Host(**{**facts, "devices": tuple(Device(**device) for device in facts.get("devices", ()))})


def load_job(folder: Path, of: Lab) -> Job | None:
    """Build the job of a case, for a ``-hosts`` case from its ``-nodes`` case; None without a folder of workloads."""
    folder = folder.with_name(folder.name.replace("-hosts", "-nodes"))
    if not (folder / "workloads").is_dir():
        return None
    name = next((folder / "workloads").iterdir()).name
    workload = loader.load(folder / "workloads", name, launchers.known())
    entries = hostfile.parse((folder / "hostfile").read_text(encoding="utf-8"), "hostfile")
    return job.build(of, workload, f"20260102-150405-{name}-3fa2", job.choose(of, entries), workload.timeout)


def rendered(folder: Path, scratch: Path) -> dict[str, str]:
    """Render the files, plans and run of a case; return their content by path, without the leading ``.lab/``."""
    of = load_case(folder, scratch)
    files = render.render(of)
    contents = {file.path.removeprefix(".lab/"): file.content for file in files}
    local = (
        steps.WriteKeys(paths=ssh_keys.outdated(of), cause="new or changed"),
        steps.WriteFiles(files=files, cause="new or changed"),
    )
    contents["plan-up.txt"] = (
        f"{plan.up(of, files, ObservedState(), local=local, stale=[host.name for host in of.hosts])}\n"
    )
    if task := load_job(folder, of):
        contents |= {f"run/{file.path}": file.content for file in task.files}
        contents["run/argv.txt"] = "".join(f"{word}\n" for word in task.argv)
        contents["plan-run.txt"] = f"{plans.of_run(of, task, load_settings(folder, scratch))}\n"
    return contents


def kept(folder: Path) -> dict[str, str]:
    """Return the content of each file below the case's ``expected`` by relative path."""
    root = folder / "expected"
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in files}


def test_every_folder_is_a_case_and_every_case_a_folder() -> None:
    folders = {path.name for path in HERE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_rendered_files_are_the_expected_ones(case: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Files and plans equal those below ``expected``; --update-golden rewrites these."""
    contents = rendered(HERE / case, tmp_path)
    if request.config.getoption("--update-golden"):
        shutil.rmtree(HERE / case / "expected", ignore_errors=True)
        for name, content in contents.items():
            path = HERE / case / "expected" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    expected = kept(HERE / case)
    assert sorted(contents) == sorted(expected)
    for name, content in contents.items():
        assert content == expected[name], name


@pytest.mark.parametrize("case", CASES)
def test_expected_files_hold_no_secret(case: str, tmp_path: Path) -> None:
    """No expected file contains a secret's value of the case, or the placeholder of one."""
    secrets = [secret.reveal() for _, secret in load_case(HERE / case, tmp_path).secrets]
    text = "".join(kept(HERE / case).values())
    assert not [secret for secret in secrets if secret in text]
    assert "not_a_real_one" not in text
    assert "not-a-real-one" not in text


# --- what every compose file must and must not say -----------------------------------------------------------

# No privileged, ports, ipc or pid here: a key that is not listed does not pass.
SERVICE_KEYS = {
    *("image", "command", "hostname", "init", "restart", "working_dir", "labels", "environment"),
    *("shm_size", "pids_limit", "mem_limit", "cpuset", "ulimits", "security_opt", "cap_drop", "cap_add", "runtime"),
    *("deploy", "devices", "group_add", "tmpfs", "volumes", "secrets", "healthcheck", "logging"),
}
BRIDGE_KEYS = {"networks"}
HOST_KEYS = {"network_mode", "extra_hosts"}
CAPABILITIES = {"AUDIT_WRITE", "SETGID", "SETUID", "SYS_CHROOT", "SYS_NICE", "IPC_LOCK"}


@pytest.fixture(params=COMPOSE_FILES, ids=[f"{path.parts[-5]}-{path.parts[-2]}" for path in COMPOSE_FILES])
def compose_file(request: pytest.FixtureRequest) -> Path:
    """Return each expected compose file in turn."""
    path: Path = request.param
    return path


def services(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and content of each service; AssertionError for an unknown top-level key."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert set(document) <= {"name", "services", "networks", "secrets"}
    yield from document["services"].items()


def test_there_is_a_compose_file_for_every_node_of_every_case() -> None:
    assert len(COMPOSE_FILES) == 4 * (1 + 3) + 2 * 3


def on_hosts(path: Path) -> bool:
    """Return True if the compose file is of a case with several hosts."""
    return path.parts[-5] in ON_HOSTS


def test_services_are_confined(compose_file: Path) -> None:
    """Each service has only known keys, drops all capabilities, and has limits for processes and logs."""
    for name, service in services(compose_file):
        network = HOST_KEYS if on_hosts(compose_file) else BRIDGE_KEYS
        assert network <= set(service) <= SERVICE_KEYS | network, name
        assert service.get("network_mode", "host") == "host"
        assert service["cap_drop"] == ["ALL"]
        assert set(service["cap_add"]) <= CAPABILITIES
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["init"] is True
        assert service["restart"] == "no"
        assert 0 < service["pids_limit"] < 1 << 22
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}
        assert all(isinstance(value, str) for value in service["environment"].values())


def test_mounts_are_long_and_their_sources_never_made_by_docker(compose_file: Path) -> None:
    assert "docker.sock" not in compose_file.read_text(encoding="utf-8")
    for _, service in services(compose_file):
        for mount in service["volumes"]:
            assert mount["type"] == "bind"
            assert mount["bind"] == {"create_host_path": False}
            assert mount["source"].startswith("/")
            assert mount["target"].startswith("/")


def test_only_the_first_node_has_the_launcher_and_it_has_no_device(compose_file: Path) -> None:
    service_by_name = dict(services(compose_file))
    node = compose_file.parent.name
    assert list(service_by_name) == ([node, "launcher"] if node == "worker-0" else [node])
    if "launcher" in service_by_name:
        device_keys = {"devices", "deploy", "runtime", "group_add"}
        assert not device_keys & set(service_by_name["launcher"])
        assert set(service_by_name["launcher"]["cap_add"]) == {"SETGID", "SETUID"}


def test_every_service_names_its_lab_node_and_role(compose_file: Path) -> None:
    document = yaml.safe_load(compose_file.read_text(encoding="utf-8"))
    lab_name = document["name"].removeprefix("labctl-")
    for name, service in document["services"].items():
        labels = service["labels"]
        assert labels["labctl.lab"] == lab_name
        assert labels["labctl.node"] == service["hostname"] == name
        assert labels["labctl.role"] == ("launcher" if name == "launcher" else "worker")
    networks = {} if on_hosts(compose_file) else {"lab": {"labctl.lab": lab_name}}
    assert {name: network["labels"] for name, network in document.get("networks", {}).items()} == networks


def test_a_secret_is_a_file_below_the_nodes_own_directory(compose_file: Path) -> None:
    document = yaml.safe_load(compose_file.read_text(encoding="utf-8"))
    node = compose_file.parent.name
    for secret in document.get("secrets", {}).values():
        assert set(secret) == {"file"}
        directory = r"/home/someone/\.labctl/gpu-3\.gpu-[abc]" if on_hosts(compose_file) else "/srv/lab"
        assert re.fullmatch(rf"{directory}/\.lab/nodes/{node}/secrets/\w+", secret["file"])


def compose_available() -> bool:
    """Return True if `docker compose version` works here."""
    docker = shutil.which("docker")
    return bool(docker) and subprocess.run([str(docker), "compose", "version"], capture_output=True).returncode == 0  # noqa: PLW1510


@pytest.mark.docker
@pytest.mark.skipif(not compose_available(), reason="docker compose is not installed")
def test_compose_reads_the_file_without_a_word(compose_file: Path, tmp_path: Path) -> None:
    """`docker compose config -q` of each expected file succeeds and prints nothing."""
    command = ["docker", "compose", "-f", str(compose_file), "config", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.docker
@pytest.mark.skipif(not compose_available(), reason="docker compose is not installed")
def test_compose_reads_odd_values_byte_for_byte(tmp_path: Path) -> None:
    """`docker compose config` returns the environment and mount sources of cpu-1-node unchanged."""
    path = HERE / "cpu-1-node/expected/nodes/worker-0/compose.yml"
    command = ["docker", "compose", "-f", str(path), "config", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    service = json.loads(done.stdout)["services"]["worker-0"]
    read = {name: value.replace("$$", "$") for name, value in service["environment"].items()}
    of = load_case(HERE / "cpu-1-node", tmp_path)
    assert {name: read[name] for name, _ in of.environment} == dict(of.environment)
    assert {mount["source"].replace("$$", "$") for mount in service["volumes"]} >= {m.source for m in of.mounts}
