"""The command that every rank runs, and a job that is ready to run: the supervisor's input. Pure data.

The function of ``rc.run`` and its results pass through the agents of the hosts; they are unpickled only after
their signatures with the job's key are verified.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ringcomm.config import Settings, Slot
from ringcomm.errors import ConfigError
from ringcomm.storage.keys import key_text
from ringcomm.wire.auth import Signer

from .environment import OTHER_LAUNCHERS, rank_variables, removed
from .ranks import Place, Plan, PlannedHost

if TYPE_CHECKING:
    from ..job.files import SourceTree
    from ..reach.base import Reach

_PYTHON = re.compile(r"python(3(\.\d+)?)?\Z")
_SPLIT = (
    (
        re.compile(r"([^/=,]+@[^/=,]+|[\w.-]+:\d+|\[[0-9a-fA-F:]+\](:\d+)?|,[^/=]*|[^/=]*,)\Z"),
        "a host. Hosts are separated by commas, without blanks, like: ringrun -H localhost,host1:2 train.py",
    ),
    (
        re.compile(r"[A-Za-z_]\w*="),
        "a variable. Each one follows a -x of its own, like: ringrun -x NAME=VALUE -x OTHER train.py",
    ),
)
"""Parts of lists that a blank has separated from their option, so that they became the command."""
_TAKES_VALUE = ("-X", "-W", "--check-hash-based-pycs")


class Command(NamedTuple):
    """A command line for the ranks."""

    argv: Tuple[Optional[str], ...]  # None stands for the interpreter chosen for the host
    word: Optional[str] = None  # python or python3 if the user named it without a path
    is_python: bool = False  # ringcomm must then be importable
    script: Optional[str] = None  # None for a module, -c, or another program

    @property
    def shown(self) -> str:
        """The script, the module or the program, without arguments."""
        if self.script is not None:
            return self.script
        words = [word for word in self.argv if word is not None]
        # After -c, and of programs other than Python, it is an argument.
        is_module = self.is_python and "-m" in words[:-1] and "-c" not in words[: words.index("-m")]
        return words[words.index("-m") + 1] if is_module else words[0]

    def text(self, python: str) -> str:
        """Return the command line for messages, with `python` as the interpreter."""
        return shlex.join(python if word is None else word for word in self.argv)


def parse_command(words: Sequence[str]) -> Command:
    """Parse ``train.py …``, ``-m pkg.mod …``, ``python train.py …`` or any other command."""
    if not words or not words[0]:
        raise ConfigError("There is no command to run. Give it last, like: ringrun -np 2 train.py --epochs 3")
    first = words[0]
    for pattern, meant in _SPLIT:
        if pattern.match(first):
            raise ConfigError(f"{first!r} is no command; it looks like {meant}")
    if first == "-m":
        if len(words) < 2 or words[1].startswith("-"):
            raise ConfigError("-m is not followed by a module. Write it like: ringrun -np 2 -m pkg.mod")
        return Command((None, *words), is_python=True)
    if first.endswith(".py"):
        return Command((None, *words), is_python=True, script=first)
    if _PYTHON.match(first.rsplit("/", 1)[-1]):
        word = first if "/" not in first else None
        return Command(tuple(words), word=word, is_python=True, script=_script(words[1:]))
    return Command(tuple(words))


def in_tree(command: Command, root: Path, cwd: Path) -> Command:
    """Return the command with a script's absolute path in the tree `root` made relative to `cwd`."""
    script, root, cwd = command.script, root.resolve(), cwd.resolve()
    if script is None:
        return command
    real = Path(os.path.abspath(cwd / script))  # noqa: PTH100  links stay
    if not Path(script).is_absolute():
        if root not in real.parents:
            above = os.path.relpath(os.path.commonpath([real.parent, root]), cwd)
            raise ConfigError(
                f"--ship sends {root}, and {script} is not in it, so the hosts would not have it. Send a "
                f"directory that contains both, with --ship={above}, or change to the script's directory."
            )
        return command
    real = Path(script).parent.resolve() / Path(script).name
    if root not in real.parents:
        return command
    relative = os.path.relpath(real, cwd)
    place = command.argv.index(script)
    argv = (*command.argv[:place], relative, *command.argv[place + 1 :])
    return command._replace(argv=argv, script=relative)


def with_interpreter(command: Command, python: Optional[str]) -> Command:
    """Return the command with ``python`` replaced by a path; None: the interpreter chosen for the host."""
    if command.word is None:
        return command
    return command._replace(argv=(python, *command.argv[1:]))


def _script(words: Sequence[str]) -> Optional[str]:
    """Return the script among the arguments of a Python interpreter, or None."""
    rest = iter(words)
    for word in rest:
        if word in _TAKES_VALUE:
            next(rest, None)
        elif word.startswith(("-m", "-c")) or word == "-":
            return None
        elif not word.startswith("-"):
            return word
    return None


# -- a job ---------------------------------------------------------------------------------------

SILENCE_S = 120.0
"""A remote agent that receives nothing for this long considers the launcher dead, and ends its ranks."""


def signed(data: bytes, signer: Signer, *about: object) -> bytes:
    """Return the signature of data that the receiver will unpickle, bound to a purpose, and the data."""
    return signer.sign(data, "ringrun", *about) + data


def verified(data: bytes, signer: Signer, *about: object) -> Optional[bytes]:
    """Return the data that :func:`signed` was given; None if data or purpose do not match the signature."""
    signature, rest = data[: Signer.SIGNATURE_BYTES], data[Signer.SIGNATURE_BYTES :]
    return rest if signer.verifies(rest, signature, "ringrun", *about) else None


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
    watch: bool = False  # show the counters of ranks in a table
    report: Optional[Path] = None  # and in an HTML file at the end
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
        return None if self.payload is None else signed(self.payload, self._signer, "function")

    def verified_result(self, rank: int, data: bytes) -> Optional[bytes]:
        """Return the result that a rank wrote to its descriptor; None if its signature is not valid."""
        return verified(data, self._signer, "result", *self.slot_of(rank))

    @property
    def _signer(self) -> Signer:
        return Signer(self.key, self.id)

    def agent_config(self, host: HostJob) -> Dict[str, Any]:
        """Return the first message to a host's agent, for JSON. It has the key: send it over stdin only."""
        places = self.plan.on_host(host.index)
        ranks = [{"rank": place.rank, "env": self._rank_env(host, place)} for place in places]
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
            "timeline": "" if host.index else self.settings.timeline,  # the first host's ranks write it
            "threads": self.settings.threads,
        }

    def _rank_env(self, host: HostJob, place: Place) -> Dict[str, str]:
        """Return one rank's variables, which do not override those that the user passes with ``-x``."""
        others = rank_variables(place, self.plan.size, host.name, self.horovod)
        kept = {name: value for name, value in others.items() if name not in host.env}
        return {**kept, "RINGCOMM_SLOT": f"{place.host_index}:{place.local_rank}"}
