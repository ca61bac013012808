"""Validation of a hub's answers, whose words become paths in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.hub.client import RemoteFile, Repository, impossible

REVISION, SMALL, LARGE = "0a" * 20, "1b" * 20, "2c" * 32


def answer(file: RemoteFile, revision: str = REVISION) -> Repository:
    """Return a repository of one file with this revision."""
    folder = Path("/cache/models--facebook--opt-350m")
    return Repository(kind="model", name="facebook/opt-350m", revision=revision, files=(file,), folder=folder)


@pytest.mark.parametrize(
    "file",
    [
        RemoteFile("config.json", 0, SMALL, large=False),
        RemoteFile("onnx/model of 1.5 B.bin", 1 << 40, LARGE, large=True),
    ],
)
def test_files_of_repositories_are_taken(file: RemoteFile) -> None:
    """Check well-formed files: impossible() returns ""."""
    assert impossible(answer(file)) == ""


@pytest.mark.parametrize("path", ["", "../x", "a/../../x", "/etc/passwd", "a\0b", "\x1b]0;a title\x07", "a\nb"])
def test_a_name_that_is_none_of_a_repository_is_refused(path: str) -> None:
    """Check unsafe or unprintable paths: impossible() returns a printable reason."""
    why = impossible(answer(RemoteFile(path, 1, SMALL, large=False)))
    assert why.startswith("a file that cannot be in a repository: ")
    assert why.isprintable()


@pytest.mark.parametrize(
    ("blob", "large"), [("", False), (SMALL, True), (LARGE, False), ("/home/me/thesis", True), ("../" * 13, True)]
)
def test_a_hash_that_is_none_is_refused(blob: str, *, large: bool) -> None:
    """Check a hash of wrong form or length: impossible() returns "an invalid hash or size of a.bin: ..."."""
    assert impossible(answer(RemoteFile("a.bin", 1, blob, large=large))).startswith(
        "an invalid hash or size of a.bin: "
    )


def test_a_size_below_zero_is_refused() -> None:
    """Check a file of size -1: impossible() returns a reason that ends with it."""
    assert impossible(answer(RemoteFile("a.bin", -1, LARGE, large=True))).endswith(", -1")


@pytest.mark.parametrize("revision", ["", "main", "../../..", REVISION.upper(), f"{REVISION}\n"])
def test_a_revision_that_is_none_is_refused(revision: str) -> None:
    """Check a revision that is no 40-digit hash: impossible() returns "an invalid revision: ..."."""
    assert impossible(answer(RemoteFile("a.bin", 1, LARGE, large=True), revision)).startswith("an invalid revision: ")
