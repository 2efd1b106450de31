"""The process group: what PyTorch calls, translated."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import warnings
import weakref
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
import typing_extensions
from torch.distributed.algorithms import join

from ...activity import Activity
from ...arrays.mirrors import StagingPool
from ...clock import Deadline, Idleness
from ...collective.call_sites import CallSites, comparable_site, look_through, this_site
from ...collective.runner import Runner
from ...errors import Misuse, NotInitializedError, RingcommError, describe_error
from ...flight_recorder import Facts, FlightRecorder
from ...group.operation_queue import OperationQueue
from ...group.point_to_point import PointToPoint
from ._arguments import address_of, pairs_of, reduction_of, root_of, single
from ._bridge import Flat
from ._collectives import Collectives, Tensors
from ._elements import type_code, type_name
from ._group_base import GroupFace
from ._group_transport import GroupTransport
from ._monitored import MonitoredBarrier
from ._staged import Overlapping, Staged, staged
from ._steps import optimizer_steps
from ._store import group_settings
from ._trace import Traced, observer
from ._uncompiled import uncompiled
from ._work import RingcommWork, Together

for _package in (torch, typing_extensions, contextlib, functools, warnings):
    look_through(_package)  # PyTorch's functions are wrapped by decorators of the latter
_JOINING = frozenset((join.__file__,))
"""Here a rank without data takes part in the collectives of those that still train."""
_NOT_PREDICTED = (
    "No prediction for process groups of torch.distributed: --predict follows calls of ringcomm and the "
    "optimizers of its adapters, such as ringcomm.torch.DistributedOptimizer."
)
_open_groups: weakref.WeakSet[ProcessGroupRingcomm] = weakref.WeakSet()


@uncompiled("_reduce_scatter_base", "_allgather_base", "_start_coalescing", "_end_coalescing")
class ProcessGroupRingcomm(GroupFace):
    """A group of ranks with links of its own. ``init_process_group`` and ``new_group`` make them.

    Collectives run one after another, in the order in which they are called, which must be the same on
    all ranks. Point-to-point messages have links of their own.

    Args:
        store: the group's part of PyTorch's store.
        rank: this process's rank in the group.
        ranks: the ranks of the whole job that the group consists of.
        timeout: for operations that have none of their own: how long nothing at all may move.
        name: the group's name.
        default: whether it is the group of all ranks.
    """

    def __init__(
        self, store: Any, rank: int, ranks: Sequence[int], timeout: timedelta, name: str, default: bool
    ) -> None:
        super().__init__(rank, len(ranks), name, store)
        self._ranks = tuple(ranks)
        settings = group_settings(timeout)
        self._timeout_s = settings.timeout_s
        transport = self._transport = GroupTransport(store, rank, ranks, name, settings, default)
        self._watch, channels, spin_s = transport.watch, transport.channels, transport.spin_s
        self._idleness = Idleness()
        runner = Runner(channels.direct, settings, transport.generation, spin_s, self._watch)
        runner.sites = CallSites(functools.partial(self._watch.warn, "lines"), settings.check_calls)
        if settings.predict and default and rank == 0:
            self._watch.warn("no prediction", _NOT_PREDICTED)
        self._ops = Collectives(runner)
        self._staging = StagingPool()
        facts = Facts(ranks[rank], len(ranks), transport.host, transport.generation, ranks, f"group {name}")
        activity = Activity(runner, None, ranks, optimizer_steps())
        self._flight = FlightRecorder(facts, settings, runner, activity)
        self._queue = OperationQueue(f"ringcomm-{name}")
        thread = f"ringcomm-{name}-messages"
        self._messages = PointToPoint(channels.background, self._watch, spin_s, thread, type_name)
        transport.watch_over(runner.progress)
        self._coalesced: Optional[List[RingcommWork]] = None
        self._started = 0
        self._left = False
        self._pid = os.getpid()
        _open_groups.add(self)

    # ---- starting an operation ---------------------------------------------------------------

    def _begin(
        self, what: str, result: Any, opts: Any, do: Callable[..., None], *arguments: Any,
        reads: bool = False, overlapping: Optional[Overlapping] = None,
    ) -> RingcommWork:  # fmt: skip
        """Start ``do(*arguments)``, which writes the tensors of ``result`` and perhaps reads them.

        ``overlapping`` may do the same for a tensor of a device, see :meth:`._staged.Staged.run`.
        """
        limit_s, runner = self._limit_s(opts), self._ops.runner
        site, comparable = comparable_site(_JOINING)
        watching = observer()
        traced = None if watching is None else Traced(watching, self.group_name, what, result)
        on_device = staged(self._staging, arguments, result, reads)

        def run(work: RingcommWork) -> None:
            runner.timeout_s = limit_s
            runner.called_at, runner.compares_sites = site, comparable
            runner.may_poll = lambda: work.waiters > 0 or self._idleness()
            with nullcontext() if traced is None else traced, runner.exclusive(but=Exception):
                if on_device is None:
                    do(*arguments)
                else:
                    on_device.run(do, runner, overlapping)

        self._started += 1
        work = RingcommWork(what, result, run, self._queue.help, self._interrupted, on_device)
        coalesced = self._coalesced
        if coalesced is not None:
            coalesced.append(work)
        return self._queue.submit(work, inline=not getattr(opts, "asyncOp", True))

    def _interrupted(self, work: RingcommWork, problem: BaseException) -> None:
        """The program leaves an operation, and may overwrite its tensors: end the group, on all ranks."""
        self._transport.end(self._watch.note_interrupted(work.what, describe_error(problem)))

    def _limit_s(self, opts: Any) -> float:
        timeout_s: float = opts.timeout.total_seconds() if opts is not None else -1.0
        return timeout_s if timeout_s > 0 else self._timeout_s

    # ---- reductions --------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> RingcommWork:
        """Reduce a tensor over all ranks, in place."""
        tensor, how = single(tensors), reduction_of(opts)
        return self._begin(
            "allreduce", [tensor], opts, self._ops.all_reduce, tensor, how, reads=True,
            overlapping=self._ops.all_reduce_staged,
        )  # fmt: skip

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> RingcommWork:
        """Reduce several tensors, in place."""
        tensors, how = list(tensors), reduction_of(opts)
        return self._begin(
            "allreduce_coalesced", tensors, opts, self._ops.all_reduce_all, tensors, how, reads=True
        )

    def reduce(self, tensors: Any, opts: Any = None) -> RingcommWork:
        """Reduce a tensor; the root gets the result, in place."""
        tensor, how, root = single(tensors), reduction_of(opts), root_of(opts)
        return self._begin("reduce", [tensor], opts, self._ops.reduce, tensor, root, how, reads=True)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> RingcommWork:
        """Every rank gets the reduction of one of the tensors in a list."""
        output, pieces, how = single(outputs), list(inputs[0]), reduction_of(opts)
        return self._begin("reduce_scatter", [output], opts, self._ops.reduce_scatter, output, pieces, how)

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> RingcommWork:
        """Every rank gets the reduction of an equal part of one tensor."""
        how = reduction_of(opts)
        return self._begin(
            "reduce_scatter", [output], opts, self._ops.reduce_scatter_single, output, source, how
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> RingcommWork:
        """The same for several tensors."""
        pairs, how, ops = pairs_of(outputs, inputs), reduction_of(opts), self._ops

        def run(pairs: Sequence[Tuple[Any, torch.Tensor]]) -> None:
            ops.for_each(pairs, lambda pair, label: ops.reduce_scatter_single(*pair, how, label))

        return self._begin("reduce_scatter", list(outputs), opts, run, pairs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- movement ----------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None) -> RingcommWork:
        """Every rank gets the root's tensor."""
        tensor, root = single(tensors), root_of(opts)
        return self._begin(
            "broadcast", [tensor], opts, self._ops.broadcast, tensor, root, reads=self.rank() == root,
            overlapping=self._ops.broadcast_staged,
        )  # fmt: skip

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> RingcommWork:
        """Every rank gets the tensors of all ranks; they may differ in size."""
        places, tensor = list(outputs[0]), single(inputs)
        return self._begin("allgather", [places], opts, self._ops.all_gather, places, tensor)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> RingcommWork:
        """The same into one tensor."""
        return self._begin("allgather", [output], opts, self._ops.all_gather_single, output, source)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> RingcommWork:
        """The same for several tensors."""
        pairs, ops = pairs_of(outputs, inputs), self._ops

        def run(pairs: Sequence[Tuple[Any, torch.Tensor]]) -> None:
            ops.for_each(pairs, lambda pair, label: ops.all_gather_single(*pair, label))

        return self._begin("allgather", list(outputs), opts, run, pairs)

    def allgather_coalesced(self, outputs: Any, inputs: Tensors, opts: Any = None) -> RingcommWork:
        """Every rank gets the tensors of all ranks: ``outputs[r][i]`` becomes rank r's ``inputs[i]``."""
        places, ops = [list(item) for item in outputs], self._ops
        pairs = pairs_of(list(zip(*places)), inputs)

        def run(pairs: Sequence[Tuple[Any, torch.Tensor]]) -> None:
            ops.for_each(pairs, lambda pair, label: ops.all_gather(*pair, label))

        return self._begin("allgather", places, opts, run, pairs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> RingcommWork:
        """The root gets the tensors of all ranks."""
        places, tensor, root = list(outputs[0]) if outputs else [], single(inputs), root_of(opts)
        return self._begin("gather", [places], opts, self._ops.gather, places, tensor, root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> RingcommWork:
        """Every rank gets one of the root's tensors."""
        output, pieces, root = single(outputs), list(inputs[0]) if inputs else [], root_of(opts)
        return self._begin("scatter", [output], opts, self._ops.scatter, output, pieces, root)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> RingcommWork:
        """Every rank gets one tensor from every rank."""
        places, tensors = list(outputs), list(inputs)
        return self._begin("alltoall", places, opts, self._ops.all_to_all, places, tensors)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, into: Any, send: Any, opts: Any = None
    ) -> RingcommWork:
        """The same with one tensor each, in equal parts or in parts of so many rows."""
        into, send = list(into or ()), list(send or ())
        return self._begin(
            "alltoall", [output], opts, self._ops.all_to_all_single, output, source, into, send
        )

    alltoall_base = all_to_all_single

    # ---- coordination ------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> RingcommWork:
        """Wait for all ranks."""
        return self._begin("barrier", [], opts, self._ops.runner.barrier)

    def monitored_barrier(self, timeout: Optional[timedelta] = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, and name those that do not come; see :class:`._monitored.MonitoredBarrier`.

        Raises:
            PeerStalledError: a rank has not come in time.
        """
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        barrier = MonitoredBarrier(self._messages, self._watch, self._ranks)
        if self.rank() == 0:
            barrier.judge(limit_s, wait_all_ranks)
        else:
            barrier.report(limit_s)

    # ---- messages ----------------------------------------------------------------------------

    def _message_work(
        self, what: str, tensor: torch.Tensor, on_device: Optional[Staged] = None
    ) -> RingcommWork:
        return RingcommWork(what, [tensor], interrupted=self._interrupted, on_device=on_device)

    def send(self, tensors: Any, peer: int, tag: int = 0) -> RingcommWork:
        """Send a tensor to one rank."""
        tensor, address = single(tensors), address_of(tag)
        on_device = staged(self._staging, [tensor], [], False)
        flat = Flat(tensor if on_device is None else on_device.fetched(self._watch))
        work = self._message_work(f"send to rank {self._name_of(peer)} with tag {tag}", tensor)
        work.epilogue = lambda: setattr(work, "kept", None)
        # A copy, if the tensor is not contiguous or is on a device, must live until it has been sent.
        work.kept = (flat, on_device)
        view, elements = flat.array.view("u1").data, type_code(tensor.dtype)
        self._messages.send(peer, address, view, work, self._timeout_s, elements)
        return self._noted(work)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> RingcommWork:
        """Receive a tensor from one rank."""
        return self._receive(tensors, peer, tag, f"recv from rank {self._name_of(peer)} with tag {tag}")

    def recv_anysource(self, tensors: Any, tag: int = 0) -> RingcommWork:
        """Receive a tensor from any rank; the work's ``source_rank()`` is the sender."""
        if self.size() == 1:
            raise Misuse("recv from any rank: this group has no other ranks.")
        return self._receive(tensors, None, tag, f"recv from any rank with tag {tag}")

    def _receive(self, tensors: Any, peer: Optional[int], tag: int, what: str) -> RingcommWork:
        tensor, address = single(tensors), address_of(tag)
        on_device = staged(self._staging, [tensor], [tensor], False)
        flat = Flat(tensor if on_device is None else on_device.arguments[0])
        work = self._message_work(what, tensor, on_device)
        work.epilogue = flat.finish if on_device is None else on_device.deliver
        work.site = this_site()
        view, elements = flat.array.view("u1").data, type_code(tensor.dtype)
        self._messages.receive(peer, address, view, work, self._timeout_s, elements)
        return self._noted(work)

    def _name_of(self, peer: int) -> int:
        if not 0 <= peer < self.size() or peer == self.rank():
            raise Misuse(f"rank {peer}: messages go to and come from the group's other ranks.")
        return self._ranks[peer]

    def _noted(self, work: RingcommWork) -> RingcommWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> RingcommWork:
        works, self._coalesced = self._coalesced or [], None
        return Together(works)

    # ---- the end -----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the group, after what has been started. Others that still need this rank are told."""
        if not self._left:
            self._queue.drain(Deadline(self._timeout_s))
            self._leave("it called destroy_process_group()", ok=True)

    def abort(self) -> None:
        """End the group at once; the operations of all ranks fail."""
        self._leave("it called abort()", ok=False)

    def _leave(self, reason: str, ok: bool, wait: bool = False) -> None:
        if self._left or os.getpid() != self._pid:
            return  # A fork that ends must not say goodbye for the process that it was made from.
        self._left = True
        _open_groups.discard(self)
        why = f"This process group has ended ({reason}). Make another one first."
        error = NotInitializedError(why)
        self._flight.close(reason, ok, self._watch.failure)
        if not ok:
            self._watch.abort(error)
        self._ops.runner.stop()  # first of all: another thread may be about to call
        self._transport.say_goodbye(reason, ok)
        self._queue.close(why, error)
        self._messages.close(error)
        self._transport.close(wait)

    @property
    def failure(self) -> Optional[RingcommError]:
        """What ended the group's communication, once something has: a typed error that names the culprit."""
        return self._watch.failure

    def set_timeout(self, timeout: timedelta) -> None:
        """How long nothing may move in operations that have no limit of their own."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._started = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._started


def create(options: Any, _: Any = None) -> ProcessGroupRingcomm:
    """Make a group from what ``init_process_group`` and ``new_group`` give a backend."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    default = not options.global_ranks_in_group
    name = str(options.group_id)
    return ProcessGroupRingcomm(options.store, options.group_rank, ranks, options.timeout, name, default)


@atexit.register
def _leave_at_exit() -> None:
    """Leave, and say why if an uncaught exception ends the program, so that all others can name it."""
    error = getattr(sys, "last_value", None)
    for group in list(_open_groups):
        if error is not None:
            group._leave(f"uncaught {type(error).__name__}: {error}", ok=False, wait=True)
        else:
            group._leave("its program ended", ok=True, wait=True)
