"""One rank's execution, step by step: what it sends when, what it waits for, when it gives up."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.collective.drive import run
from ringcomm.collective.execute import Execution
from ringcomm.collective.flows import SegmentPool
from ringcomm.collective.reduce import Kernel
from ringcomm.errors import MismatchError, PeerLostError
from ringcomm.ops import Sum
from ringcomm.schedule.steps import SELF, SOURCE, Recv, Send
from ringcomm.transport.base import LinkClosed, Watch
from ringcomm.wire.frames import HEADER_BYTES
from tests.unit.collective.building import HEADER, fold_from, numbers, peers, raw


def start(wire, schedule, data, segment_bytes=16, source=None, **options):
    options.setdefault("kernel", Kernel(Sum, data.dtype, wire.fabric.size))
    execution = Execution(schedule, wire.fabric, HEADER, data.dtype, SegmentPool(segment_bytes), **options)
    execution.arm(HEADER.sequence, data, source)
    wire.call = HEADER, schedule
    return execution


class TestHeaders:
    def test_noise_is_no_header(self, wire):
        wire.put(b"GET / HTTP/1.1\r\nHost: www.example.com\r\nAccept: text/html, */*\r\n\r\n")
        with pytest.raises(MismatchError, match="not the start of a ringcomm message"):
            start(wire, [Recv((1,), 0, 4)], numbers(1, 2, 3, 4)).advance()

    def test_what_follows_is_left_for_the_next_collective(self, wire):
        data = numbers(0)
        execution = start(wire, [Recv((1,), 0, 1)], data)
        wire.put(wire.coming() + raw(7) + b"next")
        assert execution.advance()
        assert data == [7]
        buffer = bytearray(9)
        assert wire.fabric.link(1).recv([memoryview(buffer)]) == 4


class TestOverlap:
    def test_a_send_chases_the_fold_that_makes_its_numbers(self, make_wire):
        wire = make_wire(3)
        data = numbers(1, 2, 3, 4)
        execution = start(wire, [fold_from(1, 0, 4), Send(2, 0, 4)], data)
        wire.put(wire.coming() + raw(10, 20))
        assert not execution.advance()
        assert wire.take(2) == wire.going(2) + raw(11, 22)
        assert execution.waiting_for()[1] == []
        wire.put(raw(30)[:1])
        assert not execution.advance()
        wire.put(raw(30)[1:] + raw(40))
        assert execution.advance()
        assert wire.take(2) == raw(33, 44)

    def test_what_has_arrived_is_passed_on_although_the_segment_is_not_full(self, make_wire):
        wire = make_wire(3)
        execution = start(wire, [fold_from(1, 0, 4), Send(2, 0, 4)], numbers(1, 2, 3, 4), segment_bytes=4096)
        wire.put(wire.coming() + raw(10))
        execution.advance()
        assert wire.take(2) == wire.going(2) + raw(11)

    def test_nothing_is_overwritten_before_it_has_been_sent(self, make_wire):
        wire = make_wire(2, capacity_bytes=HEADER_BYTES + 2)
        data = numbers(1, 2, 3)
        execution = start(wire, [Send(1, 0, 3), Recv((1,), 0, 3)], data)
        wire.put(wire.coming() + raw(7))
        assert not execution.advance()
        assert data.tolist() == [7, 2, 3]
        wire.put(raw(8, 9))
        assert not execution.advance()
        assert data.tolist() == [7, 2, 3]
        assert peers(execution.waiting_for()[1]) == [1]
        assert wire.take() == wire.going() + raw(1)
        assert execution.advance()
        assert wire.take() == raw(2, 3)
        assert data.tolist() == [7, 8, 9]

    def test_a_fold_waits_for_the_send_of_what_it_changes(self, make_wire):
        wire = make_wire(2, capacity_bytes=HEADER_BYTES + 2)
        data = numbers(1, 2)
        execution = start(wire, [Send(1, 0, 2), fold_from(1, 0, 2)], data)
        wire.put(wire.coming() + raw(10))
        execution.advance()
        wire.put(raw(20))
        execution.advance()
        assert data.tolist() == [11, 2]
        assert wire.take() == wire.going() + raw(1)
        assert execution.advance()
        assert data.tolist() == [11, 22]

    def test_steps_on_other_spans_do_not_wait(self, make_wire):
        wire = make_wire(3)
        execution = start(wire, [Recv((1,), 0, 2), Send(2, 2, 4)], numbers(1, 2, 3, 4))
        assert not execution.advance()
        assert wire.take(2) == wire.going(2) + raw(3, 4)

    def test_a_peer_that_is_ahead_is_not_read_beyond_the_segment(self, make_wire):
        wire = make_wire(3)
        count = 40
        data = np.zeros(count, np.int16)
        execution = start(wire, [Recv((1, 2), 0, count, fold=(SELF, 1, 2), final=True)], data)
        wire.put(wire.coming() + raw(*range(count)), peer=1)
        assert not execution.advance()
        assert peers(execution.waiting_for()[0]) == [2]
        wire.put(wire.coming(2) + raw(*range(count)), peer=2)
        assert execution.advance()
        assert data.tolist() == [2 * number for number in range(count)]


class TestMemory:
    def test_bytes_leave_from_and_arrive_in_the_caller_s_own_arrays(self, wire):
        link, seen = wire.fabric.link(1), []
        send, recv = link.send, link.recv
        link.send = lambda views: seen.extend(views) or send(views)
        link.recv = lambda views: seen.extend(views) or recv(views)
        data, source = numbers(0, 0), numbers(5, 6)
        execution = start(wire, [Send(1, 0, 2, SOURCE), Recv((1,), 0, 2)], data, source=source)
        wire.put(wire.coming() + raw(7, 8))
        assert execution.advance()
        for array in (data, source):
            assert any(np.shares_memory(np.frombuffer(view, np.uint8), array) for view in seen)
        assert source.tolist() == [5, 6]

    def test_segments_are_as_long_as_suits_the_link(self, make_wire):
        links = [make_wire(4).fabric.link(peer) for peer in (1, 2, 3)]
        links[1].segment_bytes = 4096
        pool = SegmentPool()
        assert [pool.segment(link).nbytes for link in links] == [256 * 1024, 4096, 256 * 1024]

    def test_a_fold_goes_no_further_than_the_shortest_segment(self, make_wire):
        wire = make_wire(3)
        wire.fabric.link(2).segment_bytes = 16
        count = 40
        data = np.zeros(count, np.int16)
        steps = [Recv((1, 2), 0, count, fold=(SELF, 1, 2), final=True)]
        execution = start(wire, steps, data, segment_bytes=0)
        for peer in (1, 2):
            wire.put(wire.coming(peer) + raw(*range(count)), peer)
        assert execution.advance()
        assert data.tolist() == [2 * number for number in range(count)]


class TestFailure:
    def test_a_peer_hangs_up(self, wire):
        execution = start(wire, [fold_from(1, 0, 2)], numbers(1, 2))
        wire.put(wire.coming() + raw(3))
        wire.hang_up()
        with pytest.raises(LinkClosed) as caught:
            while not execution.advance():
                pass
        assert caught.value.peer == 1


class Scripted:
    """A fabric that waits as long as it takes, on a clock of its own, while the script goes on."""

    def __init__(self, fabric, script=(), watch=None):
        self.now_s = 0.0
        self.watch = watch
        self.waits = []
        self._script = iter(script)
        self._link = fabric.link
        self.rank = fabric.rank

    def link(self, peer):
        return self._link(peer)

    def wait(self, reading, writing, timeout_s):
        self.waits.append((peers(reading), peers(writing), timeout_s))
        delay_s, happening = next(self._script, (timeout_s, None))
        self.now_s += delay_s
        if happening is not None:
            happening()


class TestRun:
    def go(self, wire, execution, script=(), timeout_s=10.0, watch=None):
        fabric = Scripted(wire.fabric, script, watch)
        try:
            run(execution, fabric, timeout_s, clock=lambda: fabric.now_s)
        finally:
            self.fabric = fabric

    def test_gives_up_when_nothing_moves(self, wire):
        with pytest.raises(TimeoutError):
            self.go(wire, start(wire, [Recv((1,), 0, 1)], numbers(1)))
        assert self.fabric.waits == [([1], [], 10.0)]

    def test_every_byte_starts_the_clock_again(self, wire):
        execution = start(wire, [Recv((1,), 0, 1)], numbers(1))
        message = wire.coming() + raw(3)
        script = [(9.0, lambda byte=byte: wire.put(bytes([byte]))) for byte in message]
        self.go(wire, execution, script)
        assert self.fabric.now_s == 9.0 * len(message)

    def test_waking_up_for_nothing_does_not_start_it_again(self, wire):
        with pytest.raises(TimeoutError):
            self.go(wire, start(wire, [Recv((1,), 0, 1)], numbers(1)), [(4.0, None)] * 99)
        assert self.fabric.now_s == 12.0

    def test_no_rank_sleeps_when_the_last_bytes_leave_between_two_looks(self, wire):
        answers = iter([False, False, True, True, True])  # what a link kept has gone when it is asked again
        wire.fabric.link(1).settled = lambda: next(answers)
        self.go(wire, start(wire, [Send(1, 0, 1)], numbers(1)))
        assert self.fabric.waits == []

    def test_the_watch_ends_it(self, wire):
        class Announcement(Watch):
            def fileno(self):
                return -1

            def check(self):
                raise PeerLostError("rank 2 is gone", rank=2)

        execution = start(wire, [Recv((1,), 0, 1)], numbers(1))
        with pytest.raises(PeerLostError, match="rank 2 is gone"):
            self.go(wire, execution, [(0.5, None)], watch=Announcement())
        assert self.fabric.now_s == 0.5
