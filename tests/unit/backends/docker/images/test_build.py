"""Arguments of image builds, without a build."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from support.builders import cluster_of

from labctl.accelerators import cpu
from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.deploy import images as prepare
from labctl.backends.docker.images import build, catalog, package_sources
from labctl.backends.docker.images.build import BuildRequest
from labctl.backends.docker.images.package_sources import PipSources
from labctl.config.context import Context
from labctl.errors import HostError
from labctl.system import files as resources
from labctl.system import process
from labctl.system.setup import apt

CANARY = "s3cr3t-canary"
APT_SOURCES = """\
deb [signed-by=/usr/share/keyrings/vendor.gpg] https://vendor.example/debian bookworm main
deb https://download.example/linux/debian bookworm stable
deb https://tools.example/apt bookworm main
deb http://mirror.example/debian bookworm main
deb http://mirror.example/debian bookworm-updates main contrib
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://mirror.example/secure bookworm-security main
"""


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Make a folder with two versions of torch, two other packages and a text file; return it."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in (
        "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl",
        "torch-2.12.0+cpu-cp311-cp311-linux_x86_64.whl",
        "nvidia_cublas-1-py3-none-any.whl",
        "Py_Cpuinfo-9.0.0.tar.gz",
        "notes.txt",
    ):
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def index(tmp_path: Path) -> str:
    """Make a package index on this disk, whose pages also link to a missing server; return its URL."""
    files = tmp_path / "pypi/files"
    files.mkdir(parents=True)
    for name, version in (("numpy", "2.4.6"), ("scipy", "1.0")):
        page = tmp_path / f"pypi/simple/{name}/index.html"
        page.parent.mkdir(parents=True)
        file = f"{name}-{version}-cp311-cp311-linux_x86_64.whl"
        (files / file).write_text(file)
        page.write_text(
            f'<a href="../../files/{file}#sha256=0">{file}</a><a href="https://far.example/{name}-9.whl">x</a>'
        )
    return (tmp_path / "pypi/simple").as_uri()


def request(directory: Path, **given: object) -> BuildRequest:
    """Return a request to build labctl/cpu:test in this directory, with these fields changed."""
    return BuildRequest(**{"image": "cpu", "tag": "labctl/cpu:test", "directory": directory, **given})  # type: ignore[arg-type]


def test_pip_settings_as_pip_shows_them() -> None:
    """parse_pip() reads `pip config list`; install wins over global, and the environment's find-links is kept."""
    text = (
        ":env:.find-links='/env/wheels'\n"
        "global.cert='/etc/ca.crt'\n"
        "global.extra-index-url='file:///a/simple\\nhttps://b.example/simple'\n"
        "global.find-links='/global/wheels'\n"
        "global.trusted-host='b.example'\n"
        "install.cert='/install/ca.crt'\n"
        "install.no-index='true'\n"
    )
    assert package_sources.parse_pip(text) == PipSources(
        extra_indexes=("file:///a/simple", "https://b.example/simple"),
        find_links=("/env/wheels",),
        trusted_hosts=("b.example",),
        no_index=True,
        cert="/install/ca.crt",
    )


def test_only_locked_versions_are_staged(wheels: Path, index: str, tmp_path: Path) -> None:
    """stage_wheels() copies files of locked versions from folder and index on this disk; returns the names found."""
    expected = package_sources.pins("# lock\nnumpy==2.4.6\npy-cpuinfo==9.0.0\ntorch==2.13.0+cpu\nabsent==1\n")
    pip = PipSources(find_links=(str(wheels), "https://far.example/wheels"), extra_indexes=(index,))
    assert package_sources.stage_wheels(pip, expected, tmp_path / "staged") == {"numpy", "py-cpuinfo", "torch"}
    assert sorted(path.name for path in (tmp_path / "staged").iterdir()) == [
        "Py_Cpuinfo-9.0.0.tar.gz",
        "numpy-2.4.6-cp311-cp311-linux_x86_64.whl",
        "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl",
    ]


def test_of_a_locked_version_only_files_with_its_hashes_are_staged(wheels: Path, tmp_path: Path) -> None:
    """A file whose SHA-256 differs from the lock's is not staged, nor its name returned."""
    digest = hashlib.sha256((wheels / "Py_Cpuinfo-9.0.0.tar.gz").read_bytes()).hexdigest()
    expected: dict[str, str | None] = {"py-cpuinfo": "9.0.0", "torch": "2.13.0+cpu"}
    for number, (lock, staged) in enumerate(((digest, {*expected}), ("0" * 64, {"torch"}))):
        hashes = package_sources.hashes(f"py-cpuinfo==9.0.0 --hash=sha256:{lock}\n")
        pip = PipSources(find_links=(str(wheels),))
        assert package_sources.stage_wheels(pip, expected, tmp_path / f"staged{number}", hashes) == staged


def test_any_version_is_staged_to_update_the_lock(wheels: Path, tmp_path: Path) -> None:
    """With version None, both versions of torch are staged."""
    package_sources.stage_wheels(PipSources(find_links=(wheels.as_uri(),)), {"torch": None}, tmp_path / "staged")
    assert len(list((tmp_path / "staged").iterdir())) == 2


def test_pins() -> None:
    """pins() maps normalized names to versions, None without `==`; comments are left out."""
    assert package_sources.pins("a.b_C==1.0+cpu\nd\ne<81\n  \n# f==1\n") == {"a-b-c": "1.0+cpu", "d": None, "e": None}


def test_pip_conf_names_remote_places_and_its_own_paths() -> None:
    """pip.conf has only remote URLs, the torch index, and the build's paths of wheels and certificates."""
    pip = PipSources(
        index="https://i.example/simple", extra_indexes=("file:///a",), find_links=("/w", "https://w.example")
    )
    assert package_sources.pip_conf(
        pip, torch_index="https://t.example/cpu", wheels=True, certificates=True
    ).splitlines() == [
        "[global]",
        "index-url = https://i.example/simple",
        "extra-index-url = https://t.example/cpu",
        "find-links = https://w.example",
        "    /run/sources/wheels",
        "cert = /run/sources/ca.crt",
        "timeout = 60",
        "disable-pip-version-check = true",
    ]


def test_settings_win_over_this_host(tmp_path: Path) -> None:
    """Values of the request's pip settings replace this host's; the others are kept."""
    host = PipSources(index="https://host.example", find_links=("/host",), cert="/host.crt")
    merged = build.pip_sources(request(tmp_path, pip=PipSources(index="https://set.example", cert="/set.crt")), host)
    assert merged == PipSources(index="https://set.example", find_links=("/host",), cert="/set.crt")


def test_secrets_are_in_files_and_never_in_arguments(tmp_path: Path, wheels: Path) -> None:
    """The arguments of `docker build` name files and variables; credentials are in the files alone, not in repr()."""
    bundle = tmp_path / "ca.crt"
    bundle.write_text("certificates")
    pip = PipSources(index=f"https://me:{CANARY}@i.example", find_links=(str(wheels),), cert=str(bundle))
    proxied = request(tmp_path, proxies=(("HTTPS_PROXY", f"http://me:{CANARY}@proxy.example:3128"),))
    folder = tmp_path / "handed"
    folder.mkdir()
    arguments = build.hand_in(
        proxied, pip, {"torch": "2.13.0+cpu"}, f"deb http://me:{CANARY}@m.example x main\n", folder
    )
    assert arguments == [
        "--build-context", f"wheels={folder}/wheels",
        "--secret", f'id=ca.crt,"src={bundle}"',
        "--secret", f'id=pip.conf,"src={folder}/pip.conf"',
        "--secret", f'id=apt.list,"src={folder}/apt.list"',
        "--secret", f'id=apt.conf,"src={folder}/apt.conf"',
        "--build-arg", "HTTPS_PROXY",
        "--build-arg", "https_proxy",
    ]  # fmt: skip
    assert CANARY in (folder / "pip.conf").read_text()
    assert CANARY not in repr((proxied, pip))


def test_the_torch_index_is_asked_only_where_no_wheel_is_here(tmp_path: Path, wheels: Path) -> None:
    """pip.conf has the torch index only if no locked wheel is on this disk."""
    for number, links in enumerate(((), (str(wheels),))):
        folder = tmp_path / str(number)
        folder.mkdir()
        build.hand_in(request(tmp_path), PipSources(find_links=links), {"torch": "2.13.0+cpu"}, "", folder)
        assert (cpu.MODULE.torch_index in (folder / "pip.conf").read_text()) is not bool(links)


def test_what_is_built_for_torch_comes_from_its_index(tmp_path: Path) -> None:
    """For torchvision pip.conf has the torch index."""
    build.hand_in(request(tmp_path), PipSources(), {"torchvision": None}, "", tmp_path)
    assert cpu.MODULE.torch_index in (tmp_path / "pip.conf").read_text()


def test_the_torch_index_is_not_asked_for_an_image_that_adds_no_torch(tmp_path: Path) -> None:
    """For an image with horovod alone pip.conf does not have the torch index."""
    build.hand_in(request(tmp_path), PipSources(), {"horovod": "0.28.1"}, "", tmp_path)
    assert cpu.MODULE.torch_index not in (tmp_path / "pip.conf").read_text()


def test_a_failed_build_shows_its_last_lines_without_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed build raises HostError, and neither it nor build.log, mode 0600, has the URL's password."""
    line = f"Looking in indexes: https://me:{CANARY}@i.example/simple"

    def stream(argv: list[str], on_line: object, **_: object) -> process.CompletedProcess:
        """Print the line with the password; return code 1."""
        on_line(line)  # type: ignore[operator]
        return process.CompletedProcess(tuple(argv), 1, line, "")

    monkeypatch.setattr(process, "stream", stream)
    monkeypatch.setattr(DockerEngine, "context", lambda _: "default")
    with pytest.raises(HostError, match=r"https://\[REDACTED\]@i\.example") as caught:
        build.run(catalog.dockerfile("cpu"), [], request(tmp_path), print)
    log = tmp_path / ".lab/build.log"
    assert CANARY not in caught.value.message + log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600


UNKNOWN = "ERROR: No matching distribution found for {}"
RETRIED = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError': /simple/nltk/"


@pytest.mark.parametrize(
    ("lines", "message", "hint"),
    [
        (
            [UNKNOWN.format("Nltkk<4")],
            "the package index has no version that fits Nltkk<4",
            "check its name and version",
        ),
        ([UNKNOWN.format("torch==2.13.0")], "No matching distribution found for torch==2.13.0", "less "),
        (
            [RETRIED, *["..."] * 99, UNKNOWN.format("nltkk")],
            "the package index is unreachable",
            "check LAB_PIP_INDEX_URL",
        ),
        ([RETRIED, UNKNOWN.format("torch==2.13.0")], "the package index is unreachable", "check LAB_PIP_INDEX_URL"),
    ],
)
def test_a_misspelt_name_is_not_an_index_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], message: str, hint: str
) -> None:
    """`No matching distribution` for a package asked for is its name, after failed connections the index."""

    def stream(argv: list[str], on_line: Callable[[str], None], **_: object) -> process.CompletedProcess:
        """Print the planted lines; return code 1 with the last 30."""
        for line in lines:
            on_line(line)
        return process.CompletedProcess(tuple(argv), 1, "\n".join(lines[-30:]), "")

    monkeypatch.setattr(process, "stream", stream)
    monkeypatch.setattr(DockerEngine, "context", lambda _: "default")
    with pytest.raises(HostError) as caught:
        build.run(catalog.dockerfile("cpu"), [], request(tmp_path), print, asked={"nltkk"})
    assert message in caught.value.message
    assert caught.value.hint.startswith(hint)
    assert ("has no" in caught.value.message) == (hint == "check its name and version")


def test_apt_sources_for_another_release_leave_third_parties_out() -> None:
    """for_release() keeps Debian's own sources, signed and renamed to trixie; for ubuntu it is empty."""
    parsed = tuple(apt.parse_list(APT_SOURCES))
    signed = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    assert apt.for_release(parsed, "debian", "bookworm", "trixie").splitlines() == [
        f"{signed} http://mirror.example/debian trixie main",
        f"{signed} http://mirror.example/debian trixie-updates main",
        f"{signed} http://mirror.example/secure trixie-security main",
    ]
    assert apt.for_release(parsed, "ubuntu", "bookworm", "noble") == ""


def test_an_ubuntu_image_gets_the_component_that_has_pdsh_and_open_mpi() -> None:
    """for_release() of an Ubuntu source adds `universe`."""
    (source,) = apt.parse_list("deb http://archive.ubuntu.com/ubuntu noble main restricted")
    assert apt.for_release((source,), "ubuntu", "noble", "jammy") == (
        "deb [signed-by=/usr/share/keyrings/ubuntu-archive-keyring.gpg] "
        "http://archive.ubuntu.com/ubuntu jammy main universe\n"
    )


def test_a_named_mirror_serves_debian_images_only() -> None:
    """apt_list() of a mirror has three Debian suites; for another distribution it is empty."""
    lines = build.apt_list("debian", "bookworm", "https://m.example/debian/").splitlines()
    assert [line.split()[2:4] for line in lines] == [
        ["https://m.example/debian", "bookworm"],
        ["https://m.example/debian", "bookworm-updates"],
        ["https://m.example/debian-security", "bookworm-security"],
    ]
    assert build.apt_list("other", "x", "https://m.example/debian") == ""


def test_progress_is_one_line_when_a_step_works_and_one_when_it_is_done() -> None:
    """Progress says each step when it works and when it is done or cached; internal steps are left out."""
    messages: list[str] = []
    progress = build.Progress(messages.append)
    for line in (
        "#1 [internal] load build definition", "#1 DONE 0.0s", "#7 [context wheels] load from client", "#7 DONE 1s",
        "#8 [system 2/2] RUN apt-get", "#8 0.5 Get:1", "#8 0.6 Get:2", "#8 DONE 23.4s", "",
        "#9 [python 1/1] RUN pip", "#9 CACHED", "#10 exporting to image", "#10 DONE 4.7s",
    ):  # fmt: skip
        progress.read(line)
    assert messages == ["  system 2/2 ...", "  system 2/2: 23.4 s", "  python 1/1: cached", "  exporting: 4.7 s"]


@pytest.fixture
def docker_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a folder of two Dockerfiles in place of labctl's, `under` and `over` built on it; return it."""
    folder = tmp_path / "docker"
    folder.mkdir()
    for name, base in (("under", "debian:bookworm-slim"), ("over", "labctl/under")):
        (folder / f"{name}.Dockerfile").write_text(
            f"# {name}\nARG BASE_IMAGE={base}\nFROM ${{BASE_IMAGE}}\n"
            f"RUN --mount=type=bind,source={name}.lock,target=/lock \\\n    true\n"
            f"COPY --chmod=755 labnode.py /labnode.py\nCOPY --from=elsewhere /made /\n"
        )
        (folder / "labnode.py").touch()
        (folder / f"{name}.lock").write_text("one==1\n")
    monkeypatch.setattr(resources, "path", tmp_path.joinpath)
    return folder


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("labctl/over", "over"),
        ("labctl/over:latest", "over"),
        ("labctl/over:mine", None),
        ("labctl/base", None),
        ("over", None),
        ("elsewhere/over", None),
    ],
)
def test_labctls_own_images_are_known_by_their_names(docker_files: Path, image: str, name: str | None) -> None:
    """name_of() is the Dockerfile's name for labctl/NAME and its `latest`, else None."""
    assert catalog.name_of(image) == name


def test_an_image_built_on_another_of_labctls_is_recognised(docker_files: Path) -> None:
    """base_of("over") is `under`, and of `under` it is None."""
    assert catalog.base_of("over") == "under"
    assert catalog.base_of("under") is None


@pytest.mark.parametrize("changed", ["over.Dockerfile", "over.lock", "under.Dockerfile", "under.lock", "labnode.py"])
def test_an_image_is_stale_when_its_files_or_those_below_it_change(docker_files: Path, changed: str) -> None:
    """A changed file of `over`, or of `under` below it, makes `over` stale."""
    labels = {catalog.INPUTS_LABEL: catalog.inputs_hash("over")}
    assert not catalog.is_stale(labels, "over")
    with (docker_files / changed).open("a") as file:
        file.write("\n")
    assert catalog.is_stale(labels, "over")


def test_an_image_is_stale_without_a_label_and_with_that_of_another(docker_files: Path) -> None:
    """An image without the inputs label, or with another image's, is stale."""
    assert catalog.is_stale({}, "under")
    assert catalog.is_stale({catalog.INPUTS_LABEL: catalog.inputs_hash("over")}, "under")


def test_what_stands_above_an_image_does_not_make_it_stale(docker_files: Path) -> None:
    """A changed file of `over` does not change the inputs of `under`."""
    before = catalog.inputs_hash("under")
    (docker_files / "over.lock").write_text("two==2\n")
    assert catalog.inputs_hash("under") == before


def test_an_image_without_a_dockerfile_is_an_error_that_names_the_file(docker_files: Path) -> None:
    """dockerfile() of an unknown image raises HostError that names the file."""
    with pytest.raises(HostError, match=r"other\.Dockerfile"):
        catalog.dockerfile("other")


@pytest.fixture
def engine(docker_files: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """Replace the engine and builds: return labels of local images by name, to which each build adds its own."""
    here: dict[str, dict[str, str]] = {}

    def image(_: DockerEngine, name: str) -> dict[str, object] | None:
        """Return the description of an image that is here, else None."""
        return {"Id": "id", "Size": 1000, "Config": {"Labels": here[name]}} if name in here else None

    def buildx_run(dockerfile: Path, arguments: list[str], *_: object) -> None:
        """Add the image of `--tag` with the labels of the arguments."""
        labels = (word for option, word in pairwise(arguments) if option == "--label")
        here[arguments[arguments.index("--tag") + 1]] = dict(label.split("=", 1) for label in labels)

    monkeypatch.setattr(DockerEngine, "image", image)
    monkeypatch.setattr(build, "release_of", lambda *_: {})
    monkeypatch.setattr(build, "run", buildx_run)
    monkeypatch.setattr(build, "ensure_base", lambda name, *_: name)
    monkeypatch.setattr(package_sources, "of_host", PipSources)
    return here


def test_the_base_is_built_first_where_it_is_missing_or_old(engine: dict[str, dict[str, str]], tmp_path: Path) -> None:
    """build() of `over` builds a missing or stale `under` first, and says so."""
    for labels in (None, {catalog.INPUTS_LABEL: "of other files"}):
        engine.clear()
        if labels:
            engine["labctl/under"] = labels
        messages: list[str] = []
        build.build(request(tmp_path, image="over", tag="labctl/over"), messages.append)
        assert list(engine) == ["labctl/under", "labctl/over"]
        assert not catalog.is_stale(engine["labctl/under"], "under")
        assert "labctl/under" in messages[0]


def test_a_base_that_is_here_is_left_alone(engine: dict[str, dict[str, str]], tmp_path: Path) -> None:
    """build() of `over` keeps a current `under`."""
    engine["labctl/under"] = {catalog.INPUTS_LABEL: catalog.inputs_hash("under"), "kept": "yes"}
    build.build(request(tmp_path, image="over", tag="labctl/over"), print)
    assert engine["labctl/under"]["kept"] == "yes"


def test_an_image_that_a_person_built_on_labctls_is_not_written_over(
    engine: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """build() raises HostError for a tag of a user's image that was built on labctl's, and keeps it."""
    build.build(request(tmp_path, image="under", tag="labctl/under"), print)
    engine["mine:1"] = inherited = {**engine["labctl/under"]}
    with pytest.raises(HostError, match=r"image mine:1 here was not built by labctl, so it is not replaced"):
        build.build(request(tmp_path, image="under", tag="mine:1"), print)
    assert engine["mine:1"] is inherited


def test_an_image_that_a_person_built_on_labctls_under_a_name_like_labctls_is_theirs(
    engine: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """A user's image named labctl/mine, built on labctl's, raises HostError in build() and stays."""
    build.build(request(tmp_path, image="under", tag="labctl/under"), print)
    engine["labctl/mine"] = inherited = {**engine["labctl/under"], "mine": "yes"}
    with pytest.raises(HostError, match=r"image labctl/mine here was not built by labctl, so it is not replaced"):
        build.build(request(tmp_path, image="under", tag="labctl/mine"), print)
    assert engine["labctl/mine"] is inherited


@pytest.mark.parametrize("tag", ["labctl/under", "labctl/under:latest"])
def test_latest_is_what_docker_takes_where_no_tag_is_named(
    engine: dict[str, dict[str, str]], tmp_path: Path, tag: str
) -> None:
    """An image built as labctl/under is labctl's under that name and `latest`, not under another tag."""
    build.build(request(tmp_path, image="under", tag=tag), print)
    labels = engine[tag]
    assert [catalog.is_labctls(name, labels) for name in ("labctl/under", "labctl/under:latest", "labctl/under:1")] == [
        True,
        True,
        False,
    ]


def test_what_labctl_built_under_a_persons_tag_it_builds_again(
    engine: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """A tag of a user's, built by labctl before, is built again."""
    for _ in range(2):
        build.build(request(tmp_path, image="under", tag="mine:1"), print)
    assert engine["mine:1"][catalog.INPUTS_LABEL] == catalog.inputs_hash("under")


@pytest.mark.parametrize(
    ("setting", "image", "tag"),
    [
        ("", "cpu", "labctl/cpu"),
        ("mine:1", "cpu", "mine:1"),
        ("labctl/horovod", "horovod", "labctl/horovod"),
    ],
)
def test_which_image_is_built_under_which_name(
    setting: str, image: str, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """build_image() builds the Dockerfile of LAB_IMAGE or of the accelerator, tagged with LAB_IMAGE."""
    built: list[BuildRequest] = []
    monkeypatch.setattr(build, "build", lambda request, _: built.append(request))
    flags = {"LAB_ACCELERATOR": "cpu", "LAB_IMAGE": setting}
    context = Context(directory=tmp_path, environ={}, emit=lambda _: None, flags=flags)
    prepare.build_image(context, cluster_of(context))
    assert [(request.image, request.tag) for request in built] == [(image, tag)]
