"""The devcontainer.json that attaches VS Code: valid by the schema, and the user's own file is never overwritten."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from labctl import flows
from labctl.backends.docker.compose import devcontainer
from labctl.config.context import Context
from labctl.errors import ConfigError

# What github.com/devcontainers/spec, schemas/devContainer.base.schema.json, says of a container that compose makes
# (`composeContainer`) and of every container (`devContainerCommon`): no other key is allowed.
REQUIRED = {"dockerComposeFile", "service", "workspaceFolder"}
COMPOSE: dict[str, Any] = {
    "dockerComposeFile": (str, list), "service": str, "runServices": list, "workspaceFolder": str,
    "shutdownAction": {"none", "stopCompose"}, "overrideCommand": bool,
}  # fmt: skip
COMMON: dict[str, Any] = {
    "$schema": str, "name": str, "features": dict, "overrideFeatureInstallOrder": list, "secrets": dict,
    "forwardPorts": list, "portsAttributes": dict, "otherPortsAttributes": dict, "updateRemoteUserUID": bool,
    "containerEnv": dict, "containerUser": str, "mounts": list, "init": bool, "privileged": bool, "capAdd": list,
    "securityOpt": list, "remoteEnv": dict, "remoteUser": str, "initializeCommand": (str, list, dict),
    "onCreateCommand": (str, list, dict), "updateContentCommand": (str, list, dict),
    "postCreateCommand": (str, list, dict), "postStartCommand": (str, list, dict),
    "postAttachCommand": (str, list, dict), "waitFor": str, "userEnvProbe": str, "hostRequirements": dict,
    "customizations": dict,
}  # fmt: skip


def complaints(document: dict[str, Any]) -> list[str]:
    """List a devcontainer.json's violations of the schema, empty if it is valid."""
    properties = COMPOSE | COMMON
    wrong = [f"lacks {key}" for key in sorted(REQUIRED - document.keys())]
    for key, value in document.items():
        if key not in properties:
            wrong.append(f"knows no {key}")
        elif isinstance(properties[key], set):
            wrong += [] if value in properties[key] else [f"{key} may not be {value}"]
        elif not isinstance(value, properties[key]):
            wrong.append(f"{key} may not be a {type(value).__name__}")
    return wrong


def written(lab: str = "demo", project: str = "/workspace", program: str = "/opt/labctl") -> dict[str, Any]:
    """Render devcontainer.json for this lab; return it parsed."""
    document: dict[str, Any] = json.loads(devcontainer.render(lab, project, program).content)
    return document


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """Return the context of a lab directory with PROJECT_PATH=/home/me/project."""
    (tmp_path / ".env").write_text("LAB_NAME=demo\nPROJECT_PATH=/home/me/project\n")
    return Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={})


def test_it_is_what_the_schema_asks_for() -> None:
    """The rendered devcontainer.json has no violation of the schema."""
    assert complaints(written()) == []


@pytest.mark.parametrize("change", [{"service": None}, {"shutdownAction": "stopContainer"}, {"image": "debian"}])
def test_the_check_by_the_schema_can_fail(change: dict[str, Any]) -> None:
    """A missing service, a wrong shutdownAction or a key that is not allowed is one violation."""
    assert len(complaints({**written(), **change})) == 1


def test_it_names_the_rendered_file_and_service_of_the_launcher(context: Context) -> None:
    """The written file has the launcher's compose file, service and workspaceFolder from PROJECT_PATH."""
    answer = flows.devcontainer(context, "/opt/labctl")
    document = json.loads(Path(answer.file).read_text())
    compose = Path(answer.file).parent / document["dockerComposeFile"]
    assert compose.resolve() == context.directory / ".lab/nodes/worker-0/compose.yml"
    assert (document["service"], document["workspaceFolder"]) == ("launcher", "/home/me/project")


@pytest.mark.parametrize(("state", "ups"), [("true", 0), ("false", 1)], ids=["running", "not running"])
def test_a_lab_is_brought_up_only_where_it_does_not_run(tmp_path: Path, state: str, ups: int) -> None:
    """initializeCommand asks docker for the launcher, and calls `labctl up` only if it does not run."""
    programs = {"docker": f'echo "$*" >> {tmp_path}/asked; echo {state}', "my labctl": f'echo "$*" >> {tmp_path}/ups'}
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    command = written(program=str(tmp_path / "my labctl"))["initializeCommand"]
    subprocess.run(["sh", "-c", command], env={"PATH": f"{tmp_path}:/bin:/usr/bin"}, check=True)
    assert "labctl-demo-launcher-1" in (tmp_path / "asked").read_text()
    called = tmp_path / "ups"
    assert (called.read_text() if called.exists() else "") == "up\n" * ups


def test_what_labctl_wrote_is_written_anew_when_the_settings_change(context: Context) -> None:
    """A second call changes nothing; with another LAB_NAME the file is written again."""
    flows.devcontainer(context, "/opt/labctl")
    assert not flows.devcontainer(context, "/opt/labctl").changed
    (context.directory / ".env").write_text("LAB_NAME=other\n")
    answer = flows.devcontainer(context, "/opt/labctl")
    assert answer.changed
    assert json.loads(Path(answer.file).read_text())["name"] == "labctl other"


@pytest.mark.parametrize("own", ['{"image": "debian"}', "// mine\n{}", "[]", "with a line of mine"])
def test_a_persons_own_file_is_left_alone_unless_forced(context: Context, own: str) -> None:
    """A file of a user's own, or one edited, raises ConfigError and stays; with force it is overwritten."""
    path = context.directory / devcontainer.PATH
    if own.startswith("with"):
        flows.devcontainer(context, "/opt/labctl")
        own = path.read_text().replace('"/home/me/project"', '"/elsewhere"')
    path.parent.mkdir(exist_ok=True)
    path.write_text(own)
    with pytest.raises(ConfigError, match=r"devcontainer\.json was not written by labctl, or was changed") as caught:
        flows.devcontainer(context, "/opt/labctl")
    assert "--force" in caught.value.hint
    assert path.read_text() == own
    flows.devcontainer(context, "/opt/labctl", force=True)
    assert devcontainer.is_ours(path.read_text())


def test_a_directory_that_is_no_labs_gets_none(tmp_path: Path) -> None:
    """A directory without .env raises ConfigError and gets no file."""
    with pytest.raises(ConfigError, match=r"no \.env"):
        flows.devcontainer(Context(directory=tmp_path, environ={}, emit=lambda _: None, flags={}), "/opt/labctl")
    assert list(tmp_path.iterdir()) == []
