"""Measures how fast this machine encodes and decodes gradients, for choosing a codec."""

from __future__ import annotations

import time
from functools import partial
from typing import Callable, Dict, List, NamedTuple, Optional

import numpy as np

from ..codec.codecs import SEGMENT_ITEMS, make_codec

CODECS = ("bf16", "int8")
_REPETITIONS = 5


class Rates(NamedTuple):
    """The cost of a codec, in seconds per byte of float32."""

    encode_byte_s: float
    decode_byte_s: float


def measured_rates(mean_over_s: float = 0.0) -> Dict[str, Rates]:
    """Return the speed of the codecs on this machine: by default the best of a few runs, which takes some
    milliseconds; else the mean of this many seconds per codec and direction, as for machines with a CPU
    quota.
    """
    values = np.linspace(-1, 1, SEGMENT_ITEMS, dtype=np.float32)
    found = {}
    for name in CODECS:
        codec = make_codec(name)
        codes = np.empty(codec.encoded_bytes(values.size), np.uint8)
        out = np.empty_like(values)
        encode_s = _seconds(partial(codec.encode, values, codes), mean_over_s)
        decode_s = _seconds(partial(codec.decode, codes, out), mean_over_s)
        found[name] = Rates(encode_s / values.nbytes, decode_s / values.nbytes)
    return found


def code_s(nbytes: int, size: int, rates: Optional[Rates]) -> float:
    """Return the seconds of processor time for encoding, decoding and adding on each rank. ``nbytes``: of all
    gradients in float32; ``rates``: of the codec, None without one.
    """
    if rates is None or size < 2:
        return 0.0
    others = (size - 1) / size
    return nbytes * (rates.encode_byte_s + others * 2 * rates.decode_byte_s)


def _seconds(act: Callable[[], object], mean_over_s: float) -> float:
    times: List[float] = []
    while len(times) < _REPETITIONS or sum(times) < mean_over_s:
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return sum(times) / len(times) if mean_over_s else min(times)
