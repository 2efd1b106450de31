"""Run a function in the tasks of a Spark job, as the ranks of one job, with Horovod's interface.

::

    import ringcomm.spark
    results = ringcomm.spark.run(train, args=(0.1,), num_proc=4)

The tasks are a barrier stage, so Spark starts all of them together. The executors must be able to connect to
the driver's machine, through which the ranks find each other.
"""

from __future__ import annotations

import logging
import queue
from typing import Any, Callable, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import pyspark

from ._adapter.placed import ARRIVE_S, PlacedJob, RankOutcome, Ticket, attempt, by_host, call, settings_for
from .calls.objects import unpack
from .clock import Deadline
from .configuration.membership import exported
from .errors import ConfigError, NotOfferedError, RemoteError, StartTimeoutError
from .transport.nics import spec_of

__all__ = ["run"]

logger = logging.getLogger("ringcomm")


def run(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Optional[Mapping[str, Any]] = None,
    num_proc: Optional[int] = None, start_timeout: Optional[float] = None, use_mpi: Optional[bool] = None,
    use_gloo: Optional[bool] = None, extra_mpi_args: Optional[str] = None,
    env: Optional[Mapping[str, str]] = None, stdout: Any = None, stderr: Any = None, verbose: int = 1,
    nics: Optional[Iterable[str]] = None, prefix_output_with_timestamp: bool = False,
    executable: Optional[str] = None,
) -> List[Any]:  # fmt: skip
    """Call ``fn(*args, **kwargs)`` in ``num_proc`` Spark tasks, and wait for all. Each task is a rank.

    If a task is lost, you get an error that names its rank as soon as the other ranks notice. The Spark job
    is cancelled, and the function does not run again.

    Args:
        fn: the function. ringcomm calls ``init()`` before it; the function may call it again.
        args: its positional arguments, the same on all ranks.
        kwargs: its keyword arguments.
        num_proc: number of ranks; None for ``spark.default.parallelism``.
        start_timeout: seconds in which Spark must start the tasks; None for 600.
        use_mpi: must not be True: ringcomm has no MPI.
        use_gloo: not used.
        extra_mpi_args: not used.
        env: environment variables that are set while the function runs.
        stdout: must be None. The output of ranks is in the logs of Spark's executors.
        stderr: must be None.
        verbose: 0 for no line in the log about the number of ranks.
        nics: names of the network interfaces that may be used; None for all.
        prefix_output_with_timestamp: not used.
        executable: must be None: Spark chooses the interpreter (``PYSPARK_PYTHON``).

    Returns:
        the results of all ranks, in rank order. Tasks on one host have successive ranks.

    Raises:
        RemoteError: a rank failed. ``rank`` names it, and ``__cause__`` is its exception.
        StartTimeoutError: Spark has not started the tasks in time.
        ConfigError: there is no active SparkContext, or a number is out of range.
        NotOfferedError: an argument asks for something that ringcomm does not offer.
    """
    refused = {"use_mpi": use_mpi, "stdout": stdout, "stderr": stderr, "executable": executable}
    for name, value in refused.items():
        if value not in (None, False):
            raise NotOfferedError(f"ringcomm.spark.run({name}={value!r}) is not offered: leave it out.")
    context = pyspark.SparkContext._active_spark_context
    if context is None:
        raise ConfigError("There is no active SparkContext. Make a SparkSession first.")
    size = int(context.defaultParallelism if num_proc is None else num_proc)
    if size < 1:
        raise ConfigError(f"num_proc={num_proc}: at least one process is needed.")
    if verbose:
        logger.info("running %d ranks in Spark tasks", size)
    job = PlacedJob("spark", size, settings_for(iface=spec_of(nics)))
    start_s = 600.0 if start_timeout is None else float(start_timeout)
    stage = _Stage(context, job, _task(job.tickets, fn, args, kwargs or {}, dict(env or {})), start_s)
    try:
        return job.collect(stage.poll)
    finally:
        stage.cancel()
        job.close()


class _Stage:
    """The barrier stage of a job, in a separate thread; Spark may take ``start_s`` to start the tasks."""

    def __init__(
        self, context: Any, job: PlacedJob, task: Callable[[Iterator[Any]], Iterator[Tuple[int, bytes]]],
        start_s: float,
    ) -> None:  # fmt: skip
        self._context, self._job, self._task = context, job, task
        self._starts, self._running = Deadline(start_s), False
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = pyspark.InheritableThread(target=self._run)
        self._thread.daemon = True
        self._thread.start()

    def _run(self) -> None:
        """Run the stage in the thread; keep the results of the tasks, or Spark's error."""
        size = self._job.size
        try:
            self._context.setJobGroup(self._job.id, f"{size} ranks of ringcomm", interruptOnCancel=True)
            tasks = self._context.parallelize(range(size), size).barrier().mapPartitions(self._task)
            self._results.put(tasks.collect())
        except Exception as problem:  # noqa: BLE001  the caller's thread raises it
            self._results.put(problem)

    def poll(self, timeout_s: float) -> List[Tuple[int, RankOutcome]]:
        """Return the outcomes, once Spark has those of all tasks; wait for that at most ``timeout_s``."""
        try:
            found = self._results.get(timeout=timeout_s)
        except queue.Empty:
            self._check_start()
            return []
        if not isinstance(found, Exception):
            return [(rank, RankOutcome(unpack(data))) for rank, data in found]
        # Spark ends all tasks when one has failed. The ranks' own report says which, and why.
        if self._job.failed.wait(ARRIVE_S):
            return [(rank, RankOutcome.of_error(found)) for rank in range(self._job.size)]
        text = str(found).strip().replace("\n: ", ": ").partition("\n")[0]
        raise RemoteError(f"Spark could not run the tasks. {text}") from found

    def _check_start(self) -> None:
        if self._running:
            return
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup(self._job.id)]
        stages = [tracker.getStageInfo(number) for item in jobs if item for number in item.stageIds]
        self._running = any(item is not None and item.numActiveTasks > 0 for item in stages)
        if not self._running and self._starts.expired():
            raise StartTimeoutError(
                f"Spark has not started {self._job.size} tasks at once within {self._starts.timeout_s:g} s. "
                "A barrier stage needs that many free task slots: ask for fewer ranks (num_proc), or for "
                "more executors or cores."
            )

    def cancel(self) -> None:
        """End the tasks that still run."""
        if self._thread.is_alive():
            self._context.cancelJobGroup(self._job.id)


def _task(
    tickets: Sequence[Ticket], fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
    env: Mapping[str, str],
) -> Callable[[Iterator[Any]], Iterator[Tuple[int, bytes]]]:  # fmt: skip
    """Return the function of a task: it runs a rank, and returns the user's result or error as bytes."""

    def task(_: Iterator[Any]) -> Iterator[Tuple[int, bytes]]:
        context = pyspark.BarrierTaskContext.get()
        hosts = [info.address.rpartition(":")[0] or info.address for info in context.getTaskInfos()]
        rank = by_host(range(len(hosts)), hosts.__getitem__).index(context.partitionId())
        with exported(env):
            yield rank, attempt(lambda: call(tickets[rank], fn, args, kwargs))

    return task
