"""The nodes of a Slurm allocation, reached by a job step on each. Pure."""

from __future__ import annotations

import re
from typing import Optional, Sequence

from ..plan.reaching import Failure, last_lines
from .via import Via

TEMPLATE = (
    "srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none --mpi=none --nodelist={host}"
)
"""A step of one task that shares the node's resources with other steps. Without ``--overlap`` it would wait
until they end, and with Slurm's binding all ranks of the node would share the task's single core."""


class Srun(Via):
    """Reaches nodes by ``srun``; `job` is the number of the Slurm job, for messages."""

    def __init__(self, job: str) -> None:
        super().__init__(TEMPLATE)
        self._job = job
        self.connection = "the job step on it (srun)"

    def refused(
        self, host: str, argv: Sequence[str], status: Optional[int], output: str
    ) -> Optional[Failure]:
        """Return the failure that srun reported; None if the output is not srun's."""
        said = last_lines(output)
        if re.search(r"unrecognized option .*overlap", output):
            return Failure(
                f"{host}: this Slurm is older than srun's option --overlap. Steps share nodes there anyway: "
                f"use --via '{TEMPLATE.replace('--overlap ', '')}'."
            )
        if re.search(r"Invalid job id|Job/step already completing|has been revoked|expired", output, re.I):
            return Failure(f"{host}: Slurm job {self._job} is over, so no step starts in it ({said}).")
        if re.search(r"Unable to create step|Invalid node name|node configuration", output, re.I):
            return Failure(
                f"{host}: Slurm starts no step there ({said}). Is it one of the nodes of job {self._job}, "
                f"and up? `scontrol show job {self._job}` and `sinfo -N -l` show it."
            )
        return None
