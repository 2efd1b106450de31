"""Scripts that srun, and the mpirun of Open MPI, have started themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from typing import Any, List

import pytest

from tests.hosts.job import EXAMPLES, ROOT
from tests.hosts.netlab import Lab
from tests.slurm.cluster import Slurm
from tests.slurm.test_slurm import MEMBER, places

ARTICLE = "-bind-to none -map-by slot -mca pml ob1 -mca btl ^openib"


def three_hosts(slurm: Slurm, lab: Lab, launcher: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run a program on three hosts with an mpirun that logs in by ssh."""
    own = lab.addresses("localhost")[0]
    hosts = ",".join(f"{host.name}:1" for host in lab.hosts)
    environ = {**slurm.environ(), "PATH": f"{lab.directory}/bin:{slurm.environ()['PATH']}"}
    if launcher == "mpirun.openmpi":
        words = ["--allow-run-as-root", "-mca", "oob_tcp_if_include", f"{own}/24", *ARTICLE.split()]
        words += ["-x", "PYTHONPATH", "-x", "HOME"]
    else:
        words = ["-launcher", "ssh", "-localhost", own, "-genvlist", "PYTHONPATH,HOME"]
    line: List[Any] = [launcher, "-np", 3, "-H" if "openmpi" in launcher else "-hosts", hosts, *words]
    return slurm.run(*line, sys.executable, *arguments, check=False, env=environ, start_new_session=True)


def test_srun(slurm: Slurm) -> None:
    done = slurm.run("srun", "-N2", "-n4", "python", MEMBER)
    assert sorted(host for host, _ in places(done.stdout).values()) == ["jetson1"] * 3 + ["jetson2"]
    assert list((slurm.folder / ".ringcomm").iterdir()) == []  # nothing with a key is left


def test_two_steps_of_one_job_at_once(slurm: Slurm) -> None:
    flag = slurm.folder / "both-steps"
    # Both steps have joined before either may go on.
    script = (
        f"for step in 1 2; do srun --overlap -N2 -n2 python {MEMBER} until {flag} >step$step.out & done; "
        f"until grep -c started step1.out | grep -q 2 && grep -c started step2.out | grep -q 2; "
        f"do sleep 0.1; done; touch {flag}; wait"
    )
    slurm.run("salloc", "-N2", "-n4", "sh", "-c", script)
    for step in (1, 2):
        assert len(places((slurm.folder / f"step{step}.out").read_text())) == 2


def test_mpirun_on_three_hosts(slurm: Slurm, slurm_lab: Lab) -> None:
    done = three_hosts(slurm, slurm_lab, "mpirun.openmpi", MEMBER)
    assert sorted(host for host, _ in places(done.stdout).values()) == ["jetson1", "jetson2", "jetson3"], (
        done.stdout + done.stderr
    )
    assert done.returncode == 0


def test_mpirun_in_an_allocation(slurm: Slurm) -> None:
    """Open MPI starts its daemons with srun: a rank has the variables of that step, too."""
    done = slurm.run("salloc", "-N2", "-n4", "mpirun.openmpi", "--allow-run-as-root", "python", MEMBER)
    assert sorted(host for host, _ in places(done.stdout).values()) == ["jetson1"] * 3 + ["jetson2"]


@pytest.mark.parametrize("launcher", ["srun", "mpirun.openmpi"])
def test_a_rank_that_fails_is_named(slurm: Slurm, slurm_lab: Lab, launcher: str) -> None:
    program = slurm.folder / "fails.py"
    program.write_text(
        "import numpy as np, ringcomm as rc\n"
        "rc.init()\n"
        "if rc.rank() == 1: raise SystemExit('rank 1 gives up')\n"
        "try: rc.allreduce(np.ones(3))\n"
        "except rc.RingcommError as problem: print('error of', rc.rank(), problem, flush=True)\n"
    )
    if launcher == "srun":
        done = slurm.run("srun", "--kill-on-bad-exit=0", "-N3", "-n3", "python", program, check=False)
        assert done.stdout.count("error of") == 2 and "rank 1" in done.stdout, done.stdout
    else:  # mpirun ends the others
        done = three_hosts(slurm, slurm_lab, launcher, program)
        assert "rank 1 gives up" in done.stdout + done.stderr
    assert done.returncode != 0


@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("lightning") is None, reason="bash tests/run.sh --only trainers has Lightning")
def test_lightning_trains_in_an_allocation(slurm: Slurm) -> None:
    """Three ranks on two nodes, no list of hosts; Slurm's variables do not mislead Lightning."""
    recorded = ROOT / "tests" / "adapters" / "trainers" / "recorded.py"
    command = ["salloc", "-N2", "-n3", "ringrun", "-x", "OMP_NUM_THREADS=1", "--start-timeout", "200",
               recorded, EXAMPLES / "lightning_ddp.py", "--epochs", "1"]  # fmt: skip
    done = slurm.run(*command, timeout_s=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pattern = r"^\[(jetson\d:\d)\] rank (\d): weights have digest (\w{16})"
    found = re.findall(pattern, done.stdout, re.MULTILINE)
    assert [row[:2] for row in sorted(found)] == [("jetson1:0", "0"), ("jetson1:1", "1"), ("jetson2:2", "2")]
    assert len({row[2] for row in found}) == 1, done.stdout
    assert "3 process(es) over ringcomm" in done.stdout, done.stdout
