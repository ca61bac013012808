from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.batches import hostfiles
from labctl.batches.hostfiles import Group, Pattern, groups
from labctl.config import hostfile
from labctl.errors import ConfigError, HostError

SEVEN = tuple(f"n{number}" for number in range(1, 8))
PATTERNS: tuple[Pattern, ...] = ("sequential", "pairs", "ring", "all-pairs", "random")


def test_seven_nodes_are_three_pairs_and_one_node_left_over() -> None:
    """Group seven nodes by two: three pairs, the last node in none."""
    made = groups(SEVEN, 2, "sequential")
    assert made == (("n1", "n2"), ("n3", "n4"), ("n5", "n6"))


def test_one_of_the_first_half_is_paired_with_one_of_the_second() -> None:
    """Group by pairs: node k with node k + 3 of seven."""
    assert groups(SEVEN, 2, "pairs") == (("n1", "n4"), ("n2", "n5"), ("n3", "n6"))


def test_a_ring_has_each_node_with_the_next_ones_and_neighbours_share_none() -> None:
    """Group as a ring: each node with the next ones, groups that share no node first."""
    assert groups(SEVEN[:4], 2, "ring") == (("n1", "n2"), ("n3", "n4"), ("n2", "n3"), ("n1", "n4"))
    assert groups(SEVEN, 3, "ring")[:2] == (("n1", "n2", "n3"), ("n4", "n5", "n6"))
    assert len(groups(SEVEN, 3, "ring")) == 7


def test_a_ring_of_all_nodes_is_one_group() -> None:
    """Group a ring as large as the list: one group."""
    assert groups(SEVEN[:2], 2, "ring") == (("n1", "n2"),)
    assert groups(SEVEN, 7, "ring") == (SEVEN,)


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 31, 32])
def test_all_pairs_has_every_pair_once_and_each_round_every_node_at_most_once(count: int) -> None:
    """Group all pairs: each pair once, and each turn of count // 2 pairs uses a node at most once."""
    names = tuple(f"n{number}" for number in range(count))
    made = groups(names, 2, "all-pairs")
    assert sorted(map(sorted, made)) == sorted(map(sorted, combinations(names, 2)))
    at_once = count // 2
    for first in range(0, len(made), at_once):
        turn = [name for pair in made[first : first + at_once] for name in pair]
        assert len(set(turn)) == len(turn) == 2 * at_once


def test_random_groups_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    """Group at random: equal for one seed, different for another, every node once."""
    names = tuple(f"n{number}" for number in range(100))
    first, again, other = (groups(names, 2, "random", seed) for seed in (5, 5, 6))
    assert first == again != other
    assert sorted(name for pair in other for name in pair) == sorted(names)
    assert first != groups(names, 2, "sequential")


@given(count=st.integers(1, 40), size=st.integers(1, 40), pattern=st.sampled_from(PATTERNS), seed=st.integers())
def test_groups_are_of_the_size_asked_for_and_of_nodes_of_the_list_each_once(
    count: int, size: int, pattern: Pattern, seed: int
) -> None:
    """Group any list by any pattern: distinct groups of the size, or ConfigError where the pattern cannot."""
    names = tuple(f"n{number}" for number in range(count))
    if size > count or (size != 2 and pattern in ("pairs", "all-pairs")):
        with pytest.raises(ConfigError):
            groups(names, size, pattern, seed)
        return
    made = groups(names, size, pattern, seed)
    assert all(len(set(group)) == size and set(group) <= set(names) for group in made)
    assert len(set(map(frozenset, made))) == len(made)
    used = {name for group in made for name in group}
    remaining = {"ring": 0, "all-pairs": 0}.get(pattern, count % size)
    assert len(names) - len(used) == remaining


@pytest.mark.parametrize(
    ("size", "pattern", "message", "hint"),
    [
        (8, "sequential", "--size 8: the list has only 7 nodes", ""),
        (3, "pairs", "--pattern pairs makes pairs, not groups of 3", "--size 2"),
        (3, "all-pairs", "--pattern all-pairs makes pairs, not groups of 3", "--size 2"),
        (1, "pairs", "--pattern pairs makes pairs, not groups of 1", "--size 2"),
    ],
)
def test_groups_that_cannot_be_made_are_refused(size: int, pattern: Pattern, message: str, hint: str) -> None:
    """Ask for impossible groups: ConfigError with message and hint."""
    with pytest.raises(ConfigError) as caught:
        groups(SEVEN, size, pattern)
    assert caught.value.message == message
    assert hint in caught.value.hint


def test_an_unknown_pattern_is_refused_with_the_nearest() -> None:
    """Ask for an unknown pattern: ConfigError suggests the nearest."""
    assert hostfiles.pattern_named("all-pairs") == "all-pairs"
    with pytest.raises(ConfigError, match="--pattern rings: no such pattern") as caught:
        hostfiles.pattern_named("rings")
    assert caught.value.hint == "did you mean `ring`?"


@pytest.mark.parametrize(
    ("count", "size", "pattern", "name"),
    [
        (7, 2, "sequential", "7nodes_2xN"),
        (1, 1, "sequential", "1node_1xN"),
        (8, 2, "all-pairs", "8nodes_2xN_all-pairs"),
    ],
)
def test_sets_are_named_as_in_lambdas_benchmark(count: int, size: int, pattern: Pattern, name: str) -> None:
    """Ask for the default directory: hostfiles/<count>nodes_<size>xN, with the pattern unless sequential or pairs."""
    assert hostfiles.default_directory(count, size, pattern) == Path("hostfiles", name)


def texts(made: tuple[Group, ...]) -> dict[str, str]:
    """Return the hostfile texts of the groups, 8 slots for each node."""
    return hostfiles.texts(made, dict.fromkeys(SEVEN, 8))


def test_hostfiles_are_numbered_in_order_and_read_back_as_their_group() -> None:
    """Make hostfile texts: names are numbered, and each text parses to its group."""
    made = texts(groups(SEVEN, 2, "sequential"))
    assert list(made) == ["hostfile_2xN_batch0001", "hostfile_2xN_batch0002", "hostfile_2xN_batch0003"]
    assert made["hostfile_2xN_batch0002"] == "n3 slots=8\nn4 slots=8\n"
    assert hostfile.parse(made["hostfile_2xN_batch0003"], "h") == (("n5", 8), ("n6", 8))


def test_ten_thousand_hostfiles_are_still_in_order_by_name() -> None:
    """Make 11175 hostfiles: five digits, so that names sort in order."""
    names = tuple(f"n{number}" for number in range(150))
    made = hostfiles.texts(groups(names, 2, "all-pairs"), dict.fromkeys(names, 8))
    assert len(made) > 10_000
    assert {"hostfile_2xN_batch00001", "hostfile_2xN_batch11175"} < made.keys()
    assert sorted(made) == list(made)


def test_a_second_call_writes_the_same(tmp_path: Path) -> None:
    """Write the same set twice: the files are the same."""
    directory, made = tmp_path / "hostfiles/7nodes_2xN", texts(groups(SEVEN, 2, "sequential"))
    for _ in range(2):
        hostfiles.write(directory, made)
        assert {path.name: path.read_text() for path in hostfiles.listed(directory)} == made


@pytest.mark.parametrize("present", ["hostfile_2xN_batch0002", "hostfile_2xN_batch0099"])
def test_a_directory_with_other_hostfiles_keeps_them(tmp_path: Path, present: str) -> None:
    """Write a set over other hostfiles: ConfigError names one, and nothing changes."""
    (tmp_path / present).write_text("mine slots=1\n")
    with pytest.raises(ConfigError, match=f"{present} does not belong to this set of hostfiles") as caught:
        hostfiles.write(tmp_path, texts(groups(SEVEN, 2, "sequential")))
    assert f"rm -r {tmp_path}" in caught.value.hint
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(present, "mine slots=1\n")]


def test_what_else_is_in_the_directory_is_left_alone(tmp_path: Path) -> None:
    """Write a set beside a README: it stays."""
    (tmp_path / "README").write_text("ours")
    hostfiles.write(tmp_path, texts(groups(SEVEN, 2, "pairs")))
    assert (tmp_path / "README").read_text() == "ours"
    assert len(hostfiles.listed(tmp_path)) == 3


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Write a set to a path that is a file: HostError names it."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(HostError, match=r"cannot write .*/taken: File exists"):
        hostfiles.write(tmp_path / "taken", texts(groups(SEVEN, 2, "pairs")))


def test_a_set_that_is_not_there_is_refused_with_how_to_make_one(tmp_path: Path) -> None:
    """List a missing or empty set: ConfigError with a command or the file that is there."""
    with pytest.raises(ConfigError, match=r"4nodes: no such directory$") as caught:
        hostfiles.listed(tmp_path / "4nodes")
    assert caught.value.hint == "labctl hostfiles NODES.txt --size 2 makes one"
    (tmp_path / "hosts.txt").write_text("")
    with pytest.raises(ConfigError, match=r"has no file hostfile_\*, it has hosts\.txt"):
        hostfiles.listed(tmp_path)


def test_what_editors_leave_beside_hostfiles_is_no_job(tmp_path: Path) -> None:
    """List a set with backup files: only the hostfile; a file as directory is ConfigError."""
    for name in ("hostfile_1xN_batch0001", "hostfile_1xN_batch0001~", "hostfile_1xN_batch0001.bak"):
        (tmp_path / name).write_text("worker-0 slots=1\n")
    assert [path.name for path in hostfiles.listed(tmp_path)] == ["hostfile_1xN_batch0001"]
    with pytest.raises(ConfigError, match="not a directory"):
        hostfiles.listed(tmp_path / "hostfile_1xN_batch0001")
