"""Codecs of messages: float32 values as fewer bytes, and back."""

from __future__ import annotations

from typing import Any, Dict, Iterator, Tuple

import numpy as np

from ..codec.base import SEGMENT_ITEMS, Codec
from ..codec.table import make_codec
from ..ops import CODECS

_ITEM_BYTES = 4


class MessageCoder:
    """Encodes and decodes the contents of messages. For one thread."""

    def __init__(self) -> None:
        self._codecs: Dict[int, Codec] = {}

    def _codec(self, number: int) -> Codec:
        if number not in self._codecs:
            self._codecs[number] = make_codec(CODECS[number])
        return self._codecs[number]

    def can_decode(self, number: int, nbytes: int) -> bool:
        """Return whether a message of so many bytes can have been encoded with this codec.

        Args:
            number: the codec's place in :data:`ringcomm.ops.CODECS`; 0 is no codec.
            nbytes: the bytes before encoding.
        """
        return number == 0 or number < len(CODECS) and nbytes % _ITEM_BYTES == 0

    def encoded_bytes(self, number: int, nbytes: int) -> int:
        """Return the size in bytes of an encoded message; with codec 0 it is ``nbytes``."""
        return self._codec(number).encoded_bytes(nbytes // _ITEM_BYTES) if number else nbytes

    def encode(self, number: int, view: memoryview) -> memoryview:
        """Return the float32 values in ``view`` encoded, in memory of their own."""
        codes = np.empty(self.encoded_bytes(number, view.nbytes), np.uint8)
        with np.errstate(over="ignore", invalid="ignore"):
            for values, part in self._segments(number, view, codes):
                self._codec(number).encode(values, part)
        return codes.data

    def decode(self, number: int, codes: memoryview, view: memoryview) -> None:
        """Write what :meth:`encode` has encoded to ``view``, as float32 values."""
        for values, part in self._segments(number, view, np.frombuffer(codes, np.uint8)):
            self._codec(number).decode(part, values)

    def _segments(
        self, number: int, view: memoryview, codes: np.ndarray[Any, Any]
    ) -> Iterator[Tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Yield the values and the codes of each segment."""
        values = np.frombuffer(view, np.float32)
        segment_bytes = self._codec(number).encoded_bytes(SEGMENT_ITEMS)
        for index, start in enumerate(range(0, values.size, SEGMENT_ITEMS)):
            place = index * segment_bytes
            yield values[start : start + SEGMENT_ITEMS], codes[place : place + segment_bytes]
