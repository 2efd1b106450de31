"""The options of a collective, declared once: direct calls, calls by name and all adapters take the same.

A public function is written as a body that takes its array and :class:`Options`; :func:`takes` makes of it
the function that programs call. What an option means for rows is in :mod:`.rows`.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

from ..docstrings import SHARED, compose
from ..errors import ConfigError
from ..ops import ReduceOp, op_of

Result = TypeVar("Result")

KINDS = {
    "reducescatter": "op name prescale_factor postscale_factor process_set compression weight splits",
}
"""By collective: its options, in the order in which functions take those that Horovod's do not have."""
HOROVODS: Dict[str, Any] = {"priority": 0, "device_dense": "", "ignore_name_scope": False}
"""Options without an effect, which Horovod's functions have, and their defaults."""
TEXTS: Dict[str, str] = {
    "direct_name": SHARED["call_name"],
    "direct_process_set": SHARED["direct_set"],
    "direct_compression": SHARED["codec"],
    "core_compression": SHARED["codec"],
    "mx_compression": SHARED["codec"],
    "reducescatter_op": SHARED["scatter_op"],
    "reducescatter_splits": """\
splits: the number of rows for each rank that takes part, in rank order, such as ``[3, 0, 1]``: the same list
    on all ranks, with the number of rows as its sum. Without it rows are divided evenly.""",
}
"""Descriptions of options that are special to some functions or to a collective."""
_PLACEHOLDER = re.compile(r"^([ \t]*)\{options\}[ \t]*$", re.MULTILINE)


class Options(NamedTuple):
    """What a caller of a collective has chosen.

    Attributes:
        op: the reduction.
        name: by which ranks match or compare the call.
        prescale_factor, postscale_factor: factors before and after a reduction.
        compression: a codec, or one of the adapters' compressors.
        weight: of this rank's contribution to a weighted average; None: there are none.
        process_set: the ranks that take part; None: all of them.
        urgent: whether the caller waits at once.
        splits: the rows of each rank, as a tuple; None: they are divided evenly.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    name: Optional[str] = None
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    compression: Any = None
    weight: Any = None
    process_set: Any = None
    urgent: bool = False
    splits: Optional[Sequence[int]] = None

    @classmethod
    def of(cls, named: Dict[str, Any]) -> Options:
        """Return the options of a call.

        Raises:
            Misuse: ``op`` is not a reduction.
            ConfigError: ``splits`` are not whole numbers.
        """
        given = {name: value for name, value in named.items() if name not in HOROVODS}
        op = given.get("op")
        given["op"] = ReduceOp.AVERAGE if op is None else op_of(op)
        if given.get("splits") is not None:
            given["splits"] = tuple(whole_numbers("reducescatter", given["splits"]))
        return cls(**given)


def whole_numbers(what: str, splits: Any) -> List[int]:
    """Return the numbers of rows by rank as a list, from what NumPy can take.

    Args:
        what: the collective, for the error.
        splits: the numbers.

    Raises:
        ConfigError: they are not whole numbers in one dimension.
    """
    import numpy as np  # here: the documentation is built of this table where there is no NumPy

    try:
        numbers = np.asarray(splits)
    except (TypeError, ValueError, NotImplementedError):  # a tensor of a graph that has no value yet
        numbers = np.empty(0, object)
    if numbers.ndim != 1 or numbers.size and numbers.dtype.kind not in "iu" or numbers.dtype == object:
        raise ConfigError(
            f"{what}: splits={splits!r:.200} is not a list of whole numbers, one per rank: the rows that "
            "each rank gets."
        )
    listed: List[int] = numbers.tolist()
    return listed


def names_of(kind: str, order: str = "", without: str = "") -> List[str]:
    """Return the names of a function's options in the order in which it takes them.

    Args:
        kind: the collective.
        order: the names that come first.
        without: a name that the function does not have.
    """
    first = order.split()
    return first + [name for name in KINDS[kind].split() if name not in first and name != without]


def compose_options(text: str, kind: str, names: Sequence[str], texts: str) -> str:
    """A docstring with its placeholders replaced, of which ``{options}`` stands for a collective's options.

    Args:
        text: the docstring.
        kind: the collective.
        names: of its options.
        texts: what stands in front of the names of texts that are special to some functions, like ``tf``.
    """
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
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Make a decorator of a collective's body, whose last parameter is :class:`Options`.

    The function takes the options by name, and in their order by place. ``help()`` and ``inspect.signature``
    show all of them; ``{options}`` in the docstring stands for their texts.

    Args:
        kind: the collective.
        order: the names that come first.
        without: a name that the function does not have.
        texts: which texts describe the options, see :func:`compose_options`.
    """
    names = names_of(kind, order, without)

    def decorate(body: Callable[..., Result]) -> Callable[..., Result]:
        signature = inspect.signature(body)
        leading = list(signature.parameters.values())[:-1]
        first = [parameter.name for parameter in leading]

        @functools.wraps(body)
        def call(*given: Any, **named: Any) -> Result:
            return body(*_bound(body.__name__, first, names, given, named))

        call.__doc__ = compose_options(body.__doc__ or "", kind, names, texts)
        parameters = leading + [parameter_of(name) for name in names]
        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def parameter_of(name: str) -> inspect.Parameter:
    """Return an option as a parameter of functions."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    if name in HOROVODS:
        default = HOROVODS[name]
        return inspect.Parameter(name, kind, default=default, annotation=type(default).__name__)
    declared = Options.__annotations__[name]
    annotation = getattr(declared, "__forward_arg__", declared)  # NamedTuple makes a reference of the text
    return inspect.Parameter(name, kind, default=Options._field_defaults[name], annotation=annotation)


def _bound(
    what: str, first: Sequence[str], names: Sequence[str], given: Tuple[Any, ...], named: Dict[str, Any]
) -> List[Any]:
    """Return the arguments of a body: the leading ones, and the options.

    Raises:
        TypeError: an argument is missing or given twice, or there is no such option.
    """
    places = [*first, *names]
    if len(given) > len(places):
        raise TypeError(f"{what}() takes at most {len(places)} arguments ({', '.join(places)}).")
    for name, value in zip(places, given):
        if name in named:
            raise TypeError(f"{what}() got {name} twice, by its place and by its name.")
        named[name] = value
    unknown = [name for name in named if name not in places]
    if unknown:
        raise TypeError(f"{what}() has no option {unknown[0]!r}: there are {', '.join(names)}.")
    missing = [name for name in first if name not in named]
    if missing:
        raise TypeError(f"{what}() lacks its argument {missing[0]!r}.")
    arguments = [named.pop(name) for name in first]
    return [*arguments, Options.of(named)]
