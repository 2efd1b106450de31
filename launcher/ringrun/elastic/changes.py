"""The lines that report how the ranks of an elastic job change. Pure."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Set, Tuple


class Change(NamedTuple):
    """A view that the rendezvous has published.

    Attributes:
        epoch: its number.
        members: in the order of ranks.
        lost, joined, left: the members by which it differs from the previous view.
        pause_s: seconds from the failure, or from the last step, to this view.
    """

    epoch: int
    members: Tuple[int, ...]
    lost: Tuple[int, ...] = ()
    joined: Tuple[int, ...] = ()
    left: Tuple[int, ...] = ()
    pause_s: float = 0.0

    def without_leaving(self, asked: Set[int]) -> Change:
        """The change, in which members that the job has asked to leave are not lost.

        Args:
            asked: these members.
        """
        lost = tuple(member for member in self.lost if member not in asked)
        return self._replace(lost=lost, left=self.left + tuple(set(self.lost) & asked))


def change_of(detail: Mapping[str, Any]) -> Change:
    """The change in the facts of the rendezvous' ``view`` notice."""
    rows = sorted(detail["members"], key=lambda row: int(row["rank"]))
    return Change(
        int(detail["epoch"]), tuple(int(row["member"]) for row in rows), tuple(detail["lost"]),
        tuple(detail["joined"]), tuple(detail["left"]), float(detail["pause_s"]),
    )  # fmt: skip


def describe_change(
    change: Change,
    ranks: Mapping[int, int],
    hosts: Mapping[int, str],
    causes: Mapping[int, str],
    returned: Set[str],
) -> List[str]:
    """One line each for the members that are lost, those that left, and those that joined.

    Args:
        change: the new view.
        ranks: by member, its rank in the previous view.
        hosts: by member, the name of its host.
        causes: by member, why it was lost.
        returned: hosts of which a process has been a rank before.
    """
    lines: List[str] = []
    size = _ranks(len(change.members))
    if change.lost:
        parts = [
            f"{_rank(member, ranks)} ({hosts.get(member, '?')}) lost: {causes.get(member, 'no connection')}"
            for member in sorted(change.lost, key=lambda member: ranks.get(member, member))
        ]
        lines.append(f"{'; '.join(parts)}; going on with {size} after {change.pause_s:.1f} s")
    if change.left:
        lines.append(f"{_named(change.left, hosts)} left: {size}")
    if change.joined:
        for word, chosen in (("joined again", True), ("joined", False)):
            members = [member for member in change.joined if (hosts.get(member) in returned) is chosen]
            if members:
                lines.append(f"{_named(members, hosts)} {word}: {size}")
    return lines


def _rank(member: int, ranks: Mapping[int, int]) -> str:
    return f"rank {ranks[member]}" if member in ranks else f"process {member}"


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


def _named(members: Sequence[int], hosts: Mapping[int, str]) -> str:
    """The hosts of members, with the number of members where it is not one."""
    counts: Dict[str, int] = {}
    for member in members:
        name = hosts.get(member, "?")
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(name if count == 1 else f"{name} ({_ranks(count)})" for name, count in counts.items())


def describe_history(changes: Sequence[Tuple[float, str]], most: int = 40) -> str:
    """The paragraph at the end of a job: every change with the time since the start.

    Args:
        changes: seconds since the start, and text.
        most: number of lines; of more changes the middle is left out.
    """
    lines = [f"{_clock(at_s)}  {text}" for at_s, text in changes]
    if len(lines) > most:
        half = most // 2
        lines = [*lines[:half], f"… {len(lines) - 2 * half} changes left out …", *lines[-half:]]
    return "\n".join(lines)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
