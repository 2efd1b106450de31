"""A process without the key that gets a rank to dial it: nothing goes through it, whatever it tries."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from ringcomm.errors import AuthenticationError, PeerLostError, RingcommError, StartupError
from ringcomm.transport import connect
from tests.support.relay import TAG_BYTES, Relay, content, replaced
from tests.support.service import Service

ITEMS = 1000


@pytest.fixture
def make_service(no_leaks):
    with ExitStack() as stack:

        def make(size=2, **options):
            service = Service(size, start_timeout_s=2.0, **options)
            stack.callback(service.server.stop)
            return service

        yield make


def run(service, relay):
    """Start two ranks, rank 1 by way of the relay: each one's sum of ones, or its error."""

    def one(rank):
        places = [relay.at] if rank == 1 else service.endpoints
        try:
            with service.start(rank, rendezvous=tuple(places)) as context:
                return float(context.allreduce(np.ones(ITEMS), op=1)[0])
        except RingcommError as problem:
            return problem

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


@pytest.fixture
def on_the_wire(monkeypatch):
    """Relays that stand for a process on the wire: the place that was dialled is not compared."""
    monkeypatch.setattr(connect, "place_here", lambda sock: None)


def test_a_rank_that_dials_a_relay_is_refused(make_service):
    """The proof says where it was meant to arrive, and the error names that place."""
    service = make_service()
    with Relay(service.endpoints[0]) as relay:
        zero, one = run(service, relay)
    assert isinstance(one, AuthenticationError)
    assert f"{relay.at[0]}:{relay.at[1]}" in str(one) and "(--encrypt)" in str(one)
    assert isinstance(zero, StartupError)
    refused = " ".join(service.texts("log"))
    assert f"dialled {relay.at[0]}:{relay.at[1]}" in refused, refused


def test_an_encrypted_job_works_through_port_forwarding(make_service):
    service = make_service(encrypt=True)
    with Relay(service.endpoints[0]) as relay:
        assert run(service, relay) == [2.0, 2.0]


def test_what_is_changed_in_an_encrypted_connection_ends_the_start(make_service):
    service = make_service(encrypt=True)

    def flip_a_bit(data):
        return data[:-1] + bytes([data[-1] ^ 1]) if len(data) > 200 else data

    with Relay(service.endpoints[0], stream=flip_a_bit) as relay:
        outcome = run(service, relay)
    assert all(isinstance(item, (StartupError, PeerLostError)) for item in outcome), outcome


def add_1000(data):
    """Change what looks like an array of numbers."""
    usable = len(data) // 8 * 8
    numbers = np.frombuffer(data[:usable], np.float64).copy()
    numbers[numbers == 1.0] += 1000.0
    return numbers.tobytes() + data[usable:]


def test_a_relay_cannot_lead_the_links_through_itself(make_service, on_the_wire):
    """It owns the control connection of rank 1 and says that rank 0 is where the relay is."""
    service = make_service()
    with ExitStack() as stack:

        def change(direction, number, frame):
            message = content(frame)
            if message["type"] != "link":
                return [(direction, frame)]
            for route in message["routes"]:
                offers = [item for item in route["addresses"] if item["address"] == "127.0.0.1"]
                route["addresses"] = offers
                for offer in offers:
                    data = stack.enter_context(Relay(("127.0.0.1", offer["port"]), stream=add_1000))
                    offer["port"] = data.at[1]
            return [(direction, replaced(frame, message))]

        outcome = run(service, stack.enter_context(Relay(service.endpoints[0], change)))
    assert all(isinstance(item, (StartupError, PeerLostError)) for item in outcome), outcome


# ---- what a process on the wire can do with messages -------------------------------------------


def altered(frame):
    message = content(frame)
    message["pid" if "pid" in message else "more"] = 4711
    return [replaced(frame, message)]


TRICKS = {
    "alter": altered, "repeat": lambda frame: [frame, frame],
    "forge": lambda frame: [frame[:-TAG_BYTES] + bytes(TAG_BYTES)], "leave out": lambda frame: [],
}  # fmt: skip
PLACES = [("there", 0), ("there", 1), ("back", 0), ("back", 1), ("back", 2)]
"""Of the first messages in each way: join and an answer; the rank, the routes and the start."""
CASES = [("alter", *place) for place in PLACES]
CASES += [(trick, "back", 1) for trick in ("repeat", "forge", "leave out")] + [("forge", "there", 1)]


@pytest.mark.parametrize("trick, way, place", CASES)
def test_no_message_can_be_changed(make_service, on_the_wire, trick, way, place):
    """Each message that travels while a job starts, in each way: an error, and never another number."""
    service = make_service()
    met = []

    def change(direction, number, frame):
        if (direction, number) != (way, place):
            return [(direction, frame)]
        met.append(content(frame)["type"])
        return [(direction, piece) for piece in TRICKS[trick](frame)]

    with Relay(service.endpoints[0], change) as relay:
        outcome = run(service, relay)
    assert len(met) == 1
    assert all(isinstance(item, (StartupError, PeerLostError)) for item in outcome), (met, outcome)


def test_what_a_rank_has_said_is_worth_nothing_to_itself(make_service, on_the_wire):
    """Its own message sent back to it, although it has the number that is due."""
    service = make_service()

    def change(direction, number, frame):
        return [("back", frame)] if direction == "there" and number == 0 else [(direction, frame)]

    with Relay(service.endpoints[0], change) as relay:
        outcome = run(service, relay)
    assert all(isinstance(item, (StartupError, PeerLostError)) for item in outcome), outcome
