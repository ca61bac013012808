from __future__ import annotations

from typing import Any

import pytest
import yaml
from msgspec.structs import replace
from support.builders import devices, host, lab, node

from labctl import naming
from labctl.backends.docker.compose import render
from labctl.model import DeviceMapping, Lab, Limits, Mount, Secret

INJECTIONS = [
    "x\n    privileged: true",
    'x"\n    privileged: true\n    y: "',
    "${HOME}",
    "$$",
    "$",
    "*alias",
    "&anchor",
    "!!python/object:os.system",
    "yes",
    "null",
    "~",
    "1e3",
    "0x10",
    "12:30:45",
    "2026-01-02",
    "",
    " padded ",
    "# no comment",
    "a: b",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "\\",
    "\\n",
    '"',
    "'",
    "\t",
    "\x85\u2028\u2029\ufeff",
    "\x1b[31m",
    "ü😀",
]


def read(of: Lab) -> dict[str, Any]:
    """Render the first node's compose file; return it parsed."""
    document: dict[str, Any] = yaml.safe_load(render.render_node(of, of.nodes[0], {}).content)
    return document


# --- values are data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", INJECTIONS)
def test_a_value_cannot_become_yaml(value: str) -> None:
    """A variable's value of YAML, Compose or Jinja syntax is read back as it is and changes nothing else."""
    plain, odd = read(lab(1, environment=(("X", "plain"),))), read(lab(1, environment=(("X", value),)))
    for service in ("worker-0", "launcher"):
        assert odd["services"][service]["environment"].pop("X").replace("$$", "$") == value
        plain["services"][service]["environment"].pop("X")
        # Made from the text as a whole.
        odd["services"][service]["labels"].pop("labctl.config-hash")
        plain["services"][service]["labels"].pop("labctl.config-hash")
    assert odd == plain


@pytest.mark.parametrize("name", ["X", "null", "Null", "NULL", "true", "True", "FALSE"])
def test_the_name_of_a_variable_is_text_whatever_yaml_reads_in_it(name: str) -> None:
    """A variable named like YAML's null or true is a key of text in the compose file."""
    environment = read(lab(1, environment=((name, "1"),)))["services"]["worker-0"]["environment"]
    assert name in environment


@pytest.mark.parametrize("value", ["/srv/a b", "/srv/${HOME}", '/srv/"x"', "/srv/x: {y}", "/srv/ü"])
def test_a_path_is_a_path(value: str) -> None:
    """A mount's source with spaces, quotes or `$` is read back as it is."""
    mounts = read(lab(1, mounts=(Mount(source=value, target="/data"),)))["services"]["worker-0"]["volumes"]
    assert mounts[0]["source"].replace("$$", "$") == value


# --- what a node gets ----------------------------------------------------------------------------------------


def test_a_lab_is_a_compose_file_for_each_node_and_the_launchers_ssh_config() -> None:
    """Three nodes render three compose files and the launcher's ssh config, all with mode 0600."""
    assert [file.path for file in render.render(lab(3))] == [
        ".lab/nodes/worker-0/compose.yml",
        ".lab/nodes/worker-1/compose.yml",
        ".lab/nodes/worker-2/compose.yml",
        ".lab/nodes/worker-0/launcher/config",
    ]
    assert {file.mode for file in render.render(lab(3))} == {0o600}


def test_the_command_to_type_by_hand_has_the_override_of_a_node_that_has_one() -> None:
    """The comment's command has `-f override.yml` only for the node with an override, which is rendered too."""
    override = (("worker-1", '{"tmpfs": ["/scratch"]}'),)
    made = {file.path: file.content for file in render.render(lab(override=override))}
    commands = [made[naming.compose_path(node)].splitlines()[1] for node in ("worker-0", "worker-1")]
    assert [command.partition("compose -f ")[2] for command in commands] == [
        ".lab/nodes/worker-0/compose.yml up -d",
        ".lab/nodes/worker-1/compose.yml -f .lab/nodes/worker-1/override.yml up -d",
    ]
    assert ".lab/nodes/worker-1/override.yml" in made


def test_rendering_is_the_same_every_time() -> None:
    assert render.render(lab(3)) == render.render(lab(3))


def test_the_network_has_the_hosts_mtu_and_the_labs_name() -> None:
    """The compose network has the host's MTU; network and project are named after the lab."""
    document = read(lab(1, name="other", hosts=(host(mtu=1412),)))
    assert document["networks"]["lab"]["driver_opts"] == {"com.docker.network.driver.mtu": "1412"}
    assert (document["name"], document["networks"]["lab"]["name"]) == ("labctl-other", "labctl-other")


def test_the_fingerprint_changes_with_the_file_and_with_nothing_else() -> None:
    """The config-hash label equals the file's fingerprint, and changes with shm_size."""

    def label(of: Lab) -> str:
        """Return the fingerprint of the first node's compose file."""
        return naming.fingerprint(render.render_node(of, of.nodes[0], {}).content)

    assert label(lab(2)) == label(lab(2))
    assert label(lab(2)) != label(lab(2, shm_size="9g"))
    assert read(lab(2))["services"]["worker-0"]["labels"]["labctl.config-hash"] == label(lab(2))


def test_limits_that_the_engine_refused_are_left_out() -> None:
    """Limits that are None are not in `ulimits`, and without any the key is absent."""
    service = read(lab(1, limits=Limits(memlock=None, stack=None, nofile=4096)))["services"]["worker-0"]
    assert service["ulimits"] == {"nofile": {"soft": 4096, "hard": 4096}}
    none = read(lab(1, limits=Limits(memlock=None, stack=None, nofile=None)))["services"]["worker-0"]
    assert "ulimits" not in none


@pytest.mark.parametrize(
    ("override", "limits"),
    [
        ("{}", "memory=1610612736 pids=100 cpuset=0,2"),
        ('{"tmpfs": ["/scratch"]}', "memory=1610612736 pids=100 cpuset=0,2"),
        ('{"mem_limit": "1g"}', ""),
        ('{"deploy": {"resources": {}}}', ""),
        ('{"<<": {"cpus": 2}}', ""),
    ],
)
def test_the_limits_of_a_container_are_its_label_unless_an_override_may_set_others(override: str, limits: str) -> None:
    """Label labctl.limits has the node's memory, pids and cpuset; it is empty if an override may set limits."""
    of = lab(
        (node(0, cpuset=(0, 2)),), memory="1536m", limits=Limits(pids=100), override=(("worker-0", override),)
    )  # fmt: skip
    services = read(of)["services"]
    assert services["worker-0"]["labels"]["labctl.limits"] == limits
    assert services["launcher"]["labels"]["labctl.limits"] == "memory=1610612736 pids=100"


def test_threads_are_the_nodes_cores_shared_by_its_ranks() -> None:
    """OMP_NUM_THREADS is the cpuset's cores, or the host's, by slots, and at least 1."""

    def threads(**changes: Any) -> str:
        """Return OMP_NUM_THREADS of a node with these changes."""
        of = lab((node(0, **changes),))
        return str(read(of)["services"]["worker-0"]["environment"]["OMP_NUM_THREADS"])

    assert threads(cpuset=(2, 3)) == "2"
    assert threads(cpuset=(), slots=2) == "2"
    assert threads(cpuset=(0,), slots=8) == "1"


def test_the_settings_environment_wins_over_the_nodes() -> None:
    """OMP_NUM_THREADS from the lab's environment replaces the computed one."""
    service = read(lab(1, environment=(("OMP_NUM_THREADS", "7"),)))["services"]["worker-0"]
    assert service["environment"]["OMP_NUM_THREADS"] == "7"


def test_secrets_are_files_of_the_node_and_never_text() -> None:
    """A secret's value is in no file; compose has it as a file of the node, mounted by its name."""
    of = lab(2, secrets=(("hf_token", Secret("CANARY")),))
    text = "".join(file.content for file in render.render(of))
    assert "CANARY" not in text
    assert "[REDACTED]" not in text
    document = yaml.safe_load(render.render_node(of, of.nodes[1], {}).content)
    assert document["secrets"] == {
        "worker-1-hf_token": {"file": "/srv/lab/.lab/nodes/worker-1/secrets/hf_token"},
    }
    assert document["services"]["worker-1"]["secrets"] == [{"source": "worker-1-hf_token", "target": "hf_token"}]


def test_a_nodes_devices_are_written_on_its_container() -> None:
    """Label labctl.devices lists the ids of a node's devices, from which ``status`` reads them."""
    gpus = node(0, devices=DeviceMapping(devices=devices("2", "3")), slots=2)
    assert read(lab((gpus,), accelerator="nvidia"))["services"]["worker-0"]["labels"]["labctl.devices"] == "2,3"


def test_the_launcher_sees_no_device() -> None:
    """The launcher's service has no runtime, devices, groups or health check, and only SETGID and SETUID."""
    full = DeviceMapping(
        runtime="habana",
        driver="nvidia",
        requests=("0",),
        paths=("/dev/x",),
        cap_add=(("SYS_NICE", "why"),),
        group_add=(44,),
    )
    launcher = read(lab((node(0, devices=full),)))["services"]["launcher"]
    assert not {"runtime", "deploy", "devices", "group_add", "healthcheck"} & set(launcher)
    assert launcher["cap_add"] == ["SETGID", "SETUID"]


def test_only_the_launcher_mounts_the_identity() -> None:
    """/etc/lab/ssh is the node's ssh folder in a worker and the launcher's folder in the launcher, read-only."""
    document = read(lab(1))["services"]
    keys = {
        name: next(mount for mount in service["volumes"] if mount["target"] == "/etc/lab/ssh")
        for name, service in document.items()
    }
    assert keys["worker-0"]["source"] == "/srv/lab/.lab/nodes/worker-0/ssh"
    assert keys["launcher"]["source"] == "/srv/lab/.lab/nodes/worker-0/launcher"
    assert all(mount["read_only"] for mount in keys.values())


def test_the_launcher_may_write_to_workloads_and_to_no_other_mount_that_nodes_may_not() -> None:
    """The launcher may write to workloads and runs, a worker to runs alone; /data is read-only in both."""
    of = lab()
    read_only = {f"{of.project_path}/workloads": True, f"{of.project_path}/runs": False, "/data": True}
    mounts = tuple(Mount(source=path, target=path, read_only=flag) for path, flag in read_only.items())
    written = {}
    for name, service in read(replace(of, mounts=mounts))["services"].items():
        written[name] = {mount["target"] for mount in service["volumes"] if not mount.get("read_only")} & set(read_only)
    assert written["worker-0"] == {f"{of.project_path}/runs"}
    assert written["launcher"] == {f"{of.project_path}/runs", f"{of.project_path}/workloads"}


def test_the_ssh_config_has_each_node_with_its_port_and_trusts_nobody_else() -> None:
    """The launcher's ssh config has each worker with port 3022 and StrictHostKeyChecking yes."""
    config = render.render(lab(2, ssh_port=3022))[-1].content
    for name in ("worker-0", "worker-1"):
        assert f"Host {name}\n  HostName {name}\n  Port 3022\n" in config
    assert "StrictHostKeyChecking yes" in config


def test_ten_times_the_nodes_is_ten_times_the_files() -> None:
    """Fifty nodes render 51 files."""
    of = replace(lab(1), nodes=tuple(node(index) for index in range(50)))
    assert len(render.render(of)) == 51


def test_only_the_launcher_publishes_ports_and_only_workers_are_told_what_sshd_logs() -> None:
    """The launcher has `ports` and no LAB_SSHD_LOG_LEVEL; a worker has the level and no ports."""
    services = read(lab(1, ports=(("127.0.0.1", 6006, 80),), sshd_log_level="DEBUG"))["services"]
    assert services["launcher"]["ports"] == ["127.0.0.1:6006:80"]
    assert "ports" not in services["worker-0"]
    assert services["worker-0"]["environment"]["LAB_SSHD_LOG_LEVEL"] == "DEBUG"
    assert "LAB_SSHD_LOG_LEVEL" not in services["launcher"]["environment"]
