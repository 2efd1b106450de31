from __future__ import annotations

from pathlib import Path
from typing import List, Optional

import pytest

from ringcomm.errors import ConfigError
from ringrun.plan.allocations import Allocation
from ringrun.plan.hosts import HostSpec
from ringrun.reach.doors import Doors, allocation_of
from ringrun.reach.protocol import BOOT
from ringrun.reach.ssh import Ssh, SshOptions
from ringrun.reach.via import Srun, Via

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
    ("template", "word"),
    [("docker exec", "{host}"), ("", "{host}"), ("docker 'x {host}", "cannot be parsed")],
)
def test_templates_that_cannot_be_used(template: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Via(template)
    assert "--via" in str(caught.value) and word in str(caught.value)


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
def test_failures_have_a_remedy(
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
        (None, SLURM, "Slurm job 7 get this job's key by srun,"),
        ("ssh", SLURM, ""),
        (None, PODS, ""),
        (None, None, ""),
    ],
)
def test_a_way_that_does_not_encrypt_the_key_is_named(
    via: Optional[str], allocation: Optional[Allocation], by: str
) -> None:
    told = Doors(via, SshOptions(), allocation).in_clear()
    assert bool(told) is bool(by) and all(by in text and "--via ssh" in text for text in told)


@pytest.mark.parametrize(
    ("via", "ssh", "allocation", "host", "kind"),
    [
        (None, SshOptions(), None, "box1", "ssh"),
        (None, SshOptions(), SLURM, "box1", "srun"),
        (None, SshOptions(), SLURM, "other", "ssh"),
        (None, SshOptions(port=2222), SLURM, "box1", "ssh"),
        ("ssh", SshOptions(), SLURM, "box1", "ssh"),
        ("docker exec -i {host}", SshOptions(), SLURM, "box1", "docker"),
        (None, SshOptions(), PODS, "box1", "ssh"),
    ],
)
def test_the_way_to_a_host(
    via: Optional[str], ssh: SshOptions, allocation: Optional[Allocation], host: str, kind: str
) -> None:
    doors = Doors(via, ssh, allocation)
    assert doors.of(HostSpec(host), False).description == kind
    assert doors.of(HostSpec(host), True).description == "this machine, no ssh"


def test_hosts_of_a_cluster_that_starts_are_waited_for() -> None:
    output = "ssh: Could not resolve hostname box1: Name or service not known"
    for may_appear in (False, True):
        ssh = Ssh(SshOptions(), may_appear)
        failure = ssh.explain_start("box1", ssh.argv(BOX, "/p"), "/p", 255, output)
        assert (failure.retry, failure.may_appear) == (may_appear, may_appear)
        assert "cannot be resolved" in failure.text
    argv = ["ssh", "box1", ""]
    assert not Ssh(SshOptions(), True).explain_start("box1", argv, "/p", 255, "Permission denied").retry


def test_the_name_of_a_container_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object, **__: object) -> None:
        raise AssertionError("a name was looked up")

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    assert Doors("docker exec -i {host}", SshOptions(), None).find_local([BOX]) == [False]
    assert Doors(None, SshOptions(), SLURM).find_local([BOX]) == [False]
    own = Doors(None, SshOptions(), SLURM).find_local([HostSpec("box0"), HostSpec("localhost")])
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
