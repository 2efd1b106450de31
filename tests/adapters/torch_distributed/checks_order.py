"""Messages, groups, threads, futures: what happens when."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from tests.adapters.torch_distributed.harness import Ranks
from tests.support.errors import raises


def check_waiting_in_any_order(on: Ranks) -> None:
    order = random.Random(on.rank)
    for _ in range(5):
        tensors = [torch.full((1 + n * 997,), float(on.rank + n)) for n in range(20)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        sync = torch.ones(3)
        dist.all_reduce(sync)
        numbers = list(range(20))
        order.shuffle(numbers)
        for n in numbers:
            assert works[n].wait() and works[n].is_completed() and works[n].is_success()
        for n, tensor in enumerate(tensors):
            assert bool((tensor == sum(rank + n for rank in range(on.size))).all())
        assert bool((sync == on.size).all())


def check_futures(on: Ranks) -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    chained = work.get_future().then(lambda future: future.value()[0] * 2)
    assert torch.equal(chained.wait(), torch.full((3,), 2.0 * on.size))
    assert torch.equal(work.result()[0], torch.full((3,), float(on.size)))
    work.wait()
    assert torch.equal(work.get_future().wait()[0], torch.full((3,), float(on.size)))


def check_collectives_inside_futures(on: Ranks) -> None:
    """As PowerSGD's hook does. The order of what they start is the same on all ranks, or this mixes up."""

    def again(future: torch.futures.Future) -> torch.Tensor:
        tensor = future.value()[0]
        inner = dist.all_reduce(tensor, async_op=True).get_future().wait()
        return inner[0]

    pause = random.Random(on.rank)
    for _ in range(20):
        tensors = [torch.full((n + 1,), 1.0) for n in range(5)]
        chains = []
        for tensor in tensors:
            chains.append(dist.all_reduce(tensor, async_op=True).get_future().then(again))
            time.sleep(pause.choice((0, 0, 1e-3)))
        for number, chain in enumerate(chains):
            got = chain.wait()
            assert torch.equal(got, torch.full((number + 1,), float(on.size**2)))


def check_messages(on: Ranks) -> None:
    if on.size < 2:
        return
    right, left = (on.rank + 1) % on.size, (on.rank - 1) % on.size
    for count in (0, 1, 1000, 300_000):
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
            sent = (torch.arange(count) + on.rank).to(dtype)
            got = torch.zeros(count, dtype=dtype)
            work = dist.isend(sent, right)
            assert dist.recv(got, left) == left
            work.wait()
            assert torch.equal(got, (torch.arange(count) + left).to(dtype)), (count, dtype)


def check_messages_with_tags_out_of_order(on: Ranks) -> None:
    if on.size < 2 or on.rank > 1:
        return
    counts = [3, 200_000, 5, 100_000]
    if on.rank == 0:
        works = [dist.isend(torch.full((n,), float(tag)), 1, tag=tag) for tag, n in enumerate(counts)]
        for work in works:
            work.wait()
    else:
        time.sleep(0.05)  # so that some have come before they are asked for
        for tag in (3, 0, 2, 1):
            got = torch.zeros(counts[tag])
            dist.recv(got, 0, tag=tag)
            assert bool((got == tag).all())


def check_messages_with_one_tag_keep_their_order(on: Ranks) -> None:
    if on.size < 2 or on.rank > 1:
        return
    sizes = [1, 50_000, 2, 50_000, 3]
    if on.rank == 0:
        for work in [dist.isend(torch.full((n,), float(i)), 1) for i, n in enumerate(sizes)]:
            work.wait()
    else:
        places = [torch.zeros(n) for n in sizes]
        works = [dist.irecv(place, 0) for place in places]
        for work in reversed(works):
            work.wait()
        assert [float(place[0]) for place in places] == [0, 1, 2, 3, 4]


def check_messages_from_any_peer(on: Ranks) -> None:
    if on.rank == 0:
        seen = set()
        for count in (2, 40_000):
            for _ in range(on.size - 1):
                got = torch.zeros(count)
                source = dist.recv(got, tag=count)
                assert bool((got == source).all())
                seen.add((count, source))
        assert len(seen) == 2 * (on.size - 1)
    else:
        for count in (2, 40_000):
            dist.send(torch.full((count,), float(on.rank)), 0, tag=count)
    on.together("received")


def check_messages_in_batches(on: Ranks) -> None:
    if on.size < 2:
        return
    right, left = (on.rank + 1) % on.size, (on.rank - 1) % on.size
    for count in (10, 400_000):
        got, back = torch.zeros(count), torch.zeros(count)
        batch = [
            dist.P2POp(dist.isend, torch.full((count,), float(on.rank)), right, tag=1),
            dist.P2POp(dist.irecv, got, left, tag=1),
            dist.P2POp(dist.isend, torch.full((count,), -float(on.rank)), left, tag=2),
            dist.P2POp(dist.irecv, back, right, tag=2),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert bool((got == left).all()) and bool((back == -right).all())


def check_messages_and_collectives_do_not_disturb_each_other(on: Ranks) -> None:
    if on.size < 2:
        return
    right, left = (on.rank + 1) % on.size, (on.rank - 1) % on.size
    got, columns = torch.zeros(500_000), torch.zeros(4, 3)
    receiving = dist.irecv(got, left)
    strided = dist.irecv(columns[:, 1], left, tag=7)
    for _ in range(3):
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor)
        assert bool((tensor == on.size).all())
    sending = [dist.isend(torch.full((500_000,), float(on.rank)), right)]
    sending.append(dist.isend(torch.ones(4, 2)[:, 1], right, tag=7))
    dist.barrier()
    for work in [receiving, strided, *sending]:
        work.wait()
    assert bool((got == left).all())
    assert torch.equal(columns, torch.tensor([0.0, 1.0, 0.0]).expand(4, 3))


def check_many_messages_received_in_the_reverse_order(on: Ranks) -> None:
    """More than may wait for a receive at the other end."""
    if on.size < 2 or on.rank > 1:
        return
    tags = range(3000)
    tensors = [torch.full((32_000,), tag % 251, dtype=torch.uint8) for tag in tags]
    if on.rank == 0:
        works = [dist.isend(tensor, 1, tag=tag) for tag, tensor in enumerate(tensors)]
        for work in works:
            work.wait()
    else:
        got = torch.zeros(32_000, dtype=torch.uint8)
        for tag in reversed(tags):
            dist.recv(got, 0, tag=tag)
            assert torch.equal(got, tensors[tag]), tag


def check_tags(on: Ranks) -> None:
    from ringcomm.errors import Misuse

    if on.size < 2 or on.rank > 1:
        return
    peer = 1 - on.rank
    for tag in (2**31, -(2**31) - 1, 2**40):
        for act in (dist.isend, dist.irecv):
            error = raises(Misuse, partial(act, torch.ones(1), peer, tag=tag), "32 bits")
            assert f"tag={tag}" in str(error)
    for tag in (2**31 - 1, 0):  # and then everything goes on
        got = torch.zeros(1)
        work = dist.isend(torch.full((1,), float(on.rank)), peer, tag=tag)
        dist.recv(got, peer, tag=tag)
        work.wait()
        assert float(got) == peer


def check_groups(on: Ranks) -> None:
    if on.size < 3:
        return
    low, ends = dist.new_group([0, 1]), dist.new_group([0, on.size - 1], group_desc="ends")
    alone = dist.new_group([1])
    if on.rank in (0, 1):
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=low)
        assert bool((tensor == 2).all()) and dist.get_backend(low) == "ringcomm"
    if on.rank in (0, on.size - 1):
        tensor = torch.full((2,), float(on.rank))
        dist.broadcast(tensor, on.size - 1, group=ends)
        assert bool((tensor == on.size - 1).all()) and dist.get_world_size(ends) == 2
        if on.rank:
            dist.send(tensor, 0, group=ends)
        else:
            assert dist.recv(tensor, group=ends) == on.size - 1
        assert ends.group_desc == "ends"
    if on.rank == 1:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=alone)
        assert float(tensor) == 1
    for group in (low, ends, alone):
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    dist.barrier()


def check_groups_in_threads(on: Ranks) -> None:
    groups = [dist.new_group() for _ in range(3)]
    problems = []

    def use(group: object, seed: int) -> None:
        pause = random.Random(seed * 100 + on.rank)
        try:
            for n in range(30):
                tensor = torch.full((1 + n * 501,), float(seed))
                dist.all_reduce(tensor, group=group, async_op=bool(n % 2)) and None
                if pause.random() < 0.1:
                    time.sleep(1e-3)
                dist.barrier(group=group)
                assert bool((tensor == seed * on.size).all()), (seed, n)
        except Exception as problem:  # noqa: BLE001 - raised below, in the thread that counts
            problems.append(problem)

    threads = [threading.Thread(target=use, args=(group, seed)) for seed, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    for group in groups:
        dist.destroy_process_group(group)


def check_subgroups_and_meshes(on: Ranks) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (on.size,), mesh_dim_names=("all",))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=mesh.get_group("all"))
    assert float(tensor) == on.size
    if on.size == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("down", "across"))
        for name, others in (("down", (on.rank + 2) % 4), ("across", on.rank ^ 1)):
            tensor = torch.tensor([float(on.rank)])
            dist.all_reduce(tensor, group=square[name].get_group())
            assert float(tensor) == on.rank + others


def check_names_and_numbers(on: Ranks) -> None:
    assert dist.get_backend() == "ringcomm" and on.ring.name() == "ringcomm"
    assert (dist.get_rank(), dist.get_world_size()) == (on.rank, on.size)
    assert on.ring.group_name and repr(on.ring).startswith("ProcessGroupRingcomm(")
    before = on.ring._get_sequence_number_for_group()
    dist.barrier()
    assert on.ring._get_sequence_number_for_group() == before + 1
    on.ring.set_timeout(timedelta(seconds=20))
    dist.barrier()


def check_a_receive_without_a_send_ends(on: Ranks) -> None:
    from ringcomm.errors import PeerStalledError

    group = dist.new_group(timeout=timedelta(seconds=1))
    try:
        group.recv_anysource([torch.zeros(1)], 5).wait()
    except PeerStalledError as error:
        assert "1 s" in str(error)
    except Exception as error:  # noqa: BLE001
        assert on.size == 1, error
    on.together("ended")
    dist.barrier(group=group)
    dist.destroy_process_group(group)


def check_messages_while_another_rank_is_in_a_collective(on: Ranks) -> None:
    """Ranks 0 and 1 exchange messages, long ones too; the others wait for them in an all-reduce meanwhile."""
    if on.size < 3:
        return
    for count in (1, 5_000, 3_000_000):
        for waits in (False, True):
            total = torch.ones(10)
            if on.rank > 1:
                work = [] if waits else [dist.all_reduce(total, async_op=True)]
                thread = threading.Thread(target=_say_when_in_a_call, args=(on, f"{count} {waits}"))
                thread.start()
                if waits:
                    dist.all_reduce(total)
                for item in work:
                    item.wait()
                thread.join()
            else:
                on.together(f"{count} {waits}")
                mine, other = torch.full((count,), float(on.rank)), torch.zeros(count)
                if on.rank:
                    dist.recv(other, 0)
                    dist.send(mine, 0)
                else:
                    dist.send(mine, 1)
                    dist.recv(other, 1)
                assert bool((other == 1 - on.rank).all())
                dist.all_reduce(total)
            assert bool((total == on.size).all())


def _say_when_in_a_call(on: Ranks, word: str) -> None:
    progress = on.ring._ops.runner.progress
    while not progress().doing:
        time.sleep(0.001)
    on.together(word)
