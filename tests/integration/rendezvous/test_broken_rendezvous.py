"""A rendezvous that talks nonsense, falls silent or leaves: while a job starts, and while it runs."""

from __future__ import annotations

import select
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from ringcomm.config import Settings
from ringcomm.errors import (
    PeerLostError,
    StartupError,
)
from ringcomm.job.context import Context
from ringcomm.rendezvous import control
from ringcomm.transport.connect import listen
from ringcomm.wire.messages import MessageReader, body_of, encode, framed
from tests.integration.rendezvous.fake_rendezvous import ABORT, GO, LINK, PROBE, FakeRendezvous
from tests.support.service import eventually

# ---- a rendezvous that misbehaves ------------------------------------------------------------


@pytest.fixture
def fake(no_leaks):
    fake = FakeRendezvous()
    yield fake
    fake.close()


def start_with(fake, pool):
    start = pool.submit(Context.start, fake.membership, Settings(start_timeout_s=5.0))
    fake.accept()
    fake.read("join")
    return start


def test_an_abort_right_behind_the_go_is_not_lost(fake):
    with ThreadPoolExecutor(1) as pool:
        start = start_with(fake, pool)
        fake.send(PROBE, LINK, GO, ABORT)
        with pytest.raises(PeerLostError, match="rank 1 died young") as caught:
            start.result()
    assert (caught.value.rank, caught.value.host) == (1, "there")


@pytest.mark.parametrize(
    "spoken",
    [
        lambda session: b"\xff\xff\xff\xff",
        lambda session: framed(body_of({"type": "abort", "kind": "lost", "text": "x"})[:-1] + b"!", session),
        lambda session: encode({"type": "leaving", "reason": "", "ok": True}, session),
        lambda session: encode({**PROBE, "members": [{}]}, session),
        lambda session: encode(ABORT),
        lambda session: b"",
    ],
    ids=["too long", "not JSON", "not its to say", "incomplete", "without a tag", "nothing"],
)
def test_a_rendezvous_that_talks_nonsense_or_leaves(fake, spoken):
    with ThreadPoolExecutor(1) as pool:
        start = start_with(fake, pool)
        fake.sock.sendall(spoken(fake.session))
        fake.sock.close()
        with pytest.raises(StartupError, match="The rendezvous ended while the job was starting"):
            start.result()


def test_an_abort_in_the_middle_of_linking_leaves_nothing_behind(fake):
    """A peer that accepts but never answers is being dialled when the job ends."""
    silent = listen("127.0.0.1")
    offer = {"address": "127.0.0.1", "port": silent.getsockname()[1], "iface": "lo", "kind": "loopback"}
    with ThreadPoolExecutor(1) as pool:
        start = start_with(fake, pool)
        route = {"peer": 1, "dial": True, "addresses": [offer], "iface": "lo"}
        fake.send(PROBE, {"type": "link", "routes": [route]})
        assert eventually(lambda: _connects(silent))
        fake.send(ABORT)
        with pytest.raises(PeerLostError):
            start.result()
    silent.close()


def _connects(listener):
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


# ---- the control channel while the job runs --------------------------------------------------


@pytest.fixture
def channel(no_leaks, monkeypatch, request):
    """Of a rank without any host name, or of rank 1 among these hosts."""
    monkeypatch.setattr(control, "ROOT_CAUSE_S", 0.2)
    inside, outside = socket.socketpair()
    inside.setblocking(False)
    place = (1, request.param) if hasattr(request, "param") else ()
    channel = control.ControlChannel(inside, MessageReader(100_000), *place)
    yield channel, outside
    channel.leave("the test is over", True)
    outside.close()


def test_the_root_cause_of_the_rendezvous_counts(channel):
    channel, outside = channel
    outside.sendall(encode(ABORT))
    error = channel.report_lost(3, "allreduce", "connection reset")
    assert (str(error), error.rank, error.host) == ("rank 1 died young", 1, "there")
    again = channel.report_lost(3, "allreduce", "connection reset")
    assert again is not error
    assert str(again) == str(error)


def test_all_threads_that_wait_for_the_rendezvous_wake_at_the_end(channel):
    channel, outside = channel
    assert select.select([channel], [], [], 0.0)[0] == []
    outside.sendall(encode(ABORT))
    for _ in range(2):
        assert select.select([channel], [], [], 30.0)[0] == [channel]
        with pytest.raises(PeerLostError):
            channel.check()


@pytest.mark.parametrize("channel", [("desk", "jetson1")], indirect=True)
def test_the_own_view_names_hosts(channel):
    channel, outside = channel
    error = channel.report_lost(0, "barrier()", "connection reset")
    assert "rank 0 (desk) was lost while rank 1 (jetson1) was in barrier(): connection reset" in str(error)
    assert (error.rank, error.host) == (0, "desk")


def test_a_silent_rendezvous_leaves_the_own_view(channel):
    channel, outside = channel
    error = channel.report_lost(3, "allreduce(4 x int8)", "connection reset")
    assert isinstance(error, PeerLostError)
    assert error.rank == 3
    assert "rank 3 was lost while this rank was in allreduce(4 x int8): connection reset" in str(error)
    assert channel.open
    with pytest.raises(PeerLostError, match="rank 3 was lost"):
        channel.check()
    assert not channel._sock.getblocking(), "the channel was left in blocking mode"


@pytest.mark.parametrize("last_words", [b"", b"\0\0\0\1x", encode({"type": "echo", "rank": 1})[:-1] + b"?"])
def test_a_rendezvous_that_is_gone_or_mad_is_named(channel, last_words):
    channel, outside = channel
    channel.check()
    outside.sendall(last_words)
    outside.close()
    assert select.select([channel], [], [], 30.0)[0] == [channel]
    with pytest.raises(PeerLostError, match="The rendezvous of this job is gone"):
        channel.check()
    assert "The rendezvous of this job is gone" in str(channel.report_lost(1, "allreduce", "reset"))
