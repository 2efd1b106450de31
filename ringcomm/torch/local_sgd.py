"""Local steps for PyTorch: ranks train by themselves and average their models now and then."""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch

from .._adapter.compression import dtype_name
from .._adapter.local_sgd import ADAPTIVE_DRIFT, AUTO, OuterOptimizer, host_dtype
from .._adapter.local_sgd import LocalSGD as Core
from ..calls.process_set import ProcessSet, global_process_set
from ..docstrings import documented
from ..dtypes import Array
from ..errors import ConfigError
from .state import broadcast_parameters


@documented
class LocalSGD(OuterOptimizer):
    """Context manager in which ranks train alone, and average their models from time to time.

    Example::

        with hvd.LocalSGD(model, optimizer, sync_every=16):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()

    This algorithm differs from averaging gradients, and so do its results. By default
    (``sync_every="auto"``), gradients are averaged in every step at first, like with
    ``DistributedOptimizer``. When the weights of the ranks are close enough, ranks train alone for longer and
    longer. docs/slow_links.md shows the effect on accuracy, which can be larger with a fixed number. For runs
    with hundreds of synchronizations, :meth:`diloco` adds an outer momentum.

    At the start of the block, all ranks get rank 0's parameters and buffers. At every ``sync_every``-th
    ``optimizer.step()`` and at the end of the block, the changes of all ranks are averaged. The average is
    the gradient of an outer step from the last common parameters; with the defaults, the result is the
    average of the parameters. Floating-point buffers, such as batch-norm statistics, are averaged. The
    optimizer's own state (momenta) is averaged in automatic intervals of one or two steps. In longer
    intervals, each rank keeps its own state. All ranks must synchronize equally often. You cannot use a
    ``GradScaler``, which skips different steps on each rank.

    Args:
        model: a ``torch.nn.Module`` on any device. Parameters that do not require gradients are not changed.
        optimizer: the optimizer of the model. It must not be a ``DistributedOptimizer``, which averages every
            gradient.
        {local_sgd}

    Raises:
        ConfigError: an argument is out of range, or the optimizer is already distributed. Or (at a step) the
            optimizer trains parameters that it did not train when the block began.
    """

    _of_distributed = False

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
        sync_every: Union[int, str, Sequence[int]] = AUTO, outer_lr: float = 1.0, outer_momentum: float = 0.0,
        compression: Any = None, process_set: ProcessSet = global_process_set, fragments: int = 1,
        overlap: int = 0, max_drift: Optional[float] = None,
    ) -> None:  # fmt: skip
        if hasattr(optimizer, "skip_synchronize") and not self._of_distributed:
            raise ConfigError(
                "LocalSGD needs the original optimizer: a DistributedOptimizer averages gradients."
            )
        self._model, self._optimizer, self._process_set = model, optimizer, process_set
        adaptive = any("eps" in group for group in optimizer.param_groups)
        if max_drift is None and sync_every == AUTO and adaptive:
            max_drift = ADAPTIVE_DRIFT
        self._core_of = partial(
            Core, sync_every=sync_every, outer_lr=outer_lr, outer_momentum=outer_momentum,
            compression=compression, process_set=process_set, name="torch.local_sgd", fragments=fragments,
            overlap=overlap, max_drift=max_drift,
        )  # fmt: skip
        self._hooks: List[Any] = []
        self._began = self._prepared = self._shared = False
        self._start()

    def _start(self) -> None:
        parameters = [item for item in self._model.parameters() if item.requires_grad]
        buffers = [item for item in self._model.buffers() if item.is_floating_point()]
        self._parameters: List[torch.Tensor] = parameters
        self._dense = not any(getattr(module, "sparse", False) for module in self._model.modules())
        own = [_host_array(item) for item in (*parameters, *buffers)]
        self._pairs: List[Tuple[torch.Tensor, Array]] = list(zip((*parameters, *buffers), own))
        # The outer optimizer, on NumPy copies of the parameters.
        self.core: Core = self._core_of(own[: len(parameters)], averaged=own[len(parameters) :])

    def __enter__(self) -> LocalSGD:
        """Give all ranks rank 0's parameters, and begin to count the optimizer's steps."""
        if self._added():
            self._start()
        self._begin()
        self._attach()
        return self

    def _attach(self) -> None:
        """Begin to count the optimizer's steps; training begins with the first one, if it has not yet."""
        before = self._optimizer.register_step_pre_hook(self._stepping)
        self._hooks = [before, self._optimizer.register_step_post_hook(self._stepped)]

    def _detach(self) -> None:
        """Stop counting steps."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self) -> None:
        broadcast_parameters(self._model.state_dict(), 0, self._process_set)
        self._read(self._pairs)
        self.core.restart()
        self._began, self._prepared = True, False

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Synchronize once more, unless the block has ended with an exception."""
        self._detach()
        if kind is None and self.core.steps:
            self.synchronize()

    def _added(self) -> List[str]:
        """Return the parameters that have become trainable since this object was made or its block began."""
        known = {id(tensor) for tensor, _ in self._pairs}
        named = self._model.named_parameters()
        return [name for name, item in named if item.requires_grad and id(item) not in known]

    def _stepping(self, optimizer: Any, arguments: Sequence[Any], options: Dict[str, Any]) -> None:
        given = [*(item for item in arguments if item is not optimizer), options.get("closure")]
        self._prepare(closure=given != [None])

    def _prepare(self, closure: bool = False) -> None:
        """Average the gradients, once, before a step of data-parallel training without a ``closure``."""
        if not self._together():
            self._begin()
        if not self._prepared:
            self._shared = not closure and self._dense and self.core.shares_gradients()
            self._prepared = True
            if self._shared:
                self._refuse_added()
                self._average_gradients()

    def _together(self) -> bool:
        """Return whether training has begun, with the present ranks."""
        return self._began and not self.core.view_changed()

    def _restart(self) -> None:
        """Start over with the next step, from rank 0's parameters. All ranks must call it."""
        self._began = False

    def _drop(self) -> None:
        """Record that the gradients were reset before a step used them."""
        self._prepared = False

    def _average_gradients(self) -> None:
        """Average all gradients, in the arrays of the weights; those that no rank has stay None."""
        arrays = [array for _, array in self._pairs[: len(self._parameters)]]
        absent = 0
        for place, (parameter, array) in enumerate(zip(self._parameters, arrays)):
            if parameter.grad is None:
                absent |= 1 << place
                array[...] = 0
            else:
                torch.from_numpy(array).copy_(parameter.grad)
        missing = self.core.average_gradients(arrays, absent)
        for place, (parameter, array) in enumerate(zip(self._parameters, arrays)):
            if parameter.grad is not None:
                parameter.grad.copy_(torch.from_numpy(array))
            elif not missing >> place & 1:
                parameter.grad = torch.empty_like(parameter).copy_(torch.from_numpy(array))

    def _stepped(self, *ignored: Any) -> None:
        self._prepared = False
        if not self._shared and self.core.due():
            self._refuse_added()
            touched = [self._pairs[place] for place in self.core.touched()]
            state = self._state() if self.core.averages_state() else []
            self._read(touched)
            self.core.advance()
            self._write(touched)
            self.core.average([array for _, array in state])
            self._write(state)

    def _state(self) -> List[Tuple[torch.Tensor, Array]]:
        """Return the optimizer's tensors with a value for each element of a parameter, such as momenta."""
        return [
            (value, _host_array(value))
            for parameter in self._parameters
            for _, value in sorted(self._optimizer.state.get(parameter, {}).items())
            if torch.is_tensor(value) and value.shape == parameter.shape and value.is_floating_point()
        ]

    def _refuse_added(self) -> None:
        """Refuse parameters that this object does not average."""
        added = self._added()
        if added:
            raise ConfigError(
                f"{added[0]} is trained since LocalSGD began, with {len(added) - 1} others, and would "
                "differ between ranks. Add or unfreeze parameters before the block begins; for a change "
                "during training, end the block and begin another one with the same object."
            )

    def synchronize(self) -> None:
        """Average the changes of all ranks now, and make the outer step. All ranks must call this.

        Raises:
            PeerLostError: a rank ended, or is silent for too long.
        """
        self._read(self._pairs)
        self.core.synchronize()
        self._write(self._pairs)

    def _read(self, pairs: Sequence[Tuple[torch.Tensor, Array]]) -> None:
        for tensor, array in pairs:
            torch.from_numpy(array).copy_(tensor.detach())

    def _write(self, pairs: Sequence[Tuple[torch.Tensor, Array]]) -> None:
        with torch.no_grad():
            for tensor, array in pairs:
                tensor.copy_(torch.from_numpy(array))

    def state_dict(self) -> Dict[str, Any]:
        """Return the outer optimizer's state for a checkpoint of this rank."""
        return self.core.state_dict()

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue with a state. Call this in the block, after you have loaded the model.

        Args:
            state: what :meth:`state_dict` of the same rank has returned.
        """
        self.core.load_state_dict(state)


def _host_array(tensor: torch.Tensor) -> Array:
    """Return a NumPy array for a tensor's values; float32 for half types."""
    dtype = getattr(torch, host_dtype(dtype_name(tensor)))
    return torch.empty(tensor.shape, dtype=dtype).copy_(tensor.detach()).numpy()
