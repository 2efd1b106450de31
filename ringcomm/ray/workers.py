"""The placement of the workers of a :class:`~ringcomm.ray.RayExecutor`, and the actor of each of them."""

from __future__ import annotations

import socket
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .._adapter.placed import Host, Ticket, attempt, by_host, end, enter
from ..configuration.membership import export
from ..errors import StartTimeoutError


class Worker:
    """The actor of one rank: it keeps its process, and so its part in the job, between calls."""

    def __init__(self) -> None:
        self._ticket: Optional[Ticket] = None
        self._executable: Any = None

    def describe(self) -> WorkerFacts:
        """Return the host and the GPUs of this worker."""
        context = ray.get_runtime_context()
        gpus = [str(item) for item in context.get_accelerator_ids().get("GPU", [])]
        return WorkerFacts(Host(context.get_node_id(), socket.gethostname()), gpus)

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


class WorkerFacts(NamedTuple):
    """The host of a worker, and the numbers of its GPUs."""

    host: Host
    gpus: List[str]


class Placement:
    """The workers and their hosts, in rank order, and the resources that are reserved for them.

    ``per_host`` is the number of workers on each host; None: Ray decides, on few hosts. ``cpus`` and ``gpus``
    are those of each worker. ``use_current``: use the placement group of the calling task or actor, if it has
    one. StartTimeoutError: Ray has no such resources within ``timeout_s``.
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
        self.workers: List[Any] = by_host(made, lambda item: facts[item].host)
        self.hosts: List[Host] = [facts[item].host for item in self.workers]
        if gpus:
            self._share_gpus(facts)

    def _share_gpus(self, facts: Mapping[Any, WorkerFacts]) -> None:
        """Let every worker see all GPUs of its host's workers, so that the local rank is a GPU's index."""
        by_node: Dict[str, List[str]] = {}
        for item in self.workers:
            by_node.setdefault(facts[item].host.identity, []).extend(facts[item].gpus)
        ray.get([
            item.export.remote({"CUDA_VISIBLE_DEVICES": ",".join(by_node[facts[item].host.identity])})
            for item in self.workers
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
