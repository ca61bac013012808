"""Image of a lab with the user's own packages."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.builders import workload

from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.deploy import images
from labctl.backends.docker.images import build, catalog, foreign, package_sources, packages
from labctl.backends.docker.images.build import BuildRequest
from labctl.backends.docker.images.package_sources import PipSources
from labctl.backends.docker.images.packages import Additions
from labctl.config.context import Context
from labctl.errors import ConfigError, HostError


def at(directory: Path, **flags: str) -> Context:
    """Return the context of this directory with these flags."""
    return Context(directory=directory, environ={}, emit=lambda _: None, flags=flags)


def dockerfile(folder: Path, text: str = "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nCOPY patch /patch\n") -> Path:
    """Make a folder with this Dockerfile and a file `patch`; return the Dockerfile's path."""
    folder.mkdir()
    (folder / "patch").write_text("one")
    (folder / "Dockerfile").write_text(text)
    return folder / "Dockerfile"


def test_a_lab_without_packages_has_the_plain_image(tmp_path: Path) -> None:
    """Without packages of() is empty and tag() is the base image's name."""
    assert packages.of(at(tmp_path).settings()) == Additions()
    assert packages.tag("labctl/cpu", Additions()) == "labctl/cpu"


def test_the_name_says_what_is_in_it_whatever_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """tag() is the same for another order of packages, and differs by base, kind, packages and labctl's files."""
    tag = packages.tag("labctl/cpu", Additions(("nltk", "einops"), ("git",)))
    assert re.fullmatch(r"labctl/packages:[0-9a-f]{12}", tag)
    assert tag == packages.tag("labctl/cpu", Additions(("einops", "nltk"), ("git",)))
    variants = (
        packages.tag("mine:1", Additions(("nltk", "einops"), ("git",))),
        packages.tag("labctl/cpu", Additions(("nltk", "einops", "git"))),
        packages.tag("labctl/cpu", Additions(("nltk",), ("git",))),
    )
    assert len({tag, *variants}) == 4
    monkeypatch.setattr(catalog, "inputs_hash", lambda _: "of a newer labctl")
    assert packages.tag("labctl/cpu", Additions(("nltk", "einops"), ("git",))) != tag


def test_an_image_of_a_persons_dockerfile_is_known_by_what_its_build_reads(tmp_path: Path) -> None:
    """tag() of a Dockerfile changes with the content and the place of a file beside it, and with packages."""
    path = dockerfile(tmp_path / "image")
    additions = packages.of(at(tmp_path, LAB_DOCKERFILE="image/Dockerfile").settings())
    assert additions == Additions(dockerfile=str(path))
    tag = packages.tag("labctl/cpu", additions)
    assert tag == packages.tag("labctl/cpu", additions)
    (path.parent / "patch").write_text("two")
    other = packages.tag("labctl/cpu", additions)
    (path.parent / "sub").mkdir()
    (path.parent / "patch").rename(path.parent / "sub/patch")
    moved = packages.tag("labctl/cpu", additions)
    assert len({tag, other, moved, packages.tag("labctl/cpu", Additions(("nltk",), dockerfile=str(path)))}) == 4


def test_two_dockerfiles_of_one_folder_are_two_images(tmp_path: Path) -> None:
    """tag() differs for two Dockerfiles in one folder."""
    file = dockerfile(tmp_path / "image")
    other = file.with_name("other.Dockerfile")
    other.write_text("ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\n")
    assert len({packages.tag("labctl/cpu", Additions(dockerfile=str(path))) for path in (file, other)}) == 2


def test_a_file_beside_a_dockerfile_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file beside the Dockerfile that cannot be read raises ConfigError that names it."""
    path = dockerfile(tmp_path / "image")

    def read_bytes(file: Path) -> bytes:
        """Raise PermissionError for `patch`; return nothing of other files."""
        if file.name == "patch":
            raise PermissionError(13, "Permission denied", str(file))
        return b""

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(ConfigError, match=r"LAB_DOCKERFILE: .*/image/patch: cannot be read: Permission denied"):
        packages.tag("labctl/cpu", Additions(dockerfile=str(path)))


@pytest.mark.parametrize(
    "text",
    [
        "ARG BASE_IMAGE=labctl/cpu\nFROM --platform=linux/amd64 $BASE_IMAGE\n",
        "FROM debian:12 AS tools\nFROM ${BASE_IMAGE} as lab\nCOPY --from=tools /bin/true /bin/it\n",
        "FROM ${BASE_IMAGE} AS lab\nFROM debian:12 AS tools\nFROM LAB\n",
        "FROM ${BASE_IMAGE}\nRUN <<EOF python\nfrom os import path\nEOF\n",
    ],
)
def test_a_dockerfile_whose_last_stage_is_on_the_labs_image_is_taken(tmp_path: Path, text: str) -> None:
    """folder_of() accepts a Dockerfile whose last FROM is BASE_IMAGE or a stage on it."""
    assert packages.folder_of(dockerfile(tmp_path / "image", text))


@pytest.mark.parametrize(
    "text",
    [
        "FROM debian:12\n# not ${BASE_IMAGE}\n",
        "FROM ${BASE_IMAGE} AS lab\nFROM debian:12\nCOPY --from=lab /etc/hosts /\n",
        "FROM $BASE_IMAGES\n",
    ],
)
def test_a_dockerfile_that_leaves_the_labs_image_out_is_refused(tmp_path: Path, text: str) -> None:
    """A Dockerfile whose last FROM is another image raises ConfigError with the lines to write."""
    path = dockerfile(tmp_path / "image", text)
    with pytest.raises(ConfigError, match="image/Dockerfile: not built on the lab's image") as caught:
        packages.tag("labctl/cpu", Additions(dockerfile=str(path)))
    assert caught.value.hint == "ARG BASE_IMAGE, then FROM ${BASE_IMAGE} as its last FROM"


@pytest.mark.parametrize("name", [".env", "lab/.env", "lab/.lab/nodes/worker-0/ssh/id_ed25519", ".netrc"])
def test_a_dockerfile_beside_or_above_a_labs_secrets_is_refused(tmp_path: Path, name: str) -> None:
    """A Dockerfile whose folder has .env, an ssh key or .netrc raises ConfigError that names it."""
    path = dockerfile(tmp_path / "image")
    (path.parent / name).parent.mkdir(parents=True, exist_ok=True)
    (path.parent / name).write_text("HF_TOKEN=hf_secret\n")
    with pytest.raises(ConfigError, match=f"its folder goes into the build, and holds {re.escape(name)}"):
        packages.tag("labctl/cpu", Additions(dockerfile=str(path)))


def test_a_dockerfile_that_is_not_there_is_named_with_its_setting(tmp_path: Path) -> None:
    """A missing LAB_DOCKERFILE raises ConfigError with setting and path."""
    with pytest.raises(ConfigError, match=r"LAB_DOCKERFILE: .*/gone: cannot be read: No such file"):
        packages.tag("labctl/cpu", packages.of(at(tmp_path, LAB_DOCKERFILE="gone").settings()))


Images = dict[str, dict[str, Any]]
START = ["/usr/bin/python3", "-I", foreign.PROGRAM, "start"]
NLTK = Additions(("nltk",))


def described(identity: str, **config: Any) -> dict[str, Any]:
    """Return an image's description with this id, started as a node, with these changes of its configuration."""
    return {"Id": identity, "Size": 1, "Config": {"Entrypoint": START, "Labels": {}, **config}}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Images:
    """Replace the engine and builds: return local images by name; each build adds its own, with its ``lock``."""
    here = {"labctl/cpu": described("sha256:cpu", Labels={catalog.BASE_LABEL: "debian:12"})}
    here["mine:1"] = described("sha256:mine")

    def run(file: Path, arguments: list[str], request: BuildRequest, *_: object, **__: object) -> None:
        """Add the image of `--tag`, with the arguments' labels and lock, and the Dockerfile's ENTRYPOINT and USER."""
        given = dict(pairwise(arguments))
        labels = dict(
            word.split("=", 1) for option, word in pairwise(arguments) if option in ("--label", "--build-context")
        )
        lock = Path(labels.pop("wanted", "/nonexistent"), "lock.txt")
        start = ["other"] if file.parent.name != "docker" and "ENTRYPOINT" in file.read_text() else START
        user = "me" if file.parent.name != "docker" and "USER" in file.read_text() else ""
        here[given["--tag"]] = {
            **described(f"sha256:{len(here)}", Labels=labels, Entrypoint=start, User=user),
            "lock": lock.read_text() if lock.is_file() else "",
        }

    monkeypatch.setattr(DockerEngine, "image", lambda _, name: here.get(name))
    monkeypatch.setattr(DockerEngine, "file_of", lambda *_: "nltk==3.9\ntorch==2.13.0+cpu\nmine @ file:///mine\n")
    monkeypatch.setattr(build, "release_of", lambda *_: {})
    monkeypatch.setattr(build, "run", run)
    monkeypatch.setattr(package_sources, "of_host", PipSources)
    return here


def make(directory: Path, base: str, additions: Additions) -> str:
    """Make the image of these packages on this base; return its tag."""
    tag = packages.tag(base, additions)
    request = BuildRequest(image="cpu", tag=tag, directory=directory)
    assert packages.make(request, base, additions, lambda _: None)["image"] == tag
    return tag


def test_what_the_engine_has_of_the_same_base_is_not_built_again(engine: Images, tmp_path: Path) -> None:
    """make() keeps an image of the same base id, and builds it again when the base's id differs."""
    made = engine[make(tmp_path, "labctl/cpu", NLTK)]
    assert engine[make(tmp_path, "labctl/cpu", NLTK)] is made
    engine["labctl/cpu"]["Id"] = "sha256:another"
    assert engine[make(tmp_path, "labctl/cpu", NLTK)] is not made


def test_an_image_with_additions_carries_what_labctls_own_was_built_on(engine: Images, tmp_path: Path) -> None:
    """Both images, with Dockerfile and packages, are labelled with the root base and the base's id."""
    path = dockerfile(tmp_path / "image")
    for base, root in (("labctl/cpu", "debian:12"), ("mine:1", "mine:1")):
        tag = make(tmp_path, base, Additions(("nltk",), dockerfile=str(path)))
        labels = [
            engine[name]["Config"]["Labels"] for name in (packages.tag(base, Additions(dockerfile=str(path))), tag)
        ]
        assert [image[catalog.BASE_LABEL] for image in labels] == [root, root]
        assert [image[catalog.BASE_ID_LABEL] for image in labels] == [engine[base]["Id"]] * 2


@pytest.mark.parametrize("base", ["labctl/cpu", "mine:1"])
def test_versions_are_kept_for_the_same_base(engine: Images, tmp_path: Path, base: str) -> None:
    """A rebuild on the same base gets the lock of the last one; on another id only if the base is labctl's."""
    tag = make(tmp_path, base, NLTK)
    assert engine.pop(tag)["lock"] == ""
    assert engine.pop(make(tmp_path, base, NLTK))["lock"].splitlines()[1:] == ["nltk==3.9"]
    engine[base]["Id"] = "sha256:another"
    kept = engine[make(tmp_path, base, NLTK)]["lock"]
    # labctl's own of another build has the same files; of anyone's nothing is known.
    assert bool(kept) == (base == "labctl/cpu")


@pytest.mark.parametrize(
    ("lines", "hint"),
    [
        ('ENTRYPOINT ["other"]\n', "remove its ENTRYPOINT"),
        ("USER me\n", "remove its USER"),
        ('USER me\nENTRYPOINT ["other"]\n', "remove its ENTRYPOINT and USER"),
    ],
)
def test_a_dockerfile_whose_image_does_not_start_as_a_node_is_refused(
    engine: Images, tmp_path: Path, lines: str, hint: str
) -> None:
    """A Dockerfile with ENTRYPOINT or USER raises HostError each time, with what to remove as hint."""
    path = dockerfile(tmp_path / "image", f"FROM ${{BASE_IMAGE}}\n{lines}")
    additions = Additions(dockerfile=str(path))
    # Again, once the engine has it.
    for _ in range(2):
        with pytest.raises(HostError, match=r"LAB_DOCKERFILE: image .* does not start as a node") as caught:
            make(tmp_path, "labctl/cpu", additions)
        assert caught.value.hint == hint


def test_labctl_can_build_its_own_images_and_those_with_packages() -> None:
    """is_own() is True for an image of labctl's and labctl/packages:HASH, else False."""
    names = ("labctl/cpu", "labctl/packages:0123456789ab", "labctl/packages", "mine:1", "labctl/unknown")
    assert [packages.is_own(name) for name in names] == [True, True, False, False, False]


def test_a_file_of_requirements_comes_to_those_that_are_named(tmp_path: Path) -> None:
    """LAB_REQUIREMENTS adds the file's packages, normalized and without comments, to LAB_PACKAGES."""
    (tmp_path / "requirements.txt").write_text("# what it takes\ntransformers >= 4, < 5   # not 5\n\nnltk[all]\n")
    settings = at(tmp_path, LAB_REQUIREMENTS="requirements.txt", LAB_PACKAGES="einops").settings()
    assert packages.of(settings).python == ("einops", "transformers>=4,<5", "nltk[all]")


@pytest.mark.parametrize("line", ["-r other.txt", "git+https://example.com/x", "--index-url https://x", "a b", "-e ."])
def test_what_is_no_name_with_a_version_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    """A line that is no name with a version raises ConfigError with file and line number."""
    (tmp_path / "requirements.txt").write_text(f"nltk\n{line}\n")
    with pytest.raises(ConfigError, match=r"requirements\.txt:2: "):
        at(tmp_path, LAB_REQUIREMENTS="requirements.txt").settings()


def test_a_file_of_requirements_that_is_not_there_is_named_with_its_setting(tmp_path: Path) -> None:
    """A missing LAB_REQUIREMENTS raises ConfigError with its line in .env and the path."""
    (tmp_path / ".env").write_text("LAB_NAME=demo\nLAB_REQUIREMENTS=gone.txt\n")
    with pytest.raises(ConfigError, match=r"LAB_REQUIREMENTS \(\.env:2\): .*/gone.txt: cannot be read: No such file"):
        at(tmp_path).settings()


@pytest.mark.parametrize(
    ("key", "value"),
    [("LAB_PACKAGES", "a; rm -rf /"), ("LAB_PACKAGES", "--pre"), ("LAB_APT", "-o=x"), ("LAB_APT", "A")],
)
def test_a_setting_that_is_no_list_of_packages_is_refused(tmp_path: Path, key: str, value: str) -> None:
    """A LAB_PACKAGES or LAB_APT that is no list of names raises ConfigError."""
    with pytest.raises(ConfigError, match=key):
        at(tmp_path, **{key: value}).settings()


def test_a_workloads_packages_come_to_those_of_the_lab(tmp_path: Path) -> None:
    """for_workload() joins the lab's packages and the workload's, with the workload as their origin."""
    task = workload(packages=("nltk", "einops"), apt=("git",))
    here = at(tmp_path, LAB_PACKAGES="einops")
    settings = images.for_workload(here, here.settings(), task)
    assert packages.of(settings) == Additions(("einops", "nltk"), ("git",))
    assert settings.origin("LAB_PACKAGES") == "workload hello"
    assert settings.text("LAB_IMAGE") == ""


def test_packages_of_another_workload_do_not_come_along(tmp_path: Path) -> None:
    """for_workload() replaces another workload's packages, but a workload without any keeps them."""
    here = at(tmp_path, LAB_PACKAGES="einops")
    here.keep_image(images.for_workload(here, here.settings(), workload(name="other", packages=("nltk",))))
    assert packages.of(here.settings()).python == ("einops", "nltk")
    alone = images.for_workload(here, here.settings(), workload(packages=("sacrebleu",)))
    assert packages.of(alone).python == ("einops", "sacrebleu")
    assert packages.of(images.for_workload(here, here.settings(), workload())).python == ("einops", "nltk")


def test_an_image_that_labctl_does_not_have_is_refused_with_those_that_it_has(tmp_path: Path) -> None:
    """for_workload() with an unknown image raises ConfigError with the known ones as hint."""
    with pytest.raises(ConfigError, match="unknown image `mine`") as caught:
        images.for_workload(at(tmp_path), at(tmp_path).settings(), workload(image="mine"))
    assert "horovod" in caught.value.hint


def test_a_run_says_where_the_labs_image_is_not_the_workloads(tmp_path: Path) -> None:
    """remark() tells of a LAB_IMAGE other than the workload's; it is empty for the same one or none."""
    asking = workload(name="mnist-horovod", image="horovod")
    notices = [
        images.remark(images.for_workload(here, here.settings(), asking), asking)
        for image in ({}, {"LAB_IMAGE": "labctl/horovod"}, {"LAB_IMAGE": "mine:1"})
        for here in [at(tmp_path, **image)]
    ]
    assert notices == ["", "", "LAB_IMAGE is mine:1, and mnist-horovod asks for labctl/horovod; LAB_IMAGE is used"]
