"""``DistributedOptimizer``: an optimizer whose steps all ranks make together."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import Any, Callable, ContextManager, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import torch

from .. import api
from .._adapter.arguments import predivided
from .._adapter.checking import StepCheck
from .._adapter.gradients import Groups, Reduction, chosen_groups, names_of
from ..errors import ConfigError, NotOfferedError
from ..ops import ReduceOp, op_of
from ..process_set import ProcessSet, global_process_set
from . import handles
from .compression import Compression
from .reducer import GradientReducer
from .tensors import bytes_of

_IN_BETWEEN = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition. If it was another "
    "optimizer's loss that went through these parameters, as in a GAN, turn their requires_grad off for that "
    "backward pass; or call synchronize() first."
)


class _Options(NamedTuple):
    """How an optimizer was asked to be distributed."""

    reduction: Reduction
    compression: Any
    groups: Groups
    sparse_as_dense: bool


def _parameters(optimizer: Any) -> List[List[torch.Tensor]]:
    return [list(group["params"]) for group in optimizer.param_groups]


def _everything(optimizer: Any) -> List[torch.Tensor]:
    return [parameter for group in _parameters(optimizer) for parameter in group]


def _no_copies(optimizer: Any, protocol: Any) -> Any:
    """A copy would train without the other ranks."""
    raise NotOfferedError(
        "A DistributedOptimizer cannot be copied or pickled, because it belongs to this job's ranks. Keep "
        "its state_dict(); or copy the optimizer that it was made of, and wrap the copy."
    )


class _Distributed:
    """What comes in front of the user's own class of optimizer: gradients are reduced before a step."""

    _reducer: GradientReducer
    _options: _Options
    _check: StepCheck
    _should_synchronize: bool
    _synchronized: bool
    param_groups: List[Dict[str, Any]]

    def _distribute(self, options: _Options, names: Dict[int, str], passes: int) -> None:
        self._options = options
        self._parameter_names = {item: names[id(item)] for item in _everything(self)}
        self._check = StepCheck(options.reduction.process_set)
        self._should_synchronize = True
        self._synchronized = False
        self._reducer = GradientReducer(
            _everything(self), names, options.reduction, options.compression, passes,
            options.groups, options.sparse_as_dense,
        )  # fmt: skip

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes go into one step."""
        return self._reducer.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes go into one step.

        Raises:
            ConfigError: it is less than one.
        """
        self._reducer.reset(_checked_passes(passes))

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; for programs that look at them before the step."""
        self._reducer.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, :meth:`step` does not reduce: :meth:`synchronize` has been called before.

        ::

            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Optional[Callable[[], Any]] = None, **options: Any) -> Any:
        """Reduce what is not reduced yet, and make the optimizer's own step.

        With a closure, what that computes is reduced, each time that the optimizer calls it.
        """
        if not self._should_synchronize:
            self._synchronized = False
            return self._step_and_check(closure, options)
        if self._synchronized and not self._reducer.fresh:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). The gradients are not reduced again.",
                stacklevel=2,
            )
        elif closure is None or self._reducer.started:  # also if a batch was reduced and dropped before
            self.synchronize()
        if closure is not None:
            closure = self._then_synchronize(closure)
        self._synchronized = False
        return self._step_and_check(closure, options)

    # Otherwise torch would wrap it when an optimizer is unpickled, and hooks on steps would run twice.
    step.hooked = True  # type: ignore[attr-defined]

    def _step_and_check(self, closure: Optional[Callable[[], Any]], options: Dict[str, Any]) -> Any:
        loss = _own_step(self, _Distributed, closure, options)
        self._check.stepped(lambda: [(name, bytes_of(item)) for item, name in self._parameter_names.items()])
        return loss

    def _then_synchronize(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def computed_together() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._reducer.synchronize()
            return loss

        return computed_together

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients.

        Raises:
            AssertionError: some are on their way.
        """
        if self._reducer.started:
            raise AssertionError(_IN_BETWEEN)
        self._synchronized = False
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Load a state; what is under way is forgotten."""
        self._reducer.reset()
        self._synchronized = False
        self._should_synchronize = True
        super().load_state_dict(state_dict)  # type: ignore[misc]

    __reduce_ex__ = _no_copies

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Add parameters, which are reduced like the others from now on. All ranks must do so."""
        super().add_param_group(param_group)  # type: ignore[misc]
        passes = self._reducer.passes
        self._reducer.remove_hooks()
        self._distribute(self._options, names_of(_parameters(self), None), passes)


class _AdasumDistributed:
    """The other kind: every rank makes its own step, and the steps are combined by Adasum."""

    _compression: Any
    _passes: int
    _names: List[str]
    _check: StepCheck
    param_groups: List[Dict[str, Any]]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes go into one step. (Steps are all that counts here.)"""
        self._passes = _checked_passes(passes)

    def synchronize(self) -> None:
        """Nothing: it is steps that are combined, not gradients."""

    def skip_synchronize(self) -> ContextManager[None]:
        """Not possible here.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Optional[Callable[[], Any]] = None, **options: Any) -> Any:
        """Make the optimizer's own step, and go to where all ranks' steps together lead."""
        parameters = [item for item in _everything(self) if item.requires_grad]
        starts = [parameter.detach().clone() for parameter in parameters]
        loss = _own_step(self, _AdasumDistributed, closure, options)
        deltas = [parameter.detach() - start for parameter, start in zip(parameters, starts)]
        pairs = [self._compression.compress(delta) for delta in deltas]
        under_way = [
            handles.allreduce_async_(compressed, name=f"adasum.{name}", op=ReduceOp.ADASUM)
            for (compressed, _), name in zip(pairs, self._names)
        ]
        for parameter, start, handle, (_, context) in zip(parameters, starts, under_way, pairs):
            combined = self._compression.decompress(handles.synchronize(handle), context)
            parameter.detach().copy_(start + combined)
        self._check.stepped(lambda: [(n, bytes_of(item)) for n, item in zip(self._names, parameters)])
        return loss

    step.hooked = True  # type: ignore[attr-defined]

    __reduce_ex__ = _no_copies


def _own_step(optimizer: Any, kind: type, closure: Any, options: Dict[str, Any]) -> Any:
    """The step of the user's own class, which may take no arguments at all."""
    step = getattr(super(kind, optimizer), "step")  # noqa: B009 - mypy knows of no such method
    return step(**options) if closure is None else step(closure, **options)


def _checked_passes(passes: int) -> int:
    if passes <= 0:
        raise ConfigError("backward_passes_per_step must be > 0")
    return int(passes)


def DistributedOptimizer(  # noqa: N802 - Horovod's name for it
    optimizer: torch.optim.Optimizer,
    named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]] = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer reduce gradients over all ranks before each step.

    Reductions start during ``loss.backward()``, as soon as gradients are there; ``step()`` waits for
    them. The result is of the optimizer's own class, and shares its state and parameter groups.

    Args:
        named_parameters: usually ``model.named_parameters()``; needed only if two optimizers have
            gradients on their way at the same time and parameters of the same shapes.
        compression: ``Compression.fp16`` or ``Compression.bf16`` for half the bytes.
        backward_passes_per_step: gradients of so many passes are added up before they are reduced.
        op: Average, Sum or Adasum (or another reduction).
        gradient_predivide_factor: an average divides by this before the sum, by the rest after it.
        num_groups: older name of ``groups``.
        groups: which gradients are reduced together: a number of groups, or lists of parameters. By
            default ringcomm forms groups of up to 8 MiB.
        sparse_as_dense: reduce sparse gradients as dense ones; they are sparse again afterwards.
        process_set: the ranks that take part. Others train on their own.

    Raises:
        ConfigError: (a ValueError) arguments make no sense.
    """
    if isinstance(optimizer, (_Distributed, _AdasumDistributed)):
        raise ConfigError("This is a DistributedOptimizer already. Wrap the optimizer that it was made of.")
    if not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            "DistributedOptimizer wraps an optimizer, like torch.optim.SGD(model.parameters(), lr=0.1), and "
            f"this is a {type(optimizer).__name__}."
        )
    chosen = op_of(op)
    prescale, postscale = predivided(chosen, gradient_predivide_factor)
    passes = _checked_passes(backward_passes_per_step)
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
    groups = chosen_groups(groups, num_groups, torch.Tensor)
    names = names_of(_parameters(optimizer), named_parameters)
    if chosen == ReduceOp.ADASUM and api.size() > 1:
        if process_set is not global_process_set:
            raise NotOfferedError("Adasum does not support non-global process sets yet.")
        delta: Any = _of_kind(_AdasumDistributed, optimizer)
        delta._compression, delta._passes, delta._check = compression, passes, StepCheck(process_set)
        delta._names = [names[id(item)] for item in _everything(optimizer) if item.requires_grad]
        return delta
    wrapped = _of_kind(_Distributed, optimizer)
    reduction = Reduction(chosen, prescale, postscale, process_set)
    wrapped._distribute(_Options(reduction, compression, groups, sparse_as_dense), names, passes)
    return wrapped


def _of_kind(kind: type, optimizer: torch.optim.Optimizer) -> Any:
    """An optimizer with the same state and parameter groups, and ``kind`` in front of its class."""
    own = type(optimizer)
    wrapped: Any = object.__new__(type(own.__name__, (kind, own), {"__doc__": own.__doc__}))
    # A step that a scheduler has put into the instance belongs to the old one.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    return wrapped
