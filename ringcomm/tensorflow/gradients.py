"""Reduce the gradients of one step over all ranks: all are submitted before any is waited for."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from .._adapter.gradients import bucket_name, check_start, plan_groups, variable_name, without
from .._adapter.graph_callbacks import Operation, state_of
from .._adapter.reduction import (
    OptionsInClass,
    Reduction,
    VariableReducer,
    convert,
    derive,
    is_coded,
    set_untracked,
)
from ..calls.process_set import size_of
from ..errors import ConfigError
from ..ops import ReduceOp
from . import bridge

Name = Callable[[Any], str]
Pair = Tuple[Any, Any]  # a gradient and its variable
SMALL_BYTES = 1 << 20
"""Of a step's gradients: copying them side by side takes less than converting each of them."""


class GradientReducer(VariableReducer):
    """Reduce the gradients of a model over all ranks; without groups, all gradients are one group."""

    def reduce_shared(
        self, gradients: Sequence[Any], variables: Sequence[Any], absent: Sequence[Any],
        scope: str = "gradients", name: Name = variable_name,
    ) -> List[Any]:  # fmt: skip
        """Reduce tensors or ``tf.IndexedSlices`` in the order of the variables' names. If these are distinct,
        the variables may be in another order on each rank. ``scope`` is the prefix of the operations' names.
        """
        chosen = sorted(range(len(variables)), key=lambda index: name(variables[index]))
        lacking = without(sorted(name(variable) for variable in absent))
        bundles = list(
            self._bundles(
                gradients, variables, chosen, name,
                lambda label: bridge.unique_name(f"{scope}/{label}{lacking}"),
            )
        )  # fmt: skip
        results = bridge.run(
            [bundle.operation for bundle in bundles],
            [tensor for bundle in bundles for tensor in bundle.tensors],
            [tensor.dtype for bundle in bundles for tensor in bundle.tensors],
            [shape for bundle in bundles for shape in bundle.shapes],
            partial(_check_start, bundles[0].operation, [variables[index] for index in chosen]),
        )
        reduced: List[Any] = list(gradients)
        for bundle in bundles:
            count = len(bundle.tensors)
            bundle.finish(results[:count], reduced)
            del results[:count]
        return reduced

    def times(self, gradient: Any, factor: float) -> Any:
        """Return a gradient multiplied by a number."""
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
        return gradient * tf.cast(factor, gradient.dtype)

    def _bundles(
        self, gradients: Sequence[Any], variables: Sequence[Any], chosen: Sequence[int], name: Name,
        labelled: Callable[[str], str],
    ) -> Iterator[Bundle]:  # fmt: skip
        dense: List[int] = []
        for index in chosen:
            if isinstance(gradients[index], tf.IndexedSlices) and not self.how.all_dense:
                yield self._sparse(index, gradients[index], labelled(name(variables[index])))
            else:
                dense.append(index)
        groups = [dense] if dense else []
        if self.how.groups is not None:
            plan = plan_groups([variables[index] for index in dense], self.how.groups)
            groups = [sorted(dense[place] for place in bucket) for bucket in plan]
        for group in groups:
            tensors = [tf.convert_to_tensor(gradients[index]) for index in group]
            names = [name(variables[index]) for index in group]
            label = labelled(bucket_name(names, [_known(tensor.shape) for tensor in tensors]))
            yield self._dense(group, tensors, label, variables[group[0]])
        if not chosen:
            yield Bundle(Operation("allreduce", self.how, labelled("nothing"), 0), [], [], lambda *_: None)

    def _dense(self, indices: List[int], tensors: List[Any], label: str, owner: Any) -> Bundle:
        how, sent, restore = self.how._replace(groups=None).prepared(tensors)
        coded = is_coded(how.compression)
        parts = [tuple(tensor.shape) for tensor in sent] if not coded and _are_small(sent) else []
        sizes = [math.prod(shape) for shape in parts]

        def finish(results: Sequence[Any], into: List[Any]) -> None:
            if parts:
                pieces = zip(tf.split(results[0], sizes), parts)
                results = [tf.reshape(piece, shape) for piece, shape in pieces]
            for index, result in zip(indices, restore(results)):
                into[index] = result

        if parts:
            # The callback takes a few microseconds to convert each tensor; TensorFlow itself does not.
            flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in sent], 0)
            operation = Operation("allreduce", how, label, 1, parts=parts)
            return Bundle(operation, [flat], [[sum(sizes)]], finish)
        state = state_of(owner) if coded else None
        operation = Operation("allreduce", how, label, len(sent), state=state)
        return Bundle(operation, sent, [tensor.shape for tensor in sent], finish)

    def _sparse(self, index: int, slices: Any, label: str) -> Bundle:
        if not self.how.adds:
            raise NotImplementedError(
                "sparse gradients can be averaged and summed, not reduced by "
                f"{self.how.op.name.capitalize()}: use sparse_as_dense=True."
            )
        _, (values,), restore = self.how.prepared([slices.values])
        average = self.how.op == ReduceOp.AVERAGE
        factor = self.how.factor / (size_of(self.how.process_set) if average else 1)

        def finish(results: Sequence[Any], into: List[Any]) -> None:
            (whole,) = restore(results[:1])
            scaled = whole * tf.cast(factor, whole.dtype)
            into[index] = tf.IndexedSlices(scaled, results[1], slices.dense_shape)

        shapes = [tf.TensorShape([None]).concatenate(values.shape[1:]), tf.TensorShape([None])]
        operation = Operation("allgather", Reduction(process_set=self.how.process_set), label, 2)
        return Bundle(operation, [values, slices.indices], shapes, finish)


class ReducingOptimizer:
    """Mixin of the distributed optimizers: local variables, and the reduction."""

    _reducer: GradientReducer

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable's gradient from the reduction: only this rank has the variable."""
        self._reducer.register_local(var)

    def _reduced(self, pairs: Any, scope: str) -> Any:
        listed = list(pairs)
        gradients, variables = zip(*listed) if listed else ((), ())
        return list(zip(self._reducer.reduce(gradients, variables, scope), variables))


class Accumulator:
    """The sums of gradients of several batches, in eager mode, ``tf.function`` and TensorFlow 1 graphs.
    Horovod's own tests read ``counter``, the number of batches in the sums.
    """

    def __init__(self, passes: int, average: bool, sparse_as_dense: bool) -> None:
        self._passes, self._factor = passes, 1.0 / passes if average else 1.0
        self._sparse_as_dense = sparse_as_dense
        self._sums: Dict[Any, Any] = {}
        self.counter: Any = None

    def step(
        self, pairs: Sequence[Pair], apply: Callable[[List[Pair]], Any],
        otherwise: Callable[[], Any] = lambda: None,
    ) -> tf.Tensor:  # fmt: skip
        """Add pairs (gradient, variable); ``apply`` a complete step's sums and return whether it is."""
        present = [(self._dense(gradient), variable) for gradient, variable in pairs if gradient is not None]
        sums = [self._sum_for(variable) for _, variable in present]
        if self.counter is None:
            self.counter = _local_variable([], tf.int64)
        # Only graphs of TensorFlow 1 need control dependencies; elsewhere operations run in program order.
        added = [
            total.assign_add(tf.cast(gradient, total.dtype), read_value=False)
            for total, (gradient, _) in zip(sums, present)
        ]
        with tf.control_dependencies(added):
            count = self.counter.assign_add(1)

        def make_step() -> Any:
            values = [total.read_value() * tf.cast(self._factor, total.dtype) for total in sums]
            done = apply([(value, variable) for value, (_, variable) in zip(values, present)])
            with tf.control_dependencies([done] if isinstance(done, tf.Operation) else []):
                cleared = [total.assign(tf.zeros_like(total), read_value=False) for total in sums]
                with tf.control_dependencies([*cleared, self.counter.assign(0, read_value=False)]):
                    return tf.constant(True)

        def only_add() -> Any:
            otherwise()
            return tf.constant(False)

        return tf.cond(tf.equal(count, self._passes), make_step, only_add)

    def _dense(self, gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices) and not self._sparse_as_dense:
            raise ConfigError(
                "backward_passes_per_step sums dense gradients only; this one is tf.IndexedSlices: use "
                "sparse_as_dense=True."
            )
        return tf.convert_to_tensor(gradient)

    def _sum_for(self, variable: Any) -> Any:
        key = variable.ref()
        if key not in self._sums:
            self._sums[key] = _local_variable(variable.shape, variable.dtype.base_dtype)
        return self._sums[key]


def _local_variable(shape: Any, dtype: Any) -> Any:
    with tf.init_scope():
        return tf.compat.v1.Variable(
            tf.zeros(shape, dtype), trainable=False, use_resource=True,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
        )  # fmt: skip


class Bundle(NamedTuple):
    """Gradients that are reduced by one operation."""

    operation: Operation
    tensors: List[Any]  # its inputs
    shapes: List[Any]  # of its results
    finish: Callable[[Sequence[Any], List[Any]], None]  # stores the results in a list of all gradients


def _check_start(operation: Operation, variables: Sequence[Any]) -> None:
    # A variable without a value here is an intermediate result in a graph.
    values = [variable for variable in variables if hasattr(variable, "numpy")]
    check_start(
        operation.how.process_set,
        operation.name or "",
        lambda: [value.numpy().reshape(-1)[:8] for value in values],
    )


def _are_small(tensors: Sequence[Any]) -> bool:
    """Return whether the tensors of a graph are better passed to a callback side by side."""
    if tf.executing_eagerly() or len(tensors) < 2 or len({tensor.dtype for tensor in tensors}) > 1:
        return False
    if not all(tensor.shape.is_fully_defined() for tensor in tensors):
        return False
    count = sum(tensor.shape.num_elements() for tensor in tensors)
    return bool(0 < count * tensors[0].dtype.size <= SMALL_BYTES)


def _known(shape: tf.TensorShape) -> Tuple[int, ...]:
    return tuple(-1 if length is None else length for length in shape) if shape.rank is not None else ()


# ---- optimizers of Keras 2 (``tf_keras``, which ``TF_USE_LEGACY_KERAS=1`` makes ``tf.keras``) --------------


class _Keras2Optimizer(OptionsInClass, ReducingOptimizer):
    """Mixin that adds the reduction to the class of the user's Keras 2 optimizer. Both ``model.fit`` and
    custom training loops call ``apply_gradients()``. It reduces gradients before they are clipped (optimizers
    of ``tf_keras.optimizers.legacy`` clip them before). Methods that compute gradients return reduced ones,
    as in Horovod, and the next ``apply_gradients()`` does not reduce them again.
    """

    _agg_helper: Optional[Accumulator] = None
    _gradients_are_reduced = False

    def _take_options(self, how: Reduction, passes: int, average: bool, scale_local: bool) -> None:
        sums = Accumulator(passes, average, how.sparse_as_dense) if passes > 1 else None
        set_untracked(self, "_reducer", GradientReducer(how, scale_local))
        set_untracked(self, "_agg_helper", sums)

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """Return pairs (gradient, variable) from the optimizer's method, reduced over all ranks. ``loss`` is
        a function, or a tensor that ``tape`` has recorded.
        """
        return self._compute_gradients(loss, var_list, None, tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> List[Any]:
        """Do the same in older optimizers."""
        own: Any = super()
        if hasattr(own, "_compute_gradients"):
            pairs = own._compute_gradients(loss, var_list, grad_loss, tape)
        else:
            pairs = own.compute_gradients(loss, var_list, tape)
        return self._reduced_once(list(pairs))

    def get_gradients(self, loss: Any, params: Any) -> List[Any]:
        """Return the optimizer's gradients, reduced over all ranks, in the order of ``params``."""
        gradients = super().get_gradients(loss, params)  # type: ignore[misc]
        return [gradient for gradient, _ in self._reduced_once(list(zip(gradients, params)))]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce pairs (gradient, variable) over all ranks, unless they are reduced, and apply them. Return
        the result of the optimizer's method; with several passes per step its step counter.
        """
        pairs = list(grads_and_vars)
        own = super().apply_gradients  # type: ignore[misc]
        if self._agg_helper is not None:
            self._agg_helper.step(
                pairs,
                lambda sums: own(self._reduced(sums, "keras"), *args, **kwargs),
                lambda: self.iterations.assign_add(1),  # type: ignore[attr-defined]
            )
            return self.iterations  # type: ignore[attr-defined]
        done = self._gradients_are_reduced
        set_untracked(self, "_gradients_are_reduced", False)
        return own(pairs if done else self._reduced(pairs, "keras"), *args, **kwargs)

    def _reduced_once(self, pairs: List[Any]) -> List[Any]:
        if self._agg_helper is not None:
            return pairs
        reduced = self._reduced(pairs, "keras")
        set_untracked(self, "_gradients_are_reduced", True)
        return list(reduced)


def make_for_keras_2(
    optimizer: Any, how: Reduction, passes: int = 1, average: bool = False, scale_local: bool = True,
    in_place: bool = False,
) -> Any:  # fmt: skip
    """Create a distributed optimizer like one of ``tf_keras``, or (``in_place``) make it one."""
    own = type(optimizer)
    bases = (own,) if issubclass(own, _Keras2Optimizer) else (_Keras2Optimizer, own)
    kind = derive(bases, (how, passes, average, scale_local))
    return convert(optimizer, kind) if in_place else kind.from_config(optimizer.get_config())
