"""What every accelerator module must do, whichever they are."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import get_args

import pytest
from support.builders import devices as made
from support.builders import host

from labctl import accelerators
from labctl.config import settings
from labctl.errors import ConfigError
from labctl.model import Accelerator, Device, DeviceMapping, Host

NAMES = accelerators.names()
DEVICES = {"cpu": (), "intel": ("/dev/dri/renderD128", "/dev/dri/renderD129")}
UVERBS = "/dev/infiniband/uverbs0"
FULL = host(devices=made("0", "1"), groups=(44, 109), infiniband=(UVERBS,), gaudinet="/etc/gaudinet.json")


def devices(name: str) -> tuple[Device, ...]:
    return made(*DEVICES.get(name, ("0", "1")))


def detect(root: Path) -> tuple[str, tuple[str, ...]]:
    """What `auto` picks, and the ids of its devices."""
    choice = accelerators.detect_accelerator(root)
    return choice.name, tuple(device.id for device in choice.devices)


def put(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_names_are_the_ones_that_settings_and_model_know() -> None:
    assert set(NAMES) == set(get_args(Accelerator)) == set(settings.ACCELERATORS) - {"auto"}
    assert set(accelerators.PREFERENCE) == set(NAMES)


@pytest.mark.parametrize("name", ["tpu", "", "../cpu", "__init__", "CPU"])
def test_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        accelerators.get(name)
    assert f"`{name}`" in caught.value.message
    assert caught.value.hint == f"known: {', '.join(NAMES)}"


@pytest.mark.parametrize("name", NAMES)
def test_module_keeps_the_protocol(name: str) -> None:
    module = accelerators.get(name)
    assert list(inspect.signature(module.find).parameters) == ["root"]
    assert list(inspect.signature(module.mapping).parameters) == ["host", "devices"]
    assert isinstance(module.mapping(FULL, devices(name)), DeviceMapping)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", [FULL, host()], ids=["full", "bare"])
def test_mapping_is_pure(name: str, where: Host) -> None:
    module, before, given = accelerators.get(name), copy.deepcopy(where), devices(name)
    assert module.mapping(where, given) == module.mapping(where, given)
    assert where == before
    assert given == devices(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_capability_has_a_reason_and_none_is_broad(name: str) -> None:
    for capability, reason in accelerators.get(name).mapping(FULL, devices(name)).cap_add:
        assert reason
        assert capability in {"SYS_NICE", "IPC_LOCK"}


@pytest.mark.parametrize("name", NAMES)
def test_without_infiniband_nothing_is_asked_for_it(name: str) -> None:
    mapping = accelerators.get(name).mapping(host(), devices(name))
    assert not [path for path in mapping.paths if "infiniband" in path]
    assert "IPC_LOCK" not in dict(mapping.cap_add)


@pytest.mark.parametrize("name", ["nvidia", "habana", "intel"])
def test_with_infiniband_the_node_gets_it_and_may_pin_memory(name: str) -> None:
    mapping = accelerators.get(name).mapping(FULL, devices(name))
    assert UVERBS in mapping.paths
    assert "IPC_LOCK" in dict(mapping.cap_add)


@pytest.mark.parametrize("name", NAMES)
def test_a_bare_machine_has_no_devices(name: str, tmp_path: Path) -> None:
    assert accelerators.get(name).find(tmp_path) == ()


def test_a_bare_machine_is_a_cpu_lab(tmp_path: Path) -> None:
    assert detect(tmp_path) == ("cpu", ())


# --- each maker's devices ------------------------------------------------------------------------------------


def test_nvidia_counts_cards_not_the_control_files(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "nvidia-caps/x"):
        put(tmp_path / "dev" / name)
    assert detect(tmp_path) == ("nvidia", ("0", "2", "10"))


def test_nvidia_gets_exactly_its_cards() -> None:
    mapping = accelerators.get("nvidia").mapping(host(), made("2", "3"))
    assert (mapping.driver, mapping.requests) == ("nvidia", ("2", "3"))
    assert mapping.runtime is None


def test_nvidia_is_asked_for_as_the_engine_can_be() -> None:
    cdi = accelerators.get("nvidia").mapping(host(request="cdi"), made("2", "3"))
    assert (cdi.driver, cdi.requests) == ("cdi", ("nvidia.com/gpu=2", "nvidia.com/gpu=3"))
    runtime = accelerators.get("nvidia").mapping(host(request="runtime"), made("2", "3"))
    assert (runtime.driver, runtime.requests, runtime.runtime) == ("", (), "nvidia")
    assert dict(runtime.environment)["NVIDIA_VISIBLE_DEVICES"] == "2,3"
    assert dict(cdi.environment)["NVIDIA_VISIBLE_DEVICES"] == "void"


def habana_card(root: Path, index: int, driver: str = "habanalabs") -> None:
    put(root / f"dev/accel/accel{index}")
    put(root / f"dev/accel/accel_controlD{index}")
    (root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
    (root / f"sys/class/accel/accel{index}/device").mkdir(parents=True)
    (root / f"sys/class/accel/accel{index}/device/driver").symlink_to(root / f"sys/bus/pci/drivers/{driver}")


def test_gaudis_are_found_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for index in (10, 0, 2):
        habana_card(tmp_path, index)
    assert detect(tmp_path) == ("habana", ("0", "2", "10"))


def test_an_npu_is_not_a_gaudi(tmp_path: Path) -> None:
    habana_card(tmp_path, 0, driver="intel_vpu")
    habana_card(tmp_path, 1)
    assert [device.id for device in accelerators.get("habana").find(tmp_path)] == ["1"]


def test_an_accelerator_without_a_driver_is_not_a_gaudi(tmp_path: Path) -> None:
    put(tmp_path / "dev/accel/accel0")
    assert accelerators.get("habana").find(tmp_path) == ()


def test_habana_gets_what_its_run_line_asks_for() -> None:
    mapping = accelerators.get("habana").mapping(FULL, made("4", "5"))
    assert mapping.runtime == "habana"
    assert dict(mapping.environment)["HABANA_VISIBLE_DEVICES"] == "4,5"
    assert dict(mapping.environment)["OMPI_MCA_btl_vader_single_copy_mechanism"] == "none"
    assert "SYS_NICE" in dict(mapping.cap_add)
    assert [(mount.source, mount.target, mount.read_only) for mount in mapping.mounts] == [
        ("/etc/gaudinet.json", "/etc/habanalabs/gaudinet.json", True)
    ]
    assert (
        accelerators.get("habana")
        .mapping(
            host(),
            made(
                "4",
            ),
        )
        .mounts
        == ()
    )


def render_node(root: Path, number: int, vendor: str) -> None:
    put(root / f"dev/dri/renderD{number}")
    put(root / f"sys/class/drm/renderD{number}/device/vendor", f"{vendor}\n")


def test_an_amd_card_is_not_intel(tmp_path: Path) -> None:
    render_node(tmp_path, 128, "0x1002")
    render_node(tmp_path, 129, "0x8086")
    put(tmp_path / "dev/dri/card0")
    assert detect(tmp_path) == ("intel", ("/dev/dri/renderD129",))


def test_a_render_node_without_a_vendor_is_not_intel(tmp_path: Path) -> None:
    put(tmp_path / "dev/dri/renderD128")
    assert accelerators.get("intel").find(tmp_path) == ()


def test_gaudis_are_asked_for_by_module_where_all_have_one() -> None:
    cards = tuple(Device(id=str(index), path=f"/dev/accel/accel{index}", module=str(7 - index)) for index in (0, 1))
    assert dict(accelerators.get("habana").mapping(host(), cards).environment)["HABANA_VISIBLE_MODULES"] == "7,6"
    lacking = (cards[0], Device(id="1", path="/dev/accel/accel1"))
    assert "HABANA_VISIBLE_MODULES" not in dict(accelerators.get("habana").mapping(host(), lacking).environment)


def test_intel_gets_its_render_nodes_its_groups_and_numbers_from_zero() -> None:
    link = "pci-0000:03:00.0-render"
    cards = (Device(id="/dev/dri/renderD129", path="/dev/dri/renderD129", link=link), *made("/dev/dri/renderD130"))
    mapping = accelerators.get("intel").mapping(host(groups=(44, 109)), cards)
    assert mapping.paths == ("/dev/dri/renderD129", "/dev/dri/renderD130")
    assert mapping.group_add == (44, 109)
    assert dict(mapping.environment)["ZE_AFFINITY_MASK"] == "0,1"
    assert mapping.links == ((link, "../renderD129"),)


def test_cards_of_two_makers_go_by_preference(tmp_path: Path) -> None:
    render_node(tmp_path, 128, "0x8086")
    habana_card(tmp_path, 0)
    assert accelerators.detect_accelerator(tmp_path).name == "habana"
    put(tmp_path / "dev/nvidia0")
    assert accelerators.detect_accelerator(tmp_path).name == "nvidia"
