"""How this process takes part in a job: :class:`Membership`, and how it follows from the environment.

``ringrun`` or a user sets the variables (the process's place, the rendezvous, the job's key); without them
those of srun and mpirun count. Ray, Dask and Spark assign variables to a process in place of those of the
environment.
"""

from __future__ import annotations

import ipaddress
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Dict, Iterator, Mapping, NamedTuple, Optional, Tuple, Union

from ..errors import ConfigError
from ..storage.keys import read_key

# ---- variables -----------------------------------------------------------------------------------

PREFIX = "RINGCOMM_"

# The variables that are not settings, without the prefix, and their meaning.
MEMBERSHIP_VARIABLES = (
    ("SIZE", "Number of ranks. 1: this process is the whole job. Unset: the number of processes of `srun` or "
     "`mpirun`, otherwise 1."),
    ("RENDEZVOUS", "Address of the rendezvous, the service by which ranks find each other: `host:port`, or "
     "several separated by commas. Addresses after a semicolon are tried last. Without `ringrun`, give one "
     "address: a rank on that host serves the rendezvous if its `RINGCOMM_RANK` is 0 or unset. If there is "
     "no such rank, start `python -m ringcomm.rendezvous` there."),
    ("RENDEZVOUS_MACHINE", "Set by `ringrun`: identifies the machine that serves the rendezvous."),
    ("RANK", "The rank that this process asks for. Unset: the rendezvous assigns one."),
    ("KEY_FILE", "File with the job's key in hex digits. It must be the same on every host, and readable by "
     "its owner only. `python -m ringcomm.newkey FILE` makes one. If it also holds a certificate, all TCP "
     "connections are encrypted."),
    ("KEY", "The key itself. Prefer a file: other processes may see environment variables."),
    ("KEY_FD", "Set by `ringrun`: the file descriptor of the key."),
    ("KEY_READER", "Set by ringcomm: ID of the process that has read `RINGCOMM_KEY_FD`. Its child processes "
     "do not get the key."),
    ("JOB", "Name of the job. Ranks of another job are refused."),
    ("SHARED_DIR", "Directory that all hosts share, where ranks started by `srun` or Open MPI's `mpirun` "
     "find rank 0. Unset: `~/.ringcomm`."),
    ("HOST", "Name of this host in messages. Unset: its hostname."),
    ("SLOT", "Set by `ringrun`: `HOST_INDEX:SLOT`, the place of this process."),
    ("MASTER", "Set by `ringrun`: its values of `MASTER_ADDR`, `MASTER_PORT` and `WORLD_SIZE`. While these "
     "are unchanged, `torch.distributed` uses the job's own rendezvous."),
    ("FLIGHT_FD", "Set by `ringrun`: file descriptors by which it requests a rank's last operations."),
    ("ELASTIC", "`1`: ranks can join and leave the job, and `RINGCOMM_SIZE` has no effect. Without "
     "`ringrun`, start `python -m ringcomm.rendezvous --min-np N`."),
    ("MEMBER", "Number of this process in an elastic job. Unset: the rendezvous assigns one."),
    ("RESTART", "How often `ringrun --restarts` has restarted the job: 0 at first."),
)  # fmt: skip

_assigned: Dict[str, str] = {}


def variables(environ: Optional[Mapping[str, str]]) -> Mapping[str, str]:
    """Return ``environ``, else the variables assigned to this process, else those of the environment."""
    if environ is not None:
        return environ
    if not _assigned:
        return os.environ
    replaced = {PREFIX + name for name, _ in MEMBERSHIP_VARIABLES}
    return {**{name: value for name, value in os.environ.items() if name not in replaced}, **_assigned}


def assign(variables: Mapping[str, str]) -> None:
    """Give this process its part in a job without a launcher, as Ray, Dask and Spark do. The ``RINGCOMM_*``
    variables take the place of those in the environment, but are not written to it: child processes do not
    inherit them, in particular not the key. No variables: read the environment again.
    """
    global _assigned
    _assigned = dict(variables)


def export(variables: Mapping[str, Optional[str]]) -> None:
    """Set variables of this process, for the user's function and its child processes; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def exported(variables: Mapping[str, Optional[str]]) -> Iterator[None]:
    """Set variables as :func:`export` does, within a ``with`` block."""
    before = {name: os.environ.get(name) for name in variables}
    export(variables)
    try:
        yield
    finally:
        export(before)


# ---- addresses as text ---------------------------------------------------------------------------

Numeric = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]


def parse_endpoint(text: str) -> Tuple[str, int]:
    """Split ``host:port`` or ``[v6]:port``; ConfigError if it is neither."""
    text = text.strip()
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # an IPv6 address without brackets: which colon starts the port is a guess
    if not host or not colon or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} is not an address: write host:port, or [address]:port for IPv6.")
    return host, int(port)


def format_endpoint(address: str, port: int) -> str:
    """Return ``host:port``, the inverse of :func:`parse_endpoint`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def numeric(host: str) -> Optional[Numeric]:
    """Return the address without its scope, IPv4-mapped ones as IPv4; None for a name."""
    try:
        address: Numeric = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Return whether a host, a name or an address, means this machine only."""
    address = numeric(host)
    return host == "localhost" if address is None else address.is_loopback


# ---- srun and mpirun -----------------------------------------------------------------------------

DEFAULT_FOLDER = "~/.ringcomm"


class Launched(NamedTuple):
    """A process that srun or mpirun has started together with others."""

    launcher: str  # the program, for messages
    rank: int
    size: int
    job: str  # the same on all ranks, and different in any other job
    folder: str = ""  # shared by all hosts; rank 0 is found by it


def find_launched(environ: Mapping[str, str], folder: str = "") -> Optional[Launched]:
    """Return how another launcher started this process; None if none did, or as the only process. mpirun
    starts its own helpers with srun inside a Slurm job, so mpirun's variables come first. ConfigError: the
    mpirun of MPICH has started several processes.
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


# ---- this process --------------------------------------------------------------------------------

ELASTIC_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Limits:
    """The limits of an elastic job."""

    start_np: int = 1  # the first view waits for this many ranks, and a launcher for this many slots
    min_np: int = 1  # with fewer ranks the job waits for more
    max_np: Optional[int] = None  # None: no limit
    timeout_s: float = ELASTIC_TIMEOUT_S  # longest wait for start_np slots, and for min_np ranks

    @property
    def most(self) -> int:
        """Return the size of the largest view."""
        return self.max_np if self.max_np is not None else 2**30


class Slot(NamedTuple):
    """A place for one process: the index of its host, in the order given, and the place on that host."""

    host_index: int
    local: int


@dataclass(frozen=True)
class Membership:
    """How this process takes part in a job.

    Attributes:
        size: number of ranks. A job of one rank needs neither a rendezvous nor a key.
        rendezvous: addresses of the rendezvous, each ``(address, port)``; the first that answers is used.
        key: the job's secret, at least 16 bytes.
        job: the name of the job, which is not secret. Ranks of other jobs are refused.
        slot: the place that the launcher has given this process, or None if it joins without a launcher.
        rank: the rank that this process asks for; None: the rendezvous assigns one.
        host: this host's name in messages, or None for its own hostname.
        certificate: a certificate and its private key as PEM, if connections must be encrypted; otherwise "".
        rendezvous_last: addresses that are tried if none of ``rendezvous`` answers.
        rendezvous_machine: identifier of the machine that serves the rendezvous; "": not known.
        elastic: whether ranks may be lost and may join while the job runs. Then ``size`` and ``rank`` have no
            effect.
        member: in an elastic job, the number of this process; None: the rendezvous assigns one.
        launched: set if srun or mpirun has started this process. Then rank 0 chooses rendezvous and key.
        within: for a process group, the job whose rendezvous connects its ranks; "": its own rendezvous.
    """

    size: int = 1
    rendezvous: Tuple[Tuple[str, int], ...] = ()
    key: bytes = field(default=b"", repr=False)
    job: str = "default"
    slot: Optional[Slot] = None
    rank: Optional[int] = None
    host: Optional[str] = None
    certificate: str = field(default="", repr=False)
    rendezvous_last: Tuple[Tuple[str, int], ...] = ()
    rendezvous_machine: str = ""
    elastic: bool = False
    member: Optional[int] = None
    launched: Optional[Launched] = None
    within: str = ""

    @property
    def is_alone(self) -> bool:
        """Whether this process is the whole job. Then there is no rendezvous and no key."""
        return self.size == 1 and not self.elastic

    @classmethod
    def from_environment(
        cls, environ: Optional[Mapping[str, str]] = None, elastic: bool = False
    ) -> Membership:
        """Read the variables that ``ringrun`` or a user has set, or else the variables of srun and mpirun.

        Args:
            environ: the variables; None: the environment of this process.
            elastic: True: the job is elastic also without ``RINGCOMM_ELASTIC``.

        Raises:
            ConfigError: a variable is missing or has an invalid value.
        """
        environ = variables(environ)
        elastic = elastic or environ.get(PREFIX + "ELASTIC", "") not in ("", "0")
        size = _integer(environ, "SIZE", 1 if elastic else None, low=1)
        if size is None:
            _check_alone(environ)
            launched = find_launched(environ, environ.get(PREFIX + "SHARED_DIR", ""))
            if launched is None:
                return cls()
            host = environ.get(PREFIX + "HOST") or None
            return cls(size=launched.size, rank=launched.rank, host=host, launched=launched)
        if size == 1 and not elastic:
            return cls()
        where = environ.get(PREFIX + "RENDEZVOUS", "")
        if not where:
            raise ConfigError(
                f"{PREFIX}{'ELASTIC=1' if elastic else f'SIZE={size}'} means that this is one of "
                f"{'several' if elastic else size} processes, but {PREFIX}RENDEZVOUS, "
                "the address of their rendezvous, is not set. Start the program with ringrun, or set it to "
                "host:port."
            )
        key, certificate = key_of(environ)
        first, _, last = where.partition(";")
        return cls(
            size=size,
            rendezvous=tuple(parse_endpoint(item) for item in first.split(",")),
            rendezvous_last=tuple(parse_endpoint(item) for item in last.split(",") if last),
            rendezvous_machine=environ.get(PREFIX + "RENDEZVOUS_MACHINE", ""),
            key=key,
            job=environ.get(PREFIX + "JOB", "default"),
            slot=slot_of(environ),
            rank=None if elastic else _integer(environ, "RANK", None, low=0, high=size - 1),
            host=environ.get(PREFIX + "HOST") or None,
            certificate=certificate,
            elastic=elastic,
            member=_integer(environ, "MEMBER", None, low=0) if elastic else None,
        )


def _check_alone(environ: Mapping[str, str]) -> None:
    """Refuse to train alone without a size if a variable shows that there are other processes."""
    for name in ("RENDEZVOUS", "RANK"):
        value = environ.get(PREFIX + name)
        if value:
            raise ConfigError(
                f"{PREFIX}{name}={value} means that this process is one of several, but {PREFIX}SIZE, their "
                f"number, is not set. Set {PREFIX}SIZE on every host, or start the program with ringrun; to "
                f"run alone, unset {PREFIX}{name}."
            )


def _integer(
    environ: Mapping[str, str], name: str, default: Optional[int], low: int, high: Optional[int] = None
) -> Optional[int]:
    text = environ.get(PREFIX + name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{PREFIX}{name}={text!r} is not a whole number.") from None
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{PREFIX}{name}={value} is out of range: it must be {limits}.")
    return value


def slot_of(environ: Mapping[str, str]) -> Optional[Slot]:
    """Return the place that the launcher gave this process, or None; ConfigError if it is malformed."""
    text = environ.get(PREFIX + "SLOT", "")
    if not text:
        return None
    try:
        host_index, index = text.split(":")
        return Slot(int(host_index), int(index))
    except ValueError:
        raise ConfigError(f"{PREFIX}SLOT={text!r} is not of the form HOST_INDEX:SLOT, like 1:0.") from None


def key_of(environ: Mapping[str, str]) -> Tuple[bytes, str]:
    """Return the job's key, and its certificate or ""; ConfigError if a key is unreadable or malformed."""
    descriptor = _integer(environ, "KEY_FD", None, low=0)
    if descriptor is not None:
        _check_reader(environ.get(PREFIX + "KEY_READER", ""), environ.get(PREFIX + "RANK", ""))
    found = read_key(descriptor, environ.get(PREFIX + "KEY_FILE", ""), environ.get(PREFIX + "KEY", ""))
    if descriptor is not None and environ is os.environ:
        export({PREFIX + "KEY_READER": str(os.getpid())})
    return found


def _check_reader(reader: str, rank: str) -> None:
    """Refuse a child of the process that is the rank: it has that process's variables, but not its key."""
    if reader not in ("", str(os.getpid())):
        raise ConfigError(
            f"This process is a child of a rank of the job ({f'rank {rank}, ' if rank else ''}process "
            f"{reader}), and only the rank itself can call init(). If multiprocessing has started it by "
            "spawn or forkserver, it runs the script again: put init() and what follows under "
            '`if __name__ == "__main__":`. A helper program gets what it needs as arguments.'
        )
