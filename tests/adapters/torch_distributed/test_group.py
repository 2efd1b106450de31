"""A process group and its operations as PyTorch sees them, what they refuse, and barriers that time out."""

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

from ringcomm.arrays import kinds
from ringcomm.arrays.kinds import StagingPool
from ringcomm.balance.batches import Balanced
from ringcomm.errors import (
    NotInitializedError,
    PeerLostError,
    PeerStalledError,
    StartupError,
)
from ringcomm.group import operation_queue, point_to_point
from ringcomm.group.failures import Reporter
from ringcomm.group.message_channel import SHORT_BYTES
from ringcomm.group.point_to_point import PointToPoint
from ringcomm.testing.cluster import run_ranks
from ringcomm.torch.distributed import (
    ProcessGroupRingcomm,
    WeightedAverage,
    _group,
    _group_transport,
    monitored_barrier,
    weighted_average_hook,
)
from ringcomm.torch.distributed._collectives import Staged
from ringcomm.torch.distributed._hooks import _Plans
from ringcomm.torch.distributed._operations import RingcommWork
from ringcomm.transport.memory import memory_fabrics
from tests.adapters.torch.fake_cuda import Kind
from tests.adapters.torch_distributed.harness import on_ranks
from tests.support.fake_device import until_done
from tests.support.messages import TAG

LIMIT_S = 60.0


def default_group():
    """The group of all ranks, of a program with one rank, as PyTorch makes it."""
    options = SimpleNamespace(
        store=dist.HashStore(), group_rank=0, group_size=1, timeout=timedelta(seconds=60),
        global_ranks_in_group=[], group_id="0",
    )  # fmt: skip
    return _group.create(options)


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

        names = ("Condition", "Event", "Lock", "current_thread", "get_ident")
        kinds = {name: getattr(threading, name) for name in names}
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


# ---- a pending operation as PyTorch sees it ------------------------------------------------------


pytest.importorskip("torch")


SOON = timedelta(seconds=0.01)
LOST = PeerLostError("rank 1 was lost", rank=1)


class TestWork:
    def test_a_wait_with_a_time_limit(self):
        work = RingcommWork("allreduce", [])
        with pytest.raises(PeerStalledError, match=r"allreduce is not done within 0\.01 s"):
            work.wait(SOON)
        assert not work.is_completed() and not work.is_success() and work.waiters == 0
        work.finish()
        assert work.wait(SOON)


class TestInterruptedWaits:
    def interrupted(self, work):
        def helper(_):
            raise KeyboardInterrupt

        work._helper = helper
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        assert work.waiters == 0

    def test_it_ends_the_group_and_waits_until_the_tensors_are_free(self):
        log = []

        def end(work, problem):
            log.append(type(problem))
            threading.Timer(0.02, work.finish, (LOST,)).start()

        work = RingcommWork("work", [], interrupted=end)
        self.interrupted(work)
        assert log == [KeyboardInterrupt] and work.is_completed()


class TestLimits:
    """A point-to-point engine whose thread is this one, with a limit that is over at once."""

    @pytest.fixture
    def messages(self, monkeypatch):
        a, self.other = memory_fabrics(2, 100)
        messages = PointToPoint(a, Reporter(), 0.0, "messages")
        messages._thread = threading.current_thread()
        # So the last byte moved just now, whenever it did.
        monkeypatch.setattr(point_to_point, "monotonic", lambda: messages._channels[1].moved_s)
        return messages

    def test_a_message_that_moves_has_time(self, messages):
        moving, waiting = RingcommWork("send 0", []), RingcommWork("send 1", [])
        messages.send(1, TAG, memoryview(bytes(1000)), moving, 1e-9)
        messages._cycle()
        assert messages._check_limits() < 1
        messages.send(1, TAG, memoryview(bytes(SHORT_BYTES + 1)), waiting, 1e-9)
        messages._cycle()
        with pytest.raises(PeerStalledError, match="send 1.*not done within 1e-09 s"):
            messages._check_limits()
        assert not moving.is_completed()


# ---- tensors of devices --------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch):
    """Every tensor is on a device, of which the kind is given."""
    kind = Kind()
    monkeypatch.setitem(kinds._BY_TYPE, torch.Tensor, kind)
    yield kind
    for made in kind.devices:
        made.close()


def test_a_work_on_a_device_is_waited_for_in_every_way(device):
    for asked_before in (True, False):
        tensor = torch.arange(3.0)
        staged = Staged(StagingPool(), [tensor], [tensor], True)

        def run(work, staged=staged):
            host = staged.fetched(until_done)
            host += 1
            staged.deliver()

        work = RingcommWork("allreduce", [tensor], run, on_device=staged)
        future = work.get_future() if asked_before else None
        work.perform()
        future = work.get_future() if future is None else future
        assert work.wait() and future.wait()[0] is tensor and tensor.tolist() == [1.0, 2.0, 3.0]


# ---- hooks that average buckets of gradients -----------------------------------------------------


def average(state, gradients, last=True):
    """The gradients after the hook."""
    future = weighted_average_hook(state, SimpleNamespace(buffer=lambda: gradients, is_last=lambda: last))
    assert future.wait() is gradients
    return gradients.tolist()


@pytest.mark.parametrize("weights", [(1e39, 1.0), (1e-46, 1.0), (3e38, 3e38)])
def test_a_weight_that_the_type_of_the_gradients_does_not_represent_fails_everywhere(weights):
    def run(group):
        with pytest.raises(RuntimeError, match="Misuse: DDP: the weight of a rank"):
            average(WeightedAverage(weights[group.rank()], group), torch.ones(2))

    on_ranks(run, 2)


def test_balanced_batches_give_the_weights_of_each_step():
    def run(context):
        batches = Balanced(10, 4, speeds=[3.0, 1.0], context=lambda: context)
        state = WeightedAverage(batches)
        found = []
        for mine in batches:
            found.append((len(mine), state.now()))
            state.reduced()
        return found

    zero, one = run_ranks(2, run)
    assert [weight for _, weight in zero] == [count for count, _ in zero]
    assert [mine[1] + other[1] for mine, other in zip(zero, one)] == [4, 4, 2] and zero[0][1] == 3


@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_compressed_gradients_may_be_complex(kind):
    """A bucket has both parts of a complex gradient side by side."""

    def run(group):
        parameters = [torch.zeros(2, dtype=torch.complex64), torch.zeros(3)]
        buffer = torch.arange(7.0) * (group.rank() + 1)
        group.allreduce_packed(buffer, _Plans(kind).of(parameters)).wait()
        return buffer.tolist()

    assert on_ranks(run, 2) == [(torch.arange(7.0) * 1.5).tolist()] * 2
