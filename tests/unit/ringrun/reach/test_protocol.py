from __future__ import annotations

from typing import List

import pytest

from ringcomm.errors import ProtocolError
from ringrun.agent import framing
from ringrun.reach.protocol import FRAME_LIMIT_BYTES, Frame, FrameReader

FRAMES = [
    Frame(framing.STDOUT, 3, b"hello\n"), Frame(framing.EVENT, -1, b"{}"), Frame(framing.RESULT, 0, b"")
]  # fmt: skip
STREAM = b"".join(
    framing.TO_LAUNCHER.pack(kind, rank, len(data)) + data + framing.FRAME_END for kind, rank, data in FRAMES
)


@pytest.mark.parametrize(
    "noise", [b"", b"Welcome!\n", b"no line end", b"\nringrun-agent/\n", b"\xff" * 10000]
)
@pytest.mark.parametrize("size", [1, 7, 100000])
def test_frames_after_noise(noise: bytes, size: int) -> None:
    reader = FrameReader()
    data = noise + framing.MARKER + STREAM + b"\x01\x00"
    found: List[Frame] = []
    for start in range(0, len(data), size):
        found += reader.feed(data[start : start + size])
    assert found == FRAMES
    assert reader.started
    assert bytes(reader.noise) == noise[:4096]


def test_endless_noise_is_refused() -> None:
    reader = FrameReader()
    with pytest.raises(ProtocolError, match="1 MiB of output"):
        for _ in range(100):
            reader.feed(b"x" * 65536)


@pytest.mark.parametrize(("kind", "length"), [(0, 1), (9, 1), (framing.STDOUT, FRAME_LIMIT_BYTES + 1)])
def test_impossible_frames_are_refused(kind: int, length: int) -> None:
    reader = FrameReader()
    with pytest.raises(ProtocolError):
        reader.feed(framing.MARKER + framing.TO_LAUNCHER.pack(kind, 0, length))


def test_a_frame_that_does_not_end_where_it_says_is_refused() -> None:
    reader = FrameReader()
    with pytest.raises(ProtocolError, match="does not end there"):
        reader.feed(framing.MARKER + framing.TO_LAUNCHER.pack(framing.STDOUT, 0, 2) + b"abcd")
