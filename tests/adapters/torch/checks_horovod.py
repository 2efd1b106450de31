"""What programs written for Horovod rely on besides the collectives' results, on every rank in order."""

from __future__ import annotations

from typing import Any, Tuple

import torch

import ringcomm.torch as hvd
from ringcomm.configuration import settings
from tests.adapters.jobs import operations_with_a_set
from tests.support.errors import raises


def two_sets() -> Tuple[Any, Any]:
    """Ranks with even and with odd numbers; first the one that this rank belongs to."""
    even = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    odd = hvd.add_process_set(list(range(1, hvd.size(), 2)))
    return (odd, even) if hvd.rank() % 2 else (even, odd)


def check_gradients_with_process_sets() -> None:
    """Each operation's gradient among the ranks of a set: (how it is called, what comes of ones)."""
    if hvd.size() == 1:
        return
    mine, other = two_sets()
    members, place = mine.size(), mine.rank()
    operations = operations_with_a_set(hvd, mine, mine.ranks[-1])
    for name, (operation, wanted) in operations.items():
        for dtype in (torch.float32, torch.float64):
            source = torch.full((2 * members, 3), float(place), dtype=dtype, requires_grad=True)
            result = operation(source, mine)
            result.backward(torch.ones_like(result))
            assert source.grad is not None and torch.equal(source.grad, torch.full_like(source, wanted)), name
        raises(ValueError, lambda op=operation: op(torch.ones(4), other), "not a member")
    hvd.barrier()
    assert hvd.remove_process_set(mine if mine.ranks[0] == 0 else other)
    assert hvd.remove_process_set(other if mine.ranks[0] == 0 else mine)


def step_over(process_set: Any) -> None:
    """A step of an optimizer that reduces gradients over a process set."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), process_set=process_set)
    weight.sum().backward()
    optimizer.step()


def check_process_sets_by_lists_and_ids() -> None:
    size = hvd.size()
    lists = [[0]] + ([list(range(size - 1, 0, -1))] if size > 1 else [])
    if size == 1:
        raises(ValueError, lambda: hvd.init(process_sets=lists), "already")
        return
    hvd.init(process_sets=lists)
    known = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
    assert known == {0: list(range(size)), 1: [0], 2: list(range(1, size))}
    hvd.init()  # again: nothing happens
    fake = hvd.ProcessSet([0])
    assert fake.process_set_id is None
    raises(ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=fake), "registered")
    fake.process_set_id = 10
    raises(ValueError, lambda: hvd.allgather(torch.ones(1), process_set=fake), "Process set 10")
    raises(ValueError, lambda: hvd.barrier(process_set=fake), "Process set 10")
    named = hvd.ProcessSet([0])
    assert named.size() is None and named.rank() is None and named.included() is None
    for call in (hvd.barrier, step_over):  # nor is such a set taken for one of other ranks
        raises(ValueError, lambda call=call: call(process_set=named), "registered")
    named.process_set_id = 1
    assert named.size() == 1 and named.included() == (hvd.rank() == 0)
    hvd.barrier()
    rest = hvd.ProcessSet(range(1, size))
    rest.process_set_id = 2
    assert hvd.remove_process_set(named) and hvd.remove_process_set(rest)
    assert not hvd.remove_process_set(named) and not hvd.remove_process_set(hvd.global_process_set)


def check_gradients_of_a_fresh_optimizer() -> None:
    """They stay; only a program that imports Horovod gets zeros, as there."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=0.1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert weight.grad is None
    settings.aliases.append(lambda *ignored: [])
    try:
        a_fresh_optimizers_gradients_are_zeros()
    finally:
        settings.aliases.pop()


def a_fresh_optimizers_gradients_are_zeros() -> None:
    used = torch.nn.Parameter(torch.full((3,), float(hvd.rank() + 1)))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    whole = torch.nn.Parameter(torch.tensor([1, 3]), requires_grad=False)
    present = torch.nn.Parameter(torch.ones(2))
    present.grad = torch.full((2,), 5.0)
    parameters = [used, frozen, whole, present]
    own = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)
    names = [(str(number), item) for number, item in enumerate(parameters)]
    optimizer = hvd.DistributedOptimizer(own, named_parameters=names)
    before = used.detach().clone()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert used.grad is not None and used.grad.tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(used.detach(), before)  # nothing has moved, whatever the weight decay
    assert frozen.grad is None and whole.grad is None and present.grad.tolist() == [5.0, 5.0]
    assert hvd.broadcast(used.grad, 0).tolist() == [0.0, 0.0, 0.0]
    used.sum().backward()
    optimizer.step()
    used.grad = None
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert used.grad is None  # it is not fresh any more


def check_the_names_under_which_scripts_look() -> None:
    from ringcomm.torch import mpi_ops
    from ringcomm.torch.mpi_ops import Average, allreduce_async_, poll, rank, size, synchronize

    assert mpi_ops is hvd.mpi_ops and rank() == hvd.rank() and size() == hvd.size()
    assert synchronize is hvd.synchronize and poll is hvd.poll and Average == hvd.Average
    assert synchronize(allreduce_async_(torch.ones(2), op=Average)).tolist() == [1.0, 1.0]
    assert mpi_ops._basics.gloo_built() and mpi_ops._basics.rank() == hvd.rank()
