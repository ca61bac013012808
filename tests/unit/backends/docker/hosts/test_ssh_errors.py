from __future__ import annotations

import subprocess
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.backends.docker.hosts import ssh_errors
from labctl.backends.docker.hosts.ssh import remote
from labctl.config.inventory import InventoryHost

HOST = InventoryHost(name="gpu-1", address="10.0.0.5", user="lab", port=2222, key="/k/lab", where="hosts.txt:3")
CHANGED = """@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
Add correct host key in /home/me/.ssh/known_hosts to get rid of this message.
Offending ED25519 key in /home/me/.ssh/known_hosts:7
Host key for [10.0.0.5]:2222 has changed and you have requested strict checking.
Host key verification failed.
"""
# As OpenSSH says it when it does not check strictly.
CARELESS = "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!\nOffending RSA key in /etc/ssh/ssh_known_hosts:1\n"
UNPROTECTED = """@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @
Permissions 0644 for '/k/lab' are too open.
Load key "/k/lab": bad permissions
lab@10.0.0.5: Permission denied (publickey).
"""


@pytest.mark.parametrize(
    ("output", "message", "hint"),
    [
        (CHANGED, "key has changed", "ssh-keygen -f /home/me/.ssh/known_hosts -R '[10.0.0.5]:2222'; ssh -l lab -p"),
        (CARELESS, "host key has changed", "ssh-keygen -f /etc/ssh/ssh_known_hosts -R '[10.0.0.5]:2222'"),
        ("Host key verification failed.", "not known", "ssh -l lab -p 2222 -i /k/lab"),
        ("No ED25519 host key is known for x and you have requested strict checking.", "not known", "(once;"),
        (
            "ssh: Could not resolve hostname gpu-1: Name or service not known",
            "address not found: gpu-1: Name or service not known",
            "write `gpu-1 address=...` in hosts.txt:3",
        ),
        (
            "lab@10.0.0.5: Permission denied (publickey,password).",
            "permission denied for lab with the key /k/lab (publickey,password)",
            "ssh-copy-id -i /k/lab -p 2222 lab@10.0.0.5; or, for a key with a passphrase: ssh-add /k/lab",
        ),
        (
            "Warning: Identity file /k/lab not accessible: No such file or directory.\nlab@h: Permission denied (x).",
            "key /k/lab does not exist",
            "set another `key=` in hosts.txt:3, or create it: ssh-keygen -t ed25519 -f /k/lab",
        ),
        (UNPROTECTED, "Permissions 0644 for '/k/lab' are too open", "chmod 600 /k/lab"),
        (
            "Received disconnect from 10.0.0.5 port 2222:2: Too many authentication failures",
            "permission denied for lab",
            "ssh-copy-id -i /k/lab",
        ),
        (
            "ssh: connect to host 10.0.0.5 port 2222: Connection refused",
            "no sshd on port 2222",
            "`port=` in hosts.txt:3",
        ),
        (
            "ssh: connect to host 10.0.0.5 port 2222: Connection timed out",
            "unreachable: connection timed",
            "ping",
        ),
        ("ssh: connect to host 10.0.0.5 port 2222: No route to host", "unreachable: no route to host", "ping"),
        ("Connection timed out during banner exchange", "unreachable: connection timed out", "ping"),
        ("kex_exchange_identification: read: Connection reset by peer", "MaxStartups", "ssh -l lab"),
        ("Connection closed by 10.0.0.5 port 2222", "closed the connection before login", " -v "),
        ("This account is currently not available.", "This account is currently not available.", " -v "),
        ("", "closed the connection", " -v "),
    ],
)
def test_what_ssh_says_is_made_plain_with_the_command_to_type(output: str, message: str, hint: str) -> None:
    """why() turns each output of ssh into a HostError with reason and command as hint."""
    error = ssh_errors.why(HOST, output)
    assert error.message.startswith("gpu-1 (10.0.0.5): ")
    assert message in error.message
    assert hint in error.hint
    assert error.node == "gpu-1"


def test_a_line_that_ssh_ends_with_a_carriage_return_is_quoted_without_it() -> None:
    """excerpt() of lines that end with ``\\r\\n`` has no ``\\r``, so that why() quotes none."""
    line = "ssh: Could not resolve hostname gpu-1: Name or service not known"
    text = ssh_errors.excerpt(f"{line}\r\n")
    assert text == f"{line}\n"
    assert ssh_errors.why(HOST, f"{line}\r\n").message.endswith("not known")


@pytest.mark.parametrize(
    "output", ["\0" * 1_000_000, "a" * 1_000_000, "banner exchange: " * 100_000, "No a host key\n" * 100_000]
)
def test_a_host_that_says_far_too_much_takes_no_time(output: str) -> None:
    """why() of a million bytes takes less than a second and still finds the reason."""
    began = time.process_time()
    error = ssh_errors.why(HOST, f"{output}\nlab@10.0.0.5: Permission denied (publickey).\n")
    assert (error.node, "permission denied for lab" in error.message) == ("gpu-1", True)
    assert time.process_time() - began < 1


def test_only_a_host_that_hung_up_before_the_login_is_worth_another_try() -> None:
    """is_transient() is True for a connection closed before login, not after a denial or for a refusal."""
    assert ssh_errors.is_transient("kex_exchange_identification: Connection closed by remote host")
    denied = "lab@10.0.0.5: Permission denied (publickey).\nConnection closed by 10.0.0.5 port 22"
    assert not ssh_errors.is_transient(denied)
    assert not ssh_errors.is_transient("ssh: connect to host 10.0.0.5 port 22: Connection refused")


@pytest.mark.parametrize("shell", ["sh", "bash"])
@given(arguments=st.lists(st.text(st.characters(min_codepoint=1, max_codepoint=255)), max_size=4))
def test_words_reach_the_script_unchanged_through_a_login_shell(shell: str, arguments: list[str]) -> None:
    """Arbitrary arguments pass through `remote()` and a login shell unchanged."""
    line = remote('printf "%s\\0" "$@"', arguments)
    done = subprocess.run([shell, "-c", line], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == (arguments or [""])


def test_a_login_shell_that_cannot_read_a_script_is_named() -> None:
    """Output of csh raises HostError that names csh, with `chsh -s /bin/sh` as hint."""
    error = ssh_errors.why(InventoryHost(name="a"), "Unmatched '.\n")
    assert "such as csh or tcsh: it prints `Unmatched '.`" in error.message
    assert error.hint == "ssh -t a chsh -s /bin/sh"


def test_a_command_to_type_names_user_port_and_key_and_has_a_terminal_for_sudo() -> None:
    """typed() has user, port and address, quotes the command, and has -t for sudo."""
    target = InventoryHost(name="red", address="10.0.0.5", user="lab", port=2222)
    assert ssh_errors.typed(target, "uptime") == "ssh -l lab -p 2222 10.0.0.5 uptime"
    assert ssh_errors.typed(target, "sudo dmesg  # its kernel") == (
        "ssh -l lab -p 2222 -t 10.0.0.5 'sudo dmesg'  # its kernel"
    )
