from __future__ import annotations

from pathlib import Path

import pytest

from labctl.backends.kubernetes import target
from labctl.backends.kubernetes.target import Target, Toleration
from labctl.config import settings
from labctl.errors import ConfigError


def read(accelerator: str = "cpu", **given: str) -> Target:
    """Return the target that these settings give."""
    environ = {"LAB_NAME": "demo", "HOME": "/home/someone", "LAB_ACCELERATOR": accelerator, **given}
    return target.read(settings.load(Path("/nowhere"), environ, {}), accelerator)


def test_what_nobody_sets_is_not_asked_for() -> None:
    """Without settings the namespace is the lab's name, the kind mpijob, and no resource is asked for."""
    found = read()
    assert (found.namespace, found.kind, found.resource, found.cpu, found.memory) == ("demo", "mpijob", "", "", "")
    assert (found.storage, found.hugepages, found.queue, found.gang) == ("", "", "", "none")


def test_each_accelerator_has_a_resource_and_another_can_be_named() -> None:
    """The resource is the accelerator's or LAB_K8S_RESOURCE, which raises ConfigError for cpu."""
    assert read("habana").resource == "habana.ai/gaudi"
    assert read("nvidia").resource == "nvidia.com/gpu"
    assert read("intel").resource == "gpu.intel.com/i915"
    assert read("intel", LAB_K8S_RESOURCE="gpu.intel.com/xe").resource == "gpu.intel.com/xe"
    with pytest.raises(ConfigError, match="names a device, and a cpu lab has none"):
        read(LAB_K8S_RESOURCE="nvidia.com/gpu")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, ""), (8 << 30, "8Gi"), (512 << 20, "512Mi"), (1536 << 20, "1536Mi"), (1 << 40, "1Ti"), (7, "7")],
)
def test_sizes_are_kubernetes_quantities(size: int, text: str) -> None:
    """quantity() writes bytes with the largest binary unit that divides them, nothing for 0."""
    assert target.quantity(size) == text


def test_labels_and_taints_are_read() -> None:
    """LAB_K8S_NODE_SELECTOR and LAB_K8S_TOLERATIONS are read as labels and tolerations."""
    found = read(
        LAB_K8S_NODE_SELECTOR="zone=a example.com/rack=7", LAB_K8S_TOLERATIONS="spot reserved=lab gone=now:NoExecute"
    )
    assert found.node_selector == (("zone", "a"), ("example.com/rack", "7"))
    assert found.tolerations == (
        Toleration(key="spot"),
        Toleration(key="reserved", value="lab"),
        Toleration(key="gone", value="now", effect="NoExecute"),
    )


def test_workers_tolerate_the_taint_of_their_devices_once() -> None:
    """Workers tolerate a taint named as their resource, once, before the set ones; cpu workers none."""
    assert read("cpu").tolerated == ()
    assert read("habana", LAB_K8S_TOLERATIONS="spot habana.ai/gaudi").tolerated == (
        Toleration(key="habana.ai/gaudi"),
        Toleration(key="spot"),
    )
    other = read("intel", LAB_K8S_RESOURCE="gpu.intel.com/xe")
    assert (other.tolerations, other.tolerated) == ((), (Toleration(key="gpu.intel.com/xe"),))


def test_names_of_other_peoples_objects_may_be_longer_than_a_labs_and_have_dots() -> None:
    """Namespaces may have 63 characters, classes 253, secrets and queues dots."""
    found = read(
        LAB_K8S_NAMESPACE="n" * 63,
        LAB_K8S_PULL_SECRET="r.example",  # noqa: S106 - a name
        LAB_K8S_STORAGE_CLASS="s" * 253,
        LAB_K8S_QUEUE="team.gpus",
    )
    assert (len(found.namespace), found.pull_secret) == (63, "r.example")
    assert (len(found.storage_class), found.queue) == (253, "team.gpus")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("LAB_K8S_NODE_SELECTOR", "zone", "environment: LAB_K8S_NODE_SELECTOR: `zone` is not label=value"),
        ("LAB_K8S_TOLERATIONS", "a=b=c", "`a=b=c` is not key, key=value or key=value:effect"),
        ("LAB_K8S_TOLERATIONS", "a=b:noschedule", "unknown effect `noschedule`"),
        ("LAB_K8S_NAMESPACE", "n" * 64, "must be at most 63 of"),
        ("LAB_K8S_NAMESPACE", "my.team", "must be at most 63 of"),
        ("LAB_K8S_PULL_SECRET", "s" * 254, "must be at most 253 of"),
        ("LAB_K8S_QUEUE", "q" * 64, "must be at most 63 of"),
        ("LAB_K8S_JOB", "job", "must be one of auto, mpijob, trainjob"),
        ("LAB_K8S_CPU", "many", "must be cores, such as 8 or 500m"),
        ("LAB_K8S_HOST_IPC", "yes", "must be one of true, false"),
    ],
)
def test_a_mistake_is_named_with_its_setting(key: str, value: str, message: str) -> None:
    """An invalid setting raises ConfigError with its name and the accepted form."""
    with pytest.raises(ConfigError, match=message.replace("`", ".")):
        read(**{key: value})
