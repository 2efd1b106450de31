"""From the times of copies to how much of a ring is used."""

from __future__ import annotations

from ringcomm.transport.span import (
    EXPENSIVE,
    SKIPPED_BYTES,
    STINT_BYTES,
    WINDOW,
    SpanChoice,
)

COUNT = 512 * 1024
OWN = 1e-10
CHEAP, DEAR = COUNT * OWN * EXPENSIVE / 2, COUNT * OWN * EXPENSIVE * 2
FIRST = SKIPPED_BYTES // COUNT - 1
"""Copies before the first that counts."""


def noted(choice: SpanChoice, *times: float) -> bool:
    for elapsed_s in times:
        choice.note(COUNT, elapsed_s)
    return choice.whole


def test_the_whole_ring_is_used_where_writing_is_expensive():
    choice = SpanChoice(OWN)
    assert not noted(choice, *[DEAR] * (FIRST + WINDOW - 1))
    assert noted(choice, DEAR)


def test_a_part_of_it_is_used_where_writing_is_cheap():
    assert not noted(SpanChoice(OWN), *[CHEAP] * 1000)


def test_the_part_is_tried_again_after_some_time():
    choice = SpanChoice(OWN)
    noted(choice, *[DEAR] * (FIRST + WINDOW))
    stint = STINT_BYTES // COUNT
    assert noted(choice, *[CHEAP] * (stint - 1))  # cheap, because the whole ring is used
    assert not noted(choice, CHEAP)
    assert not noted(choice, *[DEAR] * (FIRST + WINDOW - 1))
    assert noted(choice, DEAR)
