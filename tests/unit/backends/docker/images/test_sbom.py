from __future__ import annotations

import json
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from labctl.backends.docker.daemon import DockerEngine
from labctl.backends.docker.images import sbom
from labctl.errors import HostError
from labctl.system import process
from labctl.system.process import CompletedProcess

INSTALLED = """\
deb\tdebian\tlibstdc++6\t12.2.0-14+deb12u1
pypi\t\tPyYAML\t6.0.3
pypi\t\ttorch\t2.13.0+cpu
pypi\t\ttorch\t2.13.0+cpu
rpm\trhel\tbash\t5.1.8-9.el9
"""


def test_packages_are_named_as_vulnerability_databases_know_them() -> None:
    """bill() gives package URLs for Debian, PyPI and RPM, once each, and is valid CycloneDX 1.5."""
    document = sbom.bill("labctl/cpu", "sha256:1111", INSTALLED)
    assert [component["purl"] for component in document["components"]] == [
        "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1",
        "pkg:pypi/pyyaml@6.0.3",
        "pkg:pypi/torch@2.13.0%2Bcpu",
        "pkg:rpm/rhel/bash@5.1.8-9.el9",
    ]
    assert JsonStrictValidator(SchemaVersion.V1_5).validate_str(json.dumps(document)) is None


@pytest.mark.parametrize("line", ["deb\tdebian\tfoo", "Segmentation fault", "deb\tdebian\tfoo\t1\t2\x1b[2J"])
def test_what_is_no_list_of_packages_is_an_error_that_shows_it(line: str) -> None:
    """A line that is no package raises HostError that shows it in ASCII."""
    with pytest.raises(HostError, match="labctl/cpu") as raised:
        sbom.bill("labctl/cpu", "sha256:1111", INSTALLED + line)
    assert ascii(line) in raised.value.message


def test_a_container_that_does_not_end_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If `docker run` takes too long, write() raises HostError and removes the container by name."""
    calls: list[tuple[str, ...]] = []

    def run(argv: tuple[str, ...], **_: object) -> CompletedProcess:
        """Record the command; raise HostError for `run`."""
        calls.append(argv)
        if "run" in argv:
            raise HostError("docker run took too long")
        return CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(process, "run", run)
    monkeypatch.setattr(DockerEngine, "image_id", lambda *_: "sha256:1111")
    with pytest.raises(HostError, match="too long"):
        sbom.write("labctl/cpu", tmp_path / "sbom.json")
    started, removed = calls
    assert removed[-3:] == ("rm", "--force", started[started.index("--name") + 1])


def test_the_versions_of_an_image_are_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """versions() lists an image's packages once, keeps them in a file, and asks again for another image."""
    calls: list[tuple[str, ...]] = []

    def run(argv: tuple[str, ...], **_: object) -> CompletedProcess:
        """Record the command; return the planted list of packages."""
        calls.append(argv)
        return CompletedProcess(argv, 0, INSTALLED, "")

    monkeypatch.setattr(process, "run", run)
    versions = [sbom.versions(DockerEngine(), "sha256:1111", tmp_path / "packages") for _ in range(2)]
    assert versions[0] == versions[1] == {
        "PyYAML": "6.0.3", "deb/libstdc++6": "12.2.0-14+deb12u1", "rpm/bash": "5.1.8-9.el9", "torch": "2.13.0+cpu",
    }  # fmt: skip
    assert len(calls) == 1
    sbom.versions(DockerEngine(), "sha256:2222", tmp_path / "packages")
    assert len(calls) == 2
