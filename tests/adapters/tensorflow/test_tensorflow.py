"""ringcomm.tensorflow between processes, and Keras on it in the same ones, as imports take seconds."""

from __future__ import annotations

from functools import lru_cache
from typing import Dict

import pytest

from tests.adapters.jobs import InTurn, check_outcomes, run_checks, run_in_turn
from tests.adapters.signatures import differences, differences_of_options

CHECKS = [
    f"tests.adapters.tensorflow.checks_{subject}" for subject in ("collectives", "training", "balanced")
]
pytestmark = pytest.mark.timeout(600)


def run_all_checks() -> Dict[str, str]:
    return run_checks(CHECKS)


def reduce_with_keras() -> bool:
    from tests.adapters.keras import reductions

    return reductions.work()


@lru_cache(maxsize=None)
def outcomes_on_two_ranks() -> InTurn:
    parts = [(run_all_checks, 2), (reduce_with_keras, 2)]
    return run_in_turn(parts, KERAS_BACKEND="tensorflow")


class TestOnTwoRanks:
    """What the quick run takes, too, in one start of each process."""

    pytestmark = [pytest.mark.smoke, pytest.mark.xdist_group("tensorflow-2")]

    def test_collectives_and_training(self) -> None:
        check_outcomes(outcomes_on_two_ranks().results(run_all_checks, 2))

    def test_keras(self) -> None:
        assert outcomes_on_two_ranks().results(reduce_with_keras, 2) == [True] * 2


@lru_cache(maxsize=None)
def outcomes_on_three_processes() -> InTurn:
    return run_in_turn([(run_all_checks, 3), (run_all_checks, 1)])


@pytest.mark.release
@pytest.mark.xdist_group("tensorflow-3")
@pytest.mark.parametrize("ranks", [1, 3])
def test_collectives_and_training_on_other_numbers_of_ranks(ranks: int) -> None:
    """In the same three processes, one job after the other."""
    check_outcomes(outcomes_on_three_processes().results(run_all_checks, ranks))


LIKE_HOROVODS = """
init(comm=None, process_sets=None)
start_timeline(file_path, mark_cycles=False)
allreduce(tensor, average=None, device_dense=, device_sparse=, compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, name=None, process_set=global, ignore_name_scope=False)
grouped_allreduce(tensors, average=None, device_dense=, device_sparse=, compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global, ignore_name_scope=False, name=None)
reducescatter(tensor, device_dense=, compression=none, op=Average, name=None, process_set=global, ignore_name_scope=False, prescale_factor=1.0, postscale_factor=1.0)
grouped_reducescatter(tensors, device_dense=, compression=none, op=Average, process_set=global, prescale_factor=1.0, postscale_factor=1.0)
allgather(tensor, name=None, ignore_name_scope=False, process_set=global)
grouped_allgather(tensors, name=None, ignore_name_scope=False, process_set=global)
broadcast(tensor, root_rank, name=None, ignore_name_scope=False, process_set=global)
broadcast_(variables, root_rank, name=None, process_set=global)
alltoall(tensor, splits=None, name=None, ignore_name_scope=False, process_set=global)
join()
size_op(process_set_id=0, name=None)
process_set_included_op(process_set_id=0, name=None)
rank_op(name=None)
local_rank_op(name=None)
local_size_op(name=None)
broadcast_variables(variables, root_rank, process_set=global, inplace=False)
broadcast_global_variables(root_rank)
BroadcastGlobalVariablesHook(root_rank, device=)
broadcast_object(obj, root_rank=0, session=None, name=None, process_set=global)
broadcast_object_fn(root_rank=0, session=None, name=None, process_set=global)
allgather_object(obj, session=None, name=None, process_set=global)
DistributedOptimizer(optimizer, name=None, use_locking=False, device_dense=, device_sparse=, compression=none, sparse_as_dense=False, backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, average_aggregated_gradients=False, num_groups=0, groups=None, process_set=global, scale_local_gradients=True)
DistributedGradientTape(gradtape, device_dense=, device_sparse=, compression=none, sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, process_set=global, scale_local_gradients=True)
PartialDistributedGradientTape(gradtape, device_dense=, device_sparse=, compression=none, sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, process_set=global, local_layers=None, scale_local_gradients=True)
SyncBatchNormalization(fused=False)
elastic.run(func)
elastic.TensorFlowState(variables=None, session=None)
elastic.TensorFlowKerasState(model, optimizer=None, backend=None)
"""  # noqa: E501


def test_signatures() -> None:
    import ringcomm.tensorflow as hvd

    assert differences(hvd, LIKE_HOROVODS) == []
    assert differences_of_options(hvd, "ringcomm.tensorflow") == []
