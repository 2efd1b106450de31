from __future__ import annotations

import numpy as np

from ringcomm.collective.calls import Call
from ringcomm.ops import Collective
from ringcomm.wire.frames import NO_OP, NO_ROOT


def test_what_no_program_has_called_is_described_without_internal_names() -> None:
    call = Call(Collective.EXCHANGE, np.dtype(np.float64), 0, NO_OP, NO_ROOT, "measure", (), ahead=True)
    assert call.describe() == call.kind == "the measurement of links in init()"
    ahead = Call(Collective.ALLGATHER, np.dtype(np.float32), 0, NO_OP, NO_ROOT, "a", (3,), ahead=True)
    assert ahead.describe() == "allgather(rows of shape (3,), float32, name='a')"


def test_the_exchange_ahead_of_a_call_is_another_call() -> None:
    """It has a schedule of its own, and plans are kept by the call."""
    call = Call(Collective.ALLGATHER, np.dtype(np.int64), 0, NO_OP, NO_ROOT, "a", (3,))
    assert call != call._replace(ahead=True)
