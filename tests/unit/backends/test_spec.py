from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builders import DIRECTORY, devices, host
from support.builders import lab as small

from labctl.backends import spec
from labctl.backends.docker.lab import capabilities
from labctl.config import settings
from labctl.errors import ConfigError, HostError
from labctl.model import Device, Host, Lab, Secret


def build(tmp_path: Path, text: str = "", accelerator: Any = "cpu", where: Host | None = None) -> Lab:
    """Build a lab from this .env on one host, this machine by default."""
    (tmp_path / ".env").write_text(text, encoding="utf-8")
    loaded = settings.load(tmp_path, {"HOME": "/home/someone"}, {})
    return spec.build(loaded, DIRECTORY, accelerator, (where or host(),), capabilities.wanted(loaded))


# --- cores ---------------------------------------------------------------------------------------------------


@given(cores=st.sets(st.integers(0, 255), min_size=1), count=st.integers(2, 64))
def test_cores_are_shared_without_overlap_and_none_is_left_over(cores: set[int], count: int) -> None:
    """share_cores() gives each node a share in order, sizes differing by one at most; no shares for too few cores."""
    ordered = tuple(sorted(cores))
    shares = spec.share_cores(host(cpus=ordered), ((),) * count)
    assert len(shares) == count
    if count > len(ordered):
        assert set(shares) == {()}
        return
    assert tuple(core for share in shares for core in share) == ordered
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_node_alone_has_all_cores() -> None:
    """share_cores() for one node gives an empty share, which means all cores."""
    assert spec.share_cores(host(cpus=(0, 1, 2)), ((),)) == ((),)


def test_a_node_has_the_cores_near_its_devices_first() -> None:
    """share_cores() gives each node the cores near its devices, without devices whole NUMA nodes, none twice."""
    where = host(cpus=tuple(range(8)), numa=((0, 1, 4, 5), (2, 3, 6, 7)))
    assert spec.share_cores(where, ((2, 3, 6, 7), (0, 1, 4, 5))) == ((2, 3, 6, 7), (0, 1, 4, 5))
    assert spec.share_cores(where, ((), ())) == ((0, 1, 4, 5), (2, 3, 6, 7)), "along the NUMA nodes"
    assert spec.share_cores(where, ((0, 1), (0, 1))) == ((0, 1, 4, 5), (2, 3, 6, 7)), "none is given twice"


def test_no_share_is_filled_up_with_what_is_near_another_nodes_devices() -> None:
    """share_cores() fills a share with cores that are near no other node's devices."""
    where = host(cpus=tuple(range(8)), numa=((0, 1), (2, 3), (4, 5), (6, 7)))
    assert spec.share_cores(where, ((6, 7), (0, 1))) == ((2, 3, 6, 7), (0, 1, 4, 5))


# --- devices -------------------------------------------------------------------------------------------------


def unused(tmp_path: Path, text: str, **environ: str) -> list[str]:
    """Return the warnings of variables that choose devices, with this .env."""
    (tmp_path / ".env").write_text(text, encoding="utf-8")
    return list(spec.unused_choices(settings.load(tmp_path, {"HOME": "/home/someone"}, {}), environ))


@pytest.mark.parametrize(
    ("name", "value", "way"),
    [
        ("CUDA_VISIBLE_DEVICES", "4,5", "LAB_DEVICES=4,5 in .env"),
        ("CUDA_VISIBLE_DEVICES", "GPU-8932f937", "LAB_DEVICES=GPU-8932f937 in .env"),
        ("CUDA_VISIBLE_DEVICES", "", "LAB_ACCELERATOR=cpu in .env makes a lab without devices"),
        ("CUDA_VISIBLE_DEVICES", "-1", "LAB_ACCELERATOR=cpu in .env makes a lab without devices"),
        ("HABANA_VISIBLE_DEVICES", "0, 1", "LAB_DEVICES=0,1 in .env"),
        ("ZE_AFFINITY_MASK", "0.0,0.1,2", "LAB_DEVICES=0,2 in .env"),
    ],
)
def test_a_variable_that_chooses_devices_is_named_with_labctls_way(
    tmp_path: Path, name: str, value: str, way: str
) -> None:
    """A variable of the environment that chooses devices is warned of, with the setting to use instead."""
    (warning,) = unused(tmp_path, "", **{name: value})
    assert warning.startswith(f"{name}={value} of the environment is not used: {way}")


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        ("LAB_DEVICES=0,1\n", {"CUDA_VISIBLE_DEVICES": "4,5"}),
        ("LAB_ENV_CUDA_VISIBLE_DEVICES=0\n", {"CUDA_VISIBLE_DEVICES": "4,5"}),
        ("LAB_ACCELERATOR=cpu\n", {"CUDA_VISIBLE_DEVICES": "4,5"}),
        ("", {"HABANA_VISIBLE_DEVICES": "all"}),
        ("", {"PATH": "/bin"}),
    ],
)
def test_a_variable_is_not_named_where_the_choice_is_made_or_there_is_none(
    tmp_path: Path, text: str, environ: dict[str, str]
) -> None:
    """No warning if LAB_DEVICES, LAB_ENV_ or LAB_ACCELERATOR is set, or the variable chooses all."""
    assert unused(tmp_path, text, **environ) == []


def test_a_cluster_chooses_the_devices_of_its_pods(tmp_path: Path) -> None:
    """On Kubernetes the warning says that the cluster chooses, with LAB_SLOTS."""
    (warning,) = unused(tmp_path, "LAB_ENGINE=kubernetes\n", CUDA_VISIBLE_DEVICES="4,5")
    assert warning.endswith("a cluster chooses the devices of a pod; LAB_SLOTS says how many it has")


@pytest.mark.parametrize(
    ("text", "slots"), [("LAB_NODES=3", 2), ("LAB_NODES=2\nLAB_SLOTS=3", 3), ("LAB_NODES=4\nLAB_SLOTS=2", 2)]
)
def test_devices_are_split_disjointly_in_order(tmp_path: Path, text: str, slots: int) -> None:
    """Eight devices are split among the nodes in order, as many as slots each."""
    of = build(tmp_path, text, "nvidia", host(devices=devices(*map(str, range(8)))))
    taken = [device for node in of.nodes for device in node.devices.requests]
    assert taken == [str(index) for index in range(slots * len(of.nodes))]
    assert {node.slots for node in of.nodes} == {len(node.devices.requests) for node in of.nodes} == {slots}


@pytest.mark.parametrize(
    ("accelerator", "has", "text", "shares"),
    [
        ("cpu", 0, "", [1, 1]),
        ("nvidia", 1, "", [1]),
        ("nvidia", 2, "", [1, 1]),
        ("nvidia", 8, "", [4, 4]),
        ("nvidia", 8, "LAB_SLOTS=8\n", [8]),
        ("nvidia", 8, "LAB_SLOTS=3\n", [3, 3]),
        ("nvidia", 8, "LAB_DEVICES=5\n", [1]),
        ("nvidia", 2, "LAB_NODES=1\n", [2]),
    ],
)
def test_a_host_has_two_nodes_unless_its_devices_are_enough_for_one_only(
    tmp_path: Path, accelerator: str, has: int, text: str, shares: list[int]
) -> None:
    """A host has two nodes with half of the devices each, one if devices or slots are enough for one only."""
    made = build(tmp_path, text, accelerator, host(devices=devices(*map(str, range(has)))))
    assert [node.slots for node in made.nodes] == shares


def test_too_many_slots_of_an_option_are_to_be_lowered_there(tmp_path: Path) -> None:
    """Too few devices for slots of -s: the hint names -s, not .env."""
    asked = settings.load(tmp_path, {"HOME": "/home/someone"}, {"LAB_SLOTS": "2"})
    with pytest.raises(HostError) as caught:
        spec.nodes(asked, "nvidia", host(devices=(Device(id="0", path="/dev/nvidia0"),)))
    assert caught.value.hint == "lower LAB_SLOTS of -s"


@pytest.mark.parametrize(("text", "needed"), [("LAB_NODES=3", 3), ("LAB_NODES=2\nLAB_SLOTS=2", 4)])
def test_too_few_devices_say_how_many(tmp_path: Path, text: str, needed: int) -> None:
    """Too few devices raise HostError with needed and existing numbers."""
    with pytest.raises(HostError) as caught:
        build(tmp_path, text, "nvidia", host(devices=devices("0", "1")))
    assert f"need {needed} nvidia devices, local has 2" in caught.value.message
    assert "LAB_NODES" in caught.value.hint


def test_too_few_picked_devices_are_not_called_what_the_host_has(tmp_path: Path) -> None:
    """Too few devices picked by LAB_DEVICES raise HostError with picked and existing numbers."""
    with pytest.raises(HostError) as caught:
        build(tmp_path, "LAB_NODES=2\nLAB_DEVICES=1", "nvidia", host(devices=devices("0", "1", "2")))
    assert "LAB_DEVICES picks 1 of 3" in caught.value.message
    assert "LAB_DEVICES" in caught.value.hint


def test_a_range_that_runs_backwards_is_refused(tmp_path: Path) -> None:
    """LAB_DEVICES=3-1 raises ConfigError, with 1-3 as hint."""
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, "LAB_DEVICES=0,3-1", "nvidia", host(devices=devices("0", "1")))
    assert "3-1" in caught.value.message
    assert "1-3" in caught.value.hint


GAUDIS = tuple(
    Device(id=str(i), path=f"/dev/accel/accel{i}", pci=f"0000:1{i}:00.0", module=str(3 - i)) for i in range(4)
)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("1,3", ["1", "3"]),
        ("2-3", ["2", "3"]),
        ("3, 0", ["3", "0"]),
        ("module:3,module:0", ["0", "3"]),
        ("0000:12:00.0,accel1", ["2", "1"]),
        ("00000000:12:00.0,/dev/dri/by-path/pci-0000:10:00.0-render", ["2", "0"]),
        ("1,/dev/accel/accel1,2", ["1", "2"]),
    ],
)
def test_devices_are_picked_by_any_of_their_names_and_once(tmp_path: Path, text: str, ids: list[str]) -> None:
    """LAB_DEVICES picks devices by id, range, module, PCI address or path, each once."""
    of = build(tmp_path, f'LAB_NODES=1\nLAB_DEVICES="{text}"', "habana", host(devices=GAUDIS))
    assert [device.id for device in of.nodes[0].devices.devices] == ids
    assert of.nodes[0].slots == len(ids)


def test_a_device_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    """An unknown device raises ConfigError, with the host's devices as hint."""
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, "LAB_DEVICES=0-4", "habana", host(devices=GAUDIS))
    assert "local has no habana device `4`" in caught.value.message
    assert "it has 0, 1, 2, 3" in caught.value.hint


def test_a_cpu_lab_has_no_devices_to_pick(tmp_path: Path) -> None:
    """LAB_DEVICES for a cpu lab raises ConfigError."""
    with pytest.raises(ConfigError, match="a CPU lab has none"):
        build(tmp_path, "LAB_DEVICES=0")


def test_a_cpu_node_has_one_rank_unless_asked_for_more(tmp_path: Path) -> None:
    """A cpu node has one slot, or LAB_SLOTS."""
    assert [node.slots for node in build(tmp_path, "LAB_NODES=2").nodes] == [1, 1]
    assert [node.slots for node in build(tmp_path, "LAB_NODES=2\nLAB_SLOTS=3").nodes] == [3, 3]


# --- the rest ------------------------------------------------------------------------------------------------


def test_the_image_is_the_accelerators_own_unless_named(tmp_path: Path) -> None:
    """The image is labctl/cpu, or LAB_IMAGE."""
    assert build(tmp_path).image == "labctl/cpu"
    assert build(tmp_path, "LAB_IMAGE=mine:1").image == "mine:1"


def test_clones_are_mounted_where_the_scripts_expect_them(tmp_path: Path) -> None:
    """The mounts are cache, clones, workloads, runs and outputs below PROJECT_PATH; clones and records read-only."""
    clones = "HOST_REPO_PATH=/srv/clone\nHOST_OPTIMUM_HABANA_PATH=/srv/habana"
    of = build(tmp_path, f"{clones}\nHOST_CACHE_PATH=/srv/cache\nPROJECT_PATH=/project")
    assert {mount.source: (mount.target, mount.read_only) for mount in of.mounts} == {
        "/srv/cache": ("/project/.cache", False),
        "/srv/clone": ("/project/DeepSpeedExamples", True),
        "/srv/habana": ("/project/optimum-habana", True),
        "/srv/lab/workloads": ("/project/workloads", True),
        "/srv/lab/runs": ("/project/runs", True),
        "/srv/lab/runs/notebooks": ("/project/runs/notebooks", False),
        "/srv/lab/runs/.outputs": ("/project/outputs", False),
        "/srv/lab/.lab/home": ("/home/lab/.kept", False),
    }


def test_those_clones_that_are_here_are_sent_to_hosts(tmp_path: Path) -> None:
    """A clone that exists here is sent to hosts; one that does not is not."""
    (tmp_path / "mine").mkdir()
    of = build(tmp_path, f"HOST_REPO_PATH={tmp_path}/mine\nHOST_OPTIMUM_HABANA_PATH={tmp_path}/on-hosts-only")
    assert of.clones == ((f"{tmp_path}/mine", "clones/DeepSpeedExamples"),)


def test_extra_environment_wins(tmp_path: Path) -> None:
    """LAB_ENV_HF_HOME replaces the default HF_HOME; other LAB_ENV_ variables are added."""
    of = build(tmp_path, "LAB_ENV_HF_HOME=/elsewhere\nLAB_ENV_MORE='a b'")
    assert (dict(of.environment)["HF_HOME"], dict(of.environment)["MORE"]) == ("/elsewhere", "a b")


# --- secrets -------------------------------------------------------------------------------------------------


def test_secrets_are_kept_out_of_the_environment(tmp_path: Path) -> None:
    """HF_TOKEN and LAB_ENV_WANDB_API_KEY are secrets, not variables or in repr(); HF_TOKEN_PATH is a variable."""
    of = build(tmp_path, "HF_TOKEN=CANARY1\nLAB_ENV_WANDB_API_KEY=CANARY2\nLAB_ENV_PLAIN=shown")
    assert [name for name, _ in of.secrets] == ["hf_token", "environment"]
    assert "CANARY" not in repr(of)
    assert "CANARY" not in f"{of.environment}"
    assert dict(of.environment)["PLAIN"] == "shown"
    assert dict(of.environment)["HF_TOKEN_PATH"] == "/run/secrets/hf_token"  # noqa: S105


def test_a_password_in_a_url_is_a_secret_and_hidden_also_alone(tmp_path: Path) -> None:
    """A variable with a password in its URL is a secret; the password is hidden also alone and decoded."""
    url = "postgres://ann:CANARY%2F1@db:5432/x"
    of = build(tmp_path, f"LAB_ENV_DATABASE_URL={url}\nLAB_ENV_ENDPOINT=https://hub.example:8443/a\n")
    assert [name for name, _ in of.secrets] == ["environment"]
    assert dict(of.environment)["ENDPOINT"] == "https://hub.example:8443/a"
    assert "DATABASE_URL" not in dict(of.environment)
    assert "CANARY" not in repr(of)
    assert [value.reveal() for value in of.hidden] == [url, "CANARY%2F1", "CANARY/1"]


def test_without_secrets_there_is_no_secret_file(tmp_path: Path) -> None:
    """Without secrets the lab has none, and no HF_TOKEN_PATH."""
    of = build(tmp_path)
    assert of.secrets == ()
    assert "HF_TOKEN_PATH" not in dict(of.environment)


def test_secret_variables_reach_bash_byte_for_byte() -> None:
    """shell_exports() is read by bash with each value unchanged, and its text hides them."""
    values = ["a'b", "$(touch x) `id`", "two\nlines\n", '"', "\\n", " padded ", "ü😀", "!x", "-n"]
    exports = spec.shell_exports(tuple((f"V{index}", Secret(value)) for index, value in enumerate(values)))
    assert "touch" not in f"{exports}"
    script = exports.reveal() + "".join(f'printf "%s\\0" "$V{index}"\n' for index in range(len(values)))
    done = subprocess.run(["bash", "--norc"], input=script.encode(), capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == values


def test_open_mpi_is_told_a_network_where_hosts_name_their_interfaces_differently() -> None:
    """addresses is the interface if all hosts have the same, else the smallest network of their addresses."""
    same = tuple(host(name=f"h{number}", address=f"10.0.1.{number}", interface="ens3") for number in (4, 7))
    assert small(2, hosts=same).addresses == "ens3"
    differing = (same[0], host(name="h7", address="10.0.1.7", interface="bond0"))
    of = small(2, hosts=differing)
    assert (of.interfaces, of.addresses) == ("ens3,bond0", "10.0.1.4/30")
