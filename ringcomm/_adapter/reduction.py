"""Options of reductions, reducers of variables, and classes of distributed optimizers, for all adapters."""

from __future__ import annotations

from functools import lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from ..calls.process_set import ProcessSet, global_process_set, included_in, size_of
from ..collective.options import Options
from ..errors import ConfigError, NotOfferedError
from ..ops import ENCODED, ReduceOp, factor_of, op_of
from .compression import NoneCompressor, compressor_of, configured, refuse_local_steps

if TYPE_CHECKING:
    from ..balance.pace import StepCursor

Groups = Union[int, Sequence[Sequence[Any]], None]


class Reduction(NamedTuple):
    """How arrays or a model's gradients are reduced."""

    op: ReduceOp = ReduceOp.AVERAGE
    prescale: float = 1.0  # factor before the reduction
    postscale: float = 1.0  # factor after it
    process_set: ProcessSet = global_process_set
    weight: Optional[StepCursor] = None  # of a weighted average; None: no weights
    compression: Any = NoneCompressor  # a compressor, or its name
    sparse_as_dense: bool = False
    # number of groups or lists of parameters, each one operation; None: the adapter divides
    groups: Groups = None
    options: Options = Options()  # of a collective, as its caller passed them

    @classmethod
    def of(cls, options: Options) -> Reduction:
        """Return the reduction that a caller has chosen; its weight is passed on separately."""
        return cls(
            options.op, factor_of(options.prescale_factor), factor_of(options.postscale_factor),
            options.process_set or global_process_set, None, compressor_of(options.compression),
            options=options._replace(weight=None),
        )  # fmt: skip

    @classmethod
    def of_rows(cls, options: Options) -> Reduction:
        """Return the reduction of a reducescatter; NotOfferedError for Adasum, which needs whole tensors."""
        if op_of(options.op) == ReduceOp.ADASUM:
            raise NotOfferedError("reducescatter does not support Adasum: it compares whole tensors.")
        return cls.of(options)

    def call(self, name: Optional[str], weight: Any = None, compression: Any = None) -> Options:
        """Return the options of one of its operations, for the engine."""
        return self.options._replace(
            op=self.op, name=name, prescale_factor=self.prescale, postscale_factor=self.postscale,
            process_set=self.process_set, weight=weight, compression=compression,
        )  # fmt: skip

    def weight_now(self) -> Optional[float]:
        """Return the weight of a contribution that is submitted now; None: there are no weights."""
        return None if self.weight is None else self.weight.now()

    @property
    def factor(self) -> float:
        return self.prescale * self.postscale

    @property
    def gathered_factor(self) -> float:
        """Return the factor of a reducescatter's gradients: a sum's is the size, as losses are averaged."""
        return self.factor * (size_of(self.process_set) if self.op == ReduceOp.SUM else 1)

    @property
    def adds(self) -> bool:
        return self.op in (ReduceOp.AVERAGE, ReduceOp.SUM)

    @property
    def all_dense(self) -> bool:
        """Return whether sparse gradients are made dense: concatenated entries cannot have weights."""
        return self.sparse_as_dense or self.weight is not None

    def active(self) -> bool:
        """Return whether this rank is in the process set, and has ranks to reduce with or steps to count."""
        return included_in(self.process_set) and (size_of(self.process_set) > 1 or self.weight is not None)

    def prepared(
        self, tensors: Sequence[Any]
    ) -> Tuple[Reduction, List[Any], Callable[[Sequence[Any]], List[Any]]]:
        """Split the compression: return the reduction with the part that it executes (reductions that do not
        add are executed without codes), the tensors to send, and a function that converts received ones.
        """
        compressor, how = compressor_of(self.compression), self
        if is_coded(compressor):
            how = self._replace(compression=compressor if self.adds else NoneCompressor)
            compressor = NoneCompressor
        elif self.compression is not NoneCompressor:
            how = self._replace(compression=NoneCompressor)
        pairs = [compressor.compress(tensor) for tensor in tensors]

        def restore(received: Sequence[Any]) -> List[Any]:
            return [compressor.decompress(item, context) for item, (_, context) in zip(received, pairs)]

        return how, [tensor for tensor, _ in pairs], restore


class VariableReducer:
    """Reduce the gradients of variables; ``scale_local`` divides those that only this rank has."""

    def __init__(self, how: Reduction = Reduction(), scale_local: bool = True) -> None:  # noqa: B008
        self.how = how
        self.scale_local = scale_local
        self._local: Dict[int, Any] = {}

    def register_local(self, variable: Any) -> None:
        """Exclude the gradient of a variable from the reduction, because only this rank has the variable."""
        self._local[id(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        return id(variable) in self._local

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], *args: Any, **kwargs: Any
    ) -> List[Any]:
        """Return the reduced gradients, in order; further arguments go to :meth:`reduce_shared`."""
        how, results = self.how, list(gradients)
        active = how.active()
        own = how.factor / (size_of(how.process_set) if active and self.scale_local else 1)
        shared: List[int] = []
        absent: List[Any] = []
        for index, variable in enumerate(variables):
            if active and not self.is_local(variable):
                if results[index] is None:
                    absent.append(variable)
                else:
                    shared.append(index)
            elif results[index] is not None and own != 1.0:
                results[index] = self.times(results[index], own)
        if shared or absent:
            sent, owners = [results[index] for index in shared], [variables[index] for index in shared]
            for index, gradient in zip(shared, self.reduce_shared(sent, owners, absent, *args, **kwargs)):
                results[index] = gradient
        return results

    def reduce_shared(
        self, gradients: Sequence[Any], variables: Sequence[Any], absent: Sequence[Any],
        *args: Any, **kwargs: Any,
    ) -> List[Any]:  # fmt: skip
        """Reduce the gradients of some variables. The names of operations contain those of the variables
        without gradients (``absent``), so that a rank with other ones is a mismatch in this step: operations
        of the same names in a later step would be matched otherwise.
        """
        raise NotImplementedError

    def times(self, gradient: Any, factor: float) -> Any:
        return gradient * factor


def register_layers(layers: Any, register: Callable[[Any], None]) -> None:
    """Call a function with each trainable weight of a Keras layer or several; None: of no layer."""
    listed = list(layers) if isinstance(layers, (list, tuple, set)) else [] if layers is None else [layers]
    if not all(hasattr(layer, "trainable_weights") for layer in listed):
        raise ConfigError(f"local_layers must be Keras layers, not {listed}.")
    for layer in listed:
        for variable in layer.trainable_weights:
            register(variable)


def is_coded(compression: Any) -> bool:
    """Return whether the reduction executes the compression itself."""
    return getattr(compression, "kind", "") in (*ENCODED, "auto")


def of_gradients(
    op: Any, gradient_predivide_factor: float, process_set: ProcessSet, compression: Any,
    weight: Optional[StepCursor] = None, sparse_as_dense: bool = False, groups: Groups = None,
    num_groups: int = 0, parameter_type: type = object, local_steps: bool = False,
) -> Reduction:  # fmt: skip
    """Return the reduction for the arguments of a ``DistributedOptimizer`` and the settings."""
    if not local_steps:
        refuse_local_steps()
    chosen = op_of(op)
    prescale, postscale = predivided(chosen, gradient_predivide_factor)
    return Reduction(
        chosen, prescale, postscale, process_set, weight,
        configured(compression, process_set), sparse_as_dense,
        chosen_groups(groups, num_groups, parameter_type),
    )  # fmt: skip


def chosen_groups(groups: Groups, num_groups: int, parameter_type: type) -> Groups:
    """Return the checked ``groups``, or ``num_groups``."""
    if groups is None:
        groups = num_groups or None
    if groups is None or isinstance(groups, int) and groups > 0:
        return groups
    if not isinstance(groups, (list, tuple)):
        raise ConfigError("groups should be a positive integer or a list of lists of parameters.")
    seen: Set[int] = set()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, parameter_type):
                raise ConfigError(f"groups must consist of parameters, not {type(parameter).__name__}.")
            if id(parameter) in seen:
                raise ConfigError("A parameter can only appear once in groups.")
            seen.add(id(parameter))
    return groups


def checked_passes(passes: Any) -> int:
    """Return a number of backward passes per step; a ConfigError in Horovod's words if it is not positive."""
    if not isinstance(passes, Integral) or passes < 1:
        raise ConfigError(f"backward_passes_per_step must be > 0, not {passes!r}.")
    return int(passes)


def predivided(op: ReduceOp, factor: float) -> Tuple[float, float]:
    """Return the factors that divide an average before and after the sum, so that float16 stays in range."""
    if factor == 1.0:
        return 1.0, 1.0
    if op != ReduceOp.AVERAGE:
        raise ConfigError("gradient_predivide_factor not supported with op != Average")
    return 1.0 / factor, float(factor)


# ---- classes of distributed optimizers and tapes, derived from the user's own ------------------------------


class OptionsInClass:
    """Mixin for the classes that :func:`derive` makes."""

    _ringcomm_options: Optional[Tuple[Any, ...]] = None

    def _take_options(self, *options: Any) -> None:
        """Make an optimizer reduce gradients by the options, without local variables."""
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        """Create an optimizer of the same class, without state, which reduces gradients in the same way."""
        made = super().from_config(config, *args, **kwargs)  # type: ignore[misc]
        if cls._ringcomm_options is not None:
            made._take_options(*cls._ringcomm_options)
        return made


def derive(bases: Tuple[type, ...], options: Tuple[Any, ...]) -> Any:
    """Return a class with these options and the name of the last base, which a saved model then names."""
    named = bases[-1]
    namespace = {"__doc__": named.__doc__, "__module__": named.__module__, "_ringcomm_options": options}
    return type(named.__name__, bases, namespace)


def wrapped(mixin: type, thing: Any, but: str = "") -> Any:
    """Return an object like ``thing``, without the attribute ``but``, of a class that ``mixin`` extends."""
    own: Any = type(thing)
    made: Any = object.__new__(_class_with(mixin, own))
    made.__dict__.update(thing.__dict__)
    made.__dict__.pop(but, None)
    return made


@lru_cache(maxsize=None)
def _class_with(mixin: type, own: type) -> type:
    return type(own.__name__, (mixin, own), {"__doc__": own.__doc__})


def convert(optimizer: Any, kind: Any) -> Any:
    """Make an existing optimizer one of a class of :func:`derive`; it keeps its state."""
    optimizer.__class__ = kind
    optimizer._take_options(*kind._ringcomm_options)
    return optimizer


def set_untracked(optimizer: Any, name: str, value: Any) -> None:
    """Set an attribute that Keras must not track, because it would save it with the model."""
    object.__setattr__(optimizer, name, value)
