"""A run's samples and hyperparameters as an event file, which TensorBoard reads."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from labctl.model import Result
from labctl.records.metrics import Sample
from labctl.runs.export import points
from labctl.system import files

SESSION = "_hparams_/session_start_info"
"""Tag of hyperparameters for TensorBoard."""
# The Castagnoli polynomial, reflected.
_CRC32C = 0x82F63B78
# Wire types of protocol buffers.
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5


def event_file(directory: Path, result: Result, samples: Iterable[Sample], parameters: Mapping[str, str]) -> Path:
    """Write samples, and hyperparameters if any, as a TensorBoard event file of a run below a log directory.

    Return its path. The file is a TFRecord of ``tensorflow.Event`` messages.
    HostError if it cannot be written.
    """
    began = points.began(result)
    path = directory / result.run_id / f"events.out.tfevents.{began:.0f}.labctl"
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            stream.writelines(map(_record, _events(result.run_id, began, samples, parameters)))
    return path


def _events(run_id: str, began: float, samples: Iterable[Sample], parameters: Mapping[str, str]) -> Iterator[bytes]:
    """Yield encoded events: file version, hyperparameters if any, then one per sample."""
    yield _double(1, began) + _bytes(3, b"brain.Event:2")
    if parameters:
        yield _double(1, began) + _bytes(5, _bytes(1, _hyperparameters(run_id, began, parameters)))
    for step, sample in points.stepped(samples):
        when = _double(1, began + (sample.seconds or 0))
        # ``Summary {repeated Value value = 1}``, ``Value {string tag = 1; float simple_value = 2}``
        value = _bytes(1, sample.metric.encode()) + _float(2, sample.number)
        yield when + _varint(2, step) + _bytes(5, _bytes(1, value))


def _hyperparameters(run_id: str, began: float, parameters: Mapping[str, str]) -> bytes:
    """Encode the start of a session of TensorBoard's plugin hparams, as a value of a Summary with an empty tensor."""
    session = b"".join(_bytes(1, _parameter(name, text)) for name, text in parameters.items())
    session += _bytes(4, run_id.encode()) + _double(5, began)
    plugin = _bytes(1, b"hparams") + _bytes(2, _bytes(3, session))
    shape = _bytes(2, b"")  # One dimension of size 0.
    tensor = _varint(1, 1) + _bytes(2, shape)
    return _bytes(1, SESSION.encode()) + _bytes(9, _bytes(1, plugin)) + _bytes(8, tensor)


def _parameter(name: str, text: str) -> bytes:
    """Encode a name with a text, or with the finite number that it is, as ``google.protobuf.Value``."""
    encoded = _bytes(3, text.encode())
    # Numbers as such can be sorted.
    with suppress(ValueError):
        if math.isfinite(number := float(text)):
            encoded = _double(2, number)
    return _bytes(1, name.encode()) + _bytes(2, encoded)


def _record(data: bytes) -> bytes:
    """Return data as a TFRecord: length, checksum of it, data, checksum of it."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    """Return the masked CRC32C of data, as TFRecord stores it."""
    crc, table = 0xFFFFFFFF, _table()
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _table() -> tuple[int, ...]:
    """Return the lookup table of CRC32C, computed once."""

    def entry(value: int) -> int:
        """Return the CRC of one byte."""
        for _ in range(8):
            value = value >> 1 ^ (_CRC32C if value & 1 else 0)
        return value

    return tuple(map(entry, range(256)))


def _number(value: int) -> bytes:
    """Encode an integer as varint."""
    low = bytearray()
    while value > 0x7F:
        low.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*low, value))


def _varint(field: int, value: int) -> bytes:
    """Encode a protobuf field with an integer."""
    return _number(field << 3 | _VARINT) + _number(value)


def _double(field: int, value: float) -> bytes:
    """Encode a protobuf field with a 64-bit float."""
    return _number(field << 3 | _DOUBLE) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    """Encode a protobuf field with a 32-bit float; too large values become infinity."""
    try:
        return _number(field << 3 | _FLOAT) + struct.pack("<f", value)
    except OverflowError:
        return _float(field, math.copysign(math.inf, value))


def _bytes(field: int, value: bytes) -> bytes:
    """Encode a protobuf field with bytes and their length."""
    return _number(field << 3 | _BYTES) + _number(len(value)) + value
