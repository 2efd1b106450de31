"""Gradient buckets: which gradients are reduced together, when a bucket is complete, and names of operations.

Parameters are identified by their indices, in the order of the optimizer.
"""

from __future__ import annotations

import re
import zlib
from typing import Any, Dict, Hashable, Iterable, List, NamedTuple, Optional, Sequence, Union

from ..configuration.bucket_sizes import FIRST_GRADIENTS_BYTES, GRADIENTS_BYTES
from ..errors import ConfigError

_LISTED = 3  # names in the name of an operation
_COUNTED = re.compile(r"_\d+(?=/|$)")


class Gradient(NamedTuple):
    """The properties of a gradient that determine its bucket."""

    nbytes: int
    kind: Hashable  # dtype and device; the same for all gradients of a bucket


def plan_buckets(
    gradients: Sequence[Gradient],
    first_bytes: int = FIRST_GRADIENTS_BYTES,
    bucket_bytes: int = GRADIENTS_BYTES,
) -> List[List[int]]:
    """Divide gradients into buckets, in the order in which a backward pass computes them: last first.

    The result depends on the arguments only, so it is the same on all ranks.
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
    """Return the name of every parameter, by ``id()``.

    ``groups`` are the optimizer's parameter groups, ``named`` the caller's pairs (name, parameter). Without
    ``everything_named`` parameters may lack a name: theirs then contain the first given one, so that they
    differ from those of other optimizers. ConfigError: invalid pairs, or a name is missing or occurs twice.
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
    """Return the name of a bucket's operation, for example ``b[10]..w[8, 10] (4 tensors, 1a2b3c4d)``.

    The checksum of names and shapes makes ranks with different models fail with a mismatch. The first and the
    last shape are in the text because models mostly differ in a layer at one end.
    """
    if len(names) == 1:
        return names[0]
    content = [(name, [int(length) for length in shape]) for name, shape in zip(names, shapes)]
    (first, first_shape), *_, (last, last_shape) = content
    checksum = zlib.crc32(repr(content).encode())
    return f"{first}{first_shape}..{last}{last_shape} ({len(names)} tensors, {checksum:08x})"


class Arrivals:
    """Track which gradients have been computed since the last step, over ``passes`` backward passes.

    ``bucket_of`` and ``passes_left`` (backward passes that are still to add to it) are by a gradient's index.
    """

    def __init__(self, buckets: Sequence[Sequence[int]], passes: int = 1) -> None:
        self.passes = passes
        self.started = False
        self.bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
        self._sizes = [len(bucket) for bucket in buckets]
        self.reset()

    def reset(self, passes: Optional[int] = None) -> None:
        """Start the next step, with another number of passes if one is given."""
        if passes is not None:
            self.passes = passes
        self.started = False
        self.passes_left = dict.fromkeys(self.bucket_of, self.passes)
        self._missing = list(self._sizes)

    def expect(self, index: int) -> None:
        """Raise AssertionError if there were ``passes`` backward passes already."""
        if self.passes_left[index] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )

    def arrived(self, index: int) -> Optional[int]:
        """Record a computed gradient; return the index of the bucket that it completes, or None.

        AssertionError: there were more than ``passes`` backward passes.
        """
        left = self.passes_left[index]
        if left <= 0:
            self.expect(index)
        self.started = True
        self.passes_left[index] = left - 1
        if left > 1:
            return None
        return self._decrement(self.bucket_of[index])

    def alone(self, index: int) -> Optional[int]:
        """Move a gradient that has not been computed to a new bucket.

        Return the index of its former bucket if that is now complete and not empty, else None.
        """
        old = self.bucket_of[index]
        self.bucket_of[index] = len(self._sizes)
        self._sizes.append(1)
        self._missing.append(1)
        self._sizes[old] -= 1
        return self._decrement(old) if self._sizes[old] else None

    def extend(self, indices: Sequence[int]) -> None:
        """Add gradients, which form a new bucket."""
        for index in indices:
            self.bucket_of[index] = len(self._sizes)
            self.passes_left[index] = self.passes
        self._sizes.append(len(indices))
        self._missing.append(len(indices))

    def _decrement(self, bucket: int) -> Optional[int]:
        self._missing[bucket] -= 1
        return None if self._missing[bucket] else bucket


def variable_name(variable: Any) -> str:
    """Return a variable's name without the numbers that frameworks append to make names unique.

    On a rank that has created another model before, those numbers differ from the other ranks'.
    """
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
