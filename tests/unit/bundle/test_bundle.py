"""A lab in one file: its content, exclusions, and incomplete files, which change nothing."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.builders import workload
from support.fakehost import FakeHost
from support.imagefile import image_archive

from labctl.backends.docker.deploy import images
from labctl.backends.docker.images import catalog, local, packages
from labctl.backends.docker.images.archive import Archive
from labctl.bundle import load, save
from labctl.bundle.format import Bundle, BundleWriter
from labctl.cli.bundle import loaded_text
from labctl.config import dotenv, settings
from labctl.config.context import Context
from labctl.errors import ConfigError, HostError
from labctl.model import Event, HostFailure
from labctl.system import filelock, process
from labctl.system.process import CompletedProcess

Loads = Callable[..., tuple[load.LoadedBundle, dict[str, str], list[str]]]

NAME = "lab/node:latest"
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n"
CANARY = "s3cr3t-canary"
STAYS = (".labctl.lock", "huggingface/token")
ENV = f"""\
# A comment
LAB_NAME=demo
LAB_IMAGE={NAME}
LAB_ACCELERATOR=cpu
LAB_BASE_IMAGE=debian@sha256:abc
HF_TOKEN={CANARY}
LAB_ENV_API_KEY={CANARY}
LAB_ENV_ADDRESS=me@example.com
LAB_PIP_INDEX_URL=https://me:{CANARY}@index.example/simple
HTTPS_PROXY=me:{CANARY}@proxy.example:3128
LAB_HOSTS=hosts.txt
#HF_TOKEN=
# HF_TOKEN={CANARY}
#LAB_PIP_INDEX_URL=https://me:{CANARY}@index.example/simple
LAB_SHM_SIZE=1g # with the token: hf_{CANARY.replace("-", "0")}
"""


@pytest.fixture(autouse=True)
def _engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace process.run by a `docker save` that copies a small archive, and report every image as present."""
    made = image_archive(tmp_path / "saved.tar", NAME, [b"l" * 3000])

    def run(argv: Any, **_: object) -> CompletedProcess:
        """Copy the prepared archive to the --output path of `docker save`; fail on any other command."""
        assert argv[:3] == ["docker", "save", "--output"]
        shutil.copy(made, argv[3])
        return CompletedProcess(tuple(argv), 0, "", "")

    monkeypatch.setattr(process, "run", run)
    monkeypatch.setattr(local, "described", lambda _: {"Id": "here", "Size": 3000})


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """Write a lab directory with settings, workloads, private keys, secrets, links and a run; return its path."""
    files = {
        ".env": ENV,
        "hosts.txt": "h1\nh2\n",
        "hostfiles/two": "worker-0 slots=1\n",
        "workloads/mine/train.py": "print()\n",
        "workloads/mine/key.pem": KEY,
        "workloads/mine/late.pem": "Bag Attributes\n" * 100 + KEY,
        "workloads/mine/account.json": json.dumps({"private_key": KEY}),
        "workloads/mine/.env": f"PASSWORD={CANARY}",
        "workloads/mine/.netrc": f"password {CANARY}",
        "workloads/mine/__pycache__/x.pyc": "x",
        ".lab/nodes/worker-0/compose.yml": "services: {}\n",
        ".lab/nodes/worker-0/ssh/ssh_host_ed25519_key": KEY,
        ".lab/nodes/worker-0/secrets/hf_token": CANARY,
        ".lab/lock": "",
        "runs/1/result.json": "{}",
        "other.txt": "not of the lab",
    }
    root = tmp_path / "lab"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "workloads/mine/train.py").chmod(0o755)
    (root / "workloads/mine/same.py").symlink_to("train.py")
    (root / "workloads/mine/far").symlink_to("/etc/passwd")
    (root / "workloads/mine/round").symlink_to("far/../train.py")
    return root


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Write a cache with one model, a lock file and a token, which no bundle may contain; return its path."""
    root = tmp_path / "cache"
    snapshot = root / "huggingface/hub/models--m/snapshots/1"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "blobs").mkdir()
    (snapshot.parents[1] / "blobs/b").write_text("weights")
    (snapshot / "model").symlink_to("../../blobs/b")
    (root / ".labctl.lock").write_text("")
    (root / "huggingface/token").write_text(CANARY)
    return root


def context(directory: Path, **flags: str) -> Context:
    """Return a Context for this directory with HOME=/home/me, no events and these flags."""
    return Context(directory=directory, environ={"HOME": "/home/me"}, emit=lambda _: None, flags=flags)


@pytest.fixture
def file(lab: Path, tmp_path: Path) -> Path:
    """Save the lab as lab.bundle; return its path."""
    save.save_bundle(context(lab), tmp_path / "lab.bundle")
    return tmp_path / "lab.bundle"


def unpacked(file: Path, directory: Path, *, force: bool = False) -> list[str]:
    """Unpack a bundle's lab files into a directory, without its images; return the paths written."""
    whole = load.checked(file, lambda _: None)
    selected = load.of_lab(whole, whole.below("lab")[".env"], directory, force=force)
    load.write(selected, directory)
    return [str(path.relative_to(directory)) for path in selected]


def tree(directory: Path) -> dict[str, str]:
    """Return the text of each file, or the target of each link, by relative path."""
    return {
        str(path.relative_to(directory)): str(path.readlink()) if path.is_symlink() else path.read_text()
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


# --- what goes in --------------------------------------------------------------------------------------------


def test_the_lab_comes_out_as_it_went_in_less_keys_and_secrets(lab: Path, file: Path, tmp_path: Path) -> None:
    """Save and unpack a lab: files come out unchanged, without keys; secret lines of .env become comments."""
    unpacked(file, tmp_path / "out")
    came = tree(tmp_path / "out")
    assert CANARY not in "".join(came.values())
    assert "PRIVATE KEY" not in "".join(came.values())
    env = came.pop(".env")
    assert came == {name: text for name, text in tree(lab).items() if name in came}
    assert sorted(came) == [
        ".lab/nodes/worker-0/compose.yml",
        "hostfiles/two",
        "hosts.txt",
        "workloads/mine/same.py",
        "workloads/mine/train.py",
    ]
    assert os.access(tmp_path / "out/workloads/mine/train.py", os.X_OK)
    hidden = ("HF_TOKEN", "LAB_ENV_API_KEY", "LAB_PIP_INDEX_URL", "HTTPS_PROXY")
    expected = [
        next((f"# {key}: left out of the bundle" for key in hidden if line.startswith(key)), line)
        for line in ENV.split("\n")
    ]
    expected[12:15] = [f"# {subject}: left out of the bundle" for subject in ("line 13", "line 14", "LAB_SHM_SIZE")]
    assert env.split("\n") == expected


def test_what_is_left_out_is_said(lab: Path, tmp_path: Path) -> None:
    """Save a lab: the result lists each excluded path and .env line with its reason."""
    saved = save.save_bundle(context(lab), tmp_path / "lab.bundle")
    assert {exclusion.path: exclusion.reason for exclusion in saved.excluded} == {
        ".env: HF_TOKEN": "a secret",
        ".env: LAB_ENV_API_KEY": "a secret",
        ".env: LAB_PIP_INDEX_URL": "a secret",
        ".env: HTTPS_PROXY": "a secret",
        "workloads/mine/far": "points outside the lab",
        "workloads/mine/round": "points outside the lab",
        ".env: line 14": "a secret",
        ".env: line 13": "a secret",
        ".env: LAB_SHM_SIZE": "a secret",
        "workloads/mine/.env": "may contain passwords",
        "workloads/mine/.netrc": "may contain passwords",
        "workloads/mine/account.json": "a private key",
        "workloads/mine/key.pem": "a private key",
        "workloads/mine/late.pem": "a private key",
        ".lab/nodes/worker-0/secrets/hf_token": "a secret",
        ".lab/nodes/worker-0/ssh/ssh_host_ed25519_key": "a private key",
    }


def test_what_the_labs_image_is_made_of_goes_along(lab: Path, tmp_path: Path) -> None:
    """Set LAB_DOCKERFILE and LAB_REQUIREMENTS: their files are bundled, so the image tag stays the same."""
    (lab / "image/patches").mkdir(parents=True)
    (lab / "image/Dockerfile").write_text("ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nCOPY patches /patches\n")
    (lab / "image/patches/apply.sh").touch(0o755)
    (lab / "requirements.txt").write_text("nltk\n")
    (lab / ".env").write_text(f"{ENV}LAB_DOCKERFILE=image/Dockerfile\nLAB_REQUIREMENTS=requirements.txt\n")
    tag = packages.tag(NAME, packages.of(context(lab).settings()))
    assert save.save_bundle(context(lab), tmp_path / "lab.bundle").images == (tag,)
    unpacked(tmp_path / "lab.bundle", tmp_path / "out")
    assert packages.tag(NAME, packages.of(context(tmp_path / "out").settings())) == tag


@pytest.mark.parametrize("name", ["/etc/image/Dockerfile", "Dockerfile", "../image/Dockerfile", "runs/1/Dockerfile"])
def test_a_dockerfile_elsewhere_stays_and_is_said(name: str, lab: Path) -> None:
    """Name a Dockerfile outside the lab's folders: it and overrides are left out, each with its reason."""
    (lab / ".env").write_text(f"{ENV}LAB_DOCKERFILE={name}\nLAB_REQUIREMENTS=~/requirements.txt\n")
    (lab / "compose.override.yml").write_text("services: {}\n")
    (lab / ".lab/nodes/worker-0/override.yml").write_text("services: {}\n")
    entries, excluded = save.of_lab(lab, secrets=False)
    assert not [
        member.name for member in entries if any(word in member.name for word in ("ocker", "requirements", "override"))
    ]
    reasons = {exclusion.path: exclusion.reason for exclusion in excluded}
    assert reasons[name] == "not in a subfolder of the lab directory"
    assert reasons["~/requirements.txt"] == "not in the lab directory"
    assert "compose.override.yml" in reasons


def test_what_else_is_in_the_cache_stays_and_is_said(lab: Path, cache: Path, tmp_path: Path) -> None:
    """Add other folders to the cache: only huggingface/ is bundled, and the others are listed as excluded."""
    (cache / "mnist").mkdir()
    (cache / "mnist/train").write_text("x")
    (cache / ".ssh").mkdir()
    (cache / ".ssh/config").write_text("x")
    saved = save.save_bundle(context(lab, HOST_CACHE_PATH=str(cache)), tmp_path / "lab.bundle", cache=True)
    assert {exclusion.path: exclusion.reason for exclusion in saved.excluded if str(cache) in exclusion.path} == {
        f"{cache}/{name}": "only datasets/ and huggingface/ of a cache are saved" for name in (".ssh", "mnist")
    }
    assert all(name.startswith("huggingface/") for name in Bundle(tmp_path / "lab.bundle").below("cache"))


def test_a_clone_in_the_home_may_have_the_name_of_a_system_directory(lab: Path, tmp_path: Path) -> None:
    """Save a lab with HOST_REPO_PATH=~/dev/...: the bundle keeps the line and unpacks."""
    (lab / ".env").write_text(f"{ENV}HOST_REPO_PATH=~/dev/DeepSpeedExamples\n")
    save.save_bundle(context(lab), tmp_path / "lab.bundle")
    assert "HOST_REPO_PATH=~/dev/" in load.settings_of(load.checked(tmp_path / "lab.bundle", lambda _: None))
    unpacked(tmp_path / "lab.bundle", tmp_path / "out")


def test_secrets_go_along_when_they_are_asked_for(lab: Path, tmp_path: Path) -> None:
    """Save with secrets=True: .env and hf_token come out unchanged, and only the owner may read the bundle."""
    save.save_bundle(context(lab), tmp_path / "lab.bundle", secrets=True)
    unpacked(tmp_path / "lab.bundle", tmp_path / "out")
    came = tree(tmp_path / "out")
    assert came[".env"] == ENV
    assert came[".lab/nodes/worker-0/secrets/hf_token"] == CANARY
    assert (tmp_path / "lab.bundle").stat().st_mode & 0o077 == 0


def test_the_pinned_versions_of_labctls_own_images_go_along() -> None:
    """Name the version lock files of labctl/horovod and labctl/cpu; none for another image."""
    assert list(save.locks_of(["labctl/horovod", "labctl/cpu", NAME])) == ["horovod.lock", "cpu.lock"]


def test_a_bundle_is_an_image_archive_too(file: Path) -> None:
    """Read manifest.json from the bundle: its RepoTags name the lab's image."""
    with tarfile.open(file) as tar:
        manifest = tar.extractfile("manifest.json")
        assert manifest
        assert json.load(manifest)[0]["RepoTags"] == [NAME]


def test_a_save_that_fails_leaves_the_file_that_was_there(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a write fail with "No space left on device": HostError, the old bundle stays and no temporary file."""
    (tmp_path / "lab.bundle").write_text("before")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BundleWriter, "add", full)
    with pytest.raises(HostError, match="No space left on device"):
        save.save_bundle(context(lab), tmp_path / "lab.bundle")
    assert (tmp_path / "lab.bundle").read_text() == "before"
    assert list(tmp_path.glob(".lab.bundle*")) == []


def test_an_image_that_is_not_here_is_said(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save a lab whose image is missing: HostError names the image."""
    monkeypatch.setattr(local, "described", lambda _: None)
    with pytest.raises(HostError, match=f"image {NAME} not found on this machine"):
        save.save_bundle(context(lab), tmp_path / "lab.bundle")


def test_a_lab_that_is_up_for_a_workload_is_saved_with_the_image_of_its_settings_too(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep a workload's image: it and LAB_IMAGE are saved; each, if missing, is named with its build command."""
    here = context(lab)
    here.keep_image(images.for_workload(here, here.settings(), workload(packages=("nltk",))))
    kept = packages.tag(NAME, packages.Additions(("nltk",)))
    assert save.save_bundle(here, tmp_path / "lab.bundle").images == (NAME, kept)
    for missing, command in ((NAME, "labctl build"), (kept, "labctl build --workload hello")):
        monkeypatch.setattr(local, "described", lambda name, missing=missing: None if name == missing else {"Size": 1})
        with pytest.raises(HostError, match=f"image {missing} not found on this machine") as caught:
            save.save_bundle(here, tmp_path / "lab.bundle")
        assert caught.value.hint == f"{command}, or docker pull"


# --- what is not whole ---------------------------------------------------------------------------------------


def test_a_file_that_was_cut_off_changes_nothing(file: Path, tmp_path: Path) -> None:
    """Cut the bundle at many offsets: HostError "is truncated" or "is damaged", and nothing is written."""
    with tarfile.open(file) as tar:
        last = tar.getmembers()[-1]
    end = last.offset_data + last.size
    whole = file.read_bytes()
    for place in (0, 1, 600, *(end * tenth // 10 for tenth in range(1, 10)), last.offset, end - 1):
        file.write_bytes(whole[:place])
        with pytest.raises(HostError, match=r"lab\.bundle (is truncated|is damaged)"):
            load.load_bundle(context(tmp_path / "out"), file)
    assert not (tmp_path / "out").exists()


def contents_of(file: Path) -> Iterator[int]:
    """Yield the offset of the middle byte of each member of a tar that is not empty."""
    with tarfile.open(file) as tar:
        yield from (member.offset_data + member.size // 2 for member in tar if member.size)


def test_a_changed_byte_in_any_member_changes_nothing(file: Path, tmp_path: Path) -> None:
    """Flip one bit in each member: HostError "is damaged" each time, and nothing is written."""
    whole = bytearray(file.read_bytes())
    for place in list(contents_of(file)):
        whole[place] ^= 1
        file.write_bytes(whole)
        whole[place] ^= 1
        with pytest.raises(HostError, match="is damaged"):
            load.load_bundle(context(tmp_path / "out"), file)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b" + b"x" * 5000, b"x" * 5000], ids=["empty", "gzip", "other"])
def test_what_is_no_bundle_is_said(tmp_path: Path, content: bytes) -> None:
    """Open an empty, gzip or other file as a bundle: HostError "not a bundle" with a hint."""
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(HostError, match=r"not a bundle") as caught:
        Bundle(tmp_path / "file")
    assert caught.value.hint


ABOUT = {"lab": "x", "written": "today", "labctl": "1", "images": [NAME], "left_out": []}


@pytest.mark.parametrize(
    ("about", "files", "message"),
    [
        (ABOUT, {}, "has no .env"),
        ({}, {"lab/.env": b""}, "does not say which lab"),
        ({**ABOUT, "images": "one"}, {"lab/.env": b""}, "does not say which lab"),
        ({**ABOUT, "images": [1]}, {"lab/.env": b""}, "does not say which lab"),
        (ABOUT, {"lab/.env": b"LAB_NAME=\xff"}, "is not UTF-8"),
        ({**ABOUT, "schema": 2}, {"lab/.env": b""}, "written by another labctl"),
        ({**ABOUT, "schema": None}, {"lab/.env": b""}, "written by another labctl"),
    ],
)
def test_a_whole_bundle_of_no_lab_is_said(
    tmp_path: Path, about: dict[str, Any], files: dict[str, bytes], message: str
) -> None:
    """Load intact bundles without .env or with malformed descriptions: an error says so, and nothing is written."""
    path = image_archive(tmp_path / "odd", NAME, [b"l"])
    with BundleWriter(path, about) as sealer:
        for name, content in files.items():
            sealer.add(name, content)
    with pytest.raises((ConfigError, HostError), match=message):
        load.load_bundle(context(tmp_path / "out"), path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("seal", [b"[]", b"{}", b"null", b"[" * 100_000])
def test_a_seal_of_another_kind_is_said(tmp_path: Path, seal: bytes) -> None:
    """Append a bundle.json that is no valid seal: HostError "is damaged"."""
    path = image_archive(tmp_path / "odd", NAME, [b"l"])
    with tarfile.open(path, "a") as tar:
        member = tarfile.TarInfo("labctl/bundle.json")
        member.size = len(seal)
        tar.addfile(member, io.BytesIO(seal))
    with pytest.raises(HostError, match="is damaged"):
        Bundle(path)


def test_a_load_waits_for_nobody_who_changes_the_lab(file: Path, tmp_path: Path) -> None:
    """Hold the lab's lock while loading: HostError names `labctl up`, and nothing but the lock is written."""
    out = tmp_path / "out"
    with filelock.held(out / filelock.LAB, "labctl up"), pytest.raises(HostError, match=r"`labctl up` by .* holds"):
        load.load_bundle(context(out), file)
    assert sorted(tree(out)) == [".lab/lock"]


def test_a_link_of_the_bundle_itself_leads_its_locks_nowhere(tmp_path: Path) -> None:
    """Load a bundle with a link at .lab/bundle: HostError, and a lock file of the lab stays unchanged."""
    path, out = image_archive(tmp_path / "odd", NAME, [b"l"]), tmp_path / "out"
    with BundleWriter(path, ABOUT) as sealer:
        sealer.add("lab/.env", b"LAB_NAME=x\n")
        sealer.add("lab/.lab/bundle", target="nodes")
        sealer.add("locks/mine.lock", b"theirs")
    (out / ".lab/nodes").mkdir(parents=True)
    (out / ".lab/nodes/mine.lock").write_text("mine")
    with pytest.raises(HostError, match=r"`lab/\.lab/bundle` does not belong in a lab"):
        load.load_bundle(context(out), path)
    assert (out / ".lab/nodes/mine.lock").read_text() == "mine"


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    """Open a missing file as a bundle: ConfigError "No such file"."""
    with pytest.raises(ConfigError, match="No such file"):
        Bundle(tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("lab/../../x", ""),
        ("lab/x", "/etc/passwd"),
        ("lab/x", "../../other"),
        ("lab/x", "../cache/x"),
        ("lab/w/p", "d/.."),
        ("lab/w/p", "../w/./d/../x"),
    ],
)
def test_nothing_leads_out_of_a_bundle(tmp_path: Path, name: str, target: str) -> None:
    """Load a bundle with a member path or link target outside its folder: HostError "unsafe path in bundle"."""
    path = image_archive(tmp_path / "evil", NAME, [b"l"])
    with BundleWriter(path, {}) as sealer:
        sealer.add(name, b"" if target else b"x", target=target)
    with pytest.raises(HostError, match="unsafe path in bundle"):
        load.checked(path, lambda _: None)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """Load a bundle that writes below one of its own links: HostError "unsafe path in bundle"."""
    path = image_archive(tmp_path / "evil", NAME, [b"l"])
    with BundleWriter(path, {}) as sealer:
        sealer.add("lab/a", target="b")
        sealer.add("lab/a/x", b"x")
    with pytest.raises(HostError, match="unsafe path in bundle"):
        load.checked(path, lambda _: None)


@pytest.mark.parametrize("name", ["workloads", ".lab"])
def test_nothing_is_written_through_a_link_that_is_there(lab: Path, tmp_path: Path, name: str) -> None:
    """Put a link in the target directory: HostError names it, and nothing is written on either side."""
    (lab / ".env").write_text(f"LAB_NAME=demo\nLAB_IMAGE={catalog.tag('cpu')}\nLAB_ACCELERATOR=cpu\n")
    save.save_bundle(context(lab), tmp_path / "lab.bundle")
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    out.mkdir()
    (out / name).symlink_to(outside)
    with pytest.raises(HostError, match=f"cannot write {out}/{name}/.* is a link"):
        load.load_bundle(context(out), tmp_path / "lab.bundle")
    assert list(outside.iterdir()) == []
    assert [path.name for path in out.iterdir()] == [name]


@pytest.mark.parametrize(
    "header",
    [
        {"GNU.sparse.map": "a,b", "GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.size": "1"},
        {"size": "9" * 30},
        {"size": "-1536"},
    ],
    ids=lambda header: next(iter(header)) + "=" + next(iter(header.values()))[:3],
)
def test_headers_that_cannot_be_are_damage(tmp_path: Path, header: dict[str, str]) -> None:
    """Open a tar with impossible sparse or size headers: HostError as a bundle and as an image archive."""
    with tarfile.open(tmp_path / "odd", "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("x")
        member.pax_headers = header
        tar.addfile(member)
    with pytest.raises(HostError, match=r"is damaged or not a bundle|is truncated"):
        Bundle(tmp_path / "odd")
    with pytest.raises(HostError, match="is not an image archive"):
        Archive(tmp_path / "odd")


# --- what its writer would have liked ------------------------------------------------------------------------


def crafted(path: Path, members: dict[str, bytes], env: str = "LAB_NAME=x\n") -> Path:
    """Write a valid bundle with these members and .env, without `labctl bundle save`; return its path."""
    with BundleWriter(image_archive(path, NAME, [b"l"]), ABOUT) as sealer:
        for name, content in {"lab/.env": env.encode(), **members}.items():
            sealer.add(name, content)
    return path


@pytest.fixture
def loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loads:
    """Return a function that loads a bundle into ``out``, without its images; set HOME to a test directory."""
    monkeypatch.setattr(load, "hand_out", lambda *_: {})
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def run(
        file: Path, ask: Callable[[str], bool] | None = None, **flags: str
    ) -> tuple[load.LoadedBundle, dict[str, str], list[str]]:
        """Load the bundle into ``out``; return the result, the files there and the warnings."""
        events: list[Event] = []
        environ = {"HOME": str(tmp_path / "home")}
        here = Context(directory=tmp_path / "out", environ=environ, emit=events.append, flags=flags)
        loaded = load.load_bundle(here, file, ask=ask)
        return loaded, tree(tmp_path / "out"), [event.text for event in events if event.kind == "warning"]

    return run


def test_the_cache_goes_where_its_reader_has_one_and_not_where_the_bundle_says(loads: Loads, tmp_path: Path) -> None:
    """Load a bundle that names a cache path: the cache goes to ~/.cache/labctl, and the line becomes a comment."""
    theirs = tmp_path / "home/other"
    theirs.mkdir(parents=True)
    env = f"LAB_NAME=x\nexport HOST_CACHE_PATH={theirs}\n"
    file = crafted(tmp_path / "odd", {"cache/huggingface/hub/b": b"weights"}, env)
    loaded, files, _ = loads(file)
    folder = tmp_path / "home/.cache/labctl"
    assert tree(theirs) == {}
    assert tree(folder) == {"huggingface/hub/b": "weights"}
    assert (loaded.cache, loaded.cache_files) == (str(folder), 1)
    # The lab is to find it there.
    assert files[".env"] == "LAB_NAME=x\n# HOST_CACHE_PATH: this machine's own\n"


def test_a_cache_that_is_named_while_loading_is_the_labs(loads: Loads, tmp_path: Path) -> None:
    """Load with HOST_CACHE_PATH given: the cache goes there, .env says so, and a second load writes no file."""
    file = crafted(tmp_path / "odd", {"cache/datasets/d": b"data"}, "LAB_NAME=x\nHOST_CACHE_PATH=/theirs\n")
    mine = str(tmp_path / "my cache")
    Path(mine).mkdir()
    loaded, files, _ = loads(file, HOST_CACHE_PATH=mine)
    assert loaded.cache == mine
    assert tree(Path(mine)) == {"datasets/d": "data"}
    assert files[".env"].endswith(f"HOST_CACHE_PATH='{mine}'\n")
    assert loads(file, HOST_CACHE_PATH=mine)[0].files == ()


def test_a_bundle_does_not_choose_which_directories_of_this_machine_containers_see(
    loads: Loads, tmp_path: Path
) -> None:
    """Load a bundle that sets host paths and mounts: they are dropped with a warning; paths of flags are kept."""
    env = "LAB_NAME=x\nHOST_CACHE_PATH=~/.config/autostart\nHOST_REPO_PATH=~/.mozilla\nHOST_OPTIMUM_HABANA_PATH=~/b\n"
    env += "LAB_MOUNTS=~/bin:/data\n"
    file = crafted(tmp_path / "odd", {}, env)
    _, files, warned = loads(file)
    assert {entry.key for entry in dotenv.parse(files[".env"], ".env")} == {"LAB_NAME"}
    loaded = settings.load(tmp_path / "out", {"HOME": str(tmp_path / "home")}, {})
    assert loaded.text("HOST_CACHE_PATH") == str(tmp_path / "home/.cache/labctl")
    assert len(warned) == 1
    assert "HOST_CACHE_PATH, HOST_REPO_PATH, HOST_OPTIMUM_HABANA_PATH, LAB_MOUNTS" in warned[0]
    (tmp_path / "out/.env").unlink()
    _, files, warned = loads(file, HOST_REPO_PATH="~/dev/examples", HOST_CACHE_PATH="~/cache")
    kept = {entry.key: entry.value for entry in dotenv.parse(files[".env"], ".env")}
    assert kept == {"LAB_NAME": "x", "HOST_REPO_PATH": "~/dev/examples", "HOST_CACHE_PATH": "~/cache"}
    assert "HOST_OPTIMUM_HABANA_PATH" in warned[0]
    assert "HOST_REPO_PATH" not in warned[0]


def test_only_models_and_data_go_into_a_cache(loads: Loads, tmp_path: Path) -> None:
    """Load a cache with other files: only datasets/ is written here and on a host, and a warning names the rest."""
    startup = ".local/lib/python3.11/site-packages/x.pth"
    members = {f"cache/{name}": b"x" for name in (".ssh/authorized_keys", startup, "huggingface", "datasets/d")}
    file = crafted(tmp_path / "odd", members)
    _, _, warned = loads(file)
    assert tree(tmp_path / "home") == {".cache/labctl/datasets/d": "x"}
    assert ".ssh/authorized_keys" in warned[0]
    host = FakeHost(tmp_path / "rack", "h1")
    loaded = context(tmp_path).settings()
    assert load.send_cache(load.checked(file, lambda _: None), loaded, {"h1": host}, lambda _: None) == {}
    assert [name for name in tree(host.home) if name.endswith((".pth", "authorized_keys"))] == []


@pytest.mark.parametrize(
    "name",
    [
        *("lab/Makefile", "lab/.envrc", "lab/.git/hooks/post-checkout", "lab/.vscode/tasks.json", "lab/conftest.py"),
        *(
            "lab/.devcontainer/devcontainer.json",
            "lab/.lab/x",
            "lab/.lab/nodes/worker-0/override.yml",
            "lab/runs/1/result.json",
            "locks/../x",
            "locks/a/b.lock",
        ),
        *("lab/workloads/.git/hooks/post-checkout", "lab/workloads/a\x1b[2J", "lab/workloads"),
    ],
)
def test_nothing_is_written_that_no_save_writes(loads: Loads, tmp_path: Path, name: str) -> None:
    """Load a bundle with a member that `bundle save` never writes: HostError, and nothing is written."""
    file = crafted(tmp_path / "odd", {name: b"#!/bin/sh\n", "lab/workloads/mine/train.py": b""})
    with pytest.raises(HostError, match=r"unsafe path|does not belong in a lab") as caught:
        loads(file, ask=lambda _: True)
    assert "\x1b" not in caught.value.message
    assert not (tmp_path / "out").exists()


RUN_HERE = ("workloads/mine/.devcontainer/devcontainer.json", "workloads/.envrc", "workloads/Makefile", ".vscode/hosts")


@pytest.mark.parametrize("answer", [True, False, None])
def test_what_programs_of_this_machine_may_run_is_written_if_the_person_says_so(
    loads: Loads, tmp_path: Path, answer: bool | None
) -> None:
    """Load files that other programs may run: they are written only after a yes; else skipped and named."""
    members = {f"lab/{name}": b"x" for name in (*RUN_HERE, "workloads/mine/train.py", "workloads/.gitignore")}
    file = crafted(tmp_path / "odd", members, "LAB_NAME=x\nLAB_HOSTS=.vscode/hosts\n")
    questions: list[str] = []

    def ask(question: str) -> bool:
        """Record the question; return the parametrized answer."""
        questions.append(question)
        return bool(answer)

    loaded, files, warned = loads(file, None if answer is None else ask)
    expected = {".env", "workloads/mine/train.py", "workloads/.gitignore", *(RUN_HERE if answer else ())}
    assert set(files) - {".lab/lock"} == expected
    assert set(loaded.skipped) == (set() if answer else set(RUN_HERE))
    assert all(name in "".join(questions or warned) for name in RUN_HERE)
    assert bool(questions) == (answer is not None)


def test_what_was_written_is_listed(loads: Loads, tmp_path: Path) -> None:
    """Load a bundle: the printed text counts files by folder, and names .env, hosts.txt and the cache."""
    names = ("workloads/a/train.py", "workloads/b/train.py", "hostfiles/two", "hosts.txt")
    members = {**{f"lab/{name}": b"" for name in names}, "locks/cpu.lock": b"", "cache/datasets/d": b""}
    loaded, _, _ = loads(crafted(tmp_path / "odd", members, "LAB_NAME=x\nLAB_HOSTS=hosts.txt\n"))
    assert loaded_text(loaded, tmp_path / "out").splitlines()[1:-1] == [
        "  workloads: 2 files",
        "  hostfiles: 1 file",
        "  .lab/bundle: 1 file",
        "  .env",
        "  hosts.txt",
        f"  {tmp_path}/home/.cache/labctl: 1 file of the cache",
    ]


# --- where it goes -------------------------------------------------------------------------------------------


def test_a_second_load_writes_nothing(file: Path, tmp_path: Path) -> None:
    """Unpack twice: six files are written the first time, none the second."""
    assert len(unpacked(file, tmp_path / "out")) == 6
    assert unpacked(file, tmp_path / "out") == []


def test_other_content_is_not_overwritten_unless_forced(file: Path, tmp_path: Path) -> None:
    """Load over a changed file: ConfigError names it and hints at --force; with force it is overwritten."""
    out = tmp_path / "out"
    (out / "workloads/mine").mkdir(parents=True)
    (out / "workloads/mine/train.py").write_text("mine\n")
    with pytest.raises(ConfigError, match=r"differ from those of the bundle: workloads/mine/train.py") as caught:
        load.load_bundle(context(out), file)
    assert "--force" in caught.value.hint
    assert tree(out) == {"workloads/mine/train.py": "mine\n"}
    assert "workloads/mine/train.py" in unpacked(file, out, force=True)


def test_node_directories_that_were_rendered_since_stay(file: Path, tmp_path: Path) -> None:
    """Change a rendered compose.yml after unpacking: a second unpack does not write it."""
    out = tmp_path / "out"
    unpacked(file, out)
    (out / ".lab/nodes/worker-0/compose.yml").write_text("rendered anew")
    assert unpacked(file, out) == []


def test_the_cache_goes_along_and_what_is_there_stays(lab: Path, cache: Path, tmp_path: Path) -> None:
    """Unpack a cache where one blob is already there: it stays, and the missing link is written."""
    file = tmp_path / "lab.bundle"
    save.save_bundle(context(lab, HOST_CACHE_PATH=str(cache)), file, cache=True)
    remote = tmp_path / "there"
    (remote / "huggingface/hub/models--m/blobs").mkdir(parents=True)
    (remote / "huggingface/hub/models--m/blobs/b").write_text("kept")
    whole = load.checked(file, lambda _: None)
    load.write(load.of_cache(whole, remote), remote)
    assert tree(remote) == {
        "huggingface/hub/models--m/blobs/b": "kept",
        "huggingface/hub/models--m/snapshots/1/model": "../../blobs/b",
    }


def test_no_room_is_said_before_anything_is_written(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load with 10 bytes free: HostError "10 B free", and nothing is written."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(HostError, match="10 B free"):
        load.load_bundle(context(tmp_path / "out"), file)
    assert not (tmp_path / "out").exists()


def test_hosts_get_what_they_lack_of_the_cache(lab: Path, cache: Path, tmp_path: Path) -> None:
    """Send the cache to two hosts: both get all but lock and token; a second time no byte is sent."""
    file = tmp_path / "lab.bundle"
    save.save_bundle(context(lab, HOST_CACHE_PATH=str(cache)), file, cache=True)
    whole = load.checked(file, lambda _: None)
    loaded = context(lab, HOST_CACHE_PATH="~/my cache").settings()
    hosts = {name: FakeHost(tmp_path / "rack", name) for name in ("h1", "h2")}
    assert load.send_cache(whole, loaded, hosts, lambda _: None) == {}
    sent = hosts["h1"].sent
    expected = {name: text for name, text in tree(cache).items() if name not in STAYS}
    for host in hosts.values():
        assert tree(host.home / "my cache") == expected
    assert load.send_cache(whole, loaded, hosts, lambda _: None) == {}
    assert hosts["h1"].sent == sent


def test_a_host_that_cannot_take_the_cache_harms_no_other(lab: Path, cache: Path, tmp_path: Path) -> None:
    """Send the cache to a host where its path is a file: only h1 fails, h2 gets it."""
    file = tmp_path / "lab.bundle"
    save.save_bundle(context(lab, HOST_CACHE_PATH=str(cache)), file, cache=True)
    hosts = {name: FakeHost(tmp_path / "rack", name) for name in ("h1", "h2")}
    (hosts["h1"].home / "c").write_text("a file")
    loaded = context(lab, HOST_CACHE_PATH="~/c").settings()
    failures = load.send_cache(load.checked(file, lambda _: None), loaded, hosts, lambda _: None)
    assert {name: error.node for name, error in failures.items()} == {"h1": "h1"}
    assert "h1: cannot use its cache c: " in failures["h1"].message
    assert (hosts["h2"].home / "c/huggingface").is_dir()


def test_hosts_that_share_a_cache_may_unpack_into_it_at_once(lab: Path, cache: Path, tmp_path: Path) -> None:
    """Send the cache to four hosts that share one directory: no failure, every file is there, no temporary file."""
    (cache / "datasets").mkdir()
    for number in range(60):
        (cache / f"datasets/file-{number}").write_text(f"{number}" * 1000)
    file = tmp_path / "lab.bundle"
    save.save_bundle(context(lab, HOST_CACHE_PATH=str(cache)), file, cache=True)
    whole = load.checked(file, lambda _: None)
    shared = tmp_path / "shared"
    hosts = {f"h{number}": FakeHost(tmp_path / "rack", f"h{number}") for number in range(4)}
    for host in hosts.values():
        (host.home / "c").symlink_to(shared)
    shared.mkdir()
    loaded = context(lab, HOST_CACHE_PATH="~/c").settings()
    assert load.send_cache(whole, loaded, hosts, lambda _: None) == {}
    assert tree(shared) == {name: text for name, text in tree(cache).items() if name not in STAYS}
    assert list(shared.glob(".labctl-coming*")) == []


def test_a_cache_that_is_cut_off_leaves_nothing_of_it(lab: Path, cache: Path, tmp_path: Path) -> None:
    """Send only part of the cache's archive: HostError, and the folder stays empty."""
    file = tmp_path / "lab.bundle"
    save.save_bundle(context(lab, HOST_CACHE_PATH=str(cache)), file, cache=True)
    whole = load.checked(file, lambda _: None)
    cargo = load.cargo(whole.below("cache"))
    host = FakeHost(tmp_path / "rack", "h1")
    (host.home / "c").mkdir()
    cut = replace(cargo, parts=cargo.parts[:2])
    with pytest.raises(HostError, match="the cache was not received completely"):
        load.unpack(host, "c", cut, lambda _: None)
    assert list((host.home / "c").iterdir()) == []


def test_a_hosts_cache_is_not_filled_through_its_links(lab: Path, cache: Path, tmp_path: Path) -> None:
    """Make the host's huggingface folder a link: the host fails, and nothing is written through it."""
    file = tmp_path / "lab.bundle"
    save.save_bundle(context(lab, HOST_CACHE_PATH=str(cache)), file, cache=True)
    host, outside = FakeHost(tmp_path / "rack", "h1"), tmp_path / "outside"
    (host.home / "c").mkdir()
    outside.mkdir()
    (host.home / "c/huggingface").symlink_to(outside)
    loaded = context(lab, HOST_CACHE_PATH="~/c").settings()
    failures = load.send_cache(load.checked(file, lambda _: None), loaded, {"h1": host}, lambda _: None)
    assert "huggingface is a link" in failures["h1"].message
    assert list(outside.iterdir()) == []


def test_a_host_that_failed_is_named_once() -> None:
    """Print two failed hosts: each is named once, with its hint where it has one."""
    failed = (
        HostFailure(host="h1", message="h1: its engine is down", hint="on h1: df -h"),
        HostFailure(host="h2", message="it has no room", hint=""),
    )
    loaded = load.LoadedBundle(
        lab="x", images=(), created="", labctl="", excluded=(), directory="/lab", files=(), failed=failed
    )
    text = loaded_text(loaded, Path("/lab"))
    assert text.splitlines()[1:-1] == ["h1: its engine is down", "  on h1: df -h", "h2: it has no room"]


def test_a_bundle_does_not_choose_which_ports_this_machine_publishes(loads: Loads, tmp_path: Path) -> None:
    """Load a bundle with LAB_PORTS: the setting is dropped with a warning."""
    _, files, warned = loads(crafted(tmp_path / "odd", {}, "LAB_NAME=x\nLAB_PORTS=0.0.0.0:9000:9000\n"))
    assert {entry.key for entry in dotenv.parse(files[".env"], ".env")} == {"LAB_NAME"}
    assert "LAB_PORTS" in warned[0]
