"""Hosts with malformed answers: at most an error of that host; the others are served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.answers import ANSWERS, RUN
from support.nearby import Nearby

from labctl.backends.docker.deploy import artifacts
from labctl.backends.docker.hosts import facts, pull, push
from labctl.backends.docker.hosts.ssh import Connection
from labctl.backends.docker.images import remote
from labctl.backends.docker.lab import cluster
from labctl.errors import HostError
from labctl.model import Secret
from labctl.naming import OUTPUTS
from labctl.records import manifest, merge
from labctl.system import hostdump
from labctl.system.parallel import map_hosts
from labctl.system.process import CompletedProcess
from labctl.system.progress import Progress


class Liar(Nearby):
    """A host that gives the same answer to all questions."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(name="red")
        self.answer = answer

    def run(self, *question: str, **options: Any) -> CompletedProcess:  # noqa: ARG002
        """Return the planted answer."""
        return CompletedProcess((), 0, self.answer.decode("utf-8", "replace"), "")

    def send(self, *question: str, **options: Any) -> CompletedProcess:  # noqa: ARG002
        """Return the planted answer, and send nothing."""
        return CompletedProcess((), 0, self.answer.decode("utf-8", "replace"), "")

    def receive(self, *question: str, on_chunk: Callable[[bytes], object], **options: Any) -> CompletedProcess:  # noqa: ARG002
        """Hand the planted answer to on_chunk in pieces of 64 KiB; return success."""
        for place in range(0, len(self.answer), 1 << 16):
            on_chunk(self.answer[place : place + (1 << 16)])
        return CompletedProcess((), 0, "", "")


def collects_facts(host: Connection, here: Path) -> object:
    """Run the survey script on the host; return its facts and devices."""
    text = host.run(facts.script()).out
    dump = hostdump.read(text, host.target.name)
    return dump.facts_at(0), cluster.observe("auto", dump)


def sees_files(host: Connection, here: Path) -> object:
    """Return the states of a tree on the host."""
    return push.sync_states(
        host, str(here / ".labctl" / host.target.name), {"workloads": manifest.scan(here / "runs" / RUN)}
    )


def pushes(host: Connection, here: Path) -> object:
    """Push a tree to the host; return the paths sent."""
    return push.push(host, str(here / ".labctl" / host.target.name), {"workloads": manifest.scan(here / "runs" / RUN)})


def fetches_what_is_left(host: Connection, here: Path) -> None:
    """Fetch what is left of runs on the host into this lab directory."""
    artifacts.fetch_left(host, str(here / ".labctl" / host.target.name), here, (Secret("hf_secret"),), lambda _: None)


def pulls(host: Connection, here: Path) -> object:
    """Pull the run's directory of the host into the record."""
    return pull.pull(host, str(here / ".labctl" / host.target.name / OUTPUTS / RUN), here / "runs" / RUN)


def sees_an_image(host: Connection, here: Path) -> object:
    """Ask a lying host for its image; return None for another."""
    return remote.image_state(host, "labctl/cpu") if isinstance(host, Liar) else None


def asks_for_a_size(host: Connection, here: Path) -> object:
    """Ask a lying host for the size of a file; return None for another."""
    return remote.size(host, "image.tar") if isinstance(host, Liar) else None


def relays(host: Connection, here: Path) -> None:
    """Let a lying host relay a file of 100 bytes; do nothing for another."""
    if isinstance(host, Liar):
        remote.relay(host, "image.tar", 100, ("true",), Progress("image", 100, 0, lambda _: None))


QUESTIONS = (
    collects_facts, sees_files, pushes, fetches_what_is_left, pulls, sees_an_image, asks_for_a_size, relays
)  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=list(ANSWERS))
def test_a_malformed_answer_is_an_error_of_that_host_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: Callable[[Connection, Path], object], answer: bytes
) -> None:
    """Each question gives host red's malformed answer at most as a short HostError of red; blue is served."""
    monkeypatch.setattr(merge, "MOST_MEMBERS", 1000)
    (tmp_path / "runs" / RUN).mkdir(parents=True)
    (tmp_path / "runs" / RUN / "hostfile").write_text("worker-0 slots=1\n")
    (tmp_path / ".labctl/blue" / OUTPUTS / RUN).mkdir(parents=True)
    (tmp_path / ".labctl/blue" / OUTPUTS / RUN / "loss").write_text("1")
    victim = tmp_path.parent / "x"
    hosts: dict[str, Connection] = {"red": Liar(answer), "blue": Nearby(name="blue")}
    done, failed = map_hosts(lambda host: question(host, tmp_path), hosts)
    assert "blue" in done
    for error in failed.values():
        assert "red" in error.message
        assert len(error.message) < 1000
    assert not victim.exists()
    if question in (fetches_what_is_left, pulls):
        assert (tmp_path / "runs" / RUN / "loss").read_text() == "1"
        assert sum(path.stat().st_size for path in (tmp_path / "runs").rglob("*") if path.is_file()) < 1 << 22


def test_an_answer_without_end_is_an_error_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """run() raises HostError for output beyond the limit of 1 MiB; within it all is returned, with a long stderr."""
    from labctl.backends.docker.hosts import ssh

    monkeypatch.setattr(ssh, "LARGEST_ANSWER", 1 << 20)
    with pytest.raises(HostError, match="answered with more than 1 MiB"):
        ssh.LocalConnection().run("yes", timeout=60)
    answer = ssh.LocalConnection().run("yes | head -c 1000000; yes | head -c 3000000 >&2", timeout=60)
    assert len(answer.out) == 1_000_000
