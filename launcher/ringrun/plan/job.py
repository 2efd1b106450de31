"""A job that is ready to run: all that the supervisor needs, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, FrozenSet, Iterable, List, Optional, Protocol, Sequence, Tuple

from ringcomm.config import Settings, Slot
from ringcomm.storage.keys import key_text
from ringcomm.wire.signing import Signer

from .command import Command
from .environment import OTHER_LAUNCHERS, rank_variables, removed
from .observe import Observation
from .ranks import Place, Plan, PlannedHost
from .reaching import Reach
from .signed import about_call, about_result, signed, verified

SILENCE_S = 120.0
"""A remote agent that receives nothing for this long considers the launcher dead, and ends its ranks."""


class Tree(Protocol):
    """The user's files, for hosts that do not have them (:class:`ringrun.ship.source_tree.SourceTree`)."""

    root: Path

    @property
    def files(self) -> Sequence[Tuple[str, str, bool]]:
        """The path, the digest of the content, and whether it is executable, of each file."""

    @property
    def ignored(self) -> Sequence[str]:
        """What git or ``.ringignore`` leaves out, directories with "/" at their ends."""

    def why_not_sent(self, path: Path) -> str:
        """Why a file of this machine is not among those that were sent, for a sentence."""

    def announced(self) -> Sequence[Tuple[str, str, bool]]:
        """The files, and directories to make with "/" at their ends and without a digest."""

    def contents(self, digests: Iterable[str]) -> Dict[str, bytes]:
        """The contents with these digests."""


@dataclass(frozen=True)
class HostJob:
    """The part of a job on one host: how its agent is started, and what its ranks run.

    Attributes:
        index: the host's number in the plan.
        planned: the host and how many ranks it runs.
        is_local: whether it is this machine.
        reach: how programs are started there.
        python: the interpreter that runs the agent, and the ranks unless the command names one.
        cwd: the ranks' working directory there.
        command: what its ranks run.
        env: variables for all its ranks.
        argv: the command line that starts the agent.
        fallback: the command line that is tried next if there is no such interpreter, or () for none.
        gets_code: whether it is sent the job's files, and its ranks run in a copy of them.
        finder: what the fallback reads first, to look for the interpreter's environment there; or b"".
        package: the digest of the package with ringcomm that its ranks use, or "" for what is installed.
    """

    index: int
    planned: PlannedHost
    is_local: bool
    reach: Reach
    python: str
    cwd: str
    command: Command
    env: Dict[str, str] = field(repr=False)
    argv: Tuple[str, ...] = ()
    fallback: Tuple[str, ...] = ()
    package: str = ""
    gets_code: bool = False
    finder: bytes = field(default=b"", repr=False)

    @property
    def name(self) -> str:
        """The host's name in messages."""
        return self.planned.spec.name


@dataclass(frozen=True)
class Job:
    """One run of a command on all ranks.

    Attributes:
        id: its public identifier, which is also in the environment of its processes.
        key: the secret by which its processes authenticate each other.
        plan: the ranks and their hosts.
        hosts: per host, how its agent is started and what its ranks run.
        settings: ringcomm's settings, for all ranks.
        command: the command line of the ranks.
        version: of ringcomm on this machine, which the hosts must have, too ("": no comparison).
        output_dir: the directory for the ranks' output, or None.
        payload: bytes that the ranks read from an inherited descriptor, or None.
        bytecode: the minor version of Python whose functions are in the payload, like "3.11", or "".
        horovod: whether ``import horovod`` finds ringcomm.
        notes: messages for the user before the job starts.
        attempt: how often it has been started before (:mod:`ringrun.job.restarts`).
        restarts: how often it may be started again.
        certificate: the job's TLS certificate with its private key, if its processes encrypt; or "".
        provision: whether hosts that lack numpy or psutil are sent their wheels.
        checks_slots: whether a host with very many slots is refused (:func:`ringrun.plan.hosts.crowding`).
        tree: the files to send to hosts, or None.
        code_at: the working directory relative to the tree.
        folder: the name of the directories for the tree, the same in all attempts; "" for the identifier.
        bind: the processors of each rank; see :func:`ringrun.agent.binding.shares`.
        fetch: patterns of files to bring back from hosts that were sent the tree.
        shown_ranks: the ranks whose output is shown; None for all.
        quiet: whether only warnings and failures are shown beside the output of ranks.
        observation: what is shown or written of the ranks' numbers.
        setting_rows: of every setting, its name, its value and its source.
        grace_s: how long ranks have to end after SIGTERM from outside, in seconds.
    """

    id: str
    key: bytes = field(repr=False)
    plan: Plan
    hosts: Sequence[HostJob]
    settings: Settings
    command: Command
    version: str = ""
    output_dir: Optional[Path] = None
    payload: Optional[bytes] = field(default=None, repr=False)
    bytecode: str = ""
    horovod: bool = False
    notes: Tuple[str, ...] = ()
    attempt: int = 0
    restarts: int = 0
    certificate: str = field(default="", repr=False)
    provision: bool = False
    checks_slots: bool = False
    tree: Optional[Tree] = field(default=None, repr=False)
    code_at: str = "."
    folder: str = ""
    fetch: Tuple[str, ...] = ()
    bind: str = "none"
    shown_ranks: Optional[FrozenSet[int]] = None
    quiet: bool = False
    observation: Observation = Observation()
    setting_rows: Tuple[Tuple[str, str, str], ...] = ()
    grace_s: float = 30.0

    def host_of(self, rank: int) -> HostJob:
        """The host of a rank."""
        return self.hosts[self.plan.places[rank].host_index]

    def slot_of(self, rank: int) -> Slot:
        """The slot by which the rendezvous identifies a rank."""
        place = self.plan.places[rank]
        return Slot(place.host_index, place.local_rank)

    @property
    def is_elastic(self) -> bool:
        """Whether hosts and processes are added and removed while it runs."""
        return False

    @property
    def last_hosts(self) -> List[HostJob]:
        """The hosts, each once: an elastic job has a part for every time that it has opened a host."""
        return list({host.planned.spec.target: host for host in self.hosts}.values())

    @property
    def all_local(self) -> bool:
        """Whether all ranks run on this machine."""
        return all(host.is_local for host in self.hosts)

    @property
    def trains(self) -> bool:
        """Whether it is likely that the ranks are to train together: a Python program, no one-liner."""
        command = self.command
        inner = command.shown.startswith(("ringrun.", "-"))
        return command.is_python and "-c" not in command.argv[:3] and self.payload is None and not inner

    def signed_payload(self) -> Optional[bytes]:
        """The payload with this attempt's signature, as the ranks read it; None without a payload."""
        return None if self.payload is None else signed(self.payload, self._signer, *about_call())

    def verified_result(self, rank: int, data: bytes) -> Optional[bytes]:
        """The result in what a rank wrote to its result descriptor; None if its signature is not valid."""
        return verified(data, self._signer, *about_result(self.slot_of(rank)))

    @property
    def _signer(self) -> Signer:
        return Signer(self.key, self.id)

    def agent_config(self, host: HostJob) -> Dict[str, Any]:
        """The first message to a host's agent, for JSON. It contains the key: send it over stdin only."""
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
            "unset_prefixes": OTHER_LAUNCHERS,
            "env": {**host.env, **own},
            "ranks": ranks,
            "slots": len(ranks),
            "elastic": False,
            "payload": self.payload is not None,
            "version": self.version,
            "package": host.package,
            "provision": self.provision,
            "code": self.tree.announced() if self.tree is not None and host.gets_code else [],
            "code_at": self.code_at,
            "folder": f"{self.folder or self.id}-{host.index}",
            "fetch": list(self.fetch),
            "bind": self.bind,
            "grace_s": self.grace_s,
            "bytecode": self.bytecode,
            "silence_s": None if host.is_local else SILENCE_S,
            "horovod": self.horovod,
            "writes": self._writes(host),
            "threads": self.settings.threads,
            "flight": self.settings.flight_recorder > 0,
        }

    def _writes(self, host: HostJob) -> List[List[str]]:
        """The files that the ranks of the first host will write because of an option: it and the path."""
        if host.index:
            return []
        return [["--timeline", self.settings.timeline]] if self.settings.timeline else []

    def _rank_env(self, host: HostJob, place: Place) -> Dict[str, str]:
        """One rank's own variables. They do not override variables that the user passes with ``-x``."""
        others = rank_variables(place, self.plan.size, host.name, self.horovod)
        kept = {name: value for name, value in others.items() if name not in host.env}
        return {**kept, "RINGCOMM_SLOT": f"{place.host_index}:{place.local_rank}"}
