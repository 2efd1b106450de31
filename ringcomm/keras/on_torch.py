"""Reduces Keras gradients on the PyTorch backend."""

from __future__ import annotations

from typing import Any, List, Sequence

import torch

from .._adapter.compressed import state_of
from .._adapter.graph_callbacks import Batch, Operation
from .._adapter.names import group_name
from .._adapter.reduction import Reduction, is_coded
from ..arrays.torch_tensors import tensor_of
from ..torch.handles import grouped_allreduce_async, synchronize
from ..torch.tensors import array_of


def reduce(how: Reduction, gradients: Sequence[Any], variables: Sequence[Any]) -> List[Any]:
    """Reduce gradients (PyTorch tensors, made dense) over all ranks in one grouped allreduce."""
    weight, name = how.weight, group_name(variables, "keras")
    with torch.no_grad():
        dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        how, sent, restore = how.prepared(dense)
        if is_coded(how.compression):
            operation = Operation("allreduce", how, name, len(sent), state=state_of(variables[0]))
            results = Batch([operation]).run([array_of(item, "a reduction") for item in sent])
            return [tensor_of(result).to(item.device) for result, item in zip(results, dense)]
        handle = grouped_allreduce_async(
            sent, None, name, how.op, how.prescale, how.postscale, how.process_set, True, how.weight_now()
        )
        if weight is not None:
            weight.submitted()
        results = synchronize(handle)
        if weight is not None:
            weight.reduced()
        return restore(results)
