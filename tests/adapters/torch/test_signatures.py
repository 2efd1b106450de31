"""Every function of ``horovod.torch`` is here and takes the same parameters; every form with every option."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ringcomm.torch as hvd  # noqa: E402 - it needs torch
from tests.adapters.signatures import (  # noqa: E402 - the adapter needs torch
    COMMON,
    differences,
    differences_of_options,
    functions_of,
)
from tests.support.options import compare_forms, sets_of  # noqa: E402

LIKE_HOROVODS = f"""{COMMON}
is_homogeneous()
allreduce(tensor, average=None, name=None, compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global)
allreduce_async(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global)
allreduce_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global)
allreduce_async_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global)
grouped_allreduce(tensors, average=None, name=None, compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global)
grouped_allreduce_async(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global)
grouped_allreduce_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global)
grouped_allreduce_async_(tensors, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global)
sparse_allreduce_async(tensor, name, op, process_set=global)
allgather(tensor, name=None, process_set=global)
allgather_async(tensor, name=None, process_set=global)
grouped_allgather(tensors, name=None, process_set=global)
grouped_allgather_async(tensors, name=None, process_set=global)
broadcast(tensor, root_rank, name=None, process_set=global)
broadcast_async(tensor, root_rank, name=None, process_set=global)
broadcast_(tensor, root_rank, name=None, process_set=global)
broadcast_async_(tensor, root_rank, name=None, process_set=global)
alltoall(tensor, splits=None, name=None, process_set=global)
alltoall_async(tensor, splits=None, name=None, process_set=global)
reducescatter(tensor, name=None, compression=none, op=Average, process_set=global, prescale_factor=1.0, postscale_factor=1.0)
reducescatter_async(tensor, name=None, op=Average, process_set=global, prescale_factor=1.0, postscale_factor=1.0)
grouped_reducescatter(tensors, name=None, compression=none, op=Average, process_set=global, prescale_factor=1.0, postscale_factor=1.0)
grouped_reducescatter_async(tensors, name=None, op=Average, process_set=global, prescale_factor=1.0, postscale_factor=1.0)
join(device=-1)
barrier(process_set=global)
poll(handle)
synchronize(handle)
broadcast_parameters(params, root_rank)
broadcast_optimizer_state(optimizer, root_rank, model=None)
broadcast_object(obj, root_rank=0, name=None, process_set=global)
allgather_object(obj, name=None)
DistributedOptimizer(optimizer, named_parameters=None, compression=none, backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=global)
SyncBatchNorm(num_features, eps=0.00001, momentum=0.1, affine=True, track_running_stats=True)
Compression.none.compress(tensor)
Compression.fp16.decompress(tensor, ctx)
elastic.run(func)
elastic.TorchState(model=None, optimizer=None)
elastic.ElasticSampler(dataset, shuffle=True, seed=0)
elastic.ElasticSampler.record_batch(batch_idx, batch_size)
elastic.get_handler_registry()
elastic.set_handler_registry(registry)
"""  # noqa: E501


def test_signatures() -> None:
    assert differences(hvd, LIKE_HOROVODS) == []
    assert differences_of_options(hvd, "ringcomm.torch") == []


@pytest.mark.parametrize("size", [2, 3])
def test_every_form_with_every_option(ranks_of, size):
    names = functions_of("ringcomm.torch")

    def work(context):
        sets = [hvd.add_process_set(ranks) for ranks in sets_of(size)]
        calls = 0
        for each in (hvd.global_process_set, *sets):
            members = list(range(size)) if each is hvd.global_process_set else each.ranks
            if context.rank in members:
                calls += compare_forms(hvd, names, members, context.rank, each, torch.tensor, np.asarray)
        hvd.barrier()
        return calls

    assert min(ranks_of(size, work)) > 100
