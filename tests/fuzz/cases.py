"""How much is tried, and what goes into the parsers.

    FUZZ_CASES=1000000 python -m pytest tests/fuzz --timeout 0

tries a million cases in test_many.py, and up to 3,000 in each of the other tests; without it some thousands
in all. They are the same in every run.
"""

from __future__ import annotations

import os
import tracemalloc
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringcomm.wire import messages

TESTS = 20
"""Among about how many tests the cases are divided."""
CASES = int(os.environ.get("FUZZ_CASES", "3000"))

_SETTINGS = settings(
    max_examples=max(1, min(CASES // TESTS, 3000)), derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
registered = []


def fuzz(*strategies: Any) -> Callable[[Any], Any]:
    """Run a test with as many cases as it is due, drawn from these."""

    def decorate(test: Any) -> Any:
        registered.append(test.__name__)
        return _SETTINGS(given(*strategies)(test))

    return decorate


@contextmanager
def at_most(limit_bytes: int) -> Iterator[None]:
    """Return what happens inside may not hold more memory than this at any time."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
        assert peak <= limit_bytes, f"{peak} bytes were allocated, {limit_bytes} are allowed"
    finally:
        tracemalloc.stop()


# ---- what goes in ----------------------------------------------------------------------------

whole = st.integers() | st.sampled_from([0, 1, 2, -1, 255, 65535, 65536, 2**31, 2**63, -(2**31) - 1])
scalars = st.none() | st.booleans() | whole | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
"""Anything that JSON can say."""
small = st.integers(-2, 4)
addresses = st.sampled_from(["127.0.0.1", "::1", "@ringcomm-x", "10.0.0.1", "fe80::1", "", "host", "@"])

_BY_TYPE: Dict[type, Any] = {
    int: small, str: st.text(max_size=8) | addresses | st.sampled_from(["lost", "stalled", "mismatch"]),
    bool: st.booleans(), float: st.floats(), list: st.lists(values, max_size=4),
}  # fmt: skip
_EXTRAS = st.dictionaries(
    st.sampled_from(["rank", "host", "slot", "machine", "python", "iface", "kind"]),
    values | small | st.lists(small, min_size=2, max_size=2), max_size=3,
)  # fmt: skip


def _fields(wanted: Any, kind: str = "") -> Any:
    fields = {}
    for name, types in wanted.items():
        items = messages._ITEMS.get((kind, name))
        if items is not None:
            fields[name] = st.lists(_fields(items), max_size=3)
        elif name == "addresses":
            fields[name] = st.lists(_fields(messages._ITEMS["join", "addresses"]), max_size=2)
        else:
            fields[name] = _BY_TYPE[types[0]]
    return st.fixed_dictionaries(fields)


@st.composite
def control_messages(draw: Any) -> Any:
    """Control messages that are right, or nearly."""
    kind = draw(st.sampled_from(sorted(messages._FIELDS)))
    message = {"type": kind, **draw(_fields(messages._FIELDS[kind], kind)), **draw(_EXTRAS)}
    if draw(st.integers(0, 3)) == 0:
        message[draw(st.sampled_from(sorted(message)))] = draw(values)
    return message


@st.composite
def damaged(draw: Any, right: Any) -> bytes:
    """Bytes that are right but for a few places, or cut short, or followed by others."""
    data = bytearray(draw(right))
    for _ in range(draw(st.integers(0, 3))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    end = draw(st.integers(0, len(data) + 4))
    return bytes(data[:end]) + (draw(st.binary(max_size=64)) if end > len(data) else b"")


pieces = st.lists(st.integers(1, 200), min_size=1, max_size=4)
"""In what portions something arrives, over and over."""
