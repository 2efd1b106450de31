"""The user's own optimizer, from which a ``DistributedOptimizer`` derives: parameters, steps and hooks."""

from __future__ import annotations

import sys
from typing import Any, Dict, List

import torch

from ..errors import ConfigError, NotOfferedError


class OwnOptimizer:
    """Base of the mixins before the user's optimizer class."""

    _option: str

    @property
    def param_groups(self) -> List[Dict[str, Any]]:
        """Return the parameter groups, in which ``GradScaler`` finds the gradients."""
        if sys._getframe(1).f_code.co_name == "_unscale_grads_":
            self._before_unscaling()
        groups: List[Dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: List[Dict[str, Any]]) -> None:
        """Replace the parameter groups."""
        self.__dict__["param_groups"] = groups

    def _before_unscaling(self) -> None:
        raise ConfigError(
            f"{self._option} does not work with a GradScaler: each rank would leave out steps because of its "
            "own gradients. Train in bfloat16, or without it."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copying: a copy would train without the other ranks."""
        raise NotOfferedError(
            "A DistributedOptimizer cannot be copied or pickled, because it belongs to this job's ranks. "
            "Keep its state_dict(); or copy the original optimizer, and wrap the copy."
        )


def parameters_of(optimizer: Any) -> List[List[torch.Tensor]]:
    """Return the parameters of each group."""
    return [list(group["params"]) for group in optimizer.param_groups]


def all_parameters(optimizer: Any) -> List[torch.Tensor]:
    """Return the parameters of all groups."""
    return [parameter for group in parameters_of(optimizer) for parameter in group]


def own_step(optimizer: Any, kind: type, closure: Any, options: Dict[str, Any]) -> Any:
    """Call the step of the user's own class; without a closure, without positional arguments."""
    step = getattr(super(kind, optimizer), "step")  # noqa: B009 - mypy finds no such method
    return step(**options) if closure is None else step(closure, **options)
