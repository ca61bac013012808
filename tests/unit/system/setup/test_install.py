"""Plan of `labctl setup` for other hosts: facts in, text out, without Docker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from labctl.errors import HostError
from labctl.system.setup import apt, install
from labctl.system.setup.requirements import Facts, is_older

DEB822 = """\
Types: deb deb-src
# a comment
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: https://other.example/debian
Suites: bookworm
Components: main
Enabled: no
"""
THIRD_PARTIES = """\
deb [arch=amd64 signed-by=/usr/share/keyrings/vendor.gpg] https://user:secret@vendor.example/debian bookworm main
deb https://tools.example/apt bookworm main
deb https://download.example/linux/debian bookworm stable
deb cdrom:[Debian 12]/ bookworm main
# deb http://old.example/debian bookworm main
"""

READY = Facts(
    distribution="debian",
    codename="bookworm",
    sources=(*apt.parse_list(THIRD_PARTIES), *apt.parse_deb822(DEB822)),
    candidates={"docker.io": "20.10.24+dfsg1-1", "docker-compose": "1.29.2-3"},
    engine="26.1.5+dfsg1",
    running=True,
    denied=False,
    outsider="",
    command=True,
    buildx="0.13.1",
    compose="2.26.1",
    systemd=False,
    mtu=1400,
    daemon="/usr/sbin/dockerd",
    prefix=(),
)
BARE = replace(READY, engine="", running=False, command=False, buildx="", compose="")
TRIXIE = {
    "docker.io": "26.1.5+dfsg1-9",
    "docker-cli": "26.1.5+dfsg1-9",
    "docker-buildx": "0.13.1+ds1-3",
    "docker-compose": "2.26.1-4",
}


def test_nothing_missing() -> None:
    """Plan for a host that has everything: "nothing to do" with the three versions."""
    steps = install.plan(replace(READY, prefix=None, candidates={}))
    assert str(steps) == "nothing to do: Docker Engine 26.1.5+dfsg1, buildx 0.13.1, compose 2.26.1"


def test_debian_12_takes_docker_from_the_next_release() -> None:
    """Plan for Debian 12 without Docker: add trixie, pinned, as a source, install from it and start dockerd."""
    assert (
        str(install.plan(BARE))
        == """\
to make this host able to run a lab:
  1. keep everything but docker.io docker-cli docker-buildx docker-compose away from Debian trixie
     printf '%s\\n' 'Package: *' 'Pin: release n=trixie' 'Pin-Priority: 1' '' \
'Package: docker.io docker-cli docker-buildx docker-compose' 'Pin: release n=trixie' 'Pin-Priority: 990' \
| tee /etc/apt/preferences.d/labctl-next > /dev/null
  2. Debian bookworm's own packages are too old: add Debian trixie as a source
     printf '%s\\n' 'Types: deb' 'URIs: http://mirror.example/debian' 'Suites: trixie' 'Components: main' \
'Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg' \
| tee /etc/apt/sources.list.d/labctl-next.sources > /dev/null
  3. update the package lists
     apt-get update
  4. check that nothing else is upgraded or removed
     apt-get install --simulate --no-install-recommends docker.io docker-cli docker-buildx docker-compose
  5. install docker.io, docker-cli, docker-buildx, docker-compose
     env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends docker.io docker-cli \
docker-buildx docker-compose
  6. a place for Docker's log and pid
     mkdir --parents /var/lib/labctl
  7. start Docker (there is no service manager here) with the default route's MTU, 1400
     start-stop-daemon --start --oknodo --background --make-pidfile --pidfile /var/lib/labctl/dockerd.pid \
--output /var/lib/labctl/dockerd.log --exec /usr/sbin/dockerd -- --mtu 1400"""
    )


def test_debian_13_has_it_itself() -> None:
    """Plan for Debian 13 with systemd: simulate, install, enable the service."""
    steps = install.plan(replace(BARE, codename="trixie", candidates=TRIXIE, systemd=True))
    assert [step.argv[0] for step in steps.steps] == ["apt-get", "env", "systemctl"]
    assert steps.steps[1].argv[-4:] == ("docker.io", "docker-cli", "docker-buildx", "docker-compose")
    assert steps.steps[2].argv == ("systemctl", "enable", "--now", "docker")


def test_ubuntu_has_the_command_in_its_engine_and_its_own_name_for_compose() -> None:
    """Plan for Ubuntu: docker.io, docker-buildx and docker-compose-v2."""
    candidates = {
        "docker.io": "27.5.1-0ubuntu3",
        "docker-buildx": "0.20",
        "docker-compose-v2": "2.33",
        "docker-compose": "1.29",
    }
    steps = install.plan(replace(BARE, distribution="ubuntu", codename="noble", candidates=candidates, systemd=True))
    assert steps.steps[0].argv[-3:] == ("docker.io", "docker-buildx", "docker-compose-v2")


def test_only_compose_is_missing() -> None:
    """Plan without compose: only docker-compose is installed."""
    steps = install.plan(replace(READY, compose="", candidates=TRIXIE))
    assert [step.argv[-1] for step in steps.steps] == ["docker-compose", "docker-compose"]


def test_only_compose_is_missing_and_this_release_has_version_1() -> None:
    """Plan with compose 1 in Debian 12: the source of trixie, and docker-compose alone."""
    steps = install.plan(replace(READY, compose="1.29.2"))
    assert [step.argv[0] for step in steps.steps] == ["tee", "tee", "apt-get", "apt-get", "env"]
    assert steps.steps[-1].argv[-2:] == ("--no-install-recommends", "docker-compose")


def test_installed_but_not_running() -> None:
    """Plan for a stopped engine: start-stop-daemon, or systemctl with systemd."""
    assert [step.argv[0] for step in install.plan(replace(READY, running=False)).steps] == [
        "mkdir",
        "start-stop-daemon",
    ]
    assert [step.argv[0] for step in install.plan(replace(READY, running=False, systemd=True)).steps] == ["systemctl"]


def test_empty_package_lists_are_filled_before_anything_is_decided() -> None:
    """Plan with empty package lists: apt-get update alone, and the plan is unfinished."""
    steps = install.plan(replace(BARE, candidates={}))
    assert [step.argv for step in steps.steps] == [("apt-get", "update")]
    assert steps.unfinished


def test_sudo_is_put_before_every_command() -> None:
    """Plan with sudo: every command is run by `sudo -n`."""
    typed = install.plan(replace(BARE, prefix=("sudo", "-n"))).typed()
    assert all(line.startswith("sudo -n ") or "| sudo -n tee /etc/apt/" in line for line in typed)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (replace(BARE, distribution="fedora", codename=""), "fedora has no packages"),
        (replace(BARE, distribution="ubuntu", codename="focal"), "ubuntu focal has no packages"),
        (replace(BARE, codename="sid"), "debian sid has no packages"),
        (replace(BARE, sources=tuple(apt.parse_list(THIRD_PARTIES))), "main archive of Debian bookworm"),
    ],
)
def test_what_labctl_cannot_do_it_says(facts: Facts, message: str) -> None:
    """Plan for other releases, or without Debian's main archive: HostError with a hint."""
    with pytest.raises(HostError, match=message) as caught:
        install.plan(facts)
    assert caught.value.hint


OUTSIDER = replace(READY, denied=True, running=False, outsider="ada", prefix=("sudo",))


def test_who_may_not_use_docker_is_put_into_its_group_and_nothing_else_happens() -> None:
    """Plan for a user who may not use Docker: usermod into group docker alone."""
    assert install.plan(OUTSIDER).typed() == ("sudo usermod --append --groups docker ada",)


def test_who_installs_docker_with_sudo_may_use_it_afterwards() -> None:
    """Plan for a user without Docker: the last step is usermod."""
    assert install.plan(replace(BARE, outsider="ada", prefix=("sudo",))).typed()[-1].endswith("--groups docker ada")


def test_who_can_use_docker_otherwise_is_left_out_of_its_group() -> None:
    """Plan for a user who can use Docker without the group: no step."""
    assert not install.plan(replace(READY, outsider="ada", prefix=("sudo",))).steps


def test_a_session_older_than_its_membership_is_told_so(on: Callable[..., list[str]]) -> None:
    """Set up in a session older than the membership: HostError with `newgrp docker`, nothing is run."""
    done = on(replace(OUTSIDER, outsider=""))
    with pytest.raises(HostError, match="older than your membership") as caught:
        install.setup(yes=True, ask=None, emit=lambda _: None)
    assert "newgrp docker" in caught.value.hint
    assert not done


def test_who_was_put_into_the_group_is_told_how_to_go_on(on: Callable[..., list[str]]) -> None:
    """Set up a user who is put into the group: True, and the last message names `newgrp docker`."""
    messages: list[str] = []
    on(OUTSIDER, replace(OUTSIDER, outsider=""))
    assert install.setup(yes=True, ask=None, emit=messages.append)
    assert "newgrp docker" in messages[-1]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that lets install observe these facts in turn, and returns the list of its steps."""

    def pretend(*facts: Facts) -> list[str]:
        """Replace observe and carry_out; return the list that gets the steps."""
        queue, done = list(facts), list[str]()
        monkeypatch.setattr(install, "observe", lambda: queue.pop(0) if len(queue) > 1 else queue[0])
        monkeypatch.setattr(install, "carry_out", lambda steps, _: done.extend(steps.typed()))
        return done

    return pretend


def test_not_root_and_no_sudo_prints_the_commands(on: Callable[..., list[str]]) -> None:
    """Set up without root and sudo: HostError, exit code 3, the hint has the commands, nothing is run."""
    done = on(replace(BARE, prefix=None))
    with pytest.raises(HostError, match="needs root or sudo") as caught:
        install.setup(yes=True, ask=None, emit=print)
    assert caught.value.hint.splitlines() == ["as root:", *install.plan(BARE).typed()]
    assert caught.value.exit_code == 3
    assert done == []


def test_nobody_to_ask(on: Callable[..., list[str]]) -> None:
    """Set up with nobody to ask: HostError with `labctl setup --yes`, nothing is run."""
    done = on(BARE)
    with pytest.raises(HostError) as caught:
        install.setup(yes=False, ask=None, emit=print)
    assert caught.value.hint == "labctl setup --yes"
    assert done == []


def test_no_means_no(on: Callable[..., list[str]]) -> None:
    """Answer no: HostError "aborted", nothing is run."""
    done = on(BARE)
    with pytest.raises(HostError, match="aborted"):
        install.setup(yes=False, ask=lambda _: False, emit=print)
    assert done == []


def test_after_empty_lists_it_goes_on_without_asking_again(on: Callable[..., list[str]]) -> None:
    """Set up from empty lists: update, then the plan, with one question in all."""
    done, messages, requests = on(replace(BARE, candidates={}), BARE, READY), list[str](), list[str]()
    assert install.setup(yes=False, ask=lambda text: not requests.append(text), emit=messages.append)  # type: ignore[func-returns-value]
    assert done == ["apt-get update", *install.plan(BARE).typed()]
    assert len(requests) == 1
    assert messages[-1].startswith("ready: Docker Engine 26.1.5")


def test_already_able(on: Callable[..., list[str]]) -> None:
    """Set up a ready host: False and "nothing to do"."""
    on(READY)
    messages: list[str] = []
    assert not install.setup(yes=False, ask=None, emit=messages.append)
    assert messages[0].startswith("nothing to do")


def test_a_simulation_that_touches_anything_else_is_refused() -> None:
    """Check apt's simulation: HostError if it upgrades or removes others, or would install an old engine."""
    argv = ("apt-get", "install", "--simulate", "docker.io")
    harmless = (
        "Inst docker.io [20.10.24] (26.1.5 Debian:13 [amd64])\nInst runc (1.1.5 Debian:12 [amd64])\nConf runc (1.1.5)\n"
    )
    install._require_harmless(harmless, argv)
    worse = harmless + "Inst libc6 [2.36] (2.41 Debian:13 [amd64])\nRemv docker-ce [23.0]\n"
    with pytest.raises(HostError, match="would upgrade libc6 and remove docker-ce"):
        install._require_harmless(worse, argv)
    with pytest.raises(HostError, match=r"that would be Docker Engine 20\.10\.24"):
        install._require_harmless("Inst docker.io (20.10.24 Debian:12 [amd64])\n", argv)


def test_sources_are_read_from_both_kinds_of_files(tmp_path: Path) -> None:
    """Read sources.list and *.sources: enabled sources alone, no other files."""
    folder = tmp_path / "etc/apt/sources.list.d"
    folder.mkdir(parents=True)
    (tmp_path / "etc/apt/sources.list").write_text(
        "deb [ arch=amd64 ] http://one.example/debian bookworm main contrib # x\n"
    )
    (folder / "debian.sources").write_text(DEB822)
    (folder / "vendor.list.disabled").write_text(THIRD_PARTIES)
    first, *remaining = apt.read(tmp_path)
    assert (first.uris, first.components) == (("http://one.example/debian",), ("main", "contrib"))
    assert [source.suites for source in remaining] == [("bookworm", "bookworm-updates"), ("bookworm-security",)]


def test_candidates() -> None:
    """Read apt-cache policy: candidates by package, none for "(none)"."""
    none = "x:\n  Installed: (none)\n  Candidate: (none)\n"
    policy = f"docker.io:\n  Installed: (none)\n  Candidate: 20.10\n  Version table:\n{none}"
    assert apt.candidates(policy) == {"docker.io": "20.10"}


@pytest.mark.parametrize(
    ("version", "oldest", "older"),
    [
        ("26.1.5+dfsg1", "24", False),
        ("5:27.0.1-1~debian", "24", False),
        ("20.10.24+dfsg1-1", "24", True),
        ("v2.24.4", "2.24.4", False),
        ("2.24.3-1", "2.24.4", True),
        ("2.9.0", "2.24.4", True),
        ("5.6.1", "2.24.4", False),
        ("2.25", "2.24.4", False),
        ("", "24", True),
        ("dev", "24", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, oldest: str, older: bool) -> None:
    """Compare versions by their numbers, without epoch and suffix; text without numbers is older."""
    assert is_older(version, oldest) == older


@pytest.mark.parametrize(
    "facts", [replace(READY, compose="2.24.3"), replace(READY, buildx="0.9.1"), replace(READY, engine="23.0.6")]
)
def test_what_is_too_old_is_replaced(facts: Facts) -> None:
    """Plan with an old compose, buildx or engine: it is installed."""
    assert install.plan(replace(facts, candidates=TRIXIE)).steps[1].argv[-1] in TRIXIE


def test_what_stays_too_old_is_named(on: Callable[..., list[str]]) -> None:
    """Set up with what stays old: HostError names it, the hint is labctl doctor."""
    old = replace(READY, compose="2.24.3", candidates=TRIXIE)
    on(old, old)
    with pytest.raises(HostError, match=r"^still missing or too old: compose$") as caught:
        install.setup(yes=True, ask=None, emit=lambda _: None)
    assert caught.value.hint == "labctl doctor"
