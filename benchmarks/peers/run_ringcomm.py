"""A rank of ringcomm, started by ringrun. With ARRAYS=shared its arrays are those of ``rc.empty``."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any, Dict, List

sys.path.insert(0, str(Path(__file__).parents[1]))
import ringcomm as rc
from peers.worker import Adapter, Array, Operation, Run, main


class Ringcomm(Adapter):
    averages = True

    def __init__(self) -> None:
        rc.init()
        self.rank, self.size = rc.rank(), rc.size()

    def barrier(self) -> None:
        rc.barrier()

    def array(self, shape: Any) -> Array:
        if os.environ.get("ARRAYS") != "shared":
            return super().array(shape)
        array = rc.empty(shape)
        array.fill(1)
        return array

    def operation(self, collective: str, count: int) -> Operation:
        data = self.array(count)
        if collective == "allreduce":
            return Operation(data, lambda: rc.allreduce_(data, op=rc.Sum), lambda: data)
        if collective == "broadcast":
            return Operation(data, lambda: rc.broadcast_(data, 0), lambda: data)
        if collective == "allgather":
            return Operation(data, lambda: rc.allgather_(data), lambda: data)
        if collective == "reducescatter":
            share = count // self.size
            own = data[self.rank * share : (self.rank + 1) * share]
            return Operation(data, lambda: rc.reducescatter_(data, op=rc.Sum), lambda: own)
        if collective == "alltoall":
            kept: Dict[str, Array] = {}

            def run() -> None:
                kept["result"] = rc.alltoall(data)

            return Operation(data, run, lambda: kept["result"])
        raise ValueError(collective)

    def reducer(self, array: Array) -> Run:
        return lambda: rc.allreduce_(array, op=rc.Average)

    def grouped(self, arrays: List[Array]) -> Run:
        return lambda: rc.grouped_allreduce_(arrays, op=rc.Average)

    def facts(self) -> Dict[str, Any]:
        return {"version": rc.__version__, "links": self._links()}

    def _links(self) -> str:
        """The links in use. There is no public way to ask, so this may one day have no answer."""
        try:
            direct = rc.api.context().group.channels.direct
            links = [direct.link(peer) for peer in range(self.size) if peer != self.rank]
        except (AttributeError, KeyError, IndexError):
            return "unknown"
        return " + ".join(sorted({_described(link) for link in links}))

    def close(self) -> None:
        rc.shutdown()


def _described(link: object) -> str:
    """Its class, and for a socket the family and the congestion control."""
    words = [type(link).__name__]
    sock = getattr(link, "sock", None)
    if isinstance(sock, socket.socket):
        words.append(sock.family.name)
        if sock.family != socket.AF_UNIX and hasattr(socket, "TCP_CONGESTION"):
            name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            words.append(name.rstrip(b"\0").decode())
    return " ".join(words)


if __name__ == "__main__":
    main(Ringcomm)
