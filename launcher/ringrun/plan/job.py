"""A job, put together and ready to run: what the supervisor needs and nothing it must look up."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from ringcomm.config import Settings, Slot
from ringcomm.keys import key_text
from ringcomm.wire.signing import Signer

from .command import Command
from .environment import rank_variables, removed
from .ranks import Place, Plan, PlannedHost
from .signed import about_call, about_result, signed, verified

SILENCE_S = 120.0
"""A remote agent that hears nothing for so long takes the launcher for dead."""


@dataclass(frozen=True)
class HostJob:
    """One host's part: how its agent is started, and what it is told.

    Attributes:
        index: the host's number in the plan.
        planned: the host and how many ranks it runs.
        is_local: whether it is this machine, so that no ssh is needed.
        python: the interpreter that runs the agent, and the ranks unless the command names one.
        cwd: the ranks' working directory there.
        command: what its ranks run.
        env: variables for all its ranks.
        argv: the command line that starts the agent.
    """

    index: int
    planned: PlannedHost
    is_local: bool
    python: str
    cwd: str
    command: Command
    env: Dict[str, str] = field(repr=False)
    argv: Tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.planned.spec.name


@dataclass(frozen=True)
class Job:
    """Everything about one run.

    Attributes:
        id: its public name, which also marks its processes.
        key: its secret.
        certificate: what its processes know each other by, with its private key, if they encrypt; or "".
        version: of ringcomm here, which the hosts must have too ("" to not compare).
        payload: what the ranks read from a descriptor, or None.
        bytecode: the minor version of Python whose functions are in the payload, like "3.11", or "".
        horovod: whether ``import horovod`` is to find ringcomm.
        notes: what the user should know before it starts.
        attempt: how often it has been started before; see :mod:`ringrun.job.restarts`.
    """

    id: str
    key: bytes = field(repr=False)
    plan: Plan
    hosts: Tuple[HostJob, ...]
    settings: Settings
    command: Command
    version: str = ""
    output_dir: Optional[Path] = None
    payload: Optional[bytes] = field(default=None, repr=False)
    bytecode: str = ""
    horovod: bool = False
    notes: Tuple[str, ...] = ()
    attempt: int = 0
    certificate: str = field(default="", repr=False)

    def host_of(self, rank: int) -> HostJob:
        """Where a rank runs."""
        return self.hosts[self.plan.places[rank].host_index]

    def slot_of(self, rank: int) -> Slot:
        """A rank's place, as the rendezvous knows it."""
        place = self.plan.places[rank]
        return Slot(place.host_index, place.local_rank)

    @property
    def all_local(self) -> bool:
        """Whether no other machine takes part."""
        return all(host.is_local for host in self.hosts)

    def signed_payload(self) -> Optional[bytes]:
        """The payload as the ranks read it, with the signature of this attempt."""
        return None if self.payload is None else signed(self.payload, self._signer, *about_call())

    def verified_result(self, rank: int, data: bytes) -> Optional[bytes]:
        """What a rank has written to its result descriptor; None if it does not carry its signature."""
        return verified(data, self._signer, *about_result(self.slot_of(rank)))

    @property
    def _signer(self) -> Signer:
        return Signer(self.key, self.id)

    def agent_config(self, host: HostJob) -> Dict[str, Any]:
        """What the agent of a host is told first, as JSON. It holds the key: stdin only."""
        ranks: List[Dict[str, Any]] = [
            {"rank": place.rank, "env": self._rank_env(host, place)}
            for place in self.plan.on_host(host.index)
        ]
        own = {
            "RINGCOMM_JOB": self.id,
            "RINGCOMM_SIZE": str(self.plan.size),
            "RINGCOMM_HOST": host.name,
            "RINGCOMM_RESTART": str(self.attempt),
            "PYTHONUNBUFFERED": "1",
        }
        return {
            "job": self.id,
            "key": key_text(self.key, self.certificate),
            "host_index": host.index,
            "cwd": host.cwd,
            "argv": host.command.argv,
            "python": host.command.is_python,
            "script": host.command.script,
            "unset": removed(),
            "env": {**host.env, **own},
            "ranks": ranks,
            "payload": self.payload is not None,
            "version": self.version,
            "bytecode": self.bytecode,
            "silence_s": None if host.is_local else SILENCE_S,
            "horovod": self.horovod,
            "writes": self._writes(host),
            "threads": self.settings.threads,
            "flight": self.settings.flight_recorder > 0,
        }

    def _writes(self, host: HostJob) -> List[List[str]]:
        """The files that the ranks of a host will write because of an option: the option and the path."""
        if host.index != self.plan.places[0].host_index:
            return []
        log = self.settings.autotune_log if self.settings.autotune else ""
        said = [["--timeline", self.settings.timeline], ["--autotune-log", log]]
        return [row for row in said if row[1]]

    def _rank_env(self, host: HostJob, place: Place) -> Dict[str, str]:
        """One rank's own variables. What the user passes on with ``-x`` stays as the user said it."""
        others = rank_variables(place, self.plan.size, host.name, self.horovod)
        kept = {name: value for name, value in others.items() if name not in host.env}
        return {**kept, "RINGCOMM_SLOT": f"{place.host_index}:{place.local_rank}"}
