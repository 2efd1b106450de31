"""From calls to the wire, from failures to errors, and what is recorded of calls."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ringcomm.clock import POLLING, Deadline
from ringcomm.collective import runner as runner_module
from ringcomm.collective.observe import (
    CallHistory,
    Progress,
    call_site,
    find_frame,
    nowhere,
    site_text,
    this_site,
)
from ringcomm.collective.runner import Runner
from ringcomm.config import Settings
from ringcomm.errors import (
    ConfigError,
    MismatchError,
    Misuse,
    NotInitializedError,
    PeerLostError,
    PeerStalledError,
    UnsupportedDtypeError,
)
from ringcomm.group.failures import Reporter
from ringcomm.ops import CODECS, Average, Collective, Max, Sum
from ringcomm.testing.cluster import run_ranks
from ringcomm.transport.base import LARGE_BYTES
from ringcomm.transport.memory import memory_fabrics
from ringcomm.wire.frames import HEADER_BYTES
from ringcomm.wire.signature import direct_call
from tests.unit.collective.building import NOW, all_reduce, broadcast, fail, ones


def both(work):
    """``work(runner)`` on two ranks, each in a thread; the results in rank order."""
    runners = [Runner(fabric, Settings(timeout_s=20.0)) for fabric in memory_fabrics(2)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, runners))


def throw(problem):
    """A function that raises this exception."""
    return lambda *_: (_ for _ in ()).throw(problem)


class TestCalls:
    @pytest.mark.parametrize(
        ("algorithm", "items"), [("one_shot", 4), ("doubling", 4), ("direct", 2), ("ring", 2)]
    )
    def test_the_algorithm_can_be_forced(self, wire, algorithm, items):
        fail(Runner(wire.fabric, Settings(timeout_s=0.001, algorithm=algorithm)))
        assert (len(wire.take()) - HEADER_BYTES) // 4 == items
        with pytest.raises(ConfigError, match="there are one_shot, direct"):
            all_reduce(Runner(wire.fabric, Settings(algorithm="magic")), ones())

    def test_codecs_of_half_types(self):
        def work(runner):
            data = np.full(300, 1.0 + runner.rank, np.float16)
            all_reduce(runner, data, codec=CODECS.index("int8"))
            return data

        for result in both(work):
            np.testing.assert_allclose(result.astype(float), 3.0, rtol=0.02)
            assert result.dtype == np.float16

    def test_numeric_trouble_is_no_warning(self, make_wire):
        theirs, wire = make_wire(), make_wire()
        huge = np.full(2, 3e38, np.float32)
        with pytest.raises(PeerStalledError):
            all_reduce(Runner(theirs.fabric, NOW), huge.copy())
        wire.put(theirs.take())
        all_reduce(Runner(wire.fabric, NOW), huge)
        assert np.isinf(huge).all()


class Rendezvous:
    """Receives reports, and gives the root cause."""

    abort_error = None

    def __init__(self):
        self.heard = []

    def report_mismatch(self, peer, text):
        self.heard.append((peer, text))
        return MismatchError("the root cause", peer=peer)


class TestFailures:
    def test_the_silent_one_of_several_is_named(self, make_wire):
        theirs, wire = make_wire(4), make_wire(4)
        fail(Runner(theirs.fabric, NOW))
        message = theirs.take()
        for peer in (1, 3):
            wire.put(message, peer=peer)
        what = r"rank 2 .* allreduce\(4 elements, float32, op=Sum\)"
        with pytest.raises(PeerStalledError, match=what) as caught:
            all_reduce(Runner(wire.fabric, NOW), ones())
        assert caught.value.rank == 2

    def test_a_peer_in_another_call(self, make_wire):
        theirs, wire = make_wire(), make_wire()
        broadcast(Runner(theirs.fabric, NOW), ones(), name="y")
        wire.put(theirs.take())
        rendezvous = Rendezvous()
        with pytest.raises(MismatchError, match="the root cause"):
            runner = Runner(wire.fabric, NOW, reporter=rendezvous)
            all_reduce(runner, ones(), name="x", shape=(2, 2), prescale=2.0)
        ((peer, text),) = rendezvous.heard
        assert peer == 1 and f"{__file__.replace('test_runner', 'building')}:" in text
        assert "rank 0: allreduce(shape (2, 2), float32, op=Sum, name='x', prescale_factor=2.0) at " in text
        assert "rank 1 makes another call" in text
        assert "broadcast(4 elements, float32, root_rank=0) there" in text

    def test_after_a_failure_every_call_says_so(self, wire):
        runner = Runner(wire.fabric, NOW)
        fail(runner)
        wire.take()
        for call in (runner.barrier, lambda: broadcast(runner, ones())):
            with pytest.raises(Misuse, match="has failed before.*PeerStalledError: rank 1") as caught:
                call()
            assert isinstance(caught.value.__cause__, PeerStalledError)
        assert wire.take() == b""

    @pytest.mark.parametrize("problem", [KeyboardInterrupt(), TimeoutError("of the program's own")])
    def test_an_interrupt_comes_through_and_breaks_the_streams(self, wire, problem):
        runner = Runner(wire.fabric, Settings())
        wire.fabric.wait = throw(problem)
        name = type(problem).__name__
        with pytest.raises(type(problem)):
            runner.barrier()
        with pytest.raises(PeerLostError, match=f"this rank was interrupted .{name}.* in barrier"):
            runner.barrier()
        with pytest.raises(Misuse, match=f"has failed before.*{name}"):
            runner.barrier()

    def test_what_fails_before_anything_is_sent_is_no_call(self, wire):
        """Otherwise this rank's calls would have other numbers than those of the others from then on."""
        runner = Runner(wire.fabric, NOW)
        wire.fabric.prepare = throw(MemoryError())
        with pytest.raises(MemoryError):
            all_reduce(runner, np.ones(LARGE_BYTES, np.uint8), Max)
        with pytest.raises(UnsupportedDtypeError):
            all_reduce(runner, np.ones(3, bool), Average)
        assert wire.take() == b"" and runner.progress().number == 0
        fail(runner)
        assert runner.progress().number == 1

    def test_a_forked_child_may_not_use_its_parents_links(self, wire, monkeypatch):
        runner = Runner(wire.fabric, Settings())
        monkeypatch.setattr(runner_module.os, "getpid", lambda: -1)
        with pytest.raises(Misuse, match="fork of rank 0"):
            runner.barrier()

    def test_leaving_does_not_wait_for_ever_for_a_call_of_another_thread(self, wire, monkeypatch):
        monkeypatch.setattr(runner_module, "_LEAVING_S", 0.01)
        runner = Runner(wire.fabric, Settings())
        entered, leave = threading.Event(), threading.Event()

        def block():
            with runner.exclusive():
                entered.set()
                assert leave.wait(20)

        thread = threading.Thread(target=block)
        thread.start()
        assert entered.wait(20)
        runner.stop()
        leave.set()
        thread.join()
        with pytest.raises(NotInitializedError, match=r"left the job.*ringcomm\.init\(\)"):
            runner.barrier()
        assert wire.take() == b""


def test_without_a_rendezvous_the_first_failure_is_the_root_cause(caplog):
    reporter = Reporter()
    reporter.check()
    first = reporter.report_lost(2, "barrier()", "it closed the connection")
    second = reporter.report_lost(1, "", "not a byte", "stalled")
    assert str(first) == "rank 2 was lost while this rank was in barrier(): it closed the connection."
    assert isinstance(first, PeerLostError) and first.rank == second.rank == 2
    with pytest.raises(PeerLostError, match="rank 2 was lost"):
        reporter.check()
    assert str(reporter.root_cause(MismatchError("other"))) == str(first) == str(second)
    noted = Reporter().note_interrupted("barrier()", "KeyboardInterrupt")
    assert str(Reporter().root_cause(noted)) == str(noted)
    assert isinstance(Reporter().report_lost(1, "", "not a byte", "stalled"), PeerStalledError)
    reporter.warn("program", "the ranks run different programs")
    assert caplog.messages == ["the ranks run different programs"]


class TestBlocksOfCalls:
    @pytest.mark.parametrize(
        ("count", "calls", "problem", "ends"),
        [
            (2, 1, ZeroDivisionError(), True), (3, 2, ZeroDivisionError(), True),
            (math.inf, 7, ZeroDivisionError(), True),
            (2, 0, ZeroDivisionError(), False), (2, 2, ZeroDivisionError(), False),
            (2, 1, Misuse("the same on every rank"), False),
        ],
    )  # fmt: skip
    def test_an_exception_between_two_parts_ends_the_calls(self, wire, count, calls, problem, ends):
        runner = Runner(wire.fabric, Settings())
        runner.sequence = 5  # by earlier blocks, which do not count
        with pytest.raises(type(problem)) as caught, runner.exclusive(count):
            assert runner.lock._is_owned()
            runner.sequence += calls
            raise problem
        assert caught.value is problem and not runner.lock._is_owned()
        assert (runner._broken is problem) is ends

    def test_the_other_ranks_are_told(self):
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


@pytest.mark.parametrize(
    ("dtype", "weight", "op", "error"),
    [
        (float, -1.0, Average, Misuse), (float, math.nan, Average, Misuse),
        (float, "3", Average, Misuse), (float, 1.0, Sum, Misuse),
        (np.int32, 1.0, Average, UnsupportedDtypeError), (bool, 1.0, Average, UnsupportedDtypeError),
    ],
)  # fmt: skip
def test_a_weight_without_a_meaning_is_refused_before_anything_is_sent(wire, dtype, weight, op, error):
    data = np.zeros(2, dtype)
    with pytest.raises(error):
        Runner(wire.fabric, NOW).weighted(data, weight, direct_call(Collective.ALLREDUCE, data, op=op))
    assert wire.take() == b""


class TestSites:
    def test_a_place_is_the_innermost_line_outside_of_ringcomm(self):
        def place():
            return this_site()

        assert site_text(place()) == f"{__file__}:{place.__code__.co_firstlineno + 1}"
        assert call_site().startswith(f"{__file__}:")


def test_the_callers_variables_are_not_kept_alive():
    history = CallHistory(10)

    def program():
        array = np.ones(4, np.float32)
        frame = find_frame(1, nowhere())
        history.begin(1, None, (frame.f_code, frame.f_lasti))
        return weakref.ref(array)

    array = program()
    gc.collect()
    assert array() is None


def test_how_far_a_call_is_that_waits_for_another_rank():
    one, other = (Runner(fabric, Settings(timeout_s=20.0)) for fabric in memory_fabrics(2))
    assert one.rows() == [] and one.progress() == Progress(0) and one.last_call == ""
    large = [np.ones(1 << 20, np.float32) for _ in range(2)]  # more than a pipe holds
    thread = threading.Thread(target=all_reduce, args=(one, large[0]))
    thread.start()
    deadline = Deadline(20.0)
    while one.progress().moved_bytes == 0 and not deadline.expired():
        POLLING.give_way()
    progress = one.progress()
    assert progress.sequence == 2 and progress.waits_for == (1,) and progress.moved_bytes > 0
    assert progress.doing == one.last_call == "allreduce(1048576 elements, float32, op=Sum)"
    assert [peer for peer, _, _ in progress.exchanged] == [1]
    assert one.rows()[0]["state"] == "running"
    assert one.totals().peers[1].sent_bytes > 0
    one.purpose = lambda: "a bucket of gradients"
    assert one.progress().doing == "a bucket of gradients"
    one.purpose = None
    all_reduce(other, large[1])
    thread.join()
    assert large[0][-1] == large[1][0] == 2.0 and one.progress() == Progress(2)
    assert one.reduced_bytes == 1 << 22


def sums(context):
    found = context._runner.totals()
    peers = {rank: (peer.sent_bytes, peer.received_bytes) for rank, peer in found.peers.items()}
    return peers, {name: (item.runs, item.moved_bytes) for name, item in found.kinds.items()}


class TestTotals:
    @pytest.mark.parametrize("count", [1, 300_000])  # by packets and by streams
    @pytest.mark.parametrize("codec", [None, "int8"])
    def test_what_one_rank_sends_another_receives(self, count, codec):
        def work(context):
            before, _ = sums(context)
            for _ in range(3):
                context.allreduce(np.ones(count, np.float32), Sum, compression=codec)
            after, kinds = sums(context)
            moved = {
                rank: [new - old for new, old in zip(after[rank], before.get(rank, (0, 0)))] for rank in after
            }
            context.close()
            return moved, kinds, sums(context) == (after, kinds)  # the sums stay

        results = run_ranks(3, work)
        for rank, (peers, kinds, stay) in enumerate(results):
            assert stay and kinds["allreduce"][0] == 3
            assert kinds["allreduce"][1] == sum(map(sum, peers.values())) > 0
            for other, (sent, received) in peers.items():
                assert [received, sent] == results[other][0][rank]
