"""Which way ranks reach each other, from what they report and measure: events and what they lead to."""

from __future__ import annotations

import itertools

import pytest

from ringcomm.errors import ProtocolError
from ringcomm.rendezvous.epoch import Phase
from ringcomm.wire.auth import Claim, Purpose
from tests.unit.rendezvous.simulated import IFACES, Job, attempt, offer, seats_of, speed, three_hosts

# ---- routes ----------------------------------------------------------------------------------

LEADERS = {0: "10.0.0.0", 1: "10.0.0.1", 3: "10.0.0.2"}
"""The address of the first rank of each host."""


def report_all(job, why=""):
    for source in LEADERS:
        job.probed(source, *[attempt(source, t, LEADERS[t], why) for t in LEADERS if t != source])


def routes_sent(job, connection):
    (message,) = [message for message in job.told[connection] if message["type"] == "link"]
    return {
        route["peer"]: (route["dial"], [item["address"] for item in route["addresses"]])
        for route in message["routes"]
    }


def test_exactly_one_end_of_each_pair_dials():
    job = three_hosts()
    report_all(job)
    routes = {rank: routes_sent(job, rank) for rank in range(4)}
    for one, other in itertools.combinations(range(4), 2):
        assert routes[one][other][0] != routes[other][one][0]
        dialler, target = (one, other) if routes[one][other][0] else (other, one)
        assert routes[dialler][target][1], "a rank that dials must get an address"
    assert routes[2][1] == (True, ["127.0.0.1", "10.0.0.1"])

# ---- measuring -------------------------------------------------------------------------------


def wires(source, target, *nets):
    """A rank has reached another one by several wires; the addresses end in the number of the rank."""
    return [
        attempt(
            source, target, f"{net}.0.{target}", local_iface=IFACES[net], remote_iface=IFACES[net],
            kind="wireless" if net == "10.3" else "wired",
        )
        for net in nets
    ]  # fmt: skip


def many_hosts(count):
    job = Job(count, seats_of(*[1] * count))
    for rank in range(count):
        offers = [
            offer(f"10.{net}.0.{rank}", iface) for net, iface in ((1, "eth0"), (2, "eth1"), (3, "wlan0"))
        ]
        job.join_seat(rank, rank, addresses=offers)
    return job


def asked(job, rank):
    """What a rank is to measure, of the last message: by rank, the addresses."""
    message = job.told[rank][-1]
    assert message["type"] == "measure", message
    return {pair["rank"]: [wire["address"] for wire in pair["wires"]] for pair in message["pairs"]}


def measuring(nets=("10.1", "10.2")):
    """Two hosts that two wires connect, and that have been asked to measure them."""
    job = many_hosts(2)
    for source in (0, 1):
        job.probed(source, *wires(source, 1 - source, *nets))
    return job


def test_one_end_measures_where_there_is_a_choice():
    job = measuring()
    assert job.state.phase is Phase.PROBING
    assert asked(job, 0) == {1: ["10.1.0.1", "10.2.0.1"]}
    assert "measure" not in job.kinds(1)
    for _ in range(2):
        assert job.state.phase is Phase.PROBING
        job.measured(0, speed(1, "10.1.0.1", 110.0), speed(1, "10.2.0.1", 2.5))
    assert routes_sent(job, 0) == {1: (True, ["10.1.0.1"])}


def test_what_overrules_the_order_is_measured_again():
    job = measuring()
    for _ in range(2):
        assert asked(job, 0) == {1: ["10.1.0.1", "10.2.0.1"]}
        job.measured(0, speed(1, "10.1.0.1", 2.5), speed(1, "10.2.0.1", 110.0))
    assert routes_sent(job, 0) == {1: (True, ["10.2.0.1"])}
    assert job.kinds(0).count("measure") == 2


def test_hosts_take_turns_so_that_no_measurement_disturbs_another():
    job = many_hosts(4)
    for source in range(4):
        job.probed(source, *[a for t in range(4) if t != source for a in wires(source, t, "10.1", "10.3")])
    done = []
    while job.state.phase is Phase.PROBING:
        turn = {rank: asked(job, rank) for rank in range(4) if job.told[rank][-1]["type"] == "measure"}
        pairs = [(rank, target) for rank, targets in turn.items() for target in targets]
        pairs = [pair for pair in pairs if pair not in done]
        hosts = [host for pair in pairs for host in pair]
        assert pairs and len(set(hosts)) == len(hosts)
        done += pairs
        for rank, target in pairs:
            job.measured(rank, *[speed(target, f"{net}.0.{target}", 100.0) for net in ("10.1", "10.3")])
    assert sorted(done) == list(itertools.combinations(range(4), 2))
    assert job.state.phase is Phase.LINKING


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_an_impossible_speed_is_a_breach(value):
    job = measuring()
    with pytest.raises(ProtocolError, match="measured speed"):
        job.measured(0, speed(1, "10.1.0.1", value))

# ---- no way ----------------------------------------------------------------------------------


def test_no_route_lists_what_was_tried():
    job = three_hosts()
    report_all(job, "connection refused")
    assert set(job.aborts()) == {0, 1, 2, 3}
    assert job.root_cause()["kind"] == "no_route"
    assert "host0 and host1 cannot reach each other" in job.root_cause()["text"]
    assert "host0 -> host1 at 10.0.0.1 (eth0): connection refused" in job.root_cause()["text"]
    assert "host1 -> host0 at 10.0.0.0 (eth0): connection refused" in job.root_cause()["text"]


def in_vain(job, rank, why="no answer within 3 s", too_slow=True, **more):
    """The first rank of a host has reached no other host."""
    others = [other for other in LEADERS if other != rank]
    more["too_slow"] = too_slow
    job.probed(rank, *(attempt(rank, other, LEADERS[other], why, **more) for other in others))


def test_hosts_that_cannot_reach_each_other_are_relayed():
    job = three_hosts(("desk", 3))
    job.probed(0, attempt(0, 1, LEADERS[1]), attempt(0, 3, LEADERS[3], "no answer", too_slow=True, local=""))
    job.probed(1, attempt(1, 0, LEADERS[0]), attempt(1, 3, LEADERS[3], "connection refused"))
    in_vain(job, 3, local="")
    text = "host0 and host2, host1 and host2 cannot reach each other: relayed over desk"
    assert job.notice("warning").text == text
    (message,) = [message for message in job.told[3] if message["type"] == "link"]
    assert all(route["relayed"] and not route["dial"] for route in message["routes"])
    (message,) = [message for message in job.told[2] if message["type"] == "link"]
    assert [(route["dial"], route.get("relayed")) for route in message["routes"]] == [
        (False, False), (True, False), (True, True)
    ]  # fmt: skip
    epoch = job.state.epoch
    link = Claim(Purpose.DIRECT, b"", epoch.generation, 2, 3)
    others = [{"target": 0}, {"target": 1}, {"target": 4}, {"source": -1}, {"generation": 99}]
    assert epoch.relays(link) and not any(epoch.relays(link._replace(**other)) for other in others)
    for rank in range(4):
        peers = [{"iface": "eth0", "local": f"10.0.0.{rank}", "peers": [[0, 3]]}]
        job.linked(rank, *peers)
    assert not epoch.relays(link), "all links are made"
    lines = job.notice("started").text.splitlines()
    assert [line.endswith("relayed over desk") for line in lines[1:]] == [
        False, False, True, False, True, True
    ]  # fmt: skip


def test_more_links_than_a_host_can_relay_are_an_error():
    job = three_hosts(("desk", 2))
    job.probed(0, attempt(0, 1, LEADERS[1]))
    job.probed(1)
    job.probed(3)
    assert job.root_cause()["kind"] == "no_route"
    assert "possible for 2 pairs of ranks, not for 3. Raise the limit of open" in job.root_cause()["text"]


@pytest.mark.parametrize("peers", [[[1, 4]], [[-1, 0]], [[2, 1]], [[1]], [1], [["1", "2"]], [[True, 2]]])
def test_a_link_to_a_rank_that_does_not_exist_is_a_breach(peers):
    job = three_hosts()
    report_all(job)
    with pytest.raises(ProtocolError, match="ranks that do not exist"):
        job.linked(0, {"iface": "eth0", "local": "10.0.0.0", "peers": peers})
