"""What two ranks check on the backend that the environment names, without training: reductions and data."""

from __future__ import annotations

from typing import Any, List

import keras
import numpy as np

import ringcomm.keras as hvd
from ringcomm._adapter.reduction import Reduction
from ringcomm.keras.collectives import as_array
from ringcomm.keras.optimizer import reducer_class
from tests.adapters import contract


def work() -> bool:
    """Check everything."""
    hvd.init()
    for check in (
        collectives, gradients_of_local_variables, gradients_of_several_passes, gradients_made_of_rows,
        gradients_weighted_by_samples,
    ):  # fmt: skip
        check()
    hvd.shutdown()
    return True


def on_the_backend(function: Any, arrays: Any) -> List[Any]:
    return list(function(*map(keras.ops.convert_to_tensor, arrays)))


def collectives() -> None:
    types = ["float16", "float32", "int8", "uint8", "int32", "bool"]
    contract.check_collectives(hvd, on_the_backend, types)
    contract.check_a_mismatch(hvd, on_the_backend, hvd.HorovodInternalError)
    contract.check_every_form(hvd, "ringcomm.keras", np.array, np.asarray)
    hvd.broadcast_variables([], 0)


def applied(gradients: List[Any], **options: Any) -> List[Any]:
    """Return what a step of gradient descent with the rate 1 subtracts from variables."""
    variables = [keras.Variable(np.zeros(np.shape(item), "float32")) for item in gradients]
    local = options.pop("local", ())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
    optimizer.build(variables)
    for place in local:
        optimizer.register_local_var(variables[place])
    optimizer.apply([keras.ops.convert_to_tensor(item) for item in gradients], variables)
    return [-as_array(variable) for variable in variables]


def gradients_of_local_variables() -> None:
    mine = np.full(3, hvd.rank() + 1.0, "float32")
    for scale, divided in ((True, hvd.size()), (False, 1)):
        shared, local = applied([mine, mine], local=[1], scale_local_gradients=scale)
        assert shared.tolist() == [(hvd.size() + 1) / 2] * 3 and local.tolist() == (mine / divided).tolist()


def gradients_of_several_passes() -> None:
    """They are added up, local variables included, also of scaled losses (JAX: in a compiled step only)."""
    before = keras.config.dtype_policy()
    for policy in ("float32",) if keras.backend.backend() == "jax" else ("float32", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        variables = [keras.Variable(np.zeros(2, "float32")) for _ in range(2)]
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), backward_passes_per_step=2, scale_local_gradients=False
        )
        optimizer.build(variables)
        optimizer.register_local_var(variables[1])
        scaled = getattr(optimizer, "scale_loss", lambda number: number)
        for _ in range(2):
            mine = keras.ops.convert_to_tensor(np.full(2, hvd.rank() + 1.0, "float32"))
            optimizer.apply([scaled(mine), scaled(mine)], variables)
        shared, local = (as_array(variable).tolist() for variable in variables)
        assert shared == [-(hvd.size() + 1.0)] * 2 and local == [-2.0 * (hvd.rank() + 1)] * 2, policy
    keras.config.set_dtype_policy(before)


def gradients_made_of_rows() -> None:
    """Such as those of embeddings: made dense on PyTorch, kept on TensorFlow for a local variable."""
    variable = keras.Variable(np.zeros((2, 2), "float32"))
    if keras.backend.backend() == "torch":
        import torch

        rows = torch.sparse_coo_tensor([[hvd.rank()], [1]], [4.0], (2, 2))
        (found,) = reducer_class()(Reduction(hvd.Sum, 1.0, 0.5)).reduce([rows], [variable])
        assert found.tolist() == [[0.0, 2.0]] * 2
    elif keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build([variable])
        optimizer.register_local_var(variable)
        optimizer.apply([tf.IndexedSlices(tf.fill([1, 2], 4.0), [1], [2, 2])], [variable])
        assert as_array(variable).tolist() == [[0.0] * 2, [-4.0 / hvd.size()] * 2]


def gradients_weighted_by_samples() -> None:
    """A rank with three quarters of the samples has three quarters of the average."""
    data = hvd.BalancedDataset(np.arange(16.0), global_batch=8, speeds=[3, 1], shuffle=False)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), batches=data)
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer.build([variable])
    assert len(data) == 2
    data.on_epoch_begin()
    for step in range(2):
        rows = data[0]  # Keras shuffles indices: each call is the next batch
        assert len(rows) == [6, 2][hvd.rank()]
        together = sum(hvd.allgather_object(rows.tolist()), [])
        assert sorted(together) == list(range(8 * step, 8 * step + 8))
        optimizer.apply([keras.ops.convert_to_tensor(np.full(2, 4.0 * hvd.rank(), "float32"))], [variable])
    data.on_epoch_end()
    np.testing.assert_allclose(as_array(variable), [-2.0, -2.0])
    assert (data.state_dict()["epoch"], data.state_dict()["step"]) == (1, 0)
