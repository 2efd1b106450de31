"""Python objects between ranks: pickled by cloudpickle, and signed with the job's key.

Unpickling can execute any code. Without encryption a link is authenticated when it opens, but its bytes are
not. So each object has a signature over the sending rank, the call, and the number of objects that the rank
signed before; it is verified before unpickling. Results and errors of functions are pickled, too: each rank
signs those of ``rc.run`` with the job's key; Ray, Dask and Spark trust their scheduler.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import threading
import traceback
from typing import Any, Dict, NamedTuple, Optional, Tuple, Union

import cloudpickle
import numpy as np

from ..errors import Misuse, ProtocolError, RemoteError, describe_error
from ..wire.auth import Signer

_HEAD = struct.Struct(f"<Q{Signer.SIGNATURE_BYTES}s")


class Unpicklable(NamedTuple):
    """Sent in place of an object that cannot be pickled, so that all ranks raise the same error."""

    text: str


class Packed(NamedTuple):
    """An object as signed bytes; if it cannot be pickled, ``data`` holds ``error``."""

    data: memoryview
    error: Optional[Misuse] = None

    def raise_error(self) -> None:
        """Raise the error, if there is one; send ``data`` first, since other ranks wait for it."""
        if self.error is not None:
            raise self.error


NOTHING = Packed(memoryview(b""))  # sent by ranks that have no object to send


class Objects:
    """Pack the objects that one rank sends, and unpack the objects of other ranks."""

    def __init__(self, signer: Signer, rank: int) -> None:
        self._signer = signer
        self._rank = rank
        self._lock = threading.Lock()
        self._packed = 0
        self._unpacked: Dict[Tuple[int, str, str], int] = {}

    def pack(self, value: Any, call: str, name: str = "") -> Packed:
        """Return an object as signed bytes; ``name`` holds the name and process set that match the call."""
        file, error = io.BytesIO(), None
        file.seek(_HEAD.size)  # the bytes are made in place, so that a large object is copied once
        try:
            cloudpickle.dump(value, file)
        except Exception as problem:  # noqa: BLE001  a class's own pickling code may raise any exception
            error = Misuse(
                f"rank {self._rank}'s object of type {type(value).__name__} cannot be pickled for {call}(): "
                f"{describe_error(problem)}. Send what it is made from: numbers, texts, arrays."
            )
            error.__cause__ = problem
            file = io.BytesIO()
            file.seek(_HEAD.size)
            cloudpickle.dump(Unpicklable(str(error)), file)
        packed = file.getbuffer()
        with self._lock:
            self._packed += 1
            number = self._packed
        signature = self._signer.sign(packed[_HEAD.size :], "object", self._rank, number, call, name)
        _HEAD.pack_into(packed, 0, number, signature)
        return Packed(packed, error)

    def unpack(self, packed: Any, source: int, call: str, name: str = "") -> Any:
        """Verify and unpickle received bytes; Misuse if the sender could not pickle the object."""
        return self.load(self.verified(packed, source, call, name))

    def verified(self, packed: Any, source: int, call: str, name: str = "") -> memoryview:
        """Return the pickle in received bytes; ProtocolError if ``source`` did not sign it for this call."""
        view = memoryview(packed)
        number, signature = _HEAD.unpack_from(view) if view.nbytes >= _HEAD.size else (0, b"")
        data = view[_HEAD.size :]
        if not self._signer.verifies(data, signature, "object", source, number, call, name):
            raise ProtocolError(_refusal(source, call, name, "it does not carry that rank's signature"))
        with self._lock:
            # Calls of one name are ordered; calls of different names are not.
            last = self._unpacked.get((source, call, name), 0)
            if number <= last:
                raise ProtocolError(_refusal(source, call, name, f"object number {number} came again"))
            self._unpacked[source, call, name] = number
        return data

    @staticmethod
    def load(data: memoryview) -> Any:
        """Return the object in a verified pickle; Misuse if the sender could not pickle it."""
        value = unpickled(data)
        if type(value) is Unpicklable:
            raise Misuse(value.text)
        return value


def _refusal(source: int, call: str, name: str, why: str) -> str:
    title = f"{call}(name={name!r})" if name else f"{call}()"
    return (
        f"What arrived in {title} as rank {source}'s object was not unpickled: {why}. Another process has "
        "changed it on the way. `ringrun --encrypt` protects everything that ranks send."
    )


# ---- results and errors of functions ------------------------------------------------------------

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
    """Return an exception as bytes, without the ``skip`` outermost frames of its traceback."""
    trace = error.__traceback__
    for _ in range(skip):
        trace = trace.tb_next if trace is not None else None
    facts: Dict[str, Any] = {
        "ok": False,
        "summary": "".join(traceback.format_exception_only(type(error), error)).strip(),
        "traceback": "".join(traceback.format_exception(type(error), error, trace)),
        "exception": _pickled(error),
    }
    return cloudpickle.dumps(facts)


def unpack(data: bytes) -> Dict[str, Any]:
    """Return the facts from a trusted process's :func:`pack_value` or :func:`pack_error`."""
    return unpickled(data)


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
