"""Events of runs under way: on a made-up backend, and of files that grow."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from support.builders import job
from support.harness import wait_until
from support.made_up_backend import MadeUpBackend

from labctl import flows
from labctl.config.context import Context
from labctl.config.settings import BACKENDS
from labctl.errors import HostError
from labctl.jobs.request import RunOptions
from labctl.records import store
from labctl.records.active import ActiveRun, Run
from labctl.records.metrics import Sample
from labctl.reports import curves
from labctl.reports.samples import Track
from labctl.runs.series import Tally, repetition
from labctl.system import filelock
from labctl.system.process import CompletedProcess
from labctl.ui import events, watcher
from labctl.ui.events import Reader
from labctl.ui.live_charts import LiveCharts, MetricsReader, NewPoints, SampleTable, read_samples
from labctl.ui.watcher import Watcher, Watchers

WORKLOAD = """\
description: made up
launcher: mpirun
script: made_up.py
timeout: 1m
metrics:
  loss: {pattern: 'loss (\\S+)'}
rehearse: {}
"""
PROGRAM = """\
import os, pathlib, sys, time
folder = pathlib.Path({folder!r})
for step in range(1, 10):
    while not (folder / str(step)).exists():
        if (folder / "end").exists():
            sys.exit()
        time.sleep(0.01)
    if os.environ["RANK"] == "0":
        print("step %d/9 loss %d" % (step, 10 - step), flush=True)
"""
LIMIT = 60
Event = tuple[str, Any]


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    """Yield a context of a lab of two made-up nodes that is up, with a workload; nodes are asked often."""
    monkeypatch.setitem(BACKENDS, "made-up", "support.made_up_backend")
    monkeypatch.setattr("labctl.system.load.SCRIPT", "true")
    monkeypatch.setattr(watcher, "PACE", 0.05)
    monkeypatch.setattr(events, "TICK", 0.01)
    lab = tmp_path / "lab"
    flows.init(lab)
    settings = ("LAB_NAME=demo", "LAB_ENGINE=made-up", "LAB_NODES=2", f"HOST_CACHE_PATH={tmp_path}/cache")
    (lab / ".env").write_text("\n".join(settings))
    (lab / "workloads/mine").mkdir()
    (lab / "workloads/mine/workload.yml").write_text(WORKLOAD)
    (lab / "workloads/mine/made_up.py").write_text(PROGRAM.format(folder=str(tmp_path / "steps")))
    made = Context(directory=lab, environ={}, emit=lambda _: None, flags={})
    flows.up(made)
    yield made
    (steps(made) / "end").touch()
    flows.down(made)


def steps(context: Context) -> Path:
    """Return the folder in which a file lets the ranks take a step."""
    folder = context.directory.parent / "steps"
    folder.mkdir(exist_ok=True)
    return folder


def take(context: Context, *numbers: int) -> None:
    """Let the ranks take these steps."""
    for number in numbers:
        (steps(context) / str(number)).touch()


def detached(context: Context) -> str:
    """Start a run that nothing follows; return its id."""
    return flows.launch(context, "mine", RunOptions(detach=True)).run_id


def parsed(text: str) -> list[Event]:
    """Return the names and data of events."""
    found: list[Event] = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


def place(text: str) -> str:
    """Return the last id in a text of events."""
    return text.rpartition("\nid: ")[2].split("\n")[0]


class Page:
    """Events that a page has got so far."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.events = reader, list[Event]()
        self.place = ""

    def has(self, condition: Callable[[], bool]) -> None:
        """Read until a condition holds."""

        def read() -> bool:
            text = self.reader.read()
            self.events += parsed(text)
            self.place = place(text) if text else self.place
            return condition()

        wait_until(read, LIMIT, "what the page should have got")

    @property
    def texts(self) -> list[str]:
        """Return the lines of the log that ranks printed."""
        logs = [data["lines"] for name, data in self.events if name == "log"]
        return [line["text"] for lines in logs for line in lines if "loss" in line["text"]]

    def points(self, chart: str) -> list[list[float]]:
        """Return the points of a chart."""
        lines = [line for name, data in self.events if name == "points" for line in data]
        return [point for line in lines if line["chart"] == chart for point in line["points"]]

    @property
    def problem(self) -> str:
        """Return why no more is known of the run, as the page was told last."""
        return next((data["problem"] for name, data in reversed(self.events) if name == "state"), "")

    @property
    def names(self) -> list[str]:
        """Return the names of the events."""
        return [name for name, _ in self.events]


def test_a_detached_run_is_followed_to_its_end_and_judged(context: Context) -> None:
    """Its lines, curve, samples and steps come as they are printed; at the end its result is written, and they end."""
    run_id = detached(context)
    with Watchers(context).watching(run_id) as watched:
        page = Page(Reader(watched, ""))
        take(context, 1, 2)
        page.has(lambda: len(page.points("loss")) == 2 and bool(page.points("machine+cpu")))
        assert page.points("loss") == [[1, 9], [2, 8]]
        assert page.texts == ["step 1/9 loss 9", "step 2/9 loss 8"]
        charts = {data["name"]: data for name, data in page.events if name == "chart"}
        assert (charts["loss"]["along"], charts["loss"]["section"]) == ("step", "curves")
        assert (charts["machine+cpu"]["along"], charts["machine+cpu"]["section"]) == ("seconds", "machine")
        state = [data for name, data in page.events if name == "state"][-1]
        assert (state["state"], state["step"], state["steps"]) == ("running", 2, 9)
        assert [node["node"] for node in state["nodes"]] == ["worker-0", "worker-1"]
        assert not watched.has_ended
        take(context, *range(3, 10))
        page.has(lambda: "ended" in page.names)
    assert [point[0] for point in page.points("loss")] == list(range(1, 10))
    assert page.names[-1] == "ended"
    result = store.read_result(context.directory, run_id)
    assert result is not None
    assert result.verdict == "PASS"


def test_what_has_come_is_not_sent_again(context: Context) -> None:
    """A page that comes back with its place gets what was printed meanwhile, and nothing twice."""
    watchers, run_id = Watchers(context), detached(context)
    with watchers.watching(run_id) as watched:
        page = Page(Reader(watched, ""))
        take(context, 1, 2)
        page.has(lambda: len(page.points("loss")) == 2)
    take(context, 3)
    with watchers.watching(run_id) as watched:
        again = Page(Reader(watched, page.place))
        again.has(lambda: len(again.points("loss")) > 0 and bool(again.texts))
        assert (again.points("loss"), again.texts) == ([[3, 7]], ["step 3/9 loss 7"])


def test_a_run_that_a_process_records_is_read_from_its_record(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing follows it a second time, and what follows it judges it."""

    def never(*_: Any) -> None:
        """Fail."""
        raise AssertionError

    monkeypatch.setattr(Watcher, "_follow", never)
    run_id = detached(context)
    following = threading.Thread(target=lambda: flows.attach(context, run_id))
    following.start()
    take(context, 1)
    lock = store.lock(context.directory, run_id)
    wait_until(lambda: filelock.is_held(lock), LIMIT, "the run is recorded")
    with Watchers(context).watching(run_id) as watched:
        page = Page(Reader(watched, ""))
        page.has(lambda: page.points("loss") == [[1, 9]])
        assert watched.folder == context.directory / "runs" / run_id
        take(context, *range(2, 10))
        page.has(lambda: "ended" in page.names)
    following.join(LIMIT)
    assert page.texts[-1] == "step 9/9 loss 1"


def test_pages_of_a_run_share_one_follower_that_ends_with_the_last(context: Context) -> None:
    """Then no thread and no file is left."""
    watchers, run_id, before = Watchers(context), detached(context), {*threading.enumerate()}
    with ExitStack() as pages:
        first, second = (pages.enter_context(watchers.watching(run_id)) for _ in range(2))
        assert first is second
        page = Page(Reader(first, ""))
        take(context, 1)
        page.has(lambda: bool(page.texts))
        own = first.folder
        assert watchers.folder(run_id) == own != context.directory / "runs" / run_id
    wait_until(lambda: not (own.exists() or working(before)), LIMIT, "all has ended")
    assert watchers.folder(run_id) == context.directory / "runs" / run_id


def working(before: Collection[threading.Thread]) -> list[str]:
    """Return the names of the threads in which a watch works that has begun since."""
    return [thread.name for thread in threading.enumerate() if thread not in before and "fulfil" in thread.name]


def test_a_node_that_does_not_answer_is_named_until_it_does(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state says which node of another machine has no samples and why, while the others have theirs."""
    run_id, asked = detached(context), MadeUpBackend.exec
    monkeypatch.setattr(store, "samples", lambda *_: context.directory / "not-here")

    def silent(self: MadeUpBackend, run: Run, node: str, argv: tuple[str, ...], *, limit: float) -> CompletedProcess:
        """Answer for all nodes but worker-1."""
        if node == "worker-1":
            raise HostError("h2: timed out after 20 s")
        return asked(self, run, node, argv, limit=limit)

    monkeypatch.setattr(MadeUpBackend, "exec", silent)
    with Watchers(context).watching(run_id) as watched:
        told = "no samples from worker-1: h2: timed out after 20 s"
        wait_until(lambda: watched.state().problem == told, LIMIT, "it is told")
        wait_until(lambda: watched.state().nodes[0].values, LIMIT, "worker-0 has samples")
        monkeypatch.setattr(MadeUpBackend, "exec", asked)
        wait_until(lambda: not watched.state().problem, LIMIT, "it answers again")


def test_a_page_tells_what_silent_ranks_wait_for_until_one_prints(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence is that of the last line on silence; lines of labctl leave it, a line of a rank ends it."""
    run_id = detached(context)
    monkeypatch.setattr(Watcher, "_look", lambda *_: None)
    with Watchers(context).watching(run_id) as watched:

        def after(*lines: str) -> str:
            """Return the hang that the page tells after further lines."""
            with (watched.folder / "output.log").open("a") as log:
                log.writelines(f"{line}\n" for line in lines)
            return watched.state().hang

        assert after("worker-0: step 1/9 loss 9") == ""
        waits = "rank 1 (worker-1) has not joined all_reduce #6 (train.py:13), where rank 0 has waited for 12 s"
        assert after(f"labctl: silent for 12 s: {waits}", "labctl:   rank 1 is at train.py:12") == waits
        assert after("labctl: silent for 2 min 4 s: no rank waits") == "no rank waits"
        assert after("worker-1: step 2/9 loss 8") == ""


def test_a_run_that_has_printed_waits_no_more(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes were asked last while it waited for them."""
    run_id = detached(context)
    waiting = ActiveRun(id=run_id, nodes=(), state="running", waits=True)
    monkeypatch.setattr(MadeUpBackend, "active", lambda _: {run_id: waiting})
    monkeypatch.setattr(MadeUpBackend, "output", lambda *_: None)
    with Watchers(context).watching(run_id) as watched:
        wait_until(lambda: watched.state().state == "waiting", LIMIT, "it waits")
        (watched.folder / "output.log").write_text("step 1/9\n")
        assert watched.state().state == "running"


def test_a_flood_of_lines_reaches_a_page_in_part(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last lines come, with how many others there are."""
    run_id = detached(context)
    monkeypatch.setattr(Watcher, "_look", lambda *_: None)
    record = context.directory / "runs" / run_id
    with Watchers(context).watching(run_id) as watched:
        (record / "output.log").write_text("first\n")
        reader = Reader(watched, "")
        assert "first" in reader.read()
        with (record / "output.log").open("a") as log:
            log.write("flood\n" * 100_000)
        (flood,) = [data for name, data in parsed(reader.read()) if name == "log"]
        assert (len(flood["lines"]), flood["skipped"]) == (events.MOST_LINES, 100_000 - events.MOST_LINES)
        assert flood["lines"][-1]["number"] == 100_001


def test_the_stream_says_when_to_try_again_beats_and_ends(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT", 0.02)
    run_id = detached(context)
    heard: list[str] = []

    async def listen() -> None:
        """Read the stream to its end; let the run end once there was a heartbeat."""
        with anyio.fail_after(LIMIT):
            async for text in events.stream(Watchers(context), run_id, ""):
                heard.append(text)
                if text == events.BEAT:
                    take(context, *range(1, 10))

    anyio.run(listen)
    assert heard[0] == "retry: 2000\n\n"
    assert events.BEAT in heard
    assert parsed(heard[-1])[-1] == ("ended", {})
    assert all(text.endswith("\n\n") for text in heard)


def test_a_place_that_is_none_begins_anew(context: Context) -> None:
    (steps(context) / "end").touch()
    with Watchers(context).watching(detached(context)) as watched:
        for text in ("", "x", "1-2-x", "-1", "9" * 99, "1-2\n"):
            reader = Reader(watched, text)
            assert (reader._log, reader._metrics, reader._samples) == (None, 0, [0, 0])


@pytest.mark.parametrize("failure", [HostError("no answer"), OSError("no answer")])
def test_a_watch_goes_on_after_a_failure(context: Context, failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an engine that is started again, or a full disk. Until then the page tells it."""
    run_id, look, failures = detached(context), Watcher._look, [failure]

    def failing_look(*given: Any) -> None:
        """Raise the failure, as long as there is one."""
        if failures:
            raise failures[0]
        look(*given)

    monkeypatch.setattr(Watcher, "_look", failing_look)
    with Watchers(context).watching(run_id) as watched:
        page = Page(Reader(watched, ""))
        page.has(lambda: page.problem == "no answer")
        failures.clear()
        take(context, 1)
        page.has(lambda: page.points("loss") == [[1, 9]] and not page.problem)


def test_a_bug_that_ends_a_watch_is_raised_where_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page connects again, to a new watch."""

    def fail(*_: Any) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(store, "load_job", lambda *_: job())
    monkeypatch.setattr(Watcher, "_look_on", fail)
    made = Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={})
    with Watchers(made).watching("20260102-030405-opt-tiny-0000aa") as watched:
        wait_until(watched._looker.done, LIMIT, "the end of the watch")
        with pytest.raises(KeyError, match="bug"):
            watched.state()


def test_files_of_a_watch_go_once_nothing_writes_to_them(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last page may close while the run's output is still written."""
    is_following, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(watcher, "LEAVING", 0.01)

    def slow_output(*_: Any) -> None:
        """Write nothing until the test lets it end."""
        is_following.set()
        assert goes_on.wait(LIMIT)

    monkeypatch.setattr(watcher, "LEAVING", 0)
    monkeypatch.setattr(MadeUpBackend, "output", slow_output)
    with Watchers(context).watching(detached(context)) as watched:
        assert is_following.wait(LIMIT)
        wait_until(lambda: watched.folder != watched._record, LIMIT, "the folder of the follower")
    wait_until(watched._looker.done, LIMIT, "the end of the looks")
    assert list(watched.folder.iterdir())
    goes_on.set()
    wait_until(lambda: not watched.folder.exists(), LIMIT, "the folder's end")


def test_a_sample_that_was_not_written_whole_is_left_out(tmp_path: Path) -> None:
    """As on a full disk, whose room came back."""
    line = b'{"metric":"loss","step":%d,"seconds":%d,"value":1.5}\n'
    (tmp_path / store.METRICS).write_bytes(line % (1, 1) + line[:20] + line % (2, 2) + line % (3, 3))
    batch = NewPoints()
    assert MetricsReader(LiveCharts(), job()).read(tmp_path, 0, batch) == (tmp_path / store.METRICS).stat().st_size
    assert list(batch.points()[0].points) == [(1, 1.5), (3, 1.5)]


def test_steps_that_begin_again_are_timed_again(tmp_path: Path) -> None:
    line = '{"metric":"loss","step":%d,"seconds":%d,"value":1.5}\n'
    steps = ((1, 1), (2, 2), (1, 9), (2, 12))
    batches = [NewPoints(), NewPoints()]
    (tmp_path / store.METRICS).write_text("".join(line % step for step in steps[:2]))
    metrics = MetricsReader(LiveCharts(), job())
    end = metrics.read(tmp_path, 0, batches[0])
    with (tmp_path / store.METRICS).open("a") as file:
        file.writelines(line % step for step in steps[2:])
    metrics.read(tmp_path, end, batches[1])
    times = [[new.points for new in batch.points() if new.chart == "step+time"] for batch in batches]
    assert times == [[[(2, 1)]], [[(2, 3)]]]


def test_epochs_whose_steps_begin_again_are_drawn_as_on_the_page_of_the_ended_run(tmp_path: Path) -> None:
    """All values with their times, of which the page draws medians and ranges over steps, and each over time."""
    epochs = [(step, 10 * epoch + step) for epoch in (1, 2, 5) for step in (1, 2, 3)]
    samples = [Sample(metric="loss", step=step, seconds=value, value=value) for step, value in epochs]
    (tmp_path / store.METRICS).write_bytes(b"\n".join(map(msgspec.json.encode, samples)) + b"\n")
    new = NewPoints()
    MetricsReader(LiveCharts(), job()).read(tmp_path, 0, new)
    (ended,) = curves.of_series("loss", [curves._printed(("", ""), samples, "step")], [("", "")], "step", "")
    (line,), (live, _) = curves.thinned(ended).lines, new.points()
    drawn = {(x, y, time) for (x, y), time in zip(line.points, line.times, strict=True)}
    assert drawn == {(x, y, time) for (x, y), time in zip(live.points, live.times, strict=True)}
    assert (live.line, live.band, drawn) == ("", (), {(step, value, value) for step, value in epochs})
    assert live.remark == ended.remark == "median and range of 3 epochs at each step"
    assert live.last == line.last == "53"


def test_a_chart_that_grows_says_that_the_last_value_is_nan(tmp_path: Path) -> None:
    """Get nan at the last two of four steps, in two reads: the second knows of both, and of all steps."""
    samples = [Sample(metric="loss", step=step, seconds=step, value=4.0 - step) for step in (1, 2)]
    samples += [Sample(metric="loss", step=step, seconds=step, value=None, note="nan") for step in (3, 4)]
    lines = [msgspec.json.encode(sample) + b"\n" for sample in samples]
    (tmp_path / store.METRICS).write_bytes(b"".join(lines[:3]))
    reader, new = MetricsReader(LiveCharts(), job()), NewPoints()
    end = reader.read(tmp_path, 0, NewPoints())
    (tmp_path / store.METRICS).write_bytes(b"".join(lines))
    reader.read(tmp_path, end, new)
    (live, step_time) = new.points()
    (ended,) = curves.of_series("loss", [curves._printed(("", ""), samples, "step")], [("", "")], "step", "")
    assert (live.last, live.remark) == (ended.lines[0].last, "no value for 2 of 4") == ("nan", "no value for 2 of 4")
    assert ended.caption == "2 to 3; no value for 2 of 4"
    assert (step_time.last, step_time.remark) == ("1", "")


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([1, 2, 3], ""),
        ([10, 20, 10, 20, 10], "median and range of 3 epochs at each step"),
        ([1, 1, 2, 2], "median and range of the values at each step"),
        # A run that went on from a checkpoint.
        ([1, 2, 3, 2, 3, 4], "median and range of the values at each step"),
        ([1, None, 2], ""),
    ],
)
def test_the_curve_of_steps_that_come_again_is_explained(steps: list[int | None], text: str) -> None:
    tally = Tally()
    for step in steps:
        tally.add(step, 1.0)
    assert repetition([tally]) == text


def test_curves_of_different_epochs_are_explained_by_the_fewest_and_the_most() -> None:
    tallies = [Tally(), Tally(), Tally()]
    for tally, epochs in zip(tallies, (1, 2, 3), strict=True):
        for step in (1, 2) * epochs:
            tally.add(step, 1.0)
    assert repetition(tallies) == "median and range of 2 to 3 epochs at each step"


def test_steps_of_an_epoch_without_a_value_keep_the_times_of_the_others() -> None:
    """Get no value in the first and the last epoch: the value between has its own time, and is the only one."""
    new, chart = NewPoints(), curves.Chart(name="loss", title="loss", caption="", along="step", unit="", lines=())
    for y, seconds in ((None, 1), (7, 2), (None, 3)):
        new.add(chart, "", 1, y, seconds)
    new.add(chart, "", 2, None, 4)
    (live,) = new.points()
    assert (live.points, live.times) == ([(1, 7), (2, None)], [2, 4])


def test_many_values_of_epochs_are_medians_in_a_band_without_times() -> None:
    """A part of the line has values of all epochs, at no time in common."""
    points = [(float(step), 10.0 * epoch) for epoch in (1, 2, 5) for step in range(400)]
    chart = curves.Chart(name="loss", title="loss", caption="", along="step", unit="", lines=(
        curves.Line(name="", points=points, times=range(len(points))),))  # fmt: skip
    (line,) = curves.thinned(chart).lines
    assert ({y for _, y in line.points}, set(line.band), line.times) == ({20}, {(10, 50)}, ())


def printed(*samples: tuple[int, float, int]) -> str:
    """Return the samples of a loss, each with step, value and rank, as lines of metrics.jsonl."""
    lines = ({"metric": "loss", "step": step, "seconds": step / 2, "value": value, "rank": rank}
             for step, value, rank in samples)  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_of_ranks_that_print_the_same_metric_one_is_drawn(tmp_path: Path) -> None:
    """A stray value of rank 1 comes first: once rank 0 prints more, its points replace it, with their times.

    The first points replace those that the page was loaded with.
    """
    file, reader = tmp_path / store.METRICS, MetricsReader(LiveCharts(), job())
    file.write_text(printed((1, 99, 1)))
    first, second, third = NewPoints(), NewPoints(), NewPoints()
    end = reader.read(tmp_path, 0, first)
    file.write_text(printed((1, 99, 1), (1, 7, 0), (2, 6, 0)))
    end = reader.read(tmp_path, end, second)
    file.write_text(printed((1, 99, 1), (1, 7, 0), (2, 6, 0), (3, 98, 1), (3, 5, 0)))
    reader.read(tmp_path, end, third)
    ((stray,), (loss, step_time), (more, _)) = (new.points() for new in (first, second, third))
    assert (list(stray.points), stray.replaces, stray.remark) == ([(1, 99)], True, "")
    assert (list(loss.points), loss.times, loss.replaces, loss.remark) == ([(1, 7), (2, 6)], [0.5, 1], True, "rank 0")
    assert (list(step_time.points), step_time.times) == ([(2, 0.5)], [1])
    assert (list(more.points), more.replaces) == ([(3, 5)], False)


def test_a_page_that_comes_back_knows_the_ranks_of_what_it_had(tmp_path: Path) -> None:
    text = printed((1, 7, 0), (2, 6, 0), (3, 5, 0), (4, 4, 0))
    (tmp_path / store.METRICS).write_text(text + printed((5, 99, 1)))
    new = NewPoints()
    MetricsReader(LiveCharts(), job()).read(tmp_path, len(text), new)
    assert new.points() == []


def test_nodes_of_a_large_run_are_drawn_as_their_mean_in_a_band(tmp_path: Path) -> None:
    """Samples of a second that come later, of other nodes, still count. Devices of a node are drawn likewise."""
    tables = [SampleTable(f"worker-{number}", tmp_path / f"{number}.csv") for number in range(8)]
    charts, offsets, first = LiveCharts(), [0] * 8, NewPoints()
    head = "seconds (s),memory (GB)\n"
    for number, table in enumerate(tables[:4]):
        table.add(f"{head}0.9,{number + 1}\n2.1,{number + 1}\n.")
    read_samples(charts, tables, offsets, first)
    for table in tables[4:]:
        table.add(f"{head}2.0,9.5\n3.0,9.5\n.")
    second = NewPoints(NewPoints(first))
    read_samples(charts, tables, offsets, second)
    (early,), (late,) = first.points(), second.points()
    assert (early.line, early.points, early.band) == ("all", [(1, 2.5), (2, 2.5)], [(1, 4), (1, 4)])
    assert (late.points, late.band) == ([(2, 6), (3, 9.5)], [(1, 9.5), (9.5, 9.5)])
    assert late.remark == "mean of 8 nodes"


def test_a_chart_has_the_name_that_it_has_on_the_page_of_the_ended_run(tmp_path: Path) -> None:
    """Of a metric and a quantity with the same title, whichever came first."""
    (tmp_path / store.METRICS).write_text(printed((1, 3, 0), (2, 2, 0)).replace("loss", "memory"))
    table, live, new = SampleTable("worker-0", tmp_path / "0.csv"), LiveCharts(), NewPoints()
    table.add("seconds (s),memory (GB)\n0,1\n1,2\n.")
    read_samples(live, [table], [0], new)
    MetricsReader(live, job()).read(tmp_path, 0, new)
    track = Track(what="memory", unit="GB", node="worker-0", points=((0, 1), (1, 2)))
    ended = curves.of_machine({("", ""): [track]}) + curves.of_series(
        "memory", [curves.Series(name=("", ""), points=[(1, 3), (2, 2)])], [("", "")], "step", ""
    )
    assert [chart.name for chart in ended] == list(live.by_name)[:2]
    assert [live.section(chart) for chart in live.by_name.values()] == ["machine", "curves", "curves"]
