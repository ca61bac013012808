"""Transfer of a run's directory to hosts and back; the hosts are local directories."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest
from msgspec.structs import replace
from support import builders
from support.fake_backend import FakeBackend
from support.nearby import Nearby

from labctl.backends.docker.deploy import artifacts
from labctl.backends.docker.hosts.ssh import Connection
from labctl.errors import HostError
from labctl.model import Lab, Secret
from labctl.naming import OUTPUTS
from labctl.records import store
from labctl.reports import samples
from labctl.system.process import CompletedProcess

RUN = "20260102-150405-hello-3fa2"


def over(**connections: Nearby) -> FakeBackend:
    """Return a fake engine with connections to these hosts."""
    return FakeBackend(ways=cast(dict[str, Connection], connections))


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """Return a lab with one node on host `red`, after making the directories of a run."""
    directory = str(tmp_path / "red/.labctl/demo")
    host = builders.host(name="red", directory=directory)
    lab = builders.lab((builders.node(0, host="red"),), hosts=(host,), directory=tmp_path / "here")
    (lab.directory / "workloads").mkdir(parents=True)
    (lab.directory / "runs" / RUN).mkdir(parents=True)
    (lab.directory / OUTPUTS / RUN).mkdir(parents=True)
    (lab.directory / OUTPUTS / RUN / "hostfile").write_text("worker-0 slots=1")
    return lab


def remote_run(lab: Lab, run: str = RUN) -> Path:
    """Return the run's directory on host red."""
    return Path(lab.hosts[0].directory) / OUTPUTS / run


def fetched(lab: Lab, red: Nearby) -> list[str]:
    """Collect the run's outputs from host ``red``; return the warnings."""
    warned: list[str] = []
    artifacts.collect(lab, RUN, over(red=red), warned.append)
    return warned


def sent(lab: Lab, *earlier: str) -> None:
    """Send the run's files to host red, with these earlier runs."""
    artifacts.send(lab, builders.job(lab, run_id=RUN), over(red=Nearby()), earlier)


def test_clones_are_sent_along_as_they_are_now(lab: Lab, tmp_path: Path) -> None:
    """send() copies the current content of a clone to the host."""
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone/main.py").write_text("edited since `up`")
    lab = replace(lab, clones=((str(tmp_path / "clone"), "clones/DeepSpeedExamples"),))
    sent(lab)
    assert Path(lab.hosts[0].directory, "clones/DeepSpeedExamples/main.py").read_text() == "edited since `up`"


def test_a_host_keeps_nothing_of_a_run_that_came_back(lab: Lab) -> None:
    """collect() moves the host's files of the run into the record, without warnings; a second one does nothing."""
    sent(lab)
    (remote_run(lab) / "loss").write_text("1")
    assert fetched(lab, Nearby()) == []
    assert (lab.directory / "runs" / RUN / "loss").read_text() == "1"
    assert list(remote_run(lab).parent.iterdir()) == []
    assert fetched(lab, Nearby()) == []


class Ordered(Nearby):
    """A host whose files arrive only after another host's; sets ``came`` once its own have arrived."""

    def __init__(self, name: str, after: Event, came: Event) -> None:
        """Wait for event ``after`` before receiving, and set ``came`` once received."""
        super().__init__(name=name)
        self.after, self.came = after, came

    def receive(self, script: str, *arguments: str, **options: Any) -> Any:
        """Receive after event ``after``, and then set ``came``, even on an error."""
        assert self.after.wait(60)
        try:
            return super().receive(script, *arguments, **options)
        finally:
            self.came.set()


def test_of_a_file_that_several_hosts_wrote_the_first_ones_stands_whoever_comes_first(lab: Lab, tmp_path: Path) -> None:
    """The same file of three hosts: the lab's first host's is in the record, others' in hosts/NAME, in any order."""
    names = ("red", "blue", "green")
    hosts = tuple(builders.host(name=name, directory=str(tmp_path / name)) for name in names)
    lab = replace(lab, hosts=hosts)
    for name in names:
        remote = tmp_path / name / OUTPUTS / RUN
        (remote / "model").mkdir(parents=True)
        (remote / "model/same.txt").write_text(name)
        (remote / "link").symlink_to(f"only-{name}")
    begun, second, third, end = Event(), Event(), Event(), Event()
    begun.set()
    way = over(
        green=Ordered("green", begun, second), blue=Ordered("blue", second, third), red=Ordered("red", third, end)
    )
    path = lab.directory / "runs" / RUN
    artifacts.collect(lab, RUN, way, lambda _: None)
    texts = [(path / part / "model/same.txt").read_text() for part in ("", "hosts/blue", "hosts/green")]
    assert (texts, (path / "link").readlink()) == (["red", "blue", "green"], Path("only-red"))


def test_the_samples_of_all_nodes_come_into_one_directory(lab: Lab) -> None:
    """samples/NODE.csv of a remote and a local node are both read from the record."""
    sent(lab)
    for node, path in (("worker-0", remote_run(lab)), ("worker-1", lab.directory / OUTPUTS / RUN)):
        (path / "samples").mkdir()
        (path / f"samples/{node}.csv").write_text(f"seconds (s),CPU (cores)\n1,{node[-1]}\n")
    assert fetched(lab, Nearby()) == []
    tracks = samples.read(lab.directory / "runs" / RUN)
    assert [(track.node, track.points) for track in tracks] == [("worker-0", ((1, 0),)), ("worker-1", ((1, 1),))]


def test_what_did_not_come_back_stays_and_is_told_of(lab: Lab) -> None:
    """A symbolic link in the run's directory is not fetched: a warning names it and the host keeps the run."""
    sent(lab)
    (remote_run(lab) / "loss").write_text("1")
    (remote_run(lab) / "secret").symlink_to("/etc/passwd")
    (warning,) = fetched(lab, Nearby(name="red"))
    assert "not fetched, because it is not a file of the run: secret; files of the run stay on red in" in warning
    assert str(remote_run(lab)) in warning
    assert (remote_run(lab) / "loss").exists()


def test_a_host_that_does_not_say_whether_it_has_the_run_is_told_of(lab: Lab) -> None:
    """A host whose shell fails with 254 gives a warning with its error, and keeps the run."""
    sent(lab)
    host = Nearby(name="red")
    host.shell = ("sh", "-c", "echo 'fork: out of memory' >&2; exit 254")
    (warning,) = fetched(lab, host)
    assert warning.startswith("red: fork: out of memory")
    assert f"files of the run stay on red in {remote_run(lab)}" in warning
    assert (remote_run(lab) / "hostfile").exists()


class TarSays(Nearby):
    """A host whose tar exits with this code and message after a complete archive."""

    code, words = 0, ""

    def receive(self, script: str, *arguments: str, **options: Any) -> Any:
        """Receive the archive, then let tar print its message to stderr and exit with its code."""
        says = f"\nprintf '%s\\n' \"tar: {self.words}\" >&2; exit {self.code}"
        return super().receive(script.replace("exec tar", "tar") + says, *arguments, **options)


@pytest.mark.parametrize(
    ("code", "complaint", "warned"),
    [
        (1, "./sock: socket ignored\ntar: ./a.log: file changed as we read it", "files changed while"),
        (1, "./a: File removed before we read it", "files changed while"),
        (1, "./a: File shrank by 10 bytes; padding with zeros", "files changed while"),
        # What busybox says.
        (1, "can't open './a': Permission denied", "cannot fetch {there}: tar: can't open './a': Permission denied"),
        (1, "./a changed as we read it: Permission denied", "cannot fetch {there}: tar: ./a changed"),
        (2, "./a: Cannot open: Permission denied", "cannot fetch {there}: tar: ./a: Cannot open: Permission denied"),
    ],
)
def test_a_directory_of_which_tar_complains_stays(lab: Lab, code: int, complaint: str, warned: str) -> None:
    """If tar reports changed files or an error, collect() warns accordingly and the host keeps its directory."""
    sent(lab)
    host = TarSays(name="red")
    host.code, host.words = code, complaint
    (warning,) = fetched(lab, host)
    assert warned.format(there=remote_run(lab)) in warning
    assert f"files of the run stay on red in {remote_run(lab)}" in warning
    assert (remote_run(lab) / "hostfile").exists()


def test_a_run_that_reads_an_earlier_one_has_it_on_its_host(lab: Lab) -> None:
    """send() copies an earlier run that is named to the host's runs; it stays there after collect()."""
    model = lab.directory / "runs/20260101-000000-reward-0000/reward"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    sent(lab, model.parent.name)
    copy = Path(lab.hosts[0].directory) / "runs" / model.parent.name
    assert (copy / "reward/config.json").read_text() == "{}"
    fetched(lab, Nearby())
    assert (list(remote_run(lab).parent.iterdir()), copy.exists()) == ([], True)


def fetch_left(lab: Lab, red: Nearby) -> list[str]:
    """Fetch the outputs left in ``red``'s lab directory, as before its removal; return the messages."""
    messages: list[str] = []
    artifacts.fetch_left(red, lab.hosts[0].directory, lab.directory, (Secret("hf_secret"),), messages.append)
    return messages


def test_what_runs_left_on_a_host_comes_here_without_secrets_and_copies_of_earlier_runs_do_not(lab: Lab) -> None:
    """fetch_left() moves a run's files here with secrets redacted, and no earlier run or symbolic link."""
    model = lab.directory / "runs/20260101-000000-reward-0000"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    sent(lab, model.name)
    (model / "config.json").unlink()
    (remote_run(lab) / "ranks").mkdir()
    (remote_run(lab) / "ranks/rank-1.log").write_text("token hf_secret\n")
    (remote_run(lab).parent / "elsewhere").symlink_to(lab.directory)
    assert fetch_left(lab, Nearby(name="red")) == [f"red: fetched the remaining files of run {RUN}"]
    assert (lab.directory / "runs" / RUN / "ranks/rank-1.log").read_text() == "token [REDACTED]\n"
    assert (list(model.iterdir()), remote_run(lab).exists()) == ([], False)
    assert fetch_left(lab, Nearby()) == []


def test_what_runs_left_stays_there_where_not_all_of_it_comes(lab: Lab) -> None:
    """fetch_left() raises HostError if a file cannot be fetched or tar fails; the host keeps the run."""
    sent(lab)
    (remote_run(lab) / "loss").write_text("1")
    (remote_run(lab) / "secret").symlink_to("/etc/passwd")
    kept = f"files of run {RUN} stay on red in {remote_run(lab)}"
    lacks = f"not fetched, because it is not a file of the run: secret; {kept}$"
    with pytest.raises(HostError, match=lacks) as caught:
        fetch_left(lab, Nearby(name="red"))
    assert caught.value.hint == f"ssh red rm -r {remote_run(lab)}  # if nobody needs it"
    assert ((lab.directory / "runs" / RUN / "loss").read_text(), remote_run(lab).exists()) == ("1", True)
    broken = TarSays(name="red")
    broken.code = 2
    with pytest.raises(HostError, match=rf"cannot fetch \S+: .*; files of run {RUN} stay on red"):
        fetch_left(lab, broken)
    assert remote_run(lab).exists()


def test_a_name_that_would_lead_out_of_the_runs_is_not_fetched(lab: Lab) -> None:
    """fetch_left() raises HostError for an output folder on the host whose name is a line end and `..`."""
    sent(lab)
    (remote_run(lab).parent / "\n..").mkdir()
    with pytest.raises(HostError, match=r"red: \S+/runs/\.outputs contains '', not a run of this lab"):
        fetch_left(lab, Nearby(name="red"))


class Names(Nearby):
    """A host that answers the list of runs with arbitrary text."""

    run_name = ""

    def run(self, script: str, *arguments: str, **options: Any) -> CompletedProcess:
        """Answer the list of output folders with the planted name; run other scripts."""
        if arguments[:1] == ("folders",):
            return CompletedProcess((), 0, f"{self.run_name}\n", "")
        return super().run(script, *arguments, **options)


@pytest.mark.parametrize(
    "name", ["{victim}", "x/../../../victim", "../../victim", "20260101-000000-forged-0000", ".ssh", "\x1b[31mred"]
)
def test_a_host_brings_no_run_that_this_lab_did_not_send_there(lab: Lab, name: str) -> None:
    """fetch_left() raises HostError for a run name with `..`, an absolute path, or of no run sent; writes nothing."""
    sent(lab)
    victim = lab.directory.parent / "victim"
    victim.mkdir()
    red = Names(name="red")
    red.run_name = name.replace("{victim}", str(victim))
    # What lies where the name leads on the host, and is meant to lie where it leads here.
    source = Path(f"{lab.hosts[0].directory}/{OUTPUTS}/{red.run_name}")
    (remote_run(lab).parent / "x").mkdir()
    (source / ".ssh").mkdir(parents=True, exist_ok=True)
    (source / ".ssh/authorized_keys").write_text("ssh-ed25519 AAAA mallory")
    (source / "result.json").write_text('{"verdict": "PASS"}')
    with pytest.raises(HostError, match=r"^red: \S+/runs/\.outputs contains '[ -~]+', not a run of this lab$"):
        fetch_left(lab, red)
    assert list(victim.iterdir()) == []
    assert {path.name for path in (lab.directory / "runs").iterdir()} == {RUN, Path(OUTPUTS).name}


def test_a_host_writes_no_result_and_no_output_of_a_run_and_keeps_nothing(lab: Lab) -> None:
    """A host's result.json and run.lock land in hosts/red with one warning; the record's own files stay."""
    sent(lab)
    record = lab.directory / "runs" / RUN
    (record / "output.log").write_text("")
    (remote_run(lab) / "result.json").write_text("forged")
    (remote_run(lab) / "output.log").symlink_to("hostfile")
    (remote_run(lab) / "run.lock").mkdir()
    (remote_run(lab) / "run.lock/x").write_text("forged")
    warned = fetched(lab, Nearby(name="red"))
    see = "see hosts/red/result.json, hosts/red/run.lock/x in"
    assert [text.partition(see)[0] for text in warned] == [
        "red: labctl or another host writes files of the same names: "
    ]
    files = {str(path.relative_to(record)): path.read_text() for path in record.rglob("*") if path.is_file()}
    assert files == {
        "hostfile": "worker-0 slots=1",
        "output.log": "",
        "hosts/red/result.json": "forged",
        "hosts/red/run.lock/x": "forged",
    }
    assert (record / "hosts/red/output.log").is_symlink()
    assert list(remote_run(lab).parent.iterdir()) == []


def test_a_log_that_cannot_be_redacted_is_a_warning(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs that cannot be redacted, and a pipe among the outputs, are warnings of collect() on this machine."""

    def refuse(path: Path, hidden: object) -> None:
        raise HostError(f"cannot write {path}/ranks/rank-0.log: Permission denied")

    monkeypatch.setattr(store, "redact_ranks", refuse)
    os.mkfifo(lab.directory / OUTPUTS / RUN / "pipe")
    here = replace(lab, hosts=(replace(lab.hosts[0], directory=""),))
    warned: list[str] = []
    artifacts.collect(here, RUN, FakeBackend(), warned.append)
    stays = f"pipe; it stays in {OUTPUTS}/{RUN}"
    assert [text.split(": ")[-1] for text in warned] == ["Permission denied", stays]
