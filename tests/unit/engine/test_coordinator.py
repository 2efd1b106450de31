"""The coordinator: announcements in, responses out. No threads, no links, a clock that is a number."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import pytest

from ringcomm.engine.coordinator import Coordinator, Tuning
from ringcomm.engine.deadlocks import DEADLOCK_S, PATIENCE
from ringcomm.engine.request import Signature
from ringcomm.errors import ProtocolError
from ringcomm.ops import Collective, ReduceOp
from ringcomm.wire.frames import NO_OP, NO_ROOT
from ringcomm.wire.messages import encode, validate

HOSTS = ["desk", "jetson1", "jetson2"]
SETS = {0: (0, 1, 2), 1: (0, 2), 2: (1, 2), 3: (1,)}


def sig(name: str = "", **changes: Any) -> Signature:
    plain = Signature(name, 0, int(Collective.ALLREDUCE), int(ReduceOp.SUM), NO_ROOT, ("float32",), ((4,),))
    return plain._replace(**changes)


class Job:
    """A coordinator, and what each rank has been told of signatures so far."""

    def __init__(self, **options: Any) -> None:
        self.now_s = 100.0
        options.setdefault("tuning", Tuning(1 << 20, 0.0))
        self.coordinator = Coordinator(HOSTS, SETS.__getitem__, **options)
        self.ids: Dict[Signature, int] = {}
        self.lines: Dict[int, List[str]] = {}

    def ready(
        self, rank: int, *signatures: Signature, number: int = 0, urgent: bool = False, site: str = ""
    ) -> None:
        site = site or f"train.py:{rank}"
        known: List[int] = []
        fresh: List[List[Any]] = []
        lines = self.lines.setdefault(rank, [])
        sites = [site] if site not in lines else []
        lines += sites
        for item in signatures:
            if item in self.ids:
                known += [self.ids[item], number, lines.index(site) + 1]
            else:
                fresh.append([list(item), number, lines.index(site) + 1])
        message = {"type": "ready", "known": known, "carried": [], "fresh": fresh, "sites": sites}
        self.send(rank, {**message, "weights": [], "urgent": urgent})

    def send(self, rank: int, message: Dict[str, Any]) -> None:
        validate(message)
        assert encode(message)
        self.coordinator.take(rank, message, self.now_s)

    def responses(self) -> Optional[Dict[str, Any]]:
        responses = self.coordinator.decide(self.now_s)
        if responses is not None:
            validate(responses)
            for number, data in responses["fresh"]:
                self.ids[Signature.from_json(data)] = number
            if responses["forget"]:
                self.ids.clear()
        return responses

    def run(self) -> List[List[str]]:
        """Names by bucket of what is to be run now."""
        responses = self.responses()
        if responses is None:
            return []
        assert not responses["failed"]
        names = {number: item.name for item, number in self.ids.items()}
        return [[names[number] for number in bucket[::2]] for bucket in responses["run"]]

    def failures(self) -> List[Tuple[str, str]]:
        responses = self.responses()
        return [] if responses is None else [(key[1], text) for key, _, text, _ in responses["failed"]]


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
    """Operations without a name that ranks submit at different lines of the program."""

    def test_that_is_a_warning_once(self):
        job = Job()
        for number in (1, 2):
            for rank in range(3):
                job.ready(rank, sig(), number=number, site=f"/home/host{rank}/train.py:{7 + (rank == 2)}")
            assert job.run() == [[""]]
        (text,) = job.coordinator.warnings
        assert text.startswith("The operation without a name (number 1), allreduce(shape (4,), float32, ")
        assert "different lines of the program: ranks 0, 1 at train.py:7, rank 2 at train.py:8" in text
        (found,) = job.coordinator.sites.differences
        assert found["op"] == 1
        assert found["sites"] == {"0": "train.py:7", "1": "train.py:7", "2": "train.py:8"}

    def test_if_asked_for_it_is_an_error(self):
        job = Job(check_calls=True)
        for rank in range(3):
            job.ready(rank, sig(), number=1, site=f"/home/host{rank}/train.py:{7 + (rank == 2)}")
        ((_, text),) = job.failures()
        assert "Mismatched lines" in text and "/home/host1/train.py:7" in text and "train.py:8" in text
        assert not job.coordinator.warnings

    @pytest.mark.parametrize("item", [sig("named"), sig(kind=int(Collective.BARRIER))])
    def test_what_may_come_from_anywhere(self, item):
        job = Job(check_calls=True)
        for rank in range(3):
            job.ready(rank, item, number=0 if item.name else 1, site=f"train.py:{rank}")
        assert job.run() == [[item.name]] and not job.coordinator.warnings

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


class TestWaiting:
    def test_all_ranks_wait_for_something_else(self):
        job = Job()
        for rank, name in enumerate("abb"):
            job.ready(rank, sig(name))
            job.send(rank, {"type": "blocked", "heard": 0, "for_good": True})
        assert job.responses() is None
        assert job.coordinator.next_alarm_s(job.now_s) == pytest.approx(DEADLOCK_S)
        job.now_s += DEADLOCK_S
        failures = dict(job.failures())
        assert set(failures) == {"a", "b"}
        assert "rank 0 (desk): allreduce" in failures["a"] and "named 'b'" in failures["a"]
        assert job.responses() is None

    def test_some_ranks_wait_for_each_other(self):
        """Whatever the third one does, which is in a call in order, say; what it waits for may still come."""
        job = Job(stall_warning_s=60, stall_limit_s=0)
        one, other = (sig(f"message {name}", process_set=1) for name in "ab")
        job.ready(0, one)
        job.ready(2, other)
        job.ready(1, sig("later"))
        for rank in (0, 2):
            job.send(rank, {"type": "blocked", "heard": 0, "for_good": True})
        assert job.responses() is None
        assert job.coordinator.next_alarm_s(job.now_s) == pytest.approx(DEADLOCK_S)
        job.now_s += DEADLOCK_S
        failures = dict(job.failures())
        assert set(failures) == {"message a", "message b"}
        assert "ranks 0 (desk) and 2 (jetson2) wait for each other" in failures["message a"]
        assert "rank 0 (desk): allreduce" in failures["message b"]
        job.ready(0, sig("later"))
        job.ready(2, sig("later"))
        assert job.run() == [["later"]]

    def crossed(self, **options):
        """Ranks 0 and 2 have sent messages to each other, and neither has received one yet."""
        job = Job(stall_warning_s=60, stall_limit_s=0, **options)
        for rank, name in ((0, "a"), (2, "b")):
            job.ready(rank, sig(f"message {name}", process_set=1))
        return job

    def go_on_alone(self, job):
        """Rank 1 makes a call by name that needs no other rank."""
        job.ready(1, sig("own", process_set=3))
        assert job.run() == [["own"]]

    def blocked(self, job, *ranks, heard=0):
        for rank in ranks:
            job.send(rank, {"type": "blocked", "heard": heard, "for_good": True})

    def test_some_ranks_wait_for_each_other_while_others_make_calls(self):
        job = self.crossed()
        self.go_on_alone(job)
        self.blocked(job, 0, 2)  # response 1 is on its way
        for heard in range(1, 5):
            assert job.responses() is None
            job.now_s += DEADLOCK_S / 4
            self.blocked(job, 0, 2, heard=heard)
            if heard < 4:
                self.go_on_alone(job)
        failures = dict(job.failures())
        assert set(failures) == {"message a", "message b"}
        assert "ranks 0 (desk) and 2 (jetson2) wait for each other" in failures["message a"]

    def test_the_last_of_them_must_have_waited_long_enough(self):
        job = self.crossed()
        self.blocked(job, 0)
        job.now_s += DEADLOCK_S * 3 / 4
        self.blocked(job, 2)
        job.now_s += DEADLOCK_S / 2
        self.go_on_alone(job)
        assert job.coordinator.next_alarm_s(job.now_s) == pytest.approx(DEADLOCK_S / 2)
        job.now_s += DEADLOCK_S * 5 / 8
        assert len(job.failures()) == 2

    @pytest.mark.parametrize("rank", [0, 2])
    def test_an_operation_that_ends_meanwhile_may_be_what_a_rank_waited_for(self, rank):
        """Another thread of the rank waits for it, and may then submit what is missing."""
        job = self.crossed(tuning=Tuning(1 << 20, 100 * DEADLOCK_S))
        job.ready(rank, sig("all"))
        self.blocked(job, 0, 2)
        for other in {0, 1, 2} - {rank}:
            job.ready(other, sig("all"))
        self.blocked(job, 0, 2)  # "all" is ready, and waits to be fused
        job.now_s += 10 * DEADLOCK_S
        assert job.responses() is None
        job.now_s += 90 * DEADLOCK_S
        assert job.run() == [["all"]]
        self.blocked(job, 2 - rank, heard=1)
        self.blocked(job, rank, heard=0)  # sent before it had received that
        job.now_s += 10 * DEADLOCK_S
        assert job.responses() is None
        self.blocked(job, rank, heard=1)
        job.now_s += DEADLOCK_S
        assert len(job.failures()) == 2

    def test_what_is_left_for_later_responses_may_be_what_a_rank_waits_for(self):
        job = self.crossed()
        job.coordinator.needed = {"large": 0, "later": 1}
        for name in ("large", "later"):
            for rank in range(3):
                job.ready(rank, sig(name, shapes=((2 << 20,),)))
        assert job.run() == [["large"]]
        self.blocked(job, 0, 2, heard=1)
        job.now_s += 10 * DEADLOCK_S
        assert job.run() == [["later"]]
        self.blocked(job, 0, 2, heard=2)
        job.now_s += DEADLOCK_S
        assert len(job.failures()) == 2

    @pytest.mark.parametrize("change", ["unblocked", "ready", "not for good"])
    def test_one_of_some_ranks_may_still_come(self, change):
        job = self.crossed()
        self.blocked(job, 0, 2)
        job.now_s += DEADLOCK_S / 2
        if change == "unblocked":
            job.send(2, {"type": "unblocked"})
        elif change == "ready":
            job.ready(2, sig("more"))
        else:
            job.send(2, {"type": "blocked", "heard": 0, "for_good": False})
        for _ in range(5):
            job.now_s += DEADLOCK_S
            self.go_on_alone(job)
        self.blocked(job, 2, heard=5)
        job.now_s += DEADLOCK_S / 2
        assert job.responses() is None, "it has to wait anew"
        job.now_s += DEADLOCK_S / 2
        assert len(job.failures()) == 2 + (change == "ready")

    def test_ranks_in_a_chain_wait_for_one_that_may_still_come(self):
        job = Job(stall_warning_s=60, stall_limit_s=0)
        job.ready(0, sig("message", process_set=1))
        job.ready(2, sig("another message", process_set=2))
        for rank in (0, 2):
            job.send(rank, {"type": "blocked", "heard": 0, "for_good": True})
        job.now_s += DEADLOCK_S
        assert job.responses() is None
        assert job.coordinator.next_alarm_s(job.now_s) == pytest.approx(60 - DEADLOCK_S), "the warning"
        job.send(1, {"type": "blocked", "heard": 0, "for_good": True})  # it waits for something unknown here
        job.now_s += DEADLOCK_S
        assert len(job.failures()) == 2

    def test_a_rank_that_has_not_received_the_last_responses_may_come_yet(self):
        job = Job(stall_warning_s=0, stall_limit_s=0)
        for rank in range(3):
            job.ready(rank, sig("a"))
        assert job.responses()["run"]
        job.send(2, {"type": "blocked", "heard": 0, "for_good": True})  # on its way when "a" was ordered
        for rank in range(2):
            job.ready(rank, sig("b"))
            job.send(rank, {"type": "blocked", "heard": 1, "for_good": True})
        job.now_s += 100 * DEADLOCK_S
        assert job.responses() is None and job.coordinator.next_alarm_s(job.now_s) is None
        job.send(2, {"type": "blocked", "heard": 1, "for_good": True})
        job.now_s += DEADLOCK_S
        assert "every rank waits" in dict(job.failures())["b"]

    def test_where_a_thread_may_still_submit_it_is_a_stall_that_is_reported_first(self):
        job = Job(stall_warning_s=60, stall_limit_s=0)
        for rank, name in enumerate("abb"):
            job.ready(rank, sig(name))
            job.send(rank, {"type": "blocked", "heard": 0, "for_good": rank != 0})
        job.now_s += 60
        assert job.responses() is None and "'a'" in job.coordinator.warnings[0]
        job.send(2, {"type": "stack", "text": "asked because of the warning"})  # says nothing new
        assert job.coordinator.next_alarm_s(job.now_s) == pytest.approx((PATIENCE - 1) * 60)
        job.now_s += (PATIENCE - 1) * 60
        failures = dict(job.failures())
        assert set(failures) == {"a", "b"}
        assert "threads of rank 0 (desk) could still call it" in failures["a"]
        assert "for 120 s, 2 times RINGCOMM_STALL_WARNING" in failures["a"]

    @pytest.mark.parametrize("options", [{"stall_warning_s": 0}, {"stall_warning_s": 60, "paused": 2}])
    def test_where_a_thread_may_still_submit_it_is_not_given_up(self, options):
        job = Job(stall_warning_s=options["stall_warning_s"], stall_limit_s=0)
        for rank, name in enumerate("abb"):
            job.ready(rank, sig(name))
            job.send(rank, {"type": "blocked", "heard": 0, "for_good": rank != 0})
        if "paused" in options:
            job.send(options["paused"], {"type": "paused", "reason": "checkpoint"})
        job.now_s += 10_000
        assert job.responses() is None

    @pytest.mark.parametrize("for_good", [True, False])
    def test_some_ranks_are_given_up_only_if_none_of_their_threads_may_still_submit(self, for_good):
        """Rank 2 goes on, so it may be long before a thread of rank 1 has anything to do."""
        job = Job(stall_warning_s=60, stall_limit_s=0)
        for rank, name in enumerate("ab"):
            job.ready(rank, sig(name))
            job.send(rank, {"type": "blocked", "heard": 0, "for_good": for_good or rank == 0})
        job.now_s += 10_000
        responses = job.responses()
        assert (responses is not None) == for_good

    def test_a_rank_that_is_away_does_not_hide_one_that_is_missing(self):
        job = Job(stall_warning_s=60, stall_limit_s=0)
        job.send(2, {"type": "paused", "reason": "checkpoint"})
        job.ready(0, sig("a"))
        job.ready(2, sig("a"))
        job.now_s += 61
        assert job.responses() is None
        assert len(job.coordinator.warnings) == 1 and "rank 1" in job.coordinator.warnings[0]

    def test_what_has_failed_may_be_what_a_rank_waited_for(self):
        job = Job(stall_warning_s=0, stall_limit_s=0)
        for rank in range(3):
            job.ready(rank, sig("a", shapes=((rank,),)), sig("abb"[rank] + "!"))
            job.send(rank, {"type": "blocked", "heard": 0, "for_good": True})
        assert [name for name, _ in job.failures()] == ["a"]
        job.now_s += 100 * DEADLOCK_S  # what had waited for "a" computes now
        assert job.responses() is None

    @pytest.mark.parametrize("change", ["unblocked", "ready", "no message"])
    def test_a_rank_may_still_come(self, change):
        job = Job(stall_warning_s=0, stall_limit_s=0)
        for rank, name in enumerate("abb"):
            job.ready(rank, sig(name))
            if rank or change != "no message":
                job.send(rank, {"type": "blocked", "heard": 0, "for_good": True})
        if change == "unblocked":
            job.send(0, {"type": "unblocked"})
        elif change == "ready":
            job.ready(0, sig("c"))
        job.now_s += 100 * DEADLOCK_S
        assert job.responses() is None and job.coordinator.next_alarm_s(job.now_s) is None

    def test_warns_and_gives_up(self):
        job = Job(stall_warning_s=60, stall_limit_s=150)
        job.ready(1, sig("early"))
        job.ready(2, sig("a"))
        job.ready(0, sig("a"))
        job.now_s += 60
        assert job.responses() is None
        early, warning = job.coordinator.warnings
        assert "waited for 60 s on ranks 0 (desk) and 2 (jetson2) for rank 1 (jetson1)" in warning
        assert "rank 1 last submitted allreduce" in warning and "'early', 60 s ago" in warning
        assert "rank 0 last submitted" in early
        job.coordinator.warnings.clear()
        job.now_s += 30
        assert job.responses() is None and not job.coordinator.warnings
        job.now_s += 60
        responses = job.responses()
        assert responses is not None
        assert [(kind, missing) for _, kind, _, missing in responses["failed"]] == [
            ("stalled", [0, 2]),
            ("stalled", [1]),
        ]
        assert "given up" in responses["failed"][1][2]

    def test_a_second_warning_says_in_a_word_where_a_rank_was_at_the_first(self):
        job = Job(stall_warning_s=60, stall_limit_s=0)
        job.ready(0, sig("a"))
        job.now_s += 60
        job.responses()
        assert job.coordinator.to_explain == [1, 2]
        stack = '  File "/x/train.py", line 7, in main\n    load()\n  File "/x/data.py", line 22, in load\n'
        job.send(1, {"type": "stack", "text": f"{stack}    sleep(9)\n"})
        job.send(2, {"type": "stack", "text": ""})
        job.coordinator.warnings.clear()
        job.now_s += 60
        job.responses()
        [again] = job.coordinator.warnings
        assert again.endswith(
            "(rank 1 has submitted nothing yet; its main thread was last seen at /x/data.py:22; "
            "rank 2 has submitted nothing yet)."
        )


def test_cache_forgets_and_old_numbers_stay_good_until_all_have_confirmed():
    job = Job(cache_capacity=2)
    for name in "ab":
        for rank in range(3):
            job.ready(rank, sig(name))
    old = {"type": "ready", "known": [], "carried": [], "fresh": [], "weights": [], "sites": [],
           "urgent": False}
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


def test_ranks_that_take_turns_are_each_late():
    job = Job()
    for last in (0, 1, 2):
        for rank in (0, 1, 2):
            if rank != last:
                job.ready(rank, sig("a"))
        job.now_s += 0.5
        job.ready(last, sig("a"))
        job.run()
    assert job.coordinator.late_s == {0: 0.5, 1: 0.5, 2: 0.5}


def test_what_the_program_needs_first_is_not_behind_what_became_ready_before():
    job = Job()
    job.coordinator.needed = {"first": 0, "second": 1, "last": 2}
    large = {name: sig(name, shapes=((2 << 20,),)) for name in ("last", "second", "first")}
    for rank in range(3):
        job.ready(rank, large["last"], large["second"])
    assert job.run() == [["second"]]
    for rank in range(3):
        job.ready(rank, large["first"], sig("small"))
    assert job.coordinator.next_alarm_s(job.now_s) == 0.0
    assert sorted(name for bucket in job.run() for name in bucket) == ["first", "small"]
    assert job.run() == [["last"]]
    assert job.run() == []


def test_callbacks_are_told_what_happens():
    job = Job()
    coordinator, seen = job.coordinator, []
    coordinator.on_announce = lambda key, rank, signature: seen.append(("announced", key.name, rank))
    coordinator.on_complete = lambda key: seen.append(("complete", key.name))
    coordinator.on_responses = lambda nbytes, now_s: seen.append(("run", nbytes, now_s))
    for rank in range(3):
        job.ready(rank, sig("a"))
    assert job.run() == [["a"]]
    announced = [("announced", "a", rank) for rank in range(3)]
    assert seen == [*announced, ("complete", "a"), ("run", 16, job.now_s)]


def test_a_rank_that_is_back_is_not_excused_any_more():
    job = Job()
    job.send(1, {"type": "paused", "reason": "saving checkpoint"})
    assert job.coordinator.paused == {1: "saving checkpoint"}
    for _ in range(2):
        job.send(1, {"type": "resumed"})
        assert job.coordinator.paused == {}


def test_a_confirmation_of_an_epoch_that_is_over_says_nothing():
    job = Job(cache_capacity=1)
    for epoch in (1, 2):
        for rank in range(3):
            job.ready(rank, sig(f"a{epoch}"))
        assert job.run() == [[f"a{epoch}"]]
        responses = job.responses()
        assert responses is not None and responses["forget"] == epoch
        for rank in range(3):
            job.send(rank, {"type": "forgot", "epoch": epoch})
    for rank in range(3):
        job.send(rank, {"type": "forgot", "epoch": 1})
    for rank in range(3):
        job.ready(rank, sig("again"))
    assert job.run() == [["again"]]


def test_ranks_are_waited_for_by_the_members_of_a_set_only():
    job = Job()
    job.ready(0, sig("a", process_set=1))
    assert job.coordinator.waits_for([2]) and job.coordinator.waits_for([1, 2])
    assert not job.coordinator.waits_for([1])  # no member
    assert not job.coordinator.waits_for([0])  # it has announced it


def test_a_stack_is_shown_once_it_is_known():
    job = Job()
    assert job.coordinator.stack_of(1) == ""
    job.send(1, {"type": "stack", "text": "  File train.py\n"})
    assert job.coordinator.stack_of(1) == "Its main thread was last seen here:\n  File train.py"
    assert "jetson1" in job.coordinator.warnings[-1]


def test_what_only_rank_0_sends_is_refused():
    job = Job()
    with pytest.raises(ProtocolError, match="rank 1 may not send 'explain' to rank 0"):
        job.send(1, {"type": "explain"})
