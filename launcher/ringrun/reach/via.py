"""Hosts that a command template reaches: ``--via``, like ``kubectl exec -i {host} --``, and srun. Pure."""

from __future__ import annotations

import re
import shlex
from typing import List, Optional, Sequence

from ringcomm.errors import ConfigError

from ..plan.hosts import HostSpec, check_host
from ..plan.reaching import Failure, last_lines
from .base import Reach, remote_command
from .protocol import BOOT

JOINING = ("ssh", "rsh")
"""Programs that join their words with blanks and pass them to a remote shell, as ssh does."""
_EXAMPLES = "--via 'kubectl exec -i {host} --', --via 'docker exec -i {host}'"
_STILL_STARTING = (
    r"ContainerCreating|PodInitializing|does not have a host assigned|is not running|container not found|"
    r"unable to upgrade connection"
)


class Via(Reach):
    """Reaches hosts by a template of words with ``{host}``, and perhaps ``{command}``, quoted for a shell."""

    def __init__(self, template: str) -> None:
        try:
            self._words = shlex.split(template)
        except ValueError as problem:
            raise ConfigError(f"--via {template!r} cannot be parsed: {problem}.") from None
        if not any("{host}" in word for word in self._words):
            raise ConfigError(
                f"--via {template!r} does not say where the host goes: write {{host}} there, like "
                f"{_EXAMPLES}. (--via ssh reaches hosts by ssh also inside a scheduler's job.)"
            )
        self._joins = self._words[0].rpartition("/")[2] in JOINING
        self._has_command = any("{command}" in word for word in self._words)
        self.description = self._words[0]
        self.connection = f"the connection to it ({self._words[0]})"

    def argv(self, spec: HostSpec, python: str) -> List[str]:
        check_host(spec, self._words[0])  # a template may pass it to a shell
        words = [word.replace("{host}", spec.target) for word in self._words]
        if self._has_command:
            return [word.replace("{command}", remote_command(python)) for word in words]
        if self._joins:
            return [*words, remote_command(python)]
        if python.startswith("~"):
            raise ConfigError(
                f"{spec.name}: no shell expands the ~ in {python} when hosts are reached by "
                f"{self._words[0]}. Give the full path."
            )
        return [*words, python, "-c", BOOT]

    def by_hand(self, argv: Sequence[str]) -> str:
        end = 1 if self._joins or self._has_command else 3
        return shlex.join(argv[:-end]) + " "

    def lacks_python(self, python: str, status: Optional[int], output: str) -> bool:
        """Return whether the remote program could not be executed; such commands also have other failures."""
        if self._joins:
            return super().lacks_python(python, status, output)
        named = python in output and re.search(r"not found|No such file", output, re.I) is not None
        return named or status == 127

    def refused(
        self, host: str, argv: Sequence[str], status: Optional[int], output: str
    ) -> Optional[Failure]:
        """Return a failure to retry until the start timeout if a container is being created, or None."""
        if re.search(_STILL_STARTING, output, re.I) is None:
            return None
        said = last_lines(output)
        return Failure(
            f"{host}: it does not run yet ({said}). By hand: {self.by_hand(argv)}true",
            retry=True, may_appear=True,
        )  # fmt: skip


SRUN = (
    "srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none --mpi=none --nodelist={host}"
)
"""A step of one task that shares the node's resources with other steps. Without ``--overlap`` it would wait
until they end, and with Slurm's binding all ranks of the node would share the task's single core."""


class Srun(Via):
    """Reaches nodes by ``srun``; `job` is the number of the Slurm job, for messages."""

    def __init__(self, job: str) -> None:
        super().__init__(SRUN)
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
                f"use --via '{SRUN.replace('--overlap ', '')}'."
            )
        if re.search(r"Invalid job id|Job/step already completing|has been revoked|expired", output, re.I):
            return Failure(f"{host}: Slurm job {self._job} is over, so no step starts in it ({said}).")
        if re.search(r"Unable to create step|Invalid node name|node configuration", output, re.I):
            return Failure(
                f"{host}: Slurm starts no step there ({said}). Is it one of the nodes of job {self._job}, "
                f"and up? `scontrol show job {self._job}` and `sinfo -N -l` show it."
            )
        return None
