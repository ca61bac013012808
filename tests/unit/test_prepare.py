from __future__ import annotations

from pathlib import Path

from builders import lab

from labctl import prepare, render
from labctl.model import Secret


def secrets_of(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (directory / ".lab/nodes/worker-1/secrets").iterdir()}


def test_a_secret_is_a_private_file_of_every_node(tmp_path: Path) -> None:
    prepare.write_secrets(lab(directory=tmp_path, secrets=(("hf_token", Secret("first")),)))
    assert secrets_of(tmp_path) == {"hf_token": "first"}
    assert (tmp_path / ".lab/nodes/worker-0/secrets/hf_token").stat().st_mode & 0o777 == 0o600


def test_a_secret_that_is_not_set_any_more_is_removed(tmp_path: Path) -> None:
    prepare.write_secrets(lab(directory=tmp_path, secrets=(("hf_token", Secret("a")), ("environment", Secret("b")))))
    prepare.write_secrets(lab(directory=tmp_path, secrets=(("environment", Secret("b")),)))
    assert secrets_of(tmp_path) == {"environment": "b"}


def test_a_changed_secret_renews_the_containers_and_is_not_in_the_text() -> None:
    before, after = (
        render.render_node(one, one.nodes[0]).content
        for one in (lab(secrets=(("hf_token", Secret(value)),)) for value in ("CANARY-1", "CANARY-2"))
    )
    assert render.fingerprint(before) != render.fingerprint(after)
    assert "CANARY" not in before + after
