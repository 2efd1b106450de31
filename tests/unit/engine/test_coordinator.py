"""The coordinator: announcements in, responses out. No threads, no links, a clock that is a number."""

from __future__ import annotations

import pytest

from ringcomm.engine.coordinator import Tuning
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


def test_a_second_time_numbers_are_enough():
    job = Job()
    for _ in range(2):
        for rank in range(3):
            job.ready(rank, sig("a"))
        assert job.run() == [["a"]]
    assert list(job.ids) == [sig("a")]
    job.ready(0, sig("a"))
    assert job.responses() is None


def test_a_set_needs_its_members_only():
    job = Job()
    job.ready(0, sig("a", process_set=1))
    job.ready(2, sig("a", process_set=1))
    assert job.run() == [["a"]]


def test_same_name_in_two_sets_are_two_operations():
    job = Job()
    for rank in range(3):
        job.ready(rank, sig("a"))
    job.ready(0, sig("a", process_set=1))
    assert job.run() == [["a"]]


def test_waits_for_others_to_fuse_with_unless_a_caller_waits():
    job = Job(tuning=Tuning(1 << 20, 0.5))
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


def test_roots_that_differ():
    job = Job()
    for rank in range(3):
        job.ready(rank, sig("w", kind=int(Collective.BROADCAST), op=NO_OP, root=rank // 2))
    ((_, text),) = job.failures()
    assert text.startswith("Mismatched broadcast root ranks") and "root_rank=1" in text


def test_without_names_the_number_counts():
    job = Job()
    for number in (1, 2):
        for rank in range(3):
            job.ready(rank, sig(shapes=((number,),)), number=number)
    responses = job.responses()
    assert responses is not None
    assert sorted(tuple(bucket[1::2]) for bucket in responses["run"]) == [(1, 2)]
    job.ready(0, sig(), number=3)
    job.ready(1, sig(kind=int(Collective.BARRIER), op=NO_OP, shapes=(), dtypes=()), number=3)
    job.ready(2, sig(), number=3)
    ((_, text),) = job.failures()
    assert "without a name (number 3)" in text and "barrier()" in text


class TestLines:
    """The lines of the program at which ranks submit operations."""

    def test_a_line_is_told_once_and_known_by_its_number(self):
        job = Job(stall_warning_s=10.0)
        for site in ("a.py:1", "b.py:2", "a.py:1"):
            for rank in range(3):
                job.ready(rank, sig("x"), site=site)
            assert job.run() == [["x"]]
        job.ready(0, sig("x"), site="b.py:2")
        job.now_s += 11.0
        assert job.responses() is None
        assert "at b.py:2 has waited" in job.coordinator.warnings[0]


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

    def test_a_late_join_completes_what_waits(self):
        job = Job()
        job.ready(0, sig("a"))
        job.ready(2, sig("a"))
        job.send(1, {"type": "joined"})
        assert job.run() == [["a"]]

    @pytest.mark.parametrize("kind", [Collective.ALLGATHER, Collective.BROADCAST, Collective.ALLTOALL])
    def test_other_collectives_need_all_ranks(self, kind):
        job = Job()
        job.send(1, {"type": "joined"})
        job.ready(0, sig("a", kind=int(kind)))
        job.ready(2, sig("a", kind=int(kind)))
        ((name, text),) = job.failures()
        assert name == "a" and "rank 1 (jetson1) called join()" in text


def test_cache_forgets_and_old_numbers_stay_good_until_all_have_confirmed():
    job = Job(most_ids=2)
    for name in "ab":
        for rank in range(3):
            job.ready(rank, sig(name))
    old = {
        "type": "ready",
        "known": [],
        "carried": [],
        "fresh": [],
        "weights": [],
        "absent": [],
        "sites": [],
        "urgent": False,
    }
    assert job.run() == [["a", "b"]]
    numbers = dict(job.ids)
    responses = job.responses()
    assert responses is not None and responses["forget"] == 1
    # Rank 1 had not heard of it yet.
    job.send(1, {**old, "known": [numbers[sig("a")], 0, 1]})
    job.send(1, {"type": "forgot", "epoch": 1})
    for rank in (0, 2):
        job.send(rank, {"type": "forgot", "epoch": 1})
        job.ready(rank, sig("a"))
    assert job.run() == [["a"]]
    assert job.ids[sig("a")] not in numbers.values()
    with pytest.raises(ProtocolError):
        job.send(1, {**old, "known": [numbers[sig("a")], 0, 1]})


def test_a_rank_is_late_by_the_time_that_the_others_wait_for_it_alone():
    job = Job()
    for _ in range(2):
        for rank in (0, 2):
            job.ready(rank, sig("a"), sig("b"))
            job.now_s += 1.0
        job.now_s += 2.0
        job.ready(1, sig("a"), sig("b"))  # both operations have waited in the same time
        job.run()
    assert job.coordinator.late_s == {1: 6.0}


def test_a_rank_that_is_back_is_not_excused_any_more():
    job = Job()
    job.send(1, {"type": "paused", "reason": "saving checkpoint"})
    assert job.coordinator.paused == {1: "saving checkpoint"}
    for _ in range(2):
        job.send(1, {"type": "resumed"})
        assert job.coordinator.paused == {}


def test_a_stack_is_shown_once_it_is_known():
    job = Job()
    assert job.coordinator.stack_of(1) == ""
    job.send(1, {"type": "stack", "text": "  File train.py\n"})
    assert job.coordinator.stack_of(1) == "Its main thread was last seen here:\n  File train.py"
    assert "jetson1" in job.coordinator.warnings[-1]
