"""What reducers of gradients share: buckets, names of operations, a check that weights are equal at first.

Parameters are identified by their indices, in the order of the optimizer.
"""

from __future__ import annotations

import re
import zlib
from typing import Any, Callable, Dict, Hashable, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union
from weakref import WeakKeyDictionary

import numpy as np

from .. import api
from ..calls.process_set import ProcessSet, included_in, number_of
from ..configuration.settings import FIRST_GRADIENTS_BYTES, GRADIENTS_BYTES
from ..dtypes import Array
from ..errors import ConfigError
from ..job.context import Context
from ..ops import ReduceOp

_LISTED = 3  # names in the name of an operation
_COUNTED = re.compile(r"_\d+(?=/|$)")


class Gradient(NamedTuple):
    """The properties of a gradient that determine its bucket."""

    nbytes: int
    kind: Hashable  # dtype and device; the same for all gradients of a bucket


def plan_buckets(gradients: Sequence[Gradient]) -> List[List[int]]:
    """Divide gradients into buckets, in the order in which a backward pass computes them: last first."""
    buckets: List[List[int]] = []
    open_buckets: Dict[Hashable, List[int]] = {}
    filled: Dict[Hashable, int] = {}
    for index in reversed(range(len(gradients))):
        nbytes, kind = gradients[index]
        is_first = kind in open_buckets and open_buckets[kind] is buckets[0]
        limit = FIRST_GRADIENTS_BYTES if is_first else GRADIENTS_BYTES
        if kind not in open_buckets or filled[kind] + nbytes > limit:
            open_buckets[kind] = []
            filled[kind] = 0
            buckets.append(open_buckets[kind])
        open_buckets[kind].append(index)
        filled[kind] += nbytes
    return buckets


def plan_groups(parameters: Sequence[Any], groups: Union[int, Sequence[Sequence[Any]]]) -> List[List[int]]:
    """Divide parameters into the caller's groups; a parameter in no group gets its own bucket."""
    count = len(parameters)
    order = list(reversed(range(count)))
    if isinstance(groups, int):
        number = min(groups, count)
        bounds = [count * part // number for part in range(number + 1)] if number else [0]
        return [order[start:stop] for start, stop in zip(bounds, bounds[1:])]
    numbers = {id(parameter): index for index, parameter in enumerate(parameters)}
    buckets = [[numbers[id(item)] for item in group if id(item) in numbers] for group in groups]
    grouped = {index for bucket in buckets for index in bucket}
    return [bucket for bucket in buckets if bucket] + [[index] for index in order if index not in grouped]


def names_of(
    groups: Sequence[Sequence[Any]], named: Optional[Iterable[Any]], everything_named: bool = True
) -> Dict[int, str]:
    """Return the name of every parameter, by ``id()``, from the caller's pairs (name, parameter). Without
    ``everything_named`` parameters may lack a name: theirs then contain the first given one, so that they
    differ from those of other optimizers.
    """
    own = {
        id(item): f"noname.{number}.{place}"
        for number, group in enumerate(groups)
        for place, item in enumerate(group)
    }
    if named is None:
        return own
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ConfigError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ConfigError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
        )
    given = {id(item): str(name) for name, item in pairs}
    missing = [name for key, name in own.items() if key not in given]
    if missing and everything_named:
        raise ConfigError(
            "named_parameters was specified, but one or more model parameters were not named "
            f"({len(missing)} of the optimizer's {len(own)})."
        )
    beside = f" beside {pairs[0][0]}" if pairs else ""
    return {**{key: f"{name}{beside}" for key, name in own.items()}, **given}


def bucket_name(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> str:
    """Return the name of a bucket's operation, which differs between ranks of different models, for example
    ``b[10]..w[8, 10] (4 tensors, 1a2b3c4d)``.
    """
    if len(names) == 1:
        return names[0]
    content = [(name, [int(length) for length in shape]) for name, shape in zip(names, shapes)]
    (first, first_shape), *_, (last, last_shape) = content
    checksum = zlib.crc32(repr(content).encode())
    return f"{first}{first_shape}..{last}{last_shape} ({len(names)} tensors, {checksum:08x})"


def variable_name(variable: Any) -> str:
    """Return a variable's name without numbers that frameworks append, which differ after other models."""
    name = getattr(variable, "path", None) or getattr(variable, "name", None) or "variable"
    return _COUNTED.sub("", str(name).replace(":0", ""))


def without(names: Sequence[str]) -> str:
    """Return the end of the name of an operation on gradients in a step without those of these variables.

    >>> without(["b", "w"])
    ', without b, w'
    """
    if len(names) <= _LISTED:
        return f", without {', '.join(names)}" if names else ""
    checksum = zlib.crc32(repr(names).encode())
    return f", without {', '.join(names[:_LISTED])} and {len(names) - _LISTED} more ({checksum:08x})"


def group_name(variables: Sequence[Any], scope: str, absent: Sequence[Any] = ()) -> str:
    """Return the name of one operation on the gradients of all given variables; ``absent`` have none."""
    lacking = without([variable_name(variable) for variable in absent])
    if not variables:
        return f"{scope}/nothing{lacking}"
    names = [variable_name(variable) for variable in variables]
    shapes = [tuple(-1 if length is None else int(length) for length in item.shape) for item in variables]
    return f"{scope}/{bucket_name(names, shapes)}{lacking}"


# ---- the weights of all ranks, compared once at the beginning of training ----------------------------------

_AFTER = 5  # the reduction before which weights are compared: programs may broadcast after step 1
_ITEMS = 256  # compared elements
_PER_WEIGHT = 8
_DIFFERENT = (
    "The ranks train different models: their weights were not equal when training began, and the average of "
    "gradients does not make them so. Broadcast the weights before the first step (broadcast_parameters, "
    "broadcast_variables or the callback for it), or load the same checkpoint on all ranks."
)
# By job and label, the calls of join() so far, and the reductions since. All ranks begin to count again in a
# new view of an elastic job, and after join(), before which they have made different numbers of steps.
_reductions: WeakKeyDictionary[Context, Dict[str, Tuple[int, int]]] = WeakKeyDictionary()


def check_start(process_set: ProcessSet, label: str, weights: Callable[[], Iterable[Array]]) -> None:
    """Count a reduction of gradients; before one of the first, warn once if the weights of ranks differ.
    Small differences are allowed: processors of different kinds round differently. ``weights`` returns at
    least the first elements of each weight, in order.
    """
    context = api.context()
    counts = _reductions.setdefault(context, {})
    joins, count = counts.get(label, (0, 0))
    count = count + 1 if joins == context.engine.joins else 1
    counts[label] = context.engine.joins, count
    if count == _AFTER and context.size > 1 and included_in(process_set):
        _compare(context, number_of(process_set), label, weights())


def _compare(context: Context, process_set: int, label: str, weights: Iterable[Array]) -> None:
    own = np.zeros(_ITEMS, np.float32)
    filled = 0
    for values in weights:
        part = values.reshape(-1)[: min(_PER_WEIGHT, _ITEMS - filled)]
        own[filled : filled + part.size] = part
        filled += part.size
    both = np.concatenate([own, -own])  # a rank that has joined leaves the others' numbers as they are
    context.engine.allreduce(
        [both], ReduceOp.MAX, f"ringcomm.weights.{label}", process_set=process_set, urgent=True
    ).wait()
    highest, lowest = both[:_ITEMS].astype(np.float64), -both[_ITEMS:].astype(np.float64)
    apart, scale = np.abs(highest - lowest).sum(), np.abs(highest).sum() + np.abs(lowest).sum()
    if apart > 0.01 * scale and context.rank == min(context.engine.sets.members(process_set)):
        context.announce("different weights", _DIFFERENT)
