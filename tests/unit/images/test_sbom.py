from __future__ import annotations

import json

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from labctl.images import sbom

INSTALLED = """\
deb\tdebian\tlibstdc++6\t12.2.0-14+deb12u1
pypi\t\tPyYAML\t6.0.3
pypi\t\ttorch\t2.13.0+cpu
pypi\t\ttorch\t2.13.0+cpu
rpm\trhel\tbash\t5.1.8-9.el9
"""


def test_packages_are_named_as_vulnerability_databases_know_them() -> None:
    document = sbom.bill("labctl/cpu", "sha256:1111", INSTALLED)
    assert [one["purl"] for one in document["components"]] == [
        "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1",
        "pkg:pypi/pyyaml@6.0.3",
        "pkg:pypi/torch@2.13.0%2Bcpu",
        "pkg:rpm/rhel/bash@5.1.8-9.el9",
    ]
    assert JsonStrictValidator(SchemaVersion.V1_5).validate_str(json.dumps(document)) is None
