"""Runs collectives on NumPy arrays from TensorFlow: eagerly, in ``tf.function``, and in graphs of version 1.

What has to be run is a :class:`~ringcomm._adapter.graph_callbacks.Batch`, and how depends on where:

Eagerly it is called.

In a ``tf.function`` it is one stateful ``tf.numpy_function``. TensorFlow runs those in program order, one
at a time, so all ranks run the same ones in the same order.

In a graph of version 1 there is no order, and a callback that waits holds one of a few threads (the
inter-op pool, by default as many as the machine has cores). With two threads and three allreduces, one
rank may wait for the first two while the other waits for the last two: for ever. So a batch is two
callbacks there. The first only submits, and holds no thread. The second waits, and does so on a thread of
its own: it is the only step of a data set of one element, and TensorFlow gives the computation of an
element (``get_single_element``) a thread that is not the pool's. Thus every callback that submits
gets its turn, whatever waits, and what all ranks have submitted is done in the end.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Type

import numpy as np
import tensorflow as tf

from .._adapter.graph_callbacks import Batch, Operation, check_sets
from ..engine.process_sets import UnknownProcessSetError
from ..errors import ConfigError, HorovodInternalError, Misuse, RingcommError

try:
    from tensorflow.python.eager.record import could_possibly_record as _is_recorded
except ImportError:  # it is not in TensorFlow's public interface

    def _is_recorded() -> bool:
        return True


Shape = Sequence[Optional[int]]


def run(
    operations: Sequence[Operation], inputs: Sequence[Any], dtypes: Sequence[Any], shapes: Sequence[Shape]
) -> List[tf.Tensor]:
    """Run collectives, all submitted before any is waited for.

    Args:
        operations: what to do.
        inputs: tensors for all of them.
        dtypes, shapes: of the results; None stands for a length that is not known beforehand.

    Returns:
        the results of all of them, one after another.
    """
    batch = Batch(operations)
    if tf.executing_eagerly():
        return _run_eagerly(batch, inputs, dtypes)
    try:
        check_sets(operations)
    except UnknownProcessSetError as error:
        # AutoGraph passes on plain errors of Python only; of others it makes an error of its own.
        raise ValueError(str(error)) from error
    if tf.inside_function():
        call = _reporting(lambda *arrays: batch.run(arrays), dtypes)
        outputs = _checked(tf.numpy_function(call, list(inputs), [tf.string, *dtypes]))
    else:
        outputs = _run_in_graph(batch, inputs, dtypes)
    for output, shape in zip(outputs, shapes):
        output.set_shape(shape)
    return outputs


def differentiable(forward: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """The results of a function that also gives its gradient's; see ``tf.custom_gradient``.

    Without a tape that might ask for gradients it is called alone: what TensorFlow does around it takes as
    long as a small collective.
    """
    if tf.executing_eagerly() and not _is_recorded():
        outputs, _ = forward(*inputs)
        return outputs
    return tf.custom_gradient(forward)(*inputs)


def unique_name(name: str) -> str:
    """The name, with a number behind it if this graph has it already.

    Not by the graph's own ``unique_name()``: that puts the scope before it, of which the number depends
    on what has been built before, which need not be in the same order on all ranks.
    """
    if tf.executing_eagerly():
        return name
    taken = _taken.setdefault(tf.compat.v1.get_default_graph(), {})
    taken[name] = number = taken.get(name, 0) + 1
    return name if number == 1 else f"{name}#{number}"


_taken: weakref.WeakKeyDictionary[Any, Dict[str, int]] = weakref.WeakKeyDictionary()


def name_of(name: Optional[str], kind: str, tensors: Sequence[Any]) -> Optional[str]:
    """What an operation is called: as the caller says, or by its place in the graph.

    Without a graph nothing has a name, and what has none is matched by its order.
    """
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
            "tensors of strings cannot be sent; there are broadcast_object and allgather_object."
        )
    # Its own memory, where .numpy() would copy; but a number has no memory that NumPy takes.
    return np.asarray(tensor) if tensor.shape.rank else tensor.numpy()


def _run_in_graph(batch: Batch, inputs: Sequence[Any], dtypes: Sequence[Any]) -> List[tf.Tensor]:
    token = tf.numpy_function(
        lambda *arrays: np.int64(batch.start(arrays)), list(inputs), tf.int64, stateful=True
    )

    def step(number: tf.Tensor) -> Any:
        return tuple(tf.numpy_function(_reporting(batch.finish, dtypes), [number], [tf.string, *dtypes]))

    options = tf.data.Options()
    # The step itself shall not go to the pool either.
    options.threading.private_threadpool_size = 1
    options.autotune.enabled = False
    element = tf.data.Dataset.from_tensors(token).map(step).with_options(options).get_single_element()
    return _checked(element)


# ---- errors ----------------------------------------------------------------------------------

_NO_ERROR = b"/dev/null"


def _reporting(call: Callable[..., List[Any]], dtypes: Sequence[Any]) -> Callable[..., List[Any]]:
    """A callback that gives one result more, before the others: a path for :func:`_checked`.

    Whatever a callback raises becomes UnknownError, or InvalidArgumentError if it is a ValueError. Programs
    expect FailedPreconditionError where ranks disagree, so that is passed on as a result.
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


_PATH_BYTES = 3900
"""A path has 4096 at most."""


def _checked(results: Sequence[tf.Tensor]) -> List[tf.Tensor]:
    """The results behind the first, which come to FailedPreconditionError if that is not an empty file.

    Of TensorFlow's own operations only a few fail like that, and but for reading a file below one that is no
    folder none says a text of our choice. The assertion is there because it has a side effect: a reader
    alone is optimized away.
    """
    path, *outputs = results
    path.set_shape([])
    nothing = tf.equal(tf.io.read_file(path), "")
    check = tf.raw_ops.Assert(condition=nothing, data=["ranks disagree:", path])
    with tf.control_dependencies([check]):
        return [tf.identity(output) for output in outputs]


_translated: Dict[Type[RingcommError], Type[Any]] = {}


def translated(error: RingcommError) -> BaseException:
    """The same error, as an error of TensorFlow's too: what Horovod's users catch."""
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
