"""ringcomm.mxnet between real processes: collectives, errors, parameters and training."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.jobs import check_a_lost_rank, run_on
from tests.adapters.signatures import COMMON, differences, differences_of_options

if find_spec("mxnet") is None:
    pytest.skip("MXNet is not installed", allow_module_level=True)

CHECKS = [f"tests.adapters.mxnet.checks_{subject}" for subject in ("collectives", "training")]

LIKE_HOROVODS = f"""{COMMON}
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
    assert differences_of_options(hvd, "ringcomm.mxnet") == []


@pytest.mark.smoke
def test_everything_on_two_ranks() -> None:
    run_on(2, CHECKS)


@pytest.mark.release
@pytest.mark.parametrize("ranks", [1, 3])
def test_everything_on_other_numbers_of_ranks(ranks: int) -> None:
    run_on(ranks, CHECKS)


def step_of_a_trainer() -> Any:
    """A function that trains a parameter for a step."""
    import mxnet as mx

    import ringcomm.mxnet as hvd

    parameter = mx.gluon.Parameter("weight", shape=(3,))
    parameter.initialize(mx.init.One())
    optimizer = mx.optimizer.SGD(learning_rate=0.1)
    trainer = hvd.DistributedTrainer({"w": parameter}, optimizer)

    def step() -> None:
        with mx.autograd.record():
            loss = (parameter.data() * 2).sum()
        loss.backward()
        trainer.step(1)

    return step


def test_a_lost_rank_is_the_same_recoverable_error_for_all_others(tmp_path: Path) -> None:
    check_a_lost_rank(step_of_a_trainer, tmp_path)
