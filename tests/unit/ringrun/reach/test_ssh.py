from __future__ import annotations

import re
from typing import List

import pytest

from ringcomm.errors import ConfigError
from ringrun.plan.hosts import HostSpec
from ringrun.reach.base import ThisMachine, quoted_path, remote_command
from ringrun.reach.protocol import BOOT
from ringrun.reach.ssh import Ssh, SshOptions
from ringrun.reach.via import Via

SSH = Ssh(SshOptions("ssh -F 'my config'", 2222, "key file"))
ARGV = SSH.argv(HostSpec("jetson1", "me"), "/v/bin/python")


def test_argv() -> None:
    assert ARGV[:3] == ["ssh", "-F", "my config"]
    assert ARGV[-3:] == ["--", "me@jetson1", remote_command("/v/bin/python")]
    assert "--" not in Ssh(SshOptions("dbclient -y")).argv(HostSpec("jetson1"), "python3")
    assert Ssh(SshOptions()).argv(HostSpec("fd00::2", "me"), "python3")[-2] == "me@fd00::2", "no brackets"
    text = " ".join(ARGV)
    for part in ("-T", "-o BatchMode=yes", "-o ConnectTimeout=10", "-p 2222", "-i key file"):
        assert part in text
    assert "StrictHostKeyChecking" not in text


def test_the_port_of_a_host_comes_before_that_of_all() -> None:
    spec = HostSpec("a", port=22)
    argv = SSH.argv(spec, "python3")
    assert argv[argv.index("-p") + 1] == "22" and "2222" not in argv


@pytest.mark.parametrize("spec", [HostSpec("-oProxyCommand=id"), HostSpec("a", "-l"), HostSpec("$(id)")])
def test_a_name_that_is_an_option_or_a_command_reaches_no_command_line(spec: HostSpec) -> None:
    for reach in (SSH, Via("sh -c 'ssh {host}' {command}")):
        with pytest.raises(ConfigError, match="is not a host"):
            reach.argv(spec, "python3")


@pytest.mark.parametrize("command", ["", "ssh 'x"])
def test_bad_ssh_commands(command: str) -> None:
    with pytest.raises(ConfigError, match="--ssh"):
        Ssh(SshOptions(command)).argv(HostSpec("a"), "python3")


def test_boot_survives_every_shell() -> None:
    assert not re.search(r"['\\!$`\n]", BOOT)
    assert remote_command("/v/bin/python") == f"/v/bin/python -c '{BOOT}'"
    compile(BOOT, "boot", "exec")


@pytest.mark.parametrize(
    ("path", "quoted"),
    [
        ("/a/b-1.2/python3", "/a/b-1.2/python3"),
        ("~/v/bin/python", "~/v/bin/python"),
        ("~/my v/python", "~/'my v/python'"),
        ("/my v/$x/python", "'/my v/$x/python'"),
        ("~me", "'~me'"),
    ],
)
def test_paths_are_quoted(path: str, quoted: str) -> None:
    assert quoted_path(path) == quoted


@pytest.mark.parametrize("path", ["it's", "a\\b", "a!b", "a\nb"])
def test_paths_that_shells_disagree_about(path: str) -> None:
    with pytest.raises(ConfigError, match="symbolic link"):
        quoted_path(path)


@pytest.mark.parametrize(
    ("status", "stderr", "words", "retry"),
    [
        (255, "ssh: Could not resolve hostname jetson1: Name or service not known",
         ["cannot be resolved", "~/.ssh/config"], False),
        (255, "ssh: connect to host jetson1 port 22: Connection refused",
         ["not accept ssh connections", "port 22"], False),
        (255, "ssh: connect to host jetson1 port 22: Connection timed out", ["cannot be reached", "10 s"],
         False),
        (255, "ssh: connect to host jetson1 port 22: No route to host", ["cannot be reached"], False),
        (255, "No ED25519 host key is known for jetson1\nHost key verification failed.",
         ["not been accepted", "once"], False),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
         ["intercepts the connection"], False),
        (255, "me@jetson1: Permission denied (publickey,password).", ["refused", "ssh-copy-id", "-i"], False),
        (255, "Received disconnect: Too many authentication failures", ["refused"], False),
        (255, "kex_exchange_identification: Connection closed by remote host", ["MaxStartups"], True),
        (255, "Connection reset by 10.0.0.2 port 22", ["MaxStartups"], True),
        (255, "Connection closed by 10.0.0.2 port 22", ["MaxStartups"], True),
        (255, "ssh_config: terminating, 1 bad configuration options", ["configuration"], False),
        (255, "something new", ["login failed", "something new"], False),
        (127, "bash: line 1: /v/bin/python: No such file or directory",
         ["no Python at /v/bin/python", "--python"], False),
        (126, "sh: /v/bin/python: Permission denied", ["no Python at"], False),
        (1, "/v/bin/python: Command not found.", ["no Python at", "--python jetson1=PATH"], False),
        (1, "ringrun-old-python 3.6.9 /usr/bin/python3", ["too old", "/usr/bin/python3 is 3.6.9", "3.8"],
         False),
        (1, "This account is currently not available.", ["status 1", "not available"], False),
        (-9, "", ["signal", "nothing"], False),
    ],
)  # fmt: skip
def test_failures_have_a_remedy(status: int, stderr: str, words: List[str], retry: bool) -> None:
    failure = SSH.explain_start("jetson1", ARGV, "/v/bin/python", status, stderr)
    for word in ["jetson1: ", *words]:
        assert word in failure.text
    assert failure.retry is retry
    assert "\n" not in failure.text


@pytest.mark.parametrize(
    ("status", "is_local", "words"),
    [
        (255, False, ["ssh connection", "status 255", "Broken pipe"]),
        (-9, False, ["signal 9"]),
        (None, True, ["agent", "still open"]),
    ],
)
def test_losses(status: int, is_local: bool, words: List[str]) -> None:
    reach = ThisMachine() if is_local else SSH
    text = reach.explain_loss("jetson1", status, "client_loop: send disconnect: Broken pipe\r\n")
    for word in words:
        assert word in text
