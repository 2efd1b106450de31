"""Python objects between ranks: pickled by cloudpickle, and signed with the job's key.

Unpickling runs whatever the bytes say. Without encryption a link is authenticated when it starts, but not
each byte on it, so what is unpickled carries a signature of its own: of which rank it comes, in which call,
and how many objects that rank has signed before. Nothing is unpickled before that has been verified.
"""

from __future__ import annotations

import struct
import threading
from typing import Any, Dict, Tuple

import cloudpickle

from .errors import ProtocolError
from .wire.signing import Signer

_HEAD = struct.Struct(f"<Q{Signer.SIGNATURE_BYTES}s")


class Objects:
    """Packs the objects that one rank sends, and unpacks those of the others.

    Args:
        signer: the job's.
        rank: this one.
    """

    def __init__(self, signer: Signer, rank: int) -> None:
        self._signer = signer
        self._rank = rank
        self._lock = threading.Lock()
        self._packed = 0
        self._unpacked: Dict[Tuple[int, str, str], int] = {}

    def pack(self, value: Any, call: str, name: str = "") -> bytes:
        """An object as it travels.

        Args:
            call: the collective, like ``broadcast_object``.
            name: the name, and the process set, by which the call is matched on the ranks.
        """
        data: bytes = cloudpickle.dumps(value)
        with self._lock:
            self._packed += 1
            number = self._packed
        return _HEAD.pack(number, self._signer.sign(data, "object", self._rank, number, call, name)) + data

    def unpack(self, packed: Any, source: int, call: str, name: str = "") -> Any:
        """The object in what has arrived: :meth:`verified`, then unpickled.

        Raises:
            ProtocolError: as :meth:`verified`.
        """
        return cloudpickle.loads(self.verified(packed, source, call, name))

    def verified(self, packed: Any, source: int, call: str, name: str = "") -> memoryview:
        """The pickle in what has arrived. Calls of one name must be verified in their order.

        Args:
            packed: bytes, or an array of them.
            source: the rank that it must come from.

        Raises:
            ProtocolError: that rank has not packed it for this call, or it has been verified before.
        """
        view = memoryview(packed)
        number, signature = _HEAD.unpack_from(view) if view.nbytes >= _HEAD.size else (0, b"")
        data = view[_HEAD.size :]
        if not self._signer.verifies(data, signature, "object", source, number, call, name):
            raise ProtocolError(_refusal(source, call, name, "it does not carry that rank's signature"))
        with self._lock:
            # Calls of one name come one after another; calls of different names may overtake each other.
            last = self._unpacked.get((source, call, name), 0)
            if number <= last:
                raise ProtocolError(_refusal(source, call, name, f"object number {number} came again"))
            self._unpacked[source, call, name] = number
        return data

    @staticmethod
    def load(data: memoryview) -> Any:
        """The object in a pickle that has been verified."""
        return cloudpickle.loads(data)


def _refusal(source: int, call: str, name: str, why: str) -> str:
    title = f"{call}(name={name!r})" if name else f"{call}()"
    return (
        f"What arrived in {title} as rank {source}'s object was not unpickled: {why}. Another process has "
        "changed it on the way. `ringrun --encrypt` protects everything that ranks send."
    )
