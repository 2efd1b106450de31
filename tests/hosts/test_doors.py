"""Ways to reach hosts other than ssh: command templates, and schedulers by stub commands of theirs."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Callable, Iterator, List

import pytest

from tests.hosts.job import Job, job_processes, ringrun
from tests.hosts.netlab import Lab, wait_for

MEMBER = Path(__file__).parents[1] / "slurm" / "programs" / "member.py"
LINE = re.compile(r"rank (\d+) of (\d+) on (\S+) local (\d+) of (\d+): total (\d+)")

Program = Callable[[str, str], Path]


@pytest.fixture
def program(lab: Lab) -> Iterator[Program]:
    """`program(name, script)`: make a command of the user's PATH; `enter_HOST ARGV` runs ARGV on a host."""
    made: List[Path] = []

    def make(name: str, script: str) -> Path:
        enter = "".join(
            f'enter_{host.name}() {{ exec {shlex.join(lab.command(host.name, [], cwd="/"))} "$@"; }}\n'
            for host in lab.hosts
        )
        path = lab.directory / "bin" / name
        path.write_text(f"#!/bin/sh\n{enter}{script}\n")
        path.chmod(0o755)
        made.append(path)
        return path

    yield make
    for path in made:
        path.unlink()


def logins(lab: Lab) -> int:
    """Return how many logins by ssh the hosts have seen."""
    logs = [lab.directory / host.name / "sshd.log" for host in lab.hosts]
    return sum(log.read_text().count("Accepted publickey") for log in logs)


def places(job: Job) -> List[str]:
    """The hosts of the ranks; every rank has the sum over all of them."""
    found = {int(row[0]): row for row in LINE.findall(job.output)}
    assert all(int(row[5]) == len(found) * (len(found) + 1) // 2 for row in found.values()), job.output
    return [row[2] for _, row in sorted(found.items())]


def test_containers_that_sleep(lab: Lab, program: Program, tmp_path: Path) -> None:
    """The command line of the fourth article: workers without sshd, a hostfile, root."""
    program("python", f'exec {sys.executable} "$@"')
    program("box", 'host=$2; shift 3; enter_$host "$@"')
    (tmp_path / "hostfile").write_text("jetson1 slots=1\njetson2 slots=1\n")
    before = logins(lab)
    line = f"--allow-run-as-root --hostfile {tmp_path}/hostfile -bind-to none -map-by slot -mca pml ob1"
    job = ringrun(lab, "--via", "box -i {host} --", *line.split(), "-mca", "btl", "^openib", "python", MEMBER)
    assert places(job) == ["jetson1", "jetson2"], job.output
    assert logins(lab) == before


def test_a_container_that_ends_is_named(lab: Lab, program: Program) -> None:
    program("box", 'host=$2; shift 3; enter_$host "$@"')
    with Job(lab, "--via", "box -i {host} --", "-H", "jetson1,jetson2", MEMBER, "sleep", "ends") as job:
        for _ in range(2):
            job.wait_for_line("started")
        lab.kill_host("jetson2")
        assert job.finish() == 255  # of a host that is lost
    assert re.search(r"jetson2: the connection to it \(box\) ", job.output), job.output
    wait_for(lambda: not job_processes(lab, "member.py sleep ends"), 10, "the end of all processes")


def test_the_mpi_operators_hosts_are_waited_for(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variables name a hostfile whose names resolve late: pods and their services start later."""
    names = ["train-worker-0.train.jobs.svc", "train-worker-1.train.jobs.svc"]
    (tmp_path / "hostfile").write_text("".join(f"{name} slots=1\n" for name in names))
    monkeypatch.setenv("OMPI_MCA_orte_default_hostfile", str(tmp_path / "hostfile"))
    plain = lab.ssh_config.read_text()
    with Job(lab, "--verbose", MEMBER) as job:
        try:
            job.wait_for_line("train-worker-1.*Could not resolve hostname", 60)
            entries = [
                f"Host {name}\n    HostName {lab.addresses(host.name)[0]}\n    HostKeyAlias {host.name}\n"
                f"    IdentityFile {lab.directory}/client_key\n"
                for name, host in zip(names, lab.hosts)
            ]
            lab.ssh_config.write_text("".join(entries) + plain)
            job.finish(90)
        finally:
            lab.ssh_config.write_text(plain)
    assert places(job) == ["jetson1", "jetson2"], job.output
    assert "train-worker-0.train.jobs.svc:1" in job.output


def test_which_frameworks_hosts_have(lab: Lab, program: Program) -> None:
    program("box", 'host=$2; shift 3; enter_$host "$@"')
    job = ringrun(lab, "--via", "box -i {host} --", "-H", "jetson1:2,jetson2:2", "--check-build")
    assert len(re.findall(r"^\[jetson1:0\].*NumPy", job.output, re.MULTILINE)) == 1, job.output
    assert len(re.findall(r"^\[jetson2:1\].*NumPy", job.output, re.MULTILINE)) == 1, job.output


@pytest.mark.parametrize(
    "line",
    [
        "-np 3 -H localhost:1,jetson2:1,jetson3:1 -mca btl_tcp_if_include eth0 -x NCCL_SOCKET_IFNAME=eth0"
        " -bind-to none -map-by slot",
        "-np 6 -H jetson1:2,jetson2:2,jetson3:2 -bind-to none -map-by slot -mca pml ob1 -mca btl ^openib",
        "--allow-run-as-root --hostfile HOSTFILE -bind-to none -map-by slot -mca pml ob1 -mca btl ^openib",
    ],
)
def test_lines_of_the_articles_on_three_hosts(
    make_lab: Callable[..., Lab], tmp_path: Path, line: str
) -> None:
    lab = make_lab("jetson1", "jetson2", "jetson3")
    (tmp_path / "hosts").write_text("jetson1 slots=1 max_slots=4\njetson2 slots=1\njetson3 slots=1\n")
    words = line.replace("HOSTFILE", str(tmp_path / "hosts")).split()
    root = Path(__file__).parents[2]
    environ = {**lab.environ(), "PYTHONPATH": f"{root}:{root / 'launcher'}"}
    path = os.pathsep.join([str(Path(sys.executable).parent), lab.environ()["PATH"]])
    argv = ["env", f"PATH={path}", sys.executable, "-m", "ringrun", *words, "python", str(MEMBER)]
    done = lab.run("jetson1", argv, env=environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = sorted(LINE.findall(done.stdout))
    hosts = ["jetson1", "jetson2", "jetson3"]
    each = 2 if "-np 6" in line else 1
    assert [row[2] for row in found] == [host for host in hosts for _ in range(each)], done.stdout
    assert len({row[5] for row in found}) == 1
