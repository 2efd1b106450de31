"""The coordinator: announcements in, responses out. No threads, no links, a clock that is a number."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.collective.reduce import Total
from ringcomm.engine import coordinator, request
from ringcomm.engine.coordinator import Ready, fuse
from ringcomm.engine.request import Handle, Pending, Request
from ringcomm.errors import ProtocolError
from ringcomm.ops import Collective, ReduceOp
from ringcomm.wire.frames import NO_OP
from tests.unit.engine.coordinated import HOSTS, Job, sig


def test_runs_when_the_last_rank_has_announced():
    job = Job()
    job.ready(2, sig("a"), sig("b"))
    job.ready(0, sig("b"))
    assert job.run() == []
    job.ready(1, sig("b"), sig("a"))
    assert job.run() == [["b"]]
    job.ready(0, sig("a"))
    assert job.run() == [["a"]]
    assert job.coordinator.next_alarm_s(job.now_s) is None


def test_waits_for_others_to_fuse_with_unless_a_caller_waits():
    job = Job(cycle_s=0.5)
    for rank in range(3):
        job.ready(rank, sig("a"))
    assert job.run() == []
    assert job.coordinator.next_alarm_s(job.now_s) == pytest.approx(0.5)
    job.now_s += 0.3
    for rank in range(3):
        job.ready(rank, sig("b"))
    job.now_s += 0.2
    assert job.run() == [["a", "b"]]
    for rank in range(3):
        job.ready(rank, sig("c"), urgent=rank == 1)
    assert job.run() == [["c"]]
    for rank in range(3):
        job.ready(rank, sig("big", shapes=((1 << 20,),)))
    assert job.run() == [["big"]]


DISAGREEMENTS = {
    "operations": {"kind": int(Collective.ALLGATHER), "op": NO_OP},
    "data types": {"dtypes": ("int32",)},
    "reduction operations": {"op": int(ReduceOp.MAX)},
    "allreduce tensor shapes": {"shapes": ((2, 2),)},
    "prescale factors": {"prescale": 0.5},
    "postscale factors": {"postscale": 0.5},
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_disagreement_fails_on_all_and_disturbs_nothing_else(what):
    job = Job()
    job.ready(0, sig("a"))
    job.ready(1, sig("a", **DISAGREEMENTS[what]), sig("b"))
    job.ready(2, sig("a"))
    ((name, text),) = job.failures()
    assert name == "a" and text.startswith(f"Mismatched {what}")
    assert "ranks 0 (desk) and 2 (jetson2)" not in text  # they called from different places
    for rank in range(3):
        assert f"rank {rank} ({HOSTS[rank]})" in text and f"train.py:{rank}" in text
    job.ready(0, sig("b"), sig("a"))
    job.ready(2, sig("b"), sig("a"))
    job.ready(1, sig("a"))
    assert sorted(map(sorted, job.run())) == [["a", "b"]]


def test_a_line_of_the_program_is_told_once_and_known_by_its_number():
    job = Job(stall_warning_s=10.0)
    for site in ("a.py:1", "b.py:2", "a.py:1"):
        for rank in range(3):
            job.ready(rank, sig("x"), site=site)
        assert job.run() == [["x"]]
    job.ready(0, sig("x"), site="b.py:2")
    job.now_s += 11.0
    assert job.responses() is None
    assert "at b.py:2 has waited" in job.coordinator.reports.warnings[0]


class TestJoin:
    def test_goes_on_without_ranks_that_joined(self):
        job = Job()
        job.ready(0, sig("a"))
        job.send(1, {"type": "joined"})
        job.ready(2, sig("a"))
        assert job.run() == [["a"]]
        job.send(0, {"type": "joined"})
        assert job.responses() is None
        job.send(2, {"type": "joined"})
        responses = job.responses()
        assert responses is not None and responses["joined"] == 2
        job.ready(0, sig("a"))
        assert job.responses() is None

    @pytest.mark.parametrize("kind", [Collective.ALLGATHER, Collective.BROADCAST, Collective.ALLTOALL])
    def test_other_collectives_need_all_ranks(self, kind):
        job = Job()
        job.send(1, {"type": "joined"})
        job.ready(0, sig("a", kind=int(kind)))
        job.ready(2, sig("a", kind=int(kind)))
        ((name, text),) = job.failures()
        assert name == "a" and "rank 1 (jetson1) called join()" in text


def test_a_rank_is_late_by_the_time_that_the_others_wait_for_it_alone():
    job = Job()
    for _ in range(2):
        for rank in (0, 2):
            job.ready(rank, sig("a"), sig("b"))
            job.now_s += 1.0
        job.now_s += 2.0
        job.ready(1, sig("a"), sig("b"))  # both operations have waited in the same time
        job.run()
    assert job.coordinator.reports.late_s == {1: 6.0}


def test_signatures_beyond_the_table_get_a_number_for_one_time_only(monkeypatch):
    monkeypatch.setattr(coordinator, "MAX_NUMBERS", 1)
    monkeypatch.setattr(request, "MAX_NUMBERS", 1)
    job, own = Job(), Pending()
    for _ in range(2):
        requests = [Request(sig(name), [np.zeros(4, np.float32)], Handle(name)) for name in "abc"]
        for each in requests:
            own.add(each)
        announced = own.announce(False, 0)
        for rank in range(3):
            job.send(rank, announced if rank == 0 else {**announced, "sites": [""]})
        responses = job.responses()
        own.learn(responses["fresh"])
        assert [each for _, each in own.take_bucket(responses["run"][0])] == requests
        own.forget(responses["fresh"])
        assert list(own.signatures.values()) == [sig("a")]
    assert [type(what) for what, *_ in announced["operations"]] == [int, list, list]


def test_weights_are_added_up_and_parts_are_absent_that_no_rank_has():
    job = Job()
    average = sig("w", op=int(ReduceOp.AVERAGE), weighted=True)
    for rank, (weight, absent) in enumerate(((0.1, "d"), (0.2, "7"))):
        own = Pending()
        given = Request(average, [np.zeros(4, np.float32)], Handle("w"), "", weight, int(absent, 16))
        own.add(given)
        job.send(rank, own.announce(False, rank))
    job.send(2, {"type": "joined"})  # has neither a weight nor parts
    [[[number, count, more]]] = job.responses()["run"]
    assert more == {"total": Total.of([0.1, 0.2]), "absent": "5"}
    own.learn([[number, average.to_json()]])
    [(_, taken)] = own.take_bucket([[number, count, more]])
    assert taken is given and given.absent == 5 and given.total == Total.of([0.1, 0.2])


@pytest.mark.parametrize(
    "operation",
    [
        [7, 0, 0],  # a number that was not given
        [sig("a").to_json(), 0, 9],  # a line that was not sent
        [sig("a").to_json()[:-1], 0, 0],
        [sig("a", process_set=2).to_json(), 0, 0],  # rank 0 is no member
        [sig("a").to_json(), "0", 0],
        [sig("a", weighted=True).to_json(), 0, 0],
        [sig("a", weighted=True).to_json(), 0, 0, {"weight": -1.0}],
        [sig("a").to_json(), 0, 0, {"absent": "parts"}],
        None,
    ],
)
def test_what_makes_no_sense_is_an_error_of_the_rank(operation):
    with pytest.raises(ProtocolError, match=r"Rank 0 \(desk\) sent a message of kind 'ready' that makes no"):
        Job().send(0, {"type": "ready", "operations": [operation], "sites": [], "urgent": False})


def planned(*changes, items=1):
    """Numbers of operations by bucket, of at most 100 bytes."""
    signatures = [sig(shapes=((items,),))._replace(**each) for each in changes]
    members = [Ready(item, number, item.nbytes, {}) for number, item in enumerate(signatures)]
    return [[item.number for item in bucket] for bucket in fuse(members, 100)]


class TestBuckets:
    """What travels together, decided by signatures alone."""

    def test_fills_up_to_the_threshold(self):
        assert planned(*[{}] * 5, items=10) == [[0, 1], [2, 3], [4]]

    def test_never_across_sets_scales_or_kinds(self):
        assert planned(
            {}, {"process_set": 1}, {"prescale": 0.5}, {"postscale": 0.5},
            {"kind": int(Collective.REDUCESCATTER)}, {"kind": int(Collective.ALLGATHER), "op": NO_OP},
        ) == [[number] for number in range(6)]  # fmt: skip

    def test_some_are_always_alone(self):
        barrier = {"kind": int(Collective.BARRIER), "op": NO_OP, "shapes": (), "dtypes": ()}
        broadcast = {"kind": int(Collective.BROADCAST), "op": NO_OP, "root": 0}
        for changes in (barrier, {"op": int(ReduceOp.ADASUM)}, broadcast):
            assert planned(changes, changes) == [[0], [1]]
