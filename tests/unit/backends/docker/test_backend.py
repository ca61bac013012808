"""Plans that ``--dry-run`` prints; those of runs are compared whole."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace
from support import builders, records
from support.fake_backend import FakeBackend, active

from labctl.backends.docker.backend import DockerBackend, DownPlan, NewRun
from labctl.backends.docker.deploy import images, readiness
from labctl.backends.plan import Plan
from labctl.config.context import Context
from labctl.config.inventory import InventoryHost
from labctl.errors import HostError
from labctl.jobs.request import RunOptions
from labctl.model import Event, Job, Lab, Mount
from labctl.records import left
from labctl.runs import start
from labctl.runs.steps import StageRun

RUN = "20260102-150405-hello-3fa2"


@pytest.fixture
def events() -> list[Event]:
    """Return an empty list, to which the backend adds its events."""
    return []


@pytest.fixture
def backend(tmp_path: Path, events: list[Event]) -> DockerBackend:
    """Return a backend of lab `demo` with a fake engine, whose events are recorded."""
    context = Context(directory=tmp_path, environ={"LAB_NAME": "demo"}, emit=events.append, flags={})
    return builders.backend(context, builders.cluster_of(context))


def lab_of(backend: DockerBackend) -> Lab:
    """Return a lab of two nodes in the backend's directory."""
    return builders.lab(directory=backend.context.directory)


def plan(backend: DockerBackend, lab: Lab, job: Job, *, detach: bool = False) -> Plan:
    """Plan a run as a preview, without an observed state."""
    return start.plan(backend, NewRun(lab=lab, job=job), RunOptions(detach=detach), preview=True)


def test_run_reaches_writes_launches(backend: DockerBackend) -> None:
    """The plan of a run: ask sshd, write the record, launch deepspeed, move the outputs, write the result."""
    lab, directory = lab_of(backend), f"/workspace/outputs/{RUN}"
    rendered = ", ".join(f"rendered/nodes/{name}/compose.yml" for name in ("worker-0", "worker-1"))
    assert str(plan(backend, lab, builders.job(lab, entries=(("worker-1", 1),)))) == (
        "#1 ask sshd of worker-1 for an answer within 15 s  [a run needs every node]\n"
        "#2 write hostfile, .deepspeed_env, rank.sh, plan.txt, job.json, settings.json, versions.json, "
        f"{rendered}, started, health.json, output.log, output.times, metrics.jsonl "
        f"to runs/{RUN}, and ranks/, work/, hostfile, .deepspeed_env, rank.sh to runs/.outputs/{RUN}  [run {RUN}]\n"
        f"#3 in launcher, at most 60 s: deepspeed --hostfile {directory}/hostfile --master_addr worker-1 "
        "--master_port 29500 --ssh_port 12345 --launcher pdsh --force_multi --no_python --no_local_rank "
        f"{directory}/rank.sh, which starts hello.py  [hello on worker-1]\n"
        f"#4 move runs/.outputs/{RUN} to runs  [run {RUN}]\n"
        f"#5 write runs/{RUN}/result.json  [run {RUN}]"
    )


def test_a_run_that_is_detached_is_only_launched(backend: DockerBackend) -> None:
    """The plan of a detached run has three steps: ask, write, launch."""
    lab = lab_of(backend)
    steps = str(plan(backend, lab, builders.job(lab), detach=True)).splitlines()
    assert [step.split()[1] for step in steps] == ["ask", "write", "in"]


def test_a_run_on_hosts_ends_what_is_left_pushes_and_fetches(
    backend: DockerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan on two hosts ends an unfinished run first, pushes inputs, and fetches from both."""
    names = ("red", "blue")
    hosts = tuple(builders.host(name=name, directory="/home/ann/.labctl/demo") for name in names)
    nodes = tuple(builders.node(number, host=name) for number, name in enumerate(names))
    mounts = (Mount(source=f"{backend.context.directory}/runs", target="/workspace/runs", read_only=True),)
    lab = replace(lab_of(backend), nodes=nodes, hosts=hosts, mounts=mounts)
    job = builders.job(lab, arguments=("--data", "/workspace/runs/r1/data"), inputs=(("data", ""),))
    monkeypatch.setattr(left, "unfinished", lambda *_: {"r0": "its labctl died"})
    text = str(plan(backend, lab, job)).splitlines()
    assert text[0] == "#1 end, fetch and close runs/r0  [its labctl died]"
    assert text[3] == f"#4 push workloads, runs/.outputs/{RUN}, runs/r1 to red, blue  [run {RUN}]"
    assert text[5] == f"#6 move runs/.outputs/{RUN} to runs, and fetch it from red, blue  [run {RUN}]"


def test_the_record_of_a_run_has_the_text_of_its_own_plan(backend: DockerBackend) -> None:
    """plan.txt in the record has the text of the whole plan."""
    lab = lab_of(backend)
    whole = plan(backend, lab, builders.job(lab))
    (stage,) = (step for step in whole.steps if isinstance(step, StageRun))
    assert {file.path: file.content for file in stage.record}["plan.txt"] == f"{whole}\n"


@pytest.mark.parametrize(("preview", "warnings"), [(True, ["red: no answer"]), (False, [])])
def test_a_preview_of_down_names_the_hosts_that_it_skips(
    backend: DockerBackend, events: list[Event], *, preview: bool, warnings: list[str]
) -> None:
    """A preview of `down` warns of a host that does not answer; otherwise nothing is said, as its error is raised."""
    backend.cluster = replace(backend.cluster, failed={"red": HostError("red: no answer", node="red")})
    backend.plan_down(preview=preview)
    assert [event.text for event in events if event.kind == "warning"] == warnings


def test_a_preview_takes_no_port_for_in_use_that_an_earlier_run_may_have(
    backend: DockerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a preview a port in use raises HostError, unless an unfinished run may have it."""

    def refuse(*_: object) -> None:
        """Raise HostError that the port is in use."""
        raise HostError("port 29500 is in use")

    lab = lab_of(backend)
    run = NewRun(lab=lab, job=builders.job(lab), observed=builders.observed(lab))
    monkeypatch.setattr(readiness, "require_port", refuse)
    with pytest.raises(HostError, match="port 29500"):
        start.plan(backend, run, RunOptions(), preview=True)
    monkeypatch.setattr(left, "unfinished", lambda *_: {"r0": "its launcher was restarted"})
    assert start.plan(backend, run, RunOptions(), preview=True).steps


def test_up_and_run_warn_of_an_image_for_another_accelerator(
    backend: DockerBackend, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepare up, then begin a run with an image that does not suit: each warns."""
    monkeypatch.setattr(images, "unfit_for", lambda *_: "another accelerator's")
    warning = Event(kind="warning", text="another accelerator's")
    backend.plan_prepare()
    assert events.count(warning) == 1
    backend.begin(builders.workload(), RunOptions(), datetime(2026, 1, 2, tzinfo=timezone.utc))
    assert events.count(warning) == 2


def test_up_is_refused_during_a_run_before_images_and_probes(backend: DockerBackend) -> None:
    """plan_prepare() raises HostError while a run is active, and not as a preview."""
    engine = cast(FakeBackend, backend.cluster.engine)
    assert backend.plan_prepare().steps
    of = lab_of(backend)
    changed = {name: {"directory": str(of.directory)} for name in ("launcher", "worker_0", "worker_1")}
    engine.seen, engine.answer = builders.observed(of, **changed), active("r1", "worker-0")
    with pytest.raises(HostError, match="cannot change the lab while run r1"):
        backend.plan_prepare()
    assert backend.plan_prepare(preview=True).steps


def test_down_names_nodes_that_may_still_run_on_a_host_that_does_not_answer(
    backend: DockerBackend, events: list[Event]
) -> None:
    """With blue unreachable, carrying out the removal warns of worker-1 there, and raises the error of blue."""
    lost = HostError("blue: no sshd on port 2222: connection refused", node="blue")
    targets = tuple(InventoryHost(name=name) for name in ("red", "blue"))
    backend.cluster = replace(backend.cluster, inventory=targets, failed={"blue": lost})
    with pytest.raises(HostError, match="blue: no sshd"):
        backend.carry_out(DownPlan((), failed={"blue": lost}))
    texts = [event.text for event in events]
    assert texts == ["worker-1 on blue may still run: repeat `labctl down` when blue answers"]


def test_a_run_is_known_while_the_launcher_answers_whichever_other_host_does_not(backend: DockerBackend) -> None:
    """Lose a worker's host, at the connection or later: the run is running. Lose the launcher's: it is unknown."""
    of, lost = lab_of(backend), HostError("blue: timed out", node="blue")
    path = records.write(of.directory, RUN)
    (path / "result.json").unlink()
    engine = cast(FakeBackend, backend.cluster.engine)
    engine.answer = active(RUN, "worker-0", "worker-1")
    whole = builders.observed(of)
    reached = tuple(each for each in whole.containers if each.node != "worker-1")
    for failed, silent in (({"blue": lost}, ()), ({}, (("blue", lost),))):
        backend.cluster = replace(backend.cluster, failed=failed)
        engine.seen = replace(whole, containers=reached, silent=silent)
        assert {run.state for run in backend.active().values()} == {"running"}
        engine.seen = replace(engine.seen, containers=reached[1:])
        assert {run.state for run in backend.active().values()} == {"unknown"}
