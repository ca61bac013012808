"""Examination of made-up nodes: comparison with neighbours, earlier readings, lock file and the site's rules."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace

from labctl.health import examine, rules
from labctl.health.examine import Past
from labctl.health.model import (
    Answer,
    Check,
    Condition,
    KernelLine,
    Level,
    LineCheck,
    OwnCheck,
    Reading,
    Rules,
    Snapshot,
    Subject,
)


def judge_xid(match: re.Match[str]) -> Answer | None:
    """Judge Xid 79 as bad, 31 as a remark, others as nothing."""
    level: Level | None = {"79": "bad", "31": "remark"}.get(match[1])  # type: ignore[assignment]
    return Answer(level, f"Xid {match[1]}") if level else None


XID = LineCheck(name="xid", pattern="Xid ([0-9]+)", judge=judge_xid, steps=("{sudo}reboot",))
CARDS = Subject(
    name="Cards",
    checks=(
        Check(
            name="width",
            reading="PCIe width",
            judge=rules.less_than_neighbours,
            steps=("end the run that uses {item}", "{sudo}reset --id={id} --form='{json}'"),
        ),
        Check(name="heat", reading="temperature", judge=rules.above, limit=90),
        Check(name="errors", reading="errors", judge=rules.grew),
    ),
    lines=(XID,),
)


def card(number: int, width: int | None = 16, **fields: Any) -> Reading:
    """Build the PCIe width of a card; further fields replace those of the reading."""
    base = Reading(name="PCIe width", value=width, item=f"GPU {number}", kin="H100", source="lspci", kind="fact")
    return replace(base, **fields)


def node(*readings: Reading, **fields: Any) -> Snapshot:
    """Build a snapshot of a node that started 1000 s ago."""
    return Snapshot(**{"time": 5000.0, "boot": "b1", "uptime": 1000.0, "readings": readings, **fields})


def examined(now: Snapshot, before: Snapshot | None = None, **given: Any) -> list[Condition]:
    """Return the conditions of a node that are not ok, compared with earlier readings from which lines count."""
    past = given.pop("past", Past(snapshot=before, since=examine.since_of(now, before)))
    conditions = examine.examine(now, (CARDS,), given.pop("rules", Rules()), past, given.pop("others", {}))
    return [condition for condition in conditions if condition.level != "ok"]


def sentences(*args: Any, **given: Any) -> list[tuple[str, str]]:
    """Return level and sentence of each condition that is not ok."""
    return [(condition.level, condition.sentence()) for condition in examined(*args, **given)]


# --- neighbours ----------------------------------------------------------------------------------------------


def test_cards_of_a_node_are_compared_with_each_other() -> None:
    """Examine four cards, one narrower: it alone is bad, by the others of the node."""
    now = node(card(0), card(1), card(2, 8), card(3))
    assert sentences(now) == [("bad", "GPU 2: PCIe width 8, 16 on 3 others")]


def test_a_single_card_is_compared_with_that_of_another_node() -> None:
    """Examine two nodes of one card each: a remark that names the other node and its card."""
    assert sentences(node(card(0, 8)), others={"worker-1": node(card(0))}) == [
        ("remark", "GPU 0: PCIe width 8, 16 on worker-1 GPU 0")
    ]
    assert sentences(node(card(0)), others={"worker-1": node(card(0, 8))}) == []


def test_only_the_same_hardware_is_compared() -> None:
    """Examine cards beside another model, and beside a node of another processor: no answer."""
    epyc, xeon = (Reading(name="processor", value=name, source="", kind="fact") for name in ("EPYC", "Xeon"))
    assert sentences(node(card(0, 8), card(1, kin="A2"), card(2, kin="A2"))) == []
    others = {f"worker-{number}": node(card(0), xeon) for number in (1, 2)}
    assert sentences(node(card(0, 8), epyc), others=others) == []
    assert sentences(node(card(0, 8), xeon), others=others) == [("bad", "GPU 0: PCIe width 8, 16 on 2 others")]


def test_without_kin_an_item_is_compared_with_that_of_the_same_name() -> None:
    """Examine eth0 and eth1: each is compared with its own name on other nodes only, unknown values are left out."""
    eth0, eth1 = card(0, 8, item="eth0", kin=""), card(0, 16, item="eth1", kin="")
    good = replace(eth0, value=16)
    assert sentences(node(eth0, eth1), others={"worker-1": node(eth1)}) == []
    others = {"worker-1": node(good), "worker-2": node(good), "worker-3": node(replace(eth0, value=None))}
    assert sentences(node(eth0, eth1), others=others) == [("bad", "eth0: PCIe width 8, 16 on 2 others")]


# --- levels and steps ----------------------------------------------------------------------------------------


def test_a_reading_without_a_value_is_unknown_and_tells_why() -> None:
    """Examine a value that cannot be read: unknown, with the reason, without steps."""
    (condition,) = examined(node(card(0, None, why="only root reads it")))
    assert (condition.level, condition.text, condition.value, condition.steps) == (
        "unknown", "only root reads it", "", ()
    )  # fmt: skip


@pytest.mark.parametrize(("root", "sudo"), [(False, "sudo "), (True, "")])
def test_steps_name_the_item_and_become_root_if_needed(root: bool, sudo: str) -> None:
    """Examine a bad card: its steps have item, id and sudo filled in, other braces stay; so have those of lines."""
    now = node(card(0), card(1), card(2, 8), lines=(KernelLine(5, "Xid 79"),), root=root)
    width, line = examined(now)
    assert width.steps == ("end the run that uses GPU 2", f"{sudo}reset --id=2 --form='{{json}}'")
    assert line.steps == (f"{sudo}reboot",)


def test_unknown_is_never_ok() -> None:
    """Take the worst level: unknown if no check could look, else the worst of those that could."""

    def worst(*levels: Level) -> Level:
        return examine.worst(Condition(check="x", subject="X", level=level) for level in levels)

    assert worst() == worst("unknown") == worst("unknown", "unknown") == "unknown"
    assert worst("ok", "unknown") == "ok"
    assert worst("remark", "ok", "unknown") == "remark"
    assert worst("bad", "remark") == worst("unknown", "bad") == "bad"


def test_a_node_of_whose_devices_nothing_is_known_is_unknown_unless_it_is_bad() -> None:
    """Take the worst level where the devices' tool is silent: other checks that are ok or a remark do not count."""

    def worst(*levels: Level) -> Level:
        return examine.worst((Condition(check="x", subject="X", level=level) for level in levels), is_blind=True)

    assert worst("ok", "unknown") == worst("remark", "ok", "unknown") == worst("ok") == "unknown"
    assert worst("bad", "remark", "unknown") == "bad"


def test_a_subject_is_blind_if_its_tool_is_silent_and_it_knows_of_no_item() -> None:
    """Look at cards of which something is known, and at a tool that is silent, alone or beside a card's files."""
    silent = Reading(name="errors", value=None, source="smi", why="no answer")
    assert examine.is_blind(CARDS, node(silent))
    assert examine.is_blind(CARDS, node(replace(silent, name="Cards"), card(0, None)))
    for seen in (node(), node(card(0)), node(silent, card(0)), node(replace(silent, slow=True))):
        assert not examine.is_blind(CARDS, seen)


def test_a_check_that_fails_is_unknown() -> None:
    """Examine values that a judge does not expect, and a line: both are unknown and tell why, and others are judged."""
    checks = (
        Check(name="inverse", reading="errors", judge=lambda *_: Answer("bad", f"{1 / 0}")),
        Check(name="errors", reading="errors", judge=rules.above, limit=-1),
    )
    line = LineCheck(name="xid", pattern="Xid (.*)", judge=lambda match: Answer("bad", f"{int(match[1])}"))
    subject, now = Subject(name="Cards", checks=checks, lines=(line,)), node(errors(0), lines=lines((5, "Xid a")))
    found = examine.examine(now, (subject,), Rules(), Past(shows_age=False), {})
    assert [(each.level, each.text.partition(" by ")[0].partition(" for ")[0]) for each in found] == [
        ("unknown", "the check failed: ZeroDivisionError: division"),
        ("bad", "errors 0, the limit is -1"),
        ("unknown", "the check failed: ValueError: invalid literal"),
    ]


def test_a_site_turns_checks_off_and_changes_limits() -> None:
    """Examine with rules: a check, one of lines and one of changes are off, and another limit counts."""
    hot = Reading(name="temperature", value=85, item="GPU 0", source="")
    now, before = node(card(0, 8), hot, lines=(KernelLine(5, "Xid 79"),)), node(card(0))
    assert [level for level, _ in sentences(now, node(card(0)))] == ["bad", "remark"]
    off = Rules(off=frozenset({"xid", "changed"}), limits={"heat": 80})
    assert sentences(now, before, rules=off) == [("bad", "GPU 0: temperature 85, the limit is 80")]


# --- counters and kernel lines ---------------------------------------------------------------------------


def errors(count: int) -> Reading:
    """Build a counter of errors."""
    return Reading(name="errors", value=count, item="eth0", kind="counter", source="")


def test_a_counter_counts_from_the_earlier_readings_but_not_across_a_restart() -> None:
    """Examine a counter: growth since before; nothing at first, nor after the node has restarted."""
    assert sentences(node(errors(5)), node(errors(3))) == [("bad", "eth0: errors +2")]
    assert sentences(node(errors(5))) == []
    assert sentences(node(errors(5)), node(errors(3), boot="b0")) == []


def lines(*seen: tuple[float, str]) -> tuple[KernelLine, ...]:
    """Build kernel lines of these times and texts."""
    return tuple(KernelLine(seconds, text) for seconds, text in seen)


def test_lines_of_the_same_text_are_one_condition() -> None:
    """Examine three lines of two numbers, and one that accuses nobody: two conditions, with times and age."""
    now = node(lines=lines((10, "Xid 79"), (20, "Xid 31"), (990, "Xid 79"), (991, "Xid 1")))
    assert sentences(now) == [("bad", "Xid 79 (2 times), 10s ago"), ("remark", "Xid 31, 16m ago")]
    assert sentences(now, past=Past(shows_age=False)) == [("bad", "Xid 79 (2 times)"), ("remark", "Xid 31")]


def test_a_line_that_names_an_item_accuses_that_alone() -> None:
    """Examine lines on two cards: a condition of each, whose steps have the item."""
    check = LineCheck(
        name="lost", pattern="lost (.*)", judge=lambda match: Answer("bad", "is lost", match[1]), steps=("reset {id}",)
    )
    now = node(lines=lines((10, "lost GPU 1"), (20, "lost GPU 2"), (30, "lost GPU 1")))
    found = examine.examine(now, (Subject(name="Cards", lines=(check,)),), Rules(), Past(shows_age=False), {})
    assert [(each.sentence(), each.steps) for each in found] == [
        ("GPU 1: is lost (2 times)", ("reset 1",)),
        ("GPU 2: is lost", ("reset 2",)),
    ]


def test_a_line_counts_once() -> None:
    """Examine a node again: lines that were there before do not count, new ones do, and after a restart all do."""
    old, new = (100.0, "Xid 79"), (200.0, "Xid 31")
    before, now = node(lines=lines(old)), node(lines=lines(old, new))
    assert [text for _, text in sentences(now, before)] == ["Xid 31, 13m ago"]
    assert sentences(before, before) == []
    assert len(sentences(now, replace(before, boot="b0"))) == 2


def test_lines_count_whose_clock_is_behind_the_uptime() -> None:
    """Examine a machine that slept, whose lines are older than its uptime of before tells: the new line counts."""
    before = node(lines=lines((100, "Xid 31")), uptime=900.0)
    assert examine.since_of(node(), before) == 100
    assert sentences(node(lines=lines((100, "Xid 31"), (150, "Xid 79"))), before) == [("bad", "Xid 79, 14m ago")]


def test_the_time_from_which_lines_count() -> None:
    """Take the last seconds if they are given, else the earlier look of the same boot, else the start."""
    assert examine.since_of(node(), None) == 0
    assert examine.since_of(node(), node(boot="b0", lines=lines((7, "Xid 31")))) == 0
    assert examine.since_of(node(), node()) == 0
    assert examine.since_of(node(), node(lines_why="not permitted", uptime=900.0)) == 900
    assert examine.since_of(node(), node(lines=lines((7, "Xid 31"))), 60) == 940


def test_harmless_lines_are_ignored() -> None:
    """Examine with a pattern of the site: the line that it matches does not count."""
    now = node(lines=lines((10, "Xid 79 on test"), (20, "Xid 31")))
    assert sentences(now, rules=Rules(ignored=("on te.t$",))) == [("remark", "Xid 31, 16m ago")]


def test_lines_that_cannot_be_read_are_unknown() -> None:
    """Examine without access to the kernel's log: unknown, with the reason."""
    assert sentences(node(lines_why="not permitted")) == [("unknown", "not permitted")]


# --- what moved ------------------------------------------------------------------------------------------


def version(value: str | None, item: str = "", **fields: Any) -> Reading:
    """Build the version of a driver or of an item's firmware."""
    return Reading(**{"name": "driver", "value": value, "item": item, "kind": "fact", "source": "modinfo", **fields})


def test_a_fact_that_moved_is_a_remark() -> None:
    """Examine another version than before and than in the lock file: a remark for each."""
    past = Past(snapshot=node(version("570")), frozen={"": {"driver": "560"}}, lock="lab.lock")
    assert sentences(node(version("580")), past=past) == [
        ("remark", "driver 580, 570 before"),
        ("remark", "driver 580, 560 in lab.lock"),
    ]


def test_a_fact_is_found_in_the_lock_file_by_item_and_name() -> None:
    """Examine cards with a lock file: only what differs is told, and nothing of what it does not have."""
    before = node(card(0), card(1), version("580"))
    assert examine.fingerprint(before) == {"GPU 0 PCIe width": "16", "GPU 1 PCIe width": "16", "driver": "580"}
    frozen = examine.facts_of(before)
    past = Past(frozen=frozen, lock="lab.lock")
    now = node(card(0), card(1, 32), card(2), version("580"))
    assert ("remark", "GPU 1: PCIe width 32, 16 in lab.lock") in sentences(now, past=past)
    assert sentences(node(card(0), card(1), card(2), version(None)), past=past) == []


def test_states_and_unknown_facts_do_not_move() -> None:
    """Examine a state that changed, and a fact that cannot be read now: nothing moved."""
    state = version("ACTIVE", kind="state")
    assert sentences(node(replace(state, value="DOWN"), version(None, "x")), node(state, version("1", "x"))) == []


def test_hardware_that_is_gone_is_bad_and_other_items_are_a_remark() -> None:
    """Examine without a card and a disk that were there: both are told with what they had."""
    before = node(card(0), card(1), version("v1", "/dev/sda"), version("v2", "/dev/sda", name="serial"))
    assert sentences(node(card(0)), before) == [
        ("bad", "GPU 1: is gone; it had PCIe width 16"),
        ("remark", "/dev/sda: is gone; it had driver v1, serial v2"),
    ]


def test_an_item_whose_values_cannot_be_read_is_not_gone() -> None:
    """Examine a card that is there but cannot be read: unknown, not gone."""
    assert sentences(node(card(0, None, why="no answer")), node(card(0))) == [("unknown", "GPU 0: no answer")]


def test_items_of_a_subject_that_cannot_be_parsed_are_not_gone() -> None:
    """Examine a node with garbage in place of its cards: unknown, and no card is called gone."""
    garbage = Reading(name="Cards", value=None, source="", why="its output cannot be read")
    assert sentences(node(garbage), node(card(0), version("570"))) == [("unknown", "its output cannot be read")]


def test_items_of_a_tool_that_does_not_answer_are_not_gone() -> None:
    """Examine a node whose tool is silent, and one on which another tool is: only there the card is gone."""
    before, silent = node(card(0, source="nvidia-smi -q")), Reading(name="tool", value=None, source="nvidia-smi")
    assert sentences(node(silent), before) == []
    assert len(sentences(node(replace(silent, source="smartctl")), before)) == 1


def test_items_that_nobody_asks_for_any_more_are_not_gone() -> None:
    """Examine a node whose lab was of another accelerator: its cards are not gone, only those of a subject in use."""
    other = node(card(0), card(1, subject="GPUs"))
    assert sentences(node(card(0)), other) == []
    assert len(sentences(node(card(0)), node(card(0), card(1, subject="Cards")))) == 1


def test_what_only_a_full_look_takes_is_not_gone_in_a_quick_one() -> None:
    """Examine a quick look after a full one, which had an item of its own: nothing is gone."""
    assert sentences(node(card(0)), node(card(0), version("F1", "fan", slow=True))) == []


FROZEN = {
    "": {"driver": "580"},
    "GPU 0": {"PCIe width": "16"},
    "GPU 1": {"PCIe width": "16", "a": "1", "b": "2", "model": "H100"},
    "fan": {"rpm": "9"},
}


def lacking(*readings: Reading, before: Snapshot | None = None) -> list[tuple[str, str]]:
    """Return level and sentence of what is wrong with a node beside a lock file with two cards and a fan."""
    return sentences(node(*readings), past=Past(frozen=FROZEN, lock="lab.lock", snapshot=before))


def test_an_item_of_the_lock_file_that_is_not_there_is_told() -> None:
    """Examine without a card and a fan of the lock file: hardware that has neighbours is bad, else a remark."""
    assert lacking(card(0)) == [
        ("bad", "GPU 1: is not there; lab.lock has model H100, PCIe width 16, a 1"),
        ("remark", "fan: is not there; lab.lock has rpm 9"),
    ]
    assert [level for level, _ in lacking()] == ["remark"] * 3


def test_an_item_that_is_gone_or_has_another_place_is_told_once() -> None:
    """Examine without a card that was there before too, and with one at a new place: once each, the latter a remark."""
    before = node(card(0), card(1), version("9", "fan", name="rpm"))
    assert [text for _, text in lacking(card(0), before=before)] == [
        "GPU 1: is gone; it had PCIe width 16",
        "fan: is gone; it had rpm 9",
    ]
    model = Reading(name="model", value="H100", item="GPU 7", kind="fact", source="")
    assert lacking(card(0), model)[0] == ("remark", "GPU 1: is not there; lab.lock has model H100, PCIe width 16, a 1")


def test_an_item_of_the_lock_file_is_not_missing_if_its_subject_gives_no_answer() -> None:
    """Examine a node whose subject is silent or garbage: nothing is missing; nor if only what is slow is silent."""
    silent = Reading(name="errors", value=None, source="smi", why="no answer")
    assert lacking(card(0), silent) == [("unknown", "no answer")]
    assert len(lacking(card(0), replace(silent, slow=True))) == 3
    assert lacking(card(0), replace(silent, name="Cards", source="")) == [("unknown", "no answer")]


@pytest.mark.parametrize(("root", "sudo"), [(False, "sudo "), (True, "")])
def test_what_is_gone_or_not_there_has_steps(root: bool, sudo: str) -> None:
    """Examine without a card that was there, without one of the lock file, and beside another width there."""
    lost = (f"{sudo}dmesg | tail -n 100", f"{sudo}reboot", "if it does not come back: service of the host")
    (gone,) = examined(node(card(0), root=root), node(card(0), card(1)))
    assert gone.steps == (*lost, "if it was taken out on purpose: labctl health --since 1m")
    locked = {"GPU 0": {"PCIe width": "8"}, "GPU 1": {"PCIe width": "16"}, "fan": {"rpm": "9"}}
    found = examined(node(card(0), root=root), past=Past(frozen=locked, lock="lab.lock"))
    freeze = "if that is on purpose: labctl freeze"
    assert [each.steps for each in found] == [(freeze,), (*lost, freeze), (freeze,)]


def test_a_remark_that_the_next_look_does_not_repeat_has_no_steps() -> None:
    """Examine another version than before, and without an interface: nothing is to be done."""
    found = examined(node(version("2")), node(version("1"), version("3", "eth9")))
    assert [(each.level, each.steps) for each in found] == [("remark", ()), ("remark", ())]


# --- devices with another number -----------------------------------------------------------------------------


def gpu(number: int, address: str, count: int = 0, **fields: Any) -> tuple[Reading, ...]:
    """Build the address, width, uuid and errors of a card."""
    place = card(number, name="PCI address", value=f"0000:{address}:00.0")
    uuid = card(number, name="uuid", value=f"GPU-{fields.pop('uuid', address)}")
    return (place, card(number), uuid, replace(errors(count), item=f"GPU {number}"), *fields.values())


def test_a_card_is_known_by_its_address_when_numbers_shift() -> None:
    """Examine after the first of three cards is gone: that alone is told; counters count by card, not by number."""
    before = node(*gpu(0, "18", 9), *gpu(1, "2a", 5), *gpu(2, "3b", 1))
    now = node(*gpu(0, "2a", 5), *gpu(1, "3b", 4))
    gone = "GPU 0 (0000:18:00.0): is gone; it had PCI address 0000:18:00.0, PCIe width 16, uuid GPU-18"
    assert sentences(now, before) == [("bad", "GPU 1: errors +3"), ("bad", gone)]
    locked = Past(frozen=examine.facts_of(before), lock="lab.lock")
    assert [text for _, text in sentences(now, past=locked)] == [
        "GPU 0 (0000:18:00.0): is not there; lab.lock has PCI address 0000:18:00.0, PCIe width 16, uuid GPU-18"
    ]
    assert sentences(now, past=replace(locked, snapshot=before, since=1e9)) == [
        ("bad", "GPU 1: errors +3"), ("bad", gone)
    ]  # fmt: skip


def test_a_card_at_another_address_is_not_gone() -> None:
    """Examine cards that a firmware numbers anew, one that was exchanged, and swapped ones: remarks only."""
    before = node(*gpu(0, "18"), *gpu(1, "2a"))
    moved = node(*gpu(0, "19", uuid="18"), *gpu(1, "2b", uuid="2a"))
    assert sentences(moved, before) == [
        ("remark", "GPU 0: PCI address 0000:19:00.0, 0000:18:00.0 before"),
        ("remark", "GPU 1: PCI address 0000:2b:00.0, 0000:2a:00.0 before"),
    ]
    assert sentences(node(*gpu(0, "18", uuid="new"), *gpu(1, "2a")), before) == [
        ("remark", "GPU 0: uuid GPU-new, GPU-18 before")
    ]
    other = node(*gpu(0, "18"), *gpu(1, "77"))
    assert {level for level, _ in sentences(other, before)} == {"remark"}


def test_a_card_that_cannot_be_read_is_not_gone() -> None:
    """Examine a card of which only the state is told, without its address: neither gone nor moved."""
    before = node(*gpu(0, "18"), *gpu(1, "2a"))
    lost = card(1, name="state", value="Unknown Error", kind="state")
    assert sentences(node(*gpu(0, "18"), lost), before) == []


def test_devices_of_which_the_address_is_unknown_keep_their_names() -> None:
    """Examine cards with an empty address, as where a link leads nowhere: all items stay as they are."""
    cards = [card(at, name="PCI address", value="") for at in range(2)]
    before = node(*cards, card(0, item="eth0"), version("570"))
    assert examine.renumbered(before, node(*cards)) == before
    assert sentences(node(*cards, card(0, item="eth0"), version("580")), before) == [
        ("remark", "driver 580, 570 before")
    ]


def test_parts_of_a_card_and_items_without_an_address_keep_theirs() -> None:
    """Look at a link of a card that has another number now, and at an interface: the link moves with its card."""
    link = card(1, item="GPU 1 NVLink 3")
    before = node(*gpu(0, "18"), *gpu(1, "2a"), link, card(0, item="eth0"))
    (*_, moved, interface) = examine.renumbered(before, node(*gpu(0, "2a"))).readings
    assert (moved.item, interface.item) == ("GPU 0 NVLink 3", "eth0")


# --- own checks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "level", "text"),
    [
        ("0 OK - all mounted", "ok", ""),
        ("1 slow: 12 ms", "remark", "storage: slow: 12 ms"),
        ("2 no mount", "bad", "storage: no mount"),
        ("3 no right", "unknown", "storage: no right"),
        ("2 ", "bad", "storage: exit code 2"),
        ("127 sh: not found", "unknown", "storage: sh: not found"),
        ("124 ", "unknown", "storage: did not end within 2 s"),
        ("", "unknown", "storage: it printed nothing"),
        ("garbage", "unknown", "storage: exit code garbage"),
        (None, "unknown", "storage: it printed nothing"),
    ],
)
def test_an_own_check_has_the_level_of_its_exit_code(printed: str | None, level: Level, text: str) -> None:
    """Examine the answer of an own check: Nagios' codes 0 to 3, and unknown for all else."""
    own = Rules(own=(OwnCheck(name="storage", command=("check", "it")),))
    reading = Reading(name="own storage", value=printed, source="check it", why="" if printed else "it printed nothing")
    conditions = examine.examine(node(reading), (), own, Past(), {})
    assert [(each.check, each.level, each.text) for each in conditions] == [("storage", level, text)]
    assert not examine.examine(node(reading), (), replace(own, off=frozenset({"storage"})), Past(), {})
