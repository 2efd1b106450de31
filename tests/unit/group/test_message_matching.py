"""Which message a receive gets."""

from __future__ import annotations

from ringcomm.group.message_matching import Arrival, Matcher
from tests.support.messages import TAG, receive


def test_a_receive_waits_for_its_message():
    matcher, wanted = Matcher(), receive(1, 4)
    assert matcher.post(wanted) is None
    assert matcher.match(2, TAG) is None
    assert matcher.match(1, (0, 6)) is None
    assert matcher.match(1, (1, 5)) is None
    assert matcher.match(1, TAG) is wanted
    assert matcher.match(1, TAG) is None


def test_a_message_waits_for_its_receive():
    matcher = Matcher()
    first, second = (Arrival(1, TAG, number, 0, 4, memoryview(b"abcd")) for number in (1, 2))
    matcher.hold(first)
    matcher.hold(second)
    assert matcher.post(receive(2, 4)) is None
    assert matcher.post(receive(1, 4)) is first
    assert matcher.post(receive(None, 4)) is second
    assert matcher.post(receive(1, 4)) is None


def test_nothing_is_kept_of_tags_that_are_done():
    matcher = Matcher()
    for tag in range(100):
        matcher.hold(Arrival(1, (0, tag), tag, 0, 4, memoryview(b"abcd")))
        assert matcher.post(receive(1, 4, (0, tag))) is not None
    assert matcher._arrivals == matcher._receives == {}


def test_the_receive_that_was_posted_first_gets_it():
    matcher, any_peer, one = Matcher(), receive(None, 4), receive(1, 4)
    matcher.post(any_peer)
    matcher.post(one)
    assert [item is any_peer for item in matcher.receives()] == [True, False]
    assert matcher.match(1, TAG) is any_peer
    matcher.withdraw(one)
    assert matcher.receives() == []
