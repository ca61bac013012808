"""A run's verdict as JUnit XML, for CI servers."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from labctl.model import Result
from labctl.records.verdict import final

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
