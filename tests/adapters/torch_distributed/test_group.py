"""What a process group is to PyTorch, what it refuses, and barriers that ranks do not reach in time."""

from __future__ import annotations

import re
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from ringcomm.errors import (
    NotInitializedError,
    PeerLostError,
    PeerStalledError,
    StartupError,
)
from ringcomm.group import operation_queue, point_to_point
from ringcomm.torch.distributed import ProcessGroupRingcomm, _group, _group_transport, monitored_barrier
from tests.adapters.torch_distributed.harness import on_ranks

LIMIT_S = 60.0


def default_group():
    """The group of all ranks, of a program with one rank, as PyTorch makes it."""
    options = SimpleNamespace(
        store=dist.HashStore(), group_rank=0, group_size=1, timeout=timedelta(seconds=60),
        global_ranks_in_group=[], group_id="0",
    )  # fmt: skip
    return _group.create(options)


def test_several_operations_as_one():
    def run(group):
        peer, tensor, place = 1 - group.rank(), torch.ones(3), torch.zeros(2)
        group._start_coalescing()
        group.allreduce([tensor])
        group.recv([place], peer, 4)
        group.send([torch.full((2,), 7.0 + group.rank())], peer, 4)
        work = group._end_coalescing()
        assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
        assert [item[0] is kept for item, kept in zip(work.result(), (tensor, place))] == [True, True]
        assert len(work.get_future().wait()) == 3
        assert group._end_coalescing().is_completed(), "of nothing"
        return tensor.tolist(), place.tolist()

    assert on_ranks(run, 2) == [([2.0] * 3, [8.0] * 2), ([2.0] * 3, [7.0] * 2)]


class TestEnd:
    def test_after_the_end_no_operation_can_start(self):
        def leave(group):
            group.shutdown()
            group.shutdown()
            with pytest.raises(NotInitializedError, match=r"ended \(it called destroy_process_group\(\)\)"):
                group.barrier()
            with pytest.raises(NotInitializedError, match="Make another one first"):
                group.send([torch.ones(2)], 1 - group.rank()).wait()

        on_ranks(leave, 2)

    def test_an_abort_ends_the_operations_of_all_ranks(self):
        def run(group):
            if group.rank():
                work = group.recv([torch.ones(2)], 0)
                group.abort()
                with pytest.raises(NotInitializedError, match=r"abort\(\)"):
                    work.wait()
                return None
            work = group.allreduce([torch.ones(3)])
            with pytest.raises(PeerLostError) as caught:
                work.wait()
            return caught.value.rank, group.failure.rank, "abort()" in str(caught.value)

        assert on_ranks(run, 2, ranks=(3, 5))[0] == (5, 5, True)

    def test_an_interrupted_wait_ends_the_group_and_names_this_rank(self):
        """Two threads may report it, and the rendezvous reports it to the other ranks."""

        def run(group):
            if group.rank():
                with pytest.raises(PeerLostError) as caught:
                    group.allreduce([torch.ones(3)]).wait()
                return caught.value.rank
            work = group.recv([torch.ones(2)], 1)
            for _ in range(2):
                group._operations.interrupted(work, KeyboardInterrupt())
            return group.failure.rank

        assert on_ranks(run, 2, ranks=(1, 2)) == [1, 1]

    def test_a_program_that_ends_leaves_its_groups(self, monkeypatch):
        for error, reason in ((None, "its program ended"), (KeyError("x"), "uncaught KeyError: 'x'")):
            monkeypatch.setattr(sys, "last_value", error, raising=False)
            group = default_group()
            _group._leave_at_exit()
            with pytest.raises(NotInitializedError, match=re.escape(f"has ended ({reason})")):
                group.barrier()

    def test_a_fork_that_ends_leaves_the_group_alone(self):
        def run(group):
            group._transport.group._pid += 1
            group._leave("its program ended", ok=True)
            group._transport.group._pid -= 1
            return group.allreduce([torch.ones(1)]).wait()

        assert on_ranks(run, 2) == [True, True]


class TestMonitoredBarrier:
    def test_all_ranks_come_and_rank_0_may_leave_at_once(self):
        """Its replies are sent when the barrier is over, also if that takes a while."""

        def run(group):
            if group.rank() == 0:
                send = group._operations.messages.send
                group._operations.messages.send = lambda *args: threading.Timer(0.1, send, args).start()
            monitored_barrier(group, timedelta(seconds=LIMIT_S), wait_all_ranks=True)
            monitored_barrier(group)

        assert on_ranks(run, 3) == [None] * 3
        assert monitored_barrier(dist.GroupMember.NON_GROUP_MEMBER, timeout=LIMIT_S) is None

    @pytest.mark.parametrize(("wait_all_ranks", "names"), [(False, "Rank 4"), (True, "Ranks 4, 7")])
    def test_missing_ranks_are_named(self, wait_all_ranks, names):
        judged = threading.Event()

        def run(group):
            if group.rank():
                assert judged.wait(LIMIT_S)
                return None
            with pytest.raises(PeerStalledError) as caught:
                monitored_barrier(group, 0.05, wait_all_ranks)
            judged.set()
            return caught.value.rank, str(caught.value)

        assert on_ranks(run, 3, ranks=(2, 4, 7))[0] == (
            4,
            f"Rank 2 timed out in monitoredBarrier after 0.05 s: {names} failed to pass monitoredBarrier in "
            "that time.",
        )


@pytest.mark.parametrize(
    ("module", "part"),
    [
        (_group_transport, "HeartbeatThread"),
        (_group, "Operations"),
        (operation_queue, "threading"),
        (point_to_point, "threading"),
    ],
)
def test_what_one_rank_lacks_for_a_group_is_told_to_all(monkeypatch, module, part):
    """Here after the last link, when another rank may have its group already, or at the first operation."""
    lock, made = threading.Lock(), []

    def lacks():
        with lock:
            made.append(1)
            if len(made) == 2:
                raise RuntimeError("can't start new thread")

    if part == "threading":

        class Thread(threading.Thread):
            def start(self):
                lacks()
                super().start()

        kinds = {
            name: getattr(threading, name) for name in ("Condition", "Event", "Lock", "current_thread", "get_ident")
        }
        monkeypatch.setattr(module, part, SimpleNamespace(Thread=Thread, **kinds))
    else:
        usual = getattr(module, part)
        monkeypatch.setattr(module, part, lambda *given: (lacks(), usual(*given))[1])
    errors = []

    def work(rank, store):
        try:
            group = ProcessGroupRingcomm(store, rank, [0, 1], timedelta(seconds=90), "test", False)
            if module is point_to_point:
                group.send([torch.ones(1)], 1 - rank, 0)
                group.recv([torch.ones(1)], 1 - rank, 0).wait()
            group.allreduce(torch.ones(1)).wait()
        except StartupError as problem:
            errors.append(str(problem))

    store = dist.HashStore()
    threads = [threading.Thread(target=work, args=(rank, store)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(errors) == 2
    assert all("cannot connect to the others: no thread can be started" in text for text in errors)
