"""Run collectives on NumPy arrays from TensorFlow: in eager mode, ``tf.function`` and TensorFlow 1 graphs.

How a :class:`~ringcomm._adapter.graph_callbacks.Batch` runs depends on the mode:

In eager mode it is called.

In a ``tf.function`` it is one stateful ``tf.numpy_function``. TensorFlow runs those in program order, one at
a time, so all ranks run the same ones in the same order.

In a TensorFlow 1 graph there is no order, and a waiting callback occupies one of a few threads (the inter-op
pool, by default as many as the machine has cores). With two threads and three allreduces, one rank may wait
for the first two and another for the last two: a deadlock. A batch is therefore two callbacks there. The
first only submits and does not block. The second waits, on a separate thread: it is the map step of a
``tf.data`` dataset of one element. TensorFlow computes that element on a thread outside the pool, and the
step runs on the same thread, because it is without inter-op parallelism. Every submitting callback can run
while others wait, so every operation that all ranks have submitted completes.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Type

import numpy as np
import tensorflow as tf

from .._adapter.compression import register_cast
from .._adapter.graph_callbacks import Batch, Operation, check_sets
from ..engine.process_sets import UnknownProcessSetError
from ..errors import ConfigError, HorovodInternalError, Misuse, RingcommError

try:
    from tensorflow.python.eager.record import could_possibly_record as _is_recorded
except ImportError:  # pragma: no cover - the name is not part of TensorFlow's public interface

    def _is_recorded() -> bool:
        return True


register_cast(tf.Tensor, tf.cast)

Shape = Sequence[Optional[int]]


def run(
    operations: Sequence[Operation],
    inputs: Sequence[Any],
    dtypes: Sequence[Any],
    shapes: Sequence[Shape],
    before: Callable[[], None] = lambda: None,
) -> List[tf.Tensor]:
    """Return the results of collectives, in order; all are submitted before any is waited for. ``before`` is
    called before each run, except in TensorFlow 1 graphs, whose order is not defined.
    """
    if tf.executing_eagerly():
        return _run_eagerly(Batch(operations, before), inputs, dtypes)
    try:
        check_sets(operations)
    except UnknownProcessSetError as error:
        # AutoGraph re-raises built-in errors of Python only; it replaces others by an error of its own.
        raise ValueError(str(error)) from error
    # Also in a function within a graph of TensorFlow 1, such as a branch of tf.cond().
    eager_outside = tf.compat.v1.executing_eagerly_outside_functions()
    batch = Batch(operations, before) if eager_outside else Batch(operations)
    if tf.inside_function():
        call = _reporting(lambda *arrays: batch.run(arrays), dtypes)
        outputs = _checked(tf.numpy_function(call, list(inputs), [tf.string, *dtypes]))
    else:
        outputs = _run_in_graph(batch, inputs, dtypes)
    for output, shape in zip(outputs, shapes):
        output.set_shape(shape)
    return outputs


def differentiable(forward: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Call a function under ``tf.custom_gradient``, which is slow, if a tape records."""
    if tf.executing_eagerly() and not _is_recorded():
        outputs, _ = forward(*inputs)
        return outputs
    return tf.custom_gradient(forward)(*inputs)


def unique_name(name: str) -> str:
    """Return the name, with a number appended if this graph has it already. The graph's ``unique_name()`` is
    not used: it prepends the name scope, whose number depends on what was built before, which may be in
    another order on each rank.
    """
    if tf.executing_eagerly():
        return name
    taken = _taken.setdefault(tf.compat.v1.get_default_graph(), {})
    taken[name] = number = taken.get(name, 0) + 1
    return name if number == 1 else f"{name}#{number}"


_taken: weakref.WeakKeyDictionary[Any, Dict[str, int]] = weakref.WeakKeyDictionary()


def name_of(name: Optional[str], kind: str, tensors: Sequence[Any]) -> Optional[str]:
    """Return an operation's name: the caller's, or one from its place in the graph; none in eager mode."""
    if name is not None or tf.executing_eagerly():
        return name
    first = tensors[0].name.replace(":", "_") if tensors else "nothing"
    return unique_name(f"{kind}/{first}")


def _run_eagerly(batch: Batch, inputs: Sequence[Any], dtypes: Sequence[Any]) -> List[tf.Tensor]:
    try:
        results = batch.run([_array(item) for item in inputs])
    except RingcommError as error:
        raise translated(error) from error
    return [tf.convert_to_tensor(result, dtype) for result, dtype in zip(results, dtypes)]


def _array(tensor: Any) -> Any:
    if tensor.dtype == tf.string:
        raise ConfigError(
            "collectives do not support tf.string tensors; use broadcast_object or allgather_object."
        )
    # np.asarray() shares the tensor's memory, .numpy() copies; a scalar has no buffer to share.
    return np.asarray(tensor) if tensor.shape.rank else tensor.numpy()


def _run_in_graph(batch: Batch, inputs: Sequence[Any], dtypes: Sequence[Any]) -> List[tf.Tensor]:
    token = tf.numpy_function(
        lambda *arrays: np.int64(batch.start(arrays)), list(inputs), tf.int64, stateful=True
    )
    types = [tf.string, *dtypes]

    def step(number: tf.Tensor) -> Any:
        with tf.device("/cpu:0"):
            return tuple(tf.numpy_function(_reporting(batch.finish, dtypes), [number], types))

    # On one device, the function's body as well as the outputs that TensorFlow adds to it: it runs a function
    # that has parts on several devices in the inter-op pool.
    with tf.device("/cpu:0"):
        callback = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int64))
    # Dataset.map() has no argument for this, and the private thread pool of a dataset's options is made for
    # iterators only.
    element = tf.raw_ops.DatasetToSingleElement(
        dataset=tf.raw_ops.MapDataset(
            input_dataset=tf.raw_ops.TensorDataset(components=[token], output_shapes=[[]]),
            other_arguments=[],
            f=callback,
            output_types=types,
            output_shapes=[None] * len(types),
            use_inter_op_parallelism=False,
        ),
        output_types=types,
        output_shapes=[None] * len(types),
    )
    return _checked(element)


# ---- errors ----------------------------------------------------------------------------------

_NO_ERROR = b"/dev/null"


def _reporting(call: Callable[..., List[Any]], dtypes: Sequence[Any]) -> Callable[..., List[Any]]:
    """Return a callback with one more result, before the others: a path for :func:`_checked`. TensorFlow
    turns every error of a callback into UnknownError, or InvalidArgumentError if it is a ValueError. Programs
    expect FailedPreconditionError if ranks disagree, so that error is returned as a result.
    """

    def report(*arrays: Any) -> List[Any]:
        try:
            return [_NO_ERROR, *call(*arrays)]
        except RingcommError as error:
            if _counterpart(error)[0] is not tf.errors.FailedPreconditionError:
                raise
            text = f"{type(error).__name__}: {error}".replace("/..", "/ ..")
            empty = [np.zeros(0, tf.as_dtype(dtype).as_numpy_dtype) for dtype in dtypes]
            return [_NO_ERROR + b"/" + text.encode()[:_PATH_BYTES], *empty]

    return report


_PATH_BYTES = 3900  # longest error text in a path; the system accepts 4096 bytes for the whole path


def _checked(results: Sequence[tf.Tensor]) -> List[tf.Tensor]:
    """Return the results after the first; they fail with FailedPreconditionError if that reports an error.
    The first is the path of an empty file, or for an error a path below that file with the error's text.
    Reading the latter is the only operation of TensorFlow that fails with FailedPreconditionError and a text
    of our choice. The assertion keeps the read from being optimized away, because it has a side effect.
    """
    path, *outputs = results
    path.set_shape([])
    nothing = tf.equal(tf.io.read_file(path), "")
    check = tf.raw_ops.Assert(condition=nothing, data=["ranks disagree:", path])
    with tf.control_dependencies([check]):
        return [tf.identity(output) for output in outputs]


_translated: Dict[Type[RingcommError], Type[Any]] = {}


def translated(error: RingcommError) -> BaseException:
    """Return the error as an instance also of TensorFlow's error class, which programs for Horovod catch."""
    kind = type(error)
    if kind not in _translated:
        counterpart, code = _counterpart(error)

        def init(self: Any, message: str) -> None:
            tf.errors.OpError.__init__(self, None, None, message, code)

        _translated[kind] = type(kind.__name__, (kind, counterpart), {"__init__": init, "__str__": _text})
    copy: BaseException = _translated[kind](str(error))
    copy.__dict__.update(error.__dict__)
    return copy


def _counterpart(error: RingcommError) -> Tuple[Type[Any], int]:
    if not isinstance(error, Misuse):
        return tf.errors.UnknownError, tf.errors.UNKNOWN
    if isinstance(error, HorovodInternalError):
        return tf.errors.FailedPreconditionError, tf.errors.FAILED_PRECONDITION
    return tf.errors.InvalidArgumentError, tf.errors.INVALID_ARGUMENT


def _text(self: Any) -> str:
    return str(self.message)
