"""Pickles from ranks: objects, and the results and errors of functions (``rc.run``, Ray, Dask, Spark).

Unpickling can execute any code: only bytes that are known to come from a rank of the job may be unpickled.
With ``rc.run`` each rank signs them with the job's key; the others trust their scheduler.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import traceback
from typing import Any, Dict, Optional, Union

import cloudpickle
import numpy as np

from ..errors import Misuse, RemoteError

NOT_SENT = (pickle.PicklingError, TypeError, AttributeError, RecursionError)
"""The exceptions of pickle for objects that cannot be pickled."""

# NumPy 2 calls the package with its functions ``numpy._core``, NumPy 1 ``numpy.core``; pickles of arrays
# contain the name. NumPy 1 does not have the new name, and NumPy 2 warns of the old one.
_NAMES = ("numpy._core", "numpy.core")
_OWN = _NAMES[0] if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else _NAMES[1]


class _Unpickler(pickle.Unpickler):
    """Finds NumPy's functions where the NumPy of this process has them."""

    def find_class(self, module: str, name: str) -> Any:
        for package in _NAMES:
            if module == package or module.startswith(f"{package}."):
                module = _OWN + module[len(package) :]
        return super().find_class(module, name)


def unpickled(data: Union[bytes, memoryview]) -> Any:
    """Return the object in a pickle of a rank of the job."""
    return _Unpickler(io.BytesIO(data)).load()


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
