"""The operations of a process group: how they run, and the ``torch.distributed.Work`` that PyTorch gets."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections import deque
from contextlib import nullcontext
from datetime import timedelta
from types import FunctionType
from typing import Any, Callable, Deque, List, Optional, TypeVar

import torch
import torch.distributed as dist
import typing_extensions

from ...arrays.kinds import StagingPool
from ...clock import Idleness
from ...collective.observe import Site, look_through, site_text, this_site
from ...errors import Misuse, PeerStalledError, RingcommError, describe_error
from ...group.message_channel import Address
from ...group.operation_queue import OperationQueue
from ...group.point_to_point import PointToPoint
from ._collectives import GroupOperand, Staged, inside, staged, tensors_inside, type_code, type_name
from ._group_transport import GroupTransport, Traced, observer

Class = TypeVar("Class", bound=type)
Helper = Callable[["RingcommWork"], None]
Interrupted = Callable[["RingcommWork", BaseException], None]

_MAX_KEPT_ITEMS = 16
# The newest works with small results, to keep their Python objects alive. Within ``join()`` DDP counts the
# ranks that still train by an all-reduce, and its reducer holds only the C++ part of that work until the
# backward pass. Without the Python object that part has no methods ("Work::getFuture not implemented").
_kept: Deque[RingcommWork] = deque(maxlen=64)


_DYNAMO = "torch._dynamo"
_prepare: List[Callable[[], None]] = []


def uncompiled(*others: str) -> Callable[[Class], Class]:
    """Return a class decorator: public methods, and ``others``, run outside of compiled code. Compiled
    programs call a group from C++ too (DDP's broadcast of buffers, functional collectives), and Dynamo would
    trace its methods as if they were the user's, though it allows only a few members of groups ("Attempted to
    access unregistered member on an OpaqueObject").
    """

    def decorate(cls: Class) -> Class:
        for name, item in list(vars(cls).items()):
            if isinstance(item, FunctionType) and (not name.startswith("_") or name in others):
                setattr(cls, name, _outside(item))
        return cls

    return decorate


def _outside(method: Callable[..., Any]) -> Callable[..., Any]:
    disabled: List[Callable[..., Any]] = []

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if disabled:
            return disabled[0](*args, **kwargs)
        # Dynamo is not imported for this: that takes seconds, and without it nothing is compiled.
        dynamo = sys.modules.get(_DYNAMO)
        if dynamo is not None and not getattr(dynamo.__spec__, "_initializing", False):
            for prepare in _prepare:
                prepare()
            _prepare.clear()
        return (disabled[0] if disabled else method)(*args, **kwargs)

    _prepare.append(lambda: disabled.append(sys.modules[_DYNAMO].disable(method)))
    return call


@uncompiled()
class RingcommWork(dist.Work):
    """A collective or a point-to-point message. Any thread may run it, once; any number may wait for it. Each
    waiting thread calls ``helper``, which may run queued works, before it sleeps, and ``interrupted``, which
    ends the group, if it is interrupted (for example by Ctrl-C).
    """

    any_made = False

    def __init__(
        self, what: str, result: Any, run: Optional[Helper] = None, helper: Optional[Helper] = None,
        interrupted: Optional[Interrupted] = None, on_device: Optional[Staged] = None,
    ) -> None:  # fmt: skip
        super().__init__()
        RingcommWork.any_made = True
        self.what = what
        self.waiters = 0
        self.source = -1  # the sender's rank, of a received message
        self.epilogue: Optional[Callable[[], None]] = None  # called on success, before waiting threads wake
        self.site: Optional[Site] = None
        self.noted: Any = None  # record and history of a recorded message
        self.ended: Optional[Callable[[], None]] = None  # called once on success or failure
        self._result = result
        self._run = run
        self._helper = helper
        self._interrupted = interrupted
        self._on_device = on_device
        self._lock = threading.Lock()
        self._completed_event: Optional[threading.Event] = None
        self._root: Any = None
        self._future: Any = None
        self._done = False
        self._error: Optional[BaseException] = None
        if len(result) == 1 and isinstance(result[0], torch.Tensor) and result[0].numel() <= _MAX_KEPT_ITEMS:
            _kept.append(self)

    # ---- called by the executing thread ------------------------------------------------------

    def perform(self) -> None:
        """Run it, and finish it with success or its error."""
        run, self._run = self._run, None
        assert run is not None
        try:
            run(self)
        except Exception as error:  # noqa: BLE001 - raised in the waiting threads
            self.finish(error)
        except BaseException as error:
            self.finish(error)
            raise  # Ctrl-C in a user's thread that runs the work
        else:
            self.finish()

    def finish(self, error: Optional[BaseException] = None) -> None:
        """Mark it as done or failed: wake waiting threads, and run its future's callbacks."""
        epilogue = self.epilogue
        if error is None and epilogue is not None and not self._done:
            epilogue()
        with self._lock:
            if self._done:
                return
            self._error = error
            self._done = True
            self._helper = self._interrupted = self.epilogue = None
            completed, root = self._completed_event, self._root
        if completed is not None:
            completed.set()
        if self.ended is not None:
            self.ended()
        if root is not None:
            self._complete(root)

    def _complete(self, root: Any) -> None:
        """Set the future; on a device, its callbacks come after the result in the stream."""
        if self._on_device is None:
            root.set_result(None)
        else:
            with self._on_device.stream():
                root.set_result(None)

    def where(self) -> str:
        return "" if self.site is None else f" at {site_text(self.site)}"

    # ---- called by waiting threads -----------------------------------------------------------

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Wait until it is done, for ``timeout`` (None or zero: its own limit), and return True."""
        if not self._done:
            self._block(timeout.total_seconds() if timeout else None)
        self._raise_error()
        if self._on_device is not None:
            self._on_device.follow()
        return True

    def _raise_error(self) -> None:
        if self._error is not None:
            # A RingcommError has all facts; a traceback through ringcomm's own code adds none.
            is_own = isinstance(self._error, RingcommError)
            raise self._error.with_traceback(None) if is_own else self._error

    def _block(self, timeout_s: Optional[float]) -> None:
        self.waiters += 1
        history, message = self.noted or (None, None)
        wait = None if history is None else history.begin_wait(message, self)
        try:
            helper = self._helper
            if helper is not None and timeout_s is None:
                helper(self)
            in_time = self._wait_for_end(timeout_s)
        except BaseException as problem:
            if not self._done and self._interrupted is not None:
                self._interrupted(self, problem)
                self._wait_for_end()  # until no peer can read the work's tensors any more
            raise
        finally:
            self.waiters -= 1
            if history is not None:
                history.end_wait(wait)
        if not in_time:
            raise PeerStalledError(f"{self.what} is not done within {timeout_s:g} s.")

    def _wait_for_end(self, timeout_s: Optional[float] = None) -> bool:
        with self._lock:
            if self._done:
                return True
            completed = self._completed_event = self._completed_event or threading.Event()
        return completed.wait(timeout_s)

    def is_completed(self) -> bool:
        """Return whether it is done or has failed."""
        return self._done

    def is_success(self) -> bool:
        """Return whether it is done without an error."""
        return self._done and self._error is None

    def exception(self) -> Optional[BaseException]:
        """Return its error, if it has failed."""
        return self._error

    def synchronize(self) -> None:
        """Wait until it is done, without an additional time limit."""
        self.wait()

    def result(self) -> List[torch.Tensor]:
        """Return the tensors that hold the result."""
        return self._result

    def source_rank(self) -> int:
        """Return the sender's rank in the group, of a received message; -1 otherwise."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a ``torch.futures.Future`` of the result. Its callbacks run in the thread that executes the
        operation, before the next operation, so collectives that they start have the same position in the
        order on every rank.
        """
        with self._lock:
            if self._future is None:
                on_device = self._on_device
                self._root = torch.futures.Future() if on_device is None else on_device.future()
                # Only a callback that raises makes a future fail in C++ too, where DDP waits.
                self._future = self._root.then(self._outcome)
                if self._done:
                    self._complete(self._root)
            return self._future

    def _outcome(self, _: Any) -> Any:
        self._raise_error()
        return self._result


@uncompiled()
class Together(RingcommWork):
    """Several works as one: done when all are done."""

    def __init__(self, works: List[RingcommWork]) -> None:
        super().__init__("a group of operations", [work.result() for work in works])
        self._works = works

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        self.finish()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Optional[BaseException]:
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works])


for _package in (torch, typing_extensions, contextlib, functools, warnings):
    look_through(_package)  # PyTorch's functions are wrapped by decorators of the latter


class Operations:
    """Start a group's operations: collectives, which run in the order of the calls, and messages."""

    def __init__(self, name: str, transport: GroupTransport, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.started = 0  # number of started collectives
        self.queue = OperationQueue(f"ringcomm-{name}")
        group, thread = transport.group, f"ringcomm-{name}-messages"
        background = group.channels.background
        self.messages = PointToPoint(background, transport.watch, group.spin_s, thread, type_name)
        self.messages.history = group.record_messages(type_name)
        self._name = name
        self._ranks = group.members
        self._runner = group.runner
        self._transport = transport
        self._staging = StagingPool()
        self._idleness = Idleness()
        self.coalesced: Optional[List[RingcommWork]] = None  # works that will be one

    def start(
        self, what: str, result: Any, opts: Any, do: Callable[..., None], *arguments: Any,
        reads: bool = False,
    ) -> RingcommWork:  # fmt: skip
        """Start a collective: ``do`` gets ``arguments``, with host copies of a device's tensors, and writes
        (with ``reads``, also reads) the tensors in ``result``.
        """
        inner = tensors_inside(arguments)
        if inner:
            return Together([
                self.start(what, inside(result, name), opts, do, *inside(arguments, name), reads=reads)
                for name in inner
            ])  # fmt: skip
        given_s = opts.timeout.total_seconds() if opts is not None else -1.0
        limit_s, runner = given_s if given_s > 0 else self.timeout_s, self._runner
        site = this_site()
        watching = observer()
        traced = None if watching is None else Traced(watching, self._name, what, result)
        on_device = staged(self._staging, arguments, result, reads)

        def run(work: RingcommWork) -> None:
            runner.timeout_s = limit_s
            runner.called_at = site
            runner.may_poll = lambda: work.waiters > 0 or self._idleness()
            with nullcontext() if traced is None else traced, runner.exclusive(but=Exception):
                if on_device is None:
                    do(*arguments)
                else:
                    on_device.run(do, runner)

        self.started += 1
        work = RingcommWork(what, result, run, self.queue.help, self.interrupted, on_device)
        self._note(work)
        try:
            self.queue.submit(work, inline=not getattr(opts, "asyncOp", True))
            return work
        except RuntimeError as problem:
            self._transport.tell_shortage(problem)  # it starts a thread, once
            raise

    def interrupted(self, work: RingcommWork, problem: BaseException) -> None:
        """End the group on all ranks: the program leaves an operation, and may overwrite its tensors."""
        watch = self._transport.watch
        self._transport.end(watch.note_interrupted(work.what, describe_error(problem)))

    def send(self, tensor: torch.Tensor, peer: int, address: Address) -> RingcommWork:
        """Start sending a tensor to one rank; Misuse if there is no such rank, or it is this one."""
        what = f"send to rank {self._number_of(peer)} with tag {address[1]}"
        on_device = staged(self._staging, [tensor], [], False)
        operand = GroupOperand(tensor if on_device is None else on_device.fetched(self._runner.await_copy))
        work = RingcommWork(what, [tensor], None, self.messages.help, self.interrupted)
        work.epilogue = lambda: setattr(work, "kept", None)
        # A copy, if the tensor is not contiguous or is on a device, must live until it has been sent.
        work.kept = (operand, on_device)
        return self._started(self.messages.send, peer, address, operand, work)

    def receive(self, tensor: torch.Tensor, peer: Optional[int], address: Address) -> RingcommWork:
        """Start receiving a tensor from one rank, or (None) from any; Misuse as for :meth:`send`."""
        if peer is None and len(self._ranks) == 1:
            raise Misuse("recv from any rank: this group has no other ranks.")
        source = "any rank" if peer is None else f"rank {self._number_of(peer)}"
        on_device = staged(self._staging, [tensor], [tensor], False)
        operand = GroupOperand(tensor if on_device is None else on_device.arguments[0])
        what = f"recv from {source} with tag {address[1]}"
        work = RingcommWork(what, [tensor], None, self.messages.help, self.interrupted, on_device)
        work.epilogue = operand.finish if on_device is None else on_device.deliver
        work.site = this_site()
        return self._started(self.messages.receive, peer, address, operand, work)

    def _started(
        self, act: Callable[..., None], peer: Optional[int], address: Address, operand: GroupOperand,
        work: RingcommWork,
    ) -> RingcommWork:  # fmt: skip
        elements = type_code(operand.element)
        watching = observer()
        if watching is not None:
            traced = Traced(watching, self._name, work.what.partition(" with ")[0], [])
            work.ended = traced.__exit__
            traced.__enter__()
        try:
            act(peer, address, operand.flat.view("u1").data, work, self.timeout_s, elements)
        except BaseException as problem:
            if not isinstance(problem, Exception):  # Ctrl-C, while this thread moved messages
                self.interrupted(work, problem)
            self._transport.tell_shortage(problem)  # it starts a thread, once
            raise
        self._note(work)
        return work

    def _number_of(self, peer: int) -> int:
        if not 0 <= peer < len(self._ranks) or peer == self._runner.rank:
            raise Misuse(
                f"rank {peer}: messages go to and come from the other ranks of the group. It has ranks 0 to "
                f"{len(self._ranks) - 1}, and this is rank {self._runner.rank}."
            )
        return self._ranks[peer]

    def _note(self, work: RingcommWork) -> None:
        if self.coalesced is not None:
            self.coalesced.append(work)


# ---- what PyTorch's dispatcher and compiler need -----------------------------------------------------------

_library = torch.library.Library("_c10d_functional", "IMPL")


def _all_gather_out(source: torch.Tensor, size: int, group: str, *, out: torch.Tensor) -> torch.Tensor:
    """Start ``all_gather_into_tensor_out`` of functional collectives, over a group of any backend."""
    found: Any = dist.distributed_c10d._resolve_process_group(group)
    torch._C._distributed_c10d._register_work(out, found._allgather_base(out, source))
    return out


def register_functional() -> None:
    """Make the functional collective that gathers into a tensor work: it calls C++ without a method."""
    if hasattr(torch.ops._c10d_functional, "all_gather_into_tensor_out"):
        for device in ("CPU", "CUDA"):
            _library.impl("all_gather_into_tensor_out", _all_gather_out, device)
