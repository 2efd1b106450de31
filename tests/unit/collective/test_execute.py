"""One rank's execution, step by step: what it sends when, what it waits for, when it gives up.

A schedule of short messages runs as packets, any other as streams; the bytes on the wire are the same.
"""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.collective.execute import Execution, Headers, SegmentPool, run
from ringcomm.collective.reduce import Kernel
from ringcomm.collective.short import ShortExecution, make_execution
from ringcomm.errors import MismatchError, PeerLostError
from ringcomm.ops import Sum
from ringcomm.schedule.direct import all_to_all
from ringcomm.schedule.steps import SELF, SOURCE, Recv, Send
from ringcomm.transport.base import Watch
from ringcomm.wire.frames import stamp, unpack_header
from tests.unit.collective.building import HEADER, fold_from, numbers, peers, raw


def start(wire, schedule, data, segment_bytes=16, source=None, **options):
    """An armed execution by streams."""
    options.setdefault("kernel", Kernel(Sum, data.dtype, wire.fabric.size))
    execution = Execution(schedule, wire.fabric, HEADER, data.dtype, SegmentPool(segment_bytes), **options)
    return armed(execution, wire, schedule, data, source)


def make(wire, schedule, dtype=np.int16, segment_bytes=1 << 18, **options):
    """The execution that is chosen for a schedule."""
    options.setdefault("kernel", Kernel(Sum, np.dtype(dtype), wire.fabric.size))
    pool = SegmentPool(segment_bytes)
    return make_execution(schedule, wire.fabric, HEADER, np.dtype(dtype), pool, **options)


def start_short(wire, schedule, data, source=None, **options):
    execution = make(wire, schedule, data.dtype, **options)
    assert type(execution) is ShortExecution
    return armed(execution, wire, schedule, data, source)


def armed(execution, wire, schedule, data, source):
    execution.arm(HEADER.sequence, data, source)
    wire.call = HEADER, schedule
    return execution


BOTH = pytest.mark.parametrize("begin", [start, start_short], ids=["streams", "packets"])


@BOTH
def test_even_an_empty_message_has_a_header(begin, wire):
    execution = begin(wire, [Send(1, 0, 0), Recv((1,), 0, 0)], numbers())
    assert not execution.advance()
    assert wire.take() == wire.going()
    wire.put(wire.coming())
    assert execution.advance()


@BOTH
def test_a_header_may_arrive_in_crumbs(begin, wire):
    data = numbers(0, 0)
    execution = begin(wire, [Recv((1,), 0, 2)], data)
    message = wire.coming() + raw(7, 8)
    for index in range(len(message)):
        assert not execution.advance()
        assert execution.moved_bytes == index
        assert peers(execution.waiting_for()[0]) == [1]
        wire.put(message[index : index + 1])
    assert execution.advance()
    assert data.tolist() == [7, 8]


@BOTH
def test_another_call_is_recognised_by_its_header(begin, wire):
    execution = begin(wire, [Recv((1,), 0, 4)], numbers(1, 2, 3, 4))
    wire.put(HEADER._replace(items=5).pack())
    with pytest.raises(MismatchError, match=r"number of elements \(4 here, 5 there\)") as caught:
        execution.advance()
    assert (caught.value.rank, caught.value.peer) == (0, 1)


@BOTH
def test_one_fold_of_several_peers_in_the_order_given(begin, make_wire):
    wire = make_wire(3)
    data = np.array([1e8], np.float32)
    execution = begin(wire, [Recv((2, 1), 0, 1, fold=(1, SELF, 2), final=True)], data)
    wire.put(wire.coming(2) + np.float32(-1e8).tobytes(), peer=2)
    assert not execution.advance()
    assert peers(execution.waiting_for()[0]) == [1]
    wire.put(wire.coming() + np.float32(1).tobytes(), peer=1)
    assert execution.advance()
    assert data == np.float32(np.float32(1 + 1e8) - 1e8)


class TestHeaders:
    def test_what_goes_to_a_peer_is_what_that_peer_expects(self):
        bounds = [(0, 1, 3, 6), (0, 4, 9, 15), (0, 7, 15, 24)]  # rank r sends what bounds[r] says
        sides = []
        for rank in range(3):
            counts = [bounds[peer][rank + 1] - bounds[peer][rank] for peer in range(3)]
            into = (0, counts[0], counts[0] + counts[1], sum(counts))
            sides.append(Headers(HEADER, all_to_all(rank, 3, bounds[rank], into), rank))
            stamp(sides[rank].packed, 7)
        for rank, peer in ((0, 1), (0, 2), (1, 2), (2, 0)):
            sent = sides[rank].outgoing[peer]
            assert sent == sides[peer].expected[rank]
            assert unpack_header(sent).sends == bounds[rank][peer + 1] - bounds[rank][peer]
            sides[peer].check(rank, memoryview(sent))

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"sends": 2}, "its message has 2 elements, but 3 are expected here"),
            ({"expects": 1}, "it expects 1 elements, but the message from here has 0"),
            ({"items": 5}, r"number of elements \(4 here, 5 there\)"),
            ({"root": 1}, "the root rank"),
            ({"digest": HEADER.digest ^ 1 << 40}, "the list of sizes"),
            ({"digest": HEADER.digest ^ 1}, "the name, and about nothing else"),
            ({"codec": 3}, "the compression .*compression='int8'"),
            ({"codec": 99}, "the compression .*something that this version"),
        ],
    )
    def test_what_does_not_fit_is_said(self, change, words):
        headers = Headers(HEADER, [Recv((1,), 0, 3), Send(1, 0, 0)], 0)
        received = HEADER._replace(**{"sends": 3, **change}).pack() + b"elements"
        with pytest.raises(MismatchError, match=words) as caught:
            headers.check(1, memoryview(received))
        assert (caught.value.rank, caught.value.peer) == (0, 1)


class TestStreams:
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


class TestWhenPacketsAreUsed:
    def kind(self, wire, schedule, **options):
        return type(make(wire, schedule, **options))

    def test_not_where_a_send_would_wait_for_more_than_it_needs(self, make_wire):
        wire = make_wire(3)
        one, other = Recv((1,), 0, 2), Recv((2,), 2, 4)
        assert self.kind(wire, [one, Send(1, 0, 4), other]) is ShortExecution
        assert self.kind(wire, [one, other, Send(1, 0, 4)]) is Execution
        assert self.kind(wire, [one, Send(1, 0, 2), Send(2, 8, 9)]) is Execution
        assert self.kind(wire, [one, other, Send(1, 0, 4, SOURCE)]) is ShortExecution


class TestPackets:
    def test_headers_without_elements_go_and_are_awaited_first(self, make_wire):
        wire = make_wire(3)
        steps = [Recv((1,), 0, 2), Send(2, 0, 2), Send(1, 0, 0), Recv((2,), 0, 0)]
        execution = start_short(wire, steps, numbers(0, 0))
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
