"""ringcomm.tensorflow in one process: errors, names, arguments, variables and data."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from ringcomm.errors import ConfigError, MismatchError, Misuse, PeerLostError

tf: Any = None
hvd: Any = None


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """Import what the tests use: to collect them must not import a framework."""
    globals().update(tf=import_module("tensorflow"), hvd=import_module("ringcomm.tensorflow"))


def test_shapes_are_known_when_a_function_is_built(alone: Any) -> None:
    @tf.function(autograph=False)
    def both(x: Any) -> Any:
        doubled = hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0)
        gathered = hvd.allgather(x)
        assert doubled.shape == (3,) and gathered.shape[1:] == x.shape[1:]
        return doubled, gathered

    doubled, gathered = both(tf.constant([1.0, 2.0, 3.0]))
    assert doubled.numpy().tolist() == [2.0, 4.0, 6.0]
    assert gathered.numpy().tolist() == [1.0, 2.0, 3.0]


def test_a_set_that_does_not_exist_is_an_error_when_the_graph_is_built(alone: Any) -> None:
    fake = hvd.ProcessSet([0])
    fake.process_set_id = 10

    def function(x: Any) -> Any:
        return hvd.allreduce(x, process_set=fake)

    for autograph in (True, False):
        with pytest.raises(ValueError, match="Process set 10 does not exist"):
            tf.function(function, autograph=autograph)(tf.ones(2))
    with tf.Graph().as_default(), pytest.raises(ValueError, match="Process set 10 does not exist"):
        function(tf.ones(2))
    with pytest.raises(Misuse, match="Process set 7 does not exist"):
        hvd.size_op(7)


def test_errors_are_those_of_tensorflow_too(alone: Any) -> None:
    from ringcomm.tensorflow import bridge

    with pytest.raises(ConfigError, match="broadcast_object or allgather_object") as raised:
        hvd.broadcast(tf.constant(["text"]), 0)
    assert isinstance(raised.value, tf.errors.InvalidArgumentError)
    for error, counterpart in (
        (PeerLostError("rank 3 was lost", rank=3), tf.errors.UnknownError),
        (MismatchError("ranks differ"), tf.errors.FailedPreconditionError),
    ):
        found = bridge.translated(error)
        assert isinstance(found, type(error)) and isinstance(found, counterpart)
        assert type(found).__name__ == type(error).__name__ and str(found) == str(error)
        assert {name: getattr(found, name) for name in vars(error)} == vars(error)


def test_variables_of_graphs_are_broadcast_by_an_operation(alone: Any) -> None:
    from tests.adapters.tensorflow.modes import session_of_a_graph

    assert hvd.broadcast_variables([], 0) is None and hvd.broadcast_([], 0) == []
    variables = [tf.Variable(1.0), tf.Variable([2, 3])]
    assert all(mine is other for mine, other in zip(hvd.broadcast_(variables, 0), variables))
    hook, found = hvd.BroadcastGlobalVariablesHook(0), []
    for value in (5.0, 6.0):
        with session_of_a_graph() as session:
            variable = tf.compat.v1.get_variable("v", initializer=value)
            hook.begin()
            found.append(hook.bcast_op)
            hook.begin()
            assert hook.bcast_op is found[-1], "the graph has it already"
            (after,) = hvd.broadcast_([variable], 0)
            session.run(tf.compat.v1.global_variables_initializer())
            hook.after_create_session(session, None)
            assert session.run([variable, after, hvd.broadcast_variables([], 0)]) == [value, value, None]
    assert found[0].graph is not found[1].graph


def test_arguments_of_optimizers_are_checked(alone: Any) -> None:
    own = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    for thing, options in (("adam", {}), (own, {"backward_passes_per_step": 0}), (own, {"groups": -1})):
        with pytest.raises(ConfigError):
            hvd.DistributedOptimizer(thing, **options)
    plain, named = hvd.DistributedOptimizer(own), hvd.DistributedOptimizer(own, name="mine")
    assert (plain.get_name(), named.get_name()) == ("GradientDescent", "mine")
    assert isinstance(plain, type(own)) and plain._optimizer is own


def test_the_names_under_which_scripts_and_horovods_own_tests_look(alone: Any) -> None:
    from ringcomm.tensorflow import mpi_ops

    compression = import_module("ringcomm.tensorflow.compression")
    assert compression.Compression is hvd.Compression
    assert hvd.Compression.fp16 is compression.FP16Compressor
    assert import_module("ringcomm.tensorflow.util")._executing_eagerly()
    assert mpi_ops is hvd.mpi_ops and mpi_ops.allreduce is hvd.allreduce and mpi_ops.size() == 1
    assert mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0]}
    assert hvd.util._executing_eagerly() and hvd._executing_eagerly()
