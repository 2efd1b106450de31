"""Every peer by name: what it needs, and the command line that starts N ranks of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FORCED = ("RINGCOMM_TRANSPORT", "ARRAYS")
"""What a peer's name decides. Other settings of ringcomm are taken from the environment, and reported."""

Command = List[str]
Start = Callable[[int, Command], Command]
"""From the number of ranks and the worker's command line to the whole command line."""


@dataclass(frozen=True)
class Peer:
    """One way to run one library."""

    name: str
    worker: str
    start: Start
    missing: Callable[[], Optional[str]]
    environ: Mapping[str, str] = field(default_factory=dict)
    mpi: str = ""

    def command(self, ranks: int, plan: Path, output: Path, options: Sequence[str] = ()) -> Command:
        """The command line that runs a plan, with options of the launcher; rank files go to ``output``."""
        worker = [sys.executable, str(HERE / self.worker), "--plan", str(plan), "--output", str(output)]
        return self.start(ranks, [*options, *worker])

    def environment(self) -> Dict[str, str]:
        """The environment to start it in."""
        environ = {name: value for name, value in os.environ.items() if name not in FORCED}
        environ["OMP_NUM_THREADS"] = environ["OPENBLAS_NUM_THREADS"] = "1"  # as torchrun does
        paths = [str(ROOT), str(ROOT / "launcher")] if self.start is _ringrun else []
        if self.mpi:
            paths.append(os.environ[f"MPI4PY_{self.mpi.upper()}"])
        paths += [environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else []
        environ["PYTHONPATH"] = os.pathsep.join(paths)
        return {**environ, **self.environ}


def python(*argv: str) -> Command:
    return [sys.executable, *argv]


# --- ringcomm, and torch.distributed ---


def _ringrun(ranks: int, worker: Command) -> Command:
    return [*python("-m", "ringrun", "-np", str(ranks)), *worker]


def _not_importable(*modules: str) -> Callable[[], Optional[str]]:
    def missing() -> Optional[str]:
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'launcher'}"}
        code = f"import {', '.join(modules)}"
        done = subprocess.run(python("-c", code), env=environ, capture_output=True, text=True)
        return f"cannot import {' and '.join(modules)}" if done.returncode else None

    return missing


# --- MPI ---


def _openmpi(*options: str) -> Start:
    def start(ranks: int, worker: Command) -> Command:
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return ["mpirun.openmpi", *root, "--oversubscribe", *options, "-np", str(ranks), *worker]

    return start


def _mpich(ranks: int, worker: Command) -> Command:
    return ["mpirun.mpich", "-np", str(ranks), *worker]


def _mpi_missing(mpi: str) -> Callable[[], Optional[str]]:
    def missing() -> Optional[str]:
        if not shutil.which(f"mpirun.{mpi}"):
            return f"no mpirun.{mpi}"
        variable = f"MPI4PY_{mpi.upper()}"
        found = (Path(os.environ.get(variable, "")) / "mpi4py").is_dir()
        return None if found else f"${variable} must name the directory of an mpi4py that was built for it"

    return missing


def _ringcomm(name: str, transport: str = "", arrays: str = "") -> Peer:
    environ = {"RINGCOMM_TRANSPORT": transport} if transport else {}
    environ.update({"ARRAYS": arrays} if arrays else {})
    return Peer(name, "run_ringcomm.py", _ringrun, _not_importable("ringrun"), environ)


TCP_OPENMPI = ("--mca", "btl", "tcp,self", "--mca", "pml", "ob1")
# MPICH with UCX (Debian's) and with libfabric; each ignores the other's variable.
TCP_MPICH = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "FI_PROVIDER": "tcp"}

PEERS: Dict[str, Peer] = {
    peer.name: peer
    for peer in (
        _ringcomm("ringcomm"),
        _ringcomm("ringcomm-shared", arrays="shared"),
        _ringcomm("ringcomm-shm", "shm"),
        _ringcomm("ringcomm-tcp", "tcp"),
        Peer("gloo", "run_gloo.py", _ringrun, _not_importable("torch.distributed"),
             {"GLOO_SOCKET_IFNAME": "lo"}),
        Peer("openmpi-tcp", "run_mpi.py", _openmpi(*TCP_OPENMPI), _mpi_missing("openmpi"), mpi="openmpi"),
        Peer("openmpi", "run_mpi.py", _openmpi(), _mpi_missing("openmpi"), mpi="openmpi"),
        Peer("mpich-tcp", "run_mpi.py", _mpich, _mpi_missing("mpich"), TCP_MPICH, mpi="mpich"),
        Peer("mpich", "run_mpi.py", _mpich, _mpi_missing("mpich"), mpi="mpich"),
    )
}  # fmt: skip


def choose(names: Sequence[str]) -> Tuple[List[Peer], Dict[str, str]]:
    """The peers to measure, and why others are left out."""
    reasons = {name: PEERS[name].missing() for name in names}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    return [PEERS[name] for name in names if name not in left_out], left_out
