"""Parsers for settings as text: sizes, durations, switches and choices.

Each function returns the value of a text, or raises ``ValueError`` with the values that are valid; the
caller adds the name of the setting.
"""

from __future__ import annotations


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("must be a number") from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be a whole number") from None


def positive_seconds(text: str) -> float:
    """A duration of more than zero."""
    value = _real(text)
    if not value > 0:
        raise ValueError("must be more than zero seconds")
    return value


def size(text: str) -> int:
    """Bytes: ``262144``, ``256K``, ``256KiB`` or ``1M``."""
    digits = text.strip().lower()
    for suffix in ("ib", "b"):
        if digits.endswith(suffix):
            digits = digits[: -len(suffix)]
            break
    factor = 1
    if digits and digits[-1] in "kmg":
        factor = 1024 ** ("kmg".index(digits[-1]) + 1)
        digits = digits[:-1]
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError("must be a number of bytes like 65536, 64K or 1M, and at least 1")
    return int(digits) * factor


def size_or_zero(text: str) -> int:
    """Like :func:`size`; ``0`` has a meaning of its own."""
    if text.strip() == "0":
        return 0
    try:
        return size(text)
    except ValueError:
        raise ValueError("must be a number of bytes like 65536, 64K or 1M, or 0") from None


def count(text: str) -> int:
    """A whole number from 1."""
    value = _whole(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


def whole(text: str) -> int:
    """A whole number from 0."""
    value = _whole(text)
    if value < 0:
        raise ValueError("must not be negative")
    return value


MAX_RANKS = 100_000
"""To be predicted; each takes about 10 microseconds."""


def counts(text: str) -> str:
    """Whole numbers from 1 to 100000, separated by commas."""
    for part in text.split(","):
        try:
            fits = count(part) <= MAX_RANKS
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"must be whole numbers like 2,4,8, up to {MAX_RANKS}")
    return text


_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def link_rate(text: str) -> str:
    """A line rate like ``1gbit``, or nothing."""
    if text:
        bits_per_s(text)
    return text


def bits_per_s(text: str) -> float:
    """A line rate: ``1gbit``, ``100mbit``, ``2.5gbit/s``."""
    rate = text.strip().lower()
    rate = rate[:-2] if rate.endswith("/s") else rate
    factor = _RATE_UNITS.get(rate[-4:])
    try:
        value = float(rate[:-4]) * factor if factor is not None else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError("must be a rate like 1gbit, 100mbit or 2.5gbit")
    return value


def price(text: str) -> float:
    """An amount of money, zero included."""
    value = _real(text)
    if not 0 <= value < float("inf"):
        raise ValueError("must be zero or more")
    return value


def figure(text: str) -> str:
    """A file for a figure, or nothing."""
    if text and not text.lower().endswith(".svg"):
        raise ValueError("must end in .svg: figures are written as SVG")
    return text


def seconds(text: str) -> float:
    """A duration, zero included."""
    value = _real(text)
    if not 0 <= value < float("inf"):
        raise ValueError("must be zero or more seconds")
    return value


def limit(text: str) -> float:
    """A duration, zero and infinity included."""
    value = _real(text)
    if not value >= 0:
        raise ValueError("must be zero or more seconds")
    return value


def milliseconds(text: str) -> float:
    """A short duration, up to ten seconds."""
    value = _real(text)
    if not 0 <= value <= 10_000:
        raise ValueError("must lie between 0 and 10000 milliseconds")
    return value


def flag(text: str) -> bool:
    """``1`` or ``0``, or a word for them."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("", "0", "false", "no", "off"):
        return False
    raise ValueError("must be 1 or 0")


def microseconds(text: str) -> float:
    """A very short duration, up to a second."""
    value = _real(text)
    if not 0 <= value <= 1e6:
        raise ValueError("must lie between 0 and 1000000 microseconds")
    return value


def threads(text: str) -> str:
    """``auto``, ``none``, or a whole number from 1."""
    word = text.strip().lower()
    if word not in ("auto", "none") and not (word.isdecimal() and int(word)):
        raise ValueError("must be auto, none, or a whole number from 1")
    return word


TRANSPORTS = ("auto", "memory", "shm", "unix", "tcp")


def transport(text: str) -> str:
    """One of :data:`TRANSPORTS`."""
    if text not in TRANSPORTS:
        raise ValueError(f"must be one of {', '.join(TRANSPORTS)}")
    return text


JAX_CALLBACKS = ("auto", "buffers", "io_callback")


def jax_callbacks(text: str) -> str:
    """One of :data:`JAX_CALLBACKS`."""
    if text not in JAX_CALLBACKS:
        raise ValueError(f"must be one of {', '.join(JAX_CALLBACKS)}")
    return text


JAX_MATCHINGS = ("order", "name")


def jax_matching(text: str) -> str:
    """One of :data:`JAX_MATCHINGS`."""
    if text not in JAX_MATCHINGS:
        raise ValueError(f"must be one of {', '.join(JAX_MATCHINGS)}")
    return text


ALGORITHMS = {
    "one_shot": "direct",
    "direct": "direct",
    "doubling": "doubling",
    "ring": "ring",
    "hierarchical": "hierarchy",
}
"""The all-reduce algorithms, and the modules of ``ringcomm.schedule`` that register them. This is the table
to which a new algorithm is added; :mod:`ringcomm.schedule.algorithms` imports the modules."""

OTHER_ALGORITHM_MODULES = ("tree",)
"""Modules of ``ringcomm.schedule`` that register algorithms, but none for all-reduce."""


COMPRESSIONS = ("none", "fp16", "bf16", "int8", "int4", "auto")


def compression(text: str) -> str:
    """One of :data:`COMPRESSIONS`, or nothing."""
    if text and text not in COMPRESSIONS:
        raise ValueError(f"must be empty or one of {', '.join(COMPRESSIONS)}")
    return text


def local_steps(text: str) -> str:
    """``auto``, a number from 1 on, or nothing."""
    if text not in ("", "auto") and not (text.isdecimal() and int(text)):
        raise ValueError("must be empty, auto, or a number from 1 on")
    return text


def algorithm(text: str) -> str:
    """One of :data:`ALGORITHMS`, or nothing."""
    if text and text not in ALGORITHMS:
        raise ValueError(f"must be empty or one of {', '.join(ALGORITHMS)}")
    return text
