"""Both sides of the rendezvous: which addresses are dialled, joining, entries, messages, the end."""

from __future__ import annotations

import errno
import logging
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ringcomm.config import Membership, Settings, Slot
from ringcomm.configuration.membership import format_endpoint
from ringcomm.errors import AuthenticationError, RefusedError, StartTimeoutError, StartupError
from ringcomm.rendezvous import client
from ringcomm.rendezvous import server as server_module
from ringcomm.rendezvous.client import Moved, Watched, await_entry, join, post, reach
from ringcomm.rendezvous.membership import Drop, Send
from ringcomm.rendezvous.server import RendezvousServer
from ringcomm.wire.auth import Purpose
from tests.integration.rendezvous.fake_rendezvous import GO, LINK, PROBE, FakeRendezvous, Peer
from tests.support.service import CLAIM, JOB, KEY, Service, eventually

SETTINGS = Settings(start_timeout_s=60.0, spin_us=0.0)
REFUSED = {"type": "refused", "reason": "it came too late"}


@pytest.fixture
def fake(no_leaks):
    fake = FakeRendezvous()
    yield fake
    fake.close()


@pytest.fixture
def joining(fake):
    """`joining(settings, **change)`: a rank joins at the fake rendezvous, in a thread; its request, and the
    future of its end."""
    with ThreadPoolExecutor(1) as pool:

        def begin(settings=SETTINGS, **change):
            future = pool.submit(join, replace(fake.membership, **change), settings)
            fake.accept()
            return fake.read("join"), future

        yield begin
        fake.close()


def refuse(fake, future):
    fake.send(REFUSED)
    with pytest.raises(RefusedError, match="The rendezvous refused this process: it came too late"):
        future.result(60.0)


@pytest.mark.parametrize(
    "messages",
    [
        [{"type": "measure", "pairs": []}],
        [LINK],
        [GO],
        [PROBE, {"type": "link", "routes": [{"peer": 1, "dial": False, "addresses": [], "iface": ""}]}, GO],
    ],
    ids=["measure", "link", "go", "go before the links"],
)
def test_a_rendezvous_that_sends_something_too_early(fake, joining, messages):
    _, future = joining()
    fake.send(*messages)
    with pytest.raises(StartupError, match=f"the rendezvous sent '{messages[-1]['type']}' too early"):
        future.result(60.0)


# ---- a rendezvous that ends, or does not answer ----------------------------------------------


def test_without_a_launcher_a_rank_whose_rendezvous_ends_too_early_joins_again(fake, joining):
    """The rank that serves has ended the last generation, and not begun the next one."""
    request, future = joining(slot=None)
    fake.accept()  # closes the first connection
    assert fake.read("join") == request
    refuse(fake, future)


# ---- an address that may change --------------------------------------------------------------


@pytest.fixture
def nowhere(refusing):
    """Where no connection is accepted."""
    return refusing["address"], refusing["port"]


def membership_at(where, key=b"k" * 32, **more):
    return Membership(2, (where,), key, "job", **more)


def test_a_rank_learns_that_the_rendezvous_is_somewhere_else_now(no_leaks, nowhere):
    watched = Watched(lambda: True, 60.0)
    with pytest.raises(Moved, match="another address now"):
        join(membership_at(nowhere), SETTINGS, watched=watched)


def test_a_launcher_serves_before_it_starts_ranks_so_a_refusal_is_not_waited_out(
    no_leaks, nowhere, monkeypatch
):
    monkeypatch.setattr(client, "REFUSED_S", 0.0)
    with pytest.raises(StartTimeoutError, match="(?s)No answer from the rendezvous.*connection refused"):
        join(membership_at(nowhere, slot=Slot(0, 0)), SETTINGS)


def test_a_rendezvous_of_another_job_may_be_about_to_be_replaced(service):
    """Its address is left from an earlier start; only after a while that is an error."""
    job, looked = service(2), []
    watched = Watched(lambda: bool(looked.append(1)), 1.0)
    with pytest.raises(AuthenticationError, match="Every process of a job needs the same key and job name"):
        join(membership_at(job.endpoints[0]), SETTINGS, watched=watched)
    assert len(looked) > 1


def short(*_):
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("lacks", ["check_descriptors", "LinkSetup"])
def test_a_rank_that_lacks_something_has_all_told(fake, monkeypatch, lacks):
    """Before it joins, and after it has reached the rendezvous."""
    monkeypatch.setattr(client, lacks, short)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(join, replace(fake.membership, host="desk"), SETTINGS)
        fake.accept()
        text = fake.read("short")["text"]
        fake.close()
        with pytest.raises(StartupError) as caught:
            future.result(60.0)
    assert str(caught.value) == text and "A rank on desk cannot connect to the others: " in text
    assert "`ulimit -n`" in text


# ---- which addresses are dialled ---------------------------------------------------------------


@pytest.fixture
def server(no_leaks):
    service = Service(2)
    service.server._key, service.server._job = KEY, JOB
    service.server._acceptor.key, service.server._acceptor.job = KEY, JOB
    yield service.endpoints[0]
    service.server.stop()


@pytest.fixture
def listener(no_leaks):
    """Another server, which would notice if it were dialled."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(0.05)
        yield sock


def dialled(listener):
    try:
        listener.accept()[0].close()
    except socket.timeout:
        return False
    return True


def test_an_address_of_this_machine_does_not_lead_to_another(reactor, listener):
    """docker0 has the same address on many hosts, and any user can listen there."""
    where = listener.getsockname()
    found = reach(reactor, [where], KEY, CLAIM, None, 5.0, elsewhere=True)
    assert found.sock is None
    (line,) = found.tried
    assert f"127.0.0.1:{where[1]}: not dialled, because this machine has that address itself" in line
    assert not dialled(listener)


@pytest.mark.parametrize("silent", [False, True], ids=["refused", "silent"])
def test_what_is_for_later_is_dialled_when_no_other_answers(reactor, server, silent, monkeypatch):
    monkeypatch.setattr(client, "_LATER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = other.getsockname()
        if not silent:
            other.close()
        found = reach(reactor, [where], KEY, CLAIM, None, 5.0, later=[server])
        assert found.sock is not None and found.sock.getpeername() == server
        found.sock.close()


@pytest.mark.parametrize("host", ["desk..local", "x" * 70 + ".local"])
def test_a_name_that_can_be_none_is_a_line_among_what_was_tried(reactor, server, host):
    """Python refuses to look it up by a UnicodeError, which is no OSError."""
    assert reach(reactor, [(host, 5000), server], KEY, CLAIM, None, 5.0).sock.close() is None
    found = reach(reactor, [(host, 5000)], KEY, CLAIM, None, 5.0)
    assert found.sock is None
    (line,) = found.tried
    assert line.startswith(f"  {host}: ") and "label" in line


def test_a_server_with_another_key_is_told_from_one_that_is_silent(reactor, server, listener):
    found = reach(reactor, [server], b"x" * 32, CLAIM, None, 30.0)
    assert found.sock is None and not found.silent
    where, reason = format_endpoint(*found.refused.address), found.refused.reason
    assert where == f"127.0.0.1:{server[1]}" and "does not hold this job's key" in reason
    assert found.tried == [f"  {where}: {reason}"]
    found = reach(reactor, [listener.getsockname()], KEY, CLAIM, None, 0.05)
    assert found.sock is None and found.silent and found.refused is None
    assert found.tried == [f"  127.0.0.1:{listener.getsockname()[1]}: no answer within 0.05 s"]


# ---- entries -----------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def served(request, no_leaks):
    service = Service(2, encrypt=request.param)
    yield service
    service.server.stop()


def test_an_entry_reaches_waiting_and_later_readers(served):
    member = served.membership(0)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(await_entry, member, "group 1", 20.0) for _ in range(2)]
        post(member, "group 1", "where it is", 20.0)
        assert [item.result() for item in waiting] == ["where it is"] * 2
    assert await_entry(member, "group 1", 20.0) == "where it is"


def test_a_wait_for_an_entry_that_is_never_posted_ends_in_time(served):
    with pytest.raises(StartTimeoutError, match="No rank has posted group 2 .* within 0.2 s"):
        await_entry(served.membership(0), "group 2", 0.2)


# ---- a server that exchanges control messages ----------------------------------------------------


NOTE = {"type": "note", "text": "hello"}
LONG = {"type": "note", "text": "x" * 3_000_000}
MANY = 8
"""So many of them are more than the buffers of a connection hold."""


def server_of(*addresses, notify=print):
    return RendezvousServer(
        key=KEY, job="job", size=2, addresses=addresses, start_timeout_s=20.0, notify=notify
    )


@pytest.fixture
def running(no_leaks):
    notices = []
    running = server_of("127.0.0.1", notify=notices.append)
    running.endpoints, running.notices = running.start(), notices
    yield running
    running.stop()


@pytest.fixture
def dials(running):
    """`dials()`: connects to it."""
    made = []

    def connect(*arguments):
        made.append(Peer(running.endpoints, KEY, "job", *arguments))
        return made[-1]

    yield connect
    for item in made:
        item.sock.close()


def here(running, action):
    """Call this in the server's thread; what it returns."""
    results, done = [], threading.Event()

    def call():
        results.append(action())
        done.set()

    running.order(call)
    assert done.wait(30.0)
    return results[0]


def numbers(running):
    return here(running, lambda: sorted(running._connections))


def test_a_connection_that_is_dropped_first_gets_all_that_was_sent(running, dials):
    item = dials()
    assert eventually(lambda: numbers(running) == [1])
    here(running, lambda: running._act([*[Send(1, LONG)] * MANY, Drop(1), Send(2, NOTE)]))
    assert item.read() == [LONG] * MANY
    assert eventually(lambda: numbers(running) == [])


def test_a_connection_that_breaks_the_rules_ends_and_the_others_stay(running, dials, caplog):
    caplog.set_level(logging.INFO, "ringcomm.rendezvous")
    stays = dials()
    unwanted, malformed, reset = dials(), dials(), dials()
    unwanted.send({"type": "unblocked"})
    malformed.sock.sendall(b"\xff" * 4)
    reset.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reset.sock.close()
    assert eventually(lambda: numbers(running) == [1])
    for number, why in (
        (2, "a rank may not send 'unblocked'"), (3, "a control message of 4294967295 bytes"),
        (4, "Connection reset by peer"),
    ):
        assert f"control connection {number}: {why}" in caplog.text
    running.stop()
    assert stays.read() == []


def test_a_peer_with_another_purpose_is_turned_away_and_reported(running, dials, monkeypatch):
    monkeypatch.setattr(server_module, "_REFUSALS_EVERY_S", 0.3)
    for _ in range(2):
        assert dials(Purpose.DIRECT).read() == []
    assert eventually(lambda: sum(int(item.text.split()[1]) for item in running.notices) == 2)
    why = "(mostly a rank: it dialled the rendezvous for another purpose)"
    assert all(why in item.text and item.kind == "log" for item in running.notices)


def test_an_address_that_is_not_this_machines_is_left_out(no_leaks):
    running = server_of("192.0.2.1", "127.0.0.1")
    ((address, port),) = running.start()
    running.stop()
    assert address == "127.0.0.1" and port > 0


def test_a_peer_that_does_not_read_cannot_keep_a_server_from_its_end(running, dials):
    item = dials()
    assert eventually(lambda: numbers(running) == [1])
    here(running, lambda: running._act([Send(1, LONG)] * MANY))
    running.stop()
    assert item.sock.recv(4) != b"", "what was sent before is there"
    called = []
    running.stop()
    running.order(lambda: called.append(1))
    assert called == [], "after its end nothing is called any more"
