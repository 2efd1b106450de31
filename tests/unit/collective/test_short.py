"""Short messages as packets: when they are used, what they send when, what they wait for."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.collective.execute import Execution
from ringcomm.collective.flows import SegmentPool
from ringcomm.collective.reduce import Kernel
from ringcomm.collective.short import SHARED_BYTES, SHORT_BYTES, ShortExecution, make_execution
from ringcomm.ops import Sum
from ringcomm.schedule import direct
from ringcomm.schedule.steps import SOURCE, Recv, Send
from ringcomm.wire.frames import HEADER_BYTES
from tests.unit.collective.building import HEADER, fold_from, numbers, raw
from tests.unit.schedule.building import make as make_schedule


def make(wire, schedule, dtype=np.int16, segment_bytes=1 << 18, **options):
    options.setdefault("kernel", Kernel(Sum, np.dtype(dtype), wire.fabric.size))
    pool = SegmentPool(segment_bytes)
    return make_execution(schedule, wire.fabric, HEADER, np.dtype(dtype), pool, **options)


def start(wire, schedule, data, source=None, **options):
    execution = make(wire, schedule, data.dtype, **options)
    assert type(execution) is ShortExecution
    execution.arm(HEADER.sequence, data, source)
    wire.call = HEADER, schedule
    return execution


class TestWhenTheyAreUsed:
    def kind(self, wire, schedule, **options):
        return type(make(wire, schedule, **options))

    def test_up_to_a_limit(self, wire):
        most = (SHORT_BYTES - HEADER_BYTES) // 2
        assert self.kind(wire, [Send(1, 0, most)]) is ShortExecution
        assert self.kind(wire, [Send(1, 0, most + 1)]) is Execution
        assert self.kind(wire, [Recv((1,), 0, most)]) is ShortExecution
        assert self.kind(wire, [Recv((1,), 0, most), Recv((1,), most, most + 1)]) is Execution

    def test_longer_ones_through_shared_memory(self, wire, monkeypatch):
        most = (SHARED_BYTES - HEADER_BYTES) // 2
        assert self.kind(wire, [Send(1, 0, most)]) is Execution
        monkeypatch.setattr(type(wire.fabric.link(1)), "peeks", True)
        assert self.kind(wire, [Send(1, 0, most)]) is ShortExecution
        assert self.kind(wire, [Send(1, 0, most), Recv((1,), 0, most)]) is ShortExecution
        assert self.kind(wire, [Send(1, 0, most + 1)]) is Execution

    def test_up_to_a_segment(self, wire):
        most = (80 - HEADER_BYTES) // 2
        assert self.kind(wire, [Send(1, 0, most)], segment_bytes=80) is ShortExecution
        assert self.kind(wire, [Send(1, 0, most + 1)], segment_bytes=80) is Execution

    def test_not_for_many_peers_at_once_that_are_not_so_short(self, make_wire):
        wire, each = make_wire(6), 6000
        assert self.kind(wire, [Send(peer, 0, each) for peer in range(1, 6)]) is ShortExecution
        sends = [Send(peer, 0, each) for peer in range(1, 6)]
        receipts = [Recv((peer,), peer * each, (peer + 1) * each) for peer in range(1, 6)]
        assert self.kind(wire, sends + receipts) is Execution

    def test_not_where_a_send_would_wait_for_more_than_it_needs(self, make_wire):
        wire = make_wire(3)
        one, other = Recv((1,), 0, 2), Recv((2,), 2, 4)
        assert self.kind(wire, [one, Send(1, 0, 4), other]) is ShortExecution
        assert self.kind(wire, [one, other, Send(1, 0, 4)]) is Execution
        assert self.kind(wire, [one, Send(1, 0, 2), Send(2, 8, 9)]) is Execution
        assert self.kind(wire, [one, other, Send(1, 0, 4, SOURCE)]) is ShortExecution

    @pytest.mark.parametrize("size", [2, 3, 8])
    def test_for_everything_that_is_chosen_for_small_arrays(self, make_wire, size):
        wire = make_wire(size)
        bounds = tuple(range(size + 1))
        for schedule in (
            make_schedule("allreduce", "one_shot", 0, size, 2),
            make_schedule("reducescatter", "direct", 0, size, bounds[-1], bounds=bounds),
            make_schedule("allgather", "direct", 0, size, bounds[-1], bounds=bounds),
            direct.all_to_all(0, size, bounds, bounds),
            *(make_schedule("broadcast", "tree", 0, size, 2, root=root) for root in range(size)),
        ):
            assert self.kind(wire, schedule) is ShortExecution


class TestBytes:
    def test_several_steps_with_one_peer_share_a_header(self, wire):
        data = numbers(1, 2, 3)
        execution = start(wire, [Send(1, 0, 1), Send(1, 2, 3), Recv((1,), 1, 2), fold_from(1, 0, 1)], data)
        wire.put(wire.coming() + raw(7, 10) + b"next")
        assert execution.advance()
        assert wire.take() == wire.going() + raw(1, 3)
        assert data.tolist() == [11, 7, 3]

    def test_what_is_sent_was_there_at_the_start(self, make_wire):
        wire = make_wire(2, capacity_bytes=HEADER_BYTES + 2)
        data = numbers(1, 2, 3)
        execution = start(wire, [Send(1, 0, 3), Recv((1,), 0, 3)], data)
        wire.put(wire.coming() + raw(7))
        assert not execution.advance()
        assert wire.take() == wire.going() + raw(1)
        wire.put(raw(8, 9))
        assert execution.advance()
        assert wire.take() == raw(2, 3)
        assert data.tolist() == [7, 8, 9]

    def test_headers_without_elements_go_and_are_awaited_first(self, make_wire):
        wire = make_wire(3)
        steps = [Recv((1,), 0, 2), Send(2, 0, 2), Send(1, 0, 0), Recv((2,), 0, 0)]
        execution = start(wire, steps, numbers(0, 0))
        assert not execution.advance()
        assert wire.take(1) == wire.going(1)
        wire.put(wire.coming() + raw(5, 6), 1)
        assert not execution.advance()
        wire.put(wire.coming(2), 2)
        assert execution.advance()
        assert wire.take(2) == wire.going(2) + raw(5, 6)

    def test_again_with_other_arrays(self, make_wire):
        wire = make_wire(3)
        steps = [Send(1, 0, 1, SOURCE), Send(2, 0, 1, SOURCE), fold_from(1, 0, 1)]
        execution = make(wire, steps)
        for sequence in (3, 4):
            wire.call = HEADER._replace(sequence=sequence), steps
            data, source = numbers(sequence), numbers(10 * sequence)
            source.flags.writeable = False
            execution.arm(sequence, data, source)
            wire.put(wire.coming() + raw(100))
            assert execution.advance()
            execution.disarm()
            assert wire.take(1) == wire.going(1) + raw(10 * sequence)
            assert wire.take(2) == wire.going(2) + raw(10 * sequence)
            assert data.tolist() == [100 + sequence]


@pytest.mark.parametrize("most", [3, SHORT_BYTES])
def test_the_volume_of_a_run_is_independent_of_its_progress(make_wire, most):
    """By peer, sent and received, a header in front of each; the same in both executors."""
    schedule = [Send(1, 0, most), Recv((1,), most, 2 * most), Send(2, 0, 2), Recv((1,), 0, 1)]
    execution = make(make_wire(3), schedule)
    one, other = HEADER_BYTES + 2 * most, HEADER_BYTES + 2 * most + 2
    assert type(execution) is (ShortExecution if most == 3 else Execution)
    found = execution.volume()
    assert found[1] == (one, other) and found[2][0] == HEADER_BYTES + 4
