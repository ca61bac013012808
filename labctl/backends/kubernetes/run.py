"""Submits, follows, judges and records a run as a job of a cluster, which places its pods."""

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
from pathlib import Path
from typing import IO, cast, get_args

import msgspec
from msgspec import Struct
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
from labctl.backends.kubernetes.job import KEPT, STORAGE
from labctl.backends.kubernetes.target import Kind
from labctl.backends.kubernetes.waiting import Waiting
from labctl.backends.stopping import RunStopper, interrupts
from labctl.config.settings import Settings
from labctl.errors import HostError
from labctl.jobs.job import GRACE
from labctl.model import LAUNCHER, Cause, Job
from labctl.records import store
from labctl.records.active import Ended, Run
from labctl.records.crash import CrashWatch, judged
from labctl.records.lines import Line, line_of
from labctl.records.merge import Merge
from labctl.records.verdict import RunOutcome
from labctl.system import files, human

KINDS: dict[Kind, str] = {"mpijob": "MPIJob", "trainjob": "TrainJob"}
OWNED = {"MPIJob": ("ConfigMap", "Secret"), "TrainJob": ("ConfigMap", "Secret", "TrainingRuntime")}
"""Kinds of objects that a job has with its own name."""
SHARED_KINDS = ("Namespace", "PersistentVolumeClaim")
"""Kinds of objects that all jobs of a lab share."""
# Seconds between two polls of a run's pods; that an API server may be unreachable; for a run that is stopped to gather
# its results; for the cluster to report why it ended a run; for a node to report that a pod has ended, after its grace.
LOOK, SILENT_FOR, ENDING, EXPLAINING, REPORTING = 1.0, 600, 600, 10, 60
# Trainer's error for a missing runtime; seconds until it sees a new one.
NO_RUNTIME, SEEING = "trainingRuntime must be created before", 10
# The launcher prints this when its command has ended (pod.sh), after an unfinished last line of the command, if any.
# The agent, if the image has a python3, adds the run's seconds, and the cause if it is not the command's own.
ENDED = re.compile(
    r"(?P<rest>.*)\x01!\x02labctl: the launcher ended with exit code (?P<code>\d+)(?: after (?P<seconds>[\d.]+) s)?"
    rf"(?:; (?:(?P<cause>{'|'.join(get_args(Cause))}): )?(?P<why>.+))?"
)
# pod.sh's warning.
NO_AGENT = "labctl: the image has no python3: a crashed rank or a stall ends the run only when its launcher does"
# The agent's own decisions, which nothing in the cluster explains.
DECIDED: tuple[Cause, ...] = ("timeout", "stalled")
FETCH_LIMIT = 3600
# Exit code of tar if files changed while they were read.
CHANGED = 1
# Number of files that a warning names.
SHOWN = 4


class ClusterRun(Run, frozen=True, kw_only=True):
    """A run, and name and kind of its job in the cluster."""

    name: str
    kind: str
    patience: float
    """Seconds that its pods may take to start, once it is admitted."""
    waits: bool = False
    """It waits for room on its nodes for as long as that takes."""

    def short(self, text: str) -> str:
        """Return a text with names of the run's pods replaced by names of the lab's nodes."""
        name = re.escape(self.name)
        text = re.sub(rf"\b{name}-(?:worker|node-0)-(\d+)(?:\.{name}(?:\.[a-z0-9-]+\.svc)?)?\b", r"worker-\1", text)
        return re.sub(rf"\b{name}-launcher(?:-[a-z0-9-]+)?\b", LAUNCHER, text)


# --- the cluster ---------------------------------------------------------------------------------------------


def definitions(api: Api) -> dict[str, bool]:
    """Return whether the cluster serves each kind of job, and as ``v1`` the old MPIJob."""
    kinds: dict[str, bool] = {name: serves(api, *COLLECTIONS[kind]) for name, kind in KINDS.items()}
    return {**kinds, "v1": serves(api, "/apis/kubeflow.org/v1", "mpijobs")}


def serves(api: Api, group: str, plural: str) -> bool:
    """Return True if the cluster serves a resource, False on 404. Refused for another error."""
    try:
        return plural in {resource["name"] for resource in api.request("GET", group)["resources"]}
    except Refused as error:
        if error.status == 404:
            return False
        raise


def kind_of(api: Api, settings: Settings) -> Kind:
    """Return the first kind of job that LAB_K8S_JOB allows and the cluster serves. HostError if none."""
    setting, defined = settings.text("LAB_K8S_JOB"), definitions(api)
    kinds = [kind for kind in KINDS if setting in ("auto", kind)]
    if served := next((kind for kind in kinds if defined[kind]), None):
        return served
    names = " and no ".join(KINDS[kind] for kind in kinds)
    left = "; it has MPIJob v1, of the training operator, which labctl does not use" if defined["v1"] else ""
    raise HostError(
        f"the cluster {api.server} has no {names}{left}",
        hint="install Kubeflow's mpi-operator (MPIJob v2beta1) or Kubeflow Trainer (TrainJob): docs/kubernetes.md",
    )


# --- submit --------------------------------------------------------------------------------------------------


def submit(api: Api, lab: str, manifests: Sequence[Manifest]) -> None:
    """Apply a job and its objects, owned by it, after a dry run; on any error remove them if the job is new."""
    objects = prepare(api, lab, manifests)
    job = render.job_in(objects)
    kind, name = job["kind"], job["metadata"]["name"]
    for manifest in objects:
        # A TrainJob is refused until the runtime that it names is there.
        if manifest["kind"] != "TrainJob":
            api.apply(manifest, dry_run=True)
    before = api.get(kind, name)
    try:
        for manifest in objects:
            if manifest["kind"] == "TrainJob":
                _rehearse(api, manifest)
            made = api.apply(manifest)
        owner = {key: made[key] for key in ("apiVersion", "kind")}
        owner |= {key: made["metadata"][key] for key in ("name", "uid")}
        for manifest in objects[:-1]:
            # So that they are deleted with the job by any client: they may hold a token.
            api.apply({**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [owner]}})
    except BaseException:
        if not before:
            with suppress(HostError):
                remove(api, kind, name)
        raise


def _rehearse(api: Api, job: Manifest) -> None:
    """Dry-run a TrainJob, again for SEEING seconds until Trainer sees its runtime. Refused if it never does."""
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


def prepare(api: Api, lab: str, objects: Sequence[Manifest]) -> list[Manifest]:
    """Create namespace and claim if they do not exist; return the other objects. Refused if not allowed."""
    shared = [manifest for manifest in objects if manifest["kind"] in SHARED_KINDS]
    for manifest in shared:
        try:
            existing = api.get(manifest["kind"], manifest["metadata"]["name"])
        except Refused as error:
            if error.status == 403 and manifest["kind"] == "Namespace":
                # Users with rights in one namespace only cannot get the namespace itself.
                continue
            raise
        if not existing:
            api.apply(_marked(manifest, lab) if manifest["kind"] == "Namespace" else manifest)
    return [manifest for manifest in objects if manifest["kind"] not in SHARED_KINDS]


def _marked(namespace: Manifest, lab: str) -> Manifest:
    """Return a namespace's manifest with the label of the lab that it is created for."""
    return {**namespace, "metadata": {**namespace["metadata"], "labels": {"labctl.lab": lab}}}


def remove(api: Api, kind: str, name: str) -> None:
    """Delete a job and the objects that it owns; missing ones are ignored."""
    api.delete(kind, name)
    for other in OWNED[kind]:
        api.delete(other, name)


# --- follow --------------------------------------------------------------------------------------------------


# Exit codes of a command that timeout(1) ended.
TIMED_OUT = (124, 137)


class JobStopper(RunStopper):
    """Stops a run for the first cause given: ends its launch command, so that results can still be fetched."""

    def __init__(self, run: ClusterRun, api: Api) -> None:
        """Keep the run to stop, and the API of its cluster."""
        self._run, self._api = run, api
        self.told = 0.0
        """Monotonic time when its command was told to end; 0 before."""
        self.killed = False
        """True if nothing of the run is to be waited for."""
        super().__init__(run.lab, run.job)

    def end(self, grace: float) -> None:
        """Send TERM to the launch command in the launcher's pod, errors ignored; ``grace`` 0: mark as killed."""
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
    """Return the pods of a run, the launcher first."""
    listed = api.list("Pod", f"labctl.run={render.label(run.run_id)}")
    return sorted(listed, key=lambda pod: (node_of(pod) != LAUNCHER, pod["metadata"]["name"]))


class Follower:
    """Follows the pods and lines of a run to its end, through outages of the API server."""

    def __init__(self, api: Api, run: ClusterRun, stop: JobStopper, notice: Callable[[str], object]) -> None:
        """Follow nothing yet; ``notice`` gets why pods wait, and what happens to the connection."""
        self._api, self._run, self._stop, self._notice = api, run, stop, notice
        self._waiting = Waiting(run.kind, run.lab.image, run.patience, time.monotonic(), waits=run.waits)
        self._told: dict[str, str] = {}
        self._seen: dict[str, Manifest] = {}
        self._silent = self._deleted = 0.0
        self._heard: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._reader: threading.Thread | None = None
        self.launcher = ""
        """The name of the launcher's pod, once its program has started."""
        self.first = self.last = 0.0
        """Times of the launcher's start or first line, and of its last line, in seconds since 1970."""
        self.has_agent = False
        """An agent beside the launch command has judged how the run ended."""

    def follow(self, look: Callable[[Line], None]) -> Ended:
        """Pass on lines and why pods wait, until the run ends; return how. HostError if the API is lost.

        A lost pod stops the run. HostError if the API server is unreachable for SILENT_FOR seconds, or refuses.
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
        """If the launch command failed, wait up to EXPLAINING s for a lost pod or deleted job, and note it."""
        deadline = time.monotonic() + EXPLAINING
        while self.launcher and code and not self._stop.cause and time.monotonic() < deadline:
            with suppress(Unreachable):
                job, members = self._ask()
                launcher = next((pod for pod in members if _name(pod) == self.launcher), None)
                # Ranks may have failed since a worker was lost between two polls.
                workers = (pod for pod in members if node_of(pod) != LAUNCHER and not _is_deleted(pod))
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
        """Pass on lines for LOOK s, or all that are left; return the end by the last line, else None."""
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
        """Return the run's end by the launcher's last line; note causes that only the agent knows."""
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
        """Ask for job and pods; return how the run ended, None if it goes on or the API is silent."""
        try:
            job, members = self._ask()
        except Unreachable as error:
            self._wait_for_server(error)
            return None
        self._silent = 0.0
        return self._judge_pods(job, members)

    def _ask(self) -> tuple[Manifest | None, list[Manifest]]:
        """Return the run's job, None if deleted, and its pods. Unreachable; HostError if refused."""
        try:
            job = self._api.get(self._run.kind, self._run.name)
            if job is None and not serves(self._api, *COLLECTIONS[self._run.kind]):
                # While its operator is being reinstalled the job's existence is unknown.
                raise Unreachable(f"the API server {self._api.server} has no {self._run.kind} at present")
            return job, run_pods(self._api, self._run)
        except Refused as error:
            raise self._left_alone(error) from error

    def _left_alone(self, error: HostError) -> HostError:
        """Return the HostError of a run that goes on without labctl, with the command to attach."""
        mend = f"{error.hint}; then " if isinstance(error, Refused) and error.hint else ""
        again = f"labctl attach {self._run.run_id}"
        return HostError(f"{error.message}; run {self._run.run_id} goes on without labctl", hint=mend + again)

    def _judge_pods(self, job: Manifest | None, members: list[Manifest]) -> Ended | None:
        """Return how the run ended by job and pods, None if it goes on; start to read the launcher."""
        if self._stop.killed or (self._stop.told and time.monotonic() > self._stop.told + ENDING):
            return Ended(code=137)
        if job is None:
            self._stop.note("interrupted", f"{self._run.kind} {self._run.name} was deleted")
            return Ended(code=137, lost=True)
        # A deleted launcher may have a successor, which does not count.
        launcher = next(
            (pod for pod in members if node_of(pod) == LAUNCHER and self.launcher in ("", _name(pod))), None
        )
        if launcher and pods.has_started(launcher):
            self._begin_to_read(launcher, members)
            for pod in members:
                # With a queue the launcher starts along with its workers.
                if not pods.has_started(pod) and (why := pods.trouble(pod)):
                    self._tell(node_of(pod), why)
            return self._judge_launcher(job, launcher, members)
        if self.launcher or self._stop.cause:
            return Ended(code=137)
        return self._not_started(job, members)

    def _judge_launcher(self, job: Manifest, launcher: Manifest, members: list[Manifest]) -> Ended | None:
        """Return how a started run ended, None if it goes on; stop it for each lost worker."""
        state, ended = pods.state_of(job).name, pods.has_ended(launcher)
        if ended or state != "active":
            self._note_end(job, launcher)
        # A failed job's launcher may still run; for other ended jobs the operator removes the workers.
        if not ended and (state == "active" or (state == "failed" and not _is_deleted(launcher))):
            for cause, message in self._losses(members):
                self._stop.because(cause, message)
        if ended:
            return self._ended(pods.code_of(launcher))
        return self._out_of_reach(launcher) if _is_deleted(launcher) else None

    def _out_of_reach(self, launcher: Manifest) -> Ended | None:
        """Return the end of a run whose deleted launcher does not report in time; None before."""
        self._deleted = self._deleted or time.monotonic()
        grace = launcher["metadata"].get("deletionGracePeriodSeconds", 0)
        if time.monotonic() < self._deleted + grace + REPORTING:
            return None
        self._stop.note("node-lost", f"{LAUNCHER}: its node does not answer")
        return Ended(code=137, lost=True)

    def _wait_for_server(self, error: Unreachable) -> None:
        """Notice once that the API is silent. HostError after SILENT_FOR s, or at once if killed."""
        if not self._silent:
            self._silent = time.monotonic()
            self._notice(f"{error.message}; the run goes on, and labctl asks again for {human.duration(SILENT_FOR)}")
        if time.monotonic() > self._silent + SILENT_FOR or self._stop.killed:
            raise self._left_alone(error)

    def _begin_to_read(self, launcher: Manifest, members: list[Manifest]) -> None:
        """At the first call, record the pods and start the thread that reads the launcher's log."""
        if self._reader:
            return
        self.launcher = launcher["metadata"]["name"]
        keep_pods(self._run, members)
        self.first = seconds_of(str((pods.own(launcher).get("running") or {}).get("startedAt")))
        self._reader = threading.Thread(target=self._read, args=(launcher,), daemon=True)
        self._reader.start()

    def _read(self, launcher: Manifest) -> None:
        """Put the launcher's log lines into the queue, reconnecting until ``_over``; then put None."""
        place, last = "", False
        while not last:
            last = self._over.is_set()
            try:
                for when, text in self._api.lines(launcher, place, follow=True):
                    place = when
                    self._heard.put((when, text))
            except HostError:
                # Polls of the pods detect a lost launcher.
                pass
            self._over.wait(0 if last else LOOK)
        self._heard.put(None)

    def _note_end(self, job: Manifest, launcher: Manifest | None) -> None:
        """Note as cause that the cluster ended the run: deadline, suspension, or a lost launcher."""
        state = pods.state_of(job)
        if state.reason.startswith("DeadlineExceeded"):
            self._stop.note("timeout", f"the cluster ended it: {state.message or state.reason}")
        elif state.name == "waiting":
            why = f": {state.message}" if state.message else ""
            self._stop.note("interrupted", f"{self._run.kind} {self._run.name} was suspended or preempted{why}")
        elif launcher and pods.code_of(launcher) and (lost := pods.loss(launcher)) and "exit code" not in lost[1]:
            self._stop.note(lost[0], f"{LAUNCHER}: {lost[1]}")

    def _losses(self, members: list[Manifest]) -> list[tuple[Cause, str]]:
        """Return cause and message per worker whose pod is lost, or was there before and is gone."""
        members = [pod for pod in members if node_of(pod) != LAUNCHER]
        now = {pod["metadata"]["uid"]: pod for pod in members}
        gone = [pod for uid, pod in self._seen.items() if uid not in now]
        self._seen |= now
        return [*_lost(members), *(("node-lost", f"{node_of(pod)}: its pod is gone") for pod in gone)]

    def _not_started(self, job: Manifest, members: list[Manifest]) -> Ended | None:
        """Notice why the run waits, return None; if it will not begin, note why and return its end."""
        now = time.monotonic()
        wrong = _over_without_launcher(self._run, job)
        wrong = wrong or self._waiting.look(job, members, self._why_missing(members, now), now)
        if wrong:
            self._stop.note(*wrong)
            return Ended(code=1)
        for who, reason in self._waiting.reasons.items():
            self._tell(who, reason)
        return None

    def _why_missing(self, members: list[Manifest], now: float) -> str:
        """Return the last warning on missing pods, or that none exists; "" if all do, and at first."""
        if len(members) > len(self._run.job.nodes) or self._waiting.lasts(now) < 5 * LOOK:
            return ""
        refusal = ""
        with suppress(HostError):
            refusal = pods.last_refusal(self._api.list("Event", fields="type=Warning"), self._run.name)
        return refusal or ("" if members else "no pod yet: is its operator running?")

    def _tell(self, who: str, reason: str) -> None:
        """Pass a reason to ``notice``, unless it repeats the last one of this node or job."""
        if self._told.get(who) != reason:
            self._told[who] = reason
            self._notice(f"{who}: {reason}")


def _name(pod: Manifest) -> str:
    return str(pod["metadata"]["name"])


def _is_deleted(pod: Manifest) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _lost(candidates: Iterable[Manifest]) -> list[tuple[Cause, str]]:
    """Return cause and message of each lost pod: out of memory first, deleted pods last."""
    lost = [(pod, loss) for pod in candidates if (loss := pods.loss(pod))]
    lost.sort(key=lambda entry: (entry[1][0] != "out-of-memory", _is_deleted(entry[0])))
    return [(cause, f"{node_of(pod)}: {message}") for pod, (cause, message) in lost]


def _over_without_launcher(run: ClusterRun, job: Manifest) -> tuple[Cause, str] | None:
    """Return cause and message of a job that ended without a launcher pod; None if it goes on."""
    state = pods.state_of(job)
    if state.name == "succeeded":
        copy = f"if its pods had a claim, its files are there, in {STORAGE}/runs/{run.run_id}"
        return "no-metric", f"the cluster says that it succeeded, but its launcher and log are gone; {copy}"
    if state.name == "failed":
        cause: Cause = "timeout" if state.reason.startswith("DeadlineExceeded") else "launcher-failed"
        how = ", and its launcher and log are gone" if pods.has_run(job) else " before it began"
        return cause, f"the cluster ended it{how}: {state.message or state.reason}"
    return None


def seconds_of(when: str) -> float:
    """Return the time of a log line in UTC as seconds since 1970; 0 if it is not a time."""
    with suppress(ValueError):
        return datetime.fromisoformat(f"{when.rstrip('Z')[:26]}+00:00").timestamp()
    return 0.0


# --- judge and record ----------------------------------------------------------------------------------------


def supervise(
    api: Api,
    run: ClusterRun,
    keep: Callable[[Sequence[Line]], Sequence[Line]],
    *,
    notice: Callable[[str], object],
    ends: bool,
    gather: Callable[[str], object],
) -> RunOutcome:
    """Follow a run to its end, gather results; return the outcome. HostError if the API server is lost.

    ``ends``: Ctrl-C stops the run. ``keep`` gets lines as they come and returns them redacted. ``gather`` is called
    with the launcher's pod if results can be fetched. HostError if the API server is unreachable for too long, or
    refuses.
    """
    stop = JobStopper(run, api)
    follower = Follower(api, run, stop, notice)
    watch = CrashWatch(run.lab, run.job)
    with interrupts(stop, notice) if ends else nullcontext():
        ended = follower.follow(lambda line: watch.look_at(keep((line,))))
        cause, message = judged(ended if follower.has_agent else judged_alone(ended, run.job, watch), watch)
        if cause:
            stop.note(cause, message)
        stop.close()
        # Another Ctrl-C does not leave the run without its results.
        if follower.launcher and not ended.lost and not stop.killed:
            gather(follower.launcher)
    if stop.cause == "timeout" and watch.is_silent:
        stop.message += "; no rank wrote a line"
    return RunOutcome(
        exit_code=ended.code,
        cause=stop.cause,
        message=run.short(store.redact(stop.message, run.lab.hidden)),
        silent=watch.is_silent,
        gave_up=store.redact(watch.gave_up(), run.lab.hidden),
        seconds=ended.seconds,
    )


def judged_alone(ended: Ended, job: Job, watch: CrashWatch) -> Ended:
    """Return the end of a run without an agent, with cause by crash reports or timeout's exit code."""
    if watch.ends_run:
        return replace(ended, cause="rank-crashed")
    if ended.code in TIMED_OUT and ended.seconds >= job.timeout:
        return replace(ended, cause="timeout", message=f"timed out after {job.timeout:g} s")
    return ended


class PodRecord(Struct, frozen=True, kw_only=True):
    """A pod in the record of its run; ``image_id`` has the digest of its image, if it is from a registry."""

    node: str
    pod: str
    on: str
    """Node of the cluster."""
    image: str
    image_id: str


def keep_pods(run: ClusterRun, members: Iterable[Manifest]) -> None:
    """Write a run's pods into its record, beside those in it; a file that cannot be written is ignored."""
    path = run.directory / store.PODS
    records = {pod.pod: pod for pod in store.decode(path, list[PodRecord]) or []}
    records |= {
        _name(pod): PodRecord(
            node=node_of(pod),
            pod=_name(pod),
            on=pod["spec"].get("nodeName", ""),
            image=pods.own_container(pod).get("image", ""),
            image_id=pods.image_id(pod),
        )
        for pod in members
    }
    with suppress(HostError):
        files.write(path, msgspec.json.format(msgspec.json.encode(list(records.values()))).decode() + "\n")


def pinned_images(record: Path) -> dict[str, str]:
    """Return the name with digest of each image in a run's record; without those that have none."""
    kept = store.decode(record / store.PODS, list[PodRecord]) or []
    # Docker's shim names its scheme: docker-pullable://NAME@sha256:DIGEST.
    return {pod.image: pod.image_id.rpartition("://")[2] for pod in kept if "@sha256:" in pod.image_id}


def fetch(api: Api, run: ClusterRun, launcher: str, warn: Callable[[str], None]) -> bool:
    """Fetch a run's files from the launcher's pod; return False if that fails and the pod still has them.

    Failures are warnings. A lost connection is retried for SILENT_FOR seconds.
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
            warn(f"the run's files were not fetched: {error}; {LAUNCHER} has them for {human.duration(KEPT)}: {copy}")
            return False
    if left:
        names = human.listed(left, SHOWN)
        warn(f"not fetched, as they are not regular files or point outside the run's directory: {names}")
    with suppress(HostError):
        done = ("sh", "-c", "touch ~/.fetched")
        KubernetesEngine(api, run.lab.name).exec(launcher, done, user="")
    return True


def _fetch(api: Api, run: ClusterRun, launcher: str) -> list[str]:
    """Fetch a run's files by tar into its outputs; return the refused entries. HostError, TarError, OSError."""
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
    """Write the output of tar in a pod to ``sink``. ReadError if tar fails, HostError if the connection is lost."""
    with connected(api.execute(pod, argv)) as socket:
        for channel, piece in outputs_of(socket, FETCH_LIMIT, argv):
            if channel == OUT:
                sink.write(piece)
        if (code := exit_code(socket, argv)) not in (0, CHANGED):
            raise tarfile.ReadError(f"tar ended with exit code {code}")


def clear(api: Api, run: ClusterRun, warn: Callable[[str], None]) -> None:
    """Delete a run's job and its workers' pods, without waiting for the end; a failure is only a warning."""
    try:
        remove(api, run.kind, run.name)
        # The cluster would delete them in half a minute; a launcher would be replaced by its job.
        for pod in run_pods(api, run):
            if node_of(pod) != LAUNCHER:
                api.delete("Pod", pod["metadata"]["name"])
    except HostError as error:
        warn(f"{run.kind} {run.name} is not removed: {error.message}; `labctl down` removes it")
