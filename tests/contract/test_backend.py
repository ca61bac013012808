"""The contract of backends, through the protocol and through the flows of the commands."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.fake_backend import Failed, FakeBackend, healthy
from support.harness import WORKLOADS, Lab, wait_until
from support.sites import NODES, ClusterInMemory, ClusterSite, DockerSite, Lasts, MadeUpSite, Site

from labctl import backends, flows
from labctl.backends.docker.lab import cluster
from labctl.backends.state import ObservedState
from labctl.backends.status import LabStatus
from labctl.config.context import Context
from labctl.config.settings import BACKENDS
from labctl.errors import ConfigError, HostError
from labctl.jobs.request import RunOptions, choose_workload
from labctl.model import Cache, Result
from labctl.runs.fitting import Hardware
from labctl.runs.labs import LabNow
from labctl.ui.events import Reader
from labctl.ui.tiles import Known, tiles
from labctl.ui.watcher import Watchers

DOCKER = pytest.param("Docker here", marks=pytest.mark.docker)
SSH = pytest.param("Docker over ssh", marks=[pytest.mark.docker, pytest.mark.xdist_group("shared_rack")])
CLUSTER = pytest.param(
    "cluster", marks=[pytest.mark.docker, pytest.mark.kubernetes, pytest.mark.xdist_group("kubernetes")]
)
EVERYWHERE = ["made-up", "Docker in memory", DOCKER, SSH, "cluster in memory", CLUSTER]
LASTING = ["made-up", "Docker in memory", DOCKER, SSH]
"""Sites of labs that `up` brings up; on others a run brings its nodes."""
DETACHED = ["made-up", DOCKER, SSH, CLUSTER]
"""Sites on which a run goes on without labctl; in memory a run is over once launched."""
FOLLOWED = [*DETACHED, "cluster in memory"]
"""Sites where a run can be followed after it was launched."""
REPLAYED = [DOCKER, SSH, "cluster in memory", CLUSTER]
"""Sites whose backends can repeat a run from its record."""
LOSING = ["made-up", DOCKER, "cluster in memory", CLUSTER]
"""Sites whose nodes can be lost with their processes; over ssh each engine behaves as a local one."""
LIMITED = ["made-up", "cluster in memory"]
"""Sites of backends that do not support every command."""


def programs(container: str, argv: tuple[str, ...]) -> Iterator[str]:
    """Answer programs run in a node: echo, an exit with 7, mpirun with two ranks, else as a healthy agent does."""
    yield from healthy(container, argv)
    if argv[0] == "echo":
        yield " ".join(argv[1:])
    elif argv == EXIT_7:
        raise Failed(7)
    elif "mpirun" in argv:
        yield from ranks(" ".join(argv))


def ranks(command: str) -> Iterator[str]:
    """Yield output of two ranks: of `fails` rank 0 fails with code 1, `stubborn` lasts, others print `answer 42`."""
    for rank in range(2):
        yield f"\x01{rank}!\x02labctl: rank {rank} of 2 on worker-{rank}"
    if "-fails-" in command:
        yield f"\x010\x02{LAST_WORDS}"
        yield "\x010!\x02labctl: rank 0 on worker-0 exited with code 1"
        raise Failed(1)
    if "stubborn" in command:
        raise Lasts
    for rank in range(2):
        yield f"\x01{rank}\x02answer 42"


EXIT_7 = ("sh", "-c", "exit 7")
LAST_WORDS = "KeyError: 'SERVICE_TOKEN'"
"""Last lines of the traceback of workload `fails` without its variable."""


def made_up(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Register the made-up backend for LAB_ENGINE=made-up; return the site of a new lab on it."""
    monkeypatch.setitem(BACKENDS, "made-up", "support.made_up_backend")
    return MadeUpSite(context_of(directory, "LAB_ENGINE=made-up"))


def docker_in_memory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Replace the Docker engine by an in-memory one; return the site of a new lab on it."""
    fake = FakeBackend(answer=programs, seen=ObservedState(image="sha256:fake"))
    monkeypatch.setattr(cluster, "backend_here", lambda _: fake)
    return DockerSite(context_of(directory))


def cluster_in_memory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Replace the Kubernetes API by one in memory with two nodes; return the site of a new lab on it."""
    api = ClusterInMemory(programs, ("n0", "n1"))
    monkeypatch.setattr("labctl.backends.kubernetes.lab.Api", lambda *_: api)
    return ClusterSite(context_of(directory, "LAB_ENGINE=kubernetes"))


IN_MEMORY: Mapping[str, Callable[[Path, pytest.MonkeyPatch], Site]] = {
    "made-up": made_up,
    "Docker in memory": docker_in_memory,
    "cluster in memory": cluster_in_memory,
}
LABS: Mapping[str, tuple[str, tuple[int, ...], Callable[[Context], Site]]] = {
    "Docker here": ("lend", (), DockerSite),
    "Docker over ssh": ("rack_lab", (2,), DockerSite),
    "cluster": ("cluster_lab", (), ClusterSite),
}
"""Fixture that makes a real lab, its arguments, and the site."""


def context_of(directory: Path, *settings: str) -> Context:
    """Make a lab directory with the tests' workloads and an .env with these lines added; return its context."""
    flows.init(directory)
    shutil.copytree(WORKLOADS, directory / "workloads", dirs_exist_ok=True)
    lines = ("LAB_NAME=demo", "LAB_ACCELERATOR=cpu", f"HOST_CACHE_PATH={directory}", *settings)
    (directory / ".env").write_text("\n".join(lines))
    return Context(directory=directory, environ={}, emit=lambda _: None, flags={})


@pytest.fixture(params=EVERYWHERE)
def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Yield a lab of two nodes on a backend; in memory it is new and down, and taken down after the test."""
    if request.param in IN_MEMORY:
        made = IN_MEMORY[request.param](tmp_path, monkeypatch)
        yield made
        flows.down(made.context)
        return
    fixture, arguments, of = LABS[request.param]
    lab: Lab = request.getfixturevalue(fixture)(*arguments)
    # The ssh of hosts, whose options are in a wrapper.
    monkeypatch.setenv("PATH", lab.environ["PATH"])
    if config := lab.environ.get("KUBECONFIG"):
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", config)
    yield of(Context(directory=lab.path, environ=lab.environ, emit=lambda _: None, flags={}))


on = pytest.mark.parametrize


def states(status: LabStatus) -> tuple[str, list[str]]:
    """Return the lab's state and the names of its running nodes."""
    return status.state, [node.name for node in status.nodes if node.state == "running"]


# --- the lab -------------------------------------------------------------------------------------------------


def test_status_names_the_nodes(site: Site) -> None:
    """Status of a lab with a run or nodes begun is `up` and lists both nodes."""
    site.begin()
    assert states(flows.status(site.context)) == ("up", NODES)


@on("site", LASTING, indirect=True)
def test_a_lab_comes_up_once_and_goes_down_whole(site: Site) -> None:
    """`up` starts both nodes, a second `up` keeps them; `down` leaves nothing, and a second `down` is accepted."""
    flows.down(site.context)
    assert flows.plan_up(site.context).plan[0].startswith("#1 ")
    assert states(flows.status(site.context)) == ("down", [])
    assert states(flows.up(site.context)) == ("up", NODES)
    before = site.identities()
    assert sorted(before) == NODES
    assert states(flows.up(site.context)) == ("up", NODES)
    assert site.identities() == before

    flows.down(site.context)
    assert states(flows.status(site.context)) == ("down", [])
    assert remains(site) == ()
    flows.down(site.context)


def test_a_lab_that_is_up_goes_down_whole(site: Site) -> None:
    """A lab that has something running has nothing left after `down`, and its state is `down`."""
    site.begin()
    assert remains(site) != ()
    flows.down(site.context)
    wait_until(lambda: remains(site) == (), 120, "nothing is left")
    assert states(flows.status(site.context)) == ("down", [])


def remains(site: Site) -> tuple[str, ...]:
    """Return the objects of the lab that the backend still finds; fail if a host does not answer."""
    with backends.connect(site.context) as backend:
        left, silent = backend.remains()
    assert silent == {}
    return left


def test_a_preview_changes_nothing(site: Site) -> None:
    """plan_run, plan_down and plan_up return numbered steps; status, nodes and runs stay the same."""
    site.prepare()
    before = states(flows.status(site.context)), site.identities(), flows.runs(site.context)
    previews = [flows.plan_run(site.context, "hello", RunOptions()), flows.plan_down(site.context)]
    if "up" not in backends.unsupported(site.context.settings()):
        previews.append(flows.plan_up(site.context))
    assert (states(flows.status(site.context)), site.identities(), flows.runs(site.context)) == before
    assert all(preview.plan[0].startswith(("#1 ", "nothing to do")) for preview in previews)
    (run, *_) = previews
    assert [line.split()[0] for line in run.plan] == [f"#{number}" for number in range(1, len(run.plan) + 1)]
    assert any("result.json" in line for line in run.plan)


# --- nodes ---------------------------------------------------------------------------------------------------


def test_programs_are_run_in_the_node_that_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """exec() and flows.execute() on worker-1: echo gives code 0, `exit 7` gives 7; exec() returns `x`."""
    site.begin()
    settings, options = site.context.settings(), RunOptions()
    with backends.connect(site.context) as backend:
        workload = choose_workload(site.context.directory, "hello", options, settings)
        run = backend.begin(workload, options, datetime.now().astimezone())
        printed = backend.exec(run, "worker-1", ("echo", "x"), limit=60)
        assert (printed.code, printed.out) == (0, "x\n")
        assert backend.exec(run, "worker-1", EXIT_7, limit=60).code == 7
    with Path(os.devnull).open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert flows.execute(site.context, EXIT_7, "worker-1", everywhere=False, terminal=False) == 7
        assert flows.execute(site.context, ("echo", "x"), "worker-1", everywhere=False, terminal=False) == 0


def test_logs_are_those_of_the_node_that_is_named(site: Site) -> None:
    """`logs worker-1` gives lines, each of this node alone and without labctl's marks of ranks."""
    site.begin()
    logged: list[str] = []
    flows.logs(site.context, "worker-1", logged.append, follow=False, colors=False)
    assert {line.split()[0].removesuffix("-1") for line in logged} <= {"worker", "worker-1"}
    assert logged
    assert not [line for line in logged if "\x01" in line], "marks of ranks are labctl's own"


# --- runs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ready(site: Site) -> Iterator[Context]:
    """Yield the context of a lab prepared for a run; stop the runs that are still active after the test."""
    site.prepare()
    yield site.context
    for run in flows.runs(site.context).runs:
        if run.state in ("running", "waiting"):
            flows.stop(site.context, run.run_id, 1)


def test_a_workload_passes_and_is_listed_and_recorded(ready: Context) -> None:
    """`hello` passes on two ranks; list, show, logs and the record's files agree."""
    result = flows.run(ready, "hello", RunOptions())
    assert (result.verdict, result.message) == ("PASS", "All criteria met on 2 ranks: answer 42 things (>= 41 wanted).")
    assert result.metrics["answer"]["value"] == 42
    assert [(rank.rank, rank.node) for rank in result.ranks] == [(0, "worker-0"), (1, "worker-1")]
    assert (result.run_id, "done") in [(run.run_id, run.state) for run in flows.status(ready).runs]
    assert flows.show(ready, "latest").result == result

    record = ready.directory / "runs" / result.run_id
    assert json.loads((record / "job.json").read_text())["workload"] == "hello"
    assert (record / "plan.txt").read_text().startswith("#1 ")
    printed = (record / "output.log").read_text().splitlines()
    # Launchers put a rank or a node before what a rank says.
    assert [line for line in printed if line.endswith("answer 42")]
    assert json.loads((record / "result.json").read_text())["verdict"] == "PASS"
    logged: list[str] = []
    flows.run_logs(ready, result.run_id, logged.append, follow=False)
    assert logged == printed


def test_a_run_that_fails_quotes_its_last_words_and_exit_code(ready: Context) -> None:
    """Rank 0 crashes: ERROR by rank-crashed, exit code 4, and the message quotes the traceback's last line."""
    result = flows.run(ready, "fails", RunOptions(words=("exit",)))
    assert (result.verdict, result.cause, result.exit_code) == ("ERROR", "rank-crashed", 4)
    assert f"exited with code 1: {LAST_WORDS}" in result.message


@on("site", DETACHED, indirect=True)
def test_a_run_past_its_time_is_ended_and_what_its_ranks_wrote_is_in_the_record(ready: Context) -> None:
    """A script that sleeps past its timeout ends as ERROR by timeout, 124; the record has both ranks' files."""
    script = ready.directory / "writes.py"
    script.write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(os.environ['LABCTL_RUN_DIR'], 'made-' + os.environ['RANK']).write_text('here')\n"
        "time.sleep(600)\n"
    )
    result = flows.run(ready, "", RunOptions(script=script, launcher="mpirun", timeout=10))
    assert (result.verdict, result.cause, result.exit_code) == ("ERROR", "timeout", 124)
    record = ready.directory / "runs" / result.run_id
    assert [(record / f"made-{rank}").read_text() for rank in range(2)] == ["here", "here"]


@on("site", DETACHED, indirect=True)
def test_a_detached_run_is_active_and_can_be_followed_from_its_beginning_and_stopped(ready: Context) -> None:
    """Two followers hear the same lines; `stop` gives ERROR, interrupted, 130; a second stop raises HostError."""
    run_id = flows.launch(ready, "stubborn", RunOptions()).run_id
    heard: tuple[list[str], list[str]] = ([], [])
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(follow, ready, run_id, heard[0])
        wait_until(lambda: begun(heard[0]), 180, "both ranks are heard")
        assert (run_id, "running") in [(run.run_id, run.state) for run in flows.status(ready).runs]
        second = threads.submit(follow, ready, run_id, heard[1])
        wait_until(lambda: begun(heard[1]), 60, "they are heard again from the beginning")
        result = flows.stop(ready, run_id, 1)
        first.result(120)
        second.result(120)
    assert (result.verdict, result.cause, result.exit_code) == ("ERROR", "interrupted", 130)
    assert "stopped by " in result.message
    assert heard[0] == heard[1]
    assert flows.attach(ready, run_id) == result
    with pytest.raises(HostError, match=f"run {run_id} has ended: ERROR"):
        flows.stop(ready, run_id, 1)


def follow(context: Context, run_id: str, heard: list[str]) -> None:
    """Collect a run's lines in ``heard`` from the first until it ends; retry until it can be followed."""

    def followed() -> bool:
        """Follow the run into an emptied ``heard``; return False if that raises HostError."""
        heard.clear()
        try:
            flows.run_logs(context, run_id, heard.append, follow=True)
        except HostError:
            return False
        return True

    wait_until(followed, 180, "the run's lines are handed on to its end")


def begun(heard: list[str]) -> bool:
    """Return True if both ranks have printed their `does not listen` line."""
    return len([line for line in heard if line.endswith("does not listen")]) == 2


@on("site", LOSING, indirect=True)
def test_a_run_whose_nodes_are_gone_is_closed_by_the_next_list(site: Site, ready: Context) -> None:
    """After the nodes are lost, listing the runs closes the record: ERROR by lab-lost or interrupted."""
    run_id = flows.launch(ready, "stubborn", RunOptions()).run_id
    wait_until(lambda: runs_of(ready)[run_id] == "running", 120, "it runs")
    site.lose()
    closed = wait_until(lambda: result_of(ready, run_id), 120, "its record is closed")
    assert closed.verdict == "ERROR"
    assert closed.cause in ("lab-lost", "interrupted")


def runs_of(context: Context) -> dict[str, str]:
    """List the runs; return each one's state by id."""
    return {run.run_id: run.state for run in flows.runs(context).runs}


def result_of(context: Context, run_id: str) -> Result | None:
    """List the runs, which closes records of ended ones; return this run's result, None if it is not done."""
    return flows.show(context, run_id).result if runs_of(context)[run_id] == "done" else None


def every_node(context: Context) -> Path:
    """Write hostfiles of all the lab's nodes into folder `every` of the lab directory; return the folder."""
    with backends.connect(context) as backend:
        size = len(backend.lab().nodes)
    out = context.directory / "every"
    flows.hostfiles(context, None, size=size, pattern="sequential", slots=0, out=out, seed=0)
    return out


@on("site", FOLLOWED, indirect=True)
def test_a_batch_runs_on_hostfiles_of_the_labs_nodes(ready: Context) -> None:
    """A batch of one hostfile of all nodes passes with value 42; resuming it returns the same jobs."""
    report = flows.batch(ready, "hello", (every_node(ready),), RunOptions(), lambda _: None)
    (job,) = report.batch.jobs
    assert (job.verdict, job.value) == ("PASS", 42)
    assert job.nodes == job.names
    again = flows.batch(ready, "hello", (ready.directory / "every",), RunOptions(), lambda _: None, resume=True)
    assert again.batch.jobs == report.batch.jobs


@on("site", FOLLOWED, indirect=True)
def test_a_run_that_is_under_way_is_looked_at(ready: Context) -> None:
    """`top` shows the active run and its two nodes; after `stop` it raises HostError."""
    run_id = flows.launch(ready, "stubborn", RunOptions()).run_id
    view = flows.top(ready)
    assert (view.run_id, view.workload, len(view.nodes)) == (run_id, "stubborn", 2)
    assert view.state in ("running", "waiting")
    flows.stop(ready, run_id, 1)
    with pytest.raises(HostError, match="no run is under way"):
        flows.top(ready)


@on("site", FOLLOWED, indirect=True)
def test_the_pages_show_a_run_that_is_under_way(ready: Context) -> None:
    """The cluster's tiles have the run on both workers; its page is followed to the end that `stop` makes."""
    run_id = flows.launch(ready, "stubborn", RunOptions()).run_id
    now = wait_until(lambda: busy(flows.look(ready)), 120, "both workers have the run")
    shown = [(tile.node, tile.run) for tile in tiles(now, Known())]
    assert shown == [("launcher", ""), ("worker-0", run_id), ("worker-1", run_id)]
    with Watchers(ready).watching(run_id) as watcher:
        page = Reader(watcher, "")
        wait_until(lambda: "rank 1 of 2" in page.read(), 120, "its lines come")
        assert (watcher.state().state, watcher.state().problem) == ("running", "")
        assert [node.node for node in watcher.state().nodes] == ["worker-0", "worker-1"]
        flows.stop(ready, run_id, 1)
        assert "event: ended" in page.read()


def busy(now: LabNow) -> LabNow | None:
    """Return the lab's state if both workers have a run."""
    return now if [bool(node.run) for node in now.status.nodes] == [False, True, True] else None


@on("site", REPLAYED, indirect=True)
def test_a_run_is_repeated_from_its_record(ready: Context) -> None:
    """`replay` of a passed run passes with the same metrics, a new run id, and the first one's id in `replays`."""
    result = flows.run(ready, "hello", RunOptions())
    again = flows.replay(ready, result.run_id)
    assert (again.verdict, again.replays, again.metrics) == ("PASS", result.run_id, result.metrics)
    assert again.run_id != result.run_id


@on("site", REPLAYED, indirect=True)
def test_a_lab_that_is_frozen_is_verified(ready: Context) -> None:
    """`verify` finds no drift after `freeze`, and names a workload's file that was changed after it."""
    lock = ready.directory / "lab.lock"
    assert flows.freeze(ready, lock).facts > 3
    assert flows.verify(ready, lock).drift == ()
    (ready.directory / "workloads/hello/hello.py").write_text("other")
    assert [fact.what for fact in flows.verify(ready, lock).drift] == ["files workloads/hello/hello.py"]


# --- what a backend does not have ----------------------------------------------------------------------------


def refused(context: Context, command: str) -> object:
    """Call a command, or `run` with an option, that a backend may not support; return its result."""
    if command.startswith("--"):
        name = command.removeprefix("--").replace("-", "_")
        given: Any = {"hostfile": Path("x"), "wait": True, "retries": 1}.get(name, "x")
        return flows.run(context, "hello", RunOptions(**{name: given}))
    return COMMANDS[command](context)


def ignore(_: object) -> None:
    """Drop the message."""


COMMANDS: Mapping[str, Callable[[Context], object]] = {
    "health": flows.health,
    "up": flows.up,
    "render": flows.render_files,
    "devcontainer": lambda context: flows.devcontainer(context, "code"),
    "build": flows.build,
    "clean": flows.clean,
    "keys rotate": flows.rotate_keys,
    "down --images": lambda context: flows.down(context, images=True),
    "jupyter": lambda context: flows.jupyter(context, "launcher", None, ignore),
    "bundle save": lambda context: flows.save_bundle(context, Path("x"), workloads=(), cache=False, secrets=False),
    "cache --hosts": lambda context: flows.cache(context, "", Cache(), hosts=True),
    "doctor --fix": lambda context: flows.fix(context, None),
    "doctor --node": lambda context: flows.doctor(context, node="worker-0"),
    "replay": lambda context: flows.replay(context, "latest"),
    "top": flows.top,
    "freeze": lambda context: flows.freeze(context, Path("x")),
    "verify": lambda context: flows.verify(context, context.directory / "lab.lock"),
    "batch": lambda context: flows.batch(context, "hello", (), RunOptions(), ignore),
    "bisect": lambda context: flows.bisect(context, "hello", RunOptions(), ignore),
    "validate": flows.validate,
    "fit": lambda context: flows.fit(context, "hello", RunOptions(), Hardware()),
}


def test_a_backend_has_every_member_of_the_protocol(site: Site) -> None:
    """A connected backend has every public name of the protocol Backend."""
    members = {*vars(backends.Backend)} | {*backends.Backend.__annotations__}
    with backends.connect(site.context) as backend:
        assert [name for name in members if not name.startswith("_") and not hasattr(backend, name)] == []


@on("site", LIMITED, indirect=True)
def test_what_calls_docker_itself_is_refused_by_every_other_backend(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a backend lists nothing as unsupported, each command of OF_DOCKER raises ConfigError on it."""
    monkeypatch.setattr(backends, "unsupported", lambda _: {})
    for command in backends.OF_DOCKER:
        with pytest.raises(ConfigError, match=f"^{command} is not supported with LAB_ENGINE="):
            refused(site.context, command)


@on("site", LIMITED, indirect=True)
def test_what_a_backend_does_not_have_is_refused_with_what_to_do_instead(site: Site) -> None:
    """Each command that the backend lists as unsupported raises ConfigError, with the listed advice as its hint."""
    (site.context.directory / "lab.lock").write_text('{"schema": 1}')
    settings = site.context.settings()
    missing = backends.unsupported(settings)
    assert missing
    for command, instead in missing.items():
        with pytest.raises(ConfigError) as error:
            refused(site.context, command)
        assert error.value.message == f"{command} is not supported with LAB_ENGINE={settings.text('LAB_ENGINE')}"
        assert error.value.hint == instead
