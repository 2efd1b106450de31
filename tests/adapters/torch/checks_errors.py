"""What every rank checks about errors of its own, and about ranks that join, leave and come back."""

from __future__ import annotations

import warnings

import torch

import ringcomm.torch as hvd
from tests.support.errors import raises


def check_local_errors() -> None:
    size = hvd.size()
    ones = torch.ones(size, 2)
    raises(ValueError, lambda: hvd.allreduce(ones, average=True, op=hvd.Sum), "average")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(hvd.allreduce(ones, average=False), size * ones)
    assert [item.category for item in caught] == [DeprecationWarning]
    assert caught[0].filename == __file__
    splits = [1] * size
    raises(ValueError, lambda: hvd.alltoall(ones, [2] + splits[1:]), "greater than the first dimension")
    raises(ValueError, lambda: hvd.alltoall(ones, splits + [0]), "number of workers")
    raises(ValueError, lambda: hvd.alltoall(ones, torch.ones(size)), "list of whole numbers")
    if size > 1:
        raises(ValueError, lambda: hvd.alltoall(torch.ones(size + 1)), "not an even multiple")
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(1), name="twice") if hvd.rank() == 0 else None
        if hvd.rank() == 0:
            raises(ValueError, lambda: hvd.allreduce_async(torch.ones(1), name="twice"), "same name")
        hvd.barrier()
        handle = handle or hvd.allreduce_async(torch.ones(1), name="twice")
        assert hvd.synchronize(handle).item() == 1.0
    for function in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        raises(RuntimeError, lambda function=function: function(torch.tensor(1.0)), "dimension")
    raises(NotImplementedError, lambda: hvd.reducescatter(ones, op=hvd.Adasum), "Adasum")
    raises(ValueError, lambda: hvd.allreduce(ones.to_sparse()), "sparse")
    raises(ValueError, lambda: hvd.broadcast(ones, size), "root_rank")
    raises(ValueError, lambda: hvd.sparse_allreduce_async(ones.to_sparse(), "s", hvd.Max), "Sum")
    raises(ValueError, lambda: hvd.init(process_sets=[[0], [0]]), "entry number 2")
    raises(ValueError, lambda: hvd.init(comm=object()), "MPI")
    hvd.init(comm=list(range(size)), process_sets="dynamic")


def check_join() -> None:
    size, rank = hvd.size(), hvd.rank()
    for step in range(rank + 1):
        total = hvd.allreduce(torch.ones(3), op=hvd.Sum, name=f"uneven.{step}")
        assert total.tolist() == [float(size - step)] * 3  # ranks below ``step`` have joined
        average = hvd.allreduce(torch.ones(2), name=f"average.{step}")
        assert torch.allclose(average, torch.tensor((size - step) / size))
    assert 0 <= hvd.join() < size
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    if size > 1:
        if rank == 0:
            hvd.join()
        else:
            raises(hvd.HorovodInternalError, lambda: hvd.allgather(torch.ones(2)), "join")
            hvd.join()


def check_leaving_and_coming_back() -> None:
    rank, size = hvd.rank(), hvd.size()
    group = hvd.add_process_set([0]) if size > 1 else None
    for turn in range(2):
        hvd.barrier()
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        raises(ValueError, hvd.size, "init")
        raises(ValueError, lambda: hvd.allreduce(torch.ones(1)), "init")
        hvd.init()
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (rank, size)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name=f"turn.{turn}").item() == size
    if group is not None:
        assert group.process_set_id is None  # it belonged to the job before
        hvd.init(process_sets=[group])
        assert group.process_set_id == 1
