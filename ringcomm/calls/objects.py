"""Python objects between ranks: pickled by cloudpickle, and signed with the job's key.

Unpickling can execute any code. Without encryption a link is authenticated when it opens, but its bytes are
not. So each object has a signature over the sending rank, the call, and the number of objects that the rank
signed before; it is verified before unpickling.
"""

from __future__ import annotations

import io
import struct
import threading
from typing import Any, Dict, NamedTuple, Optional, Tuple

import cloudpickle

from ..errors import Misuse, ProtocolError, describe_error
from ..wire.auth import Signer

_HEAD = struct.Struct(f"<Q{Signer.SIGNATURE_BYTES}s")


class Unpicklable(NamedTuple):
    """Sent in place of an object that cannot be pickled, so that all ranks raise the same error."""

    text: str


class Packed(NamedTuple):
    """An object as signed bytes; if it cannot be pickled, ``data`` holds ``error``. Send ``data`` in any
    case.
    """

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
        """Return an object as signed bytes; ``name`` holds the name and process set that match the call. The
        bytes are made in place, so that a large object is copied once.
        """
        file, error = io.BytesIO(), None
        file.seek(_HEAD.size)
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
        """Return the verified pickle in received bytes; verify calls of one name in their order.
        ProtocolError: ``source`` did not sign it for this call, or it has been verified before.
        """
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
        from ..storage.results import unpickled  # most jobs send no objects

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
