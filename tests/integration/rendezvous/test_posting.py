"""Posting at a real rendezvous, and waiting there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ringcomm.errors import StartTimeoutError, StartupError
from ringcomm.rendezvous.connect_server import await_entry, post
from tests.support.relay import Relay
from tests.support.service import Service


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def service(request, no_leaks):
    service = Service(2, encrypt=request.param)
    yield service
    service.server.stop()


def test_an_entry_reaches_waiting_and_later_readers(service):
    member = service.membership(0)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(await_entry, member, "group 1", 20.0) for _ in range(2)]
        post(member, "group 1", "where it is", 20.0)
        assert [item.result() for item in waiting] == ["where it is"] * 2
    assert await_entry(member, "group 1", 20.0) == "where it is"


def test_a_wait_for_an_entry_that_is_never_posted_ends_in_time(service):
    with pytest.raises(StartTimeoutError, match="No rank has posted group 2 .* within 0.2 s"):
        await_entry(service.membership(0), "group 2", 0.2)


def test_a_relay_is_refused_or_passes_on_ciphertext(service):
    if service.certificate:
        with Relay(service.endpoints[0]) as relay:
            post(service.membership(0, rendezvous=(relay.at,)), "group 4", "elsewhere", 5.0)
        return
    with Relay(service.endpoints[0]) as relay, pytest.raises(StartupError, match="passed on from there"):
        post(service.membership(0, rendezvous=(relay.at,)), "group 4", "elsewhere", 5.0)


ANSWERS = (
    (lambda odd, number, message: odd.drop(number), "it closed the connection"),
    (lambda odd, number, message: odd.send_message(number, {"type": "ping"}), "it sent 'ping'"),
)
