"""Broadcasts of variables and operations that return facts, in one process: eagerly and in graphs."""

from __future__ import annotations

from typing import Any

import pytest

from ringcomm.errors import Misuse


def test_the_facts_about_a_job_of_one_rank(alone: Any) -> None:
    import tensorflow as tf

    import ringcomm.tensorflow as hvd
    from tests.adapters.tensorflow.modes import session_of_a_graph

    makers = (
        hvd.size_op, hvd.rank_op, hvd.local_rank_op, hvd.local_size_op, hvd.process_set_included_op,
    )  # fmt: skip
    expected = [1, 0, 0, 1, 1]
    eagerly = [make() for make in makers]
    assert [int(item) for item in eagerly] == expected
    assert {item.dtype for item in eagerly} == {tf.int32}
    with session_of_a_graph() as session:
        built = [make(name=make.__name__) for make in makers]
        assert all(item.shape == () for item in built)
        assert [item.op.name for item in built] == [make.__name__ for make in makers]
        assert session.run(built) == expected
    for make in (hvd.size_op, hvd.process_set_included_op):
        with pytest.raises(Misuse, match="Process set 7 does not exist"):
            make(7)


def test_broadcasts_of_no_variables_do_nothing(alone: Any) -> None:
    import ringcomm.tensorflow as hvd
    from tests.adapters.tensorflow.modes import session_of_a_graph

    assert hvd.broadcast_variables([], 0) is None
    assert hvd.broadcast_([], 0) == []
    with session_of_a_graph() as session:
        assert session.run(hvd.broadcast_variables([], 0)) is None


def test_broadcasts_return_the_variables_and_in_graphs_their_new_values(alone: Any) -> None:
    import tensorflow as tf

    import ringcomm.tensorflow as hvd
    from tests.adapters.tensorflow.modes import session_of_a_graph

    variables = [tf.Variable(1.0), tf.Variable([2, 3])]
    assert hvd.broadcast_variables(variables, 0) is None
    assert all(mine is other for mine, other in zip(hvd.broadcast_(variables, 0), variables))
    assert [item.numpy().tolist() for item in variables] == [1.0, [2, 3]]
    with session_of_a_graph() as session:
        variable = tf.compat.v1.get_variable("v", initializer=[4.0])
        (after,) = hvd.broadcast_([variable], 0)
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(after).tolist() == [4.0]
        session.run(hvd.broadcast_global_variables(0))
        assert session.run(variable).tolist() == [4.0]
    with pytest.raises(RuntimeError, match=r"broadcast_variables\(model.variables, root_rank=0\)"):
        hvd.broadcast_global_variables(0)


def test_the_hook_adds_one_operation_to_each_graph(alone: Any) -> None:
    import tensorflow as tf

    import ringcomm.tensorflow as hvd
    from tests.adapters.tensorflow.modes import session_of_a_graph

    hook = hvd.BroadcastGlobalVariablesHook(0)
    found = []
    for value in (5.0, 6.0):
        with session_of_a_graph() as session:
            variable = tf.compat.v1.get_variable("v", initializer=value)
            hook.begin()
            found.append(hook.bcast_op)
            hook.begin()
            assert hook.bcast_op is found[-1], "the graph has it already"
            session.run(tf.compat.v1.global_variables_initializer())
            hook.after_create_session(session, None)
            assert session.run(variable) == value
    assert found[0].graph is not found[1].graph


def test_objects(alone: Any) -> None:
    import ringcomm.tensorflow as hvd

    thing = {"a": [1, None]}
    assert hvd.broadcast_object(thing) == thing
    assert hvd.broadcast_object_fn()(thing) == thing
    assert hvd.allgather_object(thing) == [thing]
