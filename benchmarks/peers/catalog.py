"""Every peer by name: what it needs, and the command line that starts N ranks of it.

A name may carry a congestion control, as in ``gloo@reno``. The peer then runs in a network namespace of its
own (needs root) in which that is the system's default, so that nothing else on the machine is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BASELINE = "gloo"
FORCED = ("RINGCOMM_TRANSPORT", "RINGCOMM_CONGESTION", "ARRAYS")
"""What a peer's name decides. Other settings of ringcomm are taken from the environment, and reported."""
MPIS = ("openmpi", "mpich")

# A namespace with an ordinary interface besides lo, because Open MPI and UCX leave lo alone.
NAMESPACE = """
set -e
ip link set lo up
ip link add bench0 type veth peer name bench1
ip addr add 10.77.77.1/24 dev bench0
ip link set bench0 up
ip link set bench1 up
echo "$0" > /proc/sys/net/ipv4/tcp_congestion_control
exec "$@"
"""

Command = List[str]
Start = Callable[[int, Command, Path], Command]
"""From the number of ranks, the worker's command line and a directory to the whole command line."""


@dataclass(frozen=True)
class Tools:
    """What the command line or the environment said about where the peers are."""

    mpi4py: Mapping[str, str] = field(default_factory=dict)
    """For each MPI, the directory that holds the mpi4py built for it."""


@dataclass(frozen=True)
class Peer:
    """One way to run one library."""

    name: str
    worker: str
    start: Start
    missing: Callable[[Tools], Optional[str]]
    environ: Mapping[str, str] = field(default_factory=dict)
    mpi: str = ""
    congestion: str = ""
    same_host: bool = False
    """Whether it may use shared memory; then it is compared with the memory's speed."""

    def command(self, ranks: int, plan: Path, output: Path) -> Command:
        """The command line that runs a plan; its rank files go to ``output``."""
        worker = [sys.executable, str(HERE / self.worker), "--plan", str(plan), "--output", str(output)]
        command = self.start(ranks, worker, output)
        if self.congestion:
            command = ["unshare", "--net", "sh", "-c", NAMESPACE, self.congestion, *command]
        return command

    def environment(self, tools: Tools) -> Dict[str, str]:
        """The environment to start it in."""
        environ = {name: value for name, value in os.environ.items() if name not in FORCED}
        environ["OMP_NUM_THREADS"] = environ["OPENBLAS_NUM_THREADS"] = "1"  # as torchrun does
        paths = [str(ROOT), str(ROOT / "launcher")] if self.start is _ringrun else []
        if self.mpi:
            paths.append(tools.mpi4py[self.mpi])
        paths += [environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else []
        environ["PYTHONPATH"] = os.pathsep.join(paths)
        return {**environ, **self.environ}


def python(*argv: str) -> Command:
    return [sys.executable, *argv]


# --- ringcomm ---


def _ringrun(ranks: int, worker: Command, _: Path) -> Command:
    return [*python("-m", "ringrun", "-np", str(ranks)), *worker]


@lru_cache(maxsize=None)
def _settings() -> Tuple[str, ...]:
    script = "from ringrun.plan.environment import setting_variables as v; print(*v())"
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'launcher'}"}
    found = subprocess.run(python("-c", script), env=environ, capture_output=True, text=True)
    return tuple(found.stdout.split())


def _ringcomm_missing(variable: Optional[str] = None) -> Callable[[Tools], Optional[str]]:
    def missing(_: Tools) -> Optional[str]:
        if not _settings():
            return "cannot import ringrun (pip install numpy cloudpickle psutil click)"
        if variable is not None and variable not in _settings():
            return f"this ringcomm has no {variable} yet"
        return None

    return missing


# --- torch.distributed and Horovod ---


def spawned(commands: Sequence[Command], output: Path) -> Command:
    """The command that runs one command per rank."""
    return python(str(HERE / "spawn.py"), str(output / "store"), json.dumps(commands))


def _spawn(ranks: int, worker: Command, output: Path) -> Command:
    return spawned([worker] * ranks, output)


def _horovodrun(ranks: int, worker: Command, _: Path) -> Command:
    return [*python("-m", "horovod.runner.launch", "-np", str(ranks), "--gloo"), *worker]


def _not_importable(*modules: str) -> Callable[[Tools], Optional[str]]:
    def missing(_: Tools) -> Optional[str]:
        done = subprocess.run(python("-c", f"import {', '.join(modules)}"), capture_output=True, text=True)
        return f"cannot import {' and '.join(modules)}" if done.returncode else None

    return missing


# --- MPI ---


def _openmpi(*options: str) -> Start:
    def start(ranks: int, worker: Command, _: Path) -> Command:
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return ["mpirun.openmpi", *root, "--oversubscribe", *options, "-np", str(ranks), *worker]

    return start


def _mpich(ranks: int, worker: Command, _: Path) -> Command:
    return ["mpirun.mpich", "-np", str(ranks), *worker]


def _mpi_missing(mpi: str) -> Callable[[Tools], Optional[str]]:
    def missing(tools: Tools) -> Optional[str]:
        if not shutil.which(f"mpirun.{mpi}"):
            return f"no mpirun.{mpi}"
        if not tools.mpi4py.get(mpi):
            return f"no mpi4py for it: --mpi4py-{mpi} DIR"
        if not (Path(tools.mpi4py[mpi]) / "mpi4py").is_dir():
            return f"no mpi4py in {tools.mpi4py[mpi]}"
        return None

    return missing


def _ringcomm(name: str, transport: str = "", same_host: bool = False, arrays: str = "") -> Peer:
    environ = {"RINGCOMM_TRANSPORT": transport} if transport else {}
    environ.update({"ARRAYS": arrays} if arrays else {})
    missing = _ringcomm_missing("RINGCOMM_TRANSPORT" if transport else None)
    return Peer(name, "run_ringcomm.py", _ringrun, missing, environ, same_host=same_host)


TCP_OPENMPI = ("--mca", "btl", "tcp,self", "--mca", "pml", "ob1")
# MPICH with UCX (Debian's) and with libfabric; each ignores the other's variable.
TCP_MPICH = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self", "FI_PROVIDER": "tcp"}

PEERS: Dict[str, Peer] = {
    peer.name: peer
    for peer in (
        _ringcomm("ringcomm", same_host=True),
        _ringcomm("ringcomm-shared", same_host=True, arrays="shared"),
        _ringcomm("ringcomm-tcp", "tcp"),
        _ringcomm("ringcomm-unix", "unix"),
        _ringcomm("ringcomm-shm", "shm", same_host=True),
        _ringcomm("ringcomm-memory", "memory", same_host=True),
        Peer(
            "gloo", "run_gloo.py", _spawn, _not_importable("torch.distributed"), {"GLOO_SOCKET_IFNAME": "lo"}
        ),
        *(
            Peer(
                f"ringcomm-torch{of}",
                "run_gloo.py",
                _ringrun,
                _not_importable("torch.distributed"),
                {"BACKEND": "ringcomm", **({"RINGCOMM_TRANSPORT": "tcp"} if of else {})},
                same_host=not of,
            )
            for of in ("", "-tcp")
        ),
        Peer("mlx", "run_mlx.py", _spawn, _not_importable("mlx.core")),
        Peer("openmpi-tcp", "run_mpi.py", _openmpi(*TCP_OPENMPI), _mpi_missing("openmpi"), mpi="openmpi"),
        Peer("openmpi", "run_mpi.py", _openmpi(), _mpi_missing("openmpi"), mpi="openmpi", same_host=True),
        Peer("mpich-tcp", "run_mpi.py", _mpich, _mpi_missing("mpich"), TCP_MPICH, mpi="mpich"),
        Peer("mpich", "run_mpi.py", _mpich, _mpi_missing("mpich"), mpi="mpich", same_host=True),
        Peer(
            "horovod",
            "run_horovod.py",
            _horovodrun,
            _not_importable("horovod.torch"),
            {"HOROVOD_GLOO_IFACE": "lo"},
        ),
    )
}


def find(name: str) -> Peer:
    """A peer by name, perhaps with a congestion control.

    Raises:
        KeyError: there is no such peer.
    """
    plain, _, congestion = name.partition("@")
    peer = PEERS[plain]
    if not congestion:
        return peer
    environ = dict(peer.environ)
    if peer.worker == "run_ringcomm.py":
        environ["RINGCOMM_CONGESTION"] = congestion

    def missing(tools: Tools) -> Optional[str]:
        if os.geteuid() != 0:
            return "another congestion control needs root (for a network namespace)"
        known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
        return (
            peer.missing(tools) if congestion in known else f"no {congestion} here, only {', '.join(known)}"
        )

    return Peer(
        name, peer.worker, peer.start, missing, environ, peer.mpi, congestion, peer.same_host
    )  # fmt: skip


def baseline_of(name: str) -> str:
    """Whose time a peer's is compared with, if it was measured: Gloo's under the same congestion control."""
    _, at, congestion = name.partition("@")
    return BASELINE + at + congestion


def choose(names: Optional[Sequence[str]], tools: Tools) -> Tuple[List[Peer], Dict[str, str]]:
    """The peers to measure, and why others are left out.

    Raises:
        SystemExit: one that was asked for by name is not to be had.
    """
    left_out: Dict[str, str] = {}
    chosen: List[Peer] = []
    for name in names or PEERS:
        try:
            peer = find(name)
        except KeyError:
            raise SystemExit(f"no peer {name!r}; there are {', '.join(PEERS)}") from None
        reason = peer.missing(tools)
        if reason is None:
            chosen.append(peer)
        elif names:
            raise SystemExit(f"{name}: {reason}")
        else:
            left_out[name] = reason
    return chosen, left_out
