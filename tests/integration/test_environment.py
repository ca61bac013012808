"""Values of any form reach containers and ranks byte for byte; secrets reach only the ranks."""

from __future__ import annotations

import hashlib
import json
import os
import random
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.harness import Answer, Lab, wait_until

pytestmark = pytest.mark.docker

TOKEN = "hf_CanaryThatNobodyMaySee0123456789"  # noqa: S105 - nobody's
CONTROL = "/runs/"
"""Control word in the arguments of processes: a watcher that misses it sees nothing."""
PASSWORD = "p4ss %Canary"  # noqa: S105
DATABASE_URL = "postgresql://me:p4ss%20%25Canary@db.example/runs"
API_KEY = "canary of $WANDB 'with' \"odd\" \\ parts"
SECRETS = (TOKEN, API_KEY, DATABASE_URL, PASSWORD)
CHOSEN = {
    "EMPTY": "",
    "BLANKS": "  two  blanks each side  ",
    "SINGLE_QUOTES": "it's 'quoted'",
    "DOUBLE_QUOTES": 'say "so" and \\"so\\"',
    "DOLLARS": "$HOME ${PATH} $$ $(id) `id` ${UNSET:-default}",
    "BACKSLASHES": "C:\\new\\table \\\\ \\",
    "LINES": "first\nsecond\r\nthird\n",
    "TABS": "\tone\ttwo\t",
    "COMMENT": "value # not a comment",
    "YAML": "{a: [1, 2]} & *anchor !tag % @ | > - ? :",
    "BOOLEAN": "yes",
    "NUMBER": "0o17",
    "NON_ASCII": "grüße 漢字 🙂 \u00a0\u2028\u0085 e\u0301",
    "CONTROLS": "\x01\x1b[31m\x7f",
    "BYTE_ORDER_MARK": "\ufeffvalue",
    "SHELL": "; rm -rf /nonexistent & | > < * ? [a] ~ !",
    "TEN_THOUSAND": "0123456789" * 1000,
}
RUN = ("run", "environ", "--set", "tell=WANDB_API_KEY,DATABASE_URL")
LAUNCHERS = ("deepspeed", "deepspeed:openmpi", "mpirun", "torchrun")
ALPHABET = " \t\n\r'\"\\$`#{}()[]<>|&;*?!~%=,:@-_.aZ09\u00e9\u4e2d\U0001f600\u2029\x0b\x0c\x1f"


def odd_values() -> dict[str, str]:
    """Return ODD_* variables: the chosen values, and forty random ones of special characters."""
    draw = random.Random(2)  # noqa: S311 - the same values in every session
    drawn = {f"DRAWN_{index}": "".join(draw.choices(ALPHABET, k=draw.randint(1, 40))) for index in range(40)}
    return {f"ODD_{name}": value for name, value in {**CHOSEN, **drawn}.items()}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def variables(block: bytes) -> dict[str, str]:
    """Return name -> value of the output of `env -0`."""
    pairs = (entry.decode().partition("=") for entry in block.rstrip(b"\0").split(b"\0"))
    return {name: value for name, _, value in pairs}


def forms(secret: str) -> tuple[str, ...]:
    """Return a secret as it is, as in JSON, and between a shell's single quotes."""
    return secret, json.dumps(secret)[1:-1], secret.replace("'", "'\"'\"'")


def only_odd(values: dict[str, str]) -> dict[str, str]:
    """Return the variables that begin with ODD_."""
    return {name: value for name, value in values.items() if name.startswith("ODD_")}


@contextmanager
def watching_arguments(searched_for: tuple[str, ...]) -> Iterator[list[str]]:
    """Watch command lines of all processes on this machine; yield the growing list of those with a word."""
    lines: list[str] = []
    searched = [word.encode() for word in searched_for]
    done = threading.Event()

    def look() -> None:
        """Keep the command lines of all processes that contain a word, until the block ends."""
        while not done.wait(0.02):
            for process in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - a Path for each takes four times as long
                with suppress(OSError):
                    descriptor = os.open(f"/proc/{process}/cmdline", os.O_RDONLY)
                    line = os.read(descriptor, 1 << 17)
                    os.close(descriptor)
                    lines.extend(line.decode("utf-8", "replace") for word in searched if word in line)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lines
    finally:
        done.set()
        thread.join()


class SecretLab:
    """A lab with odd and secret values, up, with all output of labctl."""

    def __init__(self, lab: Lab) -> None:
        """Bring the lab up (`up --dry-run`, `render`, `up`) and keep the answers and command lines seen."""
        self.lab = lab
        self.answers: list[Answer] = []
        self.arguments: list[str] = []
        """Command lines seen on this machine during labctl's commands."""
        with self.watched():
            self.call("up", "--dry-run")
            self.call("render")
            self.call("up")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Add the command lines with a secret or the control word that are seen during the block."""
        with watching_arguments((TOKEN, API_KEY, DATABASE_URL, CONTROL)) as lines:
            yield
        self.arguments += lines

    def call(self, *arguments: str, code: int = 0) -> Answer:
        """Run labctl, keep and return its answer; require exit code ``code`` (any code for `doctor`)."""
        answer = self.lab.call(*arguments)
        self.answers.append(answer)
        if code:
            # `expect` would refuse a workload's traceback.
            assert answer.code == code, answer.err
            return answer
        return answer if arguments[0] == "doctor" else answer.expect(0)

    def run(self, launcher: str) -> str:
        """Run `environ` under this launcher; return the run's id."""
        return str(self.call(*RUN, "--json", "--launcher", launcher).json["run_id"])

    def crashed(self) -> str:
        """Run `environ` so that it crashes with secrets in its error; check that `show` redacts; return its id."""
        self.call(*RUN, "--set", "end=crash", code=4)
        (run_id,) = self.lab.run_ids()[-1:]
        assert "RuntimeError: refused: [REDACTED]" in self.call("show", run_id).out
        return run_id

    def timed_out(self) -> str:
        """Run `environ` into a limit of 10 s; return the run's id."""
        return str(self.call(*RUN, "--json", "--set", "end=hang", "--timeout", "10s", code=124).json["run_id"])

    def stopped(self) -> str:
        """Kill labctl during a run, then look at the run and stop it with other commands; return its id."""
        with self.lab.start(*RUN, "--set", "end=hang") as running:
            wait_until(lambda: "it goes on" in running.err, 120, "the run is under way")
            (run_id,) = self.lab.run_ids()[-1:]
        self.answers.append(running.answer(60))
        self.call("runs")
        self.call("show", run_id)
        self.call("stop", run_id, "--grace", "0")
        return run_id

    def digests(self, launcher: str) -> dict[str, str]:
        """Run `environ` under this launcher; return name -> SHA-256 of rank 0's variables and its token file."""
        path = self.lab.path / "runs" / self.run(launcher) / "environ-0.json"
        digest_by_name: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        return digest_by_name


@pytest.fixture(scope="module")
def secret_lab(new_lab: Callable[[dict[str, str]], Lab], image: str) -> Iterator[SecretLab]:
    """Yield a lab of one node, up, with a token, secret variables and variables with odd values."""
    extra = {f"LAB_ENV_{name}": value for name, value in odd_values().items()}
    lab = new_lab(
        {
            "LAB_NODES": "1",
            "HF_TOKEN": TOKEN,
            "LAB_ENV_WANDB_API_KEY": API_KEY,
            "LAB_ENV_DATABASE_URL": DATABASE_URL,
            **extra,
        }
    )
    yield SecretLab(lab)
    lab.destroy()


@pytest.fixture(scope="module")
def runs(secret_lab: SecretLab) -> list[str]:
    """Return ids of a crashed and a passed run, after all commands that can show them."""
    with secret_lab.watched():
        made = [secret_lab.crashed(), secret_lab.run("mpirun")]
        for arguments in (
            ("config",), ("config", "--json"), ("status",), ("status", "--json"), ("doctor",), ("doctor", "--json"),
            ("runs",), ("show",), ("logs",), ("up",), ("workloads",), ("down", "--dry-run"),
        ):  # fmt: skip
            secret_lab.call(*arguments)
    return made


@pytest.mark.parametrize("node", ["launcher", "worker-0"])
def test_a_container_has_every_value_byte_for_byte(secret_lab: SecretLab, node: str) -> None:
    """All ODD_* variables are unchanged in `docker inspect` and `env -0` of the container."""
    configured = dict(entry.split("=", 1) for entry in secret_lab.lab.containers()[node].attrs["Config"]["Env"])
    assert only_odd(configured) == odd_values()
    assert only_odd(variables(secret_lab.lab.inside_bytes(node, "env", "-0"))) == odd_values()


def test_a_session_over_ssh_has_every_value_byte_for_byte(secret_lab: SecretLab) -> None:
    """All ODD_* variables are unchanged in `ssh worker-0 env -0`."""
    answer = secret_lab.lab.call("exec", "--", "ssh", "worker-0", "env", "-0").expect(0)
    assert only_odd(variables(answer.stdout)) == odd_values()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_has_every_value_byte_for_byte_and_can_read_the_secrets(secret_lab: SecretLab, launcher: str) -> None:
    """Under each launcher a rank has all ODD_* variables, the API key and the token file."""
    digests = secret_lab.digests(launcher)
    assert only_odd(digests) == {name: digest(value) for name, value in odd_values().items()}
    assert digests["WANDB_API_KEY"] == digest(API_KEY)
    assert digests["the file at HF_TOKEN_PATH"] == digest(TOKEN)


def secrets_in(*texts: str) -> list[str]:
    """List the secrets that occur in any of these texts, in any form."""
    return [secret for secret in SECRETS if any(form in text for form in forms(secret) for text in texts)]


@pytest.mark.smoke
@pytest.mark.usefixtures("runs")
class TestNobodyElseSees:
    """A secret in all places where it might appear."""

    def test_what_labctl_says(self, secret_lab: SecretLab) -> None:
        """No stdout or stderr of labctl has a secret."""
        for answer in secret_lab.answers:
            assert secrets_in(answer.out, answer.err) == [], answer.command

    def test_the_records_of_runs(self, secret_lab: SecretLab, runs: list[str]) -> None:
        """The runs printed their secrets as [REDACTED], and no file of a record has one."""
        are_redacted(secret_lab, *runs)

    def test_files_but_the_private_ones(self, secret_lab: SecretLab) -> None:
        """Only files of mode 0600 in a `secrets` folder of mode 0700 have a secret."""
        paths = files_with_secrets(secret_lab.lab.path / ".lab", secret_lab.lab.path / "started")
        assert paths
        assert paths == [path for path in paths if path.parent.name == "secrets"]
        for path in paths:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    def test_docker(self, secret_lab: SecretLab, image: str) -> None:
        """No secret in inspect of image, containers and networks, image history, or container logs."""
        made_from = secret_lab.lab.engine.images.get(image)
        shown = [made_from.attrs, made_from.history()]
        shown += [item.attrs for item in (*secret_lab.lab.containers().values(), *secret_lab.lab.networks())]
        assert secrets_in(json.dumps(shown)) == []
        for container in secret_lab.lab.containers().values():
            assert secrets_in(container.logs().decode("utf-8", "replace")) == []

    def test_compose(self, secret_lab: SecretLab) -> None:
        """`docker compose config` of a node shows no secret."""
        for form in ("yaml", "json"):
            shown = subprocess.run(
                ["docker", "compose", "-f", ".lab/nodes/worker-0/compose.yml", "config", "--format", form],
                cwd=secret_lab.lab.path,
                capture_output=True,
                text=True,
                check=True,
            )
            assert secrets_in((shown.stdout + shown.stderr).replace("$$", "$")) == []

    def test_arguments_of_processes(self, secret_lab: SecretLab) -> None:
        """No command line seen during labctl's commands has a secret; the control word was seen."""
        assert any(CONTROL in line for line in secret_lab.arguments)
        assert secrets_in(*secret_lab.arguments) == []


def test_a_run_that_is_ended_records_no_secret(secret_lab: SecretLab) -> None:
    """After a timeout and a stop, no secret is in records, output of labctl, or command lines."""
    answers, commands = len(secret_lab.answers), len(secret_lab.arguments)
    with secret_lab.watched():
        are_redacted(secret_lab, secret_lab.timed_out(), secret_lab.stopped())
    assert (
        secrets_in(
            *secret_lab.arguments[commands:], *(answer.out + answer.err for answer in secret_lab.answers[answers:])
        )
        == []
    )


def are_redacted(secret_lab: SecretLab, *run_ids: str) -> None:
    """Assert that these runs printed their secrets as [REDACTED], and that no file of any run has one."""
    for run_id in run_ids:
        output = (secret_lab.lab.path / "runs" / run_id / "output.log").read_text(encoding="utf-8")
        assert "WANDB_API_KEY is [REDACTED]" in output
        assert "its password is [REDACTED]" in output
    assert files_with_secrets(secret_lab.lab.path / "runs") == []


def test_config_says_that_a_secret_is_set_and_no_more(secret_lab: SecretLab) -> None:
    """`config` shows `set` for the token and the API key, and .env as the origin."""
    rows = {row["key"]: row for row in secret_lab.lab.call("config", "--json").expect(0).json["settings"]}
    assert rows["HF_TOKEN"]["value"] == rows["LAB_ENV_WANDB_API_KEY"]["value"] == "set"
    assert rows["HF_TOKEN"]["origin"].startswith(".env:")


def test_secrets_are_in_the_environment_of_no_container(secret_lab: SecretLab) -> None:
    """`env -0` in each container has no WANDB_API_KEY."""
    for node in secret_lab.lab.containers():
        assert "WANDB_API_KEY" not in variables(secret_lab.lab.inside_bytes(node, "env", "-0"))


def files_with_secrets(*directories: Path) -> list[Path]:
    """List the files below these directories that contain a secret, in any form."""
    files = [path for directory in directories for path in directory.rglob("*") if path.is_file()]
    return [path for path in files if secrets_in(path.read_bytes().decode("utf-8", "replace"))]
