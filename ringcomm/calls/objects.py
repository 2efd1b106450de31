"""Python objects between ranks: pickled by cloudpickle, and signed with the job's key.

Unpickling can execute any code. Without encryption a link is authenticated when it is opened, but not each
byte on it, so every object has a signature of its own, over the sending rank, the call, and the number of
objects that the rank has signed before. It is verified before unpickling.
"""

from __future__ import annotations

import io
import struct
import threading
from typing import Any, Dict, NamedTuple, Optional, Tuple

import cloudpickle

from ..errors import Misuse, ProtocolError, describe_error
from ..wire.signing import Signer

_HEAD = struct.Struct(f"<Q{Signer.SIGNATURE_BYTES}s")


class Unpicklable(NamedTuple):
    """Sent in place of an object that cannot be pickled, so that all ranks raise the same error.

    Attributes:
        text: of the error.
    """

    text: str


class Packed(NamedTuple):
    """An object as signed bytes.

    Attributes:
        data: the bytes, to be sent in any case.
        error: why the object cannot be pickled, if it cannot; ``data`` has the error then.
    """

    data: memoryview
    error: Optional[Misuse] = None

    def raise_error(self) -> None:
        """Raise the error, if there is one. Send the bytes before: other ranks wait for them."""
        if self.error is not None:
            raise self.error


NOTHING = Packed(memoryview(b""))
"""What ranks send that have no object to send."""


class Objects:
    """Packs the objects that one rank sends, and unpacks the objects of other ranks.

    Args:
        signer: signs with the job's key.
        rank: this rank.
    """

    def __init__(self, signer: Signer, rank: int) -> None:
        self._signer = signer
        self._rank = rank
        self._lock = threading.Lock()
        self._packed = 0
        self._unpacked: Dict[Tuple[int, str, str], int] = {}

    def pack(self, value: Any, call: str, name: str = "") -> Packed:
        """An object as signed bytes. They are made in place, so that a large object is copied once.

        Args:
            value: the object.
            call: the collective, for example ``broadcast_object``.
            name: the name and the process set by which the ranks match the call.
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
        """The object in what has arrived: :meth:`verified`, then unpickled.

        Raises:
            Misuse: that rank could not pickle it.
            ProtocolError: as :meth:`verified`.
        """
        return self.load(self.verified(packed, source, call, name))

    def verified(self, packed: Any, source: int, call: str, name: str = "") -> memoryview:
        """The pickle in what has arrived. Calls of one name must be verified in their order.

        Args:
            packed: bytes, or an array of uint8.
            source: the rank that must have packed it.
            call: the collective.
            name: the name and the process set by which the ranks match the call.

        Raises:
            ProtocolError: that rank has not packed it for this call, or it has been verified before.
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
        """The object in a pickle that has been verified.

        Raises:
            Misuse: the rank that sent it could not pickle it.
        """
        from ..storage.unpickling import unpickled  # most jobs send no objects

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
