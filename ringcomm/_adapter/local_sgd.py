"""Local steps: every rank trains by itself for a while, then the ranks' models are brought together.

Local SGD (Stich, "Local SGD converges fast and communicates little", 2019): the ranks average their weights
once per ``sync_every`` steps, in place of gradients in every step. An outer optimizer may follow, as in
DiLoCo (Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023): the
average of the ranks' changes is taken for a gradient, with which Nesterov's momentum makes one step from the
weights that all ranks had before.

**Streaming** (Douillard et al., "Streaming DiLoCo with overlapping communication", 2025): the weights are
divided into fragments that take turns, and a fragment's reduction runs during the next local steps. When it
is complete, the outer step replaces the weights that the fragment had when the reduction began; changes by
local steps since then are kept, and are part of the next delta.

**Intervals.** The average of weights is as good as weights trained in common only while ranks are close to
each other: their distance decides how much accuracy is lost, rather than the number of steps or the learning
rate (Kong et al., "Consensus Control for Decentralized Deep Learning", 2021). It is large in the first steps
and falls with the learning rate. So automatic intervals, which it bounds, are short at first and long at the
end, as in post-local SGD (Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2020). All ranks decide
alike: each sends its numbers of the last exchange with the next one, and all use the averages.
"""

from __future__ import annotations

import inspect
import math
import time
from collections import deque
from functools import partial
from typing import Any, Deque, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type, TypeVar, Union

import numpy as np

from .. import api
from ..calls.process_set import ProcessSet, global_process_set, number_of
from ..docstrings import documented
from ..dtypes import Array
from ..engine.request import Handle
from ..errors import ConfigError
from ..job.context import Context
from ..ops import BLOCKWISE, CODECS, ENCODED, ReduceOp, codec_number
from .compression import codec_for, compressor_of

AUTO = "auto"
AUTO_DRIFT = 0.01  # the distance up to which at most a third of a point was lost in docs/slow_links.md
# the same for optimizers that divide by the size of gradients: Adam, any with an ``eps``
ADAPTIVE_DRIFT = 0.001
FIXED_DRIFT = 0.2  # accuracy was lost on that page
EXCHANGE_PART = 0.1  # part of the time of local steps for exchanges, if the distance permits
# While the interval is one step, gradients are averaged; weights in every PROBE-th step, for the distance, or
# up to _RAREST times as rarely, in proportion to the distance relative to the permitted one.
PROBE = 8
_RAREST = 8
# Up to this many steps optimizers' states are also averaged: different ones drive weights apart later.
_SHORT = 2
_GROWTH = 2
_TIMES = 3  # exchanges of which the shortest counts
_NO_STEPS = 1e-9  # the weight of a rank that has made no step


def host_dtype(name: str) -> str:
    """Return the array type for a weight's type: float32 for half types; ConfigError if it is complex."""
    if name.startswith("complex"):
        raise ConfigError(f"LocalSGD averages real weights, not {name}: make two of each.")
    return name if name == "float64" else "float32"


class Exchange(NamedTuple):
    """The reduction of a fragment that is running."""

    until: int  # the local step after which its result is taken
    handles: List[Handle]
    started: Dict[int, Array]  # by place: the weights at its beginning; empty if it is waited for at once
    deltas: Dict[int, Array]  # by place: the arrays in the average
    distance: float  # squared norm of this rank's deltas
    before: List[Array]  # the arrays to be averaged, at its beginning
    means: List[Array]  # receives their averages
    facts: Optional[Array]  # receives the average of the ranks' numbers, with the last fragment


def divided(sizes: Sequence[int], parts: int) -> List[List[int]]:
    """Divide neighbouring places into ``parts`` of similar total size; parts may be empty.

    >>> divided([4, 4, 1, 1, 6], 2)
    [[0, 1], [2, 3, 4]]
    """
    found: List[List[int]] = [[] for _ in range(parts)]
    total, reached = max(1, sum(sizes)), 0
    for place, size in enumerate(sizes):
        found[min(parts - 1, (2 * reached + size) * parts // (2 * total))].append(place)
        reached += size
    return found


def square(array: Array) -> float:
    flat = array.reshape(-1)
    return float(np.dot(flat, flat))


_Made = TypeVar("_Made", bound="OuterOptimizer")


class OuterOptimizer:
    """What makes outer steps: the values of its arguments ``outer_lr`` and ``outer_momentum`` by name."""

    @classmethod
    def diloco(cls: Type[_Made], *arguments: Any, **options: Any) -> _Made:
        """Make an object with DiLoCo's values: ``outer_lr=0.7``, ``outer_momentum=0.9``, ``sync_every=16``.

        They suit long runs with small learning rates, such as those of language models. In runs of some
        dozens of synchronizations they lose accuracy, or the loss diverges: see docs/slow_links.md.

        Args:
            arguments: positional arguments of the class.
            options: keyword arguments of the class.
        """
        given = inspect.signature(cls).bind_partial(*arguments, **options).arguments
        return cls(**{"sync_every": 16, "outer_lr": 0.7, "outer_momentum": 0.9, **given})


@documented
class LocalSGD(OuterOptimizer):
    """Local steps on arrays of weights, which are overwritten at every synchronization.

    Example::

        local = rc.LocalSGD(weights, sync_every=16)
        for batch in batches:
            for weight, gradient in zip(weights, gradients_of(weights, batch)):
                weight -= 0.1 * gradient
            local.step()
        local.synchronize()

    This algorithm differs from averaging gradients, and so do its results. By default ranks synchronize as
    often as the distance of their weights demands; docs/slow_links.md shows the effect on accuracy. With Adam
    it acts like a lower learning rate. For runs with hundreds of synchronizations, :meth:`diloco` adds an
    outer momentum.

    All ranks must begin with the same weights, and synchronize equally often. With ``sync_every=1`` it is
    data-parallel SGD on the changes that the ranks make to the weights.

    Args:
        weights: writable NumPy arrays of float32 or float64, of equal shapes on all ranks.
        {local_sgd}
        averaged: arrays that are only averaged at every synchronization, such as batch-norm statistics. With
            ``fragments``, this happens together with the last fragment.
        name: name of its operations; needed if a program has several objects of this class.
        context: the job; by default that of ``init()``.

    Raises:
        ConfigError: ``sync_every``, ``outer_lr``, ``outer_momentum``, ``fragments``, ``overlap`` or
            ``max_drift`` is out of range, or an array is not a writable array of floating-point numbers.
        Misuse: there is no such codec.
    """

    def __init__(
        self, weights: Sequence[Array], sync_every: Union[int, str, Sequence[int]] = AUTO,
        outer_lr: float = 1.0, outer_momentum: float = 0.0, compression: Any = None,
        averaged: Sequence[Array] = (), process_set: ProcessSet = global_process_set,
        name: str = "local_sgd", context: Optional[Context] = None, fragments: int = 1, overlap: int = 0,
        max_drift: Optional[float] = None,
    ) -> None:  # fmt: skip
        self._given, self._context = context, context or api.context()
        if fragments < 1 or overlap < 0:
            raise ConfigError(f"fragments must be >= 1 and overlap >= 0, not {fragments} and {overlap}.")
        least = max(fragments, overlap + 1)
        self._intervals = partial(Interval, sync_every, least=least, max_drift=max_drift)
        self._interval = self._intervals(self._context.rank, self._context.size)
        if not outer_lr > 0 or not 0 <= outer_momentum < 1:
            raise ConfigError(
                f"outer_lr must be > 0 and outer_momentum from 0 to 1, not {outer_lr} and {outer_momentum}."
            )
        self._weights, self._averaged = list(weights), list(averaged)
        for array in (*self._weights, *self._averaged):
            if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or not array.flags.writeable:
                raise ConfigError("LocalSGD works on writable NumPy arrays of float32 or float64.")
        self._lr, self._momentum = outer_lr, outer_momentum
        self._name, self._process_set, self._codec = name, process_set, CODECS[codec_number(compression)]
        self._anchors = [array.copy() for array in self._weights]
        self._velocities = [np.zeros_like(array) for array in self._weights]
        self._residuals = [np.zeros(array.size, np.float32) for array in self._weights]
        self._gradient_residuals: List[Array] = []
        self._steps = self._within = 0
        self._overlap = overlap
        self._fragments = divided([array.nbytes for array in self._weights], fragments)
        self._apart = self._norm = 0.0
        self._running: Dict[int, Exchange] = {}

    @property
    def steps(self) -> int:
        """Local steps since all ranks had the same weights."""
        return self._steps

    def shares_gradients(self) -> bool:
        """Return whether :meth:`average_gradients` replaces :meth:`due` in the next step."""
        return self._lr == 1 and not self._momentum and self._interval.shares_gradients()

    def average_gradients(self, gradients: Sequence[Array], absent: int = 0) -> int:
        """Average all gradients in place, and count a step; return bits of the gradients that no rank has."""
        began_s = time.perf_counter()
        if self._codec in BLOCKWISE and not self._gradient_residuals:
            self._gradient_residuals = [np.zeros_like(item) for item in self._residuals]
        missing = 0
        started = self._start_coded(
            "gradients.", dict(enumerate(gradients)), self._gradient_residuals, absent=absent
        )
        facts = np.array(self._interval.send(began_s, 1, weights=False))
        sent = self._start("facts", [facts])
        for places, handle in started:
            handle.wait()
            missing |= sum(1 << place for bit, place in enumerate(places) if handle.absent >> bit & 1)
        sent.wait()
        self._announce(self._interval.learn(facts.tolist()))
        self._interval.begin()
        self._interval.exchanged(began_s)
        self._steps += 1
        return missing

    def averages_state(self) -> bool:
        """Return whether :meth:`average` must average the optimizer's own state, like the weights."""
        return self._lr == 1 and not self._momentum and self._interval.averages_state()

    def average(self, arrays: Sequence[Array]) -> None:
        """Average arrays in place, as bfloat16 if weights are compressed. Call it after :meth:`advance`."""
        if arrays:
            began_s = time.perf_counter()
            self._start("state", arrays, "bf16" if self._codec != "none" else "none").wait()
            self._interval.exchanged(began_s)

    def due(self) -> bool:
        """Count a local step; return whether :meth:`advance` has something to do now."""
        self._steps += 1
        if self._within >= self._interval.steps:
            self._within = 0
            self._interval.begin()
        self._within += 1
        return bool(self._ending() or self._beginning())

    def _beginning(self) -> List[int]:
        """Return the fragments whose reduction begins after this step; the last one's ends an interval."""
        every, parts = self._interval.steps, len(self._fragments)
        return [number for number in range(parts) if every * (number + 1) // parts == self._within]

    def _ending(self) -> List[int]:
        """Return the fragments whose result is taken after this step, in the order in which they began."""
        return [number for number, item in self._running.items() if item.until <= self._steps]

    def touched(self) -> List[int]:
        """Return the places of the arrays (``weights``, then ``averaged``) that :meth:`advance` uses now."""
        numbers = {*self._ending(), *self._beginning()}
        places = [place for number in sorted(numbers) for place in self._fragments[number]]
        if len(self._fragments) - 1 in numbers:
            places += range(len(self._weights), len(self._weights) + len(self._averaged))
        return places

    def step(self) -> bool:
        """Count a local step, and synchronize if it is time. Call it after every local step.

        Returns:
            whether the ranks have synchronized at least one fragment.

        Raises:
            PeerLostError: a rank ended, or is silent for too long.
        """
        if not self.due():
            return False
        self.advance()
        return True

    def advance(self) -> None:
        """Use the results and begin the reductions that are due. Call it after :meth:`due`."""
        if len(self._fragments) == 1 and not self._overlap:
            self.synchronize()
            return
        began_s = time.perf_counter()
        for number in self._ending():
            self._end(number)
        for number in self._beginning():
            self._begin(number, began_s)
            if not self._overlap:
                self._end(number)
        self._interval.exchanged(began_s)

    def synchronize(self) -> None:
        """Average the changes of all ranks and make the outer step. All ranks then have the same weights.

        Raises:
            PeerLostError: a rank ended, or is silent for too long.
        """
        began_s = time.perf_counter()
        for number in list(self._running):
            self._end(number)
        self._steps = 0
        for number in range(len(self._fragments)):
            self._begin(number, began_s)
        for number in list(self._running):
            self._end(number)
        self._within = 0
        self._interval.begin()
        self._interval.exchanged(began_s)

    def _begin(self, number: int, began_s: float) -> None:
        """Start the reduction of this rank's changes in a fragment."""
        places = self._fragments[number]
        started = {place: self._weights[place].copy() for place in places} if self._overlap else {}
        # Into new arrays: the plain difference of arrays of zero dimensions is a scalar, whose flat
        # copy would be averaged in place of it.
        deltas = {place: np.empty_like(self._anchors[place]) for place in places}
        for place, delta in deltas.items():
            np.subtract(self._anchors[place], self._weights[place], out=delta)
        distance = self._interval.share * sum(map(square, deltas.values()))
        label = "" if len(self._fragments) == 1 else f"{number}."
        coded = self._start_coded(label, deltas, self._residuals, self._weight())
        handles = [handle for _, handle in coded]
        means: List[Array] = []
        facts: Optional[Array] = None
        if number == len(self._fragments) - 1:
            if self._averaged:
                means = [np.array(array, order="C") for array in self._averaged]
                handles.append(self._start(f"{label}averaged", means, weight=self._weight()))
            facts = np.array(self._interval.send(began_s, self._within))
            handles.append(self._start(f"{label}facts", [facts]))
        before = [array.copy() for array in self._averaged] if means else []
        until = self._steps + self._overlap
        self._running[number] = Exchange(until, handles, started, deltas, distance, before, means, facts)

    def _start_coded(
        self, label: str, arrays: Dict[int, Array], residuals: Sequence[Array],
        weight: Optional[float] = None, absent: int = 0,
    ) -> List[Tuple[List[int], Handle]]:  # fmt: skip
        """Start one average for each codec, of arrays and residuals by place; return places and handles."""
        groups: Dict[str, List[int]] = {}
        for place, array in arrays.items():
            codec = self._codec
            if codec in ENCODED:
                codec = codec_for(compressor_of(codec), "float32", array.shape)
            groups.setdefault(codec, []).append(place)
        found = []
        for codec, places in sorted(groups.items()):
            own = [residuals[place] for place in places] if codec in BLOCKWISE else []
            bits = sum(1 << bit for bit, place in enumerate(places) if absent >> place & 1)
            chosen = [arrays[place] for place in places]
            found.append((places, self._start(f"{label}{codec}", chosen, codec, own, weight, bits)))
        return found

    def _start(
        self, label: str, arrays: Sequence[Array], codec: str = "none", residuals: Sequence[Array] = (),
        weight: Optional[float] = None, absent: int = 0,
    ) -> Handle:  # fmt: skip
        """Start an average of arrays, in place."""
        engine, process_set = self._context.engine, number_of(self._process_set)
        name = f"{self._name}.{label}"
        engine.finish_earlier(name, process_set)  # of one that the program has left
        return engine.allreduce(
            [array.reshape(-1) for array in arrays], ReduceOp.AVERAGE, name,
            [array.shape for array in arrays], process_set=process_set,
            compression=codec, residuals=residuals, weight=weight, absent=absent,
        )  # fmt: skip

    def _end(self, number: int) -> None:
        """Wait for a fragment's reduction, and make the outer step."""
        exchange = self._running.pop(number)
        for handle in exchange.handles:
            handle.wait()
        for array, before, mean in zip(self._averaged, exchange.before, exchange.means):
            array[...] = mean + (array - before)
        self._apart += exchange.distance - sum(map(square, exchange.deltas.values()))
        for place, delta in exchange.deltas.items():
            weight, anchor, velocity = self._weights[place], self._anchors[place], self._velocities[place]
            if self._momentum:
                velocity *= weight.dtype.type(self._momentum)
                velocity += delta
                delta += weight.dtype.type(self._momentum) * velocity
            anchor -= weight.dtype.type(self._lr) * delta
            if exchange.started:
                weight -= exchange.started[place]  # what local steps have changed since then
                weight += anchor
            else:
                weight[...] = anchor
            self._norm += square(anchor)
        if exchange.facts is not None:
            self._announce(self._interval.learn(exchange.facts.tolist()))
            self._interval.measured(self._apart, self._norm)
            self._apart = self._norm = 0.0

    def _announce(self, warning: str) -> None:
        """Show the present interval and distance, and a warning if there is one."""
        gauges = self._context.activity.gauges
        gauges["local_steps"] = self._interval.steps
        if math.isfinite(self._interval.drift):
            gauges["local_drift"] = self._interval.drift
        if warning and self._context.rank == 0:
            self._context.announce(f"{self._name} drift", warning)

    def _drop_running(self) -> None:
        """Wait for running reductions, and forget them."""
        for exchange in self._running.values():
            for handle in exchange.handles:
                handle.wait()
        self._running.clear()

    def _weight(self) -> Optional[float]:
        """Return this rank's weight at an exchange: its steps, if ranks make unequal numbers."""
        if not self._interval.unequal:
            return None
        whole = len(self._fragments) > 1 or self._overlap
        return float(self._interval.steps if whole else max(self._within, _NO_STEPS))

    def state_dict(self) -> Dict[str, Any]:
        """The outer optimizer's state, for a checkpoint of this rank.

        Returns:
            a dictionary with copies of arrays: ``anchors`` (the weights after the last synchronization),
            ``velocities`` and ``residuals``. It also has the number of local ``steps`` since then, and the
            state of the ``interval``.

        Raises:
            ConfigError: (with ``overlap``) a reduction is running. Call :meth:`synchronize` first.
        """
        if self._running:
            raise ConfigError("A reduction is running: call synchronize() on all ranks before state_dict().")
        return {
            "anchors": [array.copy() for array in self._anchors],
            "velocities": [array.copy() for array in self._velocities],
            "residuals": [array.copy() for array in self._residuals],
            "steps": self._steps,
            "within": self._within,
            "interval": self._interval.state_dict(),
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue with the state of :meth:`state_dict`. The weights themselves must be loaded, too.

        Args:
            state: the state that the same rank has saved.
        """
        for mine, kind in (
            (self._anchors, "anchors"), (self._velocities, "velocities"), (self._residuals, "residuals"),
        ):  # fmt: skip
            for array, saved in zip(mine, state[kind]):
                array[...] = saved
        self._drop_running()
        self._steps = int(state["steps"])
        self._within = int(state["within"])
        self._apart = self._norm = 0.0
        self._interval.load_state_dict(state["interval"])

    def restart(self) -> None:
        """Assume that all ranks have the present weights, and forget momentum and residuals."""
        if self.view_changed():
            self._running.clear()
            self._context = api.context()
            self._interval = self._intervals(self._context.rank, self._context.size)
        self._drop_running()
        self._steps = self._within = 0
        self._apart = self._norm = 0.0
        self._interval.restart()
        for anchor, weight in zip(self._anchors, self._weights):
            anchor[...] = weight
        for array in (*self._velocities, *self._residuals, *self._gradient_residuals):
            array[...] = 0

    def view_changed(self) -> bool:
        """Return whether the ranks have changed since the last :meth:`restart`; then call it again."""
        return self._given is None and api.context() is not self._context


# ---- how many local steps the ranks make until they synchronize ------------------------------------------


class Facts(NamedTuple):
    """The numbers that ranks send about their last exchange; also the averages."""

    apart: float = 0.0  # squared distance from the mean: this rank's share, which may be negative
    norm: float = 0.0  # squared norm of the common weights
    steps: float = 0.0  # local steps before it; 0: there was no exchange
    exchange_s: float = 0.0  # in the exchange
    step_s: float = 0.0  # of a local step before it


class Interval:
    """The local steps of this rank until the next synchronization, at least ``least``. ``max_drift`` is the
    permitted distance, relative to the norm of the weights; ``drift`` is the last that is known, nan before.
    """

    def __init__(
        self, sync_every: Union[int, str, Sequence[int]], rank: int, size: int, least: int,
        max_drift: Optional[float] = None,
    ) -> None:  # fmt: skip
        self.automatic = sync_every == AUTO
        periods = [least] * size if self.automatic else _periods(sync_every, size)
        self._least, self._first = least, periods[rank]
        if least > min(periods):
            raise ConfigError(
                f"sync_every={sync_every!r} is too short: fragments must be at most sync_every, and overlap "
                f"at most sync_every - 1. These need sync_every={least} or more."
            )
        self.max_drift = (AUTO_DRIFT if self.automatic else FIXED_DRIFT) if max_drift is None else max_drift
        if not self.max_drift > 0:
            raise ConfigError(f"max_drift must be positive, not {max_drift}.")
        self.unequal = len(set(periods)) > 1
        self.share = periods[rank] * size / sum(periods)  # this rank's steps relative to the average
        self.restart()

    def restart(self) -> None:
        """Start over."""
        self.steps = self._planned = self._first
        self.drift = math.nan
        self._warned = False
        self._own = Facts()
        self._made = self._shared = 0
        self._probe = PROBE
        self._costs: Deque[float] = deque(maxlen=_TIMES)
        self._sent_s = math.nan
        self._exchange_s = 0.0

    def shares_gradients(self) -> bool:
        """Return whether gradients are averaged before the next step, in place of weights after it. Such a
        step is one of data-parallel training, whatever the optimizer: Adam's second moments are those of
        averaged gradients. It shows nothing of the distance, so now and then a step is local.
        """
        return self.automatic and self.steps == 1 and self._shared < self._probe - 1

    def averages_state(self) -> bool:
        """Return whether momenta and the like are averaged with the weights."""
        return self.automatic and self.steps <= _SHORT

    def exchanged(self, began_s: float) -> None:
        """Record that this rank has been in an exchange since ``began_s``, by ``time.perf_counter()``."""
        self._exchange_s += time.perf_counter() - began_s

    def measured(self, apart: float, norm: float) -> None:
        """Record the squared distance and norm of an exchange that ended, for the next one."""
        self._own = Facts(apart, norm, self._made)

    def send(self, began_s: float, made: int, weights: bool = True) -> List[float]:
        """Return the numbers of the last exchange, which go with the one that begins."""
        passed_s = max(0.0, began_s - self._sent_s - self._exchange_s)  # 0 with nan: it is the first one
        sent = self._own._replace(exchange_s=self._exchange_s, step_s=passed_s / max(1, made))
        self._sent_s, self._exchange_s, self._made, self._own = began_s, 0.0, made, Facts()
        self._shared = 0 if weights else self._shared + 1
        return list(sent)

    def learn(self, means: Sequence[float]) -> str:
        """Set the next interval from the averages of :meth:`send`; return a warning, or ""."""
        facts = Facts(*means)
        if facts.step_s > 0:
            self._costs.append(facts.exchange_s / facts.step_s)
        if not facts.steps > 0:
            return ""  # nothing is known of an exchange after local steps
        finite = facts.norm > 0 and math.isfinite(facts.apart)
        self.drift = math.sqrt(max(0.0, facts.apart) / facts.norm) if finite else math.inf
        if not self.automatic:
            if self._warned or self.drift <= self.max_drift:
                return ""
            self._warned = True
            return (
                f"LocalSGD: after {facts.steps:.3g} local steps the ranks' weights were {self.drift:.2g} of "
                f"their norm apart, more than max_drift={self.max_drift:g}, which costs accuracy. A lower "
                f'learning rate or sync_every="{AUTO}" avoids that.'
            )
        self._probe = int(PROBE * min(_RAREST, max(1.0, self.drift / self.max_drift)))
        allowed = _GROWTH * self.steps
        if self.drift > 0:  # distances grow in proportion to the steps, or more slowly
            allowed = math.floor(min(allowed, facts.steps * self.max_drift / self.drift))
        needed = math.ceil(min(self._costs, default=0.0) / EXCHANGE_PART)
        self._planned = max(self._least, min(allowed, needed))
        return ""

    def begin(self) -> None:
        self.steps = self._planned

    def state_dict(self) -> List[float]:
        """Return the present and the planned length, for a checkpoint."""
        return [self.steps, self._planned]

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Go on with the lengths of :meth:`state_dict`; measurements are forgotten."""
        self.restart()
        self.steps, self._planned = (int(item) for item in state)


def _periods(sync_every: Union[int, str, Sequence[int]], size: int) -> List[int]:
    """Return the local steps between two synchronizations, by rank."""
    if isinstance(sync_every, str):
        raise ConfigError(f'sync_every={sync_every!r}: a number from 1 on, one per rank, or "{AUTO}".')
    periods = [sync_every] * size if isinstance(sync_every, int) else [int(item) for item in sync_every]
    if len(periods) != size or min(periods) < 1:
        raise ConfigError(f"sync_every={sync_every!r}: a number from 1 on, or {size} of them, one per rank.")
    return periods
