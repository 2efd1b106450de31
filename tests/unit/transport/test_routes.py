"""Which address wins, from what was tried."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from ringcomm.errors import ProtocolError
from ringcomm.transport.nics import LOOPBACK, REAL, VIRTUAL
from ringcomm.transport.routes import (
    Attempt,
    choose_route,
    explain_no_route,
    is_virtual,
    worth_measuring,
)


def tried(address="10.0.0.2", local_iface="eth0", remote_iface="eth0", speed=None, why="", **more):
    virtual = more.pop("virtual", "docker" in local_iface + remote_iface)
    values = {"source": 0, "target": 1, "port": 5000, "local": "10.0.0.1", **more}
    return Attempt(
        address=address, local_iface=local_iface, remote_iface=remote_iface, virtual=virtual, why=why,
        mb_per_s=speed, **values,
    )  # fmt: skip


TWIN = tried("172.17.0.1", "docker0", "docker0", why="rank 0 answered there, not rank 1")
OVERLAY = tried("172.20.0.2", "docker1", "docker1")
WIRE = tried("10.0.0.2", "eth0", "enp3s0")
WIFI = tried("192.168.0.2", "wlan0", "wlan0")
WIRE_V6 = tried("fd00::2", "eth0", "enp3s0")
WIRE_LOCAL = tried("fe80::2", "eth0", "enp3s0")
REFUSED = tried("10.9.0.2", why="connection refused")


def chosen(*attempts):
    """The address that wins, whatever the order in which attempts were reported."""
    orders = list(itertools.permutations(attempts)) if len(attempts) < 6 else [attempts, attempts[::-1]]
    results = {choose_route(order) for order in orders}
    assert len(results) == 1
    (route,) = results
    return route.address if route else None


def test_nothing_works():
    assert chosen() is None
    assert chosen(TWIN, REFUSED) is None


def test_the_docker_twin_never_wins():
    assert chosen(TWIN, WIRE) == WIRE.address
    assert chosen(TWIN._replace(mb_per_s=9999.0), WIRE._replace(mb_per_s=0.1)) == WIRE.address
    assert chosen(TWIN, OVERLAY) == OVERLAY.address


def test_real_before_virtual_even_if_slower():
    assert chosen(OVERLAY._replace(mb_per_s=1000.0), WIRE._replace(mb_per_s=1.0)) == WIRE.address
    assert chosen(OVERLAY) == OVERLAY.address


def test_the_faster_of_real_ones():
    assert chosen(WIRE._replace(mb_per_s=10.0), WIFI._replace(mb_per_s=100.0)) == WIFI.address
    assert chosen(WIRE._replace(mb_per_s=100.0), WIFI._replace(mb_per_s=10.0)) == WIRE.address


def test_measured_before_not_measured():
    assert chosen(WIRE, WIFI._replace(mb_per_s=10.0)) == WIFI.address


def test_a_fast_virtual_one_does_not_make_real_ones_look_slow():
    fast = OVERLAY._replace(mb_per_s=5000.0)
    assert chosen(fast, WIFI._replace(mb_per_s=10.0), WIRE._replace(mb_per_s=100.0)) == WIRE.address


@pytest.mark.parametrize(
    "other, winner",
    [(75.0, WIRE.address), (74.0, WIFI.address), (80.0, WIRE.address), (100.0, WIRE.address)],
)
def test_nearly_as_fast_is_as_fast(other, winner):
    """Within the tie the fixed order decides (10.… before 192.…), not the noise of a measurement."""
    assert chosen(WIRE._replace(mb_per_s=other), WIFI._replace(mb_per_s=100.0)) == winner


def test_ipv4_then_routable_ipv6_then_link_local():
    assert chosen(WIRE_LOCAL, WIRE_V6, WIRE) == WIRE.address
    assert chosen(WIRE_LOCAL, WIRE_V6) == WIRE_V6.address
    assert chosen(WIRE_LOCAL) == WIRE_LOCAL.address
    link_local_v4 = tried("169.254.3.4", "eth0", "eth0")
    assert chosen(link_local_v4, WIRE_V6) == WIRE_V6.address


def test_faster_ipv6_before_slower_ipv4():
    assert chosen(WIFI._replace(mb_per_s=10.0), WIRE_V6._replace(mb_per_s=100.0)) == WIRE_V6.address


def test_either_direction_will_do():
    back = tried("10.0.0.1", "enp3s0", "eth0", source=1, target=0)
    assert chosen(WIRE._replace(why="no route to host"), back) == back.address
    assert choose_route([back, WIRE]).source == 0


@pytest.mark.parametrize("seed", range(50))
def test_order_of_reports_does_not_matter(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    attempts = [
        tried(
            address=rng.choice(["10.0.0.2", "10.0.0.3", "192.168.7.7", "fd00::2", "fe80::2"]),
            local_iface=rng.choice(["eth0", "eth1", "docker0"]),
            speed=rng.choice([None, 1.0, 70.0, 80.0, 100.0]),
            why=rng.choice(["", "", "timed out"]),
            source=rng.choice([0, 1]),
        )
        for _ in range(8)
    ]
    routes = set()
    for _ in range(20):
        rng.shuffle(attempts)
        route = choose_route(attempts)
        routes.add(route and (route.source, route.address))
    assert len(routes) == 1


# ---- measuring -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attempts, measured",
    [
        ([], []),
        ([TWIN, REFUSED], []),
        ([WIRE], []),
        ([WIRE, TWIN, REFUSED, OVERLAY], []),
        ([WIRE, WIFI], [WIRE, WIFI]),
        ([WIRE, OVERLAY, WIFI], [WIRE, WIFI]),
        ([WIRE, WIRE_V6, WIRE_LOCAL], []),
        ([WIRE_V6, WIRE, WIRE_LOCAL, WIFI], [WIRE, WIFI]),
        (
            [OVERLAY, OVERLAY._replace(local_iface="docker2")],
            [OVERLAY, OVERLAY._replace(local_iface="docker2")],
        ),
    ],
)
def test_only_a_real_choice_is_measured(attempts, measured):
    assert worth_measuring(attempts) == measured


@pytest.mark.parametrize(
    "local, remote, virtual",
    [
        (REAL, REAL, False),
        (REAL, VIRTUAL, True),
        (VIRTUAL, REAL, True),
        (LOOPBACK, LOOPBACK, False),
        ("", "", False),
    ],
)
def test_virtual_if_either_end_is(local, remote, virtual):
    assert is_virtual(local, remote) is virtual


# ---- reports ---------------------------------------------------------------------------------


@pytest.mark.parametrize("attempt", [WIRE, TWIN, WIFI._replace(mb_per_s=12.5), WIRE_LOCAL])
def test_reports_travel_as_json(attempt):
    assert Attempt.from_json(json.loads(json.dumps(attempt.to_json()))) == attempt


@pytest.mark.parametrize("field", Attempt._fields)
def test_incomplete_report(field):
    data = {name: value for name, value in WIRE.to_json().items() if name != field}
    with pytest.raises(ProtocolError, match="malformed"):
        Attempt.from_json(data)


@pytest.mark.parametrize(
    "change",
    [
        {"source": "zero"},
        {"target": None},
        {"port": float("inf")},
        {"port": float("nan")},
        {"address": "not an address"},
        {"address": 5},
        {"mb_per_s": "fast"},
        {"mb_per_s": []},
    ],
)
def test_malformed_report(change):
    with pytest.raises(ProtocolError, match="malformed"):
        Attempt.from_json({**WIRE.to_json(), **change})


@pytest.mark.parametrize("data", [None, 1, "text", [], [1, 2]])
def test_report_that_is_no_object(data):
    with pytest.raises(ProtocolError, match="malformed"):
        Attempt.from_json(data)


def test_explanation_lists_every_attempt():
    text = explain_no_route(
        {0: "head", 1: "jetson1"}, [TWIN, REFUSED, tried(source=1, target=0, why="timed out")]
    )
    assert text.splitlines() == [
        "  head -> jetson1 at 172.17.0.1 (docker0): rank 0 answered there, not rank 1",
        "  head -> jetson1 at 10.9.0.2 (eth0): connection refused",
        "  jetson1 -> head at 10.0.0.2 (eth0): timed out",
    ]


def test_explanation_when_nothing_could_be_tried():
    assert "offered no address" in explain_no_route({}, [])
    assert "rank 0 -> rank 1" in explain_no_route({}, [REFUSED])
