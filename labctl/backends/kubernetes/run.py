"""A run as a job of a cluster: submitted, followed, judged and recorded; its pods are the cluster's to place."""

from __future__ import annotations

import queue
import re
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from typing import IO, cast, get_args

from msgspec.structs import replace

from labctl.backends.kubernetes import pods, render
from labctl.backends.kubernetes.api import (
    COLLECTIONS,
    OUT,
    Api,
    KubernetesEngine,
    Manifest,
    Refused,
    Unreachable,
    connected,
    exit_code,
    node_of,
    outputs_of,
)
from labctl.backends.kubernetes.job import KEPT, STORAGE, ClusterJob
from labctl.backends.kubernetes.target import Kind, Target
from labctl.backends.kubernetes.waiting import Waiting
from labctl.backends.stopping import RunStopper, interrupts
from labctl.config.settings import Settings
from labctl.errors import HostError
from labctl.jobs.job import GRACE
from labctl.model import LAUNCHER, Cause, Job
from labctl.records import store
from labctl.records.active import Ended, Run
from labctl.records.crash import SILENT, CrashWatch, judged
from labctl.records.lines import Line, line_of
from labctl.records.merge import Merge
from labctl.records.verdict import RunOutcome

KINDS: dict[Kind, str] = {"mpijob": "MPIJob", "trainjob": "TrainJob"}
OWNED = {"MPIJob": ("ConfigMap", "Secret"), "TrainJob": ("ConfigMap", "Secret", "TrainingRuntime")}
"""What a job has beside it, of its name."""
SHARED = ("Namespace", "PersistentVolumeClaim")
"""What a lab's jobs have together."""
# Seconds between two looks at a run's pods; that an API server may be silent; for a run that is told to end, to gather
# its results; for the cluster to say why it ended one; for a node to say that a pod has ended, after the time it has.
LOOK, SILENT_FOR, ENDING, EXPLAINING, REPORTING = 1.0, 600, 600, 10, 60
# Trainer's word for a runtime that is not there; seconds for it to see one that is.
NO_RUNTIME, SEEING = "trainingRuntime must be created before", 10
# The last line of a launcher's pod, by pod.sh, behind a last line of the command that has no end. The agent, if the
# image has a python3, adds the run's seconds, and the cause if it is not the command's own.
ENDED = re.compile(
    r"(?P<rest>.*)\x01!\x02labctl: the launcher ended with exit code (?P<code>\d+)(?: after (?P<seconds>[\d.]+) s)?"
    rf"(?:; (?:(?P<cause>{'|'.join(get_args(Cause))}): )?(?P<why>.+))?"
)
# pod.sh's warning.
NO_AGENT = "labctl: the image has no python3: a crashed rank or a stall ends the run only when its launcher does"
# The agent's own decisions, which nothing in the cluster explains.
DECIDED: tuple[Cause, ...] = ("timeout", "stalled")
FETCH_LIMIT = 3600
# Of tar, where files changed while they were read.
CHANGED = 1
# Files that a warning names.
SHOWN = 4


class ClusterRun(Run, frozen=True, kw_only=True):
    """A run, and the job that it is in the cluster."""

    name: str
    kind: str

    def short(self, text: str) -> str:
        """Names of pods as a lab calls its nodes."""
        name = re.escape(self.name)
        text = re.sub(rf"\b{name}-(?:worker|node-0)-(\d+)(?:\.{name}(?:\.[a-z0-9-]+\.svc)?)?\b", r"worker-\1", text)
        return re.sub(rf"\b{name}-launcher(?:-[a-z0-9-]+)?\b", LAUNCHER, text)


# --- the cluster ---------------------------------------------------------------------------------------------


def definitions(api: Api) -> dict[str, bool]:
    """Whether the cluster knows ``mpijob``, ``trainjob``, and ``v1``, the MPIJob of the older training operator."""
    known: dict[str, bool] = {name: serves(api, *COLLECTIONS[kind]) for name, kind in KINDS.items()}
    return {**known, "v1": serves(api, "/apis/kubeflow.org/v1", "mpijobs")}


def serves(api: Api, group: str, plural: str) -> bool:
    """Whether the cluster has such objects now; ``group`` with its version, as in COLLECTIONS."""
    try:
        return plural in {one["name"] for one in api.request("GET", group)["resources"]}
    except Refused as error:
        if error.status == 404:
            return False
        raise


def kind_of(api: Api, settings: Settings) -> Kind:
    """The kind of jobs: the one that the settings name, or what the cluster has. HostError where it has it not."""
    wanted, known = settings.text("LAB_K8S_JOB"), definitions(api)
    kinds = [kind for kind in KINDS if wanted in ("auto", kind)]
    found = next((kind for kind in kinds if known[kind]), None)
    if found:
        return found
    names = " and no ".join(KINDS[kind] for kind in kinds)
    left = "; it has MPIJob v1, of the training operator, which labctl does not use" if known["v1"] else ""
    raise HostError(
        f"the cluster {api.server} knows no {names}{left}",
        hint="install Kubeflow's mpi-operator (MPIJob v2beta1) or Kubeflow Trainer (TrainJob): docs/kubernetes.md",
    )


# --- submit --------------------------------------------------------------------------------------------------


def submit(api: Api, target: Target, built: ClusterJob) -> None:
    """Create a job with all that it needs, or nothing of it. HostError with the server's reason."""
    own = prepare(api, built.lab.name, render.manifests(target, built))
    for one in own:
        # A TrainJob is refused until the runtime that it names is there.
        if one["kind"] != "TrainJob":
            api.apply(one, dry_run=True)
    kind = KINDS[target.kind]
    before = api.get(kind, built.name)
    try:
        for one in own:
            if one["kind"] == "TrainJob":
                _rehearse(api, one)
            made = api.apply(one)
        owner = {key: made[key] for key in ("apiVersion", "kind")} | {
            key: made["metadata"][key] for key in ("name", "uid")
        }
        for one in own[:-1]:
            # So they go with it, whoever deletes it: one of them may be a token.
            api.apply({**one, "metadata": {**one["metadata"], "ownerReferences": [owner]}})
    except BaseException:
        if not before:
            with suppress(HostError):
                remove(api, kind, built.name)
        raise


def _rehearse(api: Api, job: Manifest) -> None:
    """A TrainJob's dry run, again for some seconds until Trainer has seen the runtime that was made just before."""
    deadline = time.monotonic() + SEEING
    while True:
        try:
            api.apply(job, dry_run=True)
        except Refused as error:
            if NO_RUNTIME not in error.message or time.monotonic() > deadline:
                raise
            time.sleep(LOOK)
        else:
            return


def prepare(api: Api, lab: str, objects: list[Manifest]) -> list[Manifest]:
    """Create the namespace and the claim where they are missing, and leave them where not; the objects beside them."""
    shared = [one for one in objects if one["kind"] in SHARED]
    for one in shared:
        try:
            there = api.get(one["kind"], one["metadata"]["name"])
        except Refused as error:
            if error.status == 403 and one["kind"] == "Namespace":
                # Who may work in a namespace alone may not look at it.
                continue
            raise
        if not there:
            api.apply(_marked(one, lab) if one["kind"] == "Namespace" else one)
    return [one for one in objects if one["kind"] not in SHARED]


def _marked(namespace: Manifest, lab: str) -> Manifest:
    """A namespace that is made for a lab, which says so when it goes."""
    return {**namespace, "metadata": {**namespace["metadata"], "labels": {"labctl.lab": lab}}}


def remove(api: Api, kind: str, name: str) -> None:
    """Delete a job and what it has beside it."""
    api.delete(kind, name)
    for other in OWNED[kind]:
        api.delete(other, name)


# --- follow --------------------------------------------------------------------------------------------------


# Exit codes of a command that timeout(1) has ended.
TIMED_OUT = (124, 137)


class JobStopper(RunStopper):
    """Stops a run for the first reason given: its launch command is told to end, as results are still to be fetched."""

    def __init__(self, run: ClusterRun, api: Api) -> None:
        self._run, self._api = run, api
        self.told = 0.0
        """When it was told to end, on the monotonic clock; 0 before."""
        self.killed = False
        """Whether nothing of it is waited for."""
        super().__init__(run.lab, run.job)

    def end(self, grace: float) -> None:
        """Have the launch command end; a second Ctrl-C waits for nothing."""
        if not grace:
            self.killed = True
            return
        self.told = time.monotonic()
        with suppress(HostError):
            for pod in run_pods(self._api, self._run):
                if node_of(pod) == LAUNCHER and pods.has_started(pod):
                    end = ("sh", "-c", 'kill -TERM "$(cat ~/.command)"')
                    KubernetesEngine(self._api, self._run.lab.name).exec(
                        pod["metadata"]["name"], end, user="", limit=GRACE
                    )


def run_pods(api: Api, run: ClusterRun) -> list[Manifest]:
    """The pods of a run, the launcher first."""
    found = api.list("Pod", f"labctl.run={render.label(run.run_id)}")
    return sorted(found, key=lambda pod: (node_of(pod) != LAUNCHER, pod["metadata"]["name"]))


class Follower:
    """What a run's pods do and print, from its beginning to its end, while the API server comes and goes."""

    def __init__(
        self, api: Api, run: ClusterRun, stop: JobStopper, patience: float, notice: Callable[[str], object]
    ) -> None:
        """``patience``: seconds that pods may take to start."""
        self._api, self._run, self._stop, self._notice = api, run, stop, notice
        self._waiting = Waiting(run.kind, run.lab.image, patience, time.monotonic())
        self._told: dict[str, str] = {}
        self._seen: dict[str, Manifest] = {}
        self._silent = self._deleted = 0.0
        self._heard: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._reader: threading.Thread | None = None
        self.launcher = ""
        """The name of the launcher's pod, once its program has started."""
        self.first = self.last = 0.0
        """When the launcher started, or the first line was printed, and the last was, in seconds since 1970."""
        self.has_agent = False
        """An agent beside the launch command has judged how the run ended."""

    def follow(self, look: Callable[[Line], None]) -> Ended:
        """Hand on each line and notice what keeps pods from starting; how the run ended.

        What is found to be wrong stops the run. HostError where the API server is silent for too long, or refuses.
        """
        try:
            while True:
                if ended := self._read_lines(look):
                    self._explain(ended.code)
                    return ended
                if gone := self._look_at_pods():
                    self._over.set()
                    printed = self._read_lines(look, to_the_end=True)
                    ended = printed or replace(self._ended(gone.code), lost=gone.lost)
                    self._explain(ended.code)
                    return ended
        finally:
            self._over.set()

    def _explain(self, code: int) -> None:
        """Note what the cluster did to a launcher whose command it has ended, once that is known."""
        deadline = time.monotonic() + EXPLAINING
        while self.launcher and code and not self._stop.cause and time.monotonic() < deadline:
            with suppress(Unreachable):
                job, found = self._ask()
                launcher = next((pod for pod in found if _name(pod) == self.launcher), None)
                # Ranks may have failed for a worker's loss before anyone has looked.
                workers = (pod for pod in found if node_of(pod) != LAUNCHER and not _is_deleted(pod))
                for cause, message in _lost(workers):
                    self._stop.note(cause, message)
                if launcher and not _is_deleted(launcher):
                    return
                if job is None:
                    self._stop.note("interrupted", f"{self._run.kind} {self._run.name} was deleted")
                elif pods.state_of(job).name != "active":
                    self._note_end(job, launcher)
            time.sleep(LOOK)
        if self.launcher and code:
            self._stop.note("node-lost", f"{LAUNCHER}: its pod was deleted")

    def _ended(self, code: int) -> Ended:
        return Ended(code=code, seconds=max(self.last - self.first, 0.0), at=self.last)

    def _read_lines(self, look: Callable[[Line], None], *, to_the_end: bool = False) -> Ended | None:
        """Hand on the lines of a moment; how the launch command ended, if it has."""
        if to_the_end and not self._reader:
            return None
        deadline = time.monotonic() + (ENDING if to_the_end else LOOK)
        while (left := deadline - time.monotonic()) > 0:
            try:
                heard = self._heard.get(timeout=left)
            except queue.Empty:
                return None
            if heard is None:
                return None
            when, text = heard
            self.last = seconds_of(when) or self.last
            self.first = self.first or self.last
            if text == NO_AGENT:
                self._notice(text)
                continue
            ended = ENDED.fullmatch(text)
            if not ended or ended["rest"]:
                look(line_of(ended["rest"] if ended else text, self.last))
            if ended:
                return self._end_in(ended)
        return None

    def _end_in(self, line: re.Match[str]) -> Ended:
        """Return the end of the run by its launcher's last line; note a cause that the cluster cannot explain."""
        ended, cause, why = self._ended(int(line["code"])), cast("Cause | None", line["cause"]), line["why"] or ""
        self.has_agent = line["seconds"] is not None
        if self.has_agent:
            ended = replace(ended, seconds=float(line["seconds"]))
        if cause in DECIDED:
            self._stop.note(cause, why)
        elif why and not cause:
            self._stop.note("interrupted", why)
        return replace(ended, cause=cause, message=why)

    def _look_at_pods(self) -> Ended | None:
        """What the cluster says of the run: None while it goes on."""
        try:
            job, found = self._ask()
        except Unreachable as error:
            self._wait_for_server(error)
            return None
        self._silent = 0.0
        return self._judge_pods(job, found)

    def _ask(self) -> tuple[Manifest | None, list[Manifest]]:
        """The run's job and its pods. Unreachable; HostError where the server refuses to tell."""
        try:
            job = self._api.get(self._run.kind, self._run.name)
            if job is None and not serves(self._api, *COLLECTIONS[self._run.kind]):
                # As while its operator is installed anew: whether the job is there nobody can tell.
                raise Unreachable(f"the API server {self._api.server} knows no {self._run.kind} now")
            return job, run_pods(self._api, self._run)
        except Refused as error:
            raise self._left_alone(error) from error

    def _left_alone(self, error: HostError) -> HostError:
        """That the run goes on without labctl, and how to come back to it once this is mended."""
        mend = f"{error.hint}; then " if isinstance(error, Refused) and error.hint else ""
        again = f"labctl attach {self._run.run_id}"
        return HostError(f"{error.message}; run {self._run.run_id} is left to itself", hint=mend + again)

    def _judge_pods(self, job: Manifest | None, found: list[Manifest]) -> Ended | None:
        if self._stop.killed or (self._stop.told and time.monotonic() > self._stop.told + ENDING):
            return Ended(code=137)
        if job is None:
            self._stop.note("interrupted", f"{self._run.kind} {self._run.name} was deleted")
            return Ended(code=137, lost=True)
        # One that was deleted may have a successor, which is none of this run's.
        launcher = next((pod for pod in found if node_of(pod) == LAUNCHER and self.launcher in ("", _name(pod))), None)
        if launcher and pods.has_started(launcher):
            self._begin_to_read(launcher)
            for pod in found:
                # A queue has the launcher started with its workers.
                if not pods.has_started(pod) and (why := pods.trouble(pod)):
                    self._tell(node_of(pod), why)
            return self._judge_launcher(job, launcher, found)
        if self.launcher or self._stop.cause:
            return Ended(code=137)
        return self._not_started(job, found)

    def _judge_launcher(self, job: Manifest, launcher: Manifest, found: list[Manifest]) -> Ended | None:
        state, ended = pods.state_of(job).name, pods.has_ended(launcher)
        if ended or state != "active":
            self._note_end(job, launcher)
        # A job may have failed while its launcher runs on; of any other that is over, its operator removes the workers.
        if not ended and (state == "active" or (state == "failed" and not _is_deleted(launcher))):
            for cause, message in self._losses(found):
                self._stop.because(cause, message)
        if ended:
            return self._ended(pods.code_of(launcher))
        return self._out_of_reach(launcher) if _is_deleted(launcher) else None

    def _out_of_reach(self, launcher: Manifest) -> Ended | None:
        """How a run ended whose launcher was told to go, and of which nobody says for too long that it has."""
        self._deleted = self._deleted or time.monotonic()
        grace = launcher["metadata"].get("deletionGracePeriodSeconds", 0)
        if time.monotonic() < self._deleted + grace + REPORTING:
            return None
        self._stop.note("node-lost", f"{LAUNCHER}: its node does not answer")
        return Ended(code=137, lost=True)

    def _wait_for_server(self, error: Unreachable) -> None:
        if not self._silent:
            self._silent = time.monotonic()
            self._notice(f"{error.message}; the run goes on, and labctl asks again for {SILENT_FOR} s")
        if time.monotonic() > self._silent + SILENT_FOR or self._stop.killed:
            raise self._left_alone(error)

    def _begin_to_read(self, launcher: Manifest) -> None:
        if self._reader:
            return
        self.launcher = launcher["metadata"]["name"]
        self.first = seconds_of(str((pods.own(launcher).get("running") or {}).get("startedAt")))
        self._reader = threading.Thread(target=self._read, args=(launcher,), daemon=True)
        self._reader.start()

    def _read(self, launcher: Manifest) -> None:
        """The launcher's lines, over one connection after another, until it has ended."""
        place, last = "", False
        while not last:
            last = self._over.is_set()
            try:
                for when, text in self._api.lines(launcher, place, follow=True):
                    place = when
                    self._heard.put((when, text))
            except HostError:
                # Whether it is lost, the look at the pods says.
                pass
            self._over.wait(0 if last else LOOK)
        self._heard.put(None)

    def _note_end(self, job: Manifest, launcher: Manifest | None) -> None:
        """What the cluster itself did to the run."""
        state = pods.state_of(job)
        if state.reason.startswith("DeadlineExceeded"):
            self._stop.note("timeout", f"the cluster ended it: {state.message or state.reason}")
        elif state.name == "waiting":
            why = f": {state.message}" if state.message else ""
            self._stop.note("interrupted", f"{self._run.kind} {self._run.name} was suspended or preempted{why}")
        elif launcher and pods.code_of(launcher) and (lost := pods.loss(launcher)) and "exit code" not in lost[1]:
            self._stop.note(lost[0], f"{LAUNCHER}: {lost[1]}")

    def _losses(self, found: list[Manifest]) -> list[tuple[Cause, str]]:
        """The workers that the run has lost; how a launcher ends, it prints itself."""
        found = [pod for pod in found if node_of(pod) != LAUNCHER]
        now = {pod["metadata"]["uid"]: pod for pod in found}
        gone = [pod for uid, pod in self._seen.items() if uid not in now]
        self._seen |= now
        return [*_lost(found), *(("node-lost", f"{node_of(pod)}: its pod is gone") for pod in gone)]

    def _not_started(self, job: Manifest, found: list[Manifest]) -> Ended | None:
        """Notice what the run waits for; how it ended that will not begin."""
        now = time.monotonic()
        wrong = _over_without_launcher(self._run, job) or self._waiting.look(job, found, self._against(found, now), now)
        if wrong:
            self._stop.note(*wrong)
            return Ended(code=1)
        for who, what in self._waiting.reasons.items():
            self._tell(who, what)
        return None

    def _against(self, found: list[Manifest], now: float) -> str:
        """What the cluster has against pods that are not there; empty where nothing is known."""
        if len(found) > len(self._run.job.nodes) or self._waiting.lasts(now) < 5 * LOOK:
            return ""
        refusal = ""
        with suppress(HostError):
            refusal = pods.last_refusal(self._api.list("Event", fields="type=Warning"), self._run.name)
        return refusal or ("" if found else "no pod yet: is its operator running?")

    def _tell(self, who: str, what: str) -> None:
        if self._told.get(who) != what:
            self._told[who] = what
            self._notice(f"{who}: {what}")


def _name(pod: Manifest) -> str:
    return str(pod["metadata"]["name"])


def _is_deleted(pod: Manifest) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _lost(found: Iterable[Manifest]) -> list[tuple[Cause, str]]:
    """How pods were lost; first those for which the cluster has deleted the others."""
    lost = [(pod, loss) for pod in found if (loss := pods.loss(pod))]
    lost.sort(key=lambda one: (one[1][0] != "out-of-memory", _is_deleted(one[0])))
    return [(cause, f"{node_of(pod)}: {what}") for pod, (cause, what) in lost]


def _over_without_launcher(run: ClusterRun, job: Manifest) -> tuple[Cause, str] | None:
    """How a job ended of which there is no launcher to follow; None of one that has not."""
    state = pods.state_of(job)
    if state.name == "succeeded":
        copy = f"where pods have a claim, its files are there, in {STORAGE}/runs/{run.run_id}"
        return "no-metric", f"the cluster says that it succeeded, but its launcher and log are gone; {copy}"
    if state.name == "failed":
        cause: Cause = "timeout" if state.reason.startswith("DeadlineExceeded") else "launcher-failed"
        how = ", and its launcher and log are gone" if pods.has_run(job) else " before it began"
        return cause, f"the cluster ended it{how}: {state.message or state.reason}"
    return None


def seconds_of(when: str) -> float:
    """A time as logs have it, in seconds since 1970; 0 for what is none."""
    with suppress(ValueError):
        return datetime.fromisoformat(f"{when.rstrip('Z')[:26]}+00:00").timestamp()
    return 0.0


# --- judge and record ----------------------------------------------------------------------------------------


def supervise(
    api: Api,
    run: ClusterRun,
    keep: Callable[[Sequence[Line]], Sequence[Line]],
    *,
    patience: float,
    notice: Callable[[str], object],
    ends: bool,
    gather: Callable[[str], object],
) -> RunOutcome:
    """Follow a run to its end, and fetch its results.

    ``ends``: it ends with Ctrl-C. ``keep`` gets lines as they come and returns them redacted; ``gather`` the launcher's
    pod if its results can be fetched. HostError if the API server is silent for too long, or refuses.
    """
    stop = JobStopper(run, api)
    follower = Follower(api, run, stop, patience, notice)
    watch = CrashWatch(run.lab, run.job)
    with interrupts(stop) if ends else nullcontext():
        ended = follower.follow(lambda line: watch.look_at(keep((line,))))
        watch.now = ended.at or watch.now
        cause, message = judged(ended if follower.has_agent else judged_alone(ended, run.job, watch), watch)
        if cause:
            stop.note(cause, message)
        stop.close()
        # Another Ctrl-C does not leave the run without its results.
        if follower.launcher and not ended.lost and not stop.killed:
            gather(follower.launcher)
    silence = watch.silence()
    if stop.cause == "timeout" and silence:
        stop.message += f"; {silence}"
    return RunOutcome(
        exit_code=ended.code,
        cause=stop.cause,
        message=run.short(store.redact(stop.message, run.lab.hidden)),
        silent=silence == SILENT,
        seconds=ended.seconds,
    )


def judged_alone(ended: Ended, job: Job, watch: CrashWatch) -> Ended:
    """Add the cause of an end that no agent has judged: timeout(1) alone keeps a limit, that of the launch command."""
    if watch.ends_run:
        return replace(ended, cause="rank-crashed")
    if ended.code in TIMED_OUT and ended.seconds >= job.timeout:
        return replace(ended, cause="timeout", message=f"timed out after {job.timeout:g} s")
    return ended


def fetch(api: Api, run: ClusterRun, launcher: str, warn: Callable[[str], None]) -> bool:
    """Bring here what ranks wrote, which the launcher has gathered, and let it end.

    What fails is a warning; False where a launcher that runs still has the files. A lost connection is made again.
    """
    deadline = time.monotonic() + SILENT_FOR
    while True:
        try:
            left = _fetch(api, run, launcher)
            break
        except Refused as error:
            # It has ended, or is gone.
            warn(f"the run's files were not fetched from {LAUNCHER}: {error}")
            return True
        except (HostError, tarfile.TarError, OSError) as error:
            if isinstance(error, HostError) and time.monotonic() < deadline:
                time.sleep(LOOK)
                continue
            copy = f"kubectl cp {api.namespace}/{launcher}:{run.job.directory} runs/{run.run_id}"
            warn(f"the run's files were not fetched: {error}; {LAUNCHER} has them for {KEPT // 60} minutes: {copy}")
            return False
    if left:
        more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
        warn(f"not fetched, as they are no files or lead out of the run's directory: {', '.join(left[:SHOWN])}{more}")
    with suppress(HostError):
        done = ("sh", "-c", "touch ~/.fetched")
        KubernetesEngine(api, run.lab.name).exec(launcher, done, user="")
    return True


def _fetch(api: Api, run: ClusterRun, launcher: str) -> list[str]:
    """Bring the files here; those that are none, or lead out of the directory. HostError, TarError, OSError."""
    merge = Merge(store.outputs(run.lab.directory, run.run_id), LAUNCHER)
    # The launcher stays while this is locked.
    command = ("sh", "-c", 'exec flock --shared ~/.fetching tar -C "$0" -cf - .', run.job.directory)
    with tempfile.TemporaryFile() as archive:
        _receive(api, launcher, command, archive)
        archive.seek(0)
        if broken := merge.unpack(archive):
            raise tarfile.ReadError(broken)
    return merge.found.refused


def _receive(api: Api, pod: str, argv: tuple[str, ...], sink: IO[bytes]) -> None:
    with connected(api.execute(pod, argv)) as socket:
        for channel, piece in outputs_of(socket, FETCH_LIMIT, argv):
            if channel == OUT:
                sink.write(piece)
        if (code := exit_code(socket, argv)) not in (0, CHANGED):
            raise tarfile.ReadError(f"tar ended with exit code {code}")


def clear(api: Api, run: ClusterRun, warn: Callable[[str], None]) -> None:
    """Delete a run's job and its pods, which end in their own time. What fails is a warning."""
    try:
        remove(api, run.kind, run.name)
        # The cluster would come to them by itself, in half a minute; a launcher's job would make another one.
        for pod in run_pods(api, run):
            if node_of(pod) != LAUNCHER:
                api.delete("Pod", pod["metadata"]["name"])
    except HostError as error:
        warn(f"{run.kind} {run.name} is not removed: {error.message}; `labctl down` removes it")
