"""The table of links: which interface connects which ranks, and its measured speed."""

from __future__ import annotations

import itertools
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence

from ..errors import ProtocolError
from .membership import Member
from .routing import Routes

MAX_LINES = 500
"""Of the table as text. A thousand ranks have half a million links; a message may have 4 MiB."""
MAX_ROWS = 2016
"""Of the table: all links of 64 ranks. Half a million rows would take seconds to make, without a reader."""


def ranges_of(ranks: Iterable[int]) -> List[List[int]]:
    """Return ranks as ranges, each its first and its last.

    >>> ranges_of([5, 1, 2, 3])
    [[1, 3], [5, 5]]
    """
    ranges: List[List[int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ranges


def check_ranges(links: Sequence[Mapping[str, Any]], size: int) -> None:
    """Raise ProtocolError unless the peers in a report of links are ranges of the job's ranks."""
    for link in links:
        for item in link["peers"]:
            whole = isinstance(item, list) and len(item) == 2 and all(type(end) is int for end in item)
            if not whole or not 0 <= item[0] <= item[1] < size:
                raise ProtocolError(f"a report of links to ranks that do not exist: {str(item)[:40]}")


def link_rows(
    members: Sequence[Member],
    links: Mapping[int, Sequence[Mapping[str, Any]]],
    routes: Routes,
) -> List[Dict[str, Any]]:
    """Return one row for each pair of ranks, from both sides' reports: the first :data:`MAX_ROWS`. ``links``:
    by rank, the groups of peers that it reaches from the same address.
    """
    rows = []
    for member, peer in itertools.islice(itertools.combinations(members, 2), MAX_ROWS):
        near, far = _end(links, member, peer), _end(links, peer, member)
        if near is None:
            continue
        route = routes.get((min(member.host_index, peer.host_index), max(member.host_index, peer.host_index)))
        rows.append(
            {
                "rank": member.rank,
                "host": member.host,
                "iface": near["iface"],
                "address": near["local"],
                "peer": peer.rank,
                "peer_host": peer.host,
                "peer_iface": "?" if far is None else far["iface"],
                "peer_address": "?" if far is None else far["local"],
                "mb_per_s": None if route is None else route.mb_per_s,
            }
        )
    return rows


def _end(
    links: Mapping[int, Sequence[Mapping[str, Any]]], member: Member, peer: Member
) -> Optional[Mapping[str, Any]]:
    """Return one end of a link, as the rank there has reported it."""
    for link in links.get(member.rank, ()):
        if any(first <= peer.rank <= last for first, last in link["peers"]):
            return link
    return None


def link_table(rows: Sequence[Mapping[str, Any]], size: int) -> str:
    """Return the first rows as aligned text."""
    cells = [
        (
            f"rank {row['rank']} ({row['host']})",
            f"{row['iface']} {row['address']}",
            "<->",
            f"{row['peer_iface']} {row['peer_address']}",
            f"rank {row['peer']} ({row['peer_host']})",
            f"{row['mb_per_s']:.0f} MB/s" if row["mb_per_s"] else "",
        )
        for row in rows[:MAX_LINES]
    ]
    widths = [max((len(line[column]) for line in cells), default=0) for column in range(6)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
    left = size * (size - 1) // 2 - MAX_LINES
    more = [f"and {left} more"] if left > 0 else []
    return "\n".join(["links:"] + ["  " + line for line in [*lines, *more]])
