"""Which peers are accepted into the mesh of links: the right rank of the right generation, and no other."""

from __future__ import annotations

import pytest

from ringcomm.rendezvous.links import LinkSetup
from ringcomm.transport.connect import Dial
from ringcomm.transport.kinds import LOOPBACK
from ringcomm.transport.nics import Interface
from ringcomm.transport.reactor import Reactor
from ringcomm.wire.auth import Claim, Purpose, job_digest
from tests.support.service import eventually

KEY, JOB = b"k" * 32, job_digest("job")
RIGHT = Claim(Purpose.DIRECT, JOB, generation=3, source=0, target=1)


@pytest.fixture
def mesh(no_leaks):
    """That of rank 1 of 2, in the fourth generation, waiting to be dialled."""
    told = []
    mesh = LinkSetup(Reactor(), [Interface("lo", "127.0.0.1", LOOPBACK, 0)], KEY, JOB, told.append)
    mesh.assign_rank(1, 3)
    mesh.link([{"peer": 0, "dial": False, "addresses": [], "iface": ""}], _Endless())
    yield mesh
    mesh.close()
    mesh.reactor.close()


class _Soon:
    def remaining_s(self):
        return 0.01


def test_once_it_is_closed_it_reports_nothing(no_leaks):
    """The rendezvous would take it for a report about the next view."""
    told = []
    mesh = LinkSetup(Reactor(), [Interface("lo", "127.0.0.1", LOOPBACK, 0)], KEY, JOB, told.append)
    mesh.assign_rank(1, 3)
    offer = {"address": "127.0.0.1", "port": 1}  # refuses
    mesh.link([{"peer": 0, "dial": True, "addresses": [offer], "iface": "lo"}], _Soon())
    mesh.close()
    for _ in range(20):
        mesh.reactor.run_once(0.02)
    mesh.reactor.close()
    assert told == []


class _Endless:
    def remaining_s(self):
        return 60.0


def dialled(mesh, claim):
    """Dial with this claim, and say whether the connection stays."""
    ends = []
    (offer,) = mesh.offers()
    Dial(mesh.reactor, (offer["address"], offer["port"]), KEY, claim, ends.append, 5.0)
    assert eventually(lambda: mesh.reactor.run_once(0.01) or bool(ends))
    sock = ends[0].sock
    sock.settimeout(5.0)
    for _ in range(3):
        mesh.reactor.run_once(0.01)
    said = b"".join(iter(lambda: sock.recv(1000), b"")) if not connected(mesh) else sock.recv(1000)
    sock.close()
    return said


def connected(mesh):
    return sorted(mesh._links)


def test_the_right_one_is_linked(mesh):
    assert b'"rank":1' in dialled(mesh, RIGHT)
    assert connected(mesh) == [(int(Purpose.DIRECT), 0)]


@pytest.mark.parametrize(
    "change",
    [
        {"generation": 2},
        {"generation": 4},
        {"target": 0},
        {"target": 2},
        {"source": 1},
        {"purpose": Purpose.CONTROL},
        {"purpose": 99},
    ],
    ids=str,
)
def test_others_of_the_same_job_are_sent_away(mesh, change):
    """They hold the key, and have come to the wrong door: an old start, or an address that two hosts have."""
    dialled(mesh, RIGHT._replace(**change))
    assert connected(mesh) == []
