"""Labs on the real engine: shared ones, restored after each test, and new ones; all are removed."""

from __future__ import annotations

import base64
import contextlib
import gc
import os
import secrets
import signal
import warnings
from collections.abc import Callable, Generator, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import yaml
from support.harness import Lab, remove_labelled
from support.lease import Labs
from support.machine.machine import EVERY_VENDOR, Machine, import_node
from support.rack.rack import Rack, RackLab

import docker
from docker import DockerClient

if TYPE_CHECKING:
    from support.operator import Operator

# Examples may be slow to run or to generate on a busy machine.
hypothesis.settings.register_profile("labctl", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("labctl")

IMAGE = "labctl/cpu"

NewLab = Callable[[dict[str, str]], Lab]
FreshLab = Callable[..., Lab]
RackLabs = Callable[..., RackLab]
ClusterLabs = Callable[..., Lab]


# Print a traceback if a program crashes in C; labctl and its children inherit the variable.
os.environ["PYTHONFAULTHANDLER"] = "1"

# Child processes inherit ignored signals: SIGINT under `make test &` in a script, SIGHUP under nohup.
# A handler here resets them to the default in children.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-docker", action="store_true", help="fail, not skip, where no Docker engine answers")
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*/expected from the code")


# Fixtures shared by many tests, the longest first.
SHARED = ("shared_rack", "shared_machine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Assign tests to xdist workers: one for the rack, one for the second machine, one per other module; longest first.

    Tests of the second machine that want the same of its engine run one after the other: another costs a restart.
    """

    def group(item: pytest.Item) -> str:
        fixtures = getattr(item, "fixturenames", ())
        return next((name for name in SHARED if name in fixtures), item.nodeid.partition("::")[0])

    def turn(item: pytest.Item) -> tuple[int, str]:
        name = next(item.iter_markers("xdist_group")).args[0]
        if name in SHARED:
            dockerd = item.get_closest_marker("dockerd")
            return SHARED.index(name), repr(dockerd.args) if dockerd else ""
        return len(SHARED) + (item.get_closest_marker("docker") is None), ""

    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group(item)))
    if hasattr(config, "workerinput"):
        # Start long tests first, so that no worker is left with one at the end.
        items.sort(key=turn)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a smoke test that skips: it must run everywhere."""
    report = yield
    if report.skipped and item.get_closest_marker("smoke"):
        report.outcome = "failed"
    return report


@pytest.fixture(scope="session")
def engine(pytestconfig: pytest.Config) -> Iterator[DockerClient]:
    """Client of Docker. Without it, skip the test, or fail if it is required (--require-docker, CI=true)."""
    client, reason = None, ""
    with warnings.catch_warnings():
        # The SDK leaks sockets that fail to connect.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            client = docker.from_env(timeout=120)
        except docker.errors.DockerException as error:
            reason = f"no Docker engine answers: {error}"
        gc.collect()
    if client is None:
        if pytestconfig.getoption("--require-docker") or os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    yield client
    client.close()


@pytest.fixture(scope="session")
def family() -> str:
    """Name prefix of this session's labs."""
    return f"pytest-{secrets.token_hex(3)}"


@pytest.fixture(scope="session")
def new_lab(engine: DockerClient, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewLab]:
    """Function that makes a lab directory; the lab is removed from the engine at the end of the session."""
    numbers = count()
    image = {"LAB_IMAGE": os.environ["LAB_IMAGE"]} if os.environ.get("LAB_IMAGE") else {}

    def make(settings: dict[str, str]) -> Lab:
        path = tmp_path_factory.mktemp("lab")
        return Lab.make(path, f"{family}-{next(numbers)}", engine, {**image, **settings})

    yield make
    remove_labelled(engine, lambda name: name.startswith(f"{family}-"))


@pytest.fixture(scope="session")
def image(engine: DockerClient, new_lab: NewLab) -> str:
    """Name of the lab image: LAB_IMAGE if set, else labctl's own, built if missing."""
    if name := os.environ.get("LAB_IMAGE"):
        return name
    if not engine.images.list(filters={"reference": f"{IMAGE}:latest"}):
        new_lab({}).call("build", limit=1800).expect(0)
    return IMAGE


@pytest.fixture(scope="session")
def small_image(engine: DockerClient, image: str, family: str) -> Iterator[str]:
    """Name of the lab image without frameworks, a tenth of its size, for tests that copy an image."""
    name = f"{family}/node:latest"
    import_node(image, name)
    yield name
    engine.images.remove(name, force=True)


@pytest.fixture
def fresh_lab(new_lab: NewLab, image: str) -> Iterator[FreshLab]:
    """Function that makes a lab directory for this test; the lab's containers are removed after it."""
    made: list[Lab] = []

    def make(**settings: str) -> Lab:
        made.append(new_lab(settings))
        return made[-1]

    yield make
    for lab in made:
        lab.destroy()


@pytest.fixture(scope="session")
def labs(new_lab: NewLab, image: str) -> Labs:
    """Pool of shared labs, each brought up when first lent; tests leave them up."""
    return Labs(new_lab)


@pytest.fixture
def lend(labs: Labs) -> Iterator[FreshLab]:
    """Function that lends a lab with these settings, up, until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(labs.lend(**settings))


@pytest.fixture(scope="module")
def lend_module(labs: Labs) -> Iterator[FreshLab]:
    """Function that lends a lab with these settings, up, until the module ends."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(labs.lend(**settings))


@pytest.fixture(scope="module")
def module_lab(lend_module: FreshLab) -> Lab:
    """A lab of two nodes for a module whose tests share a run."""
    return lend_module()


@pytest.fixture
def lab(lend: FreshLab) -> Lab:
    """A lab of two nodes that is up."""
    return lend()


# --- a second machine with stand-in devices ---


@pytest.fixture(scope="session")
def shared_machine(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A second machine with its own engine and the node image, for the session."""
    with contextlib.closing(Machine(tmp_path_factory.mktemp("machine"))) as machine:
        machine.configure(EVERY_VENDOR)
        machine.load_node(image)
        yield machine


@pytest.fixture
def machine(shared_machine: Machine, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """The second machine, without devices; its engine supports all vendors unless the mark `dockerd` configures it."""
    mark = request.node.get_closest_marker("dockerd")
    shared_machine.configure(mark.args[0] if mark else EVERY_VENDOR)
    yield shared_machine
    shared_machine.clear()


@pytest.fixture(scope="module")
def module_machine(shared_machine: Machine) -> Iterator[Machine]:
    """The second machine for a module whose tests share a lab."""
    shared_machine.configure(EVERY_VENDOR)
    yield shared_machine
    shared_machine.clear()


@pytest.fixture
def machine_lab(machine: Machine, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshLab]:
    """Function that makes a lab directory on the second machine; the lab's containers are removed after the test."""
    made: list[Lab] = []

    def make(**settings: str) -> Lab:
        made.append(machine.lab(tmp_path_factory.mktemp("lab"), f"{family}-device-{len(made)}", settings))
        return made[-1]

    yield make
    for lab in made:
        lab.destroy()


# --- a rack of hosts ---


@pytest.fixture(scope="session")
def shared_rack(
    engine: DockerClient, image: str, family: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rack]:
    """The rack: hosts with their own sshd and engine, created on request."""
    with contextlib.closing(Rack(engine, family, tmp_path_factory.mktemp("rack"), image)) as rack:
        yield rack


@pytest.fixture
def rack(shared_rack: Rack) -> Iterator[Rack]:
    """The rack; after the test its faults are cured and its used hosts cleaned."""
    yield shared_rack
    shared_rack.clear()


@pytest.fixture
def rack_lab(rack: Rack, family: str, tmp_path_factory: pytest.TempPathFactory) -> RackLabs:
    """Function that makes a lab directory over shared hosts for this test; the rack cleans up."""
    numbers = count()

    def make(hosts: int, **settings: str) -> RackLab:
        path = tmp_path_factory.mktemp("lab")
        return rack.lab(path, f"{family}-rack-{next(numbers)}", rack.hosts(hosts), settings)

    return make


# --- a cluster ---


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of LABCTL_TEST_KUBECONFIG that verifies the cluster's certificate; skip the test if it is not set."""
    given = os.environ.get("LABCTL_TEST_KUBECONFIG")
    if not given:
        pytest.skip("LABCTL_TEST_KUBECONFIG names no cluster")
    content = yaml.safe_load(Path(given).read_text())
    cluster = content["clusters"][0]["cluster"]
    if cluster.pop("insecure-skip-tls-verify", False):
        authority = Path(given).with_name("certs") / "apiserver.crt"
        cluster["certificate-authority-data"] = base64.b64encode(authority.read_bytes()).decode()
    path = tmp_path_factory.mktemp("cluster") / "kubeconfig"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def operator(kubeconfig: Path) -> Iterator[Operator]:
    """A running stand-in for the mpi-operator in its own namespace."""
    from support.operator import fresh_namespace, operating

    with fresh_namespace(kubeconfig) as namespace, operating(kubeconfig, namespace) as running:
        yield running


@pytest.fixture(scope="session")
def node_image(engine: DockerClient, image: str) -> Iterator[str]:
    """Name of the lab image with tag ``pytest``, which the cluster's node, on this engine, does not pull."""
    engine.images.get(image).tag(image.partition(":")[0], "pytest")
    yield f"{image.partition(':')[0]}:pytest"
    engine.images.remove(f"{image.partition(':')[0]}:pytest")


@pytest.fixture
def cluster_lab(operator: Operator, kubeconfig: Path, fresh_lab: FreshLab, node_image: str) -> Iterator[ClusterLabs]:
    """Function that makes a lab in the operator's namespace; its objects are removed after the test."""
    from kubernetes.client.exceptions import ApiException

    made: list[Lab] = []

    def make(**settings: str) -> Lab:
        plain = {"LAB_ENGINE": "kubernetes", "LAB_K8S_NAMESPACE": operator.namespace, "LAB_SHM_SIZE": "256m"}
        made.append(fresh_lab(**{**plain, "LAB_IMAGE": node_image, **settings}))
        made[-1].environ["KUBECONFIG"] = str(kubeconfig)
        return made[-1]

    yield make
    for lab in made:
        # Delete pods without a grace period: their node takes half a minute to end them.
        for kind in ("MPIJob", "Pod"):
            for name in operator.objects(kind):
                if name.startswith(f"{lab.name}-"):
                    # The pod was removed meanwhile.
                    with contextlib.suppress(ApiException):
                        operator.kind(kind).delete(name=name, namespace=operator.namespace, grace_period_seconds=0)
