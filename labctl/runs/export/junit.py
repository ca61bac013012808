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
    root = Element("testsuites", name="labctl run")
    suite = SubElement(root, "testsuite", _counts(result))
    properties = SubElement(suite, "properties")
    for name, value in _properties(result).items():
        SubElement(properties, "property", name=xml_text(name), value=xml_text(value))
    classname = xml_text(result.workload)
    run = SubElement(suite, "testcase", classname=classname, name="completes", time=str(result.seconds))
    if result.verdict == "ERROR":
        SubElement(run, "error", type=result.cause or "", message=xml_text(result.message))
    for check in result.checks:
        case = SubElement(suite, "testcase", classname=classname, name=xml_text(check.criterion))
        if not check.passed:
            SubElement(case, "failure", type="criteria", message=xml_text(f"{check.criterion}: was {check.value}"))
    return xml_document(root)


def _counts(result: Result) -> dict[str, str]:
    """Return the attributes of the test suite: its name, its numbers of cases and failures, its time."""
    return {
        "name": xml_text(result.workload),
        "tests": str(1 + len(result.checks)),
        "failures": str(sum(not check.passed for check in result.checks)),
        "errors": str(int(result.verdict == "ERROR")),
        "time": str(result.seconds),
        "timestamp": result.started,
    }


def _properties(result: Result) -> dict[str, str]:
    """Return the run's identity and its metrics, each with its value or the note in place of one."""
    properties = {"run": result.run_id, "lab": result.lab, "launcher": result.launcher}
    for name, metric in result.metrics.items():
        value = metric.get(final(metric))
        properties[name] = str(metric.get("note", "") if value is None else value)
    return properties


def xml_text(text: str) -> str:
    """Replace characters that XML cannot represent by ``?``."""
    return _NOT_IN_XML.sub("?", text)


def xml_document(root: Element) -> str:
    """Return an element, which is indented in place, as the text of an XML document."""
    indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{tostring(root, encoding="unicode")}\n'
