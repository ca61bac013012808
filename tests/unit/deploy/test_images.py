"""How a lab comes by its image, without an engine that has any."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from support.builders import site
from support.fake_backend import FakeBackend

from labctl.config.context import Context
from labctl.config.inventory import InventoryHost
from labctl.deploy import images
from labctl.engines.docker import DockerEngine
from labctl.engines.multi import MultiHostEngine
from labctl.engines.state import ObservedState
from labctl.errors import ConfigError, HostError
from labctl.hosts.ssh import LocalConnection
from labctl.images import build, distribute, local
from labctl.lab.cluster import Cluster

MADE_OF_ANOTHER = "labctl/from:0123456789ab"
WITH_PACKAGES = "labctl/packages:0123456789ab"


def at(directory: Path, **flags: str) -> Context:
    return Context(directory=directory, environ={}, emit=lambda _: None, flags={"LAB_ACCELERATOR": "cpu", **flags})


def on_hosts(context: Context) -> Cluster:
    """The lab on two hosts whose engines answer."""
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
    """Neither this machine's engine nor a host's has the image."""
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
    context = at(tmp_path, LAB_IMAGE=image)
    with pytest.raises(HostError, match=f"LAB_IMAGE is {image}, which `labctl build` does not make") as caught:
        images.build_image(context, site(context))
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("added", [{}, {"LAB_PACKAGES": "nltk"}])
@pytest.mark.parametrize(
    ("image", "hint"), [(MADE_OF_ANOTHER, "labctl build --from IMAGE"), (WITH_PACKAGES, "unset LAB_IMAGE")]
)
def test_no_registry_is_asked_for_an_image_that_was_made_here(
    nothing_here: None, tmp_path: Path, image: str, hint: str, added: dict[str, str]
) -> None:
    context = at(tmp_path, LAB_IMAGE=image, **added)
    for refused in (
        lambda: images.require_buildable(site(context)),
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
    context = at(tmp_path, LAB_IMAGE_FROM=how, **settings)
    ((step,), failed) = images.plan_images(context, on_hosts(context), ObservedState())
    assert (step.image, failed) == (on_hosts(context).image, {})
