"""Common steps of the Dockerfiles, the input files of an image, and the base image of an accelerator."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path

import pytest
from support.builders import cluster_of

from labctl import accelerators
from labctl.accelerators import habana
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.deploy import images as prepare
from labctl.backends.docker.images import build, catalog, package_sources
from labctl.backends.docker.images.build import BuildRequest
from labctl.config.context import Context
from labctl.config.settings import accelerators_known
from labctl.errors import HostError
from labctl.system import process

GAUDI = "vault.habana.ai/gaudi-docker/{}/ubuntu22.04/habanalabs/pytorch-installer-{}:latest"
DOCKER = Path(__file__).parents[5] / "docker"
COMMON = ("system.sh", "install.sh")
LAST = """\
RUN mkdir -p /workspace /run/sshd
COPY sshd_config /opt/lab/sshd_config
COPY ssh_config /etc/ssh/ssh_config.d/lab.conf
COPY --chmod=755 labnode.py /opt/lab/labnode.py
COPY --chmod=644 rank_output.py step.regex stacks.py diagnosis.py sampler.py *_sampler.py /opt/lab/
WORKDIR /workspace
ENTRYPOINT ["/usr/bin/python3", "-I", "/opt/lab/labnode.py", "start"]
"""


def text(name: str) -> str:
    """Return the text of an image's Dockerfile."""
    return catalog.dockerfile(name).read_text(encoding="utf-8")


def steps(name: str) -> list[str]:
    """List the RUN steps of a Dockerfile, with mounts and script, each on one line."""
    parts = re.split(r"^(?=[A-Z]+ )", text(name).replace("\\\n", " "), flags=re.MULTILINE)
    return [step for step in parts if step.startswith("RUN ")]


def test_every_accelerator_has_an_image() -> None:
    """Each known accelerator has a Dockerfile."""
    assert {*accelerators_known()} - {"auto"} <= {*catalog.names()}


@pytest.mark.parametrize("name", catalog.names())
def test_every_image_is_made_by_the_common_scripts(name: str) -> None:
    """Each Dockerfile uses system.sh and install.sh, and calls neither apt-get nor pip by itself."""
    mounted = {path.name for path in catalog.inputs(name)}
    assert {*COMMON} <= mounted
    calls = [
        word for step in steps(name) for word in ("apt-get install", "pip install --no-deps --req") if word in step
    ]
    assert calls == [], "a step of its own where a common one would do"


@pytest.mark.parametrize("name", [name for name in catalog.names() if catalog.base_of(name) is None])
def test_what_changes_most_is_the_last_layer_and_the_same_in_all(name: str) -> None:
    """Each Dockerfile without a base of labctl's ends with the same lines."""
    assert text(name).endswith(LAST)


@pytest.mark.parametrize("name", catalog.names())
def test_steps_that_fetch_are_handed_what_they_need(name: str) -> None:
    """Each RUN step of system.sh, install.sh or resolve.py mounts its secrets and wheels."""
    for step in steps(name):
        if "system.sh" in step:
            assert all(f"id={secret}" in step for secret in ("apt.list", "apt.conf", "ca.crt")), step
        if "install.sh" in step or "resolve.py" in step:
            assert all(f"id={secret}" in step for secret in ("pip.conf", "ca.crt")), step
            assert "from=wheels" in step, step


@pytest.mark.parametrize("name", catalog.names())
def test_the_hash_covers_every_file_that_the_image_comes_from(name: str) -> None:
    """inputs() has each file of docker/ that the Dockerfile names outside comments, and the Dockerfile."""
    named = {word for word in re.findall(r"[\w.-]+", text(name)) if (DOCKER / word).is_file()}
    used = {path.name for path in catalog.inputs(name)}
    comments = {
        word for line in text(name).splitlines() if line.startswith("#") for word in re.findall(r"[\w.-]+", line)
    }
    assert named - comments <= used
    assert f"{name}.Dockerfile" in used


def test_the_common_scripts_are_shell_that_debian_and_ubuntu_know() -> None:
    """system.sh and install.sh pass `sh -n`; resolve.py parses as Python 3.10."""
    for script in COMMON:
        process.run(["sh", "-n", str(DOCKER / script)])
    ast.parse((DOCKER / "resolve.py").read_text(encoding="utf-8"), feature_version=(3, 10))


@pytest.mark.parametrize("name", [path.stem for path in DOCKER.glob("*.lock")])
def test_a_lock_holds_what_was_asked_for(name: str) -> None:
    """Each lock has all packages of its .in file, with the asked versions, and hashes except for torch."""
    locked = package_sources.pins(catalog.file(name, "lock").read_text(encoding="utf-8"))
    requested = package_sources.pins(catalog.file(name, "in").read_text(encoding="utf-8"))
    assert requested.keys() <= locked.keys()
    assert {project: locked[project] for project, version in requested.items() if version} == {
        project: version for project, version in requested.items() if version
    }
    assert all(locked.values())
    lines = catalog.file(name, "lock").read_text(encoding="utf-8").splitlines()[1:]
    assert [line for line in lines if " --hash=sha256:" not in line and not line.startswith("torch==")] == []


def test_every_accelerator_trains_with_the_same_versions() -> None:
    """The locks of cpu and nvidia have the same versions, except that cpu's torch is the +cpu build."""
    cpu, nvidia = (
        package_sources.pins(catalog.file(name, "lock").read_text(encoding="utf-8")) for name in ("cpu", "nvidia")
    )
    assert {project for project in cpu if nvidia.get(project) != cpu[project]} == {"torch"}
    assert cpu["torch"] == f"{nvidia['torch']}+cpu"


PIP = """\
#!/bin/sh
[ "$1" = list ] && { printf 'torch==2.7.1+vendor\\nnumpy==1.26.4\\n'; exit; }
echo "pip $*" | sed 's#/tmp/[^ ]*/##g' >> "$LOG"
for word; do case $word in */*) sed 's/^/  /' "$word" >> "$LOG";; esac; done
"""


def installed(tmp_path: Path, requirements: str, name: str) -> list[str]:
    """Run install.sh without /opt/venv; return its calls of pip, each followed by the files that it names."""
    (tmp_path / "pip").write_text(PIP)
    (tmp_path / "pip").chmod(0o755)
    (tmp_path / name).write_text(requirements)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LOG": f"{tmp_path}/log", "TMPDIR": "/tmp"}  # noqa: S108
    process.run(["sh", str(DOCKER / "install.sh"), str(tmp_path / name)], env=environment)
    return (tmp_path / "log").read_text().splitlines()


VENDORS_PIP = """\
#!/bin/sh
case "$*" in
"list --format freeze") printf 'torch==2.9.0a0+nv25.9\\nnumpy==1.26.4\\nhabana-torch-plugin==1.22.0\\n' ;;
freeze) printf 'torch @ file:///opt/torch.whl\\nnumpy==1.26.4\\n' ;;
install*) for word; do case $word in */constraints) cat "$word" >> "$LOG" ;; esac; done ;;
esac
"""


def test_what_a_vendor_installed_from_a_file_keeps_its_version(tmp_path: Path) -> None:
    """packages.sh constrains a vendor's packages installed from a file, and those of the kept lock."""
    (tmp_path / "pip").write_text(VENDORS_PIP)
    (tmp_path / "pip").chmod(0o755)
    (tmp_path / "python").symlink_to("/bin/true")
    (tmp_path / "requirements.txt").write_text("nltk\n")
    (tmp_path / "lock.txt").write_text("nltk==3.9\n")
    script = (DOCKER / "packages.sh").read_text(encoding="utf-8")
    script = script.replace("/run/sources/wanted", str(tmp_path)).replace("/opt/lab", f"{tmp_path}/lab")
    process.run(["sh", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin", "LOG": f"{tmp_path}/log"})
    held = (tmp_path / "log").read_text().splitlines()
    assert held == ["torch==2.9.0a0+nv25.9", "habana-torch-plugin==1.22.0", "nltk==3.9"]


@pytest.mark.skipif(Path("/opt/venv").exists(), reason="this machine has what a plain base gets")
def test_around_a_vendors_torch_nothing_that_is_there_is_replaced(tmp_path: Path) -> None:
    """install.sh constrains the installed packages, leaves torch out, and installs deepspeed last."""
    frozen = ["  torch==2.7.1+vendor", "  numpy==1.26.4"]
    assert installed(tmp_path, "deepspeed==1\nnumpy\ntorch==2.13.0\n", "some.in") == [
        "pip install --constraint constraints --requirement requirements",
        *frozen,
        "  numpy",
        "pip install --constraint constraints --no-build-isolation --no-cache-dir --requirement deepspeed",
        *frozen,
        "  deepspeed==1",
    ]


def test_a_lock_is_installed_as_it_is_and_deepspeed_against_its_torch(tmp_path: Path) -> None:
    """install.sh installs a lock with hashes and without dependencies: torch, the others, then deepspeed."""
    lock = "# made\ndeepspeed==1\nhorovod==2\nnumpy==3\ntorch==4\n"
    assert [line for line in installed(tmp_path, lock, "some.lock") if not line.startswith("  #")] == [
        "pip install --no-deps --requirement torch",
        "  torch==4",
        "pip install --no-deps --require-hashes --requirement requirements",
        "  numpy==3",
        "pip install --no-deps --require-hashes --no-build-isolation --no-cache-dir --requirement deepspeed",
        "  deepspeed==1",
    ]


# --- the base ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "image"),
    [
        ("1.17.0", GAUDI.format("1.17.0", "2.3.1")),
        ("1.19.1", GAUDI.format("1.19.1", "2.5.1")),
        ("1.21.0", GAUDI.format("1.21.0", "2.6.0")),
        ("1.21.9", GAUDI.format("1.21.3", "2.6.0")),
        ("1.24.1", GAUDI.format("1.24.1", "2.11.0")),
    ],
)
def test_habanas_image_is_of_the_drivers_release(driver: str, image: str) -> None:
    """base_for() gives Habana's image of the driver's release, and why_mismatch() none for it."""
    assert habana.base_for(driver) == image
    assert not habana.why_mismatch(driver, image)


def test_a_driver_whose_image_is_not_known_is_an_error_that_names_the_releases() -> None:
    """base_for() of an unknown driver raises HostError that lists the known releases."""
    with pytest.raises(HostError, match=r"driver 9\.1\.0 is not known; labctl knows 1\.17, .*1\.24") as caught:
        habana.base_for("9.1.0")
    assert caught.value.hint.startswith("set LAB_BASE_IMAGE to ")


def test_a_base_whose_release_is_not_known_ends_the_build_with_those_that_are(tmp_path: Path) -> None:
    """The habana Dockerfile's script with an unknown release exits with 1 and lists the known ones."""
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho 9.1\n")
    python.chmod(0o755)
    script = text("habana").partition("<<'SCRIPT'\n")[2].partition("SCRIPT\n")[0].replace("/run/sources", str(DOCKER))
    done = process.run(["sh", "-c", script], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=False)
    assert done.code == 1
    assert re.search(r"release 9\.1, .* known are 1\.17 1\.18 .*1\.24$", done.err.strip())
    assert "parameter not set" not in done.err


@pytest.mark.parametrize(("cuda", "compiled"), [("13.0", True), ("13.1", True), ("12.6", False), ("none", False)])
def test_fused_operators_are_compiled_for_a_torch_of_the_compilers_cuda(
    tmp_path: Path, cuda: str, compiled: bool
) -> None:
    """The nvidia script compiles deepspeed's fused operators only if torch's and nvcc's major CUDA are the same."""
    script = text("nvidia").rpartition("<<'SCRIPT'\n")[2].partition("SCRIPT\n")[0]
    script = script.replace("/run/sources", str(tmp_path)).replace("/opt/venv", str(tmp_path))
    script = script.replace("/tmp/nvidia", f"{tmp_path}/made").replace("/usr/local/cuda", f"{tmp_path}/cuda")  # noqa: S108
    (tmp_path / "cuda/bin").mkdir(parents=True)
    (tmp_path / "torch.py").write_text(f"class version: cuda = {None if cuda == 'none' else cuda!r}\n")
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "cuda/bin/nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    (tmp_path / "cuda/bin/nvcc").chmod(0o755)
    (tmp_path / "nvidia.lock").write_text("torch==2.13.0\ndeepspeed==1\n")
    (tmp_path / "cuda.sh").write_text("")
    (tmp_path / "install.sh").write_text(
        'echo "$(tail -n 1 "$1") ${DS_BUILD_FUSED_ADAM:-0} ${DS_BUILD_FUSED_LAMB:-0}"\n'
    )
    done = process.run(["sh", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path)})
    before, *printed, after = done.out.splitlines()
    assert (before, after) == ("torch==2.13.0 0 0", "deepspeed==1 1 1" if compiled else "deepspeed==1 0 0")
    assert [line.partition(":")[0] for line in printed] == (
        [] if compiled else ["FusedAdam and FusedLamb are not compiled"]
    )


@pytest.mark.parametrize(
    ("driver", "image", "differs"),
    [
        ("1.22.0", GAUDI.format("1.21.0", "2.6.0"), True),
        ("9.1.0", GAUDI.format("1.21.0", "2.6.0"), True),
        ("1.21.3", GAUDI.format("1.21.0", "2.6.0"), False),
        ("1.2.0", GAUDI.format("1.21.0", "2.6.0"), True),
        ("1.22.0", "mirror.example:5000/habana/pytorch:1.21.0-555", True),
        ("1.21.0", "10.0.0.5:5000/habana/pytorch:1.21.0", False),
        ("10.0.0", "10.0.0.5:5000/habana/pytorch:1.21.0", True),
        ("1.21.0", "10.0.0.5/habana/pytorch:latest", False),
        ("1.22.0", "habana:1.21.0", True),
        ("1.22.0", "labctl/habana", False),
        ("1.22.0", "mirror.example/other:3.1.0", False),
    ],
)
def test_an_image_of_another_release_than_the_driver(driver: str, image: str, differs: bool) -> None:
    """why_mismatch() names driver and image if their releases differ; it is empty if they fit or one is unknown."""
    why = habana.why_mismatch(driver, image)
    assert bool(why) is differs
    if why:
        assert image in why
        assert driver in why


@pytest.mark.parametrize("output", ["1.22.0-740\n", "1.22.0", "v1.22.0-97a5f6b"])
def test_the_driver_is_known_without_habanas_tools(tmp_path: Path, output: str) -> None:
    """installed_release() is read from the kernel module's version file."""
    path = tmp_path / "sys/module/habanalabs/version"
    path.parent.mkdir(parents=True)
    path.write_text(output)
    assert habana.installed_release(tmp_path) == "1.22.0"


@pytest.mark.parametrize(("code", "out", "version"), [(0, "1.22.0-97a5f6b\n", "1.22.0"), (127, "", "")])
def test_where_the_kernel_does_not_say_the_tool_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, out: str, version: str
) -> None:
    """Without the version file installed_release() is read from hl-smi's output, empty if that fails."""
    monkeypatch.setattr(process, "run", lambda argv, **_: process.CompletedProcess(tuple(argv), code, out, ""))
    assert habana.installed_release(tmp_path) == version


class Builder:
    """Stand-in for Docker that records the requested bases and the build arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        """Replace Docker and builds by records of bases and arguments."""
        self._directory = directory
        self.bases: list[tuple[str, bool]] = []
        self.arguments: list[str] = []
        monkeypatch.setattr(build, "ensure_base", self._ensure)
        monkeypatch.setattr(DockerEngine, "image", lambda *_: {"Config": {"Labels": {"labctl.inputs": "0"}}})
        monkeypatch.setattr(build, "release_of", lambda *_: {})
        monkeypatch.setattr(package_sources, "of_host", package_sources.PipSources)
        monkeypatch.setattr(build, "run", lambda *given: self.arguments.extend(given[1]))

    def _ensure(self, name: str, request: BuildRequest, _: object) -> str:
        """Record the requested base and if it was chosen; return its name."""
        self.bases.append((name, bool(request.base_image)))
        return name

    def prepare(self, image: str, base: str = "") -> str:
        """Prepare a build and keep its arguments; return the base that the image would be built on."""
        request = BuildRequest(image=image, tag=catalog.tag(image), directory=self._directory, base_image=base)
        with build.prepared(request, build._base(request, print), {}) as arguments:
            self.arguments = arguments
        return self.bases[-1][0]


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Builder:
    return Builder(monkeypatch, tmp_path)


def driver(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Make this the installed release of habana's driver."""
    monkeypatch.setattr(habana, "installed_release", lambda: version)


def test_each_image_has_its_own_base_unless_one_is_chosen(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """cpu and nvidia are built on Debian, habana on its driver's image; a chosen base replaces them."""
    driver(monkeypatch, "1.21.0")
    assert builder.prepare("cpu") == builder.prepare("nvidia") == build.PLAIN
    assert builder.prepare("habana") == GAUDI.format("1.21.0", "2.6.0")
    assert builder.prepare("nvidia", "nvcr.io/nvidia/pytorch:25.10-py3") == "nvcr.io/nvidia/pytorch:25.10-py3"
    assert [chosen for _, chosen in builder.bases] == [False, False, False, True]


def test_the_image_remembers_its_base(builder: Builder) -> None:
    """The build has the base as label labctl.base and as BASE_IMAGE."""
    builder.prepare("nvidia", "mirror.example/pytorch:1")
    assert "labctl.base=mirror.example/pytorch:1" in builder.arguments
    assert "BASE_IMAGE=mirror.example/pytorch:1" in builder.arguments


def test_without_a_driver_the_person_names_habanas_image(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A habana build without driver and base raises HostError with an image as hint; with a base it is built."""
    driver(monkeypatch, "")
    with pytest.raises(HostError, match="depends on the driver") as caught:
        builder.prepare("habana")
    assert caught.value.hint.endswith(GAUDI.format("1.24.1", "2.11.0"))
    named = GAUDI.format("1.20.0", "2.6.0")
    assert builder.prepare("habana", named) == named


def test_a_base_of_another_release_is_refused_before_it_is_pulled(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A habana base of release 1.20 with driver 1.22 raises HostError before it is ensured."""
    driver(monkeypatch, "1.22.0")
    with pytest.raises(HostError, match="must be of one release"):
        builder.prepare("habana", GAUDI.format("1.20.0", "2.6.0"))
    assert builder.bases == []


@pytest.mark.parametrize(
    ("image", "chosen", "index"),
    [
        ("cpu", "", "https://download.pytorch.org/whl/cpu"),
        ("intel", "", "https://download.pytorch.org/whl/xpu"),
        ("nvidia", "", ""),
        ("nvidia", "https://torch.example/cu126", "https://torch.example/cu126"),
    ],
)
def test_torch_comes_from_the_index_of_the_accelerator(tmp_path: Path, image: str, chosen: str, index: str) -> None:
    """pip.conf has the accelerator's torch index, or the chosen one; for nvidia none by default."""
    request = BuildRequest(image=image, tag="mine", directory=tmp_path, torch_index=chosen)
    build.hand_in(request, package_sources.PipSources(), {"torch": "2.13.0"}, "", tmp_path)
    extra = re.findall(r"^extra-index-url = (.*)$", (tmp_path / "pip.conf").read_text(), re.MULTILINE)
    assert extra == ([index] if index else [])


def test_a_lock_is_made_anew_without_torch_for_another_device(
    builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """update_lock() for nvidia stages torch 2.13.0 and not 2.13.0+cpu, which would satisfy the same requirement."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for version in ("2.13.0+cpu", "2.13.0"):
        (wheels / f"torch-{version}-cp311-cp311-linux_x86_64.whl").touch()
    staged: list[str] = []

    def run(_: object, arguments: list[str], *rest: object) -> None:
        """Record the staged wheels; raise HostError."""
        (context,) = [word for word in arguments if word.startswith("wheels=")]
        staged.extend(path.name for path in Path(context.removeprefix("wheels=")).iterdir())
        raise HostError("far enough")

    monkeypatch.setattr(build, "run", run)
    pip = package_sources.PipSources(find_links=(str(wheels),))
    request = BuildRequest(image="nvidia", tag="mine", directory=tmp_path / "lab", pip=pip)
    with pytest.raises(HostError, match="far enough"):
        build.update_lock(request, print)
    assert staged == ["torch-2.13.0-cp311-cp311-linux_x86_64.whl"]


def test_an_image_without_a_lock_says_where_its_versions_are(tmp_path: Path) -> None:
    """update_lock() of intel, which has no lock, raises HostError with intel.in as hint."""
    with pytest.raises(HostError, match="intel has no lock") as caught:
        build.update_lock(BuildRequest(image="intel", tag="mine", directory=tmp_path), print)
    assert caught.value.hint.endswith("intel.in")


@pytest.mark.parametrize("accelerator", accelerators.modules())
def test_an_image_is_built_where_its_devices_are_not(
    accelerator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """build_image() builds labctl/ACCELERATOR on a machine without its devices."""
    built: list[BuildRequest] = []
    monkeypatch.setattr(build, "build", lambda request, _: built.append(request))
    monkeypatch.setattr(accelerators, "ROOT", tmp_path)
    context = Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={"LAB_ACCELERATOR": accelerator})
    prepare.build_image(context, cluster_of(context))
    assert [(request.image, request.tag) for request in built] == [(accelerator, f"labctl/{accelerator}")]
