"""Reduces the gradients of one step over all ranks: all are submitted before any is waited for."""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from .._adapter import graph_callbacks
from .._adapter.arguments import predivided
from .._adapter.choice import configured
from .._adapter.compressed import CompressedAllreduce, is_coded, state_of
from .._adapter.gradients import Groups, Reduction, bucket_name, chosen_groups, plan_groups
from .._adapter.names import variable_name
from ..balance.step_weight import StepWeight
from ..ops import ReduceOp, op_of
from ..process_set import ProcessSet, global_process_set, included_in, size_of
from . import bridge
from .compression import Compression, NoneCompressor

Name = Callable[[Any], str]


class GradientReducer:
    """Reduces the gradients of a model over all ranks.

    Args:
        compression: a compressor class.
        sparse_as_dense: convert ``tf.IndexedSlices`` to dense tensors first.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: with Average, the factor to divide by before the sum.
        num_groups: number of groups, each reduced as one operation; 0: one group.
        groups: the number of groups, or lists of variables.
        process_set: the ranks that take part.
        scale_local_gradients: divide gradients of local variables by the number of ranks.
        weight: the weights of gradients; None: there are none.
    """

    def __init__(
        self,
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: ReduceOp = ReduceOp.AVERAGE,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Groups = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        weight: Optional[StepWeight] = None,
    ) -> None:
        chosen = op_of(op)
        prescale, postscale = predivided(chosen, gradient_predivide_factor)
        self.how = Reduction(chosen, prescale, postscale, process_set, weight)
        self.compression = configured(compression, process_set, weight is not None)
        self.sparse_as_dense = sparse_as_dense
        self.groups = chosen_groups(groups, num_groups, object)
        self.scale_local_gradients = scale_local_gradients
        self._local: Dict[int, Any] = {}

    def fresh(self) -> GradientReducer:
        """Another reducer with the same options, without local variables."""
        other = copy.copy(self)
        other._local = {}
        return other

    def register_local(self, variable: Any) -> None:
        """Exclude the gradient of a variable from the reduction, because only this rank has the variable."""
        self._local[id(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        """Whether the variable was passed to :meth:`register_local`."""
        return id(variable) in self._local

    def active(self) -> bool:
        """Whether this rank is in the process set, and has other ranks to reduce with or steps to count."""
        if not included_in(self.how.process_set):
            return False
        return size_of(self.how.process_set) > 1 or self.how.weight is not None

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        scope: str = "gradients",
        name: Optional[Name] = None,
    ) -> List[Any]:
        """Reduce gradients over all ranks.

        Gradients are reduced in the order of the variables' names. If these are distinct, the variables may
        be in another order on each rank.

        Args:
            gradients: tensors, ``tf.IndexedSlices`` or None.
            variables: the variables, in the same order.
            scope: prefix of the operations' names, to distinguish several reductions of one program.
            name: function that returns the name of a variable.

        Returns:
            the reduced gradients in the same order; None where the gradient is None.
        """
        if not self.active():
            factor = self.how.prescale * self.how.postscale
            return [_times(item, factor) for item in gradients] if factor != 1.0 else list(gradients)
        named = name or variable_name
        reduced: List[Any] = list(gradients)
        for index, variable in enumerate(variables):
            if self.is_local(variable):
                reduced[index] = self._scaled(gradients[index])
        chosen = [
            index for index, variable in enumerate(variables)
            if gradients[index] is not None and not self.is_local(variable)
        ]  # fmt: skip
        chosen.sort(key=lambda index: named(variables[index]))
        bundles = self._bundles(gradients, variables, chosen, scope, named)
        results = bridge.run(
            [bundle.operation for bundle in bundles],
            [tensor for bundle in bundles for tensor in bundle.tensors],
            [tensor.dtype for bundle in bundles for tensor in bundle.tensors],
            [shape for bundle in bundles for shape in bundle.shapes],
        ) if bundles else []  # fmt: skip
        for bundle in bundles:
            count = len(bundle.tensors)
            bundle.finish(results[:count], reduced)
            del results[:count]
        return reduced

    def _scaled(self, gradient: Any) -> Any:
        if not self.scale_local_gradients:
            return gradient
        return _times(gradient, 1.0 / size_of(self.how.process_set))

    def _bundles(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        chosen: Sequence[int],
        scope: str,
        name: Name,
    ) -> List[Bundle]:
        dense: List[int] = []
        bundles: List[Bundle] = []
        for index in chosen:
            # Slices are gathered, not added, so they have no weights.
            gathered = not self.sparse_as_dense and self.how.weight is None
            if isinstance(gradients[index], tf.IndexedSlices) and gathered:
                label = bridge.unique_name(f"{scope}/{name(variables[index])}")
                bundles.append(self._sparse(index, gradients[index], label))
            else:
                dense.append(index)
        for group in self._grouped(variables, dense):
            tensors = [tf.convert_to_tensor(gradients[index]) for index in group]
            names = [name(variables[index]) for index in group]
            label = bucket_name(names, [_known(tensor.shape) for tensor in tensors])
            label = bridge.unique_name(f"{scope}/{label}")
            if is_coded(self.compression):
                bundles.append(self._coded(group, tensors, label, variables[group[0]]))
            else:
                bundles.append(self._dense(group, tensors, label))
        return bundles

    def _coded(self, indices: List[int], tensors: List[Any], label: str, owner: Any) -> Bundle:
        def finish(results: Sequence[Any], into: List[Any]) -> None:
            for index, result in zip(indices, results):
                into[index] = result

        operation = CompressedAllreduce(self.how, label, len(tensors), self.compression, state_of(owner))
        return Bundle(operation, tensors, [tensor.shape for tensor in tensors], finish)

    def _grouped(self, variables: Sequence[Any], dense: List[int]) -> List[List[int]]:
        if self.groups is None:
            return [dense] if dense else []
        plan = plan_groups([variables[index] for index in dense], self.groups)
        return [sorted(dense[place] for place in bucket) for bucket in plan]

    def _dense(self, indices: List[int], tensors: List[Any], label: str) -> Bundle:
        pairs = [self.compression.compress(tensor) for tensor in tensors]
        compressed = [tensor for tensor, _ in pairs]

        def finish(results: Sequence[Any], into: List[Any]) -> None:
            for index, result, (_, context) in zip(indices, results, pairs):
                into[index] = self.compression.decompress(result, context)

        operation = graph_callbacks.Allreduce(self.how, label, len(compressed))
        return Bundle(operation, compressed, [tensor.shape for tensor in compressed], finish)

    def _sparse(self, index: int, slices: Any, label: str) -> Bundle:
        if self.how.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise NotImplementedError(
                "sparse gradients can be averaged and summed, not reduced by "
                f"{self.how.op.name.capitalize()}: use sparse_as_dense=True."
            )
        compression = NoneCompressor if is_coded(self.compression) else self.compression
        values, context = compression.compress(slices.values)
        average = self.how.op == ReduceOp.AVERAGE
        factor = self.how.prescale * self.how.postscale
        factor = factor / size_of(self.how.process_set) if average else factor

        def finish(results: Sequence[Any], into: List[Any]) -> None:
            whole = compression.decompress(results[0], context)
            scaled = whole * tf.cast(factor, whole.dtype)
            into[index] = tf.IndexedSlices(scaled, results[1], slices.dense_shape)

        shapes = [tf.TensorShape([None]).concatenate(values.shape[1:]), tf.TensorShape([None])]
        operation = graph_callbacks.Allgather(self.how.process_set, label, 2)
        return Bundle(operation, [values, slices.indices], shapes, finish)


class ReducingOptimizer:
    """Mixin of the distributed optimizers: local variables, and the reduction."""

    _reducer: GradientReducer

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradient of a variable from the reduction, because only this rank has the variable.

        Args:
            var: the variable.
        """
        self._reducer.register_local(var)

    def _reduced(self, pairs: Any, scope: str) -> Any:
        listed = list(pairs)
        gradients, variables = zip(*listed) if listed else ((), ())
        return list(zip(self._reducer.reduce(gradients, variables, scope), variables))


class Bundle(NamedTuple):
    """Gradients that are reduced by one operation.

    Attributes:
        operation: the collective.
        tensors: its inputs.
        shapes: of its results.
        finish: stores the results in a list of all gradients.
    """

    operation: graph_callbacks.Operation
    tensors: List[Any]
    shapes: List[Any]
    finish: Callable[[Sequence[Any], List[Any]], None]


def _times(gradient: Any, factor: float) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _known(shape: tf.TensorShape) -> Tuple[int, ...]:
    return tuple(-1 if length is None else length for length in shape) if shape.rank is not None else ()
