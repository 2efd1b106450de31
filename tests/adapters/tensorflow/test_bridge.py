"""The way from TensorFlow to collectives, in one process: functions, names, and TensorFlow's errors."""

from __future__ import annotations

import threading
from typing import Any, Dict, List, Set

import numpy as np
import pytest

from ringcomm.errors import ConfigError, MismatchError, PeerLostError


def test_a_function_that_autograph_does_not_convert(alone: Any) -> None:
    import tensorflow as tf

    import ringcomm.tensorflow as hvd

    @tf.function(autograph=False)
    def both(x: Any) -> Any:
        doubled = hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0)
        gathered = hvd.allgather(x)
        assert doubled.shape == (3,), "known when the graph is built"
        assert gathered.shape[1:] == x.shape[1:]
        return doubled, gathered

    doubled, gathered = both(tf.constant([1.0, 2.0, 3.0]))
    assert doubled.numpy().tolist() == [2.0, 4.0, 6.0]
    assert gathered.numpy().tolist() == [1.0, 2.0, 3.0]


def test_a_set_that_does_not_exist_is_an_error_when_the_graph_is_built(alone: Any) -> None:
    import tensorflow as tf

    import ringcomm.tensorflow as hvd

    fake = hvd.ProcessSet([0])
    fake.process_set_id = 10
    for function in (
        lambda x: hvd.allreduce(x, process_set=fake), lambda x: hvd.allgather(x, process_set=fake),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="Process set 10 does not exist"):
            tf.function(function, autograph=False)(tf.ones(2))
        with tf.Graph().as_default(), pytest.raises(ValueError, match="Process set 10 does not exist"):
            function(tf.ones(2))


def test_in_a_graph_a_callback_that_waits_keeps_no_other_from_running(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only thread of the inter-op pool submits: else ranks that run callbacks in another order hang."""
    import tensorflow as tf

    import ringcomm.tensorflow as hvd
    from ringcomm._adapter.graph_callbacks import Batch
    from tests.adapters.tensorflow.modes import session_of_a_graph

    threads: Dict[str, Set[int]] = {"start": set(), "finish": set()}

    def noted(name: str) -> None:
        method = getattr(Batch, name)

        def note(batch: Batch, argument: Any) -> Any:
            threads[name].add(threading.get_native_id())
            return method(batch, argument)

        monkeypatch.setattr(Batch, name, note)

    noted("start")
    noted("finish")
    with session_of_a_graph() as session:
        tensors = [tf.constant([float(number)]) for number in range(3)]
        results = session.run([hvd.allreduce(tensor, op=hvd.Sum) for tensor in tensors])
    assert [result.tolist() for result in results] == [[0.0], [1.0], [2.0]]
    assert len(threads["start"]) == 1 and threads["finish"].isdisjoint(threads["start"])


def test_strings_are_refused(alone: Any) -> None:
    import tensorflow as tf

    import ringcomm.tensorflow as hvd

    with pytest.raises(ConfigError, match="broadcast_object or allgather_object") as raised:
        hvd.broadcast(tf.constant(["text"]), 0)
    assert isinstance(raised.value, tf.errors.InvalidArgumentError)


def test_names_are_unique_in_a_graph_only() -> None:
    import tensorflow as tf

    from ringcomm._tensorflow import bridge

    assert [bridge.unique_name("a"), bridge.unique_name("a")] == ["a", "a"]
    assert bridge.name_of(None, "allreduce", [tf.ones(2)]) is None
    for _ in range(2):  # each graph counts by itself
        with tf.Graph().as_default():
            assert [bridge.unique_name(name) for name in "aaba"] == ["a", "a#2", "b", "a#3"]
            place = tf.compat.v1.placeholder(tf.float32, [2], "place")
            assert bridge.name_of("mine", "allreduce", [place]) == "mine"
            assert bridge.name_of(None, "allreduce", [place]) == "allreduce/place_0"
            assert bridge.name_of(None, "allreduce", [place]) == "allreduce/place_0#2"
            assert bridge.name_of(None, "barrier", []) == "barrier/nothing"


def test_callbacks_return_disagreements_and_raise_other_errors() -> None:
    """TensorFlow replaces what a callback raises, so a disagreement is the first of its results."""
    import tensorflow as tf

    from ringcomm._tensorflow import bridge

    def raising(error: Exception) -> Any:
        def call(*arrays: Any) -> List[Any]:
            raise error

        return bridge._reporting(call, [tf.float32, tf.int64])

    path, *empty = raising(MismatchError("rank 0 has a/../b"))()
    assert path == b"/dev/null/MismatchError: rank 0 has a/ ../b"
    assert [(item.dtype, item.size) for item in empty] == [(np.float32, 0), (np.int64, 0)]
    path, *_ = raising(MismatchError("x" * 9000))()
    assert len(path) < 4096, "the longest path of Linux"
    for error in (PeerLostError("rank 1 was lost"), ConfigError("a mistake"), KeyError("a defect")):
        with pytest.raises(type(error)) as raised:
            raising(error)()
        assert raised.value is error
    passed = bridge._reporting(lambda *arrays: list(arrays), [tf.float32])(np.ones(2))
    assert passed[0] == b"/dev/null" and passed[1].tolist() == [1.0, 1.0]


def test_what_a_callback_returns_is_an_error_of_tensorflow_where_it_is_read() -> None:
    import tensorflow as tf

    from ringcomm._tensorflow import bridge

    (value,) = bridge._checked([tf.constant(b"/dev/null"), tf.constant(5.0)])
    assert float(value) == 5.0
    with pytest.raises(tf.errors.FailedPreconditionError, match="MismatchError: rank 0 differs"):
        bridge._checked([tf.constant(b"/dev/null/MismatchError: rank 0 differs"), tf.constant(5.0)])


def test_errors_are_those_of_tensorflow_too() -> None:
    import tensorflow as tf

    from ringcomm._tensorflow import bridge

    for error, counterpart in (
        (PeerLostError("rank 3 was lost", rank=3), tf.errors.UnknownError),
        (ConfigError("a mistake"), tf.errors.InvalidArgumentError),
        (MismatchError("ranks differ"), tf.errors.FailedPreconditionError),
    ):
        found = bridge.translated(error)
        assert isinstance(found, type(error)) and isinstance(found, counterpart)
        assert type(found).__name__ == type(error).__name__ and str(found) == str(error)
        assert {name: getattr(found, name) for name in vars(error)} == vars(error)
        assert type(bridge.translated(type(error)("again"))) is type(found)
