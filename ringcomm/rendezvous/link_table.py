"""The table of links: which interface connects which ranks, and how fast it measured."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

from .membership import Member
from .routing import Routes

MOST_LINES = 500
"""Of the table as text. A thousand ranks have half a million links; a message may have 4 MiB."""


def link_rows(
    members: Mapping[int, Member],
    links: Mapping[int, Sequence[Mapping[str, Any]]],
    routes: Routes,
) -> List[Dict[str, Any]]:
    """One row for each pair of ranks, from what both sides reported.

    Args:
        members: by rank.
        links: by rank, too.
        routes: between the hosts.
    """
    rows = []
    ifaces = {rank: {link["peer"]: link["iface"] for link in found} for rank, found in links.items()}
    for rank, own_links in sorted(links.items()):
        for link in own_links:
            peer = int(link["peer"])
            if rank < peer:
                hosts = members[rank].host_index, members[peer].host_index
                route = routes.get((min(hosts), max(hosts)))
                rows.append(
                    {
                        "rank": rank,
                        "host": members[rank].host,
                        "iface": link["iface"],
                        "address": link["local"],
                        "peer": peer,
                        "peer_host": members[peer].host,
                        "peer_iface": ifaces.get(peer, {}).get(rank, "?"),
                        "peer_address": link["remote"],
                        "mb_per_s": None if route is None else route.mb_per_s,
                    }
                )
    return rows


def link_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first rows as aligned text."""
    cells = [
        (
            f"rank {row['rank']} ({row['host']})",
            f"{row['iface']} {row['address']}",
            "<->",
            f"{row['peer_iface']} {row['peer_address']}",
            f"rank {row['peer']} ({row['peer_host']})",
            f"{row['mb_per_s']:.0f} MB/s" if row["mb_per_s"] else "",
        )
        for row in rows[:MOST_LINES]
    ]
    widths = [max((len(line[column]) for line in cells), default=0) for column in range(6)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
    more = [f"and {len(rows) - MOST_LINES} more"] if len(rows) > MOST_LINES else []
    return "\n".join(["links:"] + ["  " + line for line in [*lines, *more]])
