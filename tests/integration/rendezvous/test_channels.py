"""The three channels of a rank, made of its connections, and what is said when one of them becomes slow."""

from __future__ import annotations

import socket

import pytest

from ringcomm.config import Settings
from ringcomm.errors import StartupError
from ringcomm.group.view import Peer
from ringcomm.rendezvous.client import make_channels, paces_of
from ringcomm.rendezvous.control import ControlChannel
from ringcomm.transport.routes import Expected
from ringcomm.wire.auth import Purpose
from ringcomm.wire.messages import MAX_MESSAGE_BYTES, MessageReader
from ringcomm.wire.signing import session_of

PURPOSES = (Purpose.DIRECT, Purpose.BACKGROUND, Purpose.ENGINE_CONTROL)
SETTINGS = Settings(transport="tcp", measure=False)
PEERS = [Peer(0, "desk", 0, 0, 100), Peer(1, "jetson1", 1, 0, 101), Peer(2, "jetson1", 1, 1, 102)]
BETTER = Expected(1, 110.0, "wlan0", (("eth0", 100.0),))


@pytest.fixture
def connected(no_leaks):
    """The connections of rank 0 to rank 1, by purpose and peer; the other ends; and the control channel."""
    found, ends = {}, []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for purpose in PURPOSES:
            there = socket.create_connection(server.getsockname())
            here, _ = server.accept()
            here.setblocking(False)
            found[purpose] = {1: (here, session_of(bytes(32), False))}
            ends.append(there)
    inside, outside = socket.socketpair()
    inside.setblocking(False)
    control = ControlChannel(inside, MessageReader(MAX_MESSAGE_BYTES), 0, ["desk", "jetson1"])
    yield found, ends, control
    outside.close()  # so that its goodbye is not waited for
    control.leave("the test is over", True)
    for sock in (*ends, *(sock for links in found.values() for sock, _ in links.values())):
        sock.close()


def test_each_channel_has_its_own_links(connected):
    found, ends, control = connected
    channels = make_channels(0, 2, found, control, SETTINGS)
    for channel, there in zip((channels.direct, channels.background, channels.control), ends):
        channel.link(1).send([memoryview(b"x")])
        there.settimeout(30.0)
        assert there.recv(10) == b"x"
    channels.close()


def test_a_link_that_cannot_be_set_up_closes_all(connected):
    found, ends, control = connected
    found[Purpose.BACKGROUND][1][0].close()
    with pytest.raises(StartupError, match="links to the ranks of this host could not be set up: .*Bad file"):
        make_channels(0, 2, found, control, SETTINGS)
    assert all(sock.fileno() == -1 for links in found.values() for sock, _ in links.values())


def test_what_is_said_of_a_slow_link_names_the_network_to_use(connected):
    found, _, control = connected
    channels = make_channels(0, 2, found, control, SETTINGS)
    pace = paces_of(0, PEERS, [BETTER], channels)
    assert pace.look() == pace.look() == [], "nothing was sent, so nothing is known"
    text = pace.describe(BETTER, 2.5, "eth0")
    assert "rank 0 (desk) reaches rank 1 (jetson1) over wlan0 at 2.5 MB/s, although more waits" in text
    assert "when the job started, it was 110 MB/s, and 100 over eth0, which connects them, too" in text
    assert "Look at the cable, the switch and other traffic of wlan0" in text
    assert "--iface 'desk=!wlan0' (on desk: RINGCOMM_IFACE='!wlan0')" in text
    channels.close()
