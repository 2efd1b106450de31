"""Texts for operations that ranks disagree about, or that some of them never come to."""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, Sequence, Tuple

from ..ops import Collective
from .request import Key, Signature


def ranks_text(ranks: Sequence[int], hosts: Sequence[str], most: int = 8) -> str:
    """Like ``ranks 1 (jetson1) and 2 (jetson2)``."""
    names = [f"{rank} ({hosts[rank]})" for rank in ranks[:most]]
    if len(ranks) > most:
        names.append(f"{len(ranks) - most} more")
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


_WHAT = (
    ("kind", "operations"),
    ("dtypes", "data types"),
    ("op", "reduction operations"),
    ("root", "broadcast root ranks"),
    ("shapes", "tensor shapes"),
    ("prescale", "prescale factors"),
    ("postscale", "postscale factors"),
    ("codec", "compressions"),
    ("weighted", "averages, some with and some without weights,"),
)


def mismatch_text(
    what: str, signatures: Mapping[int, Signature], sites: Mapping[int, str], hosts: Sequence[str]
) -> str:
    """What every rank is told when the same operation is not the same everywhere.

    Args:
        what: the operation's name as a person would write it.
        signatures: what each rank submitted.
        sites: from where in its program.
        hosts: of every rank of the job.
    """
    some = list(signatures.values())
    differing = next(
        (label for field, label in _WHAT if len({getattr(item, field) for item in some}) > 1), "calls"
    )
    if differing == "tensor shapes":
        kind = Collective(some[0].kind).name.lower()
        differing = f"{kind} tensor shapes"
    return f"Mismatched {differing} for the operation {what}: {calls_text(signatures, sites, hosts)}."


def calls_text(signatures: Mapping[int, Signature], sites: Mapping[int, str], hosts: Sequence[str]) -> str:
    """Which ranks made which call, and where; ranks with the same call are named together."""
    alike: Dict[str, List[int]] = {}
    for rank in sorted(signatures):
        site = f" at {sites[rank]}" if sites.get(rank) else ""
        name = f" named {signatures[rank].name!r}" if signatures[rank].name else ""
        alike.setdefault(f"{signatures[rank].describe()}{name}{site}", []).append(rank)
    return "; ".join(f"{ranks_text(ranks, hosts)}: {call}" for call, ranks in alike.items())


_FRAME = re.compile(r'^ *File "(.*)", line (\d+), in ', re.MULTILINE)


def innermost(stack: str) -> str:
    """The file and line that a stack ends in, like ``train.py:22``; empty if there is none."""
    frames = _FRAME.findall(stack)
    return "{}:{}".format(*frames[-1]) if frames else ""


def whereabouts(rank: int, host: str, stack: str) -> str:
    """What is logged of a rank that does not come: where its main thread is."""
    return f"Rank {rank} ({host}), for which others wait, is here:\n{stack}"


def last_seen_text(
    missing: Sequence[int], last: Mapping[int, Tuple[Signature, Key, float]], stacks: Mapping[int, str],
    now_s: float,
) -> str:  # fmt: skip
    """What is known of ranks that have not come to an operation; of the first six only.

    Args:
        missing: these ranks.
        last: by rank, what it announced last, and when.
        stacks: by rank, its main thread's stack, if it was asked for it.
        now_s: the time.
    """
    seen = []
    for rank in missing[:6]:
        if rank in last:
            signature, key, when_s = last[rank]
            seen.append(
                f"rank {rank} last submitted {signature.describe()} {key}, {now_s - when_s:.0f} s ago"
            )
        else:
            seen.append(f"rank {rank} has submitted nothing yet")
        place = innermost(stacks.get(rank, ""))
        if place:
            seen.append(f"its main thread was last seen at {place}")
    return "; ".join(seen)
