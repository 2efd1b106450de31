"""The operations of a process group: how they run, and the works that PyTorch gets."""

from __future__ import annotations

import contextlib
import functools
import warnings
from contextlib import nullcontext
from typing import Any, Callable, List, Optional

import torch
import typing_extensions

from ...arrays.mirrors import StagingPool
from ...clock import Idleness
from ...collective.call_sites import look_through, this_site
from ...errors import Misuse, describe_error
from ...group.message_channel import Address
from ...group.operation_queue import OperationQueue
from ...group.point_to_point import PointToPoint
from ._bridge import GroupOperand, inside, tensors_inside, type_code, type_name
from ._dispatch import count_call
from ._group_transport import GroupTransport, Traced, observer
from ._staged import staged
from ._work import RingcommWork, Together

for _package in (torch, typing_extensions, contextlib, functools, warnings):
    look_through(_package)  # PyTorch's functions are wrapped by decorators of the latter


class Operations:
    """Start a group's operations: collectives, which run in the order of the calls, and messages.

    ``timeout_s`` limits the time without progress of operations without their own limit.
    """

    def __init__(self, name: str, transport: GroupTransport, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.started = 0  # number of started collectives
        self.queue = OperationQueue(f"ringcomm-{name}")
        group, thread = transport.group, f"ringcomm-{name}-messages"
        self.messages = PointToPoint(
            group.channels.background, transport.watch, group.spin_s, thread, type_name
        )  # fmt: skip
        self.messages.history = group.record_messages(type_name)
        self._name = name
        self._ranks = group.members
        self._runner = group.runner
        self._transport = transport
        self._staging = StagingPool()
        self._idleness = Idleness()
        self._coalesced: Optional[List[RingcommWork]] = None

    def start(
        self, what: str, result: Any, opts: Any, do: Callable[..., None], *arguments: Any,
        reads: bool = False,
    ) -> RingcommWork:  # fmt: skip
        """Start a collective: ``do`` gets ``arguments``, with host copies of a device's tensors.

        ``result`` are the tensors that it writes, in (nested) lists; ``reads``: it also reads them. ``opts``
        of PyTorch have its time limit, and whether the caller waits.
        """
        count_call(what, arguments)
        inner = tensors_inside(arguments)
        if inner:
            return Together([
                self.start(what, inside(result, name), opts, do, *inside(arguments, name), reads=reads)
                for name in inner
            ])  # fmt: skip
        limit_s, runner = self.limit_s(opts), self._runner
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
            return self.queue.submit(work, inline=not getattr(opts, "asyncOp", True))
        except RuntimeError as problem:
            self._transport.tell_shortage(problem)  # it starts a thread, once
            raise

    def limit_s(self, opts: Any) -> float:
        """Return the time limit in PyTorch's options, or the group's."""
        timeout_s: float = opts.timeout.total_seconds() if opts is not None else -1.0
        return timeout_s if timeout_s > 0 else self.timeout_s

    def interrupted(self, work: RingcommWork, problem: BaseException) -> None:
        """End the group on all ranks: the program leaves an operation, and may overwrite its tensors."""
        watch = self._transport.watch
        self._transport.end(watch.note_interrupted(work.what, describe_error(problem)))

    def send(self, tensor: torch.Tensor, peer: int, address: Address) -> RingcommWork:
        """Start sending a tensor to one rank; Misuse if there is no such rank, or it is this one."""
        what = f"send to rank {self._number_of(peer)} with tag {address[1]}"
        on_device = staged(self._staging, [tensor], [], False)
        operand = GroupOperand(tensor if on_device is None else on_device.fetched(self._runner.await_copy))
        work = RingcommWork(what, [tensor], helper=self.messages.help, interrupted=self.interrupted)
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
        work = RingcommWork(
            what, [tensor], helper=self.messages.help, interrupted=self.interrupted, on_device=on_device
        )
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
            else:
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
        if self._coalesced is not None:
            self._coalesced.append(work)

    def start_coalescing(self) -> None:
        """Collect all works that are started until :meth:`end_coalescing`."""
        self._coalesced = []

    def end_coalescing(self) -> Together:
        """Return the collected works as one."""
        works, self._coalesced = self._coalesced or [], None
        return Together(works)
