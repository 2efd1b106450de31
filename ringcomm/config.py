"""Reads the configuration from the environment, through :mod:`.environment`; the only module that does.

It produces two frozen objects: :class:`Settings`, the tunables, and :class:`Membership`, how
this process takes part in a job (its place or rank, where the rendezvous listens, the job's key).
Nothing else in ringcomm reads ``os.environ``. ``docs/configuration.md`` is generated
by :func:`document` from the same table, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from . import environment, parsing, setting_aliases
from .endpoints import parse_endpoint
from .environment import PREFIX as PREFIX
from .errors import ConfigError
from .keys import read_key
from .other_launchers import Launched, find_launched
from .unknown_settings import misspelt
from .variables import MEMBERSHIP_VARIABLES, env_rendezvous, launchers_rank, torchrun


def _setting(default: Any, variable: str, parse: Callable[[str], Any], doc: str, flag: str = "") -> Any:
    flag = flag or "--" + variable.lower().replace("_", "-")
    metadata = {"variable": PREFIX + variable, "flag": flag, "parse": parse, "doc": doc}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """The tunables, each defined exactly once: default, variable, parser and description."""

    iface: str = _setting(
        "", "IFACE", str,
        "Which network interfaces may carry traffic: names, globs, CIDRs and exclusions, separated by "
        "commas (`eth0`, `en*`, `192.168.1.0/24`, `!docker*`). Empty: every interface that works.",
    )  # fmt: skip
    start_timeout_s: float = _setting(
        60.0, "START_TIMEOUT", parsing.positive_seconds,
        "Seconds that ranks wait for each other in `init`.",
    )  # fmt: skip
    timeout_s: float = _setting(
        0.0, "TIMEOUT", parsing.limit,
        "Seconds without a single byte from a peer after which a collective fails and names that peer, "
        "even if the peer sends heartbeats or has called `pause`. 0: as long as `LATE_AFTER` and "
        "`DEAD_AFTER` allow; where they do not apply (groups of `torch.distributed`), 600.",
    )  # fmt: skip
    segment_bytes: int = _setting(
        0, "SEGMENT_BYTES", parsing.size_or_zero,
        "Bytes that are received before they are reduced; they should fit into the processor's cache. 0: by "
        "link, 1 MiB where ranks read each other's memory and 256 KiB elsewhere.",
    )  # fmt: skip
    spin_us: float = _setting(
        200.0, "SPIN_US", parsing.microseconds,
        "Microseconds for which a waiting call polls before it sleeps, yielding the processor between two "
        "polls; five times as long where the ranks on a host outnumber its cores.",
    )  # fmt: skip
    algorithm: str = _setting(
        "", "ALGORITHM", parsing.algorithm,
        "Forces the allreduce algorithm: `one_shot`, `direct`, `doubling`, `ring`, `hierarchical` (several "
        "hosts with equally many ranks; `direct` elsewhere) or `pipelined` (for arrays on GPUs). Empty: "
        "chosen by size and what was measured.",
    )  # fmt: skip
    compression: str = _setting(
        "", "COMPRESSION", parsing.compression,
        "How gradients are sent by optimizers and tapes that name no compression: `bf16`, `fp16`, `int8`, "
        "`int4`, `auto` (float32, bf16 or int8, as measured steps, links and codecs suggest) or `none`.",
        "--compress",
    )  # fmt: skip
    measure: bool = _setting(
        True, "MEASURE", parsing.flag,
        "Measure latencies and speeds when a job starts, choose algorithms by them, and give slow links "
        "smaller shares; within a host, also the best transport for each size. Off on any rank: algorithms "
        "are chosen by rule.",
    )  # fmt: skip
    transport: str = _setting(
        "auto", "TRANSPORT", parsing.transport,
        "How ranks of one host exchange data: `auto` (the first of these that works), `memory` (each reads "
        "the other's memory), `shm` (memory that both share), `unix` (Unix sockets) or `tcp`.",
    )  # fmt: skip
    congestion: str = _setting(
        "auto", "CONGESTION", str,
        "TCP congestion control of the links: one that the system has (`cubic`, `reno`, `bbr`), "
        "`system` for its default, or `auto`: the default, but cubic or reno instead of bbr "
        "between hosts less than 2 ms apart, because bbr paces even the loopback.",
    )  # fmt: skip
    fusion_bytes: int = _setting(
        64 * 1024 * 1024, "FUSION_THRESHOLD", parsing.size_or_zero,
        "Largest total size in bytes of small tensors that the engine fuses into one message. 0: no fusion.",
    )  # fmt: skip
    cycle_ms: float = _setting(
        1.0, "CYCLE_TIME", parsing.milliseconds,
        "Milliseconds that a tensor may wait for others to be fused with, unless a caller waits for it.",
    )  # fmt: skip
    dead_after_s: float = _setting(
        30.0, "DEAD_AFTER", parsing.seconds,
        "Seconds without a heartbeat after which a rank counts as failed: its process is stopped or cut off, "
        "or a C call holds the interpreter lock. Also the limit for a transfer without progress. 0: never.",
    )  # fmt: skip
    cache_capacity: int = _setting(
        4096, "CACHE_CAPACITY", parsing.count,
        "Number of tensors whose metadata the engine caches, so that a few bytes announce them.",
    )  # fmt: skip
    stall_warning_s: float = _setting(
        60.0, "STALL_WARNING", parsing.seconds,
        "Seconds after which rank 0 warns that some ranks have not entered the collective in which others "
        "wait, with their Python stacks. 0: never.",
    )  # fmt: skip
    late_after_s: float = _setting(
        600.0, "LATE_AFTER", parsing.seconds,
        "Seconds after which a collective fails that some ranks have not entered, although they send "
        "heartbeats. 0: never. `with ringcomm.pause(...)` stops this clock.",
    )  # fmt: skip
    timeline: str = _setting(
        "", "TIMELINE", str,
        "Write what the engines of all ranks do (collectives by name, and so everything in the adapters; not "
        "direct calls), and what process groups of torch.distributed do, from start to end, to this file of "
        "rank 0: a Chrome trace. Empty: nothing.",
    )  # fmt: skip
    timeline_mark_cycles: bool = _setting(
        False, "TIMELINE_MARK_CYCLES", parsing.flag,
        "Mark in the timeline when the engine receives responses: which operations to execute.",
    )  # fmt: skip
    autotune: bool = _setting(
        False, "AUTOTUNE", parsing.flag,
        "Try fusion thresholds and cycle times while the job runs, and keep the best, which rank 0 logs.",
    )  # fmt: skip
    autotune_log: str = _setting(
        "", "AUTOTUNE_LOG", str,
        "File of rank 0 for what autotuning has measured, as CSV. Empty: none.",
    )  # fmt: skip
    flight_recorder: int = _setting(
        1000, "FLIGHT_RECORDER", parsing.whole,
        "Number of last operations that each rank records, for the diagnosis when a job fails or makes no "
        "progress. 0: none, and no diagnosis.",
    )  # fmt: skip
    diagnose_dir: str = _setting(
        "", "DIAGNOSE_DIR", str,
        "Where ranks' last operations and Python stacks are written when a job fails; `ringrun` brings them "
        "there from all hosts. Empty: ringrun's `--output-dir`, or else a new temporary folder (ten stay); "
        "without `ringrun`, nothing is written.",
    )  # fmt: skip
    advise: bool = _setting(
        False, "ADVISE", parsing.flag,
        "Recommend machines: measure every rank in 20 steps with each of two batch sizes, print the "
        "predicted time of a step for every subset of hosts, and end. The program must take its data from "
        "balanced batches.",
    )  # fmt: skip
    predict: bool = _setting(
        False, "PREDICT", parsing.flag,
        "Predict how the program scales: measure 10 of its steps and the links, print the predicted step, "
        "rate and efficiency for more ranks and other ways to reduce gradients, and end. It needs two ranks.",
    )  # fmt: skip
    predict_ranks: str = _setting(
        "2,4,8,16", "PREDICT_RANKS", parsing.counts,
        "For `--predict`: numbers of ranks, separated by commas.", "--ranks",
    )  # fmt: skip
    predict_link: str = _setting(
        "", "PREDICT_LINK", parsing.link_rate,
        "For `--predict`: line rate of the hosts' interfaces, like `1gbit`. Empty: as measured.", "--link",
    )  # fmt: skip
    predict_batch: int = _setting(
        0, "PREDICT_BATCH", parsing.whole,
        "For `--predict`: samples of one rank per step, for rates in samples. 0: rates are in steps.",
        "--batch",
    )  # fmt: skip
    predict_price: float = _setting(
        0.0, "PREDICT_PRICE", parsing.price,
        "For `--predict`: price of one machine per hour, for costs per million samples. 0: none.", "--price",
    )  # fmt: skip
    predict_figure: str = _setting(
        "", "PREDICT_FIGURE", str,
        "For `--predict`: file of rank 0 for a figure in SVG. Empty: none.", "--figure",
    )  # fmt: skip
    check_calls: bool = _setting(
        False, "CHECK_CALLS", parsing.flag,
        "Make it an error that ranks make the same call (the same number, among calls in order and among "
        "operations without a name) at different lines of the program. Off: that is a warning, once. Calls "
        "of `barrier` are not compared.",
    )  # fmt: skip
    check_every: int = _setting(
        0, "CHECK_EVERY", parsing.whole,
        "Number of optimizer steps between two checks that all ranks have the same parameters, bit by "
        "bit. 0: never.",
    )  # fmt: skip
    jax_callbacks: str = _setting(
        "auto", "JAX_CALLBACKS", parsing.jax_callbacks,
        "How programs that JAX has compiled call `ringcomm.jax`: `buffers` (on XLA's own memory, without "
        "copies; uses private names of JAX), `io_callback` (as that does, by copies of arrays), or `auto`: "
        "`buffers` if a trial with the installed JAX succeeds.",
    )  # fmt: skip
    encrypt: bool = _setting(
        False, "ENCRYPT", parsing.flag,
        "Encrypt all TCP connections by TLS 1.3, with a certificate for this job alone that `ringrun` makes "
        "and passes to its processes. Without `ringrun`: require it; the key file must hold a certificate "
        "(`python -m ringcomm.newkey --encrypt FILE`). What stays in one host's memory is not encrypted.",
    )  # fmt: skip
    threads: str = _setting(
        "auto", "THREADS", parsing.threads,
        "For `ringrun`: threads per rank, set as `OMP_NUM_THREADS` and similar variables of NumPy, "
        "TensorFlow and JAX unless they are set. `auto`: cores // ranks where several share a host; "
        "`none`: not set.",
    )  # fmt: skip
    allow_forwarding: bool = _setting(
        False, "ALLOW_FORWARDING", parsing.flag,
        "Accept connections that were dialled at another address or port than they arrive at, because port "
        "forwarding or NAT lies between the hosts. Then a process that gets a rank to dial it can relay and "
        "change the data between two ranks: use it with `--encrypt`.",
    )  # fmt: skip
    verbose: bool = _setting(
        False, "VERBOSE", parsing.flag,
        "Rank 0 logs the table of links and which interface each one uses, and which algorithm serves which "
        "messages.",
    )  # fmt: skip

    @classmethod
    def from_environment(cls, environ: Optional[Mapping[str, str]] = None) -> Settings:
        """The effective settings: defaults, overridden by ``RINGCOMM_*`` variables.

        Raises:
            ConfigError: a variable does not parse; the message names it, its value and what fits.
        """
        environ = environment.variables(environ)
        changes: Dict[str, Any] = {}
        for item in fields(cls):
            variable = item.metadata["variable"]
            if variable in environ:
                text = environ[variable]
                changes[item.name] = parse_setting(item.name, text, f"{variable}={text!r}")
        for source in setting_aliases.sources:
            for other in source(environ):
                changes[other.setting] = parse_setting(other.setting, other.text, other.said)
        return replace(cls(), **changes)

    def to_environment(self) -> Dict[str, str]:
        """The variables that give another process these same settings (only what differs)."""
        plain = Settings()
        changed: Dict[str, str] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value != getattr(plain, item.name):
                changed[item.metadata["variable"]] = str(int(value) if isinstance(value, bool) else value)
        return changed


def parse_setting(name: str, text: str, said: str) -> Any:
    """The value of one setting from its text.

    Args:
        name: the field of :class:`Settings`.
        text: its value as text.
        said: the setting as the user wrote it, which starts the error message.

    Raises:
        ConfigError: the text does not parse; the message says why, and what the setting means.
    """
    (metadata,) = [item.metadata for item in fields(Settings) if item.name == name]
    try:
        return metadata["parse"](text)
    except ValueError as problem:
        raise ConfigError(f"{said} cannot be used: {problem}. It means: {metadata['doc']}") from None


class Slot(NamedTuple):
    """A place for one process: the n-th of the hosts in the order given, and the place on it."""

    host_index: int
    local: int


@dataclass(frozen=True)
class Membership:
    """How this process takes part in a job.

    Attributes:
        size: number of ranks; 1 needs neither rendezvous nor key.
        rendezvous: where the rendezvous may be reached, ``(address, port)``; any one will do.
        key: the job's secret, at least 16 bytes.
        job: the job's public name; ranks of other jobs are refused.
        slot: the place the launcher gave this process, or None if it joins on its own.
        rank: the rank it asks for, or None to be given one.
        host: this host's name in messages, or None for its own hostname.
        certificate: PEM of a certificate and of its private key, if connections are to be encrypted; else "".
        rendezvous_last: further addresses of the rendezvous, if it does not answer at ``rendezvous``.
        rendezvous_machine: identifies the machine that serves the rendezvous; "": not known.
        elastic: whether ranks may be lost and may join while the job runs; then ``size`` and ``rank`` do not
            count.
        member: in an elastic job, this process's member number, or None if the rendezvous is to give one.
        launched: how srun or mpirun has started this process; then rank 0 chooses rendezvous and key.
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

    @property
    def is_alone(self) -> bool:
        """Whether this process is the whole job, without rendezvous and key."""
        return self.size == 1 and not self.elastic

    @classmethod
    def from_environment(cls, environ: Optional[Mapping[str, str]] = None) -> Membership:
        """Read the variables that ``ringrun`` or a user has set; without them those of srun and mpirun.

        Raises:
            ConfigError: a variable is missing or does not parse.
        """
        environ = environment.variables(environ)
        elastic = environ.get(PREFIX + "ELASTIC", "") not in ("", "0")
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
        key, certificate = _key(environ)
        first, _, last = where.partition(";")
        return cls(
            size=size,
            rendezvous=tuple(parse_endpoint(item) for item in first.split(",")),
            rendezvous_last=tuple(parse_endpoint(item) for item in last.split(",") if last),
            rendezvous_machine=environ.get(PREFIX + "RENDEZVOUS_MACHINE", ""),
            key=key,
            job=environ.get(PREFIX + "JOB", "default"),
            slot=_slot(environ),
            rank=None if elastic else _integer(environ, "RANK", None, low=0, high=size - 1),
            host=environ.get(PREFIX + "HOST") or None,
            certificate=certificate,
            elastic=elastic,
            member=_integer(environ, "MEMBER", None, low=0) if elastic else None,
        )


def _check_alone(environ: Mapping[str, str]) -> None:
    """Without a size this process would train alone; refuse if a variable shows that it is not to."""
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


def _slot(environ: Mapping[str, str]) -> Optional[Slot]:
    text = environ.get(PREFIX + "SLOT", "")
    if not text:
        return None
    try:
        host_index, index = text.split(":")
        return Slot(int(host_index), int(index))
    except ValueError:
        raise ConfigError(f"{PREFIX}SLOT={text!r} is not of the form HOST_INDEX:SLOT, like 1:0.") from None


def _key(environ: Mapping[str, str]) -> Tuple[bytes, str]:
    descriptor = _integer(environ, "KEY_FD", None, low=0)
    return read_key(descriptor, environ.get(PREFIX + "KEY_FILE", ""), environ.get(PREFIX + "KEY", ""))


def key_from_environment(environ: Optional[Mapping[str, str]] = None) -> Optional[Tuple[bytes, str]]:
    """The job's key, and its certificate or "", for jobs with another rendezvous; None: no key.

    Raises:
        ConfigError: a variable names a key that cannot be read or is none.
    """
    environ = environment.variables(environ)
    if not any(environ.get(PREFIX + name) for name in ("KEY_FD", "KEY_FILE", "KEY")):
        return None
    return _key(environ)


def place_from_environment() -> Tuple[str, Optional[Slot]]:
    """The job's name, and the place in it that the launcher gave this process, if one did."""
    environ = environment.variables(None)
    return environ.get(PREFIX + "JOB", "default"), _slot(environ)


def host_from_environment(environ: Optional[Mapping[str, str]] = None) -> Optional[str]:
    """The launcher's name of this host, or None if it has given none."""
    return environment.variables(environ).get(PREFIX + "HOST") or None


def launchers_rank_from_environment() -> Optional[int]:
    """This process's rank if ``ringrun`` has set what ``env://`` reads; None if something else has."""
    return launchers_rank(environment.variables(None))


def torchrun_from_environment(size: int) -> Tuple[bool, str]:
    """torchrun's or ``ringrun``'s variables about a group of ``size`` ranks: (all on this host, address)."""
    return torchrun(environment.variables(None), size)


def env_rendezvous_from_environment() -> Tuple[List[str], int]:
    """Of the variables that PyTorch's ``env://`` reads, those that are not set; and ``WORLD_SIZE``, or 1."""
    return env_rendezvous(environment.variables(None))


def flight_channel_from_environment(environ: Optional[Mapping[str, str]] = None) -> List[Tuple[int, int]]:
    """For flight records, the socket to ringrun's agent and the pipe for stacks: descriptors and inodes.

    Empty where there are none.
    """
    text = environment.variables(environ).get(PREFIX + "FLIGHT_FD", "")
    pairs = [item.partition(":") for item in text.split(",")]
    if len(pairs) != 2 or not all(number.isdigit() and inode.isdigit() for number, _, inode in pairs):
        return []
    return [(int(number), int(inode)) for number, _, inode in pairs]


def misspelt_variables(environ: Optional[Mapping[str, str]] = None) -> List[str]:
    """A warning for each variable whose name is similar, but not equal, to one that is read."""
    known = [item.metadata["variable"] for item in fields(Settings)]
    known += [PREFIX + name for name, _ in MEMBERSHIP_VARIABLES]
    return misspelt(environment.variables(environ), known, PREFIX)


def document() -> str:
    """The configuration page, as Markdown."""
    lines: List[str] = [
        "# Configuration",
        "",
        "Written by `python -m ringcomm.config` from the table in `ringcomm/config.py`.",
        "",
        "## Settings",
        "",
        "Each has an option of `ringrun`, a variable, and, without the dashes, a line in a file for "
        "`ringrun --config-file`. The option comes before the variable, the variable before the file. "
        "[ringrun.md](ringrun.md) has the rest.",
        "",
        "| option | variable | default | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for item in fields(Settings):
        shown = {"False": "off", "True": "on", "": "empty"}.get(str(item.default), f"`{item.default}`")
        names = f"`{item.metadata['flag']}` | `{item.metadata['variable']}`"
        lines.append(f"| {names} | {shown} | {item.metadata['doc']} |")
    lines += ["", "## Taking part in a job", ""]
    lines += ["`ringrun` sets `SIZE`, `RENDEZVOUS`, `KEY_FD`, `JOB`, `HOST` and `SLOT`; the rank follows."]
    lines += ["By hand `SIZE`, `RENDEZVOUS` and a key are enough to join.", ""]
    lines += ["| variable | meaning |", "| --- | --- |"]
    lines += [f"| `{PREFIX}{name}` | {doc} |" for name, doc in MEMBERSHIP_VARIABLES]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
