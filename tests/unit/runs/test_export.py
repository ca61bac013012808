"""A run for TensorBoard and for CI servers, parsed by an independent reader."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support import records as support

from labctl.model import CriterionResult, Result
from labctl.records.metrics import Sample
from labctl.runs import compare
from labctl.runs.export import junit, points, tensorboard

RESULT = Result(
    run_id="20261125-203600-opt-tiny-0d07",
    workload="opt-tiny",
    launcher="deepspeed",
    lab="demo",
    verdict="PASS",
    cause=None,
    message="All criteria met.",
    exit_code=0,
    seconds=23.4,
    started="2026-11-25T20:36:15+00:00",
    metrics={"loss": {"first": 8.0, "last": 7.5}},
    checks=(CriterionResult(criterion="loss <= 8", value=7.5, passed=True),),
)
BEGAN = 1795638975.0


def sample(step: int | None, seconds: float | None, value: float | None, metric: str = "loss") -> Sample:
    """Return a sample of this metric."""
    return Sample(metric=metric, step=step, seconds=seconds, value=value)


def crc32c(data: bytes) -> int:
    """Compute CRC-32C bit by bit, as RFC 3720 defines it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    """Return the masked CRC-32C of a TFRecord."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def records(content: bytes) -> Iterator[bytes]:
    """Read the records of a TFRecord file; check their checksums."""
    while content:
        length, of_length = struct.unpack("<QI", content[:12])
        data, (of_data,) = content[12 : 12 + length], struct.unpack("<I", content[12 + length : 16 + length])
        assert (of_length, of_data) == (masked(content[:8]), masked(data))
        yield data
        content = content[16 + length :]


def varint(data: bytes) -> tuple[int, bytes]:
    """Decode the varint at the start of protobuf data; return it and the rest."""
    value = shift = 0
    for at, byte in enumerate(data):
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, data[at + 1 :]
    raise AssertionError(data)


def fields(data: bytes) -> dict[int, int | float | bytes]:
    """Parse the fields of a protocol buffers message, each at most once."""
    by_number: dict[int, int | float | bytes] = {}
    while data:
        key, data = varint(data)
        kind = key & 7
        if kind == 0:
            by_number[key >> 3], data = varint(data)
        elif kind == 2:
            length, data = varint(data)
            by_number[key >> 3], data = data[:length], data[length:]
        else:
            size, code = {1: (8, "<d"), 5: (4, "<f")}[kind]
            (by_number[key >> 3],), data = struct.unpack(code, data[:size]), data[size:]
    return by_number


def message(value: int | float | bytes) -> dict[int, int | float | bytes]:
    """Parse a nested message; fail if the value is not bytes."""
    assert isinstance(value, bytes)
    return fields(value)


def test_the_checksum_is_crc32c() -> None:
    """Compute CRC-32C of the standard's test text: the known value, and export's mask of it."""
    assert crc32c(b"123456789") == 0xE3069283
    assert tensorboard._masked(b"123456789") == struct.pack("<I", masked(b"123456789"))


def test_an_event_file_has_every_sample_with_its_step_and_time(tmp_path: Path) -> None:
    """Write an event file: each sample with step, time and value; NaN for None, infinity beyond float32."""
    samples = (
        sample(1, 2.5, 8.0),
        sample(300, 4.5, None),
        sample(70_000, 5.0, 1e300),
        sample(None, None, 24.8, "throughput"),
    )
    path = tensorboard.event_file(tmp_path, RESULT, samples, {})
    assert path.parent.name == RESULT.run_id
    assert ".tfevents." in path.name
    first, *events = map(fields, records(path.read_bytes()))
    assert first == {1: BEGAN, 3: b"brain.Event:2"}
    values = [message(message(event[5])[1]) for event in events]
    assert [value[1] for value in values] == [b"loss", b"loss", b"loss", b"throughput"]
    assert [event[2] for event in events] == [1, 300, 70_000, 0]
    assert [event[1] for event in events] == [BEGAN + 2.5, BEGAN + 4.5, BEGAN + 5, BEGAN]
    numbers = [float(value[2]) for value in values]
    assert math.isnan(numbers[1])
    assert [numbers[0], numbers[2], numbers[3]] == [8.0, math.inf, pytest.approx(24.8)]


def test_an_event_file_begins_with_the_hyperparameters_of_the_run(tmp_path: Path) -> None:
    """Export a record: the plugin hparams gets numbers as numbers, texts as texts, and no secret."""
    arguments = ("--steps", "40", "--model", "opt-tiny", "--api-key", "hidden")
    support.write(tmp_path, RESULT.run_id, arguments=arguments, losses=[8.0])
    parameters = points.parameters(compare.read(tmp_path, RESULT))
    path = tensorboard.event_file(tmp_path / "tb", RESULT, points.samples(tmp_path, RESULT.run_id), parameters)
    _, event, *rest = map(fields, records(path.read_bytes()))
    value = message(message(event[5])[1])
    assert (value[1], value[8], len(rest)) == (b"_hparams_/session_start_info", b"\x08\x01\x12\x02\x12\x00", 1)
    plugin = message(message(value[9])[1])
    assert plugin[1] == b"hparams"
    session = message(plugin[2])[3]
    assert isinstance(session, bytes)
    assert b"\n\x05steps\x12\t\x11" + struct.pack("<d", 40) in session
    assert b"\n\x05model\x12\n\x1a\x08opt-tiny" in session
    assert b"hidden" not in session


def test_a_second_export_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """Export twice: one file remains."""
    for _ in range(2):
        path = tensorboard.event_file(tmp_path, RESULT, [sample(1, 2.5, 8.0)], {})
    assert len(list(records(path.read_bytes()))) == 2
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [path]


def cases(result: Result) -> dict[str, tuple[str, str] | None]:
    """Return type and message of each case's failure or error in the JUnit report, or None; check its counts."""
    suite = ElementTree.fromstring(junit.junit_xml(result))[0]  # noqa: S314
    element_by_name = {case.get("name", ""): next(iter(case), None) for case in suite.iter("testcase")}
    assert suite.get("tests") == str(len(element_by_name))
    tags = [element.tag for element in element_by_name.values() if element is not None]
    assert (suite.get("failures"), suite.get("errors")) == (str(tags.count("failure")), str(tags.count("error")))
    return {
        name: None if element is None else (element.get("type", ""), element.get("message", ""))
        for name, element in element_by_name.items()
    }


def changed(**changes: object) -> Result:
    """Return RESULT with these fields replaced."""
    from msgspec.structs import replace

    return replace(RESULT, **changes)


def test_a_run_that_passed_is_cases_that_passed_and_its_metrics_are_properties() -> None:
    """Export a PASS as JUnit: cases without failure, metrics as properties."""
    assert cases(RESULT) == {"completes": None, "loss <= 8": None}
    assert '<property name="loss" value="7.5" />' in junit.junit_xml(RESULT)


def test_a_criterion_that_was_missed_is_a_failure_of_its_case() -> None:
    """Export a missed criterion as JUnit: its case is a failure."""
    checks = (CriterionResult(criterion="loss <= 7", value=7.5, passed=False),)
    failed = changed(verdict="FAIL", cause="criteria", checks=checks)
    assert cases(failed) == {"completes": None, "loss <= 7": ("criteria", "loss <= 7: was 7.5")}


def test_a_run_that_broke_is_an_error_whatever_it_wrote() -> None:
    """Export an ERROR as JUnit: the case `completes` is an error, without control characters."""
    broke = changed(verdict="ERROR", cause="rank-crashed", message="rank 1: \x1b[31m<&>\x00", checks=())
    assert cases(broke) == {"completes": ("rank-crashed", "rank 1: ?[31m<&>?")}
