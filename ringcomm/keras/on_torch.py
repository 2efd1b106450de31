"""Reduces Keras gradients on the PyTorch backend."""

from __future__ import annotations

from typing import Any, List, Sequence

import torch

from .._adapter.compressed import is_coded
from .._adapter.graph_callbacks import Batch
from .._adapter.names import group_name
from ..torch.handles import grouped_allreduce_async, synchronize
from ..torch.tensors import flat_array, on_host, tensor_of
from .reduction_options import How, compressed


def reduce(how: How, gradients: Sequence[Any], variables: Sequence[Any]) -> List[Any]:
    """Reduce gradients (PyTorch tensors, made dense) over all ranks in one grouped allreduce."""
    op, prescale, postscale, process_set, weight = how.reduction
    with torch.no_grad():
        dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        if is_coded(how.compression):
            operation = compressed(how, group_name(variables, "keras"), len(dense), variables)
            arrays = [flat_array(on_host(item)).reshape(tuple(item.shape)) for item in dense]
            results = Batch([operation]).run(arrays)
            return [tensor_of(result, item) for result, item in zip(results, dense)]
        pairs = [how.compression.compress(gradient) for gradient in dense]
        handle = grouped_allreduce_async(
            [compressed for compressed, _ in pairs],
            name=group_name(variables, "keras"),
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
            urgent=True,
            weight=how.reduction.weight_now(),
        )
        if weight is not None:
            weight.submitted()
        results = synchronize(handle)
        if weight is not None:
            weight.reduced()
        return [
            how.compression.decompress(result, context) for result, (_, context) in zip(results, pairs)
        ]
