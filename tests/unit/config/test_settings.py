from __future__ import annotations

import os
import re
import socket
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.config import dotenv, settings
from labctl.errors import ConfigError
from labctl.model import Secret

EXAMPLE = Path(__file__).parents[3] / "env.example"
HOME = {"HOME": "/home/someone"}


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """Return a Lab at tmp_path."""
    return Lab(tmp_path)


class Lab:
    """A lab directory, its environment and its flags."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def load(
        self, text: str = "", environ: dict[str, str] | None = None, flags: dict[str, str] | None = None
    ) -> settings.Settings:
        """Write .env and load the settings with this environment, HOME and flags."""
        (self.directory / ".env").write_text(text, encoding="utf-8")
        return settings.load(self.directory, HOME | (environ or {}), flags or {})

    def error(self, text: str = "", environ: dict[str, str] | None = None, flags: dict[str, str] | None = None) -> str:
        """Return "message | hint" of the ConfigError that loading raises; its exit code is 2."""
        with pytest.raises(ConfigError) as caught:
            self.load(text, environ, flags)
        assert caught.value.exit_code == 2
        return f"{caught.value.message} | {caught.value.hint}"


# --- order and origin ----------------------------------------------------------------------------------------


def test_defaults_without_a_file(tmp_path: Path) -> None:
    """Load without .env: every origin is "default", no environment and no warnings."""
    loaded = settings.load(tmp_path, HOME, {})
    assert loaded.text("LAB_NAME") == "lab"
    assert loaded.text("LAB_SHM_SIZE") == "8g"
    assert {loaded.origin(setting.key) for setting in settings.SETTINGS} == {"default"}
    assert (loaded.environment, loaded.secret_environment, loaded.warnings) == ((), (), ())


def test_each_source_wins_over_the_next(lab: Lab) -> None:
    """Set LAB_NODES in flag, environment and .env: the first counts, and origin names it."""
    text, environ, flags = "\n\nLAB_NODES=3", {"LAB_NODES": "4"}, {"LAB_NODES": "5"}
    for given_flags, given_environ, number, origin in [
        (flags, environ, 5, "flag"),
        ({}, environ, 4, "environment"),
        ({}, {}, 3, ".env:3"),
    ]:
        loaded = lab.load(text, given_environ, given_flags)
        assert (loaded.number("LAB_NODES"), loaded.origin("LAB_NODES")) == (number, origin)


def test_an_empty_value_is_not_set(lab: Lab) -> None:
    """Set keys to empty: the next source or the default counts."""
    loaded = lab.load("LAB_NAME=\nLAB_NODES=7", {"LAB_NODES": "", "HF_TOKEN": ""}, {"LAB_NODES": ""})
    assert (loaded.text("LAB_NAME"), loaded.origin("LAB_NAME")) == ("lab", "default")
    assert (loaded.number("LAB_NODES"), loaded.origin("LAB_NODES")) == (7, ".env:2")
    assert loaded.secret("HF_TOKEN") is None


def test_an_override_that_is_no_setting_is_said_by_its_option(lab: Lab) -> None:
    """Give an unknown --setting: the error begins with "--setting"."""
    assert lab.error(flags={"LAB_NOPE": "1"}).startswith("--setting: unknown key LAB_NOPE |")


def test_an_alias_is_its_key(lab: Lab) -> None:
    """Set aliases: the key has the value; the environment's alias goes before .env."""
    loaded = lab.load("DOCKER_SSH_PORT=5100\nhttp_proxy=http://p:1\nHTTP_PROXY=http://p:1")
    assert (loaded.number("LAB_SSH_PORT"), loaded.origin("LAB_SSH_PORT")) == (5100, ".env:1")
    assert loaded.text("HTTP_PROXY") == "http://p:1"
    assert lab.load("LAB_SSH_PORT=5100", {"DOCKER_SSH_PORT": "5200"}).number("LAB_SSH_PORT") == 5200


@pytest.mark.parametrize(
    ("key", "alias"),
    [("LAB_SSH_PORT", "DOCKER_SSH_PORT"), ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), ("HTTPS_PROXY", "https_proxy")],
)
def test_a_key_and_its_alias_must_agree(lab: Lab, key: str, alias: str) -> None:
    """Set key and alias to different values: ConfigError names both places, not the values."""
    assert lab.error(f"{key}=50001\n{alias}=50002").startswith(f".env:2: {alias}: differs from {key} (.env:1)")
    error = lab.error(flags={key: "50001", alias: "50002"})
    assert f"differs from {key}" in error
    assert "5000" not in error


def test_two_spellings_of_a_proxy_in_the_hosts_environment_are_no_ones_mistake(lab: Lab) -> None:
    """Set HTTP_PROXY and http_proxy differently in the environment: accepted; other aliases: ConfigError."""
    loaded = lab.load("", {"HTTP_PROXY": "http://p:1/", "http_proxy": "http://p:1"})
    assert loaded.text("HTTP_PROXY") == "http://p:1/"
    assert lab.error(environ={"LAB_SSH_PORT": "5001", "DOCKER_SSH_PORT": "5002"}).startswith("environment: DOCKER")


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("LAB_NODE=2", "did you mean LAB_NODES?"),
        ("lab_nodes=2", "did you mean LAB_NODES?"),
        ("LAB_WORKERS=2", "did you mean LAB_NODES?"),
        ("lab_workers=2", "did you mean LAB_NODES?"),
        ("LAB_GPUS=2", "did you mean LAB_DEVICES (which), or LAB_SLOTS (how many per node)?"),
        ("LAB_HOST=a", "did you mean LAB_HOSTS?"),
        ("NPROC_PER_NODE=2", "did you mean LAB_SLOTS?"),
        ("HF_TOKN=x", "did you mean HF_TOKEN?"),
        ("FOO=x", "env.example lists every key; LAB_ENV_FOO=... would hand FOO to workloads"),
    ],
)
def test_unknown_key_names_the_nearest(lab: Lab, line: str, hint: str) -> None:
    """Set an unknown key: ConfigError with line and the nearest key."""
    assert lab.error(f"\n\n\n{line}") == f".env:4: unknown key {line.partition('=')[0]} | {hint}"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("LAB_NAME=MyLab", "did you mean mylab?"),
        ("LAB_NAME=my_lab", "did you mean my-lab?"),
        ("LAB_NAME=-", "did you mean lab?"),
        ("LAB_PORTS=6006,8080:80", "separate by spaces: '6006 8080:80'"),
        ("LAB_PORTS='8080:80, 6006'", "separate by spaces: '8080:80 6006'"),
        ("LAB_PACKAGES=a,b", "spaces between packages and none within one, such as 'transformers>=4,<5 nltk'"),
        ("LAB_MOUNTS=$HOME/x:/x", "begin it with /, ~/ or ./"),
        ("HOST_CACHE_PATH=$HOME/cache", "begin it with / or ~/; `$` is not expanded"),
        (
            "LAB_SHM_SIZE=8 g",
            "write a size as LAB_SHM_SIZE=8g; other values with blanks must be quoted",
        ),
        ("LAB_SHM_SIZE='8 g'", "write it like 512m or 8g, without a blank"),
    ],
)
def test_what_people_type_first_gets_a_hint_of_what_to_type(lab: Lab, line: str, hint: str) -> None:
    """Set a value as in other tools: ConfigError whose hint says how it is written."""
    assert lab.error(line).partition(" | ")[2] == hint


def test_lone_prefix_is_no_key(lab: Lab) -> None:
    """Set LAB_ENV_ without a name: ConfigError."""
    assert lab.error("LAB_ENV_=x").startswith(".env:1: unknown key LAB_ENV_ |")


BAD = {
    "LAB_NAME": ["a;b", "Lab", "-lab", "lab-", "a_b", "a.b", "ä", "x" * 41, "a b"],
    "LAB_ACCELERATOR": ["gpu", "NVIDIA"],
    "LAB_NODES": ["0", "1001", "-1", "two", "2.0", "02", "٢", "9" * 5000],
    "LAB_SLOTS": ["0", "1025"],
    "LAB_IMAGE": ["-v", "a b", "x;y"],
    "LAB_BASE_IMAGE": ["--privileged"],
    "LAB_SSH_PORT": ["22", "65536", "ssh"],
    "LAB_MASTER_PORT": ["1023", "12345"],
    "LAB_PORTS": ["x", "0", "80", "65536", "1:2:3:4", "999.0.0.1:9000:9000", "6006 6006", "6006:0", "6006,6007"],
    "LAB_SSHD_LOG_LEVEL": ["loud", "verbose", "INFO -o X"],
    "LAB_SHM_SIZE": ["0", "8x", "eight", "8 g", "1.5g", "1k", "9" * 18 + "t"],
    "LAB_MEMORY": ["5m", "unlimited"],
    "LAB_MEMLOCK": ["-1", "8g"],
    "LAB_STACK": ["unlimited", "8m"],
    "LAB_NOFILE": ["unlimited", "-1"],
    "LAB_PIDS": ["0"],
    "LAB_PIP_INDEX_URL": ["pypi.org/simple", "-r x"],
    "LAB_PIP_EXTRA_INDEX_URL": ["https://a b"],
    "LAB_PIP_FIND_LINKS": ["wheels", "--pre"],
    "LAB_CA_CERTIFICATES": ["ca.pem"],
    "LAB_APT_MIRROR": ["mirror.example"],
    "LAB_TORCH_INDEX": ["cpu"],
    "HOST_CACHE_PATH": ["cache", "./cache", "~other/cache", "$HOME/x"],
    "HOST_REPO_PATH": ["repo"],
    "HOST_OPTIMUM_HABANA_PATH": ["optimum-habana"],
    "PROJECT_PATH": ["workspace", "/", "/a/../b", "/a b", "/a;b", "//a"],
    "HF_TOKEN": ["a b", "tökén"],
    "HTTP_PROXY": ["http://a b"],
    "NO_PROXY": ["a\nb"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_bad_values_say_where(lab: Lab, key: str, value: str) -> None:
    """Set invalid values in .env, environment and flag: ConfigError names source and key."""
    assert lab.error(f"\n{key}={dotenv.quote(value)}").startswith(f".env:2: {key}: ")
    assert lab.error(environ={key: value}).startswith(f"environment: {key}: ")
    assert lab.error(flags={key: value}).startswith(f"--setting {key}: ")


MOUNTED = ("HOST_CACHE_PATH", "HOST_REPO_PATH", "HOST_OPTIMUM_HABANA_PATH")
NEVER_MOUNTED = """
    / // /. /bin /sbin /lib /lib64 /usr /usr/bin /usr/lib/ /boot /boot/x /root
    /etc //etc /etc/ /etc/x /srv/../etc /home/someone/../../etc/cron.d /home /home/someone
    ~ ~/ ~/x/.. ~/.ssh ~/.ssh/x ~/.gnupg ~/.docker ~/.kube ~/.aws /home/other/.ssh
    /proc /proc/1/root /sys /sys/fs/cgroup /dev /dev/sda /dev/shm /var /var/run /run
    /run/x /var/run/x /var/run/docker.sock /run/containerd/containerd.sock /run/user/1000
    /run/user/1000/podman/podman.sock /srv/docker.sock /var/lib/docker /var/lib/docker/volumes
"""
MAY_BE_MOUNTED = """
    ~/.cache/labctl ~/x /root/x /home/me/x /var/lib/x /usr/local/share/data /srv /data /etcetera
    /dev/shm/x /run/user/1000/x /run/media /run/media/me/disk /var/run/media/x /mnt/docker /rooted
"""


@pytest.mark.parametrize("key", MOUNTED)
@pytest.mark.parametrize("value", NEVER_MOUNTED.split())
def test_what_is_the_hosts_own_is_not_mounted(lab: Lab, key: str, value: str) -> None:
    """Mount system paths, homes, keys or sockets: ConfigError, also with LAB_HOSTS.

    Containers could write keys, the system or the engine's data otherwise.
    """
    error = lab.error(f"{key}={value}")
    assert error.startswith(f".env:1: {key}: "), error
    assert " | name a directory" in error
    assert lab.error(f"{key}={value}\nLAB_HOSTS=hosts.txt").startswith(f".env:1: {key}: ")


@pytest.mark.parametrize("value", MAY_BE_MOUNTED.split())
def test_a_directory_of_ones_own_is_mounted(lab: Lab, value: str) -> None:
    """Mount directories of one's own: accepted."""
    for key in MOUNTED:
        assert lab.load(f"{key}={value}").text(key)


@pytest.mark.parametrize("target", ["/etc", "/", "home", "home/.ssh", "engine.sock", "holder"])
@pytest.mark.parametrize("way", ["link", "link-to-link", "up/../link"])
def test_a_link_mounts_no_more_than_its_target_may(lab: Lab, target: str, way: str) -> None:
    """Mount a link to a forbidden target: ConfigError; with LAB_HOSTS it is not followed."""
    (lab.directory / "home/.ssh").mkdir(parents=True)
    (lab.directory / "holder").mkdir()
    folder = os.open(lab.directory, os.O_PATH)
    for name in ("engine.sock", "holder/docker.sock"):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{folder}/{name}")
    os.close(folder)
    (lab.directory / "link").symlink_to(target)
    (lab.directory / "link-to-link").symlink_to("link")
    value = f"HOST_CACHE_PATH={lab.directory / way}"
    environ = {"HOME": str(lab.directory / "home")}
    assert lab.error(value, environ).startswith(".env:1: HOST_CACHE_PATH: ")
    # Where links of other hosts lead is not known here.
    assert lab.load(f"{value}\nLAB_HOSTS=hosts.txt", environ).text("HOST_CACHE_PATH")


@pytest.mark.parametrize(("name", "reason"), [("loop", "is a loop of links"), ("file", "is not a directory")])
def test_what_is_no_directory_is_not_mounted(lab: Lab, name: str, reason: str) -> None:
    """Mount a loop of links or a file: ConfigError with the reason."""
    (lab.directory / "loop").symlink_to("loop")
    (lab.directory / "file").touch()
    assert reason in lab.error(f"HOST_CACHE_PATH={lab.directory / name}")


def test_the_default_is_refused_where_it_is_a_link_out(lab: Lab) -> None:
    """Make ~/.cache/labctl a link to /etc: the default is refused."""
    (lab.directory / ".cache").mkdir()
    (lab.directory / ".cache/labctl").symlink_to("/etc")
    assert "HOST_CACHE_PATH" in lab.error(environ={"HOME": str(lab.directory)})


def test_a_bad_value_is_refused_even_where_it_is_overridden(lab: Lab) -> None:
    """Override an invalid value of .env: still ConfigError for its line."""
    assert lab.error("LAB_NODES=0", flags={"LAB_NODES": "3"}).startswith(".env:1: LAB_NODES: ")


def test_errors_name_the_key_as_it_was_written(lab: Lab) -> None:
    """Set an alias to an invalid value: the error names the alias."""
    assert lab.error("DOCKER_SSH_PORT=22").startswith(".env:1: DOCKER_SSH_PORT: must be a whole number from 1024")


def test_unknown_accelerator_names_the_known_and_the_nearest(lab: Lab) -> None:
    """Set a misspelt accelerator: ConfigError lists the known and the nearest."""
    assert lab.error("LAB_ACCELERATOR=nvdia") == (
        ".env:1: LAB_ACCELERATOR: unknown accelerator 'nvdia'; known are auto, cpu, nvidia, habana, intel"
        " | did you mean nvidia?"
    )


def test_ports_must_differ(lab: Lab) -> None:
    """Set two ports to the same number: ConfigError names both."""
    both = "LAB_SSH_PORT=5100\nDOCKER_MASTER_PORT=5100"
    assert lab.error(both).startswith(".env:2: DOCKER_MASTER_PORT: 5100 is also LAB_SSH_PORT (.env:1)")
    assert lab.error("LAB_SSH_PORT=29500").startswith(".env:1: LAB_SSH_PORT: 29500 is also LAB_MASTER_PORT (default)")


def test_a_file_that_everyone_may_write_is_refused(lab: Lab) -> None:
    """Load a .env that everyone may write: ConfigError with chmod."""
    lab.load("LAB_NODES=3")
    (lab.directory / ".env").chmod(0o666)
    with pytest.raises(ConfigError, match="everyone") as caught:
        settings.load(lab.directory, HOME, {})
    assert caught.value.hint == "chmod o-w .env"


def test_a_dangling_link_is_not_a_missing_file(tmp_path: Path) -> None:
    """Make .env a broken link: ConfigError, not the defaults."""
    (tmp_path / ".env").symlink_to("gone")
    with pytest.raises(ConfigError, match=r"\.env: cannot be read: No such file"):
        settings.load(tmp_path, HOME, {})


def test_unknown_keys_of_the_environment_are_warnings(lab: Lab) -> None:
    """Set unknown LAB_ keys in the environment: a warning each, with the nearest key."""
    loaded = lab.load(environ={"LAB_NODE": "7", "LABEL": "x", "PATH": "/bin", "LAB_": "x"})
    assert loaded.text("LAB_NODES") == ""
    assert [warning.split(",")[0] for warning in loaded.warnings] == [
        "environment: unknown key LAB_",
        "environment: unknown key LAB_NODE",
    ]
    assert "did you mean LAB_NODES?" in loaded.warnings[1]


def test_bytes_that_are_no_text_are_refused(lab: Lab) -> None:
    """Set an environment value that is not UTF-8: ConfigError."""
    assert lab.error(environ={"LAB_ENV_X": "a\udcff"}).startswith("environment: LAB_ENV_X: not UTF-8")


# --- values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "number"),
    [
        ("LAB_SHM_SIZE", "8g", 8 * 2**30),
        ("LAB_SHM_SIZE", "512MB", 512 * 2**20),
        ("LAB_MEMORY", "16GiB", 16 * 2**30),
        ("LAB_MEMORY", "8388608b", 2**23),
        ("LAB_MEMORY", "", 0),
        ("LAB_MEMLOCK", "unlimited", -1),
        ("LAB_MEMLOCK", "65536", 65536),
        ("LAB_SLOTS", "", 0),
        ("LAB_SLOTS", "1024", 1024),
        ("LAB_NODES", "1000", 1000),
    ],
)
def test_numbers(lab: Lab, key: str, value: str, number: int) -> None:
    """Load sizes and counts: number() in bytes, -1 for unlimited, 0 for unset."""
    assert lab.load(f"{key}={value}").number(key) == number


def test_paths_expand_the_home_and_are_shown_with_it(lab: Lab) -> None:
    """Load paths with ~: expanded in text(), shown with ~ in rows()."""
    loaded = lab.load("HOST_REPO_PATH=~/a$b")
    assert loaded.text("HOST_CACHE_PATH") == "/home/someone/.cache/labctl"
    assert loaded.text("HOST_REPO_PATH") == "/home/someone/a$b"
    assert ("HOST_CACHE_PATH", "~/.cache/labctl", "default") in loaded.rows()


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_value_reaches_the_workload_unchanged(value: str) -> None:
    """Hand any value on as LAB_ENV_X: it reaches environment or secret_environment unchanged."""
    with tempfile.TemporaryDirectory() as directory:
        loaded = Lab(Path(directory)).load(f"LAB_ENV_X={dotenv.quote(value)}")
    # A URL with a password is a secret.
    secrets = tuple((name, secret.reveal()) for name, secret in loaded.secret_environment)
    assert loaded.environment + secrets == (("X", value),)


def test_extra_environment_by_name_and_source(lab: Lab) -> None:
    """Set LAB_ENV_ keys in .env and environment: sorted by name, the environment's counts, empty ones stay."""
    loaded = lab.load("LAB_ENV_B=1\nLAB_ENV_A=\nLAB_ENV_a='x y'", {"LAB_ENV_B": "2"})
    assert loaded.environment == (("A", ""), ("B", "2"), ("a", "x y"))


def test_extra_environment_takes_names_of_variables_only(lab: Lab) -> None:
    """Set LAB_ENV_1A: ConfigError, as 1A is no variable name."""
    assert lab.error("LAB_ENV_1A=x").startswith(".env:1: LAB_ENV_1A: the part after LAB_ENV_ is not a variable name")


# --- secrets -------------------------------------------------------------------------------------------------

SECRET_NAMES = ["WANDB_API_KEY", "MY_TOKEN", "my_secret", "DB_PASSWORD", "DB_PASSWD", "AWS_CREDENTIALS", "SIGNING_KEY"]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_secret_extra_environment_is_kept_apart(lab: Lab, name: str) -> None:
    """Set LAB_ENV_ with a secret's name: it is in secret_environment alone, shown as "set"."""
    loaded = lab.load(f"LAB_ENV_{name}=CANARY\nLAB_ENV_KEYBOARD=us")
    assert loaded.environment == (("KEYBOARD", "us"),)
    ((key, secret),) = loaded.secret_environment
    assert (key, type(secret), secret.reveal()) == (name, Secret, "CANARY")
    assert (f"LAB_ENV_{name}", "set", ".env:1") in loaded.rows()


def test_a_password_in_a_url_makes_a_secret(lab: Lab) -> None:
    """Set LAB_ENV_ to a URL with a password: a secret, shown without the password."""
    loaded = lab.load("LAB_ENV_DATABASE_URL=postgres://ann:CANARY@db/x\nLAB_ENV_HUB=https://ann@hub.example:8443/x")
    assert loaded.environment == (("HUB", "https://ann@hub.example:8443/x"),)
    assert [(name, secret.reveal()) for name, secret in loaded.secret_environment] == [
        ("DATABASE_URL", "postgres://ann:CANARY@db/x")
    ]
    assert ("LAB_ENV_DATABASE_URL", "postgres://[REDACTED]@db/x", ".env:1") in loaded.rows()


def test_a_secret_is_never_shown(lab: Lab) -> None:
    """Load secrets: repr and rows never have them, reveal() does, text() raises ValueError."""
    loaded = lab.load("HUGGING_FACE_HUB_TOKEN=CANARY\nHTTP_PROXY=http://u:CANARY@p:1\nLAB_ENV_API_KEY=CANARY")
    secret = loaded.secret("HF_TOKEN")
    assert secret is not None
    assert secret.reveal() == "CANARY"
    assert ("HF_TOKEN", "set", ".env:1") in loaded.rows()
    assert ("HF_TOKEN", "unset", "default") in lab.load().rows()
    assert "CANARY" not in repr(loaded) + repr(loaded.rows())
    with pytest.raises(ValueError, match="is a secret"):
        loaded.text("HF_TOKEN")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("http://user:CANARY@proxy:3128", "http://[REDACTED]@proxy:3128"),
        ("http://user:CAN/CANARY@CANARY@proxy:3128", "http://[REDACTED]@proxy:3128"),
        ("user:CANARY@proxy:3128", "[REDACTED]@proxy:3128"),
        ("http://proxy:3128", "http://proxy:3128"),
    ],
)
def test_passwords_in_urls_are_redacted_only_where_shown(lab: Lab, value: str, shown: str) -> None:
    """Set a proxy with a password: text() has it, rows() have [REDACTED]."""
    loaded = lab.load(f"https_proxy={value}")
    assert loaded.text("HTTPS_PROXY") == value
    assert ("HTTPS_PROXY", shown, ".env:1") in loaded.rows()


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN='CANARY x'",
        "HF_TOKEN=CANARY\nHUGGING_FACE_HUB_TOKEN=CANARY2",
        "HTTP_PROXY='http://u:CANARY @p'",
        "LAB_PIP_INDEX_URL=u:CANARY@host",
        "LAB_ENV_1_TOKEN=CANARY",
        "HF_TOKENS=CANARY",
    ],
)
def test_errors_never_show_a_secret(lab: Lab, text: str) -> None:
    """Load faulty secrets: the error never has them."""
    assert "CANARY" not in lab.error(text)


# --- mounts ----------------------------------------------------------------------------------------------------


def test_mounts_are_read_with_their_place_and_mode(tmp_path: Path) -> None:
    """Load LAB_MOUNTS: source, target and read-only of each, ~ expanded."""
    loaded = settings.load(tmp_path, HOME, {"LAB_MOUNTS": "/data/imagenet:/data:ro  ~/models:/workspace/models"})
    assert [tuple(mount) for mount in loaded.mounts] == [
        ("/data/imagenet", "/data", True),
        ("/home/someone/models", "/workspace/models", False),
    ]


def test_a_relative_mount_is_taken_from_the_lab_directory(tmp_path: Path) -> None:
    """Load LAB_MOUNTS with ./ and ../, in a directory with a blank too: sources below and beside the directory."""
    directory = tmp_path / "my lab"
    directory.mkdir()
    loaded = settings.load(directory, HOME, {"LAB_MOUNTS": "./data:/data:ro ../models:/models"})
    assert [mount.source for mount in loaded.mounts] == [f"{directory}/data", f"{tmp_path}/models"]


def test_a_relative_mount_of_keys_is_refused(tmp_path: Path) -> None:
    """Load LAB_MOUNTS with a relative path to keys: ConfigError with the whole path."""
    with pytest.raises(ConfigError, match=f"would write {tmp_path}/.ssh"):
        settings.load(tmp_path, HOME, {"LAB_MOUNTS": "./.ssh:/data"})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("/data", "must be mounts"),
        ("data:/data", "must be mounts"),
        ("/data:data", "must be mounts"),
        ("/data:/data:rx", "must be mounts"),
        ("/data:/a/../etc", "must be mounts"),
        ("/a:/data /b:/data", "has two mounts at one place"),
        ("/etc:/data", "containers would write /etc, which is in /etc"),
        ("~:/data", "which is the home directory"),
        ("/var/run/docker.sock:/data", "engine's socket"),
        ("/data:/", "/ in the containers is the system's"),
        ("/data:/etc/lab", "is the system's"),
        ("/data://etc/lab", "/etc/lab in the containers is the system's"),
        ("/a:/data /b://data", "has two mounts at one place"),
        ("/data:/home", "is the system's"),
        ("/data:/workspace", "is labctl's own"),
        ("/data:/workspace/runs/x", "is labctl's own"),
        ("/data:/work/../usr", "must be mounts"),
    ],
)
def test_a_mount_that_takes_what_is_not_a_persons_is_refused(tmp_path: Path, value: str, reason: str) -> None:
    """Load invalid or dangerous LAB_MOUNTS: ConfigError with the reason."""
    with pytest.raises(ConfigError, match=re.escape(reason)):
        settings.load(tmp_path, HOME, {"LAB_MOUNTS": value})


def test_a_mount_that_holds_the_project_is_refused(tmp_path: Path) -> None:
    """Mount over a folder that holds PROJECT_PATH: ConfigError."""
    with pytest.raises(ConfigError, match="/srv in the containers holds /srv/lab"):
        settings.load(tmp_path, HOME, {"LAB_MOUNTS": "/data:/srv", "PROJECT_PATH": "/srv/lab"})


# --- env.example ---------------------------------------------------------------------------------------------


def example_entries() -> list[tuple[str, str]]:
    """Return each settings line of env.example, commented out or not, with the line above it."""
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    return [(above, line) for above, line in pairwise(lines) if re.match(r"#?[A-Z0-9_]+=", line)]


def test_example_and_table_agree() -> None:
    """Compare env.example with SETTINGS: same keys and defaults in order, each with a sentence above."""
    *table, (meaning, extra) = example_entries()
    shown = {"LAB_NAME"}
    assert [line for _, line in table] == [
        f"{'' if setting.key in shown else '#'}{setting.key}={setting.default}" for setting in settings.SETTINGS
    ]
    assert all(re.fullmatch(r"# \S.*\.", above) for above, _ in table)
    assert meaning.startswith("# LAB_ENV_<NAME>=value ")
    assert extra == "#LAB_ENV_NCCL_DEBUG=INFO"


def test_every_accelerator_and_every_alias_is_documented() -> None:
    """Read env.example: every accelerator and alias is named in its comment."""
    meanings = {line.lstrip("#").partition("=")[0]: above for above, line in example_entries()}
    names = ", ".join(settings.accelerators_known())
    assert meanings["LAB_ACCELERATOR"] == f"# One of {names}; auto takes what it finds."
    for setting in settings.SETTINGS:
        for alias in setting.aliases:
            assert f"(also {alias})" in meanings[setting.key]


@pytest.mark.parametrize("uncommented", [False, True])
def test_example_loads_as_the_defaults(lab: Lab, uncommented: bool) -> None:
    """Load env.example, as it is or uncommented: all values are the defaults."""
    text = EXAMPLE.read_text(encoding="utf-8")
    loaded = lab.load(re.sub(r"(?m)^#(?=[A-Z_]+=)", "", text) if uncommented else text)
    defaults = settings.load(lab.directory / "nowhere", HOME, {})
    assert [row[:2] for row in loaded.rows() if not row[0].startswith("LAB_ENV_")] == [
        row[:2] for row in defaults.rows()
    ]
    assert loaded.environment == ((("NCCL_DEBUG", "INFO"),) if uncommented else ())


def test_ports_are_on_loopback_unless_an_address_is_asked_for() -> None:
    """Split LAB_PORTS: 127.0.0.1 unless an address is given."""
    published = settings.split_ports("6006 8080:80 0.0.0.0:9000:9001")
    assert published == (("127.0.0.1", 6006, 6006), ("127.0.0.1", 8080, 80), ("0.0.0.0", 9000, 9001))  # noqa: S104
