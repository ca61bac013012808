"""Health for `labctl health`, before a run, and what changed while it ran."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support import builders
from support.in_memory import InMemory

from labctl import backends
from labctl.backends import health as of_backend
from labctl.cli.output import to_json
from labctl.config.context import Context
from labctl.config.settings import Settings
from labctl.errors import ConfigError, Failures, HostError
from labctl.health import catalogue, memory, rules
from labctl.health.model import Answer, Check, Condition, Level, LineCheck, Reading, Snapshot, Subject
from labctl.jobs.request import RunOptions
from labctl.model import Event, Result
from labctl.records import store
from labctl.records.active import Run
from labctl.runs import changes as changed
from labctl.runs import health, judge, start
from labctl.runs.health import Unfit
from labctl.system import files
from labctl.system.hostdump import HostDump
from labctl.system.process import CompletedProcess

HOSTS = ("gpu-0", "gpu-1", "gpu-2")


def readings(dump: HostDump) -> list[Reading]:
    """Return the width, heat and errors that a host prints."""
    kinds = {"width": "fact", "heat": "state", "errors": "counter"}
    return [
        Reading(name=name, value=float(dump.facts[name]), item="eth0", source="ethtool", kind=kind)  # type: ignore[arg-type]
        for name, kind in kinds.items()
        if name in dump.facts
    ]


LINKS = Subject(
    name="Links",
    readings=readings,
    checks=(
        Check(name="width", reading="width", judge=rules.less_than_neighbours, steps=("check the cable",)),
        Check(name="heat", reading="heat", judge=rules.above, limit=90),
        Check(name="errors", reading="errors", judge=rules.grew),
    ),
    lines=(LineCheck(name="xid", pattern="Xid", judge=lambda match: Answer("bad", match.string)),),
)


@pytest.fixture(autouse=True)
def _subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make LINKS the only subject of hosts, whatever their accelerator."""
    monkeypatch.setattr(catalogue, "HOST", (LINKS,))
    monkeypatch.setattr(of_backend, "subjects_of", lambda _: (LINKS,))


def printed(*lines: str, boot: str = "b1", **facts: float) -> str:
    """Return what the script of a host prints that started 1000 s ago, with kernel lines."""
    entries = [f"fact {name}\n\t{value}\n" for name, value in facts.items()]
    kernel = "fact kernel\n" + "".join(f"\t{line}\n" for line in lines)
    of_boot = f"file proc/sys/kernel/random/boot_id\n\t{boot}\nfile proc/uptime\n\t1000.0 1\n"
    return f"labctl survey\n{of_boot}{''.join(entries)}{kernel}end\n"


class Backend(InMemory):
    """A lab of three hosts, each with a worker; what they print is in ``answers``, or an error that they fail with."""

    def __init__(self, directory: Path, settings: str = "", accelerator: str = "nvidia", **answers: Any) -> None:
        (directory / ".env").write_text(settings)
        nodes = tuple(builders.node(number, host=host) for number, host in enumerate(HOSTS))
        of = builders.lab(
            nodes,
            directory=directory,
            hosts=tuple(builders.host(name=name) for name in HOSTS),
            accelerator=accelerator,
        )
        self.events: list[Event] = []
        super().__init__(of, emit=self.events.append)
        self.answers: dict[str, Any] = {host: printed(width=16) for host in HOSTS}
        self.answers |= {name.replace("_", "-"): answer for name, answer in answers.items()}

    def on_hosts(
        self,
        script: str,  # noqa: ARG002 - as the protocol's
        arguments: tuple[str, ...],  # noqa: ARG002
        seconds: float,  # noqa: ARG002
        hosts: Collection[str] = (),
    ) -> tuple[Mapping[str, CompletedProcess], Failures]:
        """Answer with the text of each host, or with its error."""
        given = {host: self.answers[host] for host in hosts}
        failed = {host: answer for host, answer in given.items() if isinstance(answer, HostError)}
        return {host: CompletedProcess(("sh",), 0, given[host], "") for host in given.keys() - failed}, failed

    @property
    def warnings(self) -> list[str]:
        """Return the texts of warnings."""
        return [event.text for event in self.events if event.kind == "warning"]

    def run(self, *names: str) -> Run:
        """Build a run on these nodes, or on all."""
        lab = self.lab()
        return Run(lab=lab, job=builders.job(lab, entries=tuple((name, 1) for name in names)))

    def fit(self, *names: str) -> Mapping[str, Snapshot]:
        """Read the hosts of a run on these nodes and judge them."""
        run = self.run(*names)
        return health.require_fit(self, run, RunOptions(), health.begin_look(self, run))


Make = Callable[..., Backend]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that makes a lab with these settings and answers."""
    return lambda settings="", **given: Backend(tmp_path, settings, **given)


ON, WARN, OFF = (f"LAB_PREFLIGHT={mode}\n" for mode in ("on", "warn", "off"))
BAD = printed(width=8)
WHY = "eth0: width 8, 16 on 2 others"


# --- labctl health ---------------------------------------------------------------------------------------


def test_all_hosts_are_read_and_those_that_are_asked_for_are_told(make: Make) -> None:
    """Report a node, and a host: judged beside all, only those are told; an unknown one is an error with a hint."""
    backend = make(gpu_1=BAD)
    report = health.report(backend, ("worker-1",))
    assert (report.level, [verdict.host for verdict in report.hosts]) == ("bad", ["gpu-1"])
    assert [condition.sentence() for condition in report.hosts[0].wrong] == [WHY]
    assert health.report(backend, ("gpu-0",)).level == "ok"
    assert [verdict.host for verdict in health.report(backend).hosts] == list(HOSTS)
    with pytest.raises(ConfigError, match="worker-7 is no node of the lab") as caught:
        health.report(backend, ("worker-7",))
    assert "worker-" in caught.value.hint


def test_hosts_that_lost_all_devices_are_bad(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report hosts without the devices that the settings ask for: all are read, and bad for that."""
    on_processors = make(accelerator="cpu")
    lost = make("LAB_ACCELERATOR=nvidia\n")
    accelerators: list[str] = []

    def no_lab() -> None:
        """Raise HostError, as where every host lacks its devices."""
        raise HostError("this host has no device")

    def connect(_: Context, settings: Settings, **__: bool) -> AbstractContextManager[Backend]:
        """Note the settings' accelerator; connect the lab on CPUs."""
        accelerators.append(settings.text("LAB_ACCELERATOR"))
        return nullcontext(on_processors)

    monkeypatch.setattr(lost, "lab", no_lab)
    monkeypatch.setattr(backends, "connect", connect)
    report = health.report(lost)
    assert accelerators == ["cpu"]
    assert {verdict.host for verdict in report.hosts} == set(HOSTS)
    texts = {condition.text for verdict in report.hosts for condition in verdict.wrong}
    assert (report.level, texts) == ("bad", {"lacks devices of the lab: this host has no device"})


def test_what_was_wrong_is_kept_with_the_verdict(make: Make) -> None:
    """Report a bad host, and the same once it is mended: its file has the fault, then none."""
    backend = make(gpu_1=BAD)
    health.report(backend)
    kept = of_backend.read(backend.context.directory, "gpu-1")
    assert kept
    assert [condition.sentence() for condition in kept.wrong] == [WHY]
    health.report(make())
    mended = of_backend.read(backend.context.directory, "gpu-1")
    assert mended
    assert mended.wrong == ()


def test_a_host_that_is_not_read_is_no_good_answer(make: Make) -> None:
    """Report with a lost host: its verdict is unknown, and the answer is bad."""
    report = health.report(make(gpu_1=HostError("no route", node="gpu-1")))
    assert report.level == "bad"
    assert {verdict.host: (verdict.level, verdict.error) for verdict in report.hosts}["gpu-1"] == (
        "unknown",
        "no route",
    )


def test_a_host_of_which_nothing_is_known_makes_the_answer_unknown(make: Make) -> None:
    """Report with a host that prints no reading and no kernel lines: unknown, though the others are ok."""
    unread = "labctl survey\nfact kernel error\n\tnot permitted\nend\n"
    assert health.report(make(gpu_1=unread)).level == "unknown"


def test_the_report_is_json(make: Make) -> None:
    """Render the report as JSON: verdicts with all answers, and what to do."""
    document = json.loads(json.dumps(to_json(health.report(make(gpu_1=BAD)))))
    assert document["level"] == "bad"
    (of_host,) = [host for host in document["hosts"] if host["host"] == "gpu-1"]
    assert (of_host["level"], of_host["nodes"], of_host["error"]) == ("bad", ["worker-1"], "")
    found = of_host["conditions"][0]
    assert (found["check"], found["level"], found["item"], found["value"]) == ("width", "bad", "eth0", "8")
    assert (found["text"], found["steps"]) == ("width 8, 16 on 2 others", ["check the cable"])


def test_checks_that_nobody_knows_are_a_warning(make: Make) -> None:
    """Report with a health.yml that names an unknown check: a warning names it."""
    backend = make()
    (backend.context.directory / "health.yml").write_text("checks:\n  widht: off\n")
    health.report(backend)
    assert backend.warnings == ["health.yml: no check is called widht"]


# --- before a run ----------------------------------------------------------------------------------------


def test_a_bad_node_stops_a_run_before_it_starts(make: Make) -> None:
    """Begin a run with LAB_PREFLIGHT=on: Unfit, with node, finding and the option that leaves the node out."""
    with pytest.raises(Unfit) as caught:
        make(ON, gpu_1=BAD).fit()
    error = caught.value
    assert (error.exit_code, error.node, error.message) == (3, "worker-1", f"worker-1: {WHY}")
    assert error.hint.startswith("--exclude worker-1 runs without; ")


def test_only_the_nodes_of_the_run_must_be_fit(make: Make) -> None:
    """Begin a run on the two other nodes: it starts, without a word."""
    backend = make(ON, gpu_1=BAD)
    assert set(backend.fit("worker-0", "worker-2")) == {"gpu-0", "gpu-2"}
    assert backend.warnings == []


@pytest.mark.parametrize(
    ("settings", "accelerator", "warnings"),
    [
        (WARN, "nvidia", [f"worker-1: {WHY}"]),
        ("", "nvidia", [f"worker-1: {WHY}"]),
        (WARN, "cpu", [f"worker-1: {WHY}"]),
        ("", "cpu", []),
    ],
)
def test_otherwise_a_bad_node_is_a_warning_where_devices_are(
    make: Make, settings: str, accelerator: str, warnings: list[str]
) -> None:
    """Begin a run with `warn`, and by default: it starts; a plain CPU lab is not judged, but read."""
    backend = make(settings, accelerator=accelerator, gpu_1=BAD)
    assert set(backend.fit()) == set(HOSTS)
    assert backend.warnings == warnings


def test_with_preflight_off_nothing_is_read(make: Make) -> None:
    """Begin a run with LAB_PREFLIGHT=off: no host is read."""
    backend = make(OFF, gpu_1=BAD)
    assert health.begin_look(backend, backend.run()) is None
    assert backend.fit() == {}
    assert health.unfit_nodes(backend) == {}


@pytest.mark.parametrize("settings", [ON, WARN])
def test_a_host_that_is_not_read_does_not_stop_a_run_but_is_told(make: Make, settings: str) -> None:
    """Begin a run with a silent host: a warning says that its health is unknown; the others' readings are kept."""
    backend = make(settings, gpu_1=HostError("no route", node="gpu-1"))
    assert set(backend.fit()) == {"gpu-0", "gpu-2"}
    assert backend.warnings == ["health of host gpu-1 is unknown: no route"]


def test_a_host_that_is_still_not_read_is_named_again_and_kept_once(make: Make) -> None:
    """Begin two runs with a silent host: the second warning names it as before; one line is kept."""
    backend = make(WARN, gpu_1=HostError("no route", node="gpu-1"))
    for _ in range(2):
        backend.fit()
    assert backend.warnings[1:] == ["as before the last run, health of host gpu-1 is unknown: no route (labctl health)"]
    kept = backend.context.directory / health.WARNED
    assert kept.read_text(encoding="utf-8") == "health of host gpu-1 is unknown: no route\n"


def test_if_all_nodes_are_bad_the_hint_excludes_none(make: Make) -> None:
    """Begin a run on hot nodes only: one sentence each, at most three, and no --exclude that would leave nothing."""
    with pytest.raises(Unfit) as caught:
        make(ON, **{host.replace("-", "_"): printed(heat=95 + at) for at, host in enumerate(HOSTS)}).fit()
    assert caught.value.message == "; ".join(f"worker-{at}: eth0: heat {95 + at}, the limit is 90" for at in range(3))
    assert "--exclude" not in caught.value.hint
    assert "LAB_PREFLIGHT=warn" in caught.value.hint


def test_what_is_wrong_with_several_nodes_is_said_once() -> None:
    """Tell of eight nodes with the same finding and one more: two sentences, and all nodes in the option."""
    bad = {f"worker-{number}": ["disk full"] for number in range(8)} | {"worker-8": ["hot", "disk full"]}
    error = health.unfit(bad, tuple(f"worker-{number}" for number in range(16)), RunOptions())
    assert error.message == "worker-0, worker-1, worker-2, worker-3 and 5 more: disk full; worker-8: hot"
    assert error.hint.startswith(f"--exclude {'@'.join(bad)} runs without; ")


def test_more_findings_than_can_be_read_are_counted() -> None:
    """Tell of five findings: three, and the number of the others."""
    error = health.unfit(
        {"worker-0": [f"finding {number}" for number in range(5)]}, ("worker-0", "worker-1"), RunOptions()
    )
    assert error.message.endswith("; worker-0: finding 2 and 2 more")


def test_a_batch_leaves_bad_nodes_out(make: Make) -> None:
    """Ask for the nodes that no run can use: the bad one with its finding if LAB_PREFLIGHT=on, else none."""
    assert health.unusable(make(ON, gpu_1=BAD)) == {"worker-1": WHY}
    assert health.unusable(make(WARN, gpu_1=BAD)) == {}


# --- retries ---------------------------------------------------------------------------------------------


def ended(backend: Backend, *nodes: str) -> Result:
    """Record a run on these nodes, and return its result, which has no rank."""
    run = backend.run(*nodes)
    store.create(run.lab, run.run_id, run.job.files, ())
    (run.directory / "job.json").write_text(
        json.dumps({"nodes": [{"name": node.name, "slots": 1} for node in run.job.nodes]})
    )
    return Result(
        run_id=run.run_id, workload="hello", launcher="deepspeed", lab="demo", verdict="ERROR", cause="node-lost",
        message="", exit_code=1, ranks=(),
    )  # fmt: skip


@pytest.mark.parametrize("elastic", [True, False])
def test_a_retry_does_not_start_on_a_bad_node(make: Make, elastic: bool) -> None:
    """Retry a run of three nodes: an elastic workload goes on without the bad one, another is not started again."""
    backend = make(ON, gpu_1=BAD)
    workload, options = builders.workload(elastic=elastic), RunOptions()
    if elastic:
        retried = start._without_unfit(backend, workload, options, ended(backend))
        assert retried.exclude == "worker-1"
        assert f"the run goes on without worker-1: {WHY}" in [event.text for event in backend.events]
    else:
        with pytest.raises(Unfit, match="worker-1"):
            start._without_unfit(backend, workload, options, ended(backend))


def test_a_retry_does_not_mind_a_bad_node_that_the_run_does_not_use(make: Make) -> None:
    """Retry a run of two nodes that had no rank yet, beside a bad one: its options stay."""
    backend = make(ON, gpu_1=BAD)
    options = RunOptions(include="worker-0@worker-2")
    of = ended(backend, "worker-0", "worker-2")
    assert start._without_unfit(backend, builders.workload(), options, of) is options


# --- what changed during a run ---------------------------------------------------------------------------


def changes(backend: Backend, run: Run, **after: Any) -> list[tuple[str, str]]:
    """Record the readings before a run, change what hosts print, and return level and sentence of what changed."""
    store.create(run.lab, run.run_id, (), ())
    before = health.require_fit(backend, run, RunOptions(), health.begin_look(backend, run))
    changed.record(run, changed.Recorded(before=before))
    backend.answers |= {name.replace("_", "-"): answer for name, answer in after.items()}
    found = changed.of(run, changed.begin_after(backend, run))
    return [(condition.level, condition.sentence()) for condition in found]


def test_what_changed_is_told_with_its_node_the_bad_first(make: Make) -> None:
    """Run while errors grow, a line is written and a link gets narrower: all are told, and kept in the record."""
    backend = make("", accelerator="cpu", gpu_1=printed(width=16, errors=1))
    run = backend.run()
    found = changes(backend, run, gpu_1=printed("[ 999.0] Xid 79", width=8, errors=3))
    assert found == [
        ("bad", "worker-1 eth0: errors +2"),
        ("bad", "worker-1: Xid 79"),
        ("remark", "worker-1 eth0: width 8, 16 before"),
    ]
    recorded = changed.read(run.directory)
    assert set(recorded.before) == set(recorded.after) == set(HOSTS)


def test_a_restart_is_a_change_of_its_own(make: Make) -> None:
    """Run while a host restarts: that is bad; not if either start is unknown, or if changes are off."""
    backend = make("", accelerator="cpu")
    restarted, unknown = printed(width=16, boot="b2"), printed(width=16, boot="")
    run = backend.run()
    assert changes(backend, run, gpu_1=restarted, gpu_2=unknown) == [("bad", "worker-1: restarted")]
    assert [each.level for each in health.report(backend).hosts] == ["ok"] * len(HOSTS)
    (backend.context.directory / "health.yml").write_text("checks:\n  changed: off\n")
    assert changed.of(run, changed.begin_after(backend, run)) == ()


def test_what_was_wrong_before_is_no_change(make: Make) -> None:
    """Run on a host that was hot and had a line: neither counts, though the temperature is another one after it."""
    backend = make("", accelerator="cpu", gpu_1=printed("[ 5.0] Xid 79", heat=95))
    assert changes(backend, backend.run(), gpu_1=printed("[ 5.0] Xid 79", heat=97)) == []


def test_a_host_that_got_hot_is_a_change(make: Make) -> None:
    """Run on a host that is hot after it only, of the hosts of the run only: that is told."""
    backend = make("", accelerator="cpu", gpu_1=printed(heat=80), gpu_2=printed(heat=80))
    assert changes(backend, backend.run("worker-1"), gpu_1=printed(heat=97), gpu_2=printed(heat=97)) == [
        ("bad", "worker-1 eth0: heat 97, the limit is 90")
    ]


def test_a_program_that_was_killed_for_want_of_memory_is_only_a_remark(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run while the host's kernel kills a program, which may be another's: a remark, which the message leaves out."""
    monkeypatch.setattr(of_backend, "subjects_of", lambda _: (memory.SUBJECT,))
    before, after = (
        f"file proc/meminfo\n\tMemTotal: 64 kB\nfile proc/vmstat\n\toom_kill {kills}\n" for kills in (2, 3)
    )
    backend = make("", accelerator="cpu")
    backend.answers["gpu-1"] = printed().replace("end\n", f"{before}end\n")
    found = changes(backend, backend.run(), gpu_1=printed().replace("end\n", f"{after}end\n"))
    assert found == [("remark", "worker-1: OOM kills of the host +1")]


def test_a_host_that_is_lost_hides_no_change_of_another(make: Make) -> None:
    """Run until a host is lost: what changed on the other is told."""
    backend = make("", accelerator="cpu", gpu_1=printed(errors=1))
    lost = HostError("no route", node="gpu-0")
    assert changes(backend, backend.run(), gpu_0=lost, gpu_1=printed(errors=2)) == [("bad", "worker-1 eth0: errors +1")]


def test_nothing_is_read_after_a_run_before_which_nothing_was(make: Make) -> None:
    """End a run without a record of readings, of another labctl, and with LAB_PREFLIGHT=off: no changes."""
    backend = make()
    run = backend.run()
    assert changed.begin_after(backend, run) is None
    run.directory.mkdir(parents=True)
    (run.directory / changed.RECORD).write_text("{")
    assert changed.begin_after(backend, run) is None
    assert changed.of(run, None) == ()
    assert changes(make(OFF), replace(run, job=builders.job(run.lab, run_id="20260102-150405-hello-0000"))) == []


def test_a_health_yml_that_breaks_during_a_run_does_not_keep_it_from_its_result(make: Make) -> None:
    """Break health.yml while a run runs, and after its hosts are asked: no changes, and no error."""
    backend = make("", accelerator="cpu")
    run = backend.run()
    assert changes(backend, run) == []
    looked = changed.begin_after(backend, run)
    (backend.context.directory / "health.yml").write_text("nonsense: 1\n")
    assert changed.of(run, looked) == ()
    assert changed.begin_after(backend, run) is None


def test_a_look_that_fails_does_not_keep_a_run_from_its_result(make: Make) -> None:
    """End a run whose look raises a host's error: no changes."""
    looked: Future[Any] = Future()
    looked.set_exception(HostError("the engine is gone"))
    assert changed.of(make().run(), looked) == ()


def test_a_full_disk_does_not_hide_what_changed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """End a run whose record cannot be written any more: the changes are told all the same."""
    backend = make("", accelerator="cpu", gpu_1=printed(errors=1))
    run = backend.run()
    changes(backend, run)
    backend.answers["gpu-1"] = printed(errors=4)
    looked = changed.begin_after(backend, run)

    def full(*_: object, **__: object) -> None:
        """Raise HostError, as for a full disk."""
        raise HostError("no space left on device")

    monkeypatch.setattr(files, "write", full)
    assert [each.sentence() for each in changed.of(run, looked)] == ["worker-1 eth0: errors +3"]


def test_a_clock_that_moved_on_all_hosts_is_this_machines_own(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell that a clock jumped on one of three hosts, and nothing if it did on all: that of labctl's machine moved."""
    jumped = Condition(check="clock-jump", subject="Clock", level="bad", item="worker", text="clock jumped by 3 s")
    backend = make("", accelerator="cpu")
    run = backend.run()
    changes(backend, run)
    monkeypatch.setattr(changed, "_changes_of", lambda *_: [jumped])
    assert changed.of(run, changed.begin_after(backend, run)) == ()
    monkeypatch.setattr(changed, "_changes_of", lambda _, host, *__: [jumped] if host == HOSTS[0] else [])
    assert changed.of(run, changed.begin_after(backend, run)) == (jumped,)


def test_a_finding_is_warned_of_once(make: Make) -> None:
    """Begin three runs on a host that is bad: the first is told why, the second that it is as before, until cured."""
    backend = make(WARN, gpu_1=BAD)
    backend.fit()
    backend.fit()
    assert backend.warnings == [f"worker-1: {WHY}", f"as before the last run, worker-1: {WHY} (labctl health)"]
    backend.answers["gpu-1"] = printed(width=16)
    backend.fit()
    backend.answers["gpu-1"] = BAD
    backend.fit()
    assert backend.warnings[2:] == [f"worker-1: {WHY}"]


def test_a_lab_whose_folder_cannot_be_written_runs_all_the_same(make: Make, tmp_path: Path) -> None:
    """Keep no verdict where .lab/health is a file: a run begins, and `health` warns and answers."""
    backend = make(WARN)
    (tmp_path / ".lab").mkdir(exist_ok=True)
    (tmp_path / ".lab/health").write_text("")
    assert set(backend.fit()) == set(HOSTS)
    assert health.report(backend).level == "ok"
    assert any("the verdicts are not kept" in text for text in backend.warnings)


def test_since_keeps_only_the_hosts_that_are_shown(make: Make) -> None:
    """Accept one host by --since: another host's line is still told the next time."""
    line = printed("[ 999.0] Xid 79", width=16)
    backend = make("", gpu_1=line, gpu_2=line)
    assert health.report(backend).level == "bad"
    assert health.report(backend, ("worker-1",), since=0.1).level == "ok"
    assert {each.host: each.level for each in health.report(backend).hosts} == {
        "gpu-0": "ok", "gpu-1": "ok", "gpu-2": "bad",
    }  # fmt: skip


def test_the_option_to_leave_out_a_node_goes_with_those_that_were_typed() -> None:
    """Name what is left of --include, or add to --exclude; without a node left, name none."""
    bad = {"worker-1": ["slow"]}
    included = health.unfit(bad, ("worker-0", "worker-1"), RunOptions(include="worker-0@worker-1"))
    assert included.hint.startswith("--include worker-0 runs without")
    excluded = health.unfit(bad, ("worker-0", "worker-1"), RunOptions(exclude="worker-2"))
    assert excluded.hint.startswith("--exclude worker-2@worker-1 runs without")
    assert "runs without" not in health.unfit(bad, ("worker-1",), RunOptions()).hint


def change(level: Level, text: str) -> Condition:
    """Build a change of worker-1."""
    return Condition(check="x", subject="X", level=level, item="worker-1 eth0", text=text)


def test_a_message_names_what_went_bad_and_no_remark() -> None:
    """Complete a run's message: at most three bad changes, no remark."""
    failed = Result(
        run_id="r1", workload="hello", launcher="deepspeed", lab="demo", verdict="ERROR", cause="rank-crashed",
        message="rank 1 failed", exit_code=4,
    )  # fmt: skip
    assert changed.message(failed, [change("remark", "slow")]) == "rank 1 failed"
    found = [change("bad", "errors +1"), change("remark", "slow"), *[change("bad", f"b{at}") for at in range(5)]]
    assert changed.message(failed, found) == (
        "rank 1 failed; worker-1 eth0: errors +1 during the run; worker-1 eth0: b0 during the run; "
        "worker-1 eth0: b1 during the run"
    )


def test_a_result_has_what_changed_and_its_message_too_if_the_run_failed() -> None:
    """Complete results: each has all changes; the message of a passed one stays."""
    plain = Result(
        run_id="r1", workload="hello", launcher="deepspeed", lab="demo", verdict="PASS", cause=None,
        message="done", exit_code=0,
    )  # fmt: skip
    found = [change("bad", "errors +1"), change("remark", "slow")]
    passed = judge.with_changes(plain, found)
    assert passed.message == "done"
    assert passed.node_changes == ("worker-1 eth0: errors +1", "worker-1 eth0: slow")
    failed = judge.with_changes(replace(plain, verdict="ERROR"), found)
    assert failed.message == "done; worker-1 eth0: errors +1 during the run"
