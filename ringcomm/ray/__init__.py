"""ringcomm on Ray: :class:`RayExecutor` with Horovod's interface, and configurations for Ray Train.

::

    from ringcomm.ray import RayExecutor
    executor = RayExecutor(RayExecutor.create_settings(), num_workers=4)
    executor.start()
    results = executor.run(train)
    executor.shutdown()

With Ray Train, use ``TorchTrainer(train, torch_config=TorchConfig())`` for process groups of PyTorch. Use
``DataParallelTrainer(train, backend_config=RingcommConfig())`` for programs that call ``init()`` of ringcomm
or of one of its adapters. Ray starts, places and ends the processes; ringcomm connects them.
"""

from __future__ import annotations

import importlib
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .._adapter.placed import Host, PlacedJob, RankOutcome, Ticket, attempt, by_host, end, enter, settings_for
from ..calls.objects import unpack
from ..clock import Deadline
from ..config import Settings
from ..configuration.membership import export
from ..errors import ConfigError, NotOfferedError, RemoteError, StartTimeoutError
from ..transport.nics import spec_of

if TYPE_CHECKING:
    from .torch_config import TorchConfig
    from .train import RingcommConfig

__all__ = ["MiniSettings", "RayExecutor", "RingcommConfig", "TorchConfig"]

_LEAVE_S = 5.0  # time of workers to leave the job before they are ended


@dataclass
class MiniSettings:
    """Settings of a :class:`RayExecutor`, with their names in Horovod.

    Attributes:
        nics: names of the network interfaces that may be used; None for all.
        verbose: not used; ``RINGCOMM_VERBOSE=1`` shows the job's progress.
        key: not used: every job makes its own key.
        ssh_port: not used: Ray starts the processes.
        ssh_identity_file: not used.
        ssh_str: not used.
        timeout_s: seconds for which ranks wait for each other at the start.
        placement_group_timeout_s: seconds in which Ray must reserve the resources.
        elastic: not used.
    """

    nics: Optional[Sequence[str]] = None
    verbose: int = 1
    key: Optional[str] = None
    ssh_port: Optional[int] = None
    ssh_identity_file: Optional[str] = None
    ssh_str: Optional[str] = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    elastic: bool = False


class RayExecutor:
    """Workers on a Ray cluster that are the ranks of one job, with Horovod's interface.

    The workers must be able to connect to the machine of this process, through which they find each other.
    Therefore use it on a machine of the cluster (``ray job submit``), not through Ray Client.

    If a worker is lost, the others raise an error that names it as soon as their connections or heartbeats
    show the loss. This does not wait for Ray.

    Args:
        settings: the result of :meth:`create_settings`, a :class:`ringcomm.Settings`, or None for the
            defaults.
        num_workers: number of ranks, on any hosts that have room.
        num_hosts: number of hosts, instead of ``num_workers``.
        num_workers_per_host: number of ranks on each of these hosts.
        cpus_per_worker: CPUs that Ray reserves for each rank.
        use_gpu: whether Ray also reserves GPUs.
        gpus_per_worker: number of GPUs for each rank; by default 1.
        use_current_placement_group: whether to use the placement group of the Ray task or actor that makes
            this call, if it has one.
        min_workers: must be None: ringcomm offers no elastic jobs on Ray.
        max_workers: must be None.
        reset_limit: must be None.
        cooldown_range: must be None.
        elastic_timeout: not used.
        override_discovery: not used.

    Attributes:
        workers: the actors in rank order, between :meth:`start` and :meth:`shutdown`.

    Raises:
        ConfigError: the numbers do not fit together.
        NotOfferedError: an argument asks for an elastic job.
    """

    @classmethod
    def create_settings(
        cls, timeout_s: float = 30, ssh_identity_file: Optional[str] = None, ssh_str: Optional[str] = None,
        placement_group_timeout_s: float = 100, nics: Optional[Sequence[str]] = None,
    ) -> MiniSettings:  # fmt: skip
        """Return settings for the constructor.

        Args:
            timeout_s: seconds for which ranks wait for each other at the start.
            ssh_identity_file: not used: Ray starts the processes.
            ssh_str: not used.
            placement_group_timeout_s: seconds in which Ray must reserve the resources.
            nics: names of the network interfaces that may be used; None for all.

        Returns:
            the settings.
        """
        return MiniSettings(
            ssh_identity_file=ssh_identity_file, ssh_str=ssh_str, timeout_s=timeout_s, nics=nics,
            placement_group_timeout_s=placement_group_timeout_s,
        )  # fmt: skip

    def __init__(
        self, settings: Any = None, num_workers: Optional[int] = None, num_hosts: Optional[int] = None,
        num_workers_per_host: int = 1, cpus_per_worker: float = 1, use_gpu: bool = False,
        gpus_per_worker: Optional[int] = None, use_current_placement_group: bool = True,
        min_workers: Optional[int] = None, max_workers: Optional[int] = None,
        reset_limit: Optional[int] = None, cooldown_range: Optional[Sequence[int]] = None,
        elastic_timeout: float = 600, override_discovery: bool = True,
    ) -> None:  # fmt: skip
        elastic = {"min_workers": min_workers, "max_workers": max_workers, "reset_limit": reset_limit,
                   "cooldown_range": cooldown_range}  # fmt: skip
        asked = [name for name, value in elastic.items() if value is not None]
        if asked:
            raise NotOfferedError(
                f"{asked[0]}: elastic jobs on Ray are not offered. ringrun has them (--min-np, with "
                "--host-discovery-script for hosts that come and go)."
            )
        if (num_workers is None) == (num_hosts is None):
            raise ConfigError("Give either num_workers, or num_hosts with num_workers_per_host.")
        if gpus_per_worker is not None and (not use_gpu or gpus_per_worker < 1):
            raise ConfigError(f"gpus_per_worker={gpus_per_worker}: it needs use_gpu=True, and at least 1.")
        self._settings = settings
        self._job_settings = job_settings(settings)
        self._per_host = None if num_hosts is None else num_workers_per_host
        self.num_workers = num_workers if num_hosts is None else num_hosts * num_workers_per_host
        if not self.num_workers or self.num_workers < 1:
            raise ConfigError("At least one worker is needed.")
        self._use_current = use_current_placement_group
        self._cpus, self._gpus = cpus_per_worker, (gpus_per_worker or 1) if use_gpu else 0
        self._placement: Optional[Placement] = None
        self._job: Optional[PlacedJob] = None
        self._failed = False

    @property
    def workers(self) -> List[Any]:
        """The actors in rank order."""
        return [] if self._placement is None else self._placement.workers

    def start(
        self, executable_cls: Optional[Callable[..., Any]] = None,
        executable_args: Optional[Sequence[Any]] = None,
        executable_kwargs: Optional[Mapping[str, Any]] = None,
        extra_env_vars: Optional[Mapping[str, str]] = None,
    ) -> None:  # fmt: skip
        """Start the workers.

        Args:
            executable_cls: a class. Each worker makes an object of it, and the functions of :meth:`execute`
                get this object.
            executable_args: the class's positional arguments.
            executable_kwargs: its keyword arguments.
            extra_env_vars: environment variables for the workers.

        Raises:
            StartTimeoutError: Ray has no room for the workers.
            RemoteError: the class raised an error.
            ConfigError: the workers have already been started.
        """
        if self._placement is not None:
            raise ConfigError("The workers of this executor have been started. Call shutdown() first.")
        timeout_s = float(getattr(self._settings, "placement_group_timeout_s", 100))
        assert self.num_workers is not None
        self._placement = Placement(
            self.num_workers, self._per_host, self._cpus, self._gpus, timeout_s, self._use_current
        )
        try:
            if extra_env_vars:
                found = {name: str(value) for name, value in extra_env_vars.items()}
                ray.get([worker.export.remote(found) for worker in self.workers])
            self._begin_job()
            if executable_cls is not None:
                self.start_executables(executable_cls, executable_args, executable_kwargs)
        except BaseException:
            self.shutdown()
            raise

    def start_executables(
        self, executable_cls: Callable[..., Any], executable_args: Optional[Sequence[Any]] = None,
        executable_kwargs: Optional[Mapping[str, Any]] = None,
    ) -> None:  # fmt: skip
        """Make an object on each worker; the functions of :meth:`execute` get this object.

        Args:
            executable_cls: the class of the object.
            executable_args: the class's positional arguments.
            executable_kwargs: its keyword arguments.

        Raises:
            RemoteError: the class raised an error.
        """
        args, kwargs = list(executable_args or []), dict(executable_kwargs or {})
        self._collect([
            worker.make.remote(executable_cls, args, kwargs) for worker in self._ready_workers()
        ])  # fmt: skip

    def execute(self, fn: Callable[[Any], Any], callbacks: Optional[Sequence[Any]] = None) -> List[Any]:
        """Call ``fn(object)`` on each worker, with its object of ``executable_cls``.

        Args:
            fn: the function; the object is None if there is no class.
            callbacks: must be None.

        Returns:
            the results of all ranks, in rank order.

        Raises:
            RemoteError: a rank failed. ``rank`` and ``host`` name it, and ``__cause__`` is its exception.
        """
        if callbacks:
            raise NotOfferedError(
                "callbacks: workers have no queue to the driver here. Return the values, or use an actor of "
                "Ray."
            )
        return self._collect([worker.attempt.remote(fn) for worker in self._ready_workers()])

    def run(
        self, fn: Callable[..., Any], args: Optional[Sequence[Any]] = None,
        kwargs: Optional[Mapping[str, Any]] = None, callbacks: Optional[Sequence[Any]] = None,
    ) -> List[Any]:  # fmt: skip
        """Call ``fn(*args, **kwargs)`` on each worker.

        The function must call ``init()``. After it has returned, the worker remains in the job for the next
        call.

        Args:
            fn: the function.
            args: its positional arguments, the same on all ranks.
            kwargs: its keyword arguments.
            callbacks: must be None.

        Returns:
            the results of all ranks, in rank order.

        Raises:
            RemoteError: a rank failed. ``rank`` and ``host`` name it, and ``__cause__`` is its exception.
        """
        return self.execute(lambda _: fn(*(args or ()), **(kwargs or {})), callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Optional[Sequence[Any]] = None,
        kwargs: Optional[Mapping[str, Any]] = None,
    ) -> List[Any]:  # fmt: skip
        """Start ``fn(*args, **kwargs)`` on each worker, and do not wait.

        Args:
            fn: the function.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            a reference for each rank. ``ray.get`` returns its result, or raises the function's error as Ray
            does.
        """
        call: Callable[[Any], Any] = lambda _: fn(*(args or ()), **(kwargs or {}))  # noqa: E731
        return [worker.execute.remote(call) for worker in self._ready_workers()]

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(object)`` on rank 0 only.

        Args:
            fn: the function.

        Returns:
            the result of the function.
        """
        return ray.get(self._ready_workers()[0].execute.remote(fn))

    def shutdown(self) -> None:
        """Let the workers leave the job, end them, and give the resources back to Ray."""
        placement, self._placement = self._placement, None
        if placement is not None:
            ray.wait(
                [worker.leave.remote() for worker in placement.workers],
                num_returns=len(placement.workers), timeout=_LEAVE_S,
            )  # fmt: skip
            placement.remove()
        job, self._job = self._job, None
        if job is not None:
            job.close()

    def _ready_workers(self) -> List[Any]:
        """Return the workers, in a job that has not failed."""
        if self._placement is None or self._job is None:
            raise ConfigError("The workers have not been started: call start() first.")
        if self._failed or self._job.failure is not None:
            self._begin_job()
        return self._placement.workers

    def _begin_job(self) -> None:
        """Give every worker its part in a new job."""
        assert self._placement is not None
        self._failed = True  # until all workers have their part
        if self._job is not None:
            self._job.close()
        workers = self._placement.workers
        job = self._job = PlacedJob(
            "ray", len(workers), self._job_settings, self._placement.hosts, "timeout_s of create_settings"
        )
        entered = [worker.enter.remote(ticket) for worker, ticket in zip(workers, job.tickets)]
        deadline = Deadline(self._job_settings.start_timeout_s)
        for rank, reference in enumerate(entered):
            try:
                ray.get(reference, timeout=deadline.remaining_s())
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as problem:
                ended = isinstance(problem, ray.exceptions.RayActorError)
                what = "has ended" if ended else f"has not answered for {deadline.timeout_s:g} s"
                host = self._placement.hosts[rank].name
                raise RemoteError(
                    f"The worker of rank {rank} on {host} {what}. Call shutdown() and start().",
                    rank=rank, host=host,
                ) from problem  # fmt: skip
        self._failed = False

    def _collect(self, references: Sequence[Any]) -> List[Any]:
        assert self._job is not None
        left = {reference: rank for rank, reference in enumerate(references)}
        try:
            return self._job.collect(partial(_poll, left))
        except RemoteError:
            self._failed = True
            raise


def _poll(left: Dict[Any, int], timeout_s: float) -> List[Any]:
    """Return the ranks that ended since the last call; ``left`` keeps the references of the others."""
    done, _ = ray.wait(list(left), num_returns=1, timeout=timeout_s)
    found = []
    for reference in done:
        try:
            outcome = RankOutcome(unpack(ray.get(reference)))
        except ray.exceptions.RayError as problem:
            outcome = RankOutcome.of_error(problem)
        found.append((left.pop(reference), outcome))
    return found


def job_settings(given: Any) -> Settings:
    """Return the driver's settings, with those of a RayExecutor's argument in place of them."""
    if isinstance(given, Settings):
        return given
    nics = getattr(given, "nics", None)
    timeout_s = getattr(given, "timeout_s", None)
    return settings_for(None if timeout_s is None else float(timeout_s), spec_of(nics))


# ---- the workers of an executor ------------------------------------------------------------------


def host_of_worker() -> Host:
    """Return the host of a worker, on it."""
    return Host(ray.get_runtime_context().get_node_id(), socket.gethostname())


class Worker:
    """The actor of one rank: it keeps its process, and so its part in the job, between calls."""

    def __init__(self) -> None:
        self._ticket: Optional[Ticket] = None
        self._executable: Any = None

    def describe(self) -> Tuple[Host, List[str]]:
        """Return the host of this worker, and the numbers of its GPUs."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return host_of_worker(), list(map(str, gpus))

    def export(self, variables: Mapping[str, str]) -> None:
        """Set environment variables."""
        export(variables)

    def enter(self, ticket: Ticket) -> None:
        """Make the worker a rank of this job only."""
        self.leave()
        enter(ticket)
        self._ticket = ticket

    def leave(self) -> None:
        """Leave the job."""
        if self._ticket is not None:
            self._ticket = None
            end()

    def make(self, cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        """Make the object for later functions; return an error as bytes."""

        def make_it() -> None:
            self._executable = self._guarded(lambda: cls(*args, **kwargs))

        return attempt(make_it)

    def execute(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function with that object."""
        return self._guarded(lambda: fn(self._executable))

    def attempt(self, fn: Callable[[Any], Any]) -> bytes:
        """Call a function with that object; return its result or error as bytes."""
        return attempt(lambda: self.execute(fn))

    def _guarded(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except BaseException as error:
            # This process does not end, so the other ranks must be told; later calls may join again.
            end(error)
            if self._ticket is not None:
                enter(self._ticket)
            raise


class Placement:
    """The workers and their hosts, in rank order, and the resources that are reserved for them, perhaps
    those of the calling task. ``per_host`` is the number of workers on each host; None: Ray decides.
    """

    def __init__(
        self, count: int, per_host: Optional[int], cpus: float, gpus: float, timeout_s: float,
        use_current: bool,
    ) -> None:  # fmt: skip
        current = ray.util.get_current_placement_group() if use_current else None
        self._own: Any = None
        if current is None:
            bundle = {"CPU": cpus * (per_host or 1), "GPU": gpus * (per_host or 1)}
            bundle = {name: amount for name, amount in bundle.items() if amount}
            self._own = _reserve([bundle] * (count // (per_host or 1)), per_host is not None, timeout_s)
        remote: Any = ray.remote(Worker)
        try:
            made = []
            for number in range(count):
                strategy = PlacementGroupSchedulingStrategy(
                    placement_group=current or self._own,
                    placement_group_bundle_index=-1 if current is not None else number // (per_host or 1),
                )
                options = remote.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=strategy)
                made.append(options.remote())
            facts = dict(zip(made, ray.get([item.describe.remote() for item in made], timeout=timeout_s)))
        except BaseException as problem:
            self.remove()
            if isinstance(problem, ray.exceptions.GetTimeoutError):
                raise StartTimeoutError(
                    f"Ray has not started {count} workers within {timeout_s:g} s."
                ) from None
            raise
        self.workers: List[Any] = by_host(made, lambda item: facts[item][0].identity)
        self.hosts: List[Host] = [facts[item][0] for item in self.workers]
        if gpus:
            self._share_gpus([facts[item][1] for item in self.workers])

    def _share_gpus(self, gpus: Sequence[List[str]]) -> None:
        """Let every worker see all GPUs of its host's workers, so that the local rank is a GPU's index."""
        by_node: Dict[str, List[str]] = {}
        for host, own in zip(self.hosts, gpus):
            by_node.setdefault(host.identity, []).extend(own)
        ray.get([
            item.export.remote({"CUDA_VISIBLE_DEVICES": ",".join(by_node[host.identity])})
            for item, host in zip(self.workers, self.hosts)
        ])  # fmt: skip

    def remove(self) -> None:
        """End the workers, and give the resources back."""
        for item in getattr(self, "workers", []):
            ray.kill(item)
        self.workers = []
        if self._own is not None:
            ray.util.remove_placement_group(self._own)
            self._own = None


def _reserve(bundles: List[Dict[str, float]], spread: bool, timeout_s: float) -> Any:
    """Return a placement group with these resources."""
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD" if spread else "PACK")
    if not group.wait(timeout_seconds=timeout_s):
        ray.util.remove_placement_group(group)
        raise StartTimeoutError(
            f"Ray has not reserved {len(bundles)} times {bundles[0]}"
            f"{' on hosts of their own' if spread else ''} within {timeout_s:g} s. "
            f"It has: {ray.cluster_resources()}; free now: {ray.available_resources()}."
        )
    return group


# Names that need more than Ray's core, and their modules.
_FROM = {"RingcommConfig": ".train", "TorchConfig": ".torch_config"}


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(importlib.import_module(_FROM[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
