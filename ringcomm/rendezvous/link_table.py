"""The table of links: which interface connects which ranks, and how fast it measured."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence

from ..transport.routes import Attempt
from .membership import Member


def link_rows(
    members: Mapping[int, Member],
    links: Mapping[int, Sequence[Mapping[str, Any]]],
    reports: Mapping[int, Sequence[Attempt]],
) -> List[Dict[str, Any]]:
    """One row for each pair of ranks, from what both sides reported (all keyed by rank)."""
    speeds = {(item.source, item.target, item.address): item.mb_per_s for r in reports.values() for item in r}
    rows = []
    for rank, own_links in sorted(links.items()):
        for link in own_links:
            peer = int(link["peer"])
            if rank < peer:
                there = speeds.get((rank, peer, link["remote"]))
                back = speeds.get((peer, rank, link["local"]))
                rows.append(
                    {
                        "rank": rank,
                        "host": members[rank].host,
                        "iface": link["iface"],
                        "address": link["local"],
                        "peer": peer,
                        "peer_host": members[peer].host,
                        "peer_iface": next(
                            (x["iface"] for x in links.get(peer, ()) if x["peer"] == rank), "?"
                        ),
                        "peer_address": link["remote"],
                        "mb_per_s": there or back,
                    }
                )
    return rows


def link_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as aligned text."""
    cells = [
        (
            f"rank {row['rank']} ({row['host']})",
            f"{row['iface']} {row['address']}",
            "<->",
            f"{row['peer_iface']} {row['peer_address']}",
            f"rank {row['peer']} ({row['peer_host']})",
            f"{row['mb_per_s']:.0f} MB/s" if row["mb_per_s"] else "",
        )
        for row in rows
    ]
    widths = [max((len(line[column]) for line in cells), default=0) for column in range(6)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
    return "\n".join(["links:"] + ["  " + line for line in lines])
