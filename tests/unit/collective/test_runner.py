"""From calls to the wire, and from failures to errors that people can read."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ringcomm.clock import POLLING, Deadline
from ringcomm.collective import call_runner
from ringcomm.collective.call_history import CallHistory
from ringcomm.collective.call_sites import site_text
from ringcomm.collective.progress import Progress
from ringcomm.collective.runner import Runner
from ringcomm.config import Settings
from ringcomm.errors import (
    ConfigError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    PeerStalledError,
)
from ringcomm.ops import CODECS, Average, Collective, Max, Sum
from ringcomm.transport.memory import memory_fabrics
from ringcomm.wire.frames import HEADER_BYTES, NO_ROOT, unpack_header
from ringcomm.wire.signature import Signature
from tests.unit.collective.building import NOW, fail, ones


def header_of(wire):
    return unpack_header(wire.take()[:HEADER_BYTES])


class TestCalls:
    def test_calls_are_numbered(self, wire):
        runner = Runner(wire.fabric, NOW)
        for number in (1, 2, 3):
            with pytest.raises(MismatchError):
                wire.put(bytes(HEADER_BYTES))
                runner.barrier()
            assert header_of(wire).sequence == number
            runner._errors.broken = None

    def test_the_header_says_what_the_call_is(self, wire):
        with pytest.raises(PeerStalledError):
            Runner(wire.fabric, NOW, generation=3).all_reduce(ones(5), Max, "x", (5,))
        header = header_of(wire)
        assert (header.generation, header.collective, header.op, header.items) == (
            3, Collective.ALLREDUCE, Max, 5,
        )  # fmt: skip

    @pytest.mark.parametrize(
        "change",
        [{"name": "y"}, {"shape": (4, 1)}, {"prescale": 2.0}, {"postscale": 2.0}, {"op": Average}],
        ids=str,
    )
    def test_the_header_changes_with_every_argument(self, make_wire, change):
        headers = []
        for arguments in ({}, change):
            wire = make_wire()
            with pytest.raises(PeerStalledError):
                call = {"op": Sum, "name": "x", "shape": (2, 2), **arguments}
                Runner(wire.fabric, NOW).all_reduce(ones(), **call)
            headers.append(header_of(wire))
        assert headers[0] != headers[1]

    def test_one_rank_touches_no_link(self):
        (fabric,) = memory_fabrics(1)
        runner = Runner(fabric, NOW)
        data = ones()
        runner.all_reduce(data, Average, prescale=3.0)
        assert data.tolist() == [3.0] * 4
        runner.reduce_scatter(data, (0, 4), Sum, postscale=2.0)
        assert data.tolist() == [6.0] * 4
        runner.all_gather(data, (0, 4))
        runner.broadcast(data, 0)
        runner.barrier()
        assert runner.exchange([7, 8], Collective.ALLTOALL, data.dtype, "", ()).tolist() == [[7, 8]]
        received = np.zeros(4, np.float32)
        runner.all_to_all(data, received, (0, 4), (0, 4))
        assert received.tolist() == [6.0] * 4

    @pytest.mark.parametrize("algorithm", ["one_shot", "direct", "doubling", "ring"])
    def test_the_algorithm_can_be_forced(self, wire, algorithm):
        fail(Runner(wire.fabric, Settings(timeout_s=0.001, algorithm=algorithm)))
        sent_items = (len(wire.take()) - HEADER_BYTES) // 4
        assert sent_items == {"one_shot": 4, "doubling": 4, "direct": 2, "ring": 2}[algorithm]

    def test_an_unknown_algorithm(self, wire):
        with pytest.raises(ConfigError, match="there are one_shot, direct, doubling"):
            Runner(wire.fabric, Settings(algorithm="magic")).all_reduce(ones(), Sum)


def allreduce(kind=Collective.ALLREDUCE, shape=(4,)):
    """A direct call that sums four numbers."""
    return Signature("", 0, int(kind), int(Sum), NO_ROOT, ("float32",), (shape,), items=4)


def both(work):
    """``work(runner)`` on two ranks, each in a thread; the results in rank order."""
    runners = [Runner(fabric, Settings(timeout_s=20.0)) for fabric in memory_fabrics(2)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, runners))


class TestTogether:
    """With another rank that makes the same calls."""

    def test_calls_that_are_repeated_with_other_numbers(self):
        def work(runner):
            found = []
            for count in (1, 1, 3, 1):
                mine = [runner.rank] * count
                table = runner.exchange(mine, Collective.ALLTOALL, np.dtype(np.float32), "", ())
                found.append(table.tolist())
            for _ in range(2):
                data = np.arange(4.0) + runner.rank
                runner.reduce_scatter(data, (0, 2, 4), Sum)
                found.append(data[2 * runner.rank : 2 * runner.rank + 2].tolist())
            return found

        tables = [[[0] * count, [1] * count] for count in (1, 1, 3, 1)]
        rows = [[1.0, 3.0], [5.0, 7.0]]
        assert both(work) == [[*tables, row, row] for row in rows]

    def test_reduced_bytes_and_the_last_call_are_kept(self):
        def work(runner):
            runner.all_reduce(ones(6), Sum, "x")
            runner.barrier()
            return runner.reduced_bytes, runner.last_call

        assert both(work) == [(25, "barrier()")] * 2

    def test_codecs_of_half_types(self):
        def work(runner):
            data = np.full(300, 1.0 + runner.rank, np.float16)
            runner.all_reduce(data, Sum, codec=CODECS.index("int8"))
            return data

        for result in both(work):
            np.testing.assert_allclose(result.astype(float), 3.0, rtol=0.02)
            assert result.dtype == np.float16

    def test_calls_belong_to_the_line_that_asked_for_them(self):
        def work(runner):
            runner.history = CallHistory(4)
            site = (work.__code__, 0)
            with runner.calls_of(site):
                runner.barrier()
            runner.barrier()
            first, second = (row["site"] for row in runner.rows())
            return first == site_text(site), second != first, runner.called_at

        assert both(work) == [(True, True, None)] * 2

    def test_a_block_of_calls_that_ends_too_early_ends_the_calls(self):
        """The other rank waits for the second part."""

        def work(runner):
            if runner.rank == 1:
                runner.barrier()
                return None
            with pytest.raises(KeyError), runner.exclusive(parts=2):
                runner.barrier()
                raise KeyError("x")
            with pytest.raises(PeerLostError, match=r"was interrupted \(KeyError: 'x'\) in barrier"):
                runner.barrier()
            return True

        assert both(work) == [True, None]


def test_leaving_does_not_wait_for_ever_for_a_call_of_another_thread(monkeypatch):
    monkeypatch.setattr(call_runner, "_LEAVING_S", 0.01)
    runner = Runner(memory_fabrics(2)[0], Settings())
    entered, leave = threading.Event(), threading.Event()

    def block():
        with runner.exclusive():
            entered.set()
            assert leave.wait(20)

    thread = threading.Thread(target=block)
    thread.start()
    assert entered.wait(20)
    runner.stop()
    with pytest.raises(NotInitializedError):
        runner._errors.check_usable()
    leave.set()
    thread.join()


def test_how_far_a_call_is_that_waits_for_another_rank():
    one, other = (Runner(fabric, Settings(timeout_s=20.0)) for fabric in memory_fabrics(2))
    assert one.rows() == [] and one.progress() == Progress(0) and one.last_call == ""
    large = [np.ones(1 << 20, np.float32) for _ in range(2)]  # more than a pipe holds
    thread = threading.Thread(target=one.all_reduce, args=(large[0], Sum))
    thread.start()
    deadline = Deadline(20.0)
    while one.progress().moved_bytes == 0 and not deadline.expired():
        POLLING.give_way()
    progress = one.progress()
    assert progress.sequence == 2 and progress.waits_for == (1,) and progress.moved_bytes > 0
    assert progress.doing == one.last_call == "allreduce(1048576 elements, float32, op=Sum)"
    assert [peer for peer, _, _ in progress.exchanged] == [1]
    assert one.totals().peers[1].sent_bytes > 0
    one.purpose = lambda: "a bucket of gradients"
    assert one.progress().doing == "a bucket of gradients"
    one.purpose = None
    other.all_reduce(large[1], Sum)
    thread.join()
    assert large[0][-1] == large[1][0] == 2.0 and one.progress() == Progress(2)
