"""Which address wins, from what was tried."""

from __future__ import annotations

import itertools

import pytest

from ringcomm.errors import ProtocolError
from ringcomm.transport.nics import VIRTUAL, WIRED, WIRELESS
from ringcomm.transport.routes import (
    Attempt,
    candidates,
    choose,
    wire_of,
)


def tried(address="10.0.0.2", local_iface="eth0", remote_iface="eth0", speed=None, why="", **more):
    names = local_iface + remote_iface
    kind = more.pop("kind", VIRTUAL if "docker" in names else WIRELESS if "wlan" in names else WIRED)
    values = {"source": 0, "target": 1, "port": 5000, "local": "10.0.0.1", **more}
    return Attempt(
        address=address, local_iface=local_iface, remote_iface=remote_iface, kind=kind, why=why,
        mb_per_s=speed, **values,
    )  # fmt: skip


SAME_ADDRESS = tried("172.17.0.1", "docker0", "docker0", why="rank 0 answered there, not rank 1")
OVERLAY = tried("172.20.0.2", "docker1", "docker1")
WIRE = tried("10.0.0.2", "eth0", "enp3s0")
WIFI = tried("192.168.0.2", "wlan0", "wlan0")
WIRE_V6 = tried("fd00::2", "eth0", "enp3s0")
WIRE_LOCAL = tried("fe80::2", "eth0", "enp3s0")
REFUSED = tried("10.9.0.2", why="connection refused")


SECOND_WIRE = tried("10.8.0.2", "eth1", "enp4s0")


def chosen(*attempts, speeds=()):
    """Return the address that wins, whatever the order of the reported attempts; None: measure (again).
    `speeds` are for each measurement those of the attempts' wires; None: it broke.
    """
    permutations = list(itertools.permutations(range(len(attempts))))
    results = set()
    for order in permutations if len(attempts) < 6 else [permutations[0], permutations[-1]]:
        wires = candidates([attempts[index] for index in order])
        if not wires:
            results.add(None)
            continue
        measured = [
            {wire_of(item): speed for item, speed in zip(attempts, each) if speed is not None}
            for each in speeds
        ]
        index = choose(wires, measured)
        results.add(None if index is None else wires[index].address)
    assert len(results) == 1
    return results.pop()


def test_the_docker_twin_never_wins():
    assert chosen(SAME_ADDRESS, WIRE) == WIRE.address
    assert chosen(SAME_ADDRESS, WIRE, speeds=[(9999.0, 0.1)] * 3) == WIRE.address
    assert chosen(SAME_ADDRESS, OVERLAY) == OVERLAY.address


@pytest.mark.parametrize(
    "attempts, order",
    [
        ([], []),
        ([SAME_ADDRESS, REFUSED], []),
        ([OVERLAY, WIFI, WIRE], [WIRE, WIFI, OVERLAY]),
        ([WIFI, WIRE, SAME_ADDRESS, REFUSED], [WIRE, WIFI]),
        ([WIRE_LOCAL, WIRE_V6, WIRE], [WIRE]),
        ([WIRE_LOCAL, WIRE_V6], [WIRE_V6]),
        ([SECOND_WIRE, WIRE, WIRE_V6], [WIRE, SECOND_WIRE]),
        ([tried("169.254.3.4"), SECOND_WIRE], [SECOND_WIRE, tried("169.254.3.4")]),
        ([OVERLAY, OVERLAY._replace(local_iface="docker2")],) * 2,
    ],
)
def test_one_of_each_wire_the_preferred_first(attempts, order):
    assert candidates(attempts) == order


@pytest.mark.parametrize("attempts", [(WIRE, WIFI), (WIRE, OVERLAY), (WIRE, SECOND_WIRE), (OVERLAY, WIFI)])
def test_a_choice_is_measured_first(attempts):
    assert chosen(*attempts) is None


@pytest.mark.parametrize(
    "attempts, speeds, winner",
    [
        # of one kind, nothing but two measurements that agree shows which is slow
        ((WIRE, SECOND_WIRE), [(100.0, 100.0)], None),
        ((WIRE, SECOND_WIRE), [(100.0, 2.5)], None),
        ((WIRE, WIFI, tried("192.168.7.2", "wlan1", "wlan1")), [(100.0, 2.5, 2.5)], WIRE),
        # equal, or nearly so: the fixed order
        ((WIRE, SECOND_WIRE), [(100.0, 100.0)] * 2, WIRE),
        ((WIRE, SECOND_WIRE), [(700.0, 9000.0)] * 2, WIRE),  # there it is the processor that is measured
        # faster: only if a second measurement says so
        ((WIRE, SECOND_WIRE), [(100.0, 161.0)], None),
        ((WIRE, SECOND_WIRE), [(100.0, 161.0)] * 2, SECOND_WIRE),
        ((WIRE, SECOND_WIRE), [(10.0, 100.0), (100.0, 100.0), (100.0, 90.0)], WIRE),
        # of another kind: only if it is much faster
        ((WIRE, WIFI), [(100.0, 399.0)], WIRE),
        ((WIRE, WIFI), [(100.0, 399.0)] * 2, WIRE),
        # both were fast, and the wire had no processor for moments: seen in one of 100 starts at load 10
        ((WIRE, WIFI), [(100.0, 1700.0)] * 2, WIRE),
        ((WIRE, WIFI), [(20.0, 81.0)], None),
        ((WIRE, WIFI), [(20.0, 81.0)] * 2, WIFI),
        ((WIRE, OVERLAY), [(2.5, 2000.0)] * 2, OVERLAY),
        ((WIFI, OVERLAY), [(2.5, 700.0)] * 2, OVERLAY),
        # a burst passed for once
        ((WIRE, WIFI), [(2.0, 900.0), (110.0, 2.5), (110.0, 2.5)], WIRE),
        # a virtual one does not make a slower real one look slow
        ((WIRE, SECOND_WIRE, OVERLAY), [(10.0, 100.0, 390.0)] * 2, SECOND_WIRE),
        # what breaks while it is measured
        ((WIRE, WIFI), [(None, 1.0)] * 2, WIFI),
        # three measurements, three results: the preferred of them
        ((WIRE, WIFI, OVERLAY), [(1.0, 1.0, 100.0), (1.0, 100.0, 1.0), (100.0, 1.0, 1.0)], WIRE),
    ],
)
def test_what_measurements_decide(attempts, speeds, winner):
    assert chosen(*attempts, speeds=speeds) == (None if winner is None else winner.address)


def test_either_direction_will_do():
    back = tried("10.0.0.1", "enp3s0", "eth0", source=1, target=0)
    assert wire_of(back) == wire_of(WIRE)
    assert candidates([WIRE._replace(why="no route to host"), back]) == [back]
    assert candidates([back, WIRE]) == [WIRE]


@pytest.mark.parametrize(
    "change",
    [
        {"source": "zero"},
        {"port": float("inf")},
        {"address": "not an address"},
        {"mb_per_s": "fast"},
        {"kind": "quick"},
    ],
)
def test_malformed_report(change):
    with pytest.raises(ProtocolError, match="malformed"):
        Attempt.from_json({**WIRE.to_json(), **change})
