"""Reduce Keras gradients on the PyTorch backend."""

from __future__ import annotations

from typing import Any, List, Sequence

import torch

from .._adapter.gradients import check_start, group_name
from .._adapter.graph_callbacks import state_of
from .._adapter.reduction import VariableReducer, is_coded
from .._adapter.submit import finish_earlier
from ..torch.mpi_ops import reduced
from ..torch.reducer import first_elements


class GradientReducer(VariableReducer):
    """Reduce gradients that are PyTorch tensors, made dense."""

    def reduce_shared(
        self, gradients: Sequence[Any], variables: Sequence[Any], absent: Sequence[Any],
        scope: str = "gradients", *args: Any,
    ) -> List[Any]:  # fmt: skip
        """Reduce gradients of variables that all ranks have, in one grouped allreduce."""
        with torch.no_grad():
            dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
            how, sent, restore = self.how.prepared(dense)
            state = state_of([*variables, *absent][0]) if is_coded(how.compression) else None
            name = group_name(variables, scope, absent)
            check_start(how.process_set, name, lambda: [first_elements(item.value) for item in variables])
            finish_earlier("allreduce", name, how.process_set)  # of a fit() that was interrupted
            results = reduced(how, name, sent, how.weight_now(), state)
            if how.weight is not None:
                how.weight.reduced()
            return restore(results)
