"""The variables by which srun and mpirun number the processes that they start. Pure."""

from __future__ import annotations

from typing import Mapping, NamedTuple, Optional

from ..errors import ConfigError

DEFAULT_FOLDER = "~/.ringcomm"


class Launched(NamedTuple):
    """A process that srun or mpirun has started together with others.

    Attributes:
        launcher: the program, for messages.
        rank: this process's rank.
        size: number of ranks.
        job: the same on all ranks, and different in any other job.
        folder: a directory that all hosts share, by which rank 0 is found; "" where that is not needed.
        pmi: the descriptor by which the launcher exchanges values between ranks, or -1.
    """

    launcher: str
    rank: int
    size: int
    job: str
    folder: str = ""
    pmi: int = -1


def find_launched(environ: Mapping[str, str], folder: str = "") -> Optional[Launched]:
    """Return how another launcher has started this process; None if none has, or as the only process.

    mpirun starts its own helpers with srun inside a Slurm job, so mpirun's variables come first.

    Args:
        environ: the environment.
        folder: the directory that all hosts share, or "" for the default.

    Raises:
        ConfigError: mpirun has started several processes, but there is no way to find the others.
    """
    found = _open_mpi(environ) or _mpich(environ) or _slurm(environ)
    if found is None or found.size < 2:
        return None
    return found if found.pmi >= 0 else found._replace(folder=folder or DEFAULT_FOLDER)


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


def _mpich(environ: Mapping[str, str]) -> Optional[Launched]:
    rank, size = _number(environ, "PMI_RANK"), _number(environ, "PMI_SIZE")
    in_slurm = (_number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")) == (rank, size)
    if not 0 <= rank < size or size < 2 or in_slurm:  # `srun --mpi=pmi2` sets these, too
        return None
    descriptor = _number(environ, "PMI_FD")
    if descriptor < 0:
        raise ConfigError(
            f"PMI_SIZE={size} means that mpirun has started this process with others, but PMI_FD, by which "
            "they would find each other, is not set. Start the program with ringrun; to run alone, set "
            "RINGCOMM_SIZE=1."
        )
    return Launched("mpirun (MPICH)", rank, size, "mpich", pmi=descriptor)


def _slurm(environ: Mapping[str, str]) -> Optional[Launched]:
    rank, size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
    # A batch script has a SLURM_PROCID, but is no step; an interactive shell has a terminal.
    if _number(environ, "SLURM_STEP_ID") < 0 or not 0 <= rank < size or "SLURM_PTY_PORT" in environ:
        return None
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return Launched("srun", rank, size, " ".join(["slurm", *(environ.get(name, "") for name in names)]))
