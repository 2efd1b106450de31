"""Elastic states for TensorFlow: training continues after the loss of a rank (``hvd.elastic``)."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import tensorflow as tf

from ..elastic.state import (
    ElasticSampler,
    ObjectState,
    PartsState,
    State,
    StatePart,
    VariablesPart,
    check_built,
    run,
)
from .functions import broadcast_variables

__all__ = ["ElasticSampler", "ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

tf1 = tf.compat.v1


class TensorFlowState(PartsState):
    """Elastic state of TensorFlow variables and plain Python values, each an attribute of the state.

    ::

        state = hvd.elastic.TensorFlowState(variables=variables, epoch=0)

    Args:
        variables: list of ``tf.Variable``, in the same order on all ranks. None: all variables of the present
            TensorFlow 1 graph.
        session: in a TensorFlow 1 graph, the session that holds the values; None: the default session.
        kwargs: initial values of further attributes, which must be picklable.
    """

    def __init__(self, variables: Optional[Sequence[Any]] = None, session: Any = None, **kwargs: Any) -> None:
        listed = list(tf1.global_variables() if variables is None else variables)
        if tf.executing_eagerly():
            part: StatePart = _eager_part(listed)
        else:
            part = _session_part(listed, session or tf1.get_default_session())
        super().__init__({"variables": part}, **kwargs)


class TensorFlowKerasState(PartsState):
    """Elastic state of a ``tf.keras`` model, its optimizer and plain Python values, each an attribute.

    ::

        state = hvd.elastic.TensorFlowKerasState(model, epoch=0, batch=0)

    Args:
        model: a built model.
        optimizer: the optimizer; None: the one that the model was compiled with.
        backend: no effect; accepted because Horovod's class has it.
        kwargs: initial values of further attributes, which must be picklable.

    Raises:
        ConfigError: the model is not built, so its variables do not exist yet.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        chosen = check_built(model, optimizer)
        parts: Dict[str, StatePart] = {"model": _eager_part(model)}
        if chosen is not None:
            parts["optimizer"] = _eager_part(chosen)
        super().__init__(parts, **kwargs)


def _eager_part(value: Any) -> VariablesPart:
    return VariablesPart(
        value,
        lambda variables: [tf.identity(variable) for variable in variables],
        lambda variables, values: [variable.assign(saved) for variable, saved in zip(variables, values)],
        lambda variables: broadcast_variables(variables, root_rank=0),
    )


def _session_part(variables: List[Any], session: Any) -> VariablesPart:
    # Created once: every call would add operations to the graph, which may be finalized by then.
    send = broadcast_variables(variables, root_rank=0)

    def assign(listed: List[Any], values: Sequence[Any]) -> None:
        # Feed each variable's existing initializer with the saved value: the graph may be finalized.
        session.run(
            [variable.initializer for variable in listed],
            {variable.initializer.inputs[1]: saved for variable, saved in zip(listed, values)},
        )

    return VariablesPart(variables, lambda listed: session.run(listed), assign, lambda _: session.run(send))
