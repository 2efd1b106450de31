"""The variables by which srun and mpirun number the processes that they start."""

from __future__ import annotations

from typing import Mapping, NamedTuple, Optional

from ..errors import ConfigError

DEFAULT_FOLDER = "~/.ringcomm"


class Launched(NamedTuple):
    """A process that srun or mpirun has started together with others."""

    launcher: str  # the program, for messages
    rank: int
    size: int
    job: str  # the same on all ranks, and different in any other job
    folder: str = ""  # shared by all hosts; rank 0 is found by it


def find_launched(environ: Mapping[str, str], folder: str = "") -> Optional[Launched]:
    """Return how another launcher started this process; None if none did, or as the only process.

    mpirun starts its own helpers with srun inside a Slurm job, so mpirun's variables come first. ConfigError:
    the mpirun of MPICH has started several processes.
    """
    found = _open_mpi(environ)
    if found is None:
        _refuse_mpich(environ)
        found = _slurm(environ)
    return None if found is None or found.size < 2 else found._replace(folder=folder or DEFAULT_FOLDER)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdigit() and text.isascii() else -1


def _open_mpi(environ: Mapping[str, str]) -> Optional[Launched]:
    rank, size = _number(environ, "OMPI_COMM_WORLD_RANK"), _number(environ, "OMPI_COMM_WORLD_SIZE")
    if not 0 <= rank < size:
        return None
    names = ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_precondition_transports")
    job = " ".join(["openmpi", *(environ.get(name, "") for name in names)])
    return Launched("mpirun (Open MPI)", rank, size, job)


def _refuse_mpich(environ: Mapping[str, str]) -> None:
    """Refuse MPICH's ranks, which find each other by their own store: each would train alone."""
    rank, size = _number(environ, "PMI_RANK"), _number(environ, "PMI_SIZE")
    in_slurm = (_number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")) == (rank, size)
    if 0 <= rank < size and size > 1 and not in_slurm:  # `srun --mpi=pmi2` sets these, too
        raise ConfigError(
            f"MPICH's mpirun has started this process as one of {size} (PMI_SIZE). Start the program with "
            "ringrun, srun or the mpirun of Open MPI; to run alone, set RINGCOMM_SIZE=1."
        )


def _slurm(environ: Mapping[str, str]) -> Optional[Launched]:
    rank, size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
    # A batch script has a SLURM_PROCID, but is not a step; an interactive shell has a terminal.
    if _number(environ, "SLURM_STEP_ID") < 0 or not 0 <= rank < size or "SLURM_PTY_PORT" in environ:
        return None
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return Launched("srun", rank, size, " ".join(["slurm", *(environ.get(name, "") for name in names)]))
