"""The options of a collective, declared once: direct calls, calls by name and all adapters take the same.

A public function is written as a body that takes its array and :class:`Options`; :func:`takes` makes of it
the function that programs call. The meaning of an option for rows is in :mod:`.rows`.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Protocol, Sequence, TypeVar, overload

from ..docstrings import SHARED, compose
from ..errors import ConfigError
from ..ops import ReduceOp, op_of

Result = TypeVar("Result", covariant=True)
ProcessSet = Any  # that of calls.process_set, which is above this module

KINDS = {
    "allreduce": "op name prescale_factor postscale_factor process_set compression weight",
    "reducescatter": "op name prescale_factor postscale_factor process_set compression weight splits",
}
"""By collective: its options, in the order in which functions take those that Horovod's do not have."""
DIRECT_ORDER = "op name prescale_factor postscale_factor compression weight"
"""The options of a synchronous allreduce that a context's method has first."""
HOROVODS: Dict[str, Any] = {
    "average": None, "priority": 0, "device_dense": "", "device_sparse": "", "ignore_name_scope": False,
}  # fmt: skip
"""Further options of Horovod's functions, and their defaults: all but ``average`` have no effect."""
TEXTS: Dict[str, str] = {
    "direct_name": SHARED["call_name"],
    "direct_process_set": SHARED["direct_set"],
    "direct_compression": SHARED["codec"],
    "core_compression": SHARED["codec"],
    "mx_compression": SHARED["codec"],
    "tf_weight": SHARED["weight"] + "\n    It may be a tensor.",
    "reducescatter_op": SHARED["scatter_op"],
    "reducescatter_splits": """\
splits: the number of rows for each rank that takes part, in rank order, such as ``[3, 0, 1]``. All ranks
    pass the same list; its sum is the number of rows. Without it rows are divided evenly.""",
}
"""Descriptions of options that are special to some functions or to a collective."""
_PLACEHOLDER = re.compile(r"^([ \t]*)\{options\}[ \t]*$", re.MULTILINE)


class Call(Protocol[Result]):
    """A collective's function for type checkers: names and types of options, of any collective. They do not
    check arguments passed by place: each function has its own order.
    """

    @overload
    def __call__(
        self, array: Any, /, *ordered: Any, op: Any = ..., name: Optional[str] = ...,
        prescale_factor: float = ..., postscale_factor: float = ..., compression: Any = ...,
        weight: Any = ..., process_set: Any = ..., urgent: bool = ..., splits: Optional[Sequence[int]] = ...,
        average: Optional[bool] = ..., priority: int = ..., device_dense: str = ..., device_sparse: str = ...,
        ignore_name_scope: bool = ...,
    ) -> Result: ...  # fmt: skip
    @overload
    def __call__(self, **named: Any) -> Result: ...


class Options(NamedTuple):
    """The options of a call of a collective."""

    op: ReduceOp = ReduceOp.AVERAGE
    name: Optional[str] = None  # by which ranks match or compare the call
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    compression: Any = None  # a codec, or one of the adapters' compressors
    weight: Optional[float] = None  # of this rank's contribution to a weighted average
    process_set: Optional[ProcessSet] = None  # the ranks that take part; None: all
    urgent: bool = False  # the caller waits at once
    splits: Optional[Sequence[int]] = None  # the rows of each rank, as a tuple; None: divided evenly


def whole_numbers(what: str, splits: Any) -> List[int]:
    """Return the numbers of rows by rank as a list; raises ConfigError for anything else."""
    import numpy as np  # imported late: the documentation is built of this table without NumPy

    try:
        numbers = np.asarray(splits)
    except (TypeError, ValueError, NotImplementedError):  # a tensor of a graph that has no value yet
        numbers = np.empty(0, object)
    if numbers.ndim != 1 or numbers.size and numbers.dtype.kind not in "iu" or numbers.dtype == object:
        raise ConfigError(
            f"{what}: splits={splits!r:.200} is not a list of whole numbers, one per rank: the rows that "
            "each rank gets."
        )
    return numbers.tolist()


def names_of(kind: str, order: str = "", without: str = "") -> List[str]:
    """Return the names of a function's options in their order: those of ``order`` first, one left out."""
    first = order.split()
    return first + [name for name in KINDS[kind].split() if name not in first and name != without]


def compose_options(text: str, kind: str, names: Sequence[str], texts: str) -> str:
    """Return a docstring with its placeholders replaced, ``{options}`` by the descriptions of options."""
    known = {**SHARED, **TEXTS}
    lines = []
    for name in names:
        special = [key for key in (f"{texts}_{name}", f"{kind}_{name}") if key in known]
        lines += known[special[0] if special else name].split("\n")

    def options(found: re.Match[str]) -> str:
        return "\n".join((found.group(1) + line).rstrip() for line in lines)

    return _PLACEHOLDER.sub(options, compose(text))


def takes(
    kind: str, order: str = "", texts: str = "", without: str = ""
) -> Callable[[Callable[..., Result]], Call[Result]]:
    """Make a decorator that turns a body with :class:`Options` into the function that programs call."""
    names = names_of(kind, order, without)
    parameters = parameters_of(names)

    def decorate(body: Callable[..., Result]) -> Any:
        code, annotations = body.__code__, dict(body.__annotations__)
        first = code.co_varnames[: code.co_argcount - 1]
        del annotations["options"]
        call: Any = functools.update_wrapper(_maker_of(first, tuple(names))(body), body)
        del call.__wrapped__  # the signature is this function's
        call.__code__ = call.__code__.replace(  # in a traceback it is at the decorator of the body
            co_name=code.co_name, co_filename=code.co_filename, co_firstlineno=code.co_firstlineno
        )
        call.autograph_info__ = {}  # for TensorFlow, which would look there for code to convert
        call.__defaults__ = tuple(item.default for item in parameters)
        call.__annotations__ = {**annotations, **{item.name: item.annotation for item in parameters}}
        call.__doc__ = compose_options(body.__doc__ or "", kind, names, texts)
        return call

    return decorate


@functools.lru_cache(maxsize=None)
def _maker_of(first: Sequence[str], names: Sequence[str]) -> Callable[..., Any]:
    """Return the maker of a body's function, compiled: it binds real parameters in a tenth of the time."""
    values = {name: name if name in names else repr(value) for name, value in Options._field_defaults.items()}
    values["op"] = "op if type(op) is ReduceOp else reduction(op)" if "op" in names else "ReduceOp.AVERAGE"
    if "average" in names:
        values["op"] = "reduction(op, average)"
    if "splits" in names:
        values["splits"] = "splits if splits is None else tuple(whole_numbers('reducescatter', splits))"
    passed = ", ".join([*first, f"_new(Options, ({', '.join(values.values())}))"])
    return eval(f"lambda body: lambda {', '.join([*first, *names])}: body({passed})")


_new = tuple.__new__


def parameters_of(names: Sequence[str]) -> List[inspect.Parameter]:
    """Return options as parameters of a function."""
    defaults = {**Options._field_defaults, **HOROVODS}
    types = {name: getattr(item, "__forward_arg__", item) for name, item in Options.__annotations__.items()}
    types.update({name: type(value).__name__ for name, value in HOROVODS.items()}, average="Optional[bool]")
    if "average" in names:
        defaults["op"], types["op"] = None, "Optional[ReduceOp]"
    place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [inspect.Parameter(name, place, default=defaults[name], annotation=types[name]) for name in names]


def reduction(op: Any, average: Optional[bool] = None) -> ReduceOp:
    """Return the reduction that ``op`` or Horovod's older ``average`` selects; ConfigError for both."""
    if average is None:
        return ReduceOp.AVERAGE if op is None else op_of(op)
    if op is not None:
        raise ConfigError("average and op both select the reduction: pass op only.")
    warnings.warn(
        "average=... is deprecated: use op=Average or op=Sum", DeprecationWarning, stacklevel=_outside()
    )
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def _outside() -> int:
    """Return the stack level of the first caller outside ringcomm."""
    package = __name__.partition(".")[0] + "."
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(package):
        frame = frame.f_back
        level += 1
    return level
