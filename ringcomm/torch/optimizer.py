"""``DistributedOptimizer``: an optimizer that reduces gradients over all ranks before each step.

It is an object of a class derived from one of three mixins and the class of the user's own optimizer:
gradients are reduced, or with Adasum steps, or with ``--local-steps`` weights now and then.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, ContextManager, Dict, Iterable, Iterator, List, Optional, Tuple, Union

import torch

from .. import api
from .._adapter.compression import Residuals
from .._adapter.gradients import check_start, names_of
from .._adapter.reduction import Groups, Reduction, checked_passes, is_coded, of_gradients, wrapped
from ..balance.batches import Balanced
from ..balance.pace import weight_of_steps
from ..calls.process_set import ProcessSet, global_process_set
from ..configuration.settings import use
from ..docstrings import documented
from ..errors import ConfigError, NotOfferedError
from ..ops import ReduceOp, op_of
from .compression import Compression
from .local_sgd import LocalSGD
from .mpi_ops import allreduce_async_
from .reducer import GradientReducer, first_elements

_ZEROED_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition. If it was another "
    "optimizer's loss that went through these parameters, as in a GAN, turn their requires_grad off for that "
    "backward pass; or call synchronize() first."
)

Named = List[Tuple[str, torch.Tensor]]


class OwnOptimizer:
    """Base of the mixins before the class of the user's own optimizer."""

    _option: str

    def _before_unscaling(self) -> None:
        """Prepare the gradients for a ``GradScaler``, which tests and unscales them."""
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


class _Distributed(OwnOptimizer):
    """Mixin before the user's optimizer class: reduce gradients before each step."""

    _reducer: GradientReducer
    _should_synchronize: bool
    _for_scaler = False  # the gradients are reduced because a scaler has asked

    def _before_unscaling(self) -> None:
        """Reduce the gradients that a ``GradScaler`` tests and unscales, as :meth:`synchronize` does.

        Otherwise it would change them during the reduction (PyTorch does not count that as a change of
        tensors), and each rank would leave out steps because of its own gradients.
        """
        if self._should_synchronize and (not self._reducer.synchronized or self._reducer.fresh):
            self.synchronize()
            self._for_scaler = True

    def _distribute(
        self, reduction: Reduction, named: Optional[Named], passes: int, residuals: Optional[Residuals] = None
    ) -> None:
        self._reduction, self._named = reduction, named
        names = names_of(parameters_of(self), named, everything_named=residuals is None)
        # Horovod's name for it: scripts and Horovod's own tests read it.
        self._parameter_names = {item: names[id(item)] for item in all_parameters(self)}
        self._should_synchronize = True
        self._reducer = GradientReducer(all_parameters(self), names, reduction, passes, residuals)

    @property
    def backward_passes_per_step(self) -> int:
        """Return the number of backward passes per step."""
        return self._reducer.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per step; ConfigError if it is less than one."""
        self._reducer.reset(checked_passes(passes))

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; for programs that read or clip them before the step."""
        self._wait()
        self._reducer.synchronized, self._for_scaler = True, False

    def _wait(self) -> None:
        self._reducer.synchronize()
        if isinstance(self, torch.optim.SparseAdam):  # it refuses the dense gradients of sparse_as_dense
            for parameter in all_parameters(self):
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_sparse(1)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context manager: :meth:`step` does not reduce, because :meth:`synchronize` has been called.

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
        """Reduce the gradients that are not reduced yet, and make the optimizer's own step.

        ``closure`` recomputes the loss and the gradients; they are reduced after each call. PeerLostError: a
        rank ended, or is silent for too long.
        """
        if not self._should_synchronize:
            self._reducer.synchronized = False
            return own_step(self, _Distributed, closure, options)
        if self._reducer.synchronized and not self._reducer.fresh:
            if self._reducer.hooks and not self._for_scaler:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). The gradients are not reduced again.",
                    stacklevel=2,
                )
        elif closure is None or self._reducer.started:  # also if a dropped batch is being reduced
            self.synchronize()
        self._reducer.synchronized = False
        if closure is None:
            return own_step(self, _Distributed, None, options)

        def compute_and_synchronize() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._wait()
            return loss

        return own_step(self, _Distributed, compute_and_synchronize, options)

    # Otherwise torch would wrap it when an optimizer is unpickled, and hooks on steps would run twice.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, to None or to zeros; AssertionError if reductions are in progress."""
        if self._reducer.started:
            raise AssertionError(_ZEROED_TOO_EARLY)
        self._reducer.synchronized = False
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def residual_state_dict(self) -> Dict[str, Any]:
        """Return this rank's error feedback as float32 arrays by parameter name, for its checkpoint."""
        return self._reducer.residuals.state()

    def load_residual_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue with this rank's :meth:`residual_state_dict`, after :meth:`load_state_dict`.

        Without this call training goes on with residuals of zero.
        """
        self._reducer.residuals.load(state)

    def scale_residuals(self, factor: float) -> None:
        """Multiply the residuals by ``factor``: the new scale of losses divided by the old one."""
        self._reducer.residuals.scale(factor)

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Load a state; drop reductions in progress and the residuals of error feedback.

        After ``loss.backward()`` all ranks must call it: the reductions end on all ranks first.
        """
        self._reducer.reset()
        self._reducer.residuals.reset("a state was loaded")
        self._reducer.synchronized = False
        self._should_synchronize = True
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Add parameters to be reduced after this. All ranks must do so.

        Parameters that were not among ``named_parameters`` are named after their place and the first one that
        was, so no other optimizer has the same names. ConfigError: gradients are being reduced.
        """
        if self._reducer.started:
            raise ConfigError(
                "optimizer.add_param_group() was called after loss.backward(), while gradients are being "
                "reduced. Call it after optimizer.step()."
            )
        super().add_param_group(param_group)  # type: ignore[misc]
        self._reducer.remove_hooks()
        self._distribute(self._reduction, self._named, self._reducer.passes, self._reducer.residuals)


class _AdasumDistributed(OwnOptimizer):
    """Mixin for Adasum: every rank makes its step, and the steps (deltas) are combined."""

    _compression: Any
    _named: Optional[Named]
    _option = "op=Adasum"

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Ignore the number of backward passes per step: the steps are reduced."""
        checked_passes(passes)

    def synchronize(self) -> None:
        """Do nothing: the steps are reduced, not the gradients."""

    def skip_synchronize(self) -> ContextManager[None]:
        """Raise AssertionError: the steps are reduced, not the gradients."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Optional[Callable[[], Any]] = None, **options: Any) -> Any:
        """Make the optimizer's own step, and apply the ranks' deltas, combined by Adasum, instead of it."""
        parameters = [item for item in all_parameters(self) if item.requires_grad]
        by_id = names_of(parameters_of(self), self._named, everything_named=False)
        names = [by_id[id(item)] for item in parameters]
        check_start(global_process_set, f"adasum.{names[0]}", lambda: map(first_elements, parameters))
        starts = [parameter.detach().clone() for parameter in parameters]
        loss = own_step(self, _AdasumDistributed, closure, options)
        deltas = [parameter.detach() - start for parameter, start in zip(parameters, starts)]
        pairs = [self._compression.compress(delta) for delta in deltas]
        pending = [
            allreduce_async_(compressed, name=f"adasum.{name}", op=ReduceOp.ADASUM)
            for (compressed, _), name in zip(pairs, names)
        ]
        for parameter, start, handle, (_, context) in zip(parameters, starts, pending, pairs):
            combined = self._compression.decompress(handle.wait(), context)
            parameter.detach().copy_(start + combined)
        return loss

    step.hooked = True  # type: ignore[attr-defined]


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
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Add parameters, which are trained after this. All ranks must do so."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self.local._detach()
        _train_locally(self)


@documented
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]] = None,
    compression: Any = Compression.none, backward_passes_per_step: int = 1, op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Groups = None,
    sparse_as_dense: bool = False, process_set: ProcessSet = global_process_set,
    batches: Optional[Balanced] = None,
) -> Any:  # fmt: skip
    """Wrap an optimizer so that it reduces gradients over all ranks before each step.

    Reductions start during ``loss.backward()``, as soon as gradients have been computed, and ``step()`` waits
    for them. In the first step, they start in ``step()``, because the ranks must find out which gradients are
    sparse.

    All ranks must call ``step()`` equally often, and begin with equal parameters and optimizer state
    (``broadcast_parameters``, ``broadcast_optimizer_state``). A rank without a gradient of a parameter
    contributes zeros if another rank has one.

    Example::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    Args:
        optimizer: any ``torch.optim.Optimizer``. The returned optimizer shares its state and parameter
            groups.
        named_parameters: usually ``model.named_parameters()``. It is required only if two optimizers reduce
            gradients at the same time and have parameters of the same shapes.
        {gradient_compression}
        backward_passes_per_step: the number of backward passes whose gradients are summed before they are
            reduced.
        {torch_optimizer_op}
        gradient_predivide_factor: with ``Average``, gradients are divided by this factor before the sum, and
            the sum is divided by ``size / gradient_predivide_factor``.
        num_groups: deprecated; use ``groups``.
        groups: the gradients that are reduced in one operation: a number of groups, or lists of parameters.
            By default ringcomm forms groups of up to 8 MiB.
        sparse_as_dense: reduce sparse gradients as dense ones. The results are dense, but sparse with
            ``torch.optim.SparseAdam``, which accepts no dense gradients.
        process_set: the ranks that take part; by default all. Other ranks make steps without a reduction.
        {balanced_batches}

    Returns:
        an optimizer of a subclass of the given optimizer's class. Its additional methods ``synchronize()``
        and ``skip_synchronize()`` let you read or clip reduced gradients before the step.

    Raises:
        ConfigError: (a ValueError) an argument has an invalid value, or the optimizer is already wrapped.
        NotOfferedError: Adasum with a process set.
        {not_initialized}
        {torch_optimizer_errors}
    """
    if isinstance(optimizer, (_Distributed, _AdasumDistributed, LocalDistributed)):
        raise ConfigError("This is a DistributedOptimizer already. Wrap the original optimizer.")
    if not hasattr(optimizer, "param_groups"):
        kind = type(optimizer).__name__
        raise ConfigError(f"Wrap an optimizer, such as torch.optim.SGD(...): this is a {kind}.")
    chosen, passes = op_of(op), checked_passes(backward_passes_per_step)
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
    reduction = of_gradients(
        chosen, gradient_predivide_factor, process_set, compression, weight_of_steps(batches, chosen, passes),
        sparse_as_dense, groups, num_groups, torch.Tensor, local_steps=True,
    )  # fmt: skip
    _let_scalers_ask()
    if local_steps_of_settings():
        return local_optimizer(optimizer, reduction, passes)
    named = None if named_parameters is None else list(named_parameters)
    if chosen == ReduceOp.ADASUM and api.size() > 1:
        if process_set is not global_process_set:
            raise NotOfferedError("Adasum does not support non-global process sets yet.")
        names_of(parameters_of(optimizer), named)  # refuses wrong ones
        delta: Any = wrapped(_AdasumDistributed, optimizer, but="step")
        delta._compression = Compression.none if is_coded(reduction.compression) else reduction.compression
        delta._named = named
        return delta
    made = wrapped(_Distributed, optimizer, but="step")
    made._distribute(reduction, named, passes)
    return made


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


def local_steps_of_settings() -> Union[int, str]:
    """Return the value of ``--local-steps``: a number, ``"auto"``, or 0 for none."""
    text = api.placed().settings.local_steps if api.is_initialized() else ""
    return int(text or 0) if text != "auto" else text


def local_optimizer(optimizer: Any, how: Reduction, passes: int) -> Any:
    """Return an optimizer of the given one's class that makes local steps."""
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
    codec = getattr(how.compression, "kind", "none")
    made._options = {
        "compression": "int8" if codec == "auto" else codec, "process_set": how.process_set,
        "sync_every": local_steps_of_settings(),
    }  # fmt: skip
    _train_locally(made)
    return made


def _train_locally(optimizer: Any) -> None:
    parameters = torch.nn.ParameterList(all_parameters(optimizer))
    optimizer.local = _Attached(parameters, optimizer, **optimizer._options)
    optimizer.local._attach()


def _let_scalers_ask() -> None:
    """Let ``GradScaler`` announce that it is about to test gradients; PyTorch has no hook before that."""
    kind = torch.amp.GradScaler if hasattr(torch.amp, "GradScaler") else torch.cuda.amp.GradScaler
    for name in ("unscale_", "step"):
        method = getattr(kind, name)
        if not hasattr(method, "announces"):
            setattr(kind, name, _announcing(method))


def _announcing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(scaler: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(optimizer, OwnOptimizer) and scaler.is_enabled():
            optimizer._before_unscaling()
        return method(scaler, optimizer, *arguments, **options)

    call.announces = True  # type: ignore[attr-defined]
    return call
