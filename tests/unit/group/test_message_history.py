"""What is recorded of point-to-point messages, without an engine."""

from __future__ import annotations

import pytest

from ringcomm.collective.observe import Totals
from ringcomm.errors import PeerLostError
from ringcomm.group.point_to_point import KIND, RECEIVE, SEND, MessageHistory
from tests.integration.group.works import Task


@pytest.fixture
def history():
    return MessageHistory({7: "float32"}.get)


def states(history):
    return [(row["kind"], row["op"], row["state"]) for row in history.rows()]


def test_messages_are_numbered_by_peer_and_way_and_the_last_one_is_kept(history):
    for number in range(6):
        work = Task(f"message {number}")
        history.post(RECEIVE, 1, 0, 7, 8, work)
    assert states(history) == [("recv", 6, "submitted")]
    work.finish()
    (row,) = history.rows()
    assert (row["state"], row["what"], row["peer"]) == ("done", "8 bytes of float32", 1)
    history.post(SEND, 2, 3, 0, 16, Task("sent"))
    (row,) = history.rows()
    assert (row["what"], row["name"], row["site"]) == ("16 bytes, tag 3", "", "")
    channel = history.channel("messages", [10, 11, 12])
    assert channel["messages"] == {"11": [0, 6], "12": [1, 0]} and channel["operations"][0]["peer"] == 12


def test_the_sums_of_a_rank(history):
    work = Task("x")
    wait = history.begin_wait(history.post(RECEIVE, 1, 0, 7, 8, work), work)
    history.end_wait(wait)
    history.post(SEND, 1, 0, 7, 4, work)
    totals = Totals()
    history.add_to(totals)
    assert (totals.peers[1].sent_bytes, totals.peers[1].received_bytes) == (4, 8)
    assert totals.peers[1].slept_s == history.waited_s > 0.0
    assert (totals.kinds[KIND].runs, totals.kinds[KIND].moved_bytes) == (2, 12)


def test_what_was_waited_for_has_failed(history):
    found = []
    history.on_failure = found.append
    work, other = Task("x"), Task("y")
    message = history.post(RECEIVE, 1, 0, 7, 8, work)
    history.post(RECEIVE, 1, 0, 7, 8, other)
    history.begin_wait(message, work)
    error = PeerLostError("rank 1 was lost", rank=1)
    history.fail(error)
    work.finish(error)
    assert [row["state"] for row in history.rows()] == ["failed"] and found == [error]
    assert history.rows()[0]["error"] == "PeerLostError: rank 1 was lost"
