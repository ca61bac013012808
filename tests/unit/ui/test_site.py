"""Errors of requests, as pages and as JSON."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from labctl.errors import HostError
from labctl.ui import app
from labctl.ui.site import Site

AS_PERSON = {"accept": "text/html"}


@pytest.fixture
def client(site: Site) -> TestClient:
    """Return a client of a lab's pages that does not raise their bugs."""
    return TestClient(app.application(site), base_url="http://127.0.0.1", raise_server_exceptions=False)


def test_what_is_missing_is_404_and_a_host_that_fails_503(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for headers in (AS_PERSON, {}):
        assert client.get("/token/run/nothing", headers=headers).status_code == 404

    def fail(*_: object) -> None:
        raise HostError("h2 timed out", hint="labctl doctor")

    monkeypatch.setattr("labctl.records.store.find", fail)
    page = client.get("/token/run/any", headers=AS_PERSON)
    assert (page.status_code, "h2 timed out" in page.text, "labctl doctor" in page.text) == (503, True, True)
    answer = client.get("/token/run/any")
    assert answer.status_code == 503
    assert answer.json() == {"error": {"message": "h2 timed out", "hint": "labctl doctor"}}


def test_a_bug_has_a_page_that_says_where_its_traceback_is(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("<b>")

    monkeypatch.setattr("labctl.records.store.find", fail)
    page = client.get("/token/run/any", headers=AS_PERSON)
    assert page.status_code == 500
    assert "labctl failed: KeyError(&#39;&lt;b&gt;&#39;)" in page.text
    assert "traceback" in page.text
