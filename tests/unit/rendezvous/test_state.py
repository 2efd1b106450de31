"""The rendezvous' life, as lists of events and what they lead to."""

from __future__ import annotations

import itertools
import random

import pytest

from ringcomm.errors import ProtocolError
from ringcomm.rendezvous.actions import Drop, Notice, Send, Timer
from ringcomm.rendezvous.link_table import MOST_ROWS, ranges_of
from ringcomm.rendezvous.root_cause import EVIDENCE_S, SETTLE_S, VANISHED
from ringcomm.rendezvous.state import Phase
from ringcomm.wire.messages import MAX_MESSAGE_BYTES, encode
from tests.unit.rendezvous.simulated import VERSION, Job, attempt, join_message, offer, seats_of

# ---- joining ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_any_order_of_joining_gives_the_same_ranks(order):
    planned, free = Job(4, seats_of(2, 2)), Job(4)
    for connection in order:
        planned.join_seat(connection, connection)
        free.join(connection, hostname="ab"[connection // 2], pid=connection)
    assert planned.ranks() == free.ranks() == {0: 0, 1: 1, 2: 2, 3: 3}


def test_the_assignment_names_all_ranks_to_all_ranks():
    job = Job(3, seats_of(2, 1))
    for rank in range(3):
        job.join_seat(10 + rank, rank, addresses=[offer(f"10.0.0.{rank}")])
    assert job.state.phase is Phase.PROBING
    members = [
        {"rank": 0, "host": "host0", "host_index": 0, "local_rank": 0, "pid": 100},
        {"rank": 1, "host": "host0", "host_index": 0, "local_rank": 1, "pid": 101},
        {"rank": 2, "host": "host1", "host_index": 1, "local_rank": 0, "pid": 102},
    ]
    targets = {
        10: [{"rank": 2, "addresses": [offer("10.0.0.2")], "machine": ""}],
        11: [],
        12: [{"rank": 0, "addresses": [offer("10.0.0.0")], "machine": ""}],
    }
    for connection in (10, 11, 12):
        assert job.told[connection] == [
            {
                "type": "probe",
                "rank": connection - 10,
                "generation": 0,
                "members": members,
                "targets": targets[connection],
            }
        ]


def test_the_first_join_starts_the_clock_and_all_are_announced():
    job = Job(3)
    assert job.join(0) == [Notice("joined", "1 of 3 ranks have joined (newest: host0)"), Timer(60.0)]
    assert job.join(1) == [Notice("joined", "2 of 3 ranks have joined (newest: host0)")]


@pytest.mark.parametrize(
    "seats, message, words",
    [
        (
            (3,),
            {"slot": (0, 0), "hostname": "x", "pid": 5},
            "place 0 on host0 is already taken by process 100 on host0",
        ),
        ((3,), {"hostname": "x"}, "x (process 100) was not started by this job's launcher"),
        ((3,), {"slot": (0, 7)}, "which was not planned"),
        ((3,), {"slot": (0, 1), "version": "9.9"}, f"has ringcomm 9.9, but this job runs {VERSION}"),
        ((), {"version": "9.9"}, f"has ringcomm 9.9, but this job runs {VERSION}"),
        ((), {"rank": 5}, "asks for rank 5"),
    ],
)
def test_refused_on_both_sides_and_the_others_go_on(seats, message, words):
    job = Job(3, seats_of(*seats))
    join = job.join_seat if seats else (lambda connection, rank: job.join(connection, pid=rank))
    join(0, 0)
    job.join(9, **message)
    assert job.kinds(9) == ["refused"]
    assert words in job.told[9][0]["reason"]
    assert words in job.notice("refused").text
    assert job.dropped == [9]
    job.hang_up(9)
    join(1, 1)
    join(2, 2)
    job.link_all([0, 1, 2])
    assert job.kinds(9) == ["refused"]


@pytest.mark.parametrize("phase", ["probing", "running"])
def test_latecomer(phase):
    job = Job(2)
    job.join(0, pid=0)
    job.join(1, pid=1)
    if phase == "running":
        job.link_all([0, 1])
    before = {connection: list(messages) for connection, messages in job.told.items()}
    job.join(2, hostname="late", pid=2)
    assert "the job's 2 ranks are complete; late came too late" in job.told[2][0]["reason"]
    assert job.dropped == [2]
    assert {0: job.told[0], 1: job.told[1]} == before


def test_joining_twice_on_one_connection_is_a_breach():
    job = Job(2, seats_of(2))
    job.join_seat(0, 0)
    with pytest.raises(ProtocolError, match="only once"):
        job.join_seat(0, 1)
    job.join_seat(1, 1)
    with pytest.raises(ProtocolError, match="only once"):
        job.join_seat(0, 0)


def test_a_rank_that_leaves_while_waiting_makes_room():
    job = Job(2, seats_of(2))
    job.join_seat(0, 0)
    job.hang_up(0)
    job.join_seat(1, 0, pid=777)
    job.join_seat(2, 1)
    assert job.ranks() == {1: 0, 2: 1}
    assert job.told[0] == []


@pytest.mark.parametrize("end", ["hang_up", "leave"])
def test_the_clock_starts_anew_when_no_rank_waits_any_more(end):
    job = Job(2, start_timeout_s=10.0)
    job.join(0)
    job.pass_time(9.0)
    getattr(job, end)(0)
    job.pass_time(2.0)
    assert job.notices[-1].kind == "joined"
    job.join(1)
    job.pass_time(9.0)
    assert not job.aborts()
    job.pass_time(1.0)
    assert list(job.aborts()) == [1]


def test_two_ask_for_the_same_rank():
    job = Job(2)
    job.join(0, rank=1, hostname="a")
    job.join(1, rank=1, hostname="b")
    assert set(job.aborts()) == {0, 1}
    assert job.root_cause()["kind"] == "startup"
    assert "two processes ask for rank 1" in job.root_cause()["text"]


# ---- missing ranks ---------------------------------------------------------------------------


def test_start_timeout_names_the_missing():
    job = Job(3, seats_of(1, 2), start_timeout_s=30.0)
    job.join_seat(5, 1)
    job.pass_time(29.9)
    assert not job.aborts()
    job.pass_time(0.1)
    assert set(job.aborts()) == {5}
    assert (job.root_cause()["kind"], job.root_cause()["rank"]) == ("timeout", 0)
    assert "Only 1 of 3 ranks called ringcomm.init() within 30 s" in job.root_cause()["text"]
    assert "Missing: rank 0 (host0), rank 2 (host1)" in job.root_cause()["text"]
    assert job.notice("failed").culprit == 0


def test_start_timeout_without_a_plan_names_those_present():
    job = Job(3, start_timeout_s=30.0)
    job.join(5, hostname="pc", pid=7)
    job.pass_time(30.0)
    assert "Missing: 2 more; these have joined: pc (process 7)" in job.root_cause()["text"]
    assert job.root_cause()["rank"] is None


def test_no_timeout_once_all_are_here():
    job = Job(2, start_timeout_s=30.0)
    job.run_on_one_host()
    job.pass_time(1000.0)
    assert not job.aborts()


def test_process_that_ends_before_init_is_named_at_once():
    job = Job(3, seats_of(1, 2))
    job.join_seat(0, 0)
    job.exit(2, "exit code 0", ok=True)
    assert (job.root_cause()["kind"], job.root_cause()["rank"]) == ("startup", 2)
    assert (
        "rank 2 (host1) ended (exit code 0) before it called ringcomm.init(), while 1 of 3 ranks were "
        "waiting for it" in job.root_cause()["text"]
    )


def test_process_that_ended_before_the_first_came_is_named_when_the_first_comes():
    job = Job(2, seats_of(2))
    job.exit(1, "killed by SIGSEGV")
    assert not job.aborts()
    job.join_seat(0, 0)
    assert set(job.aborts()) == {0}
    assert "rank 1 (host0) ended (killed by SIGSEGV)" in job.root_cause()["text"]


# ---- routes ----------------------------------------------------------------------------------


def three_hosts():
    """Ranks 0 to 3 on three hosts, 10.0.0.0 to 10.0.0.2; rank 2 is the second on its host."""
    job = Job(4, seats_of(1, 2, 1))
    for rank, host in enumerate((0, 1, 1, 2)):
        job.join_seat(rank, rank, addresses=[offer(f"10.0.0.{host}"), offer("127.0.0.1", "lo", "loopback")])
    return job


LEADERS = {0: "10.0.0.0", 1: "10.0.0.1", 3: "10.0.0.2"}
"""The address of the first rank of each host."""


def report_all(job, why=""):
    for source in LEADERS:
        job.probed(source, *[attempt(source, t, LEADERS[t], why) for t in LEADERS if t != source])


def test_probing_ends_when_the_first_rank_of_each_host_has_reported():
    job = three_hosts()
    job.probed(0, attempt(0, 1, "10.0.0.1"), attempt(0, 3, "10.0.0.2"))
    job.probed(2)  # not the first rank of its host: not asked
    job.probed(1, attempt(1, 0, "10.0.0.0"), attempt(1, 3, "10.0.0.2"))
    assert job.state.phase is Phase.PROBING
    job.probed(3, attempt(3, 0, "10.0.0.0"), attempt(3, 1, "10.0.0.1"))
    assert job.state.phase is Phase.LINKING


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


def test_the_end_that_got_through_dials():
    job = Job(2, seats_of(1, 1))
    for rank in range(2):
        job.join_seat(rank, rank, addresses=[offer(f"10.0.0.{rank}")])
    job.probed(0, attempt(0, 1, "10.0.0.1", "no route to host"))
    job.probed(1, attempt(1, 0, "10.0.0.0"))
    assert routes_sent(job, 1) == {0: (True, ["10.0.0.0"])}
    assert routes_sent(job, 0)[1][0] is False


def test_a_report_about_another_rank_does_not_count():
    """A rank reports its own attempts, and not those of another."""
    job = Job(2, seats_of(1, 1))
    for rank in range(2):
        job.join_seat(rank, rank, addresses=[offer(f"10.0.0.{rank}")])
    job.probed(0, attempt(1, 1, "10.0.0.1"), attempt(99, 98, "10.0.0.1"))
    job.probed(1)
    assert routes_sent(job, 0) == {1: (True, ["10.0.0.1"])}


# ---- measuring -------------------------------------------------------------------------------


IFACES = {"10.1": "eth0", "10.2": "eth1", "10.3": "wlan0"}


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


def speed(rank, address, mb_per_s, iface=None):
    return {
        "rank": rank, "address": address, "iface": iface or IFACES[address[:4]], "mb_per_s": mb_per_s
    }  # fmt: skip


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


def test_one_measurement_will_do_where_kinds_differ():
    job = measuring(("10.1", "10.3"))
    job.measured(0, speed(1, "10.1.0.1", 110.0), speed(1, "10.3.0.1", 2.5))
    assert routes_sent(job, 0) == {1: (True, ["10.1.0.1"])}


def test_what_overrules_the_order_is_measured_again():
    job = measuring()
    for _ in range(2):
        assert asked(job, 0) == {1: ["10.1.0.1", "10.2.0.1"]}
        job.measured(0, speed(1, "10.1.0.1", 2.5), speed(1, "10.2.0.1", 110.0))
    assert routes_sent(job, 0) == {1: (True, ["10.2.0.1"])}
    assert job.kinds(0).count("measure") == 2


def test_each_end_measures_what_only_it_can_dial():
    job = many_hosts(2)
    job.probed(0, *wires(0, 1, "10.1"))
    job.probed(1, *wires(1, 0, "10.2"))
    for _ in range(2):
        assert asked(job, 0) == {1: ["10.1.0.1"]}
        assert asked(job, 1) == {0: ["10.2.0.0"]}
        job.measured(0, speed(1, "10.1.0.1", 110.0))
        assert job.state.phase is Phase.PROBING
        job.measured(1, speed(0, "10.2.0.0", 2.5))
    assert routes_sent(job, 0) == {1: (True, ["10.1.0.1"])}


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


def test_many_hosts_do_not_take_turns():
    job = many_hosts(13)
    for source in range(13):
        job.probed(source, *[a for t in range(13) if t != source for a in wires(source, t, "10.1", "10.3")])
    assert {rank: len(asked(job, rank)) for rank in range(12)} == {rank: 12 - rank for rank in range(12)}
    for rank in range(12):
        found = [(t, f"{net}.0.{t}") for t in range(rank + 1, 13) for net in ("10.1", "10.3")]
        job.measured(rank, *[speed(target, address, 100.0) for target, address in found])
    assert job.state.phase is Phase.LINKING


def test_a_wire_that_breaks_while_it_is_measured_is_not_used():
    job = measuring()
    for _ in range(2):
        job.measured(0, speed(1, "10.2.0.1", 1.0))
    assert routes_sent(job, 0) == {1: (True, ["10.2.0.1"])}


def test_the_table_shows_what_was_measured():
    job = measuring()
    for seen in (110.0, 120.0):  # the lower one counts
        job.measured(0, speed(1, "10.1.0.1", seen), speed(1, "10.2.0.1", 2.5))
    for rank in range(2):
        job.linked(rank, {"iface": "eth0", "local": f"10.1.0.{rank}", "peers": [[1 - rank, 1 - rank]]})
    assert "110 MB/s" in job.told[0][-1]["table"]


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_an_impossible_speed_is_a_breach(value):
    job = measuring()
    with pytest.raises(ProtocolError, match="measured speed"):
        job.measured(0, speed(1, "10.1.0.1", value))


def test_speeds_that_were_not_requested_do_not_count():
    job = measuring()
    job.measured(1, speed(0, "10.1.0.0", 1.0))
    job.measured(7)
    assert job.state.phase is Phase.PROBING
    for _ in range(2):
        job.measured(
            0, speed(1, "10.1.0.1", 110.0), speed(1, "10.2.0.1", 2.5), speed(1, "10.9.0.1", 900.0, "eth9")
        )
    assert routes_sent(job, 0) == {1: (True, ["10.1.0.1"])}
    job.measured(0, speed(1, "10.1.0.1", 1.0))
    assert job.state.phase is Phase.LINKING


# ---- no way ----------------------------------------------------------------------------------


def test_no_route_lists_what_was_tried():
    job = three_hosts()
    report_all(job, "connection refused")
    assert set(job.aborts()) == {0, 1, 2, 3}
    assert job.root_cause()["kind"] == "no_route"
    assert "host0 and host1 cannot reach each other" in job.root_cause()["text"]
    assert "host0 -> host1 at 10.0.0.1 (eth0): connection refused" in job.root_cause()["text"]
    assert "host1 -> host0 at 10.0.0.0 (eth0): connection refused" in job.root_cause()["text"]


def in_vain(job, rank, why="no answer within 3 s", too_slow=True):
    """The first rank of a host has reached no other host."""
    others = [other for other in LEADERS if other != rank]
    job.probed(rank, *(attempt(rank, other, LEADERS[other], why, too_slow=too_slow) for other in others))


def test_hosts_that_took_too_long_to_answer_are_probed_once_more():
    job = three_hosts()
    job.probed(0, attempt(0, 1, LEADERS[1]), attempt(0, 3, LEADERS[3], "no answer", too_slow=True))
    job.probed(1, attempt(1, 0, LEADERS[0]), attempt(1, 3, LEADERS[3], "connection refused"))
    in_vain(job, 3)
    assert job.state.phase is Phase.PROBING
    again = {rank: job.told[rank][-1] for rank in range(4) if "probe_again" in job.kinds(rank)}
    targets = {
        rank: [(item["rank"], [offered["address"] for offered in item["addresses"]]) for item in m["targets"]]
        for rank, m in again.items()
    }
    assert targets == {0: [(3, [LEADERS[3]])], 3: [(0, [LEADERS[0]]), (1, [LEADERS[1]])]}
    in_vain(job, 3)
    assert job.state.phase is Phase.PROBING  # rank 0 has not answered
    job.probed(0, attempt(0, 3, LEADERS[3]))
    assert "host1 and host2 cannot reach each other" in job.root_cause()["text"]


def test_a_second_round_that_succeeds_leads_to_links():
    job = three_hosts()
    for rank in LEADERS:
        in_vain(job, rank)
    report_all(job)
    assert job.state.phase is Phase.LINKING


def test_a_second_round_that_takes_too_long_is_the_last():
    job = three_hosts()
    for rank in (0, 1, 3, 0, 1, 3):
        in_vain(job, rank)
    assert job.root_cause()["text"].count("host0 -> host1 at 10.0.0.1") == 1


def test_hosts_that_refuse_are_not_probed_again():
    job = three_hosts()
    for rank in LEADERS:
        in_vain(job, rank, "connection refused", too_slow=False)
    assert len(job.aborts()) == 4
    assert not any("probe_again" in job.kinds(rank) for rank in range(4))


def test_malformed_report_is_a_breach():
    job = three_hosts()
    with pytest.raises(ProtocolError):
        job.probed(0, {"source": 0})


def test_all_linked_starts_the_job_with_a_table():
    job = three_hosts()
    report_all(job)
    for rank in range(4):
        peers = ranges_of(peer for peer in range(4) if peer != rank)
        links = [{"iface": f"eth{rank}", "local": f"10.0.0.{rank}", "peers": peers}]
        assert not any(kind == "go" for kind in job.kinds(rank))
        job.linked(rank, *links)
    assert job.state.phase is Phase.RUNNING
    assert all(job.kinds(rank) == ["probe", "link", "go"] for rank in range(4))
    assert "rank 0 (host0)  eth0 10.0.0.0  <->  eth1 10.0.0.1  rank 1 (host1)" in job.told[0][-1]["table"]
    assert len(job.notice("started").detail["links"]) == 6


@pytest.mark.parametrize("peers", [[[1, 4]], [[-1, 0]], [[2, 1]], [[1]], [1], [["1", "2"]], [[True, 2]]])
def test_a_link_to_a_rank_that_does_not_exist_is_a_breach(peers):
    job = three_hosts()
    report_all(job)
    with pytest.raises(ProtocolError, match="ranks that do not exist"):
        job.linked(0, {"iface": "eth0", "local": "10.0.0.0", "peers": peers})


def test_a_rank_that_cannot_connect_ends_it():
    job = three_hosts()
    report_all(job)
    job.unlinked(2, "rank 3 did not answer (10.0.0.3: timed out)", peer=3)
    job.pass_time(1.0)
    assert set(job.aborts()) == {0, 1, 2, 3}
    assert (
        job.root_cause()["text"]
        == "rank 2 (host1) could not connect to all ranks: rank 3 did not answer (10.0.0.3: timed out)."
    )


def test_one_host_needs_no_probing():
    job = Job(3)
    for connection in range(3):
        job.join(connection, pid=connection)
    assert all(job.kinds(connection) == ["probe", "link"] for connection in range(3))


# ---- losing a rank ---------------------------------------------------------------------------


@pytest.mark.parametrize("seats", [(), (3,)])
def test_vanished_rank_is_named_to_all_after_a_moment(seats):
    job = Job(3, seats_of(*seats))
    job.run_on_one_host()
    job.hang_up(1)
    assert not job.aborts()
    job.pass_time(EVIDENCE_S)
    assert job.root_cause()["rank"] == 1
    assert VANISHED in job.root_cause()["text"]
    assert {0, 2} <= set(job.aborts())
    failed = job.notice("failed")
    assert (failed.culprit, failed.detail) == (1, {"kind": "lost", "leaving": False})


def test_how_its_process_ended_is_known_a_little_later():
    job = Job(3, seats_of(3))
    job.run_on_one_host()
    job.hang_up(1)
    job.lost(0, peer=1)
    job.pass_time(0.1)
    job.exit(1, "killed by SIGKILL")
    assert "rank 1 (host0) was lost while others were in allreduce" in job.root_cause()["text"]
    assert "killed by SIGKILL" in job.root_cause()["text"]
    assert VANISHED not in job.root_cause()["text"]


def test_how_its_process_ended_is_known_before():
    job = Job(2, seats_of(2))
    job.run_on_one_host()
    job.exit(1, "exit code 3")
    assert job.root_cause()["text"] == "rank 1 (host0) was lost: exit code 3."
    job.hang_up(1)
    job.pass_time(10.0)
    assert len(job.aborts()) == 2


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_chain_of_losses(order):
    job = Job(4, seats_of(1, 1, 1, 1))
    for rank in range(4):
        job.join_seat(rank, rank)
    report = {
        source: [attempt(source, t, "10.0.0.9") for t in range(4) if t != source] for source in range(4)
    }
    for rank in range(4):
        job.probed(rank, *report[rank])
    job.link_all(range(4))
    for reporter in order:
        job.lost(reporter, peer=reporter + 1)
        job.pass_time(0.05)
    job.pass_time(EVIDENCE_S)
    assert job.root_cause()["rank"] == 3


def test_stalled_rank():
    job = Job(3)
    job.run_on_one_host()
    job.lost(0, peer=2, kind="stalled", why="not a byte for 5 s, 100 bytes into it")
    job.pass_time(SETTLE_S)
    assert (job.root_cause()["kind"], job.root_cause()["rank"]) == ("stalled", 2)
    assert "not a byte for 5 s" in job.root_cause()["text"]


def test_a_rank_that_finishes_while_others_need_it():
    job = Job(3)
    job.run_on_one_host()
    job.leave(2, "its program ended")
    assert not job.aborts()
    job.lost(0, peer=2)
    job.pass_time(SETTLE_S)
    assert set(job.aborts()) >= {0, 1}
    assert "has finished (its program ended)" in job.root_cause()["text"]


def test_a_rank_that_leaves_with_an_error_ends_it_for_all_at_once():
    job = Job(3)
    job.run_on_one_host()
    job.leave(2, "uncaught ValueError: boom", ok=False)
    assert job.root_cause()["text"] == "rank 2 (host0) was lost: uncaught ValueError: boom."


def test_a_rank_that_leaves_during_the_start_ends_it_for_all():
    job = three_hosts()
    job.leave(2, "it was interrupted")
    assert job.root_cause()["rank"] == 2
    assert set(job.aborts()) >= {0, 1, 3}


class TestInterrupted:
    """A rank has left a collective half-way and says so; its program may go on."""

    DOING = "allreduce(8 x float32), call number 4, 96 bytes into it"

    def interrupted(self):
        job = Job(3)
        job.run_on_one_host()
        message = {"type": "interrupted", "doing": self.DOING, "why": "KeyboardInterrupt"}
        job.take(job.state.interrupted(1, message, job.now_s))
        assert not job.aborts()
        return job

    def test_it_is_named_even_if_others_lose_each_other_because_of_it(self):
        job = self.interrupted()
        job.lost(0, peer=2, kind="still")
        for connection in range(3):
            job.state.answered(connection, {"heard": [], "silent": []}, job.now_s)
        job.pass_time(SETTLE_S)
        root_cause = job.root_cause()
        assert (root_cause["kind"], root_cause["rank"]) == ("lost", 1)
        assert root_cause["text"] == (
            f"rank 1 (host0) was interrupted (KeyboardInterrupt) in {self.DOING} and left it "
            "unfinished, so the job cannot go on."
        )

    def test_one_that_ends_because_of_it_says_more(self):
        job = self.interrupted()
        job.leave(1, "uncaught KeyboardInterrupt", ok=False)
        assert "rank 1 (host0) was lost" in job.root_cause()["text"]
        assert "uncaught KeyboardInterrupt" in job.root_cause()["text"]

    def test_one_that_leaves_in_peace_was_interrupted_all_the_same(self):
        job = self.interrupted()
        job.leave(1)
        job.pass_time(SETTLE_S)
        assert "was interrupted (KeyboardInterrupt)" in job.root_cause()["text"]
        assert job.root_cause()["text"].endswith("it has left the job (it called shutdown()).")

    def test_one_that_was_interrupted_because_it_had_lost_another_is_not_the_cause(self):
        job = Job(3)
        job.run_on_one_host()
        job.lost(1, peer=2)
        message = {"type": "interrupted", "doing": self.DOING, "why": "KeyboardInterrupt"}
        job.take(job.state.interrupted(1, message, job.now_s))
        job.hang_up(2)
        job.pass_time(EVIDENCE_S)
        assert job.root_cause()["rank"] == 2


class TestComingBack:
    """After a failure, a rank calls init() again in the same process."""

    def test_a_job_of_ringrun_does_not_start_again(self):
        job = Job(2, seats_of(2))
        job.run_on_one_host()
        job.leave(1, "uncaught ValueError: boom", ok=False)
        job.join_seat(10, 0)
        (answer,) = job.told[10]
        assert answer["type"] == "refused"
        assert "init() cannot start it again" in answer["reason"] and "--restarts N" in answer["reason"]
        assert "ValueError: boom" in answer["reason"]

    def test_without_ringrun_it_is_to_look_for_the_next_rendezvous(self):
        job = Job(2)
        job.run_on_one_host()
        job.leave(1, "uncaught ValueError: boom", ok=False)
        assert job.join(10) == [Drop(10)] and not job.told[10]

    def test_a_late_rank_reads_why_the_start_has_failed(self):
        job = Job(3, seats_of(3))
        job.join_seat(0, 0)
        job.exit(1)
        job.join_seat(2, 2)
        assert [message["type"] for message in job.told[2]] == ["abort"]


def test_mismatch_carries_both_sides_words():
    job = Job(2)
    job.run_on_one_host()
    job.mismatch(1, peer=0, text="rank 1 wanted a broadcast")
    job.mismatch(0, peer=1, text="rank 0 wanted an allreduce")
    job.pass_time(SETTLE_S)
    assert (job.root_cause()["kind"], job.root_cause()["rank"]) == ("mismatch", None)
    text = job.root_cause()["text"]
    assert text.index("rank 0 wanted an allreduce") < text.index("rank 1 wanted a broadcast")


def test_reports_by_and_about_unknown_ranks_are_ignored():
    job = Job(2)
    job.run_on_one_host()
    for event in (
        lambda: job.lost(99, peer=0),
        lambda: job.lost(0, peer=77),
        lambda: job.mismatch(99, 0, "x"),
        lambda: job.leave(99),
        lambda: job.hang_up(99),
        lambda: job.linked(99),
        lambda: job.unlinked(99),
        lambda: job.probed(99),
    ):
        assert event() == []
    job.pass_time(100.0)
    assert not job.aborts()


def test_abort_happens_once():
    job = Job(3, seats_of(3))
    job.run_on_one_host()
    job.leave(2, "boom", ok=False)
    first = job.root_cause()
    job.lost(0, peer=1)
    job.mismatch(1, 0, "different")
    job.exit(0)
    job.hang_up(1)
    job.unlinked(0)
    job.leave(0, "then another", ok=False)
    job.pass_time(1000.0)
    assert job.root_cause() is first
    job.notice("failed")


def test_a_rank_that_comes_after_the_end_reads_why():
    job = Job(3, seats_of(3))
    job.run_on_one_host()
    job.leave(2, "boom", ok=False)
    job.hang_up(2)
    job.join_seat(9, 2)
    assert len(job.told[9]) == 1
    assert "boom" in str(job.told[9][0])
    assert job.told[9][0]["type"] in ("refused", "abort")


# ---- the next generation ---------------------------------------------------------------------


def test_leave_and_join_again():
    job = Job(2, seats_of(2))
    for generation in range(3):
        first = 10 * generation
        job.run_on_one_host(first)
        assert [job.told[first + rank][0]["generation"] for rank in range(2)] == [generation] * 2
        for rank in range(2):
            job.leave(first + rank)
            job.hang_up(first + rank)
        assert job.state.phase is Phase.JOINING
    assert [item.kind for item in job.notices if item.kind in ("started", "ended")] == [
        "started",
        "ended",
    ] * 3
    assert not job.aborts()


@pytest.mark.parametrize("seats", [(), (3,)])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_fast_rejoiner_waits_until_the_others_have_left(seats, order):
    job = Job(3, seats_of(*seats))
    job.run_on_one_host()
    for count, rank in enumerate(order):
        job.leave(rank)
        job.hang_up(rank)
        if seats:
            job.join_seat(10 + rank, rank)
        else:
            job.join(10 + rank, rank=rank)
        assert bool(job.told[10 + rank]) == (count == 2), "told before the others had left, or never"
    assert {connection: rank for connection, rank in job.ranks().items() if connection >= 10} == {
        10: 0,
        11: 1,
        12: 2,
    }
    assert job.told[10][0]["generation"] == 1
    job.link_all([10, 11, 12])
    assert not job.aborts()


def test_only_ranks_that_left_may_come_back():
    job = Job(2)
    job.run_on_one_host()
    job.leave(0)
    job.join(10, rank=0)
    assert job.told[10] == []
    job.join(11, hostname="elsewhere", pid=3)
    assert "came too late" in job.told[11][0]["reason"]


def test_a_process_that_ended_in_peace_is_missed_in_the_next_generation():
    job = Job(2, seats_of(2))
    job.run_on_one_host()
    job.leave(0, "its program ended")
    job.hang_up(0)
    job.exit(0, "exit code 0", ok=True)
    job.leave(1)
    assert not job.aborts()
    job.join_seat(11, 1)
    assert "rank 0 (host0) ended (exit code 0) before it called ringcomm.init()" in job.root_cause()["text"]


def test_rejoining_times_out_too():
    job = Job(2, seats_of(2), start_timeout_s=20.0)
    job.run_on_one_host()
    job.leave(0)
    job.leave(1)
    job.join_seat(10, 0)
    job.pass_time(20.0)
    assert "called ringcomm.init() again within 20 s. Missing: rank 1 (host0)" in job.root_cause()["text"]


def test_a_rank_that_waits_for_others_to_return_waits_as_long_as_any():
    job = Job(2, seats_of(2), start_timeout_s=20.0)
    job.run_on_one_host()
    job.leave(0)
    job.join_seat(10, 0)
    job.pass_time(15.0)
    job.leave(1)
    job.pass_time(19.9)
    assert not job.aborts()
    job.pass_time(0.1)
    assert set(job.aborts()) == {10}


def test_reports_of_an_old_generation_do_not_hurt_the_next():
    job = Job(2, seats_of(2))
    job.run_on_one_host()
    job.leave(0)
    job.lost(1, peer=0)
    job.leave(1)
    job.run_on_one_host(10)
    job.pass_time(100.0)
    assert not job.aborts()


# ---- any order of events ---------------------------------------------------------------------


class Storm:
    """Random events, at random moments, from connections that behave as the server lets them."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.size = self.rng.randrange(1, 5)
        seats = seats_of(*[1] * self.size) if self.rng.random() < 0.5 else ()
        self.job = Job(self.size, seats, start_timeout_s=self.rng.choice([2.0, 60.0]))
        self.open = set()
        self.fresh = itertools.count()
        self.said_goodbye = set()
        self.ended = set()  # their processes have, and receive nothing

    def step(self):
        rng, job = self.rng, self.job
        connection = rng.choice(sorted(self.open)) if self.open and rng.random() < 0.7 else None
        event = rng.choice(
            ["join"] * 4
            + ["linked", "probed", "measured"] * 4
            + ["lost", "mismatch", "leave", "hang_up", "exit", "unlinked"]
        )
        rank = rng.randrange(self.size)
        if event == "exit":
            if job.seats:
                slot = job.seats[rank].slot
                self.ended |= {each for each, member in job.state.members.items() if member.slot == slot}
                job.exit(rank, rng.choice(["exit code 0", "killed by SIGKILL"]), rng.random() < 0.5)
        elif event == "join":
            self.join(rank)
        elif connection is None:
            job.pass_time(rng.choice([0.0, 0.1, 0.5, 5.0]))
        elif connection in self.said_goodbye or event == "hang_up":
            self.hang_up(connection)
        elif event == "leave":
            self.said_goodbye.add(connection)
            job.leave(connection, "bye", ok=rng.random() < 0.7)
        elif event == "probed":
            job.probed(
                connection,
                *[
                    attempt(0, t, f"10.{net}.0.{t}", rng.choice(["", "", "", "refused"]), local_iface=iface)
                    for t in range(self.size)
                    for net, iface in ((0, "eth0"), (1, "eth1"))[: rng.choice([1, 1, 2])]
                ],
            )
        elif event == "measured":
            job.measured(
                connection,
                *[speed(t, f"10.{rng.randrange(2)}.0.{t}", rng.random(), "eth0") for t in range(self.size)],
            )
        elif event == "linked":
            job.linked(connection)
        elif event == "unlinked":
            job.unlinked(connection)
        elif event == "lost":
            job.lost(connection, rng.randrange(-1, self.size + 1), rng.choice(["lost", "stalled"]))
        else:
            job.mismatch(connection, rank, "different")
        for dropped in job.dropped:
            if dropped in self.open:
                self.hang_up(dropped)

    def join(self, rank):
        connection = next(self.fresh)
        self.open.add(connection)
        if self.job.seats:
            self.job.join_seat(connection, rank)
        else:
            self.job.join(connection, pid=connection, rank=self.rng.choice([None, rank]))

    def hang_up(self, connection):
        self.open.discard(connection)
        self.job.hang_up(connection)


@pytest.mark.parametrize("seed", range(300))
def test_whatever_happens_all_ranks_are_aborted_exactly_once(seed):
    """Any sequence of events is handled; after an abort, every connected rank has got it."""
    print(f"seed {seed}")
    storm = Storm(seed)
    job = storm.job
    for _ in range(60):
        storm.step()
    job.pass_time(100.0)
    told = job.aborts()  # which checks that no rank gets two, and all the same
    failures = [item for item in job.notices if item.kind == "failed"]
    assert len(failures) == (1 if job.state.phase is Phase.ABORTED else 0)
    if job.state.phase is Phase.ABORTED:
        for connection in storm.open - storm.ended:
            informed = connection in told or "refused" in job.kinds(connection)
            assert informed, f"connection {connection} never learned that the job is over"


def test_the_storm_reaches_every_phase():
    """The property above is worth something: its events lead everywhere."""
    phases, root_causes = set(), set()
    for seed in range(300):
        storm = Storm(seed)
        for _ in range(60):
            storm.step()
            phases.add(storm.job.state.phase)
        root_causes |= {message["kind"] for message in storm.job.aborts().values()}
    assert phases == set(Phase)
    assert root_causes == {"lost", "stalled", "mismatch", "timeout", "no_route", "startup"}


def test_a_note_is_shown_if_a_member_wrote_it():
    job = Job(2)
    job.run_on_one_host()
    note = {"type": "note", "text": "allreduce of 0 to 127 bytes: one_shot"}
    job.take(job.state.told(1, note))
    assert job.notices[-1] == Notice("note", note["text"])
    before = list(job.notices)
    job.take(job.state.told(99, note))
    assert job.notices == before


def test_the_time_that_a_member_has_waited_is_passed_on():
    job = Job(2)
    job.run_on_one_host()
    facts = {"elapsed_s": 10.0, "waited_s": 2.5, "balanced": False}
    job.take(job.state.told(1, {"type": "usage", **facts}))
    assert job.notices[-1] == Notice("usage", "", 1, detail=facts)


def test_of_each_topic_the_first_warning_is_shown():
    job = Job(2)
    job.run_on_one_host()
    before = len(job.notices)
    for rank, topic, text in ((1, "lines", "first"), (0, "lines", "second"), (0, "program", "third")):
        job.take(job.state.told(rank, {"type": "warning", "topic": topic, "text": text}))
    job.take(job.state.told(99, {"type": "warning", "topic": "other", "text": "from elsewhere"}))
    assert job.notices[before:] == [Notice("warning", "first"), Notice("warning", "third")]
    for number in range(100):
        job.take(job.state.told(0, {"type": "warning", "topic": str(number), "text": "flood"}))
    assert len(job.notices) < before + 20


class TestSilence:
    """While links are built, and when only one rank is left, the rendezvous pings."""

    def joined(self):
        job = Job(3)
        for rank in range(3):
            job.join(rank, rank=rank, pid=100 + rank, dead_after=6.0, listens=True)
        return job

    def answer(self, job, *connections):
        for connection in connections:
            job.take(job.state.answered(connection, {"heard": [], "silent": []}, job.now_s))

    def test_members_that_answer_are_not_given_up(self):
        job = self.joined()
        for _ in range(20):
            job.pass_time(1.0)
            self.answer(job, 0, 1, 2)
        assert not job.aborts()
        assert job.kinds(0).count("ping") >= 20

    def test_the_one_that_does_not_answer_is_the_cause(self):
        job = self.joined()
        for _ in range(5):
            job.pass_time(1.0)
            self.answer(job, 0, 2)
            assert not job.aborts()
        job.pass_time(1.5)
        cause = job.aborts()[0]
        assert (cause["kind"], cause["rank"]) == ("stalled", 1)
        assert "has been silent for 6 s while links were being built" in cause["text"]

    def test_a_running_job_is_not_pinged_until_one_rank_is_left(self):
        job = self.joined()
        job.link_all(range(3))
        before = job.kinds(2).count("ping")
        job.pass_time(100.0)
        assert job.kinds(2).count("ping") <= before + 1 and not job.aborts()
        job.leave(0)
        job.leave(1)
        job.pass_time(5.5)
        assert not job.aborts()
        job.pass_time(1.0)
        assert "while others have left already" in job.aborts()[2]["text"]


def test_what_ranks_are_told_of_links_grows_with_the_ranks_only():
    """With all pairs of ranks in every rank's message, 340 ranks were told more than a message may have."""
    size = 400
    job = Job(size)
    for rank in range(size):
        job.state.joined(rank, join_message(rank=rank, pid=100 + rank), job.now_s)
    for rank in range(size):
        peers = ranges_of(peer for peer in range(size) if peer != rank)
        links = [{"iface": "eth0", "local": "10.0.0.1", "peers": peers}]
        actions = job.state.linked(rank, {"type": "linked", "links": links})
    sent = {action.connection: len(encode(action.message)) for action in actions if isinstance(action, Send)}
    assert len(sent) == size
    assert max(sent.values()) < MAX_MESSAGE_BYTES / 16
    assert sum(sent.values()) - max(sent.values()) < 100 * size
    (started,) = [action for action in actions if isinstance(action, Notice)]
    assert len(started.detail["links"]) == MOST_ROWS
    assert f"and {size * (size - 1) // 2 - 500} more" in started.text
