"""Operations that ranks disagree about, or that some of them never come to, and texts about them."""

from __future__ import annotations

import re
from typing import Dict, Iterable, List, Mapping, Sequence, Tuple

from ..wire.signature import Key, Signature, first_difference
from .deadlocks import BUSY_FACTOR, Deadlock


def ranks_text(ranks: Sequence[int], hosts: Sequence[str], most: int = 8) -> str:
    """Like ``ranks 1 (jetson1) and 2 (jetson2)``."""
    names = [f"{rank} ({hosts[rank]})" for rank in ranks[:most]]
    if len(ranks) > most:
        names.append(f"{len(ranks) - most} more")
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def mismatch_text(
    what: str, signatures: Mapping[int, Signature], sites: Mapping[int, str], hosts: Sequence[str]
) -> str:
    """Return what every rank is told when the same operation is not the same everywhere."""
    some = list(signatures.values())
    field, _, differing = first_difference(some)
    kind = f"{some[0].verb} " if field in ("root", "shapes") else ""
    differing = f"{kind}{differing or 'calls'}"
    return f"Mismatched {differing} for the operation {what}: {calls_text(signatures, sites, hosts)}."


def calls_text(signatures: Mapping[int, Signature], sites: Mapping[int, str], hosts: Sequence[str]) -> str:
    """Return which ranks made which call, and where; ranks with the same call are named together."""
    alike: Dict[str, List[int]] = {}
    for rank in sorted(signatures):
        site = f" at {sites[rank]}" if sites.get(rank) else ""
        name = f" named {signatures[rank].name!r}" if signatures[rank].name else ""
        alike.setdefault(f"{signatures[rank].describe(named=False)}{name}{site}", []).append(rank)
    return "; ".join(f"{ranks_text(ranks, hosts)}: {call}" for call, ranks in alike.items())


def deadlock_text(
    found: Deadlock, calls: Iterable[Tuple[Mapping[int, Signature], Mapping[int, str]]], hosts: Sequence[str]
) -> str:
    """Return what ranks are told that wait for each other.

    ``calls``: of each operation that fails, what ranks have submitted, and from where.
    """
    signatures: Dict[int, Signature] = {}
    sites: Dict[int, str] = {}
    for announced, places in calls:
        for rank in announced.keys() - signatures.keys():
            signatures[rank], sites[rank] = announced[rank], places[rank]
    what = "every rank waits for something that the others have not called"
    if len(found.ranks) < len(hosts):
        some = ranks_text(sorted(found.ranks), hosts)
        what = f"{some} wait for each other, each for something that another one of them has not called"
    text = f"Mismatched calls: {what}: {calls_text(signatures, sites, hosts)}."
    if found.calls:
        direct = sorted(found.calls.items())
        others = "; ".join(f"{ranks_text([rank], hosts)}: {call}" for rank, call in direct)
        text = (
            f"{text[:-1]}; {others}, which returns the result itself and is matched by order, not by name. "
            "Every rank has to make the same kind of call."
        )
    if found.busy:
        text += (
            f" (Other threads of {ranks_text(found.busy, hosts)} could still call it, but no thread has "
            f"called anything for {found.waited_s:.0f} s, {10 * BUSY_FACTOR:g} % of RINGCOMM_LATE_AFTER.)"
        )
    return text


_FRAME = re.compile(r'^ *File "(.*)", line (\d+), in ', re.MULTILINE)


def innermost(stack: str) -> str:
    """The file and line that a stack ends in, like ``train.py:22``; empty if there is none."""
    frames = _FRAME.findall(stack)
    return "{}:{}".format(*frames[-1]) if frames else ""


def whereabouts(rank: int, host: str, stack: str) -> str:
    """Return what is logged of a rank that does not come: where its main thread is."""
    return f"Rank {rank} ({host}), for which others wait, is here:\n{stack}"


def last_seen_text(
    missing: Sequence[int], last: Mapping[int, Tuple[Signature, Key, float]], stacks: Mapping[int, str],
    now_s: float,
) -> str:  # fmt: skip
    """Return what is known of ranks that have not come to an operation; of the first six only."""
    seen = []
    for rank in missing[:6]:
        if rank in last:
            signature, key, when_s = last[rank]
            seen.append(
                f"rank {rank} last submitted {signature.describe(named=False)} {key}, "
                f"{now_s - when_s:.0f} s ago"
            )
        else:
            seen.append(f"rank {rank} has submitted nothing yet")
        place = innermost(stacks.get(rank, ""))
        if place:
            seen.append(f"its main thread was last seen at {place}")
    return "; ".join(seen)
