"""``DistributedOptimizer`` with local steps, by ``--local-steps`` in an unchanged program."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, ContextManager, Dict, Union

import torch

from .. import api
from .._adapter.arguments import checked_passes
from .._adapter.optimizer_classes import wrapped
from .._adapter.reduction import Reduction
from ..configuration.without_effect import use
from ..errors import ConfigError
from ..ops import ReduceOp
from .local_sgd import LocalSGD
from .own_optimizer import OwnOptimizer, all_parameters


class _Attached(LocalSGD):
    """The :class:`LocalSGD` that a :class:`LocalDistributed` uses."""

    _of_distributed = True


class LocalDistributed(OwnOptimizer):
    """Mixin before the user's optimizer class: local steps, with ``DistributedOptimizer``'s methods."""

    local: LocalSGD
    _passes: int
    _options: Dict[str, Any]
    _option = "--local-steps (RINGCOMM_LOCAL_STEPS)"

    @property
    def backward_passes_per_step(self) -> int:
        """Return the number of backward passes per step, over which gradients are added up."""
        return self._passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per step; ConfigError if it is less than one."""
        self._passes = checked_passes(passes)

    def synchronize(self) -> None:
        """Average the gradients now, if the next step is one with averaged gradients; otherwise do nothing.

        For programs that clip gradients before the step: those are this rank's own in local steps.
        """
        self.local._prepare()

    def skip_synchronize(self) -> ContextManager[None]:
        """Return a context manager without effect: :meth:`synchronize` has an effect once for a step."""
        return nullcontext()

    def average_weights(self) -> None:
        """Average the weights of all ranks now, before they are saved or judged. All ranks must call it."""
        self.local.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, to None or to zeros."""
        self.local._drop()
        partial(super().zero_grad, set_to_none=set_to_none)()  # type: ignore[misc]

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Add parameters, which are trained after this. All ranks must do so."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self.local._detach()
        _train_locally(self)


def local_steps_of_settings() -> Union[int, str]:
    """Return the value of ``--local-steps``: a number, ``"auto"``, or 0 for none."""
    text = api.placed().settings.local_steps if api.is_initialized() else ""
    return int(text or 0) if text != "auto" else text


def local_optimizer(optimizer: Any, how: Reduction, passes: int) -> Any:
    """Return an optimizer of the given one's class that makes local steps.

    ConfigError: local steps cannot do what the reduction ``how`` of the program asks for.
    """
    codec = getattr(how.compression, "kind", "none")
    problem = ""
    if how.op != ReduceOp.AVERAGE or how.factor != 1.0:
        problem = f"gradients are averaged, and this program asks for {how.op.name.lower()} or other factors"
    elif how.weight is not None:
        problem = "each rank's weights count alike, and this program has balanced batches"
    elif not all(isinstance(item, torch.nn.Parameter) for item in all_parameters(optimizer)):
        problem = "the optimizer has tensors that are no torch.nn.Parameter"
    if problem:
        raise ConfigError(
            f"--local-steps (RINGCOMM_LOCAL_STEPS) cannot be used here: {problem}. Change that, or leave the "
            "option out."
        )
    use("local_steps")
    made = wrapped(LocalDistributed, optimizer, but="step")
    made._passes = passes
    codec = "int8" if codec == "auto" else codec
    made._options = {"compression": codec, "process_set": how.process_set}
    made._options["sync_every"] = local_steps_of_settings()
    _train_locally(made)
    return made


def _train_locally(optimizer: Any) -> None:
    parameters = torch.nn.ParameterList(all_parameters(optimizer))
    optimizer.local = _Attached(parameters, optimizer, **optimizer._options)
    optimizer.local._attach()
