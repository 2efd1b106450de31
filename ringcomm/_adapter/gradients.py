"""Gradients on their way to being reduced: which travel together, and when they are ready.

Parameters are known by their numbers here, in the order in which the optimizer has them.
"""

from __future__ import annotations

import zlib
from typing import Any, Dict, Hashable, Iterable, List, NamedTuple, Optional, Sequence, Set, Union

from ..errors import ConfigError
from ..ops import ReduceOp
from ..process_set import ProcessSet

FIRST_BYTES = 1 << 20
"""Size of the bucket that is ready first: it should leave early, while most of the pass is still to come."""
BUCKET_BYTES = 8 << 20
"""Size of the others: large enough to use the network well, small enough that several overlap."""


class Reduction(NamedTuple):
    """How gradients become one."""

    op: ReduceOp
    prescale: float
    postscale: float
    process_set: ProcessSet


class Gradient(NamedTuple):
    """What decides about a gradient's bucket.

    Attributes:
        nbytes: its size.
        kind: element type and device; only gradients of one kind can lie side by side.
    """

    nbytes: int
    kind: Hashable


def plan_buckets(
    gradients: Sequence[Gradient], first_bytes: int = FIRST_BYTES, bucket_bytes: int = BUCKET_BYTES
) -> List[List[int]]:
    """Divide gradients into buckets, in the order in which a backward pass produces them: last first.

    It depends on nothing but the arguments, so all ranks get the same.
    """
    buckets: List[List[int]] = []
    open_buckets: Dict[Hashable, List[int]] = {}
    filled: Dict[Hashable, int] = {}
    for index in reversed(range(len(gradients))):
        nbytes, kind = gradients[index]
        limit = first_bytes if kind in open_buckets and open_buckets[kind] is buckets[0] else bucket_bytes
        if kind not in open_buckets or filled[kind] + nbytes > limit:
            open_buckets[kind] = []
            filled[kind] = 0
            buckets.append(open_buckets[kind])
        open_buckets[kind].append(index)
        filled[kind] += nbytes
    return buckets


Groups = Union[int, Sequence[Sequence[Any]], None]


def chosen_groups(groups: Groups, num_groups: int, parameter_type: type) -> Groups:
    """The caller's own division, checked.

    Raises:
        ConfigError: it is none.
    """
    if groups is None:
        groups = num_groups or None
    if groups is None:
        return None
    if isinstance(groups, int):
        if groups <= 0:
            raise ConfigError("groups should be a positive integer or a list of lists of parameters.")
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


def plan_groups(parameters: Sequence[Any], groups: Union[int, Sequence[Sequence[Any]]]) -> List[List[int]]:
    """Buckets as the caller wants them; parameters in no group are alone."""
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
    """The name of every parameter, by ``id()``.

    Args:
        groups: the optimizer's parameters, by parameter group.
        named: pairs of names and parameters, as the caller gives them, or None.
        everything_named: whether parameters without a name are an error.

    Raises:
        ConfigError: they are no such pairs, a name stands twice, or a parameter has none.
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
    return {**own, **given}


def bucket_name(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> str:
    """What a bucket is called among the ranks, like ``b[10]..w[8, 10] (4 tensors, 1a2b3c4d)``.

    Another content gives another name. With the shapes, ranks whose models differ see where: mostly it is
    the layer at one end.
    """
    if len(names) == 1:
        return names[0]
    content = [(name, [int(length) for length in shape]) for name, shape in zip(names, shapes)]
    (first, first_shape), *_, (last, last_shape) = content
    mark = zlib.crc32(repr(content).encode())
    return f"{first}{first_shape}..{last}{last_shape} ({len(names)} tensors, {mark:08x})"


class Arrivals:
    """Which gradients have been computed since the last step.

    Args:
        buckets: numbers of the parameters in each bucket.
        passes: how many backward passes go into one step.
    """

    def __init__(self, buckets: Sequence[Sequence[int]], passes: int = 1) -> None:
        self.passes = passes
        self.started = False
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
        self._sizes = [len(bucket) for bucket in buckets]
        self.reset()

    def reset(self, passes: Optional[int] = None) -> None:
        """A step has been made; from now on with another number of passes if one is given."""
        if passes is not None:
            self.passes = passes
        self.started = False
        self._passes_left = dict.fromkeys(self._bucket_of, self.passes)
        self._missing = list(self._sizes)

    def arrived(self, index: int) -> Optional[int]:
        """A backward pass has computed a gradient; the number of the bucket that this completes, if any.

        Raises:
            AssertionError: there were more passes than announced.
        """
        left = self._passes_left[index]
        if left <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )
        self.started = True
        self._passes_left[index] = left - 1
        if left > 1:
            return None
        return self._less(self._bucket_of[index])

    def complete(self, index: int) -> bool:
        """Whether all passes have computed this gradient."""
        return self._passes_left[index] == 0

    def bucket_of(self, index: int) -> int:
        """The bucket that a gradient belongs to."""
        return self._bucket_of[index]

    def alone(self, index: int) -> Optional[int]:
        """Take a gradient that has not arrived out of its bucket, into a new one of its own.

        Returns:
            the bucket that it leaves if nothing is missing there any more and something is left in it.
        """
        old = self._bucket_of[index]
        self._bucket_of[index] = len(self._sizes)
        self._sizes.append(1)
        self._missing.append(1)
        self._sizes[old] -= 1
        return self._less(old) if self._sizes[old] else None

    def extend(self, indices: Sequence[int]) -> None:
        """More gradients, which form a bucket of their own."""
        for index in indices:
            self._bucket_of[index] = len(self._sizes)
            self._passes_left[index] = self.passes
        self._sizes.append(len(indices))
        self._missing.append(len(indices))

    def _less(self, bucket: int) -> Optional[int]:
        self._missing[bucket] -= 1
        return None if self._missing[bucket] else bucket
