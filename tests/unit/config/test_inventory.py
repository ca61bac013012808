from __future__ import annotations

import cProfile
import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.config.inventory import DRAINED, InventoryHost, in_use, parse, read
from labctl.errors import ConfigError

NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?(\.[a-z0-9]{1,5})?", fullmatch=True)
ADDRESSES = NAMES | st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(str)
PORTS = st.integers(1, 65535).map(str)
FORMS = ("hosts.txt", "hosts.env", "hosts.yaml")


def hosts(text: str) -> list[InventoryHost]:
    """Return the hosts that the text lists."""
    return list(parse(text, "hosts.txt"))


def yaml_hosts(tmp_path: Path, text: str) -> tuple[InventoryHost, ...]:
    """Write hosts.yaml and return the hosts that it lists."""
    (tmp_path / "hosts.yaml").write_text(text)
    return read(tmp_path / "hosts.yaml", "hosts.yaml")


def reason(text: str, path: Path | None = None) -> str:
    """Return the message of the ConfigError that the text, or the file at ``path``, raises."""
    with pytest.raises(ConfigError) as caught:
        read(path, path.name) if path else parse(text, "hosts.txt")
    return caught.value.message


def test_a_line_says_how_its_host_is_reached() -> None:
    """Parse a line with every key: all are in the host, with its line."""
    line = (
        "gpu-1 address=10.0.0.5 user=lab port=2222 key=~/.ssh/lab slots=8 iface=ib0 docker=/run/user/1000/docker.sock"
    )
    assert hosts(f"# the rack\n\n{line}  # the master\r\ngpu-2\n") == [
        InventoryHost(
            name="gpu-1",
            address="10.0.0.5",
            user="lab",
            port=2222,
            key="~/.ssh/lab",
            slots=8,
            iface="ib0",
            docker="/run/user/1000/docker.sock",
            where="hosts.txt:3",
        ),
        InventoryHost(name="gpu-2", where="hosts.txt:4"),
    ]


def test_hostfiles_and_plain_lists_are_inventories() -> None:
    """Parse a hostfile and a plain list: hosts by name, with slots where given."""
    assert [(host.name, host.slots) for host in hosts("100.83.155.75 slots=8\n100.83.155.86 slots=8\n")] == [
        ("100.83.155.75", 8),
        ("100.83.155.86", 8),
    ]
    assert [host.name for host in hosts("a\nB.lab.example\n10.0.0.7")] == ["a", "B.lab.example", "10.0.0.7"]


@pytest.mark.parametrize(
    "text",
    [
        "MASTER_IP=10.0.0.5\nMEMBER_IPS=10.0.0.6,10.0.0.7\n",
        "# from printenv\nexport BUILD_VERSION='1.2 beta'\nMEMBER_IPS=\"10.0.0.6, 10.0.0.7\"\nMASTER_IP=10.0.0.5",
    ],
)
def test_the_master_is_the_first_of_master_and_members(text: str) -> None:
    """Parse MASTER_IP and MEMBER_IPS: node-0 is the master, members follow."""
    assert [(host.name, host.address) for host in hosts(text)] == [
        ("node-0", "10.0.0.5"),
        ("node-1", "10.0.0.6"),
        ("node-2", "10.0.0.7"),
    ]


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("ann@red:2222 slots=8", ("red", "", "ann", 2222)),
        ("red:2222", ("red", "", "", 2222)),
        ("ann@10.0.0.5", ("10.0.0.5", "", "ann", 0)),
        ("red address=ann@10.0.0.5:2222", ("red", "10.0.0.5", "ann", 2222)),
        ("red address=ann@[fe80::1%eth0]:2222", ("red", "fe80::1%eth0", "ann", 2222)),
        ("red address=ann@fe80::1", ("red", "fe80::1", "ann", 0)),
        ("MASTER_IP=ann@10.0.0.5:2222", ("node-0", "10.0.0.5", "ann", 2222)),
    ],
)
def test_user_and_port_may_stand_with_the_host_as_ssh_has_it(text: str, host: tuple[str, str, str, int]) -> None:
    """Parse user@host:port forms: name, address, user and port."""
    (only,) = hosts(text)
    assert (only.name, only.address, only.user, only.port) == host


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("red 10.0.0.5", "write `address=10.0.0.5`"),
        ("red ann@10.0.0.5:22", "write `address=ann@10.0.0.5:22`"),
        ("10.0.0.5 red", "the name comes first: `red address=10.0.0.5`"),
        ("red user = ann", "write no blank around `=`"),
        ("red ansible_host=10.0.0.5", "write `address=`"),
        ("fe80::1", "write `node-0 address=fe80::1`"),
        ("red address=[fe80::1]", "write an IPv6 address with a port as `[fe80::1]:22`"),
        (
            "[gpus:vars]\nred",
            "install ansible-core",
        ),
    ],
)
def test_what_was_mistyped_is_told_as_it_should_be_written(text: str, hint: str) -> None:
    """Parse mistyped lines: ConfigError with line, the hint shows them written right."""
    with pytest.raises(ConfigError, match=r"hosts\.txt:1: ") as caught:
        hosts(text)
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    "text", ["node-0 address=10.0.0.5", "MASTER_IP=10.0.0.5", "hosts:\n  node-0: {ansible_host: 10.0.0.5}"]
)
def test_a_byte_order_mark_may_begin_the_file(tmp_path: Path, text: str) -> None:
    """Read inventories as an editor saves them as UTF-8 with BOM: their host is there."""
    path = tmp_path / "hosts.txt"
    path.write_bytes(f"{text}\n".encode("utf-8-sig"))
    assert [(host.name, host.address) for host in read(path)] == [("node-0", "10.0.0.5")]


@pytest.mark.parametrize("members", ["", "MEMBER_IPS=\n"])
def test_a_master_may_be_alone(members: str) -> None:
    """Parse MASTER_IP alone: one host, node-0."""
    assert [host.name for host in hosts(f"MASTER_IP=10.0.0.5\n{members}")] == ["node-0"]


SEED = """hosts:
hosts:
  node-0:
    ansible_host: "100.83.155.72"

  node-1:
    ansible_host: "100.83.155.86"
"""


def test_the_inventory_of_the_validation_operator_is_read_as_it_writes_it(tmp_path: Path) -> None:
    """Read the validation operator's YAML: names and addresses with their lines."""
    assert yaml_hosts(tmp_path, SEED) == (
        InventoryHost(name="node-0", address="100.83.155.72", where="hosts.yaml:3"),
        InventoryHost(name="node-1", address="100.83.155.86", where="hosts.yaml:6"),
    )


GROUPS = """---
all:
  vars: {ansible_user: everyone, ansible_port: 22, python: whatever}
  hosts:
    front: {ansible_host: 10.0.0.1, ansible_ssh_private_key_file: keys/front}
rack:
  children:
    workers:
      children:
        gpu:
          hosts:
            gpu-0:
            gpu-1: {ansible_user: own, labctl_slots: 8, labctl_iface: ib0}
      vars: {ansible_user: group}
  vars: {ansible_user: rack, ansible_port: 2222}
slow:
  children:
    workers:
  hosts:
    gpu-1: {labctl_slots: 8}
    front:
"""


def test_what_a_host_says_itself_goes_before_its_groups_the_innermost_first(tmp_path: Path) -> None:
    """Read nested Ansible groups: a host's own value counts first, then the innermost group's."""
    front, first, second = yaml_hosts(tmp_path, GROUPS)
    assert (front.name, front.user, front.port, front.key) == ("front", "everyone", 22, str(tmp_path / "keys/front"))
    assert (first.name, first.user, first.port) == ("gpu-0", "group", 2222)
    assert (second.name, second.user, second.slots, second.iface) == ("gpu-1", "own", 8, "ib0")


def test_the_form_is_told_by_what_the_file_says(tmp_path: Path) -> None:
    """Read YAML in a file without extension: parsed as YAML."""
    path = tmp_path / "inventory"
    path.write_text("# rack 1\nall:\n  hosts:\n    a: {ansible_port: 2222}\n")
    assert read(path) == (InventoryHost(name="a", port=2222, where=f"{path}:4"),)


def test_a_key_lies_beside_the_inventory_that_names_it(tmp_path: Path) -> None:
    """Read keys: relative ones are beside the inventory, ~ is the home, absolute ones stay."""
    (tmp_path / "hosts.txt").write_text("a key=keys/a#1\nb key=/etc/b\nc key=~/.ssh/c\nd\n")
    keys = [host.key for host in read(tmp_path / "hosts.txt")]
    assert keys == [str(tmp_path / "keys/a#1"), "/etc/b", str(Path.home() / ".ssh/c"), ""]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-oProxyCommand=x", "1: bad host name"),
        ("a\n-oProxyCommand=x", "2: bad host name"),
        ("a address=-oProxyCommand=x", "1: bad host name `-oProxyCommand=x`"),
        ("a address=", "1: bad host name ``"),
        ("a address=fe80::1::2", "1: address must be an IP address or a name, not `fe80::1::2`"),
        ("a address=fe80::1%$(id)", "1: address must be"),
        ("a user=-l", "1: user must be a user's name, not `-l`"),
        ("a user=root;reboot", "1: user must be"),
        ("a port=0", "1: port must be between 1 and 65535, not `0`"),
        ("a port=65536", "1: port must be between"),
        (f"a port={'9' * 5000}", "1: port must be between"),
        ("a port=\u0661", r"1: port must be between 1 and 65535, not `\u0661`"),
        ("a key=-i", "1: key must be a path"),
        ("a key=~root/k", "1: key must be a path"),
        ("a key=/k/%h", "1: key must be a path"),
        ("a key=${HOME}/k", "1: key must be a path"),
        ("a slots=0", "1: slots must be between 1 and 1024, not `0`"),
        ("a iface=eth0;x", "1: iface must be the name of a network interface"),
        ("a iface=sixteen-letters-", "1: iface must be"),
        ("a docker=docker.sock", "1: docker must be the absolute path of a socket"),
        ("a docker=/a:/b", "1: docker must be"),
        ("a slot=8", "1: unknown word `slot`"),
        ("a 8", "1: expected `key=value`, found `8`"),
        ("a user=x user=y", "1: `user` is given twice"),
        ("lab@a user=me", "1: `lab@a` gives a user, and so does `user=`"),
        ("a address=b:22 port=22", "1: `b:22` gives a port, and so does `port=`"),
        ("a:ssh", "1: port must be between 1 and 65535, not `ssh`"),
        ("@a", "1: user must be a user's name, not ``"),
        ("-l@a", "1: user must be a user's name, not `-l`"),
        ("lab@-oProxyCommand=x", "1: bad host name `-oProxyCommand=x`"),
        ("local", "1: `local` is reserved for this machine"),
        ("lab@local:22", "1: `local` is reserved for this machine"),
        ("a_b", "1: bad host name `a_b`"),
        ("a\x1b[31m", "1: contains a control character"),
        ("a\x00", "1: contains a control character"),
        ("a\u00a0slots=8", "1: contains a control character"),
        ("a\n\nA", "3: duplicate host `A`, first named on line 1"),
        ("a address=10.0.0.5\nb address=10.0.0.5", "2: `b` is the same machine as `a` on line 1"),
        ("10.0.0.5\nb address=10.0.0.5", "2: `b` is the same machine as `10.0.0.5` on line 1"),
        ("", "1: names no host"),
        ("# nobody\n\n", "1: names no host"),
        ("MEMBER_IPS=10.0.0.6", "1: MASTER_IP is missing"),
        ("MASTER_IP=", "1: bad host name ``"),
        ("MASTER_IP=10.0.0.5\nMEMBER_IP=10.0.0.6", "2: unknown key `MEMBER_IP`"),
        ("MASTER_IP=10.0.0.5\nMEMBER_IPS=10.0.0.6,", "2: bad host name ``"),
        ("MASTER_IP=10.0.0.5\nMEMBER_IPS=10.0.0.5", "2: `node-1` is the same machine as `node-0` on line 1"),
    ],
)
def test_what_cannot_be_a_host_is_refused_with_its_line(text: str, message: str) -> None:
    """Parse invalid lines: ConfigError with line and reason."""
    assert reason(text).startswith(f"hosts.txt:{message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all: {hosts: {-x: }}", "1: bad host name `-x`"),
        ("all:\n  hosts:\n    a:\n      ansible_port: high", "4: port must be between"),
        ("all:\n  vars: {ansible_user: -l}\n  hosts:\n    a:", "2: user must be a user's name"),
        ("all:\n  hosts:\n    a: {ansible_connection: local}", "3: `ansible_connection` is not understood here"),
        ("all:\n  hosts:\n    a: {ansible_ssh_common_args: -J b}", "3: `ansible_ssh_common_args` is not understood"),
        ("all:\n  vars: {labctl_slot: 8}\n  hosts: {a: }", "2: `labctl_slot` is not understood"),
        ("all:\n  hosts: [a, b]", "2: `hosts` must be a mapping, not a list"),
        ("all:\n  machines: {a: }", "2: unknown key `machines`"),
        ("all:\n  hosts:\n    node-[0:3]:", "3: bad host name `node-[0:3]`"),
        ("all:\n  hosts: {a: {ansible_host: '{{ ip }}'}}", "2: `ansible_host` is a template, `{{ ip }}`"),
        ("a: &x\n  children: {b: *x}\n  hosts: {h: }", "1: an alias contains itself"),
        ("all:\n  hosts:\n", "1: names no host"),
        ("", "1: is empty"),
        ("- a\n", "1: `hosts.yaml` must be a mapping, not a list"),
        ("all: {hosts: {a: ", "1: not YAML"),
    ],
)
def test_what_cannot_be_an_ansible_host_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    """Read invalid Ansible YAML: ConfigError with line and reason."""
    (tmp_path / "hosts.yaml").write_text(text)
    assert reason("", tmp_path / "hosts.yaml").startswith(f"hosts.yaml:{message}")


def test_a_bomb_of_aliases_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Read YAML whose aliases multiply: ConfigError before it is expanded."""
    groups = "".join(
        f"g{number}: &g{number}\n  children: {{{', '.join(f'x{n}: *g{number - 1}' for n in range(10))}}}\n"
        for number in range(1, 10)
    )
    (tmp_path / "hosts.yaml").write_text(f"g0: &g0 {{hosts: {{a: }}}}\n{groups}")
    assert "values with its aliases" in reason("", tmp_path / "hosts.yaml")


BEYOND = {
    "range": "all: {hosts: {'node-[0:2]': }}",
    "merge key": "x: &x {vars: {ansible_user: ann}}\ny: {vars: {<<: {ansible_user: bob}}, hosts: {a: }}",
    "a group in two places": "b: {vars: {ansible_user: ann}, children: {a: }}\na: {hosts: {x: }}",
    "a host with two users": "u: {vars: {ansible_port: 1}, hosts: {x: }}\nv: {vars: {ansible_port: 2}, hosts: {x: }}",
    "priority": "a: {vars: {ansible_group_priority: 9}, hosts: {b: }}",
    "groups of INI": "front ansible_host=10.0.0.1\n[gpu]\na",
    "group_vars": "all: {hosts: {a: }}",
}
LISTED = {
    "_meta": {"hostvars": {"a": {"ansible_host": "10.0.0.5", "ansible_port": 2222, "http_port": 80}}},
    "all": {"children": ["ungrouped", "gpu"]},
    "gpu": {"hosts": ["b", "a"], "children": ["rack"]},
    "rack": {"hosts": ["a", "c"]},
}


def program(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set PATH to a folder with an `ansible-inventory` of this script; to an empty one if it is ""."""
    folder.mkdir()
    if script:
        (folder / "ansible-inventory").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "ansible-inventory").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin" if script else str(folder))


def beyond(tmp_path: Path, case: str) -> Path:
    """Write the inventory of this case, with group_vars/ if it needs one; return its path."""
    path = tmp_path / ("hosts" if "INI" in case else "hosts.yaml")
    path.write_text(BEYOND[case])
    if case == "group_vars":
        (tmp_path / case).mkdir()
    return path


@pytest.mark.parametrize("case", BEYOND)
def test_what_only_ansible_resolves_is_refused_without_it(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read inventories that only Ansible resolves, without it: ConfigError with line, the hint names ansible."""
    program(tmp_path / "bin", "", monkeypatch)
    path = beyond(tmp_path, case)
    line = 2 if "\n" in BEYOND[case] else 1
    with pytest.raises(ConfigError, match=rf"^{path.name}:{line}: ") as caught:
        read(path, path.name)
    assert "ansible" in caught.value.hint


@pytest.mark.parametrize("case", BEYOND)
def test_ansible_inventory_resolves_it_where_it_is_installed(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read them with an ansible-inventory: hosts, addresses and ports are those of its JSON."""
    path = beyond(tmp_path, case)
    script = f"""[ "$*" = "--list -i {path}" ] && [ "$PWD $ANSIBLE_INVENTORY_ENABLED" = "/ yaml,ini" ] || exit 9
echo '[WARNING]: something' >&2; cat <<'E'\n{json.dumps(LISTED)}\nE"""
    program(tmp_path / "bin", script, monkeypatch)
    parsed = read(path, path.name)
    assert [(host.name, host.address, host.port) for host in parsed] == [
        ("b", "", 0),
        ("a", "10.0.0.5", 2222),
        ("c", "", 0),
    ]
    assert parsed[2].where == f"{path.name}:1"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({**LISTED, "_meta": {"hostvars": {"b": {"ansible_connection": "local"}}}}, "`ansible_connection` is not"),
        ({**LISTED, "_meta": {"hostvars": {"b": {"ansible_user": "-l"}}}}, "user must be a user's name"),
        ({**LISTED, "_meta": {"hostvars": {"b": {"ansible_host": "{{ x }}"}}}}, "`ansible_host` is a template"),
        ({**LISTED, "rack": {"hosts": ["-oProxyCommand=x"]}}, "bad host name"),
        (
            {**LISTED, "_meta": {"hostvars": {name: {"ansible_host": "10.0.0.5"} for name in "ab"}}},
            "is the same machine",
        ),
        (None, "ansible-inventory cannot read it: [ERROR]: no"),
    ],
)
def test_what_ansible_resolved_is_checked_as_any_host(
    tmp_path: Path, answer: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let ansible-inventory give invalid hosts or fail: ConfigError with the reason."""
    script = f"cat <<'E'\n{json.dumps(answer)}\nE" if answer else "echo '[ERROR]: no' >&2; exit 4"
    program(tmp_path / "bin", script, monkeypatch)
    path = beyond(tmp_path, "range")
    with pytest.raises(ConfigError, match=rf"^hosts\.yaml:1: .*{re.escape(reason)}"):
        read(path, path.name)


def test_a_plain_inventory_is_read_without_ansible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a plain YAML inventory with a failing ansible-inventory: it is not called."""
    program(tmp_path / "bin", "exit 9", monkeypatch)
    assert len(yaml_hosts(tmp_path, GROUPS)) == 3


def test_an_inventory_that_is_a_program_is_refused_and_not_executed(tmp_path: Path) -> None:
    """Read an executable inventory: ConfigError, and it is not executed."""
    (tmp_path / "hosts").write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\n")
    (tmp_path / "hosts").chmod(0o755)
    with pytest.raises(ConfigError, match=r"^hosts:1: is a program, and labctl does not execute inventories") as caught:
        read(tmp_path / "hosts", "hosts")
    assert caught.value.hint.startswith("ansible-inventory -i hosts --list --yaml > hosts.yaml")
    assert not (tmp_path / "executed").exists()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Read a missing file and one that is not UTF-8: ConfigError names them."""
    assert reason("", tmp_path / "hosts.txt") == "hosts.txt: cannot be read: No such file or directory"
    (tmp_path / "hosts.txt").write_bytes(b"a\nb\xff\n")
    assert reason("", tmp_path / "hosts.txt") == "hosts.txt:2: is not UTF-8"


@given(st.lists(st.tuples(NAMES, ADDRESSES, PORTS), min_size=1, max_size=8, unique_by=lambda entry: entry[0]))
def test_what_is_written_is_what_is_read(entries: list[tuple[str, str, str]]) -> None:
    """Write any valid hosts and parse them: the same names, addresses and ports."""
    entries = [(name, address, str(number + 1)) for number, (name, address, _) in enumerate(entries)]
    text = "".join(f"{name} address={address} port={port}\n" for name, address, port in entries)
    assert [(host.name, host.address, str(host.port)) for host in hosts(text)] == entries


@given(
    st.text(max_size=60)
    | st.lists(st.sampled_from(["a", "=", "-", "\n", " ", "address", "MASTER_IP", "%"])).map("".join)
)
def test_nothing_is_taken_that_ssh_could_take_for_an_option(text: str) -> None:
    """Parse any text: ConfigError with a line, or hosts without leading dash, blank or control character."""
    try:
        parsed = hosts(text)
    except ConfigError as error:
        assert re.match(r"hosts\.txt:\d+: ", error.message)  # noqa: PT017 - either outcome is right
        return
    for host in parsed:
        for word in (host.name, host.address, host.user, host.key):
            assert not word.startswith("-")
            assert word.isprintable()
            assert " " not in word


def lines(count: int) -> str:
    """Return this many lines of an inventory."""
    return "".join(f"node-{number} address=10.0.0.{number}.x user=lab slots=8\n" for number in range(count))


def test_a_hundred_thousand_lines_are_read_in_a_moment() -> None:
    """Parse 100,000 lines: below 3 s of processor time."""
    text = lines(100_000)
    began = time.process_time()
    assert len(hosts(text)) == 100_000
    # Half a second where the processor is free; what grows with the square of the lines takes minutes.
    assert time.process_time() - began < 3


def test_a_line_costs_few_calls() -> None:
    """Allow as many calls as let a hundred thousand lines be read in well under a second."""
    text, costs = lines(1000), cProfile.Profile()
    costs.runcall(hosts, text)
    assert sum(entry.callcount for entry in costs.getstats()) / 1000 < 40


def test_machines_that_are_drained_are_left_out_by_name_or_address(tmp_path: Path) -> None:
    """List hosts in drained.txt by name and address: they are left out, each with its reason."""
    (tmp_path / DRAINED).write_text("# mended ones go\nRed  # fan broken, 2026-01-02\n10.0.0.7\n\n")
    listed = parse("red\nblue address=10.0.0.7\ngreen\n", "hosts.txt")
    used, left_out = in_use(tmp_path, listed)
    assert [host.name for host in used] == ["green"]
    assert left_out == (("red", "fan broken, 2026-01-02"), ("blue", DRAINED))


def test_without_a_list_of_drained_machines_all_are_used(tmp_path: Path) -> None:
    """Ask for hosts in use without drained.txt: all."""
    listed = parse("red\nblue\n", "hosts.txt")
    assert in_use(tmp_path, listed) == (listed, ())
