"""Ways to hosts: command lines, and explanations of failures."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any, List, Optional

import pytest

from ringcomm.errors import ConfigError
from ringrun.plan.hosts import Allocation, HostSpec
from ringrun.plan.options import Options
from ringrun.reach import base
from ringrun.reach.base import (
    Doors,
    Srun,
    Ssh,
    Via,
    allocation_of,
    find_local,
    is_own_name,
    quoted_path,
    remote_command,
)
from ringrun.reach.protocol import BOOT

SSH = Ssh(Options(ssh="ssh -F 'my config'", ssh_port=2222, ssh_identity_file="key file"))
ARGV = SSH.argv(HostSpec("jetson1", "me"), "/v/bin/python")


def test_argv() -> None:
    assert ARGV[:3] == ["ssh", "-F", "my config"]
    assert ARGV[-3:] == ["--", "me@jetson1", remote_command("/v/bin/python")]
    assert "--" not in Ssh(Options(ssh="dbclient -y")).argv(HostSpec("jetson1"), "python3")
    assert Ssh(Options()).argv(HostSpec("fd00::2", "me"), "python3")[-2] == "me@fd00::2", "no brackets"
    text = " ".join(ARGV)
    for part in ("-T", "-o BatchMode=yes", "-o ConnectTimeout=10", "-p 2222", "-i key file"):
        assert part in text
    assert "StrictHostKeyChecking" not in text
    argv = SSH.argv(HostSpec("a", port=22), "python3")
    assert argv[argv.index("-p") + 1] == "22" and "2222" not in argv, "the host's port comes first"


@pytest.mark.parametrize("spec", [HostSpec("-oProxyCommand=id"), HostSpec("a", "-l"), HostSpec("$(id)")])
def test_a_name_that_is_an_option_or_a_command_reaches_no_command_line(spec: HostSpec) -> None:
    for reach in (SSH, Via("sh -c 'ssh {host}' {command}")):
        with pytest.raises(ConfigError, match="is not a host"):
            reach.argv(spec, "python3")


def test_boot_survives_every_shell() -> None:
    assert not re.search(r"['\\!$`\n]", BOOT)
    assert remote_command("/v/bin/python") == f"/v/bin/python -c '{BOOT}'"
    compile(BOOT, "boot", "exec")


@pytest.mark.parametrize(
    ("path", "quoted"),
    [
        ("/a/b-1.2/python3", "/a/b-1.2/python3"), ("~/v/bin/python", "~/v/bin/python"),
        ("~/my v/python", "~/'my v/python'"), ("/my v/$x/python", "'/my v/$x/python'"), ("~me", "'~me'"),
    ],
)
def test_paths_are_quoted(path: str, quoted: str) -> None:
    assert quoted_path(path) == quoted


def test_paths_that_shells_disagree_about() -> None:
    for path in ("it's", "a\\b", "a!b", "a\nb"):
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


BOX = HostSpec("box1")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("docker exec -i {host}", ["docker", "exec", "-i", "box1", "/p", "-c", BOOT]),
        ("kubectl exec -i pod/{host} --", ["kubectl", "exec", "-i", "pod/box1", "--", "/p", "-c", BOOT]),
        ("/opt/bin/rsh -n {host}", ["/opt/bin/rsh", "-n", "box1", f"/p -c '{BOOT}'"]),
        ("run {host} sh -c {command}", ["run", "box1", "sh", "-c", f"/p -c '{BOOT}'"]),
    ],
)
def test_templates(template: str, words: List[str]) -> None:
    assert Via(template).argv(BOX, "/p") == words


@pytest.mark.parametrize(
    ("template", "text"),
    [("docker exec", "{host}"), ("", "{host}"), ("docker 'x {host}", "cannot be parsed")],
)
def test_templates_and_commands_that_cannot_be_used(template: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"--via.*{text}"):
        Via(template)
    for command in ("", "ssh 'x"):
        with pytest.raises(ConfigError, match="--ssh"):
            Ssh(Options(ssh=command)).argv(HostSpec("a"), "python3")


@pytest.mark.parametrize(
    ("template", "status", "output", "words", "no_python", "may_appear"),
    [
        ("docker exec -i {host}", 127, 'OCI runtime exec failed: exec: "/p": no such file or directory',
         ["no Python at /p", "--python box1=PATH"], True, False),
        ("docker exec -i {host}", 1, "Error response from daemon: No such container: box1",
         ["status 1", "No such container", "docker exec -i box1 /p --version"], False, False),
        ("kubectl exec -i {host} --", 1, 'Error from server (NotFound): pods "box1" not found',
         ["NotFound", "kubectl exec -i box1 -- /p --version"], False, False),
        ("kubectl exec -i {host} --", 1, "error: unable to upgrade connection: container not found",
         ["does not run yet", "kubectl exec -i box1 -- true"], False, True),
        ("rsh {host}", 127, "sh: /p: not found", ["no Python at /p"], True, False),
        ("docker exec -i {host}", 1, "ringrun-old-python 3.6.9 /p", ["too old", "3.8"], False, False),
    ],
)  # fmt: skip
def test_failures_of_templates_have_a_remedy(
    template: str, status: int, output: str, words: List[str], no_python: bool, may_appear: bool
) -> None:
    via = Via(template)
    failure = via.explain_start("box1", via.argv(BOX, "/p"), "/p", status, output)
    assert all(word in failure.text for word in ["box1: ", *words]), failure.text
    assert (failure.no_python, failure.may_appear) == (no_python, may_appear)
    assert failure.retry is may_appear and "\n" not in failure.text and BOOT not in failure.text


@pytest.mark.parametrize(
    ("status", "output", "words", "no_python"),
    [
        (2, "slurmstepd: error: execve(): /p: No such file or directory", ["no Python at /p"], True),
        (1, "srun: error: Unable to create step for job 7: Requested node configuration is not available",
         ["starts no step there", "scontrol show job 7"], False),
        (1, "srun: error: Unable to confirm allocation for job 7: Invalid job id specified",
         ["job 7 is over"], False),
        (1, "srun: unrecognized option '--overlap'",
         ["--via 'srun --nodes=1 ", "--cpu-bind=none", "--nodelist={host}'"], False),
    ],
)  # fmt: skip
def test_failures_of_srun(status: int, output: str, words: List[str], no_python: bool) -> None:
    srun = Srun("7")
    failure = srun.explain_start("box1", srun.argv(BOX, "/p"), "/p", status, output)
    assert all(word in failure.text for word in ["box1: ", *words]), failure.text
    assert failure.no_python is no_python


SLURM = Allocation("Slurm job 7", (BOX,), "7", "box0")
PODS = Allocation("/etc/mpi/hostfile (HYDRA_HOST_FILE)", (BOX,), may_appear=True)


@pytest.mark.parametrize(
    ("via", "allocation", "by"),
    [
        (None, SLURM, "Slurm job 7 get this job's key by srun,"), ("ssh", SLURM, ""), (None, PODS, ""),
        (None, None, ""),
    ],
)
def test_a_way_that_does_not_encrypt_the_key_is_named(
    via: Optional[str], allocation: Optional[Allocation], by: str
) -> None:
    told = Doors(Options(via=via), allocation).in_clear()
    assert bool(told) is bool(by) and all(by in text and "--via ssh" in text for text in told)


@pytest.mark.parametrize(
    ("options", "allocation", "host", "kind"),
    [
        (Options(), None, "box1", "ssh"), (Options(), SLURM, "box1", "srun"),
        (Options(), SLURM, "other", "ssh"), (Options(ssh_port=2222), SLURM, "box1", "ssh"),
        (Options(via="ssh"), SLURM, "box1", "ssh"),
        (Options(via="docker exec -i {host}"), SLURM, "box1", "docker"),
        (Options(), PODS, "box1", "ssh"),
    ],
)
def test_the_way_to_a_host(
    options: Options, allocation: Optional[Allocation], host: str, kind: str
) -> None:
    doors = Doors(options, allocation)
    assert doors.of(HostSpec(host), False).description == kind
    assert doors.of(HostSpec(host), True).description == "this machine, no ssh"


def test_hosts_of_a_cluster_that_starts_are_waited_for() -> None:
    output = "ssh: Could not resolve hostname box1: Name or service not known"
    for may_appear in (False, True):
        ssh = Ssh(Options(), may_appear)
        failure = ssh.explain_start("box1", ssh.argv(BOX, "/p"), "/p", 255, output)
        assert (failure.retry, failure.may_appear) == (may_appear, may_appear)
        assert "cannot be resolved" in failure.text
    argv = ["ssh", "box1", ""]
    assert not Ssh(Options(), True).explain_start("box1", argv, "/p", 255, "Permission denied").retry


def test_the_name_of_a_container_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object, **__: object) -> None:
        raise AssertionError("a name was looked up")

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    assert Doors(Options(via="docker exec -i {host}"), None).find_local([BOX]) == [False]
    assert Doors(Options(), SLURM).find_local([BOX]) == [False]
    own = Doors(Options(), SLURM).find_local([HostSpec("box0"), HostSpec("localhost")])
    assert own == [True, True]


@pytest.mark.parametrize(
    ("content", "text"), [(None, "cannot be read: No such file"), (b"\xff\xfe", "not a text file in UTF-8")]
)
def test_a_file_of_a_scheduler_that_cannot_be_read(
    tmp_path: Path, content: Optional[bytes], text: str
) -> None:
    """The job may be over: that matters only if its hosts are needed."""
    file = tmp_path / "nodes"
    if content is not None:
        file.write_bytes(content)
    environ = {"HYDRA_HOST_FILE": str(file)}
    assert allocation_of(environ, needed=False) is None
    with pytest.raises(ConfigError) as caught:
        allocation_of(environ, needed=True)
    assert text in str(caught.value) and str(file) in str(caught.value)


OWN = frozenset(map(ipaddress.ip_address, ["10.0.0.5", "fe80::5", "fd00::5"]))


@pytest.mark.parametrize(
    ("name", "hostname", "own"),
    [
        ("localhost", "pc", True), ("LOCALHOST", "pc", True), ("PC", "pc", True), ("pc.", "pc", True),
        ("pc", "pc.lan", True), ("pc.lan", "pc", False), ("pc.lan", "pc.office", False), ("pc2", "pc", False),
        ("", "", True),
    ],
)
def test_names(name: str, hostname: str, own: bool) -> None:
    assert is_own_name(name, hostname) is own


def test_names_are_looked_up_once_and_a_user_needs_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: List[str] = []

    def look_up(name: str, *_: object, **__: object) -> List[Any]:
        asked.append(name)
        if name == "unknown":
            raise OSError("Name or service not known")
        addresses = {"alias": ["10.0.0.6", "FD00:0::5"], "here": ["127.0.1.1"], "odd": ["not-an-address"]}
        return [(2, 1, 6, "", (address, 0)) for address in addresses.get(name, ["10.0.0.6"])]

    monkeypatch.setattr(base, "own_addresses", lambda: OWN)
    monkeypatch.setattr(base.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(base.getpass, "getuser", lambda: "me")
    specs = [
        HostSpec("localhost"), HostSpec("alias"), HostSpec("alias", "me"), HostSpec("alias", "you"),
        HostSpec("far"), HostSpec("unknown"), HostSpec("node0"), HostSpec("pod"), HostSpec("here"),
        HostSpec("odd"),
    ]  # fmt: skip
    found = find_local(specs, more_names=["node0"], by_name=lambda spec: spec.name == "pod", answers={})
    assert found == [True, True, True, False, False, False, True, False, True, False]
    assert sorted(asked) == ["alias", "far", "here", "odd", "unknown"]


@pytest.mark.parametrize("problem", [KeyError("uid"), OSError("no name"), ImportError("pwd")])
def test_an_account_without_a_name(monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    def user() -> str:
        raise problem

    monkeypatch.setattr(base.getpass, "getuser", user)
    specs = [HostSpec("localhost"), HostSpec("localhost", "me")]
    assert find_local(specs, more_names=(), by_name=lambda spec: False, answers={}) == [True, False]
