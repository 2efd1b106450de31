"""Batches for ranks of unequal speed: a batch sampler for loaders, and indices for NumPy programs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Sized, Union

from .. import api
from ..docstrings import documented
from ..errors import ConfigError
from ..job.context import Context
from .pace import Pace
from .plan import MEASURE, SampleDivision, Speeds, check_whole, limits_of

MaxBatch = Union[int, Sequence[Optional[int]], None]

PLACEHOLDERS = 2  # samples in place of an empty share: batch normalization fails with fewer

_STATE = {"epoch", "step", "seed", "global_batch", "count"}


@documented
class Balanced:
    """The indices of this rank's samples, global batch by global batch.

    Args:
        {balanced_count}
        {balanced_options}

    Attributes:
        pace: this rank's position in the data and its measurements, for optimizers.

    Raises:
        {balanced_errors}
    """

    def __init__(
        self,
        count: Union[int, Sized],
        global_batch: int = 96,
        seed: int = 0,
        speeds: Speeds = MEASURE,
        min_batch: int = 0,
        max_batch: MaxBatch = None,
        multiple_of: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        context: Callable[[], Context] = api.context,
    ) -> None:
        number = len(count) if isinstance(count, Sized) else count
        size = context().size
        limits = limits_of(min_batch, max_batch, multiple_of, size)
        division = SampleDivision(number, global_batch, seed, size, speeds, limits, shuffle, drop_last)
        self.pace = Pace(division, context)
        self._epoch: Optional[int] = None
        self._start = 0
        self._exhausted = False

    @property
    def global_batch(self) -> int:
        """Samples of all ranks together per step."""
        return self.pace.division.global_batch

    @property
    def epoch(self) -> int:
        """The epoch of the current iteration, from 0."""
        return self.pace.epoch

    @property
    def shares(self) -> Sequence[int]:
        """How many samples of a full global batch each rank has now, in rank order."""
        return self.pace.division.full_shares(self.pace.epoch, self.pace.step)

    @property
    def weight(self) -> int:
        """How many samples of the current global batch this rank has: the weight of its gradients."""
        return self.pace.share(self.pace.step)

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        return self.pace.division.steps

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. By default the next one follows a complete one.

        Args:
            epoch: from 0; with the seed it determines the order of samples.
        """
        check_whole(0, epoch=epoch)
        if epoch != self._next_epoch():
            self._start = 0
        self._epoch = int(epoch)

    def set_step(self, step: int) -> None:
        """Set the global batch with which the next iteration begins, counted over all epochs.

        It does not depend on the number of ranks, so that the ``step`` of an elastic state can be passed.

        Args:
            step: number of global batches that are done, from 0.
        """
        check_whole(0, step=step)
        self._epoch, self._start = divmod(int(step), max(1, self.pace.division.steps))
        self._exhausted = False

    def _next_epoch(self) -> int:
        return self.pace.epoch + self._exhausted if self._epoch is None else self._epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's share of each global batch as an int64 array of indices; it may be empty."""
        epoch, start = self._next_epoch(), self._start
        self._epoch, self._start, self._exhausted = None, 0, False
        self.pace.begin(epoch, start)
        return self._iterate(epoch, start, self.pace.iteration)

    def _iterate(self, epoch: int, start: int, iteration: int) -> Iterator[Any]:
        pace = self.pace
        for step in range(start, pace.division.steps):
            yield self._item(epoch, step)
            if not pace.counted and pace.iteration == iteration:
                pace.step_done()
        if pace.iteration == iteration:
            self._exhausted = True

    def _item(self, epoch: int, step: int) -> Any:
        return self.pace.take(epoch, step)

    def state_dict(self) -> Dict[str, Any]:
        """The position in the data: it does not depend on the number of ranks.

        An optimizer with ``batches=`` counts a global batch when it has made the step. Without one, a global
        batch is done when the next one is taken, so the current one of the loop is not.

        Returns:
            ``epoch``, ``step`` (number of global batches of this epoch that are done), ``seed``,
            ``global_batch`` and ``count``.
        """
        division, epoch, step = self.pace.division, self.pace.epoch, self.pace.step
        if self._epoch is not None:
            epoch, step = self._epoch, self._start
        elif step >= division.steps:
            epoch, step = epoch + 1, 0
        return {
            "epoch": epoch, "step": step, "seed": division.seed, "global_batch": division.global_batch,
            "count": division.count,
        }  # fmt: skip

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue at a position that :meth:`state_dict` has returned, with any number of ranks.

        Args:
            state: the position.

        Raises:
            ConfigError: it is not a position, or belongs to another data set, seed or global batch.
        """
        division = self.pace.division
        if not isinstance(state, Mapping) or not set(state) >= _STATE:
            raise ConfigError(f"A position in the data has {', '.join(sorted(_STATE))}; this is {state!r}.")
        check_whole(0, epoch=state["epoch"], step=state["step"])
        for name in ("seed", "global_batch", "count"):
            if state[name] != getattr(division, name):
                raise ConfigError(
                    f"This position in the data is one of {name}={state[name]}, not "
                    f"{getattr(division, name)}."
                )
        self._epoch, self._start = int(state["epoch"]), int(state["step"])
        self._exhausted = False


@documented
class BalancedBatches(Balanced):
    """A batch sampler for PyTorch's ``DataLoader``: each rank gets as many samples as it can compute in time.

    The global batch is fixed, so use the learning rate of one process. The seed, the epoch and the number of
    a global batch determine its samples. Every sample is in one global batch per epoch.
    ::

        batches = hvd.BalancedBatches(dataset, global_batch=96)
        loader = DataLoader(dataset, batch_sampler=batches, num_workers=2)
        optimizer = hvd.DistributedOptimizer(optimizer, batches=batches)

    Average the loss over the samples of this rank's batch, as in one process. Gradients are weighted by the
    number of samples. A rank whose share of a global batch is empty gets two samples of another rank, and its
    gradients have weight 0.

    Args:
        {balanced_count}
        {balanced_options}

    Raises:
        {balanced_errors}
    """

    def _item(self, epoch: int, step: int) -> List[int]:
        indices = self.pace.take(epoch, step)
        if not indices.size:
            indices = self.pace.division.batch(epoch, step)[:PLACEHOLDERS]
        return indices.tolist()

    @contextmanager
    def within_memory(self) -> Iterator[None]:
        """Context manager for forward and backward pass: the job continues if this rank runs out of memory.

        Then the gradients of this rank have weight 0 in this step, so the samples of its share are left out.
        Soon all ranks change their shares. From then on, the share of this rank is at most nine tenths of the
        present one.
        ::

            with batches.within_memory():
                loss_of(model(x), y).backward()
            optimizer.step()
        """
        try:
            yield
        except (MemoryError, RuntimeError) as problem:
            if not _is_out_of_memory(problem):
                raise
            self.pace.lose()


def _is_out_of_memory(problem: BaseException) -> bool:
    """Return whether this is a MemoryError, or PyTorch's error for a device without memory."""
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return True
    return "can't allocate memory" in str(problem) or "not enough memory" in str(problem)


@documented
def balanced(count: Union[int, Sized], global_batch: int = 96, seed: int = 0, **options: Any) -> Balanced:
    """Return the samples of this rank in each global batch, for ranks of unequal speed.

    Example::

        for mine in rc.balanced(len(images), global_batch=96):
            gradient = rc.allreduce(mean_gradient(mine), weight=len(mine))

    Each iteration over the result is an epoch. In an epoch, every sample is in the share of one rank,
    whatever the speeds. A share may be empty; its weight is then 0.

    Args:
        {balanced_count}
        global_batch: samples of all ranks together per step.
        seed: seed for the order of the samples, the same on all ranks.
        **options: ``speeds``, ``min_batch``, ``max_batch``, ``multiple_of``, ``shuffle`` and ``drop_last``,
            as for ``ringcomm.torch.BalancedBatches``.

    Returns:
        an iterable of arrays of indices (int64), with ``set_epoch()``, ``state_dict()`` and
        ``load_state_dict()``.

    Raises:
        {balanced_errors}
    """
    return Balanced(count, global_batch, seed, **options)
