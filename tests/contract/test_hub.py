"""`labctl cache` and the huggingface_hub library against a small local hub."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.fakehub import REVISION, FakeHub, blob_of, serving
from support.harness import wait_until

LABCTL = str(Path(sys.executable).with_name("labctl"))
SECONDS = 60
MODEL, DATASET = "facebook/opt-350m", "Dahoas/rm-static"
TOKEN = "hf_onlyForTheHub"  # noqa: S105
WEIGHTS = bytes(number % 251 for number in range(600_000))
ROWS = bytes(number % 241 for number in range(300_000))
NOT_INHERITED = ("LAB_", "HF_", "HOST_", "HTTP", "http", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy")


@dataclass
class Said:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Return the JSON document that was printed to stdout."""
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def states(self) -> list[str]:
        """Return the states of the document's items, in order."""
        return [item["state"] for item in self.document["items"]]


@dataclass
class Person:
    """A user in a lab directory, whose workload `opt` reads a model and a dataset."""

    directory: Path
    environ: dict[str, str] = field(default_factory=dict)
    workload: tuple[str, ...] = ("opt",)

    @property
    def hub(self) -> Path:
        """Return the hub's cache in the lab directory, which containers see as ``hub`` in HF_HOME."""
        return self.directory / "shared/huggingface/hub"

    @property
    def snapshot(self) -> Path:
        """Return the folder of the model's snapshot in the cache."""
        return self.hub / "models--facebook--opt-350m/snapshots" / REVISION

    @property
    def partial(self) -> Path:
        """Return the path of the weights while they are only partly fetched."""
        return self.hub / "models--facebook--opt-350m/blobs" / f"{blob_of(WEIGHTS)}.incomplete"

    def declare(self, cache: str) -> None:
        """Write workload `opt` with this cache line in its workload.yml."""
        folder = self.directory / "workloads/opt"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").touch()
        text = f"description: trains\nlauncher: deepspeed\nscript: train.py\ntimeout: 1m\n{cache}\n"
        (folder / "workload.yml").write_text(text, encoding="utf-8")

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start `labctl cache` in the lab directory, with this person's variables and none of the hub's."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
        return subprocess.Popen(
            [LABCTL, "cache", *self.workload, *words],
            cwd=self.directory,
            env={**inherited, "HOME": str(self.directory / "home"), **self.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: str) -> Said:
        """Run `labctl cache` with these words to its end; return its exit code and output."""
        return finished(self.start(*words))


def finished(process: subprocess.Popen[str]) -> Said:
    """Wait for the process; return its exit code and output; fail if it printed a traceback."""
    out, err = process.communicate(timeout=SECONDS)
    assert "Traceback" not in err, err
    return Said(process.returncode, out, err)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """Serve a hub with a model in three formats, and a dataset."""
    model = {
        "config.json": b'{"model_type": "opt"}',
        "vocab.json": b"{}",
        "merges.txt": b"#version: 0.2\n",
        "pytorch_model.bin": WEIGHTS,
        "tf_model.h5": bytes(200_000),
        "flax_model.msgpack": bytes(200_001),
    }
    data = {"README.md": b"# rows\n", "data/train-00000.parquet": ROWS}
    with serving(FakeHub(models={MODEL: model}, datasets={DATASET: data})) as served:
        yield served


@pytest.fixture
def person(tmp_path: Path, hub: FakeHub) -> Person:
    """Return a user whose lab has an empty shared cache and whose workload reads the hub's model and dataset."""
    (tmp_path / "shared").mkdir()
    (tmp_path / ".env").write_text(f"LAB_NAME=demo\nHOST_CACHE_PATH={tmp_path}/shared\n", encoding="utf-8")
    made = Person(tmp_path, {"HF_ENDPOINT": hub.endpoint})
    made.declare(f"cache: {{models: [{MODEL}], datasets: [{DATASET}]}}")
    return made


def test_what_is_fetched_is_where_workloads_read_it_and_nothing_is_fetched_twice(hub: FakeHub, person: Person) -> None:
    """Only the PyTorch weights and all of the dataset land in the cache; a second call fetches no file."""
    said = person("--json")
    assert said.code == 0
    assert said.document["items"][0] == {
        "kind": "model",
        "name": MODEL,
        "revision": REVISION,
        "bytes": len(WEIGHTS) + 21 + 2 + 14,
        "fetched_bytes": len(WEIGHTS) + 21 + 2 + 14,
        "state": "fetched",
    }
    assert {path.name for path in person.snapshot.iterdir()} == {
        "config.json",
        "vocab.json",
        "merges.txt",
        "pytorch_model.bin",
    }
    assert (person.snapshot / "pytorch_model.bin").read_bytes() == WEIGHTS
    rows = person.hub / "datasets--Dahoas--rm-static/snapshots" / REVISION / "data/train-00000.parquet"
    assert rows.read_bytes() == ROWS
    assert (person.hub / "models--facebook--opt-350m/refs/main").read_text() == REVISION

    hub.asked.clear()
    again = person("--json")
    assert (again.code, again.states) == (0, ["present", "present"])
    assert [one.path for one in hub.asked] == [f"/api/models/{MODEL}", f"/api/datasets/{DATASET}"]


def test_a_path_is_a_pattern_for_itself_alone(hub: FakeHub, person: Person) -> None:
    """Files whose names contain `*`, `?` or `[` are fetched, and such a name matches no other file."""
    paths = ("data/[all]/train-*.txt", "data/a/train-1.txt", "what?.json", "whats.json")
    hub.datasets[DATASET] |= {path: path.encode() for path in paths}
    hub.models[MODEL] |= {"a*.json": b"wanted", "a/b.json": b"in a folder"}
    assert person().code == 0
    snapshot = person.hub / "datasets--Dahoas--rm-static/snapshots" / REVISION
    assert [(snapshot / path).read_bytes() for path in paths] == [path.encode() for path in paths]
    assert (person.snapshot / "a*.json").read_bytes() == b"wanted"
    assert not (person.snapshot / "a").exists()


def test_people_are_told_what_comes_and_how_it_went(person: Person) -> None:
    """stderr tells sizes before the fetch and the time after it; stdout says `fetched` for both."""
    said = person()
    assert f"model {MODEL} (08ab08cc): 600 kB in 4 files, 600 kB to fetch" in said.err
    assert re.search(rf"model {MODEL}: 100 %, 600 kB in [\d.]+ s", said.err)
    assert [line.split()[-1] for line in said.out.splitlines()[1:3]] == ["fetched", "fetched"]


def test_a_dry_run_fetches_nothing(hub: FakeHub, person: Person) -> None:
    """`--dry-run` lists both as `to fetch`, writes nothing, and asks only the hub's API."""
    said = person("--dry-run", "--json")
    assert (said.code, said.states) == (0, ["to fetch", "to fetch"])
    assert list((person.directory / "shared").iterdir()) == []
    assert all(one.path.startswith("/api/") for one in hub.asked)


def test_safetensors_are_taken_before_pickles(hub: FakeHub, person: Person) -> None:
    """Of a model with both formats, model.safetensors is fetched and pytorch_model.bin is not."""
    hub.models[MODEL]["model.safetensors"] = WEIGHTS[::-1]
    assert person().code == 0
    assert (person.snapshot / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert not (person.snapshot / "pytorch_model.bin").exists()


def test_ctrl_c_leaves_what_came_and_the_next_call_goes_on_from_there(hub: FakeHub, person: Person) -> None:
    """SIGINT ends with code 130 and keeps the partial file; the next call asks for the rest alone."""
    hub.hold_after = 200_000
    process = person.start("--json")
    assert hub.holding.wait(SECONDS)
    wait_until(lambda: person.partial.exists() and person.partial.stat().st_size, SECONDS, "bytes in the partial file")
    process.send_signal(signal.SIGINT)
    said = finished(process)
    assert said.code == 130
    assert said.document["error"]["kind"] == "interrupted"
    assert not person.snapshot.exists()
    came = person.partial.stat().st_size
    assert 0 < came <= 200_000

    hub.go.set()
    said = person("--json")
    assert said.code == 0
    assert [one.first for one in hub.fetched("pytorch_model.bin")] == [0, came]
    assert said.document["items"][0]["fetched_bytes"] == len(WEIGHTS) + 37 - came
    assert (person.snapshot / "pytorch_model.bin").read_bytes() == WEIGHTS


def test_a_broken_connection_is_taken_up_again_at_once(hub: FakeHub, person: Person) -> None:
    """The hub breaks off after 250,000 bytes: the same call asks for the rest, and the file is whole."""
    hub.break_after = 250_000
    assert person().code == 0
    first, second = hub.fetched("pytorch_model.bin")
    assert (first.first, second.first) == (0, 250_000)
    assert (person.snapshot / "pytorch_model.bin").read_bytes() == WEIGHTS


def test_a_hub_without_ranges_is_no_reason_for_a_broken_file(hub: FakeHub, person: Person) -> None:
    """The hub breaks off and ignores ranges: the file is fetched from its start and is whole."""
    hub.break_after, hub.ranges = 250_000, False
    assert person().code == 0
    assert (person.snapshot / "pytorch_model.bin").read_bytes() == WEIGHTS


def test_content_that_is_not_what_the_hub_describes_is_never_kept(hub: FakeHub, person: Person) -> None:
    """Wrong content ends with code 3 and its SHA-256, and leaves no partial file; a later call succeeds."""
    hub.spoil = True
    said = person()
    assert said.code == 3
    assert f"pytorch_model.bin has SHA-256 {blob_of(bytes(600_000))[:12]}" in said.err
    assert not person.partial.exists()
    hub.spoil = False
    assert person().code == 0


def test_a_truncated_file_in_the_cache_is_fetched_anew(hub: FakeHub, person: Person) -> None:
    """A blob cut to 1,000 bytes: the model is `fetched` again and whole, the dataset is `present`."""
    assert person().code == 0
    blob = (person.snapshot / "pytorch_model.bin").resolve()
    blob.write_bytes(WEIGHTS[:1000])
    assert person("--json").states == ["fetched", "present"]
    assert (person.snapshot / "pytorch_model.bin").read_bytes() == WEIGHTS


def test_two_at_once_fetch_everything_once(hub: FakeHub, person: Person) -> None:
    """A second call waits for the first; the weights are asked for once."""
    hub.hold_after = 200_000
    first = person.start("--json")
    assert hub.holding.wait(SECONDS)
    second = person.start("--json")
    assert second.stderr
    assert "waiting for `labctl cache` by" in second.stderr.readline()
    hub.go.set()
    assert finished(first).states == ["fetched", "fetched"]
    assert finished(second).states == ["present", "present"]
    assert len(hub.fetched("pytorch_model.bin")) == 1


def test_the_token_reaches_the_hub_and_nothing_else(hub: FakeHub, person: Person) -> None:
    """HF_TOKEN is sent to the hub, not to the storage it redirects to, and is in no output and no file."""
    storage = FakeHub(models=hub.models, datasets=hub.datasets)
    hub.token = person.environ["HF_TOKEN"] = TOKEN
    with serving(storage):
        hub.storage = storage.endpoint
        said = person()
    assert said.code == 0
    assert {one.token for one in hub.asked} == {TOKEN}
    assert {one.token for one in storage.asked} == {None}
    assert TOKEN not in said.out + said.err
    files = [path for path in person.directory.rglob("*") if path.is_file()]
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []


@pytest.mark.parametrize(("token", "said_of_it"), [(None, "HF_TOKEN is not set"), ("hf_wrong", "HF_TOKEN was sent")])
def test_a_closed_repository_says_what_opens_it(
    hub: FakeHub, person: Person, token: str | None, said_of_it: str
) -> None:
    """A hub that wants another token: code 3, the message tells of HF_TOKEN, the hint gives the URL and .env."""
    hub.token = TOKEN
    person.environ |= {"HF_TOKEN": token} if token else {}
    said = person("--json")
    assert said.code == 3
    error = said.document["error"]
    assert said_of_it in error["message"]
    assert f"{hub.endpoint}/{MODEL}" in error["hint"]
    assert "HF_TOKEN in .env" in error["hint"]
    assert "hf_wrong" not in said.out + said.err


def test_repositories_are_fetched_by_name_with_a_workload_and_without(person: Person) -> None:
    """--model and --dataset add to a workload's list, and work without one; with neither, code 2."""
    person.declare(f"cache: {{models: [{MODEL}]}}")
    planned = person("--dataset", DATASET, "--model", MODEL, "--dry-run", "--json").document
    assert [(item["kind"], item["name"]) for item in planned["items"]] == [("model", MODEL), ("dataset", DATASET)]
    person.workload = ()
    said = person("--dataset", DATASET, "--json")
    assert said.document["workload"] == ""
    assert [(item["name"], item["state"]) for item in said.document["items"]] == [(DATASET, "fetched")]
    said = person()
    assert (said.code, said.out) == (2, "")
    assert "labctl cache --model NAME" in said.err


def test_an_unknown_repository_is_said_before_anything_is_fetched(hub: FakeHub, person: Person) -> None:
    """Fetch two models, one of which does not exist: code 3, its name and 404 are printed, and nothing is fetched."""
    person.declare(f"cache: {{models: [{MODEL}, facebook/nothing]}}")
    said = person()
    assert said.code == 3
    assert "model facebook/nothing" in said.err
    assert "answers 404" in said.err
    assert not person.snapshot.exists()


def test_without_a_hub_it_says_what_is_missing_and_how_to_carry_it_in(person: Person) -> None:
    """An unreachable hub: code 3; the message lists what is missing without the password, the hint how to copy it."""
    # Port 9 is discard's: nothing answers there.
    person.environ["HF_ENDPOINT"] = "http://someone:hush@127.0.0.1:9"
    said = person("--json")
    assert said.code == 3
    error = said.document["error"]
    assert "http://[REDACTED]@127.0.0.1:9" in error["message"]
    assert f"missing here: model {MODEL}, dataset {DATASET}" in error["message"]
    assert "models--facebook--opt-350m datasets--Dahoas--rm-static" in error["hint"]
    assert str(person.hub) in error["hint"]


def test_without_a_hub_what_is_here_is_enough(person: Person) -> None:
    """An unreachable hub with all in the cache: code 0, states `unchecked`, and a warning."""
    assert person().code == 0
    person.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
    said = person("--json")
    assert (said.code, said.states) == (0, ["unchecked", "unchecked"])
    assert "not compared with the hub: cannot reach" in said.err


def test_proxies_of_env_are_honoured(hub: FakeHub, person: Person) -> None:
    """HTTP_PROXY in .env is used to reach a hub whose host name does not resolve."""
    with (person.directory / ".env").open("a", encoding="utf-8") as settings:
        settings.write(f"HTTP_PROXY={hub.endpoint}\n")
    person.environ["HF_ENDPOINT"] = "http://hub.invalid"
    assert person().code == 0


def test_a_full_disk_is_said_before_anything_is_fetched(hub: FakeHub, person: Person) -> None:
    """The hub claims 10**15 bytes: code 3 and the space needed; nothing is fetched."""
    hub.claims = 10**15
    said = person()
    assert said.code == 3
    assert "2,000 TB needed on" in said.err
    assert "too little" in said.err
    assert not person.snapshot.exists()


def test_a_workload_that_declares_nothing_says_so(person: Person) -> None:
    """A workload without `cache`: code 0, a line that says so, and no items in JSON."""
    person.declare("")
    said = person()
    assert said.code == 0
    assert said.out.startswith("workload opt declares nothing to fetch")
    assert person("--json").document["items"] == []


def test_a_cache_that_is_not_there_is_not_made(person: Person) -> None:
    """HOST_CACHE_PATH that does not exist: code 3 and the `mkdir -p` to run."""
    said = person("-s", f"HOST_CACHE_PATH={person.directory}/not-mounted")
    assert said.code == 3
    assert f"mkdir -p {person.directory}/not-mounted" in said.err


def lfs(sha256: str, size: int = 200_000) -> dict[str, Any]:
    """Return what a hub's answer says of a file in LFS."""
    return {"sha256": sha256, "oid": sha256, "size": size, "pointerSize": 132}


@pytest.mark.parametrize(
    "lie",
    [
        {"sha": "../../../../../victim"},
        {"rfilename": "../../../../../../victim/thesis.json"},
        {"size": 200_000, "lfs": lfs("{victim}/thesis.json")},
    ],
    ids="-".join,
)
def test_an_answer_of_a_hub_that_would_lead_out_of_the_cache_is_refused(
    person: Person, hub: FakeHub, lie: dict[str, Any]
) -> None:
    """A revision, file name or hash with a path in it: code 3; the victim's file stays and the cache gets no file."""
    victim = person.directory / "victim"
    victim.mkdir()
    (victim / "thesis.json").write_text("years of work")
    hub.lies = json.loads(json.dumps(lie).replace("{victim}", str(victim)))
    said = person()
    assert (said.code, said.out) == (3, "")
    assert f"the hub at {hub.endpoint} returned " in said.err
    assert [(path.name, path.read_text()) for path in victim.iterdir()] == [("thesis.json", "years of work")]
    assert not [path for path in (person.directory / "shared").rglob("*") if path.is_file() and path.stat().st_size]


@pytest.mark.parametrize("plant", ["symlink_to", "hardlink_to"])
def test_a_link_in_the_place_of_a_file_that_is_under_way_is_not_followed(person: Person, plant: str) -> None:
    """A link to another file at the partial file's path: the other file stays and the model is fetched."""
    theirs = person.directory / "authorized_keys"
    theirs.write_text("ssh-ed25519 AAAA mine\n")
    person.partial.parent.mkdir(parents=True)
    getattr(person.partial, plant)(theirs)
    assert person().code == 0
    assert theirs.read_text() == "ssh-ed25519 AAAA mine\n"
    assert (person.snapshot / "pytorch_model.bin").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    "planted",
    [
        "",
        "hub",
        "hub/.locks",
        "hub/CACHEDIR.TAG",
        "hub/models--facebook--opt-350m",
        "hub/models--facebook--opt-350m/blobs",
        "hub/models--facebook--opt-350m/refs",
        "hub/models--facebook--opt-350m/refs/main",
        "hub/models--facebook--opt-350m/snapshots",
        f"hub/models--facebook--opt-350m/snapshots/{REVISION}",
        "hub/.locks/models--facebook--opt-350m",
        f"hub/datasets--Dahoas--rm-static/snapshots/{REVISION}/data",
    ],
)
def test_a_link_in_the_place_of_a_directory_of_the_cache_leads_to_no_other_files(person: Person, planted: str) -> None:
    """A symbolic link inside the cache: code 3 with the `rm` to run; the files it leads to stay as they are."""
    theirs = person.directory / "project"
    theirs.mkdir()
    for name in ("config.json", "main", "train-00000.parquet"):
        (theirs / name).write_text("years of work")
    link = person.directory / "shared/huggingface" / planted
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(theirs / "main" if planted.endswith("main") else theirs)
    said = person()
    assert {path.name: path.read_text() for path in theirs.iterdir()} == dict.fromkeys(
        ("config.json", "main", "train-00000.parquet"), "years of work"
    )
    assert said.code == 3
    assert f"rm {link}" in said.err


def test_a_file_that_leads_elsewhere_is_fetched_anew_and_the_other_stays(person: Person) -> None:
    """Snapshot links that lead outside are replaced by fetched files; their targets stay, or stay absent."""
    theirs = person.directory / "config.json"
    theirs.write_text("years of work")
    person.snapshot.mkdir(parents=True)
    (person.snapshot / "config.json").symlink_to(theirs)
    (person.snapshot / "vocab.json").symlink_to(person.directory / "absent.json")
    assert person().code == 0
    assert theirs.read_text() == "years of work"
    assert not (person.directory / "absent.json").exists()
    assert (person.snapshot / "config.json").read_bytes() == b'{"model_type": "opt"}'
