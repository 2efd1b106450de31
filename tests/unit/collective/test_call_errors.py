"""Calls that fail: what the caller, the rendezvous and later calls of the same runner learn."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.collective.runner import Runner
from ringcomm.config import Settings
from ringcomm.errors import (
    MismatchError,
    Misuse,
    NotInitializedError,
    PeerLostError,
    PeerStalledError,
    UnsupportedDtypeError,
)
from ringcomm.group.failures import Reporter
from ringcomm.ops import Average, Max, Sum
from ringcomm.transport.huge_pages import MIN_BYTES
from ringcomm.transport.memory import memory_fabrics
from ringcomm.wire.frames import HEADER_BYTES
from tests.unit.collective.building import NOW, fail, ones


class Rendezvous:
    """Receives reports, and gives the root cause."""

    abort_error = None

    def __init__(self):
        self.heard = []

    def report_lost(self, peer, doing, why, kind="lost"):
        self.heard.append((peer, doing, why, kind))
        return PeerLostError("the root cause", rank=peer)

    def report_mismatch(self, peer, text):
        self.heard.append((peer, text))
        return MismatchError("the root cause", peer=peer)


class TestFailures:
    def test_a_silent_peer(self, wire):
        what = r"rank 1 .* allreduce\(4 elements, float32, op=Sum\)"
        with pytest.raises(PeerStalledError, match=what) as caught:
            Runner(wire.fabric, NOW).all_reduce(ones(), Sum)
        assert caught.value.rank == 1

    def test_the_silent_one_of_several_is_named(self, make_wire):
        theirs = make_wire(4)
        fail(Runner(theirs.fabric, NOW))
        message = theirs.take()
        wire = make_wire(4)
        for peer in (1, 3):
            wire.put(message, peer=peer)
        with pytest.raises(PeerStalledError) as caught:
            Runner(wire.fabric, NOW).all_reduce(ones(), Sum)
        assert caught.value.rank == 2

    def test_a_peer_that_is_gone(self, wire):
        wire.hang_up()
        with pytest.raises(PeerLostError, match="rank 1 .* it closed the connection") as caught:
            Runner(wire.fabric, NOW).all_reduce(ones(), Sum)
        assert caught.value.rank == 1
        assert not isinstance(caught.value, PeerStalledError)

    def test_a_peer_in_another_call(self, make_wire):
        theirs = make_wire()
        Runner(theirs.fabric, NOW).broadcast(ones(), 0, "y")
        wire = make_wire()
        wire.put(theirs.take())
        with pytest.raises(MismatchError) as caught:
            Runner(wire.fabric, NOW).all_reduce(ones(), Sum, "x", (2, 2), prescale=2.0)
        text = str(caught.value)
        assert "rank 0: allreduce(shape (2, 2), float32, op=Sum, name='x', prescale_factor=2.0) at " in text
        assert f"{__file__}:" in text
        assert "rank 1 makes another call" in text
        assert "broadcast(4 elements, float32, root_rank=0) there" in text

    def test_the_rendezvous_has_the_last_word(self, wire):
        rendezvous = Rendezvous()
        wire.hang_up()
        with pytest.raises(PeerLostError, match="the root cause"):
            Runner(wire.fabric, NOW, reporter=rendezvous).all_reduce(ones(), Sum)
        ((peer, doing, why, kind),) = rendezvous.heard
        assert (peer, kind) == (1, "lost")
        assert doing == "allreduce(4 elements, float32, op=Sum), call number 1"
        assert why == "it closed the connection"

    def test_mismatches_are_reported_to_the_rendezvous(self, wire):
        rendezvous = Rendezvous()
        wire.put(bytes(HEADER_BYTES))
        with pytest.raises(MismatchError, match="the root cause"):
            Runner(wire.fabric, NOW, reporter=rendezvous).barrier("x")
        ((peer, text),) = rendezvous.heard
        assert peer == 1
        assert text.startswith("rank 0: barrier(name='x') at ")

    def test_after_a_failure_every_call_says_so(self, wire):
        runner = Runner(wire.fabric, NOW)
        fail(runner)
        wire.take()
        for call in (runner.barrier, lambda: runner.broadcast(ones(), 0)):
            with pytest.raises(Misuse, match="has failed before.*PeerStalledError: rank 1") as caught:
                call()
            assert isinstance(caught.value.__cause__, PeerStalledError)
        assert wire.take() == b""

    def test_an_interrupt_comes_through_and_breaks_the_streams(self, wire):
        runner = Runner(wire.fabric, Settings())
        wire.fabric.wait = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.barrier()
        with pytest.raises(PeerLostError, match="this rank was interrupted .KeyboardInterrupt. in barrier"):
            runner.barrier()
        with pytest.raises(Misuse, match="has failed before.*KeyboardInterrupt"):
            runner.barrier()

    def test_what_fails_before_anything_is_sent_is_no_call(self, wire):
        """Otherwise this rank's calls would have other numbers than those of the others from then on."""
        runner = Runner(wire.fabric, Settings())
        wire.fabric.prepare = lambda *_: (_ for _ in ()).throw(MemoryError)
        with pytest.raises(MemoryError):
            runner.all_reduce(np.ones(MIN_BYTES, np.uint8), Max)
        assert wire.take() == b"" and runner.progress().number == 0
        wire.fabric.wait = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.barrier()
        assert runner.progress().number == 1

    def test_an_interrupt_while_a_failure_is_reported_breaks_the_streams_too(self, wire):
        class Interrupted(Reporter):
            def report_lost(self, *_):
                raise KeyboardInterrupt

        runner = Runner(wire.fabric, NOW, reporter=Interrupted())
        with pytest.raises(KeyboardInterrupt):
            runner.all_reduce(ones(), Sum)
        wire.take()
        with pytest.raises(Misuse, match="has failed before"):
            runner.all_reduce(ones(), Sum)
        assert wire.take() == b""

    def test_a_time_limit_of_the_program_is_not_one_of_ours(self, wire):
        """A handler of SIGALRM that raises TimeoutError says nothing about any rank."""
        runner = Runner(wire.fabric, Settings())
        wire.fabric.wait = lambda *_: (_ for _ in ()).throw(TimeoutError("five minutes are over"))
        with pytest.raises(TimeoutError, match="five minutes are over"):
            runner.barrier()
        with pytest.raises(PeerLostError, match="this rank was interrupted .TimeoutError: five minutes"):
            runner.barrier()

    def test_a_call_that_makes_no_sense_breaks_nothing(self, wire):
        runner = Runner(wire.fabric, NOW)
        with pytest.raises(UnsupportedDtypeError):
            runner.all_reduce(np.ones(3, bool), Average)
        assert wire.take() == b""
        fail(runner)  # it still talks

    def test_after_leaving(self, wire):
        runner = Runner(wire.fabric, NOW)
        runner.stop()
        with pytest.raises(NotInitializedError, match=r"left the job.*ringcomm\.init\(\)"):
            runner.barrier()
        assert wire.take() == b""

    def test_numeric_trouble_is_no_warning(self, make_wire):
        theirs = make_wire()
        huge = np.full(2, 3e38, np.float32)
        with pytest.raises(PeerStalledError):
            Runner(theirs.fabric, NOW).all_reduce(huge.copy(), Sum)
        wire = make_wire()
        wire.put(theirs.take())
        Runner(wire.fabric, NOW).all_reduce(huge, Sum)
        assert np.isinf(huge).all()


def test_a_forked_child_may_not_use_its_parents_links(monkeypatch):
    runner = Runner(memory_fabrics(2)[0], Settings())
    monkeypatch.setattr("ringcomm.collective.call_errors.os.getpid", lambda: -1)
    with pytest.raises(Misuse, match="fork of rank 0"):
        runner.barrier()


class TestReporter:
    """What takes the place of a rendezvous where there is none."""

    def test_the_first_failure_is_the_root_cause(self, caplog):
        reporter = Reporter()
        assert reporter.fileno() == -1
        reporter.check()
        first = reporter.report_lost(2, "barrier()", "it closed the connection")
        second = reporter.report_lost(1, "", "not a byte", "stalled")
        assert isinstance(first, PeerLostError) and first.rank == second.rank == 2
        assert str(first) == str(second)
        assert str(first) == "rank 2 was lost while this rank was in barrier(): it closed the connection."
        with pytest.raises(PeerLostError, match="rank 2 was lost"):
            reporter.check()
        assert str(reporter.root_cause(MismatchError("other"))) == str(first)

    def test_a_silent_peer_and_an_interruption(self):
        reporter = Reporter()
        noted = reporter.note_interrupted("barrier()", "KeyboardInterrupt")
        assert reporter.note_interrupted("", "again") is noted
        assert str(reporter.root_cause(noted)) == str(noted)
        silent = Reporter().report_lost(1, "", "not a byte", "stalled")
        assert isinstance(silent, PeerStalledError) and str(silent) == "rank 1 was lost: not a byte."

    def test_warnings_are_logged(self, caplog):
        Reporter().warn("program", "the ranks run different programs")
        assert [record.getMessage() for record in caplog.records] == ["the ranks run different programs"]
