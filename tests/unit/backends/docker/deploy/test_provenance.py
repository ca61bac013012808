"""Provenance in a run's record, and the questions to hosts that it takes."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace
from support import builders
from support.builders import host, job, lab, node
from support.fake_backend import FakeBackend

from labctl.backends.docker.deploy import provenance
from labctl.backends.state import ObservedState
from labctl.config.context import Context
from labctl.model import Cache, Device, DeviceMapping, Mount

CARD = Device(id="0", path="/dev/x0", pci="0000:3b:00.0", name="H100", uuid="GPU-1", firmware="96.00.61")
CACHE = Mount(source="/srv/cache", target="/workspace/.cache")
CLONE = Mount(source="/data/clone", target="/clone", read_only=True)


def test_devices_are_told_with_the_driver_of_their_host() -> None:
    """devices() lists id, name, uuid, firmware and the host's driver of a node's devices; none for another node."""
    of = lab((node(devices=DeviceMapping(devices=(CARD,))), node(1)), hosts=(host(driver="550.54.15"),))
    device = {"id": "0", "name": "H100", "uuid": "GPU-1", "firmware": "96.00.61", "driver": "550.54.15"}
    assert [provenance.devices(of, node) for node in of.nodes] == [[device], []]


def test_clones_are_asked_for_where_they_are() -> None:
    """code() asks the host for its mounts, below its own home; code_here() asks this machine for sent clones."""
    far = host(name="far", directory="/home/ann/.labctl/demo", home="/home/ann")
    sent = Mount(source="/home/me/sent", target="/workspace/sent", read_only=True)
    mine = Mount(source="/home/me/mine", target="/mine")
    of = lab(
        (node(host="far"),),
        hosts=(far,),
        home="/home/me",
        mounts=(CACHE, CLONE, sent, mine, Mount(source="/srv/lab/workloads", target="/workspace/workloads")),
        clones=(("/home/me/sent", "clones/sent"),),
    )
    assert provenance.code(of, far) == [("code", "/data/clone"), ("code", "/home/ann/mine")]
    here = provenance.code_here(of, [Path("/srv/lab/workloads/opt"), Path("/home/me/script")])
    assert here == [("code", "/srv/lab/workloads"), ("code", "/home/me/script"), ("code", "/home/me/sent")]


def test_a_run_is_told_by_host_and_node_and_what_is_cached_by_its_newest_revision(tmp_path: Path) -> None:
    """of_run() has images by host, devices by node, and each model's newest revision in the cache, None if absent."""
    cache = tmp_path / "cache"
    (cache / "huggingface/hub/models--facebook--opt-125m/snapshots/27dcfa74").mkdir(parents=True)
    of = lab(directory=tmp_path, mounts=(Mount(source=str(cache), target="/workspace/.cache"),))
    run = job(of, cache=Cache(models=("facebook/opt-125m",), datasets=("glue",)))
    context = Context(directory=tmp_path, environ={"LAB_NAME": "demo"}, emit=lambda _: None, flags={})
    observed = replace(builders.observed(of), image="sha256:1111")
    assert provenance.of_run(of, run, builders.cluster_of(context, FakeBackend()), observed) == {
        "images": {"local": "sha256:1111"},
        "packages": None,
        "devices": {"worker-0": [], "worker-1": []},
        "code": [],
        "cache": {"local": {"model facebook/opt-125m": "27dcfa74", "dataset glue": None}},
    }


def test_a_host_that_does_not_say_is_left_out_of_the_record_not_of_the_run(tmp_path: Path) -> None:
    """A host without a connection has image None and no code in the record, and nothing is raised."""
    of = lab((node(), node(1, host="far")), directory=tmp_path, hosts=(host(), host(name="far")), mounts=(CACHE, CLONE))
    context = Context(directory=tmp_path, environ={"LAB_NAME": "demo"}, emit=lambda _: None, flags={})
    recorded = provenance.of_run(of, job(of), builders.cluster_of(context, FakeBackend()), ObservedState())
    assert (recorded["images"], recorded["code"]) == ({"local": None, "far": None}, [])
