"""A host whose sshd sends malformed answers: only that host fails, while the other one is served."""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from support.answers import ANSWERS
from support.harness import Answer
from support.rack.host import Host
from support.rack.rack import Rack, RackLab

pytestmark = pytest.mark.docker

# Shell of all sessions: the first ones run their command, later ones print the lie instead. A framed lie is enclosed in
# the lines of the script that opens a connection.
LIAR = """\
#!/bin/sh
cd /tmp/liar || exit
asked=$(ls asked | wc -l)
: > "asked/$$"
[ "$asked" -ge "$(cat honest)" ] || exec sh -c "$SSH_ORIGINAL_COMMAND"
[ "$(cat framed)" = yes ] || exec cat answer
sh -c "$SSH_ORIGINAL_COMMAND" < /dev/null > "said.$$"
head -n 2 "said.$$"
cat answer
echo
tail -n 1 "said.$$"
exec cat > /dev/null
"""
PREPARE = """\
rm -rf /tmp/liar && mkdir -p /tmp/liar/asked && cd /tmp/liar || exit
echo "$1" > honest
echo "$2" > framed
base64 -d > answer
chmod -R 777 .
"""
# Number of honest sessions, and `yes` for a framed lie.
WAYS = ((0, False), (0, True), (1, False), (2, False))
FEW = (
    ("an escape sequence", (0, False)),
    ("a number of 5000 digits", (0, True)),
    ("a fact without an end", (0, True)),
    ("a number of 5000 digits", (1, False)),
    ("an empty object", (2, False)),
)
# Program that runs labctl and prints its peak memory in KiB on the last line.
MEASURED = (
    "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr); sys.exit(code)"
)


@pytest.fixture(scope="module")
def lab(shared_rack: Rack, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RackLab]:
    """Yield a lab over two hosts, up, whose labctl prints its peak memory in KiB as its last line."""
    home = tmp_path_factory.mktemp("home")
    (home / ".bashrc").write_text("mine\n")
    made = shared_rack.lab(tmp_path_factory.mktemp("lab"), f"{family}-liar", shared_rack.hosts(2), {})
    made = replace(made, prefix=(sys.executable, "-c", MEASURED), environ={**made.environ, "HOME": str(home)})
    made.call("up").expect(0)
    yield made
    shared_rack.clear()


def tree(path: Path) -> dict[str, str]:
    """Return path -> SHA-256 of each file below a directory."""
    files = (file for file in path.rglob("*") if file.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def lie(host: Host, answer: bytes, honest: int, framed: bool) -> None:
    """Let the host's sessions print this answer after ``honest`` correct ones; between true lines if ``framed``."""
    text = base64.b64encode(answer).decode()
    host.run("sh", "-c", PREPARE, "sh", str(honest), "yes" if framed else "no", stdin=text)


def alone(lab: RackLab, answer: Answer) -> None:
    """Assert that labctl succeeded or named the lying host, without traceback, in less than 300 MiB."""
    assert answer.code in (0, 3), answer.err
    assert "Traceback" not in answer.err
    if answer.code:
        assert lab.hosts[1].name in answer.out + answer.err
    assert "\x1b[2J" not in answer.out + answer.err
    assert int(answer.err.splitlines()[-1]) < 300 * 1024


@pytest.mark.parametrize(
    "lies",
    [
        pytest.param(FEW, id="few"),
        pytest.param(tuple(product(ANSWERS, WAYS)), id="all", marks=pytest.mark.slow),
    ],
)
def test_a_host_that_lies_is_an_error_of_that_host_alone(
    lab: RackLab, lies: tuple[tuple[str, tuple[int, bool]], ...]
) -> None:
    """status, up and down name h2 at most; nodes of h1 and files of the user stay as they are."""
    other, liar = lab.hosts
    home = Path(lab.environ["HOME"])
    before, kept = tree(home), lab.on(other).identities()
    liar.program("liar", LIAR)
    liar.sshd(ForceCommand="/usr/local/bin/liar")
    for name, (sessions, framed) in lies:
        lie(liar, ANSWERS[name], sessions, framed)
        status = lab.call("status", "--json")
        alone(lab, status)
        states = {node["name"]: node["state"] for node in status.json["nodes"] if node["host"] == other.name}
        assert states == {"launcher": "running", "worker-0": "running"}, (name, sessions, framed)
        alone(lab, lab.call("up"))
        assert lab.on(other).identities() == kept, (name, sessions, framed)
    lie(liar, ANSWERS["a name that leads out later"], honest=2, framed=False)
    alone(lab, lab.call("down"))
    assert lab.on(other).labelled() == []
    assert tree(home) == before
    liar.cure()
    lab.call("up").expect(0)
    assert lab.call("status", "--json").expect(0).json["state"] == "up"
