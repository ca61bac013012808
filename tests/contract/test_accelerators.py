"""The contract of accelerator modules."""

from __future__ import annotations

import copy
import fcntl
import inspect
import json
import re
import subprocess
from pathlib import Path
from typing import cast

import pytest
import yaml
from support import made_up, sysfs
from support.builders import devices as made
from support.builders import host

from labctl import accelerators, naming
from labctl.accelerators import observe
from labctl.backends import spec
from labctl.backends.docker.checks import devices as checks
from labctl.backends.docker.checks.examination import CheckContext
from labctl.backends.docker.compose import render
from labctl.backends.docker.engine import Engine
from labctl.backends.docker.hosts import facts
from labctl.backends.docker.lab import capabilities, cluster
from labctl.backends.docker.lab import devices as device_listing
from labctl.config import settings
from labctl.errors import ConfigError
from labctl.model import Device, DeviceMapping, Host, Lab
from labctl.system import files, hostdump, procfs

NAMES = tuple(sorted(accelerators.modules()))
VENDORS = tuple(name for name in NAMES if name != accelerators.CPU)
UVERBS = "/dev/infiniband/uverbs0"
FULL = host(devices=made("0", "1"), groups=(44, 109), infiniband=(UVERBS,), files=("/etc/gaudinet.json",))


def devices(name: str) -> tuple[Device, ...]:
    """Return no devices for cpu, else devices `0` and `1`."""
    return () if name == accelerators.CPU else made("0", "1")


def detect(root: Path) -> tuple[str, tuple[str, ...]]:
    """Return the name of the accelerator that `auto` picks on the host at this root, and the ids of its devices."""
    choice = accelerators.detect_accelerator(root)
    return choice.name, tuple(device.id for device in choice.devices)


def put(path: Path, text: str = "") -> None:
    """Write a text file, empty by default; make its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_names_are_the_ones_that_settings_know() -> None:
    """Modules and `auto` are the accelerators that settings accept; cpu is the last module."""
    assert {*NAMES, "auto"} == {*settings.accelerators_known()}
    assert [*accelerators.modules()][-1] == accelerators.CPU


@pytest.mark.parametrize("name", ["tpu", "", "../cpu", "__init__", "CPU"])
def test_unknown_name_lists_the_known(name: str) -> None:
    """get() raises ConfigError that quotes the name; its hint lists all modules."""
    with pytest.raises(ConfigError) as caught:
        accelerators.get(name)
    assert f"`{name}`" in caught.value.message
    assert caught.value.hint == f"known: {', '.join(NAMES)}"


@pytest.mark.parametrize("name", NAMES)
def test_module_keeps_the_protocol(name: str) -> None:
    """find() takes `root`, mapping() takes `host` and `devices` and returns a DeviceMapping."""
    module = accelerators.get(name)
    assert list(inspect.signature(module.find).parameters) == ["root"]
    assert list(inspect.signature(module.mapping).parameters) == ["host", "devices"]
    assert isinstance(module.mapping(FULL, devices(name)), DeviceMapping)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", [FULL, host()], ids=["full", "bare"])
def test_mapping_is_pure(name: str, where: Host) -> None:
    """Two calls of mapping() return the same and do not change their arguments."""
    module, before, given = accelerators.get(name), copy.deepcopy(where), devices(name)
    assert module.mapping(where, given) == module.mapping(where, given)
    assert where == before
    assert given == devices(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_capability_has_a_reason_and_none_is_broad(name: str) -> None:
    """mapping().cap_add has only SYS_NICE and IPC_LOCK, each with a reason that is not empty."""
    for capability, reason in accelerators.get(name).mapping(FULL, devices(name)).cap_add:
        assert reason
        assert capability in {"SYS_NICE", "IPC_LOCK"}


@pytest.mark.parametrize("name", NAMES)
def test_without_infiniband_nothing_is_asked_for_it(name: str) -> None:
    """On a host without InfiniBand, mapping() has no infiniband path and no IPC_LOCK."""
    mapping = accelerators.get(name).mapping(host(), devices(name))
    assert not [path for path in mapping.paths if "infiniband" in path]
    assert "IPC_LOCK" not in dict(mapping.cap_add)


@pytest.mark.parametrize("name", VENDORS)
def test_with_infiniband_the_node_gets_it_and_may_pin_memory(name: str) -> None:
    """On a host with /dev/infiniband/uverbs0, mapping() of each vendor has this path and IPC_LOCK."""
    mapping = accelerators.get(name).mapping(FULL, devices(name))
    assert UVERBS in mapping.paths
    assert "IPC_LOCK" in dict(mapping.cap_add)


@pytest.mark.parametrize("name", NAMES)
def test_a_bare_machine_has_no_devices(name: str, tmp_path: Path) -> None:
    """find() returns an empty tuple for an empty root."""
    assert accelerators.get(name).find(tmp_path) == ()


def test_every_sampler_is_an_accelerators() -> None:
    """Each docker/*_sampler.py is named after a vendor's module."""
    samplers = {path.stem.removesuffix("_sampler") for path in files.path("docker").glob("*_sampler.py")}
    assert samplers <= {*VENDORS}


def test_a_bare_machine_is_a_cpu_lab(tmp_path: Path) -> None:
    """`auto` picks cpu, without devices, for an empty root."""
    assert detect(tmp_path) == ("cpu", ())


# --- each maker's devices ------------------------------------------------------------------------------------


def test_nvidia_counts_cards_not_the_control_files(tmp_path: Path) -> None:
    """Of /dev/nvidia* only files that end in a number are devices, in numeric order: 0, 2, 10."""
    for name in ("nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "nvidia-caps/x"):
        put(tmp_path / "dev" / name)
    assert detect(tmp_path) == ("nvidia", ("0", "2", "10"))


def test_nvidia_gets_exactly_its_cards() -> None:
    """The mapping of cards 2 and 3 requests driver `nvidia` with these two ids and no runtime."""
    mapping = accelerators.get("nvidia").mapping(host(), made("2", "3"))
    assert (mapping.driver, mapping.requests) == ("nvidia", ("2", "3"))
    assert mapping.runtime is None


def test_nvidia_is_asked_for_as_the_engine_can_be() -> None:
    """Request by CDI names nvidia.com/gpu=N; request by runtime sets NVIDIA_VISIBLE_DEVICES and runtime `nvidia`."""
    cdi = accelerators.get("nvidia").mapping(host(request="cdi"), made("2", "3"))
    assert (cdi.driver, cdi.requests) == ("cdi", ("nvidia.com/gpu=2", "nvidia.com/gpu=3"))
    runtime = accelerators.get("nvidia").mapping(host(request="runtime"), made("2", "3"))
    assert (runtime.driver, runtime.requests, runtime.runtime) == ("", (), "nvidia")
    assert dict(runtime.environment)["NVIDIA_VISIBLE_DEVICES"] == "2,3"
    assert dict(cdi.environment)["NVIDIA_VISIBLE_DEVICES"] == "void"


def habana_card(root: Path, index: int, driver: str = "habanalabs") -> None:
    """Make a card's files in /dev/accel and its link to the driver, below this root."""
    put(root / f"dev/accel/accel{index}")
    put(root / f"dev/accel/accel_controlD{index}")
    (root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
    (root / f"sys/class/accel/accel{index}/device").mkdir(parents=True)
    (root / f"sys/class/accel/accel{index}/device/driver").symlink_to(root / f"sys/bus/pci/drivers/{driver}")


def test_gaudis_are_found_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """`auto` finds Gaudi cards 10, 0 and 2 as 0, 2, 10."""
    for index in (10, 0, 2):
        habana_card(tmp_path, index)
    assert detect(tmp_path) == ("habana", ("0", "2", "10"))


def test_an_npu_is_not_a_gaudi(tmp_path: Path) -> None:
    """Of two accelerators, one with driver intel_vpu, habana's find() returns only the one with driver habanalabs."""
    habana_card(tmp_path, 0, driver="intel_vpu")
    habana_card(tmp_path, 1)
    assert [device.id for device in accelerators.get("habana").find(tmp_path)] == ["1"]


def test_an_accelerator_without_a_driver_is_not_a_gaudi(tmp_path: Path) -> None:
    """habana's find() returns nothing for /dev/accel/accel0 without a driver link."""
    put(tmp_path / "dev/accel/accel0")
    assert accelerators.get("habana").find(tmp_path) == ()


def test_habana_gets_what_its_run_line_asks_for() -> None:
    """habana's mapping has its runtime, variables, SYS_NICE, and mounts gaudinet.json only if the host has it."""
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
    """Make the file of a DRM render node and its PCI vendor id, below this root."""
    put(root / f"dev/dri/renderD{number}")
    put(root / f"sys/class/drm/renderD{number}/device/vendor", f"{vendor}\n")


def test_an_amd_card_is_not_intel(tmp_path: Path) -> None:
    """Of render nodes of AMD and Intel, and a card file, `auto` finds only Intel's render node."""
    render_node(tmp_path, 128, "0x1002")
    render_node(tmp_path, 129, "0x8086")
    put(tmp_path / "dev/dri/card0")
    assert detect(tmp_path) == ("intel", ("/dev/dri/renderD129",))


def test_a_render_node_without_a_vendor_is_not_intel(tmp_path: Path) -> None:
    """intel's find() returns nothing for a render node without a vendor file."""
    put(tmp_path / "dev/dri/renderD128")
    assert accelerators.get("intel").find(tmp_path) == ()


def test_gaudis_are_asked_for_by_module_where_all_have_one() -> None:
    """HABANA_VISIBLE_MODULES lists the module ids; it is not set if one card has none."""
    cards = tuple(Device(id=str(index), path=f"/dev/accel/accel{index}", module=str(7 - index)) for index in (0, 1))
    assert dict(accelerators.get("habana").mapping(host(), cards).environment)["HABANA_VISIBLE_MODULES"] == "7,6"
    lacking = (cards[0], Device(id="1", path="/dev/accel/accel1"))
    assert "HABANA_VISIBLE_MODULES" not in dict(accelerators.get("habana").mapping(host(), lacking).environment)


def test_intel_gets_its_render_nodes_its_groups_and_numbers_from_zero() -> None:
    """intel's mapping has the render nodes, the groups, the by-path link, and ZE_AFFINITY_MASK=0,1."""
    link = "pci-0000:03:00.0-render"
    cards = (Device(id="/dev/dri/renderD129", path="/dev/dri/renderD129", link=link), *made("/dev/dri/renderD130"))
    mapping = accelerators.get("intel").mapping(host(groups=(44, 109)), cards)
    assert mapping.paths == ("/dev/dri/renderD129", "/dev/dri/renderD130")
    assert mapping.group_add == (44, 109)
    assert dict(mapping.environment)["ZE_AFFINITY_MASK"] == "0,1"
    assert mapping.links == ((link, "../renderD129"),)


def test_cards_of_two_makers_go_by_preference(tmp_path: Path) -> None:
    """Intel and Gaudi cards: `auto` picks habana; with an NVIDIA card too, nvidia."""
    render_node(tmp_path, 128, "0x8086")
    habana_card(tmp_path, 0)
    assert accelerators.detect_accelerator(tmp_path).name == "habana"
    put(tmp_path / "dev/nvidia0")
    assert accelerators.detect_accelerator(tmp_path).name == "nvidia"


# --- one accelerator more, of one module and one compose fragment --------------------------------------------

CARDS = ("0000:41:00.0", "0000:42:00.0")


@pytest.fixture
def zeta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a host root with two cards of a made-up vendor, add its module and fragment to labctl; return it."""
    monkeypatch.setattr(accelerators, "__path__", [*accelerators.__path__, str(made_up.FOLDER)])
    packaged = files.path

    def path(*parts: str) -> Path:
        """Return the path of the made-up vendor's fragment for zeta.yml.j2, else the packaged file's path."""
        return made_up.FOLDER / parts[-1] if parts[-1] == "zeta.yml.j2" else packaged(*parts)

    monkeypatch.setattr(files, "path", path)
    root = tmp_path / "root"
    sysfs.cores(root, "0-3")
    put(root / "proc/meminfo", "MemTotal: 8000000 kB\n")
    put(root / "etc/passwd", "root:x:0:0::/root:/bin/sh\n")
    put(root / "sys/module/zeta/version", "2.1\n")
    (root / "run/lock").mkdir(parents=True)
    for index, address in enumerate(CARDS):
        put(sysfs.card(root, address, "0x7e7a", driver="zeta", cores=f"{2 * index}-{2 * index + 1}") / "model", "Z1\n")
        put(root / f"dev/zeta{index}")
    return root


def lab_of(root: Path, directory: Path, **values: str) -> Lab:
    """Write .env with image zeta/image; return the lab that is built from it and the devices below this root."""
    directory.mkdir(exist_ok=True)
    (directory / ".env").write_text("LAB_IMAGE=zeta/image\n", encoding="utf-8")
    found = settings.load(directory, {"HOME": str(directory), **values}, {})
    accelerator, here = observe(found.text("LAB_ACCELERATOR"), root)
    return spec.build(found, directory, accelerator, (here,), capabilities.wanted(found))


@pytest.mark.parametrize("wanted", ["auto", "zeta"])
def test_a_made_up_accelerator_is_found_by_its_module_alone(zeta: Path, wanted: str) -> None:
    """observe() by `auto` or by name finds both cards; without a card's device file remarks() tells of it."""
    accelerator, here = observe(wanted, zeta)
    assert (accelerator, here.driver) == ("zeta", "2.1")
    assert [(one.path, one.pci, one.name, one.cpus) for one in here.devices] == [
        ("/dev/zeta0", CARDS[0], "Z1", (0, 1)), ("/dev/zeta1", CARDS[1], "Z1", (2, 3)),
    ]  # fmt: skip
    (zeta / "dev/zeta1").unlink()
    assert accelerators.remarks(zeta) == (f"a Zeta card at {CARDS[1]} has its driver, zeta, but no device file",)


def test_a_made_up_accelerator_is_found_on_another_host(zeta: Path) -> None:
    """The script of host facts, run on this root, finds the same devices and driver as a local look."""
    done = subprocess.run(["sh", "-c", facts.script(), "sh", str(zeta)], capture_output=True, text=True, check=True)
    told = hostdump.read(done.stdout, "blue")
    accelerator, found = cluster.observe("auto", told)
    assert (accelerator, found.devices, found.driver) == ("zeta", observe("auto", zeta)[1].devices, "2.1")


def test_a_made_up_accelerator_is_mapped_into_the_nodes_and_locked(zeta: Path, tmp_path: Path) -> None:
    """Each worker's compose file has its card, variables, fragment key and lease mount; the launcher has no card."""
    lab = lab_of(zeta, tmp_path / "lab", LAB_ACCELERATOR="zeta", LAB_NODES="2")
    rendered = {file.path: file.content for file in render.render(lab)}
    for index, node in enumerate(lab.nodes):
        folder = naming.node_directory(node.name)
        services = yaml.safe_load(rendered[naming.compose_path(node.name)])["services"]
        worker = services[node.name]
        assert worker["devices"] == [f"/dev/zeta{index}:/dev/zeta{index}"]
        assert worker["environment"]["ZETA_CARDS"] == str(index)
        assert worker["oom_score_adj"] == 7
        locks = [mount["source"] for mount in worker["volumes"] if mount["target"].startswith("/etc/lab/leases/")]
        assert locks == [str(naming.lease_path(lab.hosts[0].locks, node.devices.devices[0]))]
        assert json.loads(rendered[f"{folder}/ssh/devices.json"]) == {
            "files": ["zeta[0-9]*"], "tool": ["zeta-smi", "-L"], "line": "Zeta [0-9]+",
        }  # fmt: skip
    launcher = yaml.safe_load(rendered[naming.compose_path("worker-0")])["services"]["launcher"]
    assert launcher["environment"]["ZETA_CARDS"] == "none"
    assert not launcher.keys() & {"devices", "oom_score_adj"}


def test_a_made_up_accelerator_is_leased_and_shown(zeta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device listing shows each card's node, and lab `other` for the card whose lease file it locks."""
    locks = zeta / "locks"
    locks.mkdir()
    monkeypatch.setattr(procfs, "lock_directory", lambda _: str(locks))
    directory = tmp_path / "lab"
    lab_of(zeta, directory, LAB_NODES="2")
    found = settings.load(directory, {}, {})
    held = {"lab": "other", "uid": "0", "node": "worker-0", "directory": "/srv/other", "since": "today"}
    path = naming.lease_path(str(locks), observe("zeta", zeta)[1].devices[1])
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(json.dumps(held))
        stream.flush()
        shown = device_listing.of_host(found, directory, zeta)
    assert (shown.accelerator, shown.drivers) == ("zeta", {"zeta": "2.1"})
    assert [(one.id, one.node, one.leased_by.partition(" of ")[0]) for one in shown.devices] == [
        ("0", "worker-0", ""), ("1", "worker-1", "lab `other`"),
    ]  # fmt: skip


def test_a_made_up_accelerator_is_examined_by_doctor(zeta: Path, tmp_path: Path) -> None:
    """Doctor warns with LAB-ZETA-001 and a fix, until the module's sysctl file is 1."""
    lab = lab_of(zeta, tmp_path / "lab", LAB_NODES="1")
    found = settings.load(tmp_path / "lab", {}, {})
    ctx = CheckContext(lab=lab, settings=found, environ={}, engine=cast(Engine, None), root=zeta)
    (warning,) = checks.vendor_host(ctx)
    assert (warning.code, warning.level, warning.summary) == ("LAB-ZETA-001", "warn", "zeta level unknown for 2 cards")
    assert warning.fix.endswith("sysctl -w kernel.zeta_level=1")
    put(zeta / "proc/sys/kernel/zeta_level", "1\n")
    assert [one.level for one in checks.vendor_host(ctx)] == ["ok"]
    assert {one.code for one in checks.health(ctx)} == {"LAB-DEVICE-003"}


# --- a vendor's name is in its module, its fragment and its image --------------------------------------------

PACKAGE = Path(accelerators.__file__).parents[1]
LIBRARIES = ("nvml", "hl-smi", "amdgpu", "rocm")
OTHERS_PRODUCTS = re.compile(
    r"Intel (?:MPI|SDM)|intel_pstate|optimum.habana|CUDA_CACHE_PATH|\.cache/cuda", re.IGNORECASE
)
"""Others' products with a vendor's word: a launcher, processors, a repository, and a directory of torch's."""
VENDORS_PLACES = ("accelerators/", "workloads/external.py")
"""Places for vendors' names; the last one runs the scripts of optimum-habana."""


def vendors_words() -> re.Pattern[str]:
    """Return a pattern that matches vendors' names, aliases and libraries, in any case, without ``gpu``."""
    aliases = (alias for name in VENDORS for alias in accelerators.get(name).aliases)
    words = {*VENDORS, *aliases, *LIBRARIES} - {"gpu"}
    return re.compile(rf"(?<![a-z])({'|'.join(sorted(words))})", re.IGNORECASE)


def test_no_vendor_is_named_elsewhere() -> None:
    """No line of labctl's sources and templates, outside the accelerators' modules, matches a vendor's word."""
    programs = [
        files.path("docker", name)
        for name in ("labnode.py", "sampler.py", "lookaround.py", "system.sh", "install.sh", "from.sh")
    ]
    agent = (*programs, files.path("compose", "node.yml.j2"))
    vendors = vendors_words()
    sources = (path for path in PACKAGE.rglob("*") if path.suffix in {".py", ".sh", ".j2"})
    own = {path: path.relative_to(PACKAGE).as_posix() for path in sources if "_data" not in path.parts}
    elsewhere = [path for path, name in own.items() if not name.startswith(VENDORS_PLACES)]
    named = [
        f"{path}:{number}: {line}"
        for path in (*elsewhere, *agent)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if vendors.search(OTHERS_PRODUCTS.sub("", line))
    ]
    assert named == []
