"""Training that goes on after a rank is lost: ``hvd.elastic``."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import tensorflow as tf

from ..elastic.parts import PartsState, VariablesPart, check_built
from ..elastic.state import ObjectState, Part, State, run
from .functions import broadcast_variables

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

tf1 = tf.compat.v1


class TensorFlowState(PartsState):
    """Variables of TensorFlow, and plain values: all are attributes.

    ::

        state = hvd.elastic.TensorFlowState(variables=variables, epoch=0)

    Args:
        variables: a list; in a graph of version 1 all of its variables if none are given.
        session: of such a graph; the present one if none is given.
        kwargs: plain values.
    """

    def __init__(self, variables: Optional[Sequence[Any]] = None, session: Any = None, **kwargs: Any) -> None:
        listed = list(tf1.global_variables() if variables is None else variables)
        if tf.executing_eagerly():
            part: Part = _eager_part(listed)
        else:
            part = _session_part(listed, session or tf1.get_default_session())
        super().__init__({"variables": part}, **kwargs)


class TensorFlowKerasState(PartsState):
    """A model of ``tf.keras`` and its optimizer, and plain values: all are attributes.

    Args:
        model: a built one.
        optimizer: if the model was not compiled with one.
        backend: without effect; Horovod has it.
        kwargs: plain values.

    Raises:
        ConfigError: the model is not built yet.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        chosen = check_built(model, optimizer)
        parts: Dict[str, Part] = {"model": _eager_part(model)}
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
    # Made once: each would be another operation in the graph, which may not even take one any more.
    send = broadcast_variables(variables, root_rank=0)

    def assign(listed: List[Any], values: Sequence[Any]) -> None:
        # By the operation that every variable has anyway, fed with another value.
        session.run(
            [variable.initializer for variable in listed],
            {variable.initializer.inputs[1]: saved for variable, saved in zip(listed, values)},
        )

    return VariablesPart(variables, lambda listed: session.run(listed), assign, lambda _: session.run(send))
