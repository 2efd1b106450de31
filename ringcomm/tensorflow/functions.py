"""Variables, objects and questions about the job, eagerly and in graphs."""

from __future__ import annotations

from typing import Any, Callable, Iterable, List, Optional

import numpy as np
import tensorflow as tf

from .. import api
from .._adapter import graph_callbacks, objects
from .._tensorflow import bridge
from ..errors import Misuse
from ..process_set import ProcessSet, global_process_set

tf1 = tf.compat.v1


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Give variables the root's values, all in one operation.

    Args:
        variables: those of TensorFlow or of Keras; in the same order on all ranks.
        inplace: without effect; Horovod has it.

    Returns:
        in a graph, an operation to run; else None, when it is done.
    """
    listed = list(variables)
    if not listed:
        return tf.no_op() if not tf.executing_eagerly() else None
    values = [tf.convert_to_tensor(variable) for variable in listed]
    results = bridge.run(
        [graph_callbacks.Broadcast(root_rank, process_set, bridge.unique_name("variables"), len(values))],
        values,
        [value.dtype for value in values],
        [value.shape for value in values],
    )
    assigned = [variable.assign(result) for variable, result in zip(listed, results)]
    return None if tf.executing_eagerly() else tf.group(*assigned)


def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> List[Any]:
    """Like :func:`broadcast_variables`; the variables."""
    listed = list(variables)
    done = broadcast_variables(listed, root_rank, process_set)
    if done is None:
        return listed
    with tf.control_dependencies([done]):
        return [tf.identity(variable) for variable in listed]


def broadcast_global_variables(root_rank: int) -> Any:
    """In a graph of version 1: an operation that gives all its variables the root's values.

    Raises:
        RuntimeError: there is no graph.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() needs a graph of TensorFlow 1. Where operations run at once, there "
            "is broadcast_variables(model.variables, root_rank=0)."
        )
    return broadcast_variables(tf1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Gives all variables the root's values when a ``MonitoredTrainingSession`` has made or loaded them.

    So ranks start from the same ones, be they random or from a checkpoint.

    Args:
        root_rank: the rank whose values are taken.
        device: without effect; Horovod has it.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: Any = None

    def begin(self) -> None:
        """The graph is about to be finished."""
        if self.bcast_op is None or self.bcast_op.graph != tf1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """The variables have values."""
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send any object (pickled by cloudpickle) from the root to all; what others pass is ignored.

    Args:
        session: not needed; Horovod has it.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """:func:`broadcast_object` as a function of the object alone."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> List[Any]:
    """Collect any object (pickled by cloudpickle) from every rank: a list in rank order."""
    return objects.allgather_object(obj, name, process_set)


# ---- questions that a graph asks each time it runs -------------------------------------------


def size_op(process_set_id: int = 0, name: Optional[str] = None) -> tf.Tensor:
    """How many ranks a process set has."""
    return _asked(lambda: len(_members(process_set_id)), name)


def process_set_included_op(process_set_id: int = 0, name: Optional[str] = None) -> tf.Tensor:
    """1 if this rank belongs to a process set, 0 if not."""
    return _asked(lambda: int(api.rank() in _members(process_set_id)), name)


def rank_op(name: Optional[str] = None) -> tf.Tensor:
    """This process's number."""
    return _asked(api.rank, name)


def local_rank_op(name: Optional[str] = None) -> tf.Tensor:
    """This process's number on its host."""
    return _asked(api.local_rank, name)


def local_size_op(name: Optional[str] = None) -> tf.Tensor:
    """How many processes of the job run on this host."""
    return _asked(api.local_size, name)


def _asked(question: Callable[[], int], name: Optional[str]) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(question(), tf.int32, name=name)
    answer = tf.numpy_function(lambda: np.int32(question()), [], tf.int32, name=name)
    answer.set_shape([])
    return answer


def _members(process_set_id: int) -> Any:
    try:
        return api.context().engine.sets.members(process_set_id)
    except KeyError:
        raise Misuse(f"Process set {process_set_id} does not exist.") from None
