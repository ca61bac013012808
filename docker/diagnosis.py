"""Explain a run that stands still: which rank waits for which, in what collective, and what that does instead.

Standard library only, Python >= 3.8; pure. labnode.py calls it with what stacks.py saw on each node.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

MOST_LINES = 6
# Share of a core from which a rank that others wait for is busy.
BUSY = 0.5
# Share of a core below which a process does nothing.
IDLE = 0.05
# Seconds below which a rank is not said to wait: it may be about to go on.
LEAST_WAIT = 2
# Code that is not the person's own: Python's, the image's packages, and labctl's startup hook.
LIBRARY = re.compile(
    r"site-packages|dist-packages|/lib/python\d|^/usr/|^/opt/|^<|/common/(?:sitecustomize|flight_recorder)\.py$"
)
# A run's copy of the code is in work/ of its directory.
COPY = re.compile(r"^.*/outputs/[^/]+/work/")
# Calls of mpi4py, blocking ones and waits, as they stand in the person's code: of what is named as communicators are.
MPI_CALL = re.compile(
    r"(?:\bMPI|comm\w*|world|req\w*|status)\.((?:All(?:reduce|gather\w*|toall\w*)|B(?:cast|arrier)|Reduce\w*|Gather\w*|Scatter\w*|Scan|Sendrecv\w*|S?Send"
    r"|Recv|Probe|Wait(?:all|any)?))\(",
    re.IGNORECASE,
)
# A message of NCCL's, as the recorder names it: this rank's place in the group, and its partner's.
NCCL_MESSAGE = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")
# Horovod's files but those that call the person's code, as its elastic mode, or are called all the time.
HOROVOD = re.compile(r"/horovod/(?!.*(?:elastic|optimizer)\.py$)")
MESSAGES = ("send", "ssend", "recv", "probe", "wait", "waitall", "waitany")
# Mark of NCCL's groups; workloads/common/flight_recorder.py.
OF_NCCL = " of NCCL"
# Collectives to which every rank of a group gives the same number of values.
EVEN = ("all_reduce", "allreduce", "broadcast", "reduce")


@dataclass(frozen=True)
class Rank:
    """A rank, its main process and what that told; ``code`` if it reported its end."""

    number: int
    node: str
    process: Mapping[str, Any] | None
    unreached: str = ""
    """Reason why its node does not answer."""
    is_unknown: bool = False
    """True if its node answers, but could not be looked at."""
    code: int | None = None

    @property
    def frames(self) -> Sequence[Mapping[str, Any]]:
        """Frames of the main thread, innermost first."""
        return self.process["stacks"][-1] if self.process and self.process["stacks"] else ()

    @property
    def own(self) -> list[Mapping[str, Any]]:
        return [frame for frame in self.frames if not LIBRARY.search(frame["file"])]

    @property
    def place(self) -> str:
        """File and line of the innermost frame of the person's own code; empty if there is none."""
        return "{}:{}".format(short(self.own[0]["file"]), self.own[0]["line"]) if self.own else ""

    @property
    def recorder(self) -> Mapping[str, Any]:
        return (self.process or {}).get("recorder") or {"groups": {}, "collectives": [], "message": None}

    @property
    def is_stopped(self) -> bool:
        return bool(self.process) and self.process["state"][:1] in ("T", "t")  # type: ignore[index]

    @property
    def is_uninterruptible(self) -> bool:
        # A rank that reads from a disk is in this state for moments.
        process = self.process
        return bool(process) and process["state"][:1] == "D" and process["stays"] and process["cores"] < IDLE  # type: ignore[index]


@dataclass(frozen=True)
class Wait:
    """A collective or message in which a rank waits for others, and the place in the person's code."""

    rank: int
    name: str
    members: tuple[int, ...]
    """Ranks that take part."""
    place: str
    number: int = 0
    """Position among the collectives of its group; 0 if it is not known."""
    group: str = ""
    size: str = ""
    """Sizes and types of a collective's values, as ``[4] Float``."""
    seconds: float | None = None

    @property
    def is_message(self) -> bool:
        return self.name.rpartition(" ")[2].lower() in MESSAGES

    @property
    def label(self) -> str:
        number = f" #{self.number}" if self.number else ""
        at = f" ({self.place})" if self.place else ""
        return f"{self.name}{number}{at}"


@dataclass(frozen=True)
class Finding:
    """An explanation: its kind, one sentence, more lines, and the ranks that others wait for."""

    kind: str
    sentence: str
    ranks: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()
    wait: Wait | None = None


def explain(nodes: Mapping[str, Any], places: Mapping[int, str], codes: Mapping[int, int]) -> dict[str, Any]:
    """Explain why a run stands still.

    ``nodes``: name -> processes, or why it is unreached, or the error of looking at it; ``places``: the node of each
    rank that has begun; ``codes``: the exit codes that ranks reported. Kinds: docs/workloads.md.
    """
    ranks = ranks_of(nodes, places, codes)
    waits = {number: wait for number, rank in ranks.items() for wait in wait_of(rank, ranks)}
    findings = (different(ranks, waits), absent(ranks, waits), crossed(waits), outside(ranks))
    finding = next(filter(None, findings), UNKNOWN)
    wait = finding.wait
    return {
        "kind": finding.kind,
        "sentence": finding.sentence,
        "lines": list(finding.lines[:MOST_LINES]),
        "ranks": list(finding.ranks),
        "nodes": sorted({ranks[number].node for number in finding.ranks}),
        "collective": f"{wait.name} #{wait.number}" if wait and wait.number else wait.name if wait else "",
        "place": wait.place if wait else "",
        "seconds": longest(waits.values()),
    }


UNKNOWN = Finding("unknown", "nothing is known of its ranks")


def longest(waits: Iterable[Wait]) -> float | None:
    """Return the seconds that a rank has waited, of the rank that has for longest; None if that is not known."""
    return max((wait.seconds for wait in waits if wait.seconds is not None), default=None)


# --- what is known of ranks ----------------------------------------------------------------------------------


def ranks_of(nodes: Mapping[str, Any], places: Mapping[int, str], codes: Mapping[int, int]) -> dict[int, Rank]:
    """Return the ranks that have begun, by number: by ``places``, else as they joined a group."""
    places = {**dict(joined(nodes)), **places}
    ranks = {}
    for number, node in sorted(places.items()):
        looked = nodes.get(node, {"error": "it was not looked at"})
        main = main_process(number, looked.get("processes", ()))
        unreached, is_unknown = looked.get("unreached", ""), "error" in looked
        ranks[number] = Rank(number, node, main, unreached, is_unknown, codes.get(number))
    return ranks


def joined(nodes: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield rank and node of each process that joined a process group."""
    for node, looked in nodes.items():
        for process in looked.get("processes", ()):
            if process["recorder"] and process["recorder"]["rank"] is not None:
                yield process["recorder"]["rank"], node


def main_process(rank: int, processes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the process of a rank's program: the one that joined a group as this rank, else the first of its tree.

    Of a program in bash it is a later one; None if the rank has ended.
    """
    for process in processes:
        if process["recorder"] and process["recorder"]["rank"] == rank:
            return process
    every = [process for process in processes if process["rank"] == rank]
    own = [process for process in every if not is_wrapper(process)]
    pids = {process["pid"] for process in own}
    return next((process for process in own if process["parent"] not in pids), every[-1] if every else None)


def is_wrapper(process: Mapping[str, Any]) -> bool:
    """Tell if a process is rank.sh, timeout(1) or rank_output.py, which have the rank's number, too."""
    return process["program"] in ("bash", "timeout") or "rank_output.py" in process["command"]


def wait_of(rank: Rank, ranks: Mapping[int, Rank]) -> Iterator[Wait]:
    """Yield what a rank waits in: its first collective that is not finished, else a message or a call of MPI."""
    every = tuple(ranks)
    entries = rank.recorder["collectives"]
    for at, entry in enumerate(entries):
        # Messages of a batch are never marked as finished; github.com/pytorch/pytorch/issues/137969.
        is_over = entry["message"] and any(it["done"] and it["group"] == entry["group"] for it in entries[at + 1 :])
        if not entry["done"] and not is_over and entry["age"] >= LEAST_WAIT:
            yield message_in(rank, entry) or wait_in(rank, entry, every)
            return
    if message := rank.recorder["message"]:
        peers = every if message["peer"] is None else (message["peer"],)
        yield Wait(rank.number, message["name"], (rank.number, *peers), rank.place)
    elif not rank.recorder["collectives"] and (call := library_call(rank)):
        yield Wait(rank.number, call, every, rank.place)


def message_in(rank: Rank, entry: Mapping[str, Any]) -> Wait | None:
    """Return the wait for a message of NCCL, of an unknown partner in a batch; None if the entry is a collective."""
    if not entry["message"]:
        return None
    if not (message := NCCL_MESSAGE.match(entry["name"])):
        every = tuple(rank.recorder["groups"].get(entry["group"], (rank.number,)))
        return Wait(rank.number, entry["name"], every, rank.place, seconds=entry["age"])
    group, place = rank.recorder["groups"].get(entry["group"], ()), int(message[2])
    partner = group[place] if place < len(group) else place
    return Wait(rank.number, message[1], (rank.number, partner), rank.place, seconds=entry["age"])


def wait_in(rank: Rank, entry: Mapping[str, Any], every: tuple[int, ...]) -> Wait:
    """Return the wait of a rank in a recorder's entry; its place is empty if the entry is done."""
    return Wait(
        rank.number,
        entry["name"],
        tuple(rank.recorder["groups"].get(entry["group"], every)),
        "" if entry["done"] else rank.place,
        entry["number"],
        entry["group"],
        size_of(entry),
        entry["age"],
    )


def size_of(entry: Mapping[str, Any]) -> str:
    """Return sizes and types of a collective's values, as ``[4] Float``."""
    shapes = ", ".join(str(size).replace(" ", "") for size in entry["sizes"])
    return " ".join(filter(None, (shapes, " ".join(dict.fromkeys(entry["types"])))))


def amount_of(entry: Mapping[str, Any]) -> str:
    """Return number and types of a collective's values, as ``4 Float``; empty if ranks may give different ones."""
    if entry["name"].lstrip("_") not in EVEN:
        return ""
    return " ".join((str(sum(map(math.prod, entry["sizes"]))), *dict.fromkeys(entry["types"])))


def library_call(rank: Rank) -> str:
    """Return the call of torch's groups, Horovod or MPI in which a rank is; empty if it is in none."""
    called = [frame for frame in rank.frames if frame["file"].endswith("/distributed_c10d.py")]
    if called:
        return str(called[-1]["function"])
    inside = [frame for frame in rank.frames if HOROVOD.search(frame["file"])]
    if inside:
        return str(inside[-1]["function"])
    libraries = rank.process["libraries"] if rank.process else ()
    if "MPI" in libraries and rank.own and (call := MPI_CALL.search(rank.own[0]["text"])):
        return f"MPI {call[1]}"
    return ""


# --- explanations --------------------------------------------------------------------------------------------


def different(ranks: Mapping[int, Rank], waits: Mapping[int, Wait]) -> Finding | None:
    """Explain ranks that take part in the same collective of a group by different operations or sizes."""
    for wait in waits.values():
        if not wait.number:
            continue
        taken = {member: entry for member in wait.members for entry in entries(ranks.get(member), wait)}
        for kind, key in (("different-collective", name_of), ("different-size", amount_of)):
            variants = {member: key(entry) for member, entry in taken.items()}
            if len(set(variants.values())) > 1:
                return difference(kind, ranks, taken, variants)
    return None


def entries(rank: Rank | None, wait: Wait) -> Iterator[Mapping[str, Any]]:
    """Yield the entry of a rank for the collective of a wait."""
    for entry in rank.recorder["collectives"] if rank else ():
        if (entry["group"], entry["number"], entry["message"]) == (wait.group, wait.number, False):
            yield entry
            return


def name_of(entry: Mapping[str, Any]) -> str:
    return str(entry["name"])


def difference(
    kind: str, ranks: Mapping[int, Rank], taken: Mapping[int, Mapping[str, Any]], variants: Mapping[int, str]
) -> Finding:
    """Explain a collective in which ranks differ; those of the smaller part are named, and none if parts are equal."""
    every = tuple(ranks)
    parts = Counter(variants.values()).most_common()
    texts = []
    for variant, _ in parts:
        members = [member for member, own in variants.items() if own == variant]
        wait = wait_in(ranks[members[0]], taken[members[0]], every)
        with_size = f" of {wait.size}" if kind == "different-size" else ""
        name = f"{wait.name} #{wait.number}{with_size}" + (f" ({wait.place})" if wait.place else "")
        texts.append(f"{named(ranks, members, nodes=len(members) < len(variants) / 2)} {be(members)} in {name}")
    is_clear = parts[0][1] > sum(count for _, count in parts[1:])
    accused = tuple(member for member, own in variants.items() if own != parts[0][0]) if is_clear else ()
    first = min(variants)
    return Finding(kind, ", ".join(texts), accused, wait=wait_in(ranks[first], taken[first], every))


def absent(ranks: Mapping[int, Rank], waits: Mapping[int, Wait]) -> Finding | None:
    """Explain ranks that have not joined what others wait in, and wait for nobody themselves."""
    missing = {number: missing_in(wait, ranks, waits) for number, wait in waits.items()}
    roots = sorted({member for members in missing.values() for member in members if member not in waits})
    roots = roots or [number for number, rank in ranks.items() if why_gone(rank) and number not in waits]
    if not roots:
        return None
    waiting = waiting_for(roots, missing, waits)
    elsewhere = ("", "missing-rank")
    reasons = {number: why_gone(ranks[number]) or elsewhere for number in roots}
    # A rank that is gone explains those that only are elsewhere.
    reason, kind = next((each for each in reasons.values() if each != elsewhere), elsewhere)
    alike = [number for number in roots if reasons[number] == (reason, kind)]
    wait = waits[waiting[0]] if waiting else None
    lines = tuple(f"rank {number} {doing(ranks[number])}" for number in roots if reasons[number] == elsewhere)
    if kind != "missing-rank" or not wait:
        others = f"; {named(ranks, waiting)} {waits_verb(waiting)} for it in {wait.label}" if wait else ""
        sentence = f"{named(ranks, alike, nodes=True)} {be_or_have(reason, alike)}{others}"
        return Finding(kind, sentence, tuple(alike), lines, wait)
    few = alike if len(alike) <= len(waiting) else waiting
    return Finding(kind, not_joined(ranks, alike, waiting, waits), tuple(few), lines, wait)


def waiting_for(roots: Sequence[int], missing: Mapping[int, Sequence[int]], waits: Mapping[int, Wait]) -> list[int]:
    """Return the ranks that wait for these in the same call: in the one for which nobody else is missing, if any."""
    calls: dict[tuple[str, int, str], list[int]] = {}
    for number, members in missing.items():
        if set(members) & set(roots):
            wait = waits[number]
            calls.setdefault((wait.group, wait.number, wait.name), []).append(number)
    return min(calls.values(), key=lambda members: len({*missing[members[0]]} - {*roots}), default=[])


def not_joined(
    ranks: Mapping[int, Rank], absent: Sequence[int], waiting: Sequence[int], waits: Mapping[int, Wait]
) -> str:
    """Render that ranks have not joined what others wait in; the sentence is about those that are fewer."""
    wait = waits[waiting[0]]
    seconds = longest(waits[number] for number in waiting)
    since = f" for {seconds:.0f} s" if seconds is not None and seconds >= 1 else ""
    have, waited = "has" if len(absent) == 1 else "have", "waits" if len(waiting) == 1 else "wait"
    if since:
        waited = "has waited" if len(waiting) == 1 else "have waited"
    call = f"{wait.label}{of_group(wait, ranks)}"
    if len(absent) > len(waiting):
        # Without the recorder the ranks of the group are not known, and few may be all of it.
        is_sure = wait.number or (wait.is_message and len(wait.members) == 2)
        unsure = "" if is_sure else "; it is not known whether they must"
        who = named(ranks, waiting, nodes=True)
        return f"{who} {waited}{since} in {call}, which {numbers(absent)} {have} not joined{unsure}"
    busy = [number for number in absent if is_busy(ranks[number])]
    but = f"; rank {busy[0]} is busy" if busy else ""
    who = named(ranks, absent, nodes=True)
    if wait.is_message:
        done = "sent what" if wait.name.endswith("recv") else "received what"
        return f"{who} {have} not {done} {named(ranks, waiting)} {waited} for in {wait.label}{since}{but}"
    return f"{who} {have} not joined {call}, where {named(ranks, waiting)} {waited}{since}{but}"


def missing_in(wait: Wait, ranks: Mapping[int, Rank], waits: Mapping[int, Wait]) -> list[int]:
    """Return the ranks that have not joined what a rank waits in."""
    others = [member for member in wait.members if member != wait.rank and member in ranks]
    others = [member for member in others if not ranks[member].is_unknown]
    if wait.number:
        return [member for member in others if last_number(ranks[member], wait.group) < wait.number]
    return [member for member in others if member not in waits or not is_alike(waits[member], wait)]


def last_number(rank: Rank, group: str) -> float:
    """Return the number of the last collective of a group that a rank has begun."""
    numbers = [entry["number"] for entry in rank.recorder["collectives"] if entry["group"] == group]
    return max(numbers, default=0)


def is_alike(other: Wait, wait: Wait) -> bool:
    """Tell if two ranks are in the same call, or each sends or receives what the other may wait for."""
    if wait.is_message:
        return wait.rank in other.members and {other.name, wait.name} == {"send", "recv"}
    return other.name == wait.name


def crossed(waits: Mapping[int, Wait]) -> Finding | None:
    """Explain ranks that are all in a collective or message: the same one, or ones that others have not joined."""
    if not waits:
        return None
    calls: dict[tuple[str, int, str, str], list[int]] = {}
    for number, wait in waits.items():
        calls.setdefault((wait.name, wait.number, wait.group, "" if wait.number else wait.place), []).append(number)
    first = next(iter(waits.values()))
    if len(calls) == 1 and not first.is_message and set(first.members) <= waits.keys():
        text = f"all of its {len(waits)} ranks are in {first.label}"
        if not first.number:
            return Finding("unknown", f"{text}; whether in the same call and group is not known", wait=first)
        # A kernel of the program that never ends looks the same on a device.
        cause = "the network or a device" if OF_NCCL in first.group else "the network or a device, not the program"
        return Finding("all-inside", f"{text}: {cause}", wait=first)
    parts = [f"{numbers(members)} {be(members)} in {waits[members[0]].label}" for members in calls.values()]
    if len(calls) == 1 and not first.is_message:
        return Finding("unknown", f"{parts[0]}; whether the others have joined is not known", wait=first)
    return Finding("crossed-groups", "ranks wait for each other: " + ", ".join(parts), wait=first)


def outside(ranks: Mapping[int, Rank]) -> Finding | None:
    """Explain ranks of which none waits for another."""
    alive = [rank for rank in ranks.values() if rank.process]
    if not alive:
        return None
    groups: dict[str, list[int]] = {}
    for rank in alive:
        groups.setdefault(rank.place or "no code of its own", []).append(rank.number)
    parts = [f"{numbers(members)} {be(members)} at {place}" for place, members in groups.items()]
    lines = tuple(f"rank {rank.number} {doing(rank)}" for rank in alive)
    return Finding("all-outside", f"no rank waits for another: {', '.join(parts[:3])}", lines=lines)


def why_gone(rank: Rank) -> tuple[str, str] | None:
    """Return why a rank cannot join anything, and the kind of that; None if it could."""
    if rank.unreached:
        return f"is on a node that does not answer: {rank.unreached}", "node-unreached"
    if rank.process is None:
        return None if rank.is_unknown else (f"has ended with code {rank.code or 0}", "rank-ended")
    if rank.is_stopped:
        return "is stopped (SIGSTOP)", "rank-stopped"
    if rank.is_uninterruptible:
        inside = rank.process["waits_in"]
        return "is in uninterruptible sleep (D)" + (f", in {inside} of the kernel" if inside else ""), "uninterruptible"
    return None


def doing(rank: Rank) -> str:
    """Render what a rank does: the innermost frames, its share of a core, and the kernel function that it waits in."""
    if not rank.process:
        return "could not be inspected"
    if not rank.frames:
        place = "runs {command}".format(**rank.process)
    else:
        shown = [rank.frames[0], *(frame for frame in rank.own[:2] if frame is not rank.frames[0])]
        place = "is at " + " <- ".join(map(frame_text, shown))
    inside = rank.process["waits_in"]
    return f"{place}, {100 * rank.process['cores']:.0f} % of a core" + (f", in {inside}" if inside else "")


def frame_text(frame: Mapping[str, Any]) -> str:
    return "{}:{} in {}".format(short(frame["file"]), frame["line"], frame["function"])


def short(path: str) -> str:
    """Return a file's path in the run's copy of the code; of a library only its name."""
    return path.rpartition("/")[2] if LIBRARY.search(path) else COPY.sub("", path)


def is_busy(rank: Rank) -> bool:
    return bool(rank.process) and rank.process["cores"] >= BUSY  # type: ignore[index]


# --- words ---------------------------------------------------------------------------------------------------


def numbers(members: Sequence[int]) -> str:
    """Render ranks, as ``rank 1`` or ``ranks 0, 2, 3``; many by their first and last ones."""
    ordered = sorted(members)
    if len(ordered) > 8:
        return f"{len(ordered)} ranks ({ordered[0]} to {ordered[-1]})"
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(map(str, ordered))


def named(ranks: Mapping[int, Rank], members: Sequence[int], *, nodes: bool = False) -> str:
    """Render ranks, with ``nodes`` as ``rank 1 (worker-1)``."""
    places = list(dict.fromkeys(ranks[member].node for member in sorted(members)))
    return numbers(members) + (f" ({', '.join(places[:4])})" if nodes else "")


def of_group(wait: Wait, ranks: Mapping[int, Rank]) -> str:
    """Render the ranks of a group that has not all."""
    return "" if set(wait.members) >= set(ranks) or len(wait.members) < 2 else f" of {numbers(wait.members)}"


def be(members: Sequence[int]) -> str:
    return "is" if len(members) == 1 else "are"


def waits_verb(members: Sequence[int]) -> str:
    return "waits" if len(members) == 1 else "wait"


def be_or_have(reason: str, members: Sequence[int]) -> str:
    """Return a reason of one rank for several ones."""
    if len(members) == 1:
        return reason
    return re.sub("^is ", "are ", re.sub("^has ", "have ", reason))
