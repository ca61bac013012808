"""Commands on an in-memory engine: plans, refusals, actions, and the number of requests to the engine."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from support import builders
from support.builders import container
from support.fake_backend import Failed, FakeBackend, active, silent

from labctl import backends, flows, model, naming
from labctl.accelerators import leases
from labctl.backends.devices import DeviceReport
from labctl.backends.docker.agent import AGENT
from labctl.backends.docker.checks import run as doctor_run
from labctl.backends.docker.deploy import images
from labctl.backends.docker.engine import Kind
from labctl.backends.docker.images import foreign
from labctl.backends.docker.lab import cluster as clusters
from labctl.backends.state import ObservedState
from labctl.cli.output import to_json
from labctl.config.context import Context
from labctl.errors import ConfigError, HostError
from labctl.jobs.request import RunOptions
from labctl.model import Event, Relative, Result
from labctl.records import store
from labctl.records.lines import Line
from labctl.runs import labs, opening
from labctl.runs.fitting import Hardware
from labctl.system import filelock
from labctl.workloads.schema import parse_expectation

SETTINGS = "LAB_NAME=demo\nLAB_ACCELERATOR=cpu\nLAB_NODES=2\n"
WORKLOAD = "description: hello\nlauncher: deepspeed\nscript: hello.py\ntimeout: 60s\n"
Command = Callable[..., object]


class Engine(FakeBackend):
    """An engine whose launcher reaches all nodes, and whose containers exist once compose has run."""

    lab: model.Lab
    found: str | None = builders.IMAGE_ID
    """Id of the image."""
    docker = ("true",)
    """Command that lists packages of the image; none here."""

    def observe(self, lab: str, image: str | None = None, *, node: str = "") -> ObservedState:
        """Report the planted image id, and observe as before."""
        self.seen = replace(self.seen, image=self.found)
        return super().observe(lab, image, node=node)

    def image(self, image: str) -> dict[str, Any]:  # noqa: ARG002
        """Return an image that was not built by labctl, for the engine's processor."""
        return {"Config": {"Entrypoint": ["python3", foreign.PROGRAM]}, "Architecture": "amd64"}

    def information(self) -> dict[str, Any]:
        """Return the version and processor of the engine."""
        return {"ServerVersion": "26.1.5", "Architecture": "x86_64"}

    def image_labels(self, image: str) -> dict[str, str]:  # noqa: ARG002
        """Return no labels."""
        return {}

    def apply(self, host: str, project: str, files: tuple[Path, ...]) -> None:
        """Apply as before, and show all containers of the lab."""
        super().apply(host, project, files)
        self.seen = builders.observed(self.lab)

    def remove(self, host: str, kind: Kind, ids: tuple[str, ...]) -> None:
        """Remove as before, and show nothing."""
        super().remove(host, kind, ids)
        self.seen = ObservedState()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Write a lab with workload `hello` to tmp_path; return the in-memory engine that serves it."""

    def answer(name: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Answer `reach` for both workers; nothing else."""
        if "reach" in argv:
            for node in ("worker-0", "worker-1"):
                yield json.dumps({"node": node, "ok": True, "seconds": 0})

    (tmp_path / ".env").write_text(f"{SETTINGS}HOST_CACHE_PATH={tmp_path}/cache\n")
    (tmp_path / "cache").mkdir()
    (tmp_path / "workloads/hello").mkdir(parents=True)
    (tmp_path / "workloads/hello/hello.py").write_text("")
    (tmp_path / "workloads/hello/workload.yml").write_text(WORKLOAD)
    made = Engine(answer=answer)
    monkeypatch.setattr(clusters, "backend_here", lambda _: made)
    # It has images, as a Docker daemon.
    monkeypatch.setattr(clusters, "DockerEngine", Engine)
    monkeypatch.setattr(doctor_run, "preflight", lambda *given: given[2])
    return made


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """Return a Context of tmp_path without events."""
    return Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={})


@pytest.fixture
def lab_is_up(context: Context, engine: Engine) -> Callable[[], None]:
    """Return a function that brings the lab up, and sets the engine's count of observations to 0."""

    def up() -> None:
        """Load the lab twice, bring it up, and reset the count."""
        with clusters.connect(context, context.settings()) as cluster:
            # What the engine grants is known once it was asked.
            clusters.load_lab(context, cluster)
            engine.lab, _ = clusters.load_lab(context, cluster)
        flows.up(context)
        engine.observations = 0

    return up


def files(directory: Path) -> dict[str, int]:
    """Return the modification times of all files below a directory by path, except locks."""
    paths = (path for path in directory.rglob("*") if path.is_file() and not path.name.endswith("lock"))
    return {str(path.relative_to(directory)): path.stat().st_mtime_ns for path in paths}


def test_an_unchanged_up_observes_once(context: Context, engine: Engine, lab_is_up: Callable[[], None]) -> None:
    """Bring an unchanged lab up: one observation, no file written; its plan has one step."""
    lab_is_up()
    before = files(context.directory)
    status = flows.up(context)
    assert (engine.observations, to_json(status)["state"]) == (1, "up")
    assert files(context.directory) == before
    assert len(to_json(flows.plan_up(context))["plan"]) == 1
    assert engine.observations == 2


def test_a_first_up_carries_out_what_its_dry_run_says(context: Context, engine: Engine) -> None:
    """Plan and bring up a new lab: the plan changes nothing, and the steps are the planned ones."""
    with clusters.connect(context, context.settings()) as cluster:
        engine.lab, _ = clusters.preview_lab(cluster)
    events: list[Event] = []
    planned = to_json(flows.plan_up(context))["plan"]
    assert engine.done == []
    assert not (context.directory / ".lab").exists()
    flows.up(Context(directory=context.directory, environ={}, emit=events.append, flags={}))
    steps = [event.text for event in events if event.kind == "step"]
    assert [line.split(" ")[1] for line in planned] == [text.split(" ")[1] for text in steps]
    # Images and probes come first, as a plan of their own.
    rest = len(planned) - 1
    assert [text.split(" ")[0] for text in steps] == ["[1/1]", *(f"[{n}/{rest}]" for n in range(1, rest + 1))]
    made = {path for path in files(context.directory) if path.startswith(".lab/")}
    assert made
    assert all(path in "\n".join(planned) for path in made)
    # Once before, once after the engine was probed, and for the status.
    assert engine.observations <= 1 + 3


def test_a_dry_run_says_the_image_that_is_to_be_built(context: Context, engine: Engine) -> None:
    """Plan without the image: the first step builds it."""
    engine.found = None
    plan = to_json(flows.plan_up(context))["plan"]
    assert plan[0] == "#1 build image labctl/cpu  [not found; takes minutes, once]"
    assert "compose up worker-0, worker-1" in "\n".join(plan)


def test_a_build_without_a_workload_is_of_the_settings_alone(
    context: Context, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Build with and without a workload: the workload's image, and LAB_IMAGE's."""

    def build_image(_: Context, cluster: clusters.Cluster, **__: object) -> dict[str, Any]:
        """Return the image that would be built."""
        return {"image": cluster.image}

    monkeypatch.setattr(images, "build_image", build_image)
    task = context.directory / "workloads/hello/workload.yml"
    task.write_text(f"{WORKLOAD}image: horovod\n")
    context.keep_image(opening.settings_for(context, "hello"))
    assert context.settings().text("LAB_IMAGE") == "labctl/horovod"
    built = [flows.build(context, workload=name)["image"] for name in ("", "hello")]
    assert built == ["labctl/cpu", "labctl/horovod"]
    (context.directory / ".env").unlink(missing_ok=True)
    assert flows.build(context, workload="hello")["image"] == "labctl/horovod"


@pytest.mark.parametrize("up", [flows.up, flows.plan_up])
def test_an_image_that_cannot_be_built_is_refused(context: Context, engine: Engine, up: Command) -> None:
    """Bring up with an image that cannot be built: HostError."""
    engine.found = None
    other = Context(directory=context.directory, environ={}, emit=lambda _: None, flags={"LAB_IMAGE": "far.example/x"})
    with pytest.raises(HostError, match=r"^image far.example/x not found"):
        up(other)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (flows.up, ()),
        (flows.plan_up, ()),
        (flows.down, ()),
        (flows.plan_down, ()),
        (flows.run, ("hello", RunOptions())),
        (flows.plan_run, ("hello", RunOptions())),
    ],
)
def test_the_lab_of_another_directory_is_refused(
    context: Context, engine: Engine, tmp_path: Path, command: Command, arguments: tuple[object, ...]
) -> None:
    """Run commands on another directory's lab: HostError, and nothing is done."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    engine.seen = ObservedState(containers=(container("worker-0", directory=str(theirs)),))
    with pytest.raises(HostError, match="lab `demo` belongs to"):
        command(context, *arguments)
    assert engine.done == []


def test_another_run_that_is_active_is_refused(context: Context, engine: Engine, lab_is_up: Callable[[], None]) -> None:
    """Run and bring up while a run is active: HostError names it; the plans of both are shown all the same."""
    lab_is_up()
    (context.directory / "runs/r1").mkdir(parents=True)
    (context.directory / "runs/r1/started").touch()
    events: list[Event] = []
    noting = replace(context, emit=events.append)
    with filelock.held(context.directory / filelock.RUNS / "r1.lock", "run r1"):
        engine.answer = active("r1", "worker-1")
        with pytest.raises(HostError, match=r"worker-1: in use by run r1 \(ann@desk, since"):
            flows.run(context, "hello", RunOptions())
        assert flows.plan_run(context, "hello", RunOptions()).plan
        engine.seen = ObservedState()
        with pytest.raises(HostError, match="cannot change the lab while `run r1`") as refused:
            flows.up(context)
        assert any("compose up" in step for step in flows.plan_up(noting).plan)
    assert refused.value.message in [event.text for event in events if event.kind == "notice"]


def test_a_run_waits_for_the_command_that_changes_the_lab(
    context: Context, engine: Engine, lab_is_up: Callable[[], None]
) -> None:
    """Run while `labctl up` holds the lab: it waits, runs, and releases the lock."""
    lab_is_up()
    up, engine.seen = engine.seen, ObservedState()
    lock = context.directory / filelock.LAB

    def emit(event: Event) -> None:
        """End the other command once the run waits for it."""
        if event.text.startswith("waiting for `labctl up` by"):
            engine.seen = up
            changing.close()

    with ExitStack() as changing:
        changing.enter_context(filelock.held(lock, "labctl up"))
        waiting = Context(directory=context.directory, environ={}, emit=emit, flags={})
        # The launch of this engine prints nothing.
        assert to_json(flows.run(waiting, "hello", RunOptions()))["message"] == "Only 0 of 2 ranks reported."
    assert not filelock.is_held(lock)


def test_a_run_is_refused_if_another_command_begins_to_change_the_lab_before_it_starts(
    context: Context, engine: Engine, lab_is_up: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take the lab's lock during the run's checks: HostError, nothing is launched."""
    lab_is_up()
    engine.started.clear()
    with ExitStack() as changing:

        def begin(*given: Any) -> Any:
            """Take the lab's lock as `labctl down`; return the plan."""
            changing.enter_context(filelock.held(context.directory / filelock.LAB, "labctl down"))
            return given[2]

        monkeypatch.setattr(doctor_run, "preflight", begin)
        with pytest.raises(HostError, match=r"`labctl down` by .* holds"):
            flows.run(context, "hello", RunOptions())
    assert [argv for _, argv in engine.started if argv[0] == "timeout"] == []
    assert filelock.held_below(context.directory / filelock.RUNS) == []


def test_a_run_that_begins_while_up_waits_for_devices_keeps_its_nodes(
    context: Context, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begin a run while `up` waits for devices: HostError, and nothing is done."""
    monkeypatch.setattr(
        leases, "granting", lambda *_, **__: filelock.held(context.directory / filelock.RUNS / "r1.lock", "run r1")
    )
    with pytest.raises(HostError, match="cannot change the lab while `run r1`"):
        flows.up(context)
    assert engine.done == []


@pytest.mark.usefixtures("engine")
def test_a_run_with_other_settings_than_the_labs_says_the_up_that_makes_them_so(
    context: Context, lab_is_up: Callable[[], None]
) -> None:
    """Run with changed settings: HostError, the hint is `labctl up -s` without secrets; a dry run warns."""
    lab_is_up()
    events: list[Event] = []
    flags = {"LAB_ENV_GREETING": "good day", "LAB_ENV_API_TOKEN": "s3cr3t"}
    changed = Context(directory=context.directory, environ={}, emit=events.append, flags=flags)
    with pytest.raises(HostError, match="lab demo is out of date: launcher: LAB_ENV_API_TOKEN, LAB_ENV_G") as caught:
        flows.run(changed, "hello", RunOptions())
    assert caught.value.hint == "labctl up -s LAB_ENV_GREETING='good day' -s LAB_ENV_API_TOKEN=..."
    flows.plan_run(changed, "hello", RunOptions())
    warned = [event.text for event in events if event.kind == "warning"]
    assert "lab demo is out of date, so its launcher was not asked for programs and inputs" in warned
    status = flows.status(changed)
    assert (status.state, status.out_of_date) == ("up", "LAB_ENV_API_TOKEN, LAB_ENV_GREETING changed")
    assert status.hint == caught.value.hint
    assert (flows.status(context).out_of_date, flows.status(context).hint) == ("", "")


def test_a_directory_that_the_launcher_mounts_and_is_gone_makes_the_lab_out_of_date(
    context: Context, engine: Engine, lab_is_up: Callable[[], None]
) -> None:
    """Remove a directory that the launcher mounts: the status names it, as `run` does."""
    lab_is_up()
    gone = str(context.directory / "gone")
    mounting = (replace(each, mounts=((gone, "/data"),)) for each in engine.seen.containers)
    engine.seen = replace(engine.seen, containers=tuple(mounting))
    status = flows.status(context)
    assert (status.out_of_date, status.hint) == (f"{gone} changed: moved, removed or recreated", "labctl up")


def test_a_lab_whose_up_failed_is_still_out_of_date(
    context: Context, engine: Engine, lab_is_up: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If compose fails, status names the changed setting as before, as the nodes are not made from it."""
    lab_is_up()
    flags = {"LAB_ENV_GREETING": "good day"}
    changed = Context(directory=context.directory, environ={}, emit=lambda _: None, flags=flags)

    def fail(*_: object) -> None:
        """Raise HostError."""
        raise HostError("compose failed")

    monkeypatch.setattr(engine, "apply", fail)
    with pytest.raises(HostError, match="compose failed"):
        flows.up(changed)
    assert flows.status(changed).out_of_date == "LAB_ENV_GREETING changed"


@pytest.mark.parametrize("run", [flows.run, flows.plan_run])
def test_a_launcher_that_the_image_lacks_is_refused(
    context: Context, engine: Engine, lab_is_up: Callable[[], None], run: Command
) -> None:
    """Run with a launcher that the image lacks: HostError."""
    lab_is_up()
    reach = engine.answer

    def answer(name: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Fail `which`; answer else as before."""
        if argv[0] == "which":
            raise Failed(1)
        yield from reach(name, argv)

    engine.answer = answer
    with pytest.raises(HostError, match="launcher `mpirun` not found in image labctl/cpu"):
        run(context, "hello", RunOptions(launcher="mpirun"))


def records(context: Context) -> list[Path]:
    """List the directories of runs."""
    writable = {context.directory / naming.NOTEBOOKS, context.directory / naming.OUTPUTS}
    return [path for path in (context.directory / "runs").iterdir() if path not in writable]


def test_a_run_observes_once_and_makes_what_its_dry_run_says(
    context: Context, engine: Engine, lab_is_up: Callable[[], None]
) -> None:
    """Plan and run: one observation, the plan's steps, and every record's file is in the plan."""
    lab_is_up()
    planned = to_json(flows.plan_run(context, "hello", RunOptions()))["plan"]
    assert (engine.observations, records(context)) == (1, [])
    events: list[Event] = []
    emitting = Context(directory=context.directory, environ={}, emit=events.append, flags={})
    result = flows.run(emitting, "hello", RunOptions())
    steps = [event.text for event in events if event.kind == "step"]
    assert [line.split(" ")[1] for line in planned] == [text.split(" ")[1] for text in steps]
    record = context.directory / "runs" / to_json(result)["run_id"]
    # Why a run failed is packed besides.
    excluded = ("work/", "evidence.tar.gz")
    assert all(path in "\n".join(planned) for path in files(record) if not path.startswith(excluded))
    assert "work/ (2 files of project `hello`)" in "\n".join(planned)
    assert "#5 write runs/" in (record / "plan.txt").read_text()


def test_a_run_is_not_launched_on_a_node_that_the_launcher_does_not_reach(
    context: Context, engine: Engine, lab_is_up: Callable[[], None]
) -> None:
    """Run while a worker is not reached by ssh: HostError, nothing is launched or recorded."""
    lab_is_up()
    engine.answer = silent
    engine.started.clear()
    with pytest.raises(HostError, match="the launcher does not reach every worker over ssh"):
        flows.run(context, "hello", RunOptions())
    assert [argv[len(AGENT)] for _, argv in engine.started if argv[: len(AGENT)] == AGENT] == ["reach"]
    assert [argv for _, argv in engine.started if argv[0] == "timeout"] == []
    assert records(context) == []


def test_a_dry_run_of_a_run_says_what_left_runs_are_ended(
    context: Context, engine: Engine, lab_is_up: Callable[[], None]
) -> None:
    """Plan and run with an abandoned run: the first step closes it."""
    lab_is_up()
    folder = context.directory / "runs/20260101-000000-hello-0000"
    folder.mkdir(parents=True)
    (folder / "run.lock").touch()
    assert to_json(flows.plan_run(context, "hello", RunOptions()))["plan"][0].endswith(
        "close runs/20260101-000000-hello-0000  [its launcher was restarted]"
    )
    flows.run(context, "hello", RunOptions())
    assert (folder / "result.json").exists()


def test_down_and_clean_do_what_they_say(context: Context, engine: Engine, lab_is_up: Callable[[], None]) -> None:
    """Plan and run down and clean: the same steps, and .lab is removed."""
    lab_is_up()
    planned = to_json(flows.plan_down(context))["plan"]
    assert engine.observations == 1
    assert to_json(flows.down(context))["plan"] == planned
    for clean in (flows.plan_clean, flows.clean):
        assert (context.directory / ".lab").exists()
        assert to_json(clean(context))["plan"] == ["#1 remove .lab  [labctl clean]"]
    assert not (context.directory / ".lab").exists()


def test_a_lab_that_is_too_large_is_refused_once_the_engine_was_probed(
    context: Context, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bring up 300 nodes where 64 open files are allowed: HostError, nothing is done."""
    monkeypatch.setattr(engine, "grants", lambda *_: False)
    monkeypatch.setattr(engine, "most_files", lambda *_: 64, raising=False)
    large = Context(directory=context.directory, environ={}, emit=lambda _: None, flags={"LAB_NODES": "300"})
    with pytest.raises(HostError, match=r"ranks take \d+ open files in one process, and containers here may have 64"):
        flows.up(large)
    assert engine.done == []


def test_keys_are_not_replaced_under_a_run(context: Context, engine: Engine, lab_is_up: Callable[[], None]) -> None:
    """Rotate keys during a run: HostError, and the keys stay."""
    lab_is_up()
    keys = {path: path.read_bytes() for path in context.directory.glob(".lab/nodes/*/*/*_ed25519*")}
    assert len(keys) == 3
    engine.done.clear()
    held = filelock.held(context.directory / filelock.RUNS / "r1.lock", "run r1")
    with held, pytest.raises(HostError, match="cannot change the"):
        flows.rotate_keys(context)
    assert {path: path.read_bytes() for path in keys} == keys
    assert engine.done == []


# --- runs whose records are not what they should be ------------------------------------------------------------


def test_what_a_workload_planted_in_the_runs_stops_no_command(
    context: Context, engine: Engine, lab_is_up: Callable[[], None]
) -> None:
    """Plant broken records in runs/: status, runs, show and run all work."""
    lab_is_up()
    plants: dict[str, Callable[[Path], object]] = {
        "empty": lambda path: path.write_text("{}"),
        "nested": lambda path: path.write_text("[" * 1_000_000),
        "pipe": os.mkfifo,
        "link": lambda path: path.symlink_to("/dev/zero"),
        "\x1b[2J": lambda path: path.write_text("{}"),
    }
    for name, plant in plants.items():
        for stem in (f"{name}-result", f"{name}-job"):
            path = context.directory / "runs" / stem
            path.mkdir(parents=True)
            (path / "run.lock").touch()
            plant(path / f"{stem.split('-')[-1]}.json")
    listed = {run.run_id: run.state for run in flows.status(context).runs}
    names = sorted(name for name in plants if name != "\x1b[2J")
    assert listed == {
        f"{name}-{kind}": state for name in names for kind, state in (("result", "done"), ("job", "orphaned"))
    }
    closed = {run.run_id: run.cause for run in flows.runs(context).runs if run.run_id.endswith("-job")}
    assert closed == {f"{name}-job": "lab-lost" for name in names}
    assert {run.run_id for run in flows.runs(context).runs} == set(listed)
    for run_id in listed:
        assert flows.show(context, run_id).summary.run_id == run_id
    assert isinstance(flows.run(context, "hello", RunOptions()), model.Result)
    assert {run.state for run in flows.runs(context).runs} == {"done"}


def launching(engine: Engine, *lines: str, code: int = 0) -> None:
    """Let the launcher print these lines and exit with that code."""
    reaching = engine.answer

    def answer(name: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Print the lines and fail with the code for a launch; answer else as before."""
        if argv[0] != "timeout":
            yield from reaching(name, argv)
            return
        yield from lines
        if code:
            raise Failed(code)

    engine.answer = answer


def test_a_run_is_held_against_one_that_was_recorded_before(
    context: Context, engine: Engine, lab_is_up: Callable[[], None]
) -> None:
    """Run with an expectation against the latest run: ConfigError without one, FAIL with its bound."""
    with (context.directory / "workloads/hello/workload.yml").open("a") as stream:
        stream.write("metrics: {speed: {pattern: 'speed (.*)', unit: /s}}\n")
    lab_is_up()
    held = RunOptions(expect=(parse_expectation("speed>=-5% of latest"),))
    with pytest.raises(ConfigError, match="no run of hello has passed yet"):
        flows.run(context, "hello", held)
    assert records(context) == []
    ranks = [f"\x01{rank}!\x02labctl: rank {rank} of 2 on worker-{rank}" for rank in (0, 1)]
    launching(engine, *ranks, "speed 200")
    first = flows.run(context, "hello", RunOptions())
    launching(engine, *ranks, "speed 180")
    second = flows.run(context, "hello", held)
    assert isinstance(first, Result)
    assert isinstance(second, Result)
    assert (first.verdict, second.verdict, second.exit_code) == ("PASS", "FAIL", 5)
    assert second.message == f"1 of 1 criterion not met: speed 180 /s (>= 190 wanted, 5 % below {first.run_id})."
    (recorded,) = store.load_job(context.directory, second.run_id).workload.criteria
    assert (recorded.min, recorded.relative) == (190, Relative(">=", -0.05, first.run_id))


def test_a_token_that_a_rank_says_before_it_crashes_is_shown_and_recorded_nowhere(
    context: Context, engine: Engine, lab_is_up: Callable[[], None]
) -> None:
    """Print a token and crash: it is redacted in message, events and record."""
    token = "hf_CANARYCANARY"  # noqa: S105
    with (context.directory / ".env").open("a") as stream:
        stream.write(f"HF_TOKEN={token}\n")
    events: list[Event] = []
    context = replace(context, emit=events.append)
    lab_is_up()
    crash = "worker-1: \x011!\x02labctl: rank 1 on worker-1 exited with code 9"
    launching(engine, f"worker-1: KeyError: {token}", crash, code=1)
    result = flows.run(context, "hello", RunOptions())
    assert isinstance(result, model.Result)
    assert result.message == "rank 1 on worker-1 exited with code 9: KeyError: [REDACTED]"
    assert "worker-1: KeyError: [REDACTED]" in [event.text for event in events if event.kind == "line"]
    record = context.directory / "runs" / result.run_id
    assert token not in "".join(
        map(str, (events, result, *(path.read_bytes() for path in record.iterdir() if path.is_file())))
    )


def test_a_disk_that_is_full_ends_a_run_with_one_error_and_keeps_what_was_recorded(
    context: Context, engine: Engine, lab_is_up: Callable[[], None]
) -> None:
    """Fill the disk during a run: cause disk-full, exit code 4, the run is stopped, earlier lines stay."""
    lab_is_up()
    launching(engine, "one", "two", "three")

    def emit(event: Event) -> None:
        """Put /dev/full in place of the open output.log once a line is printed."""
        if event.kind == "line":
            (log,) = (
                link
                for link in Path("/proc/self/fd").iterdir()
                if link.is_symlink() and link.readlink().name == "output.log"
            )
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, int(log.name))
            os.close(full)

    result = flows.run(replace(context, emit=emit), "hello", RunOptions())
    assert (result.verdict, result.cause, result.exit_code) == ("ERROR", "disk-full", 4)
    assert re.fullmatch(r"cannot write .*/output\.log: No space left on device; .* free at /.*", result.message)
    (record,) = records(context)
    assert (record / "output.log").read_text() == "one\n"
    assert [(cause, message) for _, cause, message in engine.stops] == [("disk-full", result.message)]
    assert [run.cause for run in flows.runs(context).runs] == ["disk-full"]


def test_a_disk_with_no_room_for_the_result_either_leaves_it_to_the_next_command(
    context: Context, engine: Engine, lab_is_up: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fill the disk for the result too: cause disk-full, a warning, no result.json."""
    lab_is_up()
    launching(engine, "one")
    replacing, events = os.replace, list[Event]()

    def full(source: str, name: str, **options: int) -> None:
        """Raise "No space left on device" for result.json; else replace."""
        if name == "result.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replacing(source, name, **options)

    def keep(self: store.RunLog, lines: Sequence[Line]) -> Sequence[Line]:
        """Raise DiskFull."""
        raise store.DiskFull("cannot write output.log: No space left on device; 0 B free at /data")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(store.RunLog, "keep", keep)
    result = flows.run(replace(context, emit=events.append), "hello", RunOptions())
    assert (result.verdict, result.cause, result.exit_code) == ("ERROR", "disk-full", 4)
    warnings = [event.text for event in events if event.kind == "warning"]
    assert warnings[-1].endswith(f"`labctl show {result.run_id}` writes it once there is room")
    (record,) = records(context)
    assert not (record / "result.json").exists()


def test_whether_a_run_has_ended_is_unknown_where_its_launcher_does_not_answer(
    context: Context, engine: Engine, lab_is_up: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """List a run whose launcher does not answer: "unknown", or "running" while its lock is held."""
    lab_is_up()
    folder = context.directory / "runs/20260101-000000-hello-0000"
    folder.mkdir(parents=True)
    (folder / "started").touch()
    assert [run.state for run in flows.status(context).runs] == ["orphaned"]

    def silent_engine(*_: Any, **__: Any) -> ObservedState:
        """Raise HostError "Docker Engine does not answer"."""
        raise HostError("Docker Engine does not answer")

    monkeypatch.setattr(engine, "observe", silent_engine)
    assert [run.state for run in flows.runs(context).runs] == ["unknown"]
    with filelock.held(context.directory / filelock.RUNS / f"{folder.name}.lock", "run"):
        assert [run.state for run in flows.runs(context).runs] == ["running"]


def test_a_result_that_cannot_be_written_is_one_error(
    context: Context, engine: Engine, lab_is_up: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail to write result.json: HostError with `df -h`, the other records stay."""
    lab_is_up()
    replacing = os.replace

    def full(source: str, name: str, **options: int) -> None:
        """Raise "No space left on device" for result.json; else replace."""
        if name == "result.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replacing(source, name, **options)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(HostError, match=r"^cannot write .*/result\.json: No space left on device$") as caught:
        flows.run(context, "hello", RunOptions())
    assert "df -h" in caught.value.hint
    (record,) = records(context)
    assert {path.name for path in record.iterdir()} > {"output.log", "job.json"}
    assert not list(record.glob(".new-*"))


def test_an_earlier_run_whose_record_cannot_be_closed_is_a_warning(
    context: Context, engine: Engine, lab_is_up: Callable[[], None]
) -> None:
    """Remove an earlier run's folder while it is closed: a warning, and the run goes on."""
    lab_is_up()
    folder = context.directory / "runs/20260101-000000-hello-0000"
    folder.mkdir(parents=True)
    (folder / "run.lock").touch()
    events: list[Event] = []

    def emit(event: Event) -> None:
        """Record the event; remove the folder once it is to be closed."""
        events.append(event)
        if f"close runs/{folder.name}" in event.text:
            shutil.rmtree(folder)

    flows.run(replace(context, emit=emit), "hello", RunOptions())
    warned = [event.text for event in events if event.kind == "warning"]
    assert [text for text in warned if text.startswith(f"run {folder.name}: cannot write {folder}/result.json: ")]


# --- going on from a checkpoint ------------------------------------------------------------------------------

RESUMES = f"{WORKLOAD}resume: {{argument: --resume, checkpoint: 'ckpt/*.pt'}}\n"


class Fragile:
    """A launcher whose first runs save a checkpoint and lose worker-1; later ones only start their ranks."""

    def __init__(self, context: Context, engine: Engine, breaks: int, *, saves: bool = True) -> None:
        """Replace the engine's answers by ``answer``."""
        self.context, self.engine, self.breaks, self.saves = context, engine, breaks, saves
        self.reach = engine.answer
        self.launched: list[str] = []
        """Arguments of each run's script."""
        engine.answer = self.answer

    def answer(self, name: str, argv: tuple[str, ...]) -> Iterator[str]:
        """Answer as the launcher: the first ``breaks`` runs lose worker-1, later ones start their ranks."""
        if argv[0] != "timeout":
            yield from self.reach(name, argv)
            return
        (written,) = (self.context.directory / naming.OUTPUTS).iterdir()
        script = (self.context.directory / "runs" / written.name / "rank.sh").read_text()
        self.launched.append(script.partition("hello.py")[2].partition(" <")[0].strip())
        if len(self.launched) > self.breaks:
            yield from ("\x010!\x02labctl: rank 0 of 2 on worker-0", "\x011!\x02labctl: rank 1 of 2 on worker-1")
            return
        if self.saves:
            (written / "ckpt").mkdir()
            (written / f"ckpt/{len(self.launched)}.pt").touch()
        self.engine.seen = builders.observed(self.engine.lab, worker_1={"state": "exited"})
        raise Failed(1)


@pytest.fixture
def resumes(context: Context, engine: Engine, lab_is_up: Callable[[], None]) -> None:
    """Bring up a lab whose workload can resume."""
    (context.directory / "workloads/hello/workload.yml").write_text(RESUMES)
    lab_is_up()


@pytest.mark.usefixtures("resumes")
def test_a_run_goes_on_from_the_checkpoint_of_one_that_broke(context: Context, engine: Engine) -> None:
    """Lose a node, bring it up and resume: PASS from the checkpoint, with the same arguments."""
    fragile = Fragile(context, engine, breaks=1)
    broken = to_json(flows.run(context, "hello", RunOptions(arguments=(("steps", "9"),))))
    assert broken["cause"] == "node-lost"
    with pytest.raises(HostError, match="worker-1: exited"):
        flows.run(context, "", RunOptions(resume="latest"))
    flows.up(context)
    result = to_json(flows.run(context, "", RunOptions(resume=broken["run_id"])))
    assert (result["verdict"], result["resumed"]) == ("PASS", f"{broken['run_id']}/ckpt/1.pt")
    assert fragile.launched == ["--steps 9", f"--steps 9 --resume /workspace/runs/{broken['run_id']}/ckpt/1.pt"]
    record = json.loads((context.directory / "runs" / result["run_id"] / "job.json").read_text())
    assert record["resumed"] == result["resumed"]


@pytest.mark.usefixtures("resumes")
def test_a_resumed_run_that_breaks_too_is_started_again(context: Context, engine: Engine) -> None:
    """Resume with retries=1 a run that breaks again: PASS after one retry."""
    Fragile(context, engine, breaks=2)
    broken = to_json(flows.run(context, "hello", RunOptions()))
    flows.up(context)
    result = to_json(flows.run(context, "", RunOptions(resume=broken["run_id"], retries=1)))
    assert (result["workload"], result["verdict"], len(result["retried"])) == ("hello", "PASS", 1)


@pytest.mark.usefixtures("resumes")
def test_a_lost_node_is_brought_up_and_the_run_started_again_as_often_as_asked(
    context: Context, engine: Engine
) -> None:
    """Run with retries=3 and two lost nodes: PASS, each retry from the newest checkpoint."""
    events: list[Event] = []
    emitting = Context(directory=context.directory, environ={}, emit=events.append, flags={})
    fragile = Fragile(context, engine, breaks=2)
    result = to_json(flows.run(emitting, "hello", RunOptions(retries=3)))
    first, second = (attempt.partition(": ")[0] for attempt in result["retried"])
    assert (result["verdict"], result["resumed"]) == ("PASS", f"{second}/ckpt/2.pt")
    assert all(": node-lost: worker-1 (rank 1): container exited" in attempt for attempt in result["retried"])
    started = ["", f"--resume /workspace/runs/{first}/ckpt/1.pt", f"--resume /workspace/runs/{second}/ckpt/2.pt"]
    assert fragile.launched == started
    notices = [event.text for event in events if event.kind == "notice"]
    assert f"retry 1 of 3 goes on from {first}/ckpt/1.pt" in notices
    assert len(records(context)) == 3


@pytest.mark.usefixtures("resumes")
def test_a_run_without_a_checkpoint_is_started_again_from_the_beginning(context: Context, engine: Engine) -> None:
    """Retry without a checkpoint: PASS from the beginning."""
    fragile = Fragile(context, engine, breaks=1, saves=False)
    result = to_json(flows.run(context, "hello", RunOptions(retries=1)))
    assert (result["verdict"], result["resumed"], fragile.launched) == ("PASS", "", ["", ""])


@pytest.mark.usefixtures("resumes")
def test_the_last_attempt_is_the_answer(context: Context, engine: Engine) -> None:
    """Run with retries=1 that breaks always: the second result."""
    fragile = Fragile(context, engine, breaks=9)
    result = to_json(flows.run(context, "hello", RunOptions(retries=1)))
    assert (result["cause"], len(result["retried"]), len(fragile.launched)) == ("node-lost", 1, 2)


@pytest.mark.usefixtures("resumes")
def test_a_run_that_ends_twice_in_the_same_way_is_not_started_again(context: Context, engine: Engine) -> None:
    """Run with retries=5 that fails twice alike: no-progress, exit code 7, two launches."""
    engine.started.clear()
    result = to_json(flows.run(context, "hello", RunOptions(retries=5)))
    second = result["run_id"]
    (first,) = {*store.ids(context.directory)} - {second}
    ended = f"runs {first} and {second} ended before any step, with the same words, without a newer checkpoint"
    assert (result["run_id"], result["cause"], result["exit_code"], result["evidence"]) == (
        second,
        "no-progress",
        7,
        ended,
    )
    assert len([argv for _, argv in engine.started if argv[0] == "timeout"]) == 2


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.usefixtures("resumes")
def test_an_elastic_workload_goes_on_without_a_node_that_does_not_come_back(
    context: Context, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, elastic: bool
) -> None:
    """Lose a node for good: an elastic workload runs without it, another is not retried."""
    file = context.directory / "workloads/hello/workload.yml"
    file.write_text(f"{RESUMES}elastic: {'true' if elastic else 'false'}\n")
    fragile = Fragile(context, engine, breaks=1)
    monkeypatch.setattr(labs, "bring_up", lambda *_, **__: (_ for _ in ()).throw(HostError("worker-1 does not start")))
    events: list[Event] = []
    emitting = Context(directory=context.directory, environ={}, emit=events.append, flags={})
    result = to_json(flows.run(emitting, "hello", RunOptions(retries=1)))
    (warned,) = [event.text for event in events if event.kind == "warning"]
    if not elastic:
        assert (result["cause"], len(fragile.launched)) == ("node-lost", 1)
        assert warned.endswith("is not started again, because the lab does not come up: worker-1 does not start")
        return
    assert warned == "worker-1 does not start; going on without worker-1"
    assert fragile.launched[1].endswith("ckpt/1.pt")
    record = json.loads((context.directory / "runs" / result["run_id"] / "job.json").read_text())
    assert record["nodes"] == [{"name": "worker-0", "slots": 1}]


@pytest.mark.usefixtures("resumes")
def test_a_run_that_nobody_follows_is_not_gone_on_from_while_it_runs(context: Context, engine: Engine) -> None:
    """Resume a run that is still active: ConfigError with attach and stop."""
    Fragile(context, engine, breaks=1)
    run_id = to_json(flows.run(context, "hello", RunOptions()))["run_id"]
    (context.directory / "runs" / run_id / "result.json").unlink()
    flows.up(context)
    engine.answer = active(run_id, "worker-0", "worker-1")
    with pytest.raises(ConfigError, match=f"run {run_id} is still running") as caught:
        flows.run(context, "", RunOptions(resume=run_id))
    assert caught.value.hint == f"labctl attach {run_id}, or labctl stop {run_id}"


@pytest.mark.parametrize("launch", [flows.launch, flows.plan_run])
def test_a_detached_run_is_not_started_again(context: Context, launch: Command) -> None:
    """Launch detached with retries: ConfigError."""
    with pytest.raises(ConfigError, match="by the labctl that follows it"):
        launch(context, "hello", RunOptions(detach=True, retries=1))


@pytest.mark.usefixtures("resumes")
def test_a_dry_run_says_what_it_would_go_on_from(context: Context, engine: Engine) -> None:
    """Plan to resume the latest run: the plan has its checkpoint."""
    Fragile(context, engine, breaks=1)
    broken = to_json(flows.run(context, "hello", RunOptions()))["run_id"]
    flows.up(context)
    plan = "\n".join(to_json(flows.plan_run(context, "", RunOptions(resume="latest")))["plan"])
    assert f"--resume /workspace/runs/{broken}/ckpt/1.pt" in plan


# --- replay --------------------------------------------------------------------------------------------------


@pytest.fixture
def ran(context: Context, engine: Engine, lab_is_up: Callable[[], None]) -> Result:
    """Bring up a lab with a shared module and run hello; return the result."""
    shared = context.directory / store.SHARED
    shared.mkdir()
    (shared / "shapes.py").write_text("SIDES = 4\n")
    lab_is_up()
    result = flows.run(context, "hello", RunOptions())
    assert isinstance(result, Result)
    return result


def normalised(context: Context, run_id: str, name: str) -> str:
    """Read a file of a run's record, with ``RUN`` in place of the run's id."""
    return (context.directory / "runs" / run_id / name).read_text().replace(run_id, "RUN")


def test_a_replay_has_the_same_command_files_and_code_whatever_became_of_the_workload(
    context: Context, ran: Result
) -> None:
    """Change the workload and replay: the record's command, files and code, and it can be replayed again."""
    folder = context.directory / "workloads/hello"
    (folder / "hello.py").write_text("print('another')\n")
    (folder / "workload.yml").write_text(WORKLOAD.replace("60s", "90s"))
    again = flows.replay(context, ran.run_id)
    assert isinstance(again, Result)
    assert (again.replays, ran.replays) == (ran.run_id, "")
    for name in ("hostfile", "rank.sh", "work/hello.py", "work/workload.yml"):
        assert normalised(context, again.run_id, name) == normalised(context, ran.run_id, name)
    jobs = [json.loads(normalised(context, run_id, "job.json")) for run_id in (ran.run_id, again.run_id)]
    assert (jobs[0].pop("replays"), jobs[1].pop("replays")) == ("", ran.run_id)
    assert (jobs[0]["job"].pop("replays"), jobs[1]["job"].pop("replays")) == ("", ran.run_id)
    hashed = [job.pop("files") for job in jobs]
    assert hashed[0].keys() == hashed[1].keys()
    assert jobs[0] == jobs[1]
    # One that is a replay itself, and has all that the first had.
    assert isinstance(flows.replay(context, again.run_id), Result)


def test_a_dry_run_of_a_replay_is_the_plan_of_the_run(context: Context, ran: Result) -> None:
    """Plan a replay: the run's plan, and no record."""
    plan = to_json(flows.plan_replay(context, ran.run_id))["plan"]
    assert "which starts hello.py" in "\n".join(plan)
    assert len(records(context)) == 1


def another_image(context: Context, engine: Engine, record: Path) -> None:
    """Show another image id."""
    engine.found = "sha256:2222"


def no_image(context: Context, engine: Engine, record: Path) -> None:
    """Show no image."""
    engine.found = None


def fewer_nodes(context: Context, engine: Engine, record: Path) -> None:
    """Set LAB_NODES=1."""
    env = context.directory / ".env"
    env.write_text(env.read_text().replace("LAB_NODES=2", "LAB_NODES=1"))


def another_setting(context: Context, engine: Engine, record: Path) -> None:
    """Set LAB_SHM_SIZE=1g and render."""
    env = context.directory / ".env"
    env.write_text(f"{env.read_text()}LAB_SHM_SIZE=1g\n")
    flows.render_files(context)


def changed_by_the_run(context: Context, engine: Engine, record: Path) -> None:
    """Change hello.py in the record."""
    (record / "work/hello.py").write_text("print('changed')\n")


def pruned_in_part(context: Context, engine: Engine, record: Path) -> None:
    """Remove rank.sh from the record."""
    (record / "rank.sh").unlink()


def shared_module_changed(context: Context, engine: Engine, record: Path) -> None:
    """Change the shared module."""
    (context.directory / store.SHARED / "shapes.py").write_text("SIDES = 5\n")


def recorded(record: Path, **changes: Any) -> None:
    """Replace keys in the record's versions.json."""
    path = record / "versions.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def was_on_devices(context: Context, engine: Engine, record: Path) -> None:
    """Record a device of worker-0."""
    card = {"id": "0", "name": "H100", "uuid": "GPU-1", "firmware": "96.0", "driver": "550.54"}
    recorded(record, devices={"worker-0": [card], "worker-1": []})


def had_a_model(context: Context, engine: Engine, record: Path) -> None:
    """Record a cached model."""
    recorded(record, cache={"local": {"model facebook/opt-125m": "27dcfa74"}})


LACKING = [
    (another_image, "local: image labctl/cpu was sha256:1111, and is sha256:2222 there"),
    (no_image, "local: image labctl/cpu was sha256:1111, and is not there"),
    (fewer_nodes, "worker-1: the lab has no such node"),
    (another_setting, "settings: LAB_SHM_SIZE was 8g, and is 1g"),
    (changed_by_the_run, "hello.py: its copy in .* was changed by the run"),
    (pruned_in_part, "rank.sh: its copy in .* is gone"),
    (shared_module_changed, "workloads/common/shapes.py: changed since"),
    (was_on_devices, "worker-0: its devices or their driver were 0 H100 GPU-1 96.0 550.54, and are none"),
    (had_a_model, "local: model facebook/opt-125m was 27dcfa74, and is not cached"),
]


@pytest.mark.parametrize(("change", "message"), LACKING, ids=lambda change: getattr(change, "__name__", ""))
def test_a_replay_that_cannot_be_had_says_what_it_lacks(
    context: Context, engine: Engine, ran: Result, change: Callable[[Context, Engine, Path], None], message: str
) -> None:
    """Replay after a change: HostError says what differs, and no record."""
    change(context, engine, context.directory / "runs" / ran.run_id)
    before = len(records(context))
    with pytest.raises(HostError, match=message):
        flows.replay(context, ran.run_id)
    assert len(records(context)) == before


def test_a_replay_is_told_from_its_run_by_nothing_that_is_compared(context: Context, ran: Result) -> None:
    """Compare a run with its replay: one group."""
    again = flows.replay(context, ran.run_id)
    assert len(flows.compare(context, [ran.run_id, to_json(again)["run_id"]]).groups) == 1


def test_a_replay_of_a_script_compares_as_the_same_though_its_clone_moved_on(
    context: Context, engine: Engine, lab_is_up: Callable[[], None]
) -> None:
    """Change a script in its clone and replay: the old script, and compared as one group."""
    clone = context.directory / "clone"
    clone.mkdir()
    script = clone / "own.py"
    script.write_text("print(1)\n")
    identity = ("-c", "user.name=ann", "-c", "user.email=ann@example.org")
    for arguments in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "first")):
        subprocess.run(["git", *arguments], cwd=clone, check=True)
    lab_is_up()
    first = to_json(flows.run(context, "", RunOptions(script=script)))["run_id"]
    versions = json.loads((context.directory / "runs" / first / "versions.json").read_text())
    assert [(version["path"], version["dirty"]) for version in versions["code"]] == [(str(clone), False)]
    script.write_text("print(2)\n")
    again = to_json(flows.replay(context, first))["run_id"]
    assert (context.directory / "runs" / again / "work/clone/own.py").read_text() == "print(1)\n"
    assert len(flows.compare(context, [first, again]).groups) == 1


def test_all_that_a_replay_lacks_is_named_at_once(context: Context, engine: Engine, ran: Result) -> None:
    """Replay after two changes: HostError names both."""
    for change in (another_image, shared_module_changed):
        change(context, engine, context.directory / "runs" / ran.run_id)
    with pytest.raises(HostError, match=r"(?s)sha256:2222.*\n.*shapes.py"):
        flows.replay(context, ran.run_id)


def test_a_record_of_an_earlier_labctl_is_not_replayed(context: Context, ran: Result) -> None:
    """Replay a record without hashes: HostError says that it is of an earlier labctl."""
    path = context.directory / "runs" / ran.run_id / "job.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in kept.items() if key not in ("files", "code", "shared")}))
    with pytest.raises(HostError, match="an earlier labctl recorded it"):
        flows.replay(context, ran.run_id)


@pytest.fixture
def beside(context: Context, engine: Engine, ran: Result) -> None:
    """Record another run, which is active on worker-7, after the end of ``ran``."""
    folder = context.directory / "runs/29990101-000000-hello-0000"
    folder.mkdir(parents=True)
    (folder / store.MARK).touch()
    engine.answer = active("29990101-000000-hello-0000", "worker-7")


@pytest.mark.usefixtures("beside")
def test_a_replay_waits_for_nobody_and_is_refused_beside_other_runs(context: Context, ran: Result) -> None:
    """Replay while another run is active: HostError."""
    with pytest.raises(HostError, match="in use by run 29990101-000000-hello-0000"):
        flows.replay(context, ran.run_id)


@pytest.mark.usefixtures("beside")
def test_a_run_beside_another_has_a_port_of_its_own_and_the_agent_that_waits_for_it(
    context: Context, engine: Engine, ran: Result
) -> None:
    """Run while another run is active on other nodes: the next port, and the agent is waited for."""
    run = flows.run(context, "hello", RunOptions())
    of_before, launched = engine.launched[-2:]
    assert (launched.id, launched.port) == (run.run_id, of_before.port + 1)
    assert engine.waited == [ran.run_id, run.run_id]


# --- freeze and verify ---------------------------------------------------------------------------------------


def test_verify_finds_what_was_changed_of_a_lab_that_is_up(
    context: Context, engine: Engine, lab_is_up: Callable[[], None]
) -> None:
    """Freeze, change a script, data and an image: verify names the three."""
    task = context.directory / "workloads/hello"
    task.joinpath("workload.yml").write_text(f"{WORKLOAD}inputs: {{data: file}}\narguments: [--data, corpus.txt]\n")
    corpus = context.directory / "cache/corpus.txt"
    corpus.write_text("to be or not to be\n")
    lab_is_up()
    lock = context.directory / "lab.lock"
    assert flows.freeze(context, lock).changed
    assert flows.verify(context, lock).drift == ()
    (task / "hello.py").write_text("print('another')\n")
    corpus.write_text("to be\n")
    engine.seen = replace(
        engine.seen,
        containers=tuple(
            replace(container, image="sha256:2222") if container.node == "worker-1" else container
            for container in engine.seen.containers
        ),
    )
    drift = [(difference.what, difference.where, difference.now) for difference in flows.verify(context, lock).drift]
    assert [difference[:2] for difference in drift] == [
        ("files workloads/hello/hello.py", "lab"),
        (f"data {corpus}", "local"),
        ("image", "worker-1"),
    ]
    assert drift[2][2] == "sha256:2222"


def test_a_lab_without_its_image_is_not_frozen(context: Context, engine: Engine) -> None:
    """Freeze without the image: HostError."""
    engine.found = None
    with pytest.raises(HostError, match="local has no image labctl/cpu"):
        flows.freeze(context, context.directory / "lab.lock")


# --- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accelerator", "asked", "read"),
    [
        ("nvidia", Hardware(), True),
        ("nvidia", Hardware(host_memory=1 << 40), True),
        ("nvidia", Hardware(device_memory=80 << 30), False),
        ("nvidia", Hardware(nodes=4), False),
        ("cpu", Hardware(), False),
    ],
)
def test_fit_reads_the_devices_of_the_lab_if_they_decide(
    context: Context, monkeypatch: pytest.MonkeyPatch, accelerator: str, asked: Hardware, read: bool
) -> None:
    """Fit: the lab's devices are read only if they decide."""
    (context.directory / ".env").write_text(SETTINGS)
    shutil.copytree(Path(__file__).parents[2] / "workloads/opt", context.directory / "workloads/opt")
    calls: list[str] = []

    def devices() -> DeviceReport:
        """Record the call; return no devices."""
        calls.append("devices")
        return DeviceReport(())

    lab = builders.lab(accelerator=accelerator)
    backend = SimpleNamespace(lab=lambda: lab, devices=devices)
    monkeypatch.setattr(flows, "connected", lambda *_: nullcontext(backend))
    report = flows.fit(context, "opt-tiny", RunOptions(), asked)
    assert (bool(calls), report.available.device) == (read, asked.device_memory)


def test_doctor_of_a_cluster_outside_a_lab_does_not_examine_docker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With LAB_ENGINE=kubernetes and no lab, the backend of the cluster gives the findings, not Docker's."""

    class Cluster:
        """A backend without findings."""

        def findings(self, *_: object) -> tuple[()]:
            """Return no findings."""
            return ()

    def docker(*_: object) -> tuple[()]:
        """Fail."""
        raise AssertionError("Docker was examined")

    monkeypatch.setattr(doctor_run, "of_machine", docker)
    monkeypatch.setattr(backends, "connect", lambda *_, **__: nullcontext(Cluster()))
    environ = {"LAB_ENGINE": "kubernetes"}
    report = flows.doctor(Context(directory=tmp_path, environ=environ, emit=lambda _: None, flags={}))
    assert report.findings == ()
