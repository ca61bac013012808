"""A host that answers each question as it likes: an error of that host alone, or nothing; the others are served."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.nearby import Nearby

from labctl.errors import HostError
from labctl.hosts import facts, manifest, pull, push
from labctl.hosts.ssh import Connection
from labctl.images import remote
from labctl.lab import cluster
from labctl.model import Secret
from labctl.naming import OUTPUTS
from labctl.runs import artifacts
from labctl.system.parallel import map_hosts
from labctl.system.process import CompletedProcess
from labctl.system.progress import Progress

RUN = "20260102-150405-hello-3fa2"


def tar(*members: tuple[str, bytes, int], content: bytes = b"") -> bytes:
    """Members by name, type and size, with this content and an end."""
    stream = io.BytesIO()
    for name, kind, size in members:
        info = tarfile.TarInfo(name)
        info.type, info.size = kind, size
        stream.write(info.tobuf(tarfile.GNU_FORMAT) + content)
    return stream.getvalue() + b"\0" * 1024


def sparse() -> bytes:
    """A few bytes that say they are a file of 1 TiB."""
    header = bytearray(tarfile.TarInfo("loss").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[386:410] = b"%011o\0%011o\0" % (1 << 20, 0)
    header[483:495] = b"\x80" + struct.pack(">Q", 1 << 40).rjust(11, b"\0")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + b"\0" * 1024


PAX = b"30 GNU.sparse.major=1\n30 GNU.sparse.minor=0\n"
ANSWERS: dict[str, bytes] = {
    "nothing": b"",
    "an end of line": b"\n",
    "many ends of lines": b"\n" * 100_000,
    "a zero byte": b"\0",
    "zero bytes": b"\0" * 100_000,
    "one word": b"many",
    "not UTF-8": b"\xff\xfe\n" * 100,
    "an escape sequence": b"\x1b[2J\x1b]0;title\x07\n",
    "a carriage return": b"loss\rerror: all is well\n",
    "a negative number": b"-1\n",
    "a number of 5000 digits": b"9" * 5000 + b"\n",
    "not a number": b"nan\n",
    "a number with a sign": b"+0x10\n",
    "an empty object": b"{}\n",
    "an empty list": b"[]\n",
    "null": b"null\n" * 5,
    "a deep list": b"[" * 100_000 + b"\n",
    "a deep object": b'{"a":' * 50_000 + b"\n",
    "four lines": b"a b c\nroot\nroot\n[]\n",
    "lines of JSON": b'a b c\n\n\n{"RootFS": 7}\n[1, {"a": 2}]\n',
    "a list for an object": b"a b c\n/ 1 2 3 4 5\n/ 1 2 3 4 5\n[1]\n[]\n",
    "words for a number": b"a b c\n/ x y z w v u\n/ x y z w v u\n\n[]\n",
    "an absolute name": b"/home/me\n",
    "a name that leads out": b"../../../home/me\n",
    "a name that leads out later": f"{RUN}/../../../x\n".encode(),
    "a hidden name": b".ssh\n",
    "an unknown run": b"20260101-000000-forged-0000\n",
    "a name of 4 KiB": b"n" * 4096 + b"\n",
    "a name with control characters": b"\x1b[31mred\x07\n",
    "100,000 names": b"".join(b"%06d\n" % number for number in range(100_000)),
    "one fact": b"fact machine\n1 x\n1 end\n",
    "a fact without an end": b"fact time\n1 12\n",
    "an end alone": b"end\n",
    "an odd time": b"fact time\n1\tmany\nend\n",
    "an odd file": b"file /proc/meminfo\n1\tMemTotal: many kB\nend\n",
    "an odd user": b"fact user\n1\tann ann ann\nend\n",
    "a huge core number": b"file /sys/devices/system/cpu/online\n1\t0-99999999999\nend\n",
    "names without an end": b"./a\0./b\0",
    "too few facts": b"./.current\0\0a\0\0b\0\0\0\0" + b"81a4 12\n\0" + b"x\0",
    "an odd mode": b"./.current\0\0a\0\0b\0\0\0\0zzzz\n\x0081a4 many\n\0" + b"0" * 64 + b"  b\n\0",
    "an odd size": b"./.current\0\0\0b\0\0\0\x0081a4 -9\n\0" + b"0" * 64 + b"  b\n\0",
    "a tar that breaks off": tar(("loss", tarfile.REGTYPE, 1 << 20))[:700],
    "a tar of a device": tar(("null", tarfile.CHRTYPE, 0)),
    "a tar of an absolute name": tar(("/etc/passwd", tarfile.REGTYPE, 0)),
    "a tar of a name that leads out": tar(("a/../../x", tarfile.REGTYPE, 0)),
    "a tar of an unknown type": tar(("x", b"Z", 0)),
    "a sparse file of 1 TiB": sparse(),
    "a sparse file by other means": tar(("x", tarfile.XHDTYPE, len(PAX)), content=PAX.ljust(512, b"\0")),
    "a name of 8 GiB": tar(("././@LongLink", tarfile.GNUTYPE_LONGNAME, 8 << 30), content=b"n" * (6 << 20)),
    "a link name of 8 GiB": tar(("././@LongLink", tarfile.GNUTYPE_LONGLINK, 8 << 30), content=b"n" * (6 << 20)),
    "headers without a member": tar(
        *[("x", tarfile.XGLTYPE, 512)] * 12_000, content=b"11 comment=\n".ljust(512, b"\0")
    ),
    "a size below zero": tar(("x", tarfile.REGTYPE, 0)).replace(b"00000000000\0", b"-0000000001\0", 1),
    "more than is answered": b"x" * 300_000,
}


class Liar(Nearby):
    """Answers every question with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(name="red")
        self.answer = answer

    def run(self, *question: str, **options: Any) -> CompletedProcess:  # noqa: ARG002
        return CompletedProcess((), 0, self.answer.decode("utf-8", "replace"), "")

    def send(self, *question: str, **options: Any) -> CompletedProcess:  # noqa: ARG002
        return CompletedProcess((), 0, self.answer.decode("utf-8", "replace"), "")

    def receive(self, *question: str, on_chunk: Callable[[bytes], object], **options: Any) -> CompletedProcess:  # noqa: ARG002
        for place in range(0, len(self.answer), 1 << 16):
            on_chunk(self.answer[place : place + (1 << 16)])
        return CompletedProcess((), 0, "", "")


def collects_facts(host: Connection, here: Path) -> object:
    text = host.run(facts.script()).out
    dump = facts.read(text, host.target.name)
    return dump.facts_at(0), cluster.observe("auto", dump)


def sees_files(host: Connection, here: Path) -> object:
    return push.sync_states(
        host, str(here / ".labctl" / host.target.name), {"workloads": manifest.scan(here / "runs" / RUN)}
    )


def pushes(host: Connection, here: Path) -> object:
    return push.push(host, str(here / ".labctl" / host.target.name), {"workloads": manifest.scan(here / "runs" / RUN)})


def fetches_what_is_left(host: Connection, here: Path) -> None:
    artifacts.fetch_left(host, str(here / ".labctl" / host.target.name), here, (Secret("hf_secret"),), lambda _: None)


def pulls(host: Connection, here: Path) -> object:
    return pull.pull(host, str(here / ".labctl" / host.target.name / OUTPUTS / RUN), here / "runs" / RUN)


def sees_an_image(host: Connection, here: Path) -> object:
    return remote.image_state(host, "labctl/cpu") if isinstance(host, Liar) else None


def asks_for_a_size(host: Connection, here: Path) -> object:
    return remote.size(host, "image.tar") if isinstance(host, Liar) else None


def relays(host: Connection, here: Path) -> None:
    if isinstance(host, Liar):
        remote.relay(host, "image.tar", 100, ("true",), Progress("image", 100, 0, lambda _: None))


QUESTIONS = (
    collects_facts, sees_files, pushes, fetches_what_is_left, pulls, sees_an_image, asks_for_a_size, relays
)  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=list(ANSWERS))
def test_a_malformed_answer_is_an_error_of_that_host_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: Callable[[Connection, Path], object], answer: bytes
) -> None:
    monkeypatch.setattr(pull, "MOST_MEMBERS", 1000)
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
    from labctl.hosts import ssh

    monkeypatch.setattr(ssh, "LARGEST_ANSWER", 1 << 20)
    with pytest.raises(HostError, match="answered with more than 1 MiB"):
        ssh.LocalConnection().run("yes", timeout=60)
    answer = ssh.LocalConnection().run("yes | head -c 1000000; yes | head -c 3000000 >&2", timeout=60)
    assert len(answer.out) == 1_000_000
