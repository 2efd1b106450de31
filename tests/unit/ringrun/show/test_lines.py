"""Lines and progress bars, from pieces of any size."""

from __future__ import annotations

from typing import List, Tuple

import pytest

from ringrun.show.lines import MAX_LINE_BYTES, LineAssembler


def pieces(data: bytes, size: int) -> List[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\n\nb", [b"a", b"", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"\xff\xfe\n", [b"\xff\xfe"]),
        (b"", []),
        (b"end", [b"end"]),
    ],
)
def test_lines(data: bytes, lines: List[bytes], size: int) -> None:
    assembler = LineAssembler()
    found = [line for piece in pieces(data, size) for line in assembler.feed(piece, 0.0)]
    assert found + assembler.flush() == lines


@pytest.mark.parametrize(
    "data",
    [
        b"\r10%\r20%\r100%\n", b"10%\r20%\r100%\r\n", b"10%\r20%\r100%\r\r\n", b"\r10%\r\x1b[K100%\n",
        b"10%\r100%\r",
    ],
)  # fmt: skip
def test_a_progress_bar_is_shown_once_a_second_and_in_its_final_state(data: bytes) -> None:
    assembler = LineAssembler()
    lines = assembler.feed(data, 0.0) + assembler.flush()
    assert lines[-1] == b"100%"
    assert len(lines) <= 2
    assert assembler.flush() == []


def test_progress_is_throttled() -> None:
    assembler = LineAssembler()
    shown: List[Tuple[float, bytes]] = []
    for step in range(40):
        now_s = step / 10
        shown += [(now_s, line) for line in assembler.feed(b"\r%d%%" % step, now_s)]
        shown += [(now_s, line) for line in assembler.tick(now_s)]
    assert [line for _, line in shown] == [b"0%", b"10%", b"20%", b"30%"]
    assert assembler.is_bar
    assert assembler.tick(10.0) == [b"39%"]
    assert assembler.tick(20.0) == []  # nothing new
    assert assembler.feed(b"\r39%\n", 20.0) == []  # it was shown already
    assert not assembler.is_bar
    assert assembler.feed(b"next\n", 21.0) == [b"next"]


BAR = " \u2501 loss: 0."
KERAS = f"\r\x1b[1m1/2\x1b[0m{BAR}5{chr(8) * 14}\r\x1b[1m2/2\x1b[0m{BAR}4\n".encode()
"""Two states of a progress bar of Keras."""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("data", "last"),
    [
        (KERAS, f"\x1b[1m2/2\x1b[0m{BAR}4".encode()),
        (b" 10%" + b"\x08" * 4 + b" 20%" + b"\x08" * 4 + b"100%\n", b"100%"),
        (b"\xe2\x94\x81 1" + b"\x08" * 3 + b"\xe2\x94\x81 2\n", b"\xe2\x94\x81 2"),
    ],
)
def test_backspaces_redraw_a_line(data: bytes, last: bytes, size: int) -> None:
    assembler = LineAssembler()
    lines = [line for piece in pieces(data, size) for line in assembler.feed(piece, 0.0)]
    assert lines[-1] == last
    assert len(lines) <= 2
    assert not any(b"\x08" in line for line in lines)
    assert not assembler.is_bar


def test_a_very_long_line_comes_in_pieces() -> None:
    assembler = LineAssembler()
    data = b"x" * (2 * MAX_LINE_BYTES + 10)
    found = [line for piece in pieces(data, 65536) for line in assembler.feed(piece, 0.0)] + assembler.flush()
    assert b"".join(found) == data
    assert max(map(len, found)) <= MAX_LINE_BYTES
