"""The tunables, :class:`Settings`: each is defined once, with default, variable, option, parser and text.

:mod:`ringcomm.config` writes the page that documents them.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ..errors import ConfigError
from ..ops import CODECS
from .membership import PREFIX, variables

# ---- how many bytes are reduced together -------------------------------------------------------
#
# From a gradient to the network, in this order:
# 1. An adapter puts gradients side by side in buckets, in the order in which a backward pass computes them.
#    The first bucket is small, so that its reduction starts early. A bucket is one operation.
# 2. Rank 0 fuses the operations that are ready on all ranks, buckets and single tensors alike, up to
#    FUSION_BYTES (--fusion-threshold).
# 3. Each rank copies the fused tensors below ALONE_BYTES side by side. Larger ones are reduced one by one, in
#    place: the copies would cost more than a call.
# PyTorch's process group reduces several tensors at once without rank 0: those up to LISTED_BYTES side by
# side, the others one by one.

FIRST_GRADIENTS_BYTES = 1 << 20
GRADIENTS_BYTES = 8 << 20
FUSION_BYTES = 64 << 20
ALONE_BYTES = 1 << 20
LISTED_BYTES = 256 << 10

# ---- parsers -----------------------------------------------------------------------------------
#
# Each returns the value, or raises ValueError with the valid values; the caller adds the setting's name.


def _within(low: float, high: float, problem: str) -> Callable[[str], float]:
    """Return a parser of numbers from ``low`` to ``high``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("must be a number") from None
        if not low <= value <= high:
            raise ValueError(problem)
        return value

    return parse


def _one_of(words: Iterable[str], empty: bool = False) -> Callable[[str], str]:
    """Return a parser of one of these words, or of "" if ``empty``."""

    def parse(text: str) -> str:
        if text not in words and (text or not empty):
            raise ValueError(f"must be {'empty or ' if empty else ''}one of {', '.join(words)}")
        return text

    return parse


_MAX = sys.float_info.max
parse_positive_seconds = _within(sys.float_info.min, math.inf, "must be more than zero seconds")
parse_seconds = _within(0, _MAX, "must be zero or more seconds")


def parse_size(text: str) -> int:
    """Parse bytes: ``262144``, ``256K``, ``256KiB``, ``1M``, or ``0``, which has a special meaning."""
    digits = text.strip().lower()
    if digits == "0":
        return 0
    for suffix in ("ib", "b"):
        if digits.endswith(suffix):
            digits = digits[: -len(suffix)]
            break
    factor = 1
    if digits and digits[-1] in "kmg":
        factor = 1024 ** ("kmg".index(digits[-1]) + 1)
        digits = digits[:-1]
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError("must be a number of bytes like 65536, 64K or 1M, or 0")
    return int(digits) * factor


def parse_flag(text: str) -> bool:
    """Parse ``1``, ``0``, or a word for them."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("must be 1 or 0")


def parse_threads(text: str) -> str:
    """Accept ``auto``, ``none``, or a whole number from 1."""
    word = text.strip().lower()
    if word not in ("auto", "none") and not (word.isdecimal() and int(word)):
        raise ValueError("must be auto, none, or a whole number from 1")
    return word


TRANSPORTS = ("auto", "memory", "shm", "unix", "tcp")
parse_transport = _one_of(TRANSPORTS)


# The all-reduce algorithms, and the modules of ringcomm.schedule that register them. A new algorithm is added
# to this table; ringcomm.schedule.select imports the modules.
ALGORITHMS = {
    "one_shot": "direct",
    "direct": "direct",
    "doubling": "tree",
    "ring": "ring",
    "hierarchical": "hierarchy",
}  # fmt: skip

COMPRESSIONS = (*CODECS, "auto")
parse_compression = _one_of(COMPRESSIONS, empty=True)


def parse_local_steps(text: str) -> str:
    """Accept ``auto``, a number from 1, or nothing."""
    if text not in ("", "auto") and not (text.isdecimal() and int(text)):
        raise ValueError("must be empty, auto, or a number from 1 on")
    return text


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
    """The settings of a job. docs/configuration.md lists those that are also options of ``ringrun``."""

    iface: str = _setting(
        "", "IFACE", str,
        "Network interfaces that ranks may use: names, globs, networks and exclusions, separated by commas "
        "(`eth0`, `en*`, `192.168.1.0/24`, `!docker*`). Empty: all interfaces.",
    )  # fmt: skip
    start_timeout_s: float = _setting(
        60.0, "START_TIMEOUT", parse_positive_seconds,
        "Seconds that ranks wait for each other in `init()` before it fails.", metavar="S",
    )  # fmt: skip
    compression: str = _setting(
        "", "COMPRESSION", parse_compression,
        "How ringcomm's optimizers and gradient tapes send gradients if the program names no compression: "
        f"`{'`, `'.join(CODECS)}` or `auto` (chosen by measurements).",
        "--compress", metavar="|".join(COMPRESSIONS),
        brief="int8, auto, …",
    )  # fmt: skip
    local_steps: str = _setting(
        "", "LOCAL_STEPS", parse_local_steps,
        "With PyTorch's `DistributedOptimizer`: number of steps that each rank trains alone before the ranks "
        "average their weights. `auto`: chosen by measurements. Empty: gradients are averaged in every step.",
        metavar="auto|N",
    )  # fmt: skip
    transport: str = _setting(
        "auto", "TRANSPORT", parse_transport,
        "How ranks of one host exchange data: `memory` (a rank reads the other rank's memory), `shm` (shared "
        "memory), `unix` (Unix sockets), `tcp`, or `auto` (the first of these that works).",
        metavar="auto|memory|shm|unix|tcp",
    )  # fmt: skip
    fusion_bytes: int = _setting(
        FUSION_BYTES, "FUSION_THRESHOLD", parse_size,
        "Tensors that are ready are reduced together, up to this number of bytes. 0: one by one.",
        metavar="BYTES",
    )  # fmt: skip
    dead_after_s: float = _setting(
        30.0, "DEAD_AFTER", parse_seconds,
        "Seconds without a heartbeat after which a rank counts as failed. Heartbeats are missing if the "
        "rank's process is stopped, its network is cut, or a C call holds the interpreter lock. A "
        "transfer without progress has the same limit. 0: no limit.",
        metavar="S",
    )  # fmt: skip
    late_after_s: float = _setting(
        600.0, "LATE_AFTER", parse_seconds,
        "Seconds after which a collective fails if some ranks have not entered it. After a tenth of that "
        "time, rank 0 logs a warning with the Python stacks of these ranks. 0: no limit and no warning. Time "
        "in `with ringcomm.pause(...)` does not count.",
        metavar="S", brief="Longest wait.",
    )  # fmt: skip
    timeline: str = _setting(
        "", "TIMELINE", str,
        "Write a Chrome trace of all ranks to this file on rank 0's host. It shows all collectives except "
        "direct ones like `rc.allreduce`. Empty: no trace.",
        metavar="FILE", brief="Chrome trace.",
    )  # fmt: skip
    diagnose_dir: str = _setting(
        "", "DIAGNOSE_DIR", str,
        "Folder for ranks' last operations and Python stacks when a job fails. `ringrun` collects them from "
        "all hosts. Empty: `--output-dir`, or else a new temporary folder (the ten newest are kept); without "
        "`ringrun`, nothing is written.",
        metavar="FOLDER",
    )  # fmt: skip
    advise: bool = _setting(
        False, "ADVISE", parse_flag,
        "Predict the step time for every subset of the hosts, recommend a subset, and end the job. "
        "The program must take its data from `BalancedBatches`, `BalancedDataset` or `rc.balanced`.",
    )  # fmt: skip
    encrypt: bool = _setting(
        False, "ENCRYPT", parse_flag,
        "Encrypt all TCP connections with TLS 1.3. `ringrun` does so by default if a host has a public "
        "address or machines join with a code. Without `ringrun`, the key file must hold a certificate "
        "(`python -m ringcomm.newkey --encrypt FILE`). Data that ranks exchange in memory are not "
        "encrypted.",
    )  # fmt: skip
    threads: str = _setting(
        "auto", "THREADS", parse_threads,
        "Threads per rank, for NumPy, TensorFlow and JAX. `ringrun` sets `OMP_NUM_THREADS` and similar "
        "variables unless you have set them. `auto`: on hosts with several ranks, cores divided by ranks. "
        "`none`: `ringrun` sets nothing.", metavar="N|none",
    )  # fmt: skip
    verbose: bool = _setting(
        False, "VERBOSE", parse_flag,
        "Rank 0 logs the links between ranks, and the algorithm for each message size.",
    )  # fmt: skip

    # The rest has no option and no variable: it is for programs that pass their own settings to `init`.

    timeout_s: float = 0.0
    """Seconds after which a call that moves no data fails, even if all ranks are alive; 0: no limit."""
    algorithm: str = ""
    """The name of the all-reduce algorithm; "": chosen by message size and measurements."""
    measure: bool = True
    """Whether links are measured when a job starts. Otherwise fixed rules choose the algorithms."""
    segment_bytes: int = 0
    """Bytes that are received before they are reduced; 0: a number that suits the link."""
    spin_us: float = 200.0
    """Microseconds for which a waiting call polls before it sleeps."""
    cycle_ms: float = 1.0
    """Milliseconds for which a tensor waits for others to be reduced with, unless a caller waits for it."""

    @property
    def stall_warning_s(self) -> float:
        """Seconds after which rank 0 warns of ranks that have not entered a collective; 0: never."""
        return self.late_after_s / 10

    @classmethod
    def from_environment(cls, environ: Optional[Mapping[str, str]] = None) -> Settings:
        """Return the effective settings: the defaults, overridden by ``RINGCOMM_*`` variables.

        Raises:
            ConfigError: a variable has an invalid value. The message names the variable and valid values.
        """
        environ = variables(environ)
        return effective([source(environ) for source in (values_in, *aliases)]).settings

    def to_environment(self) -> Dict[str, str]:
        """Return variables that give another process the same settings, without those at their defaults."""
        plain = Settings()
        changed: Dict[str, str] = {}
        for item in tunables():
            value = getattr(self, item.name)
            if value != getattr(plain, item.name):
                changed[item.metadata["variable"]] = str(int(value) if isinstance(value, bool) else value)
        return changed


def tunables() -> List[Field[Any]]:
    """Return the fields of :class:`Settings` that have an option and a variable, in their order."""
    return [item for item in fields(Settings) if item.metadata]


def parse_setting(name: str, text: str, said: str) -> Any:
    """Parse one setting; ConfigError starts with ``said``, the setting as the user wrote it."""
    (metadata,) = [item.metadata for item in tunables() if item.name == name]
    try:
        return metadata["parse"](text)
    except ValueError as problem:
        raise ConfigError(f"{said} cannot be used: {problem}. It means: {metadata['doc']}") from None


class SettingValue(NamedTuple):
    """The value that one source gives to one setting."""

    name: str  # the field of :class:`Settings`
    text: str  # in the form of the setting's parser
    as_written: str  # in the user's form, for messages
    source: str  # flag, variable or file


class Effective(NamedTuple):
    """Settings, and the source of each field that is not at its default."""

    settings: Settings
    sources: Dict[str, str]


aliases: List[Callable[[Mapping[str, str]], Iterable[SettingValue]]] = []
"""Find settings in variables of other names, which a program sets just before it joins a job."""


def values_in(environ: Mapping[str, str]) -> List[SettingValue]:
    """Return the settings that ``RINGCOMM_*`` variables set."""
    found = []
    for item in tunables():
        variable = item.metadata["variable"]
        if variable in environ:
            text = environ[variable]
            found.append(SettingValue(item.name, text, f"{variable}={text!r}", variable))
    return found


def effective(sources: Sequence[Iterable[SettingValue]]) -> Effective:
    """Merge the sources; a later one overrides an earlier one. ConfigError if a text is not a valid value."""
    changes: Dict[str, Any] = {}
    origins: Dict[str, str] = {}
    for source in sources:
        for value in source:
            changes[value.name] = parse_setting(value.name, value.text, value.as_written)
            origins[value.name] = value.source
    return Effective(replace(Settings(), **changes), origins)


# ---- settings that have no effect, and misspelt names --------------------------------------------

# of this process: an optimizer outlives the view of an elastic job in which it was made
_used: Set[str] = set()


def use(name: str) -> None:
    """Record that an optimizer follows a setting."""
    _used.add(name)


def without_effect(settings: Settings) -> List[Tuple[str, str]]:
    """Return topics and lines about settings without effect, for the end of a job."""
    found: List[Tuple[str, str]] = []
    if settings.compression not in ("", "none") and "compression" not in _used:
        found.append((
            "no compression",
            f"--compress {settings.compression} had no effect: it is for ringcomm's optimizers and tapes "
            "(DistributedOptimizer, …) that name no compression themselves, and this program has made none. "
            "DDP takes it from ringcomm.torch.distributed.compress_hook(…).",
        ))  # fmt: skip
    if settings.local_steps and "local_steps" not in _used:
        found.append((
            "no local steps",
            f"--local-steps {settings.local_steps} had no effect: it is for PyTorch's DistributedOptimizer "
            "of ringcomm, and this program has made none. LocalSGD makes local steps in any loop.",
        ))  # fmt: skip
    return found


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return the known name that is most like a misspelt one, at least by `likeness` (0 to 1), or ""."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, likeness)), "")


# ---- how long a waiting call polls before it sleeps ----------------------------------------------

_CROWDED = 5.0  # factor of the polling time where ranks outnumber cores


def polling_s(settings: Settings, local_size: int) -> float:
    """Return how long a waiting call polls before it sleeps, in seconds. Polling yields the processor at each
    round, so it keeps no rank from working where ranks outnumber cores. There a longer time pays: 4 ranks on
    2 cores exchange 8 bytes in half the time of sleeping.
    """
    spin_s = settings.spin_us * 1e-6
    return spin_s if local_size <= own_cores()[1] else _CROWDED * spin_s


def own_cores() -> Tuple[int, int]:
    """Return the lowest core that this process may run on, and the number of such cores."""
    try:
        cores = os.sched_getaffinity(0)  # type: ignore[attr-defined,unused-ignore]
    except (AttributeError, OSError):  # not Linux, or refused
        return 0, os.cpu_count() or 1
    return min(cores), len(cores)


def cores_together(cores: Iterable[Tuple[int, int]]) -> int:
    """Return how many cores processes of a host have together, each given by :func:`own_cores`.

    Bound processes have either the same cores or disjoint ones.

    >>> cores_together([(0, 2)] * 3), cores_together([(0, 1), (1, 1), (1, 1)])
    (2, 2)
    """
    return sum(count for _, count in set(cores))
