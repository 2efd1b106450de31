"""Measure how long ranks compute, and change shares accordingly in a running job.

Every rank measures its own steps: the time from one reduction to the next, less the time that it waited for
others. Now and then all ranks exchange one line of numbers in the background, feed the same
:class:`~.plan.Replanner` with them, and so change shares at the same step without a further message.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import numpy as np

from .. import api
from ..collective.measure import CHOSEN_CODECS, Rates, measured_rates
from ..engine.request import Handle
from ..errors import ConfigError
from ..job.context import Context
from ..ops import ReduceOp
from ..schedule.cost import Calibration, model_of
from .advise import Probe
from .plan import RankTimes, Replanner, SampleDivision, rank_names, typical_s

MIN_FOR_BATCH_NORM = 8  # with fewer samples the statistics of batch normalization are mostly noise
_FEW_SAMPLES = (
    "a rank has only {} samples per step, and the model has batch normalization, whose statistics are those "
    "of a rank's samples: use SyncBatchNorm, GroupNorm, min_batch=8 or a larger global batch"
)
_CODEC_S = 0.05  # time of measuring each codec for the advice, in each direction
_FITS = 0.9  # part of a share that did not fit into memory, to be tried next


class Pace:
    """One rank's position in the data, ``iteration`` counts those over the data set, and its measurements."""

    def __init__(self, division: SampleDivision, context: Callable[[], Context] = api.context) -> None:
        self.division = division
        self.epoch = self.step = self.iteration = 0
        self.replanner: Union[Replanner, Probe, None] = None  # None: shares do not change
        # ended: the program must end, since --advise has recommended machines.
        # by_epoch: shares change between epochs only: the framework takes any number of them ahead.
        self.by_epoch = self.ended = False
        self._context = context
        self._ahead = 0  # most steps that a loader took in advance
        self._most = 0  # most samples that fit into memory; 0: not known
        self._lost = (-1, -1)  # iteration and step for whose share there was no memory
        self._samples = self._samples_before = 0
        self._warned = False
        self._leader: Optional[StepCursor] = None
        self._last: Optional[Tuple[float, float]] = None  # end of the last step, seconds waited
        self._attach()

    def _attach(self) -> None:
        """Restart with the ranks of the current job: some of them may have measured nothing yet."""
        context = self._attached = self._context()
        context.balance_count += 1
        self._number = context.balance_count
        self._total_steps = 0
        self._handle: Optional[Handle] = None
        self._effective = -1  # position from which the next shares apply; -1: none are to come
        self.division.resize(context.size)
        self.replanner = None
        if self.division.measures and context.size > 1:
            shares = self.division.full_shares(self.epoch, self.step)
            total, limits = self.division.global_batch, self.division.limits
            if context.settings.advise:
                self.replanner = Probe(shares, total, limits)
            else:
                hosts = rank_names([peer.host for peer in context.peers])
                self.replanner = Replanner(shares, total, limits, hosts)
        self._begin_window()

    def _begin_window(self) -> None:
        self._count = 0
        self._compute_s: List[float] = []
        self._waited_s: List[float] = []

    # ---- position ----------------------------------------------------------------------------

    def begin(self, epoch: int, step: int) -> None:
        """Begin an iteration over the data set at this step."""
        if self._context() is not self._attached:
            self._attach()
        self.iteration += 1
        if self._samples:
            self._samples_before, self._samples = self._samples, 0
        self.epoch, self.step = epoch, step
        self._last = None  # the time between two epochs is not part of a step

    def take(self, epoch: int, step: int) -> Any:
        """Return the indices of this rank's share; a loader may take it long before it is computed."""
        indices = self.division.take(epoch, step, self._context().rank)
        position = self.division.position(self.epoch, self.step)
        self._ahead = max(self._ahead, self.division.furthest - position + 1)
        return indices

    def share(self, step: int) -> int:
        """Return this rank's number of samples in a step of the epoch; ConfigError without such a step."""
        if not 0 <= step < self.division.steps:
            raise ConfigError(
                f"Step {step + 1} of an epoch of {self.division.steps} global batches: every optimizer that "
                "has batches=... makes one step for each batch, and backward_passes_per_step is 1."
            )
        if self._lost == (self.iteration, step):
            return 0
        return self.division.shares(self.epoch, step)[self._context().rank]

    @property
    def samples(self) -> int:
        """Return the samples that this rank computed in this epoch; at its beginning, in the last one."""
        return self._samples or self._samples_before

    def cursor(self) -> StepCursor:
        """Return the weights of gradients for an optimizer; the first cursor also counts the steps."""
        made = StepCursor(self)
        self._leader = self._leader or made
        return made

    @property
    def leader(self) -> StepCursor:
        """Return the cursor that counts steps, also for tapes, of which each step has a new one."""
        return self._leader or self.cursor()

    @property
    def counted(self) -> bool:
        """Return whether an optimizer counts steps; otherwise the iteration over the batches does."""
        return self._leader is not None

    # ---- measuring ---------------------------------------------------------------------------

    def lose(self) -> None:
        """Record that this rank has no memory for its share of the step, and contributes nothing to it."""
        if self._lost != (self.iteration, self.step):
            fits = max(1, int(_FITS * self.share(self.step)))
            self._most = min(self._most or fits, fits)
            self._lost = (self.iteration, self.step)

    def step_done(self) -> None:
        """Record that a step is complete: all gradients are reduced."""
        context = self._context()
        now_s, waited_s = time.perf_counter(), context.waited_s
        full = self.division.full_shares(self.epoch, self.step)
        lost = self._lost == (self.iteration, self.step)
        if self._last is not None and not lost and self.division.shares(self.epoch, self.step) == full:
            since_s, before_s = self._last
            self._waited_s.append(waited_s - before_s)
            self._compute_s.append(max(1e-9, now_s - since_s - (waited_s - before_s)))
        self._last = (now_s, waited_s)
        self._samples += self.share(self.step)
        self.step += 1
        self._total_steps += 1
        if context.batch_norm and context.rank == 0 and context.size > 1 and not self._warned:
            fewest = min(share for share in full if share)
            if fewest < MIN_FOR_BATCH_NORM:
                self._warned = True
                context.announce(f"batch normalization {self._number}", _FEW_SAMPLES.format(fewest))
        if self.replanner is not None:
            self._replan(context, self.replanner, full[context.rank])

    def _replan(self, context: Context, replanner: Union[Replanner, Probe], samples: int) -> None:
        position = self.division.position(self.epoch, self.step)
        self._count += 1
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._decide(context, replanner, position, handle)
        if 0 <= self._effective <= position:
            self._effective = -1
            self._begin_window()
        elif self._effective < 0 and self._count >= replanner.window:
            self._handle = self._report(context, samples, position)
            self._begin_window()

    def _report(self, context: Context, samples: int, position: int) -> Handle:
        division, computes = self.division, bool(samples and self._compute_s)
        compute_s = typical_s(self._compute_s) if computes else 0.0
        waited_s = typical_s(self._waited_s) if computes else 0.0
        measured = [samples, compute_s, waited_s, self._ahead, self._most]
        same = [division.count, division.global_batch, division.digest, position]
        row = np.array([*measured, *same], np.float64)
        name = f"ringcomm.balance.{self._number}.{self._total_steps}"
        return context.engine.allgather([row], [(1, row.size)], name)

    def _decide(
        self, context: Context, replanner: Union[Replanner, Probe], position: int, handle: Handle
    ) -> None:
        """Take the ranks' reports of one step, which all ranks have, and change shares."""
        rows = np.asarray(handle.wait()[0])
        _check_same(rows[:, 5:], self.division.steps)
        reports = [RankTimes(int(r[0]), float(r[1]), float(r[2]), int(r[3]), int(r[4])) for r in rows]
        change = replanner.decide(self._total_steps, reports)
        if isinstance(replanner, Probe) and replanner.finished:
            self._advise(context, replanner)
        if change is None:
            return
        next_epoch = self.division.position(self.epoch + 1, 0)
        self._effective = next_epoch if self.by_epoch else position + change.lead
        self.division.change(self._effective, change.shares)
        if context.rank == 0:
            context.announce(f"balance {self._number} {self._total_steps}", change.text)

    def _advise(self, context: Context, probe: Probe) -> None:
        """Recommend machines, and end the program."""
        hosts = [peer.host for peer in context.peers]
        if len(set(hosts)) == 1:
            hosts = rank_names(hosts)  # then ranks are compared
        numbers = [peer.host_index for peer in context.peers]
        model = context.cost_model or model_of([Calibration()] * context.size, numbers)
        nbytes = context.reduced_bytes // max(1, self._total_steps)
        advice = probe.advice(hosts, model, nbytes, _codec_rates(context))
        context.advised = True
        if context.rank == 0:
            context.announce("advise", f"{advice.table()}\n{advice.text}")
        self.ended, self.replanner = True, None
        if threading.current_thread() is threading.main_thread():
            raise SystemExit(0)


def _check_same(rows: Any, steps: int) -> None:
    """Check by count, global batch, digest and position that all ranks divide the same data at the same step.
    """
    first, *others = rows.tolist()
    for rank, (count, global_batch, digest, position) in enumerate(others, 1):
        if [count, global_batch, digest] != first[:3]:
            raise ConfigError(
                "Ranks divide different data, so samples are left out or used twice: rank 0 has "
                f"count={first[0]:.0f} and global_batch={first[1]:.0f}, rank {rank} has "
                f"count={count:.0f} and global_batch={global_batch:.0f}. Pass the same data set, "
                "global_batch, seed, shuffle, drop_last, min_batch, max_batch and multiple_of on all ranks."
            )
        if position != first[3]:
            (epoch, done), (own_epoch, own_done) = divmod(int(first[3]), steps), divmod(int(position), steps)
            raise ConfigError(
                "Ranks are at different places in the data, so samples are left out or used twice: rank 0 "
                f"is in epoch {epoch} after {done} steps, rank {rank} in epoch {own_epoch} after {own_done}. "
                "Call set_epoch(), set_step() and load_state_dict() with the same values on all ranks, and "
                "make the same number of steps."
            )


def _codec_rates(context: Context) -> List[Dict[str, Rates]]:
    """Return the speed of the codecs on every rank. All ranks call it at the same point."""
    own = measured_rates(_CODEC_S)
    row = np.array([value for name in CHOSEN_CODECS for value in own[name]], np.float64)
    rows = np.asarray(context.engine.allgather([row], [(1, row.size)], "ringcomm.balance.codecs").wait()[0])
    return [
        {name: Rates(*values) for name, values in zip(CHOSEN_CODECS, numbers.reshape(-1, 2).tolist())}
        for numbers in rows
    ]


def weight_of_steps(
    batches: Any, op: ReduceOp, passes: int = 1, shared: bool = False
) -> Optional[StepCursor]:
    """Return the weights of an optimizer's gradients; ``shared``: by several objects in turn."""
    if batches is None:
        return None
    if op != ReduceOp.AVERAGE or passes != 1:
        raise ConfigError(
            "batches=... weights the average of one global batch: use it with op=Average and "
            "backward_passes_per_step=1 (a larger global_batch is accumulated over ranks already)."
        )
    return batches.pace.leader if shared else batches.pace.cursor()


class StepCursor:
    """The weights of this rank's gradients in weighted averages, from step to step; for optimizers."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._iteration = -1
        self._step = 0

    @property
    def samples(self) -> int:
        return self._pace.samples

    def now(self) -> float:
        """Return the samples behind the gradients of the step; ConfigError if the epoch has no more steps."""
        if self._iteration != self._pace.iteration:
            self._iteration, self._step = self._pace.iteration, self._pace.step
        return float(self._pace.share(self._step))

    def reduced(self) -> None:
        self.now()
        self._step += 1
        if self is self._pace.leader:
            self._pace.step_done()
