"""Export a run: TensorBoard event files, JUnit XML for CI servers."""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from msgspec import Struct

from labctl.model import Result
from labctl.records import store
from labctl.records.metrics import Sample
from labctl.records.verdict import final
from labctl.runs import compare, series
from labctl.runs.compare import RecordedRun
from labctl.system import files


class ExportedRun(Struct, frozen=True, kw_only=True):
    """A run, and the files that were written."""

    run_id: str
    files: tuple[str, ...]


DEEPSPEED = "deepspeed."
NAMED = ("launcher", "image")
"""Facts that are hyperparameters, beside arguments and DeepSpeed's keys."""
SESSION = "_hparams_/session_start_info"
"""Tag of hyperparameters for TensorBoard."""

# --- TensorBoard ---------------------------------------------------------------------------------------------

# The Castagnoli polynomial, reflected.
_CRC32C = 0x82F63B78
# Wire types of protocol buffers.
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5


def write(lab: Path, result: Result, *, tensorboard: Path | None, junit: Path | None) -> ExportedRun:
    """Write a run's TensorBoard event file, JUnit XML, or both, where a path is given; return absolute paths."""
    written = []
    if tensorboard:
        parameters = _parameters(compare.read(lab, result))
        written.append(event_file(tensorboard, result, series.read(lab, result.run_id), parameters))
    if junit:
        files.write(junit.absolute(), junit_xml(result), mode=0o644)
        written.append(junit)
    return ExportedRun(run_id=result.run_id, files=tuple(str(path.absolute()) for path in written))


def _parameters(run: RecordedRun) -> dict[str, str | float]:
    """Return the arguments, DeepSpeed keys, launcher, image and ranks of a run, those that it has, as hyperparameters.

    Numbers are numbers, which TensorBoard can sort.
    """
    texts = {
        name.removeprefix("--"): text
        for name, text in compare.redacted(run.facts).items()
        if name.startswith(("--", DEEPSPEED)) or name in NAMED
    }
    return {"ranks": run.result.world_size, **{name: _number_or_text(text) for name, text in texts.items()}}


def _number_or_text(text: str) -> str | float:
    """Return the finite number that a text is, else the text."""
    with suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    return text


def event_file(
    directory: Path, result: Result, samples: Iterable[Sample], parameters: Mapping[str, str | float] | None = None
) -> Path:
    """Write a run's samples, and its hyperparameters if any, as a TensorBoard event file below a log directory.

    Return its path. The file is a TFRecord of ``tensorflow.Event`` messages; nan stands for a sample without a value.
    HostError if it cannot be written.
    """
    began = _began(result)
    path = directory / result.run_id / f"events.out.tfevents.{began:.0f}.labctl"
    with files.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            stream.writelines(map(_record, _events(result.run_id, began, samples, parameters or {})))
    return path


def _began(result: Result) -> float:
    """Return a run's start in seconds since 1970; 0 if it is unknown."""
    start = store.start(result.run_id, result.started)
    return start.timestamp() if start else 0


def _events(
    run_id: str, began: float, samples: Iterable[Sample], parameters: Mapping[str, str | float]
) -> Iterator[bytes]:
    """Yield encoded events: file version, hyperparameters if any, then one per sample, nan if it has no value."""
    yield _double(1, began) + _bytes(3, b"brain.Event:2")
    if parameters:
        yield _double(1, began) + _bytes(5, _bytes(1, _hyperparameters(run_id, began, parameters)))
    places: Counter[str] = Counter()
    for sample in samples:
        name, when = sample.metric, _double(1, began + (sample.seconds or 0))
        step = _varint(2, places[name] if sample.step is None else sample.step)
        places[name] += 1
        # ``Summary {repeated Value value = 1}``, ``Value {string tag = 1; float simple_value = 2}``
        value = _bytes(1, name.encode()) + _float(2, math.nan if sample.value is None else sample.value)
        yield when + step + _bytes(5, _bytes(1, value))


def _hyperparameters(run_id: str, began: float, parameters: Mapping[str, str | float]) -> bytes:
    """Encode the start of a session of TensorBoard's plugin hparams, as a value of a Summary with an empty tensor."""
    session = b"".join(_bytes(1, _parameter(name, value)) for name, value in parameters.items())
    session += _bytes(4, run_id.encode()) + _double(5, began)
    plugin = _bytes(1, b"hparams") + _bytes(2, _bytes(3, session))
    shape = _bytes(2, b"")  # One dimension of size 0.
    tensor = _varint(1, 1) + _bytes(2, shape)
    return _bytes(1, SESSION.encode()) + _bytes(9, _bytes(1, plugin)) + _bytes(8, tensor)


def _parameter(name: str, value: str | float) -> bytes:
    """Encode a name with a number or a text, as ``google.protobuf.Value``."""
    encoded = _bytes(3, value.encode()) if isinstance(value, str) else _double(2, value)
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


# --- JUnit ---------------------------------------------------------------------------------------------------

# Characters that XML 1.0 cannot represent.
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(result: Result) -> str:
    """Render a result as JUnit XML: a test case for the run, one per criterion, metrics as properties."""
    missed = sum(not check.passed for check in result.checks)
    broke = result.verdict == "ERROR"
    root = Element("testsuites", name="labctl run")
    name = xml_text(result.workload)
    suite = SubElement(
        root,
        "testsuite",
        name=name,
        tests=str(1 + len(result.checks)),
        failures=str(missed),
        errors=str(int(broke)),
        time=str(result.seconds),
        timestamp=result.started,
    )
    identity = {"run": result.run_id, "lab": result.lab, "launcher": result.launcher}
    values = {name: (metric.get(final(metric)), metric.get("note", "")) for name, metric in result.metrics.items()}
    figures = {name: str(note if value is None else value) for name, (value, note) in values.items()}
    properties = SubElement(suite, "properties")
    for key, value in {**identity, **figures}.items():
        SubElement(properties, "property", name=xml_text(key), value=xml_text(value))
    ran = SubElement(suite, "testcase", classname=name, name="completes", time=str(result.seconds))
    if broke:
        SubElement(ran, "error", type=result.cause or "", message=xml_text(result.message))
    for check in result.checks:
        case = SubElement(suite, "testcase", classname=name, name=xml_text(check.criterion))
        if not check.passed:
            SubElement(case, "failure", type="criteria", message=xml_text(f"{check.criterion}: was {check.value}"))
    return xml_document(root)


def xml_text(text: str) -> str:
    """Replace characters that XML cannot represent by ``?``."""
    return _NOT_IN_XML.sub("?", text)


def xml_document(root: Element) -> str:
    """Return an element, which is indented in place, as the text of an XML document."""
    indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(root, encoding="unicode")}\n'
