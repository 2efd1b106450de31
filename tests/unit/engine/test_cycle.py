"""Cycles of engines that are driven by hand: what they make of each other's messages, and of failures."""

from __future__ import annotations

import pytest

from ringcomm.collective.observe import Progress
from ringcomm.engine.observer import Observer
from ringcomm.engine.peer_channels import SilenceLimits
from ringcomm.engine.request import Handle
from ringcomm.errors import NotInitializedError, PeerLostError, ProtocolError
from ringcomm.transport.base import Stopped
from tests.unit.engine.driven import NOTHING, Job, error_of


@pytest.mark.parametrize("text", ["AAAA", "not base64!", "A"])
def test_a_result_that_does_not_fit_is_an_error_of_the_operation_and_the_engine(text):
    job = Job()
    request = job.submit(1, "loss", 1.0)
    handle = request.handle
    job.turn()
    job.responses(fresh=[[1, request.signature.to_json()]], settled=[[1, 0, text]])
    with pytest.raises(ProtocolError):
        job.turn()
    assert isinstance(error_of(handle), ProtocolError)


def test_what_a_rank_may_not_send_is_refused():
    job = Job(3)
    job.states[0].peers.messages.send({"type": "joined"}, [1])
    with pytest.raises(ProtocolError, match="rank 0 may not send 'joined' to rank 1"):
        job.turn()
    job = Job(3)
    job.states[2].peers.messages.send(NOTHING, [1])
    with pytest.raises(ProtocolError, match="rank 2 may not send '.*' to rank 1"):
        job.turn()


class TestFailures:
    @pytest.mark.parametrize(
        ("problem", "kind", "text"),
        [
            (PeerLostError("rank 0 was lost", rank=0), PeerLostError, "rank 0 was lost"),
            (MemoryError("no room"), MemoryError, "no room"),
            (Stopped(), NotInitializedError, "shut down while this operation was running"),
        ],
    )
    def test_what_stops_a_bucket_reaches_the_callers_of_its_operations(self, problem, kind, text):
        job = Job(1)
        state = job.states[0]

        def stop(activity: str) -> None:
            raise problem

        observer = Observer()
        observer.activity = lambda traced, name: stop(name)  # type: ignore[method-assign]
        state.peers.tracing.observer = observer
        handle = job.submit(0, "a", 1.0, urgent=False).handle
        with pytest.raises(type(problem)):
            job.turn()
        error = error_of(handle)
        assert type(error) is kind and text in str(error)


class TestLinksThatEnd:
    def test_without_one_it_is_reported_once(self):
        job = Job()
        assert not job.states[0].peers.settled(())
        job.fabrics[1].close()
        for _ in range(3):
            job.states[0].wake_up()
            job.states[0].cycle()
        assert job.closed[0] == [1]

    @pytest.mark.parametrize("waits", ["for an operation", "for all to join"])
    def test_a_rank_that_needs_the_peer_fails(self, waits):
        job = Job()
        if waits == "for an operation":
            job.submit(1, "a", 1.0)
        else:
            job.states[1].join = Handle("join")
        job.fabrics[0].close()
        job.states[1].wake_up()
        with pytest.raises(PeerLostError, match="^lost: ") as caught:
            job.states[1].cycle()
        assert caught.value.rank == 0


class TestLate:
    def test_of_a_direct_call_is_warned_asked_and_given_up(self, caplog):
        job = Job(2, SilenceLimits(0.0, 1.0, 3.0))
        job.running[0] = Progress(2, 0, "allreduce(shape (8,))", (1,))
        for tenth in range(25):
            job.now_s = tenth / 10
            job.turn(2)
        texts = [record.getMessage() for record in caplog.records]
        assert any(text.startswith("allreduce(shape (8,)), call number 1, has waited for") for text in texts)
        assert any(text.startswith("Rank 1 (host1), for which others wait, is here:") for text in texts)
        with pytest.raises(PeerLostError, match=r"^late: (?s:.*)given up.*Its main thread was last seen"):
            for tenth in range(25, 60):
                job.now_s = tenth / 10
                job.turn(2)
