"""The tunables, :class:`Settings`: each is defined once, with default, variable, option, parser and text.

:mod:`ringcomm.config` writes the page that documents them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Callable, Dict, Mapping, Optional

from ..errors import ConfigError
from . import environment, parsing, setting_aliases
from .bucket_sizes import FUSION_BYTES
from .environment import PREFIX


def _setting(
    default: Any, variable: str, parse: Callable[[str], Any], doc: str, flag: str = "", metavar: str = "",
    brief: str = "",
) -> Any:  # fmt: skip
    flag = flag or "--" + variable.lower().replace("_", "-")
    metadata = {"variable": PREFIX + variable, "flag": flag, "parse": parse, "doc": doc}
    metadata.update(metavar=metavar, brief=brief)  # for the option: its value's name, what --help shows
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
        "Seconds that ranks wait for each other in `init`.", metavar="S",
    )  # fmt: skip
    timeout_s: float = _setting(
        0.0, "TIMEOUT", parsing.limit,
        "Seconds without a single byte from a peer after which a collective fails and names that peer, "
        "even if the peer sends heartbeats or has called `pause`. 0: as long as `LATE_AFTER` and "
        "`DEAD_AFTER` allow; where they do not apply (groups of `torch.distributed`), 600.",
        metavar="S",
        brief="Longest silence.",
    )  # fmt: skip
    segment_bytes: int = _setting(
        0, "SEGMENT_BYTES", parsing.size_or_zero,
        "Bytes that are received before they are reduced; they should fit into the processor's cache. 0: by "
        "link, 1 MiB where ranks read each other's memory and 256 KiB elsewhere.", metavar="BYTES",
    )  # fmt: skip
    spin_us: float = _setting(
        200.0, "SPIN_US", parsing.microseconds,
        "Microseconds for which a waiting call polls before it sleeps, yielding the processor between two "
        "polls; five times as long where the ranks on a host outnumber its cores.", metavar="US",
    )  # fmt: skip
    algorithm: str = _setting(
        "", "ALGORITHM", parsing.algorithm,
        "Forces the allreduce algorithm: `one_shot`, `direct`, `doubling`, `ring` or `hierarchical` (several "
        "hosts with equally many ranks; `direct` elsewhere). Empty: chosen by size and what was measured.",
        metavar="one_shot|direct|doubling|ring|hierarchical",
    )  # fmt: skip
    compression: str = _setting(
        "", "COMPRESSION", parsing.compression,
        "How gradients are sent by optimizers and tapes that name no compression: `bf16`, `fp16`, `int8`, "
        "`int4`, `auto` (float32, bf16 or int8, as measured steps, links and codecs suggest) or `none`.",
        "--compress", metavar="bf16|fp16|int8|int4|auto|none",
        brief="int8, auto, …",
    )  # fmt: skip
    local_steps: str = _setting(
        "", "LOCAL_STEPS", parsing.local_steps,
        "Local steps for programs with PyTorch's `DistributedOptimizer`: ranks train alone and average "
        "weights after so many steps; `auto`: as often as their distance demands and the link permits. "
        "Empty: gradients are averaged in every step.", metavar="auto|N",
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
        metavar="auto|memory|shm|unix|tcp",
    )  # fmt: skip
    congestion: str = _setting(
        "auto", "CONGESTION", str,
        "TCP congestion control of the links: one that the system has (`cubic`, `reno`, `bbr`), "
        "`system` for its default, or `auto`: the default, but cubic or reno instead of bbr "
        "between hosts less than 2 ms apart, because bbr paces even the loopback.",
        metavar="auto|system|cubic|reno|bbr|…",
    )  # fmt: skip
    fusion_bytes: int = _setting(
        FUSION_BYTES, "FUSION_THRESHOLD", parsing.size_or_zero,
        "Largest total size in bytes of small tensors that the engine fuses into one message. 0: no fusion.",
        metavar="BYTES",
    )  # fmt: skip
    cycle_ms: float = _setting(
        1.0, "CYCLE_TIME", parsing.milliseconds,
        "Milliseconds that a tensor may wait for others to be fused with, unless a caller waits for it.",
        metavar="MS",
    )  # fmt: skip
    dead_after_s: float = _setting(
        30.0, "DEAD_AFTER", parsing.seconds,
        "Seconds without a heartbeat after which a rank counts as failed: its process is stopped or cut off, "
        "or a C call holds the interpreter lock. Also the limit for a transfer without progress. 0: never.",
        metavar="S",
    )  # fmt: skip
    stall_warning_s: float = _setting(
        60.0, "STALL_WARNING", parsing.seconds,
        "Seconds after which rank 0 warns that some ranks have not entered the collective in which others "
        "wait, with their Python stacks. 0: never.", metavar="S",
    )  # fmt: skip
    late_after_s: float = _setting(
        600.0, "LATE_AFTER", parsing.seconds,
        "Seconds after which a collective fails that some ranks have not entered, although they send "
        "heartbeats. 0: never. `with ringcomm.pause(...)` stops this clock.", metavar="S",
    )  # fmt: skip
    timeline: str = _setting(
        "", "TIMELINE", str,
        "Write what the engines of all ranks do (collectives by name, and so everything in the adapters; not "
        "direct calls), and what process groups of torch.distributed do, from start to end, to this file of "
        "rank 0: a Chrome trace. Empty: nothing.", metavar="FILE",
        brief="Chrome trace.",
    )  # fmt: skip
    flight_recorder: int = _setting(
        1000, "FLIGHT_RECORDER", parsing.whole,
        "Number of last operations that each rank records, for the diagnosis when a job fails or makes no "
        "progress. 0: none, and no diagnosis.", metavar="N",
    )  # fmt: skip
    diagnose_dir: str = _setting(
        "", "DIAGNOSE_DIR", str,
        "Where ranks' last operations and Python stacks are written when a job fails; `ringrun` brings them "
        "there from all hosts. Empty: ringrun's `--output-dir`, or else a new temporary folder (ten stay); "
        "without `ringrun`, nothing is written.", metavar="FOLDER",
    )  # fmt: skip
    advise: bool = _setting(
        False, "ADVISE", parsing.flag,
        "Recommend machines: measure every rank in 20 steps with each of two batch sizes, print the "
        "predicted time of a step for every subset of hosts, and end. The program must take its data from "
        "balanced batches.",
    )  # fmt: skip
    check_every: int = _setting(
        0, "CHECK_EVERY", parsing.whole,
        "Number of optimizer steps between two checks that all ranks have the same parameters, bit by "
        "bit. 0: never.", metavar="N",
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
        "`none`: not set.", metavar="N|none",
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
    """Parse one setting; ConfigError starts with ``said``, the setting as the user wrote it."""
    (metadata,) = [item.metadata for item in fields(Settings) if item.name == name]
    try:
        return metadata["parse"](text)
    except ValueError as problem:
        raise ConfigError(f"{said} cannot be used: {problem}. It means: {metadata['doc']}") from None
