from __future__ import annotations

from typing import Tuple

import numpy as np
import pytest

from ringcomm.collective.calls import Call, Intent, sizes_text
from ringcomm.ops import Collective
from ringcomm.wire.frames import NO_OP, NO_ROOT


def test_what_no_program_has_called_is_described_without_internal_names() -> None:
    call = Call(Collective.EXCHANGE, np.dtype(np.float64), 0, NO_OP, NO_ROOT, "measure", (), ahead=True)
    assert call.describe() == call.kind == "the measurement of links in init()"
    ahead = Call(Collective.ALLGATHER, np.dtype(np.float32), 0, NO_OP, NO_ROOT, "a", (3,), ahead=True)
    assert ahead.describe() == "allgather(rows of shape (3,), float32, name='a')"


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ((0, 3, 4), "sizes [3, 1]"),
        ((0, 3, 6), "2 x 3 elements"),
        ((0, 5), "sizes [5]"),
        ((), "sizes []"),
        (tuple(range(0, 200, 2)) + (300,), "100 sizes [2, 2, "),
    ],
)
def test_sizes_in_words(bounds: Tuple[int, ...], text: str) -> None:
    assert sizes_text(bounds).startswith(text)


def test_an_intent_takes_the_place_of_the_call_that_runs() -> None:
    call = Call(Collective.ALLTOALL, np.dtype(np.float32), 6, NO_OP, NO_ROOT, "", (6,), bounds=(0, 3, 6))
    intent = Intent(Collective.BROADCAST, root=2, name="weights", text="6 elements")
    assert intent.applied(call).describe() == "broadcast(6 elements, float32, root_rank=2, name='weights')"
    assert intent.applied(call).bounds == (0, 3, 6), "an intent without sizes keeps those of the call"
    assert Intent(Collective.BROADCAST, bounds=(0, 6)).applied(call).bounds == (0, 6)


def test_the_exchange_ahead_of_a_call_is_another_call() -> None:
    """It has a schedule of its own, and plans are kept by the call."""
    call = Call(Collective.ALLGATHER, np.dtype(np.int64), 0, NO_OP, NO_ROOT, "a", (3,))
    assert call != call._replace(ahead=True)
