"""A bundle's cache onto hosts: what they lack of it, which is theirs only once it is whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from labctl.bundle.sealed import Bundle, Member
from labctl.connection import Connection
from labctl.model import Event
from labctl.packing import END, padding
from labctl.progress import Progress
from labctl.settings import Settings
from labctl.shipping import Failures
from labctl.shipping.archive import ArchiveStream, Range, member_header, report
from labctl.shipping.delivery import Emit
from labctl.shipping.host import ASKING, MOVING, failed
from labctl.side_by_side import attempt

SCRIPT = Path(__file__).with_name("cache.sh").read_text(encoding="utf-8")


def cache(bundle: Bundle, found: Settings, hosts: Mapping[str, Connection], emit: Emit) -> Failures:
    """Bring the bundle's cache to hosts, side by side; returns why it is not on which of them."""
    members = bundle.below("cache")
    if not members:
        return {}
    folder = place(found)

    def bring(connection: Connection) -> None:
        listed = connection.run(SCRIPT, folder, "list", timeout=ASKING, check=False)
        if listed.code != 0:
            raise failed(connection, f"cannot use its cache {folder}", listed.err, "ls -ld ~/.cache/labctl; df -h")
        there = {line.removeprefix("./") for line in listed.out.splitlines()}
        lacking = {name: member for name, member in members.items() if name not in there}
        if lacking:
            unpack(connection, folder, cargo(bundle, lacking), emit)

    return attempt(bring, hosts)[1]


def place(found: Settings) -> str:
    """HOST_CACHE_PATH as a host understands it: relative to the person's home there, where it is below it here."""
    path = Path(found.text("HOST_CACHE_PATH"))
    return str(path.relative_to(found.home)) if path.is_relative_to(found.home) else str(path)


def cargo(bundle: Bundle, members: Mapping[str, Member]) -> ArchiveStream:
    """A tar archive of these members."""
    parts: list[bytes | Range] = []
    for name, member in members.items():
        parts.append(member_header(name, member.size, member.mode, member.target))
        if not member.target:
            parts += [Range(member.offset, member.size), padding(member.size)]
    return ArchiveStream(path=bundle.path, parts=(*parts, END))


def unpack(connection: Connection, folder: str, cargo: ArchiveStream, emit: Emit) -> None:
    """Send an archive into a folder. HostError where it does not come whole."""
    host = connection.target.name

    def notice(text: str) -> None:
        emit(Event(kind="notice", text=text, node=host))

    progress = Progress(f"{host}: cache", cargo.size, 0, notice)
    chunks = report(cargo.chunks(), progress)
    done = connection.send(SCRIPT, folder, "unpack", chunks=chunks, timeout=MOVING, check=False)
    if done.code != 0:
        raise failed(connection, "the cache did not come whole", done.err, "df -h")
    progress.finish()
