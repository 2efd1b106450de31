"""Tensors as arrays of the engine: on a device that is slow and full of poison, and on the CPU."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import ringcomm.torch as hvd
from ringcomm.arrays.torch_tensors import KIND
from ringcomm.errors import UnsupportedDtypeError
from tests.adapters.torch.fake_cuda import Kind, all_tensors_of, same

SIZE = 2


def values(rank, *shape):
    return torch.from_numpy(np.random.default_rng((rank, *shape)).standard_normal(shape).astype(np.float32))


def collectives(context):
    """Every operation on tensors, as a list of results."""
    rank, small, large = context.rank, values(context.rank, 4, 6), values(context.rank, 600, 700)
    found = [
        hvd.allreduce(small, name="a"),
        hvd.allreduce_(large.clone(), name="b", op=hvd.Sum),
        *hvd.grouped_allreduce([small, large], name="c"),
        *hvd.grouped_allreduce_([small.clone(), large.clone()], name="d", op=hvd.Sum),
        hvd.allgather(values(rank, rank + 1, 5), name="e"),
        *hvd.grouped_allgather([small, large], name="f"),
        hvd.broadcast(large, 1, name="g"),
        hvd.broadcast_(small.clone(), 1, name="h"),
        hvd.alltoall(small, name="i"),
        hvd.reducescatter(large, name="j", op=hvd.Sum),
        hvd.synchronize(hvd.allreduce_async(large, name="k", prescale_factor=0.5)),
        hvd.allreduce(small.t(), name="l"),
        hvd.allreduce(large.to(torch.bfloat16), name="m").float(),
        hvd.allreduce(torch.tensor(float(rank)), name="n"),
        hvd.allreduce(small, name="o", weight=rank + 1.0),
    ]
    turned = small.clone().t()
    hvd.allreduce_(turned, name="p")
    before = large.clone()
    handle = hvd.allreduce_async(large, name="q")
    large.zero_()  # the caller may do that at once
    found += [turned, hvd.synchronize(handle), before]
    return [item[0] if isinstance(item, tuple) else item for item in found]


def training(compression=hvd.Compression.none, steps=4, group=None):
    """A function that trains a model, and returns its parameters and the broadcast state."""

    def train(context):
        model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5))
        with torch.no_grad():
            for parameter in model.parameters():  # the ranks share a random generator
                parameter.copy_(0.1 * values(context.rank, *parameter.shape))
        plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(
            plain, named_parameters=model.named_parameters(), compression=compression
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(steps):
            inputs = values(100 * step + context.rank, 8, 20)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            model(inputs).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    return train


def compared(ranks_of, function, delay_s=0.001):
    expected = ranks_of(SIZE, function)
    kind = Kind(delay_s=delay_s)
    with all_tensors_of(kind):
        found = ranks_of(SIZE, function)
    assert len(kind.devices) == SIZE and all(device.copies_out for device in kind.devices)
    for mine, theirs in zip(found, expected):
        assert [same(one, other) for one, other in zip(mine, theirs)] == [True] * len(theirs)


def test_collectives(ranks_of):
    compared(ranks_of, collectives)


@pytest.mark.parametrize("compression", ["none", "fp16", "int8"])
def test_training_gives_the_parameters_of_the_cpu(compression, ranks_of):
    compared(ranks_of, training(getattr(hvd.Compression, compression)))


def test_the_hook_returns_before_the_copy_is_done(ranks_of):
    """backward() ends while no copy has been done, and step() waits for them."""
    gate = threading.Event()
    kind = Kind()
    engine = kind.engine

    def gated(value):
        made = engine(value)
        made._out.put(lambda: gate.wait(30.0))
        return made

    kind.engine = gated

    def train(context):
        model = torch.nn.Linear(50, 7)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sparse_as_dense=True
        )
        optimizer.zero_grad()
        model(values(context.rank, 3, 50)).sum().backward()
        copies = [device.copies_out for device in kind.devices]
        context.barrier()  # every rank has come here
        gate.set()
        optimizer.step()
        return copies

    with all_tensors_of(kind):
        copies = ranks_of(SIZE, train)
    assert all(sum(counts) for counts in copies), "the hooks have started copies"


# ---- the CPU -----------------------------------------------------------------------------------------------


def test_the_memory_of_a_tensor_of_the_cpu():
    tensor = torch.zeros(2, 3, requires_grad=True)
    memory = KIND.host_memory(tensor)
    memory[1, 2] = 7.0
    assert tensor[1, 2].item() == 7.0
    half = torch.ones(4, dtype=torch.bfloat16)
    memory = KIND.host_memory(half)
    assert memory.dtype.name == "bfloat16"
    memory[0] = 3.0
    assert half[0].item() == 3.0
    assert KIND.host_memory(torch.tensor([1 + 2j]).conj()) is None
    with pytest.raises(UnsupportedDtypeError, match="on dense tensors, not on torch.sparse_coo"):
        KIND.host_memory(tensor.detach().to_sparse())
    with pytest.raises(UnsupportedDtypeError, match="on the device meta, where tensors have no values"):
        KIND.host_memory(torch.zeros(2, device="meta"))
    with pytest.raises(UnsupportedDtypeError, match="torch.float8_e5m2 cannot be sent"):
        KIND.host_memory(torch.zeros(2, dtype=torch.float8_e5m2))
