"""The time that a collective on arrays of devices takes, on a virtual clock: copies and network have rates.

The executor, the schedule and the mirrors are the real ones; what the processor does takes no time. So the
result depends on the order of copies, messages and additions alone, and is the same on every machine.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from ringcomm.arrays.kinds import CopyEngine
from ringcomm.arrays.mirrors import BlockMirror, StagingPool
from ringcomm.collective.flows import SegmentPool
from ringcomm.collective.reduce import Kernel
from ringcomm.collective.staged import Done, StagedExecution, Staging
from ringcomm.dtypes import code_of
from ringcomm.ops import Collective, ReduceOp
from ringcomm.schedule.select import Selector
from ringcomm.schedule.staging import plan_copies
from ringcomm.transport.base import Fabric, Link, Views
from ringcomm.transport.memory import memory_fabrics
from ringcomm.wire.frames import NO_ROOT, Header

_TICK_S = 20e-6
_BURST_BYTES = 64 * 1024
_PACKET_BYTES = 4096


class Rates(NamedTuple):
    """What a machine does, in bytes per second.

    Attributes:
        copy_out: from a device to the host.
        copy_in: from the host to a device, at the same time.
        network: of each rank, in each direction.
    """

    copy_out: float
    copy_in: float
    network: float


class _Clock:
    now_s = 0.0


class _Copy(Done):
    def __init__(self, clock: _Clock, end_s: float, elapsed_s: float) -> None:
        self._clock = clock
        self._end_s = end_s
        self._elapsed_s = elapsed_s

    def poll(self) -> bool:
        return self._clock.now_s >= self._end_s

    def elapsed_s(self) -> Optional[float]:
        return self._elapsed_s


class _Engine(CopyEngine):
    """Copies that are done at once, and seen to be done when their time has come."""

    def __init__(self, clock: _Clock, rates: Rates) -> None:
        self._clock = clock
        self._byte_s = (1.0 / rates.copy_out, 1.0 / rates.copy_in)
        self.free_s = [0.0, 0.0]

    def block(self, nbytes: int) -> np.ndarray[Any, Any]:
        return np.empty(nbytes, np.uint8)

    def mark(self) -> Any:
        return None

    def to_host(
        self, array: Any, start: int, stop: int, block: np.ndarray[Any, Any], after: Optional[Any]
    ) -> Done:
        block[start:stop] = array.view(np.uint8)[start:stop]
        return self._started(0, stop - start)

    def to_device(
        self, block: np.ndarray[Any, Any], array: Any, start: int, stop: int, after: Optional[Any]
    ) -> Done:
        array.view(np.uint8)[start:stop] = block[start:stop]
        return self._started(1, stop - start)

    def _started(self, direction: int, nbytes: int) -> Done:
        elapsed_s = self.overhead_s + nbytes * self._byte_s[direction]
        end_s = self.free_s[direction] = max(self._clock.now_s, self.free_s[direction]) + elapsed_s
        return _Copy(self._clock, end_s, elapsed_s)

    def follow(self, done: Done) -> None:
        """Nothing: the end of the copies is the end of the simulation."""


class _Port:
    """What a rank may send at this time, to all peers together, in equal parts where all have something."""

    def __init__(self, byte_s: float, links: int) -> None:
        self.byte_s = byte_s
        self.room_bytes = 0.0
        self._links = links

    def part(self) -> int:
        """How much one link may send before the others have their turn."""
        room = int(self.room_bytes)
        return min(room, max(_PACKET_BYTES, room // self._links))

    def tick(self) -> None:
        """Time has passed; what is not used is lost, but for a little."""
        self.room_bytes = min(self.room_bytes, _BURST_BYTES) + _TICK_S / self.byte_s


class _PacedLink(Link):
    carrier = "a simulated link"

    def __init__(self, link: Link, port: _Port) -> None:
        self.peer = link.peer
        self._link = link
        self._port = port

    def send(self, views: Views) -> int:
        room = self._port.part()
        allowed: List[memoryview] = []
        for view in views:
            allowed.append(view[:room])
            room -= allowed[-1].nbytes
        sent = self._link.send(allowed)
        self._port.room_bytes -= sent
        return sent

    def recv(self, views: Views) -> int:
        return self._link.recv(views)

    def close(self) -> None:
        self._link.close()


class _PacedFabric(Fabric):
    def __init__(self, fabric: Fabric, port: _Port) -> None:
        self.rank, self.size = fabric.rank, fabric.size
        self._links: Dict[int, Link] = {
            peer: _PacedLink(fabric.link(peer), port) for peer in range(fabric.size) if peer != fabric.rank
        }

    def link(self, peer: int) -> Link:
        return self._links[peer]

    def wait(self, reading: Sequence[Link], writing: Sequence[Link], timeout_s: float) -> None:
        """Never called: the simulation does not sleep."""

    def make_wakeable(self) -> None:
        """Nothing."""

    def wake(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def simulate_all_reduce(rates: Rates, arrays: Sequence[np.ndarray[Any, Any]], algorithm: str = "") -> float:
    """Reduce flat arrays, one for each rank, as if each were on a device; the sum is in all of them.

    Args:
        rates: of every rank.
        arrays: of equal length and type.
        algorithm: of the reduction; empty: what the rules choose.

    Returns:
        seconds until the last copy to a device is done.
    """
    size, count, dtype = len(arrays), arrays[0].size, arrays[0].dtype
    clock = _Clock()
    ports = [_Port(1.0 / rates.network, size - 1) for _ in arrays]
    engines = [_Engine(clock, rates) for _ in arrays]
    header = Header(0, 1, Collective.ALLREDUCE, ReduceOp.SUM, code_of(dtype), NO_ROOT, count, 0)
    executions: List[StagedExecution] = []
    for rank, fabric in enumerate(memory_fabrics(size)):
        schedule = Selector(rank, size, algorithm or None).all_reduce(count, dtype.itemsize, False)
        results = ((0, count),)
        execution = StagedExecution(
            schedule, _PacedFabric(fabric, ports[rank]), header, dtype, SegmentPool(),
            Kernel(ReduceOp.SUM, dtype, size), plan_copies(schedule, results),
        )  # fmt: skip
        mirror = BlockMirror(StagingPool(), engines[rank], arrays[rank], None, count, dtype)
        execution.attach(Staging(mirror, results))
        execution.arm(1, mirror.host)
        executions.append(execution)
    waiting = list(executions)
    while waiting:
        waiting = [execution for execution in waiting if not execution.advance()]
        clock.now_s += _TICK_S
        for port in ports:
            port.tick()
    return max(clock.now_s, *(engine.free_s[1] for engine in engines))
