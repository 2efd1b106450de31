"""How many local steps the ranks make until they synchronize: as many as their distance permits.

The weights of ranks that train by themselves drift apart, and their average is as good as weights trained in
common only while the distance is small: it decides how much accuracy is lost, rather than the number of steps
or the learning rate (Kong et al., "Consensus Control for Decentralized Deep Learning", 2021). It is large in
the first steps and falls with the learning rate. So intervals that it bounds are short at first and long at
the end, as in post-local SGD (Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2020) and in the
quadratic synchronization rule (Gu et al., "A Quadratic Synchronization Rule for Distributed Deep Learning",
2024), which ask for a number of steps or a schedule in advance.

The decision is the same on all ranks, since its input is: each rank sends its numbers of the last exchange
with the next one, and all use the averages.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Deque, List, NamedTuple, Optional, Sequence, Union

from ..errors import ConfigError

AUTO = "auto"
AUTO_DRIFT = 0.01  # the distance up to which at most a third of a point was lost in docs/slow_links.md
# the same for optimizers that divide by the size of gradients: Adam, any with an ``eps``
ADAPTIVE_DRIFT = 0.001
FIXED_DRIFT = 0.2  # a fixed interval is shortened at this distance: accuracy was lost on that page
EXCHANGE_PART = 0.1  # part of the time of local steps for exchanges, if the distance permits
# While the interval is one step, gradients are averaged; weights in every PROBE-th step, for the distance, or
# up to _RAREST times as rarely, in proportion to the distance relative to the permitted one.
PROBE = 8
_RAREST = 8
# Up to this many steps optimizers' states are also averaged: different ones drive weights apart later.
_SHORT = 2
_GROWTH = 2
_TIMES = 3  # exchanges of which the shortest counts


class Facts(NamedTuple):
    """The numbers that ranks send about their last exchange; also the averages."""

    apart: float = 0.0  # squared distance from the mean: this rank's share, which may be negative
    norm: float = 0.0  # squared norm of the common weights
    steps: float = 0.0  # local steps before it; 0: there was no exchange
    exchange_s: float = 0.0  # in the exchange
    step_s: float = 0.0  # of a local step before it


class Interval:
    """The local steps of this rank until the next synchronization, derived from the last ones.

    ``sync_every`` is a number of steps, one number per rank, or ``"auto"``; ``least`` is the fewest steps.
    ``max_drift`` is the distance, relative to the norm of the weights, beyond which the interval becomes
    shorter; None: 0.01 with ``"auto"``, otherwise 0.2. ``drift`` is the distance at the last exchange of
    which it is known, nan before. ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        sync_every: Union[int, str, Sequence[int]],
        rank: int,
        size: int,
        least: int,
        max_drift: Optional[float] = None,
    ) -> None:
        self.automatic = sync_every == AUTO
        periods = [least] * size if self.automatic else _periods(sync_every, size)
        self._least, self._given = least, periods[rank]
        if least > min(periods):
            raise ConfigError(
                f"sync_every={sync_every!r} is too short: fragments is a number from 1 to sync_every, and "
                f"overlap one from 0 to sync_every - 1. These need sync_every={least} or more."
            )
        self.max_drift = (AUTO_DRIFT if self.automatic else FIXED_DRIFT) if max_drift is None else max_drift
        if not self.max_drift > 0:
            raise ConfigError(f"max_drift is a positive number, not {max_drift}.")
        # With unequal numbers of steps the interval stays, or ranks would synchronize unequally often.
        self.fixed = len(set(periods)) > 1
        self.share = periods[rank] * size / sum(periods)  # this rank's steps relative to the average
        self.restart()

    def restart(self) -> None:
        """Start over."""
        self.steps = self._planned = self._given
        self.drift = math.nan
        self._warned = False
        self._own = Facts()
        self._made = self._shared = 0
        self._probe = PROBE
        self._costs: Deque[float] = deque(maxlen=_TIMES)
        self._sent_s = math.nan
        self._exchange_s = 0.0

    def shares_gradients(self) -> bool:
        """Return whether gradients are averaged before the next step, in place of weights after it.

        Such a step is one of data-parallel training, whatever the optimizer: Adam's second moments are those
        of averaged gradients. It shows nothing of the distance, so now and then a step is local.
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
        """Return the numbers of the last exchange, which go with the one that begins.

        ``made`` counts local steps since the last one: fewer than :attr:`steps` if the program asks for it.
        ``weights``: it exchanges weights, otherwise gradients.
        """
        passed_s = max(0.0, began_s - self._sent_s - self._exchange_s)  # 0 with nan: it is the first one
        sent = self._own._replace(exchange_s=self._exchange_s, step_s=passed_s / max(1, made))
        self._sent_s, self._exchange_s, self._made, self._own = began_s, 0.0, made, Facts()
        self._shared = 0 if weights else self._shared + 1
        return list(sent)

    def learn(self, means: Sequence[float]) -> str:
        """Set the next interval from the averages of :meth:`send`.

        Return a warning if the ranks are too far apart for the interval that the program has set, else "".
        """
        facts = Facts(*means)
        if facts.step_s > 0:
            self._costs.append(facts.exchange_s / facts.step_s)
        if not facts.steps > 0:
            return ""  # nothing is known of an exchange after local steps
        finite = facts.norm > 0 and math.isfinite(facts.apart)
        self.drift = math.sqrt(max(0.0, facts.apart) / facts.norm) if finite else math.inf
        return self._decide(facts.steps)

    def _decide(self, before: float) -> str:
        """Set the next length; after ``before`` steps the ranks were :attr:`drift` apart."""
        self._probe = int(PROBE * min(_RAREST, max(1.0, self.drift / self.max_drift)))
        if self.fixed:
            return self._too_far(before, self.steps) if self.drift > self.max_drift else ""
        allowed = _GROWTH * self.steps
        if self.drift > 0:  # distances grow in proportion to the steps, or more slowly
            allowed = math.floor(min(allowed, before * self.max_drift / self.drift))
        longest = self._given
        if self.automatic:
            longest = math.ceil(min(self._costs, default=0.0) / EXCHANGE_PART)
        planned = max(self._least, min(allowed, longest))
        shortened = planned < self._planned and not self.automatic
        self._planned = planned
        return self._too_far(before, planned) if shortened else ""

    def _too_far(self, before: float, planned: int) -> str:
        """Return the warning about a distance that is too large; "" after the first one."""
        if self._warned:
            return ""
        self._warned = True
        again = "The interval stays, since it differs between ranks"
        if not self.fixed:
            again = f"The interval is {planned} now, and follows the distance from here on"
        return (
            f"LocalSGD: after {before:.3g} local steps the ranks' weights were {self.drift:.2g} of their "
            f"norm apart, more than max_drift={self.max_drift:g}, which costs accuracy. {again}; a lower "
            f'learning rate or sync_every="{AUTO}" avoids that.'
        )

    def begin(self) -> None:
        """Begin the next interval."""
        self.steps = self._planned

    def state_dict(self) -> List[float]:
        """Return the present and the planned length, for a checkpoint."""
        return [self.steps, self._planned]

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Go on with the lengths of :meth:`state_dict`; measurements are forgotten."""
        self.restart()
        if state:
            self.steps, self._planned = (int(item) for item in state)


def _periods(sync_every: Union[int, str, Sequence[int]], size: int) -> List[int]:
    """Return the local steps between two synchronizations, by rank."""
    if isinstance(sync_every, str):
        raise ConfigError(f'sync_every={sync_every!r}: a number from 1 on, one per rank, or "{AUTO}".')
    periods = [sync_every] * size if isinstance(sync_every, int) else [int(item) for item in sync_every]
    if len(periods) != size or min(periods) < 1:
        raise ConfigError(f"sync_every={sync_every!r}: a number from 1 on, or {size} of them, one per rank.")
    return periods
