"""A real Slurm over the hosts of a lab: munged and slurmctld here, one slurmd on each host."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence

from tests.hosts import netlab_system as system
from tests.hosts.netlab import Lab, wait_for

ROOT = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol")
CPUS = 8
PORTS = 26800
"""slurmctld listens on this port plus the number of the lab."""

CONFIG = """
ClusterName=lab{number}
SlurmctldHost={here}({address})
SlurmctldPort={port}
SlurmdPort=26818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=60
KillWait=4
OverTimeLimit=0
JobRequeue=1
SchedulerParameters=sched_interval=2,bf_interval=2
MpiDefault=none
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


def missing() -> List[str]:
    """The programs of Slurm that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=system.TOOL_PATH) is None]


class Slurm:
    """A context manager; its commands run here or on a host. The lab's hosts become nodes of these names."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.names = [host.name for host in lab.hosts]
        self._daemons: List[subprocess.Popen[Any]] = []

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        here = socket.gethostname().split(".")[0]
        (self.folder / "state").mkdir()
        nodes = []
        for name in self.names:
            (self.folder / f"spool-{name}").mkdir()
            own = self.lab.addresses(name)[0]
            nodes.append(f"NodeName={name} NodeAddr={own} CPUs={CPUS} RealMemory=2000")
            for other in self.names:  # a cluster's nodes resolve each other's names
                if other != name:
                    with (self.lab.directory / other / "hosts").open("a") as hosts:
                        hosts.write(f"{own} {name}\n")
        address = self.lab.addresses("localhost")[0]
        text = CONFIG.format(
            number=self.lab.number, port=PORTS + self.lab.number, here=here, address=address,
            folder=self.folder, nodes="\n".join(nodes),
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munge = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        munge.append(f"--socket={self.folder}/munge.socket")
        self._daemon("localhost", ["munged", "--foreground", "--force", *munge])
        wait_for((self.folder / "munge.socket").exists, 20, "munged")
        self._daemon("localhost", ["slurmctld", "-D"])
        for name in self.names:
            self._daemon(name, ["slurmd", "-D", "-N", name])
        wait_for(self._all_idle, 40, "idle nodes")

    def _daemon(self, host: str, argv: Sequence[str]) -> None:
        with (self.folder / f"{argv[0]}.out").open("ab") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._daemons.append(self.lab.popen(host, argv, env=self.environ(), cwd="/", **streams))

    def _all_idle(self) -> bool:
        shown = self.run("sinfo", "-h", "-N", "-o", "%t", check=False).stdout.split()
        return shown == ["idle"] * len(self.names)

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--user=root", check=False)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def environ(self) -> Dict[str, str]:
        """The environment of a user of this Slurm, with ringcomm."""
        mine = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "HOME": str(self.folder)}
        mine["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), system.TOOL_PATH])
        mine["PYTHONPATH"] = f"{ROOT}:{ROOT / 'launcher'}"
        for name in ("CI", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"):
            mine.pop(name, None)
        return mine

    def run(self, *argv: Any, timeout_s: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command here; output is captured, and errors raise, unless told otherwise."""
        options = {"check": True, "cwd": self.folder, "env": self.environ(), **options}
        return subprocess.run(
            [str(word) for word in argv], text=True, capture_output=True, timeout=timeout_s,
            stdin=subprocess.DEVNULL, **options,
        )  # fmt: skip
