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
    """Add --require-docker and --update-golden."""
    parser.addoption("--require-docker", action="store_true", help="fail, not skip, where no Docker engine answers")
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*/expected from the code")


# Fixtures shared by many tests, the longest first.
SHARED = ("shared_rack", "shared_machine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test its xdist group, and sort a worker's tests: shared machines first.

    Tests of the second machine that want the same of its engine run one after the other: another costs a restart.
    """

    def group(item: pytest.Item) -> str:
        """Return a test's xdist group: the shared machine that it uses, else its module."""
        fixtures = getattr(item, "fixturenames", ())
        return next((name for name in SHARED if name in fixtures), item.nodeid.partition("::")[0])

    def turn(item: pytest.Item) -> tuple[int, str]:
        """Return a test's sort key: the rack, the second machine by its engine's settings, with Docker, the rest."""
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
    """Yield a Docker client; without an engine skip the test, or fail it with --require-docker or CI=true."""
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
    """Return the name prefix of this session's labs, random."""
    return f"pytest-{secrets.token_hex(3)}"


@pytest.fixture(scope="session")
def new_lab(engine: DockerClient, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewLab]:
    """Yield a function that makes a lab directory; at the session's end remove all their Docker objects."""
    numbers = count()
    image = {"LAB_IMAGE": os.environ["LAB_IMAGE"]} if os.environ.get("LAB_IMAGE") else {}

    def make(settings: dict[str, str]) -> Lab:
        """Make a lab directory with these settings."""
        path = tmp_path_factory.mktemp("lab")
        return Lab.make(path, f"{family}-{next(numbers)}", engine, {**image, **settings})

    yield make
    remove_labelled(engine, lambda name: name.startswith(f"{family}-"))


@pytest.fixture(scope="session")
def image(engine: DockerClient, new_lab: NewLab) -> str:
    """Return the lab image's name: LAB_IMAGE if set, else labctl/cpu, built if missing."""
    if name := os.environ.get("LAB_IMAGE"):
        return name
    if not engine.images.list(filters={"reference": f"{IMAGE}:latest"}):
        new_lab({}).call("build", limit=1800).expect(0)
    return IMAGE


@pytest.fixture(scope="session")
def small_image(engine: DockerClient, image: str, family: str) -> Iterator[str]:
    """Yield the name of an image like the lab's without frameworks; remove it at the session's end."""
    name = f"{family}/node:latest"
    import_node(image, name)
    yield name
    engine.images.remove(name, force=True)


@pytest.fixture
def fresh_lab(new_lab: NewLab, image: str) -> Iterator[FreshLab]:
    """Yield a function that makes a lab directory for this test; destroy these labs after it."""
    made: list[Lab] = []

    def make(**settings: str) -> Lab:
        """Make a lab directory with these settings."""
        made.append(new_lab(settings))
        return made[-1]

    yield make
    for lab in made:
        lab.destroy()


@pytest.fixture(scope="session")
def labs(new_lab: NewLab, image: str) -> Labs:
    """Return the session's pool of shared labs, each brought up when first lent."""
    return Labs(new_lab)


@pytest.fixture
def lend(labs: Labs) -> Iterator[FreshLab]:
    """Yield a function that lends a lab with these settings, up, until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(labs.lend(**settings))


@pytest.fixture(scope="module")
def lend_module(labs: Labs) -> Iterator[FreshLab]:
    """Yield a function that lends a lab with these settings, up, until the module's tests end."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(labs.lend(**settings))


@pytest.fixture(scope="module")
def module_lab(lend_module: FreshLab) -> Lab:
    """Return a lab of two nodes, up, lent to the module."""
    return lend_module()


@pytest.fixture
def lab(lend: FreshLab) -> Lab:
    """Return a lab of two nodes, up, lent to the test."""
    return lend()


# --- a second machine with stand-in devices ---


@pytest.fixture(scope="session")
def shared_machine(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Yield the second machine, a container with its own engine and the node image; close it at the end."""
    with contextlib.closing(Machine(tmp_path_factory.mktemp("machine"))) as machine:
        machine.configure(EVERY_VENDOR)
        machine.load_node(image)
        yield machine


@pytest.fixture
def machine(shared_machine: Machine, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Yield the second machine, its engine as the mark `dockerd` says, else for all vendors; clear it afterwards."""
    mark = request.node.get_closest_marker("dockerd")
    shared_machine.configure(mark.args[0] if mark else EVERY_VENDOR)
    yield shared_machine
    shared_machine.clear()


@pytest.fixture(scope="module")
def module_machine(shared_machine: Machine) -> Iterator[Machine]:
    """Yield the second machine, its engine set up for all vendors, to a module; clear it afterwards."""
    shared_machine.configure(EVERY_VENDOR)
    yield shared_machine
    shared_machine.clear()


@pytest.fixture
def machine_lab(machine: Machine, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshLab]:
    """Yield a function that makes a lab directory on the second machine; destroy these labs afterwards."""
    made: list[Lab] = []

    def make(**settings: str) -> Lab:
        """Make a lab directory on the second machine with these settings."""
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
    """Yield the rack, which creates hosts with sshd and an engine on request; close it at the end."""
    with contextlib.closing(Rack(engine, family, tmp_path_factory.mktemp("rack"), image)) as rack:
        yield rack


@pytest.fixture
def rack(shared_rack: Rack) -> Iterator[Rack]:
    """Yield the rack; after the test cure its faults and clean its used hosts."""
    yield shared_rack
    shared_rack.clear()


@pytest.fixture
def rack_lab(rack: Rack, family: str, tmp_path_factory: pytest.TempPathFactory) -> RackLabs:
    """Return a function that makes a lab directory over so many hosts of the rack."""
    numbers = count()

    def make(hosts: int, **settings: str) -> RackLab:
        """Make a lab directory over so many hosts of the rack."""
        path = tmp_path_factory.mktemp("lab")
        return rack.lab(path, f"{family}-rack-{next(numbers)}", rack.hosts(hosts), settings)

    return make


# --- a cluster ---


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of LABCTL_TEST_KUBECONFIG that verifies the certificate; skip the test if it is not set."""
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
    """Yield a running stand-in for the mpi-operator in a new namespace, for a module."""
    from support.operator import fresh_namespace, operating

    with fresh_namespace(kubeconfig) as namespace, operating(kubeconfig, namespace) as running:
        yield running


@pytest.fixture(scope="session")
def node_image(engine: DockerClient, image: str) -> Iterator[str]:
    """Yield the lab image's name with tag ``pytest``, which the cluster does not pull; remove the tag at the end."""
    engine.images.get(image).tag(image.partition(":")[0], "pytest")
    yield f"{image.partition(':')[0]}:pytest"
    engine.images.remove(f"{image.partition(':')[0]}:pytest")


@pytest.fixture
def cluster_lab(operator: Operator, kubeconfig: Path, fresh_lab: FreshLab, node_image: str) -> Iterator[ClusterLabs]:
    """Yield a function that makes a lab in the operator's namespace; delete their MPIJobs and pods afterwards."""
    from kubernetes.client.exceptions import ApiException

    made: list[Lab] = []

    def make(**settings: str) -> Lab:
        """Make a lab directory for Kubernetes in the operator's namespace."""
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
