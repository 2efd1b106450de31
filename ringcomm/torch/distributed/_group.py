"""The process group: what PyTorch calls, translated; and ``init()``, so that trainers use it by default."""

from __future__ import annotations

import atexit
import operator
import sys
import warnings
import weakref
from datetime import timedelta
from functools import partial
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ... import api
from ...clock import Deadline
from ...config import Membership, env_rendezvous_from_environment
from ...errors import (
    Misuse,
    NotInitializedError,
    PeerStalledError,
    RingcommError,
    StartupError,
    describe_error,
)
from ...group.message_channel import Address
from ._collectives import Collectives, Divided, GroupReduction, Packed, Tensors
from ._group_transport import GroupTransport
from ._operations import Operations, RingcommWork, Together, uncompiled
from ._rendezvous import SCHEME, group_settings

BACKEND = "ringcomm"
_USERS, _BARRIERS = 0, 1  # owners of tags: those of barriers do not match the program's messages
_open_groups: weakref.WeakSet[ProcessGroupRingcomm] = weakref.WeakSet()


@uncompiled("_reduce_scatter_base", "_allgather_base", "_start_coalescing", "_end_coalescing")
class ProcessGroupRingcomm(dist.ProcessGroup):
    """A process group with its own links. ``init_process_group`` and ``new_group`` make it.

    Collectives run one after another, in the order of the calls. This order must be the same on all ranks.
    Point-to-point messages have separate links.
    """

    def __init__(
        self, store: Any, rank: int, ranks: Sequence[int], timeout: timedelta, name: str, default: bool
    ) -> None:
        # Without the store: with it, C++ would not call the methods that Python overrides.
        super().__init__(rank, len(ranks))
        self._name, self._desc = name, "undefined"
        self._store = store
        self._ranks = tuple(ranks)
        settings = group_settings(timeout)
        transport = self._transport = GroupTransport(store, rank, ranks, name, settings, default)
        self._watch = transport.watch
        self._ops = Collectives(transport.group.runner)
        with transport.telling_shortages():
            self._operations = Operations(name, transport, settings.timeout_s)
        self._start = self._operations.start
        self._left = False
        _open_groups.add(self)

    # ---- names and abilities -----------------------------------------------------------------

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return BACKEND

    # C++ calls these four.
    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    name = _get_backend_name = getBackendName
    group_name = property(getGroupName, doc="The group's name.")
    group_desc = property(getGroupDesc, doc="The group's description.")
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> List[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: Any) -> ProcessGroupRingcomm:
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return False: the backend allocates no tensors."""
        return False

    def get_group_store(self) -> Any:
        """Return the group's part of PyTorch's store."""
        return self._store

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self._name!r}, rank={self.rank()}, size={self.size()})"

    # ---- reductions --------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> RingcommWork:
        """Reduce a tensor over all ranks, in place."""
        tensor, how = single(tensors), reduction_of(opts)
        return self._start("allreduce", [tensor], opts, self._ops.all_reduce, tensor, how, reads=True)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> RingcommWork:
        """Reduce several tensors, in place."""
        tensors, how = list(tensors), reduction_of(opts)
        do = self._ops.all_reduce_all
        return self._start("allreduce_coalesced", tensors, opts, do, tensors, how, reads=True)

    def allreduce_packed(self, buffer: torch.Tensor, packed: Sequence[Packed]) -> RingcommWork:
        """Average parts of a tensor over all ranks, each with its codec, in place."""
        do = self._ops.all_reduce_packed
        return self._start("allreduce", [buffer], None, do, buffer, packed, reads=True)

    def reduce(self, tensors: Any, opts: Any = None) -> RingcommWork:
        """Reduce a tensor in place; only the root gets the result."""
        tensor, how, root = single(tensors), reduction_of(opts), root_of(opts)
        return self._start("reduce", [tensor], opts, self._ops.reduce, tensor, root, how, reads=True)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> RingcommWork:
        """Reduce the tensors of a list; every rank gets the result of one of them."""
        return self.reduce_scatter_single(single(outputs), list(inputs[0]), opts)

    def reduce_scatter_single(self, output: torch.Tensor, source: Divided, opts: Any = None) -> RingcommWork:
        """Reduce a tensor; every rank gets an equal part of the result."""
        how = reduction_of(opts)
        return self._start("reduce_scatter", [output], opts, self._ops.reduce_scatter, output, source, how)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingcommWork:
        scatter = partial(self._ops.reduce_scatter, how=reduction_of(opts))
        return self._of_each("reduce_scatter", outputs, pairs_of(outputs, inputs), scatter, opts)

    def _of_each(
        self, what: str, result: Any, pairs: Sequence[Any], do: Callable[..., None], opts: Any
    ) -> RingcommWork:
        """Start ``do(output, source, label=label)`` for each pair of tensors, as one collective."""

        def run(pairs: Sequence[Any]) -> None:
            self._ops.for_each(pairs, lambda pair, label: do(*pair, label=label))

        return self._start(what, list(result), opts, run, pairs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- movement ----------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None) -> RingcommWork:
        """Copy the root's tensor to every rank."""
        tensor, root = single(tensors), root_of(opts)
        reads = self.rank() == root
        return self._start("broadcast", [tensor], opts, self._ops.broadcast, tensor, root, reads=reads)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> RingcommWork:
        """Copy the tensors of all ranks to every rank. The tensors may differ in size."""
        places, tensor = list(outputs[0]), single(inputs)
        return self._start("allgather", [places], opts, self._ops.all_gather, places, tensor)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> RingcommWork:
        """Copy the tensors of all ranks into one tensor on every rank."""
        return self._start("allgather", [output], opts, self._ops.all_gather, output, source)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> RingcommWork:
        return self._of_each("allgather", outputs, pairs_of(outputs, inputs), self._ops.all_gather, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Tensors, opts: Any = None) -> RingcommWork:
        """Copy the tensors of all ranks to every rank: ``outputs[r][i]`` becomes rank r's ``inputs[i]``."""
        places = [list(item) for item in outputs]
        pairs = pairs_of(list(zip(*places)), inputs)
        return self._of_each("allgather", places, pairs, self._ops.all_gather, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> RingcommWork:
        """Copy the tensors of all ranks to the root."""
        places, tensor, root = list(outputs[0]) if outputs else [], single(inputs), root_of(opts)
        return self._start("gather", [places], opts, self._ops.gather, places, tensor, root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> RingcommWork:
        """Copy one of the root's tensors to each rank."""
        output, pieces, root = single(outputs), list(inputs[0]) if inputs else [], root_of(opts)
        return self._start("scatter", [output], opts, self._ops.scatter, output, pieces, root)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> RingcommWork:
        """Send one tensor to every rank, and receive one from every rank."""
        places, tensors = list(outputs), list(inputs)
        return self._start("alltoall", places, opts, self._ops.all_to_all, places, tensors)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, into: Any, send: Any, opts: Any = None
    ) -> RingcommWork:
        """Send parts of a tensor to every rank, equal parts or parts with the given numbers of rows."""
        into, send = list(into or ()), list(send or ())
        return self._start("alltoall", [output], opts, self._ops.all_to_all, output, source, into, send)

    alltoall_base = all_to_all_single

    # ---- coordination ------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> RingcommWork:
        """Wait for all ranks."""
        return self._start("barrier", [], opts, self._ops.runner.barrier)

    def monitored_barrier(self, timeout: Optional[timedelta] = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; PeerStalledError (on every rank) names the ranks that are not there in time."""
        limit_s = self._operations.timeout_s if timeout is None else timeout.total_seconds()
        if self.rank() == 0:
            self._judge(limit_s, wait_all_ranks)
        else:
            self._token("send", 0, limit_s)
            # Longer than rank 0's limit, so that its error arrives first.
            self._token("receive", 0, 2 * limit_s + 10.0).wait()

    def _judge(self, limit_s: float, wait_all_ranks: bool) -> None:
        """Wait on rank 0 for a report of each rank, and reply to all; abort the group if one is missing."""
        deadline = Deadline(limit_s)
        missing: List[int] = []
        peers = range(1, self.size())
        for peer, work in [(peer, self._token("receive", peer, None)) for peer in peers]:
            if not work.is_completed() and missing and not wait_all_ranks:
                break
            try:
                work.wait(timedelta(seconds=max(1e-3, deadline.remaining_s())))
            except PeerStalledError:
                missing.append(peer)
        if missing:
            why = f"not there after {limit_s:g} s"
            self._watch.report_lost(missing[0], "monitored_barrier", why, "stalled")
            late = "Ranks " if len(missing) > 1 else "Rank "
            late += ", ".join(str(self._ranks[peer]) for peer in missing)
            # Gloo's words: programs search for them.
            raise PeerStalledError(
                f"Rank {self._ranks[0]} timed out in monitoredBarrier after {limit_s:g} s: "
                f"{late} failed to pass monitoredBarrier in that time.",
                rank=self._ranks[missing[0]],
            )
        for work in [self._token("send", peer, limit_s) for peer in peers]:
            work.wait()  # this rank may leave the group next

    def _token(self, act: str, peer: int, limit_s: Optional[float]) -> RingcommWork:
        """Start sending or receiving a byte of a barrier that names missing ranks."""
        work, token = RingcommWork("monitored_barrier", []), memoryview(bytearray(1))
        getattr(self._operations.messages, act)(peer, (_BARRIERS, 0), token, work, limit_s)
        return work

    # ---- messages ----------------------------------------------------------------------------

    def send(self, tensors: Any, peer: int, tag: int = 0) -> RingcommWork:
        """Send a tensor to one rank."""
        return self._operations.send(single(tensors), peer, address_of(tag))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> RingcommWork:
        """Receive a tensor from one rank."""
        return self._operations.receive(single(tensors), peer, address_of(tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> RingcommWork:
        """Receive a tensor from any rank; the work's ``source_rank()`` is the sender."""
        return self._operations.receive(single(tensors), None, address_of(tag))

    def _start_coalescing(self, device: Any = None) -> None:
        self._operations.coalesced = []

    def _end_coalescing(self, device: Any = None) -> RingcommWork:
        works, self._operations.coalesced = self._operations.coalesced or [], None
        return Together(works)

    # ---- the end -----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the group after the running operations. Ranks that still need this rank get an error."""
        if not self._left:
            self._operations.queue.drain(Deadline(self._operations.timeout_s))
            self._leave("it called destroy_process_group()", ok=True)

    def abort(self) -> None:
        """End the group at once; the operations of all ranks fail."""
        self._leave("it called abort()", ok=False)

    def _leave(self, reason: str, ok: bool, wait: bool = False) -> None:
        if self._left or self._transport.group.is_forked:
            return  # A fork that ends must not say goodbye for the process that it was made from.
        self._left = True
        _open_groups.discard(self)
        why = f"This process group has ended ({reason}). Make another one first."
        error = NotInitializedError(why)
        if not ok:
            self._watch.abort(error)
        self._transport.group.leave(reason, ok, self._watch.failure)
        self._operations.queue.close(why, error)
        self._operations.messages.close(error)
        self._transport.close(wait)

    @property
    def failure(self) -> Optional[RingcommError]:
        """The error that ended the group, or None. It names the rank at fault."""
        return self._watch.failure

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation without its own limit may make no progress."""
        self._operations.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._operations.started = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._operations.started


def single(tensors: Any) -> torch.Tensor:
    """Return the tensor of a list of one; Misuse if the list has another length."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise Misuse(f"one tensor at a time, not {len(tensors)}.")
    return tensors[0]


def address_of(tag: int) -> Address:
    """Return the address of messages with a user's tag; Misuse if the tag is invalid."""
    if not -(1 << 31) <= tag < 1 << 31:
        raise Misuse(f"tag={tag}: tags are whole numbers of 32 bits, from -2**31 to 2**31 - 1.")
    return _USERS, operator.index(tag)


def pairs_of(outputs: Sequence[Any], inputs: Tensors) -> List[Tuple[Any, torch.Tensor]]:
    """Return each output with its input; Misuse if their numbers differ."""
    if len(outputs) != len(inputs):
        raise Misuse(f"{len(inputs)} inputs need as many outputs, not {len(outputs)}.")
    return list(zip(outputs, inputs))


def reduction_of(opts: Any) -> GroupReduction:
    """Return the reduction in PyTorch's options; a sum without options."""
    return GroupReduction.of(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)


def root_of(opts: Any) -> int:
    """Return the root's rank in the group, from PyTorch's options."""
    return int(opts.rootRank) if opts is not None else 0


def monitored_barrier(
    group: Any = None, timeout: Union[timedelta, float, None] = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank of a group has called this; name the ranks that exceed a time limit.

    It replaces ``torch.distributed.monitored_barrier``, which accepts only the Gloo backend.

    Example: ``monitored_barrier(timeout=60, wait_all_ranks=True)``.

    Args:
        group: a process group of the backend ``"ringcomm"``; by default the default group.
        timeout: how long rank 0 waits for the other ranks, in seconds or as a ``timedelta``; by default the
            group's timeout.
        wait_all_ranks: name all missing ranks, not only the first.

    Raises:
        PeerStalledError: (on every rank) a rank has not called this in time.
    """
    chosen = dist.group.WORLD if group is None else group
    if chosen == dist.GroupMember.NON_GROUP_MEMBER:
        return
    limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    chosen.monitored_barrier(limit, wait_all_ranks)


def backend_of(group: Any) -> Optional[ProcessGroupRingcomm]:
    """Return a group of PyTorch, or its part for CPU tensors, if that is of this backend; otherwise None."""
    if not isinstance(group, ProcessGroupRingcomm) and hasattr(group, "_get_backend"):
        try:
            group = group._get_backend(torch.device("cpu"))
        except RuntimeError:  # it has no backend for CPU tensors
            return None
    return group if isinstance(group, ProcessGroupRingcomm) else None


def create(options: Any, _: Any = None) -> ProcessGroupRingcomm:
    """Return a group for the options that ``init_process_group`` and ``new_group`` give a backend."""
    own = options.global_ranks_in_group
    ranks, name = list(own) or list(range(options.group_size)), str(options.group_id)
    return ProcessGroupRingcomm(options.store, options.group_rank, ranks, options.timeout, name, not own)


@atexit.register
def _leave_at_exit() -> None:
    """Leave, and report an uncaught exception that ends the program, so that all others can name it."""
    error = getattr(sys, "last_value", None)
    reason = "its program ended" if error is None else f"uncaught {describe_error(error)}"
    for group in list(_open_groups):
        group._leave(reason, ok=error is None, wait=True)


# ---- init(): ringcomm as the default backend --------------------------------------------------------------


def init(timeout: Optional[timedelta] = None) -> None:
    """Join the job's other processes, and make ``"ringcomm"`` the default backend for CPU tensors.

    Call it at the top of a program that uses Lightning, Fabric, Accelerate, the Hugging Face ``Trainer``,
    Composer or plain ``torch.distributed``::

        import ringcomm.torch.distributed
        ringcomm.torch.distributed.init()

    It finds the other processes under ``ringrun`` and ``torchrun``. Without a launcher, it makes a group of
    one process. A second call does nothing. If Lightning starts its processes itself, call
    :func:`make_default` instead.

    If several ranks train but do not communicate, every rank trains a separate model. ringcomm then warns
    (``RuntimeWarning``) at the tenth step of an optimizer.

    Args:
        timeout: how long a transfer of the default group may make no progress, and how long to wait for the
            other processes to connect. None, or PyTorch's default of half an hour: 600 s for transfers, and
            half an hour for connecting. It has no effect if there is already a default group.

    Raises:
        Misuse: there is a default process group of another backend.
        StartupError: (or a subclass) the processes did not connect, or a launcher has set only some of the
            variables that are needed.
    """
    make_default()
    if dist.is_initialized():
        _default_group()
        return
    uses_context = api.is_initialized()
    dist.init_process_group(BACKEND, init_method=_init_method(), timeout=timeout)
    if not uses_context:
        watch_optimizers()


def make_default() -> None:
    """Make ``"ringcomm"`` the default backend for CPU tensors, without joining a job.

    Then ``init_process_group()`` without a backend and Lightning's ``strategy="ddp"`` use ringcomm. Composer
    accepts only Gloo for CPUs. If it has been imported, this function also changes Composer's constant.
    """
    dist.Backend.default_device_backend_map["cpu"] = BACKEND
    composer = sys.modules.get("composer.devices.device_cpu")
    if composer is not None:
        composer.DeviceCPU.dist_backend = BACKEND


def local_rank() -> int:
    """Return this process's number among the processes of the default group on its host.

    Returns:
        0 for the first rank on each host, in the order of ranks.

    Raises:
        Misuse: the default group does not use ringcomm for CPU tensors.
    """
    return _default_group()._transport.group.local_rank


def _default_group() -> ProcessGroupRingcomm:
    """Return the default group, or its part for CPU tensors; raise unless it uses ringcomm."""
    found = backend_of(dist.group.WORLD)
    if found is None:
        raise Misuse(
            f"There is a default process group already, and its backend is {dist.get_backend()!r}. Call "
            "ringcomm.torch.distributed.init() before anything makes a group (init_process_group, "
            "Accelerator, TrainingArguments, Trainer), or destroy that group first."
        )
    return found


def _init_method() -> str:
    """Return ``env://`` where a launcher has set its variables, else ``ringcomm://``."""
    membership = Membership.from_environment()
    unset, size = env_rendezvous_from_environment()
    if membership.elastic:
        return f"{SCHEME}://"
    if not unset:
        return "env://"
    if membership.is_alone and size > 1:
        raise StartupError(
            f"WORLD_SIZE={size} says that this is one of {size} processes, but {', '.join(unset)} is "
            "not set. Where Lightning starts its processes itself, call make_default() of this module "
            "instead of init(); else start the program with ringrun or torchrun."
        )
    return f"{SCHEME}://"


STEPS = 10  # the step of an optimizer after which the warning is given


def watch_optimizers() -> None:
    """Warn on rank 0 if each rank of the default group trains a separate model, which no error shows."""
    if dist.get_world_size() == 1 or dist.get_rank() > 0:
        return
    world, has_context = weakref.ref(dist.group.WORLD), api.is_initialized()
    steps = 0

    def after_step(*_: Any) -> None:
        nonlocal steps
        if world() is not dist.group.WORLD or world() is None:
            return
        steps += 1
        # Operations of ringcomm's other interface are not counted here.
        if steps == STEPS and not RingcommWork.any_made and api.is_initialized() == has_context:
            warnings.warn(
                f"Rank 0 of {dist.get_world_size()} has made {STEPS} optimizer steps, and no collective of "
                "torch.distributed has run: every rank trains a model of its own. On machines without a GPU "
                "Accelerate takes part only with Accelerator(cpu=True), the Hugging Face Trainer with "
                'TrainingArguments(use_cpu=True), and Lightning with a strategy ("ddp_ringcomm"); a plain '
                "model has to be wrapped in DistributedDataParallel.",
                RuntimeWarning,
                stacklevel=2,
            )

    register_optimizer_step_post_hook(after_step)
