"""Transfer of trees to a host: real scripts on this machine, with a minimal PATH."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from support.nearby import Nearby

from labctl.backends.docker.hosts import push
from labctl.errors import ConfigError, HostError
from labctl.records import manifest
from labctl.system.process import CompletedProcess
from labctl.system.tar import END

TOOLS = (
    "cat",
    "chmod",
    "find",
    "grep",
    "ln",
    "mkdir",
    "mktemp",
    "mv",
    "readlink",
    "rm",
    "rmdir",
    "sh",
    "sha256sum",
    "stat",
    "tar",
    "touch",
    "xargs",
)
# What changes anything on the host, for the test that ends a sender before each such step.
CHANGES = ("ln", "mkdir", "mktemp", "mv", "rm", "tar", "touch")
NAMES = ("a b", 'it\'s "one"', "new\nline\n", "-rf", "ünï", "back\\slash", ".hidden", "..two", "*", "$HOME", "x" * 200)
BUSYBOX = shutil.which("busybox")

Content = dict[str, object]


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a PATH directory with the minimal tools of a host; return it."""
    folder = tmp_path_factory.mktemp("tools")
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool) or tool)
    return folder


@pytest.fixture
def host(tools: Path) -> Nearby:
    """Return a host whose PATH has only the minimal tools."""
    return Nearby(environment={"PATH": str(tools)})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Make a tree with all kinds of names, modes and entries that can be sent; return its root."""
    root = tmp_path / "source"
    for name in NAMES:
        folder = root / "names" / name
        folder.mkdir(parents=True)
        (folder / name).write_text(name)
        (root / name).write_text(name)
    Path(os.fsdecode(os.fsencode(root) + b"/no-utf8-\xff")).write_bytes(bytes(range(256)))
    (root / "empty/deep").mkdir(parents=True)
    (root / "nothing").touch()
    (root / "link").symlink_to("names/a b")
    (root / "leads-nowhere").symlink_to("../..//gone/")
    for name, mode in (("key", 0o600), ("script.sh", 0o755), ("shared", 0o664), ("read-only", 0o444)):
        (root / name).write_text(f"{name} one")
        (root / name).chmod(mode)
    (root / "open").mkdir()
    (root / "open").chmod(0o775)
    return root


def content(root: Path, path: str) -> Iterator[tuple[str, object]]:
    """Yield the content at a path and below: mode and bytes of a file, mode of a directory, target of a link."""
    place = root / path
    status = place.lstat()
    if stat.S_ISLNK(status.st_mode):
        yield path, os.readlink(place)  # noqa: PTH115 - a Path would tidy what it says
    elif stat.S_ISDIR(status.st_mode):
        yield path, stat.S_IMODE(status.st_mode)
        for name in names(place):
            yield from content(root, f"{path}/{name}")
    else:
        yield path, (stat.S_IMODE(status.st_mode), place.read_bytes())


def names(place: Path) -> set[str]:
    """Return the names of the entries of a directory."""
    return {path.name for path in place.iterdir()}


def all_of(root: Path) -> Content:
    """Return the content of all entries below a root, by path."""
    return dict(pair for name in names(root) for pair in content(root, name))


def shown(place: Path) -> Content:
    """Return the content of the names in a host's directory, empty without it; all must lead through ``.current``."""
    if not place.exists():
        return {}
    by_name: Content = {}
    for name in names(place) - {".versions", ".current"}:
        assert os.readlink(place / name) == f".current/{name}"  # noqa: PTH115
        if os.path.lexists(place / ".current" / name):
            by_name.update(content(place / ".current", name))
    return by_name


def files_of(root: Path) -> dict[str, int]:
    """Return the inode of each file below a root, by path."""
    return {path: os.lstat(root / path).st_ino for path, value in all_of(root).items() if isinstance(value, tuple)}


def versions(place: Path) -> list[str]:
    """Return the sorted names of the versions that a host keeps."""
    return sorted(path.name for path in (place / ".versions").iterdir() if not path.is_symlink())


def age(place: Path, days: float) -> None:
    """Set the age of all versions on the host, in days."""
    then = time.time() - days * 86400
    for version in (place / ".versions").iterdir():
        os.utime(version, (then, then), follow_symlinks=False)


def send(host: Nearby, source: Path, directory: Path, name: str = "workloads") -> tuple[str, ...]:
    """Push a tree as this name; return the paths sent."""
    return push.push(host, str(directory), {name: manifest.scan(source)})


def test_a_host_shows_what_was_sent_whatever_the_names_and_modes(host: Nearby, source: Path, tmp_path: Path) -> None:
    """Pushed entries of all names and modes are on the host as here, in private folders, by two commands."""
    lab = tmp_path / "home dir/.labctl/it's"
    sent = send(host, source, lab)
    assert shown(lab / "workloads") == all_of(source)
    assert sorted(sent) == sorted(f"workloads/{path}" for path in all_of(source))
    assert host.commands == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in (lab, lab / "workloads", lab / "workloads/.versions")} == {
        0o700
    }
    assert [path.name for path in lab.iterdir()] == ["workloads"]


def test_what_is_unchanged_costs_one_command_and_no_bytes(host: Nearby, source: Path, tmp_path: Path) -> None:
    """A second push runs one command, sends no bytes and makes no version."""
    send(host, source, tmp_path / "lab")
    before, host.commands, host.bytes = versions(tmp_path / "lab/workloads"), 0, 0
    assert send(host, source, tmp_path / "lab") == ()
    assert (host.commands, host.bytes) == (1, 0)
    assert versions(tmp_path / "lab/workloads") == before


def test_only_what_changed_travels_and_the_rest_stays_the_same_file(host: Nearby, source: Path, tmp_path: Path) -> None:
    """After four edits, three paths are sent; other files keep their inodes and the old version stays as it was."""
    (source / "large").write_bytes(os.urandom(1 << 20))
    place = tmp_path / "lab/workloads"
    send(host, source, tmp_path / "lab")
    before, inodes = shown(place), files_of(place / ".current")
    held = (place / ".current").resolve()
    host.commands = host.bytes = 0

    (source / "key").write_text("key two")
    (source / "script.sh").chmod(0o700)
    shutil.rmtree(source / "names/*")
    (source / "names/*").write_text("a file in the place of a directory")
    sent = send(host, source, tmp_path / "lab")

    assert sorted(sent) == ["workloads/key", "workloads/names/*", "workloads/script.sh"]
    assert host.commands == 2
    assert host.bytes < 200_000
    assert shown(place) == all_of(source)
    after = files_of(place / ".current")
    assert {path for path in after if after[path] != inodes.get(path)} == {"key", "names/*", "script.sh"}
    assert all_of(held) == before, "a container that still has the version before sees it as it was"


def test_names_that_went_are_gone(host: Nearby, source: Path, tmp_path: Path) -> None:
    """A name that is not in the last tree is not on the host."""
    for number in range(3):
        (source / f"only-{number}").write_text("x")
        (source / f"only-{number - 1}").unlink(missing_ok=True)
        send(host, source, tmp_path / "lab")
    assert names(tmp_path / "lab/workloads") == {*names(source), ".current", ".versions"}


def test_who_stands_in_what_was_sent_keeps_it_whatever_is_sent_for_a_month(
    host: Nearby, source: Path, tmp_path: Path
) -> None:
    """An old version stays readable through other pushes for about a month, and is removed after 32 days."""
    place, before = tmp_path / "lab/workloads", all_of(source)
    send(host, source, tmp_path / "lab")
    age(place, 100)
    stood_in = (place / "names").resolve().parent
    for text in ("two", "three", "four"):
        (source / "key").write_text(text)
        send(host, source, tmp_path / "lab")
        assert all_of(stood_in) == before
    age(place, 28)
    send(host, source, tmp_path / "lab")
    assert len(versions(place)) == 4
    age(place, 32)
    send(host, source, tmp_path / "lab")
    assert len(versions(place)) == 1
    assert shown(place) == all_of(source)


def test_what_was_changed_on_the_host_is_mended(host: Nearby, source: Path, tmp_path: Path) -> None:
    """A file changed or removed on the host is as here after the next push."""
    place = tmp_path / "lab/workloads"
    send(host, source, tmp_path / "lab")
    (place / "key").write_text("KEY ONE")
    (place / "names/a b/a b").unlink()
    send(host, source, tmp_path / "lab")
    assert shown(place) == all_of(source)


def test_to_look_changes_nothing_and_tells_what_is_there(host: Nearby, source: Path, tmp_path: Path) -> None:
    """sync_states() says missing, stale or current, and changes nothing on the host."""
    lab, trees = tmp_path / "lab", {"workloads": manifest.scan(source), "other": manifest.scan(source / "open")}
    assert push.sync_states(host, str(lab), trees) == {"workloads": "missing", "other": "missing"}
    assert not lab.exists()
    push.push(host, str(lab), trees)
    (lab / "workloads/-rf").unlink()
    before = all_of(lab)
    assert push.sync_states(host, str(lab), trees) == {"workloads": "stale", "other": "current"}
    assert all_of(lab) == before
    push.push(host, str(lab), trees)
    assert set(push.sync_states(host, str(lab), trees).values()) == {"current"}


def test_several_trees_go_in_one_command_and_one_may_lie_in_anothers_directory(host: Nearby, tmp_path: Path) -> None:
    """Several trees need two commands; nodes that are not sent are pruned, and so is the launcher's key."""
    lab = tmp_path / "lab"
    for name in ("a/compose.yml", "a/ssh/key", "a/launcher/id", "b/compose.yml", "b/ssh/key"):
        (lab / ".lab/nodes" / name).parent.mkdir(parents=True, exist_ok=True)
        (lab / ".lab/nodes" / name).write_text(name)
    (lab / "workloads").mkdir()
    remote = tmp_path / "there"

    push.push(host, str(remote), manifest.scan_nodes(lab, ("a",), launcher=True), prune=".lab/nodes")
    assert host.commands == 2
    nodes = remote / ".lab/nodes"
    assert (nodes / "a/launcher/id").read_text() == "a/launcher/id"
    assert not (nodes / "a/launcher").is_symlink()
    assert shown(remote / "workloads") == {}
    assert not (nodes / "b").exists()

    push.push(host, str(remote), manifest.scan_nodes(lab, ("a", "b"), launcher=False), prune=".lab/nodes")
    assert (nodes / "b/ssh/key").read_text() == "b/ssh/key"
    assert not (nodes / "a/launcher").exists(), "a private key stays only on the launcher's host"

    push.push(host, str(remote), manifest.scan_nodes(lab, ("b",), launcher=False), prune=".lab/nodes")
    assert names(nodes) == {"b"}


def test_of_a_node_no_key_or_secret_of_before_stays(host: Nearby, tmp_path: Path) -> None:
    """Each push of a node leaves one version; an earlier value of its secret is in no file of the host."""
    node, remote = tmp_path / "node", tmp_path / "lab/.lab/nodes/worker-0"
    (node / "secrets").mkdir(parents=True)
    (node / "compose.yml").write_text("x")
    for value in ("first", "second", ""):
        (node / "secrets/hf_token").write_text(value) if value else (node / "secrets/hf_token").unlink()
        send(host, node, tmp_path / "lab", ".lab/nodes/worker-0")
        assert shown(remote) == all_of(node)
        contents = [path.read_text() for path in remote.rglob("*") if path.is_file() and path.name == "hf_token"]
        assert set(contents) == ({value} if value else set())
        assert len(versions(remote)) == 1


class CutOff(Nearby):
    """A connection that breaks after this many bytes; with ``kill`` the host's side dies too."""

    def __init__(self, tools: Path, after: int, *, kill: bool) -> None:
        super().__init__(environment={"PATH": str(tools)})
        self.after, self.kill = after, kill

    def send(self, script: str, *arguments: str, chunks: Iterable[bytes], timeout: float) -> CompletedProcess:
        """Send the first bytes of the stream to the script on the host."""
        return super().send(script, *arguments, chunks=self.first(chunks), timeout=timeout)

    def first(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the first ``after`` bytes, then end, or raise HostError if ``kill`` is set."""
        left = self.after
        for chunk in chunks:
            if left < len(chunk):
                yield chunk[:left]
                if self.kill:
                    raise HostError("the connection broke")
                return
            left -= len(chunk)
            yield chunk


@pytest.mark.parametrize("kill", [False, True], ids=["ended", "killed"])
def test_a_copy_that_is_cut_off_never_shows(
    host: Nearby, source: Path, tmp_path: Path, tools: Path, kill: bool
) -> None:
    """With the stream cut at each of twelve places, send() raises HostError and the host keeps the old tree."""
    place, old, entries = tmp_path / "lab/workloads", all_of(source), frozenset(manifest.scan(source).entries)
    send(host, source, tmp_path / "lab")
    (source / "large").write_bytes(os.urandom(50_000))
    (source / "key").write_text("key two")
    shutil.rmtree(source / "names")
    length = sum(map(len, push.stream([push.Update("", manifest.scan(source), "stale", entries)]))) - len(END)
    for after in range(0, length, length // 12):
        with pytest.raises(HostError):
            send(CutOff(tools, after, kill=kill), source, tmp_path / "lab")
        assert shown(place) == old
    send(host, source, tmp_path / "lab")
    assert shown(place) == all_of(source)
    assert names(tmp_path / "lab") == {"workloads"}


def deadly(folder: Path, tools: Path) -> Path:
    """Copy the tools to ``folder``; those that change files kill their session from the DEADLY-th change on."""
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(tools / tool)
    for tool in CHANGES:
        (folder / tool).unlink()
        (folder / tool).write_text(
            f'#!/bin/sh\necho >>"$STEPS"\nset -- {tools / tool} "$@"\n'
            '[ "$(stat -c %s "$STEPS")" -lt "$DEADLY" ] && exec "$@"\nkill -9 0\n'
        )
        (folder / tool).chmod(0o755)
    return folder


def test_a_sender_killed_before_any_step_leaves_the_old_or_the_new(host: Nearby, tmp_path: Path, tools: Path) -> None:
    """A push killed at each change shows the old or the new tree; the next push shows the new one, with no rest."""
    path, steps = deadly(tmp_path / "deadly", tools), tmp_path / "steps"
    lab, states = tmp_path / "lab", set()
    trees = []
    for number in range(2):
        root = tmp_path / f"source-{number}"
        (root / f"folder-{number}").mkdir(parents=True)
        for name in ("one", "two", f"only-{number}"):
            (root / name).write_text(f"{name} {number}")
        trees.append(root)
    send(host, trees[1], lab)
    for number in count():
        old, new = trees[(number + 1) % 2], trees[number % 2]
        steps.write_text("")
        killed = Nearby(environment={"PATH": str(path), "STEPS": str(steps), "DEADLY": str(number + 1)})
        try:
            send(killed, new, lab)
        except HostError:
            now = shown(lab / "workloads")
            assert now in (all_of(old), all_of(new))
            states.add(now == all_of(new))
            send(host, new, lab)
            assert shown(lab / "workloads") == all_of(new)
            assert names(lab) == {"workloads"}
            assert names(lab / "workloads") == {*names(new), ".current", ".versions"}
        else:
            break
    assert number > 10
    assert states == {False, True}
    age(lab / "workloads", 32)
    send(host, trees[number % 2], lab)
    assert len(list((lab / "workloads/.versions").iterdir())) == 1


def test_two_senders_at_once_do_not_break_each_other(host: Nearby, source: Path, tmp_path: Path) -> None:
    """Pushes of two trees at once, three times, end with one of the trees whole."""
    other = shutil.copytree(source, tmp_path / "other", symlinks=True)
    (other / "key").write_text("key of another")
    (other / "more").mkdir()
    (source / "large").write_bytes(os.urandom(1 << 20))
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            list(pool.map(lambda root: send(host, root, tmp_path / "lab"), (source, other, source, other)))
            assert shown(tmp_path / "lab/workloads") in (all_of(source), all_of(other))
    send(host, source, tmp_path / "lab")
    assert shown(tmp_path / "lab/workloads") == all_of(source)
    assert names(tmp_path / "lab") == {"workloads"}


def test_a_file_that_changes_on_its_way_is_an_error_and_shows_nowhere(
    host: Nearby, source: Path, tmp_path: Path
) -> None:
    """A file that changes between scan and push raises HostError, and the host shows nothing."""
    read = {"workloads": manifest.scan(source)}
    (source / "key").write_text("KEY ONE")
    with pytest.raises(HostError, match=r"source/key changed while it was sent"):
        push.push(host, str(tmp_path / "lab"), read)
    assert shown(tmp_path / "lab/workloads") == {}


def test_the_layout_of_before_is_replaced(host: Nearby, source: Path, tmp_path: Path) -> None:
    """A tree in the layout with .sent and .now is replaced by the current layout."""
    place = tmp_path / "lab/workloads"
    (place / ".sent/1234.1-2/tree").mkdir(parents=True)
    (place / ".sent/1234.1-2/tree/key").write_text("old")
    (place / ".now").symlink_to(".sent/1234.1-2/tree")
    (place / "key").symlink_to(".now/key")
    send(host, source, tmp_path / "lab")
    assert all_of(place / ".current") == all_of(source)
    assert (place / "key").read_text() == "key one"


def test_what_was_not_sent_is_not_replaced(host: Nearby, source: Path, tmp_path: Path) -> None:
    """A folder in the place of a name to send raises HostError and stays."""
    (tmp_path / "lab/workloads/key").mkdir(parents=True)
    with pytest.raises(HostError, match="workloads/key is in the way"):
        send(host, source, tmp_path / "lab")
    assert names(tmp_path / "lab/workloads/key") == set()


def test_a_tree_has_no_compiled_python_and_no_sockets(source: Path) -> None:
    """scan() leaves out __pycache__ and pipes; `only` selects names at the top."""
    (source / "names/__pycache__").mkdir()
    (source / "names/__pycache__/a.pyc").touch()
    os.mkfifo(source / "pipe")
    before = manifest.scan(source)
    assert {"names/__pycache__", "pipe"}.isdisjoint(entry.path for entry in before.entries)
    assert manifest.scan(source, only=("key", "names")).entries != before.entries
    assert {entry.path.partition("/")[0] for entry in manifest.scan(source, only=("key", "names")).entries} == {
        "key",
        "names",
    }


def test_links_whose_targets_hold_line_ends_are_told_apart(host: Nearby, tmp_path: Path) -> None:
    """Two trees whose links differ only in where a line end is are both pushed right."""
    (tmp_path / "source").mkdir()
    for targets in (("x\ny", "z"), ("x", "y\nz")):
        for name, target in zip("ab", targets, strict=True):
            (tmp_path / "source" / name).unlink(missing_ok=True)
            (tmp_path / "source" / name).symlink_to(target)
        send(host, tmp_path / "source", tmp_path / "lab")
        assert shown(tmp_path / "lab/workloads") == all_of(tmp_path / "source")


def test_a_name_that_hosts_need_is_refused(source: Path) -> None:
    """A tree with an entry `.current` raises ConfigError."""
    (source / ".current").touch()
    with pytest.raises(ConfigError, match="hosts keep that name for labctl"):
        manifest.scan(source)


def test_a_run_appears_at_once_and_only_once(host: Nearby, source: Path, tmp_path: Path, tools: Path) -> None:
    """push_new() cut off leaves no directory; whole it makes one, and a second one raises HostError."""
    run = tmp_path / "lab/runs/20260102-opt"
    for kill in (False, True):
        with pytest.raises(HostError):
            push.push_new(CutOff(tools, 20_000, kill=kill), manifest.scan(source), str(run))
        assert not run.exists()
    push.push_new(host, manifest.scan(source), str(run))
    assert all_of(run) == all_of(source)
    assert names(run.parent) == {run.name}
    (source / "key").write_text("two")
    with pytest.raises(HostError, match="already exists"):
        push.push_new(host, manifest.scan(source), str(run))
    assert (run / "key").read_text() == "key one"


def test_only_what_lies_below_labctls_own_directory_is_removed(host: Nearby, source: Path, tmp_path: Path) -> None:
    """remove() raises HostError for a path that is not below .labctl; a second removal raises nothing."""
    mine = tmp_path / "home/.labctl/lab"
    send(host, source, mine)
    (mine / "workloads/open").resolve().chmod(0o500)
    for wrong in (tmp_path / "home", tmp_path / "home/.labctl", mine / "../../..", Path(".labctl/lab")):
        with pytest.raises(HostError, match="labctl removes nothing else"):
            push.remove(host, str(wrong))
    push.remove(host, str(mine))
    push.remove(host, str(mine))
    assert names(tmp_path / "home") == set()


@pytest.mark.skipif(not BUSYBOX, reason="no busybox here")
def test_busybox_is_enough_of_a_host(source: Path, tmp_path: Path) -> None:
    """With busybox's tools alone push(), sync_states() and remove() work."""
    applets = tmp_path / "applets"
    applets.mkdir()
    for tool in TOOLS:
        (applets / tool).symlink_to(BUSYBOX or "")
    host = Nearby(environment={"PATH": str(applets)})
    for text in ("key two", "key three"):
        send(host, source, tmp_path / "lab")
        assert shown(tmp_path / "lab/workloads") == all_of(source)
        (source / "key").write_text(text)
        host.commands = 0
    send(host, source, tmp_path / "lab")
    assert host.commands == 2
    assert push.sync_states(host, str(tmp_path / "lab"), {"workloads": manifest.scan(source)}) == {
        "workloads": "current"
    }
    push.remove(host, "/.labctl/no/such")
