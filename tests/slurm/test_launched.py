"""Scripts that srun, and the mpirun of Open MPI, have started themselves."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, List

import pytest

from tests.hosts.netlab import Lab
from tests.slurm.cluster import Slurm
from tests.slurm.test_slurm import LINE, MEMBER, places

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


def test_one_process_of_mpirun_is_a_whole_job(slurm: Slurm) -> None:
    done = slurm.run("mpirun.openmpi", "--allow-run-as-root", "-np", 1, sys.executable, MEMBER)
    assert [(row[0], row[1]) for row in LINE.findall(done.stdout)] == [("0", "1")]


def test_a_process_group_of_torch(slurm: Slurm) -> None:
    program = slurm.folder / "group.py"
    program.write_text(
        "import torch, torch.distributed as dist, ringcomm.torch.distributed\n"
        "dist.init_process_group('ringcomm', init_method='ringcomm://')\n"
        "x = torch.ones(2)\n"
        "dist.all_reduce(x)\n"
        "part = dist.new_group([0, 1])\n"
        "dist.barrier(group=part)\n"
        "print('sum', float(x.sum()))\n"
        "dist.destroy_process_group()\n"
    )
    done = slurm.run("srun", "-N2", "-n2", "python", program)
    assert done.stdout.count("sum 4.0") == 2, done.stdout + done.stderr
