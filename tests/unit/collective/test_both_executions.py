"""What executions by streams and by packets have in common."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.errors import BrokenInvariantError, MismatchError
from ringcomm.schedule.steps import SELF, Recv, Send
from tests.unit.collective import test_execute, test_short
from tests.unit.collective.building import HEADER, fold_from, numbers, peers, raw


@pytest.fixture(params=[test_execute, test_short], ids=["streams", "packets"])
def start(request):
    return request.param.start


def test_nothing_to_do(start, wire):
    assert start(wire, [], numbers()).advance()
    assert wire.take() == b""


def test_even_an_empty_message_has_a_header(start, wire):
    execution = start(wire, [Send(1, 0, 0), Recv((1,), 0, 0)], numbers())
    assert not execution.advance()
    assert wire.take() == wire.going()
    wire.put(wire.coming())
    assert execution.advance()


def test_a_header_may_arrive_in_crumbs(start, wire):
    data = numbers(0, 0)
    execution = start(wire, [Recv((1,), 0, 2)], data)
    message = wire.coming() + raw(7, 8)
    for index in range(len(message)):
        assert not execution.advance()
        assert execution.moved_bytes == index
        assert peers(execution.waiting_for()[0]) == [1]
        wire.put(message[index : index + 1])
    assert execution.advance()
    assert data.tolist() == [7, 8]


def test_another_call_is_recognised_by_its_header(start, wire):
    execution = start(wire, [Recv((1,), 0, 4)], numbers(1, 2, 3, 4))
    wire.put(HEADER._replace(items=5).pack())
    with pytest.raises(MismatchError, match=r"number of elements \(4 here, 5 there\)") as caught:
        execution.advance()
    assert (caught.value.rank, caught.value.peer) == (0, 1)


def test_one_fold_of_several_peers_in_the_order_given(start, make_wire):
    wire = make_wire(3)
    data = np.array([1e8], np.float32)
    execution = start(wire, [Recv((2, 1), 0, 1, fold=(1, SELF, 2), final=True)], data)
    wire.put(wire.coming(2) + np.float32(-1e8).tobytes(), peer=2)
    assert not execution.advance()
    assert peers(execution.waiting_for()[0]) == [1]
    wire.put(wire.coming() + np.float32(1).tobytes(), peer=1)
    assert execution.advance()
    assert data == np.float32(np.float32(1 + 1e8) - 1e8)


def test_folding_needs_a_kernel(start, wire):
    execution = start(wire, [fold_from(1, 0, 1)], numbers(1), kernel=None)
    wire.put(wire.coming() + raw(3))
    with pytest.raises(BrokenInvariantError, match="without a kernel"):
        execution.advance()
