"""A job that is ready to run: the supervisor's input, as plain data.

The function of ``rc.run`` and its results pass through the agents of the hosts; they are unpickled only after
their signatures with the job's key are verified.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ringcomm.config import Settings, Slot
from ringcomm.errors import ConfigError
from ringcomm.storage.keys import key_text
from ringcomm.wire.auth import Signer

from .command import Command
from .environment import OTHER_LAUNCHERS, rank_variables, removed
from .ranks import Place, Plan, PlannedHost

if TYPE_CHECKING:
    from ..reach.base import Reach
    from ..ship.contents import SourceTree

SILENCE_S = 120.0
"""A remote agent that receives nothing for this long considers the launcher dead, and ends its ranks."""


def signed(data: bytes, signer: Signer, *about: object) -> bytes:
    """Return the signature of data that the receiver will unpickle, bound to a purpose, and the data."""
    return signer.sign(data, "ringrun", *about) + data


def verified(data: bytes, signer: Signer, *about: object) -> Optional[bytes]:
    """Return the data that :func:`signed` was given; None if data or purpose do not match the signature."""
    signature, rest = data[: Signer.SIGNATURE_BYTES], data[Signer.SIGNATURE_BYTES :]
    return rest if signer.verifies(rest, signature, "ringrun", *about) else None


ABOUT_CALL = ("function",)
"""The purpose that the payload's signature is bound to."""


def about_result(place: Optional[Slot]) -> Tuple[object, ...]:
    """Return the purpose that the signature of a rank's result is bound to, with the rank's slot."""
    return ("result", *(place or ()))


class Observation(NamedTuple):
    """Where counters of ranks are shown: in a table while the job runs, and in an HTML file at the end."""

    watch: bool = False
    report: Optional[Path] = None

    @property
    def needs_numbers(self) -> bool:
        """Whether counters must be requested from ranks."""
        return self.watch or self.report is not None


def observation_of(watch: bool, report: Optional[str]) -> Observation:
    """Return the observation for ``--watch`` and ``--report``."""
    found = Observation(watch, None if report is None else Path(report).absolute())
    if found.report is not None and (found.report.is_dir() or not found.report.parent.is_dir()):
        raise ConfigError(f"--report {report}: this is a directory, or its directory does not exist.")
    return found


@dataclass(frozen=True)
class HostJob:
    """The part of a job on one host: how its agent is started, and what its ranks run."""

    index: int
    planned: PlannedHost
    is_local: bool
    reach: Reach  # starts programs there
    python: str  # runs the agent, and the ranks unless the command names another
    cwd: str  # of the ranks
    command: Command
    env: Dict[str, str] = field(repr=False)
    argv: Tuple[str, ...] = ()  # starts the agent
    fallback: Tuple[str, ...] = ()  # starts it if the host lacks that interpreter; () for none
    package: str = ""  # digest of the package with ringcomm; "" for the installed one
    gets_code: bool = False  # its ranks run in a copy of the job's files
    # first input of the fallback, which looks for the interpreter's environment there; or b""
    finder: bytes = field(default=b"", repr=False)

    @property
    def name(self) -> str:
        return self.planned.spec.name


@dataclass(frozen=True)
class Job:
    """One run of a command on all ranks."""

    id: str  # public; also in the environment of its processes
    key: bytes = field(repr=False)  # its processes authenticate each other by it
    plan: Plan
    hosts: Sequence[HostJob]
    settings: Settings
    command: Command
    version: str = ""  # this machine's ringcomm, which hosts must have; "" for no comparison
    output_dir: Optional[Path] = None  # of the ranks' output
    payload: Optional[bytes] = field(default=None, repr=False)  # read by ranks from an inherited descriptor
    bytecode: str = ""  # Python version of functions in the payload, like "3.11", or ""
    horovod: bool = False  # `import horovod` finds ringcomm
    notes: Tuple[str, ...] = ()  # shown before the job starts
    attempt: int = 0  # number of starts before this one
    restarts: int = 0
    certificate: str = field(default="", repr=False)  # TLS certificate and private key if the job encrypts
    port: int = 0  # of the rendezvous; 0: any
    joining: Any = None  # takes connections of machines that join again at that port
    provision: bool = False  # send wheels of numpy and psutil to hosts without
    checks_slots: bool = False  # refuse hosts with too many slots (plan.hosts.crowding)
    tree: Optional[SourceTree] = field(default=None, repr=False)
    code_at: str = "."  # working directory relative to the tree
    folder: str = ""  # name of the tree's copies, the same in all attempts; "" for the id
    fetch: Tuple[str, ...] = ()  # glob patterns of files to bring back from copies of the tree
    bind: str = "none"  # see ringrun.agent.processes.shares
    observation: Observation = Observation()
    setting_rows: Tuple[Tuple[str, str, str], ...] = ()  # name, value, source
    grace_s: float = 30.0  # between SIGTERM from outside and SIGKILL

    def host_of(self, rank: int) -> HostJob:
        return self.hosts[self.plan.places[rank].host_index]

    def slot_of(self, rank: int) -> Slot:
        """Return the slot by which the rendezvous identifies a rank."""
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
        return all(host.is_local for host in self.hosts)

    @property
    def trains(self) -> bool:
        """Whether the ranks probably train together: the command is a Python program, not a one-liner."""
        command = self.command
        inner = command.shown.startswith(("ringrun.", "-"))
        return command.is_python and "-c" not in command.argv[:3] and self.payload is None and not inner

    def signed_payload(self) -> Optional[bytes]:
        """Return the payload with this attempt's signature, or None without a payload."""
        return None if self.payload is None else signed(self.payload, self._signer, *ABOUT_CALL)

    def verified_result(self, rank: int, data: bytes) -> Optional[bytes]:
        """Return the result that a rank wrote to its descriptor; None if its signature is not valid."""
        return verified(data, self._signer, *about_result(self.slot_of(rank)))

    @property
    def _signer(self) -> Signer:
        return Signer(self.key, self.id)

    def agent_config(self, host: HostJob) -> Dict[str, Any]:
        """Return the first message to a host's agent, for JSON. It has the key: send it over stdin only."""
        places = self.plan.on_host(host.index)
        ranks = [{"rank": place.rank, "env": self._rank_env(host, place)} for place in places]
        timeline = self.settings.timeline
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
            # The files that an option makes the first host's ranks write: the option and the path.
            "writes": [["--timeline", timeline]] if timeline and not host.index else [],
            "threads": self.settings.threads,
        }

    def _rank_env(self, host: HostJob, place: Place) -> Dict[str, str]:
        """Return one rank's variables, which do not override those that the user passes with ``-x``."""
        others = rank_variables(place, self.plan.size, host.name, self.horovod)
        kept = {name: value for name, value in others.items() if name not in host.env}
        return {**kept, "RINGCOMM_SLOT": f"{place.host_index}:{place.local_rank}"}
