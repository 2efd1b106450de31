"""Packs the result or error of a function that ran on a rank for the process that started it.

Ranks pack (``rc.run``, and jobs on Ray, Dask and Spark); the process that started them unpacks, and raises a
:class:`~.errors.RemoteError`. Unpacking executes pickles: only bytes that are known to come from a rank of
the job may be unpacked. With ``rc.run`` each rank signs them with the job's key; the others trust their
scheduler.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
from typing import Any, Dict, Optional

import cloudpickle

from ..errors import Misuse, RemoteError
from .unpickling import unpickled

NOT_SENT = (pickle.PicklingError, TypeError, AttributeError, RecursionError)
"""The exceptions of pickle for objects that cannot be pickled."""


def pack_value(value: Any) -> bytes:
    """Return a function's return value as bytes; raises Misuse if it cannot be pickled."""
    try:
        data: bytes = cloudpickle.dumps({"ok": True, "value": value})
    except NOT_SENT as problem:
        raise Misuse(
            f"the function's return value, a {type(value).__name__}, cannot be sent back: {problem}. Return "
            "numbers, arrays or strings."
        ) from None
    return data


def pack_error(error: BaseException, skip: int = 0) -> bytes:
    """Return an exception as bytes: its text and, if it can be pickled, the object. ``skip``: number of
    outermost frames to omit from the traceback.
    """
    trace = error.__traceback__
    for _ in range(skip):
        trace = trace.tb_next if trace is not None else None
    facts: Dict[str, Any] = {
        "ok": False,
        "summary": "".join(traceback.format_exception_only(type(error), error)).strip(),
        "traceback": "".join(traceback.format_exception(type(error), error, trace)),
        "exception": _pickled(error),
    }
    data: bytes = cloudpickle.dumps(facts)
    return data


def unpack(data: bytes) -> Dict[str, Any]:
    """Return the facts from a trusted process's :func:`pack_value` or :func:`pack_error`: ``ok``; if it is
    True also ``value``, otherwise ``summary`` (type and message), ``traceback`` (text) and ``exception`` (a
    pickle, or None).
    """
    facts: Dict[str, Any] = unpickled(data)
    return facts


def remote_error(facts: Dict[str, Any], rank: int, host: str) -> RemoteError:
    """Return the error for the caller, whose cause is the rank's exception if that could be pickled."""
    error = RemoteError(
        f"rank {rank} on {host}: {facts['summary']}\n\nIts traceback there:\n{facts['traceback']}",
        rank=rank, host=host, traceback_text=facts["traceback"],
    )  # fmt: skip
    # The class may be of a package that only the rank's host has, or run code that fails here.
    with contextlib.suppress(Exception):
        error.__cause__ = None if facts["exception"] is None else unpickled(facts["exception"])
    return error


def _pickled(error: BaseException) -> Optional[bytes]:
    """Return the exception as a pickle; None if it cannot be unpickled (some need more arguments)."""
    try:
        data: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(data)
    except Exception:  # noqa: BLE001  a class's own pickling code may raise any exception
        return None
    return data
