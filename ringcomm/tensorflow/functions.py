"""Broadcast of variables and objects, and operations that return rank and size, in eager mode and graphs."""

from __future__ import annotations

from typing import Any, Callable, Iterable, List, Optional

import numpy as np
import tensorflow as tf

from .. import api
from .._adapter import submit
from .._adapter.graph_callbacks import Operation
from .._adapter.reduction import Reduction
from ..calls.process_set import ProcessSet, global_process_set
from ..docstrings import documented
from ..errors import Misuse
from . import bridge

__all__ = [
    "BroadcastGlobalVariablesHook", "allgather_object", "broadcast_", "broadcast_global_variables",
    "broadcast_object", "broadcast_object_fn", "broadcast_variables", "local_rank_op", "local_size_op",
    "process_set_included_op", "rank_op", "size_op",
]  # fmt: skip

tf1 = tf.compat.v1


@documented
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:  # fmt: skip
    """Assign the root's values to variables on all ranks, in one operation.

    Args:
        variables: variables of TensorFlow or Keras, of the same shapes and dtypes in the same order on all
            ranks.
        {root_rank}
        {process_set}
        inplace: no effect; accepted because Horovod's function has it.

    Returns:
        in a graph, an operation that you must run. In eager mode None, after the assignment.

    Raises:
        {rank_errors}
    """
    listed = list(variables)
    if not listed:
        return tf.no_op() if not tf.executing_eagerly() else None
    values = [tf.convert_to_tensor(variable) for variable in listed]
    how, name = Reduction(process_set=process_set), bridge.unique_name("variables")
    operation = Operation("broadcast", how, name, len(values), root_rank)
    dtypes, shapes = [value.dtype for value in values], [value.shape for value in values]
    results = bridge.run([operation], values, dtypes, shapes)
    assigned = [variable.assign(result) for variable, result in zip(listed, results)]
    return None if tf.executing_eagerly() else tf.group(*assigned)


@documented
def broadcast_(
    variables: Iterable[Any], root_rank: int, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> List[Any]:  # fmt: skip
    """Assign the root's values to variables on all ranks, in one operation, and return the variables.

    Args:
        variables: variables of TensorFlow or Keras, of the same shapes and dtypes in the same order on all
            ranks.
        {root_rank}
        name: no effect; accepted because Horovod's function has it.
        {process_set}

    Returns:
        in eager mode, the variables. In a graph, tensors with their new values.

    Raises:
        {rank_errors}
    """
    listed = list(variables)
    done = broadcast_variables(listed, root_rank, process_set)
    if done is None:
        return listed
    with tf.control_dependencies([done]):
        return [tf.identity(variable) for variable in listed]


@documented
def broadcast_global_variables(root_rank: int) -> Any:
    """Create an operation that assigns the root's values to all variables of a TensorFlow 1 graph.

    Args:
        {root_rank}

    Returns:
        the operation. Run it in a session after the variables have been initialized.

    Raises:
        RuntimeError: called in eager mode, where TensorFlow has no list of all variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() needs a graph of TensorFlow 1. In eager mode use "
            "broadcast_variables(model.variables, root_rank=0)."
        )
    return broadcast_variables(tf1.global_variables(), root_rank)


@documented
class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Session hook that assigns the root's values to all variables when a session has been created.

    With ``MonitoredTrainingSession`` all ranks then start from the same initial or restored values.

    Args:
        {root_rank}
        device: no effect; accepted because Horovod's class has it.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Add the broadcast operation to the graph, before TensorFlow finalizes it."""
        if self.bcast_op is None or self.bcast_op.graph != tf1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the broadcast in a new session, whose variables are initialized.

        Args:
            session: the session.
            coord: the session's coordinator of threads; not used.
        """
        session.run(self.bcast_op)


@documented
def broadcast_object(
    obj: Any, root_rank: int = 0, session: Any = None, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """Send a Python object from the root to all ranks, pickled by cloudpickle. It does not work in graphs.

    Args:
        obj: the object; used on the root only.
        {root_rank}
        session: no effect; accepted because Horovod's function has it.
        {matching}

    Returns:
        on the root the object itself, on all other ranks an equal copy.

    Raises:
        PeerLostError: a rank was lost.
    """
    return submit.broadcast_object(obj, root_rank, name, process_set)


@documented
def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:  # fmt: skip
    """Create a function of one argument that broadcasts a Python object from the root to all ranks.

    Args:
        {root_rank}
        session: no effect; accepted because Horovod's function has it.
        {matching}

    Returns:
        a function that returns the root's object. All ranks must call it, each with an object.
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@documented
def allgather_object(
    obj: Any, session: Any = None, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> List[Any]:
    """Collect one Python object from every rank, pickled by cloudpickle. It does not work in graphs.

    Args:
        obj: this rank's object.
        session: no effect; accepted because Horovod's function has it.
        {matching}

    Returns:
        the objects of all ranks, in rank order, the same list on every rank.

    Raises:
        PeerLostError: a rank was lost.
    """
    return submit.allgather_object(obj, name, process_set)


# ---- facts about the job, read each time a graph runs ----------------------------------------


def size_op(process_set_id: int = 0, name: Optional[str] = None) -> tf.Tensor:
    """Return an operation that gives the number of ranks of a process set each time it runs.

    Args:
        process_set_id: id of the process set; 0 is the set of all ranks.
        name: name of the tensor in the graph.

    Returns:
        an int32 scalar tensor.

    Raises:
        Misuse: there is no process set with this id.
    """
    return _evaluated(lambda: len(_members(process_set_id)), name)


def process_set_included_op(process_set_id: int = 0, name: Optional[str] = None) -> tf.Tensor:
    """Return an operation that tells whether this rank belongs to a process set, each time it runs.

    Args:
        process_set_id: id of the process set; 0 is the set of all ranks.
        name: name of the tensor in the graph.

    Returns:
        an int32 scalar tensor: 1 if it belongs to the set, otherwise 0.

    Raises:
        Misuse: there is no process set with this id.
    """
    return _evaluated(lambda: int(api.rank() in _members(process_set_id)), name)


def rank_op(name: Optional[str] = None) -> tf.Tensor:
    """Return an operation that gives the rank of this process each time it runs.

    Args:
        name: name of the tensor in the graph.

    Returns:
        an int32 scalar tensor.
    """
    return _evaluated(api.rank, name)


def local_rank_op(name: Optional[str] = None) -> tf.Tensor:
    """Return an operation that gives this process's rank among the ranks of its host each time it runs.

    Args:
        name: name of the tensor in the graph.

    Returns:
        an int32 scalar tensor.
    """
    return _evaluated(api.local_rank, name)


def local_size_op(name: Optional[str] = None) -> tf.Tensor:
    """Return an operation that gives the number of ranks on this host each time it runs.

    Args:
        name: name of the tensor in the graph.

    Returns:
        an int32 scalar tensor.
    """
    return _evaluated(api.local_size, name)


def _evaluated(read: Callable[[], int], name: Optional[str]) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(read(), tf.int32, name=name)
    value = tf.numpy_function(lambda: np.int32(read()), [], tf.int32, name=name)
    value.set_shape([])
    return value


def _members(process_set_id: int) -> Any:
    try:
        return api.context().engine.sets.members(process_set_id)
    except KeyError:
        raise Misuse(f"Process set {process_set_id} does not exist.") from None
