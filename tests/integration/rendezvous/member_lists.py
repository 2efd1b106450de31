"""Messages by which ranks pass the list of ranks on."""

from __future__ import annotations

from ringcomm.transport.nics import machine

HERE = machine()
WAYS = {"type": "ways", "ways": []}


def row(rank, host, local):
    return {
        "rank": rank, "host": f"host{host}", "host_index": host, "local_rank": local, "pid": 100 + rank,
        "machine": HERE, "addresses": [],
    }  # fmt: skip


def listing(*hosts):
    """The list of a job with so many ranks on its hosts."""
    places = [(host, local) for host, ranks in enumerate(hosts) for local in range(ranks)]
    return {"type": "members", "members": [row(rank, *place) for rank, place in enumerate(places)]}


def echo(rank):
    return {"type": "echo", "rank": rank}
