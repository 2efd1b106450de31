"""Broadcast the state of models and optimizers from one rank to all."""

from __future__ import annotations

from typing import Any, Iterable, List, Mapping, Tuple, Union

import torch

from .. import api
from .._adapter.graph_callbacks import put_together, take_apart
from .._adapter.submit import broadcast_object, start_broadcast
from ..calls.process_set import ProcessSet, global_process_set
from ..configuration import settings
from ..docstrings import documented
from ..errors import ConfigError
from .mpi_ops import broadcast_async_, operand_of
from .reducer import like_parameter

Named = Union[Mapping[str, Any], Iterable[Tuple[str, Any]]]


@documented
def broadcast_parameters(params: Named, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite parameters and buffers on every rank with the root's values.

    Example: ``hvd.broadcast_parameters(model.state_dict(), root_rank=0)``.

    Args:
        params: ``model.state_dict()`` or ``model.named_parameters()``, with the same names, shapes and dtypes
            on all ranks. Values that are not tensors are not changed.
        {root_rank}
        {process_set}

    Raises:
        ConfigError: ``params`` is neither a mapping nor pairs of name and tensor.
        {call_errors}
    """
    pairs = _pairs(params)
    if any(name.endswith("running_mean") for name, _ in pairs):
        api.context().batch_norm = True
    pending = [
        broadcast_async_(tensor, root_rank, f"parameters.{name}", process_set)
        for name, tensor in pairs
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in pending:
        handle.wait()


def _pairs(params: Named) -> List[Tuple[str, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    iterable = isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor))
    pairs: List[Any] = list(params) if iterable else [None]
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ConfigError(f"invalid params of type: {type(params).__name__}, not pairs of name and tensor")
    return pairs


@documented
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite optimizer state and options (learning rates, momenta, …) on every rank with the root's.

    Ranks that have not made a step need no preparation: the root sends the structure of its state. Gradients
    stay as they are. In programs that import ``horovod``, however, parameters of an optimizer without state
    get gradients of zeros, like in Horovod.

    Args:
        optimizer: any ``torch.optim.Optimizer``, wrapped by ``DistributedOptimizer`` or not.
        {root_rank}
        model: ignored. It exists for scripts that were written for Horovod.
        {process_set}

    Raises:
        ConfigError: the parameter groups of the root's optimizer have other sizes.
        {call_errors}
    """
    root = api.rank() == root_rank
    if settings.aliases and not optimizer.state:
        for parameter in (item for group in optimizer.param_groups for item in group["params"]):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    tree, tensors = take_apart(optimizer.state_dict() if root else None, _is_strided)
    facts = [(tuple(item.shape), item.dtype, item.device.type == "cpu") for item in tensors]
    tree, facts = broadcast_object((tree, facts), root_rank, "optimizer", process_set)
    if not root:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype, _ in facts]
    if tensors:  # all as one operation
        operands = [operand_of(tensor, "broadcast_optimizer_state", True, root) for tensor in tensors]
        start_broadcast(operands, root_rank, "optimizer_state", process_set, True).wait()
    if not root:
        stays = {id(tensor): on_cpu for tensor, (_, _, on_cpu) in zip(tensors, facts)}
        _install(optimizer, put_together(tree, tensors), stays)


def _is_strided(value: Any) -> bool:
    """Return whether it is a tensor that is sent as its elements; sparse ones are pickled."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _install(optimizer: torch.optim.Optimizer, state: Any, stays: Mapping[int, bool]) -> None:
    """Load a state into the optimizer. ``load_state_dict`` would convert dtypes to the parameters', and
    replace the parameter groups, to which schedulers may hold references. ``stays`` says, by ``id()``,
    whether a tensor stays on the CPU when the parameter is elsewhere.
    """
    if set(state) != {"state", "param_groups"} or len(state["param_groups"]) != len(optimizer.param_groups):
        optimizer.load_state_dict(state)
        return
    parameters: List[torch.Tensor] = []
    for group, loaded in zip(optimizer.param_groups, state["param_groups"]):
        if len(group["params"]) != len(loaded["params"]):
            raise ConfigError("the root's optimizer has parameter groups of other sizes than this rank's.")
        parameters += group["params"]
        group.update({key: value for key, value in loaded.items() if key != "params"})
    optimizer.state.clear()
    for number, own in state["state"].items():
        parameter = parameters[number]
        tree, tensors = take_apart(own, _is_strided)
        placed = [item if stays[id(item)] else item.to(parameter.device) for item in tensors]
        laid_out = [like_parameter(item, parameter) for item in placed]
        optimizer.state[parameter] = put_together(tree, laid_out)
