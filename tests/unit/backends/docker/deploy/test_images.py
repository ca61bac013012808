"""Sources of a lab's image, with an engine that has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace
from support.builders import cluster_of
from support.fake_backend import FakeBackend

from labctl.accelerators import habana
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.deploy import images
from labctl.backends.docker.hosts.ssh import LocalConnection
from labctl.backends.docker.images import build, catalog, distribute, foreign, local, packages
from labctl.backends.docker.lab.cluster import Cluster
from labctl.backends.docker.multi import MultiHostEngine
from labctl.backends.state import ObservedState
from labctl.config.context import Context
from labctl.config.inventory import InventoryHost
from labctl.errors import ConfigError, HostError
from labctl.model import HERE

MADE_OF_ANOTHER = "labctl/from:0123456789ab"
WITH_PACKAGES = "labctl/packages:0123456789ab"


def at(directory: Path, **flags: str) -> Context:
    """Return a context with accelerator cpu and these flags."""
    return Context(directory=directory, environ={}, emit=lambda _: None, flags={"LAB_ACCELERATOR": "cpu", **flags})


def on_hosts(context: Context) -> Cluster:
    """Return a cluster of this lab on two reachable hosts with fake engines."""
    engines = {name: FakeBackend() for name in ("h1", "h2")}
    return Cluster(
        settings=context.settings(),
        directory=context.directory,
        engine=MultiHostEngine(cast(Any, engines), {}),
        daemons=cast(dict[str, DockerEngine], engines),
        inventory=tuple(InventoryHost(name=name) for name in engines),
        connections={name: LocalConnection() for name in engines},
    )


@pytest.fixture
def nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all engines lack the image; fail the test on a build or a pull."""
    monkeypatch.setattr(local, "described", lambda _: None)
    monkeypatch.setattr(distribute, "preview", lambda image, how, _: f"{how} image {image} on h1, h2")
    monkeypatch.setattr(images, "image_targets", lambda *_: None)
    monkeypatch.setattr(build, "build", lambda *_: pytest.fail("built"))
    monkeypatch.setattr(DockerEngine, "pull", lambda *_: pytest.fail("pulled"))
    monkeypatch.setattr(DockerEngine, "image", lambda *_: None)


@pytest.mark.parametrize(
    ("image", "hint"), [(MADE_OF_ANOTHER, "labctl build --from IMAGE"), (WITH_PACKAGES, "unset LAB_IMAGE")]
)
def test_labctl_build_does_not_write_over_an_image_whose_name_says_what_it_is_of(
    nothing_here: None, tmp_path: Path, image: str, hint: str
) -> None:
    """`labctl build` raises HostError for a LAB_IMAGE made by --from or with packages, with advice as hint."""
    context = at(tmp_path, LAB_IMAGE=image)
    with pytest.raises(HostError, match=f"LAB_IMAGE is {image}, which `labctl build` does not make") as caught:
        images.build_image(context, cluster_of(context))
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("added", [{}, {"LAB_PACKAGES": "nltk"}])
@pytest.mark.parametrize(
    ("image", "hint"), [(MADE_OF_ANOTHER, "labctl build --from IMAGE"), (WITH_PACKAGES, "unset LAB_IMAGE")]
)
def test_no_registry_is_asked_for_an_image_that_was_made_here(
    nothing_here: None, tmp_path: Path, image: str, hint: str, added: dict[str, str]
) -> None:
    """With a missing labctl/from or labctl/packages image, checks and plan raise HostError instead of pulling."""
    context = at(tmp_path, LAB_IMAGE=image, **added)
    for refused in (
        lambda: images.require_buildable(cluster_of(context)),
        lambda: images.plan_images(context, on_hosts(context), ObservedState()),
        lambda: build.ensure_base(image, build.request(context.settings(), "cpu", image, tmp_path, {}), print),
    ):
        with pytest.raises(HostError, match=f"^image {image} not found$") as caught:
            refused()
        assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("how", "image", "why"),
    [
        ("pull", MADE_OF_ANOTHER, f"LAB_IMAGE_FROM=pull: no registry has image {MADE_OF_ANOTHER}"),
        ("build", MADE_OF_ANOTHER, "LAB_IMAGE_FROM=build builds only labctl's own images"),
        ("build", "mine:1", "LAB_IMAGE_FROM=build builds only labctl's own images, and LAB_IMAGE is mine:1"),
    ],
)
def test_a_way_in_which_hosts_would_get_another_image_or_none_is_refused(
    nothing_here: None, tmp_path: Path, how: str, image: str, why: str
) -> None:
    """plan_images() raises ConfigError for LAB_IMAGE_FROM=pull or build with an image that this cannot give."""
    context = at(tmp_path, LAB_IMAGE=image, LAB_IMAGE_FROM=how)
    with pytest.raises(ConfigError, match=f"^{why}") as caught:
        images.plan_images(context, on_hosts(context), ObservedState())
    assert "LAB_IMAGE_FROM=send" in caught.value.hint


@pytest.mark.parametrize(
    ("how", "settings"),
    [
        ("build", {}),
        ("build", {"LAB_IMAGE": "labctl/horovod"}),
        ("build", {"LAB_IMAGE": "mine:1", "LAB_PACKAGES": "nltk"}),
        ("pull", {"LAB_IMAGE": "mine:1"}),
        ("send", {"LAB_IMAGE": "mine:1"}),
    ],
)
def test_what_hosts_can_build_or_pull_is_planned(
    nothing_here: None, tmp_path: Path, how: str, settings: dict[str, str]
) -> None:
    """plan_images() gives one step with the lab's image for a way that hosts can use."""
    context = at(tmp_path, LAB_IMAGE_FROM=how, **settings)
    ((step,), failed) = images.plan_images(context, on_hosts(context), ObservedState())
    assert (step.image, failed) == (on_hosts(context).image, {})


class EngineHere(FakeBackend):
    """This machine's engine: images with labels and ids."""

    def __init__(self, images: dict[str, dict[str, str]]) -> None:
        """Have these images, by name, with their labels."""
        super().__init__()
        self.images = images

    def image(self, image: str) -> dict[str, Any] | None:
        """Return an image's description with entrypoint, labels and id, None if it does not exist."""
        config = {"Entrypoint": [foreign.PROGRAM], "Labels": self.images.get(image)}
        return {"Id": f"id of {image}", "Size": 1, "Config": config} if image in self.images else None

    def image_id(self, image: str) -> str | None:
        return f"id of {image}" if image in self.images else None

    def image_labels(self, image: str) -> dict[str, str]:
        return self.images.get(image, {})


def here(context: Context, images_here: dict[str, dict[str, str]]) -> Cluster:
    """Return the cluster on this machine whose engine has these images."""
    engine = EngineHere(images_here)
    return replace(cluster_of(context, engine), daemons=cast(dict[str, DockerEngine], {HERE: engine}))


def current() -> dict[str, str]:
    """Return the label that an up-to-date labctl/cpu has."""
    return {catalog.INPUTS_LABEL: catalog.inputs_hash("cpu")}


@pytest.mark.parametrize(
    ("images_here", "first"),
    [
        ({}, ", and first labctl/cpu, which is not found"),
        ({"labctl/cpu": {catalog.INPUTS_LABEL: "of other files"}}, ", and first labctl/cpu, which is out of date"),
        ({"labctl/cpu": current()}, ""),
    ],
)
def test_the_plan_says_the_image_below_the_packages_where_that_is_built_too(
    tmp_path: Path, images_here: dict[str, dict[str, str]], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step to build an image with packages also names labctl/cpu if that is missing or out of date."""
    context = at(tmp_path, LAB_PACKAGES="nltk")
    cluster = here(context, images_here)
    ((step,), _) = images.plan_images(context, cluster, ObservedState())
    assert step.words == f"build image {cluster.image}{first}"
    # With hosts it is this machine's engine that builds.
    monkeypatch.setattr(local, "described", lambda _: None)
    monkeypatch.setattr(distribute, "preview", lambda image, *_: f"build image {image} here and send it to h1, h2")
    monkeypatch.setattr(images, "image_targets", lambda *_: None)
    monkeypatch.setattr(images, "require_buildable", lambda _: None)
    monkeypatch.setattr(images, "DockerEngine", lambda: EngineHere(images_here))
    ((step,), _) = images.plan_images(context, on_hosts(context), ObservedState())
    assert step.words == f"build image {cluster.image} here and send it to h1, h2{first}"


@pytest.mark.parametrize(
    ("labels", "refresh", "built"),
    [
        ({}, False, ["labctl/cpu"]),
        (current(), False, []),
        (current(), True, ["labctl/cpu"]),
    ],
)
def test_a_build_follows_the_settings_of_the_image_below_the_packages(
    tmp_path: Path, labels: dict[str, str], refresh: bool, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """build_image() builds labctl/cpu before the packages, unless it is current and not refreshed."""
    messages: list[str] = []
    context = at(tmp_path, LAB_PACKAGES="nltk", LAB_TORCH_INDEX="https://torch.example/whl")
    monkeypatch.setattr(DockerEngine, "image_labels", lambda *_: labels)
    monkeypatch.setattr(build, "build", lambda request, _: messages.extend((request.tag, request.torch_index)))
    monkeypatch.setattr(packages, "make", lambda request, *_: messages.extend((request.tag,)))
    images.build_image(context, cluster_of(context), refresh=refresh)
    below = ["labctl/cpu", "https://torch.example/whl"] if built else []
    assert messages == [*below, cluster_of(context).image]


@pytest.mark.parametrize(
    ("labels", "warned"),
    [
        ({catalog.BASE_ID_LABEL: "id of mine:1"}, []),
        ({catalog.BASE_ID_LABEL: "id of what it was"}, ["on an earlier mine:1; rebuild it with `labctl build`"]),
    ],
)
def test_an_image_of_what_a_name_meant_earlier_is_said(
    tmp_path: Path, labels: dict[str, str], warned: list[str]
) -> None:
    """check_image() warns if the image's label of the base id differs from the base's current id."""
    messages: list[str] = []
    flags = {"LAB_ACCELERATOR": "cpu", "LAB_IMAGE": "mine:1", "LAB_PACKAGES": "nltk"}
    context = Context(directory=tmp_path, environ={}, emit=lambda event: messages.append(event.text), flags=flags)
    cluster = here(context, {})
    cast(EngineHere, cluster.engine).images |= {"mine:1": {}, cluster.image: labels}
    images.check_image(context, cluster)
    assert [line.partition(" was built ")[2] for line in messages] == warned


def test_an_image_with_packages_is_judged_by_what_labctls_own_was_built_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image with packages on a Gaudi base of release 1.20, with driver 1.22, raises HostError."""
    monkeypatch.setattr(habana, "installed_release", lambda: "1.22.0")
    base = "vault.habana.ai/gaudi-docker/1.20.0/ubuntu22.04/habanalabs/pytorch-installer-2.6.0:latest"
    context = at(tmp_path, LAB_PACKAGES="nltk")
    monkeypatch.setattr(Cluster, "accelerator", "habana")
    cluster = here(context, {})
    cast(EngineHere, cluster.engine).images |= {cluster.image: {catalog.BASE_LABEL: base}}
    with pytest.raises(HostError, match="must be of one release"):
        images.check_image(context, cluster)


def test_the_command_that_builds_an_image_names_the_workload_that_it_is_of(tmp_path: Path) -> None:
    """build_command() has `--workload hello` if the packages come from that workload."""
    settings = at(tmp_path).settings()
    by_workload = settings.with_value("LAB_PACKAGES", "nltk", "workload hello")
    assert [images.build_command(loaded) for loaded in (settings, by_workload)] == [
        "labctl build",
        "labctl build --workload hello",
    ]


def test_the_folder_of_a_dockerfile_is_read_once_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two reads of cluster.image compute the tag once."""
    read: list[str] = []

    def tag(base: str, _: object) -> str:
        read.append(base)
        return f"{base}-made"

    monkeypatch.setattr(packages, "tag", tag)
    cluster = cluster_of(at(tmp_path))
    assert [cluster.image, cluster.image] == ["labctl/cpu-made"] * 2
    assert read == ["labctl/cpu"]


@pytest.mark.parametrize(
    ("image", "accelerator", "warned"),
    [
        ("labctl/cpu", "nvidia", True),
        ("labctl/nvidia-horovod:latest", "habana", True),
        ("labctl/nvidia-horovod", "nvidia", False),
        ("labctl/nvidia", "cpu", False),
        ("mine", "nvidia", False),
        ("", "nvidia", False),
    ],
)
def test_an_image_for_another_accelerator_is_warned_of(
    tmp_path: Path, image: str, accelerator: str, warned: bool
) -> None:
    """Name labctl's image of another accelerator in LAB_IMAGE: a warning, not on nodes without devices."""
    warning = images.unfit_for(at(tmp_path, LAB_IMAGE=image).settings(), accelerator)
    assert warning.startswith(f"LAB_IMAGE is {image}, and the nodes have {accelerator} devices") is warned
    assert bool(warning) is warned
