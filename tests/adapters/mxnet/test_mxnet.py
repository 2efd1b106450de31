"""ringcomm.mxnet between real processes: collectives, errors, parameters and training."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import pytest

from tests.adapters.jobs import run_on
from tests.adapters.signatures import differences

if find_spec("mxnet") is None:
    pytest.skip("MXNet is not installed", allow_module_level=True)

CHECKS = [f"tests.adapters.mxnet.checks_{subject}" for subject in ("collectives", "parameters", "training")]

LIKE_HOROVODS = """
init(comm=None, process_sets=None)
shutdown()
is_initialized()
start_timeline(file_path, mark_cycles=False)
stop_timeline()
size()
rank()
local_size()
local_rank()
cross_size()
cross_rank()
mpi_threads_supported()
mpi_enabled()
mpi_built()
gloo_enabled()
gloo_built()
nccl_built()
ddl_built()
ccl_built()
cuda_built()
rocm_built()
add_process_set(process_set)
remove_process_set(process_set)
allreduce(tensor, average=None, name=None, priority=0, prescale_factor=1.0, postscale_factor=1.0, process_set=global, op=None)
allreduce_(tensor, average=None, name=None, priority=0, prescale_factor=1.0, postscale_factor=1.0, process_set=global, op=None)
grouped_allreduce(tensors, average=None, name=None, priority=0, prescale_factor=1.0, postscale_factor=1.0, process_set=global, op=None)
grouped_allreduce_(tensors, average=None, name=None, priority=0, prescale_factor=1.0, postscale_factor=1.0, process_set=global, op=None)
allgather(tensor, name=None, priority=0, process_set=global)
grouped_allgather(tensors, name=None, priority=0, process_set=global)
broadcast(tensor, root_rank, name=None, priority=0, process_set=global)
broadcast_(tensor, root_rank, name=None, priority=0, process_set=global)
alltoall(tensor, splits=None, name=None, priority=0, process_set=global)
reducescatter(tensor, op=Average, name=None, priority=0, process_set=global, prescale_factor=1.0, postscale_factor=1.0)
grouped_reducescatter(tensors, op=Average, name=None, priority=0, process_set=global, prescale_factor=1.0, postscale_factor=1.0)
broadcast_parameters(params, root_rank=0, prefix=None)
broadcast_object(obj, root_rank=0, name=None)
allgather_object(obj, name=None)
DistributedOptimizer(optimizer, gradient_predivide_factor=1.0, num_groups=0, process_set=global)
DistributedTrainer(params, optimizer, optimizer_params=None, compression=none, gradient_predivide_factor=1.0, prefix=None, num_groups=0, process_set=global)
Compression.none.compress(tensor)
Compression.fp16.decompress(tensor, ctx)
"""  # noqa: E501


def test_signatures() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MXNet's own, about what Python and NumPy will not have for ever
        import ringcomm.mxnet as hvd

    assert differences(hvd, LIKE_HOROVODS) == []


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.smoke), 3])
def test_every_rank_finds_everything_in_order(ranks: int) -> None:
    run_on(ranks, CHECKS)
