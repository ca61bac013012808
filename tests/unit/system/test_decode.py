from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from labctl.system.decode import convert, decode

THREADS = """
import sys, threading, types
from labctl.system.decode import convert
STRUCTS = '''
from __future__ import annotations
from msgspec import Struct
class Inner(Struct):
    pairs: tuple[tuple[str, str | None], ...] = ()
class Outer(Struct):
    inner: Inner
    others: dict[str, Inner] = {}
'''
sys.setswitchinterval(1e-6)
for number in range(1000):
    module = sys.modules[f"structs{number}"] = types.ModuleType(f"structs{number}")
    exec(STRUCTS, module.__dict__)
    barrier = threading.Barrier(3)
    def work():
        barrier.wait()
        convert({"inner": {}}, module.Outer)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


class Place(Struct, frozen=True):
    path: Path
    size: int = 0


def test_a_struct_is_decoded_with_its_paths() -> None:
    """Decode and convert a struct: its path is a Path."""
    assert (
        decode('{"path": "/a", "size": 2}', Place) == convert({"path": "/a", "size": 2}, Place) == Place(Path("/a"), 2)
    )


@pytest.mark.parametrize("content", ["", "{", "[]", '{"size": 2}', '{"path": "/a", "size": "2"}'])
def test_another_document_is_an_error(content: str) -> None:
    """Decode other documents: ValueError, and ValidationError from convert."""
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
        decode(content, Place)
    with pytest.raises(msgspec.ValidationError):
        convert(content, Place)


def test_threads_may_decode_a_struct_for_the_first_time_at_once() -> None:
    """Decode new structs in three threads at once, a thousand times in a process: it ends with code 0."""
    subprocess.run([sys.executable, "-X", "faulthandler", "-c", THREADS], check=True, timeout=60)
