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
    Misuse,
    NotInitializedError,
    PeerLostError,
    PeerStalledError,
    StartupError,
)
from ringcomm.group import operation_queue, point_to_point
from ringcomm.torch.distributed import ProcessGroupRingcomm, _group, _group_transport, monitored_barrier
from ringcomm.torch.distributed._arguments import address_of, pairs_of, reduction_of, root_of, single
from ringcomm.torch.distributed._bridge import GroupOperand
from ringcomm.torch.distributed._elements import type_code, type_name
from ringcomm.torch.distributed._operations import Operations
from ringcomm.torch.distributed._reductions import GroupReduction
from ringcomm.torch.distributed._work import RingcommWork
from tests.adapters.torch_distributed.in_threads import on_ranks

LIMIT_S = 60.0


class TestArguments:
    def test_one_tensor_at_a_time(self):
        tensor = torch.ones(2)
        assert single(tensor) is tensor and single([tensor]) is tensor
        for tensors in ([], [tensor, tensor]):
            with pytest.raises(Misuse, match=f"one tensor at a time, not {len(tensors)}"):
                single(tensors)

    def test_tags_have_32_bits(self):
        assert address_of(7) == (0, 7) and address_of(-(1 << 31)) == (0, -(1 << 31))
        for tag in (1 << 31, -(1 << 31) - 1):
            with pytest.raises(Misuse, match=f"tag={tag}: tags are whole numbers of 32 bits"):
                address_of(tag)
        with pytest.raises(TypeError):
            address_of(1.5)

    def test_as_many_outputs_as_inputs(self):
        one, two = torch.ones(1), torch.ones(2)
        assert pairs_of([one, two], [two, one]) == [(one, two), (two, one)]
        with pytest.raises(Misuse, match="2 inputs need as many outputs, not 1"):
            pairs_of([one], [one, two])

    def test_without_options_it_is_a_sum_to_rank_0(self):
        assert reduction_of(None) == GroupReduction.of(dist.ReduceOp.SUM) and root_of(None) == 0
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = dist.ReduceOp.MAX, 3
        assert reduction_of(options) == GroupReduction.of(dist.ReduceOp.MAX) and root_of(options) == 3


class TestReductions:
    def test_a_factor_is_one_number(self):
        for factor in (0.5, torch.tensor(0.5), torch.tensor([0.5])):
            how = GroupReduction.of(dist._make_nccl_premul_sum(factor))
            contribution = torch.tensor([2.0, 4.0]).numpy()
            how.prepare(contribution)
            assert how.factor == 0.5 and contribution.tolist() == [1.0, 2.0]
        several = SimpleNamespace(op=dist.ReduceOp.PREMUL_SUM, factor=torch.tensor([0.5, 2.0]))
        with pytest.raises(Misuse, match="PREMUL_SUM needs one factor for the whole tensor"):
            GroupReduction.of(several)  # newer versions of PyTorch refuse to make it

    def test_what_it_does_not_have(self):
        with pytest.raises(Misuse, match="'nonsense' is not a reduction that the backend"):
            GroupReduction.of("nonsense")

    def test_labels_are_appended(self):
        how = GroupReduction.of(dist.ReduceOp.SUM)
        assert how.labelled("tensor 1 of 2").labelled("again").name == "tensor 1 of 2 again"


def test_an_unknown_type_has_a_name_too():
    assert type_name(type_code(torch.int16)) == "int16"
    assert type_name(3) == "a type that this PyTorch does not have"


def default_group():
    """The group of all ranks, of a program with one rank, as PyTorch makes it."""
    options = SimpleNamespace(
        store=dist.HashStore(), group_rank=0, group_size=1, timeout=timedelta(seconds=60),
        global_ranks_in_group=[], group_id="0",
    )  # fmt: skip
    return _group.create(options)


def alone(function):
    """Call it with a group of one."""
    (result,) = on_ranks(function, 1)
    return result


class TestFace:
    def test_names(self):
        def look(group):
            assert {group.getBackendName(), group.name(), group._get_backend_name()} == {"ringcomm"}
            assert group.group_name == group.getGroupName() == "test"
            assert group.group_desc == group.getGroupDesc() == "undefined"
            group.setGroupName("other")
            group.setGroupDesc("for messages")
            assert (group.group_name, group.group_desc) == ("other", "for messages")
            return repr(group)

        assert alone(look) == "ProcessGroupRingcomm(name='other', rank=0, size=1)"

    def test_devices(self):
        def look(group):
            assert group._get_backend(torch.device("cpu")) is group
            assert torch.device("cpu") in group._device_types
            assert not group.supports_tensor_alloc(torch.device("cpu"))
            assert isinstance(group.get_group_store(), dist.HashStore)

        alone(look)

    def test_the_number_of_operations(self):
        def count(group):
            before = group._get_sequence_number_for_group()
            group.barrier().wait()
            group.allreduce([torch.ones(2)]).wait()
            after = group._get_sequence_number_for_group()
            group._set_sequence_number_for_group()
            return before, after, group._get_sequence_number_for_group()

        assert alone(count) == (0, 2, 0)

    def test_messages_need_another_rank(self):
        def ask(group):
            for peer in (0, 1, -1):
                for act in (group.send, group.recv):
                    with pytest.raises(Misuse, match="to and come from the other ranks of the group"):
                        act([torch.ones(2)], peer)
            with pytest.raises(Misuse, match="this group has no other ranks"):
                group.recv_anysource([torch.ones(2)])

        alone(ask)

    def test_several_operations_as_one(self):
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


def test_every_operation_on_two_ranks():
    """What PyTorch calls, by all of its names; the numbers in all cases are those of test_collectives.py."""

    def run(group):
        rank, found = group.rank(), {}

        def own(*shape):
            return torch.full(shape, rank + 1.0)

        def note(name, work, *tensors):
            assert work.wait()
            found[name] = [tensor.tolist() for tensor in tensors]

        def places(count, *shape):
            return [torch.zeros(shape) for _ in range(count)]

        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = dist.ReduceOp.SUM, 1
        tensors = [own(1), own(2)]
        note("coalesced", group.allreduce_coalesced(tensors), *tensors)
        tensor = own(2)
        note("reduce", group.reduce([tensor], options), tensor)
        (place,) = places(1, 1)
        note("scattered", group.reduce_scatter([place], [[own(1), 10 * own(1)]]), place)
        (place,) = places(1, 1)
        note("part", group._reduce_scatter_base(place, own(2)), place)
        two = places(2, 1)
        note("parts", group.reduce_scatter_tensor_coalesced(two, [own(2), own(2)]), *two)
        tensor = own(2)
        note("broadcast", group.broadcast([tensor]), tensor)
        two = places(2, 1)
        note("gathered", group.allgather([two], [own(1)]), *two)
        four = [places(2, 1), places(2, 1)]
        note("several gathered", group.allgather_coalesced(four, [own(1), 10 * own(1)]), *four[0], *four[1])
        (place,) = places(1, 2)
        note("joined", group._allgather_base(place, own(1)), place)
        two = places(2, 2)
        note("all joined", group.allgather_into_tensor_coalesced(two, [own(1), own(1)]), *two)
        two = places(2, 1)
        note("to one", group.gather([] if rank else [two], [own(1)]), *two)
        (place,) = places(1, 1)
        pieces = [] if rank else [[torch.tensor([5.0]), torch.tensor([6.0])]]
        note("from one", group.scatter([place], pieces), place)
        two = places(2, 1)
        note("exchanged", group.alltoall(two, [own(1), 10 * own(1)]), *two)
        (place,) = places(1, 3 - rank)
        rows = [2 - rank, 1]
        note("rows", group.alltoall_base(place, own(3 - rank), rows, rows), place)
        tensor, (place,) = own(1), places(1, 1)
        sent = group.send([tensor], 1 - rank)
        work = group.recv_anysource([place])
        note("message", work, place)
        assert sent.wait() and work.source_rank() == 1 - rank
        group.set_timeout(timedelta(seconds=7))
        assert group._operations.limit_s(None) == 7.0
        return found

    zero, one = on_ranks(run, 2)
    for name, expected in {
        "coalesced": ([[3.0], [3.0, 3.0]],) * 2, "reduce": ([[1.0, 1.0]], [[3.0, 3.0]]),
        "scattered": ([[3.0]], [[30.0]]), "part": ([[3.0]],) * 2, "parts": ([[3.0], [3.0]],) * 2,
        "broadcast": ([[1.0, 1.0]],) * 2, "gathered": ([[1.0], [2.0]],) * 2, "joined": ([[1.0, 2.0]],) * 2,
        "all joined": ([[1.0, 2.0]] * 2,) * 2, "to one": ([[1.0], [2.0]], [[0.0], [0.0]]),
        "several gathered": ([[1.0], [10.0], [2.0], [20.0]],) * 2,
        "from one": ([[5.0]], [[6.0]]), "exchanged": ([[1.0], [2.0]], [[10.0], [20.0]]),
        "rows": ([[1.0, 1.0, 2.0]], [[1.0, 2.0]]), "message": ([[2.0]], [[1.0]]),
    }.items():  # fmt: skip
        assert (zero[name], one[name]) == expected, name


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
    def test_all_ranks_come(self):
        def run(group):
            monitored_barrier(group, timeout=LIMIT_S)
            monitored_barrier(group, timedelta(seconds=LIMIT_S), wait_all_ranks=True)
            monitored_barrier(group)

        assert on_ranks(run, 3) == [None] * 3

    def test_other_ranks_have_nothing_to_do(self):
        assert monitored_barrier(dist.GroupMember.NON_GROUP_MEMBER, timeout=LIMIT_S) is None

    def test_the_first_missing_rank_is_named(self):
        self.missing(False, "Rank 4")

    def test_all_missing_ranks_are_named(self):
        self.missing(True, "Ranks 4, 7")

    def missing(self, wait_all_ranks, names):
        judged = threading.Event()

        def run(group):
            if group.rank():
                assert judged.wait(LIMIT_S)
                return None
            with pytest.raises(PeerStalledError) as caught:
                monitored_barrier(group, 0.05, wait_all_ranks)
            judged.set()
            return caught.value.rank, str(caught.value)

        rank, text = on_ranks(run, 3, ranks=(2, 4, 7))[0]
        assert rank == 4
        assert text == (
            f"Rank 2 timed out in monitoredBarrier after 0.05 s: {names} failed to pass monitoredBarrier "
            "in that time."
        )

    def test_rank_0_may_leave_at_once(self):
        """Its replies are sent when the barrier is over, also if that takes a while."""

        def run(group):
            if group.rank() == 0:
                send = group._operations.messages.send
                group._operations.messages.send = lambda *args: threading.Timer(0.2, send, args).start()
            monitored_barrier(group, LIMIT_S)

        assert on_ranks(run, 3) == [None] * 3


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), Misuse("no such rank")])
def test_an_interrupt_while_a_message_is_started_ends_the_group(problem):
    operations, ended = object.__new__(Operations), []
    operations._name, operations.timeout_s, operations._coalesced = "of a test", 1.0, None
    operations.interrupted = lambda work, why: ended.append((work, why))
    operations._transport = SimpleNamespace(tell_shortage=lambda problem: None)

    def act(*_):
        raise problem

    tensor = torch.ones(2)
    work = RingcommWork("send to rank 1", [tensor])
    with pytest.raises(type(problem)):
        operations._started(act, 1, (0, 0), GroupOperand(tensor), work)
    assert ended == [(work, problem)] * isinstance(problem, KeyboardInterrupt)


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
            name: getattr(threading, name) for name in ("Lock", "Condition", "get_ident", "current_thread")
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
